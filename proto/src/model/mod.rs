//! Validated forms of the wire types.

//! Saved state of components: the types, and checks that many components share.
//!
//! A component saves itself as one [`Section`]: a prost message of the package `vmm.state.v1` with its kind and its
//! version (`proto/src/state.rs` lists them). A section that is read back is untrusted: each component checks each
//! field and names the one that is wrong ([`StateError::Invalid`]).

pub use proto::state::{Saved, Section, StateError};

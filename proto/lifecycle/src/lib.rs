//! Pure decisions about the life of a VM: no clock, no store, no task. A decision is a function or a step
//! `(state, input) -> effects` with a table of tests; the caller keeps the state and carries the effects out.
//!
//! A reader starts at [`handover`]: which of two daemons may run a VM that is migrated.

pub mod handover;

//! Pure decisions about the life of a VM: no clock, no store, no task. A decision is a function or a step
//! `(state, input) -> effects` with a table of tests; the caller keeps the state and carries the effects out.
//!
//! | module | decides |
//! |---|---|
//! | [`admission`] | whether a request may be carried out now |
//! | [`stop`] | the stages of a stop: power button, end of the `vmm`, kill |
//! | [`exit`] | the meaning of a process's end |
//! | [`pause`] | the meaning of a state that the `vmm` reports |
//! | [`policy`] | the reaction of the run policy |
//! | [`probe`] | when a probe has succeeded or failed |
//! | [`restart`] | when the run policy starts the VM |
//! | [`handover`] | which of two daemons may run a VM that is migrated |
//!
//! The caller gives the time: an `Instant`, or milliseconds of Unix time. A reader starts at [`admission`].

pub mod admission;
pub mod exit;
pub mod handover;
pub mod pause;
pub mod policy;
pub mod probe;
pub mod restart;
pub mod stop;

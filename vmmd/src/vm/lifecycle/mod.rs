//! Decisions about a VM's life cycle: pure functions and steps with table tests. The
//! [actor](super::actor) carries them out.
//!
//! | file | decides |
//! |---|---|
//! | [`admission`] | whether a request may be carried out now |
//! | [`stop`] | the stages of a stop: power button, end of the `vmm`, kill |
//! | [`exit`] | the meaning of a process's end |
//! | [`pause`] | the meaning of a state that the `vmm` reports |
//! | [`policy`] | the reaction of the run policy |
//! | [`restart`] | when the run policy starts the VM |
//!
//! [`vm_lifecycle::handover`] decides which node may run a migrating VM. Both daemons use its step
//! function.

pub mod admission;
pub mod exit;
pub mod pause;
pub mod policy;
pub mod restart;
pub mod stop;

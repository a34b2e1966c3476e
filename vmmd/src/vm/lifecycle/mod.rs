//! What happens to a VM is decided here, by pure functions and steps with tables of tests; the [actor](super::actor) carries it out.
//!
//! | file | decides |
//! |---|---|
//! | [`admission`] | whether a request may be carried out now |
//! | [`stop`] | how a VM is stopped: the guest is asked, the `vmm` told to end, the process killed |
//! | [`exit`] | what the end of a process means |
//! | [`pause`] | what a state that the `vmm` tells of means for the VM |
//! | [`policy`] | what the run policy makes of that |
//! | [`restart`] | when the run policy starts the VM |
//!
//! Which node may run a VM that migrates is decided by [`proto::handover`], a step that both daemons use.

pub mod admission;
pub mod exit;
pub mod pause;
pub mod policy;
pub mod restart;
pub mod stop;

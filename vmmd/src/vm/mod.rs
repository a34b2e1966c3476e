//! Virtual machines: an actor for each, and what brings one up, watches it and takes it down. Who wants something of a VM
//! finds its actor's mailbox in the [registry](crate::registry::vms).
//!
//! | room | what |
//! |---|---|
//! | [`api`] | creates a VM's record, and shows a VM to clients |
//! | [`actor`] | the only one that changes a VM: takes requests, has work done, hears what its process does |
//! | [`lifecycle`] | decides, and does nothing: what is admitted, what an exit means, what the run policy makes of it |
//! | [`start`] | from a spec to a booted `vmm`, from top to bottom |
//! | [`instance`] | one run: the process, the connection to it, what it holds of the node |
//! | [`machine`] | what a `vmm` is told to build of a spec, how a running machine differs from its spec, its cgroup limits |
//! | [`recovery`] | a VM after the daemon's restart, after its actor has failed, and one that can't be looked after |

mod actor;
mod api;
mod instance;
pub mod lifecycle;
mod machine;
pub mod recovery;
mod start;

pub use actor::{as_it_runs, public_stats};
pub use api::create::{Incoming, create, create_as, create_incoming};
pub use machine::secret::{refuse_digests, shown};
pub use start::refused;

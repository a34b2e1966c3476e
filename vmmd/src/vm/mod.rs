//! Virtual machines: one actor for each, and the code that starts, watches and ends it. A caller
//! finds the actor's mailbox in the [registry](crate::registry::vms). Pure decisions about a VM's life (admission, the meaning
//! of an exit, the reaction of the run policy) are those of [`vm_lifecycle`].
//!
//! | module | contents |
//! |---|---|
//! | [`api`] | creates a VM's record, and shows a VM to clients |
//! | [`actor`] | the only code that changes a VM: takes requests, runs work, receives news of the process |
//! | [`address`](mod@address) | the address at which the node reaches a guest |
//! | [`start`] | from a spec to a booted `vmm`, from top to bottom |
//! | [`instance`] | one run: the process, its connection, its claims on the node |
//! | [`machine`] | machine description for a `vmm`, differences of a running machine from its spec, cgroup limits |
//! | [`migratable`](mod@migratable) | whether a VM can be moved to another node |
//! | [`probe`] | periodic checks of a guest |
//! | [`recovery`] | a VM after the daemon's restart, after a panic of its actor, and an unusable VM |

pub mod access_keys;
mod actor;
mod address;
mod api;
mod instance;
mod machine;
mod migratable;
mod probe;
pub mod recovery;
mod start;

pub use actor::as_it_runs;
pub use address::address;
pub use api::create::{Incoming, create, create_as, create_incoming};
pub use machine::secret::{refuse_digests, shown};
pub use migratable::{migratable, refuse_what_stays};
pub use start::refused;

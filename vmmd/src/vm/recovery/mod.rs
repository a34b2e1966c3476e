//! Recovery of existing VMs: at the daemon's start, after the panic of an actor, and for unusable
//! VMs.

mod migrated;
pub mod reconcile;
pub mod supervisor;
mod unusable;

//! VMs that are found and not made: at the daemon's start, after the failure of an actor, and those that can't be looked after as usual.

mod migrated;
pub mod reconcile;
pub mod supervisor;
mod unusable;

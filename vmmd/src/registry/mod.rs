//! Objects of the node, by name and in memory, for reads without waits. Each registry has the
//! stored objects of its kind, their order of changes ([`feed`](vmmd_objects::feed)) and their users. Operations on the
//! objects are elsewhere.

pub mod aborts;
pub mod agents;
pub mod channels;
pub mod clients;
pub mod consoles;
pub mod disks;
pub mod node;
pub mod pods;
pub mod screens;
pub mod snapshots;
pub mod state_dirs;
pub mod vms;

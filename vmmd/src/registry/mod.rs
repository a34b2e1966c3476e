//! What there is on the node, by name and in memory: who reads here waits for nobody. Each registry knows what is in the store of its
//! kind, in which order it changed ([`feed`]), and who uses it; what is done to the things is elsewhere.

pub mod aborts;
pub mod clients;
pub mod consoles;
pub mod disks;
pub mod images;
pub mod node;
pub mod screens;
pub mod snapshots;
pub mod vms;

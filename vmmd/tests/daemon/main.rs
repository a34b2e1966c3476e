//! The daemon from outside, driven over its socket with mock `vmm` processes. Needs root, but no KVM.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

mod attach;
mod bad_input;
mod balloon;
mod chaos;
mod console;
mod cordon;
mod disk_state;
mod disks;
mod drain;
mod events;
mod harness;
mod hostile_vmm;
mod hygiene;
mod lifecycle;
mod limits;
mod list;
mod metrics;
mod network;
mod node;
mod operations;
mod pki;
mod placement;
mod policies;
mod reconcile;
mod request;
mod resources;
mod resume;
mod robustness;
mod stats;
mod survival;
mod tls;
mod update;
mod versions;
mod watch;

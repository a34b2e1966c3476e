//! The daemon from outside, driven over its socket with mock `vmm` processes. Needs root, but no KVM.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

mod access;
mod agent;
mod attach;
mod bad_input;
mod balloon;
mod blocking;
mod channel;
mod chaos;
mod cloud_init;
mod console;
mod cordon;
mod deliberate;
mod disk_api;
mod disk_boot;
mod disk_state;
mod disks;
mod drain;
mod events;
mod examples;
mod exec;
mod firmware;
mod guest_account;
mod guest_file;
mod guest_info;
mod handover;
mod host_devices;
mod hostile_peer;
mod hostile_vmm;
mod hygiene;
mod images;
mod lifecycle;
mod limits;
mod list;
mod managed;
mod media;
mod metrics;
mod migration;
mod migration_disks;
mod migration_faults;
mod network;
mod node;
mod operation_records;
mod operations;
mod panic;
mod pki;
mod placement;
mod pod_migration;
mod pod_network;
mod pods;
mod policies;
mod probes;
mod reconcile;
mod request;
mod resources;
mod resume;
mod robustness;
mod roles;
mod roots;
mod screen;
mod screen_strangers;
mod share_plug;
mod share_steps;
mod shares;
mod sizes;
mod snapshots;
mod state_dir;
mod stats;
mod supervision;
mod survival;
mod tls;
mod tpm;
mod update;
mod verbs;
mod vsock;
mod walk;
mod watch;

// The tests add methods to the types of these modules, which the types of another crate do not allow.
#[path = "../../testing/src"]
mod testing {
    pub mod harness;
    pub mod namespace;
}

use testing::{harness, namespace};

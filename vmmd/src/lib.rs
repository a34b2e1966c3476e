//! The per-node hypervisor daemon: manages virtual machines, each of which is a `vmm` process that continues when the
//! daemon ends.
//!
//! This crate holds the verbs (what is done to VMs, disks, snapshots, shares and screens), the API and the daemon's
//! assembly. It never links the VMM or a device model.
//!
//! A reader starts at [`daemon::run`], which puts the parts together. The path of a request: [`grpc`] finds the VM in
//! [`registry::vms`] and sends a message to its actor. The actor decides ([`vm_lifecycle`]) and acts. The store keeps
//! all state that must outlive the daemon.

mod auth;
mod config;
mod control;
mod daemon;
mod disk;
mod files;
mod grpc;
mod guest;
mod host;
mod init_certs;
mod log;
mod log_rotation;
mod metrics;
mod migration;
mod node;
mod paths;
mod peers;
mod pod;
pub mod program;
mod registry;
mod screen;
mod service;
mod share;
mod snapshot;
mod state_dir;
mod stats;
mod tls;
mod vm;

/// Functions for the fuzz targets (`vmmd/fuzz`).
#[cfg(feature = "fuzzing")]
pub mod fuzzing {
    pub use crate::{
        guest::fuzzing::agent_answers, migration::fuzzing::peer_messages, pod::fuzzing::launcher_messages,
        snapshot::fuzzing::snapshot_archive,
    };
}

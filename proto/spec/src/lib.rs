//! Validated forms of the wire types: code can act on such a value without further checks of its
//! shape. Each is created with `TryFrom` from its wire type, which reports *all* problems at once,
//! each with the path of the field in a manifest (`spec.disks[1].path`).
//!
//! Conditions that depend on the node (existence of a file, free memory) are checked at the place
//! of use: this crate never reads a file or a clock. A reader starts at [`vm`].

pub mod access;
pub mod balloon;
pub mod channel;
pub mod cloud_init;
pub mod cpu;
pub mod credential;
pub mod disk;
pub mod display;
pub mod firewall;
pub mod image;
pub mod keyboard;
#[cfg(feature = "manifest")]
pub mod manifest;
#[cfg(feature = "reflect")]
pub mod mask;
pub mod metadata;
pub mod name;
pub mod network;
pub mod nic;
pub mod oci;
pub mod overhead;
pub mod pci;
pub mod pod;
pub mod policy;
pub mod probe;
pub mod resources;
pub mod share;
pub mod smbios;
pub mod subnet;
pub mod topology;
pub mod vm;
pub mod vsock;

pub use vmmd_api::violation::{Violation, Violations};

#[cfg(test)]
mod tests;

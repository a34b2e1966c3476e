//! The test node, the guest images, and the common parts of the end-to-end tests.
//!
//! A *node* is a complete Debian under QEMU with a working KVM: through nested virtualization if
//! the machine supports it, otherwise through QEMU's emulation of AMD SVM. vmmd's Debian package is
//! installed in the node, and its unit is started. Tests drive the service through a forwarded
//! socket and inspect the node with ssh. *Guests* run in VMs in the node: unmodified Debian kernels
//! with a busybox initramfs, and a Debian root disk.
//!
//! Images are built once per set of inputs ([`cache`]). `node` (src/bin/node.rs) is the command
//! line for all of this.

pub mod bench;
pub mod browser;
pub mod cache;
pub mod case;
pub mod confirmed;
mod cpio;
pub mod debian;
pub mod demo;
pub mod guest;
pub mod host;
pub mod initramfs;
pub mod node;
pub mod paths;
pub mod power;
pub mod programs;
pub mod run;
mod steps;
pub mod storage;
pub mod two_daemons;
pub mod vm;
pub mod wait;

pub use case::Case;
pub use node::{Guests, Node};

/// The value of a step that a test needs.
///
/// # Panics
///
/// Panics with the error and its causes, at the place of the caller.
#[track_caller]
fn must<T>(result: anyhow::Result<T>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error:?}"),
    }
}

/// Whether tests that have a short and a long form take the long one: `VMMD_LONG` is set, as `make nightly` does.
pub fn long() -> bool {
    std::env::var_os("VMMD_LONG").is_some()
}

//! The test node, the guest images, and what the end-to-end tests share.
//!
//! A *node* is a whole Debian under QEMU with a working KVM: by nested virtualization where the machine has it, by
//! QEMU's emulation of AMD SVM everywhere else. vmmd's Debian package is installed in it and its unit is started;
//! tests drive the service through a forwarded socket and look around with ssh. *Guests* are what runs in VMs there:
//! unmodified Debian kernels with a busybox initramfs, and a Debian root disk.
//!
//! Images are built once per set of inputs ([`cache`]); `node` (src/bin/node.rs) is the command line to all of this.

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

/// Whether tests that have a short and a long form take the long one: `VMMD_LONG` is set, as `make nightly` does.
pub fn long() -> bool {
    std::env::var_os("VMMD_LONG").is_some()
}

//! The initramfs of guests whose packets are compared.

use std::path::PathBuf;

use anyhow::Result;

use super::{Kernel, MODULES, custom_initrd};
use crate::initramfs::Extra;
use crate::programs;

/// Beside those of every busybox guest.
const MORE_MODULES: [&str; 1] = ["8021q"];

/// It has `netcheck` (tests/netcheck) in /bin and can have VLANs. It is a file on the build host; [`crate::Case::net_guest`] brings it into the
/// node.
pub fn initrd(kernel: Kernel) -> Result<PathBuf> {
    let netcheck = programs::build_static("vmmd-netcheck", "netcheck")?;
    let modules: Vec<&str> = MODULES.into_iter().chain(MORE_MODULES).collect();
    custom_initrd("net", kernel, &modules, &[Extra::new(netcheck, "bin/netcheck")])
}

//! The initramfs of guests that try out disks: fio, file systems, and our checker of confirmed writes.

use std::path::PathBuf;

use anyhow::Result;

use super::{Kernel, MODULES, custom_initrd, fio, tools};
use crate::initramfs::Extra;
use crate::programs;

/// Beside those of every busybox guest.
const MORE_MODULES: [&str; 4] = ["crc32c_generic", "crc32c-intel", "ext4", "isofs"];

/// It has `fio` and `blkcheck` (tests/blkcheck) in /bin, and in /tools mkfs.ext4, e2fsck, fstrim and blkdiscard. It is a
/// file on the build host; [`crate::Case::storage_initrd`] brings it into the node.
pub fn initrd(kernel: Kernel) -> Result<PathBuf> {
    let mut files = tools::files()?;
    files.push(Extra::new(fio::get()?, "bin/fio"));
    let blkcheck = programs::build_static("vmmd-blkcheck", "blkcheck")?;
    files.push(Extra::new(blkcheck, "bin/blkcheck"));
    let modules: Vec<&str> = MODULES.into_iter().chain(MORE_MODULES).collect();
    custom_initrd("storage", kernel, &modules, &files)
}

//! The initramfs of guests that mount shares.

use std::path::PathBuf;

use anyhow::Result;

use super::{Kernel, MODULES, custom_initrd, fio};
use crate::initramfs::Extra;
use crate::programs;

/// Beside those of every busybox guest.
const MORE_MODULES: [&str; 2] = ["fuse", "virtiofs"];

/// It has `fio` and `fscheck` (tests/fscheck) in /bin. It is a file on the build host; [`crate::Case::share_guest`] brings it into the node.
pub fn initrd(kernel: Kernel) -> Result<PathBuf> {
    let files = [
        Extra::new(fio::get()?, "bin/fio"),
        Extra::new(programs::build_static("vmmd-fscheck", "fscheck")?, "bin/fscheck"),
    ];
    let modules: Vec<&str> = MODULES.into_iter().chain(MORE_MODULES).collect();
    custom_initrd("share", kernel, &modules, &files)
}

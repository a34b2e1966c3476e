//! Initramfs of guests whose kernel has drivers for the display, the keyboard and the pointer.

use std::path::PathBuf;

use anyhow::Result;

use super::{Kernel, MODULES, custom_initrd};
use crate::initramfs::Extra;

/// Beside those of every busybox guest.
const MORE_MODULES: [&str; 2] = ["virtio-gpu", "virtio_input"];

/// It is a file on the build host; [`crate::Case::screen_guest`] brings it into the node.
pub fn initrd(kernel: Kernel) -> Result<PathBuf> {
    initrd_with(kernel, &[])
}

/// The same with more files in it.
pub fn initrd_with(kernel: Kernel, files: &[Extra]) -> Result<PathBuf> {
    let modules: Vec<&str> = MODULES.into_iter().chain(MORE_MODULES).collect();
    let name = if files.is_empty() { "screen" } else { "screen-more" };
    custom_initrd(name, kernel, &modules, files)
}

//! The initramfs of guests whose kernel has drivers for the display and for what is typed and pointed at.

use std::path::PathBuf;

use anyhow::Result;

use super::{MODULES, custom_initrd};
use crate::node::Kernel;

/// Beside those of every busybox guest.
const MORE_MODULES: [&str; 2] = ["virtio-gpu", "virtio_input"];

/// It is a file on the build host; [`crate::Case::screen_guest`] brings it into the node.
pub fn initrd(kernel: Kernel) -> Result<PathBuf> {
    let modules: Vec<&str> = MODULES.into_iter().chain(MORE_MODULES).collect();
    custom_initrd("screen", kernel, &modules, &[])
}

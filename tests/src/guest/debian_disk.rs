//! Root disks of whole Debians with systemd and a login on the serial console: one with sshd, one with a desktop.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cache::{self, Inputs};
use crate::debian::{self, boot_file, ssh_key};
use crate::paths;

/// Raise it when the code below makes another disk of the same inputs.
const BUILDER_VERSION: u32 = 1;

/// Disk size. It is sparse.
const DISK_MIB: u64 = 2048;

/// Returns a folder with `disk.raw`, and the `vmlinuz` and `initrd` installed on it.
/// `tests/guest/<name>` defines the content.
pub fn get(name: &str) -> Result<PathBuf> {
    let source = paths::crate_dir().join("guest").join(name);
    let key = ssh_key()?;
    let mut inputs = Inputs::new(BUILDER_VERSION);
    inputs
        .add_tree(&source)?
        .add_file(&debian::sources())?
        .add_file(&key.with_extension("pub"))?;
    cache::get_or_build(&format!("guest-{name}"), &inputs, |out| build(&source, &key, out))
}

fn build(source: &Path, key: &Path, out: &Path) -> Result<()> {
    let root = out.join("root");
    debian::make_system(source, key, &root)?;
    // They stay on the disk as well: it is a whole system, as an installer leaves it.
    fs::copy(boot_file(&root, "vmlinuz-")?, out.join("vmlinuz"))?;
    fs::copy(boot_file(&root, "initrd.img-")?, out.join("initrd"))?;
    debian::ext4_image(&root, &out.join("disk.raw"), "debian", DISK_MIB)?;
    fs::remove_dir_all(&root).context("remove the root folder that the disk was made from")
}

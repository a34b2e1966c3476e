//! The node's disk image, kernel and initrd.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{self, Inputs};
use crate::debian::{self, boot_file, ssh_key};
use crate::initramfs::{Extra, Initramfs};
use crate::wait::Deadline;
use crate::{paths, run};

/// Raise it when the code below makes another image of the same inputs.
const BUILDER_VERSION: u32 = 2;

/// Disk size. The disk is sparse, and a node's writes go to a temporary overlay.
const DISK_MIB: u64 = 24 * 1024;

/// Modules of the initrd: those for the root disk, and the driver of the management NIC, so that
/// the NIC exists from the start.
const MODULES: [&str; 4] = ["virtio_pci", "virtio_blk", "ext4", "virtio_net"];

/// Files that a node boots from.
pub struct NodeImage {
    /// The kernel.
    pub kernel: PathBuf,
    /// Its initrd.
    pub initrd: PathBuf,
    /// The root disk, raw ext4.
    pub disk: PathBuf,
}

impl NodeImage {
    /// The image for the present inputs, built when there is none yet.
    pub fn get() -> Result<NodeImage> {
        let source = paths::crate_dir().join("node");
        let key = ssh_key()?;
        let mut inputs = Inputs::new(BUILDER_VERSION);
        inputs
            .add_tree(&source)?
            .add_file(&debian::sources())?
            .add_file(&key.with_extension("pub"))?;
        let dir = cache::get_or_build("node", &inputs, |out| build(&source, &key, out))?;
        Ok(NodeImage {
            kernel: dir.join("vmlinuz"),
            initrd: dir.join("initrd"),
            disk: dir.join("disk.raw"),
        })
    }
}

fn build(source: &Path, key: &Path, out: &Path) -> Result<()> {
    let root = out.join("root");
    debian::make_system(source, key, &root)?;
    let kernel = boot_file(&root, "vmlinuz-")?;
    let version = kernel
        .file_name()
        .and_then(|name| name.to_str()?.strip_prefix("vmlinuz-"))
        .context("kernel version")?;
    unpack_modules(&root, version)?;
    Initramfs {
        root: &root,
        version,
        modules: &MODULES,
        files: &[Extra::new(source.join("initrd-init"), "init")],
    }
    .write(&out.join("initrd"))?;
    fs::rename(&kernel, out.join("vmlinuz"))?;
    debian::ext4_image(&root, &out.join("disk.raw"), "vmmd-node", DISK_MIB)?;
    fs::remove_dir_all(&root).context("remove the root folder that the image was made from")
}

/// Unpacks the node's kernel modules on its disk: the build host does it faster than an emulated machine.
fn unpack_modules(root: &Path, version: &str) -> Result<()> {
    let modules = root.join("lib/modules").join(version);
    let script = "find . -name '*.ko.xz' -print0 | xargs -0 -n 64 -P 0 xz -d";
    run::check(
        Command::new("sh").args(["-c", script]).current_dir(modules),
        Deadline::seconds(300),
    )?;
    debian::depmod(root, version)
}

//! The node's disk image, kernel and initrd, and the ssh key that opens it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{self, Inputs};
use crate::debian::{self, Release, Root};
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

/// The private key that opens the nodes and the Debian guests of this build tree; the public one is beside it.
/// Made when there is none yet.
pub fn ssh_key() -> Result<PathBuf> {
    let inputs = Inputs::new(1);
    let dir = cache::get_or_build("ssh", &inputs, |out| {
        let mut keygen = Command::new("ssh-keygen");
        keygen
            .args(["-q", "-t", "ed25519", "-N", "", "-C", "vmmd test node", "-f"])
            .arg(out.join("id_ed25519"));
        run::check(&mut keygen, Deadline::seconds(60)).map(drop)
    })?;
    Ok(dir.join("id_ed25519"))
}

/// Writes `key` into a root folder. The holder of the key may log in as root, and root there holds
/// the key, too.
pub fn install_ssh_key(root: &Path, key: &Path) -> Result<()> {
    let folder = root.join("root/.ssh");
    fs::create_dir_all(&folder)?;
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))?;
    fs::copy(key.with_extension("pub"), folder.join("authorized_keys"))?;
    fs::copy(key, folder.join("id_ed25519"))?;
    fs::set_permissions(folder.join("id_ed25519"), fs::Permissions::from_mode(0o600))?;
    Ok(())
}

fn build(source: &Path, key: &Path, out: &Path) -> Result<()> {
    let root = out.join("root");
    Root {
        release: Release::Bookworm,
        variant: "minbase",
        packages: &debian::packages(&source.join("packages"))?,
        more_sources: None,
        overlay: Some(source.join("overlay")),
        customize: Some(source.join("customize.sh")),
    }
    .make(&root)?;
    install_ssh_key(&root, key)?;
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

/// The one file in `root`'s /boot whose name begins with `prefix`.
pub fn boot_file(root: &Path, prefix: &str) -> Result<PathBuf> {
    let boot = root.join("boot");
    fs::read_dir(&boot)
        .with_context(|| format!("read {}", boot.display()))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        })
        .with_context(|| format!("no {prefix}* in {}", boot.display()))
}

//! The guest images: unmodified Debian kernels, each with a busybox initramfs, and a Debian root disk.

mod cpio;
mod debian_disk;
mod initramfs;
mod kernels;
mod vmlinux;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

pub use initramfs::{Extra, Initramfs};

use crate::cache::{self, Inputs};
use crate::node::Kernel;
use crate::{debian, paths};

/// Raise it when the code of this module makes other images of the same inputs.
const BUILDER_VERSION: u32 = 1;

/// The guest images on the build host.
pub struct Images {
    dir: PathBuf,
}

impl Images {
    /// The file system that the node mounts at /var/lib/guests.
    pub fn disk(&self) -> PathBuf {
        self.dir.join("guests.raw")
    }

    /// The same files as a folder.
    pub fn tree(&self) -> PathBuf {
        self.dir.join("tree")
    }
}

/// The guest images for the present inputs, built when there are none yet.
pub fn images() -> Result<Images> {
    let source = paths::crate_dir().join("guest");
    let packages = kernels::packages()?;
    let disk = debian_disk::get()?;
    let mut inputs = Inputs::new(BUILDER_VERSION);
    inputs.add_file(&source.join("init"))?.add_file(&source.join("udhcpc"))?;
    // The names of these folders are made of their own inputs.
    inputs.add("packages", packages.to_string_lossy().as_bytes()).add("disk", disk.to_string_lossy().as_bytes());
    let dir = cache::get_or_build("guests", &inputs, |out| build(&packages, &disk, &source, out))?;
    Ok(Images { dir })
}

fn build(packages: &Path, disk: &Path, source: &Path, out: &Path) -> Result<()> {
    let tree = out.join("tree");
    for kernel in Kernel::ALL {
        let dir = tree.join(kernel.name());
        fs::create_dir_all(&dir)?;
        let version = kernels::version(packages, kernel)?;
        let vmlinuz = packages.join("boot").join(format!("vmlinuz-{version}"));
        fs::copy(&vmlinuz, dir.join("vmlinuz")).with_context(|| format!("copy {}", vmlinuz.display()))?;
        vmlinux::extract(&vmlinuz, &dir.join("vmlinux"))?;
        Initramfs { packages, version: &version, scripts: source, extra: &[] }.write(&dir.join("initrd"))?;
    }
    let debian_tree = tree.join("debian");
    fs::create_dir(&debian_tree)?;
    for file in ["vmlinuz", "initrd", "disk.raw"] {
        // The same file system: a second name costs nothing.
        fs::hard_link(disk.join(file), debian_tree.join(file)).with_context(|| format!("link {file}"))?;
    }
    debian::ext4_image(&tree, &out.join("guests.raw"), "vmmd-guests", 4096)
}

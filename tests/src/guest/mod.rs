//! The guest images: unmodified Debian kernels, each with a busybox initramfs, a Debian root disk, and a Debian as clouds get it.

mod boot_disk;
mod cloud_image;
mod debian_disk;
mod fio;
mod in_node;
mod kernels;
mod net;
mod screen;
mod share;
mod storage;
mod tools;
mod vmlinux;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::ScopedJoinHandle;

use anyhow::{Context, Result, anyhow};

use crate::cache::{self, Inputs};
use crate::initramfs::{Extra, Initramfs};
use crate::{
    debian::{self, Release},
    paths,
};

pub use cloud_image::get as cloud_image;
pub use in_node::{GUESTS_DIR, Guests, Kernel};
pub use net::initrd as net_initrd;
pub use screen::{initrd as screen_initrd, initrd_with as screen_initrd_with};
pub use share::initrd as share_initrd;
pub use storage::initrd as storage_initrd;

/// Raise it when the code of this module makes other images of the same inputs.
const BUILDER_VERSION: u32 = 2;

/// Modules that `/init` of the busybox guests loads, as far as the kernel has them as modules.
pub(crate) const MODULES: [&str; 11] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "virtio-rng",
    "virtio_balloon",
    "button",
    "evdev",
    "pvpanic-mmio",
    "pvpanic-pci",
    "pvpanic",
    "rtc-cmos",
];

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
    let source = scripts_dir();
    // Each waits for downloads and disks as much as for a processor.
    let (packages, disk, desktop) = std::thread::scope(|scope| {
        let disk = scope.spawn(|| debian_disk::get("debian"));
        // Only `make nightly` boots it.
        let desktop = cfg!(feature = "nightly").then(|| scope.spawn(|| debian_disk::get("desktop")));
        let packages = kernels::packages()?;
        Ok::<_, anyhow::Error>((packages, joined(disk)?, desktop.map(joined).transpose()?))
    })?;
    let mut inputs = Inputs::new(BUILDER_VERSION);
    inputs
        .add_file(&source.join("init"))?
        .add_file(&source.join("udhcpc"))?;
    inputs
        .add_artefact(&packages)
        .add("modules", MODULES.join(" ").as_bytes())
        .add_artefact(&disk);
    if let Some(disk) = &desktop {
        inputs.add_artefact(disk);
    }
    let dir = cache::get_or_build("guests", &inputs, |out| {
        build(&packages, &disk, desktop.as_deref(), &source, out)
    })?;
    Ok(Images { dir })
}

/// Builds what tests bring into the node themselves: none of them then waits for a build.
pub fn prepare() -> Result<()> {
    for kernel in [Kernel::Cloud612, Kernel::Cloud61] {
        storage_initrd(kernel)?;
    }
    share_initrd(Kernel::Cloud612)?;
    net_initrd(Kernel::Cloud612)?;
    screen_initrd(Kernel::Generic612)?;
    if cfg!(feature = "nightly") {
        for release in Release::ALL {
            cloud_image(release)?;
        }
    }
    Ok(())
}

/// A kernel's busybox initramfs with more files in it, such as a static test program: `guest.run` can start them. It is
/// a file on the build host: copy it into the node.
pub fn initrd_with(kernel: Kernel, files: &[Extra]) -> Result<PathBuf> {
    let names: Vec<&str> = files
        .iter()
        .map(|file| file.to.rsplit('/').next().unwrap_or_default())
        .collect();
    custom_initrd(&names.join("-"), kernel, &MODULES, files)
}

fn custom_initrd(name: &str, kernel: Kernel, modules: &[&str], files: &[Extra]) -> Result<PathBuf> {
    let source = scripts_dir();
    let packages = kernels::packages()?;
    let mut inputs = Inputs::new(BUILDER_VERSION);
    inputs
        .add_artefact(&packages)
        .add("modules", modules.join(" ").as_bytes());
    inputs
        .add_file(&source.join("init"))?
        .add_file(&source.join("udhcpc"))?;
    for file in files {
        inputs.add("to", file.to.as_bytes()).add_file(&file.from)?;
    }
    let name = format!("initrd-{}-{name}", kernel.name());
    let dir = cache::get_or_build(&name, &inputs, |out| {
        initramfs(
            &packages,
            &kernels::version(&packages, kernel)?,
            &source,
            modules,
            files,
            &out.join("initrd"),
        )
    })?;
    Ok(dir.join("initrd"))
}

fn joined(builder: ScopedJoinHandle<'_, Result<PathBuf>>) -> Result<PathBuf> {
    builder
        .join()
        .map_err(|_| anyhow!("a thread that builds a guest image panicked"))?
}

pub(crate) fn scripts_dir() -> PathBuf {
    paths::crate_dir().join("guest")
}

fn initramfs(
    packages: &Path,
    version: &str,
    source: &Path,
    modules: &[&str],
    more: &[Extra],
    out: &Path,
) -> Result<()> {
    let mut files = vec![
        Extra::new(source.join("init"), "init"),
        Extra::new(source.join("udhcpc"), "lib/udhcpc"),
    ];
    files.extend_from_slice(more);
    Initramfs {
        root: packages,
        version,
        modules,
        files: &files,
    }
    .write(out)
}

fn build(packages: &Path, disk: &Path, desktop: Option<&Path>, source: &Path, out: &Path) -> Result<()> {
    let tree = out.join("tree");
    for kernel in Kernel::ALL {
        let dir = tree.join(kernel.name());
        fs::create_dir_all(&dir)?;
        let version = kernels::version(packages, kernel)?;
        let vmlinuz = packages.join("boot").join(format!("vmlinuz-{version}"));
        fs::copy(&vmlinuz, dir.join("vmlinuz")).with_context(|| format!("copy {}", vmlinuz.display()))?;
        vmlinux::extract(&vmlinuz, &dir.join("vmlinux"))?;
        initramfs(packages, &version, source, &MODULES, &[], &dir.join("initrd"))?;
    }
    boot_disk::build(packages, Kernel::Cloud612, source, &tree.join("boot-disk.raw"))?;
    let link = |name: &str, from: &Path, files: &[&str]| -> Result<()> {
        let to = tree.join(name);
        fs::create_dir(&to)?;
        for file in files {
            // The same file system: a second name costs nothing.
            fs::hard_link(from.join(file), to.join(file)).with_context(|| format!("link {file}"))?;
        }
        Ok(())
    };
    let whole = ["vmlinuz", "initrd", "disk.raw"];
    link("debian", disk, &whole)?;
    if let Some(desktop) = desktop {
        link("desktop", desktop, &whole)?;
    }
    debian::ext4_image(&tree, &out.join("guests.raw"), "vmmd-guests", 4096)
}

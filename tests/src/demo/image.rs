//! The image that the demonstration imports: a disk with Debian's kernel for clouds, busybox and dropbear, small enough to be sent to
//! another daemon in an emulated node.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{self, Inputs};
use crate::debian::{self, Release, Root, boot_file, ssh_key};
use crate::guest::{MODULES, scripts_dir};
use crate::initramfs::{Extra, Initramfs};
use crate::run;
use crate::wait::Deadline;

/// Raise it when the code below makes another image of the same inputs.
const BUILDER_VERSION: u32 = 2;

/// Disk size. The disk is sparse.
const DISK_MIB: u64 = 256;

/// Packages that files of the disk come from; they are unpacked, not installed.
const PACKAGES: [&str; 3] = ["linux-image-6.12-cloud-amd64", "busybox-static", "dropbear-bin"];

/// The server of SSH, and the libraries that it needs.
const DROPBEAR: [&str; 8] = [
    "usr/sbin/dropbear",
    "lib64/ld-linux-x86-64.so.2",
    "lib/x86_64-linux-gnu/libc.so.6",
    "lib/x86_64-linux-gnu/libcrypt.so.1",
    "lib/x86_64-linux-gnu/libz.so.1",
    "usr/lib/x86_64-linux-gnu/libgmp.so.10",
    "usr/lib/x86_64-linux-gnu/libtomcrypt.so.1",
    "usr/lib/x86_64-linux-gnu/libtommath.so.1",
];

/// Files of the folder that [`get`] returns: the image, and the kernel and the initrd that are on it.
pub const FILES: [&str; 3] = ["tiny.qcow2", "vmlinuz", "initrd"];

/// The folder with the image for the present inputs, built when there is none yet.
pub fn get() -> Result<PathBuf> {
    let key = ssh_key()?.with_extension("pub");
    let mut inputs = Inputs::new(BUILDER_VERSION);
    inputs
        .add("packages", PACKAGES.join(" ").as_bytes())
        .add("modules", MODULES.join(" ").as_bytes())
        .add_file(&debian::sources())?
        .add_file(&key)?
        .add_tree(&source())?;
    for script in ["init", "udhcpc"] {
        inputs.add_file(&scripts_dir().join(script))?;
    }
    cache::get_or_build("guest-demo", &inputs, |out| build(&key, out))
}

fn source() -> PathBuf {
    scripts_dir().join("demo")
}

fn build(key: &Path, out: &Path) -> Result<()> {
    let packages = out.join("packages");
    Root {
        release: Release::Bookworm,
        variant: "extract",
        packages: &PACKAGES.map(str::to_owned),
        more_sources: None,
        overlay: None,
        customize: None,
    }
    .make(&packages)?;
    let kernel = boot_file(&packages, "vmlinuz-")?;
    let version = kernel
        .file_name()
        .and_then(|name| name.to_str()?.strip_prefix("vmlinuz-"))
        .context("the kernel's release")?;
    debian::depmod(&packages, version)?;
    let root = out.join("root");
    fs::create_dir_all(root.join("boot"))?;
    fs::copy(&kernel, root.join("boot").join(format!("vmlinuz-{version}")))?;
    fs::copy(&kernel, out.join("vmlinuz"))?;
    Initramfs {
        root: &packages,
        version,
        modules: &["virtio_pci", "virtio_blk", "ext4"],
        files: &[Extra::new(source().join("initrd-init"), "init")],
    }
    .write(&out.join("initrd"))?;
    fs::copy(
        out.join("initrd"),
        root.join("boot").join(format!("initrd.img-{version}")),
    )?;
    Initramfs {
        root: &packages,
        version,
        modules: &MODULES,
        files: &files(&packages, key)?,
    }
    .write_into(&root)?;
    let disk = out.join("disk.raw");
    debian::ext4_image(&root, &disk, "tiny", DISK_MIB)?;
    let mut convert = Command::new("qemu-img");
    convert
        .args(["convert", "-O", "qcow2"])
        .arg(&disk)
        .arg(out.join("tiny.qcow2"));
    run::check(&mut convert, Deadline::seconds(120))?;
    fs::remove_file(&disk)?;
    for folder in [packages, root] {
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    Ok(())
}

fn files(packages: &Path, key: &Path) -> Result<Vec<Extra>> {
    let mut files = vec![
        Extra::new(scripts_dir().join("init"), "init"),
        Extra::new(scripts_dir().join("udhcpc"), "lib/udhcpc"),
        Extra::new(key, "root/.ssh/authorized_keys"),
    ];
    files.extend(DROPBEAR.map(|path| {
        // /bin and /sbin are one folder in the guest.
        let to = path
            .strip_prefix("usr/sbin/")
            .map_or(path.to_owned(), |name| format!("bin/{name}"));
        Extra::new(packages.join(path), to)
    }));
    let overlay = source().join("overlay");
    for file in cache::files_below(&overlay)? {
        let to = file.strip_prefix(&overlay)?.to_string_lossy().into_owned();
        files.push(Extra::new(file, to));
    }
    Ok(files)
}

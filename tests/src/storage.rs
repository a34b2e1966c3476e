//! Disks for VMs in the node: their part of a VM's spec, guests with tools to test them, and checks
//! of their images from outside.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::node::Kernel;
use crate::run::Output;
use crate::vm::VmSpec;
use crate::{Case, Guests, Node, guest};

/// The formats of images that can be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Byte for byte.
    Raw,
    /// QEMU's.
    Qcow2,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        })
    }
}

/// A disk in a VM's spec.
#[derive(Clone, Debug)]
pub struct Disk(Value);

impl Disk {
    /// An image or a block device of the node.
    pub fn new(name: &str, format: Format, path: &str) -> Disk {
        Self::of(name, path, &format.to_string().to_uppercase())
    }

    /// An ISO image.
    pub fn iso(name: &str, path: &str) -> Disk {
        Self::of(name, path, "ISO")
    }

    fn of(name: &str, path: &str, format: &str) -> Disk {
        Disk(json!({"name": name, "path": path, "format": format!("DISK_FORMAT_{format}")}))
    }

    /// A disk of the DiskService.
    pub fn kept(name: &str, disk: &str) -> Disk {
        Disk(json!({"name": name, "disk": disk}))
    }

    /// Sets a field by its JSON name.
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Disk {
        self.0[field] = value.into();
        self
    }
}

impl From<Disk> for Value {
    fn from(disk: Disk) -> Value {
        disk.0
    }
}

impl Case {
    /// A guest with fio, file systems and `blkcheck`; see [`guest::storage_initrd`]. 1 vCPU, no disk yet.
    pub fn storage_guest(&self, kernel: Kernel) -> Result<VmSpec> {
        Ok(VmSpec::quick(kernel, self.storage_initrd(kernel)?))
    }

    /// That guest's initramfs in the node: its path.
    pub fn storage_initrd(&self, kernel: Kernel) -> Result<String> {
        self.bring(&guest::storage_initrd(kernel)?)
    }

    /// A kernel with an initramfs that has what shares are tried out with.
    pub fn share_guest(&self, kernel: Kernel) -> Result<VmSpec> {
        Ok(VmSpec::quick(kernel, self.share_initrd(kernel)?))
    }

    /// That guest's initramfs in the node: its path.
    pub fn share_initrd(&self, kernel: Kernel) -> Result<String> {
        self.bring(&guest::share_initrd(kernel)?)
    }

    /// A kernel with an initramfs that has `netcheck`; see [`guest::net_initrd`].
    pub fn net_guest(&self, kernel: Kernel) -> Result<VmSpec> {
        Ok(VmSpec::quick(kernel, self.bring(&guest::net_initrd(kernel)?)?))
    }

    /// A guest whose kernel has a driver for the display, booted as a bzImage. The boot protocol of
    /// an ELF has no information about screens.
    pub fn screen_guest(&self, kernel: Kernel) -> Result<VmSpec> {
        let initrd = self.bring(&guest::screen_initrd(kernel)?)?;
        Ok(VmSpec::new(Guests.vmlinuz(kernel), Some(initrd)).cmdline(kernel.arguments()))
    }

    /// Copies an initramfs into the node, once per node. Its name depends on its content.
    fn bring(&self, initrd: &Path) -> Result<String> {
        let name = initrd
            .parent()
            .and_then(|dir| dir.file_name())
            .context("the initrd's folder")?;
        let there = format!("/var/tmp/{}", name.display());
        let node = self.node();
        if !node.ssh(&format!("test -f {there}"))?.success() {
            node.copy_in(initrd, &there)?;
        }
        Ok(there)
    }

    /// `fscheck` in the node: its path.
    pub fn fscheck(&self) -> Result<String> {
        let program = crate::programs::build_static("vmmd-fscheck", "fscheck")?;
        let there = format!("{}/fscheck", self.folder()?);
        self.node().copy_in(&program, &there)?;
        Ok(there)
    }

    /// `netcheck` in the node: its path.
    pub fn netcheck(&self) -> Result<String> {
        let program = crate::programs::build_static("vmmd-netcheck", "netcheck")?;
        let there = format!("{}/netcheck", self.folder()?);
        self.node().copy_in(&program, &there)?;
        Ok(there)
    }

    /// `blkcheck` in the node: its path.
    pub fn blkcheck(&self) -> Result<String> {
        let program = crate::programs::build_static("vmmd-blkcheck", "blkcheck")?;
        let there = format!("{}/blkcheck", self.folder()?);
        self.node().copy_in(&program, &there)?;
        Ok(there)
    }

    /// An empty image of `mib` MiB in the case's folder: its path. `options` are more of `qemu-img create`.
    pub fn image(&self, name: &str, format: Format, mib: u64) -> Result<String> {
        let path = format!("{}/{name}.{format}", self.folder()?);
        self.node().sh(&match format {
            Format::Raw => format!("truncate -s {mib}M {path}"),
            Format::Qcow2 => format!("qemu-img create -q -f qcow2 {path} {mib}M"),
        })?;
        Ok(path)
    }
}

impl Node {
    /// Bytes that a file of the node takes on its file system.
    pub fn allocated(&self, path: &str) -> Result<u64> {
        let blocks = self.sh(&format!("stat -c %b {path}"))?;
        Ok(blocks.trim().parse::<u64>().context("a number of blocks")? * 512)
    }

    /// Fails unless `qemu-img check` finds no corruption in a qcow2; returns the number of leaked clusters.
    pub fn check_qcow2(&self, path: &str) -> Result<u64> {
        // 0: nothing, 3: leaks only.
        let output = self.ssh(&format!("qemu-img check --output=json -f qcow2 {path}"))?;
        ensure!(
            matches!(output.status.code(), Some(0 | 3)),
            "qemu-img check {path}: {}{}",
            output.stdout,
            output.stderr
        );
        let report: Value = serde_json::from_str(&output.stdout).context("read qemu-img's report")?;
        ensure!(
            report["corruptions"].as_u64().unwrap_or(0) == 0 && report["check-errors"].as_u64() == Some(0),
            "qemu-img check {path}: {report}"
        );
        Ok(report["leaks"].as_u64().unwrap_or(0))
    }
}

/// Fails unless a command was refused: with this exit status, one `error:` line that has each of `says`, and nothing that
/// only a programmer understands.
pub fn refused(output: &Output, code: i32, says: &[&str]) {
    let text = format!("{}{}", output.stdout, output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(output.stderr.starts_with("error: "), "{text}");
    for part in says {
        assert!(output.stderr.contains(part), "no {part:?} in {text}");
    }
    for never in ["os error", "panicked", "Status {"] {
        assert!(!output.stderr.contains(never), "{text}");
    }
}

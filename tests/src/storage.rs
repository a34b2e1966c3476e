//! Guests with tools to test disks, shares and networks, and checks of images from outside.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::node::Kernel;
use crate::run::Output;
use crate::vm::VmSpec;
use crate::{Case, Guests, Node, guest, must};

pub use crate::vm::{Disk, Format};

impl Case {
    /// A guest with fio, file systems and `blkcheck`; see [`guest::storage_initrd`]. 1 vCPU, no disk yet.
    #[track_caller]
    pub fn storage_guest(&self, kernel: Kernel) -> VmSpec {
        VmSpec::quick(kernel, self.storage_initrd(kernel))
    }

    /// That guest's initramfs in the node: its path.
    #[track_caller]
    pub fn storage_initrd(&self, kernel: Kernel) -> String {
        self.bring(guest::storage_initrd(kernel))
    }

    /// A kernel with an initramfs that has what shares are tried out with.
    #[track_caller]
    pub fn share_guest(&self, kernel: Kernel) -> VmSpec {
        VmSpec::quick(kernel, self.share_initrd(kernel))
    }

    /// That guest's initramfs in the node: its path.
    #[track_caller]
    pub fn share_initrd(&self, kernel: Kernel) -> String {
        self.bring(guest::share_initrd(kernel))
    }

    /// A kernel with an initramfs that has `netcheck`; see [`guest::net_initrd`].
    #[track_caller]
    pub fn net_guest(&self, kernel: Kernel) -> VmSpec {
        VmSpec::quick(kernel, self.bring(guest::net_initrd(kernel)))
    }

    /// A guest whose kernel has a driver for the display, booted as a bzImage. The boot protocol of
    /// an ELF has no information about screens.
    #[track_caller]
    pub fn screen_guest(&self, kernel: Kernel) -> VmSpec {
        let initrd = self.bring(guest::screen_initrd(kernel));
        VmSpec::new(Guests.vmlinuz(kernel), Some(initrd)).cmdline(kernel.arguments())
    }

    /// Copies an initramfs into the node, once per node, and returns its path there. Its name depends on its content.
    #[track_caller]
    fn bring(&self, initrd: Result<PathBuf>) -> String {
        let node = self.node();
        let bring = |initrd: PathBuf| {
            let name = initrd.parent().and_then(Path::file_name);
            let there = format!("/var/tmp/{}", name.context("the initrd's folder")?.display());
            if !node.ssh(&format!("test -f {there}"))?.success() {
                node.copy_in(&initrd, &there)?;
            }
            Ok(there)
        };
        must(initrd.and_then(bring))
    }

    /// `fscheck` in the node: its path.
    #[track_caller]
    pub fn fscheck(&self) -> String {
        self.program("fscheck")
    }

    /// `netcheck` in the node: its path.
    #[track_caller]
    pub fn netcheck(&self) -> String {
        self.program("netcheck")
    }

    /// `blkcheck` in the node: its path.
    #[track_caller]
    pub fn blkcheck(&self) -> String {
        self.program("blkcheck")
    }

    #[track_caller]
    fn program(&self, name: &str) -> String {
        let program = must(crate::programs::build_static(&format!("vmmd-{name}"), name));
        let there = format!("{}/{name}", self.folder());
        must(self.node().copy_in(&program, &there));
        there
    }

    /// An empty image of `mib` MiB in the case's folder: its path.
    #[track_caller]
    pub fn image(&self, name: &str, format: Format, mib: u64) -> String {
        let path = format!("{}/{name}.{format}", self.folder());
        self.node().sh(&match format {
            Format::Raw => format!("truncate -s {mib}M {path}"),
            Format::Qcow2 => format!("qemu-img create -q -f qcow2 {path} {mib}M"),
        });
        path
    }
}

impl Node {
    /// Bytes that a file of the node takes on its file system.
    #[track_caller]
    pub fn allocated(&self, path: &str) -> u64 {
        let blocks = self.sh(&format!("stat -c %b {path}"));
        must(blocks.trim().parse::<u64>().context("a number of blocks")) * 512
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

/// Fails unless a command was refused: with this exit status or, for `None`, with any; with `error:` and each of `says` in at most four lines;
/// and with nothing that only a programmer understands.
#[track_caller]
pub fn refused(output: &Output, code: impl Into<Option<i32>>, says: &[&str]) {
    let text = format!("{}{}", output.stdout, output.stderr);
    match code.into() {
        Some(code) => assert_eq!(output.status.code(), Some(code), "{text}"),
        None => assert!(!output.success(), "{text}"),
    }
    assert!(output.stderr.starts_with("error: "), "{text}");
    assert!(output.stderr.lines().count() <= 4, "{text}");
    for part in says {
        assert!(output.stderr.contains(part), "no {part:?} in {text}");
    }
    for never in ["os error", "panicked", "Status {"] {
        assert!(!output.stderr.contains(never), "{text}");
    }
}

//! What is measured: our `vmm` and QEMU's machines, each with the same guest: 1 vCPU, 256 MiB, serial console,
//! entropy device, no disk and no network.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// Guest RAM of each in bytes.
pub const MEMORY: u64 = 256 << 20;
const CMDLINE: &str = "console=ttyS0 quiet reboot=t panic=-1 guest.modules=none";

/// A program with arguments that boots the guest with its serial console on the standard output.
pub struct Subject {
    /// What the table calls it.
    pub name: &'static str,
    /// Its file.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// All of them.
pub fn subjects(vmm: &Path, qemu: &Path, kernel: &Path, initrd: &Path) -> Result<Vec<Subject>> {
    let spec = std::env::temp_dir().join("measure-vm.yaml");
    let manifest = serde_json::json!({
        "apiVersion": "vmmd/v1",
        "kind": "Vm",
        "metadata": {"name": "measure"},
        "spec": {
            "cpu": {"cores": 1},
            "memory": {"sizeBytes": MEMORY},
            "boot": {"linux": {"kernel": kernel, "initrd": initrd, "cmdline": CMDLINE}},
        },
    });
    fs::write(&spec, manifest.to_string()).context("write the manifest")?;
    let ours = vec!["run".into(), "--spec".into(), spec.into_os_string()];
    let machine = |name: &'static str, machine: &str, rng: &str| {
        let mut arguments: Vec<OsString> = Vec::new();
        let fixed = [
            "-nodefaults",
            "-no-user-config",
            "-nographic",
            "-enable-kvm",
            "-cpu",
            "host",
            "-smp",
            "1",
        ];
        arguments.extend(fixed.map(OsString::from));
        for (option, value) in [
            ("-m", "256M"),
            ("-machine", machine),
            ("-serial", "stdio"),
            ("-device", rng),
            ("-append", CMDLINE),
        ] {
            arguments.extend([option.into(), value.into()]);
        }
        arguments.extend(["-kernel".into(), kernel.into(), "-initrd".into(), initrd.into()]);
        Subject {
            name,
            program: qemu.to_owned(),
            arguments,
        }
    };
    let microvm = "microvm,x-option-roms=off,pit=off,pic=off,isa-serial=on,rtc=on,acpi=on,pcie=on";
    Ok(vec![
        Subject {
            name: "vmm",
            program: vmm.to_owned(),
            arguments: ours,
        },
        machine("microvm", microvm, "virtio-rng-pci"),
        machine("q35", "q35", "virtio-rng-pci"),
    ])
}

//! A disk that firmware boots: Debian's GRUB for UEFI and for BIOS, and a kernel with a busybox initramfs.
//!
//! The disk has an MBR and one partition with FAT. UEFI firmware starts the GRUB of Debian's package
//! from the partition. A BIOS starts GRUB from the MBR and the sectors behind it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Kernel, MODULES, initramfs, kernels};
use crate::run;
use crate::wait::Deadline;

/// Disk size in bytes, and the start of the partition: the first MiB is for GRUB.
const DISK: u64 = 64 << 20;
const PARTITION: u64 = 1 << 20;
const SECTOR: u64 = 512;

/// GRUB for UEFI, which reads `/EFI/debian/grub.cfg`.
const GRUB_EFI: &str = "/usr/lib/grub/x86_64-efi/monolithic/grubx64.efi";
/// Parts of GRUB for BIOS.
const GRUB_BIOS: &str = "/usr/lib/grub/i386-pc";
/// Its modules that this disk needs.
const GRUB_MODULES: [&str; 7] = ["biosdisk", "part_msdos", "fat", "normal", "linux", "echo", "test"];

/// Drivers of its guest, beside those of all guests: the variables of UEFI, SATA disks and CD-ROMs.
const DRIVERS: [&str; 4] = ["efivarfs", "ahci", "sd_mod", "sr_mod"];

/// Size of the boot code in an MBR. The partition table and a signature follow it.
const BOOT_CODE: usize = 440;
const TABLE: usize = 446;
/// Type of an EFI system partition in an MBR (UEFI 2.10, 5.2.2).
const EFI_SYSTEM: u8 = 0xef;

const CONFIG: &str =
    "linux /vmlinuz console=ttyS0 quiet panic=-1 norandmaps cryptomgr.notests\ninitrd /initrd\nboot\n";

/// Makes the disk of this kernel.
pub(super) fn build(packages: &Path, kernel: Kernel, source: &Path, out: &Path) -> Result<()> {
    let folder = out.with_extension("parts");
    fs::create_dir_all(&folder)?;
    let version = kernels::version(packages, kernel)?;
    let initrd = folder.join("initrd");
    let modules = [&MODULES[..], &DRIVERS].concat();
    initramfs(packages, &version, source, &modules, &[], &initrd)?;
    let vmlinuz = packages.join("boot").join(format!("vmlinuz-{version}"));
    let config = folder.join("grub.cfg");
    fs::write(&config, CONFIG)?;

    let partition = folder.join("partition");
    File::create(&partition)?.set_len(DISK - PARTITION)?;
    host(
        Command::new("/sbin/mkfs.vfat")
            .args(["-F", "16", "-s", "8"])
            .arg(&partition),
    )?;
    for folder in ["EFI", "EFI/BOOT", "EFI/debian"] {
        host(
            Command::new("mmd")
                .arg("-i")
                .arg(&partition)
                .arg(format!("::/{folder}")),
        )?;
    }
    let files: [(&Path, &str); 4] = [
        (GRUB_EFI.as_ref(), "EFI/BOOT/BOOTX64.EFI"),
        (&config, "EFI/debian/grub.cfg"),
        (&vmlinuz, "vmlinuz"),
        (&initrd, "initrd"),
    ];
    for (from, to) in files {
        host(
            Command::new("mcopy")
                .arg("-i")
                .arg(&partition)
                .arg(from)
                .arg(format!("::/{to}")),
        )?;
    }
    let core = grub_for_bios(&folder)?;

    let disk = File::create(out)?;
    disk.set_len(DISK)?;
    disk.write_all_at(&mbr()?, 0)?;
    let core = fs::read(core)?;
    ensure!(core.len() as u64 + SECTOR <= PARTITION, "GRUB is too large");
    // Where GRUB's boot code and the first sector of its core look for it.
    disk.write_all_at(&core, SECTOR)?;
    disk.write_all_at(&fs::read(&partition)?, PARTITION)?;
    fs::remove_dir_all(&folder).context("remove the parts of the boot disk")
}

/// GRUB's core, which has the modules and the configuration: the file.
fn grub_for_bios(folder: &Path) -> Result<PathBuf> {
    let (config, core) = (folder.join("core.cfg"), folder.join("core.img"));
    fs::write(&config, format!("set root=(hd0,msdos1)\n{CONFIG}"))?;
    host(
        Command::new("grub-mkimage")
            .args(["-O", "i386-pc", "-p", "(hd0,msdos1)/", "-d", GRUB_BIOS, "-c"])
            .arg(&config)
            .arg("-o")
            .arg(&core)
            .args(GRUB_MODULES),
    )?;
    Ok(core)
}

/// The first sector: GRUB's boot code, and a table with one active partition.
fn mbr() -> Result<Vec<u8>> {
    let boot = fs::read(format!("{GRUB_BIOS}/boot.img")).context("read GRUB's boot code")?;
    let mut sector = boot.get(..BOOT_CODE).context("GRUB's boot code")?.to_vec();
    sector.resize(TABLE, 0);
    // Cylinders, heads and sectors are unused.
    sector.extend([0x80, 0, 0, 0, EFI_SYSTEM, 0, 0, 0]);
    for number in [PARTITION / SECTOR, (DISK - PARTITION) / SECTOR] {
        sector.extend(u32::try_from(number)?.to_le_bytes());
    }
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    Ok(sector)
}

fn host(command: &mut Command) -> Result<()> {
    run::check(command, Deadline::seconds(60)).map(drop)
}

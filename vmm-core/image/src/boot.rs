//! `vmm-image boot`: finds the kernel that is installed on an untrusted disk, and copies the
//! kernel. `vmm-image firmware`: chooses the firmware that boots such a disk.
//!
//! Like an import, the process has given up its rights before it reads the first byte.

use std::{
    fs::File,
    io::{self, BufWriter, Write as _},
    os::{
        fd::OwnedFd,
        unix::fs::{FileExt as _, MetadataExt as _},
    },
    rc::Rc,
};

use anyhow::{Context as _, Result};
use block::{Backing, Image as _, Qcow2Image};
use rustix::fs::FileType;
use serde_json::{Value, json};

use super::{
    args::{Boot, Disk, Firmware, Format},
    take, take_below,
};
use crate::{
    bootdisk::{
        MAX_INITRD, find, firmware,
        medium::{Medium, Window},
        partitions,
    },
    confine,
};

/// Runs the command and returns a report of the kernel.
pub fn boot(args: &Boot) -> Result<Value> {
    let kernel = File::from(take(args.kernel_fd)?);
    let initrd = File::from(take(args.initrd_fd)?);
    let disk = open(&args.disk, MAX_INITRD)?;
    partitions::check_block(&Window::whole(Rc::clone(&disk)), args.disk.logical_block)
        .map_err(anyhow::Error::msg)?;
    let found = find(disk)?;
    let mut writer = BufWriter::with_capacity(1 << 20, &kernel);
    let kernel_bytes = found.copy_kernel(&mut writer)?;
    writer.flush().context("write the kernel")?;
    let mut writer = BufWriter::with_capacity(1 << 20, &initrd);
    let initrd_bytes = found.copy_initrd(&mut writer)?;
    writer.flush().context("write the initial RAM disk")?;
    Ok(json!({
        "kernel": found.kernel,
        "kernel_bytes": kernel_bytes,
        "initrd_bytes": initrd_bytes,
        "cmdline": found.cmdline,
        "by": found.by,
    }))
}

/// Runs the command and returns the kind of firmware.
pub fn firmware(args: &Firmware) -> Result<Value> {
    let disk = open(&args.disk, 0)?;
    let kind = match args.cdrom {
        true => firmware::of_cdrom(disk),
        false => firmware::of_disk(disk, args.disk.logical_block),
    };
    let kind = match kind.map_err(anyhow::Error::msg)? {
        firmware::Firmware::Uefi => "uefi",
        firmware::Firmware::Bios => "bios",
    };
    Ok(json!({ "firmware": kind }))
}

/// Gives up all rights but to write files of this many bytes, and opens the disk. The caller has taken its other descriptors.
fn open(disk: &Disk, writes: u64) -> Result<Rc<dyn Medium>> {
    let fd = take(disk.fd)?;
    let below = take_below(&disk.below)?;
    // The rest needs no calls outside the sandbox: a seek returns the size of a block device, and
    // fstat its type.
    confine::close_in_converter(writes)?;
    Ok(match disk.format {
        Format::Raw => Rc::new(Raw::new(fd).context("look at the disk")?),
        Format::Qcow2 => {
            let below = below.into_iter().map(|(fd, format)| match format {
                Format::Raw => Backing::Raw(fd),
                Format::Qcow2 => Backing::Qcow2(fd),
            });
            Rc::new(Qcow2(Qcow2Image::open_without_lock(fd, below.collect())?))
        }
    })
}

/// A raw disk: a file or a block device.
pub struct Raw {
    file: File,
    size: u64,
}

impl Raw {
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let file = File::from(fd);
        let metadata = file.metadata()?;
        let size = match FileType::from_raw_mode(metadata.mode()) {
            FileType::BlockDevice => rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))?,
            _ => metadata.len(),
        };
        Ok(Self { file, size })
    }
}

impl Medium for Raw {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(data, offset)
    }
}

/// A disk in a qcow2 image.
struct Qcow2(Qcow2Image);

impl Medium for Qcow2 {
    fn size(&self) -> u64 {
        self.0.capacity()
    }

    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_at(data, offset)
    }
}

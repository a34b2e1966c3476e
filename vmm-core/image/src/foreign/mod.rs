//! Images of other hypervisors, to be read only: VDI, VHD, VHDX and VMDK in one file. There is no library that reads them from a
//! descriptor and refuses what names other files.

mod vdi;
mod vhd;
mod vhdx;
mod vmdk;

use std::{fs::File, os::unix::fs::FileExt as _};

use anyhow::{Context as _, Result, bail};

pub use vhd::is_fixed as is_fixed_vhd;

/// Most entries of a table that is read: 1 TiB in grains of 64 KiB, and more.
const MOST_ENTRIES: u64 = 1 << 25;
/// Data is handed on in pieces of at most this size in bytes.
const PIECE: u64 = 1 << 20;

/// Which format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    Vdi,
    Vhd,
    Vhdx,
    Vmdk,
}

impl Foreign {
    pub fn name(self) -> &'static str {
        match self {
            Self::Vdi => "vdi",
            Self::Vhd => "vhd",
            Self::Vhdx => "vhdx",
            Self::Vmdk => "vmdk",
        }
    }
}

/// Receives the size of the disk first, and then each piece of data in any order. Omitted ranges
/// read as zeroes.
pub trait Sink {
    fn size(&mut self, bytes: u64) -> Result<()>;
    /// Hears the length of the disk's logical blocks from a format that says it.
    fn logical_block(&mut self, bytes: u32);
    fn data(&mut self, offset: u64, data: &[u8]) -> Result<()>;
}

/// Reads an image.
///
/// # Errors
///
/// It is damaged, or needs other files.
pub fn read(kind: Foreign, file: &File, sink: &mut dyn Sink) -> Result<()> {
    match kind {
        Foreign::Vdi => vdi::read(file, sink),
        Foreign::Vhd => vhd::read(file, sink),
        Foreign::Vhdx => vhdx::read(file, sink),
        Foreign::Vmdk => vmdk::read(file, sink),
    }
    .with_context(|| format!("the {} image can't be used", kind.name()))
}

/// Bytes from `offset` on.
fn bytes(file: &File, offset: u64, length: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset)
        .context("it is damaged, its tables or data are not in the file: was it cut off?")?;
    Ok(bytes)
}

/// A table of `entries` entries of `width` bytes.
fn table(file: &File, offset: u64, entries: u64, width: usize) -> Result<Vec<u8>> {
    if entries > MOST_ENTRIES {
        bail!("it is damaged, its table has {entries} entries");
    }
    let length = usize::try_from(entries)?.saturating_mul(width);
    bytes(file, offset, length)
}

/// Copies a range of the file that is a range of the disk.
fn copy(file: &File, from: u64, to: u64, length: u64, sink: &mut dyn Sink) -> Result<()> {
    let mut done = 0;
    while done < length {
        let piece = usize::try_from((length - done).min(PIECE))?;
        sink.data(to + done, &bytes(file, from.saturating_add(done), piece)?)?;
        done += piece as u64;
    }
    Ok(())
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let rest = bytes.get(at..).and_then(|rest| rest.first_chunk());
    rest.copied().unwrap_or([0; N])
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(field(bytes, at))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(field(bytes, at))
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(field(bytes, at))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(field(bytes, at))
}

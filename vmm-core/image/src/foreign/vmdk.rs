//! VMDK of VMware in one file (Virtual Disk Format 5.0): sparse, and compressed as in OVA archives. A description that names other files
//! is refused.

use std::{fs::File, io::Read as _};

use anyhow::{Context as _, Result, bail};
use flate2::read::ZlibDecoder;

use super::{Sink, bytes, copy, field, le32, le64, table};

const SECTOR: u64 = 512;
/// Value of the directory's offset that means that the footer has the offset.
const AT_END: u64 = u64::MAX;
/// Flags: an entry of 1 is a grain of zeroes; grains are compressed.
const ZERO_GRAINS: u32 = 1 << 2;
const COMPRESSED: u32 = 1 << 16;
/// Longest grain in bytes.
const MOST_GRAIN: u64 = 16 << 20;
/// Longest description in bytes.
const MOST_TEXT: u64 = 1 << 20;

pub fn read(file: &File, sink: &mut dyn Sink) -> Result<()> {
    if bytes(file, 0, 4)? != b"KDMV" {
        bail!(
            "it is a description that names other files, which are not followed: convert it with `qemu-img convert` first"
        );
    }
    let mut header = bytes(file, 0, 512)?;
    description(file, &header)?;
    if le64(&header, 56) == AT_END {
        let length = file.metadata()?.len();
        header = bytes(file, length.saturating_sub(2 * SECTOR), 512)?;
        if !header.starts_with(b"KDMV") || le64(&header, 56) == AT_END {
            bail!("it is damaged, its footer is missing: was it cut off?");
        }
    }
    let (flags, grains_per_table) = (le32(&header, 8), u64::from(le32(&header, 44)));
    let size = le64(&header, 12).checked_mul(SECTOR).context("it is damaged")?;
    let grain = le64(&header, 20).saturating_mul(SECTOR);
    if !grain.is_power_of_two()
        || !(SECTOR..=MOST_GRAIN).contains(&grain)
        || !(1..=4096).contains(&grains_per_table)
    {
        bail!("it is damaged, its grains have {grain} bytes");
    }
    sink.size(size)?;
    let reach = grain * grains_per_table;
    let directory = table(
        file,
        le64(&header, 56).saturating_mul(SECTOR),
        size.div_ceil(reach),
        4,
    )?;
    for (number, entry) in (0..).zip(directory.as_chunks::<4>().0) {
        let at = u64::from(u32::from_le_bytes(*entry)) * SECTOR;
        if at == 0 {
            continue;
        }
        let grains = table(file, at, grains_per_table, 4)?;
        for (index, entry) in (0..).zip(grains.as_chunks::<4>().0) {
            let entry = u32::from_le_bytes(*entry);
            let to = reach * number + grain * index;
            if entry == 0 || (entry == 1 && flags & ZERO_GRAINS != 0) || to >= size {
                continue;
            }
            let (from, length) = (u64::from(entry) * SECTOR, grain.min(size - to));
            match flags & COMPRESSED {
                0 => copy(file, from, to, length, sink)?,
                _ => sink.data(to, &inflate(file, from, length)?)?,
            }
        }
    }
    Ok(())
}

/// A grain behind its marker: its sector, its length, and what zlib made of it.
fn inflate(file: &File, at: u64, length: u64) -> Result<Vec<u8>> {
    let marker = bytes(file, at, 12)?;
    let packed = u64::from(le32(&marker, 8));
    if packed > 2 * MOST_GRAIN {
        bail!("it is damaged, a grain has {packed} bytes");
    }
    let packed = bytes(file, at.saturating_add(12), usize::try_from(packed)?)?;
    let mut grain = Vec::new();
    ZlibDecoder::new(packed.as_slice())
        .take(length)
        .read_to_end(&mut grain)
        .context("it is damaged, a grain can't be decompressed")?;
    grain.resize(usize::try_from(length)?, 0);
    Ok(grain)
}

/// Refuses a difference to another image, and a piece of a disk in several files: its description is elsewhere or names the other pieces.
fn description(file: &File, header: &[u8]) -> Result<()> {
    let (at, length) = (
        le64(header, 28).saturating_mul(SECTOR),
        le64(header, 36).saturating_mul(SECTOR),
    );
    let text = match at == 0 || length == 0 {
        true => Vec::new(),
        false => bytes(file, at, usize::try_from(length.min(MOST_TEXT))?)?,
    };
    let text = String::from_utf8_lossy(&text);
    let lines = || text.lines().map(|line| line.trim().to_lowercase());
    let is_extent = |line: &String| {
        let mut access = ["rw ", "rdonly ", "noaccess "].into_iter();
        access.any(|access| line.starts_with(access))
    };
    let described = lines().any(|line| line.starts_with("createtype"));
    if !described || lines().filter(is_extent).count() > 1 {
        bail!(
            "it is one piece of a disk in several files: make them one with `qemu-img convert` of the .vmdk file that names them"
        );
    }
    let mut parents =
        lines().filter_map(|line| Some(line.strip_prefix("parentcid")?.replace([' ', '='], "")));
    if parents.any(|parent| parent != "ffffffff") {
        bail!("it needs another image, that it is a difference to");
    }
    let version = u32::from_le_bytes(field(header, 4));
    if !(1..=3).contains(&version) {
        bail!("its version is {version}, not 1 to 3");
    }
    Ok(())
}

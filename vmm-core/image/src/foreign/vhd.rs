//! VHD of Virtual PC and Hyper-V (Virtual Hard Disk Image Format Specification 1.0): a footer, and for dynamic disks a table of blocks.

use std::fs::File;

use anyhow::{Result, bail};

use super::{Sink, be32, be64, bytes, copy, field, table};

const SECTOR: u64 = 512;
const FIXED: u32 = 2;
const DYNAMIC: u32 = 3;
/// Programs that give the size of a disk by its geometry.
const BY_GEOMETRY: [&[u8; 4]; 2] = [b"vpc ", b"qemu"];

/// Whether a file ends with the footer of a disk of fixed size, which has no other mark.
pub fn is_fixed(file: &File) -> bool {
    let footer = || {
        let length = file.metadata().ok()?.len();
        let footer = bytes(file, length.checked_sub(SECTOR)?, 512).ok()?;
        let fits = be64(&footer, 48).checked_add(SECTOR)? == length
            || geometry(&footer).checked_add(SECTOR)? == length;
        Some(footer.starts_with(b"conectix") && be32(&footer, 60) == FIXED && fits && is_whole(&footer))
    };
    footer().unwrap_or_default()
}

/// Whether the checksum is right: the complement of the sum of all other bytes.
fn is_whole(footer: &[u8]) -> bool {
    let others = footer.iter().enumerate().filter(|(at, _)| !(64..68).contains(at));
    let sum = others.fold(0_u32, |sum, (_, byte)| sum.wrapping_add(u32::from(*byte)));
    be32(footer, 64) == !sum
}

fn geometry(footer: &[u8]) -> u64 {
    let [cylinders_high, cylinders, heads, sectors]: [u8; 4] = field(footer, 56);
    u64::from(u16::from_be_bytes([cylinders_high, cylinders]))
        * u64::from(heads)
        * u64::from(sectors)
        * SECTOR
}

pub fn read(file: &File, sink: &mut dyn Sink) -> Result<()> {
    let length = file.metadata()?.len();
    let Some(end) = length.checked_sub(SECTOR) else {
        bail!("it is cut off");
    };
    let mut footer = bytes(file, end, 512)?;
    if !footer.starts_with(b"conectix") {
        // Dynamic disks have a copy at the beginning.
        footer = bytes(file, 0, 512)?;
    }
    if !footer.starts_with(b"conectix") || !is_whole(&footer) {
        bail!("it is damaged, its footer is not whole");
    }
    let by_geometry = BY_GEOMETRY
        .iter()
        .any(|creator| footer.get(28..32) == Some(creator.as_slice()));
    let size = match (by_geometry, geometry(&footer)) {
        // More than a geometry can say is never said by it.
        (true, bytes) if bytes != 0 && bytes < 65535 * 16 * 255 * SECTOR => bytes,
        _ => be64(&footer, 48),
    };
    sink.size(size)?;
    match be32(&footer, 60) {
        FIXED => copy(file, 0, 0, size.min(end), sink),
        DYNAMIC => dynamic(file, be64(&footer, 16), size, sink),
        4 => bail!("it needs another image, that it is a difference to"),
        kind => bail!("it is of the unknown kind {kind}"),
    }
}

fn dynamic(file: &File, at: u64, size: u64, sink: &mut dyn Sink) -> Result<()> {
    let header = bytes(file, at, 1024)?;
    let (offset, entries, block) = (
        be64(&header, 16),
        u64::from(be32(&header, 28)),
        u64::from(be32(&header, 32)),
    );
    if !header.starts_with(b"cxsparse") || !block.is_power_of_two() || block < SECTOR {
        bail!("it is damaged, its header is none of a dynamic disk");
    }
    let wanted = size.div_ceil(block);
    if entries < wanted {
        bail!("it is damaged, its table has {entries} entries for {wanted} blocks");
    }
    let bitmap = (block / SECTOR).div_ceil(8);
    let table = table(file, offset, wanted, 4)?;
    for (index, entry) in (0..).zip(table.as_chunks::<4>().0) {
        let entry = u32::from_be_bytes(*entry);
        if entry == u32::MAX {
            continue;
        }
        let start = u64::from(entry) * SECTOR;
        let present = bytes(file, start, usize::try_from(bitmap)?)?;
        let data = start + bitmap.next_multiple_of(SECTOR);
        let to = block * index;
        let length = block.min(size - to);
        // A sector that was never written to has no bit, and anything in its place.
        let mut sector = 0;
        while sector * SECTOR < length {
            let has = |sector: u64| {
                let byte = usize::try_from(sector / 8).ok().and_then(|at| present.get(at));
                byte.is_some_and(|byte| byte & (0x80 >> (sector % 8)) != 0)
            };
            let first = sector;
            while sector * SECTOR < length && has(sector) == has(first) {
                sector += 1;
            }
            if has(first) {
                let from = first * SECTOR;
                copy(
                    file,
                    data + from,
                    to + from,
                    (sector * SECTOR).min(length) - from,
                    sink,
                )?;
            }
        }
    }
    Ok(())
}

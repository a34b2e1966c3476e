//! VHDX of Hyper-V ([MS-VHDX]): headers, regions, metadata, a table of blocks. A log that is not empty has to be carried out first, which
//! is left to Hyper-V.

use std::fs::File;

use anyhow::{Context as _, Result, bail};
use uuid::{Uuid, uuid};

use super::{Sink, bytes, copy, field, le32, le64, table};

/// Where the two headers and the two region tables are, in bytes ([MS-VHDX], 2.2).
const HEADERS: [u64; 2] = [64 << 10, 128 << 10];
const REGIONS: [u64; 2] = [192 << 10, 256 << 10];
const BLOCKS: Uuid = uuid!("2dc27766-f623-4200-9d64-115e9bfd4a08");
const METADATA: Uuid = uuid!("8b7ca206-4790-4b9a-b8fe-575f050f886e");
const PARAMETERS: Uuid = uuid!("caa16737-fa36-4d43-b3b6-33f0aa44e76b");
const SIZE: Uuid = uuid!("2fa54224-cd1b-4876-b211-5dbed83bf4b8");
const SECTOR_SIZE: Uuid = uuid!("8141bf1d-a96f-4709-ba47-f233a8faab5f");
/// States of a block ([MS-VHDX], 2.5.1.1).
const FULLY_PRESENT: u64 = 6;
const PARTIALLY_PRESENT: u64 = 7;

fn id(bytes: &[u8], at: usize) -> Uuid {
    Uuid::from_bytes_le(field(bytes, at))
}

/// Where a region is.
fn region(table: &[u8], wanted: Uuid) -> Option<u64> {
    let count = le32(table, 8).min(2047);
    let entries = (0..count).map(|index| 16 + 32 * index as usize);
    let mut found = entries.filter(|at| id(table, *at) == wanted);
    found.next().map(|at| le64(table, at + 16))
}

/// A piece of the metadata.
fn metadata<const N: usize>(file: &File, at: u64, wanted: Uuid) -> Result<[u8; N]> {
    let table = bytes(file, at, 64 << 10)?;
    let count = u16::from_le_bytes(field(&table, 10)).min(2047);
    let entries = (0..count).map(|index| 32 + 32 * usize::from(index));
    let mut found = entries.filter(|at| id(&table, *at) == wanted);
    let entry = found
        .next()
        .context("it is damaged, it does not say how large the disk is")?;
    let item = bytes(file, at.saturating_add(le32(&table, entry + 16).into()), N)?;
    Ok(field(&item, 0))
}

pub fn read(file: &File, sink: &mut dyn Sink) -> Result<()> {
    let headers = HEADERS.map(|at| bytes(file, at, 80)).into_iter().flatten();
    let newest = headers
        .filter(|header| header.starts_with(b"head"))
        .max_by_key(|header| le64(header, 8))
        .context("it is damaged, it has no header")?;
    if field::<16>(&newest, 48) != [0; 16] {
        bail!("it was not closed: start and end the VM that has it, or check it with Hyper-V's tools");
    }
    let regions = REGIONS.map(|at| bytes(file, at, 64 << 10)).into_iter().flatten();
    let regions: Vec<_> = regions.filter(|table| table.starts_with(b"regi")).collect();
    let find = |wanted| {
        let found = regions.iter().find_map(|table| region(table, wanted));
        found.context("it is damaged, a region is missing")
    };
    let (blocks, items) = (find(BLOCKS)?, find(METADATA)?);
    let parameters: [u8; 8] = metadata(file, items, PARAMETERS)?;
    let (block, flags) = (u64::from(le32(&parameters, 0)), le32(&parameters, 4));
    if flags & 2 != 0 {
        bail!("it needs another image, that it is a difference to");
    }
    let size = u64::from_le_bytes(metadata(file, items, SIZE)?);
    let logical_block = u32::from_le_bytes(metadata(file, items, SECTOR_SIZE)?);
    let sector = u64::from(logical_block);
    if !block.is_power_of_two() || !(1 << 20..=256 << 20).contains(&block) || ![512, 4096].contains(&sector) {
        bail!("it is damaged, its blocks have {block} bytes and its sectors {sector}");
    }
    sink.size(size)?;
    sink.logical_block(logical_block);
    // After the entries of so many blocks comes one of a bitmap, which only differences need.
    let ratio = (sector << 23) / block;
    let count = size.div_ceil(block);
    let entries = table(file, blocks, count + count.saturating_sub(1) / ratio, 8)?;
    for index in 0..count {
        let at = usize::try_from((index + index / ratio) * 8)?;
        let entry = le64(&entries, at);
        match entry & 7 {
            FULLY_PRESENT => {
                let to = block * index;
                copy(file, entry & !0xf_ffff, to, block.min(size - to), sink)?;
            }
            PARTIALLY_PRESENT => bail!("it needs another image, that it is a difference to"),
            _ => {}
        }
    }
    Ok(())
}

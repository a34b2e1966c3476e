//! VDI 1.1 of VirtualBox: a header, a map of blocks, blocks.

use std::fs::File;

use anyhow::{Result, bail};

use super::{Sink, bytes, copy, le32, le64, table};

/// Length of the preamble and the header in bytes.
const HEADER: usize = 0x1c8;
/// Entries of the map from here on have no block: 0xffff_ffff is not there, 0xffff_fffe is zero.
const NONE: u32 = 0xffff_fffe;

pub fn read(file: &File, sink: &mut dyn Sink) -> Result<()> {
    let header = bytes(file, 0, HEADER)?;
    let (version, kind) = (le32(&header, 0x44), le32(&header, 0x4c));
    if version != 0x0001_0001 {
        bail!("its version is {}.{}, not 1.1", version >> 16, version & 0xffff);
    }
    let linked = header.get(0x1a8..0x1c8).unwrap_or_default();
    if !(1..=2).contains(&kind) || linked.iter().any(|byte| *byte != 0) {
        bail!("it needs another image, that it is a difference to");
    }
    let (size, block) = (le64(&header, 0x170), u64::from(le32(&header, 0x178)));
    let blocks = u64::from(le32(&header, 0x180));
    let (map, data) = (u64::from(le32(&header, 0x154)), u64::from(le32(&header, 0x158)));
    let extra = u64::from(le32(&header, 0x17c));
    if !block.is_power_of_two() || block < 512 || size > blocks.saturating_mul(block) {
        bail!("it is damaged, {blocks} blocks of {block} bytes are no disk of {size}");
    }
    sink.size(size)?;
    let entries = table(file, map, size.div_ceil(block), 4)?;
    for (index, entry) in (0..).zip(entries.as_chunks::<4>().0) {
        let entry = u32::from_le_bytes(*entry);
        if entry < NONE {
            let from = (block + extra)
                .saturating_mul(entry.into())
                .saturating_add(data + extra);
            let to = block * index;
            copy(file, from, to, block.min(size - to), sink)?;
        }
    }
    Ok(())
}

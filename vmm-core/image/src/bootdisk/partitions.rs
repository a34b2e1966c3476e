//! Where the partitions of a disk are: GPT (UEFI 2.10, 5.3) and MBR with logical partitions. Read here, since the libraries for GPT
//! panic on sizes that a hostile disk may have, or want to write.

use super::medium::Window;

/// Most partitions that are looked at.
const MOST: u32 = 128;
/// Sizes of a sector that disks have, in bytes.
const SECTORS: [u64; 2] = [512, 4096];
/// Types of MBR partitions that hold others: CHS, LBA, Linux.
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
/// Type of the one MBR partition of a disk with a GPT.
const PROTECTIVE: u8 = 0xee;

/// A partition.
#[derive(Clone, Debug)]
pub struct Partition {
    /// From 1 on, as Linux and GRUB count.
    pub number: u32,
    /// Its bytes.
    pub window: Window,
}

/// Properties of a disk by its partition table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Length of the disk's logical blocks in bytes, if the table shows it, as a GPT does.
    pub block: Option<u64>,
    /// Where the last partition ends, in bytes.
    pub end: u64,
}

/// Refuses a disk whose partition table is for logical blocks of another length: the guest would find no partition.
///
/// # Errors
///
/// The table is for other blocks; the text says what to change.
pub fn check_block(disk: &Window, block: u64) -> Result<(), String> {
    match layout(disk) {
        Some(Layout {
            block: Some(wanted), ..
        }) if wanted != block => Err(format!(
            "its partition table is for logical blocks of {wanted} bytes, and the disk has blocks of {block}, so the guest would find no \
             partition: set logicalBlockBytes of the disk to {wanted}"
        )),
        // An MBR counts in blocks of the disk that it was made for, and does not name their length.
        Some(Layout { block: None, .. }) if block != 512 => Err(format!(
            "its partition table is an MBR, which is read for logical blocks of 512 bytes only, and the disk has blocks of {block}"
        )),
        _ => Ok(()),
    }
}

/// Whether a disk has the MBR of a GPT, and no GPT behind it.
pub fn has_lost_gpt(disk: &Window) -> bool {
    let is_gpt = record(disk, 0).is_some_and(|all| all.iter().any(|(kind, ..)| *kind == PROTECTIVE));
    is_gpt && SECTORS.iter().all(|sector| entries(disk, *sector).is_none())
}

/// The layout of a disk; nothing when it has no partition table.
pub fn layout(disk: &Window) -> Option<Layout> {
    let is_gpt = record(disk, 0)?.iter().any(|(kind, ..)| *kind == PROTECTIVE);
    let gpt = SECTORS.iter().filter(|_| is_gpt).find_map(|sector| {
        let entries = entries(disk, *sector)?;
        let ends = entries.iter().map(|(_, _, last)| last.saturating_add(1));
        let end = ends.max().unwrap_or(0).saturating_mul(*sector);
        Some(Layout {
            block: Some(*sector),
            end,
        })
    });
    gpt.or_else(|| {
        let sector: [u8; 512] = disk.bytes(0)?;
        // The first sector of FAT and NTFS ends alike, and has text where the table would be (Linux, block/partitions/msdos.c).
        let mut states = [446_usize, 462, 478, 494].iter().filter_map(|at| sector.get(*at));
        if !states.all(|state| state & 0x7f == 0) {
            return None;
        }
        let all = record(disk, 0)?;
        let used = all
            .iter()
            .filter(|(kind, start, count)| *kind != 0 && *kind != PROTECTIVE && *start != 0 && *count != 0);
        let ends = used.map(|(_, start, count)| u64::from(*start).saturating_add((*count).into()));
        Some(Layout {
            block: None,
            end: ends.max()?.saturating_mul(512),
        })
    })
}

/// The partitions of a disk; none when it has no table.
pub fn partitions(disk: &Window) -> Vec<Partition> {
    let gpt = SECTORS.iter().find_map(|sector| gpt(disk, *sector));
    gpt.unwrap_or_else(|| mbr(disk))
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let piece = bytes.get(offset..).and_then(|rest| rest.first_chunk());
    piece.map_or(0, |piece| u32::from_le_bytes(*piece))
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let piece = bytes.get(offset..).and_then(|rest| rest.first_chunk());
    piece.map_or(0, |piece| u64::from_le_bytes(*piece))
}

fn gpt(disk: &Window, sector: u64) -> Option<Vec<Partition>> {
    let entries = entries(disk, sector)?.into_iter();
    let partition = |(number, first, last): (u32, u64, u64)| {
        let sectors = last.checked_sub(first)?.checked_add(1)?;
        let window = disk.part(first.checked_mul(sector)?, sectors.checked_mul(sector)?)?;
        Some(Partition { number, window })
    };
    Some(entries.filter_map(partition).collect())
}

/// Number, first and last block of the partitions of a GPT; nothing when it is none.
fn entries(disk: &Window, sector: u64) -> Option<Vec<(u32, u64, u64)>> {
    // The header is sector 1; of a disk that has become larger, the copy at its end is elsewhere.
    let header: [u8; 92] = disk.bytes(sector)?;
    if !header.starts_with(b"EFI PART") {
        return None;
    }
    let (table, count, size) = (
        u64_at(&header, 72),
        u32_at(&header, 80),
        u64::from(u32_at(&header, 84)),
    );
    if !(128..=4096).contains(&size) {
        return Some(Vec::new());
    }
    let mut found = Vec::new();
    for index in 0..count.min(MOST) {
        let offset = table
            .checked_mul(sector)?
            .checked_add(u64::from(index).checked_mul(size)?)?;
        let Some(entry) = disk.bytes::<128>(offset) else {
            break;
        };
        // An entry without a type is free.
        if entry.first_chunk() == Some(&[0; 16]) {
            continue;
        }
        found.push((index.saturating_add(1), u64_at(&entry, 32), u64_at(&entry, 40)));
    }
    Some(found)
}

/// Type, first sector and number of sectors of the four partitions in a boot record; nothing when it is none.
fn record(disk: &Window, sector: u64) -> Option<[(u8, u32, u32); 4]> {
    let bytes: [u8; 512] = disk.bytes(sector.checked_mul(512)?)?;
    bytes.ends_with(&[0x55, 0xaa]).then(|| {
        [446_usize, 462, 478, 494].map(|at| {
            let kind = bytes.get(at.saturating_add(4)).copied().unwrap_or_default();
            (
                kind,
                u32_at(&bytes, at.saturating_add(8)),
                u32_at(&bytes, at.saturating_add(12)),
            )
        })
    })
}

fn mbr(disk: &Window) -> Vec<Partition> {
    let Some(primary) = record(disk, 0) else {
        return Vec::new();
    };
    let partition = |number: u32, start: u64, sectors: u32| {
        let window = disk.part(start.checked_mul(512)?, u64::from(sectors).checked_mul(512)?)?;
        Some(Partition { number, window })
    };
    let mut found = Vec::new();
    for (number, (kind, start, sectors)) in (1..).zip(primary) {
        if kind == 0 || kind == PROTECTIVE || start == 0 || sectors == 0 {
            continue;
        }
        if !EXTENDED.contains(&kind) {
            found.extend(partition(number, start.into(), sectors));
            continue;
        }
        // Each logical partition has a record of its own, that names it and the next record.
        let (extended, mut at) = (u64::from(start), u64::from(start));
        for number in 5..MOST {
            let Some([own, next, ..]) = record(disk, at) else {
                break;
            };
            if own.2 != 0 {
                found.extend(partition(number, at.saturating_add(own.1.into()), own.2));
            }
            if next.1 == 0 {
                break;
            }
            at = extended.saturating_add(next.1.into());
        }
    }
    found
}

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
/// Types of an EFI system partition in an MBR and in a GPT (UEFI 2.10, tables 5.4 and 5.7), the latter as it is on the disk:
/// c12a7328-f81f-11d2-ba4b-00a0c93ec93b.
const ESP_MBR: u8 = 0xef;
const ESP_GPT: [u8; 16] = [
    0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b,
];
/// Length of the code in a boot sector, in bytes: a disk signature and the table follow it.
const BOOT_CODE: usize = 440;

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

/// Whether a disk has an EFI system partition where firmware reads it: a GPT for logical blocks of this length, its copy in the last
/// block, or an MBR. MBRs count in blocks of the disk.
pub fn has_esp(disk: &Window, block: u64) -> bool {
    let Some(primary) = record(disk, 0) else {
        return false;
    };
    let is_gpt = primary.iter().any(|(kind, ..)| *kind == PROTECTIVE);
    let copy = disk.length().saturating_sub(block);
    let gpt = || entries(disk, block).or_else(|| entries_at(disk, block, copy));
    let in_gpt = || gpt().is_some_and(|entries| entries.iter().any(|entry| entry.kind == ESP_GPT));
    let in_mbr = || {
        primary
            .iter()
            .any(|(kind, start, count)| *kind == ESP_MBR && *start != 0 && *count != 0)
    };
    (is_gpt && in_gpt()) || in_mbr()
}

/// Content of the first sector of a disk, for a BIOS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootSector {
    /// The sector has no signature.
    None,
    /// The sector has a signature, and zeroes instead of code.
    WithoutCode,
    /// The sector has code.
    Code,
}

/// The boot sector of a disk.
pub fn boot_sector(disk: &Window) -> BootSector {
    match disk.bytes::<512>(0) {
        Some(sector) if sector.ends_with(&[0x55, 0xaa]) => {
            match sector.iter().take(BOOT_CODE).any(|byte| *byte != 0) {
                true => BootSector::Code,
                false => BootSector::WithoutCode,
            }
        }
        _ => BootSector::None,
    }
}

/// Refuses a disk whose partition table is for logical blocks of another length: the guest would find no partition.
///
/// # Errors
///
/// The table is for other blocks; the text says what to change.
pub fn check_block(disk: &Window, block: u64) -> Result<(), String> {
    check_gpt_block(disk, block)?;
    match layout(disk) {
        // An MBR counts in blocks of the disk that it was made for, and does not name their length.
        Some(Layout { block: None, .. }) if block != 512 => Err(format!(
            "its partition table is an MBR, which is read for logical blocks of 512 bytes only, and the disk has blocks of {block}"
        )),
        _ => Ok(()),
    }
}

/// The same for a GPT only.
///
/// # Errors
///
/// The GPT is for other blocks; the text says what to change.
pub fn check_gpt_block(disk: &Window, block: u64) -> Result<(), String> {
    match layout(disk) {
        Some(Layout {
            block: Some(wanted), ..
        }) if wanted != block => Err(format!(
            "its partition table is for logical blocks of {wanted} bytes, and the disk has blocks of {block}, so the guest would find no \
             partition: set logicalBlockBytes of the disk to {wanted}"
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
        let ends = entries.iter().map(|entry| entry.last.saturating_add(1));
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
    let partition = |entry: Entry| {
        let sectors = entry.last.checked_sub(entry.first)?.checked_add(1)?;
        let window = disk.part(entry.first.checked_mul(sector)?, sectors.checked_mul(sector)?)?;
        Some(Partition {
            number: entry.number,
            window,
        })
    };
    Some(entries.filter_map(partition).collect())
}

/// A partition of a GPT.
struct Entry {
    /// From 1 on.
    number: u32,
    /// Its type, as on the disk.
    kind: [u8; 16],
    /// First block.
    first: u64,
    /// Last block.
    last: u64,
}

/// The partitions of a GPT; nothing when there is none.
fn entries(disk: &Window, sector: u64) -> Option<Vec<Entry>> {
    // The header is sector 1; of a disk that has become larger, the copy at its end is elsewhere.
    entries_at(disk, sector, sector)
}

/// The partitions of a GPT whose header begins at this byte.
fn entries_at(disk: &Window, sector: u64, header: u64) -> Option<Vec<Entry>> {
    let header: [u8; 92] = disk.bytes(header)?;
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
        let kind = entry.first_chunk().copied().unwrap_or_default();
        if kind == [0; 16] {
            continue;
        }
        found.push(Entry {
            number: index.saturating_add(1),
            kind,
            first: u64_at(&entry, 32),
            last: u64_at(&entry, 40),
        });
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

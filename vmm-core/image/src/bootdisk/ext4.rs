//! ext2 to ext4 as the library can read them.
//!
//! The library always reads the journal, and refuses a journal without checksums. A file system has
//! such a journal if it was never mounted (as mkfs.ext4 creates it), or has no `metadata_csum`. If
//! the journal needs no recovery, this module hides the journal from the library.

use std::{error::Error, io, ops::Range};

use ext4_view::{Ext4, Ext4Read};

use super::{
    files::{Files, Kind, LONGEST_PATH, NAMES, Sink, stream},
    medium::Window,
};

/// Where the superblock is, and how long, in bytes (Documentation/filesystems/ext4/super.rst, as what follows).
const SUPERBLOCK: u64 = 1024;
const LENGTH: usize = 1024;
/// Offsets of fields in it, and their bits.
const COMPATIBLE: usize = 0x5c;
const HAS_JOURNAL: u8 = 0x4;
const INCOMPATIBLE: usize = 0x60;
const NEEDS_RECOVERY: u8 = 0x4;
const READ_ONLY_COMPATIBLE: usize = 0x65;
const METADATA_CHECKSUMS: u8 = 0x4;
const CHECKSUM: usize = 0x3fc;
const BLOCKS: usize = 0x4;
const FIRST_BLOCK: usize = 0x14;
const BLOCK_SIZE: usize = 0x18;
const BLOCKS_PER_GROUP: usize = 0x20;
const BLOCKS_HIGH: usize = 0x150;
/// Most groups of blocks: the library keeps something of each. A file system of 128 TiB has as many with its usual 128 MiB each.
const GROUPS: u64 = 1 << 20;

/// Opens a file system. The error describes why the file system is unreadable.
pub fn open(window: &Window) -> Result<Ext4, String> {
    let superblock: Option<[u8; LENGTH]> = window.bytes(SUPERBLOCK);
    if let Some(superblock) = &superblock {
        check(superblock, window.length())?;
    }
    let without_journal = superblock.map(without_journal);
    let needs_recovery = superblock.is_some_and(|superblock| superblock[INCOMPATIBLE] & NEEDS_RECOVERY != 0);
    let load = |superblock| {
        Ext4::load(Box::new(Reader {
            window: window.clone(),
            superblock,
        }))
    };
    let loaded = match needs_recovery {
        // GRUB never reads a journal: the state without the journal, which GRUB would boot, is
        // better than an error.
        true => load(None).or_else(|_| load(without_journal)),
        false => load(without_journal),
    };
    loaded.map_err(|error| error.to_string())
}

/// Whether the file system fits on its partition, and has no more groups than a real one: the library believes those numbers.
fn check(superblock: &[u8; LENGTH], length: u64) -> Result<(), String> {
    let number = |at: usize| {
        let bytes = superblock.get(at..).and_then(|rest| rest.first_chunk());
        u64::from(bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes)))
    };
    let blocks = number(BLOCKS) | number(BLOCKS_HIGH) << 32;
    let bytes = u32::try_from(number(BLOCK_SIZE))
        .ok()
        .and_then(|shift| 1024_u64.checked_shl(shift)?.checked_mul(blocks));
    if bytes.is_none_or(|bytes| bytes > length) {
        return Err(format!("it has {blocks} blocks, more than its partition"));
    }
    let groups = blocks
        .saturating_sub(number(FIRST_BLOCK))
        .checked_div(number(BLOCKS_PER_GROUP));
    match groups {
        Some(groups) if groups < GROUPS => Ok(()),
        _ => Err(format!("it has more than {GROUPS} groups of blocks")),
    }
}

impl Files for Ext4 {
    fn kind(&self, path: &str) -> Option<Kind> {
        let found = self.symlink_metadata(path).ok()?;
        if found.is_symlink() {
            // The library would read a target of any length.
            let short = found.len() <= LONGEST_PATH as u64;
            let target = short.then(|| self.read_link(path).ok()).flatten()?;
            return Some(Kind::Link(target.to_str().ok()?.to_owned()));
        }
        let kind = found.is_dir().then_some(Kind::Folder);
        kind.or_else(|| found.file_type().is_regular_file().then_some(Kind::File))
    }

    fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = self.read_dir(path) else {
            return Vec::new();
        };
        let entries = entries.take(NAMES).filter_map(Result::ok);
        let names = entries.filter_map(|entry| entry.file_name().as_str().ok().map(str::to_owned));
        names.collect()
    }

    fn copy(&self, path: &str, range: Range<u64>, to: &mut Sink<'_>) -> io::Result<()> {
        let mut file = self.open(path)?;
        file.seek_to(range.start)?;
        stream(range, to, |_, buffer| Ok(file.read_bytes(buffer)?))
    }
}

fn without_journal(mut superblock: [u8; LENGTH]) -> [u8; LENGTH] {
    superblock[COMPATIBLE] &= !HAS_JOURNAL;
    if superblock[READ_ONLY_COMPATIBLE] & METADATA_CHECKSUMS != 0 {
        // CRC32C without the inversion at the end.
        let checksum = !crc32c::crc32c(&superblock[..CHECKSUM]);
        superblock[CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
    }
    superblock
}

/// A file system with another superblock.
struct Reader {
    window: Window,
    superblock: Option<[u8; LENGTH]>,
}

impl Ext4Read for Reader {
    fn read(
        &mut self,
        start_byte: u64,
        data: &mut [u8],
    ) -> Result<(), Box<dyn Error + Send + Sync + 'static>> {
        self.window.fill(data, start_byte)?;
        let Some(superblock) = &self.superblock else {
            return Ok(());
        };
        // The read range may be a part of the superblock, or the reverse.
        for (offset, byte) in (SUPERBLOCK..).zip(superblock) {
            let at = offset
                .checked_sub(start_byte)
                .and_then(|at| usize::try_from(at).ok());
            match at.and_then(|at| data.get_mut(at)) {
                Some(place) => *place = *byte,
                None if offset >= start_byte => break,
                None => {}
            }
        }
        Ok(())
    }
}

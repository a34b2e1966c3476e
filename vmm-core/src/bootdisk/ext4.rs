//! ext2 to ext4 as the library can read them.
//!
//! It reads the journal in any case, and refuses one that has no checksums: such has a file system that was never mounted (as mkfs.ext4 makes
//! it), or one without `metadata_csum`. Where nothing is to be taken from the journal, the library is told that there is none.

use std::error::Error;

use ext4_view::{Ext4, Ext4Error, Ext4Read};

use super::medium::Window;

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

/// Opens a file system.
pub fn open(window: &Window) -> Result<Ext4, Ext4Error> {
    let superblock: Option<[u8; LENGTH]> = window.bytes(SUPERBLOCK);
    let without_journal = superblock.map(without_journal);
    let needs_recovery = superblock.is_some_and(|superblock| superblock[INCOMPATIBLE] & NEEDS_RECOVERY != 0);
    let load = |superblock| {
        Ext4::load(Box::new(Reader {
            window: window.clone(),
            superblock,
        }))
    };
    if !needs_recovery {
        return load(without_journal);
    }
    // GRUB never looks into a journal: what it would boot is better than nothing.
    load(None).or_else(|_| load(without_journal))
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
        // It may be a part of what is read, or the other way round.
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

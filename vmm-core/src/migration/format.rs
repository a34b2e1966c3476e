//! The stream of a migration, version 1. All numbers are little-endian, all checksums CRC32C
//! (Castagnoli, as in RFC 3720).
//!
//! ```text
//! 0          "vmmdmigr"
//! 8          u32  version of this format
//! 12         frames, each:
//!              0  u32  kind
//!              4  u32  length of the body
//!              8  u32  checksum of the 8 bytes before and the body
//!             12  body
//! ```
//!
//! | kind | body |
//! |---|---|
//! | 1 memory | message [`SnapshotMemory`](vmm_protocol::state::SnapshotMemory): the ranges of RAM; first frame, exactly once |
//! | 2 pages | u64 guest-physical address, then the content of 1 to 256 pages of 4 KiB |
//! | 3 zeroes | u64 guest-physical address, u64 length: the content of these pages is now zero |
//! | 4 section | message `vmm.state.v1.Section`: one of the [`SnapshotInfo`](vmm_protocol::state::SnapshotInfo), and those of the saved machine |
//! | 5 end | u64: number of the frames before |
//! | 6 disk | u32 number, from 0 on; u64 size in bytes; its name: a mirrored disk |
//! | 7 blocks | u32 number of a disk, u64 offset in it, then the content from there on: whole sectors, at most 1 MiB |
//! | 8 cleared | u32 number of a disk, u64 offset, u64 length: the content of these bytes is now zero |
//! | 9 part | the first bytes of a section's message that is longer than a frame; more parts may follow, and then a frame of kind 4 with its last bytes |
//! | 10 boot | u8: 0 the kernel, 1 the initial RAM disk, 2 the command line; then the next bytes of it, at most 1 MiB |
//! | 11 header | message [`MachineHeader`](vmm_protocol::state::MachineHeader): second frame, so that a machine that the other side can't continue is refused before anything else is sent |
//!
//! Pages and sectors that the stream omits are zero. A page or a sector may be repeated, and the
//! last one applies. Sections follow all pages and blocks.
//!
//! Programs without support for disks can read a stream without disks. The same holds for parts of
//! sections, for boot files and for the header.

use block::content::PIECE;

use crate::snapshot::format::PAGE;

/// The first bytes of each stream.
pub const MAGIC: [u8; 8] = *b"vmmdmigr";
/// Version of the format that this program sends and receives.
pub const VERSION: u32 = 1;
/// Bytes before the body of a frame.
pub const FRAME: usize = 12;
/// Most bytes of pages in a frame.
pub const MAX_PAGES: u64 = 256 * PAGE;
/// Most bytes of a disk in a frame.
pub const MAX_BLOCKS: u64 = PIECE;
/// Longest body that there is in bytes.
pub const MAX_BODY: u32 = 4 << 20;
/// The same as a length in memory.
pub const MAX_BODY_BYTES: usize = MAX_BODY as usize;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The ranges of RAM.
    Memory,
    /// What pages hold.
    Pages,
    /// Pages that hold zeroes by now.
    Zeroes,
    /// A part of the machine's state.
    Section,
    /// There is no more.
    End,
    /// A disk that goes along.
    Disk,
    /// Content of a disk.
    Blocks,
    /// A part of a disk that holds zeroes by now.
    Cleared,
    /// The beginning of a section.
    Part,
    /// A piece of a boot file.
    Boot,
    /// The machine's header.
    Header,
}

impl Kind {
    /// Its number in the stream.
    pub const fn number(self) -> u32 {
        match self {
            Self::Memory => 1,
            Self::Pages => 2,
            Self::Zeroes => 3,
            Self::Section => 4,
            Self::End => 5,
            Self::Disk => 6,
            Self::Blocks => 7,
            Self::Cleared => 8,
            Self::Part => 9,
            Self::Boot => 10,
            Self::Header => 11,
        }
    }

    /// Returns the kind of a number in the stream.
    pub const fn of(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Memory),
            2 => Some(Self::Pages),
            3 => Some(Self::Zeroes),
            4 => Some(Self::Section),
            5 => Some(Self::End),
            6 => Some(Self::Disk),
            7 => Some(Self::Blocks),
            8 => Some(Self::Cleared),
            9 => Some(Self::Part),
            10 => Some(Self::Boot),
            11 => Some(Self::Header),
            _ => None,
        }
    }
}

/// Header of a frame. The body is in several pieces.
pub fn frame(kind: Kind, body: &[&[u8]]) -> [u8; FRAME] {
    let length: usize = body.iter().map(|part| part.len()).sum();
    let [a, b, c, d] = kind.number().to_le_bytes();
    let [e, f, g, h] = u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes();
    let [i, j, k, l] = checksum(&[a, b, c, d, e, f, g, h], body).to_le_bytes();
    [a, b, c, d, e, f, g, h, i, j, k, l]
}

/// Checksum of the first 8 bytes of a frame and its body.
pub fn checksum(start: &[u8], body: &[&[u8]]) -> u32 {
    let start = crc32c::crc32c(start);
    body.iter()
        .fold(start, |checksum, part| crc32c::crc32c_append(checksum, part))
}

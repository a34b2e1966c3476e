//! The snapshot file, version 1. All numbers are little-endian, all checksums CRC32C (Castagnoli,
//! as in RFC 3720).
//!
//! ```text
//! 0          header, one block of 4 KiB
//!              0  "vmmdsnap"
//!              8  u32  version of this format
//!             12  u32  checksum of the block, computed with zero in this place
//!             16  u64  length of the file
//!             24  u64  where the sections begin
//!             32  u64  length of all sections, which end the file
//!             40  u32  number of sections
//!             44  zeroes
//! 4 KiB      zeroes, usually a hole
//! 2 MiB      guest memory: the ranges of RAM one behind the other; pages of zeroes are holes
//! …          table of checksums: u32 of each page of 4 KiB
//! …          sections, each:
//!              0  u32  length of the message
//!              4  u32  checksum of these 4 bytes and the message
//!              8  message vmm.state.v1.Section (kind, version, id, payload)
//! ```
//!
//! Sections are one `snapshot` ([`SnapshotInfo`]), one `snapshot-memory` ([`SnapshotMemory`]), and
//! those of the saved machine ([`state::Machine`]). Their order has no meaning, and each section
//! must belong to a part of a machine. The header is written last: a file without a header is a
//! snapshot that was never completed.
//!
//! Memory begins at a multiple of 2 MiB and keeps its order, so that a machine can map the file as
//! its memory: see [`Snapshot::map`](super::Snapshot::map).
//!
//! Compatibility: sections carry versions of their own (`proto/src/state.rs`); another layout of
//! the file is another version of the format.

use std::ops::Range;

use prost::Message as _;
use vmm_protocol::state::{Section, SnapshotMemory, SnapshotRange};

use super::{
    error::{Place, SnapshotError},
    reader::Source,
};
use crate::memory::layout::RAM_MAX;
#[cfg(doc)]
use vmm_protocol::state::{self, SnapshotInfo};

/// The first bytes of each snapshot.
pub const MAGIC: [u8; 8] = *b"vmmdsnap";
/// Version of the format that this program reads and writes.
pub const VERSION: u32 = 1;
/// Length of the header in bytes.
pub const HEADER: usize = 4096;
/// Where memory begins.
pub const MEMORY_OFFSET: u64 = 2 << 20;
/// Unit that has a checksum, in bytes.
pub const PAGE: u64 = PAGE_BYTES as u64;
/// The same as a length in memory.
pub const PAGE_BYTES: usize = 4096;
/// Bytes of a checksum in the table.
pub const CHECKSUM: u64 = 4;
/// Id of the sections that belong to the file.
pub const OWN_ID: &str = "snapshot";

/// Most sections. A machine has one for each vCPU (254 at most) and each device (93 on three buses), and some more.
pub const MAX_SECTIONS: u32 = 1024;
/// Longest section in bytes. The limits of all devices are below it: a balloon has one bit for each page of the largest
/// machine (128 MiB), and a screen has the picture of a guest without a driver and pictures without guest memory (36 MiB each).
pub const MAX_SECTION: u32 = 144 << 20;
/// Most bytes of all sections: those two, and 64 MiB for all others, which have some KiB each.
pub const MAX_SECTIONS_LENGTH: u64 = 288 << 20;
/// Most ranges of memory.
pub const MAX_RANGES: usize = 64;

/// Bytes before the message of a section.
const SECTION_FRAME: usize = 8;
const CHECKSUM_AT: Range<usize> = 12..16;
const ZEROES_FROM: usize = 44;

/// Content of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the file.
    pub file_length: u64,
    /// Where the sections are.
    pub sections_offset: u64,
    /// Bytes of all sections.
    pub sections_length: u64,
    /// How many there are.
    pub sections: u32,
}

impl Header {
    /// As it is in the file.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut block = [0; HEADER];
        let fields: [(usize, &[u8]); 6] = [
            (0, &MAGIC),
            (8, &VERSION.to_le_bytes()),
            (16, &self.file_length.to_le_bytes()),
            (24, &self.sections_offset.to_le_bytes()),
            (32, &self.sections_length.to_le_bytes()),
            (40, &self.sections.to_le_bytes()),
        ];
        for (at, bytes) in fields {
            put(&mut block, at, bytes);
        }
        let checksum = crc32c::crc32c(&block);
        put(&mut block, CHECKSUM_AT.start, &checksum.to_le_bytes());
        block
    }

    /// Checks it against the length that the file has.
    pub fn decode(block: &[u8; HEADER], file_length: u64) -> Result<Self, SnapshotError> {
        if block.iter().all(|byte| *byte == 0) {
            return Err(SnapshotError::Incomplete);
        }
        if !block.starts_with(&MAGIC) {
            return Err(SnapshotError::NoSnapshot);
        }
        let found = u32_at(block, 8);
        if found != VERSION {
            return Err(SnapshotError::Format {
                found,
                known: VERSION,
            });
        }
        let mut unsigned = *block;
        put(&mut unsigned, CHECKSUM_AT.start, &[0; 4]);
        let wrong = |why: &str| Err(SnapshotError::damaged(Place::Header, why));
        if crc32c::crc32c(&unsigned) != u32_at(block, CHECKSUM_AT.start) {
            return wrong("its checksum is another");
        }
        let header = Self {
            file_length: u64_at(block, 16),
            sections_offset: u64_at(block, 24),
            sections_length: u64_at(block, 32),
            sections: u32_at(block, 40),
        };
        if header.file_length != file_length {
            return Err(SnapshotError::Length {
                found: file_length,
                written: header.file_length,
            });
        }
        // A checksum is no proof that one of our programs wrote it.
        if unsigned.iter().skip(ZEROES_FROM).any(|byte| *byte != 0) {
            return wrong("it has more fields than this version");
        }
        let end = header.sections_offset.checked_add(header.sections_length);
        if end != Some(file_length) || header.sections_offset < MEMORY_OFFSET {
            return wrong("the sections do not end the file");
        }
        if header.sections > MAX_SECTIONS || header.sections_length > MAX_SECTIONS_LENGTH {
            return wrong("it has more sections than a machine");
        }
        Ok(header)
    }
}

/// Refuses a state that no reader takes, with the section that has the most.
pub fn check_sections(sections: &[Section]) -> Result<(), SnapshotError> {
    let lengths = || sections.iter().map(|section| section.encoded_len() as u64);
    let all: u64 = lengths().sum();
    let longest = lengths().zip(sections).max_by_key(|(length, _)| *length);
    match longest {
        Some((bytes, section)) if bytes > MAX_SECTION.into() || all > MAX_SECTIONS_LENGTH => {
            Err(SnapshotError::TooLong {
                id: section.id.clone(),
                bytes,
                all,
            })
        }
        _ => Ok(()),
    }
}

/// A section as it is in the file.
pub fn encode_section(section: &Section) -> Vec<u8> {
    let mut bytes = vec![0; SECTION_FRAME];
    // A vector has room for everything.
    let _encoded = section.encode(&mut bytes);
    let message = bytes.get(SECTION_FRAME..).unwrap_or_default();
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX).to_le_bytes();
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&length), message);
    put(&mut bytes, 0, &length);
    put(&mut bytes, 4, &checksum.to_le_bytes());
    bytes
}

/// The sections of `source`, which has `header` and whose length is the header's.
pub fn read_sections<S: Source>(source: &S, header: &Header) -> Result<Vec<Section>, SnapshotError> {
    let end = header.file_length;
    let mut at = header.sections_offset;
    let mut sections = Vec::new();
    for number in 0..header.sections {
        let wrong = |why: &str| SnapshotError::damaged(Place::Section { number, offset: at }, why);
        let mut frame = [0; SECTION_FRAME];
        let behind = at.saturating_add(SECTION_FRAME as u64);
        if behind > end {
            return Err(wrong("the file ends in it"));
        }
        source.read_at(&mut frame, at).map_err(SnapshotError::reading)?;
        let length = u32_at(&frame, 0);
        if length > MAX_SECTION {
            return Err(wrong("it is longer than any section"));
        }
        let next = behind.saturating_add(length.into());
        if next > end {
            return Err(wrong("the file ends in it"));
        }
        let mut message = vec![0; usize::try_from(length).unwrap_or(0)];
        source
            .read_at(&mut message, behind)
            .map_err(SnapshotError::reading)?;
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&length.to_le_bytes()), &message);
        if checksum != u32_at(&frame, 4) {
            return Err(wrong("its checksum is another"));
        }
        let section = Section::decode(message.as_slice()).map_err(|_| wrong("it can't be decoded"))?;
        sections.push(section);
        at = next;
    }
    if at != end {
        let place = Place::Section {
            number: header.sections,
            offset: at,
        };
        return Err(SnapshotError::damaged(
            place,
            "there are more bytes than sections",
        ));
    }
    Ok(sections)
}

/// Where the parts of memory are in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// In order.
    pub ranges: Vec<Part>,
}

/// A range of memory in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Guest-physical address.
    pub address: u64,
    /// In bytes.
    pub length: u64,
    /// Where it begins in the file.
    pub offset: u64,
}

impl Layout {
    /// Layout of ranges of whole pages, (guest address, length), in order of addresses.
    pub fn new(ranges: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut offset = MEMORY_OFFSET;
        let place = |(address, length)| {
            let part = Part {
                address,
                length,
                offset,
            };
            offset = offset.saturating_add(length);
            part
        };
        Self {
            ranges: ranges.into_iter().map(place).collect(),
        }
    }

    /// Layout from a file, checked: the ranges follow one another, in the file and in the address
    /// space.
    pub fn read(memory: &SnapshotMemory) -> Result<Self, &'static str> {
        if memory.ranges.len() > MAX_RANGES {
            return Err("it has too many ranges of memory");
        }
        let (mut offset, mut address) = (MEMORY_OFFSET, 0);
        for range in &memory.ranges {
            let whole = [range.address, range.length]
                .iter()
                .all(|it| it.is_multiple_of(PAGE));
            if !whole || range.length == 0 || range.address < address || range.file_offset != offset {
                return Err("its ranges of memory are not one behind the other");
            }
            let ends = (
                range.address.checked_add(range.length),
                offset.checked_add(range.length),
            );
            (address, offset) = match ends {
                (Some(address), Some(offset)) => (address, offset),
                _ => return Err("a range of memory is beyond the address space"),
            };
        }
        if offset.saturating_sub(MEMORY_OFFSET) > RAM_MAX {
            return Err("it has more memory than any machine");
        }
        if memory.checksums_offset != offset {
            return Err("its table of checksums is not behind its memory");
        }
        let ranges = memory.ranges.iter();
        Ok(Self::new(ranges.map(|range| (range.address, range.length))))
    }

    /// As it is in the file, with the checksum of the table of checksums.
    pub fn message(&self, checksums_crc32c: u32) -> SnapshotMemory {
        let range = |part: &Part| SnapshotRange {
            address: part.address,
            length: part.length,
            file_offset: part.offset,
        };
        SnapshotMemory {
            ranges: self.ranges.iter().map(range).collect(),
            checksums_offset: self.checksums_offset(),
            checksums_crc32c,
        }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|part| part.length).sum()
    }

    /// Where the table of checksums begins.
    pub fn checksums_offset(&self) -> u64 {
        MEMORY_OFFSET.saturating_add(self.bytes())
    }

    /// Where the sections begin, right behind the table.
    pub fn sections_offset(&self) -> u64 {
        let table = self.bytes() / PAGE * CHECKSUM;
        self.checksums_offset().saturating_add(table)
    }

    /// Where the checksum of the page at `offset` of the file is.
    pub fn checksum_of(&self, offset: u64) -> u64 {
        let page = offset.saturating_sub(MEMORY_OFFSET) / PAGE;
        self.checksums_offset()
            .saturating_add(page.saturating_mul(CHECKSUM))
    }

    /// Where the page at a guest-physical address is in the file.
    pub fn find(&self, address: u64) -> Option<u64> {
        let part = self
            .ranges
            .iter()
            .find(|part| (part.address..part.address.saturating_add(part.length)).contains(&address))?;
        Some(part.offset.saturating_add(address.saturating_sub(part.address)))
    }
}

fn put(block: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = block.get_mut(at..at.saturating_add(bytes.len())) {
        place.copy_from_slice(bytes);
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found.copied().map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found.copied().map_or(0, u64::from_le_bytes)
}

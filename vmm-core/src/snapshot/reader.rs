//! A snapshot file that is read back: untrusted until it is checked.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

use rustix::{fs::SeekFrom, io::Errno};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_base::GuestMemory;
use vmm_protocol::state::{self, Section, SnapshotInfo, SnapshotMemory, StateError};

use super::{
    error::{Place, SnapshotError},
    format::{CHECKSUM, HEADER, Header, Layout, MEMORY_OFFSET, PAGE, PAGE_BYTES, Part, read_sections},
    memory::{self, CHECKSUM_OF_ZEROES},
};
use crate::memory::{GuestRam, RamError, in_parallel, layout::Map};

/// Where a snapshot is read from.
pub trait Source: Sync {
    /// Its length in bytes.
    fn length(&self) -> io::Result<u64>;
    /// Reads exactly that much.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// The first range of data from `offset` on; `None` if only zeroes follow.
    fn data(&self, offset: u64) -> io::Result<Option<Range<u64>>>;
}

impl Source for File {
    fn length(&self) -> io::Result<u64> {
        Ok(rustix::fs::seek(self, SeekFrom::End(0))?)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }

    fn data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let start = match rustix::fs::seek(self, SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(self, SeekFrom::Hole(start))?;
        Ok(Some(start..end))
    }
}

impl Source for &[u8] {
    fn length(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).ok();
        let bytes = start.and_then(|start| self.get(start..)?.get(..buffer.len()));
        buffer.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        Ok((offset < self.len() as u64).then_some(offset..self.len() as u64))
    }
}

/// A snapshot whose header, sections and table of checksums are whole. Memory is checked when it is loaded.
#[derive(Debug)]
pub struct Snapshot<S = File> {
    source: S,
    layout: Layout,
    /// Info about the snapshot.
    pub info: SnapshotInfo,
    /// The saved machine.
    pub machine: state::Machine,
}

impl<S: Source> Snapshot<S> {
    /// Reads and checks everything but memory.
    pub fn open(source: S) -> Result<Self, SnapshotError> {
        let length = source.length().map_err(SnapshotError::reading)?;
        let mut block = [0; HEADER];
        if length < HEADER as u64 {
            return Err(SnapshotError::NoSnapshot);
        }
        source.read_at(&mut block, 0).map_err(SnapshotError::reading)?;
        let header = Header::decode(&block, length)?;
        check_gap(&source)?;
        let mut sections = read_sections(&source, &header)?;
        let info: SnapshotInfo = take(&mut sections)?;
        let memory: SnapshotMemory = take(&mut sections)?;
        let wrong = |why| SnapshotError::damaged(Place::Header, why);
        let layout = Layout::read(&memory).map_err(wrong)?;
        if layout.sections_offset() != header.sections_offset {
            return Err(wrong("its sections are not behind its memory"));
        }
        check_table(&source, &layout, memory.checksums_crc32c)?;
        Ok(Self {
            source,
            layout,
            info,
            machine: state::Machine { sections },
        })
    }

    /// Bytes of the machine's memory.
    pub fn memory_bytes(&self) -> u64 {
        self.layout.bytes()
    }

    /// Checks all of memory.
    pub fn check_memory(&self) -> Result<(), SnapshotError> {
        for part in &self.layout.ranges {
            for (start, length) in memory::pieces(part.length) {
                self.pages(part, start, length, |_, _| Ok(()))?;
            }
        }
        Ok(())
    }

    /// Checks memory and copies it into `memory`, which has the same ranges and is all zeroes.
    pub fn load(&self, memory: &GuestMemory) -> Result<(), SnapshotError> {
        self.fits(memory)?;
        in_parallel(memory, PAGE, |piece| {
            let Range { start: address, end } = piece.guest();
            let whole = Part {
                address,
                length: end.saturating_sub(address),
                offset: self.layout.find(address).unwrap_or(0),
            };
            memory::pieces(whole.length).try_for_each(|(start, length)| {
                self.pages(&whole, start, length, |address, bytes| {
                    Ok(memory.write_slice(bytes, GuestAddress(address))?)
                })
            })
        })
    }

    /// Whether `memory` has the ranges of the saved machine.
    fn fits(&self, memory: &GuestMemory) -> Result<(), SnapshotError> {
        let own: Vec<_> = memory
            .iter()
            .map(|region| (region.start_addr().0, region.len()))
            .collect();
        let saved = self.layout.ranges.iter().map(|part| (part.address, part.length));
        let saved: Vec<_> = saved.collect();
        if own == saved {
            return Ok(());
        }
        let bytes = |ranges: &[(u64, u64)]| ranges.iter().map(|range| range.1).sum::<u64>();
        Err(SnapshotError::OtherMemory(format!(
            "{} bytes instead of {}",
            bytes(&saved),
            bytes(&own)
        )))
    }

    /// Reads and checks a piece of a range, and passes the data outside holes to `each`: runs of
    /// whole pages with their guest addresses.
    fn pages(
        &self,
        part: &Part,
        start: u64,
        length: u64,
        mut each: impl FnMut(u64, &[u8]) -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        let offset = part.offset.saturating_add(start);
        let end = offset.saturating_add(length);
        let table = self.checksums(offset, length)?;
        let mut buffer = Vec::new();
        let mut at = offset;
        while at < end {
            let data = self.source.data(at).map_err(SnapshotError::reading)?;
            let data = data.map_or(end..end, |data| {
                // Whole pages, independent of the file system's block size.
                let first = data.start / PAGE * PAGE;
                first.clamp(at, end)..data.end.next_multiple_of(PAGE).clamp(at, end)
            });
            // A hole holds zeroes.
            for page in (at..data.start).step_by(PAGE_BYTES) {
                self.compare(part, page, offset, &table, *CHECKSUM_OF_ZEROES)?;
            }
            if data.is_empty() {
                at = data.start;
                continue;
            }
            buffer.resize(
                usize::try_from(data.end.saturating_sub(data.start)).unwrap_or(0),
                0,
            );
            self.source
                .read_at(&mut buffer, data.start)
                .map_err(SnapshotError::reading)?;
            let pages = (data.start..data.end).step_by(PAGE_BYTES);
            for (page, bytes) in pages.zip(buffer.chunks(PAGE_BYTES)) {
                self.compare(part, page, offset, &table, crc32c::crc32c(bytes))?;
            }
            each(address_of(part, data.start), &buffer)?;
            at = data.end;
        }
        Ok(())
    }

    /// The checksums of the pages from `offset` of the file on.
    fn checksums(&self, offset: u64, length: u64) -> Result<Vec<u8>, SnapshotError> {
        let bytes = length / PAGE * CHECKSUM;
        let mut table = vec![0; usize::try_from(bytes).unwrap_or(0)];
        let at = self.layout.checksum_of(offset);
        self.source
            .read_at(&mut table, at)
            .map_err(SnapshotError::reading)?;
        Ok(table)
    }

    /// Compares the checksum of the page at `page` of the file; `table` begins with that of `first`.
    fn compare(
        &self,
        part: &Part,
        page: u64,
        first: u64,
        table: &[u8],
        checksum: u32,
    ) -> Result<(), SnapshotError> {
        let at = page.saturating_sub(first) / PAGE * CHECKSUM;
        let wanted = usize::try_from(at)
            .ok()
            .and_then(|at| table.get(at..)?.first_chunk())
            .copied();
        if wanted.map(u32::from_le_bytes) == Some(checksum) {
            return Ok(());
        }
        let place = Place::Page {
            address: address_of(part, page),
            offset: page,
        };
        Err(SnapshotError::damaged(place, "its checksum is another"))
    }
}

impl Snapshot<File> {
    /// RAM that is the file, laid out as `map` says: a page is read when the guest first touches it, and is copied when it is written, so that machines of
    /// one snapshot share what none of them has changed. The file is not changed, and must not be while the machine lives. Memory is
    /// not checked: see [`check_memory`](Self::check_memory).
    pub fn map(&self, map: Map, mergeable: bool) -> Result<GuestRam, RamError> {
        let ranges: Vec<_> = self
            .layout
            .ranges
            .iter()
            .map(|part| {
                (
                    part.address..part.address.saturating_add(part.length),
                    part.offset,
                )
            })
            .collect();
        GuestRam::of_file(&self.source, map, &ranges, mergeable)
    }
}

fn address_of(part: &Part, offset: u64) -> u64 {
    part.address.saturating_add(offset.saturating_sub(part.offset))
}

/// Between the header and memory are zeroes.
fn check_gap<S: Source>(source: &S) -> Result<(), SnapshotError> {
    let mut at = HEADER as u64;
    let mut block = [0; HEADER];
    while at < MEMORY_OFFSET {
        let data = source.data(at).map_err(SnapshotError::reading)?;
        at = data
            .map_or(MEMORY_OFFSET, |data| data.start / PAGE * PAGE)
            .max(at);
        if at < MEMORY_OFFSET {
            source.read_at(&mut block, at).map_err(SnapshotError::reading)?;
            if !memory::is_zero(&block) {
                return Err(SnapshotError::damaged(Place::Gap, "it is not empty"));
            }
            at = at.saturating_add(HEADER as u64);
        }
    }
    Ok(())
}

fn check_table<S: Source>(source: &S, layout: &Layout, wanted: u32) -> Result<(), SnapshotError> {
    let length = layout.bytes() / PAGE * CHECKSUM;
    let mut checksum = 0;
    let mut buffer = Vec::new();
    for (start, length) in memory::pieces(length) {
        buffer.resize(usize::try_from(length).unwrap_or(0), 0);
        let at = layout.checksums_offset().saturating_add(start);
        source.read_at(&mut buffer, at).map_err(SnapshotError::reading)?;
        checksum = crc32c::crc32c_append(checksum, &buffer);
    }
    if checksum != wanted {
        return Err(SnapshotError::damaged(
            Place::Checksums,
            "its checksum is another",
        ));
    }
    Ok(())
}

/// The one section with this message.
pub(crate) fn take<M: state::Saved>(sections: &mut Vec<Section>) -> Result<M, SnapshotError> {
    let missing = || StateError::Missing {
        id: M::KIND.to_owned(),
    };
    let found = sections.iter().position(|section| section.kind == M::KIND);
    let section = sections.remove(found.ok_or_else(missing)?);
    if sections.iter().any(|other| other.kind == M::KIND) {
        return Err(StateError::Twice {
            id: section.id,
            kind: section.kind,
        }
        .into());
    }
    Ok(section.open()?)
}

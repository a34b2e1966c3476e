//! Fills a snapshot file.
//!
//! Pages can be written in any order and again. The file is whole when [`Writer::finish`] returns; before that it has no header.

use std::{fs::File, os::unix::fs::FileExt};

use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_base::GuestMemory;
use vmm_protocol::state::{self, Section, SnapshotInfo};

use super::{
    error::SnapshotError,
    format::{CHECKSUM, Header, Layout, OWN_ID, PAGE, PAGE_BYTES, encode_section},
    memory::{self, CHECKSUM_OF_ZEROES, PIECE},
    saving::{GoOn, Sink, Written},
};

/// See the module.
#[derive(Debug)]
pub struct Writer {
    file: File,
    layout: Layout,
    /// Bytes of memory that were written, pages that were written again included.
    written: u64,
}

impl Sink for Writer {
    fn everything(&mut self, memory: &GuestMemory, go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        Self::everything(self, memory, go_on)
    }

    fn pages(
        &mut self,
        memory: &GuestMemory,
        addresses: Vec<u64>,
        go_on: GoOn<'_>,
    ) -> Result<(), SnapshotError> {
        Self::pages(self, memory, addresses, go_on)
    }

    fn contents(&mut self, address: u64, contents: &[u8], go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        go_on()?;
        self.page_contents(address, contents)
    }

    /// Disks are no part of the file.
    fn disks(&mut self, _tell: &dyn Fn(u64, u64), _go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        Ok(())
    }

    fn disk_changes(&mut self, _go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        Ok(())
    }

    fn changed_on_disks(&self) -> u64 {
        0
    }

    fn written(&self) -> Written {
        Written {
            memory: Self::written(self),
            disks: 0,
        }
    }

    fn finish(
        self: Box<Self>,
        info: &SnapshotInfo,
        machine: state::Machine,
        _go_on: GoOn<'_>,
    ) -> Result<u64, SnapshotError> {
        Self::finish(*self, info, machine)
    }
}

/// Whether the file can have held something at a place before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Nothing: zeroes need not be written.
    First,
    /// An older version of the page.
    Again,
}

impl Writer {
    /// Begins a snapshot of a machine with `memory` in `file`, whose old content is discarded.
    pub fn new(file: File, memory: &GuestMemory) -> Result<Self, SnapshotError> {
        let regions = memory.iter();
        let layout = Layout::new(regions.map(|region| (region.start_addr().0, region.len())));
        file.set_len(0).map_err(SnapshotError::writing)?;
        file.set_len(layout.sections_offset())
            .map_err(SnapshotError::writing)?;
        Ok(Self {
            file,
            layout,
            written: 0,
        })
    }

    /// Bytes of memory that were written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Writes what all of `memory` holds now. Stops early, with an error, when `go_on` says so; it is asked each mebibyte.
    pub fn everything(
        &mut self,
        memory: &GuestMemory,
        go_on: impl Fn() -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        let mut buffer = Vec::new();
        for part in self.layout.clone().ranges {
            for (start, length) in memory::pieces(part.length) {
                go_on()?;
                let address = part.address.saturating_add(start);
                memory::read(memory, address, length, &mut buffer)?;
                self.put(part.offset.saturating_add(start), &buffer, Pass::First)?;
            }
        }
        Ok(())
    }

    /// Writes what these pages of `memory` hold now; guest-physical addresses, in order.
    pub fn pages(
        &mut self,
        memory: &GuestMemory,
        addresses: impl IntoIterator<Item = u64>,
        go_on: impl Fn() -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        let mut buffer = Vec::new();
        for (address, length) in memory::runs(addresses) {
            go_on()?;
            memory::read(memory, address, length, &mut buffer)?;
            self.page_contents(address, &buffer)?;
        }
        Ok(())
    }

    /// Writes whole pages whose content the caller has copied, at a guest-physical address within one range of memory.
    pub fn page_contents(&mut self, address: u64, contents: &[u8]) -> Result<(), SnapshotError> {
        let offset = self
            .layout
            .find(address)
            .ok_or_else(|| SnapshotError::OtherMemory(format!("there is no page at {address:#x}")))?;
        self.put(offset, contents, Pass::Again)
    }

    /// Writes whole pages at a place of the file, and their checksums.
    fn put(&mut self, offset: u64, bytes: &[u8], pass: Pass) -> Result<(), SnapshotError> {
        let mut checksums = Vec::with_capacity(bytes.len() / 1024);
        // Pages in a row that are to be written: where they begin in `bytes`.
        let mut begun = None;
        let mut at = 0_usize;
        for page in bytes.chunks(PAGE_BYTES) {
            let skip = pass == Pass::First && memory::is_zero(page);
            let checksum = if skip {
                *CHECKSUM_OF_ZEROES
            } else {
                crc32c::crc32c(page)
            };
            checksums.extend(checksum.to_le_bytes());
            match (skip, begun) {
                (true, Some(from)) => {
                    self.put_run(offset, bytes, from..at)?;
                    begun = None;
                }
                (false, None) => begun = Some(at),
                _ => {}
            }
            at = at.saturating_add(page.len());
        }
        if let Some(from) = begun {
            self.put_run(offset, bytes, from..at)?;
        }
        self.file
            .write_all_at(&checksums, self.layout.checksum_of(offset))
            .map_err(SnapshotError::writing)
    }

    fn put_run(
        &mut self,
        offset: u64,
        bytes: &[u8],
        run: std::ops::Range<usize>,
    ) -> Result<(), SnapshotError> {
        let at = offset.saturating_add(run.start as u64);
        let bytes = bytes.get(run).unwrap_or_default();
        self.written = self.written.saturating_add(bytes.len() as u64);
        self.file.write_all_at(bytes, at).map_err(SnapshotError::writing)
    }

    /// Writes the rest and makes all data durable; returns the file's length. The written memory
    /// matches the moment at which `machine` was saved.
    pub fn finish(self, info: &SnapshotInfo, machine: state::Machine) -> Result<u64, SnapshotError> {
        let memory = self.layout.message(self.checksum_of_table()?);
        let own = [Section::new(OWN_ID, info), Section::new(OWN_ID, &memory)];
        let sections_offset = self.layout.sections_offset();
        let write = |bytes: &[u8], offset| {
            let written = self.file.write_all_at(bytes, offset);
            written.map_err(SnapshotError::writing)
        };
        let (mut end, mut sections) = (sections_offset, 0_u32);
        for section in own.into_iter().chain(machine.sections) {
            let section = encode_section(&section);
            write(&section, end)?;
            end = end.saturating_add(section.len() as u64);
            sections = sections.saturating_add(1);
        }
        let header = Header {
            file_length: end,
            sections_offset,
            sections_length: end.saturating_sub(sections_offset),
            sections,
        };
        // A file with a header is complete.
        self.file.sync_all().map_err(SnapshotError::writing)?;
        write(&header.encode(), 0)?;
        self.file.sync_all().map_err(SnapshotError::writing)?;
        Ok(header.file_length)
    }

    /// Pages that were written again have put their checksums into the table, so it is read once more.
    fn checksum_of_table(&self) -> Result<u32, SnapshotError> {
        let length = self.layout.bytes() / PAGE * CHECKSUM;
        let mut checksum = 0;
        let mut buffer = vec![0; usize::try_from(PIECE.min(length)).unwrap_or(0)];
        for (start, length) in memory::pieces(length) {
            let length = usize::try_from(length).unwrap_or(0);
            let piece = buffer.get_mut(..length).unwrap_or_default();
            let at = self.layout.checksums_offset().saturating_add(start);
            self.file
                .read_exact_at(piece, at)
                .map_err(SnapshotError::reading)?;
            checksum = crc32c::crc32c_append(checksum, piece);
        }
        Ok(checksum)
    }
}

//! The target's end of the stream: untrusted.

use std::io::{self, Read};

use devices::GuestMemory;
use prost::Message as _;
use proto::state::{self, Section, SnapshotInfo, SnapshotMemory};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::format::{FRAME, Kind, MAGIC, MAX_BODY, MAX_PAGES, VERSION, checksum};
use crate::snapshot::{
    SnapshotError,
    error::Place,
    format::{Layout, MAX_SECTIONS, MAX_SECTIONS_LENGTH, PAGE, PAGE_BYTES},
    reader::take,
};

/// A machine that was received; its memory is in place.
#[derive(Debug)]
pub struct Received {
    /// What the source says of itself.
    pub info: SnapshotInfo,
    /// The machine's state.
    pub machine: state::Machine,
}

/// Receives a machine; its memory goes into `memory`, which has the same ranges and is all zeroes.
pub fn receive(stream: impl Read, memory: &GuestMemory) -> Result<Received, SnapshotError> {
    let mut receiver = Receiver {
        stream,
        offset: 0,
        memory,
        body: Vec::new(),
        sections: Vec::new(),
        sections_length: 0,
        frames: 0,
    };
    receiver.begin()?;
    while receiver.frame()? {}
    let mut sections = receiver.sections;
    let info = take(&mut sections)?;
    Ok(Received {
        info,
        machine: state::Machine { sections },
    })
}

struct Receiver<'a, R> {
    stream: R,
    /// Bytes that were read.
    offset: u64,
    memory: &'a GuestMemory,
    /// Of the frame that was read last.
    body: Vec<u8>,
    sections: Vec<Section>,
    sections_length: u64,
    frames: u64,
}

impl<R: Read> Receiver<'_, R> {
    fn read<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let mut bytes = [0; N];
        self.stream
            .read_exact(&mut bytes)
            .map_err(|error| ended(self.offset, error))?;
        self.offset = self.offset.saturating_add(N as u64);
        Ok(bytes)
    }

    fn begin(&mut self) -> Result<(), SnapshotError> {
        if self.read::<8>()? != MAGIC {
            return Err(SnapshotError::NoSnapshot);
        }
        let found = u32::from_le_bytes(self.read()?);
        if found != VERSION {
            return Err(SnapshotError::Format {
                found,
                known: VERSION,
            });
        }
        let (kind, at) = self.next()?;
        if kind != Kind::Memory {
            return Err(wrong(at, "it does not begin with the ranges of memory"));
        }
        let ranges = SnapshotMemory::decode(self.body.as_slice());
        let ranges = ranges.map_err(|_| wrong(at, "it can't be decoded"))?;
        let sent = Layout::read(&ranges).map_err(|why| wrong(at, why))?;
        let regions = self.memory.iter();
        let own = Layout::new(regions.map(|region| (region.start_addr().0, region.len())));
        if sent != own {
            let message = format!("{} bytes instead of {}", sent.bytes(), own.bytes());
            return Err(SnapshotError::OtherMemory(message));
        }
        Ok(())
    }

    /// Reads a frame into `body`: its kind, and where it began.
    fn next(&mut self) -> Result<(Kind, u64), SnapshotError> {
        let at = self.offset;
        let start: [u8; FRAME] = self.read()?;
        let number = |from: usize| {
            let bytes = start.get(from..).and_then(<[u8]>::first_chunk);
            bytes.copied().map_or(0, u32::from_le_bytes)
        };
        let kind = Kind::of(number(0)).ok_or_else(|| wrong(at, "there is no frame of its kind"))?;
        let length = number(4);
        if length > MAX_BODY {
            return Err(wrong(at, "it is longer than any frame"));
        }
        self.body.resize(usize::try_from(length).unwrap_or(0), 0);
        self.stream
            .read_exact(&mut self.body)
            .map_err(|error| ended(self.offset, error))?;
        self.offset = self.offset.saturating_add(length.into());
        if checksum(start.get(..8).unwrap_or_default(), &[&self.body]) != number(8) {
            return Err(wrong(at, "its checksum is another"));
        }
        self.frames = self.frames.saturating_add(1);
        Ok((kind, at))
    }

    /// Takes a frame; false when it is the last.
    fn frame(&mut self) -> Result<bool, SnapshotError> {
        let (kind, at) = self.next()?;
        match kind {
            Kind::Memory => return Err(wrong(at, "it has the ranges of memory again")),
            Kind::Pages | Kind::Zeroes if !self.sections.is_empty() => {
                return Err(wrong(at, "it has memory after the machine's state"));
            }
            Kind::Pages => self.pages(at)?,
            Kind::Zeroes => self.zeroes(at)?,
            Kind::Section => self.section(at)?,
            Kind::End => {
                let before = self.frames.saturating_sub(1).to_le_bytes();
                if self.body != before {
                    return Err(wrong(at, "frames before it are missing"));
                }
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn pages(&mut self, at: u64) -> Result<(), SnapshotError> {
        let split = self.body.split_first_chunk();
        let (address, pages) = split.ok_or_else(|| wrong(at, "it has no address"))?;
        let (address, length) = (u64::from_le_bytes(*address), pages.len() as u64);
        whole_pages(at, address, length)?;
        if length > MAX_PAGES {
            return Err(wrong(at, "it has more pages than any frame"));
        }
        let written = self.memory.write_slice(pages, GuestAddress(address));
        written.map_err(|_| wrong(at, "its pages are outside of memory"))
    }

    fn zeroes(&mut self, at: u64) -> Result<(), SnapshotError> {
        let [address, length] = <&[u8; 16]>::try_from(self.body.as_slice())
            .map(|body| {
                let [a, b] = [body.first_chunk(), body.last_chunk()];
                [a, b].map(|number| number.copied().map_or(0, u64::from_le_bytes))
            })
            .map_err(|_| wrong(at, "it has no range"))?;
        whole_pages(at, address, length)?;
        if length > MAX_PAGES {
            return Err(wrong(at, "it has more pages than any frame"));
        }
        let zeroes = vec![0; usize::try_from(length).unwrap_or(0)];
        let written = self.memory.write_slice(&zeroes, GuestAddress(address));
        written.map_err(|_| wrong(at, "its pages are outside of memory"))
    }

    fn section(&mut self, at: u64) -> Result<(), SnapshotError> {
        self.sections_length = self.sections_length.saturating_add(self.body.len() as u64);
        let count = u32::try_from(self.sections.len()).unwrap_or(u32::MAX);
        if count >= MAX_SECTIONS || self.sections_length > MAX_SECTIONS_LENGTH {
            return Err(wrong(at, "there are more sections than a machine has"));
        }
        let section = Section::decode(self.body.as_slice()).map_err(|_| wrong(at, "it can't be decoded"))?;
        self.sections.push(section);
        Ok(())
    }
}

fn whole_pages(at: u64, address: u64, length: u64) -> Result<(), SnapshotError> {
    let whole = [address, length].iter().all(|it| it.is_multiple_of(PAGE));
    if !whole || length < PAGE_BYTES as u64 {
        return Err(wrong(at, "it has no whole pages"));
    }
    Ok(())
}

fn wrong(at: u64, why: &str) -> SnapshotError {
    SnapshotError::damaged(Place::Stream { offset: at }, why)
}

/// Of a stream that can't be read on.
fn ended(at: u64, error: io::Error) -> SnapshotError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => wrong(at, "it ends there"),
        _ => SnapshotError::reading(error),
    }
}

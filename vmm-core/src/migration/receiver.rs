//! The target's end of the stream: untrusted.

use std::io::{self, BufReader, Read};

use block::{Content, SECTOR};
use prost::Message as _;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_base::GuestMemory;
use vmm_protocol::state::{self, MachineHeader, Section, SnapshotInfo, SnapshotMemory};

use super::{
    ReceivedBoot,
    boot::Refused,
    format::{FRAME, Kind, MAGIC, MAX_BLOCKS, MAX_BODY, MAX_PAGES, VERSION, checksum},
};
use crate::failure::Failure;
use crate::snapshot::{
    SnapshotError,
    error::Place,
    format::{Layout, MAX_SECTION, MAX_SECTIONS, MAX_SECTIONS_LENGTH, PAGE, PAGE_BYTES},
    memory,
    reader::take,
};

/// So much of a disk is written before it is brought to stable storage, in bytes: in the end, while the guest stands still, little is left.
const FLUSH: u64 = 64 << 20;

/// As much is read at once, in bytes: several frames when they are short. A longer body is read past it.
const READ: usize = 64 << 10;

/// A machine that was received; its memory is in place.
#[derive(Debug)]
pub struct Received {
    /// Info about the machine from the source.
    pub info: SnapshotInfo,
    /// The machine's state.
    pub machine: state::Machine,
}

/// A disk that comes along: its image is the receiver's own, and holds zeroes.
#[derive(Debug)]
pub struct ReceivedDisk {
    /// Its name.
    pub name: String,
    /// Target of the received content.
    pub content: Content,
    /// Bytes that were written and may not be on stable storage.
    unflushed: u64,
}

impl ReceivedDisk {
    /// A disk of which nothing has come.
    pub fn new(name: impl Into<String>, content: Content) -> Self {
        Self {
            name: name.into(),
            content,
            unflushed: 0,
        }
    }

    fn flush(&mut self) -> Result<(), SnapshotError> {
        self.unflushed = 0;
        let flushed = self.content.flush();
        flushed.map_err(|error| SnapshotError::disk("writing", &self.name, error))
    }
}

/// Receives a machine; its memory goes into `memory`, which has the same ranges and is all zeroes, and its disks are `disks`, in this order. On
/// return they are on stable storage. Boot files go into `boot`; without it, a stream with boot files is refused. `check`
/// refuses a machine by its header, when the stream begins with it.
pub fn receive(
    stream: impl Read,
    memory: &GuestMemory,
    disks: &mut [ReceivedDisk],
    boot: Option<&mut ReceivedBoot>,
    check: &mut dyn FnMut(&MachineHeader) -> Result<(), Failure>,
) -> Result<Received, SnapshotError> {
    let mut receiver = Receiver {
        stream: BufReader::with_capacity(READ, stream),
        offset: 0,
        memory,
        disks,
        boot,
        named: 0,
        body: Vec::new(),
        pages: Vec::new(),
        sections: Vec::new(),
        parts: Vec::new(),
        sections_length: 0,
        frames: 0,
        header: None,
    };
    receiver.begin()?;
    while receiver.frame()? {
        if let Some(header) = receiver.header.take() {
            check(&header).map_err(SnapshotError::Refused)?;
        }
    }
    let mut sections = receiver.sections;
    let info = take(&mut sections)?;
    Ok(Received {
        info,
        machine: state::Machine { sections },
    })
}

struct Receiver<'a, R> {
    stream: BufReader<R>,
    /// Bytes that were read.
    offset: u64,
    memory: &'a GuestMemory,
    disks: &'a mut [ReceivedDisk],
    boot: Option<&'a mut ReceivedBoot>,
    /// How many of the disks the stream has named.
    named: usize,
    /// Body of the last frame that was read.
    body: Vec<u8>,
    /// Memory that is to become zeroes.
    pages: Vec<u8>,
    sections: Vec<Section>,
    /// The beginning of the next section.
    parts: Vec<u8>,
    sections_length: u64,
    frames: u64,
    /// Received and not checked yet.
    header: Option<MachineHeader>,
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
        let memory_ended = !self.sections.is_empty() || !self.parts.is_empty();
        match kind {
            Kind::End if !self.parts.is_empty() => return Err(wrong(at, "the section before it is cut off")),
            Kind::Memory => return Err(wrong(at, "it has the ranges of memory again")),
            // The ranges of memory were the first.
            Kind::Header if self.frames != 2 => {
                return Err(wrong(at, "it has the machine's header, which comes second"));
            }
            Kind::Header => {
                let header = MachineHeader::decode(self.body.as_slice());
                self.header = Some(header.map_err(|_| wrong(at, "it can't be decoded"))?);
            }
            Kind::Pages | Kind::Zeroes if memory_ended => {
                return Err(wrong(at, "it has memory after the machine's state"));
            }
            Kind::Disk | Kind::Blocks | Kind::Cleared if memory_ended => {
                return Err(wrong(at, "it has a disk after the machine's state"));
            }
            Kind::Boot if memory_ended => {
                return Err(wrong(at, "it has a boot file after the machine's state"));
            }
            Kind::Boot => self.boot(at)?,
            Kind::Pages => self.pages(at)?,
            Kind::Zeroes => self.zeroes(at)?,
            Kind::Part => self.part(at)?,
            Kind::Section => self.section(at)?,
            Kind::Disk => self.disk(at)?,
            Kind::Blocks => self.blocks(at)?,
            Kind::Cleared => self.cleared(at)?,
            Kind::End => {
                let before = self.frames.saturating_sub(1).to_le_bytes();
                if self.body != before {
                    return Err(wrong(at, "frames before it are missing"));
                }
                if self.named != self.disks.len() {
                    return Err(wrong(at, "a disk before it is missing"));
                }
                for disk in &mut *self.disks {
                    disk.flush()?;
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
        let outside = |_| wrong(at, "its pages are outside of memory");
        memory::read(self.memory, address, length, &mut self.pages).map_err(outside)?;
        if self.pages.chunks(PAGE_BYTES).all(memory::is_zero) {
            // A write would allocate pages that the guest never touched, or gave back.
            return Ok(());
        }
        self.pages.fill(0);
        let written = self.memory.write_slice(&self.pages, GuestAddress(address));
        written.map_err(|_| wrong(at, "its pages are outside of memory"))
    }

    fn disk(&mut self, at: u64) -> Result<(), SnapshotError> {
        let (number, rest) = number_of(&self.body).ok_or_else(|| wrong(at, "it has no number"))?;
        let (size, name) = offset_of(rest).ok_or_else(|| wrong(at, "it has no size"))?;
        let disk = self.disks.get(self.named).filter(|_| number == self.named);
        let disk = disk.ok_or_else(|| wrong(at, "it has a disk that does not come along"))?;
        if disk.name.as_bytes() != name {
            return Err(wrong(at, "it has another disk than was expected"));
        }
        let own = disk.content.capacity();
        if size != own {
            return Err(wrong(
                at,
                &format!("disk {} has {size} bytes instead of {own}", disk.name),
            ));
        }
        self.named = self.named.saturating_add(1);
        Ok(())
    }

    fn blocks(&mut self, at: u64) -> Result<(), SnapshotError> {
        let (number, rest) = number_of(&self.body).ok_or_else(|| wrong(at, "it has no number"))?;
        let (offset, data) = offset_of(rest).ok_or_else(|| wrong(at, "it has no offset"))?;
        let disk = part_of(self.disks, self.named, number, (offset, data.len() as u64));
        let disk = disk.map_err(|why| wrong(at, why))?;
        let written = disk.content.write(offset, data);
        written.map_err(|error| SnapshotError::disk("writing", &disk.name, error))?;
        disk.unflushed = disk.unflushed.saturating_add(data.len() as u64);
        match disk.unflushed >= FLUSH {
            true => disk.flush(),
            false => Ok(()),
        }
    }

    fn cleared(&mut self, at: u64) -> Result<(), SnapshotError> {
        let (number, rest) = number_of(&self.body).ok_or_else(|| wrong(at, "it has no number"))?;
        let (offset, rest) = offset_of(rest).ok_or_else(|| wrong(at, "it has no offset"))?;
        let length = match offset_of(rest) {
            Some((length, [])) => length,
            _ => return Err(wrong(at, "it has no length")),
        };
        let disk = part_of(self.disks, self.named, number, (offset, length));
        let disk = disk.map_err(|why| wrong(at, why))?;
        let cleared = disk.content.clear(offset, length);
        cleared.map_err(|error| SnapshotError::disk("writing", &disk.name, error))
    }

    fn boot(&mut self, at: u64) -> Result<(), SnapshotError> {
        let boot = self.boot.as_mut();
        let boot = boot.ok_or_else(|| wrong(at, "it has a boot file, and this side has its own"))?;
        boot.take(&self.body).map_err(|refused| match refused {
            Refused::Frame(why) => wrong(at, why),
            Refused::Write(error) => SnapshotError::disk("writing", "of the boot files", error),
        })
    }

    /// Takes more of a section.
    fn part(&mut self, at: u64) -> Result<(), SnapshotError> {
        self.sections_length = self.sections_length.saturating_add(self.body.len() as u64);
        let count = u32::try_from(self.sections.len()).unwrap_or(u32::MAX);
        if count >= MAX_SECTIONS || self.sections_length > MAX_SECTIONS_LENGTH {
            return Err(wrong(at, "there are more sections than a machine has"));
        }
        if self.body.is_empty() {
            return Err(wrong(at, "it has no part of a section"));
        }
        let length = self.parts.len().saturating_add(self.body.len());
        if length as u64 > MAX_SECTION.into() {
            return Err(wrong(at, "its section is longer than any"));
        }
        self.parts.extend_from_slice(&self.body);
        Ok(())
    }

    fn section(&mut self, at: u64) -> Result<(), SnapshotError> {
        self.part(at)?;
        let message = std::mem::take(&mut self.parts);
        let section = Section::decode(message.as_slice()).map_err(|_| wrong(at, "it can't be decoded"))?;
        self.sections.push(section);
        Ok(())
    }
}

fn number_of(body: &[u8]) -> Option<(usize, &[u8])> {
    let (number, rest) = body.split_first_chunk()?;
    Some((usize::try_from(u32::from_le_bytes(*number)).ok()?, rest))
}

fn offset_of(body: &[u8]) -> Option<(u64, &[u8])> {
    let (offset, rest) = body.split_first_chunk()?;
    Some((u64::from_le_bytes(*offset), rest))
}

/// The disk, one of the first `named`, of which a frame has a part.
fn part_of(
    disks: &mut [ReceivedDisk],
    named: usize,
    number: usize,
    (offset, length): (u64, u64),
) -> Result<&mut ReceivedDisk, &'static str> {
    let disk = disks.get_mut(number).filter(|_| number < named);
    let disk = disk.ok_or("it has a part of no disk")?;
    if ![offset, length].iter().all(|it| it.is_multiple_of(SECTOR)) || length == 0 {
        return Err("it has no whole sectors");
    }
    if length > MAX_BLOCKS {
        return Err("it has more of a disk than any frame");
    }
    match offset.checked_add(length) {
        Some(end) if end <= disk.content.capacity() => Ok(disk),
        _ => Err("it goes beyond the end of the disk"),
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

/// Error for a failed read of the stream.
fn ended(at: u64, error: io::Error) -> SnapshotError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => wrong(at, "it ends there"),
        _ => SnapshotError::reading(error),
    }
}

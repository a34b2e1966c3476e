//! Storage of events beyond the life of the daemon: two files. The daemon appends to the newer one.
//!
//! A file is a sequence of frames: length (4 bytes, little-endian), CRC-32C of the rest, a
//! [`Record`]. The first frame is a mark with the epoch of the history. An incomplete or damaged
//! frame ends the read of a file; an incomplete end is removed. When the newer file has the maximum
//! number of events, it becomes the older one and replaces the events of that file.
//!
//! The daemon writes a frame with one write and does not force it to the disk. A crash of the
//! daemon loses nothing. A crash of the node loses the frames that the kernel had not written back.
//! When the boot differs from that of the last mark and there is no mark of an orderly end, the
//! daemon leaves a gap in the numbers. A cursor that names a lost event is then recognizably
//! invalid.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use prost::Message;
use vmmd_api::v1;

use super::history::KEPT;

/// Longest frame's content that is believed, in bytes; messages are a sentence.
const LONGEST: usize = 64 << 10;
/// Longer than any burst that the kernel may have lost.
const GAP: u64 = 1 << 32;

#[derive(Clone, PartialEq, Message)]
struct Record {
    #[prost(uint64, tag = "1")]
    sequence: u64,
    #[prost(message, optional, tag = "2")]
    event: Option<v1::Event>,
    #[prost(message, optional, tag = "3")]
    mark: Option<Mark>,
}

/// Describes the writer of the records that follow. The number in its record is that of the
/// previous event.
#[derive(Clone, PartialEq, Message)]
struct Mark {
    #[prost(fixed64, tag = "1")]
    epoch: u64,
    #[prost(string, tag = "2")]
    boot_id: String,
    /// A daemon ended as it should: all before this is on the disk.
    #[prost(bool, tag = "3")]
    closed: bool,
}

/// The files.
#[derive(Debug)]
pub struct Journal {
    newer: PathBuf,
    older: PathBuf,
    file: File,
    /// In the newer file.
    events: usize,
    epoch: u64,
    boot_id: String,
    /// The number of the last event.
    last: u64,
}

/// A number that no other history has.
pub fn new_epoch() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().0
}

/// Content of one file.
#[derive(Default)]
struct Contents {
    events: Vec<(u64, v1::Event)>,
    marks: Vec<(u64, Mark)>,
    /// Where the last whole frame ends.
    length: u64,
    /// The last frame is a mark of an orderly end.
    closed: bool,
}

impl Journal {
    /// Opens or creates the files in `dir`. Returns the events in order. The last entry has no
    /// event: its number is the one from which to continue.
    #[allow(clippy::type_complexity)]
    pub fn open(dir: &Path, boot_id: &str) -> io::Result<(Self, Vec<(u64, Option<v1::Event>)>)> {
        let (newer, older) = (dir.join("events.log"), dir.join("events.log.1"));
        let now = read(&newer)?;
        let before = read(&older)?;
        // After a crash between renaming the newer file and making the next there is only the older.
        let last_mark = now.marks.last().or(before.marks.last());
        let epoch = last_mark.map_or_else(new_epoch, |(_, mark)| mark.epoch);
        let newest_event = |contents: &Contents| contents.events.last().map(|(sequence, _)| *sequence);
        let newest = newest_event(&now).or(newest_event(&before)).unwrap_or(0);
        let floor = now
            .marks
            .iter()
            .chain(&before.marks)
            .map(|(sequence, _)| *sequence)
            .max();
        let mut last = newest.max(floor.unwrap_or(0));
        let whole = if now.marks.is_empty() {
            before.closed
        } else {
            now.closed
        };
        let same_boot = last_mark.is_none_or(|(_, mark)| mark.boot_id == boot_id);
        if !whole && !same_boot {
            last = last.saturating_add(GAP);
        }
        let same = |contents: &Contents| {
            contents
                .marks
                .first()
                .is_some_and(|(_, mark)| mark.epoch == epoch)
        };
        let events = [&before, &now].into_iter().filter(|contents| same(contents));
        let loaded = in_order(events.flat_map(|contents| contents.events.iter().cloned()));
        let file = append(&newer)?;
        file.set_len(now.length)?;
        let mut journal = Self {
            newer,
            older,
            file,
            events: now.events.len(),
            epoch,
            boot_id: boot_id.to_owned(),
            last,
        };
        journal.mark(false)?;
        let mut loaded: Vec<_> = loaded
            .into_iter()
            .map(|(sequence, event)| (sequence, Some(event)))
            .collect();
        loaded.push((last, None));
        Ok((journal, loaded))
    }

    /// Epoch of the history.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Adds an event, whose number is greater than all before.
    pub fn append(&mut self, sequence: u64, event: &v1::Event) -> io::Result<()> {
        if self.events >= KEPT {
            fs::rename(&self.newer, &self.older)?;
            self.file = append(&self.newer)?;
            self.events = 0;
            self.mark(false)?;
        }
        self.write(&Record {
            sequence,
            event: Some(event.clone()),
            mark: None,
        })?;
        self.events += 1;
        self.last = sequence;
        Ok(())
    }

    /// Notes an orderly end, and waits until all is on the disk.
    pub fn close(&mut self) -> io::Result<()> {
        self.mark(true)?;
        self.file.sync_data()
    }

    fn mark(&mut self, closed: bool) -> io::Result<()> {
        let mark = Mark {
            epoch: self.epoch,
            boot_id: self.boot_id.clone(),
            closed,
        };
        self.write(&Record {
            sequence: self.last,
            event: None,
            mark: Some(mark),
        })
    }

    fn write(&mut self, record: &Record) -> io::Result<()> {
        let content = record.encode_to_vec();
        let length = u32::try_from(content.len())
            .ok()
            .filter(|_| content.len() <= LONGEST);
        let length = length.ok_or(io::ErrorKind::InvalidInput)?;
        let mut frame = Vec::with_capacity(content.len() + 8);
        frame.extend_from_slice(&length.to_le_bytes());
        frame.extend_from_slice(&crc32c::crc32c(&content).to_le_bytes());
        frame.extend_from_slice(&content);
        self.file.write_all(&frame)
    }
}

fn append(path: &Path) -> io::Result<File> {
    File::options().append(true).create(true).mode(0o600).open(path)
}

/// Keeps the events with increasing numbers up to the newest one, and drops all events before a
/// number that does not increase.
fn in_order(events: impl Iterator<Item = (u64, v1::Event)>) -> Vec<(u64, v1::Event)> {
    let mut kept: Vec<(u64, v1::Event)> = Vec::new();
    for (sequence, event) in events {
        if kept.last().is_some_and(|(last, _)| *last >= sequence) {
            kept.clear();
        }
        kept.push((sequence, event));
    }
    kept
}

fn read(path: &Path) -> io::Result<Contents> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Contents::default()),
        bytes => bytes?,
    };
    let mut contents = Contents::default();
    let mut rest = bytes.as_slice();
    while let Some((record, after)) = frame(rest) {
        contents.length += (rest.len() - after.len()) as u64;
        rest = after;
        contents.closed = record.mark.as_ref().is_some_and(|mark| mark.closed);
        contents
            .marks
            .extend(record.mark.map(|mark| (record.sequence, mark)));
        contents
            .events
            .extend(record.event.map(|event| (record.sequence, event)));
    }
    if !rest.is_empty() {
        tracing::warn!(
            bytes = rest.len(),
            "the end of a file of events is damaged and left out"
        );
    }
    Ok(contents)
}

/// The first frame, if it is complete, and the bytes after it.
fn frame(bytes: &[u8]) -> Option<(Record, &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    let (sum, rest) = rest.split_first_chunk()?;
    let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
    let (content, rest) = rest.split_at_checked(length)?;
    if length > LONGEST || crc32c::crc32c(content) != u32::from_le_bytes(*sum) {
        return None;
    }
    Some((Record::decode(content).ok()?, rest))
}

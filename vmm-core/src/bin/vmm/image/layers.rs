//! The disk in an OCI image: the one regular file below `disk/` in its layers, as a containerDisk of KubeVirt has it.
//!
//! Anybody may have made a layer, an archive of tar (OCI Image Layer Filesystem Changeset; pax: POSIX.1-2024, "pax Interchange Format").
//! Nothing is ever made under a name that stands in one. Names are only looked at to find the disk, and an archive that has anything but
//! files and directories with plain names is refused. The library reads the fields of headers; the walk from one to the next is here, since
//! the library's own has no bound on what it reads into memory.

use std::{
    fs::File,
    io::{self, Read},
};

use anyhow::{Context as _, Result, bail};
use tar::{EntryType, Header};

use super::source::{Compression, Part};

/// Length of a header, and what the content of an entry is filled up to, in bytes.
const BLOCK: usize = 512;
/// Most entries of all layers together.
const MOST_ENTRIES: u32 = 100_000;
/// Longest extended header or long name that is read, in bytes.
const LONGEST_EXTENSION: u64 = 1 << 20;
/// What the layers may have beside the disk, unpacked, in bytes.
const BESIDE: u64 = 1 << 30;
/// The folder that the disk is in.
const FOLDER: &str = "disk";
/// What begins the name of a file that says that another one is gone (OCI Image Layer Filesystem Changeset, "Whiteouts").
const WHITEOUT: &str = ".wh.";

/// The disk in an archive.
#[derive(Debug)]
pub struct Disk<'a> {
    /// Its name there, for messages.
    pub name: &'a str,
    /// Its length in bytes.
    pub size: u64,
    /// How its layer is compressed.
    pub compression: Option<Compression>,
}

/// Is given the disk and its content, which has an error where the archive ends before it does.
pub type Take<'a> = dyn FnMut(&Disk<'_>, &mut dyn Read) -> Result<()> + 'a;

/// Layers that lie one after the other in a file.
#[derive(Debug)]
pub struct Layers<'a> {
    file: &'a File,
    lengths: &'a [u64],
    /// Bytes that may still be unpacked.
    left: u64,
    /// Entries that may still come.
    entries: u32,
    /// Name of the disk, when it was found.
    disk: Option<String>,
}

impl<'a> Layers<'a> {
    /// Layers of which the disk has `max_size` bytes at most.
    pub fn new(file: &'a File, lengths: &'a [u64], max_size: u64) -> Self {
        Self {
            file,
            lengths,
            left: max_size.saturating_add(BESIDE),
            entries: MOST_ENTRIES,
            disk: None,
        }
    }

    /// Goes through all of them; `take` is given the disk once at most.
    ///
    /// # Errors
    ///
    /// One of them is damaged or has what none may have, or there are several files that may be the disk.
    pub fn walk(&mut self, take: &mut Take<'_>) -> Result<()> {
        let mut at = 0_u64;
        for (number, length) in self.lengths.iter().enumerate() {
            let part = Part::of(self.file, at, *length)?;
            at = at.saturating_add(*length);
            let compression = Compression::of(&part.head()?);
            let walked = match compression {
                Some(compression) => {
                    self.archive(&mut part.decompressed(compression), Some(compression), take)
                }
                None => self.archive(&mut { part }, None, take),
            };
            walked.with_context(|| format!("layer {} of {}", number + 1, self.lengths.len()))?;
        }
        Ok(())
    }

    fn archive(
        &mut self,
        content: &mut dyn Read,
        compression: Option<Compression>,
        take: &mut Take<'_>,
    ) -> Result<()> {
        let mut extension = Extension::default();
        while let Some(header) = next_header(content)? {
            let Some(entries) = self.entries.checked_sub(1) else {
                bail!("there are more than {MOST_ENTRIES} entries");
            };
            self.entries = entries;
            let kind = header.entry_type();
            let extends = matches!(kind, EntryType::XHeader | EntryType::GNULongName);
            // What extends an entry has no extension itself.
            let Extension { name, size } = match extends {
                true => Extension::default(),
                false => std::mem::take(&mut extension),
            };
            let given = name.unwrap_or_else(|| header.path_bytes().into_owned());
            let name = shown(&given);
            let size = match size {
                Some(size) => size,
                None => header
                    .entry_size()
                    .with_context(|| format!("the length of {name}"))?,
            };
            // Refused before it is read: what was compressed may have any length.
            let whole = size
                .checked_next_multiple_of(BLOCK as u64)
                .and_then(|size| size.checked_add(BLOCK as u64));
            match whole.and_then(|whole| self.left.checked_sub(whole)) {
                Some(left) => self.left = left,
                None => {
                    bail!("{name} has {size} bytes: with it the layers are longer than they may be unpacked")
                }
            }
            let mut entry = Entry {
                content: &mut *content,
                left: size,
            };
            if extends {
                if size > LONGEST_EXTENSION {
                    bail!("a header has {size} bytes, more than the {LONGEST_EXTENSION} that it may have");
                }
                let mut text = Vec::new();
                entry.read_to_end(&mut text).context("read an extended header")?;
                match kind {
                    EntryType::XHeader => extension.read(&text)?,
                    // The name ends with a zero.
                    _ => {
                        extension.name =
                            Some(text.split(|byte| *byte == 0).next().unwrap_or_default().to_vec());
                    }
                }
            } else {
                let disk = Disk {
                    name: &name,
                    size,
                    compression,
                };
                self.entry(kind, &given, &disk, &mut entry, take)?;
            }
            // What is left of the content, and of its last block.
            entry
                .skip()
                .with_context(|| format!("the archive ends in the middle of {name}"))?;
            let filling = size.next_multiple_of(BLOCK as u64) - size;
            Entry {
                content: &mut *content,
                left: filling,
            }
            .skip()
            .with_context(|| format!("the archive ends in the middle of {name}"))?;
        }
        Ok(())
    }

    /// An entry that `disk` describes if it is one.
    fn entry(
        &mut self,
        kind: EntryType,
        given: &[u8],
        disk: &Disk<'_>,
        content: &mut Entry<'_>,
        take: &mut Take<'_>,
    ) -> Result<()> {
        let name = disk.name;
        let what = match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::Directory => None,
            EntryType::Link | EntryType::GNULongLink => Some("a link"),
            EntryType::Symlink => Some("a symbolic link"),
            EntryType::Char | EntryType::Block => Some("a device node"),
            EntryType::Fifo => Some("a FIFO"),
            EntryType::GNUSparse => Some("a sparse file"),
            EntryType::XGlobalHeader => Some("a header for all entries"),
            _ => Some("of an unknown type"),
        };
        if let Some(what) = what {
            bail!("{name} is {what}: only files and directories are taken");
        }
        let parts = parts(given).with_context(|| format!("{name} is refused"))?;
        if kind == EntryType::Directory || given.ends_with(b"/") {
            return Ok(());
        }
        if parts.len() < 2 || parts.first().is_none_or(|first| *first != FOLDER) {
            return Ok(());
        }
        if let Some(other) = &self.disk {
            bail!("{name} is a second file below \"{FOLDER}/\", beside {other}: one is the disk");
        }
        self.disk = Some(name.to_owned());
        take(disk, content)
    }
}

/// What comes before an entry and is about it.
#[derive(Default)]
struct Extension {
    name: Option<Vec<u8>>,
    size: Option<u64>,
}

impl Extension {
    /// Reads records "LENGTH KEY=VALUE\n" of an extended header.
    fn read(&mut self, mut text: &[u8]) -> Result<()> {
        const DAMAGED: &str = "an extended header is damaged";
        while !text.is_empty() {
            let digits = text
                .iter()
                .position(|byte| *byte == b' ')
                .filter(|digits| *digits < 20);
            let digits = digits.and_then(|digits| text.get(..digits)).context(DAMAGED)?;
            let length: usize = std::str::from_utf8(digits)?.parse().context(DAMAGED)?;
            let record = text.get(digits.len() + 1..length).context(DAMAGED)?;
            text = text.get(length..).context(DAMAGED)?;
            let record = record.strip_suffix(b"\n").context(DAMAGED)?;
            let equals = record.iter().position(|byte| *byte == b'=').context(DAMAGED)?;
            let (key, value) = record.split_at(equals);
            let value = value.get(1..).unwrap_or_default();
            match key {
                b"path" => self.name = Some(value.to_vec()),
                b"size" => self.size = Some(std::str::from_utf8(value)?.parse().context(DAMAGED)?),
                b"linkpath" => bail!("{} is a link: only files and directories are taken", shown(value)),
                key if key.starts_with(b"GNU.sparse") => {
                    bail!("an entry is a sparse file: make the layer without them");
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The header of the next entry; nothing at the end of the archive.
fn next_header(content: &mut dyn Read) -> Result<Option<Header>> {
    let mut zeroes = 0;
    loop {
        let mut header = Header::new_old();
        let bytes = header.as_mut_bytes();
        match read_block(content, bytes).context("read the archive")? {
            0 => return Ok(None),
            BLOCK => {}
            _ => bail!("the archive ends in the middle of a header"),
        }
        if bytes.iter().all(|byte| *byte == 0) {
            zeroes += 1;
            // POSIX.1-2024, pax: two blocks of zeroes are the end.
            if zeroes == 2 {
                return Ok(None);
            }
            continue;
        }
        if zeroes > 0 || !is_whole(&header) {
            bail!("it is no archive of tar, or damaged");
        }
        return Ok(Some(header));
    }
}

/// Whether the checksum of a header is right: the sum of its bytes, with its own field as blanks.
fn is_whole(header: &Header) -> bool {
    const FIELD: std::ops::Range<usize> = 148..156;
    let bytes = header.as_bytes().iter().enumerate();
    let sum: u32 = bytes
        .map(|(at, byte)| match FIELD.contains(&at) {
            true => u32::from(b' '),
            false => u32::from(*byte),
        })
        .sum();
    header.cksum().is_ok_and(|wanted| wanted == sum)
}

/// Fills a block as far as there is something; returns how far.
fn read_block(content: &mut dyn Read, block: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = block.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match content.read(rest) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// The parts of a name.
///
/// # Errors
///
/// What no name may have.
fn parts(name: &[u8]) -> Result<Vec<&str>> {
    let name = std::str::from_utf8(name).context("its name is not in UTF-8")?;
    if name.starts_with('/') {
        bail!("its name is absolute");
    }
    if name.chars().any(char::is_control) {
        bail!("its name has control characters");
    }
    let parts: Vec<_> = name
        .split('/')
        .filter(|part| !matches!(*part, "" | "."))
        .collect();
    if parts.contains(&"..") {
        bail!("its name leads out with \"..\"");
    }
    if parts.iter().any(|part| part.starts_with(WHITEOUT)) {
        bail!("it is a whiteout, and a disk is not taken away");
    }
    Ok(parts)
}

/// A name for messages.
fn shown(name: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(name).chars().take(100).collect();
    format!("\"{}\"", text.escape_debug())
}

/// The content of an entry, which is there to its end or an error.
struct Entry<'a> {
    content: &'a mut dyn Read,
    left: u64,
}

impl Entry<'_> {
    fn skip(&mut self) -> io::Result<()> {
        io::copy(self, &mut io::sink()).map(drop)
    }
}

impl Read for Entry<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let buffer = buffer.get_mut(..length).unwrap_or_default();
        if buffer.is_empty() {
            return Ok(0);
        }
        match self.content.read(buffer)? {
            0 => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the archive ends before it does",
            )),
            count => {
                self.left -= count as u64;
                Ok(count)
            }
        }
    }
}

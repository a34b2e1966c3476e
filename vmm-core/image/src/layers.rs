//! The disk in an archive of tar: in the layers of an OCI image the one regular file below `disk/`, as a containerDisk of KubeVirt has it; in
//! an archive that was given as an image, as an OVA file is, the one file that is no text.
//!
//! Anybody may have made an archive (OCI Image Layer Filesystem Changeset; pax: POSIX.1-2024, "pax Interchange Format"; GNU tar, "Basic Tar
//! Format"). The converter creates no file under a name from an archive: names only find the disk. So entries elsewhere are skipped, of any
//! type. The library reads the fields of headers. The walk over the entries is here, since the library's own walk reads headers of any length
//! into memory.

use std::{
    fs::File,
    io::{self, Read},
};

use anyhow::{Context as _, Result, bail};
use tar::{EntryType, Header};

use super::{
    compression::Compression,
    source::{HEAD, Part, is_tar, text},
    sparse::Sparse,
};

/// Length of a header, and unit that the content of an entry is padded to, in bytes.
const BLOCK: usize = 512;
/// Most entries of all layers together.
const MOST_ENTRIES: u32 = 100_000;
/// Longest extended header or long name that is read, in bytes.
const LONGEST_EXTENSION: u64 = 1 << 20;
/// Limit for the unpacked content of the layers other than the disk, in bytes.
const BESIDE: u64 = 1 << 30;
/// The folder that the disk is in.
const FOLDER: &str = "disk";
/// A file with this prefix removes the file with the rest of the name; the second name removes all files of its folder (OCI Image Layer
/// Filesystem Changeset, "Whiteouts").
const WHITEOUT: &str = ".wh.";
const OPAQUE: &str = ".wh..wh..opq";

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

/// Archives that are read one after the other.
#[derive(Debug)]
pub struct Archives {
    /// Whether they are layers of an OCI image.
    layers: bool,
    /// Bytes that may still be unpacked.
    left: u64,
    /// Entries that may still come.
    entries: u32,
    /// Name of the disk, when it was found.
    disk: Option<String>,
}

/// Walks through the layers of an OCI image, which lie one after the other in a file; the disk has `max_size` bytes at most. `take` gets
/// the disk, and again when a later layer replaces it. Returns whether there is one in the end.
///
/// # Errors
///
/// One of them is damaged or has what none may have, or there are several files that may be the disk.
pub fn walk(file: &File, lengths: &[u64], max_size: u64, take: &mut Take<'_>) -> Result<bool> {
    let mut archives = Archives::new(true, max_size);
    let mut at = 0_u64;
    for (number, length) in lengths.iter().enumerate() {
        let part = Part::of(file, at, *length)?;
        at = at.saturating_add(*length);
        let compression = Compression::of(&part.head()?);
        let walked = match compression {
            Some(kind) => archives.archive(&mut kind.decompressed(part), compression, take),
            None => archives.archive(&mut { part }, None, take),
        };
        walked.with_context(|| format!("layer {} of {}", number + 1, lengths.len()))?;
    }
    Ok(archives.disk.is_some())
}

/// Walks through one archive that was given as an image.
///
/// # Errors
///
/// It is damaged, or has no disk or several.
pub fn walk_one(content: &mut dyn Read, max_size: u64, take: &mut Take<'_>) -> Result<()> {
    let mut archives = Archives::new(false, max_size);
    archives.archive(content, None, take)?;
    match archives.disk {
        Some(_) => Ok(()),
        None => bail!("the archive has no file that can be a disk: unpack it, and import the disk"),
    }
}

impl Archives {
    fn new(layers: bool, max_size: u64) -> Self {
        Self {
            layers,
            left: max_size.saturating_add(BESIDE),
            entries: MOST_ENTRIES,
            disk: None,
        }
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
            let about = matches!(
                kind,
                EntryType::XHeader
                    | EntryType::XGlobalHeader
                    | EntryType::GNULongName
                    | EntryType::GNULongLink
            );
            // A header about the next entry has no extension, and keeps the extensions before it.
            let Extension { name, size, sparse } = match about {
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
            self.count(&name, size)?;
            let holes = match kind {
                EntryType::GNUSparse => {
                    Some(Sparse::read(&header, content, size).with_context(|| name.clone())?)
                }
                _ => None,
            };
            let mut entry = Entry {
                content: &mut *content,
                left: size,
            };
            if about {
                extension.take(kind, size, &mut entry)?;
            } else {
                let length = holes.as_ref().map_or(size, |holes| holes.length);
                let disk = Disk {
                    name: &name,
                    size: length,
                    compression,
                };
                let kind = match (sparse, kind.is_file()) {
                    (true, true) => EntryType::GNUSparse,
                    (_, _) if holes.is_some() => EntryType::Regular,
                    _ => kind,
                };
                match holes {
                    Some(holes) => self.entry(kind, &given, &disk, &mut holes.over(&mut entry), take)?,
                    None => self.entry(kind, &given, &disk, &mut entry, take)?,
                }
            }
            // The rest of the content, and the padding of its last block.
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

    /// Refuses a long entry before it is read: compressed content may have any length.
    fn count(&mut self, name: &str, size: u64) -> Result<()> {
        let whole = size
            .checked_next_multiple_of(BLOCK as u64)
            .and_then(|size| size.checked_add(BLOCK as u64));
        match whole.and_then(|whole| self.left.checked_sub(whole)) {
            Some(left) => self.left = left,
            None => {
                bail!("{name} has {size} bytes: with it the archive is longer than it may be unpacked")
            }
        }
        Ok(())
    }

    /// An entry that `disk` describes if it is one.
    fn entry(
        &mut self,
        kind: EntryType,
        given: &[u8],
        disk: &Disk<'_>,
        content: &mut dyn Read,
        take: &mut Take<'_>,
    ) -> Result<()> {
        let name = disk.name;
        if !self.layers {
            return self.other(kind, disk, content, take);
        }
        let parts = parts(given).with_context(|| format!("{name} is refused"))?;
        let Some([folders @ .., last]) = parts.as_deref() else {
            return Ok(());
        };
        if let Some(gone) = last.strip_prefix(WHITEOUT) {
            let gone = (*last != OPAQUE).then_some(gone);
            let gone: Vec<_> = folders.iter().copied().chain(gone).collect();
            self.remove(&gone.join("/"));
            return Ok(());
        }
        if folders.first() != Some(&FOLDER) {
            return Ok(());
        }
        let what = match kind {
            EntryType::Regular | EntryType::Continuous => None,
            EntryType::Directory => return Ok(()),
            EntryType::Link => Some("a link"),
            EntryType::Symlink => Some("a symbolic link"),
            EntryType::Char | EntryType::Block => Some("a device node"),
            EntryType::Fifo => Some("a FIFO"),
            EntryType::GNUSparse => Some("a sparse file in the format of pax"),
            _ => Some("of an unknown type"),
        };
        if let Some(what) = what {
            bail!("{name} is {what}: only files and directories are taken below \"{FOLDER}/\"");
        }
        if given.ends_with(b"/") {
            return Ok(());
        }
        let path = format!("{}/{last}", folders.join("/"));
        if let Some(other) = self.disk.as_ref().filter(|other| **other != path) {
            bail!("{name} is a second file below \"{FOLDER}/\", beside \"{other}\": one is the disk");
        }
        self.disk = Some(path);
        take(disk, content)
    }

    /// A later layer has removed the file or folder at a path, or everything when the path is empty.
    fn remove(&mut self, path: &str) {
        let stays = |disk: &String| match disk.strip_prefix(path) {
            Some(rest) => !(path.is_empty() || rest.is_empty() || rest.starts_with('/')),
            None => true,
        };
        self.disk = self.disk.take().filter(stays);
    }

    /// An entry of an archive that was given as an image: descriptions, checksums and certificates are text.
    fn other(
        &mut self,
        kind: EntryType,
        disk: &Disk<'_>,
        content: &mut dyn Read,
        take: &mut Take<'_>,
    ) -> Result<()> {
        let name = disk.name;
        let is_file = matches!(
            kind,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse
        );
        if !is_file || disk.size == 0 {
            return Ok(());
        }
        let mut head = Vec::new();
        (&mut *content).take(HEAD as u64).read_to_end(&mut head)?;
        if text(&head).is_some() || name.to_lowercase().ends_with(".nvram\"") {
            return Ok(());
        }
        if kind == EntryType::GNUSparse {
            bail!("{name} is a sparse file in the format of pax: unpack the archive, and import the disk");
        }
        if let Some(other) = &self.disk {
            bail!(
                "the archive has several files that may be a disk, {other} and {name}: unpack it, and import each disk"
            );
        }
        self.disk = Some(name.to_owned());
        take(disk, &mut head.as_slice().chain(content))
    }
}

/// Extended headers that precede an entry.
#[derive(Default)]
struct Extension {
    name: Option<Vec<u8>>,
    size: Option<u64>,
    /// It has holes, in one of the formats of pax.
    sparse: bool,
}

impl Extension {
    /// Reads an entry that is about the next one.
    fn take(&mut self, kind: EntryType, size: u64, entry: &mut Entry<'_>) -> Result<()> {
        if kind == EntryType::GNULongLink {
            return Ok(());
        }
        if size > LONGEST_EXTENSION {
            bail!("a header has {size} bytes, more than the {LONGEST_EXTENSION} that it may have");
        }
        let mut text = Vec::new();
        entry.read_to_end(&mut text).context("read an extended header")?;
        match kind {
            EntryType::XHeader => self.read(&text)?,
            EntryType::XGlobalHeader => {
                let mut global = Self::default();
                global.read(&text)?;
                if global.name.is_some() || global.size.is_some() || global.sparse {
                    bail!("a header for all entries has a name or a length");
                }
            }
            // The name ends with a zero.
            _ => self.name = Some(text.split(|byte| *byte == 0).next().unwrap_or_default().to_vec()),
        }
        Ok(())
    }

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
                key if key.starts_with(b"GNU.sparse") => self.sparse = true,
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
        if zeroes > 0 || !is_tar(header.as_bytes()) {
            bail!("it is no archive of tar, or damaged");
        }
        return Ok(Some(header));
    }
}

/// Fills a block as far as there is something; returns how far.
pub fn read_block(content: &mut dyn Read, block: &mut [u8]) -> io::Result<usize> {
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

/// The parts of a name; nothing when the name is not in UTF-8, as no name below the folder is.
///
/// # Errors
///
/// The name is absolute or leads out of the archive, or it is below the folder and has control characters.
fn parts(name: &[u8]) -> Result<Option<Vec<&str>>> {
    if name.starts_with(b"/") {
        bail!("its name is absolute");
    }
    if name.split(|byte| *byte == b'/').any(|part| part == b"..") {
        bail!("its name leads out with \"..\"");
    }
    // Base images have names in any encoding.
    let Ok(name) = std::str::from_utf8(name) else {
        return Ok(None);
    };
    let parts = name.split('/').filter(|part| !matches!(*part, "" | "."));
    let parts: Vec<_> = parts.collect();
    if parts.first() == Some(&FOLDER) && name.chars().any(char::is_control) {
        bail!("its name has control characters");
    }
    Ok(Some(parts))
}

/// A name for messages.
fn shown(name: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(name).chars().take(100).collect();
    format!("\"{}\"", text.escape_debug())
}

/// The content of an entry. A read reports an error if the archive ends early.
pub struct Entry<'a> {
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

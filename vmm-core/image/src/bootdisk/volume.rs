//! The file systems of a disk, read by libraries: nothing of a guest is ever mounted.

use std::{
    fmt,
    io::{self, Write},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
};

use fatfs::{FileSystem, FsOptions};

use super::{
    btrfs, ext4,
    fat::Fat,
    files::{Files, Kind, follow},
    medium::Window,
    partitions::{Partition, partitions},
    xfs::Xfs,
};

/// A file system that can be read.
pub struct Volume {
    /// Number of its partition; 0 when it is on the disk itself.
    pub number: u32,
    /// What `UUID` is.
    pub uuid: String,
    /// What `LABEL` is.
    pub label: String,
    /// Name of the Btrfs subvolume; `None` for the default subvolume and other file systems.
    pub subvolume: Option<String>,
    files: Box<dyn Files>,
}

impl fmt::Debug for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file system {} on partition {}", self.uuid, self.number)
    }
}

/// File systems of a disk.
#[derive(Debug, Default)]
pub struct Volumes {
    /// File systems that are readable.
    pub readable: Vec<Volume>,
    /// Descriptions of unreadable content: "partition 2 has LVM".
    pub others: Vec<String>,
}

/// Looks at all partitions of a disk, or at the file system that it has itself.
pub fn volumes(disk: &Window) -> Volumes {
    let mut found = Volumes::default();
    let mut parts = partitions(disk);
    if parts.is_empty() {
        parts.push(Partition {
            number: 0,
            window: disk.clone(),
        });
    }
    for part in parts {
        let place = match part.number {
            0 => "the disk".to_owned(),
            number => format!("partition {number}"),
        };
        // A library may panic on unexpected content.
        let opened = catch_unwind(AssertUnwindSafe(|| open(&part)));
        match opened.unwrap_or_else(|_| Err("a damaged file system".to_owned())) {
            Ok(volumes) => found.readable.extend(volumes),
            Err(what) => found.others.push(format!("{place} has {what}")),
        }
    }
    found
}

/// Opens the file system on a partition, with each subvolume as a volume; empty for unknown
/// content. The error describes unreadable content.
fn open(part: &Partition) -> Result<Vec<Volume>, String> {
    let window = &part.window;
    let has = |offset: u64, magic: &[u8]| {
        let mut bytes = vec![0; magic.len()];
        window.fill(&mut bytes, offset).is_ok() && bytes == magic
    };
    // Offsets of the magic numbers: LUKS2 4.1; LVM's label may be in any of the first four sectors.
    let sectors = [0, 512, 1024, 1536];
    if sectors.iter().any(|at| has(*at, b"LABELONE")) {
        return Err("LVM, which is not read".to_owned());
    }
    let others: [(u64, &[u8], &str); 3] = [
        (
            0,
            b"LUKS\xba\xbe",
            "an encrypted volume (LUKS), which is not read",
        ),
        (
            4096,
            &[0xfc, 0x4e, 0x2b, 0xa9],
            "a part of a RAID, which is not read",
        ),
        (0, b"hsqs", "squashfs, which is not read"),
    ];
    if let Some((_, _, what)) = others.iter().find(|(at, magic, _)| has(*at, magic)) {
        return Err((*what).to_owned());
    }
    let volume = |uuid: String, label: String, files: Box<dyn Files>| Volume {
        number: part.number,
        uuid,
        label,
        subvolume: None,
        files,
    };
    if has(0, b"XFSB") {
        let files =
            Xfs::open(window).map_err(|error| format!("an XFS file system that can't be read ({error})"))?;
        return Ok(vec![volume(files.uuid(), files.label(), Box::new(files))]);
    }
    if has(0x10040, b"_BHRfS_M") {
        let (uuid, label) = btrfs::names(window);
        let subvolumes = btrfs::open(window)
            .map_err(|error| format!("a Btrfs file system that can't be read ({error})"))?;
        let subvolumes = subvolumes.into_iter().map(|(subvolume, files)| Volume {
            subvolume,
            ..volume(uuid.clone(), label.clone(), Box::new(files))
        });
        return Ok(subvolumes.collect());
    }
    if has(0x438, &[0x53, 0xef]) {
        let files = ext4::open(window)
            .map_err(|error| format!("an ext4 file system that can't be read ({error})"))?;
        let label = files.label().to_str().unwrap_or_default().to_owned();
        return Ok(vec![volume(files.uuid().to_string(), label, Box::new(files))]);
    }
    if has(510, &[0x55, 0xaa]) && (has(54, b"FAT1") || has(82, b"FAT32")) {
        let files = FileSystem::new(window.clone(), FsOptions::new())
            .map_err(|error| format!("a FAT file system that can't be read ({error})"))?;
        let id = files.volume_id();
        let uuid = format!("{:04X}-{:04X}", id >> 16, id & 0xffff);
        return Ok(vec![volume(uuid, files.volume_label(), Box::new(Fat(files)))]);
    }
    Ok(Vec::new())
}

impl Volume {
    /// The text of a file of at most so many bytes; nothing when there is none, or when it is longer.
    pub fn text(&self, path: &str, most: u64) -> Option<String> {
        let mut bytes = Vec::new();
        self.copy(path, 0..u64::MAX, &mut bytes, most).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Some bytes of a file; nothing when it does not have them all.
    pub fn bytes(&self, path: &str, range: Range<u64>) -> Option<Vec<u8>> {
        let (mut bytes, length) = (Vec::new(), range.end.checked_sub(range.start)?);
        let copied = self.copy(path, range, &mut bytes, length).ok()?;
        (copied == length).then_some(bytes)
    }

    /// Whether there is a file.
    pub fn has(&self, path: &str) -> bool {
        self.find(path).is_some_and(|(_, kind)| kind == Kind::File)
    }

    fn find(&self, path: &str) -> Option<(String, Kind)> {
        self.look(|files| follow(files, path))
    }

    /// Asks the library, which may panic.
    fn look<T: Default>(&self, question: impl FnOnce(&dyn Files) -> T) -> T {
        catch_unwind(AssertUnwindSafe(|| question(self.files.as_ref()))).unwrap_or_default()
    }

    /// Sorted names in a folder; empty if the folder does not exist.
    pub fn names(&self, path: &str) -> Vec<String> {
        let Some((path, Kind::Folder)) = self.find(path) else {
            return Vec::new();
        };
        let mut names = self.look(|files| files.names(&path));
        names.retain(|name| name != "." && name != "..");
        names.sort();
        names
    }

    /// Copies the bytes of a file in `range`, and returns the number of copied bytes.
    ///
    /// # Errors
    ///
    /// The file does not exist, has more than `most` bytes in the range or fails to read, or `to`
    /// fails.
    pub fn copy(&self, path: &str, range: Range<u64>, to: &mut dyn Write, most: u64) -> io::Result<u64> {
        let path = match self.find(path) {
            Some((path, Kind::File)) => path,
            Some(_) => return Err(io::Error::other("it is no regular file")),
            None => return Err(io::ErrorKind::NotFound.into()),
        };
        let mut copied: u64 = 0;
        let mut pass_on = |piece: &[u8]| {
            copied = copied.saturating_add(piece.len() as u64);
            if copied > most {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            to.write_all(piece)
        };
        let done = catch_unwind(AssertUnwindSafe(|| self.files.copy(&path, range, &mut pass_on)));
        done.unwrap_or_else(|_| Err(io::Error::other("the file system is damaged")))?;
        Ok(copied)
    }
}

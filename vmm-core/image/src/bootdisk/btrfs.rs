//! Btrfs as the library reads it: the state of the last transaction. Like GRUB, the library ignores
//! the log of later syncs (`fsync`).
//!
//! Distributions' versions of GRUB differ in the root of the file system: upstream uses the top
//! level, openSUSE the default subvolume. This module therefore offers several volumes: the default
//! subvolume, which a mount without options shows, then the top level, then the subvolumes that
//! installers create for `/`.

use std::{cell::RefCell, io, ops::Range};

use lambutter::{BlockRead, Path};

use super::{
    files::{Files, Kind, LONGEST_PATH, NAMES, Sink, stream},
    medium::Window,
};

/// Number of the top level.
const TOP: u64 = 5;
/// Subvolumes for `/`: of Ubuntu, Debian's installer, and Fedora.
const ROOTS: [&str; 3] = ["@", "@rootfs", "root"];
/// Where the superblock is, and fields of it (struct `btrfs_super_block`).
const SUPERBLOCK: u64 = 0x10000;
const UUID: u64 = 0x20;
const LABEL: u64 = 0x12b;

/// A subvolume.
pub struct Btrfs(RefCell<lambutter::Btrfs<Reader>>);

/// Returns `UUID` and `LABEL`.
pub fn names(window: &Window) -> (String, String) {
    let uuid = window.bytes(SUPERBLOCK + UUID).unwrap_or_default();
    let label: [u8; 256] = window.bytes(SUPERBLOCK + LABEL).unwrap_or([0; 256]);
    let label = label.split(|byte| *byte == 0).next().unwrap_or_default();
    (
        uuid::Uuid::from_bytes(uuid).to_string(),
        String::from_utf8_lossy(label).into_owned(),
    )
}

/// Opens the supported subvolumes; all except the default one have a name. The error describes why
/// the file system is unreadable.
pub fn open(window: &Window) -> Result<Vec<(Option<String>, Btrfs)>, String> {
    let reader = || Reader(window.clone());
    let default = lambutter::Btrfs::open(reader(), window.length()).map_err(|error| error.to_string())?;
    let mut seen = vec![default.subvolume()];
    let mut found = vec![(None, default)];
    let top = lambutter::Btrfs::open_subvol_id(reader(), window.length(), TOP).ok();
    let others = ROOTS.iter().filter_map(|name| {
        let path = format!("/{name}");
        let opened = lambutter::Btrfs::open_subvol_path(reader(), window.length(), path.as_str().into());
        Some(((*name).to_owned(), opened.ok()?))
    });
    for (name, subvolume) in top.map(|top| ("/".to_owned(), top)).into_iter().chain(others) {
        if !seen.contains(&subvolume.subvolume()) {
            seen.push(subvolume.subvolume());
            found.push((Some(name), subvolume));
        }
    }
    let found = found.into_iter();
    Ok(found
        .map(|(name, files)| (name, Btrfs(RefCell::new(files))))
        .collect())
}

/// The partition.
struct Reader(Window);

impl BlockRead for Reader {
    type Error = io::Error;

    fn read_at(&mut self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.fill(buf, offset_bytes)
    }
}

impl Files for Btrfs {
    fn kind(&self, path: &str) -> Option<Kind> {
        let mut files = self.0.borrow_mut();
        let inode = files.resolve(Path::from(path)).ok()?;
        let found = files.metadata(&inode).ok()?;
        if found.is_symlink() {
            let short = found.size <= LONGEST_PATH as u64;
            let target = short.then(|| files.read_link(Path::from(path)).ok()).flatten()?;
            return String::from_utf8(target).ok().map(Kind::Link);
        }
        let kind = found.is_dir().then_some(Kind::Folder);
        kind.or_else(|| found.is_file().then_some(Kind::File))
    }

    fn names(&self, path: &str) -> Vec<String> {
        let found = self.0.borrow_mut().read_dir(Path::from(path));
        let names = found.unwrap_or_default().into_iter().take(NAMES);
        names
            .filter_map(|entry| String::from_utf8(entry.name).ok())
            .collect()
    }

    fn copy(&self, path: &str, range: Range<u64>, to: &mut Sink<'_>) -> io::Result<()> {
        let mut files = self.0.borrow_mut();
        let failed = |error: lambutter::Error| io::Error::other(error.to_string());
        let inode = files.resolve(Path::from(path)).map_err(failed)?;
        stream(range, to, |at, buffer| {
            files.read_file_at(&inode, at, buffer).map_err(failed)
        })
    }
}

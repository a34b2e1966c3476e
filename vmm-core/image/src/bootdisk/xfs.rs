//! XFS as the library reads it: with the pending changes of the log, or without the log if the
//! library cannot interpret it.

use std::{cell::RefCell, io, ops::Range};

use lamxfs::{BlockRead, Error, Path, SuperblockReason};

use super::{
    files::{Files, Kind, LONGEST_PATH, NAMES, Sink, stream},
    medium::Window,
};

/// Offsets of fields of the superblock (struct `xfs_dsb`), all of them big-endian.
const BLOCK_SIZE: u64 = 4;
const LOG_START: u64 = 48;
const GROUP_BLOCKS: u64 = 84;
const GROUP_BLOCKS_LOG: u64 = 124;
/// The first block of a log, in bytes. One that is all zeroes is of a log that was never written.
const LOG_BLOCK: u64 = 512;

/// An XFS file system.
pub struct Xfs(RefCell<lamxfs::Xfs<Reader>>);

impl Xfs {
    /// Opens the file system. The error describes why the file system is unreadable.
    pub fn open(window: &Window) -> Result<Self, String> {
        let open = |without_log: Option<u64>| {
            let reader = Reader {
                window: window.clone(),
                without_log,
            };
            lamxfs::Xfs::open(reader, window.length())
        };
        let opened = match open(None) {
            // GRUB never reads a log: the state without the log, which GRUB would boot, is better
            // than an error.
            Err(Error::BadSuperblock(SuperblockReason::DirtyLog)) => open(log(window)),
            opened => opened,
        };
        let files = opened.map_err(|error| error.to_string())?;
        Ok(Self(RefCell::new(files)))
    }

    /// What `UUID` is.
    pub fn uuid(&self) -> String {
        uuid::Uuid::from_bytes(self.0.borrow().uuid()).to_string()
    }

    /// What `LABEL` is.
    pub fn label(&self) -> String {
        self.0.borrow().label().unwrap_or_default().to_owned()
    }
}

/// Where the log begins, in bytes.
fn log(window: &Window) -> Option<u64> {
    let number = |offset: u64| window.bytes(offset).map(u32::from_be_bytes).map(u64::from);
    let start = u64::from_be_bytes(window.bytes(LOG_START)?);
    let [shift] = window.bytes(GROUP_BLOCKS_LOG)?;
    let group = start.checked_shr(shift.into())?;
    let block = start.checked_sub(group.checked_shl(shift.into())?)?;
    let blocks = group.checked_mul(number(GROUP_BLOCKS)?)?.checked_add(block)?;
    blocks.checked_mul(number(BLOCK_SIZE)?)
}

/// The partition.
struct Reader {
    window: Window,
    /// Where a log begins that is to look like one that was never written.
    without_log: Option<u64>,
}

impl BlockRead for Reader {
    type Error = io::Error;

    fn read_at(&mut self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        self.window.fill(buf, offset_bytes)?;
        let Some(log) = self.without_log else {
            return Ok(());
        };
        let within = |at: u64| usize::try_from(at.saturating_sub(offset_bytes)).unwrap_or(usize::MAX);
        let (start, end) = (within(log), within(log.saturating_add(LOG_BLOCK)).min(buf.len()));
        if let Some(hidden) = buf.get_mut(start..end) {
            hidden.fill(0);
        }
        Ok(())
    }
}

impl Files for Xfs {
    fn kind(&self, path: &str) -> Option<Kind> {
        let mut files = self.0.borrow_mut();
        let path = Path::new(path.as_bytes());
        let inode = files.resolve(path).ok()?;
        let found = files.metadata(&inode).ok()?;
        if found.is_symlink() {
            // The library would make room for a target of any length.
            let short = found.size() <= LONGEST_PATH as u64;
            let target = short.then(|| files.read_link(path).ok()).flatten()?;
            return String::from_utf8(target).ok().map(Kind::Link);
        }
        let kind = found.is_dir().then_some(Kind::Folder);
        kind.or_else(|| found.is_file().then_some(Kind::File))
    }

    fn names(&self, path: &str) -> Vec<String> {
        let found = self.0.borrow_mut().read_dir(Path::new(path.as_bytes()));
        let names = found.unwrap_or_default().into_iter().take(NAMES);
        names
            .filter_map(|entry| String::from_utf8(entry.name).ok())
            .collect()
    }

    fn copy(&self, path: &str, range: Range<u64>, to: &mut Sink<'_>) -> io::Result<()> {
        let mut files = self.0.borrow_mut();
        let inode = files
            .resolve(Path::new(path.as_bytes()))
            .map_err(|error| io::Error::other(error.to_string()))?;
        stream(range, to, |at, buffer| {
            let read = files.read_file_at(&inode, at, buffer);
            read.map_err(|error| io::Error::other(error.to_string()))
        })
    }
}

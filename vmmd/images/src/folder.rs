//! Folder of the images' files. Blocking.
//!
//! An image's content is `<digest>.raw`, which images with the same content share. The files of an
//! import are beside it: `<uid>.source` is the file as received, `<uid>.new` the image under
//! construction.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags};
use uuid::Uuid;
use vmmd_host::dirs::private_dir;
use vmmd_store::ImageRecord;

/// Bytes that an import leaves free on the file system, unless a twentieth of it is less.
const KEEP_FREE: u64 = 1 << 30;

/// `<state_dir>/images`, for root only.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// In the daemon's state folder.
    pub fn of(state_dir: &Path) -> Self {
        Self(state_dir.join("images"))
    }

    /// The folder itself.
    pub fn root(&self) -> PathBuf {
        self.0.clone()
    }

    /// Creates the folder if it does not exist.
    pub fn make(&self) -> io::Result<()> {
        private_dir(&self.0)
    }

    /// The content with this digest.
    pub fn content(&self, digest: &[u8]) -> PathBuf {
        let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        self.0.join(format!("{digits}.raw"))
    }

    /// The file that is downloaded, or was uploaded.
    pub fn source(&self, record: &ImageRecord) -> PathBuf {
        self.0.join(format!("{}.source", uid(record)))
    }

    /// The image that is being made.
    pub fn new_image(&self, record: &ImageRecord) -> PathBuf {
        self.0.join(format!("{}.new", uid(record)))
    }

    /// Opens a file for reading and writing; with `empty` it has no content then.
    pub fn open(&self, path: &Path, empty: bool) -> io::Result<File> {
        self.make()?;
        File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(empty)
            .mode(0o600)
            .open(path)
    }

    /// A file without a name, which is gone when it is closed.
    pub fn scratch(&self) -> io::Result<File> {
        self.make()?;
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        Ok(rustix::fs::open(&self.0, flags, Mode::from_raw_mode(0o600))?.into())
    }

    /// Gives a new image the name of its content.
    pub fn keep(&self, record: &ImageRecord) -> io::Result<()> {
        fs::rename(self.new_image(record), self.content(&record.digest))?;
        self.sync_names()
    }

    /// Removes what an import has left; `source` says whether the file it is made of goes too.
    pub fn clear(&self, record: &ImageRecord, source: bool) -> io::Result<()> {
        absent(fs::remove_file(self.new_image(record)))?;
        if source {
            absent(fs::remove_file(self.source(record)))?;
        }
        Ok(())
    }

    /// Removes the content of an image.
    pub fn remove(&self, record: &ImageRecord) -> io::Result<()> {
        absent(fs::remove_file(self.content(&record.digest)))?;
        self.sync_names()
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }

    /// Bytes that an import must leave free, and free bytes.
    pub fn room(&self) -> io::Result<(u64, u64)> {
        self.make()?;
        let stat = rustix::fs::statvfs(&self.0)?;
        let all = stat.f_blocks.saturating_mul(stat.f_frsize);
        Ok((keep_free(all), stat.f_bavail.saturating_mul(stat.f_frsize)))
    }
}

/// Bytes that an import leaves free on a file system of so many.
pub fn keep_free(all: u64) -> u64 {
    KEEP_FREE.min(all / 20)
}

fn uid(record: &ImageRecord) -> Uuid {
    Uuid::from_slice(&record.uid).unwrap_or_default()
}

fn absent(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

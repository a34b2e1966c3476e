//! The folder of the disks' files. Blocking.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use uuid::Uuid;
use vmmd_api::v1::DiskFormat;
use vmmd_host::{
    dirs::private_dir,
    failure::{Failure, Kind, file_failed},
};
use vmmd_spec::disk::Format;
use vmmd_store::DiskRecord;

use super::sidecar::Sidecar;

/// Most images below an overlay. Each costs a descriptor in each message that names the disk.
pub const fn backing_limit() -> usize {
    6
}

/// `<state_dir>/disks`, for root only.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// In the daemon's state folder.
    pub fn of(state_dir: &Path) -> Self {
        Self(state_dir.join("disks"))
    }

    /// The folder itself.
    pub fn root(&self) -> PathBuf {
        self.0.clone()
    }

    /// The file of a disk.
    pub fn path(&self, record: &DiskRecord) -> PathBuf {
        let uid = Uuid::from_slice(&record.uid).unwrap_or_default();
        let extension = match format(record) {
            Format::Qcow2 => "qcow2",
            Format::Raw | Format::Iso => "raw",
        };
        self.0.join(format!("{uid}.{extension}"))
    }

    /// The content of the image that a disk is an overlay of.
    pub fn image(&self, record: &DiskRecord) -> PathBuf {
        let state_dir = self.0.parent().unwrap_or(&self.0);
        vmmd_images::folder::Folder::of(state_dir).content(&record.image_digest)
    }

    /// Creates the folder if it does not exist.
    pub fn make(&self) -> io::Result<()> {
        private_dir(&self.0)
    }

    /// Makes the file of a new disk, empty; only root can open it.
    pub fn create(&self, record: &DiskRecord) -> io::Result<File> {
        self.make()?;
        File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.path(record))
    }

    /// Makes a new file's content and name durable.
    pub fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()?;
        self.sync_names()
    }

    /// Removes the file of a disk and its sidecar file. Missing files are no error.
    pub fn remove(&self, record: &DiskRecord) -> io::Result<()> {
        let path = self.path(record);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Sidecar::remove(&path),
            result => result?,
        }
        Sidecar::remove(&path)?;
        self.sync_names()
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }

    /// Virtual size in bytes: the file's length, or the size in the header of a qcow2 image (qcow2
    /// specification, "Header": big-endian, bytes 24 to 31).
    pub fn size(&self, record: &DiskRecord) -> io::Result<u64> {
        let mut file = File::open(self.path(record))?;
        if format(record) != Format::Qcow2 {
            return Ok(file.metadata()?.len());
        }
        let mut size = [0; 8];
        file.seek(SeekFrom::Start(24))?;
        file.read_exact(&mut size)?;
        Ok(u64::from_be_bytes(size))
    }
}

/// Refused as NODE_DISK_FULL when the file system of an existing folder has less room than is to be reserved, in bytes. To try would
/// fill it up for everybody else before it fails. Blocking.
pub fn enough_room(operation: &str, folder: &Path, wanted: u64) -> Result<(), Failure> {
    let free = free_bytes(folder).map_err(|error| file_failed(operation, &error))?;
    if wanted <= free {
        return Ok(());
    }
    let message = format!(
        "{operation}: {wanted} bytes are to be reserved, and the file system of the daemon's state has {free} bytes free: make \
         room, ask for less, or leave the preallocation out"
    );
    Err(Failure::new(Kind::Exhausted, "NODE_DISK_FULL", message))
}

/// Bytes that are free in the file system of an existing folder. Blocking.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(folder)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// How the image of a disk is to be read.
pub fn format(record: &DiskRecord) -> Format {
    match record.format() {
        DiskFormat::Qcow2 => Format::Qcow2,
        _ => Format::Raw,
    }
}

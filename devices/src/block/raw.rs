//! Raw images: a regular file or a block device, byte for byte. Nothing is ever guessed from the content.

use std::{fs::File, io, os::fd::OwnedFd, sync::Arc};

use rustix::fs::{OFlags, fcntl_getfl};

use super::{
    SECTOR,
    engine::Engine,
    image::{Geometry, Image, OpenError},
    pool::{Pool, PoolEngine},
    target::Target,
    uring::UringEngine,
};
use crate::sys::lock::{LockKind, try_lock};

/// An open raw image.
#[derive(Debug)]
pub struct RawImage {
    target: Arc<Target>,
    pool: Arc<Pool>,
    read_only: bool,
}

impl RawImage {
    /// Checks and locks what was opened: for writing nobody else may use it, for reading others may read it too.
    ///
    /// The lock belongs to the open file description (fcntl(2), OFD locks): whoever shares it keeps it locked.
    pub fn open(fd: OwnedFd, read_only: bool) -> Result<Self, OpenError> {
        let file = File::from(fd);
        let target = Target::new(file)?;
        check_access(&target.file, read_only)?;
        let capacity = target.capacity();
        if capacity == 0 {
            return Err(OpenError::Empty);
        }
        if !capacity.is_multiple_of(SECTOR) {
            return Err(OpenError::Size(capacity));
        }
        let lock = if read_only {
            LockKind::Read
        } else {
            LockKind::Write
        };
        match try_lock(&target.file, lock) {
            Ok(true) => {}
            Ok(false) => return Err(OpenError::InUse),
            Err(error) => return Err(OpenError::Host("lock the image", error)),
        }
        let target = Arc::new(target);
        Ok(Self {
            pool: Arc::new(Pool::new(Arc::clone(&target))),
            target,
            read_only,
        })
    }
}

impl Image for RawImage {
    fn capacity(&self) -> u64 {
        self.target.capacity()
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            physical_block: 4096,
            optimal_io: 0,
            discard_granularity: Some(4096),
        }
    }

    fn engine(&self) -> io::Result<Box<dyn Engine>> {
        match UringEngine::new(Arc::clone(&self.target), Arc::clone(&self.pool)) {
            Ok(engine) => Ok(Box::new(engine)),
            Err(error) => {
                tracing::warn!(%error, "no io_uring on this host: disks are served by threads");
                Ok(Box::new(PoolEngine::new(Arc::clone(&self.pool))?))
            }
        }
    }

    fn grow(&self, _capacity: Option<u64>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

fn check_access(file: &File, read_only: bool) -> Result<(), OpenError> {
    let flags =
        fcntl_getfl(file).map_err(|error| OpenError::Host("look how the image is open", error.into()))?;
    let mode = flags & OFlags::ACCMODE;
    if mode == OFlags::WRONLY {
        return Err(OpenError::Access("reading"));
    }
    if !read_only && mode != OFlags::RDWR {
        return Err(OpenError::Access("writing"));
    }
    if flags.contains(OFlags::APPEND) {
        return Err(OpenError::Access("writing at any place, but for appending"));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    fn image(size: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(size).unwrap();
        file
    }

    fn open(path: &Path, read_only: bool) -> Result<RawImage, OpenError> {
        let file = File::options().read(true).write(!read_only).open(path).unwrap();
        RawImage::open(file.into(), read_only)
    }

    fn refusal(result: Result<RawImage, OpenError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_file_of_whole_sectors_is_a_disk() {
        let file = image(1536);
        let disk = open(file.path(), false).unwrap();
        assert_eq!((disk.capacity(), disk.read_only()), (1536, false));
        drop(disk);
        assert!(open(file.path(), true).unwrap().read_only());
    }

    #[test]
    fn what_is_no_disk_is_refused_with_the_reason() {
        let odd = image(1000);
        assert_eq!(
            refusal(open(odd.path(), false)),
            "size of 1000 bytes is not a multiple of 512"
        );
        assert_eq!(refusal(open(image(0).path(), false)), "the image is empty");
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(
            refusal(open(directory.path(), true)),
            "not a regular file or block device but a directory"
        );
        assert!(refusal(open(Path::new("/dev/null"), false)).ends_with("character device"));
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(refusal(RawImage::open(pipe, true)).ends_with("pipe"));
    }

    #[test]
    fn a_descriptor_with_the_wrong_access_is_refused() {
        let file = image(512);
        let reader = File::open(file.path()).unwrap();
        assert_eq!(
            refusal(RawImage::open(reader.into(), false)),
            "not open for writing"
        );
        let writer = File::options().write(true).open(file.path()).unwrap();
        assert_eq!(
            refusal(RawImage::open(writer.into(), true)),
            "not open for reading"
        );
        let appender = File::options().read(true).append(true).open(file.path()).unwrap();
        assert!(refusal(RawImage::open(appender.into(), false)).contains("appending"));
    }

    #[test]
    fn one_writer_or_several_readers_until_the_last_engine_is_gone() {
        let file = image(512);
        let writer = open(file.path(), false).unwrap();
        for read_only in [false, true] {
            assert_eq!(
                refusal(open(file.path(), read_only)),
                "in use by another VM or program"
            );
        }
        let engine = writer.engine().unwrap();
        drop(writer);
        assert!(open(file.path(), true).is_err());
        drop(engine);
        let readers = [open(file.path(), true).unwrap(), open(file.path(), true).unwrap()];
        assert!(open(file.path(), false).is_err());
        drop(readers);
        assert!(open(file.path(), false).is_ok());
    }

    #[test]
    fn a_refused_image_is_left_as_it_was_and_unlocked() {
        let file = image(512);
        let taken = open(file.path(), true).unwrap();
        assert!(open(file.path(), false).is_err());
        drop(taken);
        assert_eq!(fs::read(file.path()).unwrap(), vec![0; 512]);
        assert!(open(file.path(), false).is_ok());
    }
}

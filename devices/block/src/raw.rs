//! Raw images: a regular file or a block device, byte for byte. The content never influences the
//! interpretation.

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Once},
};

use rustix::fs::{OFlags, fcntl_getfl};
use vmm_base::sys::{
    Iovecs,
    lock::{LockKind, lock_image, unlock_image},
};

use super::{
    content::{Access, Extent},
    direct::Bounce,
    engine::{Engine, Operation},
    geometry,
    image::{Geometry, Image, OpenError},
    pool::{Pool, PoolEngine},
    target::Target,
    uring::UringEngine,
};

/// Where the standard identifier of the first volume descriptor is: sector 16 of 2 KiB, byte 1 (ECMA-119, 8.1).
const VOLUME_ID_AT: u64 = 16 * 2048 + 1;
/// ECMA-119, 8.1.2.
const VOLUME_ID: &[u8] = b"CD001";

/// An open raw image.
#[derive(Debug)]
pub struct RawImage {
    target: Arc<Target>,
    pool: Arc<Pool>,
    read_only: bool,
    /// Discard granularity of the block device's queue, if the caller has read it.
    discard_granularity: Option<u32>,
    /// That there is no io_uring is said once.
    told: Once,
}

impl RawImage {
    /// Checks and locks an opened image. A writer excludes all other users; readers share the
    /// image. A descriptor with O_DIRECT bypasses the host's page cache, any other descriptor uses
    /// it.
    ///
    /// The lock belongs to the open file description (fcntl(2), OFD locks): every process that
    /// shares the description keeps the image locked.
    pub fn open(fd: OwnedFd, read_only: bool) -> Result<Self, OpenError> {
        let image = Self::open_unlocked(fd, read_only)?;
        match image.lock() {
            Ok(true) => Ok(image),
            Ok(false) => Err(OpenError::InUse),
            Err(error) => Err(OpenError::Host("lock the image", error)),
        }
    }

    /// The same of an image that somebody else still uses: nothing of it is read or written until it is [locked](Image::lock).
    pub fn open_unlocked(fd: OwnedFd, read_only: bool) -> Result<Self, OpenError> {
        let file = File::from(fd);
        check_access(&file, read_only)?;
        let target = Arc::new(Target::new(file)?);
        Ok(Self {
            pool: Arc::new(Pool::new(Arc::clone(&target))),
            target,
            read_only,
            discard_granularity: None,
            told: Once::new(),
        })
    }

    /// Sets the discard granularity of the block device's queue in bytes; 0 if the device does not
    /// support discards. This process has no access to that value.
    pub fn with_discard_granularity(mut self, bytes: Option<u32>) -> Self {
        self.discard_granularity = bytes;
        self
    }

    /// [`open`](Self::open) for reading, and a check that there is a CD or DVD in it.
    pub fn open_iso(fd: OwnedFd) -> Result<Self, OpenError> {
        let image = Self::open(fd, true)?;
        let end = VOLUME_ID_AT.saturating_add(VOLUME_ID.len() as u64);
        let mut found = false;
        if end <= image.capacity() {
            image
                .target
                .read(
                    VOLUME_ID_AT,
                    VOLUME_ID.len() as u64,
                    &mut Bounce::default(),
                    |data| {
                        found = data == VOLUME_ID;
                    },
                )
                .map_err(|error| OpenError::Host("read the volume descriptor", error))?;
        }
        if found { Ok(image) } else { Err(OpenError::NotIso) }
    }

    /// The engine on a ring, or one without.
    fn choose(&self, ring: io::Result<UringEngine>) -> io::Result<Box<dyn Engine>> {
        match ring {
            Ok(engine) => Ok(Box::new(engine)),
            Err(error) => {
                self.told.call_once(|| {
                    tracing::warn!(%error, "the host gives no io_uring: threads read and write this disk, slower");
                });
                Ok(Box::new(PoolEngine::new(Arc::clone(&self.pool))?))
            }
        }
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
        geometry::of(&self.target, self.read_only, self.discard_granularity)
    }

    fn engine(&self) -> io::Result<Box<dyn Engine>> {
        let ring = UringEngine::new(Arc::clone(&self.target), Arc::clone(&self.pool));
        self.choose(ring)
    }

    fn access(&self) -> io::Result<Box<dyn Access>> {
        Ok(Box::new(RawAccess {
            target: Arc::clone(&self.target),
            bounce: Bounce::default(),
        }))
    }

    fn grow(&self, capacity: Option<u64>) -> io::Result<()> {
        if self.read_only && capacity.is_some() {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        self.target.grow(capacity)
    }

    fn commit(&self) -> io::Result<()> {
        // It holds nothing back.
        Ok(())
    }

    fn unlock(&self) -> io::Result<()> {
        if !self.read_only {
            self.target.file.sync_data()?;
        }
        unlock_image(&self.target.file)
    }

    fn lock(&self) -> io::Result<bool> {
        let kind = if self.read_only {
            LockKind::Read
        } else {
            LockKind::Write
        };
        lock_image(&self.target.file, kind)
    }
}

/// Reads and writes an image by waiting for it.
struct RawAccess {
    target: Arc<Target>,
    bounce: Bounce,
}

impl Access for RawAccess {
    fn execute(&mut self, operation: Operation, buffers: &mut Iovecs) -> io::Result<()> {
        self.target.execute(operation, buffers, &mut self.bounce)
    }

    fn extent(&self, offset: u64) -> io::Result<Extent> {
        self.target.extent(offset)
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
        return Err(OpenError::Access(
            "writing at any offset: it is open for appending",
        ));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{FileExt as _, OpenOptionsExt as _},
        path::Path,
        time::{Duration, Instant},
    };

    use vm_memory::{Bytes as _, GuestAddress};
    use vmm_base::{GuestMemory, ram::Segment};

    use super::*;
    use crate::Request;

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
                "in use by another VM or program",
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
    fn where_io_uring_is_forbidden_threads_do_the_work() {
        let file = image(8192);
        fs::write(file.path(), [7; 8192]).unwrap();
        let disk = open(file.path(), false).unwrap();
        for refusal in [libc::ENOSYS, libc::EPERM] {
            let mut engine = disk.choose(Err(io::Error::from_raw_os_error(refusal))).unwrap();
            let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 8192)]).unwrap();
            let mut buffers = Iovecs::new(Arc::new(memory.clone()));
            let place = Segment {
                address: GuestAddress(0),
                length: 4096,
            };
            buffers.append(&[place], 0, 4096).unwrap();
            engine.submit(Request {
                token: 1,
                operation: Operation::Read { offset: 4096 },
                buffers: Box::new(buffers),
            });
            engine.commit().unwrap();
            engine.wait(Instant::now() + Duration::from_secs(20)).unwrap();
            engine.completed().unwrap().result.unwrap();
            assert_eq!(memory.read_obj::<u32>(GuestAddress(4092)).unwrap(), 0x0707_0707);
        }
    }

    #[test]
    fn a_disk_grows_and_does_not_shrink() {
        let file = image(8192);
        let disk = open(file.path(), false).unwrap();
        let _engine = disk.engine().unwrap();
        disk.grow(Some(16384)).unwrap();
        disk.grow(Some(16384)).unwrap();
        assert_eq!(
            (disk.capacity(), file.as_file().metadata().unwrap().len()),
            (16384, 16384)
        );
        for (size, expected) in [
            (8192, "does not shrink: it has 16384 bytes, not 8192"),
            (16385, "16385 bytes is not a multiple of 512"),
        ] {
            let error = disk.grow(Some(size)).unwrap_err();
            assert!(error.to_string().ends_with(expected), "{error}");
        }
        assert_eq!(disk.capacity(), 16384);
        // Somebody else made it larger.
        file.as_file().set_len(32768).unwrap();
        disk.grow(None).unwrap();
        assert_eq!(disk.capacity(), 32768);
        // The same for a smaller file: the size that the guest knows stays valid.
        file.as_file().set_len(512).unwrap();
        assert!(disk.grow(None).is_err());
        assert_eq!(disk.capacity(), 32768);
        drop((disk, _engine));
        let disk = open(file.path(), true).unwrap();
        assert_eq!(
            disk.grow(Some(1024)).unwrap_err().kind(),
            io::ErrorKind::ReadOnlyFilesystem
        );
    }

    #[test]
    fn an_iso_image_is_known_by_its_volume_descriptor() {
        let file = image(64 << 10);
        let iso = || RawImage::open_iso(File::open(file.path()).unwrap().into());
        assert_eq!(
            refusal(iso()),
            "not an ISO 9660 image: it has no volume descriptor in sector 16"
        );
        file.as_file().write_all_at(b"\x01CD001\x01", 16 * 2048).unwrap();
        assert!(iso().unwrap().read_only());
        file.as_file().set_len(2048).unwrap();
        assert!(matches!(iso(), Err(OpenError::NotIso)));
    }

    #[test]
    fn an_iso_image_is_found_with_direct_io_too() {
        let file = image(64 << 10);
        file.as_file().write_all_at(b"\x01CD001\x01", 16 * 2048).unwrap();
        let Ok(direct) = File::options()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(file.path())
        else {
            return;
        };
        RawImage::open_iso(direct.into()).unwrap();
    }

    #[test]
    fn the_geometry_is_the_hosts_within_bounds() {
        let file = image(64 << 10);
        for read_only in [false, true] {
            let Geometry {
                physical_block,
                optimal_io,
                discard_granularity,
            } = open(file.path(), read_only).unwrap().geometry();
            assert!(physical_block.is_power_of_two() && (512..=64 << 10).contains(&physical_block));
            assert!(optimal_io == 0 || optimal_io.is_power_of_two() && optimal_io >= physical_block);
            assert!(discard_granularity.is_none_or(|size| !read_only && size >= physical_block));
        }
        assert_eq!(file.as_file().metadata().unwrap().len(), 64 << 10);
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

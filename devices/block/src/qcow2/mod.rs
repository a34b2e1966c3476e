//! qcow2 images. imago locates and allocates clusters. Everything else is our own code: the refusal
//! of images ([`header`], [`check`]), the time at which changes of tables reach the file (`stage`),
//! and the execution of requests (`disk`, `pool`). No file is opened by a name from an image: all
//! files arrive as descriptors.
//!
//! Data that a guest's flush confirmed survives the death of the process and of the host. Later
//! writes may be lost, but the image stays consistent: at worst clusters leak, and the next opening
//! for writing repairs leaks.

mod base;
mod buffers;
pub mod check;
pub mod create;
mod disk;
mod engine;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
pub mod header;
mod layer;
pub mod medium;
mod pool;
mod refcount;
mod stage;
#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]
mod tests;
mod uncached;

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use imago::{
    DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, format::drivers::FormatDriverInstance,
    qcow2::Qcow2, raw::Raw,
};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl};

pub use header::{Header, Refusal};

use base::Base;
use disk::{Disk, Traits};
use engine::Qcow2Engine;
use layer::Layer;
use medium::Medium;
use pool::Pool;
use stage::Stage;
use uncached::Uncached;
use vmm_base::sys::{
    Iovecs, file,
    lock::{LockKind, lock_image},
};

use super::{
    SECTOR,
    content::{Access, Extent},
    engine::{Engine, Operation},
    image::{Geometry, Image, OpenError},
    target::{Alignment, Target},
};

/// An image below an overlay, which is only read.
#[derive(Debug)]
pub enum Backing {
    /// Byte for byte; it can't have one below it.
    Raw(OwnedFd),
    /// With the next one as its backing, if it is an overlay itself.
    Qcow2(OwnedFd),
}

/// An open qcow2 image.
#[derive(Debug)]
pub struct Qcow2Image {
    disk: Arc<Disk>,
    pool: Arc<Pool>,
    /// The file, for rings.
    target: Option<Arc<Target>>,
    read_only: bool,
}

impl Qcow2Image {
    /// Checks and locks an opened image, like [`RawImage::open`](super::RawImage::open). `backing`
    /// holds the images below it, the nearest first, as many as the headers require. Leaked
    /// clusters are freed.
    ///
    /// With `O_DIRECT` the image's data and tables bypass the host's page cache, otherwise they use
    /// it. Images below always use the page cache, because several VMs share them.
    pub fn open(fd: OwnedFd, read_only: bool, backing: Vec<Backing>) -> Result<Self, OpenError> {
        let file = prepare(fd, read_only)?;
        let mut chain = Vec::new();
        for backing in backing {
            chain.push(match backing {
                Backing::Raw(fd) => Below::Raw(Arc::new(cached(prepare(fd, true)?)?)),
                Backing::Qcow2(fd) => Below::Qcow2(Arc::new(cached(prepare(fd, true)?)?)),
            });
        }
        if let Some(target) = past_page_cache(&file, read_only) {
            return Self::open_uncached(target, read_only, chain);
        }
        if fcntl_getfl(&file).is_ok_and(|flags| flags.contains(OFlags::DIRECT)) {
            tracing::warn!(
                "a qcow2 image goes through the page cache: its file does not end with a whole block, or direct I/O can't be had"
            );
        }
        let file = Arc::new(cached(file)?);
        let image = Self::open_on(Arc::clone(&file) as Arc<dyn Medium>, read_only, chain)?;
        let target = for_rings(&file, read_only);
        Ok(Self { target, ..image })
    }

    /// Opens an image for reading without taking a lock. The caller's own lock, taken through
    /// another descriptor, must exclude writers. See [`open`](Self::open) for `backing`.
    ///
    /// # Errors
    ///
    /// The file is not usable as a qcow2 image.
    pub fn open_without_lock(fd: OwnedFd, backing: Vec<Backing>) -> Result<Self, OpenError> {
        let below = backing.into_iter().map(|backing| match backing {
            Backing::Raw(fd) => Below::Raw(Arc::new(File::from(fd))),
            Backing::Qcow2(fd) => Below::Qcow2(Arc::new(File::from(fd))),
        });
        Self::open_on(Arc::new(File::from(fd)), true, below.collect())
    }

    /// Fills `data` from byte `offset` of the disk on; the whole range must lie within the disk.
    /// Only for images without writers.
    ///
    /// # Errors
    ///
    /// The image is unreadable, or its tables point beyond the file.
    pub fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let read = catch_unwind(AssertUnwindSafe(|| self.disk.read_at(data, offset)));
        read.unwrap_or_else(|_| Err(io::Error::other("its tables are beyond what was expected")))
    }

    fn open_uncached(target: Arc<Target>, read_only: bool, below: Vec<Below>) -> Result<Self, OpenError> {
        let medium = Arc::new(Uncached::new(Arc::clone(&target)));
        let image = Self::open_on(medium, read_only, below)?;
        fill_up(&target.file, read_only, target.alignment().offset.into())
            .map_err(|error| OpenError::Host("make the image end with a whole block", error))?;
        let target = Some(target);
        Ok(Self { target, ..image })
    }

    fn open_on(medium: Arc<dyn Medium>, read_only: bool, below: Vec<Below>) -> Result<Self, OpenError> {
        let opened = catch_unwind(AssertUnwindSafe(|| open_disk(medium, read_only, below)));
        let disk = opened.unwrap_or_else(|_| {
            let reason = "its tables are beyond what was expected".to_owned();
            Err(Refusal::Inconsistent(reason).into())
        })?;
        let disk = Arc::new(disk);
        let pool = Pool::new(Arc::clone(&disk));
        Ok(Self {
            disk,
            pool,
            target: None,
            read_only,
        })
    }
}

impl Image for Qcow2Image {
    fn capacity(&self) -> u64 {
        self.disk.capacity()
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn geometry(&self) -> Geometry {
        let cluster = u32::try_from(self.disk.cluster_size()).unwrap_or(0);
        Geometry {
            physical_block: cluster.min(4096),
            optimal_io: cluster,
            discard_granularity: Some(cluster),
        }
    }

    fn engine(&self) -> io::Result<Box<dyn Engine>> {
        let engine = Qcow2Engine::new(Arc::clone(&self.pool), self.target.as_ref())?;
        Ok(Box::new(engine))
    }

    fn access(&self) -> io::Result<Box<dyn Access>> {
        Ok(Box::new(Qcow2Access(Arc::clone(&self.pool))))
    }

    fn grow(&self, capacity: Option<u64>) -> io::Result<()> {
        let now = self.capacity();
        match capacity {
            // Only block devices change by themselves.
            None => Ok(()),
            _ if self.read_only => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            Some(size) if size < now || !size.is_multiple_of(SECTOR) || size > header::MAX_SIZE => {
                Err(io::ErrorKind::InvalidInput.into())
            }
            Some(size) if size == now => Ok(()),
            Some(size) => self.pool.grow(size),
        }
    }

    fn commit(&self) -> io::Result<()> {
        self.pool.commit()
    }
}

/// Reads and writes an image by waiting for it.
struct Qcow2Access(Arc<Pool>);

impl Access for Qcow2Access {
    fn execute(&mut self, operation: Operation, buffers: &mut Iovecs) -> io::Result<()> {
        self.0.execute(operation, buffers)
    }

    fn extent(&self, offset: u64) -> io::Result<Extent> {
        self.0.extent(offset)
    }
}

/// An image below another, open.
#[derive(Debug)]
enum Below {
    Raw(Arc<dyn Medium>),
    Qcow2(Arc<dyn Medium>),
}

/// Sees to it that a descriptor is one of a file that can be used so, and locks it.
fn prepare(fd: OwnedFd, read_only: bool) -> Result<File, OpenError> {
    let file = File::from(fd);
    let status = file::status(&file).map_err(|error| OpenError::Host("look at the image", error))?;
    if status.kind != FileType::RegularFile {
        return Err(OpenError::Kind(if status.kind == FileType::Directory {
            "directory"
        } else {
            "device or the like, which can't hold a qcow2 image"
        }));
    }
    let host = |what| move |error: rustix::io::Errno| OpenError::Host(what, error.into());
    let flags = fcntl_getfl(&file).map_err(host("look how the image is open"))?;
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
    let kind = if read_only {
        LockKind::Read
    } else {
        LockKind::Write
    };
    match lock_image(&file, kind) {
        Ok(true) => Ok(file),
        Ok(false) => Err(OpenError::InUse),
        Err(error) => Err(OpenError::Host("lock the image", error)),
    }
}

/// The file, to be used through the page cache.
fn cached(file: File) -> Result<File, OpenError> {
    let host = |error: rustix::io::Errno| OpenError::Host("open the image for the page cache", error.into());
    let flags = fcntl_getfl(&file).map_err(host)?;
    if flags.contains(OFlags::DIRECT) {
        fcntl_setfl(&file, flags.difference(OFlags::DIRECT)).map_err(host)?;
    }
    Ok(file)
}

/// The same file past the page cache, if it was opened so and can be used so: a file that stays as it is has to consist of
/// whole blocks for that.
fn past_page_cache(file: &File, read_only: bool) -> Option<Arc<Target>> {
    if !fcntl_getfl(file).ok()?.contains(OFlags::DIRECT) {
        return None;
    }
    let alignment = Alignment::of(file).ok()?;
    let whole = file::length(file).ok()?.is_multiple_of(alignment.offset.into());
    if read_only && !whole {
        return None;
    }
    let target = Target::extended_by_writes(file.try_clone().ok()?, alignment);
    Some(Arc::new(target))
}

/// The same file for rings, if it can be used so: they want whole sectors.
fn for_rings(file: &File, read_only: bool) -> Option<Arc<Target>> {
    fill_up(file, read_only, SECTOR).ok()?;
    let target = Target::new(file.try_clone().ok()?).ok()?;
    Some(Arc::new(target))
}

/// Extends a writable file to a whole block.
fn fill_up(file: &File, read_only: bool, block: u64) -> io::Result<()> {
    let length = file::length(file)?;
    if !read_only && !length.is_multiple_of(block) {
        file.set_len(length.next_multiple_of(block))?;
    }
    Ok(())
}

fn read_error(error: io::Error) -> OpenError {
    OpenError::Host("read the qcow2 image", error)
}

fn open_disk(medium: Arc<dyn Medium>, read_only: bool, below: Vec<Below>) -> Result<Disk, OpenError> {
    let header = Header::read(&*medium).map_err(read_error)??;
    header.check_usable(!read_only, !below.is_empty())?;
    header.check_extensions(&*medium).map_err(read_error)??;
    if header.size == 0 {
        return Err(OpenError::Empty);
    }
    if !header.size.is_multiple_of(SECTOR) {
        return Err(OpenError::Size(header.size));
    }
    let layer = if read_only {
        Layer::direct(medium)
    } else {
        make_consistent(&*medium, &header)?;
        let base = Arc::new(Base::new(medium));
        let stage = Stage::new(Arc::clone(&base), &header).map_err(read_error)?;
        Layer::staged(base, stage)
    };
    let below = open_below(below)?;
    let traits = Traits {
        read_only,
        cluster: header.cluster_size(),
        version: header.version,
        below: below.as_ref().map(FormatAccess::size),
        capacity: header.size,
    };
    let access = open_layer(layer.clone(), !read_only, below)?;
    Ok(Disk::new(access, layer, traits))
}

/// Refuses an image whose tables contradict themselves; frees what leaked.
fn make_consistent(medium: &dyn Medium, header: &Header) -> Result<(), OpenError> {
    let inspection = check::inspect(medium, header).map_err(read_error)??;
    if let Some(reason) = inspection.report.first {
        return Err(Refusal::Inconsistent(reason).into());
    }
    if inspection.report.leaks != 0 {
        tracing::info!(
            "a qcow2 image was not closed: {} leaked clusters are freed",
            inspection.report.leaks
        );
        inspection
            .free_leaks(medium, header)
            .map_err(|error| OpenError::Host("repair the qcow2 image", error))?;
    }
    Ok(())
}

/// Opens the images below, the deepest first.
fn open_below(below: Vec<Below>) -> Result<Option<FormatAccess<Layer>>, OpenError> {
    let mut lower: Option<FormatAccess<Layer>> = None;
    for image in below.into_iter().rev() {
        lower = Some(match image {
            Below::Raw(_) if lower.is_some() => return Err(Refusal::NoBacking.into()),
            Below::Raw(medium) => {
                let raw = Raw::open_image(Layer::direct(medium), false).map_err(read_error)?;
                FormatAccess::new(raw)
            }
            Below::Qcow2(medium) => {
                let header = Header::read(&*medium).map_err(read_error)??;
                header.check_usable(false, lower.is_some())?;
                header.check_extensions(&*medium).map_err(read_error)??;
                open_layer(Layer::direct(medium), false, lower)?
            }
        });
    }
    Ok(lower)
}

fn open_layer(
    layer: Layer,
    write: bool,
    below: Option<FormatAccess<Layer>>,
) -> Result<FormatAccess<Layer>, OpenError> {
    let driver: Qcow2<Layer> = Qcow2::builder(layer)
        .write(write)
        .backing(below)
        .data_file(None)
        .open(DenyImplicitOpenGate::default())
        .map_err(read_error)?;
    debug_assert_eq!(driver.writable(), write);
    Ok(FormatAccess::new(driver))
}

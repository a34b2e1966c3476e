//! Opens one file: the device of KVM, a kernel, an initial RAM disk, an image or a block device.

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileTypeExt,
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{Mode, OFlags, major, minor},
    io::Errno,
};
use vmmd_host::{
    failure::Failure,
    ledger::FileId,
    roots::{self, Refused, Within},
    text,
};
use vmmd_spec::disk::Cache;

use super::{ENDING, in_use};

/// An image or block device, open.
#[derive(Debug)]
pub struct OpenFile {
    /// The descriptor.
    pub fd: OwnedFd,
    /// Identity of the file or device.
    pub id: FileId,
    /// Its length in bytes.
    pub size: u64,
    /// It is no file but a device.
    pub block_device: bool,
}

impl OpenFile {
    /// Discard granularity in bytes from the queue of the block device, or of the disk that
    /// contains the partition. 0 when the device does not support discards.
    pub fn discard_granularity(&self) -> Option<u32> {
        if !self.block_device {
            return None;
        }
        let device = rustix::fs::fstat(&self.fd).ok()?.st_rdev;
        let folder = format!("/sys/dev/block/{}:{}", major(device), minor(device));
        let read = |queue| fs::read_to_string(format!("{folder}/{queue}/discard_granularity")).ok();
        read("queue").or_else(|| read("../queue"))?.trim().parse().ok()
    }
}

/// Opens the device through which KVM is used.
pub fn open_kvm(device: &Path) -> Result<OwnedFd, Failure> {
    rustix::fs::open(device, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| {
        let message = match errno {
            rustix::io::Errno::NOENT | rustix::io::Errno::NODEV | rustix::io::Errno::NXIO => {
                "the node has no /dev/kvm: switch on VT-x or AMD-V in its firmware (or nesting in its hypervisor) and \
                 load the kernel module kvm_intel or kvm_amd"
                    .to_owned()
            }
            rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => {
                "no permission to open /dev/kvm: run vmmd as root, with the device allowed in its container or unit"
                    .to_owned()
            }
            errno => format!("/dev/kvm can't be opened: {}", text::words(&errno.into())),
        };
        Failure::precondition("KVM_UNAVAILABLE", message)
    })
}

/// Opens the kernel or the initial RAM disk; `field` is its path in the request.
pub(super) fn open_image(
    field: &str,
    what: &'static str,
    path: &Path,
    within: Within<'_>,
) -> Result<OwnedFd, Failure> {
    let is_kernel = what == "KERNEL";
    let (missing, unusable) = if is_kernel {
        ("KERNEL_NOT_FOUND", "KERNEL_UNUSABLE")
    } else {
        ("INITRD_NOT_FOUND", "INITRD_UNUSABLE")
    };
    let refuse = |reason, problem: &str| {
        Failure::precondition(reason, format!("{field}: \"{}\" {problem}", path.display()))
    };
    let fd = open_file(path, within, OFlags::RDONLY).map_err(|refused| {
        if let Some(problem) = refused.about_roots(within, "kernels") {
            return refuse(PATH_NOT_ALLOWED, &problem);
        }
        let error = io::Error::from(refused);
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                refuse(missing, "does not exist on the node")
            }
            _ => refuse(unusable, &format!("can't be opened: {}", text::words(&error))),
        }
    })?;
    let metadata = metadata(&fd).map_err(|error| refuse(unusable, &text::words(&error)))?;
    if metadata.is_dir() {
        return Err(refuse(unusable, "is a directory"));
    }
    if !metadata.is_file() {
        return Err(refuse(unusable, "is not a regular file"));
    }
    if metadata.len() == 0 {
        return Err(refuse(unusable, "is empty"));
    }
    Ok(fd)
}

/// The path is not below a folder that the node's configuration allows.
pub const PATH_NOT_ALLOWED: &str = "PATH_NOT_ALLOWED";

/// Intended use of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// To be read.
    Read,
    /// Open for writing. Refused as DISK_IN_USE while the node uses the file. On a block device the
    /// open file is an exclusive claim.
    Write,
    /// To find out whether it could be opened for writing.
    Look,
}

/// Opens an image file or block device; `label` begins the error message.
pub fn open_image_file(
    label: &str,
    path: &Path,
    within: Within<'_>,
    cache: Cache,
    how: Use,
) -> Result<OpenFile, Failure> {
    let refuse = |reason, problem: &str| Failure::precondition(reason, format!("{label} {problem}"));
    let access = match how {
        Use::Read => OFlags::RDONLY,
        // open(2): O_EXCL on a block device fails while the system uses it (mounted, for example).
        // On a file it has no effect.
        Use::Write => OFlags::RDWR | OFlags::EXCL,
        Use::Look => OFlags::RDWR,
    };
    let opened = match cache {
        Cache::Writeback => open_claimed(path, within, access),
        Cache::None => open_claimed(path, within, access | OFlags::DIRECT),
        Cache::Auto => match open_claimed(path, within, access | OFlags::DIRECT) {
            // open(2): the file system does not support O_DIRECT.
            Err(Refused::Errno(Errno::INVAL)) => open_claimed(path, within, access),
            opened => opened,
        },
    };
    let opened = opened.map_err(|refused| match refused.about_roots(within, "disks") {
        Some(problem) => Err(refuse(PATH_NOT_ALLOWED, &problem)),
        None => Ok(io::Error::from(refused)),
    });
    let fd = opened.map_err(|why| match why {
        Err(failure) => failure,
        Ok(error) => refuse_open(&refuse, path, cache, &error),
    })?;
    let unreadable = |error: io::Error| refuse("DISK_UNUSABLE", &text::words(&error));
    let metadata = metadata(&fd).map_err(unreadable)?;
    let block_device = metadata.file_type().is_block_device();
    let size = if metadata.is_file() {
        metadata.len()
    } else if block_device {
        rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0)).map_err(|errno| unreadable(errno.into()))?
    } else if metadata.is_dir() {
        return Err(refuse("DISK_UNUSABLE", "is a directory"));
    } else {
        return Err(refuse(
            "DISK_UNUSABLE",
            "is neither a regular file nor a block device",
        ));
    };
    let stat = rustix::fs::fstat(&fd).map_err(|errno| unreadable(errno.into()))?;
    // An exclusive claim on a block device was refused already.
    let claimed = block_device && how == Use::Write;
    if how != Use::Read
        && !claimed
        && let Some(user) = in_use::user(&stat)
    {
        return Err(refuse("DISK_IN_USE", &format!("is in use by {user}")));
    }
    Ok(OpenFile {
        id: identity(&stat),
        fd,
        size,
        block_device,
    })
}

/// Refusal for a failed open of an image.
fn refuse_open(
    refuse: &impl Fn(&'static str, &str) -> Failure,
    path: &Path,
    cache: Cache,
    error: &io::Error,
) -> Failure {
    let Some(errno) = Errno::from_io_error(error) else {
        return refuse("DISK_UNUSABLE", &text::words(error));
    };
    match errno {
        Errno::NOENT | Errno::NOTDIR => refuse("DISK_NOT_FOUND", "does not exist on the node"),
        Errno::BUSY => {
            let user =
                node_user(path).unwrap_or_else(|| "another program, which has it for itself".to_owned());
            refuse("DISK_IN_USE", &format!("is in use by {user}"))
        }
        Errno::ISDIR => refuse("DISK_UNUSABLE", "is a directory"),
        Errno::ROFS => refuse(
            "DISK_UNUSABLE",
            "is on a read-only file system: set `readOnly` or move it",
        ),
        Errno::INVAL if cache == Cache::None => refuse(
            "DIRECT_IO_UNSUPPORTED",
            "is on a file system without direct I/O, which DISK_CACHE_NONE needs: leave `cache` out, or set \
             DISK_CACHE_WRITEBACK",
        ),
        Errno::PERM => refuse(
            "DISK_UNUSABLE",
            "can't be opened: operation not permitted; a block device must be in DeviceAllow= of vmmd.service, and a \
             file not immutable",
        ),
        errno => refuse(
            "DISK_UNUSABLE",
            &format!("can't be opened: {}", text::words(&errno.into())),
        ),
    }
}

/// As [`open_file`], but waits a moment for a busy block device without a visible user: the kernel
/// may still be closing the files of a process that has just ended.
fn open_claimed(path: &Path, within: Within<'_>, access: OFlags) -> Result<OwnedFd, Refused> {
    const AGAIN: Duration = Duration::from_millis(10);
    let deadline = Instant::now() + ENDING;
    loop {
        match open_file(path, within, access) {
            Err(Refused::Errno(Errno::BUSY)) if Instant::now() < deadline && node_user(path).is_none() => {
                thread::sleep(AGAIN);
            }
            opened => return opened,
        }
    }
}

/// The node's use of an open file other than by VMs: a loop device, a mounted file system, swap.
/// The text fits into a sentence.
pub fn node_user_of(fd: impl AsFd) -> Option<String> {
    in_use::user(&rustix::fs::fstat(fd).ok()?)
}

/// The node's use of a file other than by VMs.
fn node_user(path: &Path) -> Option<String> {
    in_use::user(&rustix::fs::stat(path).ok()?)
}

/// Opens without waiting for the other end of a FIFO or a carrier.
fn open_file(path: &Path, within: Within<'_>, access: OFlags) -> Result<OwnedFd, Refused> {
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = roots::open(path, within, flags)?;
    rustix::fs::fcntl_setfl(&fd, access.difference(OFlags::EXCL)).map_err(Refused::Errno)?;
    Ok(fd)
}

fn metadata(fd: &OwnedFd) -> io::Result<std::fs::Metadata> {
    std::fs::File::from(fd.as_fd().try_clone_to_owned()?).metadata()
}

/// Identity of the file at a path, if it exists.
pub(super) fn identity_at(path: &Path) -> Option<FileId> {
    Some(identity(&rustix::fs::stat(path).ok()?))
}

pub(super) fn identity(stat: &rustix::fs::Stat) -> FileId {
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice {
        FileId {
            device: stat.st_rdev,
            inode: 0,
        }
    } else {
        FileId {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
}

//! Requests to block devices (`linux/fs.h`).

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd},
};

use rustix::fs::{FileType, major, minor};

// _IO(0x12, n) and _IOR(0x12, n, size_t), which libc does not name for Linux.
const BLKSSZGET: libc::c_ulong = 0x1268;
const BLKDISCARD: libc::c_ulong = 0x1277;
const BLKIOOPT: libc::c_ulong = 0x1279;
const BLKPBSZGET: libc::c_ulong = 0x127b;
const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;

/// Forgets the content of these bytes. Both numbers have to be multiples of the logical block.
pub fn discard(device: impl AsFd, offset: u64, length: u64) -> io::Result<()> {
    let range = [offset, length];
    // SAFETY: BLKDISCARD reads two 64-bit numbers through the pointer, which is valid for the duration of the call.
    let result = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), BLKDISCARD, range.as_ptr()) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Size in bytes by now.
pub fn size(device: impl AsFd) -> io::Result<u64> {
    let mut size = 0_u64;
    // SAFETY: BLKGETSIZE64 writes one 64-bit number through the pointer, which is valid for the duration of the call.
    let result = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), BLKGETSIZE64, &raw mut size) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(size)
    }
}

/// Smallest unit of addressing, in bytes.
pub fn logical_block(device: impl AsFd) -> io::Result<u32> {
    get(device, BLKSSZGET)
}

/// Smallest unit that is written without reading, in bytes.
pub fn physical_block(device: impl AsFd) -> io::Result<u32> {
    get(device, BLKPBSZGET)
}

/// Best size of requests in bytes; 0 when nothing is known.
pub fn optimal_io(device: impl AsFd) -> io::Result<u32> {
    get(device, BLKIOOPT)
}

/// Returns the discard granularity of the queue of the block device, or of the disk that contains
/// the partition: in bytes, 0 without discard support. `None` for a file, or if the value is not
/// available. Opens files of /sys, which a `vmm` in its sandbox cannot do.
pub fn discard_granularity(device: impl AsFd) -> Option<u32> {
    let stat = rustix::fs::fstat(device).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice {
        return None;
    }
    let folder = format!("/sys/dev/block/{}:{}", major(stat.st_rdev), minor(stat.st_rdev));
    let read = |queue| fs::read_to_string(format!("{folder}/{queue}/discard_granularity")).ok();
    read("queue").or_else(|| read("../queue"))?.trim().parse().ok()
}

/// One of the requests that give an int.
fn get(device: impl AsFd, request: libc::c_ulong) -> io::Result<u32> {
    let mut value: libc::c_uint = 0;
    // SAFETY: the requests that this is called with write one int through the pointer, which is valid for the duration
    // of the call.
    let result = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), request, &raw mut value) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(value)
    }
}

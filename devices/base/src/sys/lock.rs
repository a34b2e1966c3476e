//! Locks that belong to an open file description (fcntl(2), "Open file description locks").
//!
//! Images are locked at single bytes, like in QEMU (its block/file-posix.c, and the page "Image
//! locking" of its manual): byte 100 + n stands for an operation that the holder performs, 200 + n
//! for an operation that the holder forbids to others. A writer here write-locks all of these
//! bytes, which excludes every other user. A reader read-locks "reads" (100), "forbid writes" (201)
//! and "forbid resizes" (203). So two VMs of ours exclude each other as required, on one node or on
//! several nodes with a file system that shares byte-range locks (NFS), and so do we and QEMU,
//! qemu-img and qemu-nbd. A lock on the whole file, which vmmd takes while it prepares a VM and
//! older releases took, covers the same bytes.
//!
//! The locks are advisory: they do not affect reads and writes of the bytes with these numbers.

use std::{
    fs, io,
    ops::Range,
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::MetadataExt as _,
    },
    path::Path,
};

/// Rights that remain for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Others may read it.
    Read,
    /// Others may not use the file.
    Write,
}

/// All bytes that locks are about.
const ALL: Range<i64> = 100..300;
/// The bytes that a reader locks.
const READER: [Range<i64>; 3] = [100..101, 201..202, 203..204];

/// Locks an image, without waiting; says whether that succeeded. The lock lasts until the last descriptor that shares
/// this open file description is closed, also in other processes.
pub fn lock_image(file: impl AsFd, kind: LockKind) -> io::Result<bool> {
    let file = file.as_fd();
    if kind == LockKind::Write {
        return try_lock(file, libc::F_WRLCK, &ALL);
    }
    for (count, range) in READER.iter().enumerate() {
        let locked = try_lock(file, libc::F_RDLCK, range);
        if !matches!(locked, Ok(true)) {
            for range in READER.iter().take(count) {
                try_lock(file, libc::F_UNLCK, range)?;
            }
            return locked;
        }
    }
    Ok(true)
}

/// Releases the lock of [`lock_image`], for all processes that share this open file description.
pub fn unlock_image(file: impl AsFd) -> io::Result<()> {
    try_lock(file, libc::F_UNLCK, &ALL).map(drop)
}

/// Returns the process that blocks [`lock_image`], as far as this host reports it: "qemu-img
/// (process 4711)".
pub fn holder(file: impl AsFd, kind: LockKind) -> Option<String> {
    let file = file.as_fd();
    let (lock, ranges) = match kind {
        LockKind::Read => (libc::F_RDLCK, &READER[..]),
        LockKind::Write => (libc::F_WRLCK, &[ALL][..]),
    };
    let found = ranges
        .iter()
        .find_map(|range| conflict(file, lock, range).ok()?)?;
    // Locks of open file descriptions have no process; others may lie on another node, as one with number 0.
    let process = if found > 0 {
        Some(found.cast_unsigned())
    } else {
        let metadata = fs::File::from(file.try_clone_to_owned().ok()?).metadata().ok()?;
        process_with_lock(metadata.dev(), metadata.ino())
    }?;
    let name = fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
    // Control characters are a process's to choose.
    let name: String = name
        .trim_end()
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect();
    Some(format!("{name} (process {process})"))
}

fn try_lock(file: impl AsFd, kind: libc::c_int, range: &Range<i64>) -> io::Result<bool> {
    let lock = lock(kind, range);
    // SAFETY: F_OFD_SETLK reads one `flock` through the pointer, which is valid for the duration of the call.
    let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

/// The process that has a lock in the way (-1 for an open file description's), if there is one.
fn conflict(file: impl AsFd, kind: libc::c_int, range: &Range<i64>) -> io::Result<Option<libc::pid_t>> {
    let mut lock = lock(kind, range);
    // SAFETY: F_OFD_GETLK reads and writes one `flock` through the pointer, which is valid for the duration of the call.
    let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let free = libc::c_int::from(lock.l_type) == libc::F_UNLCK;
    Ok((!free).then_some(lock.l_pid))
}

fn lock(kind: libc::c_int, range: &Range<i64>) -> libc::flock {
    libc::flock {
        l_type: libc::c_short::try_from(kind).unwrap_or_default(),
        l_whence: libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: range.start,
        l_len: range.end.saturating_sub(range.start),
        // Has to be 0 for this kind of lock.
        l_pid: 0,
    }
}

/// Another process with a locked descriptor of that file. The kernel shows those of processes that this one may trace.
fn process_with_lock(device: u64, inode: u64) -> Option<u32> {
    let ours = std::process::id();
    fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .find(|process| *process != ours && has_lock(*process, device, inode))
}

fn has_lock(process: u32, device: u64, inode: u64) -> bool {
    let folder = format!("/proc/{process}/fd");
    let Ok(descriptors) = fs::read_dir(folder) else {
        return false;
    };
    descriptors.flatten().any(|descriptor| {
        let path = descriptor.path();
        fs::metadata(&path).is_ok_and(|data| data.dev() == device && data.ino() == inode)
            && shows_lock(process, &path)
    })
}

fn shows_lock(process: u32, descriptor: &Path) -> bool {
    let Some(number) = descriptor.file_name().and_then(|name| name.to_str()) else {
        return false;
    };
    // proc_pid_fdinfo(5): a line for each lock, "lock:	1: OFDLCK  ADVISORY  WRITE -1 08:01:1234 100 299".
    fs::read_to_string(format!("/proc/{process}/fdinfo/{number}"))
        .is_ok_and(|text| text.lines().any(|line| line.starts_with("lock:")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        fs::File,
        io::{BufRead as _, BufReader},
        process::{Command, Stdio},
    };

    use super::*;

    /// Range that the first releases locked.
    const WHOLE: Range<i64> = 0..0;

    struct Opened(tempfile::NamedTempFile);

    impl Opened {
        fn new() -> Self {
            Self(tempfile::NamedTempFile::new().unwrap())
        }

        fn again(&self) -> File {
            File::options()
                .read(true)
                .write(true)
                .open(self.0.path())
                .unwrap()
        }
    }

    #[test]
    fn one_writer_or_many_readers_by_open_file_not_by_process() {
        let file = Opened::new();
        let (a, b, c) = (file.again(), file.again(), file.again());
        assert!(lock_image(&a, LockKind::Read).unwrap());
        assert!(lock_image(&b, LockKind::Read).unwrap());
        assert!(!lock_image(&c, LockKind::Write).unwrap());
        drop((a, b));
        assert!(lock_image(&c, LockKind::Write).unwrap());
        let shared = c.try_clone().unwrap();
        drop(c);
        assert!(!lock_image(file.again(), LockKind::Read).unwrap());
        drop(shared);
        assert!(lock_image(file.again(), LockKind::Read).unwrap());
    }

    #[test]
    fn a_lock_that_is_given_up_is_free_for_others_and_can_be_taken_again() {
        let file = Opened::new();
        let (here, there) = (file.again(), file.again());
        for kind in [LockKind::Write, LockKind::Read] {
            assert!(lock_image(&here, kind).unwrap());
            let shared = here.try_clone().unwrap();
            unlock_image(&shared).unwrap();
            assert!(lock_image(&there, LockKind::Write).unwrap());
            assert!(!lock_image(&here, kind).unwrap());
            unlock_image(&there).unwrap();
            assert!(lock_image(&here, kind).unwrap());
            unlock_image(&here).unwrap();
        }
    }

    #[test]
    fn whoever_locks_the_whole_file_excludes_us_and_is_excluded() {
        let file = Opened::new();
        let whole = |kind| {
            let fd = file.again();
            (try_lock(&fd, kind, &WHOLE).unwrap(), fd)
        };
        for (theirs, ours, together) in [
            (libc::F_WRLCK, LockKind::Write, false),
            (libc::F_WRLCK, LockKind::Read, false),
            (libc::F_RDLCK, LockKind::Write, false),
            (libc::F_RDLCK, LockKind::Read, true),
        ] {
            let (locked, held) = whole(theirs);
            assert!(locked);
            assert_eq!(lock_image(file.again(), ours).unwrap(), together);
            drop(held);
            let held = file.again();
            assert!(lock_image(&held, ours).unwrap());
            assert_eq!(whole(theirs).0, together);
        }
    }

    #[test]
    fn a_reader_that_is_refused_keeps_no_lock() {
        let file = Opened::new();
        let (other, reader) = (file.again(), file.again());
        // A process that resizes, and lets others read and write.
        assert!(try_lock(&other, libc::F_WRLCK, &(203..204)).unwrap());
        assert!(!lock_image(&reader, LockKind::Read).unwrap());
        drop(other);
        assert!(lock_image(file.again(), LockKind::Write).unwrap());
    }

    #[test]
    fn the_holder_is_named_when_it_is_another_process() {
        let file = Opened::new();
        let held = file.again();
        assert!(lock_image(&held, LockKind::Write).unwrap());
        let other = file.again();
        assert_eq!(holder(&other, LockKind::Write), None, "it is this process");
        // It keeps the descriptor, and with it the lock, when this process closes its own.
        let mut child = Command::new("sh")
            .args(["-c", "echo ready; read line"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(held)
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert!(!lock_image(&other, LockKind::Read).unwrap());
        let expected = format!(" (process {})", child.id());
        let found = holder(&other, LockKind::Read);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(
            found.clone().is_some_and(|name| name.ends_with(&expected)),
            "{found:?}"
        );
        assert!(lock_image(&other, LockKind::Write).unwrap());
    }
}

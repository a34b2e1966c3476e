//! OFD locks (fcntl(2), "Open file description locks"). They belong to the open file. A lock that
//! the daemon takes therefore stays with the `vmm` that receives the descriptor, for as long as the
//! `vmm` holds it.
//!
//! The daemon locks the same bytes as the `vmm` in the same open file, and as QEMU (the page "Image
//! locking" of its manual). Byte 100 + n stands for an operation of the holder, and 200 + n for an
//! operation that the holder forbids to others. A writer locks them all. A reader locks "reads"
//! (100), "no writes by others" (201) and "no resize by others" (203).

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    thread,
    time::{Duration, Instant},
};

/// Other holders that a lock permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Other readers.
    Shared,
    /// Nobody.
    Exclusive,
}

/// First byte and number of bytes.
type Range = (i64, i64);
const WRITER: [Range; 1] = [(100, 200)];
const READER: [Range; 3] = [(100, 1), (201, 1), (203, 1)];

/// Locks an image without waiting; false when somebody else's lock is in the way. An exclusive lock needs a descriptor
/// that is open for writing.
pub fn lock_file(file: impl AsFd, kind: LockKind) -> io::Result<bool> {
    let (lock_type, ranges) = what(kind);
    // After a refusal the caller closes the descriptor, which releases the ranges locked before.
    for range in ranges {
        if !lock_range(file.as_fd(), lock_type, *range)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// As [`lock_file`], but retries until `limit` has passed. There is no event to wait for: a
/// blocking fcntl(2) has no timeout, and would take the lock after its caller has given up.
pub fn lock_file_within(file: impl AsFd, kind: LockKind, limit: Duration) -> io::Result<bool> {
    look_again(file, kind, limit, thread::sleep)
}

fn look_again(
    file: impl AsFd,
    kind: LockKind,
    limit: Duration,
    mut pause: impl FnMut(Duration),
) -> io::Result<bool> {
    const AGAIN: Duration = Duration::from_millis(10);
    let deadline = Instant::now() + limit;
    loop {
        if lock_file(&file, kind)? {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
        pause(AGAIN);
    }
}

/// Whether [`lock_file`] would succeed now; takes nothing.
pub fn could_lock(file: impl AsFd, kind: LockKind) -> io::Result<bool> {
    let (lock_type, ranges) = what(kind);
    for range in ranges {
        if conflict(file.as_fd(), lock_type, *range)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A kind of lock as fcntl(2) has it.
fn what(kind: LockKind) -> (i32, &'static [Range]) {
    match kind {
        LockKind::Shared => (libc::F_RDLCK, &READER[..]),
        LockKind::Exclusive => (libc::F_WRLCK, &WRITER[..]),
    }
}

/// Whether somebody else's lock would stand in the way of this one.
fn conflict(file: BorrowedFd<'_>, lock_type: i32, range: Range) -> io::Result<bool> {
    let mut lock = flock(lock_type, range);
    // SAFETY: the descriptor is open, and F_OFD_GETLK reads and writes one `flock`, which outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if result == 0 {
        return Ok(i32::from(lock.l_type) != libc::F_UNLCK);
    }
    Err(io::Error::last_os_error())
}

fn flock(lock_type: i32, (start, length): Range) -> libc::flock {
    // `l_pid` must be 0 for OFD locks.
    libc::flock {
        l_type: i16::try_from(lock_type).unwrap_or_default(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: start,
        l_len: length,
        l_pid: 0,
    }
}

fn lock_range(file: BorrowedFd<'_>, lock_type: i32, range: Range) -> io::Result<bool> {
    let lock = flock(lock_type, range);
    // SAFETY: the descriptor is open, and F_OFD_SETLK reads one `flock`, which outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

/// A process of this node that has a lock on the file: "qemu-img (process 4711)". For a message;
/// `None` when no process is found.
pub fn lock_holder(file: impl AsFd) -> Option<String> {
    let wanted = Locked::on(file)?;
    let own = std::process::id();
    let numbers = fs::read_dir("/proc").ok()?.flatten();
    let mut processes = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let process = processes.find(|process| *process != own && wanted.by(*process, ""))?;
    let name = fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
    Some(format!("{} (process {process})", crate::text::brief_line(&name)))
}

/// Whether this process has a file locked by another descriptor than this one, which may have a part of a lock that was refused.
pub fn is_locked_here(file: impl AsFd) -> bool {
    let this = file.as_fd().as_raw_fd().to_string();
    Locked::on(file).is_some_and(|wanted| wanted.by(std::process::id(), &this))
}

/// Looks for locks of a file.
struct Locked {
    /// The file's part of a lock's line (proc_pid_fdinfo(5)): "lock: 1: OFDLCK ADVISORY WRITE -1
    /// fd:01:1234 100 299".
    file: String,
}

impl Locked {
    fn on(file: impl AsFd) -> Option<Self> {
        let stat = rustix::fs::fstat(file).ok()?;
        let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
        Some(Self {
            file: format!(" {major:02x}:{minor:02x}:{} ", stat.st_ino),
        })
    }

    /// Whether a process has one by another descriptor than that of this number.
    fn by(&self, process: u32, but: &str) -> bool {
        let infos = fs::read_dir(format!("/proc/{process}/fdinfo"));
        let infos = infos.into_iter().flatten().flatten();
        let mut infos = infos.filter(|info| info.file_name() != but);
        infos.any(|info| {
            let text = fs::read_to_string(info.path()).unwrap_or_default();
            let mut locks = text.lines().filter(|line| line.starts_with("lock:"));
            locks.any(|line| line.contains(&self.file))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_lock_stays_with_the_open_file_until_its_last_descriptor_is_closed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(file.path()).unwrap();
        let (first, second) = (open(), open());
        assert!(lock_file(&first, LockKind::Exclusive).unwrap());
        let passed_on = first.try_clone().unwrap();
        drop(first);
        assert!(!lock_file(&second, LockKind::Exclusive).unwrap());
        assert!(!lock_file(&second, LockKind::Shared).unwrap());
        assert!(is_locked_here(&second));
        assert!(!is_locked_here(&passed_on), "its own does not count");
        drop(passed_on);
        assert!(!is_locked_here(&second));
        assert!(lock_file(&second, LockKind::Exclusive).unwrap());
    }

    #[test]
    fn a_lock_that_is_about_to_go_is_waited_for() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (first, second) = (file.reopen().unwrap(), file.reopen().unwrap());
        assert!(lock_file(&first, LockKind::Exclusive).unwrap());
        assert!(!lock_file_within(&second, LockKind::Exclusive, Duration::ZERO).unwrap());
        let mut holder = Some(first);
        let limit = Duration::from_secs(60);
        assert!(look_again(&second, LockKind::Exclusive, limit, |_| drop(holder.take())).unwrap());
        assert!(holder.is_none(), "it was taken while somebody had it");
    }

    #[test]
    fn who_has_a_lock_is_found_in_other_processes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (reader, writer) = (File::open(file.path()).unwrap(), file.reopen().unwrap());
        assert!(lock_file(&writer, LockKind::Exclusive).unwrap());
        assert_eq!(lock_holder(&reader), None, "our own don't count");
        let mut sleeper = std::process::Command::new("sleep")
            .arg("1000")
            .stdin(writer)
            .spawn()
            .unwrap();
        let found = lock_holder(&reader);
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        // The process may still have its name from before the exec.
        let found = found.unwrap();
        assert!(
            found.ends_with(&format!(" (process {})", sleeper.id())),
            "{found}"
        );
    }

    #[test]
    fn readers_share_and_keep_writers_out() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let reader = || File::open(file.path()).unwrap();
        let (first, second) = (reader(), reader());
        assert!(lock_file(&first, LockKind::Shared).unwrap());
        assert!(lock_file(&second, LockKind::Shared).unwrap());
        let writer = File::options().write(true).open(file.path()).unwrap();
        assert!(!lock_file(&writer, LockKind::Exclusive).unwrap());
    }
}

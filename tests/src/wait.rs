//! Deadlines, and waiting for what has an event to wait on.

use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A point in time after which waiting is given up. One deadline covers a whole step, however many waits it has.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    end: Instant,
    total: Duration,
}

impl Deadline {
    /// A deadline `total` from now.
    pub fn after(total: Duration) -> Self {
        Deadline { end: Instant::now() + total, total }
    }

    /// A deadline `seconds` from now.
    pub fn seconds(seconds: u64) -> Self {
        Self::after(Duration::from_secs(seconds))
    }

    /// What is left, zero when it has passed.
    pub fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Whether it has passed.
    pub fn passed(&self) -> bool {
        self.left().is_zero()
    }

    fn timespec(&self) -> Timespec {
        let left = self.left();
        Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        }
    }
}

impl fmt::Display for Deadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.total)
    }
}

/// Which of two descriptors has something to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The first, whatever the second has.
    First,
    /// Only the second.
    Second,
}

/// Waits until `fd` can be read or its other end is closed; false when the deadline passes first.
pub fn readable(fd: impl AsFd, deadline: Deadline) -> Result<bool> {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll_until(&mut fds, deadline)
}

/// Waits until one of two descriptors can be read or is closed; `None` when the deadline passes first.
pub fn either_readable(first: impl AsFd, second: impl AsFd, deadline: Deadline) -> Result<Option<Which>> {
    let mut fds = [PollFd::new(&first, PollFlags::IN), PollFd::new(&second, PollFlags::IN)];
    if !poll_until(&mut fds, deadline)? {
        return Ok(None);
    }
    let first = fds.first().is_some_and(|fd| !fd.revents().is_empty());
    Ok(Some(if first { Which::First } else { Which::Second }))
}

fn poll_until(fds: &mut [PollFd<'_>], deadline: Deadline) -> Result<bool> {
    loop {
        match poll(fds, Some(&deadline.timespec())) {
            Ok(0) if deadline.passed() => return Ok(false),
            Ok(_) if fds.iter().all(|fd| fd.revents().is_empty()) => {}
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("poll"),
        }
    }
}

/// A handle on a process that does not mistake another one with the same number for it.
pub struct Process {
    fd: OwnedFd,
    /// The process id.
    pub pid: u32,
}

impl Process {
    /// Takes hold of the running process `pid`; `None` when there is none.
    pub fn open(pid: u32) -> Result<Option<Process>> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).context("a process id is a positive number")?;
        match pidfd_open(raw, PidfdFlags::empty()) {
            Ok(fd) => Ok(Some(Process { fd, pid })),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("pidfd_open {pid}")),
        }
    }

    /// Waits for its end; false when the deadline passes first.
    pub fn wait_exit(&self, deadline: Deadline) -> Result<bool> {
        readable(&self.fd, deadline)
    }

    /// Sends a signal to exactly this process.
    pub fn signal(&self, signal: rustix::process::Signal) -> Result<()> {
        match rustix::process::pidfd_send_signal(&self.fd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error).with_context(|| format!("signal process {}", self.pid)),
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Reads `stream` until it has given `wanted`, and returns all that was read. Fails with what was read when the stream
/// ends or the deadline passes first.
pub fn text_from(mut stream: impl Read + AsFd, wanted: &str, deadline: Deadline) -> Result<String> {
    let mut seen = Vec::new();
    let mut chunk = [0u8; 4096];
    loop {
        let text = String::from_utf8_lossy(&seen);
        if text.contains(wanted) {
            return Ok(text.into_owned());
        }
        if !readable(&stream, deadline)? {
            bail!("no {wanted:?} within {deadline}; read so far:\n{}", tail(&text, 40));
        }
        match stream.read(&mut chunk).context("read")? {
            0 => bail!("the stream ended before {wanted:?}; read so far:\n{}", tail(&text, 40)),
            count => seen.extend_from_slice(chunk.get(..count).unwrap_or_default()),
        }
    }
}

/// Follows a log file that another process appends to until it contains `wanted`, and returns its text up to now.
/// The file must exist.
pub fn text_in_file(path: &Path, wanted: &str, deadline: Deadline) -> Result<String> {
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC).context("inotify")?;
    inotify::add_watch(&watch, path, inotify::WatchFlags::MODIFY | inotify::WatchFlags::CLOSE_WRITE)
        .with_context(|| format!("watch {}", path.display()))?;
    let mut file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let mut text = Vec::new();
    let mut events = [0u8; 4096];
    loop {
        file.seek(SeekFrom::Start(text.len() as u64))?;
        file.read_to_end(&mut text)?;
        let so_far = String::from_utf8_lossy(&text);
        if so_far.contains(wanted) {
            return Ok(so_far.into_owned());
        }
        if !readable(&watch, deadline)? {
            bail!("{} has no {wanted:?} after {deadline}; it ends with:\n{}", path.display(), tail(&so_far, 40));
        }
        rustix::io::read(&watch, &mut events).context("read inotify events")?;
    }
}

/// The last `lines` lines of `text`.
pub fn tail(text: &str, lines: usize) -> &str {
    let start = text.trim_end().rmatch_indices('\n').nth(lines.saturating_sub(1)).map_or(0, |(at, _)| at + 1);
    text.get(start..).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_tail_is_the_last_lines() {
        assert_eq!(tail("a\nb\nc\n", 2), "b\nc\n");
        assert_eq!(tail("a\nb", 5), "a\nb");
    }

    #[test]
    fn text_is_waited_for_and_its_absence_reported() {
        let (mut writer, reader) = UnixStream::pair().expect("socket pair");
        writer.write_all(b"one\ntwo READY\n").expect("write");
        let seen = text_from(&reader, "READY", Deadline::seconds(5)).expect("the text");
        assert_eq!(seen, "one\ntwo READY\n");
        let error = text_from(&reader, "READY", Deadline::after(Duration::from_millis(10))).expect_err("no text");
        assert!(error.to_string().contains("no \"READY\" within 10ms"), "{error}");
        drop(writer);
        let error = text_from(&reader, "READY", Deadline::seconds(5)).expect_err("the end");
        assert!(error.to_string().contains("ended"), "{error}");
    }

    #[test]
    fn text_appended_to_a_file_wakes_the_waiter() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let path = file.path().to_owned();
        let waiter = std::thread::spawn(move || text_in_file(&path, "done", Deadline::seconds(10)));
        let mut writer = file.reopen().expect("reopen");
        writer.write_all(b"not yet\n").expect("write");
        writer.write_all(b"done\n").expect("write");
        assert_eq!(waiter.join().expect("thread").expect("text"), "not yet\ndone\n");
    }
}

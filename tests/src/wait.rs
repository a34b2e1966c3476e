//! Deadlines, and waits for anything that has an event.

use std::fmt;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
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
        Deadline {
            end: Instant::now() + total,
            total,
        }
    }

    /// A deadline `seconds` from now.
    pub fn seconds(seconds: u64) -> Self {
        Self::after(Duration::from_secs(seconds))
    }

    /// Remaining time; zero after the deadline.
    pub fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Whether it has passed.
    pub fn passed(&self) -> bool {
        self.left().is_zero()
    }

    /// This one, or `total` from now if that comes first.
    pub fn at_most(&self, total: Duration) -> Self {
        Self::after(total.min(self.left()))
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
    /// The first, independent of the second.
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
    let mut fds = [
        PollFd::new(&first, PollFlags::IN),
        PollFd::new(&second, PollFlags::IN),
    ];
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
        let raw = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .context("a process id is a positive number")?;
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

/// A stream that is read up to one thing after another, such as a console.
pub struct Follow<R> {
    stream: R,
    bytes: Vec<u8>,
    /// Where the last thing that was waited for ends.
    done: usize,
    /// Text after which no more output follows.
    end: Option<&'static str>,
}

impl<R: Read + AsFd> Follow<R> {
    /// Creates a reader at the start of the stream.
    pub fn new(stream: R) -> Self {
        Follow {
            stream,
            bytes: Vec::new(),
            done: 0,
            end: None,
        }
    }

    /// Like [`Self::new`], but a wait fails as soon as `end` arrives before the wanted text.
    pub fn ends_with(stream: R, end: &'static str) -> Self {
        Follow {
            end: Some(end),
            ..Self::new(stream)
        }
    }

    /// Reads until `wanted` arrives after the previous match. Returns the text from the previous
    /// match up to the end of `wanted`. Fails with the text read so far if the stream ends or the
    /// deadline passes first.
    pub fn until(&mut self, wanted: &str, deadline: Deadline) -> Result<String> {
        let mut chunk = [0u8; 4096];
        let longest = wanted.len().max(self.end.map_or(0, str::len));
        // Neither is before this.
        let mut looked = self.done;
        loop {
            let from = looked.saturating_sub(longest.saturating_sub(1)).max(self.done);
            let fresh = self.bytes.get(from..).unwrap_or_default();
            if let Some(at) = find(fresh, wanted.as_bytes()) {
                let end = from + at + wanted.len();
                let found = self.bytes.get(self.done..end).unwrap_or_default();
                self.done = end;
                return Ok(String::from_utf8_lossy(found).into_owned());
            }
            looked = self.bytes.len();
            if let Some(end) = self.end.filter(|end| find(fresh, end.as_bytes()).is_some()) {
                bail!(
                    "{end:?} came before {wanted:?}; read so far:\n{}",
                    tail(&self.text(), 60)
                );
            }
            if !readable(&self.stream, deadline)? {
                bail!(
                    "no {wanted:?} within {deadline}; read so far:\n{}",
                    tail(&self.text(), 40)
                );
            }
            match self.stream.read(&mut chunk).context("read")? {
                0 => bail!(
                    "the stream ended before {wanted:?}; read so far:\n{}",
                    tail(&self.text(), 40)
                ),
                count => self
                    .bytes
                    .extend_from_slice(chunk.get(..count).unwrap_or_default()),
            }
        }
    }

    /// All that was read so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// The last `lines` lines of `text`.
pub fn tail(text: &str, lines: usize) -> &str {
    let start = text
        .trim_end()
        .rmatch_indices('\n')
        .nth(lines.saturating_sub(1))
        .map_or(0, |(at, _)| at + 1);
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
    fn a_stream_is_followed_from_one_thing_to_the_next() {
        let (mut writer, reader) = UnixStream::pair().expect("socket pair");
        let mut follow = Follow::new(reader);
        writer.write_all(b"login: x login: y").expect("write");
        assert_eq!(
            follow.until("login: ", Deadline::seconds(5)).expect("first"),
            "login: "
        );
        assert_eq!(
            follow.until("login: ", Deadline::seconds(5)).expect("second"),
            "x login: "
        );
        let error = follow
            .until("login: ", Deadline::after(Duration::from_millis(10)))
            .expect_err("no third");
        assert!(
            error.to_string().contains("no \"login: \" within 10ms"),
            "{error}"
        );
        drop(writer);
        let error = follow
            .until("login: ", Deadline::seconds(5))
            .expect_err("the end");
        assert!(error.to_string().contains("ended"), "{error}");
        assert_eq!(follow.text(), "login: x login: y");
    }

    #[test]
    fn nothing_more_is_waited_for_when_the_end_has_come() {
        let (mut writer, reader) = UnixStream::pair().expect("socket pair");
        let mut follow = Follow::ends_with(reader, "end Kernel panic");
        writer
            .write_all(b"oops. ---[ end Kernel panic ]--- more")
            .expect("write");
        assert_eq!(
            follow.until("oops.", Deadline::seconds(5)).expect("before"),
            "oops."
        );
        let error = follow
            .until("GUEST-READY", Deadline::seconds(60))
            .expect_err("the end");
        assert!(
            error.to_string().contains("came before \"GUEST-READY\""),
            "{error}"
        );
        assert_eq!(
            follow
                .until("Kernel panic", Deadline::seconds(5))
                .expect("the end itself"),
            " ---[ end Kernel panic"
        );
    }
}

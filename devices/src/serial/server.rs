//! Serves a port to its readers and writers, on one thread.
//!
//! # Protocol of console clients
//!
//! A client connects to the UNIX stream socket and first receives 8 bytes: the length,
//! little-endian, of the output from before the connection. That output follows, and then the new
//! output. Bytes from the client are input. A client that reads too slowly loses output and
//! receives a line with the number of lost bytes instead. At most [`MAX_CLIENTS`] are served; a
//! connection above the limit is closed without the 8 bytes.
//!
//! # Cost
//!
//! The guest's first byte after a silence wakes the thread. The thread waits for [`COALESCE`]
//! before it writes the collected output, so that a flood costs 250 wake-ups a second at most and a
//! line is one write. The thread sleeps otherwise.

mod peer;
mod worker;

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use rustix::fs::{FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, fstat, open};
use vmm_base::thread::ThreadKind;
use vmm_sys_util::eventfd::EventFd;

pub use vmm_base::thread::Server;

use self::worker::Worker;
use super::{log::Log, port::Port};

/// Most clients at once.
pub const MAX_CLIENTS: usize = 16;

/// How long output is gathered before it is written.
pub const COALESCE: Duration = Duration::from_millis(4);

/// The terminal that `vmm run` was started on. Both descriptors are non-blocking; [`reopen`] makes them so without touching
/// those of the shell.
#[derive(Debug)]
pub struct Terminal {
    /// What is typed.
    pub input: OwnedFd,
    /// Where the output goes.
    pub output: OwnedFd,
    /// A byte that is not passed as input, and the event that it signals.
    pub escape: Option<(u8, EventFd)>,
}

/// Configuration of the server.
#[derive(Default)]
pub struct Setup {
    /// A listening UNIX stream socket; it is made non-blocking.
    pub listener: Option<OwnedFd>,
    /// A terminal.
    pub terminal: Option<Terminal>,
    /// Gets everything that is printed, up to the server's end.
    pub log: Option<Log>,
    /// Sees the output, as far as the server keeps up with it.
    pub watch: Option<Watch>,
}

/// Is called with more output, and with the number of bytes printed up to its end. The server waits for it.
pub type Watch = Box<dyn FnMut(&[u8], u64) + Send>;

/// Starts the server. At its end it writes the output so far (all of it to the log, to other readers as much as they take
/// without waiting) and closes everything. It is stopped after all vCPUs have stopped.
pub fn start(port: Arc<dyn Port>, setup: Setup) -> io::Result<Server> {
    Server::start(ThreadKind::Serial, "serial", |stop| {
        let mut worker = Worker::new(port, setup, stop)?;
        Ok(move || worker.run())
    })
}

/// Returns a non-blocking descriptor for the terminal, pipe or file behind `fd`, with its own file
/// description, so the mode of the shell's description is unchanged. Sockets cannot be reopened;
/// the mode of their description is changed. Regular files are duplicated unchanged.
pub fn reopen(fd: impl AsFd, write: bool) -> io::Result<OwnedFd> {
    if FileType::from_raw_mode(fstat(&fd)?.st_mode) == FileType::RegularFile {
        // Never blocks, and its position may be shared with standard error.
        return fd.as_fd().try_clone_to_owned();
    }
    let mode = if write { OFlags::WRONLY } else { OFlags::RDONLY };
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    let flags = mode | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    if let Ok(opened) = open(path, flags, Mode::empty()) {
        return Ok(opened);
    }
    let copy = fd.as_fd().try_clone_to_owned()?;
    set_nonblocking(&copy)?;
    Ok(copy)
}

fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    Ok(fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?)
}

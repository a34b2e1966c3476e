//! A connected socket that a worker watches: a client of a channel, or the host's end of a
//! connection.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    fault::Fault,
    session::{EventSet, Session},
};

/// A connected stream socket, and how its worker watches it.
#[derive(Debug)]
pub(super) struct Stream {
    socket: OwnedFd,
    /// The events that are watched; `None` while the socket is not watched.
    watched: Option<EventSet>,
    /// The other end is closed. The socket is not watched any more. Earlier data can still be read.
    hung_up: bool,
}

impl Stream {
    /// A socket that is not watched. It must not block.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            watched: None,
            hung_up: false,
        }
    }

    /// Whether the other end is closed, as far as [`check_hang_up`](Self::check_hang_up) has found.
    pub(super) fn is_hung_up(&self) -> bool {
        self.hung_up
    }

    /// The session that watched the socket has ended.
    pub(super) fn end_session(&mut self) {
        self.watched = None;
    }

    /// Watches the socket for these events. A socket whose other end is closed is not watched.
    pub(super) fn watch(&mut self, session: &Session, token: u32, events: EventSet) -> Result<(), Fault> {
        if self.hung_up || self.watched == Some(events) {
            return Ok(());
        }
        match self.watched.replace(events) {
            Some(_) => session.rewatch(&self.socket, token, events),
            None => session.watch(&self.socket, token, events),
        }
    }

    /// Notes that the other end is closed, if that is new. The kernel reports it continuously, so the
    /// socket is not watched any more.
    pub(super) fn check_hang_up(&mut self, session: &Session) -> Result<bool, Fault> {
        if self.hung_up || !is_hung_up(&self.socket) {
            return Ok(false);
        }
        self.hung_up = true;
        self.unwatch(session)?;
        Ok(true)
    }

    /// Ends the watch. Needed before a close when another process may still have the same socket.
    pub(super) fn unwatch(&mut self, session: &Session) -> Result<(), Fault> {
        match self.watched.take() {
            Some(_) => session.unwatch(&self.socket),
            None => Ok(()),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Whether the other end of a stream socket is closed for both directions.
pub(super) fn is_hung_up(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

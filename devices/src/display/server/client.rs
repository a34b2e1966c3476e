//! A client's connection: its socket, its session, and the keys that it holds.

use std::os::fd::OwnedFd;

use rfb::{
    Frame,
    session::{Event, Session},
};
use rustix::io::Errno;

use super::Access;
use crate::input::Source;

/// Most bytes that are read of a client before others have their turn.
const READ_BATCH: usize = 64 << 10;
const READ_CHUNK: usize = 4 << 10;
/// Most bytes that are written to a client before others have their turn.
const WRITE_BATCH: usize = 4 << 20;

/// One connection. It records the state of edge-triggered events until they are handled.
pub(super) struct Client {
    pub id: u64,
    pub socket: OwnedFd,
    pub session: Session,
    pub access: Access,
    /// Releases the pressed keys and buttons on drop.
    pub source: Source,
    /// The last read did not say that it would block.
    pub readable: bool,
    /// The last write did not say that it would block.
    pub writable: bool,
    /// Reading has ended; the connection closes when all output is written.
    pub closing: bool,
    /// The client reads no more data. Its earlier messages are read, and then the connection
    /// closes.
    pub deaf: bool,
    /// It is gone.
    pub gone: bool,
}

impl Client {
    /// Reads pending input, up to a batch, and collects the resulting events for the server.
    pub fn read(&mut self, events: &mut Vec<Event>) {
        let mut chunk = [0; READ_CHUNK];
        let mut left = READ_BATCH;
        while self.wants_reading() && left > 0 {
            let count = match rustix::io::retry_on_intr(|| rustix::io::read(&self.socket, &mut chunk)) {
                Ok(0) => {
                    self.gone = true;
                    return;
                }
                Ok(count) => count,
                Err(Errno::AGAIN) => {
                    self.readable = false;
                    return;
                }
                Err(_) => {
                    self.gone = true;
                    return;
                }
            };
            left = left.saturating_sub(count);
            let input = chunk.get(..count).unwrap_or_default();
            if let Err(error) = self.session.receive(input, events) {
                tracing::debug!(%error, "a VNC client is not served any more");
                self.closing = true;
            }
        }
        self.gone |= self.deaf;
    }

    /// Whether there is something to be read that may be read now.
    pub fn wants_reading(&self) -> bool {
        self.readable && !self.closing && !self.gone && (self.deaf || self.session.listens())
    }

    /// Whether there is something to be written that may be written now.
    pub fn wants_writing(&self) -> bool {
        self.writable && !self.deaf && !self.gone && !self.session.output().is_empty()
    }

    /// Writes without waiting, up to a batch, and encodes more of the current update.
    pub fn write(&mut self, frame: &Frame) {
        let mut left = WRITE_BATCH;
        self.session.fill(frame);
        while self.wants_writing() && left > 0 {
            match rustix::io::retry_on_intr(|| rustix::io::write(&self.socket, self.session.output())) {
                Ok(0) | Err(Errno::AGAIN) => self.writable = false,
                Ok(count) => {
                    left = left.saturating_sub(count);
                    self.session.sent(count);
                    self.session.fill(frame);
                }
                Err(_) => {
                    self.deaf = true;
                    self.readable = true;
                }
            }
        }
        self.gone |= self.closing && (self.deaf || self.session.output().is_empty() || !self.writable);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{io::Write as _, os::unix::net::UnixStream, sync::Arc};

    use rfb::Size;

    use super::*;
    use crate::input::{Hub, Layout};

    #[test]
    fn what_a_client_has_said_is_heard_though_it_takes_nothing_any_more() {
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut client = Client {
            id: 0,
            socket: near.into(),
            session: Session::new("vm", Size::DEFAULT),
            access: Access::Full,
            source: Hub::source(&Arc::new(Hub::new(Layout::Us))),
            readable: false,
            writable: true,
            closing: false,
            deaf: false,
            gone: false,
        };
        far.write_all(b"RFB 003.008\n\x01\x01").unwrap();
        drop(far);
        client.write(&Frame::black(Size::DEFAULT));
        assert!(client.wants_reading() && !client.wants_writing());
        let mut events = Vec::new();
        client.read(&mut events);
        assert!(matches!(events.as_slice(), [Event::Ready { shared: true }]));
        assert!(client.gone);
    }
}

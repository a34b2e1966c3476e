//! One client of the control socket: bytes received from the client, and bytes that the client has
//! not read yet.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use vmm_protocol::{
    vmm::Message,
    wire::{self, Read, Receiver, Sending},
};

/// Maximum number of bytes that wait for a client to read them. A client with more is disconnected,
/// so that it cannot slow the machine or other clients. The client gets the current state when it
/// reconnects.
pub const MAX_BACKLOG: usize = 256 << 10;

/// See the module.
#[derive(Debug)]
pub struct Connection {
    socket: UnixStream,
    receiver: Receiver,
    /// Bytes for the client. The unsent part starts at `sent`.
    backlog: Vec<u8>,
    sent: usize,
    /// Hello was accepted: it may ask for things, and gets events.
    pub greeted: bool,
    /// Requests that the driver has not answered.
    pub under_way: usize,
    /// To be closed when the backlog is sent.
    pub closing: bool,
}

/// Error that ends a connection.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The peer closed it.
    #[error("closed by the peer")]
    Closed,
    /// The peer doesn't read.
    #[error("the peer does not read: {0} bytes wait")]
    Backlog(usize),
    /// Framing or socket.
    #[error(transparent)]
    Wire(#[from] wire::Error),
}

impl Connection {
    /// Takes an accepted socket.
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            receiver: Receiver::new(),
            backlog: Vec::new(),
            sent: 0,
            greeted: false,
            under_way: 0,
            closing: false,
        })
    }

    /// Does one receive.
    pub fn read(&mut self) -> Result<(), Broken> {
        match self.receiver.read(&self.socket) {
            Ok(Read::Data) => Ok(()),
            Ok(Read::Closed) => Err(Broken::Closed),
            Err(wire::Error::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The next whole message that was received.
    pub fn next_message(&mut self) -> Result<Option<(Message, Vec<OwnedFd>)>, Broken> {
        Ok(self.receiver.next_message()?)
    }

    /// Sends a message, or keeps it until the socket takes it.
    pub fn send(&mut self, message: &Message) -> Result<(), Broken> {
        let frame = wire::encode(message)?;
        let waiting = self.waiting() + frame.len();
        if waiting > MAX_BACKLOG {
            return Err(Broken::Backlog(waiting));
        }
        self.backlog.extend_from_slice(&frame);
        self.flush()
    }

    /// Sends as much as the socket takes now.
    pub fn flush(&mut self) -> Result<(), Broken> {
        let mut sending = Sending::new(&self.backlog[self.sent..], &[])?;
        while !sending.is_done() {
            match sending.send(&self.socket) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(Broken::Wire(error.into())),
            }
        }
        self.sent = self.backlog.len() - sending.left();
        if self.waiting() == 0 {
            self.backlog = Vec::new();
            self.sent = 0;
        }
        Ok(())
    }

    /// Bytes that the socket has not taken.
    pub fn waiting(&self) -> usize {
        self.backlog.len() - self.sent
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

//! The connection to vmmd: frames that wait to be sent, and received messages.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use vmmd_pod::{
    MAX_PIECE,
    message::{DaemonMessage, FilePiece, Hello, LauncherMessage, launcher_message::Kind},
};
use vmmd_wire::{Error, Read, Receiver, Sending, encode};

/// See the module.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    receiver: Receiver<DaemonMessage>,
    /// Files and Hello that are still to be sent: index of the file, and offset in it.
    greeting: Option<(usize, usize)>,
    hello: Hello,
    /// The frame being sent: its rest begins at the number.
    frame: Option<(Vec<u8>, usize)>,
    /// The frame being sent is that of Hello.
    has_fds: bool,
    waiting: VecDeque<Kind>,
}

impl Connection {
    /// Connects, and begins to send the files and `hello`.
    pub fn open(path: &Path, hello: Hello) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self {
            socket,
            receiver: Receiver::new(),
            greeting: Some((0, 0)),
            hello,
            frame: None,
            has_fds: false,
            waiting: VecDeque::new(),
        })
    }

    /// Sends a message behind all others.
    pub fn send(&mut self, message: Kind) {
        self.waiting.push_back(message);
    }

    /// Messages that are not sent yet.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether anything is to be sent.
    pub fn has_more(&self) -> bool {
        self.greeting.is_some() || self.frame.is_some() || !self.waiting.is_empty()
    }

    /// Sends as much as the socket takes.
    pub fn flush(&mut self, files: &[(String, Vec<u8>)], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        loop {
            if self.frame.is_none() {
                let Some(message) = self.next(files) else {
                    return Ok(());
                };
                self.has_fds = matches!(message, Kind::Hello(_));
                let message = LauncherMessage { kind: Some(message) };
                self.frame = Some((encode(&message)?, 0));
            }
            let Some((frame, sent)) = &mut self.frame else {
                return Ok(());
            };
            let fds = if self.has_fds && *sent == 0 { fds } else { &[] };
            let mut sending = Sending::new(frame.get(*sent..).unwrap_or_default(), fds)?;
            match sending.send(&self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                result => result?,
            }
            let left = sending.left();
            *sent = frame.len() - left;
            if left == 0 {
                self.frame = None;
            }
        }
    }

    /// The next message to send: a piece of a file, Hello, then the waiting messages.
    fn next(&mut self, files: &[(String, Vec<u8>)]) -> Option<Kind> {
        let Some((index, offset)) = self.greeting else {
            return self.waiting.pop_front();
        };
        let Some((path, content)) = files.get(index) else {
            self.greeting = None;
            return Some(Kind::Hello(std::mem::take(&mut self.hello)));
        };
        let rest = content.get(offset..).unwrap_or_default();
        let piece = rest.get(..MAX_PIECE).unwrap_or(rest);
        self.greeting = match piece.len() == rest.len() {
            true => Some((index + 1, 0)),
            false => Some((index, offset + piece.len())),
        };
        Some(Kind::File(FilePiece {
            path: path.clone(),
            content: piece.to_vec(),
        }))
    }

    /// Does one receive. `Closed` when vmmd has closed the connection.
    pub fn read(&mut self) -> Result<Read, Error> {
        match self.receiver.read(&self.socket) {
            Err(Error::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(Read::Data),
            read => read,
        }
    }

    /// The next message that was received.
    pub fn next_message(&mut self) -> Result<Option<DaemonMessage>, Error> {
        Ok(self.receiver.next_message()?.map(|(message, _)| message))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

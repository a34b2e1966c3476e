//! The connection of a launcher: whole messages over a UNIX stream socket.

use std::{io, os::fd::OwnedFd, sync::Arc, time::Duration};

use tokio::{
    io::Interest,
    net::UnixStream,
    time::{sleep, timeout},
};
use vmmd_pod::{
    FIXED_FDS, MAX_VOLUMES,
    message::{DaemonMessage, Ended, LauncherMessage, daemon_message::Kind},
};
use vmmd_wire::{Error, Limits, Read, Receiver, Sending, encode};

/// Bounds of a launcher's messages. The largest are a piece of a file (64 KiB) and Hello (64 volumes and a search list, less than
/// 24 KiB). A frame of this size becomes at most 4 MiB of structures, which the check of Hello drops; so fields are not counted.
pub const LIMITS: Limits = Limits {
    frame_bytes: 96 << 10,
    fields: usize::MAX,
    fds: FIXED_FDS + MAX_VOLUMES,
};
/// How long a launcher may take to read the last message and to close the connection.
const LAST: Duration = Duration::from_secs(10);
/// So many messages are read without a pause.
const BURST: u32 = 64;
/// The pause after that: a flood takes little of the daemon's time.
const PAUSE: Duration = Duration::from_millis(10);

/// See the module.
#[derive(Debug)]
pub struct Stream(UnixStream);

impl Stream {
    /// Takes an accepted connection.
    pub fn new(stream: UnixStream) -> Self {
        Self(stream)
    }

    /// Pid of the process that has connected.
    pub fn peer_pid(&self) -> io::Result<u32> {
        let pid = self.0.peer_cred()?.pid();
        let pid = pid.and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
        pid.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Sends a message. The connection must not be used after a send that was given up.
    pub async fn send(&self, message: Kind) -> Result<(), Error> {
        let frame = encode(&DaemonMessage { kind: Some(message) })?;
        let mut sending = Sending::new(&frame, &[])?;
        while !sending.is_done() {
            let sent = self.0.async_io(Interest::WRITABLE, || sending.send(&self.0));
            sent.await?;
        }
        Ok(())
    }

    /// Sends the last message, and waits until the launcher has closed the connection.
    pub async fn end(&self, ended: Ended) {
        let last = async {
            self.send(Kind::Ended(ended)).await?;
            let mut receiver = Receiver::<LauncherMessage>::limited(LIMITS);
            // Further bytes of the launcher are read and dropped.
            while self.read(&mut receiver).await? == Read::Data {
                receiver = Receiver::limited(LIMITS);
            }
            Ok::<_, Error>(())
        };
        let _closed = timeout(LAST, last).await;
    }

    async fn read(&self, receiver: &mut Receiver<LauncherMessage>) -> Result<Read, Error> {
        let read = self
            .0
            .async_io(Interest::READABLE, || match receiver.read(&self.0) {
                Err(Error::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
                result => Ok(result),
            });
        read.await?
    }
}

/// Reads the messages of a launcher.
#[derive(Debug)]
pub struct Reader {
    stream: Arc<Stream>,
    receiver: Receiver<LauncherMessage>,
    burst: u32,
}

impl Reader {
    /// Reader of a new connection.
    pub fn new(stream: &Arc<Stream>) -> Self {
        Self {
            stream: Arc::clone(stream),
            receiver: Receiver::limited(LIMITS),
            burst: 0,
        }
    }

    /// The next message with its descriptors; `None` when the launcher has closed the connection.
    pub async fn next(&mut self) -> Result<Option<(LauncherMessage, Vec<OwnedFd>)>, Error> {
        self.burst += 1;
        if self.burst > BURST {
            self.burst = 0;
            sleep(PAUSE).await;
        }
        loop {
            if let Some(message) = self.receiver.next_message()? {
                return Ok(Some(message));
            }
            if self.stream.read(&mut self.receiver).await? == Read::Closed {
                return Ok(None);
            }
        }
    }
}

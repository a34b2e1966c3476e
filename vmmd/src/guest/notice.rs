//! Notifications of systemd in a guest (sd_notify(3)), by the socket device.
//!
//! systemd makes a connection for each notification and sends lines of `NAME=VALUE`. [`BACKLOG`] tasks
//! wait for connections, without wake-ups. A guest is not trusted: a notification has a limit in length
//! and time, and each task waits after one.

use std::{sync::Arc, time::Duration};

use tokio::{
    io::AsyncReadExt as _,
    net::UnixStream,
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use uuid::Uuid;
use vmmd_host::{failure::Failure, text};
use vmmd_spec::probe::NOTIFY_PORT;

use super::open_socket;
use crate::host::Host;

/// Connections that can arrive at once: systemd sends a few notifications in a row at the end of a boot.
const BACKLOG: usize = 8;
/// Time between two connections of a task.
const PACE: Duration = Duration::from_millis(100);
/// Longest notification in bytes, as of systemd (NOTIFY_BUFFER_MAX).
const MAX_NOTICE: u64 = 4096;
/// How long a notification may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest status in bytes.
const STATUS: usize = 200;
/// Time between two requests to a `vmm` that does not answer: the first one, and the longest one.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// The guest by its notifications.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notice {
    /// The guest has booted (`READY=1`), and does not stop.
    pub ready: bool,
    /// The guest stops (`STOPPING=1`).
    pub stopping: bool,
    /// Its last `STATUS=`, as one line.
    pub status: String,
}

impl Notice {
    /// Takes a notification. Returns whether it changes something.
    fn take(&mut self, notification: &[u8]) -> bool {
        let before = self.clone();
        let notification = String::from_utf8_lossy(notification);
        for line in notification.lines() {
            match line.split_once('=') {
                Some(("READY", "1")) => (self.ready, self.stopping) = (true, false),
                Some(("STOPPING", "1")) => (self.ready, self.stopping) = (false, true),
                Some(("STATUS", status)) => self.status = text::one_line(status, STATUS),
                _ => {}
            }
        }
        *self != before
    }
}

/// Receives the notifications of a run until it is dropped.
#[derive(Debug)]
pub struct Notices {
    /// The guest at present.
    pub guest: watch::Receiver<Notice>,
    /// A receiver waits without an end for a run without a socket device.
    _sender: Arc<watch::Sender<Notice>>,
    _tasks: JoinSet<()>,
}

impl Notices {
    /// Begins to receive. `ready`: the guest has notified that it is ready.
    pub fn receive(host: &Arc<Host>, vm: Uuid, ready: bool) -> Self {
        let (sender, guest) = watch::channel(Notice {
            ready,
            ..Notice::default()
        });
        let sender = Arc::new(sender);
        let mut tasks = JoinSet::new();
        for _ in 0..BACKLOG {
            tasks.spawn(accept(Arc::clone(host), vm, Arc::clone(&sender)));
        }
        Self {
            guest,
            _sender: sender,
            _tasks: tasks,
        }
    }
}

/// Takes one connection after the other, while the run has a socket device.
async fn accept(host: Arc<Host>, vm: Uuid, guest: Arc<watch::Sender<Notice>>) {
    let mut pause = FIRST;
    loop {
        match next(&host, vm).await {
            Ok(notification) => {
                guest.send_if_modified(|guest| guest.take(&notification));
                pause = FIRST;
                sleep(PACE).await;
            }
            Err(failure) if failure.reason == "NO_VSOCK" => return,
            Err(failure) => {
                tracing::debug!(%vm, %failure, "receive notifications of a guest");
                sleep(pause).await;
                pause = pause.saturating_mul(2).min(LONGEST);
            }
        }
    }
}

/// The next notification.
async fn next(host: &Host, vm: Uuid) -> Result<Vec<u8>, Failure> {
    let mut stream = open_socket(host, vm, NOTIFY_PORT, true).await?;
    let ended = |_| Failure::internal("the vmm has ended the connection");
    stream.read_u8().await.map_err(ended)?;
    // A connection without an end has no notification.
    Ok(timeout(PATIENCE, read(stream)).await.unwrap_or_default())
}

async fn read(stream: UnixStream) -> Vec<u8> {
    let mut notification = Vec::new();
    match stream.take(MAX_NOTICE).read_to_end(&mut notification).await {
        Ok(_) => notification,
        Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_change_the_guest_and_garbage_does_not() {
        let mut guest = Notice::default();
        assert!(
            guest.take(b"STATUS=Startup \x1b[2Jfinished\nREADY=1\nX_SYSTEMD_UNIT_ACTIVE=multi-user.target")
        );
        assert!(guest.ready && !guest.status.contains('\x1b'));
        for garbage in [
            &b""[..],
            b"READY",
            b"READY=0",
            b"ready=1",
            b"\xff\xfe=\0",
            b"=",
            b"READY=1",
        ] {
            assert!(!guest.take(garbage), "{garbage:?}");
        }
        assert!(guest.take(b"STOPPING=1\n"));
        assert!(guest.stopping && !guest.ready);
        assert!(guest.take(b"READY=1"));
        assert!(guest.ready && !guest.stopping);
        let long = [b"STATUS=".as_slice(), &[b'x'; 4000]].concat();
        assert!(guest.take(&long) && guest.status.len() <= STATUS);
    }
}

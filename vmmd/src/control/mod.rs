//! The daemon's end of a `vmm`'s control socket.
//!
//! All callers share a [`Client`]. A task reads the socket, passes each response to its request,
//! and passes events to the VM's actor. When the connection closes, the task and all waiting
//! requests end. The daemon does not trust the received data: it reads within [`bounds::LIMITS`]
//! and validates with [`bounds`].

pub mod bounds;

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::Interest,
    net::UnixStream,
    sync::{Mutex as AsyncMutex, mpsc, oneshot},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use vmm_protocol::{
    vmm::{
        self, DiskStats, Error as RemoteError, Event, GetDiskStats, GetMachineStats, Hello, HelloReply,
        MachineStats, Message, MigrationPolicy, Request, Response, Save, SaveReply, SendReply, Status,
        message::Kind, request::Op, response::Result as Outcome,
    },
    wire,
};

/// Capacity of the event queue for the actor. Further events are dropped, and the actor receives
/// [`Notice::Missed`].
const EVENTS: usize = 64;

/// Messages that a `vmm` may send in [`BURST_TIME`]; the daemon reads the next ones later. One of ours sends a few.
const BURST: u32 = 1000;
/// See [`BURST`].
const BURST_TIME: Duration = Duration::from_secs(1);

/// Error of a request to a `vmm`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It said no.
    #[error("{}", .0.message)]
    Refused(RemoteError),
    /// The connection is gone, and most likely the process too.
    #[error("the vmm closed its control connection")]
    Closed,
    /// The response does not fit the request.
    #[error("the vmm answered {0}")]
    Unexpected(&'static str),
    /// No response within this time.
    #[error("the vmm did not answer within {} s", .0.as_secs())]
    Timeout(Duration),
    /// It speaks another protocol.
    #[error("the vmm speaks protocol version {0}, this daemon {ours}", ours = wire::MAJOR)]
    Version(u32),
    /// The message is outside the bounds of a valid `vmm`.
    #[error(transparent)]
    OutOfBounds(#[from] bounds::Lie),
    /// Sending or receiving failed.
    #[error("talk to the vmm")]
    Wire(#[from] wire::Error),
    /// The socket failed.
    #[error("control socket")]
    Io(#[from] io::Error),
}

impl Error {
    /// Whether the connection broke before a response.
    pub fn is_lost(&self) -> bool {
        matches!(
            self,
            Self::Closed | Self::Io(_) | Self::Wire(wire::Error::Io(_) | wire::Error::Truncated)
        )
    }
}

/// Unsolicited message from a `vmm`.
#[derive(Debug)]
pub enum Notice {
    /// An event.
    Event(Event),
    /// Events were dropped from a full queue. The receiver must query the state instead.
    Missed,
}

/// The notices of one connection.
#[derive(Debug)]
pub struct Notices {
    queue: mpsc::Receiver<Event>,
    missed: Arc<AtomicBool>,
}

impl Notices {
    /// Waits for the next one; `None` when the connection is gone. Cancel-safe.
    pub async fn next(&mut self) -> Option<Notice> {
        // Events are dropped only while the queue is full, so the receiver sees the flag after it
        // has emptied the queue.
        if let Ok(event) = self.queue.try_recv() {
            return Some(Notice::Event(event));
        }
        if self.missed.swap(false, Ordering::AcqRel) {
            return Some(Notice::Missed);
        }
        self.queue.recv().await.map(Notice::Event)
    }
}

/// Where the reader of a connection puts events.
#[derive(Debug)]
struct Outlet {
    queue: mpsc::Sender<Event>,
    missed: Arc<AtomicBool>,
}

impl Outlet {
    fn put(&self, event: Event) {
        if self.queue.try_send(event).is_err() {
            self.missed.store(true, Ordering::Release);
        }
    }
}

/// A connection to a `vmm`. Clones are the same connection; it is closed with the last.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
    /// Goes along with each request.
    trace: String,
    _reader: Arc<DropGuard>,
}

#[derive(Debug)]
struct Shared {
    stream: UnixStream,
    /// Held while a whole frame is sent.
    sending: AsyncMutex<()>,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    last_id: u64,
    closed: bool,
    requests: HashMap<u64, oneshot::Sender<Outcome>>,
}

/// Optional parts of a transfer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// The boot files, which the other side does not have.
    pub boot_files: bool,
    /// The machine's header at the beginning, which the other side checks before anything else.
    pub header_first: bool,
}

impl Client {
    /// Connects to a listening socket; does not wait for the other side to accept.
    pub async fn connect(socket: &Path) -> io::Result<(Self, Notices)> {
        let stream = UnixStream::connect(socket).await?;
        let shared = Arc::new(Shared {
            stream,
            sending: AsyncMutex::default(),
            waiting: Mutex::default(),
        });
        let (sender, queue) = mpsc::channel(EVENTS);
        let missed = Arc::<AtomicBool>::default();
        let outlet = Outlet {
            queue: sender,
            missed: Arc::clone(&missed),
        };
        let dropped = CancellationToken::new();
        tokio::spawn(read(Arc::clone(&shared), outlet, dropped.clone()));
        Ok((
            Self {
                shared,
                trace: String::new(),
                _reader: Arc::new(dropped.drop_guard()),
            },
            Notices { queue, missed },
        ))
    }

    /// Returns the same connection for requests with this trace id.
    pub fn traced(self, trace: &str) -> Self {
        let trace = trace.to_owned();
        Self { trace, ..self }
    }

    /// Lets a VM continue that a snapshot keeps paused. It is no failure when none does.
    pub async fn release(self) {
        self.release_with(false).await;
    }

    /// Cancels the snapshot in progress, at any stage. Does nothing without one.
    pub async fn give_up_snapshot(self) {
        self.release_with(true).await;
    }

    async fn release_with(self, give_up: bool) {
        let op = Op::Release(vmm::Release { give_up });
        if let Err(error) = self.request(op, &[]).await {
            tracing::debug!(
                error = vmmd_host::text::chain(&error),
                "release a VM after a snapshot"
            );
        }
    }

    /// Returns process id and user id of the peer at the time of its listen(2).
    pub fn peer(&self) -> io::Result<(u32, u32)> {
        let peer = rustix::net::sockopt::socket_peercred(&self.shared.stream)?;
        Ok((
            u32::try_from(peer.pid.as_raw_nonzero().get()).unwrap_or_default(),
            peer.uid.as_raw(),
        ))
    }

    /// The first request: checks that both sides speak the same protocol.
    pub async fn hello(&self) -> Result<HelloReply, Error> {
        let hello = Hello {
            major: wire::MAJOR,
            minor: wire::MINOR,
        };
        match self.call(Op::Hello(hello), &[]).await? {
            Outcome::Hello(reply) if reply.major == wire::MAJOR => Ok(reply),
            Outcome::Hello(reply) => Err(Error::Version(reply.major)),
            _ => Err(Error::Unexpected("something else than a hello")),
        }
    }

    /// Any request but `Hello`; returns the state after it.
    pub async fn request(&self, op: Op, fds: &[OwnedFd]) -> Result<Status, Error> {
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        match self.call(op, &borrowed).await? {
            Outcome::Status(status) => Ok(status),
            _ => Err(Error::Unexpected("something else than its state")),
        }
    }

    /// Has the machine write a snapshot into `file`; takes as long as that takes. With `keep_paused` it does not end before a release, and the notice that
    /// the disks are quiet has `number`.
    pub async fn save(
        &self,
        file: OwnedFd,
        (paused, keep_paused): (bool, bool),
        number: u64,
        description: Vec<u8>,
    ) -> Result<SaveReply, Error> {
        let save = Save {
            file_fd: 0,
            paused,
            description,
            keep_paused,
            number,
            disks_alone: false,
        };
        match self.call(Op::Save(save), &[file.as_fd()]).await? {
            Outcome::Saved(reply) => Ok(reply),
            _ => Err(Error::Unexpected("something else than what it has saved")),
        }
    }

    /// Has the machine stand still with quiet disks, of which the notice has `number`; does not end before a release.
    pub async fn hold_disks(&self, number: u64) -> Result<SaveReply, Error> {
        let save = Save {
            number,
            disks_alone: true,
            ..Save::default()
        };
        match self.call(Op::Save(save), &[]).await? {
            Outcome::Saved(reply) => Ok(reply),
            _ => Err(Error::Unexpected(
                "something else than for how long it stood still",
            )),
        }
    }

    /// Starts the transfer of the machine over `socket`, with the content of `disks`, and waits
    /// without a time limit. The machine then stays paused. `policy` applies to a guest that
    /// dirties memory too fast for `downtime`.
    pub async fn send_machine(
        &self,
        socket: OwnedFd,
        (downtime, policy): (Duration, MigrationPolicy),
        disks: Vec<String>,
        extras: Extras,
    ) -> Result<SendReply, Error> {
        let send = vmm::Send {
            socket_fd: 0,
            downtime_ms: u64::try_from(downtime.as_millis()).unwrap_or(u64::MAX),
            disks,
            policy: policy.into(),
            boot_files: extras.boot_files,
            header_first: extras.header_first,
        };
        let call = self.call(Op::Send(send), &[socket.as_fd()]).await;
        drop(socket);
        match call? {
            Outcome::Sent(reply) => Ok(reply),
            _ => Err(Error::Unexpected("something else than what it has sent")),
        }
    }

    /// Counters of the disks that the machine has.
    pub async fn disk_stats(&self) -> Result<Vec<DiskStats>, Error> {
        match self.call(Op::GetDiskStats(GetDiskStats {}), &[]).await? {
            Outcome::DiskStats(reply) => Ok(reply.disks),
            _ => Err(Error::Unexpected("something else than its disks")),
        }
    }

    /// Returns all counters of the machine.
    pub async fn machine_stats(&self) -> Result<MachineStats, Error> {
        match self.call(Op::GetMachineStats(GetMachineStats {}), &[]).await {
            Ok(Outcome::MachineStats(stats)) => Ok(stats),
            Err(error) => Err(error),
            Ok(_) => Err(Error::Unexpected("something else than its counters")),
        }
    }

    async fn call(&self, op: Op, fds: &[BorrowedFd<'_>]) -> Result<Outcome, Error> {
        let (sender, receiver) = oneshot::channel();
        let id = {
            let mut waiting = self.shared.lock();
            if waiting.closed {
                return Err(Error::Closed);
            }
            waiting.last_id += 1;
            let id = waiting.last_id;
            waiting.requests.insert(id, sender);
            id
        };
        let _forget = Forget {
            shared: &self.shared,
            id,
        };
        let message = Message {
            kind: Some(Kind::Request(Request {
                id,
                op: Some(op),
                trace_id: self.trace.clone(),
            })),
        };
        self.send(&wire::encode(&message)?, fds).await?;
        match receiver.await {
            Ok(Outcome::Error(error)) => Err(Error::Refused(error)),
            Ok(outcome) => Ok(outcome),
            Err(_) => Err(Error::Closed),
        }
    }

    async fn send(&self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let stream = &self.shared.stream;
        let _whole = self.shared.sending.lock().await;
        let mut sending = wire::Sending::new(frame, fds)?;
        let mut part = Part { stream, begun: false };
        while !sending.is_done() {
            stream
                .async_io(Interest::WRITABLE, || sending.send(stream))
                .await
                .map_err(closed)?;
            part.begun = !sending.is_done();
        }
        Ok(())
    }
}

/// A frame that is being sent. When the caller goes away in the middle of it, the connection ends: the rest of the frame would be
/// missing, and the `vmm` would take the next one for it.
struct Part<'a> {
    stream: &'a UnixStream,
    begun: bool,
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        if self.begun {
            let _ = rustix::net::shutdown(self.stream, rustix::net::Shutdown::Both);
        }
    }
}

/// Maps a connection that the peer has closed to [`Error::Closed`], for reads and writes.
fn closed(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Error::Closed,
        _ => Error::Io(error),
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Forgets a request whose caller has gone.
struct Forget<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.shared.lock().requests.remove(&self.id);
    }
}

async fn read(shared: Arc<Shared>, outlet: Outlet, dropped: CancellationToken) {
    let mut receiver = wire::Receiver::limited(bounds::LIMITS);
    let ended = tokio::select! {
        result = read_all(&shared, &mut receiver, &outlet) => result,
        () = dropped.cancelled() => Ok(()),
    };
    if let Err(error) = ended {
        let text = vmmd_host::text::chain(&error);
        match error {
            Error::OutOfBounds(_) | Error::Wire(wire::Error::TooManyFields(_) | wire::Error::TooManyFds) => {
                tracing::warn!(
                    error = text,
                    "the connection to a vmm is closed because of what it sent"
                );
            }
            _ => tracing::debug!(error = text, "control connection lost"),
        }
    }
    let mut waiting = shared.lock();
    waiting.closed = true;
    waiting.requests.clear();
}

async fn read_all(shared: &Shared, receiver: &mut wire::Receiver, outlet: &Outlet) -> Result<(), Error> {
    let mut burst = Burst::default();
    loop {
        while let Some((message, _)) = receiver.next_message()? {
            dispatch(shared, message, outlet)?;
            if let Some(rest) = burst.over(Instant::now()) {
                tokio::time::sleep(rest).await;
            }
        }
        let stream = &shared.stream;
        let read = stream.async_io(Interest::READABLE, || match receiver.read(stream) {
            Err(wire::Error::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
            result => Ok(result),
        });
        if read.await?? == wire::Read::Closed {
            return Ok(());
        }
    }
}

/// Counts messages, so that a flood takes little of the daemon's time.
#[derive(Debug, Default)]
struct Burst {
    since: Option<Instant>,
    messages: u32,
}

impl Burst {
    /// Counts one more; says how long to wait before the next is read.
    fn over(&mut self, now: Instant) -> Option<Duration> {
        let since = *self.since.get_or_insert(now);
        let passed = now.saturating_duration_since(since);
        if passed >= BURST_TIME {
            (self.since, self.messages) = (Some(now), 0);
        }
        self.messages += 1;
        (self.messages > BURST).then(|| BURST_TIME.saturating_sub(passed))
    }
}

fn dispatch(shared: &Shared, message: Message, outlet: &Outlet) -> Result<(), bounds::Lie> {
    match message.kind {
        Some(Kind::Response(Response {
            id,
            result: Some(result),
        })) => {
            let waiting = shared.lock().requests.remove(&id);
            if let Some(sender) = waiting {
                let _ = sender.send(bounds::response(result)?);
            }
        }
        Some(Kind::Event(event)) => outlet.put(bounds::event(event)?),
        _ => tracing::debug!("message without meaning ignored"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream as StdStream};

    use vmm_protocol::vmm::{ErrorKind, GetStatus, GuestReset, event};

    use super::*;

    /// A `vmm` that answers each request with what `answer` makes of it, until it gives nothing.
    fn serve(
        answer: impl Fn(u64, Op) -> Option<Vec<Message>> + Send + 'static,
    ) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (stream, _): (StdStream, _) = listener.accept().unwrap();
            let mut receiver = wire::Receiver::new();
            while let Ok(Some((message, _))) = wire::receive(&stream, &mut receiver) {
                let Some(Kind::Request(Request { id, op: Some(op), .. })) = message.kind else {
                    return;
                };
                let Some(messages) = answer(id, op) else { return };
                for message in messages {
                    wire::send_all(&stream, &message, &[]).unwrap();
                }
            }
        });
        (folder, path)
    }

    #[test]
    fn of_a_flood_a_thousand_messages_are_read_in_a_second() {
        let (mut burst, start) = (Burst::default(), Instant::now());
        for _ in 0..BURST {
            assert_eq!(burst.over(start), None);
        }
        let later = start + Duration::from_millis(400);
        assert_eq!(burst.over(later), Some(Duration::from_millis(600)));
        assert_eq!(burst.over(start + BURST_TIME), None);
    }

    #[tokio::test]
    async fn a_lie_ends_the_connection_and_nothing_of_it_is_used() {
        let (_folder, path) = serve(|id, _| {
            let error = vmm_protocol::vmm::DeviceError {
                device: "disk \u{1b}[2J".into(),
                message: String::new(),
            };
            let event = Event {
                kind: Some(event::Kind::DeviceError(error)),
            };
            let lie = Message {
                kind: Some(Kind::Event(event)),
            };
            Some(vec![lie, response(id, Outcome::Status(Status::default()))])
        });
        let (client, mut events) = Client::connect(&path).await.unwrap();
        let asked = client.request(Op::GetStatus(GetStatus {}), &[]).await;
        assert!(matches!(asked, Err(Error::Closed)), "{asked:?}");
        assert!(events.next().await.is_none());
    }

    fn response(id: u64, result: Outcome) -> Message {
        Message {
            kind: Some(Kind::Response(Response {
                id,
                result: Some(result),
            })),
        }
    }

    #[tokio::test]
    async fn responses_find_their_requests_and_events_come_between() {
        let (_folder, path) = serve(|id, _| {
            let status = Status {
                guest_resets: id,
                ..Status::default()
            };
            let event = Event {
                kind: Some(event::Kind::GuestReset(GuestReset { guest_resets: id })),
            };
            Some(vec![
                Message {
                    kind: Some(Kind::Event(event)),
                },
                response(id, Outcome::Status(status)),
            ])
        });
        let (client, mut events) = Client::connect(&path).await.unwrap();
        for id in 1..=3 {
            let status = client.request(Op::GetStatus(GetStatus {}), &[]).await.unwrap();
            assert_eq!(status.guest_resets, id);
            assert!(events.next().await.is_some());
        }
    }

    #[tokio::test]
    async fn a_request_under_way_ends_when_the_connection_does() {
        let (_folder, path) = serve(|_, _| None);
        let (client, mut events) = Client::connect(&path).await.unwrap();
        let error = client
            .request(Op::GetStatus(GetStatus {}), &[])
            .await
            .unwrap_err();
        assert!(matches!(error, Error::Closed), "{error:?}");
        assert!(events.next().await.is_none());
        assert!(matches!(client.hello().await, Err(Error::Closed)));
    }

    #[tokio::test]
    async fn request_given_up_midway_ends_the_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let (client, mut events) = Client::connect(&path).await.unwrap();
        let (stream, _) = listener.accept().unwrap();
        // More bytes than the socket buffers without a reader.
        let long = client.clone().traced(&"x".repeat(wire::MAX_FRAME - 100));
        let given_up = tokio::time::timeout(Duration::from_millis(50), long.hello()).await;
        assert!(given_up.is_err(), "{given_up:?}");
        assert!(matches!(client.hello().await, Err(Error::Closed)));
        assert!(events.next().await.is_none());
        let mut receiver = wire::Receiver::new();
        assert!(matches!(
            wire::receive(&stream, &mut receiver),
            Err(wire::Error::Truncated)
        ));
        // One that was given up before its first byte costs nothing.
        let (client, _events) = Client::connect(&path).await.unwrap();
        let busy = client.shared.sending.lock().await;
        let given_up = tokio::time::timeout(Duration::from_millis(10), client.hello()).await;
        assert!(given_up.is_err());
        drop(busy);
        let given_up = tokio::time::timeout(Duration::from_millis(10), client.hello()).await;
        assert!(given_up.is_err(), "it was sent, and nobody answers");
    }

    #[tokio::test]
    async fn who_takes_events_too_slowly_is_told_that_some_were_missed() {
        let (_folder, path) = serve(|id, _| {
            let reset = |guest_resets| Message {
                kind: Some(Kind::Event(Event {
                    kind: Some(event::Kind::GuestReset(GuestReset { guest_resets })),
                })),
            };
            let flood = (0..EVENTS as u64 + 5).map(reset);
            Some(
                flood
                    .chain([response(id, Outcome::Status(Status::default()))])
                    .collect(),
            )
        });
        let (client, mut notices) = Client::connect(&path).await.unwrap();
        client.request(Op::GetStatus(GetStatus {}), &[]).await.unwrap();
        for number in 0..EVENTS as u64 {
            let notice = notices.next().await.unwrap();
            let Notice::Event(Event {
                kind: Some(event::Kind::GuestReset(reset)),
            }) = notice
            else {
                panic!("{notice:?}");
            };
            assert_eq!(reset.guest_resets, number);
        }
        assert!(matches!(notices.next().await, Some(Notice::Missed)));
        // That is said once.
        let more = tokio::time::timeout(Duration::from_millis(10), notices.next()).await;
        assert!(more.is_err(), "{more:?}");
    }

    #[tokio::test]
    async fn a_refusal_carries_its_words() {
        let (_folder, path) = serve(|id, _| {
            let error = RemoteError {
                message: "no".into(),
                kind: ErrorKind::State.into(),
            };
            Some(vec![response(id, Outcome::Error(error))])
        });
        let (client, _events) = Client::connect(&path).await.unwrap();
        assert!(matches!(client.hello().await, Err(Error::Refused(error)) if error.message == "no"));
    }

    #[tokio::test]
    async fn another_major_version_is_refused() {
        let (_folder, path) = serve(|id, _| {
            let reply = HelloReply {
                major: wire::MAJOR + 1,
                ..HelloReply::default()
            };
            Some(vec![response(id, Outcome::Hello(reply))])
        });
        let (client, _events) = Client::connect(&path).await.unwrap();
        assert!(matches!(client.hello().await, Err(Error::Version(_))));
    }
}

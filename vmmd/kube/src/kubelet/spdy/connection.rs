//! A session over a connection: one future reads, one writes, and one, from the caller, serves the
//! streams. When one of them ends, all end.
//!
//! Received data that was not taken yet is at most [`CHUNKS`] pieces of [`PIECE`] bytes for a
//! session, and [`STREAM_CHUNKS`] of them for a stream. At this limit the connection is not read.
//! Data to write is at most [`QUEUE`] pieces.

use std::{
    collections::BTreeMap,
    io,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufWriter},
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch},
    time::{Instant, timeout},
};

use super::{
    frame::{self, Reset},
    headers::{Deflater, Headers},
    session::{Event, Session, Violation},
};

/// Bytes that are read or written at once.
const PIECE: usize = 16 << 10;
/// Pieces of a session that were read and wait to be taken.
const CHUNKS: usize = 64;
/// Pieces of a stream that were read and wait to be taken.
const STREAM_CHUNKS: usize = 4;
/// Frames that wait to be written.
const QUEUE: usize = 8;
/// New streams that wait to be accepted.
const NEW: usize = 8;
/// How long a session may be silent in both directions: as a kubelet's `--streaming-connection-idle-timeout`.
const IDLE: Duration = Duration::from_secs(4 * 60 * 60);
/// How long the client has to close the connection when all is said.
const FAREWELL: Duration = Duration::from_secs(5);

/// Why a session has ended before its work was done.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The client has closed the connection.
    #[error("the client has gone")]
    Gone,
    /// The session was silent for [`IDLE`].
    #[error("nothing was said for {} hours", IDLE.as_secs() / 3600)]
    Idle,
    /// The client has broken the rules.
    #[error("{0}")]
    Violation(#[from] Violation),
    /// The connection is broken.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The writer of the session has ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Closed;

/// A piece that was read, which counts until it was taken.
#[derive(Debug)]
struct Chunk {
    bytes: Vec<u8>,
    _room: OwnedSemaphorePermit,
}

#[derive(Debug)]
enum Command {
    Reply(u32),
    Data(u32, Vec<u8>),
    Finish(u32),
    Reset(u32, Reset),
    Ping(u32),
    GoAway,
}

/// A stream that the client has opened. It is to be accepted, or to be reset.
#[derive(Debug)]
pub struct Stream {
    headers: Headers,
    input: Input,
    output: Output,
}

impl Stream {
    /// Its number.
    pub fn id(&self) -> u32 {
        self.output.id
    }

    /// A header by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// Takes the stream: the client waits for that before it sends.
    ///
    /// # Errors
    ///
    /// That the session ends.
    pub async fn accept(self) -> Result<(Input, Output), Closed> {
        self.output.send(Command::Reply(self.output.id)).await?;
        Ok((self.input, self.output))
    }

    /// Refuses a stream that is not expected.
    pub async fn refuse(self) {
        self.output.reset(Reset::Refused).await;
    }
}

/// Data from the client on a stream. After the drop, further data is discarded.
#[derive(Debug)]
pub struct Input(mpsc::Receiver<Chunk>);

impl Input {
    /// The next bytes. `None` when there are no more, or the client has reset the stream.
    pub async fn read(&mut self) -> Option<Vec<u8>> {
        self.0.recv().await.map(|chunk| chunk.bytes)
    }
}

/// Data to the client on a stream.
#[derive(Debug)]
pub struct Output {
    id: u32,
    is_reset: watch::Receiver<bool>,
    commands: mpsc::Sender<Command>,
}

impl Output {
    /// Returns when the client has reset the stream.
    pub async fn was_reset(&self) {
        let mut is_reset = self.is_reset.clone();
        if is_reset.wait_for(|is_reset| *is_reset).await.is_err() {
            // The session ends, and its work with it.
            std::future::pending::<()>().await;
        }
    }

    /// Writes all of it.
    ///
    /// # Errors
    ///
    /// That the session ends.
    pub async fn write(&self, bytes: &[u8]) -> Result<(), Closed> {
        for piece in bytes.chunks(PIECE) {
            self.send(Command::Data(self.id, piece.to_vec())).await?;
        }
        Ok(())
    }

    /// Ends the output.
    ///
    /// # Errors
    ///
    /// Fails when the session ends.
    pub async fn finish(self) -> Result<(), Closed> {
        self.send(Command::Finish(self.id)).await
    }

    /// The stream is not needed any more.
    pub async fn cancel(self) {
        self.reset(Reset::Cancel).await;
    }

    async fn reset(self, why: Reset) {
        let _ = self.send(Command::Reset(self.id, why)).await;
    }

    async fn send(&self, command: Command) -> Result<(), Closed> {
        self.commands.send(command).await.map_err(|_| Closed)
    }
}

/// New streams. The drop refuses streams that were not taken.
#[derive(Debug)]
pub struct Acceptor(mpsc::Receiver<Stream>);

impl Acceptor {
    /// The next one, which is to be accepted or reset.
    pub async fn next(&mut self) -> Stream {
        match self.0.recv().await {
            Some(stream) => stream,
            // The session ends, and its work with it.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.0.close();
        while let (Ok(stream), Ok(runtime)) = (self.0.try_recv(), Handle::try_current()) {
            // The writer may have no room for it now.
            runtime.spawn(stream.refuse());
        }
    }
}

/// Serves a client as long as `work` takes, which gets its streams and is dropped when the client goes.
///
/// # Errors
///
/// Why the work was not done.
pub async fn run<T, F: Future<Output = T>>(
    connection: impl AsyncRead + AsyncWrite,
    work: impl FnOnce(Acceptor) -> F,
) -> Result<T, Ended> {
    let (reader, writer) = tokio::io::split(connection);
    let (commands, queue) = mpsc::channel(QUEUE);
    let (opened, new) = mpsc::channel(NEW);
    let spoken = Arc::new(Mutex::new(Instant::now()));
    let mut reading = pin!(read(reader, commands.clone(), opened, Arc::clone(&spoken)));
    let mut writing = pin!(write(writer, queue, spoken));
    let result = {
        let mut working = pin!(work(Acceptor(new)));
        tokio::select! {
            ended = &mut reading => return Err(ended),
            written = &mut writing => return Err(written.err().map_or(Ended::Gone, Ended::Io)),
            result = &mut working => result,
        }
    };
    // The client closes the connection when it has read all. If this side closes first, the client
    // may lose unread data.
    let gone = timeout(FAREWELL, async {
        tokio::select! {
            _ = &mut reading => {}
            _ = &mut writing => {}
        }
    });
    if gone.await.is_err() {
        let last = async { tokio::join!(commands.send(Command::GoAway), &mut writing) };
        let _late = timeout(FAREWELL, last).await;
    }
    Ok(result)
}

/// Reader's state of a stream.
struct Remote {
    /// Until the client has ended it.
    data: Option<mpsc::Sender<Chunk>>,
    is_reset: watch::Sender<bool>,
}

async fn read(
    mut reader: impl AsyncRead + Unpin,
    commands: mpsc::Sender<Command>,
    opened: mpsc::Sender<Stream>,
    spoken: Arc<Mutex<Instant>>,
) -> Ended {
    let mut session = Session::new();
    let mut streams = Streams {
        known: BTreeMap::new(),
        room: Arc::new(Semaphore::new(CHUNKS)),
        commands,
        opened,
    };
    let mut buffer = vec![0; PIECE];
    loop {
        let silent = lock(&spoken).elapsed();
        let count = match timeout(IDLE.saturating_sub(silent), reader.read(&mut buffer)).await {
            Ok(Ok(0)) => return Ended::Gone,
            Ok(Ok(count)) => count,
            Ok(Err(error)) => return error.into(),
            Err(_) if lock(&spoken).elapsed() >= IDLE => return Ended::Idle,
            Err(_) => continue,
        };
        *lock(&spoken) = Instant::now();
        let mut input = buffer.get(..count).unwrap_or_default();
        loop {
            match session.next(&mut input) {
                Ok(Some(event)) => streams.handle(event).await,
                Ok(None) => break,
                Err(violation) => return violation.into(),
            }
        }
    }
}

fn lock(spoken: &Mutex<Instant>) -> MutexGuard<'_, Instant> {
    spoken.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Streams {
    known: BTreeMap<u32, Remote>,
    room: Arc<Semaphore>,
    commands: mpsc::Sender<Command>,
    opened: mpsc::Sender<Stream>,
}

impl Streams {
    async fn handle(&mut self, event: Event<'_>) {
        match event {
            Event::Opened { stream, headers } => self.open(stream, headers).await,
            Event::Data { stream, bytes } => self.pass_on(stream, bytes).await,
            Event::Finished { stream } => {
                if let Some(known) = self.known.get_mut(&stream) {
                    known.data = None;
                }
            }
            Event::Reset { stream } => {
                if let Some(known) = self.known.remove(&stream) {
                    known.is_reset.send_replace(true);
                }
            }
            Event::Refuse { stream, why } => self.answer(Command::Reset(stream, why)).await,
            Event::Ping { id } => self.answer(Command::Ping(id)).await,
            Event::GoAway => {}
        }
    }

    async fn open(&mut self, id: u32, headers: Headers) {
        self.known
            .retain(|_, known| known.data.is_some() || !known.is_reset.is_closed());
        let (send, data) = mpsc::channel(STREAM_CHUNKS);
        let (reset, is_reset) = watch::channel(false);
        let remote = Remote {
            data: Some(send),
            is_reset: reset,
        };
        self.known.insert(id, remote);
        let commands = self.commands.clone();
        let stream = Stream {
            headers,
            input: Input(data),
            output: Output {
                id,
                is_reset,
                commands,
            },
        };
        if self.opened.send(stream).await.is_err() {
            self.answer(Command::Reset(id, Reset::Refused)).await;
        }
    }

    async fn pass_on(&mut self, stream: u32, bytes: &[u8]) {
        let Some(data) = self.known.get(&stream).and_then(|known| known.data.as_ref()) else {
            return;
        };
        // Without a receiver, there is no need to wait for room.
        let room = tokio::select! {
            () = data.closed() => return,
            room = Arc::clone(&self.room).acquire_owned() => room,
        };
        if let Ok(room) = room {
            let bytes = bytes.to_vec();
            let _ = data.send(Chunk { bytes, _room: room }).await;
        }
    }

    /// The writer may have ended.
    async fn answer(&self, command: Command) {
        let _ = self.commands.send(command).await;
    }
}

async fn write(
    writer: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<Command>,
    spoken: Arc<Mutex<Instant>>,
) -> io::Result<()> {
    let mut writer = BufWriter::with_capacity(2 * PIECE, writer);
    let mut deflater = Deflater::new();
    let mut last = 0;
    while let Some(command) = queue.recv().await {
        let mut next = Some(command);
        while let Some(command) = next {
            let frame = match command {
                Command::Reply(stream) => {
                    last = last.max(stream);
                    frame::syn_reply(stream, &deflater.block(&Headers::new()))
                }
                Command::Data(stream, bytes) => {
                    writer
                        .write_all(&frame::data_head(stream, false, bytes.len()))
                        .await?;
                    bytes
                }
                Command::Finish(stream) => frame::data_head(stream, true, 0).to_vec(),
                Command::Reset(stream, why) => frame::reset(stream, why),
                Command::Ping(id) => frame::ping(id),
                Command::GoAway => {
                    writer.write_all(&frame::go_away(last)).await?;
                    return writer.shutdown().await;
                }
            };
            writer.write_all(&frame).await?;
            next = queue.try_recv().ok();
        }
        writer.flush().await?;
        *lock(&spoken) = Instant::now();
    }
    Ok(())
}

#[cfg(test)]
mod tests;

//! `console`: the terminal attached to a VM's serial port, or to its virtio-console.
//!
//! Input from the keyboard or a pipe goes to the guest byte for byte, except ^], which leaves. When
//! standard input ends, output continues: a script ends it with ^] or a signal, or waits for the VM
//! to stop. After a restart of the daemon the console attaches again and continues at the same
//! place; input in between is lost.

mod seen;
pub mod terminal;

use std::{
    future::pending,
    io::{self, IsTerminal as _, Write as _},
    thread,
    time::Duration,
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    time::{Instant, sleep, timeout_at},
};
use tokio_stream::wrappers::ReceiverStream;
use vmmd_api::v1::{self, VmPhase, console_request, console_response};

pub use self::seen::Seen;
use self::terminal::RawTerminal;
use crate::{
    args::verbs::Console,
    client::{Client, RESTART, TRIES_TO_GO_ON, about_vm, went_away},
    failure::{Code, Failure, Result, printable},
    output::write_failed,
};

/// ^]
const ESCAPE: u8 = 0x1d;
/// Bytes of one message, at most 4 KiB by the API.
const CHUNK: usize = 4096;
/// Messages that may wait for the daemon before the reader of standard input does.
const QUEUE: usize = 8;
/// How long a console stays at most after the last input, so that this reaches the guest when ^] follows at once. The daemon ends the stream
/// as soon as it has passed the input on; with a guest that reads nothing, or an older daemon, it takes all that time.
const FAREWELL: Duration = Duration::from_secs(5);

/// How a session ended.
enum End {
    /// ^] was typed.
    Left,
    /// The VM's run ended, with the reason.
    Closed(String),
    /// A signal asked this program to end.
    Signal(SignalKind),
}

/// Attaches to a console of a VM.
pub async fn run(client: &Client, args: &Console) -> Result<()> {
    let name = args.name.as_str();
    let status = client.get(name).await?.status.unwrap_or_default();
    let is_down = matches!(status.phase(), VmPhase::Stopped | VmPhase::Failed);
    let mut session = Session {
        client,
        args,
        signals: Signals::new()?,
        resized: caught(SignalKind::window_change())?,
        seen: Seen::default(),
        silent: args.no_replay,
    };
    // The daemon checks the request before anything else: a failure comes before the terminal is changed.
    let connection = Connection::open(client, args, args.force).await?;
    if args.send_break {
        let message = Some(console_request::Message::SendBreak(v1::ConsoleBreak {}));
        connection.send(v1::ConsoleRequest { message }).await;
    }
    let terminal = RawTerminal::enter()
        .map_err(|error| Failure::new(Code::Other, format!("cannot change the terminal's mode: {error}")))?;
    if terminal.is_some() {
        eprint!("Connected to vm/{name}. Press ^] to leave.\r\n");
        for writer in &connection.writers {
            eprint!("{} types here too.\r\n", printable(&writer.name));
        }
    }
    let end = session.attached(connection, Input::start(args.send_break)).await;
    drop(terminal);
    let end = end?;
    let on_terminal = io::stdin().is_terminal();
    // The guest's last line may have no end.
    let begin = if on_terminal { "\n" } else { "" };
    match &end {
        End::Left if on_terminal => eprintln!("{begin}Left the console of vm/{name}."),
        End::Closed(reason) => eprintln!(
            "{begin}The console of vm/{name} was closed: {}.",
            printable(reason)
        ),
        End::Left | End::Signal(_) => {}
    }
    match end {
        // As the shell reports a program that the signal killed.
        End::Signal(kind) => std::process::exit(128 + kind.as_raw_value()),
        End::Closed(_) if is_down => {
            let message = format!("vm/{name} does not run: this is the output of its last run");
            Err(Failure::new(Code::Precondition, message).hint(format!("`vmmctl start {name}`")))
        }
        End::Left | End::Closed(_) => Ok(()),
    }
}

fn failed(status: tonic::Status, name: &str) -> Failure {
    about_vm(status.into(), name)
}

/// An open console of the daemon's.
struct Connection {
    requests: mpsc::Sender<v1::ConsoleRequest>,
    output: tonic::Streaming<v1::ConsoleResponse>,
    /// Others that type.
    writers: Vec<v1::ConsoleWriter>,
    /// Replay of earlier output received so far; `replay_left` bytes are missing.
    replay: Vec<u8>,
    replay_left: u64,
}

impl Connection {
    async fn open(client: &Client, args: &Console, force: bool) -> Result<Self> {
        let name = args.name.as_str();
        let access = match (args.exclusive, args.read_only) {
            (true, _) => v1::ConsoleAccess::Exclusive,
            (false, true) => v1::ConsoleAccess::ReadOnly,
            (false, false) => v1::ConsoleAccess::Shared,
        };
        let device = match args.hvc {
            true => v1::ConsoleDevice::Virtio,
            false => v1::ConsoleDevice::Serial,
        };
        let (requests, queue) = mpsc::channel(QUEUE);
        let open = v1::ConsoleOpen {
            name: name.to_owned(),
            // The replay is needed to find the position after a reconnect.
            no_replay: false,
            access: access.into(),
            force,
            device: device.into(),
        };
        let open = v1::ConsoleRequest {
            message: Some(console_request::Message::Open(open)),
        };
        requests
            .try_send(open)
            .map_err(|error| Failure::new(Code::Other, error.to_string()))?;
        let answer = client.vms.clone().console(ReceiverStream::new(queue)).await;
        let mut output = answer.map_err(|status| failed(status, name))?.into_inner();
        let first = output.message().await.map_err(|status| failed(status, name))?;
        let opened = match first.and_then(|response| response.message) {
            Some(console_response::Message::Opened(opened)) => opened,
            _ => return Err(Failure::new(Code::Other, "vmmd did not open the console")),
        };
        let connection = Self {
            requests,
            output,
            writers: opened.writers,
            replay: Vec::new(),
            replay_left: opened.replay_bytes,
        };
        // A serial line cannot say so to the guest.
        if let Some(size) = terminal::size().filter(|_| args.hvc) {
            connection.send(resized(size)).await;
        }
        Ok(connection)
    }

    /// Sends a request. A closed connection shows up when the output ends.
    async fn send(&self, request: v1::ConsoleRequest) {
        let _gone = self.requests.send(request).await;
    }
}

/// Attaches again when the daemon is back.
async fn reopen(client: &Client, args: &Console) -> Result<Connection> {
    let mut tries = 0;
    loop {
        sleep(RESTART).await;
        tries += 1;
        // Without force: a client that took the console by force keeps it.
        match Connection::open(client, args, false).await {
            Err(failure) if went_away(&failure) && tries < TRIES_TO_GO_ON => {}
            opened => return opened,
        }
    }
}

/// Signals that end the program, after the terminal was restored.
struct Signals([(SignalKind, Signal); 4]);

impl Signals {
    fn new() -> Result<Self> {
        let catch = |kind| caught(kind).map(|signal| (kind, signal));
        Ok(Self([
            catch(SignalKind::interrupt())?,
            catch(SignalKind::terminate())?,
            catch(SignalKind::hangup())?,
            catch(SignalKind::quit())?,
        ]))
    }

    async fn next(&mut self) -> SignalKind {
        let [(a, first), (b, second), (c, third), (d, fourth)] = &mut self.0;
        tokio::select! {
            _ = first.recv() => *a,
            _ = second.recv() => *b,
            _ = third.recv() => *c,
            _ = fourth.recv() => *d,
        }
    }
}

fn caught(kind: SignalKind) -> Result<Signal> {
    signal(kind).map_err(|error| Failure::new(Code::Other, format!("cannot catch signals: {error}")))
}

/// Next event of a connection.
enum Step {
    Output(Option<v1::ConsoleResponse>),
    Typed(Vec<u8>),
    Sent,
    Left(Instant),
    Signal(SignalKind),
    Resized,
}

struct Session<'a> {
    client: &'a Client,
    args: &'a Console,
    signals: Signals,
    /// The terminal has another size.
    resized: Signal,
    seen: Seen,
    /// Suppresses output from before the console was opened.
    silent: bool,
}

impl Session<'_> {
    /// Passes on input and output until something ends it, over restarts of the daemon.
    async fn attached(&mut self, mut connection: Connection, mut input: Input) -> Result<End> {
        loop {
            let lost = match self.pass_on(&mut connection, &mut input).await {
                Ok(end) => return Ok(end),
                Err(failure) => failure,
            };
            if !went_away(&lost) {
                return Err(lost);
            }
            eprint!("\r\nlost the connection to vmmd; continuing when vmmd is back\r\n");
            connection = tokio::select! {
                biased;
                () = input.discard() => return Ok(End::Left),
                kind = self.signals.next() => return Ok(End::Signal(kind)),
                opened = reopen(self.client, self.args) => opened?,
            };
        }
    }

    /// The same as long as the connection holds.
    async fn pass_on(&mut self, connection: &mut Connection, input: &mut Input) -> Result<End> {
        // Typed and not passed on yet, while the guest takes nothing.
        let mut waiting: Option<Vec<u8>> = None;
        loop {
            let step = tokio::select! {
                // Typing ^] works also while the guest prints without end.
                biased;
                Some(deadline) = input.escape.recv() => Step::Left(deadline),
                kind = self.signals.next() => Step::Signal(kind),
                Some(()) = self.resized.recv(), if self.args.hvc => Step::Resized,
                permit = connection.requests.reserve(), if waiting.is_some() => {
                    if let (Ok(permit), Some(bytes)) = (permit, waiting.take()) {
                        permit.send(typed(bytes));
                    }
                    Step::Sent
                }
                Some(bytes) = input.typed.recv(), if waiting.is_none() => Step::Typed(bytes),
                message = connection.output.message() => {
                    Step::Output(message.map_err(|status| failed(status, &self.args.name))?)
                }
            };
            match step {
                Step::Left(deadline) => {
                    let _ = timeout_at(deadline, self.finish(connection, input, waiting)).await;
                    return Ok(End::Left);
                }
                Step::Signal(kind) => return Ok(End::Signal(kind)),
                Step::Resized => {
                    if let Some(size) = terminal::size() {
                        connection.send(resized(size)).await;
                    }
                }
                Step::Typed(bytes) => waiting = Some(bytes),
                Step::Sent => {}
                Step::Output(Some(response)) => {
                    if let Some(reason) = self.show(connection, response)? {
                        return Ok(End::Closed(reason));
                    }
                }
                Step::Output(None) => {
                    let message = "vmmd ended the console";
                    return Err(Failure::new(Code::Unavailable, message));
                }
            }
        }
    }

    /// Sends the input typed before ^], and prints output until the daemon closes its side.
    async fn finish(
        &mut self,
        connection: &mut Connection,
        input: &mut Input,
        waiting: Option<Vec<u8>>,
    ) -> Result<()> {
        let rest = waiting
            .into_iter()
            .chain(std::iter::from_fn(|| input.typed.try_recv().ok()));
        for bytes in rest {
            if connection.requests.send(typed(bytes)).await.is_err() {
                break;
            }
        }
        // The end of the queue signals the end of input to the daemon.
        let (gone, _) = mpsc::channel(1);
        drop(std::mem::replace(&mut connection.requests, gone));
        while let Some(response) = connection.output.message().await? {
            self.show(connection, response)?;
        }
        Ok(())
    }

    /// Prints the guest's output; returns the reason when the VM's run has ended.
    fn show(&mut self, connection: &mut Connection, response: v1::ConsoleResponse) -> Result<Option<String>> {
        match response.message {
            Some(console_response::Message::Output(bytes)) if connection.replay_left > 0 => {
                connection.replay_left = connection.replay_left.saturating_sub(bytes.len() as u64);
                connection.replay.extend(bytes);
                if connection.replay_left == 0 {
                    self.replay(&std::mem::take(&mut connection.replay))?;
                }
                Ok(None)
            }
            Some(console_response::Message::Output(bytes)) => self.print(&bytes).map(|()| None),
            Some(console_response::Message::Closed(closed)) => {
                self.replay(&std::mem::take(&mut connection.replay))?;
                Ok(Some(closed.reason))
            }
            Some(console_response::Message::TakenOver(taken)) => {
                let by = taken.by.unwrap_or_default();
                eprint!(
                    "\r\n{} has taken over the console; input from here is ignored\r\n",
                    printable(&by.name)
                );
                Ok(None)
            }
            Some(console_response::Message::Opened(_)) | None => Ok(None),
        }
    }

    /// Prints what of the past was not shown yet.
    fn replay(&mut self, bytes: &[u8]) -> Result<()> {
        if std::mem::take(&mut self.silent) {
            self.seen.note(bytes);
            return Ok(());
        }
        let new = self.seen.unseen(bytes).to_vec();
        self.print(&new)
    }

    fn print(&mut self, bytes: &[u8]) -> Result<()> {
        self.seen.note(bytes);
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(bytes).and_then(|()| stdout.flush());
        written.map_err(|error| write_failed(&error))
    }
}

fn resized((columns, rows): (u16, u16)) -> v1::ConsoleRequest {
    let size = v1::ConsoleSize {
        columns: columns.into(),
        rows: rows.into(),
    };
    v1::ConsoleRequest {
        message: Some(console_request::Message::Size(size)),
    }
}

fn typed(bytes: Vec<u8>) -> v1::ConsoleRequest {
    v1::ConsoleRequest {
        message: Some(console_request::Message::Input(bytes)),
    }
}

/// Standard input.
struct Input {
    typed: mpsc::Receiver<Vec<u8>>,
    /// When ^] has come: until when to stay so that the last input arrives.
    escape: mpsc::Receiver<Instant>,
}

impl Input {
    /// Starts the thread that reads the input.
    ///
    /// A thread is used because there is no common way to wait for a terminal, a pipe and a file.
    /// The thread ends with the program. A break that was `sent` before is to arrive like typed
    /// input.
    fn start(sent: bool) -> Self {
        let (typing, typed) = mpsc::channel(QUEUE);
        let (left, escape) = mpsc::channel(1);
        let farewell = Instant::now() + if sent { FAREWELL } else { Duration::ZERO };
        thread::spawn(move || read(&typing, &left, farewell));
        Self { typed, escape }
    }

    /// Discards input until ^].
    async fn discard(&mut self) {
        loop {
            tokio::select! {
                Some(_) = self.escape.recv() => return,
                Some(_) = self.typed.recv() => {}
                else => pending().await,
            }
        }
    }
}

/// Passes standard input on until it ends or ^] comes; the console stays until `deadline` at least, longer after input.
fn read(typing: &mpsc::Sender<Vec<u8>>, left: &mpsc::Sender<Instant>, mut deadline: Instant) {
    let mut buffer = [0; CHUNK];
    loop {
        let length = match rustix::io::retry_on_intr(|| rustix::io::read(io::stdin(), &mut buffer)) {
            Ok(0) | Err(_) => return,
            Ok(length) => length,
        };
        let bytes = buffer.get(..length).unwrap_or_default();
        let (bytes, end) = match bytes.iter().position(|byte| *byte == ESCAPE) {
            Some(end) => (bytes.get(..end).unwrap_or_default(), true),
            None => (bytes, false),
        };
        if !bytes.is_empty() {
            if typing.blocking_send(bytes.to_vec()).is_err() {
                return;
            }
            deadline = Instant::now() + FAREWELL;
        }
        if end {
            // Fails only when the receiver is closed.
            let _ = left.blocking_send(deadline);
            return;
        }
    }
}

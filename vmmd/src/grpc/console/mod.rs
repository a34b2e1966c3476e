//! `Console`: a VM's serial port, or its virtio-console, over a stream.
//!
//! Each client has its own connection to the VM's `console.sock` or `hvc.sock`. On this connection
//! the `vmm` first sends the length of the replay (8 bytes, little-endian), then the replay, then
//! the guest's output. Bytes from the client are typed into the port. [`crate::registry::consoles`]
//! decides which client may type. The bytes for a slow client stay in its socket, where the `vmm`
//! drops the excess: the daemon buffers only a few messages, and other clients do not wait. A
//! client that may type and ends its requests leaves. The stream ends when its input is in the
//! socket and the replay was sent.
//!
//! For a VM that does not run, the stream shows the end of the last run's serial log (a
//! virtio-console has no log) and ends. For a VM that is about to start, the stream waits for the
//! start.

mod typing;

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
    sync::Arc,
    time::Duration,
};

use rustix::net::sockopt::set_socket_send_buffer_size;
use tokio::{
    io::AsyncReadExt,
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    task::{JoinHandle, spawn_blocking},
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use vmmd_api::v1::{
    ConsoleAccess, ConsoleClosed, ConsoleDevice, ConsoleOpen, ConsoleOpened, ConsoleRequest, ConsoleResponse,
    ConsoleWriter, Vm, VmPhase, console_request, console_response::Message,
};
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};

use self::typing::Typing;
use crate::{
    host::Host,
    paths::{LogDir, RuntimeDir},
    registry::{
        consoles::{Access, Device, Permit},
        vms::Entry,
    },
};

/// The stream to the client.
pub type Stream = ReceiverStream<Result<ConsoleResponse, Status>>;
type Sender = mpsc::Sender<Result<ConsoleResponse, Status>>;

/// Messages ready for a client that reads slowly.
const READY: usize = 4;
/// Largest message of output in bytes.
const CHUNK: usize = 16 << 10;
/// How much input may wait for a guest in the socket, in bytes, as far as the kernel can do so little. A client that loses the console has
/// typed that.
const UNREAD: usize = 4 << 10;
/// How much of a serial log is shown of a VM that doesn't run, in bytes.
const LOG_TAIL: u64 = 1 << 20;
/// How long the end of the process may take to be known after its console has closed.
const END_KNOWN: Duration = Duration::from_secs(2);

/// Opens the console that the first message of the client, which is called `who`, names.
pub async fn open(
    host: Arc<Host>,
    mut input: Streaming<ConsoleRequest>,
    who: &str,
) -> Result<Stream, Failure> {
    let first = input
        .message()
        .await
        .ok()
        .flatten()
        .and_then(|request| request.message);
    let Some(console_request::Message::Open(open)) = first else {
        return Err(Failure::field("open", "must be the first message"));
    };
    let entry = host
        .vms
        .get(&open.name)
        .ok_or_else(|| Failure::no_vm(&open.name))?;
    let (device, access) = wanted(&open)?;
    let has_console = entry
        .state
        .borrow()
        .spec
        .as_ref()
        .is_some_and(|spec| spec.virtio_console.is_some());
    if device == Device::Virtio && !has_console {
        let message = "the VM has no virtio-console: give it a `virtioConsole` and restart it";
        return Err(Failure::precondition("NO_CONSOLE", message));
    }
    // The connection comes first: a client that the `vmm` refuses must not take over the console.
    let connection = tokio::select! {
        connection = connect(&host, &entry, device) => connection?,
        () = host.stopping.cancelled() => return Err(Failure::stopping()),
    };
    let (permit, writers) = host.consoles.open((entry.uid, device), who, access, open.force)?;
    let (sender, receiver) = mpsc::channel(READY);
    tokio::spawn(async move {
        let session = Session {
            host: Arc::clone(&host),
            entry,
            device,
            connection,
            writers,
            replay: !open.no_replay,
            sender: sender.clone(),
        };
        tokio::select! {
            _ = session.serve(input, permit) => {}
            () = sender.closed() => {}
            () = host.stopping.cancelled() => {
                let _ = sender.send(Err(Failure::stopping().into())).await;
            }
        }
    });
    Ok(ReceiverStream::new(receiver))
}

/// Which console, and for what.
fn wanted(open: &ConsoleOpen) -> Result<(Device, Access), Failure> {
    let device = match ConsoleDevice::try_from(open.device) {
        Ok(ConsoleDevice::Unspecified | ConsoleDevice::Serial) => Device::Serial,
        Ok(ConsoleDevice::Virtio) => Device::Virtio,
        Err(_) => return Err(Failure::field("open.device", "is none that this vmmd knows")),
    };
    let access = match ConsoleAccess::try_from(open.access) {
        Ok(ConsoleAccess::Unspecified | ConsoleAccess::Shared) => Access::Shared,
        Ok(ConsoleAccess::Exclusive) => Access::Exclusive,
        Ok(ConsoleAccess::ReadOnly) => Access::ReadOnly,
        Err(_) => return Err(Failure::field("open.access", "is none that this vmmd knows")),
    };
    Ok((device, access))
}

/// A connection to a console of a VM that runs.
struct Connection {
    reader: OwnedReadHalf,
    writer: OwnedWriteHalf,
    /// How many bytes of the past come first.
    replay_bytes: u64,
}

/// Connects to a console; `None` when the VM does not run. Refused when the `vmm` serves as many clients as it can.
async fn connect(host: &Host, entry: &Entry, device: Device) -> Result<Option<Connection>, Failure> {
    let runtime = RuntimeDir::of(&host.config, entry.uid);
    let socket = match device {
        Device::Serial => runtime.console(),
        Device::Virtio => runtime.hvc(),
    };
    let Ok(connection) = UnixStream::connect(&socket).await else {
        return Ok(None);
    };
    // Unchanged, it holds more, and all else is the same.
    let _unchanged = set_socket_send_buffer_size(&connection, UNREAD);
    let (mut reader, writer) = connection.into_split();
    if let Ok(replay_bytes) = reader.read_u64_le().await {
        return Ok(Some(Connection {
            reader,
            writer,
            replay_bytes,
        }));
    }
    // A `vmm` that ends closes the connection without a word too.
    match timeout(END_KNOWN, run_ends(&mut entry.state.clone())).await {
        Ok(_) => Ok(None),
        Err(_) => {
            let message =
                "16 clients, the most that there can be, have this console of the VM open: close one of them";
            Err(Failure::new(Kind::Exhausted, "TOO_MANY_CONSOLES", message))
        }
    }
}

struct Session {
    host: Arc<Host>,
    entry: Entry,
    device: Device,
    /// Connection to a VM that was running when the client connected.
    connection: Option<Connection>,
    /// Others that type, when this one came.
    writers: Vec<ConsoleWriter>,
    replay: bool,
    sender: Sender,
}

/// The client has gone.
struct Gone;

/// Why no more output is sent.
enum OutputEnd {
    /// The `vmm` has closed the console.
    Closed,
    /// The client has ended its requests, and its input was passed on.
    Typed,
}

impl Session {
    async fn serve(mut self, input: Streaming<ConsoleRequest>, permit: Option<Permit>) -> Result<(), Gone> {
        let mut state = self.entry.state.clone();
        let connection = loop {
            let connected = match self.connection.take() {
                Some(connection) => Ok(Some(connection)),
                None => connect(&self.host, &self.entry, self.device).await,
            };
            match connected {
                Ok(Some(connection)) => break connection,
                Ok(None) => {}
                Err(failure) => {
                    return self.sender.send(Err(failure.into())).await.map_err(|_| Gone);
                }
            }
            let phase = phase(&state.borrow_and_update());
            match phase {
                // The socket exists before the VM runs, so one of the next changes brings the
                // connection or the end.
                VmPhase::Pending | VmPhase::Starting => {
                    if state.changed().await.is_err() {
                        return self.closed("the VM was deleted").await;
                    }
                }
                VmPhase::Running | VmPhase::Paused if self.device == Device::Virtio => {
                    return self
                        .closed("this run of the VM has no virtio-console: restart it")
                        .await;
                }
                _ => return self.show_log(&state).await,
            }
        };
        let Connection {
            reader,
            writer,
            replay_bytes,
        } = connection;
        let typing = Typing {
            host: Arc::clone(&self.host),
            uid: self.entry.uid,
            device: self.device,
            permit,
            sender: self.sender.clone(),
        };
        let mut typing = tokio::spawn(typing.run(input, writer));
        let result = self.copy_output(reader, replay_bytes, &mut typing).await;
        typing.abort();
        match result? {
            // The end of the stream confirms to the client that its input was passed on.
            OutputEnd::Typed => Ok(()),
            OutputEnd::Closed => self.closed(&end_of_run(state).await).await,
        }
    }

    /// Sends the replay, then the guest's output until an end.
    async fn copy_output(
        &mut self,
        mut reader: OwnedReadHalf,
        length: u64,
        typing: &mut JoinHandle<()>,
    ) -> Result<OutputEnd, Gone> {
        let mut skipped = if self.replay { 0 } else { length };
        let replay_bytes = if self.replay { length } else { 0 };
        let writers = std::mem::take(&mut self.writers);
        self.send(Message::Opened(ConsoleOpened {
            replay_bytes,
            writers,
        }))
        .await?;
        let mut buffer = vec![0; CHUNK];
        let mut past = length;
        loop {
            let read = tokio::select! {
                read = reader.read(&mut buffer) => read,
                _ = &mut *typing, if past == 0 => return Ok(OutputEnd::Typed),
            };
            let count = match read {
                Ok(0) | Err(_) => return Ok(OutputEnd::Closed),
                Ok(count) => count,
            };
            past = past.saturating_sub(count as u64);
            let skip = usize::try_from(skipped).unwrap_or(usize::MAX).min(count);
            skipped -= skip as u64;
            let output = buffer.get(skip..count).unwrap_or_default();
            if !output.is_empty() {
                self.send(Message::Output(output.to_vec())).await?;
            }
        }
    }

    async fn show_log(&mut self, state: &watch::Receiver<Arc<Vm>>) -> Result<(), Gone> {
        let logs = LogDir::of(&self.host.config, self.entry.uid);
        let wanted = self.replay && self.device == Device::Serial;
        let read = spawn_blocking(move || {
            if wanted {
                tail(&[&logs.serial_old(), &logs.serial()])
            } else {
                Ok(Vec::new())
            }
        });
        let log = read
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)))
            .unwrap_or_default();
        let writers = std::mem::take(&mut self.writers);
        self.send(Message::Opened(ConsoleOpened {
            replay_bytes: log.len() as u64,
            writers,
        }))
        .await?;
        for chunk in log.chunks(CHUNK) {
            self.send(Message::Output(chunk.to_vec())).await?;
        }
        let reason = reason(&state.borrow());
        self.closed(&format!("the VM is not running ({reason}): start it first"))
            .await
    }

    async fn closed(&self, reason: &str) -> Result<(), Gone> {
        self.send(Message::Closed(ConsoleClosed {
            reason: reason.to_owned(),
        }))
        .await
    }

    async fn send(&self, message: Message) -> Result<(), Gone> {
        self.sender.send(Ok(response(message))).await.map_err(|_| Gone)
    }
}

fn response(message: Message) -> ConsoleResponse {
    ConsoleResponse {
        message: Some(message),
    }
}

/// Resolves when the VM does not run, also when it was deleted.
async fn run_ends(state: &mut watch::Receiver<Arc<Vm>>) -> Option<Arc<Vm>> {
    let ended = state.wait_for(|vm| vm.status.as_ref().is_none_or(|status| status.instance.is_none()));
    ended.await.ok().map(|vm| Arc::clone(&vm))
}

/// Why the output has ended: by the status, as soon as that knows.
async fn end_of_run(mut state: watch::Receiver<Arc<Vm>>) -> String {
    match timeout(END_KNOWN, run_ends(&mut state)).await {
        Ok(Some(vm)) => format!("the run has ended ({})", reason(&vm)),
        Ok(None) => "the VM was deleted".to_owned(),
        Err(_) => "the vmm closed the console".to_owned(),
    }
}

fn phase(vm: &Vm) -> VmPhase {
    vm.status
        .as_ref()
        .map_or(VmPhase::Unspecified, |status| status.phase())
}

fn reason(vm: &Vm) -> String {
    let Some(status) = &vm.status else {
        return String::new();
    };
    if status.message.is_empty() {
        status.reason.clone()
    } else {
        format!("{}: {}", status.reason, text::brief(&status.message))
    }
}

/// The last [`LOG_TAIL`] bytes of the files after each other.
fn tail(files: &[&Path]) -> io::Result<Vec<u8>> {
    let mut rest = LOG_TAIL;
    let mut parts = Vec::new();
    for path in files.iter().rev() {
        let Ok(mut file) = File::open(path) else { continue };
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(rest)))?;
        let mut part = Vec::new();
        file.take(rest).read_to_end(&mut part)?;
        rest = rest.saturating_sub(part.len() as u64);
        parts.push(part);
    }
    parts.reverse();
    Ok(parts.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_goes_over_both_halves_of_a_log() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        let whole = usize::try_from(LOG_TAIL).unwrap();
        std::fs::write(&new, b"new").unwrap();
        assert_eq!(tail(&[&old, &new]).unwrap(), b"new");
        std::fs::write(&old, vec![b'o'; whole]).unwrap();
        let read = tail(&[&old, &new]).unwrap();
        assert!(read.len() == whole && read.ends_with(b"oonew"));
        std::fs::write(&new, vec![b'n'; whole + 5]).unwrap();
        assert_eq!(tail(&[&old, &new]).unwrap(), vec![b'n'; whole]);
    }
}

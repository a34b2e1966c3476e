//! `console`: the terminal attached to a VM's serial port.
//!
//! What is typed (or comes through a pipe) goes to the guest byte for byte, except ^] which leaves. When standard
//! input ends, output goes on: a script ends it with ^] or a signal, or waits for the VM to stop.

mod terminal;

use std::{
    io::{self, IsTerminal as _, Write as _},
    thread,
    time::Duration,
};

use proto::v1::{self, console_request, console_response};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::Instant,
};
use tokio_stream::wrappers::ReceiverStream;

use self::terminal::RawTerminal;
use crate::{
    client::{Client, about_vm},
    failure::{Code, Failure, Result, printable},
    output::write_failed,
};

/// ^]
const ESCAPE: u8 = 0x1d;
/// Bytes of one message, at most 4 KiB by the API.
const CHUNK: usize = 4096;
/// Messages that may wait for the daemon before the reader of standard input does.
const QUEUE: usize = 8;

/// How long a console stays after the last input, so that this reaches the guest when ^] follows at once. A daemon
/// that has passed it on may end the stream before; none says so otherwise.
const FAREWELL: Duration = Duration::from_millis(300);

/// How a session ended.
enum End {
    /// ^] was typed.
    Left,
    /// The VM's run ended, with the reason.
    Closed(String),
    /// A signal asked this program to end.
    Signal(SignalKind),
}

/// Attaches to the console of the VM called `name`.
pub async fn run(client: &Client, name: &str, no_replay: bool) -> Result<()> {
    let (requests, queue) = mpsc::channel(QUEUE);
    let open = v1::ConsoleOpen {
        name: name.to_owned(),
        no_replay,
    };
    let open = v1::ConsoleRequest {
        message: Some(console_request::Message::Open(open)),
    };
    requests
        .try_send(open)
        .map_err(|error| Failure::new(Code::Other, error.to_string()))?;
    let mut client = client.vms.clone();
    let answer = client.console(ReceiverStream::new(queue)).await;
    let mut output = answer.map_err(|status| failed(status, name))?.into_inner();
    // The daemon checks `open` before anything else: a failure comes before the terminal is changed.
    let first = output.message().await.map_err(|status| failed(status, name))?;

    let terminal = RawTerminal::enter()
        .map_err(|error| Failure::new(Code::Other, format!("can't change the terminal's mode: {error}")))?;
    if terminal.is_some() {
        eprint!("Connected to vm/{name}. Press ^] to leave.\r\n");
    }
    let end = attached(first, &mut output, requests, name).await;
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
        End::Left | End::Closed(_) => Ok(()),
    }
}

fn failed(status: tonic::Status, name: &str) -> Failure {
    about_vm(status.into(), name)
}

async fn attached(
    first: Option<v1::ConsoleResponse>,
    output: &mut tonic::Streaming<v1::ConsoleResponse>,
    requests: mpsc::Sender<v1::ConsoleRequest>,
    name: &str,
) -> Result<End> {
    let no_signals = |error: io::Error| Failure::new(Code::Other, format!("can't catch signals: {error}"));
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(no_signals)?;
    let mut quit = signal(SignalKind::quit()).map_err(no_signals)?;
    let mut left = read_input(requests);
    let mut next = first;
    loop {
        if let Some(response) = next.take()
            && let Some(reason) = show(response)?
        {
            return Ok(End::Closed(reason));
        }
        tokio::select! {
            // Typing ^] works also while the guest prints without end.
            biased;
            Some(deadline) = left.recv() => {
                let _ = tokio::time::timeout_at(deadline, finish(output)).await;
                return Ok(End::Left);
            }
            _ = interrupt.recv() => return Ok(End::Signal(SignalKind::interrupt())),
            _ = terminate.recv() => return Ok(End::Signal(SignalKind::terminate())),
            _ = hangup.recv() => return Ok(End::Signal(SignalKind::hangup())),
            _ = quit.recv() => return Ok(End::Signal(SignalKind::quit())),
            message = output.message() => match message.map_err(|status| failed(status, name))? {
                Some(message) => next = Some(message),
                // It ends also because ^] ended the input in this moment.
                None if left.try_recv().is_ok() => return Ok(End::Left),
                None => return Ok(End::Closed("vmmd ended it".into())),
            },
        }
    }
}

/// Prints what still comes until the daemon ends its side.
async fn finish(output: &mut tonic::Streaming<v1::ConsoleResponse>) -> Result<()> {
    while let Some(response) = output.message().await? {
        show(response)?;
    }
    Ok(())
}

/// Prints what the guest printed; the reason when the VM's run ended.
fn show(response: v1::ConsoleResponse) -> Result<Option<String>> {
    match response.message {
        Some(console_response::Message::Output(bytes)) => {
            let mut stdout = io::stdout().lock();
            stdout
                .write_all(&bytes)
                .and_then(|()| stdout.flush())
                .map_err(|error| write_failed(&error))?;
            Ok(None)
        }
        Some(console_response::Message::Closed(closed)) => Ok(Some(closed.reason)),
        Some(console_response::Message::Opened(_)) | None => Ok(None),
    }
}

/// Starts the thread that passes standard input on; what it returns says, when ^] came, until when to
/// stay so that the last input arrives.
///
/// It is a thread because reading a terminal, a pipe and a file has no common form that can be waited for; it ends
/// with the program.
fn read_input(requests: mpsc::Sender<v1::ConsoleRequest>) -> mpsc::Receiver<Instant> {
    let (left, escape) = mpsc::channel(1);
    let mut deadline = Instant::now();
    thread::spawn(move || {
        let mut buffer = [0; CHUNK];
        loop {
            let length = match rustix::io::retry_on_intr(|| rustix::io::read(io::stdin(), &mut buffer)) {
                Ok(0) | Err(_) => break,
                Ok(length) => length,
            };
            let bytes = buffer.get(..length).unwrap_or_default();
            let (bytes, end) = match bytes.iter().position(|byte| *byte == ESCAPE) {
                Some(end) => (bytes.get(..end).unwrap_or_default(), true),
                None => (bytes, false),
            };
            let message = console_request::Message::Input(bytes.to_vec());
            if !bytes.is_empty()
                && requests
                    .blocking_send(v1::ConsoleRequest {
                        message: Some(message),
                    })
                    .is_err()
            {
                break;
            }
            if !bytes.is_empty() {
                deadline = Instant::now() + FAREWELL;
            }
            if end {
                // Before the daemon can answer the end of the input with that of the output. Fails only when nobody
                // waits for it any more.
                let _ = left.blocking_send(deadline);
                // Dropping the queue's end, after all that was typed, tells the daemon that nothing more comes.
                drop(requests);
                return;
            }
        }
        // Standard input has ended, the console has not: with the queue's end it would.
        std::mem::forget(requests);
    });
    escape
}

//! `ExecVm`: a command in a guest, by the guest's agent.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    task::yield_now,
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use vmmd_api::v1::{
    ExecExit, ExecOpen, ExecVmRequest, ExecVmResponse, exec_vm_request::Message,
    exec_vm_response::Message as Output,
};
use vmmd_host::failure::{Failure, Kind};

use crate::{
    guest::{Agent, Command, Ended, FIRST_LOOK, LAST_LOOK, end_of},
    host::Host,
    registry::vms::Entry,
};

/// The stream to the client.
pub type Stream = ReceiverStream<Result<ExecVmResponse, Status>>;

/// Messages ready for a client that reads slowly.
const READY: usize = 4;
/// Largest message of output in bytes.
const CHUNK: usize = 64 << 10;
/// Most words and bytes of a command and its environment.
const MAX_WORDS: usize = 1024;
const MAX_WORD_BYTES: usize = 128 << 10;

/// Most input of a command whose guest has no shell, in bytes. It travels in one message of the
/// agent, in base64.
const MAX_INPUT: usize = 1 << 20;

/// How long the agent may take to close the files of a command when the daemon stops.
const CLOSE: Duration = Duration::from_secs(1);

type Sender = mpsc::Sender<Result<ExecVmResponse, Status>>;

/// A command that runs.
enum Running {
    /// Its output comes while it runs.
    Streamed(Box<Command>),
    /// Its output comes from the agent when it ends. This is the number of the process.
    Captured(i64),
}

/// Runs the command that the client's first message names.
pub async fn open(host: Arc<Host>, mut input: Streaming<ExecVmRequest>) -> Result<Stream, Failure> {
    let first = input.message().await.ok().flatten();
    let Some(Message::Open(open)) = first.and_then(|request| request.message) else {
        return Err(Failure::field("open", "must be the first message"));
    };
    check(&open)?;
    let limit = open.timeout.map(Duration::try_from).transpose();
    let limit = limit.map_err(|_| Failure::field("open.timeout", "must not be negative"))?;
    let limit = limit.filter(|limit| !limit.is_zero());
    let entry = host
        .vms
        .get(&open.name)
        .ok_or_else(|| Failure::no_vm(&open.name))?;
    Agent::of(&host, &entry)?;
    let (sender, receiver) = mpsc::channel(READY);
    let (pieces, typed) = mpsc::channel(1);
    let (started, is_started) = oneshot::channel();
    let stopping = host.stopping.clone();
    let input = open.input.then_some(input);
    // In a task of its own, which ends the command when the caller goes away.
    tokio::spawn(async move {
        match start(&host, &entry, &open, typed).await {
            Ok(running) => {
                let _gone = started.send(Ok(()));
                follow(&host, &entry, running, limit, &sender).await;
            }
            Err(failure) => {
                let _gone = started.send(Err(failure));
            }
        }
    });
    let begin = async {
        pass(input, &pieces).await?;
        is_started
            .await
            .unwrap_or_else(|_| Err(Failure::internal("a command ended early")))
    };
    tokio::select! {
        begun = begin => begun?,
        () = stopping.cancelled() => return Err(Failure::stopping()),
    }
    Ok(ReceiverStream::new(receiver))
}

/// A piece of the input of a command.
enum Piece {
    Bytes(Vec<u8>),
    /// All input has come.
    End,
}

/// Passes the client's input on. Without an end when the client breaks off: then the command does not
/// start.
async fn pass(input: Option<Streaming<ExecVmRequest>>, pieces: &mpsc::Sender<Piece>) -> Result<(), Failure> {
    if let Some(mut messages) = input {
        while let Some(request) = messages.message().await.map_err(|_| incomplete())? {
            let Some(Message::Input(bytes)) = request.message else {
                return Err(Failure::field("input", "must follow after `open`"));
            };
            if pieces.send(Piece::Bytes(bytes)).await.is_err() {
                // The start has failed.
                return Ok(());
            }
        }
        // tonic ends the messages of a cancelled call as if these were all. hyper drops the call then, at its next await.
        yield_now().await;
    }
    let _start_failed = pieces.send(Piece::End).await;
    Ok(())
}

fn incomplete() -> Failure {
    let message = "the client broke off its input";
    Failure::new(Kind::Aborted, "INPUT_INCOMPLETE", message)
}

async fn start(
    host: &Arc<Host>,
    entry: &Entry,
    open: &ExecOpen,
    mut typed: mpsc::Receiver<Piece>,
) -> Result<Running, Failure> {
    let ExecOpen { command, env, .. } = open;
    if let Some(command) = Command::prepare(Arc::clone(host), entry.clone(), command, env).await? {
        let fed = async {
            while let Piece::Bytes(bytes) = typed.recv().await.ok_or_else(incomplete)? {
                command.write(&bytes).await?;
            }
            command.start().await
        };
        return match fed.await {
            Ok(()) => Ok(Running::Streamed(Box::new(command))),
            Err(failure) => {
                command.give_up().await;
                Err(failure)
            }
        };
    }
    let mut input = Vec::new();
    while let Piece::Bytes(bytes) = typed.recv().await.ok_or_else(incomplete)? {
        input.extend(bytes);
        if input.len() > MAX_INPUT {
            let message = "must be at most 1 MiB for this guest: copy a larger file into the guest first";
            return Err(Failure::field("input", message));
        }
    }
    let pid = Agent::of(host, entry)?.start(command, env, &input).await?;
    Ok(Running::Captured(pid))
}

/// Sends the output and the end of a command. A streamed command whose client goes away, or which has
/// not ended in time, is asked to end.
async fn follow(host: &Host, entry: &Entry, mut running: Running, limit: Option<Duration>, sender: &Sender) {
    let ending = async {
        match &mut running {
            Running::Streamed(command) => stream(command, sender).await,
            Running::Captured(pid) => end_of(host, entry, *pid).await,
        }
    };
    let ended = tokio::select! {
        biased;
        () = host.stopping.cancelled() => {
            // The command continues. Its files go with its end, when the agent does not have them open.
            if let Running::Streamed(command) = &running {
                let _silent = timeout(CLOSE, command.close()).await;
            }
            let _gone = sender.send(Err(Failure::stopping().into())).await;
            return;
        }
        () = sender.closed() => None,
        ended = within(limit, ending) => Some(ended),
    };
    if let Running::Streamed(command) = running {
        match ended {
            Some(Ok(_)) => command.close().await,
            _ => command.give_up().await,
        }
    }
    match ended {
        Some(Ok(ended)) => send(sender, ended).await,
        Some(Err(failure)) => {
            // The client may have gone.
            let _gone = sender.send(Err(failure.into())).await;
        }
        None => {}
    }
}

async fn within(
    limit: Option<Duration>,
    ending: impl Future<Output = Result<Ended, Failure>>,
) -> Result<Ended, Failure> {
    let Some(limit) = limit else {
        return ending.await;
    };
    let message = "the command has not ended in time";
    let late = |_| Err(Failure::new(Kind::Deadline, "TIMEOUT", message));
    timeout(limit, ending).await.unwrap_or_else(late)
}

/// Sends the output of a command up to its end.
async fn stream(command: &mut Command, sender: &Sender) -> Result<Ended, Failure> {
    let mut pause = FIRST_LOOK;
    loop {
        let [stdout, stderr] = command.output().await?;
        if stdout.is_empty() && stderr.is_empty() {
            if let Some(ended) = command.ended() {
                return Ok(ended.clone());
            }
            sleep(pause).await;
            pause = pause.saturating_mul(2).min(LAST_LOOK);
            continue;
        }
        pause = FIRST_LOOK;
        for message in output(&stdout, &stderr) {
            put(sender, message).await;
        }
    }
}

fn check(open: &ExecOpen) -> Result<(), Failure> {
    if open.command.first().is_none_or(String::is_empty) {
        return Err(Failure::field("open.command", "must name a program of the guest"));
    }
    let words = open.command.iter().chain(&open.env);
    if words.clone().count() > MAX_WORDS || words.map(String::len).sum::<usize>() > MAX_WORD_BYTES {
        return Err(Failure::field(
            "open.command",
            "must be at most 1,024 words and 128 KiB, with the environment",
        ));
    }
    match open.env.iter().position(|pair| !pair.contains('=')) {
        Some(index) => Err(Failure::field(
            &format!("open.env[{index}]"),
            "must be NAME=VALUE",
        )),
        None => Ok(()),
    }
}

/// Messages with output.
fn output(stdout: &[u8], stderr: &[u8]) -> impl Iterator<Item = Output> {
    let stdout = stdout.chunks(CHUNK).map(|bytes| Output::Stdout(bytes.to_vec()));
    stdout.chain(stderr.chunks(CHUNK).map(|bytes| Output::Stderr(bytes.to_vec())))
}

/// Sends the output that has not been sent, and the end.
async fn send(sender: &Sender, ended: Ended) {
    let exit = Output::Exit(ExecExit {
        code: ended.code.unwrap_or(0),
        signal: ended.signal.unwrap_or(0),
        truncated: ended.truncated,
    });
    for message in output(&ended.stdout, &ended.stderr).chain([exit]) {
        put(sender, message).await;
    }
}

/// Sends a message. A client that has gone is no error.
async fn put(sender: &Sender, message: Output) {
    let message = ExecVmResponse {
        message: Some(message),
    };
    let _gone = sender.send(Ok(message)).await;
}

//! `ExecVm`: a command in a guest, by the guest's agent.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use vmmd_api::v1::{
    ExecExit, ExecOpen, ExecVmRequest, ExecVmResponse, exec_vm_request::Message, exec_vm_response,
};
use vmmd_host::failure::{Failure, Kind};

use crate::{
    guest::{Agent, Ended, end_of},
    host::Host,
};

/// The stream to the client.
pub type Stream = ReceiverStream<Result<ExecVmResponse, Status>>;

/// Messages ready for a client that reads slowly.
const READY: usize = 4;
/// Largest message of output in bytes.
const CHUNK: usize = 64 << 10;
/// Most input of a command in bytes. It travels in one message of the agent, in base64.
const MAX_INPUT: usize = 1 << 20;
/// Most words and bytes of a command and its environment.
const MAX_WORDS: usize = 1024;
const MAX_WORD_BYTES: usize = 128 << 10;

/// Runs the command that the client's first message names.
pub async fn open(host: Arc<Host>, mut input: Streaming<ExecVmRequest>) -> Result<Stream, Failure> {
    let first = input.message().await.ok().flatten();
    let Some(Message::Open(open)) = first.and_then(|request| request.message) else {
        return Err(Failure::field("open", "must be the first message"));
    };
    check(&open)?;
    let limit = open.timeout.map(Duration::try_from).transpose();
    let limit = limit.map_err(|_| Failure::field("open.timeout", "must not be negative"))?;
    let entry = host
        .vms
        .get(&open.name)
        .ok_or_else(|| Failure::no_vm(&open.name))?;
    Agent::of(&host, &entry)?;
    let start = async {
        let typed = match open.input {
            true => read(input).await?,
            false => Vec::new(),
        };
        let agent = Agent::of(&host, &entry)?;
        agent.start(&open.command, &open.env, &typed).await
    };
    let pid = tokio::select! {
        pid = start => pid?,
        () = host.stopping.cancelled() => return Err(Failure::stopping()),
    };
    let (sender, receiver) = mpsc::channel(READY);
    tokio::spawn(async move {
        let limit = limit.filter(|limit| !limit.is_zero());
        let ended = async {
            match limit {
                Some(limit) => timeout(limit, end_of(&host, &entry, pid))
                    .await
                    .unwrap_or_else(|_| {
                        let message = "the command has not ended in time: it continues in the guest";
                        Err(Failure::new(Kind::Deadline, "TIMEOUT", message))
                    }),
                None => end_of(&host, &entry, pid).await,
            }
        };
        let ended = tokio::select! {
            ended = ended => ended,
            () = sender.closed() => return,
            () = host.stopping.cancelled() => Err(Failure::stopping()),
        };
        match ended {
            Ok(ended) => send(&sender, ended).await,
            Err(failure) => {
                // The client may have gone.
                let _gone = sender.send(Err(failure.into())).await;
            }
        }
    });
    Ok(ReceiverStream::new(receiver))
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

/// The client's input, up to the end of its messages.
async fn read(mut messages: Streaming<ExecVmRequest>) -> Result<Vec<u8>, Failure> {
    let mut input = Vec::new();
    // A client that breaks off has not sent all: the command does not start.
    let aborted = |_| {
        Failure::new(
            Kind::Aborted,
            "INPUT_INCOMPLETE",
            "the client broke off its input",
        )
    };
    while let Some(request) = messages.message().await.map_err(aborted)? {
        match request.message {
            Some(Message::Input(bytes)) => input.extend(bytes),
            _ => return Err(Failure::field("input", "must follow after `open`")),
        }
        if input.len() > MAX_INPUT {
            let message = "must be at most 1 MiB: copy a larger file into the guest first";
            return Err(Failure::field("input", message));
        }
    }
    Ok(input)
}

/// Sends the output and the end. A client that has gone is no error.
async fn send(sender: &mpsc::Sender<Result<ExecVmResponse, Status>>, ended: Ended) {
    let stdout = ended
        .stdout
        .chunks(CHUNK)
        .map(|bytes| exec_vm_response::Message::Stdout(bytes.to_vec()));
    let stderr = ended
        .stderr
        .chunks(CHUNK)
        .map(|bytes| exec_vm_response::Message::Stderr(bytes.to_vec()));
    let exit = exec_vm_response::Message::Exit(ExecExit {
        code: ended.code.unwrap_or(0),
        signal: ended.signal.unwrap_or(0),
        truncated: ended.truncated,
    });
    for message in stdout.chain(stderr).chain([exit]) {
        let message = ExecVmResponse {
            message: Some(message),
        };
        if sender.send(Ok(message)).await.is_err() {
            return;
        }
    }
}

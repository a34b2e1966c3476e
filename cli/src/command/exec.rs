//! `exec`: a command in a guest, by the guest's agent.

use std::io::{self, Write as _};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use vmmd_api::v1::{ExecExit, ExecOpen, ExecVmRequest, exec_vm_request::Message, exec_vm_response};

use crate::{
    args::verbs::Exec,
    client::{Client, about_vm},
    failure::{Code, Failure, Result},
};

/// Bytes of one message.
const CHUNK: usize = 64 << 10;
/// Messages that wait to be sent.
const QUEUE: usize = 4;

/// Prints the output of the command, and ends with its exit code.
pub async fn exec(client: &Client, args: Exec) -> Result<()> {
    let (requests, queue) = mpsc::channel(QUEUE);
    let open = ExecOpen {
        name: args.name.clone(),
        command: args.command,
        env: args.env,
        input: args.stdin,
        timeout: args.timeout.map(Into::into),
    };
    requests
        .try_send(request(Message::Open(open)))
        .map_err(|error| Failure::new(Code::Other, error.to_string()))?;
    if args.stdin {
        // A separate thread: a read of standard input is not cancellable.
        std::thread::spawn(move || send(&requests));
    } else {
        drop(requests);
    }
    let answer = client.vms.clone().exec_vm(ReceiverStream::new(queue)).await;
    let mut responses = answer
        .map_err(|status| about_vm(status.into(), &args.name))?
        .into_inner();
    while let Some(response) = responses.message().await? {
        let written = match response.message {
            Some(exec_vm_response::Message::Stdout(bytes)) => io::stdout().write_all(&bytes),
            Some(exec_vm_response::Message::Stderr(bytes)) => io::stderr().write_all(&bytes),
            Some(exec_vm_response::Message::Exit(exit)) => return end(&exit),
            None => Ok(()),
        };
        written.map_err(|error| Failure::new(Code::Other, format!("writing the output: {error}")))?;
    }
    Err(Failure::new(
        Code::Unavailable,
        "the daemon ended the answer before the end of the command",
    ))
}

fn request(message: Message) -> ExecVmRequest {
    ExecVmRequest {
        message: Some(message),
    }
}

/// Sends standard input up to its end. A failed read ends this program: the end of the requests
/// would look like the end of the input.
fn send(requests: &mpsc::Sender<ExecVmRequest>) {
    let mut buffer = vec![0; CHUNK];
    loop {
        match rustix::io::retry_on_intr(|| rustix::io::read(io::stdin(), &mut buffer)) {
            Ok(0) => return,
            Ok(count) => {
                let bytes = buffer.get(..count).unwrap_or_default().to_vec();
                if requests.blocking_send(request(Message::Input(bytes))).is_err() {
                    return;
                }
            }
            Err(errno) => {
                eprintln!(
                    "vmmctl: error: reading standard input: {}",
                    io::Error::from(errno)
                );
                std::process::exit(Code::Other as i32);
            }
        }
    }
}

/// Ends this program as the command ended.
fn end(exit: &ExecExit) -> Result<()> {
    if exit.truncated {
        eprintln!("vmmctl: warning: the agent has left out the end of the output, which was too long for it");
    }
    let _unwritten = io::stdout().flush();
    match exit_code(exit) {
        0 => Ok(()),
        code => std::process::exit(code),
    }
}

/// As a shell does it.
fn exit_code(exit: &ExecExit) -> i32 {
    match exit.signal {
        0 => exit.code,
        signal => 128 | signal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_is_that_of_the_command_or_tells_the_signal() {
        let exit = |code, signal| ExecExit {
            code,
            signal,
            truncated: false,
        };
        assert_eq!(exit_code(&exit(0, 0)), 0);
        assert_eq!(exit_code(&exit(3, 0)), 3);
        assert_eq!(exit_code(&exit(0, 9)), 137);
    }
}

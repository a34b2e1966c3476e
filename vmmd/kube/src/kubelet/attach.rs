//! `kubectl attach` and `kubectl exec -it POD -- console`: a terminal at a console of the VM, over
//! the streams of `v4.channel.k8s.io`.
//!
//! Input goes to the guest unchanged, except ^], which leaves, as with `vmmctl console`. When the
//! input ends, output continues.

use std::{pin::pin, time::Duration};

use futures::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::timeout};
use tonic::Streaming;
use vmmd_api::v1::{self, console_request, console_response};

use super::spdy::{Acceptor, Closed, Input, Output};
use crate::daemon::{CALL, Daemon, within};

/// Protocol of the streams.
pub const PROTOCOL: &str = "v4.channel.k8s.io";
/// ^]
const LEAVE: u8 = 0x1d;
/// Bytes of one message, at most 4 KiB by vmmd's API.
const CHUNK: usize = 4096;
/// Messages that wait for vmmd.
const QUEUE: usize = 8;
/// How long the client may take to open its streams.
const STREAMS: Duration = Duration::from_secs(30);
/// Time limit for output after ^], so that earlier input reaches the guest. vmmd ends the console
/// as soon as it has passed this input on.
const FAREWELL: Duration = Duration::from_secs(5);
/// Bytes of a message about the terminal's size at most; it has about 30.
const MAX_SIZE: usize = 256;

/// Options of a client's request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    stdin: bool,
    stdout: bool,
    stderr: bool,
    tty: bool,
    hvc: bool,
    /// Earlier output comes first.
    replay: bool,
}

impl Options {
    /// Parses the query of `attach`, which shows new output only, as with a container.
    ///
    /// # Errors
    ///
    /// Returns the missing option.
    pub fn attach(query: &str) -> Result<Self, String> {
        let has = |key: &str| pairs(query).any(|pair| pair == (key, "1") || pair == (key, "true"));
        let tty = has("tty");
        let options = Self {
            stdin: has("input"),
            stdout: has("output"),
            // A terminal has one output.
            stderr: has("error") && !tty,
            tty,
            ..Self::default()
        };
        if !options.stdin && !options.stdout && !options.stderr {
            return Err("at least one of stdin, stdout and stderr is needed".to_owned());
        }
        Ok(options)
    }

    /// Parses the query of `exec`.
    ///
    /// # Errors
    ///
    /// Fails for an unknown command.
    pub fn exec(query: &str) -> Result<Self, String> {
        let options = Self::attach(query)?;
        let command = pairs(query).filter(|(key, _)| *key == "command");
        let command: Vec<_> = command.map(|(_, word)| word).collect();
        let hvc = match command.as_slice() {
            ["console" | "serial"] => false,
            ["console", "--hvc"] => true,
            _ => {
                let problem = "no programs are run in a VM: there is `console`, its serial port, and `console --hvc`, its \
                               virtio-console";
                return Err(problem.to_owned());
            }
        };
        Ok(Self {
            hvc,
            replay: true,
            ..options
        })
    }

    fn open(self, vm: String) -> v1::ConsoleOpen {
        let access = if self.stdin {
            v1::ConsoleAccess::Shared
        } else {
            v1::ConsoleAccess::ReadOnly
        };
        let device = if self.hvc {
            v1::ConsoleDevice::Virtio
        } else {
            v1::ConsoleDevice::Serial
        };
        v1::ConsoleOpen {
            name: vm,
            no_replay: !self.replay,
            access: access.into(),
            force: false,
            device: device.into(),
        }
    }
}

fn pairs(query: &str) -> impl Iterator<Item = (&str, &str)> {
    query.split('&').filter_map(|pair| pair.split_once('='))
}

/// Streams from a client.
#[derive(Default)]
struct Inputs {
    stdin: Option<Input>,
    resize: Option<Input>,
}

/// Streams to a client.
#[derive(Default)]
struct Outputs {
    error: Option<Output>,
    stdout: Option<Output>,
    stderr: Option<Output>,
    /// Those on which nothing is sent but their end.
    stdin: Option<Output>,
    resize: Option<Output>,
}

/// Waits for all streams that were asked for.
async fn accept(options: Options, acceptor: &mut Acceptor) -> Result<(Inputs, Outputs), Closed> {
    let (mut inputs, mut outputs) = (Inputs::default(), Outputs::default());
    while !outputs.has_all(options) {
        let stream = acceptor.next().await;
        let kind = stream.header("streamtype").unwrap_or_default().to_owned();
        let Some(place) = outputs.place(&kind, options).filter(|place| place.is_none()) else {
            stream.refuse().await;
            continue;
        };
        let (input, output) = stream.accept().await?;
        *place = Some(output);
        match &*kind {
            "stdin" => inputs.stdin = Some(input),
            "resize" => inputs.resize = Some(input),
            _ => {}
        }
    }
    Ok((inputs, outputs))
}

impl Outputs {
    fn place(&mut self, kind: &str, options: Options) -> Option<&mut Option<Output>> {
        match kind {
            "error" => Some(&mut self.error),
            "stdin" if options.stdin => Some(&mut self.stdin),
            "stdout" if options.stdout => Some(&mut self.stdout),
            "stderr" if options.stderr => Some(&mut self.stderr),
            "resize" if options.tty => Some(&mut self.resize),
            _ => None,
        }
    }

    fn has_all(&self, options: Options) -> bool {
        self.error.is_some()
            && self.stdin.is_some() == options.stdin
            && self.stdout.is_some() == options.stdout
            && self.stderr.is_some() == options.stderr
            && self.resize.is_some() == options.tty
    }

    async fn print(&self, bytes: &[u8]) -> Result<(), Closed> {
        match &self.stdout {
            Some(stdout) => stdout.write(bytes).await,
            None => Ok(()),
        }
    }

    /// Shows the user a notice that is not output of the guest.
    async fn notice(&self, options: Options, text: &str) -> Result<(), Closed> {
        let place = match &self.stderr {
            None if options.tty => &self.stdout,
            stderr => stderr,
        };
        match place {
            Some(place) => place.write(format!("\r\n[{text}]\r\n").as_bytes()).await,
            None => Ok(()),
        }
    }

    /// Says how it ended. The client ends when all streams have.
    async fn finish(self, result: Result<(), String>) -> Result<(), Closed> {
        let status = status(result.as_ref().err().map(String::as_str)).to_string();
        if let Some(error) = &self.error {
            error.write(status.as_bytes()).await?;
        }
        for stream in [self.stdout, self.stderr, self.stdin, self.resize, self.error]
            .into_iter()
            .flatten()
        {
            stream.finish().await?;
        }
        Ok(())
    }
}

/// Final message on the error stream.
fn status(problem: Option<&str>) -> Value {
    match problem {
        None => json!({"metadata": {}, "status": "Success"}),
        Some(problem) => json!({
            "metadata": {}, "status": "Failure", "message": problem, "reason": "InternalError", "code": 500,
        }),
    }
}

/// Serves the session of a client.
pub async fn serve(daemon: Daemon, vm: String, options: Options, mut acceptor: Acceptor) {
    let accepted = timeout(STREAMS, accept(options, &mut acceptor)).await;
    drop(acceptor);
    let Ok(Ok((inputs, outputs))) = accepted else {
        return;
    };
    let result = match Console::open(&daemon, options.open(vm)).await {
        Ok(console) => match pass(console, options, inputs, &outputs).await {
            Ok(result) => result,
            // The client has gone.
            Err(Closed) => return,
        },
        Err(status) => Err(status.message().to_owned()),
    };
    let _gone = outputs.finish(result).await;
}

/// A console of vmmd's.
struct Console {
    requests: mpsc::Sender<v1::ConsoleRequest>,
    answers: Streaming<v1::ConsoleResponse>,
}

impl Console {
    async fn open(daemon: &Daemon, open: v1::ConsoleOpen) -> Result<Self, tonic::Status> {
        let (requests, queue) = mpsc::channel(QUEUE);
        let first = v1::ConsoleRequest {
            message: Some(console_request::Message::Open(open)),
        };
        // It is empty.
        let _ = requests.try_send(first);
        let queue = stream::unfold(queue, |mut queue| async move {
            let request = queue.recv().await?;
            Some((request, queue))
        });
        let answers = within(CALL, daemon.vms.clone().console(queue)).await?;
        Ok(Self { requests, answers })
    }
}

/// How a console ended: well, or with what vmmd says; or the session did.
type Outcome = Result<Result<(), String>, Closed>;

/// Passes on input and output, until the client leaves or the console ends.
async fn pass(console: Console, options: Options, inputs: Inputs, outputs: &Outputs) -> Outcome {
    let Console { requests, answers } = console;
    let mut printing = pin!(print(answers, options, outputs));
    tokio::select! {
        outcome = &mut printing => return outcome,
        () = pass_input(inputs, requests) => {}
    }
    // Input before ^] must reach the guest. The kind of the console's end does not matter here.
    match timeout(FAREWELL, printing).await {
        Ok(Err(Closed)) => Err(Closed),
        _ => Ok(Ok(())),
    }
}

async fn print(mut answers: Streaming<v1::ConsoleResponse>, options: Options, outputs: &Outputs) -> Outcome {
    loop {
        let message = match answers.message().await {
            Ok(Some(answer)) => answer.message,
            Ok(None) => return Ok(Ok(())),
            Err(status) => return Ok(Err(status.message().to_owned())),
        };
        match message {
            Some(console_response::Message::Output(bytes)) => outputs.print(&bytes).await?,
            Some(console_response::Message::Opened(opened)) => {
                for writer in opened.writers {
                    let text = format!("{} types here too", printable(&writer.name));
                    outputs.notice(options, &text).await?;
                }
            }
            Some(console_response::Message::TakenOver(taken)) => {
                let by = taken.by.map(|writer| writer.name).unwrap_or_default();
                let text = format!(
                    "{} has taken over the console: your input is ignored",
                    printable(&by)
                );
                outputs.notice(options, &text).await?;
            }
            Some(console_response::Message::Closed(closed)) => {
                let text = format!("the console was closed: {}", printable(&closed.reason));
                outputs.notice(options, &text).await?;
                return Ok(Ok(()));
            }
            None => {}
        }
    }
}

/// Passes on input and the size of the terminal. Returns when the client leaves with ^].
async fn pass_input(inputs: Inputs, requests: mpsc::Sender<v1::ConsoleRequest>) {
    let Inputs { stdin, resize } = inputs;
    let left = async {
        if let Some(mut stdin) = stdin {
            while let Some(bytes) = stdin.read().await {
                let leaves = bytes.iter().position(|byte| *byte == LEAVE);
                let typed = bytes.get(..leaves.unwrap_or(bytes.len())).unwrap_or_default();
                for piece in typed.chunks(CHUNK) {
                    send(&requests, console_request::Message::Input(piece.to_vec())).await;
                }
                if leaves.is_some() {
                    return;
                }
            }
        }
        std::future::pending::<()>().await;
    };
    let resized = async {
        let mut sizes = Sizes::default();
        if let Some(mut resize) = resize {
            while let Some(bytes) = resize.read().await {
                for size in sizes.push(&bytes) {
                    send(&requests, console_request::Message::Size(size)).await;
                }
            }
        }
        std::future::pending::<()>().await;
    };
    // The end of the requests would be the client's.
    tokio::select! {
        () = left => {}
        () = resized => {}
    }
}

/// Sends a request. A closed receiver shows up where answers are read.
async fn send(requests: &mpsc::Sender<v1::ConsoleRequest>, message: console_request::Message) {
    let request = v1::ConsoleRequest {
        message: Some(message),
    };
    let _ = requests.send(request).await;
}

/// Sizes of a terminal, one JSON object per line. Invalid lines are ignored.
#[derive(Default)]
struct Sizes {
    line: Vec<u8>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Size {
    width: u16,
    height: u16,
}

impl Sizes {
    fn push(&mut self, bytes: &[u8]) -> Vec<v1::ConsoleSize> {
        let mut sizes = Vec::new();
        for byte in bytes {
            if *byte != b'\n' {
                if self.line.len() < MAX_SIZE {
                    self.line.push(*byte);
                }
                continue;
            }
            if let Ok(size) = serde_json::from_slice::<Size>(&self.line) {
                sizes.push(v1::ConsoleSize {
                    columns: size.width.into(),
                    rows: size.height.into(),
                });
            }
            self.line.clear();
        }
        sizes
    }
}

/// Text of others, as a terminal may show it.
fn printable(text: &str) -> String {
    text.chars()
        .filter(|letter| !letter.is_control())
        .take(200)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_those_of_the_api_server() {
        let attach = Options::attach("input=1&output=1&error=1&tty=1").unwrap();
        let wanted = Options {
            stdin: true,
            stdout: true,
            tty: true,
            ..Options::default()
        };
        assert_eq!(attach, wanted, "a terminal has no stderr");
        let piped = Options::attach("output=1&error=1").unwrap();
        assert!(piped.stderr && !piped.stdin && !piped.tty);
        assert!(Options::attach("tty=1").unwrap_err().contains("stdin"));
    }

    #[test]
    fn a_console_is_all_that_can_be_executed() {
        let query = |command: &str| {
            let words = command.split(' ').map(|word| format!("&command={word}"));
            format!("input=1&output=1&tty=1{}", words.collect::<String>())
        };
        let console = Options::exec(&query("console")).unwrap();
        assert!(console.replay && !console.hvc);
        assert!(Options::exec(&query("serial")).is_ok());
        assert!(Options::exec(&query("console --hvc")).unwrap().hvc);
        for command in ["sh", "console sh", "console --hvc x", ""] {
            let problem = Options::exec(&query(command)).unwrap_err();
            assert!(problem.contains("`console`"), "{command}: {problem}");
        }
    }

    #[test]
    fn who_does_not_type_reads_only() {
        for (query, access) in [
            ("output=1", v1::ConsoleAccess::ReadOnly),
            ("output=1&input=1", v1::ConsoleAccess::Shared),
        ] {
            let open = Options::attach(query).unwrap().open("web".to_owned());
            assert_eq!(open.access(), access, "{query}");
            assert!(open.no_replay);
        }
    }

    #[test]
    fn sizes_come_in_lines_and_may_come_in_parts() {
        let mut sizes = Sizes::default();
        assert_eq!(sizes.push(b"{\"Width\":80,\"Hei"), []);
        let wanted = v1::ConsoleSize {
            columns: 80,
            rows: 24,
        };
        assert_eq!(sizes.push(b"ght\":24}\n{\"Width\":1"), [wanted]);
        assert_eq!(
            sizes.push(b"00000,\"Height\":1}\n"),
            [],
            "more than a terminal has"
        );
        assert_eq!(sizes.push(&[b'x'; 10_000]), []);
        assert!(sizes.line.len() <= MAX_SIZE);
        assert_eq!(sizes.push(b"\n{\"Width\":80,\"Height\":24}\n"), [wanted]);
    }

    #[test]
    fn the_error_stream_says_how_it_ended() {
        assert_eq!(status(None).to_string(), r#"{"metadata":{},"status":"Success"}"#);
        let failure = status(Some("the VM is not running"));
        assert_eq!(failure["status"], "Failure");
        assert_eq!(failure["message"], "the VM is not running");
    }
}

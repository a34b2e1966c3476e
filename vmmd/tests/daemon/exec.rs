//! Commands in guests.

use std::{fs, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json};
use tokio::{net::UnixListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use vmmd_api::v1::{
    ExecExit, ExecOpen, ExecVmRequest, ExecVmResponse, exec_vm_request::Message,
    exec_vm_response::Message as Output,
};

use crate::{
    agent::{QemuAgent, guest, refuse, reply},
    harness::{Daemon, assert_refused, assert_says, uid},
    verbs::within,
};

/// The agent of a guest that has no shell.
fn without_shell(
    answer: impl Fn(&Value) -> Vec<u8> + Send + Sync + 'static,
) -> impl Fn(&Value) -> Vec<u8> + Send + Sync + 'static {
    move |question| match question["arguments"]["path"].as_str() {
        Some("/bin/sh") => refuse("GenericError", "Failed to execute child process"),
        _ => answer(question),
    }
}

/// Output and end of a command, or the refusal.
async fn exec(daemon: &Daemon, open: ExecOpen, input: &[&str]) -> Result<(String, String, ExecExit), Status> {
    let (sender, receiver) = mpsc::channel(8);
    let messages = [Message::Open(open)]
        .into_iter()
        .chain(input.iter().map(|text| Message::Input(text.as_bytes().to_vec())));
    for message in messages {
        let message = Some(message);
        sender.send(ExecVmRequest { message }).await.unwrap();
    }
    drop(sender);
    let answer = daemon.client().exec_vm(ReceiverStream::new(receiver)).await?;
    let mut answer = answer.into_inner();
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    while let Some(response) = answer.message().await? {
        match response.message.unwrap() {
            Output::Stdout(bytes) => stdout.extend(bytes),
            Output::Stderr(bytes) => stderr.extend(bytes),
            Output::Exit(exit) => {
                let text = |bytes| String::from_utf8(bytes).unwrap();
                return Ok((text(stdout), text(stderr), exit));
            }
        }
    }
    panic!("no end");
}

fn command(words: &[&str]) -> ExecOpen {
    ExecOpen {
        name: "web".into(),
        command: words.iter().map(ToString::to_string).collect(),
        ..ExecOpen::default()
    }
}

#[tokio::test]
async fn a_command_gets_its_input_and_its_output_comes_back() {
    let daemon = Daemon::start().await;
    let looks = std::sync::atomic::AtomicU32::new(0);
    let answer = without_shell(move |question| {
        let arguments = &question["arguments"];
        match question["execute"].as_str().unwrap() {
            "guest-exec" => {
                let expected = json!({
                    "path": "tr", "arg": ["a-z", "A-Z"], "env": ["LANG=C"], "capture-output": true,
                    "input-data": BASE64.encode("typed in two pieces"),
                });
                assert_eq!(*arguments, expected);
                reply(&json!({"pid": 42}))
            }
            "guest-exec-status" => {
                assert_eq!(arguments["pid"], 42);
                if looks.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 3 {
                    return reply(&json!({"exited": false}));
                }
                reply(&json!({
                    "exited": true, "exitcode": 3, "out-data": BASE64.encode("TYPED"), "err-data": BASE64.encode("oh"),
                    "out-truncated": true,
                }))
            }
            other => panic!("{other}"),
        }
    });
    guest(&daemon, answer).await;
    let open = ExecOpen {
        env: vec!["LANG=C".into()],
        input: true,
        ..command(&["tr", "a-z", "A-Z"])
    };
    let (stdout, stderr, exit) = exec(&daemon, open, &["typed in ", "two pieces"]).await.unwrap();
    assert_eq!((stdout.as_str(), stderr.as_str()), ("TYPED", "oh"));
    let expected = ExecExit {
        code: 3,
        signal: 0,
        truncated: true,
    };
    assert_eq!(exit, expected);
}

#[tokio::test]
async fn input_that_breaks_off_starts_no_command() {
    let daemon = Daemon::start().await;
    let (asked, mut questions) = mpsc::unbounded_channel();
    let answer = without_shell(move |question| {
        if question["execute"] == "guest-exec" {
            let path = question["arguments"]["path"].as_str().unwrap();
            asked.send(path.to_owned()).unwrap();
            return reply(&json!({"pid": 1}));
        }
        reply(&json!({"exited": true, "exitcode": 0}))
    });
    guest(&daemon, answer).await;
    let (sender, receiver) = mpsc::channel(1);
    let mut client = daemon.client();
    let call = tokio::spawn(async move { client.exec_vm(ReceiverStream::new(receiver)).await.map(drop) });
    let open = ExecOpen {
        input: true,
        ..command(&["rm"])
    };
    // The channel has room for one message: the connection has taken those before the last one.
    for message in [
        Message::Open(open),
        Message::Input(b"half".to_vec()),
        Message::Input(b" a".to_vec()),
    ] {
        let message = Some(message);
        sender.send(ExecVmRequest { message }).await.unwrap();
    }
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    exec(&daemon, command(&["true"]), &[]).await.unwrap();
    assert_eq!(questions.recv().await.as_deref(), Some("true"));
}

#[tokio::test]
async fn a_vm_without_an_agent_and_wrong_commands_are_refused() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let refused = exec(&daemon, command(&["true"]), &[]).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NO_GUEST_AGENT");
    assert_says(&refused, "give it a `guestAgent`");
    for wrong in [
        command(&[]),
        command(&[""]),
        ExecOpen {
            env: vec!["no value".into()],
            ..command(&["true"])
        },
        command(&["x"; 1025]),
    ] {
        let refused = exec(&daemon, wrong, &[]).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }
    let missing = ExecOpen {
        name: "nobody".into(),
        ..command(&["true"])
    };
    let refused = exec(&daemon, missing, &[]).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
}

#[tokio::test]
async fn what_a_hostile_agent_says_is_bounded_and_named() {
    let daemon = Daemon::start().await;
    let answer = without_shell(|question| {
        let path = question["arguments"]["path"].as_str().unwrap_or_default();
        match path {
            "missing" => b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"No such file\"}}\n".to_vec(),
            "long" => vec![b' '; 7 << 20],
            "confused" => b"{\"return\": []}\n".to_vec(),
            "garbage" => b"\xc3\x28\n".to_vec(),
            "empty" => b"{}\n".to_vec(),
            _ if question["execute"] == "guest-exec-status" => {
                reply(&json!({"exited": true, "signal": 9, "out-data": "no base64!"}))
            }
            _ => reply(&json!({"pid": 1})),
        }
    });
    guest(&daemon, answer).await;
    for (path, words) in [
        ("missing", "refuses guest-exec: No such file"),
        ("long", "longer than 6 MiB"),
        ("confused", "invalid answer"),
        ("garbage", "invalid answer"),
        ("empty", "without a result"),
        ("base64", "not in base64"),
    ] {
        let refused = exec(&daemon, command(&[path]), &[]).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "GUEST_AGENT_ERROR");
        assert_says(&refused, words);
    }
}

#[tokio::test]
async fn a_silent_agent_and_a_command_without_an_end_are_given_up() {
    let daemon = Daemon::start().await;
    let answer = without_shell(|question| match question["execute"].as_str().unwrap() {
        "guest-exec" => reply(&json!({"pid": 1})),
        _ => reply(&json!({"exited": false})),
    });
    guest(&daemon, answer).await;
    let endless = ExecOpen {
        timeout: Some(Duration::from_millis(50).into()),
        ..command(&["sleep", "inf"])
    };
    let refused = exec(&daemon, endless, &[]).await.unwrap_err();
    assert_refused(&refused, Code::DeadlineExceeded, "TIMEOUT");
    // Nobody accepts: the question waits in the socket, as in the port of a guest without an agent.
    let vm = daemon.get("web").await.unwrap();
    let socket = daemon.path(&format!("run/vms/{}/agent.sock", uid(&vm)));
    fs::remove_file(&socket).unwrap();
    let _deaf = UnixListener::bind(&socket).unwrap();
    let refused = exec(&daemon, command(&["true"]), &[]).await.unwrap_err();
    assert_refused(&refused, Code::Unavailable, "GUEST_AGENT_SILENT");
    assert_says(&refused, "qemu-guest-agent");
}

/// A command of a shell in the guest, with input.
fn shell(script: &str) -> ExecOpen {
    ExecOpen {
        input: true,
        ..command(&["sh", "-c", script])
    }
}

/// Begins a command without input, and returns the messages of its answer.
async fn begin(daemon: &Daemon, open: ExecOpen) -> tonic::Streaming<ExecVmResponse> {
    let open = ExecVmRequest {
        message: Some(Message::Open(open)),
    };
    let answer = daemon.client().exec_vm(tokio_stream::once(open)).await;
    answer.unwrap().into_inner()
}

/// Waits for a line of output.
async fn line(answer: &mut tonic::Streaming<ExecVmResponse>) -> String {
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        match answer.message().await.unwrap().unwrap().message.unwrap() {
            Output::Stdout(bytes) => line.extend(bytes),
            other => panic!("{other:?}"),
        }
    }
    String::from_utf8(line).unwrap().trim().to_owned()
}

async fn has_ended(pid: &str) {
    let place = std::path::Path::new("/proc").join(pid);
    within(async || (!place.exists()).then_some(())).await;
}

#[tokio::test]
async fn input_and_output_of_a_command_have_any_length() {
    let daemon = Daemon::start().await;
    let _agent = QemuAgent::start(&daemon).await;
    // Bytes of all values, 6 MiB, in messages that no piece of the agent begins with.
    let input: Vec<u8> = (0..6_u32 << 20)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let script = "sha256sum; echo oh >&2; head -c 100M /dev/zero | tr '\\0' x; exit 3";
    let messages: Vec<_> = [Message::Open(shell(script))]
        .into_iter()
        .chain(input.chunks(65_521).map(|piece| Message::Input(piece.to_vec())))
        .map(|message| ExecVmRequest {
            message: Some(message),
        })
        .collect();
    let answer = daemon.client().exec_vm(tokio_stream::iter(messages)).await;
    let mut answer = answer.unwrap().into_inner();
    let (mut stdout, mut stderr, mut exit) = (Vec::new(), Vec::new(), None);
    while let Some(message) = answer.message().await.unwrap() {
        match message.message.unwrap() {
            Output::Stdout(bytes) => stdout.extend(bytes),
            Output::Stderr(bytes) => stderr.extend(bytes),
            Output::Exit(end) => exit = Some(end),
        }
    }
    let expected = ExecExit {
        code: 3,
        ..ExecExit::default()
    };
    assert_eq!(exit, Some(expected));
    assert_eq!(stderr, b"oh\n");
    let (sum, rest) = stdout.split_at(68);
    let digest = vmmd_testing::registry::digest(&input);
    let digest = digest.strip_prefix("sha256:").unwrap();
    assert_eq!(sum, format!("{digest}  -\n").as_bytes());
    assert_eq!(rest.len(), 100 << 20);
    assert!(rest.iter().all(|byte| *byte == b'x'));
    // No file is left in the guest.
    let left: Vec<_> = fs::read_dir(daemon.path("qemu-ga"))
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
        .filter(|name| name.starts_with("vmmd."))
        .collect();
    assert_eq!(left, [""; 0]);
}

#[tokio::test]
async fn output_comes_while_the_command_runs() {
    let daemon = Daemon::start().await;
    let _agent = QemuAgent::start(&daemon).await;
    let fifo = daemon.path("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    let script = format!(
        "echo first; read word <{}; echo $word; kill -9 $$",
        fifo.display()
    );
    let mut answer = begin(&daemon, command(&["sh", "-c", &script])).await;
    assert_eq!(line(&mut answer).await, "first");
    tokio::fs::write(&fifo, "second\n").await.unwrap();
    assert_eq!(line(&mut answer).await, "second");
    let last = answer.message().await.unwrap().unwrap().message.unwrap();
    let killed = ExecExit {
        signal: 9,
        ..ExecExit::default()
    };
    assert_eq!(last, Output::Exit(killed));
}

#[tokio::test]
async fn a_command_ends_at_its_time_limit_and_with_its_client() {
    let daemon = Daemon::start().await;
    let _agent = QemuAgent::start(&daemon).await;
    let endless = command(&["sh", "-c", "echo $$; exec sleep 1000"]);
    let limited = ExecOpen {
        timeout: Some(Duration::from_secs(2).into()),
        ..endless.clone()
    };
    let mut answer = begin(&daemon, limited).await;
    let pid = line(&mut answer).await;
    let refused = answer.message().await.unwrap_err();
    assert_refused(&refused, Code::DeadlineExceeded, "TIMEOUT");
    has_ended(&pid).await;
    let mut answer = begin(&daemon, endless).await;
    let pid = line(&mut answer).await;
    drop(answer);
    has_ended(&pid).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn daemon_that_stops_leaves_no_open_file_in_the_agent() {
    let mut daemon = Daemon::start().await;
    let agent = QemuAgent::start(&daemon).await;
    let mut answer = begin(&daemon, command(&["sh", "-c", "echo $$; exec sleep 10"])).await;
    let _pid = line(&mut answer).await;
    assert_ne!(agent.deleted_files(), 0);
    daemon.terminate();
    assert_eq!(agent.deleted_files(), 0);
}

#[tokio::test]
async fn a_shell_with_half_of_its_input_starts_no_command() {
    let daemon = Daemon::start().await;
    let _agent = QemuAgent::start(&daemon).await;
    let (sender, receiver) = mpsc::channel(1);
    let mut client = daemon.client();
    let call = tokio::spawn(async move { client.exec_vm(ReceiverStream::new(receiver)).await.map(drop) });
    let trace = daemon.path("trace");
    let script = format!("touch {}", trace.display());
    for message in [Message::Open(shell(&script)), Message::Input(b"half".to_vec())] {
        let message = Some(message);
        sender.send(ExecVmRequest { message }).await.unwrap();
    }
    let pid = within(async || waiting_shell(&script)).await;
    call.abort();
    has_ended(&pid).await;
    assert!(!trace.exists());
    // A program that does not exist has the code and the words of a shell.
    let (stdout, stderr, exit) = exec(&daemon, command(&["/no/such/program"]), &[]).await.unwrap();
    assert_eq!((stdout.as_str(), exit.code), ("", 127));
    assert!(stderr.contains("/no/such/program: not found"), "{stderr}");
}

/// The process with this text as its last word.
fn waiting_shell(script: &str) -> Option<String> {
    let ending = [script.as_bytes(), b"\0"].concat();
    fs::read_dir("/proc").unwrap().find_map(|entry| {
        let entry = entry.unwrap();
        let words = fs::read(entry.path().join("cmdline")).ok()?;
        let pid = entry.file_name().into_string().unwrap();
        words.ends_with(&ending).then_some(pid)
    })
}

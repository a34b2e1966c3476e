//! Commands in guests.

use std::{fs, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::json;
use tokio::{net::UnixListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use vmmd_api::v1::{
    ExecExit, ExecOpen, ExecVmRequest, exec_vm_request::Message, exec_vm_response::Message as Output,
};

use crate::{
    agent::{guest, reply},
    harness::{Daemon, assert_refused, assert_says, uid},
};

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
    guest(&daemon, move |question| {
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
    })
    .await;
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
    guest(&daemon, move |question| {
        if question["execute"] == "guest-exec" {
            let path = question["arguments"]["path"].as_str().unwrap();
            asked.send(path.to_owned()).unwrap();
            return reply(&json!({"pid": 1}));
        }
        reply(&json!({"exited": true, "exitcode": 0}))
    })
    .await;
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
    guest(&daemon, |question| {
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
    })
    .await;
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
    guest(&daemon, |question| match question["execute"].as_str().unwrap() {
        "guest-exec" => reply(&json!({"pid": 1})),
        _ => reply(&json!({"exited": false})),
    })
    .await;
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

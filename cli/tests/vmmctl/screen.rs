//! The screen: pictures, keys and viewers.

use std::{
    io::{BufReader, Read as _, Write as _},
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use vmmd_api::v1::VmPhase;

use crate::support::{Daemon, Running, done, line, run, screen::PICTURE};

/// Time limit for typed text to reach a daemon.
const PATIENCE: Duration = Duration::from_secs(30);

fn daemon() -> Daemon {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    daemon.state.put("off", VmPhase::Stopped, &[]);
    daemon
}

#[test]
fn screenshot_is_a_png_of_the_screen() {
    let daemon = daemon();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("out.png");
    let path = file.to_str().unwrap();
    assert_eq!(run(&daemon, &["screenshot", "web", path]), done(""));
    let decoder = png::Decoder::new(BufReader::new(std::fs::File::open(&file).unwrap()));
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    assert_eq!((info.width, info.height), (4, 3));
    assert_eq!(pixels, PICTURE.concat());
    assert_eq!(daemon.state.calls(), ["picture, view only: true"]);
}

#[test]
fn keys_are_pressed_in_order_and_released_in_the_opposite_one() {
    let daemon = daemon();
    assert_eq!(line(&daemon, "send-key web ctrl+alt+delete a"), done(""));
    let expected = [
        "press 0xffe3",
        "press 0xffe9",
        "press 0xffff",
        "release 0xffff",
        "release 0xffe9",
        "release 0xffe3",
        "press 0x61",
        "release 0x61",
    ];
    assert_eq!(daemon.state.calls(), expected);
}

#[test]
fn a_text_is_typed_with_enter_behind_it_if_that_is_asked_for() {
    let daemon = daemon();
    assert_eq!(line(&daemon, "type web Hi --enter"), done(""));
    let pressed: Vec<_> = daemon
        .state
        .calls()
        .into_iter()
        .filter(|call| call.starts_with("press"))
        .collect();
    assert_eq!(pressed, ["press 0x48", "press 0x69", "press 0xff0d"]);
}

#[test]
fn text_with_a_character_without_a_key_is_an_error() {
    let daemon = daemon();
    let output = daemon
        .vmmctl()
        .args(["type", "web", "café 5€, Hi"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("layout us has no key for \"é\", \"€\""), "{text}");
    assert!(!daemon.state.calls().iter().any(|call| call.starts_with("press")));
}

#[test]
fn unknown_key_is_a_usage_error() {
    let daemon = daemon();
    let (code, _, text) = line(&daemon, "send-key web a hyper+x");
    assert_eq!(code, 2);
    assert!(
        text.contains("no key is called \"hyper\"") && text.contains("backspace"),
        "{text}"
    );
    assert!(daemon.state.calls().is_empty());
}

#[test]
fn of_a_vm_that_does_not_run_there_is_no_screen() {
    let daemon = daemon();
    for arguments in [
        &["screenshot", "off", "-"][..],
        &["type", "off", "x"],
        &["vnc", "off", "--listen", "127.0.0.1:0"],
    ] {
        let (code, _, said) = run(&daemon, arguments);
        assert_eq!((code, said.contains("not running")), (5, true), "{said}");
    }
}

/// Starts `vnc --listen` and returns the address with it.
fn listen(daemon: &Daemon) -> (Running, String) {
    let mut running = daemon.begin(&["vnc", "web", "--listen", "127.0.0.1:0"]);
    let address = running.line();
    (running, address)
}

#[test]
fn what_a_viewer_types_just_before_it_goes_is_typed() {
    const PRESS: [u8; 8] = [4, 1, 0, 0, 0, 0, 0, b'a'];
    let daemon = daemon();
    let (_running, address) = listen(&daemon);
    for _ in 0..20 {
        let mut viewer = TcpStream::connect(&address).unwrap();
        let mut hello = [0; 12];
        viewer.read_exact(&mut hello).unwrap();
        viewer.write_all(b"RFB 003.008\n\x01\x01").unwrap();
        viewer.write_all(&PRESS).unwrap();
    }
    let (expected, begin) = (vec!["press 0x61"; 20], Instant::now());
    while daemon.state.calls() != expected {
        assert!(begin.elapsed() < PATIENCE, "{:?}", daemon.state.calls());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn each_viewer_has_its_own_connection() {
    let daemon = daemon();
    let (_running, address) = listen(&daemon);
    for _ in 0..2 {
        let mut viewer = TcpStream::connect(&address).unwrap();
        let mut hello = [0; 12];
        viewer.read_exact(&mut hello).unwrap();
        assert_eq!(&hello, b"RFB 003.008\n");
    }
}

#[test]
fn a_viewer_is_started_with_a_socket_that_leads_to_the_screen() {
    use std::os::unix::fs::PermissionsExt as _;
    let daemon = daemon();
    let folder = tempfile::tempdir().unwrap();
    let viewer = folder.path().join("vncviewer");
    // It looks whether it is to share the screen, and whether its other argument is a socket.
    let script = "#!/bin/sh\ntest \"$1\" = -Shared && test -S \"$2\" && echo \"viewer at $2\"\n";
    std::fs::write(&viewer, script).unwrap();
    std::fs::set_permissions(&viewer, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", folder.path().display());
    let output = daemon
        .vmmctl()
        .args(["vnc", "web"])
        .env("PATH", &path)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let socket = text.trim().strip_prefix("viewer at ").unwrap();
    assert!(!std::path::Path::new(socket).exists(), "its folder is gone");
    // Without a viewer it is said what else to do.
    let output = daemon
        .vmmctl()
        .args(["vnc", "web"])
        .env("PATH", "/nowhere")
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("--listen"),
        "{output:?}"
    );
}

#[test]
fn a_viewer_is_started_again_when_a_screen_that_ended_is_back() {
    use std::os::unix::fs::PermissionsExt as _;
    let mut daemon = daemon();
    let folder = tempfile::tempdir().unwrap();
    let viewer = folder.path().join("vncviewer");
    // The viewer reports that it has a screen. When the screen ends, the first viewer stays, like
    // one that asks the user; the second viewer exits on its own.
    let script = r#"#!/usr/bin/python3
import os, socket, sys, time
screen = socket.socket(socket.AF_UNIX)
screen.connect(sys.argv[2])
assert screen.recv(12, socket.MSG_WAITALL) == b"RFB 003.008\n"
print("looks", flush=True)
mark = os.path.dirname(sys.argv[0]) + "/looked"
if os.path.exists(mark):
    sys.exit()
open(mark, "w").close()
while screen.recv(100):
    pass
time.sleep(600)
"#;
    std::fs::write(&viewer, script).unwrap();
    std::fs::set_permissions(&viewer, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmmctl"));
    command.args(["vnc", "web"]).env("VMMD_SOCKET", &daemon.socket);
    command.env("PATH", format!("{}:/usr/bin:/bin", folder.path().display()));
    let mut running = Running::start(&mut command);
    assert_eq!(running.line(), "looks");
    daemon.restart();
    assert_eq!(running.line(), "looks");
    let (code, _, said) = running.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("has ended; continuing when it is back"), "{said}");
}

#[test]
fn ways_to_a_screen_are_printed_for_other_programs() {
    let daemon = daemon();
    for (option, expected) in [
        ("--web", "http://127.0.0.1:6080/vnc.html?token\n"),
        ("--password", "127.0.0.1:5900 sEcr-t_1\n"),
    ] {
        let (code, stdout, said) = run(&daemon, &["vnc", "web", option]);
        assert_eq!((code, stdout.as_str()), (0, expected), "{said}");
    }
    assert_eq!(line(&daemon, "vnc nope --web").0, 3);
}

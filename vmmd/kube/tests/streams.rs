//! `kubectl attach`, `exec` and `port-forward`, as the API server passes them on.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener},
    thread,
};

use tonic::Status;

use crate::{
    kubelet::{Fixture, client, fixture},
    mock::{api::ALLOWED, vmmd::lock},
    spdy::{Client, Session},
};

const UPGRADE: [&str; 2] = ["connection: Upgrade", "upgrade: SPDY/3.1"];
const CONSOLE: &str = "x-stream-protocol-version: v4.channel.k8s.io";
const PORTS: &str = "x-stream-protocol-version: portforward.k8s.io";

fn begin(fixture: &Fixture, path: &str, protocol: &str) -> Session {
    let headers = [UPGRADE[0], UPGRADE[1], protocol];
    let config = client(Some(ALLOWED), &fixture.authority);
    Session::begin(fixture.port, config, path, &headers).unwrap_or_else(|answer| panic!("{answer}"))
}

/// Answer to a request that begins no session.
fn refused(fixture: &Fixture, user: &str, path: &str, headers: &[&str]) -> String {
    let config = client(Some(user), &fixture.authority);
    match Session::begin(fixture.port, config, path, headers) {
        Ok(_) => panic!("{path} begins a session"),
        Err(answer) => answer,
    }
}

/// Opens the streams of these kinds.
fn open<const N: usize>(session: &mut Session, kinds: [&str; N]) -> [u32; N] {
    kinds.map(|kind| session.open(&[("streamtype", kind)]))
}

#[test]
fn attach_is_the_console_from_now_until_the_end_of_the_run() {
    let fixture = fixture();
    let path = "/attach/shop/web-1/vm?input=1&output=1&error=1";
    let mut session = begin(&fixture, path, CONSOLE);
    let [error, stdin, stdout, stderr] = open(&mut session, ["error", "stdin", "stdout", "stderr"]);
    session.write(stdin, b"hello guest\n");
    session.expect(stdout, "HELLO GUEST\n");
    assert!(!session.data(stdout).contains("one\n"), "nothing is shown again");
    session.write(stdin, b"poweroff\n");
    // The end of the input is not the end of the session.
    session.finish(stdin);
    session.expect(stderr, "the guest powered off");
    assert_eq!(session.end(error), br#"{"metadata":{},"status":"Success"}"#);
    session.end(stdout);
    session.end(stderr);
    let calls = fixture.cluster.vmmds[0].state.calls();
    assert!(calls.contains(&"console Shared Serial".to_owned()), "{calls:?}");
}

#[test]
fn who_does_not_type_only_reads() {
    let fixture = fixture();
    let mut session = begin(&fixture, "/attach/shop/web-1/vm?output=1&error=1", CONSOLE);
    let [error, stdout, _stderr] = open(&mut session, ["error", "stdout", "stderr"]);
    session.expect(stdout, "three\n");
    assert_eq!(session.end(error), br#"{"metadata":{},"status":"Success"}"#);
    let calls = fixture.cluster.vmmds[0].state.calls();
    assert!(calls.contains(&"console ReadOnly Serial".to_owned()), "{calls:?}");
}

#[test]
fn a_terminal_at_the_console_is_left_with_the_escape() {
    let fixture = fixture();
    let path = "/exec/shop/web-1/vm?command=console&command=--hvc&input=1&output=1&tty=1";
    let mut session = begin(&fixture, path, CONSOLE);
    let [error, stdin, stdout, resize] = open(&mut session, ["error", "stdin", "stdout", "resize"]);
    session.expect(stdout, "one\ntwo\nthree\nhvc0\n");
    session.write(resize, b"{\"Width\":100,\"Height\":30}\n");
    session.expect(stdout, "100x30\n");
    session.write(stdin, b"ls\n\x1dnever typed\n");
    session.expect(stdout, "LS\n");
    assert_eq!(session.end(error), br#"{"metadata":{},"status":"Success"}"#);
    assert!(!String::from_utf8_lossy(&session.end(stdout)).contains("NEVER"));
}

#[test]
fn much_is_typed_in_messages_that_vmmd_takes() {
    let fixture = fixture();
    let path = "/exec/shop/web-1/vm?command=console&input=1&output=1";
    let mut session = begin(&fixture, path, CONSOLE);
    let [_error, stdin, stdout] = open(&mut session, ["error", "stdin", "stdout"]);
    let text = "x".repeat(100_000) + "y";
    session.write(stdin, text.as_bytes());
    session.expect(stdout, "Y");
    assert!(session.data(stdout).ends_with(&text.to_uppercase()));
}

#[test]
fn what_vmmd_refuses_is_told_on_the_error_stream() {
    let fixture = fixture();
    let state = &fixture.cluster.vmmds[0].state;
    *lock(&state.refusal) = Some(Status::failed_precondition("the VM has no virtio-console"));
    let mut session = begin(&fixture, "/attach/shop/web-1/vm?output=1", CONSOLE);
    let [error, stdout] = open(&mut session, ["error", "stdout"]);
    let status = String::from_utf8(session.end(error)).unwrap();
    assert!(
        status.contains("Failure") && status.contains("the VM has no virtio-console"),
        "{status}"
    );
    session.end(stdout);
}

#[test]
fn requests_that_begin_no_session_are_answered_with_the_reason() {
    let fixture = fixture();
    let attach = "/attach/shop/web-1/vm?output=1";
    let [connection, upgrade] = UPGRADE;
    let good = [connection, upgrade, CONSOLE];
    for (user, path, headers, code, text) in [
        ("mallory", attach, &good[..], "403", "mallory may not do this"),
        ("mallory", "/portForward/shop/web-1", &good, "403", "mallory"),
        (
            ALLOWED,
            "/attach/shop/web-1/other?output=1",
            &good,
            "404",
            "container",
        ),
        (ALLOWED, "/attach/shop/web-9/vm?output=1", &good, "404", "no VM"),
        (ALLOWED, "/attach/shop/web-1/vm", &good, "400", "stdin"),
        (
            ALLOWED,
            "/exec/shop/web-1/vm?output=1&command=sh",
            &good,
            "400",
            "there is `console`",
        ),
        (ALLOWED, attach, &[], "400", "SPDY/3.1"),
        (
            ALLOWED,
            attach,
            &[connection, upgrade],
            "403",
            "v4.channel.k8s.io",
        ),
        (
            ALLOWED,
            "/portForward/shop/web-1",
            &good,
            "403",
            "portforward.k8s.io",
        ),
    ] {
        let answer = refused(&fixture, user, path, headers);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {code}")) && answer.contains(text),
            "{path}: {answer}"
        );
    }
}

#[test]
fn a_session_that_breaks_the_rules_ends_and_others_go_on() {
    let fixture = fixture();
    let mut bad = begin(&fixture, "/attach/shop/web-1/vm?output=1", CONSOLE);
    bad.send(b"GET / HTTP/1.1\r\n\r\n and more that is no frame");
    bad.send(&Client::control(2, 0, &[0; 4]));
    let mut other = begin(&fixture, "/attach/shop/web-1/vm?output=1", CONSOLE);
    let [error, _stdout] = open(&mut other, ["error", "stdout"]);
    other.end(error);
}

/// A server that answers each connection with its input, once all is read.
fn server(connections: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for connection in listener.incoming().take(connections) {
            let mut connection = connection.unwrap();
            thread::spawn(move || {
                let mut had = Vec::new();
                connection.read_to_end(&mut had).unwrap();
                connection.write_all(&had).unwrap();
                let _ = connection.shutdown(Shutdown::Both);
            });
        }
    });
    port
}

#[test]
fn guest_ports_are_reached_by_several_connections_of_a_session() {
    let fixture = fixture();
    let port = server(2).to_string();
    let mut session = begin(&fixture, "/portForward/shop/web-1", PORTS);
    let [first, second] = ["0", "1"].map(|request| {
        let headers = |kind| [("port", &*port), ("requestid", request), ("streamtype", kind)];
        let error = session.open(&headers("error"));
        session.finish(error);
        (error, session.open(&headers("data")))
    });
    // The guest reads them at the same time.
    let (small, large) = (b"small".to_vec(), vec![b'L'; 3_000_000]);
    session.write(first.1, &small[..2]);
    for piece in large.chunks(32 << 10) {
        session.write(second.1, piece);
    }
    session.write(first.1, &small[2..]);
    for (error, data) in [first, second] {
        session.finish(data);
        let wanted = if data == first.1 { &small } else { &large };
        assert!(session.end(data) == *wanted);
        assert_eq!(session.end(error), b"", "nothing went wrong");
    }
}

#[test]
fn a_port_where_nobody_listens_is_told_on_the_error_stream() {
    let fixture = fixture();
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let port = unused.port().to_string();
    let mut session = begin(&fixture, "/portForward/shop/web-1", PORTS);
    let headers = |kind| [("port", &*port), ("requestid", "7"), ("streamtype", kind)];
    // In the other order as well.
    let data = session.open(&headers("data"));
    let error = session.open(&headers("error"));
    let said = String::from_utf8(session.end(error)).unwrap();
    assert!(said.contains("nothing listens on port"), "{said}");
    session.end(data);
    for headers in [
        vec![("streamtype", "data"), ("port", "0")],
        vec![("streamtype", "other"), ("port", "80")],
        vec![],
    ] {
        let stream = session.open(&headers);
        assert!(session.was_reset(stream), "{headers:?}");
    }
}

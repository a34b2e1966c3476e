//! Access to a screen beside the API: strangers without a ticket, unusable certificates, and
//! invalid configurations.

use std::{fs, net::SocketAddr};

use tokio::{
    io::AsyncWriteExt,
    net::{TcpSocket, TcpStream},
    time::timeout,
};
use vmmd_api::v1::VncTicketKind::{Password, Web};

use crate::{
    harness::{Daemon, PATIENCE, command},
    pki::Pki,
    screen::{
        BOTH, PAGE, X509_PLAIN, X509_VNC, choose, ended, read, rest, run_web, shows, ticket, to_the_end,
        vencrypt, viewer, websocket, with_certificate, with_screen,
    },
    verbs::within,
};

const RFB: &[u8; 12] = b"RFB 003.008\n";
/// More connections of a stranger than all places for handshakes.
const MANY: usize = 100;

/// A connection from another address than that of the test's other clients, 127.0.0.1.
async fn stranger(address: &str) -> TcpStream {
    let address: SocketAddr = address.parse().unwrap();
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.9:0".parse().unwrap()).unwrap();
    socket.connect(address).await.unwrap()
}

#[tokio::test]
async fn viewers_without_a_ticket_keep_nobody_out_who_has_one() {
    let daemon = with_screen(&format!("limits = {{ handshakes = 4 }}\n{BOTH}")).await;
    // Viewers with an accepted ticket do not count as handshakes: more of them are admitted.
    let mut admitted = Vec::new();
    for _ in 0..6 {
        let way = ticket(&daemon, Password, false).await.unwrap();
        let (result, mut stream) = viewer(&way.address, RFB, &way.password).await;
        assert_eq!(result, 0);
        assert_eq!(read(&mut stream, 13).await, b"screen of web");
        admitted.push(stream);
    }
    let way = ticket(&daemon, Password, false).await.unwrap();
    let begun = TcpStream::connect(&way.address).await.unwrap();
    let mut strangers = Vec::new();
    for number in 0..MANY {
        let mut stream = stranger(&way.address).await;
        // It is served, so those before it have been accepted too.
        assert_eq!(read(&mut stream, 12).await, RFB);
        if number % 2 == 0 {
            stream.write_all(RFB).await.unwrap();
            assert_eq!(read(&mut stream, 2).await, [1, 2]);
        }
        strangers.push(stream);
    }
    // The oldest strangers were closed, but not the viewer that had begun before them.
    for stream in strangers.iter_mut().take(MANY - 4) {
        ended(stream, "a stranger").await;
    }
    let (result, mut stream) = shows(begun, RFB, &way.password).await;
    assert_eq!(result, 0);
    assert_eq!(read(&mut stream, 13).await, b"screen of web");
    let way = ticket(&daemon, Password, false).await.unwrap();
    let (result, _new) = viewer(&way.address, RFB, &way.password).await;
    assert_eq!(result, 0);
    for stream in &mut admitted {
        stream.write_all(b"still").await.unwrap();
        assert_eq!(read(stream, 5).await, b"still");
    }
}

#[tokio::test]
async fn browsers_without_a_token_keep_nobody_out_who_has_one() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("large.js"), vec![b' '; 4 << 20]).unwrap();
    fs::write(folder.path().join("vnc.html"), "the page").unwrap();
    // No handshake here ends by a timeout.
    let limits = "limits = { handshakes = 4, request_seconds = 600, handshake_seconds = 600 }\n";
    let config = BOTH.replace(PAGE, folder.path().to_str().unwrap());
    let daemon = with_screen(&format!("{limits}{config}")).await;
    let mut admitted = Vec::new();
    for _ in 0..6 {
        let way = ticket(&daemon, Web, false).await.unwrap();
        admitted.push(websocket(&way).await);
    }
    let way = ticket(&daemon, Web, false).await.unwrap();
    let mut strangers = Vec::new();
    for number in 0..MANY {
        let mut stream = stranger(&way.address).await;
        let said = match number % 3 {
            0 => "",
            1 => "GET /large.js HTTP/1.1\r\n",
            // More than the kernel takes before somebody reads it.
            _ => "GET /large.js HTTP/1.1\r\nHost: node\r\n\r\n",
        };
        stream.write_all(said.as_bytes()).await.unwrap();
        strangers.push(stream);
    }
    admitted.push(websocket(&way).await);
    for stream in strangers.iter_mut().take(MANY - 4) {
        let _begun = rest(stream, "a stranger").await;
    }
    for stream in &mut admitted {
        // To the screen, with a mask of zeroes (RFC 6455, 5.2).
        stream.write_all(b"\x82\x8c\0\0\0\0RFB 003.008\n").await.unwrap();
        assert_eq!(read(stream, 4).await, [0x82, 2, 1, 1]);
    }
}

#[tokio::test]
async fn screens_of_one_client_are_bounded_closed_ones_are_released() {
    let daemon = with_screen(&format!("limits = {{ connections_per_client = 4 }}\n{BOTH}")).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        let way = ticket(&daemon, Password, false).await.unwrap();
        let (result, stream) = viewer(&way.address, RFB, &way.password).await;
        assert_eq!(result, 0);
        held.push(stream);
    }
    held.push(websocket(&ticket(&daemon, Web, false).await.unwrap()).await);
    let way = ticket(&daemon, Password, false).await.unwrap();
    let (result, stream) = viewer(&way.address, RFB, &way.password).await;
    assert_eq!(result, 1);
    let reason = to_the_end(stream).await;
    assert!(reason.contains("close another screen"), "{reason}");
    let mut again = Vec::new();
    for stream in held {
        drop(stream);
        let opened = timeout(PATIENCE, async {
            loop {
                let way = ticket(&daemon, Password, false).await.unwrap();
                let (result, stream) = viewer(&way.address, RFB, &way.password).await;
                if result == 0 {
                    return stream;
                }
            }
        });
        again.push(opened.await.expect("a place that is given back can be had again"));
    }
}

#[tokio::test]
async fn unusable_screen_certificate_is_reported_and_replaceable() {
    let pki = Pki::new("screens");
    let tls = tempfile::tempdir().unwrap();
    let daemon = Daemon::with_log(&with_certificate(BOTH, tls.path())).await;
    run_web(&daemon).await;
    let told = async |reason: &str| {
        let events = daemon.events(reason).await;
        events.into_iter().map(|event| event.message).collect::<Vec<_>>()
    };
    let unusable = told("ScreenCertificateUnusable").await;
    assert_eq!(unusable.len(), 1, "{unusable:?}");
    let expected =
        "`certificate` and `key` in `[screen]` are right: `certificate` can't be read: no such file";
    assert!(unusable[0].contains(expected), "{unusable:?}");

    let viewers = ticket(&daemon, Password, false).await.unwrap().address;
    let browsers = ticket(&daemon, Web, false).await.unwrap().address;
    let refuse_many = async || {
        for _ in 0..20 {
            for way in [X509_VNC, X509_PLAIN] {
                let mut stream = TcpStream::connect(&viewers).await.unwrap();
                choose(&mut stream, way).await;
                ended(&mut stream, "a viewer").await;
            }
            let mut stream = TcpStream::connect(&browsers).await.unwrap();
            ended(&mut stream, "a browser").await;
        }
    };
    refuse_many().await;
    assert_eq!(told("ScreenCertificateUnusable").await.len(), 1);
    for name in ["server.crt", "server.key"] {
        fs::write(tls.path().join(name), "garbage").unwrap();
    }
    refuse_many().await;
    assert_eq!(told("ScreenCertificateUnusable").await.len(), 2);

    pki.install(tls.path(), &pki.server("node"));
    let way = ticket(&daemon, Password, false).await.unwrap();
    let (result, mut stream) = vencrypt(&way.address, &pki, X509_VNC, &way.password).await;
    assert_eq!(result, 0);
    assert_eq!(read(&mut stream, 13).await, b"screen of web");
    assert_eq!(told("ScreenCertificateLoaded").await.len(), 1);
    // A thread of its own writes the log.
    let lines = within(async || {
        let log = fs::read_to_string(daemon.path("log.txt")).unwrap();
        let lines = log.lines().filter(|line| line.contains("certificate"));
        let lines: Vec<_> = lines.map(str::to_owned).collect();
        (lines.len() >= 3).then_some(lines)
    })
    .await;
    assert_eq!(
        lines.len(),
        3,
        "two problems and the end of the second: {lines:#?}"
    );

    // A repeated failure is reported again.
    fs::remove_file(tls.path().join("server.key")).unwrap();
    refuse_many().await;
    let unusable = told("ScreenCertificateUnusable").await;
    assert_eq!(unusable.len(), 3, "{unusable:?}");
    assert!(
        unusable[2].contains("`key` can't be read: no such file"),
        "{unusable:?}"
    );
}

#[test]
fn contradictory_screen_encryption_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let check = |screen: &str| {
        fs::write(folder.path().join("config.toml"), format!("[screen]\n{screen}\n")).unwrap();
        let output = command(folder.path(), None).arg("--check").output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    for (screen, said) in [
        ("certificate = '/node.crt'", "`screen.key` must be given too"),
        ("key = '/node.key'", "`screen.certificate` must be given too"),
        (
            "vnc = '0.0.0.0:5900'\ncertificate = '/node.crt'",
            "`screen.key` must be given too",
        ),
        (
            "certificate = 'node.crt'\nkey = '/node.key'",
            "`screen.certificate` must be an absolute path",
        ),
        (
            "vnc = '192.0.2.1:5900'",
            "`screen.vnc` must be an address of the loopback interface",
        ),
        (
            "vnc = '127.0.0.1:5900'\nweb = '[::]:6080'",
            "`screen.web` must be an address of the loopback interface",
        ),
    ] {
        let (fine, found) = check(screen);
        assert!(!fine && found.contains(said), "{screen}: {found}");
    }
    for screen in [
        "vnc = '[::1]:5900'\nweb = '127.0.0.2:6080'",
        // That the files are not there keeps no daemon from its start.
        "vnc = '0.0.0.0:5900'\nweb = '[::]:6080'\ncertificate = '/node.crt'\nkey = '/node.key'",
    ] {
        assert_eq!(check(screen), (true, String::new()), "{screen}");
    }
}

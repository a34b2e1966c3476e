//! Ways to a screen beside the API: viewers with a password, browsers with a token.

use std::{fs, path::Path, sync::Arc};

use des::{
    Des,
    cipher::{Array, BlockCipherEncrypt, KeyInit},
};
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::{Code, Status};
use vmmd_api::v1::{self, VncTicketKind};

use crate::{
    harness::{Daemon, PATIENCE, assert_refused, assert_says},
    pki::Pki,
};

/// A folder with a page instead of noVNC.
pub const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/novnc");

/// Viewers and browsers are served.
pub const BOTH: &str = concat!(
    "[screen]\nvnc = '127.0.0.1:0'\nweb = '127.0.0.1:0'\nnovnc = '",
    env!("CARGO_MANIFEST_DIR"),
    "/tests/daemon/novnc'\n"
);

/// A daemon with a running VM `web` that has a screen.
pub async fn with_screen(extra: &str) -> Daemon {
    let daemon = Daemon::configured(extra).await;
    run_web(&daemon).await;
    daemon
}

/// Makes and starts the VM `web`, which has a screen.
pub async fn run_web(daemon: &Daemon) {
    daemon
        .run_with("web", "", |spec| spec.display = Some(v1::DisplaySpec::default()))
        .await;
}

pub async fn ticket(
    daemon: &Daemon,
    kind: VncTicketKind,
    view_only: bool,
) -> Result<v1::CreateVncTicketResponse, Status> {
    let request = v1::CreateVncTicketRequest {
        name: "web".into(),
        view_only,
        kind: kind.into(),
    };
    Ok(daemon.client().create_vnc_ticket(request).await?.into_inner())
}

pub async fn read(stream: &mut (impl AsyncRead + Unpin), length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let read = timeout(PATIENCE, stream.read_exact(&mut bytes));
    read.await.expect("in time").expect("as many bytes");
    bytes
}

/// Reads until the daemon closes the connection. The daemon's unread data decides between an end
/// and an error.
pub async fn rest(stream: &mut (impl AsyncRead + Unpin), what: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await;
    let _end = read.unwrap_or_else(|_| panic!("the connection goes on: {what}"));
    bytes
}

/// Expects that the daemon ends the connection and says nothing more.
pub async fn ended(stream: &mut (impl AsyncRead + Unpin), what: &str) {
    assert_eq!(rest(stream, what).await, b"", "{what}");
}

pub async fn to_the_end(mut stream: impl AsyncRead + Unpin) -> String {
    let mut bytes = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut bytes));
    read.await.expect("in time").expect("an end");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A viewer that shows `password`; the result of its authentication (RFC 6143, 7.1.3) and the connection.
pub async fn viewer(address: &str, version: &[u8; 12], password: &str) -> (u32, TcpStream) {
    let stream = TcpStream::connect(address).await.unwrap();
    shows(stream, version, password).await
}

/// The same over an existing connection, before any read.
pub async fn shows(mut stream: TcpStream, version: &[u8; 12], password: &str) -> (u32, TcpStream) {
    assert_eq!(read(&mut stream, 12).await, b"RFB 003.008\n");
    stream.write_all(version).await.unwrap();
    if version == b"RFB 003.003\n" {
        assert_eq!(read(&mut stream, 4).await, [0, 0, 0, 2]);
    } else {
        assert_eq!(read(&mut stream, 2).await, [1, 2]);
        stream.write_all(&[2]).await.unwrap();
    }
    let challenge = read(&mut stream, 16).await;
    stream.write_all(&response(&challenge, password)).await.unwrap();
    (result(&mut stream).await, stream)
}

/// A SecurityResult (RFC 6143, 7.1.3): 0 when the viewer gets in.
async fn result(stream: &mut (impl AsyncRead + Unpin)) -> u32 {
    let bytes = read(stream, 4).await;
    u32::from_be_bytes(bytes.try_into().unwrap())
}

/// Response of a viewer to a challenge (RFC 6143, 7.2.2).
fn response(challenge: &[u8], password: &str) -> Vec<u8> {
    let mut key = [0; 8];
    for (place, byte) in key.iter_mut().zip(password.bytes()) {
        *place = byte.reverse_bits();
    }
    let cipher = Des::new(&Array(key));
    let halves = challenge.chunks_exact(8).flat_map(|half| {
        let mut block = Array(<[u8; 8]>::try_from(half).unwrap());
        cipher.encrypt_block(&mut block);
        block.0
    });
    halves.collect()
}

#[tokio::test]
async fn a_password_opens_the_screen_of_its_vm_once() {
    let daemon = with_screen(BOTH).await;
    let way = ticket(&daemon, VncTicketKind::Password, false).await.unwrap();
    assert_eq!((way.password.len(), way.url.as_str()), (8, ""));
    let bound = fs::read_to_string(daemon.path("run/vnc.addr")).unwrap();
    assert_eq!(bound.trim(), way.address);
    let (result, mut stream) = viewer(&way.address, b"RFB 003.008\n", &way.password).await;
    assert_eq!(result, 0);
    assert_eq!(read(&mut stream, 13).await, b"screen of web");
    stream.write_all(b"and back").await.unwrap();
    assert_eq!(read(&mut stream, 8).await, b"and back");

    let (result, stream) = viewer(&way.address, b"RFB 003.008\n", &way.password).await;
    assert_eq!(result, 1);
    let reason = to_the_end(stream).await;
    assert!(reason.contains("ask vmmd for another one"), "{reason}");
    // An older version has no reason.
    let (result, stream) = viewer(&way.address, b"RFB 003.007\n", "guessed!").await;
    assert_eq!((result, to_the_end(stream).await), (1, String::new()));

    let way = ticket(&daemon, VncTicketKind::Password, true).await.unwrap();
    let (result, mut stream) = viewer(&way.address, b"RFB 003.003\n", &way.password).await;
    assert_eq!(result, 0);
    assert_eq!(read(&mut stream, 11).await, b"view of web");
}

/// When the keepalive timer of the daemon's half of a connection fires, in hundredths of a second; `None` when there is none (/proc/net/tcp).
fn keepalive(connection: &TcpStream) -> Option<u64> {
    let [near, far] = [connection.peer_addr(), connection.local_addr()]
        .map(|address| format!("0100007F:{:04X}", address.unwrap().port()));
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    let mut lines = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let line = lines.find(|fields| fields[1] == near && fields[2] == far)?;
    let when = line[5].strip_prefix("02:")?;
    Some(u64::from_str_radix(when, 16).unwrap())
}

#[tokio::test]
async fn who_is_gone_without_a_word_is_looked_for_on_both_ports() {
    let daemon = Daemon::configured(BOTH).await;
    for file in ["run/vnc.addr", "run/web.addr"] {
        let address = fs::read_to_string(daemon.path(file)).unwrap();
        let connection = TcpStream::connect(address.trim()).await.unwrap();
        let asks = timeout(PATIENCE, async {
            loop {
                if let Some(when) = keepalive(&connection) {
                    break when;
                }
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        });
        let when = asks.await.expect("the daemon looks for it");
        assert!(when <= 3000, "{when}");
    }
}

/// Headers that ask for a WebSocket.
const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                       Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: binary\r\n";

/// Sends a request; returns the connection with the response.
async fn http(address: &str, path: &str, headers: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

/// A browser's WebSocket with the token of a ticket, and the first that comes from the screen.
pub async fn websocket(way: &v1::CreateVncTicketResponse) -> TcpStream {
    let (_, token) = way.url.split_once("token%3D").unwrap();
    let mut stream = http(&way.address, &format!("/websockify?token={token}"), UPGRADE).await;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.extend(read(&mut stream, 1).await);
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    assert!(
        head.starts_with("http/1.1 101") && head.contains("sec-websocket-protocol: binary"),
        "{head}"
    );
    // A frame (RFC 6455, 5.2): final, binary, 12 bytes.
    assert_eq!(read(&mut stream, 2).await, [0x82, 12]);
    assert_eq!(read(&mut stream, 12).await, b"RFB 003.008\n");
    stream
}

#[tokio::test]
async fn a_browser_gets_the_page_and_with_its_token_the_screen_once() {
    let daemon = with_screen(BOTH).await;
    let way = ticket(&daemon, VncTicketKind::Web, false).await.unwrap();
    let (page, token) = way.url.split_once("path=websockify%3Ftoken%3D").unwrap();
    assert_eq!(page, format!("http://{}/vnc.html?autoconnect=true&", way.address));
    let close = "Connection: close\r\n";
    let whole = format!("/vnc.html?autoconnect=true&path=websockify%3Ftoken%3D{token}");
    for page in ["/vnc.html?autoconnect=true", &whole] {
        let answer = to_the_end(http(&way.address, page, close).await).await;
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("<p>the page\n"),
            "{answer}"
        );
    }
    let answer = to_the_end(http(&way.address, &whole, close).await).await;
    assert!(
        answer.contains("content-type: text/html; charset=utf-8"),
        "{answer}"
    );
    for path in ["/../config.toml", "/nothing.js", "/"] {
        let answer = to_the_end(http(&way.address, path, close).await).await;
        assert!(answer.starts_with("HTTP/1.1 404"), "{path}: {answer}");
    }

    let socket = format!("/websockify?token={token}");
    let mut stream = websocket(&way).await;
    // To the screen, with a mask of zeroes.
    stream.write_all(b"\x82\x8c\0\0\0\0RFB 003.008\n").await.unwrap();
    assert_eq!(read(&mut stream, 4).await, [0x82, 2, 1, 1]);

    for path in [socket.as_str(), "/websockify", "/websockify?token="] {
        let upgrade = format!("{UPGRADE}\r\n");
        let mut answer = http(&way.address, path, &upgrade).await;
        assert_eq!(read(&mut answer, 12).await, b"HTTP/1.1 403", "{path}");
    }
    // The page says it too, since a browser keeps the words that a WebSocket was refused with to itself.
    let answer = to_the_end(http(&way.address, &whole, close).await).await;
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert!(
        answer.contains("`vmmctl vnc <VM> --web` prints another one"),
        "{answer}"
    );
}

#[tokio::test]
async fn who_can_not_be_served_is_told_what_to_do() {
    let daemon = with_screen("").await;
    let refused = ticket(&daemon, VncTicketKind::Web, false).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_SERVED");
    assert_says(&refused, "`web` in `[screen]`");

    let without_novnc = BOTH.replace(PAGE, "/nothing/is/here");
    let daemon = with_screen(&without_novnc).await;
    let refused = ticket(&daemon, VncTicketKind::Web, false).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_SERVED");
    assert_says(&refused, "install the package novnc");
    let address = fs::read_to_string(daemon.path("run/web.addr")).unwrap();
    let answer = to_the_end(http(address.trim(), "/vnc.html", "Connection: close\r\n").await).await;
    assert!(
        answer.starts_with("HTTP/1.1 404") && answer.contains("install the package novnc"),
        "{answer}"
    );

    let daemon = Daemon::configured(BOTH).await;
    daemon.run("web", "").await;
    let refused = ticket(&daemon, VncTicketKind::Web, false).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NO_SCREEN");
    assert_says(&refused, "give it a `display`");
}

/// Ways of VeNCrypt: TLS with the server's certificate, then VNC authentication, or a name and a password.
pub const X509_VNC: u32 = 261;
pub const X509_PLAIN: u32 = 262;

/// The configuration with the certificate that is in `folder`.
pub fn with_certificate(config: &str, folder: &Path) -> String {
    let folder = folder.display();
    format!("{config}certificate = '{folder}/server.crt'\nkey = '{folder}/server.key'\n")
}

async fn encrypted(stream: TcpStream, pki: &Pki) -> TlsStream<TcpStream> {
    let mut config = pki.tls(None);
    config.alpn_protocols.clear();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    connector
        .connect(name, stream)
        .await
        .expect("a certificate of the CA")
}

/// A viewer with VeNCrypt up to its authentication in TLS.
async fn in_tls(address: &str, pki: &Pki, way: u32) -> TlsStream<TcpStream> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    choose(&mut stream, way).await;
    encrypted(stream, pki).await
}

/// Handshake between a viewer with VeNCrypt and the daemon, before TLS.
pub async fn choose(stream: &mut TcpStream, way: u32) {
    assert_eq!(read(stream, 12).await, b"RFB 003.008\n");
    stream.write_all(b"RFB 003.008\n").await.unwrap();
    assert_eq!(read(stream, 2).await, [1, 19], "nothing that is not encrypted");
    stream.write_all(&[19]).await.unwrap();
    assert_eq!(read(stream, 2).await, [0, 2]);
    stream.write_all(&[0, 2]).await.unwrap();
    assert_eq!(
        read(stream, 10).await,
        [0, 2, 0, 0, 1, 5, 0, 0, 1, 6],
        "accepted, and two ways"
    );
    stream.write_u32(way).await.unwrap();
    assert_eq!(read(stream, 1).await, [1]);
}

/// A viewer with VeNCrypt that shows `password`; the result of its authentication and the connection.
pub async fn vencrypt(address: &str, pki: &Pki, way: u32, password: &str) -> (u32, TlsStream<TcpStream>) {
    let mut stream = in_tls(address, pki, way).await;
    if way == X509_PLAIN {
        stream.write_all(&plain("ann", password)).await.unwrap();
    } else {
        let challenge = read(&mut stream, 16).await;
        stream.write_all(&response(&challenge, password)).await.unwrap();
    }
    (result(&mut stream).await, stream)
}

/// The message of X509Plain: two lengths, the name and the password.
fn plain(name: &str, password: &str) -> Vec<u8> {
    let lengths = [name, password].map(|text| u32::try_from(text.len()).unwrap().to_be_bytes());
    let lengths = lengths.concat();
    [lengths.as_slice(), name.as_bytes(), password.as_bytes()].concat()
}

#[tokio::test]
async fn name_and_password_in_tls_are_accepted_only_when_complete() {
    let pki = Pki::new("screens");
    let folder = tempfile::tempdir().unwrap();
    pki.install(folder.path(), &pki.server("node"));
    let daemon = with_screen(&with_certificate(BOTH, folder.path())).await;
    let issued = ticket(&daemon, VncTicketKind::Password, false).await.unwrap();
    let (address, password) = (issued.address.as_str(), issued.password.as_str());
    for wrong in [
        plain("ann", "guessed!"),
        plain("ann", ""),
        plain("ann", &password[..7]),
        plain("ann", &format!("{password}!")),
        plain(password, "guessed!"),
    ] {
        let mut stream = in_tls(address, &pki, X509_PLAIN).await;
        stream.write_all(&wrong).await.unwrap();
        assert_eq!(result(&mut stream).await, 1);
        let reason = to_the_end(stream).await;
        assert!(reason.contains("ask vmmd for another one"), "{reason}");
    }
    let whole = plain("ann", password);
    for length in [0, 4, 7, 8, 10, 11, whole.len() - 1] {
        let mut stream = in_tls(address, &pki, X509_PLAIN).await;
        stream.write_all(&whole[..length]).await.unwrap();
        stream.shutdown().await.unwrap();
        ended(&mut stream, &format!("{length} bytes of a message")).await;
    }
    let mut stream = in_tls(address, &pki, X509_VNC).await;
    let challenge = read(&mut stream, 16).await;
    let half = response(&challenge, password)[..8].to_vec();
    stream.write_all(&half).await.unwrap();
    stream.shutdown().await.unwrap();
    ended(&mut stream, "half a response").await;
    for (name, length) in [(257, 8), (3, 257), (u32::MAX, 8), (3, u32::MAX)] {
        let mut stream = in_tls(address, &pki, X509_PLAIN).await;
        stream.write_u32(name).await.unwrap();
        stream.write_u32(length).await.unwrap();
        ended(&mut stream, &format!("{name} and {length} bytes")).await;
    }

    // The longest accepted name. The other attempts have not used up the password.
    let mut stream = in_tls(address, &pki, X509_PLAIN).await;
    stream
        .write_all(&plain(&"n".repeat(256), password))
        .await
        .unwrap();
    assert_eq!(result(&mut stream).await, 0);
    assert_eq!(read(&mut stream, 13).await, b"screen of web");
}

#[tokio::test]
async fn with_a_certificate_only_encrypted_screens_are_served() {
    let pki = Pki::new("screens");
    let folder = tempfile::tempdir().unwrap();
    pki.install(folder.path(), &pki.server("node"));
    let daemon = with_screen(&with_certificate(BOTH, folder.path())).await;
    for way in [X509_VNC, X509_PLAIN] {
        let issued = ticket(&daemon, VncTicketKind::Password, false).await.unwrap();
        let (result, mut stream) = vencrypt(&issued.address, &pki, way, &issued.password).await;
        assert_eq!(result, 0);
        assert_eq!(read(&mut stream, 13).await, b"screen of web");
        stream.write_all(b"and back").await.unwrap();
        assert_eq!(read(&mut stream, 8).await, b"and back");
        let (result, stream) = vencrypt(&issued.address, &pki, way, &issued.password).await;
        assert_eq!(result, 1, "good once");
        let reason = to_the_end(stream).await;
        assert!(reason.contains("ask vmmd for another one"), "{reason}");
    }

    // An old viewer receives the reason, and a viewer with another choice gets no further.
    let issued = ticket(&daemon, VncTicketKind::Password, false).await.unwrap();
    let mut old = TcpStream::connect(&issued.address).await.unwrap();
    read(&mut old, 12).await;
    old.write_all(b"RFB 003.003\n").await.unwrap();
    assert_eq!(read(&mut old, 4).await, [0; 4]);
    let reason = to_the_end(old).await;
    assert!(reason.contains("a viewer with VeNCrypt"), "{reason}");
    for (say, answer) in [
        (&b"\x02"[..], &b""[..]),
        (b"\x13\0\x01", b"\0\x02\x01"),
        (
            b"\x13\0\x02\0\0\x01\x02",
            b"\0\x02\0\x02\0\0\x01\x05\0\0\x01\x06\0",
        ),
    ] {
        let mut stream = TcpStream::connect(&issued.address).await.unwrap();
        read(&mut stream, 12).await;
        stream.write_all(b"RFB 003.008\n").await.unwrap();
        read(&mut stream, 2).await;
        stream.write_all(say).await.unwrap();
        let mut bytes = Vec::new();
        let read = timeout(PATIENCE, stream.read_to_end(&mut bytes));
        let ended = read.await.expect("in time");
        assert!(ended.is_err() || bytes == answer, "{say:?}: {bytes:?}");
    }
    // An unusable certificate ends no existing connection, and is corrected without a restart.
    let (result, mut stream) = vencrypt(&issued.address, &pki, X509_VNC, &issued.password).await;
    assert_eq!(result, 0);
    assert_eq!(read(&mut stream, 13).await, b"screen of web");
    fs::write(folder.path().join("server.key"), "garbage").unwrap();
    let way = ticket(&daemon, VncTicketKind::Web, false).await.unwrap();
    let mut refused = TcpStream::connect(&way.address).await.unwrap();
    assert_eq!(refused.read(&mut [0; 1]).await.unwrap_or(0), 0);
    stream.write_all(b"still").await.unwrap();
    assert_eq!(read(&mut stream, 5).await, b"still");
    pki.install(folder.path(), &pki.server("node"));

    // Browsers.
    assert!(
        way.url.starts_with(&format!("https://{}/vnc.html", way.address)),
        "{}",
        way.url
    );
    let mut plain = http(&way.address, "/vnc.html", "Connection: close\r\n").await;
    let mut bytes = Vec::new();
    let _ended = plain.read_to_end(&mut bytes).await;
    assert!(!String::from_utf8_lossy(&bytes).contains("HTTP"), "{bytes:?}");
    let mut stream = encrypted(TcpStream::connect(&way.address).await.unwrap(), &pki).await;
    stream
        .write_all(b"GET /vnc.html HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let answer = to_the_end(stream).await;
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("<p>the page\n"),
        "{answer}"
    );
}

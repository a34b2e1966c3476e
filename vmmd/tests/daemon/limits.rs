//! Slow, greedy or broken clients, which must not affect others.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http_body::Frame;
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};
use tonic::{
    Code, Status,
    body::Body,
    codegen::Bytes,
    transport::{Channel, Endpoint, Uri},
};
use tower::{Service, ServiceExt};
use vmmd_api::v1::{self, vm_service_client::VmServiceClient};

use crate::{
    harness::{Daemon, assert_refused, assert_says, connect, refusal},
    pki::{self, Pki},
};

const PATIENCE: Duration = Duration::from_secs(20);
const LIST: &str = "/vmmd.v1.VmService/ListVms";

async fn list(channel: &Channel) -> Result<(), Status> {
    let mut vms = VmServiceClient::new(channel.clone());
    vms.list_vms(v1::ListVmsRequest::default()).await.map(drop)
}

/// A body that begins and never ends.
struct Half(Option<&'static [u8]>);

impl http_body::Body for Half {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match self.0.take() {
            Some(bytes) => Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(bytes))))),
            None => Poll::Pending,
        }
    }
}

/// A call whose request never comes whole, or whose request is whole but never ends.
async fn half(
    channel: &Channel,
    path: &str,
    bytes: &'static [u8],
) -> Result<Status, tonic::transport::Error> {
    let request = http::Request::post(format!("http://vmmd{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(Half(Some(bytes))))
        .unwrap();
    let mut channel = channel.clone();
    let answer = channel.ready().await?.call(request).await?;
    Ok(Status::from_header_map(answer.headers()).expect("an answer without a body"))
}

#[tokio::test]
async fn unfinished_request_is_refused_and_others_are_served() {
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "limits = { request_seconds = 3 }").await;
    let slow = pki.channel(&daemon, Some(&pki.role("slow", "admin")));
    let other = pki.channel(&daemon, Some(&pki.role("other", "viewer")));
    for (path, bytes) in [
        (LIST, &b""[..]),
        (LIST, b"\0\0"),
        (LIST, b"\0\0\0\0\x09\x0a"),
        // Complete, but the stream stays open.
        (LIST, b"\0\0\0\0\0"),
        ("/vmmd.v1.VmService/CreateVm", b"\0\0\0\0\x09\x0a"),
    ] {
        let refused = half(&slow, path, bytes);
        tokio::pin!(refused);
        let refused = loop {
            tokio::select! {
                refused = &mut refused => break refused.unwrap(),
                served = list(&other) => served.unwrap(),
            }
        };
        let expected = (Code::DeadlineExceeded, "REQUEST_INCOMPLETE".to_owned());
        assert_eq!(refusal(&refused), expected, "{path} {bytes:?}");
    }
    list(&slow).await.expect("the connection lives on");
}

#[tokio::test]
async fn thousands_of_open_calls_of_one_client_do_not_hinder_another() {
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "").await;
    let greedy = pki.channel(&daemon, Some(&pki.role("greedy", "admin")));
    let other = pki.channel(&daemon, Some(&pki.role("other", "viewer")));
    let calls: Vec<_> = (0..3000)
        .map(|_| {
            let greedy = greedy.clone();
            tokio::spawn(async move { half(&greedy, LIST, b"\0\0\0").await.map(drop) })
        })
        .collect();
    for _ in 0..50 {
        list(&other).await.unwrap();
    }
    assert!(daemon.list().await.is_empty());
    for call in &calls {
        call.abort();
    }
    drop((calls, greedy));
    list(&other).await.unwrap();
}

#[tokio::test]
async fn who_calls_too_often_is_told_and_only_on_that_connection() {
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "limits = { calls_per_second = 3 }").await;
    let leaf = pki.role("greedy", "viewer");
    let (greedy, other) = (
        pki.channel(&daemon, Some(&leaf)),
        pki.channel(&daemon, Some(&leaf)),
    );
    let refused = timeout(PATIENCE, async {
        loop {
            if let Err(status) = list(&greedy).await {
                return status;
            }
        }
    });
    let refused = refused.await.unwrap();
    assert_refused(&refused, Code::ResourceExhausted, "TOO_MANY_CALLS");
    list(&other).await.unwrap();
}

#[tokio::test]
async fn the_connections_of_one_client_leave_places_for_others() {
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "limits = { connections_per_client = 3, connections = 5 }").await;
    let (greedy, other) = (pki.role("greedy", "admin"), pki.role("other", "viewer"));
    let mut held = Vec::new();
    for _ in 0..3 {
        let channel = pki.channel(&daemon, Some(&greedy));
        list(&channel).await.unwrap();
        held.push(channel);
    }
    list(&pki.channel(&daemon, Some(&greedy))).await.unwrap_err();
    list(&pki.channel(&daemon, Some(&other))).await.unwrap();
    held.pop();
    let again = timeout(PATIENCE, async {
        while list(&pki.channel(&daemon, Some(&greedy))).await.is_err() {}
    });
    again.await.expect("a place that is given back can be had again");
    // The socket has places of its own: two for this test, as its client has one.
    let local = connect(daemon.folder.path()).await;
    list(&local).await.unwrap();
    let _silent = UnixStream::connect(daemon.path("run/vmmd.sock")).unwrap();
    let mut closed = UnixStream::connect(daemon.path("run/vmmd.sock")).unwrap();
    closed.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(closed.read(&mut [0; 16]).unwrap_or(0), 0, "one too many");
    list(&local).await.unwrap();
}

/// Resident memory of a daemon in bytes.
fn memory(daemon: &Daemon) -> u64 {
    let path = format!("/proc/{}/statm", daemon.pid().as_raw_nonzero());
    let statm = std::fs::read_to_string(path).unwrap();
    let resident: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    resident * 4096
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_reads_no_answers_takes_bounded_memory() {
    const CALLS: usize = 1000;
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "").await;
    for number in 0..20 {
        let mut vm = daemon.manifest(&format!("vm{number}"), "");
        let annotations = &mut vm.metadata.as_mut().unwrap().annotations;
        annotations.insert("a".into(), "x".repeat(50_000));
        daemon.create(vm).await.unwrap();
    }
    let (greedy, other) = (pki.role("greedy", "viewer"), pki.role("other", "viewer"));
    let other = pki.channel(&daemon, Some(&other));
    list(&other).await.unwrap();
    let before = memory(&daemon);
    let mut calls = tokio::task::JoinSet::new();
    // Fewer than there may be handshakes at once.
    for _ in 0..CALLS / 20 {
        let channel = with_small_windows(pki::address(&daemon), pki.tls(Some(&greedy)));
        for _ in 0..20 {
            let mut channel = channel.clone();
            calls.spawn(async move {
                let request = http::Request::post(format!("http://vmmd{LIST}"))
                    .header("content-type", "application/grpc")
                    .header("te", "trailers")
                    .body(Body::new(Whole(Some(b"\0\0\0\0\0"))))
                    .unwrap();
                channel.ready().await.unwrap().call(request).await.unwrap()
            });
        }
    }
    // Their bodies are not read.
    let mut unread = Vec::new();
    for _ in 0..READS {
        unread.push(calls.join_next().await.unwrap().unwrap());
    }
    list(&other).await.unwrap();
    let grown = memory(&daemon).saturating_sub(before);
    assert!(grown < 200 << 20, "{grown} bytes");
    assert_eq!(calls.try_join_next().map(drop), None, "more than {READS} answers");
    drop(unread);
    // The next call has a turn.
    calls.join_next().await.unwrap().unwrap();
}

/// A client that has room for little of an answer that it does not read.
fn with_small_windows(address: String, config: rustls::ClientConfig) -> Channel {
    let config = Arc::new(config);
    let connector = tower::service_fn(move |_: Uri| {
        let (address, config) = (address.clone(), Arc::clone(&config));
        async move { pki::open(&address, config).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://vmmd")
        .initial_stream_window_size(65_535)
        .initial_connection_window_size(65_535)
        .connect_with_connector_lazy(connector)
}

/// Answers of one client that are made at once.
const READS: usize = 32;

/// A body of one frame.
struct Whole(Option<&'static [u8]>);

impl http_body::Body for Whole {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Poll::Ready(
            self.0
                .take()
                .map(|bytes| Ok(Frame::data(Bytes::from_static(bytes)))),
        )
    }
}

/// Connections, and streams on each.
const CONNECTIONS: usize = 8;
const STREAMS: usize = 512;

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_one_client_are_bounded_and_others_are_served() {
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "").await;
    for number in 0..100 {
        daemon.define(&format!("vm{number}"), "").await;
    }
    let (greedy, other) = (pki.role("greedy", "viewer"), pki.role("other", "viewer"));
    let other = pki.channel(&daemon, Some(&other));
    list(&other).await.unwrap();
    let before = memory(&daemon);
    let mut connections = tokio::task::JoinSet::new();
    for _ in 0..CONNECTIONS {
        let channel = pki.channel(&daemon, Some(&greedy));
        // One after another: handshakes are limited, too.
        list(&channel).await.unwrap();
        connections.spawn(async move {
            let mut vms = VmServiceClient::new(channel);
            let (mut held, mut refusals) = (Vec::new(), 0);
            for _ in 0..STREAMS {
                // Nobody reads them.
                match vms.watch_vms(v1::WatchVmsRequest::default()).await {
                    Ok(stream) => held.push(stream),
                    Err(status) => {
                        let expected = (Code::ResourceExhausted, "TOO_MANY_STREAMS".to_owned());
                        assert_eq!(refusal(&status), expected, "{status}");
                        assert_says(&status, "limits.streams_per_client");
                        refusals += 1;
                    }
                }
            }
            (held, refusals)
        });
    }
    let (mut held, mut refusals) = (Vec::new(), 0);
    while let Some(connection) = connections.join_next().await {
        let (streams, refused) = connection.unwrap();
        held.extend(streams);
        refusals += refused;
    }
    assert_eq!((held.len(), refusals), (512, CONNECTIONS * STREAMS - 512));
    let grown = memory(&daemon).saturating_sub(before);
    assert!(grown < 256 << 20, "{grown} bytes for {} streams", held.len());
    // Another client has streams of its own, and a stream that ends makes room.
    let mut vms = VmServiceClient::new(other);
    vms.watch_vms(v1::WatchVmsRequest::default()).await.unwrap();
    let mut vms = VmServiceClient::new(pki.channel(&daemon, Some(&greedy)));
    drop(held);
    let again = timeout(PATIENCE, async {
        while vms.watch_vms(v1::WatchVmsRequest::default()).await.is_err() {}
    });
    again
        .await
        .expect("a stream in the place of those that have ended");
}

#[tokio::test]
async fn handshakes_that_are_never_finished_keep_nobody_out() {
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "limits = { handshakes = 4 }").await;
    let address = pki::address(&daemon);
    let mut held = Vec::new();
    for number in 0..40 {
        let stream = TcpStream::connect(&address).await.unwrap();
        // Some of them begin: a record of TLS whose rest never comes.
        if number % 2 == 0 {
            stream.writable().await.unwrap();
            let _ = stream.try_write(b"\x16\x03\x01\x02\x00\x01");
        }
        held.push(stream);
    }
    let leaf = pki.role("alice", "viewer");
    for _ in 0..5 {
        list(&pki.channel(&daemon, Some(&leaf))).await.unwrap();
    }
    drop(held);
}

#[tokio::test]
async fn garbage_and_plain_http_over_tcp_disturb_nobody() {
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "").await;
    let alice = pki.role("alice", "viewer");
    let channel = pki.channel(&daemon, Some(&alice));
    list(&channel).await.unwrap();
    for garbage in [
        &b"GET / HTTP/1.1\r\nHost: node\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        &[0xff; 4096],
        &[0x16; 4096],
    ] {
        let mut stream = std::net::TcpStream::connect(pki::address(&daemon)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stream.write_all(garbage);
        // Closed by the daemon, after at most an alert.
        let _ = stream.read_to_end(&mut Vec::new());
        list(&channel).await.unwrap();
    }
    // The connection of a client without HTTP/2 is closed too.
    let mut config = pki.tls(Some(&alice));
    config.alpn_protocols.clear();
    let mut stream = pki::open(&pki::address(&daemon), config.into()).await.unwrap();
    let mut first = [0; 16];
    let read = timeout(PATIENCE, tokio::io::AsyncReadExt::read(&mut stream, &mut first))
        .await
        .unwrap();
    assert_eq!(read.unwrap_or(0), 0);
    list(&channel).await.unwrap();
}

/// A frame of HTTP/2 (RFC 9113, 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// The headers of a call (RFC 7541): POST, http, the path, an authority, the content type.
fn headers() -> Vec<u8> {
    let mut block = vec![0x83, 0x86, 0x04, u8::try_from(LIST.len()).unwrap()];
    block.extend(LIST.bytes());
    block.extend(b"\x01\x04vmmd");
    block.extend(b"\x0f\x10\x10application/grpc");
    block
}

fn raw(daemon: &Daemon) -> UnixStream {
    let mut stream = UnixStream::connect(daemon.path("run/vmmd.sock")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    stream.write_all(&frame(4, 0, 0, &[])).unwrap();
    stream
}

/// Kinds of the frames that the daemon sends until it closes the connection.
fn kinds(mut stream: UnixStream) -> Vec<u8> {
    let mut kinds = Vec::new();
    let mut header = [0; 9];
    while stream.read_exact(&mut header).is_ok() {
        kinds.push(header[3]);
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]) as usize;
        if stream.read_exact(&mut vec![0; length]).is_err() {
            break;
        }
    }
    kinds
}

/// The next frame of the daemon: its kind, stream and payload.
fn next_frame(stream: &mut UnixStream) -> (u8, u32, Vec<u8>) {
    let mut header = [0; 9];
    stream.read_exact(&mut header).unwrap();
    let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
    let mut payload = vec![0; number(&header[..3]) as usize];
    stream.read_exact(&mut payload).unwrap();
    (header[3], number(&header[5..]), payload)
}

/// A client that does not keep to the announced limit (RFC 9113, 5.1.2).
#[tokio::test]
async fn connection_has_at_most_512_calls_at_once() {
    const HEADERS: u8 = 1;
    const RST_STREAM: u8 = 3;
    const SETTINGS: u8 = 4;
    const END_HEADERS: u8 = 4;
    const PING: u8 = 6;
    const MAX_CONCURRENT_STREAMS: [u8; 6] = [0, 3, 0, 0, 2, 0];
    const REFUSED_STREAM: [u8; 4] = [0, 0, 0, 7];
    const CANCEL: [u8; 4] = [0, 0, 0, 8];
    let daemon = Daemon::start().await;
    let mut stream = raw(&daemon);
    let id = |call: usize| u32::try_from(2 * call + 1).unwrap();
    // Calls without a request.
    for call in 0..=STREAMS {
        let begun = frame(HEADERS, END_HEADERS, id(call), &headers());
        stream.write_all(&begun).unwrap();
    }
    let mut settings = Vec::new();
    let refused = loop {
        match next_frame(&mut stream) {
            (SETTINGS, _, payload) => settings.extend(payload),
            (RST_STREAM, call, reason) => break (call, reason),
            _ => {}
        }
    };
    assert!(
        settings
            .chunks(6)
            .any(|setting| setting == MAX_CONCURRENT_STREAMS),
        "{settings:?}"
    );
    assert_eq!(refused, (id(STREAMS), REFUSED_STREAM.to_vec()));
    // A call that ends makes room for another one: the daemon answers the ping behind it, and refuses nothing before.
    stream.write_all(&frame(RST_STREAM, 0, id(0), &CANCEL)).unwrap();
    let call = id(STREAMS + 1);
    stream
        .write_all(&frame(HEADERS, END_HEADERS, call, &headers()))
        .unwrap();
    stream.write_all(&frame(PING, 0, 0, b"are here")).unwrap();
    loop {
        match next_frame(&mut stream) {
            (PING, _, payload) if payload == b"are here" => break,
            (RST_STREAM, call, reason) => panic!("call {call} is refused: {reason:?}"),
            _ => {}
        }
    }
}

#[tokio::test]
async fn violation_of_http2_ends_that_connection_only() {
    const HEADERS: u8 = 1;
    const RST_STREAM: u8 = 3;
    const GOAWAY: u8 = 7;
    const CONTINUATION: u8 = 9;
    const END_HEADERS: u8 = 4;
    let daemon = Daemon::start().await;
    let local = connect(daemon.folder.path()).await;
    let block = headers();
    let opened = |end: fn(u32) -> Vec<u8>| -> Vec<u8> {
        let streams = (0..5000_u32).map(|number| 2 * number + 1);
        streams
            .flat_map(|stream| {
                let mut frames = frame(HEADERS, END_HEADERS, stream, &block);
                frames.extend(end(stream));
                frames
            })
            .collect()
    };
    let endless: Vec<u8> = (0..2000)
        .flat_map(|_| frame(CONTINUATION, 0, 1, &[0x40; 1000]))
        .collect();
    let attacks = [
        (
            "calls taken back at once",
            opened(|stream| frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes())),
        ),
        (
            "headers without end",
            [frame(HEADERS, 0, 1, &block), endless].concat(),
        ),
        (
            "a frame that is too large",
            frame(HEADERS, END_HEADERS, 1, &[0; 20_000]),
        ),
        ("a frame on stream 0", frame(HEADERS, END_HEADERS, 0, &block)),
        (
            "headers that can't be read",
            frame(HEADERS, END_HEADERS, 1, &[0xff; 100]),
        ),
    ];
    for (what, bytes) in attacks {
        let mut stream = raw(&daemon);
        // It may be closed before all has been sent.
        let reading = stream.try_clone().unwrap();
        let kinds = std::thread::spawn(move || kinds(reading));
        let _ = stream.write_all(&bytes);
        list(&local)
            .await
            .unwrap_or_else(|status| panic!("{what}: {status:?}"));
        let kinds = tokio::task::spawn_blocking(|| kinds.join().unwrap())
            .await
            .unwrap();
        assert!(kinds.contains(&GOAWAY), "{what}: {kinds:?}");
        list(&local).await.unwrap();
    }
    // Calls that stay open: those beyond the limit are refused, and at some number the connection ends.
    let mut stream = raw(&daemon);
    let _ = stream.write_all(&opened(|_| Vec::new()));
    for _ in 0..20 {
        list(&local).await.unwrap();
    }
}

#[tokio::test]
async fn oversized_headers_are_refused_and_the_next_call_is_served() {
    let daemon = Daemon::start().await;
    let local = connect(daemon.folder.path()).await;
    let mut request = tonic::Request::new(v1::ListVmsRequest::default());
    request
        .metadata_mut()
        .insert("x-large", "x".repeat(60 << 10).parse().unwrap());
    VmServiceClient::new(local.clone())
        .list_vms(request)
        .await
        .unwrap_err();
    list(&local).await.unwrap();
}

#[tokio::test]
async fn a_client_that_says_nothing_is_closed() {
    let daemon = Daemon::configured("limits = { request_seconds = 1 }").await;
    let mut silent = UnixStream::connect(daemon.path("run/vmmd.sock")).unwrap();
    silent.set_read_timeout(Some(PATIENCE)).unwrap();
    let closed = tokio::task::spawn_blocking(move || silent.read_to_end(&mut Vec::new()).is_ok());
    assert!(closed.await.unwrap(), "the end, and no time-out of the test");
    assert!(daemon.list().await.is_empty());
}

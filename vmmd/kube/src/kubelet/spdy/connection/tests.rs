use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::{
    io::{DuplexStream, duplex},
    task::{JoinHandle, yield_now},
};

use super::{super::testing::Client, *};

/// Bytes that are on their way between client and server.
const PIPE: usize = 4096;

/// A client of a server that does this with its streams.
fn serve<T: Send + 'static, F: Future<Output = T> + Send>(
    work: impl FnOnce(Acceptor) -> F + Send + 'static,
) -> (DuplexStream, JoinHandle<Result<T, Ended>>) {
    let (client, server) = duplex(PIPE);
    (client, tokio::spawn(async move { run(server, work).await }))
}

/// The next frame of the server: of a control frame its kind and payload, of data the stream, whether it ends, and the bytes.
#[derive(Debug, PartialEq, Eq)]
enum Frame {
    Control(u8, Vec<u8>),
    Data(u32, bool, Vec<u8>),
}

async fn frame(client: &mut DuplexStream) -> Frame {
    let mut head = [0; 8];
    client.read_exact(&mut head).await.unwrap();
    let length = u32::from_be_bytes([0, head[5], head[6], head[7]]);
    let mut payload = vec![0; usize::try_from(length).unwrap()];
    client.read_exact(&mut payload).await.unwrap();
    if head[0] & 0x80 != 0 {
        return Frame::Control(head[3], payload);
    }
    let stream = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
    Frame::Data(stream, head[4] & 1 != 0, payload)
}

async fn send(client: &mut DuplexStream, bytes: &[u8]) {
    client.write_all(bytes).await.unwrap();
}

/// Waits for the SYN_REPLY, whose headers are none: four zero bytes, deflated.
async fn replied(client: &mut DuplexStream, stream: u32) {
    match frame(client).await {
        Frame::Control(2, payload) => assert_eq!(payload[..4], stream.to_be_bytes()),
        other => panic!("{other:?}"),
    }
}

async fn echo(mut acceptor: Acceptor) -> usize {
    let stream = acceptor.next().await;
    assert_eq!(stream.header("streamtype"), Some("data"));
    let (mut input, output) = stream.accept().await.unwrap();
    let mut count = 0;
    while let Some(bytes) = input.read().await {
        count += bytes.len();
        output.write(&bytes).await.unwrap();
    }
    output.finish().await.unwrap();
    count
}

#[tokio::test]
async fn bytes_go_both_ways_on_a_stream_until_both_sides_end_it() {
    let (mut client, server) = serve(echo);
    send(&mut client, &Client::new().open(1, &[("streamtype", "data")])).await;
    replied(&mut client, 1).await;
    send(&mut client, &Client::data(1, false, b"hello")).await;
    assert_eq!(frame(&mut client).await, Frame::Data(1, false, b"hello".to_vec()));
    send(&mut client, &Client::control(6, 0, &[0, 0, 0, 9])).await;
    assert_eq!(
        frame(&mut client).await,
        Frame::Control(6, vec![0, 0, 0, 9]),
        "a ping is answered"
    );
    send(&mut client, &Client::data(1, true, b"end")).await;
    assert_eq!(frame(&mut client).await, Frame::Data(1, false, b"end".to_vec()));
    assert_eq!(frame(&mut client).await, Frame::Data(1, true, Vec::new()));
    // It waits for the client, which has read all now.
    drop(client);
    assert_eq!(server.await.unwrap().unwrap(), 8);
}

#[tokio::test]
async fn streams_that_nobody_takes_are_refused() {
    // From the beginning, and when one waits already.
    for turns in [0, 1000] {
        let (mut client, _server) = serve(move |acceptor| async move {
            for _ in 0..turns {
                yield_now().await;
            }
            drop(acceptor);
            std::future::pending::<()>().await;
        });
        send(&mut client, &Client::new().open(1, &[])).await;
        let refused = Frame::Control(3, vec![0, 0, 0, 1, 0, 0, 0, 3]);
        assert_eq!(frame(&mut client).await, refused, "{turns}");
    }
}

#[tokio::test]
async fn the_reset_of_a_stream_is_noticed_after_its_end_too() {
    let (mut client, server) = serve(|mut acceptor| async move {
        let (mut input, output) = acceptor.next().await.accept().await.unwrap();
        assert_eq!(input.read().await, None);
        output.was_reset().await;
        output.write(b"noticed").await.unwrap();
    });
    send(&mut client, &Client::new().open(1, &[])).await;
    replied(&mut client, 1).await;
    send(&mut client, &Client::data(1, true, b"")).await;
    send(&mut client, &Client::control(3, 0, &[0, 0, 0, 1, 0, 0, 0, 5])).await;
    let noticed = Frame::Data(1, false, b"noticed".to_vec());
    assert_eq!(frame(&mut client).await, noticed);
    drop(client);
    server.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_client_that_goes_or_breaks_the_rules_ends_the_work() {
    for (bytes, wanted) in [
        (Vec::new(), "the client has gone"),
        (Client::control(2, 0, &[0; 4]), "SYN_REPLY"),
    ] {
        let (mut client, server) = serve(|_acceptor| std::future::pending::<()>());
        send(&mut client, &bytes).await;
        drop(client);
        let error = server.await.unwrap().unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

/// The runtime has one thread: when nothing has changed although everybody had a turn many times, nothing will.
async fn stalled(count: &AtomicUsize) -> usize {
    let mut before = usize::MAX;
    while before != count.load(Ordering::Relaxed) {
        before = count.load(Ordering::Relaxed);
        for _ in 0..1000 {
            yield_now().await;
        }
    }
    before
}

#[tokio::test]
async fn a_client_that_sends_more_than_is_taken_is_held_back() {
    const TOTAL: usize = 4 << 20;
    let go = Arc::new(tokio::sync::Notify::new());
    let wait = Arc::clone(&go);
    let (client, server) = serve(|mut acceptor| async move {
        let (mut input, _output) = acceptor.next().await.accept().await.unwrap();
        wait.notified().await;
        let mut count = 0;
        while let Some(bytes) = input.read().await {
            count += bytes.len();
        }
        count
    });
    let (mut reader, mut writer) = tokio::io::split(client);
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&sent);
    let sending = tokio::spawn(async move {
        writer.write_all(&Client::new().open(1, &[])).await.unwrap();
        // One frame, which is longer than all that may wait.
        writer
            .write_all(&Client::data(1, true, &[0; TOTAL])[..8])
            .await
            .unwrap();
        while counter.load(Ordering::Relaxed) < TOTAL {
            writer.write_all(&[7; 1024]).await.unwrap();
            counter.fetch_add(1024, Ordering::Relaxed);
        }
        writer
    });
    let waiting = stalled(&sent).await;
    let room = (STREAM_CHUNKS + 1) * PIECE + PIPE;
    assert!(waiting <= room, "{waiting} bytes wait, of at most {room}");
    go.notify_one();
    let writer = sending.await.unwrap();
    let mut reply = [0; 64];
    assert!(reader.read(&mut reply).await.unwrap() > 0);
    drop((reader, writer));
    assert_eq!(server.await.unwrap().unwrap(), TOTAL);
}

#[tokio::test]
async fn a_stream_whose_reader_has_gone_holds_up_no_other() {
    let (mut client, server) = serve(|mut acceptor| async move {
        let (ignored, _output) = acceptor.next().await.accept().await.unwrap();
        drop(ignored);
        echo(acceptor).await
    });
    let mut frames = Client::new();
    send(&mut client, &frames.open(1, &[])).await;
    replied(&mut client, 1).await;
    send(&mut client, &Client::data(1, false, &[0; 1 << 20])).await;
    send(&mut client, &frames.open(3, &[("streamtype", "data")])).await;
    replied(&mut client, 3).await;
    send(&mut client, &Client::data(3, true, b"x")).await;
    assert_eq!(frame(&mut client).await, Frame::Data(3, false, b"x".to_vec()));
    assert_eq!(frame(&mut client).await, Frame::Data(3, true, Vec::new()));
    drop(client);
    assert_eq!(server.await.unwrap().unwrap(), 1);
}

#[tokio::test]
async fn what_is_written_is_held_back_by_a_client_that_does_not_read() {
    let count = Arc::new(AtomicUsize::new(0));
    let written = Arc::clone(&count);
    let (mut client, _server) = serve(|mut acceptor| async move {
        let (_input, output) = acceptor.next().await.accept().await.unwrap();
        while output.write(&[0; 1024]).await.is_ok() {
            written.fetch_add(1024, Ordering::Relaxed);
        }
    });
    send(&mut client, &Client::new().open(1, &[])).await;
    let waiting = stalled(&count).await;
    let room = (QUEUE + 1) * 1024 + 2 * PIECE + PIPE;
    assert!(
        waiting > 0 && waiting <= room,
        "{waiting} bytes wait, of at most {room}"
    );
}

//! Passes the bytes of a connection on the node through the messages of a stream: screens, and ports of guests.

use std::sync::Arc;

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use vmmd_host::failure::Failure;

use crate::host::Host;

/// Messages ready for a client that reads slowly.
const READY: usize = 4;
/// Largest message in bytes, in both directions.
const CHUNK: usize = 64 << 10;

/// The stream to a client.
pub type Stream<A> = ReceiverStream<Result<A, Status>>;

/// Effect of the end of a client's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtEnd {
    /// The connection ends.
    Closes,
    /// The end is passed on, and the other side's data continues.
    HalfCloses,
    /// Nothing: the connection has no such end, and the other side's data continues.
    Stays,
}

/// The messages of a method.
#[derive(Debug)]
pub struct Messages<Q, A> {
    /// The data of a message; none in a message of another kind.
    pub data: fn(Q) -> Option<Vec<u8>>,
    /// A message with data.
    pub answer: fn(Vec<u8>) -> A,
    /// Effect of the end of the client's data.
    pub at_end: AtEnd,
}

/// Passes data until the connection, the client or the daemon ends.
pub fn relay<Q, A, C>(
    host: Arc<Host>,
    input: Streaming<Q>,
    connection: C,
    messages: Messages<Q, A>,
) -> Stream<A>
where
    Q: Send + 'static,
    A: Send + 'static,
    C: AsyncRead + AsyncWrite + Send + 'static,
{
    relay_with(host, input, connection, messages, ())
}

/// The same, and drops `holds` at the end.
pub fn relay_with<Q, A, C, H>(
    host: Arc<Host>,
    input: Streaming<Q>,
    connection: C,
    messages: Messages<Q, A>,
    holds: H,
) -> Stream<A>
where
    Q: Send + 'static,
    A: Send + 'static,
    C: AsyncRead + AsyncWrite + Send + 'static,
    H: Send + 'static,
{
    let (sender, receiver) = mpsc::channel(READY);
    let answer = messages.answer;
    tokio::spawn(async move {
        let (reader, writer) = split(connection);
        let end = tokio::select! {
            end = pass_in(input, writer, messages) => end,
            () = pass_out(reader, &sender, answer) => None,
            () = sender.closed() => None,
            () = host.stopping.cancelled() => Some(Failure::stopping()),
        };
        if let Some(failure) = end {
            // The client may have gone.
            let _gone = sender.send(Err(failure.into())).await;
        }
        drop(holds);
    });
    ReceiverStream::new(receiver)
}

/// Passes the client's data on, until either side ends the connection. Fails on an invalid message.
async fn pass_in<Q, A, C: AsyncWrite>(
    mut input: Streaming<Q>,
    mut writer: WriteHalf<C>,
    messages: Messages<Q, A>,
) -> Option<Failure> {
    while let Ok(Some(request)) = input.message().await {
        match (messages.data)(request) {
            Some(bytes) if bytes.len() <= CHUNK => {
                if writer.write_all(&bytes).await.is_err() {
                    break;
                }
            }
            Some(_) => return Some(Failure::field("data", "at most 64 KiB a message")),
            None => return Some(Failure::field("data", "must follow after `open`")),
        }
    }
    if messages.at_end == AtEnd::HalfCloses {
        let _closed = writer.shutdown().await;
    }
    if messages.at_end != AtEnd::Closes {
        // The other side's end is seen where it is read.
        std::future::pending::<()>().await;
    }
    None
}

/// Passes data to the client, until the other side ends the connection or the client disconnects.
async fn pass_out<A, C: AsyncRead>(
    mut reader: ReadHalf<C>,
    sender: &mpsc::Sender<Result<A, Status>>,
    answer: fn(Vec<u8>) -> A,
) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(count) = reader.read(&mut buffer).await {
        let data = buffer.get(..count).unwrap_or_default().to_vec();
        if count == 0 || sender.send(Ok(answer(data))).await.is_err() {
            return;
        }
    }
}

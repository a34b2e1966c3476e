//! `Vnc`: a VM's screen over a stream.
//!
//! Each client has a connection of its own to the VM's `vnc.sock`, or to `vnc-view.sock` when it only looks. The bytes are
//! passed on as they are: the `vmm` speaks RFB. A client that does not read leaves its bytes in that socket, where the
//! `vmm` sends no more before they are taken; nothing is buffered here beyond a few messages.

use std::sync::Arc;

use proto::v1::{VncRequest, VncResponse, vnc_request::Message};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::{failure::Failure, host::Host, paths::RuntimeDir};

/// The stream to the client.
pub type Stream = ReceiverStream<Result<VncResponse, Status>>;
type Sender = mpsc::Sender<Result<VncResponse, Status>>;

/// Messages ready for a client that reads slowly.
const READY: usize = 4;
/// Largest message in bytes, in both directions.
const CHUNK: usize = 64 << 10;

/// Opens the screen that the client's first message names.
pub async fn open(host: Arc<Host>, mut input: Streaming<VncRequest>) -> Result<Stream, Failure> {
    let first = input
        .message()
        .await
        .ok()
        .flatten()
        .and_then(|request| request.message);
    let Some(Message::Open(open)) = first else {
        return Err(Failure::field("open", "must be the first message"));
    };
    let entry = host
        .table
        .get(&open.name)
        .ok_or_else(|| Failure::no_vm(&open.name))?;
    let runtime = RuntimeDir::of(&host.config, entry.uid);
    let connection = UnixStream::connect(runtime.vnc(open.view_only))
        .await
        .map_err(|_| {
            let vm = entry.state.borrow();
            let runs = vm.status.as_ref().is_some_and(|status| status.instance.is_some());
            let wants = vm.spec.as_ref().is_some_and(|spec| spec.display.is_some());
            let (reason, message) = match (runs, wants) {
                (true, true) => ("NO_SCREEN", "this run of the VM has no screen: restart it"),
                (_, false) => (
                    "NO_SCREEN",
                    "the VM has no screen: give it a `display` and restart it",
                ),
                (false, true) => ("NOT_RUNNING", "the VM is not running: start it first"),
            };
            Failure::precondition(reason, message)
        })?;
    let (sender, receiver) = mpsc::channel(READY);
    tokio::spawn(async move {
        let (reader, writer) = connection.into_split();
        let end = tokio::select! {
            end = pass_in(input, writer) => end,
            () = pass_out(reader, &sender) => None,
            () = sender.closed() => None,
            () = host.stopping.cancelled() => Some(Failure::stopping()),
        };
        if let Some(failure) = end {
            // The client may have gone.
            let _gone = sender.send(Err(failure.into())).await;
        }
    });
    Ok(ReceiverStream::new(receiver))
}

/// Passes on what the client sends, until it or the `vmm` ends the connection.
async fn pass_in(mut input: Streaming<VncRequest>, mut writer: OwnedWriteHalf) -> Option<Failure> {
    while let Ok(Some(request)) = input.message().await {
        match request.message {
            Some(Message::Data(bytes)) if bytes.len() <= CHUNK => writer.write_all(&bytes).await.ok()?,
            Some(Message::Data(_)) => return Some(Failure::field("data", "at most 64 KiB a message")),
            _ => return Some(Failure::field("data", "must follow after `open`")),
        }
    }
    None
}

/// Passes on what the `vmm` sends, until it ends the connection or the client is gone.
async fn pass_out(mut reader: OwnedReadHalf, sender: &Sender) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(count) = reader.read(&mut buffer).await {
        let data = buffer.get(..count).unwrap_or_default().to_vec();
        if count == 0 || sender.send(Ok(VncResponse { data })).await.is_err() {
            return;
        }
    }
}

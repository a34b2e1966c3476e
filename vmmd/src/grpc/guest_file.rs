//! Copies of files from and to guests: `ReadGuestFile` and `WriteGuestFile`.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use vmmd_api::v1::{
    GuestFileEnd, ReadGuestFileRequest, ReadGuestFileResponse, WriteGuestFileRequest, WriteGuestFileResponse,
    read_guest_file_response, write_guest_file_request::Message,
};
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_objects::request::to_completion;

use crate::{guest::GuestFile, host::Host, registry::vms::Entry};

/// The stream to the client.
pub type Stream = ReceiverStream<Result<ReadGuestFileResponse, Status>>;

/// Messages ready for a client that reads slowly.
const READY: usize = 4;
/// Largest message to the client in bytes.
const CHUNK: usize = 64 << 10;
/// How long a client may take nothing, or send nothing, while a file of the guest is open for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sends a file of a guest. The agent is asked for the next piece when the client has taken the last
/// one.
pub async fn read(host: Arc<Host>, entry: Entry, request: ReadGuestFileRequest) -> Result<Stream, Failure> {
    let (sender, receiver) = mpsc::channel(READY);
    let (opened, is_open) = oneshot::channel();
    // In a task of its own, which closes the file when the caller goes away.
    tokio::spawn(async move {
        let stopping = host.stopping.clone();
        let file = match GuestFile::open(host, entry, &request.path, false).await {
            Ok(file) => file,
            Err(failure) => {
                let _gone = opened.send(Err(failure));
                return;
            }
        };
        let _gone = opened.send(Ok(()));
        let sent = tokio::select! {
            sent = send(&file, &sender) => sent,
            () = sender.closed() => Ok(()),
            () = stopping.cancelled() => Err(Failure::stopping()),
        };
        close(&file, &request.path).await;
        if let Err(failure) = sent {
            let _gone = timeout(PATIENCE, sender.send(Err(failure.into()))).await;
        }
    });
    is_open
        .await
        .unwrap_or_else(|_| Err(Failure::internal("a copy ended early")))?;
    Ok(ReceiverStream::new(receiver))
}

async fn send(
    file: &GuestFile,
    sender: &mpsc::Sender<Result<ReadGuestFileResponse, Status>>,
) -> Result<(), Failure> {
    use read_guest_file_response::Message;
    let put = async |message| {
        let message = ReadGuestFileResponse {
            message: Some(message),
        };
        match timeout(PATIENCE, sender.send(Ok(message))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(stalled("took nothing of the copy for a minute")),
        }
    };
    let mut bytes = 0_u64;
    loop {
        let (piece, is_last) = file.read().await?;
        bytes = bytes.saturating_add(u64::try_from(piece.len()).unwrap_or(u64::MAX));
        for chunk in piece.chunks(CHUNK) {
            put(Message::Data(chunk.to_vec())).await?;
        }
        if is_last {
            return put(Message::End(GuestFileEnd { bytes })).await;
        }
    }
}

/// Writes a file of a guest, with the content of the client's messages.
pub async fn write(
    host: Arc<Host>,
    entry: Entry,
    path: String,
    messages: Streaming<WriteGuestFileRequest>,
) -> Result<WriteGuestFileResponse, Failure> {
    // In a task of its own, which closes the file when the caller goes away.
    to_completion(async move {
        let stopping = host.stopping.clone();
        let file = GuestFile::open(host, entry, &path, true).await?;
        let written = tokio::select! {
            written = receive(&file, messages) => written,
            () = stopping.cancelled() => Err(Failure::stopping()),
        };
        let written = match written {
            Ok(bytes) => file.flush().await.map(|()| bytes),
            Err(failure) => Err(failure),
        };
        close(&file, &path).await;
        let bytes = written.map_err(|failure| Failure {
            message: format!(
                "{}: the file \"{}\" in the guest is incomplete",
                failure.message,
                text::brief(&path)
            ),
            ..failure
        })?;
        Ok(WriteGuestFileResponse { bytes })
    })
    .await
}

async fn receive(file: &GuestFile, mut messages: Streaming<WriteGuestFileRequest>) -> Result<u64, Failure> {
    let incomplete = || {
        Failure::new(
            Kind::Aborted,
            "INPUT_INCOMPLETE",
            "the client broke off its input",
        )
    };
    let mut bytes = 0_u64;
    loop {
        let next = timeout(PATIENCE, messages.message()).await;
        let next = next.map_err(|_| stalled("sent nothing of the copy for a minute"))?;
        let next = next.map_err(|_| incomplete())?.ok_or_else(incomplete)?;
        match next.message {
            Some(Message::Data(data)) => {
                file.write(&data).await?;
                bytes = bytes.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
            }
            Some(Message::End(end)) if end.bytes == bytes => return Ok(bytes),
            Some(Message::End(_)) => return Err(incomplete()),
            Some(Message::Open(_)) | None => {
                return Err(Failure::field("data", "must follow after `open`"));
            }
        }
    }
}

fn stalled(what: &str) -> Failure {
    Failure::new(Kind::Aborted, "COPY_STALLED", format!("the client {what}"))
}

/// An agent that does not close a file keeps it open until it ends.
async fn close(file: &GuestFile, path: &str) {
    if let Err(failure) = file.close().await {
        tracing::warn!(path = text::brief(path), %failure, "close a file of a guest");
    }
}

//! `Vnc`: a VM's screen over a stream.
//!
//! Each client has a connection of its own to the VM's `vnc.sock`, or to `vnc-view.sock` when it only looks. The bytes are
//! passed on as they are: the `vmm` speaks RFB. A client that does not read leaves its bytes in that socket, where the
//! `vmm` sends no more before they are taken; nothing is buffered here beyond a few messages.

use std::sync::Arc;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::unix::{OwnedReadHalf, OwnedWriteHalf},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use vmmd_api::v1::{
    CreateVncTicketRequest, CreateVncTicketResponse, VncRequest, VncResponse, VncTicketKind,
    vnc_request::Message,
};
use vmmd_host::{failure::Failure, text};
use vmmd_objects::context::Initiator;

use crate::{
    host::Host,
    registry::screens::{Form, LIFE, Ticket},
    screen::{self, web},
};

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
        .vms
        .get(&open.name)
        .ok_or_else(|| Failure::no_vm(&open.name))?;
    let connection = screen::connect(&host, &entry, open.view_only).await?;
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

/// Makes a ticket for `who`.
pub fn ticket(
    host: &Host,
    request: &CreateVncTicketRequest,
    who: Initiator,
) -> Result<CreateVncTicketResponse, Failure> {
    let entry = host
        .vms
        .get(&request.name)
        .ok_or_else(|| Failure::no_vm(&request.name))?;
    let (form, configured, address) = match VncTicketKind::try_from(request.kind) {
        Ok(VncTicketKind::Unspecified | VncTicketKind::Password) => {
            (Form::Password, "vnc", &host.screens.vnc)
        }
        Ok(VncTicketKind::Web) => (Form::Token, "web", &host.screens.web),
        Err(_) => return Err(Failure::field("kind", "is none that this vmmd knows")),
    };
    let address = address.get().ok_or_else(|| {
        let message = format!(
            "this node does not serve screens that way: set `{configured}` in `[screen]` of its configuration"
        );
        Failure::precondition("NOT_SERVED", message)
    })?;
    screen::there(&entry)?;
    if form == Form::Token {
        web::has_page(&host.config.screen.novnc)?;
    }
    let ticket = Ticket {
        vm: entry.uid,
        name: request.name.clone(),
        view_only: request.view_only,
        who,
    };
    let secret = host.screens.tickets.issue(form, ticket)?;
    let life = u64::try_from(LIFE.as_millis()).unwrap_or(u64::MAX);
    let address = screen::reached(address);
    let encrypted = host.config.screen.is_encrypted();
    let (password, url) = match form {
        Form::Password => (secret, String::new()),
        Form::Token => (
            String::new(),
            web::url(&address, encrypted, &secret, request.view_only),
        ),
    };
    Ok(CreateVncTicketResponse {
        address,
        password,
        url,
        expire_time: text::timestamp(text::now_ms().saturating_add(life)),
    })
}

/// Passes the client's data to the `vmm`, until either side ends the connection.
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

/// Passes the data of the `vmm` to the client, until the `vmm` ends the connection or the client
/// disconnects.
async fn pass_out(mut reader: OwnedReadHalf, sender: &Sender) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(count) = reader.read(&mut buffer).await {
        let data = buffer.get(..count).unwrap_or_default().to_vec();
        if count == 0 || sender.send(Ok(VncResponse { data })).await.is_err() {
            return;
        }
    }
}

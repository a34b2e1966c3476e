//! `Vnc`: a VM's screen over a stream.
//!
//! Each client has a connection of its own to the VM's `vnc.sock`, or to `vnc-view.sock` when it only looks. The bytes are
//! passed on as they are: the `vmm` speaks RFB. A client that does not read leaves its bytes in that socket, where the
//! `vmm` sends no more before they are taken; nothing is buffered here beyond a few messages.

use std::sync::Arc;

use tonic::Streaming;
use vmmd_api::v1::{
    CreateVncTicketRequest, CreateVncTicketResponse, VncRequest, VncResponse, VncTicketKind,
    vnc_request::Message,
};
use vmmd_host::{failure::Failure, text};
use vmmd_objects::context::Initiator;

use super::relay::{self, AtEnd, Messages, relay};
use crate::{
    host::Host,
    registry::screens::{Form, LIFE, Ticket},
    screen::{self, web},
};

/// The stream to the client.
pub type Stream = relay::Stream<VncResponse>;

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
    let messages = Messages {
        data: |request: VncRequest| match request.message {
            Some(Message::Data(bytes)) => Some(bytes),
            _ => None,
        },
        answer: |data| VncResponse { data },
        at_end: AtEnd::Closes,
    };
    Ok(relay(host, input, connection, messages))
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

//! `ConnectVsock`: a connection between the client and a program of a guest, over a stream.

use std::{sync::Arc, time::Duration};

use tokio::{io::AsyncReadExt as _, net::UnixStream, time::timeout};
use tonic::Streaming;
use vmmd_api::v1::{ConnectVsockRequest, ConnectVsockResponse, VsockOpen, connect_vsock_request::Message};
use vmmd_host::failure::Failure;

use super::relay::{self, AtEnd, Messages, relay};
use crate::{guest::open_socket, host::Host, registry::vms::Entry};

/// The stream to the client.
pub type Stream = relay::Stream<ConnectVsockResponse>;

/// How long the guest has to accept the connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Opens the connection that the client's first message names.
pub async fn open(host: Arc<Host>, mut input: Streaming<ConnectVsockRequest>) -> Result<Stream, Failure> {
    let first = input.message().await.ok().flatten();
    let Some(Message::Open(open)) = first.and_then(|request| request.message) else {
        return Err(Failure::field("open", "must be the first message"));
    };
    if open.port == u32::MAX {
        return Err(Failure::field("open.port", "must be 0 to 4294967294"));
    }
    let entry = host
        .vms
        .get(&open.name)
        .ok_or_else(|| Failure::no_vm(&open.name))?;
    check(&entry)?;
    let connection = connect(&host, &entry, &open).await?;
    let messages = Messages {
        data: |request: ConnectVsockRequest| match request.message {
            Some(Message::Data(bytes)) => Some(bytes),
            _ => None,
        },
        answer: |data| ConnectVsockResponse { data },
        at_end: AtEnd::HalfCloses,
    };
    Ok(relay(host, input, connection, messages))
}

/// Refuses a VM that does not run, and one without a socket device.
fn check(entry: &Entry) -> Result<(), Failure> {
    let vm = entry.state.borrow();
    if vm.status.as_ref().is_none_or(|status| status.instance.is_none()) {
        let message = "the VM is not running: start it first";
        return Err(Failure::precondition("NOT_RUNNING", message));
    }
    if vm.spec.as_ref().is_none_or(|spec| spec.vsock.is_none()) {
        let message = "the VM has no socket device: give it a `vsock` and restart it";
        return Err(Failure::precondition("NO_VSOCK", message));
    }
    Ok(())
}

/// Waits until the connection is established.
async fn connect(host: &Host, entry: &Entry, open: &VsockOpen) -> Result<UnixStream, Failure> {
    let mut ours = open_socket(host, entry.uid, open.port, open.accept).await?;
    let established = ours.read_u8();
    let established = if open.accept {
        tokio::select! {
            established = established => established,
            () = host.stopping.cancelled() => return Err(Failure::stopping()),
        }
    } else {
        let Ok(established) = timeout(CONNECT, established).await else {
            return Err(unreachable(open.port, "the guest did not answer within 10 s"));
        };
        established
    };
    match established {
        Ok(_) => Ok(ours),
        Err(_) if open.accept => Err(unreachable(
            open.port,
            "the VM has too many connections, or has ended",
        )),
        Err(_) => Err(unreachable(open.port, "the guest has refused the connection")),
    }
}

fn unreachable(port: u32, why: &str) -> Failure {
    let message = format!("vsock port {port}: {why}; does a program of the guest listen there?");
    Failure::precondition("PORT_UNREACHABLE", message)
}

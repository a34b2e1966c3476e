//! `PortForward`: a connection from the node to a port of a VM, over a stream.
//!
//! The daemon connects to the address that it has assigned to the VM's NIC, so the guest needs no
//! route to the client. The end of the client's data is passed on to the guest, and the guest's
//! data continues until its own end.

use std::{net::IpAddr, sync::Arc, time::Duration};

use tokio::{net::TcpStream, time::timeout};
use tonic::Streaming;
use vmmd_api::v1::{PortForwardRequest, PortForwardResponse, port_forward_request::Message};
use vmmd_host::{failure::Failure, text};

use super::relay::{self, AtEnd, Messages, relay};
use crate::{host::Host, vm::address};

/// The stream to the client.
pub type Stream = relay::Stream<PortForwardResponse>;

/// How long the guest has to accept the connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Connects to the port that the client's first message names.
pub async fn open(host: Arc<Host>, mut input: Streaming<PortForwardRequest>) -> Result<Stream, Failure> {
    let first = input.message().await.ok().flatten();
    let Some(Message::Open(open)) = first.and_then(|request| request.message) else {
        return Err(Failure::field("open", "must be the first message"));
    };
    let port = u16::try_from(open.port).ok().filter(|port| *port != 0);
    let port = port.ok_or_else(|| Failure::field("open.port", "must be 1 to 65535"))?;
    let entry = host
        .vms
        .get(&open.name)
        .ok_or_else(|| Failure::no_vm(&open.name))?;
    let address = address(&entry.state.borrow(), &open.nic)?;
    let connection = match timeout(CONNECT, TcpStream::connect((address, port))).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return Err(unreachable(address, port, &text::words(&error))),
        Err(_) => return Err(unreachable(address, port, "no answer in 10 s")),
    };
    // Small writes are sent at once, because they may be interactive.
    let _slower_without = connection.set_nodelay(true);
    let messages = Messages {
        data: |request: PortForwardRequest| match request.message {
            Some(Message::Data(bytes)) => Some(bytes),
            _ => None,
        },
        answer: |data| PortForwardResponse { data },
        at_end: AtEnd::HalfCloses,
    };
    Ok(relay(host, input, connection, messages))
}

fn unreachable(address: IpAddr, port: u16, why: &str) -> Failure {
    let message = format!(
        "connect to port {port} of {address}: {why}; does the guest have its address by now, and does a program listen there?"
    );
    Failure::precondition("PORT_UNREACHABLE", message)
}

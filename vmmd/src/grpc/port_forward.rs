//! `PortForward`: a connection from the node to a port of a VM, over a stream.
//!
//! The daemon connects to the address that it has assigned to the VM's NIC, so the guest needs no
//! route to the client. The end of the client's data is passed on to the guest, and the guest's
//! data continues until its own end.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use vmmd_api::v1::{
    PortForwardOpen, PortForwardRequest, PortForwardResponse, Vm, port_forward_request::Message,
};
use vmmd_host::{failure::Failure, text};

use crate::host::Host;

/// The stream to the client.
pub type Stream = ReceiverStream<Result<PortForwardResponse, Status>>;
type Sender = mpsc::Sender<Result<PortForwardResponse, Status>>;

/// Messages ready for a client that reads slowly.
const READY: usize = 4;
/// Largest message in bytes, in both directions.
const CHUNK: usize = 64 << 10;
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
    let address = address(&entry.state.borrow(), &open)?;
    let connection = match timeout(CONNECT, TcpStream::connect((address, port))).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return Err(unreachable(address, port, &text::words(&error))),
        Err(_) => return Err(unreachable(address, port, "no answer in 10 s")),
    };
    // Small writes are sent at once, because they may be interactive.
    let _slower_without = connection.set_nodelay(true);
    let (sender, receiver) = mpsc::channel(READY);
    tokio::spawn(async move {
        let (reader, writer) = connection.into_split();
        let end = tokio::select! {
            failure = pass_in(input, writer) => Some(failure),
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

/// The address of the NIC that is meant.
fn address(vm: &Vm, open: &PortForwardOpen) -> Result<Ipv4Addr, Failure> {
    let status = vm.status.as_ref();
    if status.is_none_or(|status| status.instance.is_none()) {
        let message = "the VM is not running: start it first";
        return Err(Failure::precondition("NOT_RUNNING", message));
    }
    let nics = status.into_iter().flat_map(|status| &status.nics);
    let meant = nics.filter(|nic| open.nic.is_empty() || nic.name == open.nic);
    let mut addresses = meant.flat_map(|nic| &nic.addresses);
    addresses.find_map(|address| address.parse().ok()).ok_or_else(|| {
        let which = match open.nic.as_str() {
            "" => "the VM has no NIC".to_owned(),
            nic => format!("the VM has no NIC \"{}\"", text::brief(nic)),
        };
        let message = format!("{which} with an address of the node: give it one in a network of the node");
        Failure::precondition("NO_ADDRESS", message)
    })
}

fn unreachable(address: Ipv4Addr, port: u16, why: &str) -> Failure {
    let message = format!(
        "connect to port {port} of {address}: {why}; does the guest have its address by now, and does a program listen there?"
    );
    Failure::precondition("PORT_UNREACHABLE", message)
}

/// Passes the client's data to the guest, including its end. Returns on an invalid message.
async fn pass_in(mut input: Streaming<PortForwardRequest>, mut writer: OwnedWriteHalf) -> Failure {
    while let Ok(Some(request)) = input.message().await {
        match request.message {
            Some(Message::Data(bytes)) if bytes.len() <= CHUNK => {
                if writer.write_all(&bytes).await.is_err() {
                    break;
                }
            }
            Some(Message::Data(_)) => return Failure::field("data", "at most 64 KiB a message"),
            _ => return Failure::field("data", "must follow after `open`"),
        }
    }
    // A guest that has closed the connection is seen where it is read.
    let _closed = writer.shutdown().await;
    std::future::pending().await
}

/// Passes the guest's data to the client, until the guest ends the connection or the client
/// disconnects.
async fn pass_out(mut reader: OwnedReadHalf, sender: &Sender) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(count) = reader.read(&mut buffer).await {
        let data = buffer.get(..count).unwrap_or_default().to_vec();
        if count == 0 || sender.send(Ok(PortForwardResponse { data })).await.is_err() {
            return;
        }
    }
}

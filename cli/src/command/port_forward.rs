//! `port-forward`, `vsock` and `channel`: ports of this machine, or standard input and output, that lead
//! to a port of a VM, of its socket device, or to a channel of it.

use std::{io, net::SocketAddr, pin::Pin, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    signal::ctrl_c,
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep, timeout_at},
};
use tokio_stream::{Stream, StreamExt as _, once, wrappers::ReceiverStream};
use tonic::Status;
use vmmd_api::v1::{
    self, ChannelOpen, PortForwardOpen, VsockOpen, connect_channel_request, connect_vsock_request,
    port_forward_request,
};

use crate::{
    args::verbs::{ChannelPlace, PortForward, Vsock},
    client::{Client, about_vm},
    failure::{Code, Failure, Result},
};

/// Bytes of one message, at most 64 KiB by the API.
const CHUNK: usize = 32 << 10;
/// Messages that wait to be sent.
const QUEUE: usize = 4;

/// Forwards until ^C, or until the one connection over standard input and output has ended.
pub async fn port_forward(client: &Client, args: &PortForward) -> Result<()> {
    if args.stdio {
        let port = match args.ports.as_slice() {
            [forward] if forward.listen.is_none() => forward.port,
            _ => return Err(Failure::new(Code::Usage, "--stdio takes one port of the guest")),
        };
        return over_stdio(open(client, args, port).await?).await;
    }
    let mut listeners = Vec::new();
    for forward in &args.ports {
        let address = forward.listen.unwrap_or(SocketAddr::new(LOCALHOST, forward.port));
        let listener = TcpListener::bind(address).await;
        let listener = listener.map_err(|error| failed(&format!("listening on {address}"), &error))?;
        let address = listener
            .local_addr()
            .map_err(|error| failed("listening", &error))?;
        println!("{address} leads to port {} of vm/{}", forward.port, args.name);
        listeners.push((listener, forward.port));
    }
    let mut tasks = JoinSet::new();
    for (listener, port) in listeners {
        tasks.spawn(accept(client.clone(), args.clone(), listener, port));
    }
    tokio::select! {
        ended = tasks.join_next() => match ended {
            Some(Ok(failure)) => Err(failure),
            _ => Err(Failure::new(Code::Other, "a listener has ended")),
        },
        _ = ctrl_c() => Ok(()),
    }
}

/// Where a port of this machine is opened when no address is given.
const LOCALHOST: std::net::IpAddr = std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

/// Waits until the guest sends the first bytes of a connection to a port, as SSH servers do.
///
/// # Errors
///
/// Fails when no bytes arrive within `patience`, with the last reason, or when the VM cannot be
/// queried.
pub async fn answers(client: &Client, name: &str, port: u16, patience: Duration) -> Result<()> {
    let args = PortForward {
        name: name.to_owned(),
        ..PortForward::default()
    };
    let deadline = Instant::now() + patience;
    let mut last = "nothing has answered".to_owned();
    loop {
        let attempt = async {
            let mut connection = open(client, &args, port).await?;
            Ok::<_, Failure>(connection.received.next().await.transpose()?)
        };
        match timeout_at(deadline, attempt).await {
            Ok(Ok(Some(_))) => return Ok(()),
            Ok(Ok(None)) => {}
            Ok(Err(failure)) if matches!(failure.code, Code::NotFound | Code::Permission) => {
                return Err(failure);
            }
            Ok(Err(failure)) => last = failure.message,
            Err(_) => {
                let message = format!(
                    "vm/{name}: port {port} did not answer within {} s: {last}",
                    patience.as_secs()
                );
                return Err(Failure::new(Code::Timeout, message));
            }
        }
        // A guest that boots refuses connections at once.
        sleep(AGAIN).await;
    }
}

/// How long it takes to the next attempt.
const AGAIN: Duration = Duration::from_secs(1);

/// How long a server may take to send its first bytes.
const GREETING: Duration = Duration::from_secs(3);

/// Checks whether a port of the guest, or of its socket device with `vsock`, sends the first bytes of a
/// connection now, as SSH servers do.
pub async fn greets(client: &Client, name: &str, port: u16, vsock: bool) -> Result<()> {
    let attempt = async {
        let mut connection = match vsock {
            true => open_vsock(client, name, port.into(), false).await?,
            false => {
                let args = PortForward {
                    name: name.to_owned(),
                    ..PortForward::default()
                };
                open(client, &args, port).await?
            }
        };
        Ok::<_, Failure>(connection.received.next().await.transpose()?)
    };
    let silent = format!("nothing answers at port {port}");
    match timeout_at(Instant::now() + GREETING, attempt).await {
        Ok(Ok(Some(_))) => Ok(()),
        Ok(Err(failure)) => Err(failure),
        Ok(Ok(None)) | Err(_) => Err(Failure::new(Code::Timeout, silent)),
    }
}

/// Serves a port; why it can't any more.
async fn accept(client: Client, args: PortForward, listener: TcpListener, port: u16) -> Failure {
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => return failed("accepting a connection", &error),
        };
        let (client, args) = (client.clone(), args.clone());
        tokio::spawn(async move {
            match open(&client, &args, port).await {
                Ok(connection) => serve(connection, socket).await,
                Err(failure) => eprintln!("vmmctl: {failure}"),
            }
        });
    }
}

/// A connection to a port of the VM.
struct Connection {
    sent: mpsc::Sender<Vec<u8>>,
    received: Pin<Box<dyn Stream<Item = Result<Vec<u8>, Status>> + Send>>,
}

async fn open(client: &Client, args: &PortForward, port: u16) -> Result<Connection> {
    use port_forward_request::Message;
    let open = PortForwardOpen {
        name: args.name.clone(),
        port: port.into(),
        nic: args.nic.clone().unwrap_or_default(),
    };
    let (sent, queue) = mpsc::channel(QUEUE);
    let messages = once(Message::Open(open)).chain(ReceiverStream::new(queue).map(Message::Data));
    let requests = messages.map(|message| v1::PortForwardRequest {
        message: Some(message),
    });
    let answer = client.vms.clone().port_forward(requests).await;
    let responses = answer
        .map_err(|status| about_vm(status.into(), &args.name))?
        .into_inner();
    Ok(Connection {
        sent,
        received: Box::pin(responses.map(|response| response.map(|response| response.data))),
    })
}

/// Connects standard input and output to a port of a socket device.
pub async fn vsock(client: &Client, verb: &Vsock) -> Result<()> {
    let (place, accept) = match verb {
        Vsock::Connect(place) => (place, false),
        Vsock::Listen(place) => (place, true),
    };
    over_stdio(open_vsock(client, &place.name, place.port, accept).await?).await
}

async fn open_vsock(client: &Client, name: &str, port: u32, accept: bool) -> Result<Connection> {
    use connect_vsock_request::Message;
    let open = VsockOpen {
        name: name.to_owned(),
        port,
        accept,
    };
    let (sent, queue) = mpsc::channel(QUEUE);
    let messages = once(Message::Open(open)).chain(ReceiverStream::new(queue).map(Message::Data));
    let requests = messages.map(|message| v1::ConnectVsockRequest {
        message: Some(message),
    });
    let answer = client.vms.clone().connect_vsock(requests).await;
    let responses = answer
        .map_err(|status| about_vm(status.into(), name))?
        .into_inner();
    Ok(Connection {
        sent,
        received: Box::pin(responses.map(|response| response.map(|response| response.data))),
    })
}

/// Connects standard input and output to a channel.
pub async fn channel(client: &Client, place: &ChannelPlace) -> Result<()> {
    use connect_channel_request::Message;
    let open = ChannelOpen {
        name: place.name.clone(),
        channel: place.channel.clone(),
    };
    let (sent, queue) = mpsc::channel(QUEUE);
    let messages = once(Message::Open(open)).chain(ReceiverStream::new(queue).map(Message::Data));
    let requests = messages.map(|message| v1::ConnectChannelRequest {
        message: Some(message),
    });
    let answer = client.vms.clone().connect_channel(requests).await;
    let responses = answer
        .map_err(|status| about_vm(status.into(), &place.name))?
        .into_inner();
    over_stdio(Connection {
        sent,
        received: Box::pin(responses.map(|response| response.map(|response| response.data))),
    })
    .await
}

async fn serve(connection: Connection, socket: TcpStream) {
    let Connection { sent, mut received } = connection;
    let (reader, mut writer): (OwnedReadHalf, OwnedWriteHalf) = socket.into_split();
    let sending = tokio::spawn(send(reader, sent));
    while let Some(Ok(data)) = received.next().await {
        if writer.write_all(&data).await.is_err() {
            break;
        }
    }
    sending.abort();
}

/// Sends the bytes read. The end of input ends the requests, and the guest receives an end of
/// stream.
async fn send(mut reader: OwnedReadHalf, sent: mpsc::Sender<Vec<u8>>) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(count) = reader.read(&mut buffer).await {
        let bytes = buffer.get(..count).unwrap_or_default();
        if count == 0 || sent.send(bytes.to_vec()).await.is_err() {
            return;
        }
    }
}

/// For `ProxyCommand` of ssh: ends when the guest ends the connection.
async fn over_stdio(connection: Connection) -> Result<()> {
    let Connection { sent, mut received } = connection;
    // A separate thread: a read of standard input is not cancellable, and the program must not wait
    // for it.
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        while let Ok(count) = rustix::io::retry_on_intr(|| rustix::io::read(io::stdin(), &mut buffer)) {
            let bytes = buffer.get(..count).unwrap_or_default();
            if count == 0 || sent.blocking_send(bytes.to_vec()).is_err() {
                return;
            }
        }
    });
    while let Some(data) = received.next().await.transpose()? {
        let mut rest = data.as_slice();
        while !rest.is_empty() {
            let count = rustix::io::retry_on_intr(|| rustix::io::write(io::stdout(), rest));
            let count = count.map_err(|errno| failed("writing", &errno.into()))?;
            rest = rest.get(count..).unwrap_or_default();
        }
    }
    Ok(())
}

fn failed(what: &str, error: &io::Error) -> Failure {
    Failure::new(Code::Other, format!("{what}: {error}"))
}

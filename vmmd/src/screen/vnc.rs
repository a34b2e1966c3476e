//! Viewers: RFB over TCP with VNC authentication (RFC 6143, 7.2.2). The password says which VM's screen it is, so that one port is enough
//! for all VMs.
//!
//! VNC authentication is DES with a password of eight characters, and nothing is encrypted. So passwords are random, good once and
//! for a minute, each connection has one try, and the listener is on this machine only, unless the node has a certificate for screens:
//! then both the password and the screen come in TLS (VeNCrypt of the community's description of RFB, 7.2.7).

use std::{io, sync::Arc, time::Duration};

use rfb::handshake::{self, VERSION};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream, UnixStream},
    time::timeout,
};
use uuid::Uuid;

use super::{
    accept, enter,
    tls::{self, Stream},
};
use crate::{
    auth::Place,
    host::Host,
    registry::screens::{Form, Ticket, Tickets},
};

/// How long a viewer may take to show its password, which people type.
const HANDSHAKE: Duration = Duration::from_secs(30);
/// How long the `vmm` may take to begin.
const PATIENCE: Duration = Duration::from_secs(10);
/// Security types (7.1.2).
const NONE: u8 = 1;
const VNC_AUTHENTICATION: u8 = 2;
const VENCRYPT: u8 = 19;
/// Version 0.2 of VeNCrypt, and its ways: TLS with a certificate of the server, and in it VNC authentication, or a name and a password.
const VENCRYPT_VERSION: [u8; 2] = [0, 2];
const X509_VNC: u32 = 261;
const X509_PLAIN: u32 = 262;
/// Longest name or password that is read, in bytes.
const MAX_PLAIN: u32 = 256;
/// SecurityResults (7.1.3).
const OK: u32 = 0;
const FAILED: u32 = 1;

/// A viewer that has shown a ticket.
struct Admitted {
    stream: Box<dyn Stream>,
    /// The minor version of RFB that it speaks.
    minor: u8,
    ticket: Ticket,
}

/// Serves viewers until the daemon ends.
pub async fn serve(listener: TcpListener, host: Arc<Host>) {
    accept(listener, host, |stream, from, host| async move {
        let shown = timeout(HANDSHAKE, authenticate(stream, &host)).await;
        match shown {
            // In a task of its own, which does not give way to other handshakes.
            Ok(Ok(Some(viewer))) => drop(tokio::spawn(admitted(viewer, from, host))),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => tracing::debug!(%error, from, "a viewer's handshake"),
            Err(_) => tracing::debug!(from, "a viewer's handshake took too long"),
        }
    })
    .await;
}

/// Speaks with a viewer until it has shown a ticket. `None` when it was refused and told so.
async fn authenticate(mut stream: TcpStream, host: &Host) -> io::Result<Option<Admitted>> {
    stream.set_nodelay(true)?;
    let tickets = &host.screens.tickets;
    let minor = version(&mut stream).await?;
    let (mut stream, ticket): (Box<dyn Stream>, _) = if host.config.screen.is_encrypted() {
        choose(&mut stream, minor, VENCRYPT).await?;
        let way = vencrypt(&mut stream).await?;
        let mut stream = tls::accept(host, stream).await?;
        let ticket = match way {
            X509_PLAIN => plain(&mut stream, tickets).await?,
            _ => challenge(&mut stream, tickets).await?,
        };
        (stream, ticket)
    } else {
        choose(&mut stream, minor, VNC_AUTHENTICATION).await?;
        let ticket = challenge(&mut stream, tickets).await?;
        (Box::new(stream), ticket)
    };
    let Some(ticket) = ticket else {
        let why = "the password is wrong, or was used, or is too old: ask vmmd for another one";
        refuse(&mut stream, minor, why).await?;
        return Ok(None);
    };
    Ok(Some(Admitted {
        stream,
        minor,
        ticket,
    }))
}

/// Serves a viewer from its ticket on.
async fn admitted(viewer: Admitted, from: String, host: Arc<Host>) {
    tokio::select! {
        shown = show(viewer, &from, &host) => {
            if let Err(error) = shown {
                tracing::debug!(%error, from, "a viewer of a screen");
            }
        }
        () = host.stopping.cancelled() => {}
    }
}

/// Connects a viewer with the screen that its ticket is for, and passes bytes on until one side ends.
async fn show(mut viewer: Admitted, from: &str, host: &Host) -> io::Result<()> {
    let opened = timeout(PATIENCE, open(&mut viewer, from, host)).await;
    let Some((mut screen, _place)) = opened.map_err(|_| io::ErrorKind::TimedOut)?? else {
        return Ok(());
    };
    copy_bidirectional(&mut viewer.stream, &mut screen).await?;
    Ok(())
}

/// Completes the handshake with the `vmm` to the same stage as with the viewer, and sends the
/// viewer the result. `None` after a refusal.
async fn open(viewer: &mut Admitted, from: &str, host: &Host) -> io::Result<Option<(UnixStream, Place)>> {
    let (mut screen, place) = match enter(host, &viewer.ticket, from).await {
        Ok(entered) => entered,
        Err(failure) => {
            refuse(&mut viewer.stream, viewer.minor, &failure.to_string()).await?;
            return Ok(None);
        }
    };
    greet(&mut screen).await?;
    viewer.stream.write_u32(OK).await?;
    Ok(Some((screen, place)))
}

/// A SecurityResult with a reason, which older versions do not have (7.1.3).
async fn refuse(stream: &mut impl Stream, minor: u8, why: &str) -> io::Result<()> {
    stream.write_u32(FAILED).await?;
    if minor >= 8 {
        reason(stream, why).await?;
    }
    stream.shutdown().await
}

/// The viewer's minor version.
async fn version(stream: &mut impl Stream) -> io::Result<u8> {
    stream.write_all(VERSION).await?;
    let mut version = [0; 12];
    stream.read_exact(&mut version).await?;
    handshake::minor_version(&version).ok_or_else(|| io::Error::other("the viewer does not speak RFB"))
}

/// Has the viewer choose the only security type that there is.
async fn choose(stream: &mut impl Stream, minor: u8, only: u8) -> io::Result<()> {
    if minor > 3 {
        stream.write_all(&[1, only]).await?;
        return match stream.read_u8().await? {
            choice if choice == only => Ok(()),
            _ => Err(io::Error::other("the viewer chose another security type")),
        };
    }
    if only == VNC_AUTHENTICATION {
        return stream.write_u32(only.into()).await;
    }
    // In version 3.3 the server decides, and of two types alone (7.1.2).
    stream.write_u32(0).await?;
    reason(
        stream,
        "this node serves screens with TLS alone: a viewer with VeNCrypt is needed",
    )
    .await?;
    Err(io::Error::other("a viewer without VeNCrypt"))
}

/// Negotiates the protocol inside TLS: `X509_VNC` or `X509_PLAIN`.
async fn vencrypt(stream: &mut impl Stream) -> io::Result<u32> {
    stream.write_all(&VENCRYPT_VERSION).await?;
    let mut version = [0; 2];
    stream.read_exact(&mut version).await?;
    if version != VENCRYPT_VERSION {
        stream.write_u8(1).await?;
        return Err(io::Error::other("the viewer speaks another version of VeNCrypt"));
    }
    stream.write_all(&[0, 2]).await?;
    for way in [X509_VNC, X509_PLAIN] {
        stream.write_u32(way).await?;
    }
    let way = stream.read_u32().await?;
    let known = matches!(way, X509_VNC | X509_PLAIN);
    stream.write_u8(known.into()).await?;
    if known {
        Ok(way)
    } else {
        Err(io::Error::other("the viewer chose another way of VeNCrypt"))
    }
}

/// The ticket for a name, which may be any, and a password.
async fn plain(stream: &mut impl Stream, tickets: &Tickets) -> io::Result<Option<Ticket>> {
    let lengths = [stream.read_u32().await?, stream.read_u32().await?];
    if lengths.iter().any(|length| *length > MAX_PLAIN) {
        return Err(io::Error::other("the viewer has a very long name or password"));
    }
    let [mut name, mut shown] = lengths.map(|length| vec![0; length as usize]);
    stream.read_exact(&mut name).await?;
    stream.read_exact(&mut shown).await?;
    Ok(tickets.take(Form::Password, |password| password.as_bytes() == shown))
}

/// The ticket that matches a viewer's response to a challenge (7.2.2).
async fn challenge(stream: &mut impl Stream, tickets: &Tickets) -> io::Result<Option<Ticket>> {
    let challenge = Uuid::new_v4().into_bytes();
    stream.write_all(&challenge).await?;
    let mut response = [0; 16];
    stream.read_exact(&mut response).await?;
    Ok(found(tickets, &challenge, &response))
}

/// Why the viewer is refused (7.1.2, 7.1.3).
async fn reason(stream: &mut impl Stream, why: &str) -> io::Result<()> {
    stream.write_u32(u32::try_from(why.len()).unwrap_or(0)).await?;
    stream.write_all(why.as_bytes()).await
}

fn found(tickets: &Tickets, challenge: &[u8; 16], response: &[u8; 16]) -> Option<Ticket> {
    tickets.take(Form::Password, |password| {
        handshake::encrypt(password.as_bytes(), *challenge) == *response
    })
}

/// The beginning of the protocol with the `vmm`, which asks for no password.
pub(super) async fn greet(screen: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    let unexpected = || io::Error::other("the vmm does not speak RFB as expected");
    let mut version = [0; 12];
    screen.read_exact(&mut version).await?;
    screen.write_all(VERSION).await?;
    let count = screen.read_u8().await?;
    let mut types = vec![0; count.into()];
    screen.read_exact(&mut types).await?;
    if version != *VERSION || !types.contains(&NONE) {
        return Err(unexpected());
    }
    screen.write_u8(NONE).await?;
    if screen.read_u32().await? != 0 {
        return Err(unexpected());
    }
    Ok(())
}

//! Connections to a daemon: by its UNIX socket, or over TCP.

use std::{fmt, io, path::Path, sync::Arc};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    codegen::http::Uri,
    transport::{Channel, Endpoint},
};

use crate::{
    failure::{Code, Failure, Result},
    tls::{QUICK, Remote},
};

/// To the daemon that listens on `socket`.
pub async fn local(socket: &Path) -> Result<Channel> {
    let first = tokio::time::timeout(QUICK, UnixStream::connect(socket)).await;
    let first = first.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let mut first = Some(first.map_err(|error| unreachable(socket, &error))?);
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let (first, path) = (first.take(), path.clone());
        async move {
            let stream = match first {
                Some(stream) => stream,
                None => UnixStream::connect(path).await?,
            };
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    // The connector does not use the address.
    let endpoint = Endpoint::from_static("http://vmmd").connect_timeout(QUICK);
    let channel = endpoint.connect_with_connector(connector).await;
    channel.map_err(|error| no_vmmd(socket.display(), &error))
}

/// To the daemon of another node.
pub async fn over_tcp(remote: Remote) -> Result<Channel> {
    let config = remote.config()?;
    let mut first = Some(remote.open(Arc::clone(&config)).await?);
    let address = remote.address();
    let connector = tower::service_fn(move |_: Uri| {
        let (first, remote, config) = (first.take(), remote.clone(), Arc::clone(&config));
        async move {
            let stream = match first {
                Some(stream) => stream,
                None => {
                    let opened = remote.open(config).await;
                    opened.map_err(|failure| io::Error::other(failure.to_string()))?
                }
            };
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    let endpoint = Endpoint::from_static("http://vmmd").connect_timeout(QUICK);
    let channel = endpoint.connect_with_connector(connector).await;
    channel.map_err(|error| no_vmmd(address, &error))
}

fn no_vmmd(place: impl fmt::Display, error: &tonic::transport::Error) -> Failure {
    Failure::new(
        Code::Unavailable,
        format!("the server at {place} does not speak the protocol of vmmd: {error}"),
    )
}

fn unreachable(socket: &Path, error: &io::Error) -> Failure {
    let socket = socket.display();
    match error.kind() {
        io::ErrorKind::NotFound => Failure::new(
            Code::Unavailable,
            format!("vmmd is not running: there is no socket {socket}"),
        )
        .hint("start it with `systemctl start vmmd`, or select another socket with --socket"),
        io::ErrorKind::ConnectionRefused => Failure::new(
            Code::Unavailable,
            format!("vmmd is not running: no process listens on {socket}"),
        )
        .hint("start it with `systemctl start vmmd`; `journalctl -u vmmd` shows why it ended"),
        io::ErrorKind::PermissionDenied => {
            Failure::new(Code::Permission, format!("no permission to use {socket}")).hint(
                "run as root, or as a member of the group vmmd (`usermod -aG vmmd USER`, then log in again)",
            )
        }
        _ => Failure::new(Code::Unavailable, format!("cannot connect to {socket}: {error}"))
            .hint("check that this is the socket of vmmd; --socket selects another socket"),
    }
}

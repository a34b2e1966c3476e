//! Connections to programs of a guest by its socket device.
//!
//! The daemon gives the `vmm` one end of a pair of sockets. The first byte on the other end says that
//! the connection is established. The `vmm` gives up when the other end is closed.

use std::os::fd::OwnedFd;

use tokio::net::UnixStream;
use uuid::Uuid;
use vmm_protocol::vmm::{ErrorKind, OpenVsock, request::Op};
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};

use crate::host::Host;

/// Asks the `vmm` for a connection to `port` of the guest. With `accept`, the connection is the next one
/// of the guest to `port` of the host. The connection is not established yet.
pub async fn open_socket(host: &Host, vm: Uuid, port: u32, accept: bool) -> Result<UnixStream, Failure> {
    let failed = |error| Failure::internal(format!("make a pair of sockets: {error}"));
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    // It stays non-blocking, as the `vmm` needs it.
    let theirs = OwnedFd::from(theirs.into_std().map_err(failed)?);
    let op = Op::OpenVsock(OpenVsock {
        socket_fd: 0,
        port,
        accept,
    });
    let fds = [theirs];
    let opened = host.clients.ask(vm, op, &fds).await?;
    // The `vmm` has the only one.
    drop(fds);
    opened.map_err(|refused| {
        let message = text::brief(&refused.message);
        match refused.kind() {
            ErrorKind::State => Failure::precondition("NOT_RUNNING", message),
            ErrorKind::Resources => Failure::new(Kind::Exhausted, "TOO_MANY_CONNECTIONS", message),
            _ => {
                let message = "this run of the VM has no socket device: restart the VM";
                Failure::precondition("NO_VSOCK", message)
            }
        }
    })?;
    Ok(ours)
}

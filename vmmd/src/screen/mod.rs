//! Access to a VM's screen without the API's stream: VNC over TCP with a password, and a page with
//! a VNC client for browsers.
//!
//! | module | content |
//! |---|---|
//! | [`tickets`](crate::registry::screens) | secrets that are valid for one connection, and for a short time |
//! | [`vnc`] | viewers: RFB over TCP, with VNC authentication, or VeNCrypt |
//! | [`web`] | browsers: noVNC's files, and RFB over a WebSocket |
//! | [`tls`] | encryption of both |
//!
//! Both are off unless the configuration gives their addresses. They listen on this machine only
//! unless it has a certificate for them: without one there is no encryption. A client presents a
//! secret from the API. The `vmm` speaks RFB, and the daemon passes its bytes on unchanged.
//!
//! A connection is a handshake until it has presented a ticket. [`Handshakes`] bounds handshakes,
//! as for the API, so that strangers cannot lock out a client with a ticket. Then the connection
//! takes one of the [`Places`](crate::auth::Places) of the client that requested the ticket.

pub mod tls;
pub mod vnc;
pub mod web;

use std::{
    fs, io,
    net::SocketAddr,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::Context as _;
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    net::{TcpListener, TcpStream, UnixStream},
    time::sleep,
};
use vmmd_host::failure::{Failure, Kind};

use crate::{
    auth::{Handshakes, Place},
    host::Host,
    paths::RuntimeDir,
    registry::{screens::Ticket, vms::Entry},
};

/// After a failed accept, as when descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// After this silence the kernel probes the client, then each [`PROBE`], [`PROBES`] times. Without
/// a response the connection ends.
const SILENCE: Duration = Duration::from_secs(30);
/// See [`SILENCE`].
const PROBE: Duration = Duration::from_secs(10);
/// See [`SILENCE`].
const PROBES: u32 = 3;

/// In the runtime folder: the bound addresses.
const ADDRESS_FILES: [&str; 2] = ["vnc.addr", "web.addr"];

/// Starts the configured listeners, which run until the daemon ends.
pub async fn serve(host: &Arc<Host>) -> anyhow::Result<()> {
    let [viewers, browsers] = ADDRESS_FILES.map(|name| host.config.run_dir.join(name));
    let config = &host.config.screen;
    if config.is_encrypted() {
        // The daemon must start with unusable files too. An event reports them, and each connection
        // reads the files again.
        let _unusable = tls::certificate(host).await;
    }
    if let Some(listener) = listen(config.vnc, &host.screens.vnc, &viewers).await? {
        tokio::spawn(vnc::serve(listener, Arc::clone(host)));
    }
    if let Some(listener) = listen(config.web, &host.screens.web, &browsers).await? {
        tokio::spawn(web::serve(listener, Arc::clone(host)));
    }
    Ok(())
}

/// Binds an address. `file` has the bound address while the listener exists.
async fn listen(
    address: Option<SocketAddr>,
    bound: &OnceLock<SocketAddr>,
    file: &Path,
) -> anyhow::Result<Option<TcpListener>> {
    let Some(address) = address else {
        // The file of an earlier daemon.
        let _ = fs::remove_file(file);
        return Ok(None);
    };
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("listen on {address} for screens"))?;
    let address = listener.local_addr().context("ask for the bound address")?;
    fs::write(file, format!("{address}\n")).with_context(|| format!("write {}", file.display()))?;
    // There is one listener for each.
    let _again = bound.set(address);
    Ok(Some(listener))
}

/// An address of a listener as others reach it: by the node's name when it listens on all of its addresses.
pub fn reached(address: &SocketAddr) -> String {
    if !address.ip().is_unspecified() {
        return address.to_string();
    }
    let uname = rustix::system::uname();
    let name = uname.nodename().to_string_lossy();
    format!("{name}:{}", address.port())
}

/// Refuses a VM without a screen that could be looked at.
pub fn there(entry: &Entry) -> Result<(), Failure> {
    let vm = entry.state.borrow();
    let runs = vm.status.as_ref().is_some_and(|status| status.instance.is_some());
    let wants = vm.spec.as_ref().is_some_and(|spec| spec.display.is_some());
    drop(vm);
    if runs && wants {
        Ok(())
    } else {
        Err(no_screen(entry))
    }
}

/// Connects to a VM's screen.
pub async fn connect(host: &Host, entry: &Entry, view_only: bool) -> Result<UnixStream, Failure> {
    let runtime = RuntimeDir::of(&host.config, entry.uid);
    UnixStream::connect(runtime.vnc(view_only))
        .await
        .map_err(|_| no_screen(entry))
}

fn no_screen(entry: &Entry) -> Failure {
    let vm = entry.state.borrow();
    let runs = vm.status.as_ref().is_some_and(|status| status.instance.is_some());
    let wants = vm.spec.as_ref().is_some_and(|spec| spec.display.is_some());
    let (reason, message) = match (runs, wants) {
        (true, true) => ("NO_SCREEN", "this run of the VM has no screen: restart it"),
        (_, false) => (
            "NO_SCREEN",
            "the VM has no screen: give it a `display` and restart it",
        ),
        (false, true) => ("NOT_RUNNING", "the VM is not running: start it first"),
    };
    Failure::precondition(reason, message)
}

/// Takes a place and connects to the screen that a ticket is for, unless its VM is gone.
async fn enter(host: &Host, ticket: &Ticket, from: &str) -> Result<(UnixStream, Place), Failure> {
    let place = host.screens.places.take(&ticket.who).map_err(|full| {
        let message = format!("{full}: close another screen, and ask vmmd for another ticket");
        Failure::new(Kind::Exhausted, "TOO_MANY_SCREENS", message)
    })?;
    let entry = host
        .vms
        .find(ticket.vm)
        .ok_or_else(|| Failure::no_vm(&ticket.name))?;
    let stream = connect(host, &entry, ticket.view_only).await?;
    tracing::info!(
        vm = ticket.name,
        who = %ticket.who,
        from,
        view_only = ticket.view_only,
        "a screen was opened with a ticket"
    );
    Ok((stream, place))
}

/// Accepts connections until the daemon stops. `handshake` ends when a client has shown its ticket, or was refused.
async fn accept<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    host: Arc<Host>,
    handshake: impl Fn(TcpStream, String, Arc<Host>) -> F,
) {
    let mut handshakes = Handshakes::new(host.config.limits.handshakes);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = host.stopping.cancelled() => return,
        };
        match accepted {
            Ok((stream, from)) => {
                if let Err(error) = probe(&stream) {
                    tracing::warn!(%error, from = %from, "ask a client of a screen whether it is there");
                }
                handshakes.begin(from.ip(), handshake(stream, from.to_string(), Arc::clone(&host)));
            }
            Err(error) => {
                tracing::warn!(%error, "accept a connection to a screen");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Has the kernel find out when the client of a connection is gone without a word. Its place is free then.
fn probe(stream: &TcpStream) -> io::Result<()> {
    let probes = TcpKeepalive::new()
        .with_time(SILENCE)
        .with_interval(PROBE)
        .with_retries(PROBES);
    SockRef::from(stream).set_tcp_keepalive(&probes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_silent_client_that_is_gone_is_found_out_within_a_minute() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        probe(&stream).unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        let silence = socket.tcp_keepalive_time().unwrap();
        let probes = socket.tcp_keepalive_interval().unwrap() * socket.tcp_keepalive_retries().unwrap();
        assert!(silence + probes <= Duration::from_secs(60));
    }
}

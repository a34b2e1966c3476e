//! Ways to a VM's screen beside the API's stream: VNC over TCP with a password, and a page with a VNC client for browsers.
//!
//! | file | what |
//! |---|---|
//! | [`tickets`](crate::registry::screens) | secrets that are good for one connection, and for a short time |
//! | [`vnc`] | viewers: RFB over TCP, with VNC authentication, or VeNCrypt |
//! | [`web`] | browsers: noVNC's files, and RFB over a WebSocket |
//! | [`tls`] | what encrypts both |
//!
//! Both are off unless the configuration says where they listen, and listen on this machine only unless it has a certificate for them:
//! nothing is encrypted without. Who comes shows a secret that the API has made; the `vmm` speaks RFB, and its bytes are passed on as they are.

pub mod tls;
pub mod vnc;
pub mod web;

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::Context as _;

use tokio::{
    net::{TcpListener, TcpStream, UnixStream},
    sync::Semaphore,
    time::sleep,
};

use crate::{
    failure::Failure,
    host::Host,
    paths::RuntimeDir,
    registry::{screens::Ticket, vms::Entry},
};

/// Connections at once, of each listener; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 64;
/// After a failed accept, as when descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// In the runtime folder: the bound addresses.
const ADDRESS_FILES: [&str; 2] = ["vnc.addr", "web.addr"];

/// Serves what the configuration says, until the daemon ends.
pub async fn serve(host: &Arc<Host>) -> anyhow::Result<()> {
    let [viewers, browsers] = ADDRESS_FILES.map(|name| host.config.run_dir.join(name));
    let config = &host.config.screen;
    if config.is_encrypted() {
        let files = config.clone();
        // The daemon must start in any case, and each connection reads the files anew.
        if let Err(error) = tokio::task::spawn_blocking(move || tls::load(&files)).await? {
            tracing::error!(%error, "no screen can be opened until `certificate` and `key` in `[screen]` are right");
        }
    }
    if let Some(listener) = listen(config.vnc, &host.screens.vnc, &viewers).await? {
        tokio::spawn(vnc::serve(listener, Arc::clone(host)));
    }
    if let Some(listener) = listen(config.web, &host.screens.web, &browsers).await? {
        tokio::spawn(web::serve(listener, Arc::clone(host)));
    }
    Ok(())
}

/// Binds an address; what was bound is in `file`, as long as it is served.
async fn listen(
    address: Option<SocketAddr>,
    bound: &OnceLock<SocketAddr>,
    file: &Path,
) -> anyhow::Result<Option<TcpListener>> {
    let Some(address) = address else {
        // Of a daemon before, which need not have served it.
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

/// Connects to the screen that a ticket is for, unless its VM is gone.
async fn enter(host: &Host, ticket: &Ticket, from: &str) -> Result<UnixStream, Failure> {
    let entry = host
        .vms
        .find(ticket.vm)
        .ok_or_else(|| Failure::no_vm(&ticket.name))?;
    let stream = connect(host, &entry, ticket.view_only).await?;
    tracing::info!(
        vm = ticket.name,
        who = ticket.who,
        from,
        view_only = ticket.view_only,
        "a screen was opened with a ticket"
    );
    Ok(stream)
}

/// Accepts connections and has `serve` serve each in a task of its own. Never ends.
async fn accept<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    host: Arc<Host>,
    serve: impl Fn(TcpStream, String, Arc<Host>) -> F,
) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, from)) => {
                let serving = serve(stream, from.to_string(), Arc::clone(&host));
                let stopping = host.stopping.clone();
                tokio::spawn(async move {
                    tokio::select! {
                        () = serving => {}
                        () = stopping.cancelled() => {}
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accept a connection to a screen");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

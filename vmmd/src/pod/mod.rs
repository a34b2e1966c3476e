//! Pods of a cluster: their launchers (`vmmd-pod`) connect to a socket of this node and pass descriptors of the pod's network
//! namespace and volumes. A VM with `spec.pod` starts with these.
//!
//! ```text
//!  accept ──▶ peer: pid, cgroup ──▶ hello: files, names, descriptors ──▶ table (registry::pods)
//!                  │ no pod             │ out of bounds                     │
//!                  ▼                    ▼                                   ▼
//!                Ended                Ended                    relay: state, output ──▶ launcher
//!                                                                     stop, input   ◀──
//! ```
//!
//! A launcher is hostile: any process of a pod can connect. [`peer`] decides by the kernel's data which pod a process belongs to,
//! and [`hello`] bounds and checks all that the launcher sends. [`relay`] reads no more while the launcher reads nothing.

#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod hello;
mod output;
mod peer;
mod relay;
mod stream;

use std::{
    collections::HashMap,
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    net::UnixListener,
    time::{sleep, timeout},
};
use vmmd_host::socket;
use vmmd_pod::message::Ended;

use self::{hello::Greeted, peer::Peer, stream::Stream};
use crate::host::Host;

/// How long a launcher may take for its Hello.
const HELLO: Duration = Duration::from_secs(20);
/// Most connections of launchers.
const MAX_CONNECTIONS: usize = 1024;
/// Most connections of one pod: the present one, and one that replaces it.
const MAX_PER_POD: usize = 4;
/// Pause after a failed accept, as when descriptors have run out.
const PAUSE: Duration = Duration::from_millis(100);

/// Binds the socket for launchers. Each process may connect: a mount gives pods the way to the socket.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
        // The daemon's umask may have taken rights.
        fs::set_permissions(folder, Permissions::from_mode(0o755))?;
    }
    socket::bind(path, |path| {
        fs::set_permissions(path, Permissions::from_mode(0o666))
    })
}

/// Serves launchers. Never ends.
pub async fn serve(host: Arc<Host>, listener: UnixListener) {
    let places = Arc::new(Places::default());
    loop {
        let connection = match listener.accept().await {
            Ok((connection, _)) => connection,
            Err(error) => {
                tracing::warn!(%error, "accept a launcher");
                sleep(PAUSE).await;
                continue;
            }
        };
        let stream = Arc::new(Stream::new(connection));
        let admitted = Peer::of(&host, &stream).and_then(|peer| Ok((places.take(&peer)?, peer)));
        let host = Arc::clone(&host);
        tokio::spawn(async move {
            match admitted {
                Ok((place, peer)) => {
                    connect(&host, &stream, peer).await;
                    drop(place);
                }
                Err(problem) => refuse(&stream, problem).await,
            }
        });
    }
}

/// Serves a connection of a launcher to its end.
async fn connect(host: &Arc<Host>, stream: &Arc<Stream>, peer: Peer) {
    let pod = peer.uid.clone();
    match timeout(HELLO, hello::receive(host, stream, peer)).await {
        Ok(Ok(Some(greeted))) => {
            let Greeted {
                pod: claimed,
                position,
                reader,
            } = greeted;
            let result = match host.pods.insert(claimed) {
                Ok(connected) => relay::run(host, stream, connected, reader, position).await,
                Err(problem) => return refuse(stream, problem).await,
            };
            if let Err(error) = result {
                tracing::debug!(pod, %error, "the connection of a launcher has ended");
            }
        }
        Ok(Ok(None)) => {}
        Ok(Err(problem)) => refuse(stream, problem).await,
        Err(_) => refuse(stream, format!("no Hello within {} s", HELLO.as_secs())).await,
    }
}

/// Refuses a launcher, which ends.
async fn refuse(stream: &Stream, message: String) {
    tracing::warn!(message, "a launcher is refused");
    let ended = Ended {
        code: 1,
        reason: "PodRefused".to_owned(),
        message,
    };
    stream.end(ended).await;
}

/// Connections by pod.
#[derive(Debug, Default)]
struct Places(Mutex<HashMap<String, usize>>);

/// A connection's place, until it is dropped.
#[derive(Debug)]
struct Place {
    places: Arc<Places>,
    pod: String,
}

impl Places {
    /// Takes a place. The error says that there is none.
    fn take(self: &Arc<Self>, peer: &Peer) -> Result<Place, String> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = taken.get(&peer.uid).copied().unwrap_or(0);
        if own >= MAX_PER_POD || taken.values().sum::<usize>() >= MAX_CONNECTIONS {
            return Err("too many launchers are connected".to_owned());
        }
        taken.insert(peer.uid.clone(), own + 1);
        Ok(Place {
            places: Arc::clone(self),
            pod: peer.uid.clone(),
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.pod) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.pod);
            }
        }
    }
}

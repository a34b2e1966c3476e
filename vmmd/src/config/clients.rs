//! Clients: over TCP, and what each may take.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use serde::Deserialize;

/// The API over TCP, always with TLS and certificates on both sides. The files are PEM.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields)]
pub struct Tcp {
    /// Address and port. The file `tcp.addr` in `run_dir` contains the bound address, also when the
    /// port is 0.
    pub listen: SocketAddr,
    /// The server's certificate and what leads from it to its CA. Default `/etc/vmmd/tls/server.crt`.
    #[serde(default = "Tcp::default_certificate")]
    pub certificate: PathBuf,
    /// Its key. Default `/etc/vmmd/tls/server.key`.
    #[serde(default = "Tcp::default_key")]
    pub key: PathBuf,
    /// The CAs of clients' certificates. Default `/etc/vmmd/tls/ca.crt`.
    #[serde(default = "Tcp::default_client_ca")]
    pub client_ca: PathBuf,
    /// Lists of certificates that were revoked by these CAs (CRLs, RFC 5280). Default: none.
    #[serde(default)]
    pub revoked: Option<PathBuf>,
    /// This node's certificate for calls to the daemons of other nodes, with the role `peer`;
    /// migration uses it. A CA in `client_ca` must have issued the certificates of the other nodes.
    /// Default: none, migration from this node is not possible.
    #[serde(default)]
    pub peer_certificate: Option<PathBuf>,
    /// Its key. Default: none.
    #[serde(default)]
    pub peer_key: Option<PathBuf>,
}

impl Tcp {
    fn default_certificate() -> PathBuf {
        "/etc/vmmd/tls/server.crt".into()
    }

    fn default_key() -> PathBuf {
        "/etc/vmmd/tls/server.key".into()
    }

    fn default_client_ca() -> PathBuf {
        "/etc/vmmd/tls/ca.crt".into()
    }
}

/// Limits of clients, so that one client cannot exhaust the resources of the others. Each is at
/// least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Connections at once, of each listener. Screens that VNC viewers and browsers have open count together. Default 1024.
    pub connections: usize,
    /// Connections at once of one user id or of one certificate's name. Default 128.
    pub connections_per_client: usize,
    /// Streams at once, such as watches, consoles and screens. A stream of a client that does not read takes up to some 0.5 MiB of the
    /// daemon's memory. Default 2048.
    pub streams: usize,
    /// The same for one user id or one certificate's name. Default 512.
    pub streams_per_client: usize,
    /// Calls a second on one connection, and as many at once after a pause. Default 10,000.
    pub calls_per_second: u32,
    /// How long a client may take to send its request, in seconds; and a browser the headers of one. Default 10.
    pub request_seconds: u32,
    /// How long a TLS handshake may take, in seconds. Default 10.
    pub handshake_seconds: u32,
    /// Lifetime of a connection over TCP in seconds. After it, the connection takes no further
    /// calls. The client opens another one, and vmmd checks its certificate again. Calls in
    /// progress have a tenth of that time to end. Default 43,200 (12 hours).
    pub connection_seconds: u32,
    /// Handshakes at once, of each listener; one more ends the oldest of the address (of IPv6: the /64) that has most. A connection to a
    /// screen is one until it has shown its ticket. Default 64.
    pub handshakes: usize,
    /// How long the files that a request or a VM names may take to be found and opened, in seconds. Default 10.
    pub file_seconds: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            connections_per_client: 128,
            streams: 2048,
            streams_per_client: 512,
            calls_per_second: 10_000,
            request_seconds: 10,
            handshake_seconds: 10,
            connection_seconds: 43_200,
            handshakes: 64,
            file_seconds: 10,
        }
    }
}

impl Limits {
    /// How long a client may take to send its request.
    pub fn request(&self) -> Duration {
        Duration::from_secs(self.request_seconds.into())
    }

    /// How long a TLS handshake may take.
    pub fn handshake(&self) -> Duration {
        Duration::from_secs(self.handshake_seconds.into())
    }

    /// How long a connection over TCP may be.
    pub fn connection(&self) -> Duration {
        Duration::from_secs(self.connection_seconds.into())
    }

    /// How long files may take to be found and opened.
    pub fn files(&self) -> Duration {
        Duration::from_secs(self.file_seconds.into())
    }

    /// The key of one that is 0.
    pub fn zero(&self) -> Option<&'static str> {
        let all = [
            ("limits.connections", self.connections),
            ("limits.connections_per_client", self.connections_per_client),
            ("limits.streams", self.streams),
            ("limits.streams_per_client", self.streams_per_client),
            ("limits.calls_per_second", self.calls_per_second as usize),
            ("limits.request_seconds", self.request_seconds as usize),
            ("limits.handshake_seconds", self.handshake_seconds as usize),
            ("limits.connection_seconds", self.connection_seconds as usize),
            ("limits.handshakes", self.handshakes),
            ("limits.file_seconds", self.file_seconds as usize),
        ];
        Some(all.iter().find(|(_, value)| *value == 0)?.0)
    }
}

//! Takes connections over TCP. Handshakes are bounded in number ([`Handshakes`]) and time.

use std::{io, net::SocketAddr, sync::Arc};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use vmmd_host::text;
use vmmd_objects::context::Initiator;

use crate::{
    auth::{Bucket, Caller, Handshakes, Places},
    config::Limits,
    grpc::{ACCEPT_PAUSE, Connection},
    tls::{ALPN, Certificates, identify},
};

/// Lines a second about handshakes that fail: guests may reach the port.
const LINES_PER_SECOND: u32 = 5;

type Incoming = Connection<TlsStream<TcpStream>>;

/// The bound port.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    certificates: Arc<Certificates>,
}

/// State that all handshakes share.
struct Gate {
    certificates: Arc<Certificates>,
    limits: Limits,
    places: Arc<Places>,
    lines: Bucket,
    sender: mpsc::Sender<io::Result<Incoming>>,
}

impl Listener {
    /// Binds `address`. New connections use the `certificates` of then.
    pub async fn bind(address: SocketAddr, certificates: Arc<Certificates>) -> io::Result<Self> {
        let tcp = TcpListener::bind(address).await?;
        Ok(Self { tcp, certificates })
    }

    /// What was bound.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Accepts connections for as long as the server takes them. No error of one ends the others.
    pub async fn accept(self, limits: Limits, sender: mpsc::Sender<io::Result<Incoming>>) {
        let gate = Arc::new(Gate {
            certificates: self.certificates,
            limits,
            places: Places::new(limits.connections, limits.connections_per_client),
            lines: Bucket::new(LINES_PER_SECOND),
            sender,
        });
        let mut handshakes = Handshakes::new(limits.handshakes);
        loop {
            let (stream, address) = tokio::select! {
                accepted = self.tcp.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "accept a connection over TCP");
                        sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
                () = gate.sender.closed() => return,
            };
            let gate = Arc::clone(&gate);
            handshakes.begin(address.ip(), async move { gate.pass(stream, address).await });
        }
    }
}

impl Gate {
    async fn pass(&self, stream: TcpStream, address: SocketAddr) {
        match self.handshake(stream, address).await {
            Ok(connection) => {
                // Fails when the daemon ends.
                let _ = self.sender.send(Ok(connection)).await;
            }
            Err(refused) if self.lines.take() => {
                tracing::info!(target: "audit", peer = %address, "connection refused: {refused}");
            }
            Err(_) => {}
        }
    }

    async fn handshake(&self, stream: TcpStream, address: SocketAddr) -> Result<Incoming, String> {
        let config = self.certificates.current();
        let config = config.ok_or("there is no certificate for the server yet")?;
        let _ = stream.set_nodelay(true);
        let accepted = timeout(self.limits.handshake(), TlsAcceptor::from(config).accept(stream)).await;
        let stream = accepted
            .map_err(|_| "the TLS handshake took too long".to_owned())?
            .map_err(|error| text::brief_line(&error.to_string()))?;
        let (_, session) = stream.get_ref();
        if session.alpn_protocol() != Some(ALPN) {
            return Err("the client does not ask for HTTP/2".into());
        }
        let chain = session.peer_certificates().unwrap_or_default();
        let peer = self.certificates.admit(chain);
        let peer = peer.ok_or("the client's certificate was revoked meanwhile")?;
        let certificate = chain.first();
        let identity = certificate.and_then(identify);
        let (name, role) = identity.ok_or("the client has no certificate that can be read")?;
        let initiator = Initiator::Certificate(name);
        let place = self.places.take(&initiator);
        let place = place.map_err(|full| format!("{initiator}: {full}"))?;
        let caller = Caller {
            initiator,
            role,
            address: address.to_string(),
            bucket: Bucket::new(self.limits.calls_per_second),
        };
        let connection = Connection::new(stream, caller, place, self.limits.request());
        Ok(connection.until_gone(peer))
    }
}

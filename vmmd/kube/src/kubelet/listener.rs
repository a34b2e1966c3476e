//! TLS with certificates on both sides. The agent creates its own self-signed certificate at its
//! start. An API server that verifies it by a CA does not accept it yet; an API server without
//! `--kubelet-certificate-authority` does not verify it.

use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::Context as _;
use axum::{extract::connect_info::Connected, serve::IncomingStream};
use rustix::net::sockopt;
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// After how long a silence the other side is asked whether it is still there: a session of `kubectl attach` may be silent for hours.
const ASK: Duration = Duration::from_secs(60);
/// Handshakes that are done and not served yet.
const READY: usize = 16;
/// Limit on simultaneous handshakes, as any client can begin one. Later clients wait to be
/// accepted.
const HANDSHAKES: usize = 32;
/// Connections at the same time. The unit has a limit of descriptors that is higher.
const CONNECTIONS: usize = 512;

/// Caller, by the subject of its certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The common name.
    pub user: String,
    /// Its organizations.
    pub groups: Vec<String>,
}

/// A connection, with its place within the limit.
pub struct Connection {
    stream: TlsStream<TcpStream>,
    _place: OwnedSemaphorePermit,
}

/// Connections whose handshake is done.
pub struct Listener {
    ready: mpsc::Receiver<(Connection, Peer)>,
    address: SocketAddr,
}

impl Listener {
    /// Listens on this address, for clients with a certificate of a CA in `client_ca`. `names` are
    /// the addresses and names in the agent's own certificate.
    ///
    /// # Errors
    ///
    /// Fails for an unusable address or file.
    pub async fn bind(address: SocketAddr, client_ca: &Path, names: &[String]) -> anyhow::Result<Self> {
        let acceptor = TlsAcceptor::from(Arc::new(config(client_ca, names)?));
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let (send, ready) = mpsc::channel(READY);
        tokio::spawn(accept(listener, acceptor, send));
        Ok(Self { ready, address })
    }
}

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, send: mpsc::Sender<(Connection, Peer)>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let place = Arc::clone(&connections).acquire_owned().await;
        let handshake = Arc::clone(&handshakes).acquire_owned().await;
        // Nobody closes them.
        let (Ok(place), Ok(handshake)) = (place, handshake) else {
            return;
        };
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors: others end.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        // Without it, one that has gone is noticed later.
        let _ = sockopt::set_socket_keepalive(&stream, true);
        let _ = sockopt::set_tcp_keepidle(&stream, ASK);
        let (acceptor, send) = (acceptor.clone(), send.clone());
        tokio::spawn(async move {
            let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await else {
                return;
            };
            drop(handshake);
            let certificates = stream.get_ref().1.peer_certificates();
            let peer = certificates
                .and_then(|all| all.first())
                .and_then(|first| peer(first));
            if let Some(peer) = peer {
                let connection = Connection {
                    stream,
                    _place: place,
                };
                let _ = send.send((connection, peer)).await;
            }
        });
    }
}

fn config(client_ca: &Path, names: &[String]) -> anyhow::Result<ServerConfig> {
    let mut roots = RootCertStore::empty();
    let file = client_ca.display();
    for certificate in CertificateDer::pem_file_iter(client_ca).with_context(|| format!("read {file}"))? {
        roots.add(certificate?)?;
    }
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots))
        .build()
        .with_context(|| format!("{file} holds no CA"))?;
    let own = rcgen::generate_simple_self_signed(names.to_vec())?;
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(own.signing_key.serialize_der()));
    Ok(ServerConfig::builder()
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![own.cert.der().clone()], key)?)
}

/// Returns the peer; `None` when the certificate names no user.
fn peer(certificate: &CertificateDer<'_>) -> Option<Peer> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let subject = certificate.subject();
    let user = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
    let groups = subject.iter_organization().filter_map(|one| one.as_str().ok());
    Some(Peer {
        user,
        groups: groups.map(str::to_owned).collect(),
    })
}

impl axum::serve::Listener for Listener {
    type Io = Connection;
    type Addr = Peer;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(accepted) => accepted,
            // The other end is never dropped.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(Peer {
            user: self.address.to_string(),
            groups: Vec::new(),
        })
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Connected<IncomingStream<'_, Listener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Listener>) -> Self {
        stream.remote_addr().clone()
    }
}

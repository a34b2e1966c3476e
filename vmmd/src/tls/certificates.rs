//! The server's certificate, its key, and the CAs of clients.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock, Weak},
};

use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
    version::{TLS12, TLS13},
};
use tokio_util::sync::CancellationToken;
use vmmd_host::text;

use super::valid_until;
use crate::config::Tcp;

/// HTTP/2 in the ALPN (RFC 9113, 3.2).
pub const ALPN: &[u8] = b"h2";

/// Error in the files. It has the key of the configuration; the path is in the log only.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is unreadable.
    #[error("`{0}` can't be read: {words}", words = text::words(.1))]
    Read(&'static str, io::Error),
    /// The file is not PEM, or lacks the required content.
    #[error("`{0}` {1}")]
    Content(&'static str, String),
    /// They don't go together.
    #[error("the certificate can't be used with its key: {0}")]
    Pair(String),
}

/// Content of the configured files.
#[derive(PartialEq, Eq)]
struct Files {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_ca: Vec<u8>,
    revoked: Option<Vec<u8>>,
}

impl Files {
    fn read(tcp: &Tcp) -> Result<Self, Error> {
        let read = |key, path: &Path| fs::read(path).map_err(|error| Error::Read(key, error));
        Ok(Self {
            certificate: read("certificate", &tcp.certificate)?,
            key: read("key", &tcp.key)?,
            client_ca: read("client_ca", &tcp.client_ca)?,
            revoked: tcp
                .revoked
                .as_ref()
                .map(|path| read("revoked", path))
                .transpose()?,
        })
    }
}

/// TLS configuration and verifier from the files.
#[derive(Clone)]
struct Loaded {
    config: Arc<ServerConfig>,
    verifier: Arc<dyn ClientCertVerifier>,
    /// See [`Certificates::ends`].
    ends: Vec<(&'static str, i64)>,
}

/// The other end of a connection: it is to end when its certificate is not good any more.
#[derive(Debug)]
pub struct Peer {
    chain: Vec<CertificateDer<'static>>,
    gone: CancellationToken,
}

impl Peer {
    /// Is cancelled when the connection is to end.
    pub fn gone(&self) -> &CancellationToken {
        &self.gone
    }

    fn is_good(&self, verifier: &dyn ClientCertVerifier) -> bool {
        let Some((own, others)) = self.chain.split_first() else {
            return false;
        };
        verifier.verify_client_cert(own, others, UnixTime::now()).is_ok()
    }
}

/// What connections use.
pub struct Certificates {
    tcp: Tcp,
    current: RwLock<Option<Loaded>>,
    /// Who is connected.
    peers: Mutex<Vec<Weak<Peer>>>,
    /// Files of the last attempt.
    last: Mutex<Option<Files>>,
}

impl std::fmt::Debug for Certificates {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Certificates")
            .field("tcp", &self.tcp)
            .finish_non_exhaustive()
    }
}

impl Certificates {
    /// None yet: no connection can be made.
    pub fn new(tcp: Tcp) -> Self {
        Self {
            tcp,
            current: RwLock::new(None),
            peers: Mutex::default(),
            last: Mutex::new(None),
        }
    }

    /// Reads the files. Returns false when they are unchanged. With unusable files the present
    /// configuration stays in use. Blocking.
    pub fn reload(&self) -> Result<bool, Error> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let files = match Files::read(&self.tcp) {
            Ok(files) => files,
            Err(error) => {
                *last = None;
                return Err(error);
            }
        };
        if last.as_ref() == Some(&files) {
            return Ok(false);
        }
        let loaded = load(&files);
        *last = Some(files);
        let loaded = loaded?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(loaded.clone());
        self.check_peers(loaded.verifier.as_ref());
        Ok(true)
    }

    /// For a new connection.
    pub fn current(&self) -> Option<Arc<ServerConfig>> {
        Some(self.loaded()?.config)
    }

    /// Registers a new connection, with the certificates that the handshake has verified. `None`
    /// when they have become invalid meanwhile.
    pub fn admit(&self, chain: &[CertificateDer<'_>]) -> Option<Arc<Peer>> {
        let peer = Arc::new(Peer {
            chain: chain
                .iter()
                .map(|certificate| certificate.clone().into_owned())
                .collect(),
            gone: CancellationToken::new(),
        });
        // Noted before it is checked: a reload in between finds it.
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.retain(|peer| peer.strong_count() > 0);
        peers.push(Arc::downgrade(&peer));
        drop(peers);
        let good = peer.is_good(self.loaded()?.verifier.as_ref());
        good.then_some(peer)
    }

    fn check_peers(&self, verifier: &dyn ClientCertVerifier) {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let bad = peers
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|peer| !peer.is_good(verifier));
        bad.for_each(|peer| peer.gone.cancel());
    }

    fn loaded(&self) -> Option<Loaded> {
        self.current
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The ends of the certificates in use, in seconds of Unix time, by the key of the configuration. A file with several certificates has the
    /// earliest end.
    pub fn ends(&self) -> Vec<(&'static str, i64)> {
        self.loaded().map(|loaded| loaded.ends).unwrap_or_default()
    }

    /// Where the files are.
    pub fn files(&self) -> Vec<&Path> {
        let always = [&self.tcp.certificate, &self.tcp.key, &self.tcp.client_ca];
        always
            .into_iter()
            .chain(&self.tcp.revoked)
            .map(PathBuf::as_path)
            .collect()
    }
}

fn load(files: &Files) -> Result<Loaded, Error> {
    let chain = certificates("certificate", &files.certificate)?;
    let key = PrivateKeyDer::from_pem_slice(&files.key)
        .map_err(|error| Error::Content("key", format!("has no private key: {error}")))?;
    let authorities = certificates("client_ca", &files.client_ca)?;
    let ends = [("certificate", &chain), ("client_ca", &authorities)];
    let ends = ends.map(|(key, all)| Some((key, all.iter().filter_map(valid_until).min()?)));
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots
            .add(authority)
            .map_err(|error| Error::Content("client_ca", format!("has a wrong certificate: {error}")))?;
    }
    let provider = Arc::new(ring::default_provider());
    let revoked: Result<Vec<_>, _> = files
        .revoked
        .iter()
        .flat_map(|pem| CertificateRevocationListDer::pem_slice_iter(pem))
        .collect();
    let revoked = revoked.map_err(|error| Error::Content("revoked", format!("is no PEM file: {error}")))?;
    if files.revoked.is_some() && revoked.is_empty() {
        return Err(Error::Content("revoked", "has no list".into()));
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
        .with_crls(revoked)
        .only_check_end_entity_revocation()
        // A CA without a list has revoked nothing.
        .allow_unknown_revocation_status()
        .build()
        .map_err(|error| Error::Content("client_ca", error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13, &TLS12])
        .map_err(|error| Error::Pair(error.to_string()))?
        .with_client_cert_verifier(Arc::clone(&verifier))
        .with_single_cert(chain, key)
        .map_err(|error| Error::Pair(error.to_string()))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    // A resumed session would not have its certificate verified again.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Loaded {
        config: Arc::new(config),
        verifier,
        ends: ends.into_iter().flatten().collect(),
    })
}

/// At least one.
fn certificates(key: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let read = read.map_err(|error| Error::Content(key, format!("is no PEM file: {error}")))?;
    if read.is_empty() {
        return Err(Error::Content(key, "has no certificate".into()));
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertifiedKey, generate_simple_self_signed};

    use super::*;

    fn pair() -> (String, String) {
        let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["node".to_owned()]).unwrap();
        (cert.pem(), signing_key.serialize_pem())
    }

    #[test]
    fn broken_files_are_said_and_leave_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| -> PathBuf { folder.path().join(name) };
        let certificates = Certificates::new(Tcp {
            listen: "127.0.0.1:0".parse().unwrap(),
            certificate: path("crt"),
            key: path("key"),
            client_ca: path("ca"),
            revoked: None,
            peer_certificate: None,
            peer_key: None,
        });
        let refused = |what: &str| {
            let error = certificates.reload().unwrap_err().to_string();
            assert!(error.contains(what) && !error.contains("/tmp"), "{error}");
        };
        refused("`certificate` can't be read: no such file");
        assert!(certificates.current().is_none());
        let ((certificate, key), (other, other_key)) = (pair(), pair());
        for (name, text) in [("crt", &certificate), ("key", &key), ("ca", &other)] {
            fs::write(path(name), text).unwrap();
        }
        assert!(certificates.reload().unwrap());
        assert!(!certificates.reload().unwrap(), "nothing has changed");
        // The default of rcgen is the first day of the year 4096.
        assert_eq!(
            certificates.ends(),
            [("certificate", 67_090_118_400), ("client_ca", 67_090_118_400)]
        );
        let first = certificates.current().unwrap();
        for (name, text, what) in [
            ("key", other_key.as_str(), "can't be used with its key"),
            ("key", "garbage", "`key` has no private key"),
            ("key", &key, ""),
            ("ca", "", "`client_ca` has no certificate"),
            ("ca", "-----BEGIN CERTIFICATE-----\n!\n", "`client_ca`"),
        ] {
            fs::write(path(name), text).unwrap();
            if what.is_empty() {
                assert!(certificates.reload().unwrap(), "what is right again is used");
            } else {
                refused(what);
            }
        }
        let kept = certificates.current().unwrap();
        assert!(!Arc::ptr_eq(&kept, &first));
        assert_eq!(kept.alpn_protocols, [ALPN]);
    }
}

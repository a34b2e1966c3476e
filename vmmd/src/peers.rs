//! Connections to the daemons of other nodes: TLS with certificates on both sides.

use std::{
    fs, io,
    path::Path,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use hyper_util::rt::TokioIo;
use ring::aead::{AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use rustls::{
    CipherSuite, ClientConfig, RootCertStore,
    crypto::{CryptoProvider, ring as ciphers},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    version::TLS13,
};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};
use vmmd_api::v1::peer_service_client::PeerServiceClient;
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};

use crate::{
    auth::Role,
    config::Tcp,
    tls::{ALPN, identify, is_for_servers, valid_until},
};

/// How long a connection may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval of keepalive checks of the other node, and the time for its response. Without these
/// checks a broken connection stays unnoticed for minutes.
const ALIVE_EVERY: Duration = Duration::from_secs(10);
const ALIVE_WITHIN: Duration = Duration::from_secs(20);

/// How other daemons are reached.
#[derive(Debug)]
pub struct Peers {
    tcp: Option<Tcp>,
}

impl Peers {
    /// With the certificates that the configuration names.
    pub fn new(tcp: Option<Tcp>) -> Self {
        Self { tcp }
    }

    /// Connects to the daemon at `HOST:PORT`. Each call reads the certificates again.
    pub async fn connect(&self, address: &str) -> Result<PeerServiceClient<Channel>, Failure> {
        let (host, _) = address.rsplit_once(':').unwrap_or((address, ""));
        let host = host.trim_matches(['[', ']']).to_owned();
        let name = ServerName::try_from(host)
            .map_err(|_| Failure::field("target", "must be HOST:PORT, as in node-2.example:7443"))?;
        let tls = TlsConnector::from(self.config()?);
        let to = address.to_owned();
        let connector = tower::service_fn(move |_: Uri| {
            let (tls, name, to) = (tls.clone(), name.clone(), to.clone());
            async move {
                let stream = TcpStream::connect(to).await?;
                stream.set_nodelay(true)?;
                let stream = tls.connect(name, stream).await?;
                let chain = stream.get_ref().1.peer_certificates();
                refuse_client(chain.and_then(<[_]>::first))?;
                Ok::<_, io::Error>(TokioIo::new(stream))
            }
        });
        let endpoint = Endpoint::from_static("http://vmmd")
            .connect_timeout(PATIENCE)
            .http2_keep_alive_interval(ALIVE_EVERY)
            .keep_alive_timeout(ALIVE_WITHIN);
        let connecting = timeout(PATIENCE, endpoint.connect_with_connector(connector)).await;
        let why = match connecting {
            Ok(Ok(channel)) => return Ok(PeerServiceClient::new(channel)),
            Ok(Err(error)) => text::chain(&error),
            Err(_) => "no answer in time".to_owned(),
        };
        let message = format!("the daemon at {} can't be reached: {why}", text::brief(address));
        Err(Failure::new(Kind::Unavailable, "PEER_UNREACHABLE", message))
    }

    /// Whether this node takes part in migrations: refused when it has no certificate for that.
    pub fn takes_part(&self) -> Result<(), Failure> {
        self.credentials().map(drop)
    }

    /// When this node's certificate for other nodes ends, in seconds of Unix time. Blocking.
    pub fn ends(&self) -> Option<i64> {
        let (certificate, ..) = self.credentials().ok()?;
        let chain = certificates("peer_certificate", certificate).ok()?;
        chain.iter().filter_map(valid_until).min()
    }

    fn credentials(&self) -> Result<(&Path, &Path, &Path), Failure> {
        let credentials = self.tcp.as_ref().and_then(|tcp| {
            let (certificate, key) = (tcp.peer_certificate.as_ref()?, tcp.peer_key.as_ref()?);
            Some((certificate.as_path(), key.as_path(), tcp.client_ca.as_path()))
        });
        credentials.ok_or_else(|| {
            let message = "this node has no certificate for other nodes: set `peer_certificate` and `peer_key` in `[tcp]` of config.toml";
            Failure::precondition("PEERS_NOT_CONFIGURED", message)
        })
    }

    fn config(&self) -> Result<Arc<ClientConfig>, Failure> {
        let (certificate, key, ca) = self.credentials()?;
        let mut roots = RootCertStore::empty();
        for authority in certificates("client_ca", ca)? {
            roots
                .add(authority)
                .map_err(|error| unusable("client_ca", &error.to_string()))?;
        }
        let chain = certificates("peer_certificate", certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&read("peer_key", key)?)
            .map_err(|_| unusable("peer_key", "it has no private key"))?;
        let config = ClientConfig::builder_with_provider(Arc::new(provider()))
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| Failure::internal(error.to_string()))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key);
        let mut config = config.map_err(|error| unusable("peer_certificate", &error.to_string()))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(Arc::new(config))
    }
}

/// Cipher suites. All memory of a VM is encrypted, so ChaCha20 comes first where it is much faster
/// than AES: on a processor without AES instructions, or an emulated one. The other daemon accepts
/// the first suite.
fn provider() -> CryptoProvider {
    static CHACHA_FIRST: OnceLock<bool> = OnceLock::new();
    let first = *CHACHA_FIRST.get_or_init(|| {
        let [aes, chacha] = [&AES_256_GCM, &CHACHA20_POLY1305].map(time_of_a_record);
        prefers_chacha(aes, chacha)
    });
    let mut provider = ciphers::default_provider();
    if first {
        let is_chacha = |suite: CipherSuite| suite == CipherSuite::TLS13_CHACHA20_POLY1305_SHA256;
        provider.cipher_suites.sort_by_key(|it| !is_chacha(it.suite()));
    }
    provider
}

fn prefers_chacha(aes: Duration, chacha: Duration) -> bool {
    chacha.saturating_mul(3) <= aes.saturating_mul(2)
}

/// How long it takes to encrypt and decrypt 16 KiB, which is the longest record of TLS: the shortest of three times.
fn time_of_a_record(algorithm: &'static Algorithm) -> Duration {
    let times = (0..3).filter_map(|_| {
        let key = UnboundKey::new(algorithm, &[0; 32]).map(LessSafeKey::new).ok()?;
        let nonce = || Nonce::assume_unique_for_key([0; 12]);
        let mut record = vec![0; 16 << 10];
        let began = Instant::now();
        key.seal_in_place_append_tag(nonce(), Aad::empty(), &mut record)
            .ok()?;
        key.open_in_place(nonce(), Aad::empty(), &mut record).ok()?;
        Some(began.elapsed())
    });
    times.min().unwrap_or(Duration::MAX)
}

/// Refuses a server whose certificate was made for a client: it may have the node's name too, and be usable for a server. So a certificate has the
/// role `peer`, or no role and the extended key usage for servers, which TLS does not demand.
fn refuse_client(certificate: Option<&CertificateDer<'_>>) -> io::Result<()> {
    let identified = certificate.and_then(|certificate| Some((identify(certificate)?, certificate)));
    let message = match identified {
        Some(((_, Some(Role::Peer)), _)) => return Ok(()),
        Some(((_, None), certificate)) if is_for_servers(certificate) => return Ok(()),
        Some(((name, None), _)) => format!(
            "its certificate, \"{name}\", may be that of a client: give it one with the extended key usage serverAuth, or with the role peer"
        ),
        Some(((name, Some(role)), _)) => format!(
            "it has the certificate of a client, \"{name}\" with the role {role}: give it one of a server"
        ),
        None => "its certificate can't be read".to_owned(),
    };
    Err(io::Error::other(message))
}

fn read(key: &str, path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|error| unusable(key, &text::words(&error)))
}

fn certificates(key: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let pem = read(key, path)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match read {
        Ok(read) if !read.is_empty() => Ok(read),
        _ => Err(unusable(key, "it has no certificate in PEM")),
    }
}

fn unusable(key: &str, why: &str) -> Failure {
    let message = format!("the file of `{key}` in `[tcp]` of config.toml can't be used: {why}");
    Failure::precondition("PEERS_NOT_CONFIGURED", message)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, KeyPair, SanType};

    use super::*;

    #[test]
    fn server_with_a_clients_certificate_is_refused() {
        use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        for (uri, usages, is_refused) in [
            ("spiffe://node", vec![ServerAuth], false),
            ("spiffe://node", vec![ClientAuth, ServerAuth], false),
            ("spiffe://node", vec![], true),
            ("spiffe://node", vec![ClientAuth], true),
            ("vmmd://role/peer", vec![], false),
            ("vmmd://role/viewer", vec![ServerAuth], true),
            ("vmmd://role/operator", vec![], true),
            ("vmmd://role/admin", vec![], true),
            ("vmmd://role/agent", vec![], true),
        ] {
            let mut params = CertificateParams::new(vec!["node".to_owned()]).unwrap();
            params
                .subject_alt_names
                .push(SanType::URI(uri.try_into().unwrap()));
            params.extended_key_usages.clone_from(&usages);
            let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
            assert_eq!(
                refuse_client(Some(certificate.der())).is_err(),
                is_refused,
                "{uri} {usages:?}"
            );
        }
        assert!(refuse_client(None).is_err());
    }

    #[test]
    fn chacha_is_asked_for_first_where_aes_takes_half_as_long_again() {
        let micros = Duration::from_micros;
        for (aes, chacha, wanted) in [
            (4, 9, false),
            (9, 9, false),
            (13, 9, false),
            (14, 9, true),
            (900, 90, true),
        ] {
            assert_eq!(
                prefers_chacha(micros(aes), micros(chacha)),
                wanted,
                "{aes} {chacha}"
            );
        }
        assert!(!prefers_chacha(micros(4), Duration::MAX));
    }

    #[test]
    fn every_cipher_is_asked_for_and_each_can_be_timed() {
        let asked: Vec<_> = provider().cipher_suites.iter().map(|it| it.suite()).collect();
        let all = ciphers::ALL_CIPHER_SUITES;
        assert_eq!(asked.len(), all.len());
        assert!(all.iter().all(|suite| asked.contains(&suite.suite())));
        for algorithm in [&AES_256_GCM, &CHACHA20_POLY1305] {
            let time = time_of_a_record(algorithm);
            assert!(time > Duration::ZERO && time < Duration::from_secs(1), "{time:?}");
        }
    }
}

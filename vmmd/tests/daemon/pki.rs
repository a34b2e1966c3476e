//! A CA, certificates, and clients that have them.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hyper_util::rt::TokioIo;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType, date_time_ymd,
};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::transport::{Channel, Endpoint, Uri};

use crate::harness::{Daemon, temporary_folder};

static NEXT_SERIAL: AtomicU64 = AtomicU64::new(1000);

/// A CA.
pub struct Pki {
    authority: Issuer<'static, KeyPair>,
    pub certificate: rcgen::Certificate,
}

/// A certificate with its key.
pub struct Leaf {
    certificate: rcgen::Certificate,
    key: KeyPair,
    serial: rcgen::SerialNumber,
}

impl Leaf {
    pub fn certificate_pem(&self) -> String {
        self.certificate.pem()
    }

    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

impl Pki {
    pub fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = named(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).unwrap();
        Self {
            authority: Issuer::new(params, key),
            certificate,
        }
    }

    pub fn server(&self, name: &str) -> Leaf {
        let params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        self.issue(name, params, ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// Certificate of a client with these URIs.
    pub fn client(&self, name: &str, uris: &[&str]) -> Leaf {
        self.issue(name, client_params(uris), ExtendedKeyUsagePurpose::ClientAuth)
    }

    pub fn role(&self, name: &str, role: &str) -> Leaf {
        self.client(name, &[&format!("vmmd://role/{role}")])
    }

    /// An admin's that was valid until a minute ago.
    pub fn expired(&self) -> Leaf {
        let mut params = client_params(&["vmmd://role/admin"]);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        params.not_after = date_time_ymd(1970, 1, 1) + (now - Duration::from_secs(60));
        self.issue("expired", params, ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// An admin's that is for servers only.
    pub fn for_servers(&self) -> Leaf {
        self.issue(
            "server",
            client_params(&["vmmd://role/admin"]),
            ExtendedKeyUsagePurpose::ServerAuth,
        )
    }

    fn issue(&self, name: &str, mut params: CertificateParams, purpose: ExtendedKeyUsagePurpose) -> Leaf {
        params.distinguished_name = named(name);
        params.extended_key_usages = vec![purpose];
        let serial: rcgen::SerialNumber = NEXT_SERIAL.fetch_add(1, Ordering::Relaxed).into();
        params.serial_number = Some(serial.clone());
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        Leaf {
            certificate,
            key,
            serial,
        }
    }

    /// A list of revoked certificates of this CA.
    pub fn revoke(&self, leaves: &[&Leaf]) -> String {
        let now = rcgen::date_time_ymd(2020, 1, 1);
        let revoked = leaves.iter().map(|leaf| rcgen::RevokedCertParams {
            serial_number: leaf.serial.clone(),
            revocation_time: now,
            reason_code: None,
            invalidity_date: None,
        });
        let params = rcgen::CertificateRevocationListParams {
            this_update: now,
            next_update: rcgen::date_time_ymd(2120, 1, 1),
            crl_number: 1_u64.into(),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        params.signed_by(&self.authority).unwrap().pem().unwrap()
    }

    /// A new `server.crt`, `server.key` and `ca.crt` in `dir`, each by a rename.
    pub fn install(&self, dir: &Path, server: &Leaf) {
        fs::create_dir_all(dir).unwrap();
        for (name, text) in [
            ("server.crt", server.certificate.pem()),
            ("server.key", server.key.serialize_pem()),
            ("ca.crt", self.certificate.pem()),
        ] {
            replace(&dir.join(name), &text);
        }
    }

    /// TLS of a client that trusts this CA and has the certificate, if any.
    pub fn tls(&self, leaf: Option<&Leaf>) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.der().clone()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match leaf {
            None => builder.with_no_client_auth(),
            Some(leaf) => {
                let chain = vec![CertificateDer::from(leaf.certificate.der().to_vec())];
                let key = PrivatePkcs8KeyDer::from(leaf.key.serialize_der());
                builder
                    .with_client_auth_cert(chain, PrivateKeyDer::from(key))
                    .unwrap()
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        config
    }

    /// A client of the daemon, which connects when it is used.
    pub fn channel(&self, daemon: &Daemon, leaf: Option<&Leaf>) -> Channel {
        lazy(address(daemon), self.tls(leaf))
    }
}

/// A client that connects when it is used.
pub fn lazy(address: String, config: ClientConfig) -> Channel {
    counting(address, config, &Arc::default())
}

/// The same; counts its connections.
pub fn counting(address: String, config: ClientConfig, connections: &Arc<AtomicU32>) -> Channel {
    let (config, connections) = (Arc::new(config), Arc::clone(connections));
    let connector = tower::service_fn(move |_: Uri| {
        let (address, config) = (address.clone(), Arc::clone(&config));
        connections.fetch_add(1, Ordering::Relaxed);
        async move { open(&address, config).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://vmmd").connect_with_connector_lazy(connector)
}

fn client_params(uris: &[&str]) -> CertificateParams {
    let mut params = CertificateParams::default();
    let uris = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap()));
    params.subject_alt_names = uris.collect();
    params
}

pub fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

/// A TLS connection.
pub async fn open(address: &str, config: Arc<ClientConfig>) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    TlsConnector::from(config).connect(name, stream).await
}

/// Where the daemon listens.
pub fn address(daemon: &Daemon) -> String {
    let text = fs::read_to_string(daemon.path("run/tcp.addr")).unwrap();
    text.trim().to_owned()
}

/// A daemon with certificates of this CA, and more configuration before its table `tcp`.
pub async fn serve(pki: &Pki, extra: &str) -> Daemon {
    let folder = temporary_folder();
    pki.install(&folder.path().join("tls"), &pki.server("node"));
    let config = configuration(folder.path(), extra);
    Daemon::in_folder(folder, &config).await
}

/// The same with one more file in the table `tcp`.
pub async fn serve_with(pki: &Pki, extra: &str, key: &str, content: &str) -> Daemon {
    let folder = temporary_folder();
    pki.install(&folder.path().join("tls"), &pki.server("node"));
    let path = folder.path().join("tls").join(key);
    replace(&path, content);
    let config = configuration(folder.path(), extra) + &format!("{key} = {path:?}\n");
    Daemon::in_folder(folder, &config).await
}

pub fn configuration(folder: &Path, extra: &str) -> String {
    let path = |name: &str| folder.join("tls").join(name);
    format!(
        "audit_log = {:?}\n{extra}\n[tcp]\nlisten = '127.0.0.1:0'\ncertificate = {:?}\nkey = {:?}\nclient_ca = {:?}\n",
        folder.join("audit.log"),
        path("server.crt"),
        path("server.key"),
        path("ca.crt")
    )
}

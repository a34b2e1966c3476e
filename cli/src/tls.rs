//! The connection to a vmmd over TCP: TLS with certificates on both sides.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustls::{
    AlertDescription, CertificateError, ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    version::{TLS12, TLS13},
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::codegen::http::Uri;

use crate::failure::{Code, Failure, Result};

/// Time limit for a connection, and for an answer that takes the daemon no work.
pub const QUICK: Duration = Duration::from_secs(30);
/// Where vmmd listens when the endpoint has no port.
const PORT: u16 = 7443;

/// An established connection. The daemon's first bytes are already in the reader's buffer.
pub type Stream = BufReader<TlsStream<TcpStream>>;

/// A daemon over TCP, and the client's credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    host: String,
    port: u16,
    /// The CA of the daemon's certificate.
    pub ca: PathBuf,
    /// Our certificate.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

impl Remote {
    /// `endpoint` is `https://HOST[:PORT]`.
    pub fn new(endpoint: &str, ca: PathBuf, cert: PathBuf, key: PathBuf) -> Result<Self> {
        let wrong = || {
            let message = format!("\"{endpoint}\" is no endpoint: it must be https://HOST:PORT");
            Failure::new(Code::Usage, message)
        };
        let uri: Uri = endpoint.parse().map_err(|_| wrong())?;
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(wrong)?;
        let path = uri.path_and_query().is_none_or(|path| path == "/");
        // Allows only a host and a valid port, without a user.
        let behind = uri
            .authority()
            .and_then(|whole| whole.as_str().strip_prefix(host));
        let port = uri.port_u16().map(|port| format!(":{port}")).unwrap_or_default();
        if uri.scheme_str() != Some("https") || !path || behind != Some(port.as_str()) {
            return Err(wrong());
        }
        Ok(Self {
            host: host.trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(PORT),
            ca,
            cert,
            key,
        })
    }

    /// `HOST:PORT`.
    pub fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Reads the certificates.
    pub fn config(&self) -> Result<Arc<ClientConfig>> {
        let mut roots = RootCertStore::empty();
        for authority in certificates(&self.ca)? {
            roots
                .add(authority)
                .map_err(|error| invalid(&self.ca, &error.to_string()))?;
        }
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?)
            .map_err(|_| invalid(&self.key, "has no private key in PEM"))?;
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13, &TLS12])
            .map_err(|error| Failure::new(Code::Other, error.to_string()))?
            .with_root_certificates(roots)
            .with_client_auth_cert(certificates(&self.cert)?, key);
        let mut config = config.map_err(|error| {
            let pair = format!("cannot be used with the key {}: {error}", self.key.display());
            invalid(&self.cert, &pair)
        })?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }

    /// Connects, and waits for the daemon's first word: only then it has accepted our certificate.
    pub async fn open(&self, config: Arc<ClientConfig>) -> Result<Stream> {
        let address = self.address();
        let unreachable = |error: &str| {
            let message = format!("cannot connect to {address}: {error}");
            Failure::new(Code::Unavailable, message)
                .hint("is vmmd running there, and is `[tcp]` in its configuration?")
        };
        let late = || unreachable("no answer in time");
        let connected = timeout(QUICK, TcpStream::connect((self.host.as_str(), self.port))).await;
        let stream = connected.map_err(|_| late())?;
        let stream = stream.map_err(|error| unreachable(&error.to_string()))?;
        let _ = stream.set_nodelay(true);
        let name =
            ServerName::try_from(self.host.clone()).map_err(|_| unreachable("that is no name of a host"))?;
        let connected = timeout(QUICK, TlsConnector::from(config).connect(name, stream)).await;
        let stream = connected
            .map_err(|_| late())?
            .map_err(|error| self.explain(&error))?;
        let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        let mut stream = BufReader::new(stream);
        match timeout(QUICK, stream.fill_buf()).await.map_err(|_| late())? {
            Err(error) => Err(self.explain(&error)),
            Ok([]) => Err(self.explain(&io::ErrorKind::UnexpectedEof.into())),
            Ok(_) if !http2 => Err(unreachable("what answers there is not vmmd")),
            Ok(_) => Ok(stream),
        }
    }

    /// Returns the failure for a failed handshake, for the user.
    fn explain(&self, error: &io::Error) -> Failure {
        let (address, ca, cert) = (self.address(), self.ca.display(), self.cert.display());
        let tls = error
            .get_ref()
            .and_then(|error| error.downcast_ref::<rustls::Error>());
        let unavailable = |message: String| Failure::new(Code::Unavailable, message);
        let refused = |message: String| Failure::new(Code::Permission, message);
        match tls {
            Some(rustls::Error::InvalidCertificate(wrong)) => {
                let about = |what: &str| {
                    Failure::new(Code::Untrusted, format!("the certificate of {address} {what}"))
                };
                use CertificateError as C;
                match wrong {
                    C::Expired | C::ExpiredContext { .. } => {
                        about("has expired").hint("give the node a new one; are both clocks right?")
                    }
                    C::NotValidYet | C::NotValidYetContext { .. } => {
                        about("is not valid yet").hint("are both clocks right?")
                    }
                    C::NotValidForName | C::NotValidForNameContext { .. } => {
                        about(&format!("is for other names than \"{}\"", self.host))
                            .hint("use a name in the certificate, or create it again with --server-name")
                    }
                    C::UnknownIssuer | C::BadSignature => {
                        about(&format!("is from another CA than those in {ca}"))
                            .hint("take the ca.crt of that node")
                    }
                    _ => about(&format!("cannot be trusted: {wrong}")),
                }
            }
            Some(rustls::Error::AlertReceived(alert)) => {
                use AlertDescription as A;
                match alert {
                    A::CertificateRequired => refused(format!("{address} wants a certificate")),
                    A::CertificateExpired => refused(format!(
                        "{address} refuses {cert}: it has expired, or is not valid yet"
                    ))
                    .hint("get a new one; are both clocks right?"),
                    A::UnknownCA | A::DecryptError => refused(format!(
                        "{address} refuses {cert}: it is from a CA that vmmd does not know"
                    ))
                    .hint("`client_ca` in its configuration has the CAs that it knows"),
                    A::UnsupportedCertificate => refused(format!(
                        "{address} refuses {cert}: it is not for clients (clientAuth)"
                    )),
                    A::BadCertificate | A::CertificateRevoked | A::CertificateUnknown | A::AccessDenied => {
                        refused(format!("{address} refuses {cert}"))
                    }
                    _ => unavailable(format!("{address} ended the TLS handshake: {alert:?}"))
                        .hint("`journalctl -u vmmd` on the node says why"),
                }
            }
            Some(rustls::Error::InvalidMessage(_)) => {
                Failure::new(Code::Untrusted, format!("{address} does not speak TLS"))
                    .hint("is that the port of vmmd?")
            }
            Some(error) => unavailable(format!("no TLS connection to {address}: {error}")),
            None if matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
            ) =>
            {
                unavailable(format!("{address} closed the connection"))
                    .hint("is that the port of vmmd? `journalctl -u vmmd` on the node says why")
            }
            None => unavailable(format!("no TLS connection to {address}: {error}")),
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path)
        .map_err(|error| Failure::new(Code::Invalid, format!("cannot read {}: {error}", path.display())))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        _ => Err(invalid(path, "has no certificate in PEM")),
    }
}

fn invalid(path: &Path, what: &str) -> Failure {
    Failure::new(Code::Invalid, format!("{} {what}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_url_with_a_host_and_nothing_behind() {
        let parse = |endpoint| Remote::new(endpoint, "".into(), "".into(), "".into());
        for (endpoint, address) in [
            ("https://node1:7000", "node1:7000"),
            ("https://node1/", "node1:7443"),
            ("https://192.0.2.1", "192.0.2.1:7443"),
            ("https://[2001:db8::1]:8", "[2001:db8::1]:8"),
        ] {
            assert_eq!(parse(endpoint).unwrap().address(), address);
        }
        for wrong in [
            "node1:7443",
            "http://node1:7443",
            "https://",
            "https://a/b",
            "https://a?b",
            "",
            "https://a:x",
        ] {
            assert_eq!(parse(wrong).unwrap_err().code, Code::Usage, "{wrong}");
        }
    }
}

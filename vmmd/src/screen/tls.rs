//! TLS for screens: the node has a certificate. Clients have a ticket instead.

use std::{fs, io, path::Path, sync::Arc};

use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    version::{TLS12, TLS13},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::spawn_blocking,
};
use tokio_rustls::TlsAcceptor;
use vmmd_host::text;
use vmmd_objects::event::{Draft, Events, Object};

use crate::{config::Screen, host::Host};

/// A connection, encrypted or not.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Shakes hands over `stream`.
pub async fn accept(host: &Host, stream: TcpStream) -> io::Result<Box<dyn Stream>> {
    let server = certificate(host).await?;
    let stream = TlsAcceptor::from(Arc::new(server)).accept(stream).await?;
    Ok(Box::new(stream))
}

/// Reads the files of the configuration as they are now, so new ones need no restart. An event says when they have become unusable, are
/// unusable for another reason, or are usable again.
pub async fn certificate(host: &Host) -> io::Result<ServerConfig> {
    // One connection after the other, also when the one before has been ended meanwhile: files that do not answer block one thread.
    let mut problem = Arc::clone(&host.screens.certificate_problem).lock_owned().await;
    let (config, events) = (host.config.screen.clone(), host.events.clone());
    let reading = spawn_blocking(move || {
        let loaded = load(&config);
        let now = loaded.as_ref().err().map(ToString::to_string);
        if *problem != now {
            tell(&events, now.as_deref());
            *problem = now;
        }
        loaded
    });
    reading.await?
}

/// Emits an event about a problem with the certificate, or with `None` about its end.
fn tell(events: &Events, problem: Option<&str>) {
    let draft = match problem {
        Some(problem) => {
            let message = format!(
                "VNC viewers and browsers can't open screens until `certificate` and `key` in `[screen]` are right: {problem}"
            );
            Draft::warning(Object::Node, "ScreenCertificateUnusable", message)
        }
        None => {
            let message = "VNC viewers and browsers can open screens: the certificate is usable again";
            Draft::normal(Object::Node, "ScreenCertificateLoaded", message)
        }
    };
    events.emit(draft);
}

/// Reads the files of the configuration.
///
/// # Errors
///
/// The files are not configured, unreadable, not PEM, or do not match.
fn load(config: &Screen) -> io::Result<ServerConfig> {
    let (Some(certificate), Some(key)) = (&config.certificate, &config.key) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let chain: Result<Vec<_>, _> =
        CertificateDer::pem_slice_iter(&read("certificate", certificate)?).collect();
    let chain = chain.map_err(|error| wrong(format!("`certificate` is no PEM file: {error}")))?;
    let key = PrivateKeyDer::from_pem_slice(&read("key", key)?)
        .map_err(|error| wrong(format!("`key` has no private key: {error}")))?;
    let mut tls = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13, &TLS12])
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| wrong(format!("the certificate can't be used with its key: {error}")))?;
    // Clients do not resume the sessions of screens. With a session ticket in the same read as the
    // first message, TigerVNC 1.12 waits for more data, and never handles the message.
    tls.send_tls13_tickets = 0;
    Ok(tls)
}

fn read(key: &str, path: &Path) -> io::Result<Vec<u8>> {
    let said = |error: io::Error| format!("`{key}` can't be read: {}", text::words(&error));
    fs::read(path).map_err(|error| io::Error::new(error.kind(), said(error)))
}

fn wrong(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

//! TLS of the ways to screens: a certificate for the node, none for who comes, who has a ticket instead.

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

use crate::config::Screen;

/// A connection, encrypted or not.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Shakes hands over `stream`, with the files of the configuration as they are now: so new ones need no restart.
pub async fn accept(config: &Screen, stream: TcpStream) -> io::Result<Box<dyn Stream>> {
    let config = config.clone();
    let server = spawn_blocking(move || load(&config)).await?;
    let server = server.inspect_err(|error| {
        tracing::error!(%error, "the certificate for screens can't be used: set `certificate` and `key` in `[screen]` right");
    })?;
    let stream = TlsAcceptor::from(Arc::new(server)).accept(stream).await?;
    Ok(Box::new(stream))
}

/// Reads the files of the configuration.
///
/// # Errors
///
/// When there are none, they can't be read, are no PEM, or do not belong together.
pub fn load(config: &Screen) -> io::Result<ServerConfig> {
    let (Some(certificate), Some(key)) = (&config.certificate, &config.key) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let chain: Result<Vec<_>, _> =
        CertificateDer::pem_slice_iter(&read("certificate", certificate)?).collect();
    let chain = chain.map_err(|error| wrong(format!("`certificate` is no PEM file: {error}")))?;
    let key = PrivateKeyDer::from_pem_slice(&read("key", key)?)
        .map_err(|error| wrong(format!("`key` has no private key: {error}")))?;
    ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13, &TLS12])
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| wrong(format!("the certificate can't be used with its key: {error}")))
}

fn read(key: &str, path: &Path) -> io::Result<Vec<u8>> {
    fs::read(path).map_err(|error| io::Error::new(error.kind(), format!("`{key}` can't be read: {error}")))
}

fn wrong(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

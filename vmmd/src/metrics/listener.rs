//! HTTP for Prometheus: `GET /metrics`, and nothing else.

use std::{convert::Infallible, io, path::PathBuf, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{Method, Request, Response, StatusCode, body::Bytes, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::Semaphore,
    time::timeout,
};

use super::gather;
use crate::host::Host;

/// Most scrapes at once; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 16;
/// How long a connection may last: a scrape and what keeps it open for the next.
const LIFE: Duration = Duration::from_secs(120);
/// How long the headers of a request may take.
const HEADERS: Duration = Duration::from_secs(5);
/// After a failed accept, as when descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Of OpenMetrics 1.0.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Listener for metrics.
#[derive(Debug)]
pub enum Listener {
    /// An address and port.
    Tcp(TcpListener),
    /// A socket for root; its file.
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Binds the configured address: "127.0.0.1:9753", or the absolute path of a UNIX socket.
    pub async fn bind(listen: &str) -> io::Result<Self> {
        if !listen.starts_with('/') {
            return TcpListener::bind(listen).await.map(Self::Tcp);
        }
        let path = PathBuf::from(listen);
        // That of an earlier daemon; the lock of the state says that there is no other.
        if std::os::unix::net::UnixStream::connect(&path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        {
            std::fs::remove_file(&path)?;
        }
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        Ok(Self::Unix(listener, path))
    }

    /// Serves until the daemon ends.
    pub async fn serve(self, host: Arc<Host>) {
        let stopping = host.stopping.clone();
        tokio::select! {
            () = self.accept(host) => {}
            () = stopping.cancelled() => {}
        }
    }

    async fn accept(self, host: Arc<Host>) {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else {
                return;
            };
            let host = Arc::clone(&host);
            let accepted = match &self {
                Self::Tcp(listener) => listener.accept().await.map(|(stream, _)| {
                    tokio::spawn(async move {
                        connection(stream, host).await;
                        drop(place);
                    })
                }),
                Self::Unix(listener, _) => listener.accept().await.map(|(stream, _)| {
                    tokio::spawn(async move {
                        connection(stream, host).await;
                        drop(place);
                    })
                }),
            };
            if let Err(error) = accepted {
                tracing::warn!(%error, "accept a connection for metrics");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

async fn connection(stream: impl AsyncRead + AsyncWrite + Unpin, host: Arc<Host>) {
    let service = service_fn(move |request| {
        let host = Arc::clone(&host);
        async move { Ok::<_, Infallible>(answer(&request, &host).await) }
    });
    let mut server = hyper::server::conn::http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADERS);
    let serving = server.serve_connection(TokioIo::new(stream), service);
    if let Ok(Err(error)) = timeout(LIFE, serving).await {
        tracing::debug!(%error, "a connection for metrics");
    }
}

async fn answer<B>(request: &Request<B>, host: &Arc<Host>) -> Response<Full<Bytes>> {
    let with = |status, text: &'static str| {
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return with(StatusCode::NOT_FOUND, "figures are at /metrics\n");
    }
    if request.method() != Method::GET {
        return with(StatusCode::METHOD_NOT_ALLOWED, "use GET\n");
    }
    let mut response = Response::new(Full::from(gather(host).await));
    let kind = hyper::header::HeaderValue::from_static(CONTENT_TYPE);
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, kind);
    response
}

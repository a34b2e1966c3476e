//! Browsers: the files of noVNC, and RFB over a WebSocket (RFC 6455) for clients with a token.

use std::{path::Path, sync::Arc};

use axum::{
    Router,
    body::Body,
    extract::{
        State,
        ws::{Message, WebSocket, WebSocketUpgrade},
    },
    http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, Uri, header},
    response::IntoResponse,
    routing::get,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixStream},
    time::timeout,
};
use vmmd_host::failure::Failure;

use super::{
    accept, enter,
    tls::{self, Stream},
};
use crate::{host::Host, registry::screens::Form};

/// Largest message of a browser in bytes.
const MAX_MESSAGE: usize = 1 << 20;
/// Largest message to a browser in bytes.
const CHUNK: usize = 64 << 10;
/// Largest file that is served in bytes.
const MAX_FILE: u64 = 4 << 20;
/// Where the WebSocket is.
const SOCKET: &str = "websockify";
/// In the address of the page, before the token: where noVNC connects to, percent-encoded.
const PATH: &str = "path=websockify%3Ftoken%3D";
/// The next step when noVNC is missing.
const NO_NOVNC: &str =
    "noVNC is not there: install the package novnc, or say where it is (`novnc` in `[screen]`)";
/// Response to a client without a valid ticket.
const NO_TICKET: &str = "This address opens no screen: it is good for one connection, and for a minute. \
                         `vmmctl vnc <VM> --web` prints another one.\n";

/// The page of noVNC.
const PAGE: &str = "vnc.html";

/// The address of the page that shows a screen. `base` is where the listener is, for others.
pub fn url(base: &str, encrypted: bool, token: &str, view_only: bool) -> String {
    let scheme = if encrypted { "https" } else { "http" };
    let more = if view_only { "&view_only=true" } else { "" };
    format!("{scheme}://{base}/{PAGE}?autoconnect=true&{PATH}{token}{more}")
}

/// Refused as NOT_SERVED when the page is not in the folder of noVNC: its address would show nothing.
pub fn has_page(folder: &Path) -> Result<(), Failure> {
    if folder.join(PAGE).is_file() {
        return Ok(());
    }
    let message = format!("this node has no web page for screens: {NO_NOVNC}");
    Err(Failure::precondition("NOT_SERVED", message))
}

/// Serves browsers until the daemon ends.
pub async fn serve(listener: TcpListener, host: Arc<Host>) {
    let router = Router::new()
        .route(&format!("/{SOCKET}"), get(socket))
        .fallback(file)
        .with_state(Arc::clone(&host));
    accept(listener, host, move |stream, _from, host| {
        connection(stream, router.clone(), host)
    })
    .await;
}

/// Serves a browser until it has a WebSocket, which is passed on in a task of its own.
async fn connection(stream: TcpStream, router: Router, host: Arc<Host>) {
    let limits = &host.config.limits;
    let stream: Box<dyn Stream> = if host.config.screen.is_encrypted() {
        match timeout(limits.handshake(), tls::accept(&host, stream)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return tracing::debug!(%error, "a browser's handshake"),
            Err(_) => return,
        }
    } else {
        Box::new(stream)
    };
    let mut server = hyper::server::conn::http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(limits.request());
    let service = TowerToHyperService::new(router);
    let serving = server
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    if let Err(error) = serving.await {
        tracing::debug!(%error, "a browser's connection");
    }
}

/// A WebSocket to the screen that the token is for.
async fn socket(State(host): State<Arc<Host>>, uri: Uri, upgrade: WebSocketUpgrade) -> Response<Body> {
    let shown = uri.query().and_then(|query| query.strip_prefix("token="));
    let Some(ticket) = host
        .screens
        .tickets
        .take(Form::Token, |secret| Some(secret) == shown)
    else {
        return (StatusCode::FORBIDDEN, NO_TICKET).into_response();
    };
    match enter(&host, &ticket, "a browser").await {
        Ok((screen, place)) => upgrade
            .protocols(["binary"])
            .max_message_size(MAX_MESSAGE)
            .on_upgrade(move |socket| async move {
                let _place = place;
                tokio::select! {
                    () = pass(socket, screen) => {}
                    () = host.stopping.cancelled() => {}
                }
            }),
        Err(failure) => (StatusCode::CONFLICT, format!("{failure}\n")).into_response(),
    }
}

/// Passes bytes on in both directions until one side ends.
async fn pass(mut socket: WebSocket, mut screen: UnixStream) {
    let (mut from, mut to) = screen.split();
    let mut buffer = vec![0; CHUNK];
    loop {
        tokio::select! {
            message = socket.recv() => match message {
                Some(Ok(Message::Binary(bytes))) => {
                    if to.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                _ => return,
            },
            count = from.read(&mut buffer) => {
                let bytes = match count {
                    Ok(count @ 1..) => buffer.get(..count).unwrap_or_default().to_vec(),
                    _ => return,
                };
                if socket.send(Message::Binary(bytes.into())).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// A file of noVNC. The page is refused when its address names an invalid ticket, for example after
/// a reload: a browser does not report to noVNC why its WebSocket was refused.
async fn file(State(host): State<Arc<Host>>, uri: Uri) -> Response<Body> {
    let tickets = &host.screens.tickets;
    let is_refused = |token: &str| !tickets.is_good(Form::Token, |secret| secret == token);
    if uri.query().and_then(token).is_some_and(is_refused) {
        return (StatusCode::FORBIDDEN, NO_TICKET).into_response();
    }
    let folder = &host.config.screen.novnc;
    let Some(path) = below(uri.path()) else {
        return (StatusCode::NOT_FOUND, "no such file\n").into_response();
    };
    let file = folder.join(path);
    let kind = content_type(&file);
    match read(&file).await {
        Ok(bytes) => {
            let mut headers = HeaderMap::new();
            let fixed = [
                (header::CONTENT_TYPE, kind),
                (header::CACHE_CONTROL, "no-cache"),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
                (header::REFERRER_POLICY, "no-referrer"),
                (header::CONTENT_SECURITY_POLICY, "frame-ancestors 'none'"),
            ];
            headers
                .extend(fixed.map(|(name, value): (HeaderName, _)| (name, HeaderValue::from_static(value))));
            (headers, bytes).into_response()
        }
        Err(_) if !folder.is_dir() => (StatusCode::NOT_FOUND, format!("{NO_NOVNC}\n")).into_response(),
        Err(_) => (StatusCode::NOT_FOUND, "no such file\n").into_response(),
    }
}

/// The token in the query of the page's address.
fn token(query: &str) -> Option<&str> {
    query.split('&').find_map(|part| part.strip_prefix(PATH))
}

async fn read(file: &Path) -> std::io::Result<Vec<u8>> {
    let metadata = tokio::fs::metadata(file).await?;
    if !metadata.is_file() || metadata.len() > MAX_FILE {
        return Err(std::io::ErrorKind::NotFound.into());
    }
    tokio::fs::read(file).await
}

/// The path of a file below noVNC's folder: names of letters, digits and `._-`, none of which begins with a dot.
fn below(path: &str) -> Option<&str> {
    let path = path.strip_prefix('/')?;
    let plain = |name: &str| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        !name.is_empty() && !name.starts_with('.') && name.bytes().all(known)
    };
    path.split('/').all(plain).then_some(path)
}

fn content_type(file: &Path) -> &'static str {
    match file.extension().and_then(|extension| extension.to_str()) {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("json") => "application/json",
        Some("svg") => "image/svg+xml",
        Some("png") => "image/png",
        Some("ico") => "image/x-icon",
        Some("woff") => "font/woff",
        Some("ttf") => "font/ttf",
        Some("mp3") => "audio/mpeg",
        Some("oga") => "audio/ogg",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_is_found_in_the_address_of_the_page() {
        for view_only in [false, true] {
            let address = url("node:6080", true, "abc", view_only);
            let (page, query) = address.split_once('?').unwrap();
            assert_eq!((page, token(query)), ("https://node:6080/vnc.html", Some("abc")));
        }
        assert_eq!(token("autoconnect=true&path=websockify"), None);
    }

    #[test]
    fn only_files_below_the_folder_have_a_path() {
        assert_eq!(below("/vnc.html"), Some("vnc.html"));
        assert_eq!(below("/core/input/keyboard.js"), Some("core/input/keyboard.js"));
        for path in [
            "/",
            "",
            "vnc.html",
            "/../etc/passwd",
            "/core/../../x",
            "/.git",
            "//etc",
            "/a%2e",
            "/a/",
            "/a\0",
        ] {
            assert_eq!(below(path), None, "{path:?}");
        }
    }
}

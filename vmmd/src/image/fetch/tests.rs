//! Against a server that cuts, lies and redirects.

#[allow(dead_code, reason = "the tests of the daemon use more of it")]
#[path = "../../../tests/support/http.rs"]
mod http;

use std::{
    io::{Read as _, Write as _},
    sync::Arc,
    thread,
};

pub use self::http::{Server, Turn};
use super::*;

fn content() -> Vec<u8> {
    (0..300_000_u32).flat_map(u32::to_le_bytes).collect()
}

fn part(tag: &'static str, most: usize) -> Turn {
    http::part(&Arc::new(content()), tag, most)
}

fn says(answer: String) -> Turn {
    Box::new(move |_, stream| drop(stream.write_all(answer.as_bytes())))
}

async fn fetched(url: &str, file: &File, validator: &str, max_size: u64) -> Result<Downloaded, Failure> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let download = Download {
        client: client().unwrap(),
        url,
        headers: HeaderMap::new(),
        unauthorized: REFUSED,
        missing: REFUSED,
        blob: None,
        file: file.try_clone().unwrap(),
        validator: validator.to_owned(),
        max_size,
        first_wait: Duration::from_millis(1),
        room: |_| Ok(true),
    };
    fetch(download, &Control::default(), |_| async { Ok(()) }).await
}

fn whole() -> Downloaded {
    Downloaded {
        checksum: Sha256::digest(content()).into(),
        bytes: content().len() as u64,
    }
}

#[tokio::test]
async fn a_download_goes_on_where_the_connection_broke() {
    let server = Server::start(vec![
        part("a", 400_000),
        part("a", 1),
        part("a", 500_000),
        part("a", usize::MAX),
    ]);
    let file = tempfile::tempfile().unwrap();
    assert_eq!(fetched(&server.address, &file, "", 1 << 30).await, Ok(whole()));
    let starts: Vec<_> = server.requests.lock().unwrap().clone();
    assert!(!starts[0].contains("range:"));
    assert!(starts[1].contains("range: bytes=400000-") && starts[2].contains("range: bytes=400001-"));
}

#[tokio::test]
async fn a_download_begins_anew_when_the_file_is_another_one() {
    let server = Server::start(vec![
        part("a", 400_000),
        part("b", 500_000),
        part("b", usize::MAX),
    ]);
    let file = tempfile::tempfile().unwrap();
    assert_eq!(fetched(&server.address, &file, "", 1 << 30).await, Ok(whole()));
    let requests = server.requests.lock().unwrap().clone();
    assert!(requests[2].contains("range: bytes=500000-") && requests[2].contains("if-range: \"b\""));
}

#[tokio::test]
async fn what_an_earlier_daemon_has_downloaded_is_not_downloaded_again() {
    let server = Server::start(vec![part("a", usize::MAX)]);
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&content()[..700_000], 0).unwrap();
    assert_eq!(
        fetched(&server.address, &file, "\"a\"", 1 << 30).await,
        Ok(whole())
    );
    assert!(server.requests.lock().unwrap()[0].contains("range: bytes=700000-"));
    // Without a name of the file, what is there may be of another one.
    assert_eq!(fetched(&server.address, &file, "", 1 << 30).await, Ok(whole()));
    assert!(!server.requests.lock().unwrap()[1].contains("range:"));
}

#[tokio::test]
async fn a_server_that_lies_is_refused_with_the_reason() {
    let head = |more: &str| format!("HTTP/1.1 200 OK\r\nConnection: close\r\n{more}\r\n\r\n");
    let redirect = |to: &str| {
        says(format!(
            "HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n"
        ))
    };
    let endless: Turn = Box::new(|_, stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
        while stream.write_all(&[7; 65536]).is_ok() {}
    });
    for (turn, reason, words) in [
        (endless, "IMAGE_TOO_LARGE", "or more"),
        (
            says(head("Content-Length: 99999999999999")),
            "IMAGE_TOO_LARGE",
            "may have",
        ),
        (
            redirect("file:///etc/shadow"),
            "DOWNLOAD_REFUSED",
            "neither http nor https",
        ),
        (redirect("/again"), "DOWNLOAD_REFUSED", "redirects too often"),
        (
            says("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".into()),
            "DOWNLOAD_REFUSED",
            "404",
        ),
    ] {
        let server = Server::start(vec![turn]);
        let file = tempfile::tempfile().unwrap();
        let url = format!("{}/x?token=secret", server.address);
        let failure = fetched(&url, &file, "", 8 << 20).await.unwrap_err();
        assert_eq!(failure.reason, reason, "{failure}");
        assert!(
            failure.message.contains(words) && !failure.message.contains("secret"),
            "{failure}"
        );
    }
}

#[tokio::test]
async fn a_server_that_always_breaks_off_is_given_up() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = Server::start(vec![says(
        "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n".into(),
    )]);
    let file = tempfile::tempfile().unwrap();
    let failure = fetched(&server.address, &file, "", 8 << 20).await.unwrap_err();
    assert_eq!(failure.reason, "DOWNLOAD_FAILED");
    assert!(failure.message.contains("503"), "{failure}");
}

#[tokio::test]
async fn a_redirect_to_another_address_is_followed() {
    let target = Server::start(vec![part("a", usize::MAX)]);
    let to = format!(
        "HTTP/1.1 302 Found\r\nLocation: {}/b\r\nContent-Length: 0\r\n\r\n",
        target.address
    );
    let server = Server::start(vec![says(to)]);
    let file = tempfile::tempfile().unwrap();
    assert_eq!(fetched(&server.address, &file, "", 1 << 30).await, Ok(whole()));
}

#[tokio::test]
async fn a_download_that_is_not_wanted_any_more_ends() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let silent: Turn = Box::new(|_, stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\nabc");
        let _ = stream.read(&mut [0]);
    });
    let server = Server::start(vec![silent]);
    let control = Control::default();
    let cancel = control.cancel().clone();
    let requests = Arc::clone(&server.requests);
    thread::spawn(move || {
        while requests.lock().unwrap().is_empty() {
            thread::yield_now();
        }
        cancel.cancel();
    });
    let download = Download {
        client: client().unwrap(),
        url: &server.address,
        headers: HeaderMap::new(),
        unauthorized: REFUSED,
        missing: REFUSED,
        blob: None,
        file: tempfile::tempfile().unwrap(),
        validator: String::new(),
        max_size: 1 << 30,
        first_wait: Duration::from_millis(1),
        room: |_| Ok(true),
    };
    let failure = fetch(download, &control, |_| async { Ok(()) }).await.unwrap_err();
    assert_eq!(failure.reason, "CANCELLED");
}

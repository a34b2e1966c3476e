//! Against a server that cuts, lies and redirects.

use std::{
    io::{Read as _, Write as _},
    sync::Arc,
    thread,
};

use sha2::{Digest as _, Sha256};
use vmmd_testing::http;
pub use vmmd_testing::http::{Server, Turn};

use super::*;
use crate::{reach::Reach, rules::ImportRules as Rules};

fn content() -> Vec<u8> {
    (0..300_000_u32).flat_map(u32::to_le_bytes).collect()
}

fn part(tag: &'static str, most: usize) -> Turn {
    http::part(&Arc::new(content()), tag, most)
}

fn says(answer: String) -> Turn {
    Box::new(move |_, stream| drop(stream.write_all(answer.as_bytes())))
}

fn client_of(reach: &Reach) -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    reach.client().unwrap()
}

fn download<'a>(url: &'a str, file: &File, etag: &str, max_size: u64) -> Download<'a> {
    let version = SourceVersion {
        etag: etag.to_owned(),
        ..SourceVersion::default()
    };
    Download {
        client: client_of(&Reach::new(&Rules::default(), "127.0.0.1", true)),
        url,
        headers: HeaderMap::new(),
        unauthorized: REFUSED,
        missing: REFUSED,
        blob: None,
        file: file.try_clone().unwrap(),
        version,
        hash: Checksum::like(&[]),
        max_size,
        first_wait: Duration::from_millis(1),
        room: |_| Ok(true),
    }
}

async fn fetched(url: &str, file: &File, etag: &str, max_size: u64) -> Result<Downloaded, Failure> {
    let download = download(url, file, etag, max_size);
    fetch(download, &Control::default(), |_| async { Ok(()) }).await
}

/// That the whole content came, and in how many requests.
async fn came_whole(turns: Vec<Turn>, most: usize) {
    let server = Server::start(turns);
    let file = tempfile::tempfile().unwrap();
    let came = fetched(&server.address, &file, "", 1 << 30).await.unwrap();
    assert_eq!(
        came,
        Downloaded {
            resumed: true,
            ..whole()
        }
    );
    let mut bytes = vec![0; content().len()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == content());
    let requests = server.requests.lock().unwrap().len();
    assert!(requests <= most, "{requests} requests");
}

fn whole() -> Downloaded {
    Downloaded {
        checksum: Sha256::digest(content()).to_vec(),
        bytes: content().len() as u64,
        resumed: false,
    }
}

/// Answers each request, without regard to its range, with the content from `start` and these
/// headers. Ends after `most` bytes.
fn from(start: usize, headers: &'static str, most: usize) -> Turn {
    Box::new(move |_, stream| {
        let content = content();
        let rest = &content[start..];
        let status = match start {
            0 => "200 OK".to_owned(),
            _ => format!(
                "206 Partial Content\r\nContent-Range: bytes {start}-{}/{}",
                content.len() - 1,
                content.len()
            ),
        };
        let length = rest.len();
        let _ = write!(
            stream,
            "HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        let _ = stream.write_all(&rest[..length.min(most)]);
    })
}

#[tokio::test]
async fn part_with_another_validator_restarts_the_download() {
    const OLD: &str = "ETag: \"old\"\r\nLast-Modified: Sat, 01 Nov 2025 00:00:00 GMT\r\n";
    for new in [
        "ETag: \"new\"\r\n",
        "Last-Modified: Sun, 02 Nov 2025 00:00:00 GMT\r\n",
        "ETag: \"old\"\r\nLast-Modified: Sun, 02 Nov 2025 00:00:00 GMT\r\n",
        "",
    ] {
        let turns = vec![
            from(0, OLD, 400_000),
            from(400_000, new, usize::MAX),
            part("new", usize::MAX),
        ];
        came_whole(turns, 3).await;
    }
}

#[tokio::test]
async fn part_of_a_file_of_another_length_restarts_the_download() {
    let longer: Turn = Box::new(|_, stream| {
        let answer = "HTTP/1.1 206 Partial\r\nContent-Range: bytes 400000-400099/400100\r\nETag: \"a\"\r\n\
             Content-Length: 100\r\nConnection: close\r\n\r\n";
        let _ = stream.write_all(answer.as_bytes());
        let _ = stream.write_all(&[9; 100]);
    });
    came_whole(vec![part("a", 400_000), longer, part("a", usize::MAX)], 3).await;
}

#[tokio::test]
async fn redirect_to_a_mirror_with_another_version_restarts() {
    let mirror = Server::start(vec![
        from(400_000, "ETag: \"mirror\"\r\n", usize::MAX),
        from(0, "ETag: \"mirror\"\r\n", usize::MAX),
    ]);
    let to = format!(
        "HTTP/1.1 302 Found\r\nLocation: {}/b\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        mirror.address
    );
    came_whole(vec![part("a", 400_000), says(to)], 3).await;
}

#[tokio::test]
async fn part_from_an_earlier_offset_continues_the_download() {
    const TAG: &str = "ETag: \"a\"\r\n";
    let turns = vec![
        part("a", 400_777),
        from(262_144, TAG, 300_000),
        from(393_216, TAG, usize::MAX),
    ];
    came_whole(turns, 3).await;
}

#[tokio::test]
async fn server_that_never_brings_more_is_given_up() {
    const TAG: &str = "ETag: \"a\"\r\n";
    let other = |start: usize| -> Turn {
        // A part behind the end of the file, and the beginning again.
        Box::new(move |head, stream| match http::start(head) {
            Some(_) => from(start, TAG, usize::MAX)(head, stream),
            None => from(0, TAG, 400_000)(head, stream),
        })
    };
    let versions: Turn = {
        let count = std::sync::atomic::AtomicUsize::new(0);
        Box::new(move |_, stream| {
            let version = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let answer = format!(
                "HTTP/1.1 200 OK\r\nETag: \"{version}\"\r\nContent-Length: 4000\r\nConnection: close\r\n\r\nabc"
            );
            let _ = stream.write_all(answer.as_bytes());
        })
    };
    for (turn, words) in [
        (other(500_000), "tries in a row"),
        (from(0, "", 400_000), "tries in a row"),
        (versions, "again and again"),
    ] {
        let server = Server::start(vec![turn]);
        let file = tempfile::tempfile().unwrap();
        let failure = fetched(&server.address, &file, "", 8 << 20).await.unwrap_err();
        assert_eq!(failure.reason, "DOWNLOAD_FAILED", "{failure}");
        assert!(failure.message.contains(words), "{failure}");
        assert!(server.requests.lock().unwrap().len() <= 2 * TRIES as usize);
    }
}

#[tokio::test]
async fn server_that_starts_again_each_time_is_given_up() {
    let sent = std::sync::atomic::AtomicUsize::new(0);
    let more: Turn = Box::new(move |_, stream| {
        // Each try brings some bytes more, and all of the others again.
        let most = (sent.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 400) << 16;
        let length = 1000 << 16;
        let _ = write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        let _ = stream.write_all(&vec![7; most]);
    });
    let server = Server::start(vec![more]);
    let file = tempfile::tempfile().unwrap();
    let failure = fetched(&server.address, &file, "", 1 << 30).await.unwrap_err();
    assert!(failure.message.contains("does not continue"), "{failure}");
    let requests = server.requests.lock().unwrap().len();
    assert!((9..40).contains(&requests), "{requests}");
}

#[tokio::test]
async fn name_of_the_node_is_refused_at_the_first_try() {
    let client = client_of(&Reach::new(&Rules::default(), "registry.example", false));
    let download = Download {
        client,
        url: "http://localhost:9/disk.raw",
        first_wait: Duration::from_secs(3600),
        ..download("", &tempfile::tempfile().unwrap(), "", 1 << 30)
    };
    let failure = fetch(download, &Control::default(), |_| async { Ok(()) })
        .await
        .unwrap_err();
    assert_eq!(failure.reason, REFUSED);
    assert!(
        failure.message.contains("address of the node itself"),
        "{failure}"
    );
}

#[tokio::test]
async fn web_page_instead_of_an_image_is_refused() {
    let page = "HTTP/1.1 200 OK\r\nContent-Type: Text/HTML; charset=utf-8\r\nContent-Length: 6\r\n\r\n<html>";
    let server = Server::start(vec![says(page.to_owned())]);
    let file = tempfile::tempfile().unwrap();
    let failure = fetched(&server.address, &file, "", 1 << 30).await.unwrap_err();
    assert_eq!(failure.reason, REFUSED);
    assert!(failure.message.contains("text/html"), "{failure}");
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
    let came = fetched(&server.address, &file, "", 1 << 30).await;
    assert_eq!(
        came,
        Ok(Downloaded {
            resumed: true,
            ..whole()
        })
    );
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
    let came = fetched(&server.address, &file, "", 1 << 30).await;
    assert_eq!(
        came,
        Ok(Downloaded {
            resumed: true,
            ..whole()
        })
    );
    let requests = server.requests.lock().unwrap().clone();
    assert!(requests[2].contains("range: bytes=500000-") && requests[2].contains("if-range: \"b\""));
}

#[tokio::test]
async fn download_of_an_earlier_daemon_is_continued() {
    let server = Server::start(vec![part("a", usize::MAX)]);
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&content()[..700_000], 0).unwrap();
    assert_eq!(
        fetched(&server.address, &file, "\"a\"", 1 << 30).await,
        Ok(Downloaded {
            resumed: true,
            ..whole()
        })
    );
    assert!(server.requests.lock().unwrap()[0].contains("range: bytes=700000-"));
    // Without a version, the present content may be that of another file.
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
    let download = download(&server.address, &tempfile::tempfile().unwrap(), "", 1 << 30);
    let failure = fetch(download, &control, |_| async { Ok(()) }).await.unwrap_err();
    assert_eq!(failure.reason, "CANCELLED");
}

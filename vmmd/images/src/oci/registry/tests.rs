//! Against registries that ask for passwords and tokens, redirect, cut and lie.

use std::{io::Write as _, net::TcpStream};

use super::*;
use crate::fetch::tests::{Server, Turn};

/// Content of the blob.
fn content() -> Vec<u8> {
    (0..100_000_u32).flat_map(u32::to_le_bytes).collect()
}

fn digest() -> [u8; 32] {
    Sha256::digest(content()).into()
}

fn place() -> Blob {
    Blob {
        base: 512,
        size: content().len() as u64,
        all: 1 << 20,
    }
}

fn registry(server: &Server, password: Option<&str>) -> Registry {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let host = server.address.strip_prefix("http://").unwrap();
    let credentials = password.map(|password| RegistryCredentials {
        username: "me".into(),
        password: password.into(),
    });
    let reference = Reference::parse(&format!("{host}/debian:13")).unwrap();
    let mut registry = Registry::new(reference, &Rules::default(), false, false, credentials).unwrap();
    registry.first_wait = Duration::from_millis(1);
    registry
}

/// The blob behind 512 bytes of something else, as the registry sends it.
async fn blob(registry: &mut Registry) -> Result<Vec<u8>, Failure> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(512).unwrap();
    let came = registry
        .blob(&digest(), &file, place(), &Control::default())
        .await?;
    assert_eq!(came.bytes, content().len() as u64);
    let mut bytes = vec![0; content().len()];
    file.read_exact_at(&mut bytes, 512).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 512 + came.bytes);
    Ok(bytes)
}

async fn document(registry: &mut Registry) -> Result<Vec<u8>, Failure> {
    let file = tempfile::tempfile().unwrap();
    let read = registry
        .document_into(file, "manifests/13", &Control::default())
        .await;
    read.map(|(bytes, _)| bytes)
}

fn answer(stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]) {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n");
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.write_all(body);
}

/// The blob from where the request wants it, but at most `most` bytes of it.
fn send(head: &str, stream: &mut TcpStream, most: usize) {
    let content = content();
    let start = head
        .split("range: bytes=")
        .nth(1)
        .and_then(|rest| rest.split('-').next());
    let start: usize = start.map_or(0, |start| start.parse().unwrap());
    let status = match start {
        0 => "200 OK".to_owned(),
        _ => format!(
            "206 Partial Content\r\nContent-Range: bytes {start}-{}/{}",
            content.len() - 1,
            content.len()
        ),
    };
    let rest = &content[start..];
    let _ = write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        rest.len()
    );
    let _ = stream.write_all(&rest[..rest.len().min(most)]);
}

/// A registry of the only token "t0ken", which is given at the address.
fn with_token(realm: String) -> Turn {
    Box::new(
        move |head, stream| match head.contains("authorization: bearer t0ken\r\n") {
            true => send(head, stream, usize::MAX),
            false => {
                let challenge = format!(
                    "WWW-Authenticate: Bearer realm=\"{realm}\",service=\"us\",scope=\"more:than:pull\"\r\n"
                );
                answer(stream, "401 Unauthorized", &challenge, b"");
            }
        },
    )
}

fn gives(token: &'static str) -> Turn {
    Box::new(move |_, stream| answer(stream, "200 OK", "", token.as_bytes()))
}

#[tokio::test]
async fn token_is_got_with_the_password_that_stays_there() {
    let tokens = Server::start(vec![gives(r#"{"access_token": "t0ken"}"#)]);
    let server = Server::start(vec![with_token(format!("{}/token?a=b", tokens.address))]);
    assert!(blob(&mut registry(&server, Some("secret"))).await.unwrap() == content());
    let asked = tokens.requests.lock().unwrap().join("");
    // "me:secret", in lower case as all that a server of tests sees.
    assert!(asked.contains("authorization: basic bwu6c2vjcmv0\r\n"), "{asked}");
    let wanted = "get /token?a=b&service=us&scope=repository%3adebian%3apull http/1.1";
    assert!(asked.starts_with(wanted), "{asked}");
    let requests = server.requests.lock().unwrap().join("");
    assert!(!requests.contains("basic"), "{requests}");
    assert!(requests.contains(&format!("get /v2/debian/blobs/{}", checksum_text(&digest()))));
}

#[tokio::test]
async fn a_token_that_is_over_is_got_anew_and_the_blob_gone_on_with() {
    let tokens = Server::start(vec![
        gives(r#"{"token": "first"}"#),
        gives(r#"{"token": "second"}"#),
    ]);
    let realm = format!("{}/token", tokens.address);
    let turn: Turn = Box::new(move |head, stream| {
        let start = head.contains("range: bytes=");
        match (
            head.contains("bearer first\r\n"),
            head.contains("bearer second\r\n"),
        ) {
            (true, _) if !start => send(head, stream, 100_000),
            (_, true) => send(head, stream, usize::MAX),
            _ => answer(
                stream,
                "401 Unauthorized",
                &format!("WWW-Authenticate: Bearer realm=\"{realm}\"\r\n"),
                b"",
            ),
        }
    });
    let server = Server::start(vec![turn]);
    assert!(blob(&mut registry(&server, None)).await.unwrap() == content());
    let last = server.requests.lock().unwrap().last().unwrap().clone();
    assert!(
        last.contains("range: bytes=100000-") && !last.contains("if-range"),
        "{last}"
    );
    assert_eq!(tokens.requests.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn challenge_of_a_redirect_target_gets_no_password() {
    let thief = Server::start(vec![gives(r#"{"token": "t0ken"}"#)]);
    let realm = format!("WWW-Authenticate: Bearer realm=\"{}/\"\r\n", thief.address);
    let elsewhere = Server::start(vec![Box::new(move |_, stream| {
        answer(stream, "401 Unauthorized", &realm, b"");
    })]);
    let to = format!("Location: {}/blob\r\n", elsewhere.address);
    let server = Server::start(vec![Box::new(move |_, stream| {
        answer(stream, "307 Temporary Redirect", &to, b"");
    })]);
    let failure = blob(&mut registry(&server, Some("secret"))).await.unwrap_err();
    assert_eq!(failure.reason, UNAUTHORIZED, "{failure}");
    assert!(failure.message.contains("another server"), "{failure}");
    assert_eq!(thief.requests.lock().unwrap().len(), 0);
    let requests = elsewhere.requests.lock().unwrap().join("");
    assert!(!requests.contains("authorization"), "{requests}");
}

#[tokio::test]
async fn redirect_target_gives_a_token_where_there_is_no_password() {
    let tokens = Server::start(vec![gives(r#"{"token": "t0ken"}"#)]);
    let elsewhere = Server::start(vec![with_token(format!("{}/token", tokens.address))]);
    let to = format!("Location: {}/v2/moved/blob\r\n", elsewhere.address);
    let server = Server::start(vec![Box::new(move |_, stream| {
        answer(stream, "307 Temporary Redirect", &to, b"");
    })]);
    let mut registry = registry(&server, None);
    for _ in 0..2 {
        assert!(blob(&mut registry).await.unwrap() == content());
    }
    let asked = tokens.requests.lock().unwrap().join("");
    // The target's own scope: it may have another name for the repository.
    assert!(
        asked.starts_with("get /token?service=us&scope=more%3athan%3apull http/1.1"),
        "{asked}"
    );
    let requests = server.requests.lock().unwrap().join("");
    assert!(!requests.contains("authorization"), "{requests}");
}

#[tokio::test]
async fn tenant_reaches_a_registry_of_the_node_if_configured() {
    let server = Server::start(vec![Box::new(|head, stream| send(head, stream, usize::MAX))]);
    let host = server.address.strip_prefix("http://").unwrap();
    let open = |rules: &Rules| {
        let reference = Reference::parse(&format!("{host}/debian:13")).unwrap();
        Registry::new(reference, rules, true, true, None)
    };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let Err(failure) = open(&Rules::default()) else {
        panic!("a tenant reaches the node");
    };
    assert!(failure.message.contains("insecure_registries"), "{failure}");
    let rules = Rules {
        insecure_registries: vec![host.to_owned()],
        ..Rules::default()
    };
    assert!(blob(&mut open(&rules).unwrap()).await.unwrap() == content());
}

#[tokio::test]
async fn token_that_brings_nothing_more_ends_the_import() {
    let tokens = Server::start(vec![gives(r#"{"token": "t0ken"}"#)]);
    let realm = format!("{}/token", tokens.address);
    let count = std::sync::atomic::AtomicUsize::new(0);
    let server = Server::start(vec![Box::new(move |head, stream| {
        // Brings less each time, and never continues.
        let number = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        match head.contains("bearer t0ken") && number % 2 == 1 {
            true => {
                let length = content().len();
                let _ = write!(
                    stream,
                    "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
                );
                let _ = stream.write_all(&content()[..20_000 - 8 * number.min(2_000)]);
            }
            false => {
                let challenge = format!("WWW-Authenticate: Bearer realm=\"{realm}\"\r\n");
                answer(stream, "401 Unauthorized", &challenge, b"");
            }
        }
    })]);
    let failure = blob(&mut registry(&server, None)).await.unwrap_err();
    assert!(
        [UNAUTHORIZED, "DOWNLOAD_FAILED"].contains(&failure.reason),
        "{failure}"
    );
    assert!(tokens.requests.lock().unwrap().len() < 20);
}

#[tokio::test]
async fn another_host_that_has_the_blob_is_sent_no_secret() {
    let elsewhere = Server::start(vec![Box::new(|head, stream| send(head, stream, usize::MAX))]);
    let to = format!("Location: {}/blob\r\n", elsewhere.address);
    let server = Server::start(vec![Box::new(move |head, stream| {
        match head.contains("authorization: basic") {
            true => answer(stream, "307 Temporary Redirect", &to, b""),
            false => answer(
                stream,
                "401 Unauthorized",
                "WWW-Authenticate: Basic realm=\"us\"\r\n",
                b"",
            ),
        }
    })]);
    assert!(blob(&mut registry(&server, Some("secret"))).await.unwrap() == content());
    let requests = elsewhere.requests.lock().unwrap().clone();
    assert_eq!(requests.len(), 1);
    assert!(!requests[0].contains("authorization"), "{}", requests[0]);
}

#[tokio::test]
async fn who_is_not_let_in_is_told_so_without_the_secret() {
    let wants = |challenge: &'static str| -> Turn {
        Box::new(move |_, stream| answer(stream, "401 Unauthorized", challenge, b""))
    };
    let basic = "WWW-Authenticate: Basic realm=\"us\"\r\n";
    for (turn, password, words) in [
        (wants(basic), Some("secret"), "to this user name and password"),
        (wants(basic), None, "only with a user name and password"),
        (
            wants("WWW-Authenticate: Negotiate\r\n"),
            Some("secret"),
            "neither a password nor a token",
        ),
        (wants(""), None, "neither a password nor a token"),
        (
            wants("WWW-Authenticate: Bearer realm=\"http://tokens.example/\"\r\n"),
            Some("secret"),
            "without TLS",
        ),
    ] {
        let server = Server::start(vec![turn]);
        let failure = blob(&mut registry(&server, password)).await.unwrap_err();
        assert_eq!(failure.reason, UNAUTHORIZED, "{failure}");
        assert!(
            failure.message.contains(words) && !failure.message.contains("secret"),
            "{failure}"
        );
        assert!(server.requests.lock().unwrap().len() <= 4);
    }
    for tokens in [
        gives("{}"),
        gives("<html>"),
        gives(r#"{"token": "a\nb"}"#),
        Box::new(|_: &str, stream: &mut TcpStream| {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
            while stream.write_all(&[b' '; 65536]).is_ok() {}
        }),
    ] {
        let tokens = Server::start(vec![tokens]);
        let server = Server::start(vec![with_token(tokens.address.clone())]);
        let failure = blob(&mut registry(&server, None)).await.unwrap_err();
        assert_eq!(failure.reason, UNAUTHORIZED, "{failure}");
        assert!(failure.message.contains("has no token"), "{failure}");
    }
}

#[tokio::test]
async fn registry_that_lies_or_never_ends_is_refused() {
    let endless = || -> Turn {
        Box::new(|_, stream| {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
            while stream.write_all(&[7; 65536]).is_ok() {}
        })
    };
    let length = |length: u64| -> Turn {
        Box::new(move |_, stream| {
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
            );
        })
    };
    let size = content().len() as u64;
    for (turn, reason, words) in [
        (endless(), "IMAGE_TOO_LARGE", "or more"),
        (length(size - 1), "DOWNLOAD_REFUSED", "is to have 400000"),
        (length(1 << 50), "DOWNLOAD_REFUSED", "is to have 400000"),
        (length(size), "DOWNLOAD_FAILED", "tries in a row"),
    ] {
        let server = Server::start(vec![turn]);
        let failure = blob(&mut registry(&server, None)).await.unwrap_err();
        assert_eq!(failure.reason, reason, "{failure}");
        assert!(failure.message.contains(words), "{failure}");
    }
    for (turn, reason, words) in [
        (endless(), "IMAGE_TOO_LARGE", "4194304"),
        (length(1 << 40), "IMAGE_TOO_LARGE", "4194304"),
    ] {
        let server = Server::start(vec![turn]);
        let failure = document(&mut registry(&server, None)).await.unwrap_err();
        assert_eq!(failure.reason, reason, "{failure}");
        assert!(failure.message.contains(words), "{failure}");
    }
    let gone = Server::start(vec![Box::new(|_, stream| {
        answer(stream, "404 Not Found", "", b"");
    })]);
    let failure = document(&mut registry(&gone, None)).await.unwrap_err();
    assert_eq!(
        (failure.kind, failure.reason),
        (Kind::NotFound, MISSING),
        "{failure}"
    );
}

#[tokio::test]
async fn what_an_earlier_daemon_has_of_a_blob_is_not_got_again() {
    let server = Server::start(vec![Box::new(|head, stream| send(head, stream, usize::MAX))]);
    let mut registry = registry(&server, None);
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&content()[..300_000], 512).unwrap();
    let control = Control::default();
    let came = registry.blob(&digest(), &file, place(), &control).await.unwrap();
    assert_eq!((came.checksum, came.bytes), (digest().to_vec(), 400_000));
    assert!(server.requests.lock().unwrap()[0].contains("range: bytes=300000-"));
    // A complete blob causes no request, even with other data behind it in the file.
    file.write_all_at(b"the next one", 512 + 400_000).unwrap();
    let came = registry.blob(&digest(), &file, place(), &control).await.unwrap();
    assert_eq!((came.checksum, came.bytes), (digest().to_vec(), 400_000));
    assert_eq!(server.requests.lock().unwrap().len(), 1);
}

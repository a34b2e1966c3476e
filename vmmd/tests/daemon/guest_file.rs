//! Copies of files from and to guests.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use rstest::rstest;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use vmmd_api::v1::{
    self, GuestFileEnd, WriteGuestFileOpen, WriteGuestFileRequest, read_guest_file_response::Message as Read,
    write_guest_file_request::Message as Write,
};

use crate::{
    agent::{QemuAgent, guest, refuse, reply},
    harness::{Daemon, assert_refused, assert_says},
    verbs::within,
};

/// Files of a guest in the memory of the test.
#[derive(Clone, Default)]
struct Files(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    content: BTreeMap<String, Vec<u8>>,
    /// Path and position of each open file.
    open: BTreeMap<u64, (String, usize)>,
    next: u64,
}

impl Files {
    fn answer(&self, question: &Value) -> Vec<u8> {
        let mut inner = self.0.lock().unwrap();
        let inner = &mut *inner;
        let arguments = &question["arguments"];
        let word = question["execute"].as_str().unwrap();
        if word == "guest-file-open" {
            let path = arguments["path"].as_str().unwrap().to_owned();
            match arguments["mode"].as_str().unwrap() {
                "wb" => drop(inner.content.insert(path.clone(), Vec::new())),
                _ if inner.content.contains_key(&path) => {}
                _ => return refuse("GenericError", "failed to open file: No such file or directory"),
            }
            inner.next += 1;
            inner.open.insert(inner.next, (path, 0));
            return reply(&json!(inner.next));
        }
        let handle = arguments["handle"].as_u64().unwrap();
        let Some((path, position)) = inner.open.get_mut(&handle) else {
            return refuse("GenericError", "no such handle");
        };
        let content = inner.content.get_mut(path).unwrap();
        match word {
            "guest-file-read" => {
                let count = usize::try_from(arguments["count"].as_u64().unwrap()).unwrap();
                let end = content.len().min(*position + count);
                let piece = &content[*position..end];
                let answer = json!({"count": piece.len(), "buf-b64": BASE64.encode(piece), "eof": end == content.len()});
                *position = end;
                reply(&answer)
            }
            "guest-file-write" => {
                // A short write is no error.
                let bytes = BASE64.decode(arguments["buf-b64"].as_str().unwrap()).unwrap();
                let bytes = &bytes[..bytes.len().min(100_000)];
                content.extend(bytes);
                reply(&json!({"count": bytes.len(), "eof": false}))
            }
            "guest-file-flush" => reply(&json!({})),
            "guest-file-close" => {
                inner.open.remove(&handle);
                reply(&json!({}))
            }
            other => panic!("{other}"),
        }
    }

    async fn start(daemon: &Daemon) -> Self {
        let files = Self::default();
        let of = files.clone();
        guest(daemon, move |question| of.answer(question)).await;
        files
    }

    fn put(&self, path: &str, content: Vec<u8>) {
        self.0.lock().unwrap().content.insert(path.to_owned(), content);
    }

    fn get(&self, path: &str) -> Vec<u8> {
        self.0.lock().unwrap().content[path].clone()
    }

    async fn all_closed(&self) {
        within(async || self.0.lock().unwrap().open.is_empty().then_some(())).await;
    }
}

fn content(length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| u8::try_from(at / 7 % 251).unwrap())
        .collect()
}

impl Daemon {
    async fn read_file(&self, path: &str) -> Result<(Vec<u8>, Option<u64>), Status> {
        let request = v1::ReadGuestFileRequest {
            name: "web".into(),
            path: path.into(),
        };
        let mut stream = self.client().read_guest_file(request).await?.into_inner();
        let (mut content, mut end) = (Vec::new(), None);
        while let Some(response) = stream.message().await? {
            match response.message.unwrap() {
                Read::Data(data) => content.extend(data),
                Read::End(last) => end = Some(last.bytes),
            }
        }
        Ok((content, end))
    }

    async fn write_file(&self, messages: Vec<Write>) -> Result<u64, Status> {
        let messages = messages.into_iter().map(|message| WriteGuestFileRequest {
            message: Some(message),
        });
        let stream = tokio_stream::iter(messages.collect::<Vec<_>>());
        Ok(self.client().write_guest_file(stream).await?.into_inner().bytes)
    }
}

fn open(path: &str) -> Write {
    Write::Open(WriteGuestFileOpen {
        name: "web".into(),
        path: path.into(),
    })
}

#[rstest]
#[case::empty(0)]
#[case::short(11)]
#[case::pieces((2 << 20) + 12_345)]
#[tokio::test]
async fn file_goes_to_the_guest_and_comes_back(#[case] length: usize) {
    let daemon = Daemon::start().await;
    let files = Files::start(&daemon).await;
    let content = content(length);
    let mut messages = vec![open("/root/a")];
    messages.extend(content.chunks(128 << 10).map(|piece| Write::Data(piece.to_vec())));
    let bytes = length as u64;
    messages.push(Write::End(GuestFileEnd { bytes }));
    assert_eq!(daemon.write_file(messages).await.unwrap(), bytes);
    assert!(files.get("/root/a") == content);
    assert!(daemon.read_file("/root/a").await.unwrap() == (content, Some(bytes)));
    files.all_closed().await;
}

#[tokio::test]
async fn a_real_agent_keeps_100_mib_both_ways() {
    let daemon = Daemon::start().await;
    let _agent = QemuAgent::start(&daemon).await;
    let path = daemon.path("copy");
    let path = path.to_str().unwrap();
    let content = content(100 << 20);
    let bytes = content.len() as u64;
    let mut messages = vec![open(path)];
    messages.extend(content.chunks(128 << 10).map(|piece| Write::Data(piece.to_vec())));
    messages.push(Write::End(GuestFileEnd { bytes }));
    assert_eq!(daemon.write_file(messages).await.unwrap(), bytes);
    assert!(std::fs::read(path).unwrap() == content);
    assert!(daemon.read_file(path).await.unwrap() == (content, Some(bytes)));
}

#[tokio::test]
async fn copy_that_breaks_off_is_reported_and_the_file_closed() {
    let daemon = Daemon::start().await;
    let files = Files::start(&daemon).await;
    for messages in [
        vec![open("/a"), Write::Data(vec![1; 9])],
        vec![
            open("/a"),
            Write::Data(vec![1; 9]),
            Write::End(GuestFileEnd { bytes: 8 }),
        ],
    ] {
        let refused = daemon.write_file(messages).await.unwrap_err();
        assert_refused(&refused, Code::Aborted, "INPUT_INCOMPLETE");
        assert_says(&refused, "\"/a\" in the guest is incomplete");
        files.all_closed().await;
    }
    let refused = daemon.write_file(vec![open("/a"), open("/b")]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    files.all_closed().await;

    // The client of an upload goes away, and that of a download.
    let (sender, receiver) = mpsc::channel(1);
    let mut client = daemon.client();
    let call = tokio::spawn(async move {
        client
            .write_guest_file(ReceiverStream::new(receiver))
            .await
            .map(drop)
    });
    for message in [open("/a"), Write::Data(vec![1; 9]), Write::Data(vec![2; 9])] {
        let message = Some(message);
        sender.send(WriteGuestFileRequest { message }).await.unwrap();
    }
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    files.all_closed().await;
    files.put("/large", content(8 << 20));
    let request = v1::ReadGuestFileRequest {
        name: "web".into(),
        path: "/large".into(),
    };
    let mut stream = daemon
        .client()
        .read_guest_file(request)
        .await
        .unwrap()
        .into_inner();
    stream.message().await.unwrap();
    drop(stream);
    files.all_closed().await;
}

#[tokio::test]
async fn missing_files_and_wrong_paths_are_refused() {
    let daemon = Daemon::start().await;
    let files = Files::start(&daemon).await;
    let refused = daemon.read_file("/missing").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "GUEST_AGENT_ERROR");
    assert_says(&refused, "No such file");
    for path in ["", "relative", "/\0"] {
        let refused = daemon.read_file(path).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        let refused = daemon.write_file(vec![open(path)]).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
    }
    let refused = daemon.write_file(vec![Write::Data(vec![1])]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    files.all_closed().await;
}

#[tokio::test]
async fn slow_reader_makes_the_guest_wait() {
    let daemon = Daemon::start().await;
    let read = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&read);
    guest(&daemon, move |question| {
        match question["execute"].as_str().unwrap() {
            "guest-file-open" => reply(&json!(1)),
            "guest-file-read" => {
                // A file without an end.
                let length = question["arguments"]["count"].as_u64().unwrap();
                count.fetch_add(length, Ordering::SeqCst);
                let piece = vec![7; usize::try_from(length).unwrap()];
                reply(&json!({"count": length, "buf-b64": BASE64.encode(piece), "eof": false}))
            }
            _ => reply(&json!({})),
        }
    })
    .await;
    let request = v1::ReadGuestFileRequest {
        name: "web".into(),
        path: "/dev/zero".into(),
    };
    let mut stream = daemon
        .client()
        .read_guest_file(request)
        .await
        .unwrap()
        .into_inner();
    stream.message().await.unwrap();
    // Other questions reach the agent while the client does not read: they come after its last piece.
    let mut before = 0;
    within(async || {
        let now = read.load(Ordering::SeqCst);
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        let is_still = now == before;
        before = now;
        is_still.then_some(())
    })
    .await;
    assert!(read.load(Ordering::SeqCst) <= 16 << 20, "{read:?}");
}

#[tokio::test]
async fn hostile_answers_about_files_end_the_copy() {
    let daemon = Daemon::start().await;
    guest(&daemon, |question| {
        let handle = question["arguments"]["handle"].as_u64();
        match (question["execute"].as_str().unwrap(), handle) {
            ("guest-file-open", _) => {
                let path = question["arguments"]["path"].as_str().unwrap();
                reply(&json!(path[1..].parse::<u64>().unwrap()))
            }
            ("guest-file-read", Some(1)) => reply(&json!({"count": 1, "buf-b64": "", "eof": false})),
            ("guest-file-read", Some(2)) => reply(&json!({"count": 1, "buf-b64": "?", "eof": false})),
            ("guest-file-read", Some(3)) => {
                reply(&json!({"count": 1, "buf-b64": BASE64.encode(vec![0; 1 << 20]), "eof": false}))
            }
            ("guest-file-write", Some(1)) => reply(&json!({"count": 0, "eof": false})),
            ("guest-file-write", _) => reply(&json!({"count": 1_u64 << 40, "eof": false})),
            _ => reply(&json!({})),
        }
    })
    .await;
    for path in ["/1", "/2", "/3"] {
        let refused = daemon.read_file(path).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "GUEST_AGENT_ERROR");
    }
    for path in ["/1", "/2"] {
        let refused = daemon
            .write_file(vec![open(path), Write::Data(vec![1; 9])])
            .await
            .unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "GUEST_AGENT_ERROR");
        assert_says(&refused, "incomplete");
    }
}

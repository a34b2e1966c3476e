//! Events stay available: across restarts of the daemon, by cursor, without unreported gaps.

use prost::Message as _;
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::{Code, Streaming, transport::Channel};
use vmmd_api::v1::{self, EventSeverity, event_service_client::EventServiceClient};

use crate::harness::{Daemon, PATIENCE, assert_refused, command, connect, refusal};

async fn events(daemon: &Daemon) -> EventServiceClient<Channel> {
    EventServiceClient::new(connect(daemon.folder.path()).await)
}

async fn list(daemon: &Daemon, filter: v1::EventFilter) -> v1::ListEventsResponse {
    let request = v1::ListEventsRequest {
        filter: Some(filter),
        ..Default::default()
    };
    let answer = events(daemon).await.list_events(request).await.unwrap();
    answer.into_inner()
}

async fn watch(daemon: &Daemon, cursor: &str) -> Streaming<v1::WatchEventsResponse> {
    let request = v1::WatchEventsRequest {
        filter: None,
        cursor: cursor.into(),
    };
    let answer = events(daemon).await.watch_events(request).await.unwrap();
    answer.into_inner()
}

/// The next event that the watch gives.
async fn next(stream: &mut Streaming<v1::WatchEventsResponse>) -> v1::Event {
    let found = timeout(PATIENCE, async {
        loop {
            if let Some(event) = stream.next().await.unwrap().unwrap().event {
                return event;
            }
        }
    });
    found.await.unwrap()
}

async fn make_disk(daemon: &Daemon, name: &str) {
    let request = v1::CreateDiskRequest {
        disk: Some(crate::disks::raw(name, 1 << 20)),
        ..Default::default()
    };
    let mut client = v1::disk_service_client::DiskServiceClient::new(connect(daemon.folder.path()).await);
    client.create_disk(request).await.unwrap();
}

async fn delete_disk(daemon: &Daemon, name: &str) {
    let mut client = v1::disk_service_client::DiskServiceClient::new(connect(daemon.folder.path()).await);
    let request = v1::DeleteDiskRequest {
        name: name.into(),
        ..Default::default()
    };
    client.delete_disk(request).await.unwrap();
}

fn reasons(events: &[v1::Event]) -> Vec<&str> {
    events.iter().map(|event| event.reason.as_str()).collect()
}

#[tokio::test]
async fn events_survive_a_kill_and_a_watch_resumes_by_its_cursor() {
    let mut daemon = Daemon::start().await;
    let mut stream = watch(&daemon, "").await;
    make_disk(&daemon, "data").await;
    let made = next(&mut stream).await;
    let object = made.object.clone().unwrap();
    assert_eq!(
        (made.reason.as_str(), object.kind.as_str()),
        ("DiskCreated", "Disk")
    );
    assert_eq!(
        (object.name.as_str(), made.severity()),
        ("data", EventSeverity::Normal)
    );
    assert!(!object.uid.is_empty() && made.time.is_some());
    delete_disk(&daemon, "data").await;
    daemon.kill_and_restart().await;
    let mut stream = watch(&daemon, &made.cursor).await;
    let rest = [next(&mut stream).await, next(&mut stream).await];
    assert_eq!(reasons(&rest), ["DiskDeleted", "DaemonStarted"]);
    let all = list(&daemon, v1::EventFilter::default()).await;
    assert_eq!(
        reasons(&all.events),
        ["DaemonStarted", "DiskCreated", "DiskDeleted", "DaemonStarted"]
    );
    make_disk(&daemon, "more").await;
    let mut stream = watch(&daemon, &all.cursor).await;
    assert_eq!(next(&mut stream).await.object.unwrap().name, "more");
}

#[tokio::test]
async fn an_orderly_end_is_told_and_resumed_too() {
    let mut daemon = Daemon::start().await;
    let cursor = list(&daemon, v1::EventFilter::default()).await.cursor;
    daemon.terminate();
    daemon.relaunch().await;
    let mut stream = watch(&daemon, &cursor).await;
    let rest = [next(&mut stream).await, next(&mut stream).await];
    assert_eq!(reasons(&rest), ["DaemonStopping", "DaemonStarted"]);
}

#[tokio::test]
async fn cursor_of_another_node_and_invalid_filter_are_refused() {
    let (one, other) = (Daemon::start().await, Daemon::start().await);
    let cursor = list(&one, v1::EventFilter::default()).await.cursor;
    for cursor in [cursor.as_str(), "nonsense"] {
        let request = v1::WatchEventsRequest {
            filter: None,
            cursor: cursor.into(),
        };
        let refused = events(&other).await.watch_events(request).await.unwrap_err();
        assert_refused(&refused, Code::OutOfRange, "CURSOR_EXPIRED");
    }
    let request = v1::ListEventsRequest {
        filter: None,
        page_size: 1001,
        ..Default::default()
    };
    let refused = events(&one).await.list_events(request).await.unwrap_err();
    assert_eq!(refusal(&refused).0, Code::InvalidArgument);
    let filter = v1::EventFilter {
        object: Some(v1::ObjectReference {
            kind: "vms".into(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let request = v1::WatchEventsRequest {
        filter: Some(filter),
        cursor: String::new(),
    };
    let refused = events(&one).await.watch_events(request).await.unwrap_err();
    assert_eq!(refusal(&refused).0, Code::InvalidArgument);
}

#[tokio::test]
async fn what_a_new_daemon_repairs_is_told_with_what_it_was() {
    let mut daemon = Daemon::start().await;
    daemon.kill();
    let leftover = daemon.path("run/vms/6f4b3c1e-5f0e-4c58-9d0f-0b4f5f2b7a11");
    std::fs::create_dir_all(&leftover).unwrap();
    daemon.relaunch().await;
    let filter = v1::EventFilter {
        object: Some(v1::ObjectReference {
            kind: "Node".into(),
            ..Default::default()
        }),
        reasons: vec!["Repaired".into()],
        ..Default::default()
    };
    let told = list(&daemon, filter).await.events;
    assert_eq!(told.len(), 1);
    assert!(told[0].message.contains("6f4b3c1e"), "{}", told[0].message);
    assert!(!leftover.exists());
}

#[tokio::test]
async fn lists_have_pages_of_which_the_newest_comes_first() {
    let daemon = Daemon::start().await;
    for name in ["a", "b", "c"] {
        daemon.create(daemon.manifest(name, "")).await.unwrap();
    }
    let mut request = v1::ListEventsRequest {
        page_size: 2,
        ..Default::default()
    };
    let mut client = events(&daemon).await;
    let newest = client.list_events(request.clone()).await.unwrap().into_inner();
    assert_eq!(names(&newest), ["b", "c"]);
    // Events of the meantime are on none of the other pages.
    daemon.create(daemon.manifest("d", "")).await.unwrap();
    request.page_token.clone_from(&newest.next_page_token);
    let older = client.list_events(request.clone()).await.unwrap().into_inner();
    assert_eq!(names(&older), ["", "a"]);
    assert_eq!(older.next_page_token, "");
    request.page_token = "nonsense".into();
    let refused = client.list_events(request).await.unwrap_err();
    assert_refused(&refused, Code::OutOfRange, "CURSOR_EXPIRED");
}

fn names(listed: &v1::ListEventsResponse) -> Vec<&str> {
    let objects = listed.events.iter().filter_map(|event| event.object.as_ref());
    objects.map(|object| object.name.as_str()).collect()
}

/// A frame of the file of events.
#[derive(Clone, PartialEq, prost::Message)]
struct Record {
    #[prost(message, optional, tag = "2")]
    event: Option<v1::Event>,
    #[prost(message, optional, tag = "3")]
    mark: Option<Mark>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Mark {
    #[prost(bool, tag = "3")]
    closed: bool,
}

/// The frames of the file of events. A frame has a length, a checksum and a content.
fn frames(daemon: &Daemon) -> Vec<Record> {
    let bytes = std::fs::read(daemon.path("state/events.log")).unwrap();
    let (mut rest, mut records) = (&bytes[..], Vec::new());
    while let Some((length, after)) = rest.split_first_chunk() {
        let (content, next) = after[4..].split_at(u32::from_le_bytes(*length) as usize);
        records.push(Record::decode(content).unwrap());
        rest = next;
    }
    records
}

#[tokio::test]
async fn daemon_that_cannot_serve_closes_the_file_of_events() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut daemon = Daemon::start().await;
    daemon.kill();
    let config = daemon.path("config.toml");
    let metrics = format!("\n[metrics]\nlisten = \"{}\"\n", listener.local_addr().unwrap());
    let text = std::fs::read_to_string(&config).unwrap() + &metrics;
    std::fs::write(&config, text).unwrap();
    let before = frames(&daemon).len();
    let ended = command(daemon.folder.path(), None).status().unwrap();
    assert!(!ended.success());
    let frames = frames(&daemon);
    let reasons: Vec<_> = frames[before..]
        .iter()
        .filter_map(|record| Some(record.event.as_ref()?.reason.as_str()))
        .collect();
    assert!(reasons.contains(&"DaemonStarted"), "{reasons:?}");
    let last = frames.last().unwrap().mark.as_ref();
    assert!(last.is_some_and(|mark| mark.closed), "{last:?}");
}

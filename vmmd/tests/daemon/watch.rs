//! `WatchVms`.

use tokio_stream::StreamExt;
use tonic::Streaming;
use vmmd_api::v1::{VmPhase, WatchEventType, WatchVmsResponse};

use crate::harness::Daemon;

async fn next(events: &mut Streaming<WatchVmsResponse>) -> (WatchEventType, String, VmPhase) {
    let event = events.next().await.unwrap().unwrap();
    let kind = event.r#type();
    let vm = event.vm.unwrap_or_default();
    let phase = vm.status.map_or(VmPhase::Unspecified, |status| status.phase());
    (kind, vm.metadata.unwrap_or_default().name, phase)
}

#[tokio::test]
async fn a_watcher_sees_what_is_there_and_then_the_changes() {
    use VmPhase::{Running, Stopped, Unspecified};
    use WatchEventType::{Added, Deleted, Modified, Synced};
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("a", "")).await.unwrap();
    let mut events = daemon.watch("").await;
    assert_eq!(next(&mut events).await, (Added, "a".into(), Stopped));
    assert_eq!(next(&mut events).await, (Synced, String::new(), Unspecified));
    daemon.create(daemon.manifest("b", "")).await.unwrap();
    assert_eq!(next(&mut events).await, (Added, "b".into(), Stopped));
    // Phases that are over soon may not be seen.
    let mut until = async |wanted| {
        let mut seen = next(&mut events).await;
        while seen != (Modified, "b".to_owned(), wanted) {
            assert_eq!((seen.0, seen.1.as_str()), (Modified, "b"));
            seen = next(&mut events).await;
        }
    };
    daemon.start_vm("b").await.unwrap();
    until(Running).await;
    daemon.stop("b", None).await.unwrap();
    until(Stopped).await;
    daemon.delete("b", false).await.unwrap();
    let mut last = next(&mut events).await;
    while last.0 == Modified {
        last = next(&mut events).await;
    }
    assert_eq!((last.0, last.1.as_str()), (Deleted, "b"));
}

#[tokio::test]
async fn a_watch_of_one_name_sees_only_that_also_before_it_exists() {
    let daemon = Daemon::start().await;
    let mut events = daemon.watch("b").await;
    assert_eq!(next(&mut events).await.0, WatchEventType::Synced);
    daemon.create(daemon.manifest("a", "")).await.unwrap();
    daemon.create(daemon.manifest("b", "")).await.unwrap();
    assert_eq!(
        next(&mut events).await,
        (WatchEventType::Added, "b".into(), VmPhase::Stopped)
    );
}

#[tokio::test]
async fn a_watcher_that_does_not_read_gets_the_difference_later() {
    let daemon = Daemon::start().await;
    let mut events = daemon.watch("").await;
    assert_eq!(next(&mut events).await.0, WatchEventType::Synced);
    daemon.run("a", "").await;
    let mut console = crate::console::Client::open(&daemon, "a").await;
    // More changes than the queues on the way hold.
    for _ in 0..40 {
        console.type_in(&"reset\n".repeat(200)).await;
    }
    daemon.delete("a", true).await.unwrap();
    daemon.create(daemon.manifest("last", "")).await.unwrap();
    let mut last = Vec::new();
    while last.last() != Some(&"last".to_owned()) {
        let (kind, name, _) = next(&mut events).await;
        if kind != WatchEventType::Modified {
            last.push(name);
        }
    }
    assert_eq!(last, ["a", "a", "last"], "added, deleted, added");
}

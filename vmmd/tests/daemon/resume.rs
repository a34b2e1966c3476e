//! `WatchVms` with a cursor: a returning client receives all missed changes, regardless of kills of
//! the daemon.

use std::collections::{BTreeMap, BTreeSet};

use WatchEventType::{Added, Deleted, Modified, Synced};
use proptest::{prelude::*, strategy::Strategy};
use tokio::task::yield_now;
use tokio_stream::StreamExt;
use tonic::{Code, Status, Streaming};
use vmmd_api::v1::{self, VmFilter, VmPhase, WatchEventType, WatchVmsRequest, WatchVmsResponse};

use crate::{
    harness::{Daemon, assert_refused, uid},
    verbs::fields,
};

impl Daemon {
    async fn watch_by(&self, request: WatchVmsRequest) -> Result<Streaming<WatchVmsResponse>, Status> {
        Ok(self.client().watch_vms(request).await?.into_inner())
    }

    async fn watch_from(&self, cursor: &str) -> Streaming<WatchVmsResponse> {
        let request = WatchVmsRequest {
            cursor: cursor.into(),
            ..Default::default()
        };
        self.watch_by(request).await.unwrap()
    }
}

async fn next(events: &mut Streaming<WatchVmsResponse>) -> WatchVmsResponse {
    events.next().await.unwrap().unwrap()
}

fn told(event: &WatchVmsResponse) -> (WatchEventType, String) {
    let vm = event.vm.clone().unwrap_or_default();
    (event.r#type(), vm.metadata.unwrap_or_default().name)
}

/// Kinds and names up to SYNCED, and the cursor of that.
async fn catch_up(events: &mut Streaming<WatchVmsResponse>) -> (Vec<(WatchEventType, String)>, String) {
    let mut all = Vec::new();
    loop {
        let event = next(events).await;
        if event.r#type() == Synced {
            return (all, event.cursor);
        }
        all.push(told(&event));
    }
}

#[tokio::test]
async fn a_watch_goes_on_after_any_of_its_events() {
    let mut daemon = Daemon::start().await;
    for name in ["a", "b", "c"] {
        daemon.create(daemon.manifest(name, "")).await.unwrap();
    }
    let mut events = daemon.watch_from("").await;
    let first = next(&mut events).await;
    let (rest, synced) = catch_up(&mut events).await;
    assert_eq!(rest.len(), 2);
    // In the middle of the first look.
    assert_eq!(
        catch_up(&mut daemon.watch_from(&first.cursor).await).await.0,
        rest
    );
    // Nothing has changed.
    assert_eq!(catch_up(&mut daemon.watch_from(&synced).await).await.0, []);
    daemon.delete("b", false).await.unwrap();
    daemon.create(daemon.manifest("d", "")).await.unwrap();
    daemon.start_vm("a").await.unwrap();
    let missed = catch_up(&mut daemon.watch_from(&synced).await).await.0;
    let expected = [
        (Deleted, "b".to_owned()),
        (Added, "d".to_owned()),
        (Modified, "a".to_owned()),
    ];
    assert_eq!(missed, expected);
    // The next daemon does not know the unchanged VMs, but it knows the removed and the new ones.
    daemon.kill_and_restart().await;
    let mut missed = catch_up(&mut daemon.watch_from(&synced).await).await.0;
    missed.sort_by(|a, b| a.1.cmp(&b.1));
    let expected = [(Modified, "a"), (Deleted, "b"), (Modified, "c"), (Added, "d")];
    assert_eq!(missed, expected.map(|(kind, name)| (kind, name.to_owned())));
}

#[tokio::test]
async fn a_watch_goes_on_from_a_list() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("a", "")).await.unwrap();
    let listed = daemon
        .client()
        .list_vms(v1::ListVmsRequest::default())
        .await
        .unwrap();
    daemon.create(daemon.manifest("b", "")).await.unwrap();
    let cursor = listed.into_inner().cursor;
    let missed = catch_up(&mut daemon.watch_from(&cursor).await).await.0;
    assert_eq!(missed, [(Added, "b".to_owned())]);
}

#[tokio::test]
async fn cursor_of_another_node_or_filter_is_refused() {
    let daemon = Daemon::start().await;
    let other = Daemon::start().await;
    let (_, foreign) = catch_up(&mut other.watch_from("").await).await;
    let expired = WatchVmsRequest {
        cursor: foreign.clone(),
        ..Default::default()
    };
    let failure = daemon.watch_by(expired).await.unwrap_err();
    assert_refused(&failure, Code::OutOfRange, "CURSOR_EXPIRED");
    assert!(
        failure.message().contains("watch"),
        "it says what to do: {}",
        failure.message()
    );
    for (name, cursor) in [("a", foreign.as_str()), ("", "x")] {
        let wrong = WatchVmsRequest {
            name: name.into(),
            cursor: cursor.into(),
            ..Default::default()
        };
        let failure = daemon.watch_by(wrong).await.unwrap_err();
        assert_eq!(failure.code(), Code::InvalidArgument);
        assert_eq!(fields(&failure), ["cursor"]);
    }
}

#[tokio::test]
async fn vm_that_enters_or_leaves_the_filter_is_added_or_deleted() {
    let daemon = Daemon::start().await;
    daemon.create_labelled("a", "web").await;
    daemon.create_labelled("b", "db").await;
    let filter = VmFilter {
        labels: vec!["tier=web".into()],
        phases: vec![VmPhase::Running.into(), VmPhase::Paused.into()],
        ..Default::default()
    };
    let request = WatchVmsRequest {
        filter: Some(filter),
        fields: vec!["status.phase".into()],
        ..Default::default()
    };
    let mut events = daemon.watch_by(request.clone()).await.unwrap();
    let (there, synced) = catch_up(&mut events).await;
    assert_eq!(there, []);
    daemon.start_vm("b").await.unwrap();
    daemon.start_vm("a").await.unwrap();
    let added = next(&mut events).await;
    assert_eq!(told(&added), (Added, "a".to_owned()));
    assert!(added.vm.unwrap().spec.is_none());
    let name = || v1::PauseVmRequest {
        name: "a".into(),
        ..Default::default()
    };
    daemon.client().pause_vm(name()).await.unwrap();
    let mut last = next(&mut events).await;
    while last.vm.as_ref().unwrap().status.as_ref().unwrap().phase() == VmPhase::Running {
        last = next(&mut events).await;
    }
    assert_eq!(told(&last), (Modified, "a".to_owned()));
    daemon.kill_vm("a").await.unwrap();
    assert_eq!(told(&next(&mut events).await), (Deleted, "a".to_owned()));
    // A client that was away in between may have seen it.
    let back = WatchVmsRequest {
        cursor: synced,
        ..request
    };
    let missed = catch_up(&mut daemon.watch_by(back).await.unwrap()).await.0;
    assert!(missed.contains(&(Deleted, "a".to_owned())), "{missed:?}");
}

/// Action of a client of the property test, or of its environment.
#[derive(Clone, Debug)]
enum Step {
    Create(u8),
    StartOrKill(u8),
    Delete(u8),
    /// The client reads some of the events that are there.
    Read(u8),
    Disconnect,
    /// The daemon is killed.
    Kill,
    /// It is killed while it deletes a VM, sooner or later.
    KillWhileDeleting(u8, u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..4_u8).prop_map(Step::Create),
        3 => (0..4_u8).prop_map(Step::StartOrKill),
        3 => (0..4_u8).prop_map(Step::Delete),
        5 => (0..6_u8).prop_map(Step::Read),
        2 => Just(Step::Disconnect),
        1 => Just(Step::Kill),
        1 => ((0..4_u8), proptest::num::u8::ANY).prop_map(|(vm, when)| Step::KillWhileDeleting(vm, when)),
    ]
}

#[derive(Default)]
struct Client {
    stream: Option<Streaming<WatchVmsResponse>>,
    cursor: String,
    /// By uid.
    view: BTreeMap<String, v1::Vm>,
    deleted: BTreeSet<String>,
}

impl Client {
    fn apply(&mut self, event: WatchVmsResponse) {
        self.cursor.clone_from(&event.cursor);
        let kind = event.r#type();
        let Some(vm) = event.vm else { return };
        let uid = uid(&vm);
        if kind == Deleted {
            self.view.remove(&uid);
            self.deleted.insert(uid);
        } else {
            assert!(!self.deleted.contains(&uid), "{uid} came back");
            self.view.insert(uid, vm);
        }
    }

    async fn stream(&mut self, daemon: &Daemon) -> &mut Streaming<WatchVmsResponse> {
        if self.stream.is_none() {
            self.stream = Some(daemon.watch_from(&self.cursor).await);
        }
        self.stream.as_mut().unwrap()
    }

    /// Reads until nothing comes at once, at most `limit` events.
    async fn read(&mut self, daemon: &Daemon, limit: u8) {
        for _ in 0..limit {
            let event = tokio::select! {
                biased;
                event = self.stream(daemon).await.next() => event,
                () = yield_now() => return,
            };
            match event {
                Some(Ok(event)) => self.apply(event),
                _ => {
                    self.stream = None;
                    return;
                }
            }
        }
    }
}

async fn play(steps: Vec<Step>) {
    let mut daemon = Daemon::start().await;
    let mut client = Client::default();
    // From here on the client wants to know everything.
    let first = next(client.stream(&daemon).await).await;
    client.apply(first);
    let name = |vm: u8| format!("vm{vm}");
    for step in steps {
        match step {
            Step::Create(vm) => drop(daemon.create(daemon.manifest(&name(vm), "")).await),
            Step::StartOrKill(vm) => {
                if daemon.start_vm(&name(vm)).await.is_err() {
                    drop(daemon.kill_vm(&name(vm)).await);
                }
            }
            Step::Delete(vm) => drop(daemon.delete(&name(vm), true).await),
            Step::Read(limit) => client.read(&daemon, limit).await,
            Step::Disconnect => client.stream = None,
            Step::Kill => {
                client.stream = None;
                daemon.kill_and_restart().await;
            }
            Step::KillWhileDeleting(vm, when) => {
                let (mut api, name) = (daemon.client(), name(vm));
                let request = v1::DeleteVmRequest {
                    name,
                    force: true,
                    ..Default::default()
                };
                let call = tokio::spawn(async move { api.delete_vm(request).await });
                for _ in 0..when {
                    yield_now().await;
                }
                daemon.kill();
                drop(call.await);
                client.stream = None;
                daemon.relaunch().await;
            }
        }
    }
    // All missed changes arrive here. The daemon may still be recovering its VMs.
    loop {
        let there = daemon.list().await;
        let there: BTreeMap<_, _> = there.into_iter().map(|vm| (uid(&vm), vm)).collect();
        if client.view == there {
            return;
        }
        let event = tokio::time::timeout(
            std::time::Duration::from_secs(20),
            client.stream(&daemon).await.next(),
        );
        match event.await {
            Ok(event) => client.apply(event.unwrap().unwrap()),
            Err(_) => panic!("sees {:#?}, there is {there:#?}", client.view),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, max_shrink_iters: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn reconnecting_client_ends_with_the_vms_of_the_list(
        steps in proptest::collection::vec(step(), 5..40),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(play(steps));
    }
}

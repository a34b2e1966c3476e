//! Snapshots of disks whose file systems the agent in the guest has frozen.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use serde_json::{Value, json};
use vmmd_api::v1::SnapshotConsistency as Consistency;

use super::{disks_alone::of_disks, *};
use crate::agent::{self, refuse, reply};

fn request(name: &str, consistency: Consistency) -> v1::CreateSnapshotRequest {
    v1::CreateSnapshotRequest {
        consistency: consistency.into(),
        ..of_disks(name, "web", true)
    }
}

async fn take(daemon: &Daemon, name: &str, consistency: Consistency) -> Result<v1::SnapshotStatus, Status> {
    let taken = daemon
        .snapshots()
        .await
        .create_snapshot(request(name, consistency))
        .await?;
    Ok(taken.into_inner().snapshot.unwrap().status.unwrap())
}

/// An agent that freezes and thaws its guest.
#[derive(Clone, Default)]
struct Freezer {
    is_frozen: Arc<AtomicBool>,
    /// Requests, each with the content of the disk at that time.
    log: Arc<Mutex<Vec<String>>>,
    /// Answer to the next requests to thaw, without any effect.
    deaf: Arc<AtomicUsize>,
}

impl Freezer {
    /// The agent of the VM "web", which has a disk and these options of the mock.
    async fn start(daemon: &Daemon, options: &str) -> Self {
        let freezer = Self::default();
        let image = with_disk_of(daemon, options).await;
        let vm = daemon.get("web").await.unwrap();
        let of = freezer.clone();
        agent::listen(daemon, &vm, move |question| of.answer(question, &image));
        freezer
    }

    fn answer(&self, question: &Value, image: &Path) -> Vec<u8> {
        let word = question["execute"].as_str().unwrap();
        let note = |word: &str| {
            let line = format!("{word}: {}", content(image));
            self.log.lock().unwrap().push(line);
        };
        match word {
            "guest-fsfreeze-freeze" => {
                note("freeze");
                self.is_frozen.store(true, Ordering::SeqCst);
                reply(&json!(2))
            }
            "guest-fsfreeze-thaw" if self.deaf.load(Ordering::SeqCst) > 0 => {
                self.deaf.fetch_sub(1, Ordering::SeqCst);
                b"{}\n".to_vec()
            }
            "guest-fsfreeze-thaw" => {
                note("thaw");
                self.is_frozen.store(false, Ordering::SeqCst);
                reply(&json!(2))
            }
            other => panic!("{other}"),
        }
    }

    fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    fn is_frozen(&self) -> bool {
        self.is_frozen.load(Ordering::SeqCst)
    }

    async fn wait(&self, is_frozen: bool) {
        within(async || (self.is_frozen() == is_frozen).then_some(())).await;
    }
}

/// The VM "web" with a raw disk and a channel to an agent.
async fn with_disk_of(daemon: &Daemon, options: &str) -> PathBuf {
    let image = daemon.path("disk.raw");
    fs::write(&image, [0; 4096]).unwrap();
    let change = |spec: &mut v1::VmSpec| {
        spec.guest_agent = Some(v1::GuestAgentSpec {});
        spec.disks.push(v1::DiskSpec {
            cache: v1::DiskCache::Writeback.into(),
            any_content: true,
            logical_block_bytes: 4096,
            ..raw_file("root", &image)
        });
    };
    daemon.run_with("web", options, change).await;
    image
}

#[tokio::test]
async fn guest_is_frozen_before_the_pause_and_thawed_after_it() {
    let daemon = Daemon::start().await;
    let freezer = Freezer::start(&daemon, "").await;
    for (name, consistency) in [("one", Consistency::Agent), ("two", Consistency::RequireAgent)] {
        let told = take(&daemon, name, consistency).await.unwrap();
        assert_eq!(told.consistency(), Consistency::Agent);
        assert_eq!(told.consistency_message, "");
        assert!(!freezer.is_frozen());
    }
    assert!(content(&daemon.snapshot_disk()).starts_with("until the snapshot"));
    let log = freezer.log();
    assert_eq!(log[..2], ["freeze: ", "thaw: behind the snapshot"]);
    assert_eq!(log.len(), 4);
    // Without a wish, no agent is asked.
    let told = take(&daemon, "three", Consistency::Unspecified).await.unwrap();
    assert_eq!(told.consistency(), Consistency::Crash);
    assert_eq!(freezer.log().len(), 4);
    // It goes along to another node.
    let archive = daemon.export_snapshot("one").await.unwrap();
    let other = Daemon::start().await;
    let imported = other.import_snapshot("", &archive).await.unwrap().status.unwrap();
    assert_eq!(imported.consistency(), Consistency::Agent);
}

#[rstest]
#[case::unsupported(refuse("CommandNotFound", "not found"), "GUEST_AGENT_UNSUPPORTED")]
#[case::refused(refuse("GenericError", "no"), "GUEST_AGENT_ERROR")]
#[case::nothing(reply(&json!(0)), "GUEST_AGENT_ERROR")]
#[case::garbage(b"[]\n".to_vec(), "GUEST_AGENT_ERROR")]
#[tokio::test]
async fn guest_that_cannot_be_frozen_is_an_error_only_if_required(
    #[case] answer: Vec<u8>,
    #[case] reason: &str,
) {
    let daemon = Daemon::start().await;
    with_disk_of(&daemon, "").await;
    let vm = daemon.get("web").await.unwrap();
    let thaws = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&thaws);
    agent::listen(&daemon, &vm, move |question| match question["execute"].as_str() {
        Some("guest-fsfreeze-thaw") => {
            count.fetch_add(1, Ordering::SeqCst);
            reply(&json!(0))
        }
        _ => answer.clone(),
    });
    let refused = take(&daemon, "one", Consistency::RequireAgent).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, reason);
    assert_says(&refused, "are not frozen");
    assert!(daemon.snapshot_names().await.is_empty() && daemon.snapshot_files().is_empty());
    assert_eq!(thaws.load(Ordering::SeqCst), 1);
    let told = take(&daemon, "one", Consistency::Agent).await.unwrap();
    assert_eq!(told.consistency(), Consistency::Crash);
    assert!(told.consistency_message.contains("not frozen"), "{told:?}");
}

#[tokio::test]
async fn vm_without_a_running_guest_and_full_snapshot_are_not_frozen() {
    let daemon = Daemon::start().await;
    let freezer = Freezer::start(&daemon, "").await;
    let mut full = request("full", Consistency::RequireAgent);
    full.snapshot.as_mut().unwrap().spec.as_mut().unwrap().kind = v1::SnapshotKind::Full.into();
    let refused = daemon
        .snapshots()
        .await
        .create_snapshot(full.clone())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    full.consistency = Consistency::Agent.into();
    let told = daemon
        .snapshots()
        .await
        .create_snapshot(full.clone())
        .await
        .unwrap();
    let told = told.into_inner().snapshot.unwrap().status.unwrap();
    assert!(told.consistency_message.contains("with memory"), "{told:?}");
    full.consistency = 9;
    let unknown = daemon.snapshots().await.create_snapshot(full).await.unwrap_err();
    assert_eq!(unknown.code(), Code::InvalidArgument);

    daemon.pause("web").await.unwrap();
    let refused = take(&daemon, "paused", Consistency::RequireAgent)
        .await
        .unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
    let told = take(&daemon, "paused", Consistency::Agent).await.unwrap();
    assert!(told.consistency_message.contains("not running"), "{told:?}");
    daemon.kill_vm("web").await.unwrap();
    let refused = take(&daemon, "stopped", Consistency::RequireAgent)
        .await
        .unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
    let told = take(&daemon, "stopped", Consistency::Agent).await.unwrap();
    assert_eq!(told.consistency(), Consistency::Crash);
    assert!(freezer.log().is_empty());
}

#[rstest]
#[case::wanted(Consistency::Agent)]
#[case::required(Consistency::RequireAgent)]
#[tokio::test]
async fn guest_that_is_frozen_for_too_long_is_thawed(#[case] consistency: Consistency) {
    let daemon = Daemon::start().await;
    let freezer = Freezer::start(&daemon, "").await;
    daemon.fault("freeze-limit");
    daemon.fault("guest-frozen");
    let mut client = daemon.snapshots().await;
    let taking = tokio::spawn(async move { client.create_snapshot(request("one", consistency)).await });
    freezer.wait(true).await;
    freezer.wait(false).await;
    daemon.release("guest-frozen");
    let taken = taking.await.unwrap();
    if consistency == Consistency::RequireAgent {
        assert_refused(&taken.unwrap_err(), Code::Aborted, "GUEST_AGENT_SILENT");
        return;
    }
    let told = taken.unwrap().into_inner().snapshot.unwrap().status.unwrap();
    assert_eq!(told.consistency(), Consistency::Crash);
    assert!(told.consistency_message.contains("was thawed"), "{told:?}");
}

#[tokio::test]
async fn failed_or_abandoned_snapshot_thaws_the_guest() {
    let daemon = Daemon::start().await;
    let freezer = Freezer::start(&daemon, "mock.save=refuse").await;
    take(&daemon, "one", Consistency::Agent).await.unwrap_err();
    assert!(!freezer.is_frozen());
    assert_eq!(freezer.log().len(), 2);
    daemon.delete("web", true).await.unwrap();

    let freezer = Freezer::start(&daemon, "mock.save=stand").await;
    let mut client = daemon.snapshots().await;
    let taking =
        tokio::spawn(async move { client.create_snapshot(request("two", Consistency::Agent)).await });
    daemon.wait_phase("web", VmPhase::Paused).await;
    assert!(freezer.is_frozen());
    taking.abort();
    freezer.wait(false).await;
    daemon.wait_phase("web", VmPhase::Running).await;
}

#[rstest]
#[case::noted("freeze-noted")]
#[case::frozen("guest-frozen")]
#[case::quiet("disks-quiet")]
#[case::released("guest-thaws")]
#[tokio::test]
async fn daemon_killed_at_any_step_leaves_no_frozen_guest(#[case] step: &str) {
    let mut daemon = Daemon::start().await;
    let freezer = Freezer::start(&daemon, "").await;
    daemon.fault(step);
    let mut client = daemon.snapshots().await;
    let taking = tokio::spawn(async move {
        client
            .create_snapshot(request("one", Consistency::RequireAgent))
            .await
    });
    daemon.reached(step).await;
    assert_eq!(freezer.is_frozen(), step != "freeze-noted");
    daemon.kill();
    taking.await.unwrap().unwrap_err();
    daemon.release(step);
    daemon.relaunch().await;
    let thawed = |line: &String| line.starts_with("thaw");
    within(async || freezer.log().iter().any(thawed).then_some(())).await;
    assert!(!freezer.is_frozen());
    // Until the note is removed, another snapshot is refused.
    within(async || take(&daemon, "two", Consistency::RequireAgent).await.ok()).await;
    assert!(!freezer.is_frozen());
    assert_eq!(daemon.snapshot_names().await, ["two"]);
}

#[tokio::test]
async fn request_to_thaw_is_repeated_until_it_is_answered() {
    let mut daemon = Daemon::start().await;
    let freezer = Freezer::start(&daemon, "").await;
    freezer.deaf.store(3, Ordering::SeqCst);
    let told = take(&daemon, "one", Consistency::Agent).await.unwrap();
    assert_eq!(told.consistency(), Consistency::Agent);
    assert!(!freezer.is_frozen());
    // So does a daemon that finds a frozen guest.
    daemon.fault("guest-frozen");
    let mut client = daemon.snapshots().await;
    let taking =
        tokio::spawn(async move { client.create_snapshot(request("two", Consistency::Agent)).await });
    daemon.reached("guest-frozen").await;
    daemon.kill();
    taking.await.unwrap().unwrap_err();
    freezer.deaf.store(3, Ordering::SeqCst);
    daemon.release("guest-frozen");
    daemon.relaunch().await;
    freezer.wait(false).await;
}

//! Labels and cordon.

use std::{collections::BTreeMap, fs};

use tokio::sync::oneshot::error::TryRecvError;
use tonic::{Code, Status};
use vmmd_api::v1::{self, ConditionStatus, VmPhase};

use crate::{
    console::Client,
    disk_boot,
    harness::{Daemon, assert_refused, refusal, status, vm_pid},
    placement,
};

async fn label(
    daemon: &Daemon,
    set: &[(&str, &str)],
    remove: &[&str],
) -> Result<BTreeMap<String, String>, Status> {
    let request = v1::UpdateNodeLabelsRequest {
        set: set
            .iter()
            .map(|(key, value)| ((*key).into(), (*value).into()))
            .collect(),
        remove: remove.iter().map(|key| (*key).into()).collect(),
        ..Default::default()
    };
    let answer = daemon.nodes().await.update_node_labels(request).await?;
    Ok(answer.into_inner().node.unwrap().metadata.unwrap().labels)
}

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(key, value)| ((*key).into(), (*value).into()))
        .collect()
}

#[tokio::test]
async fn labels_are_set_and_removed_and_outlive_the_daemon() {
    let mut daemon = Daemon::start().await;
    assert_eq!(
        label(&daemon, &[("zone", "a"), ("tier", "gold")], &["none"])
            .await
            .unwrap(),
        labels(&[("zone", "a"), ("tier", "gold")])
    );
    let both = label(&daemon, &[("zone", "b")], &["zone"]).await.unwrap_err();
    assert_eq!(both.code(), Code::InvalidArgument);
    let wrong = label(&daemon, &[("a=b", "")], &[]).await.unwrap_err();
    assert_eq!(wrong.code(), Code::InvalidArgument);
    label(&daemon, &[("zone", "b")], &["tier"]).await.unwrap();
    daemon.kill_and_restart().await;
    assert_eq!(
        daemon.node().await.metadata.unwrap().labels,
        labels(&[("zone", "b")])
    );
    let many: Vec<_> = (0..64).map(|number| format!("k{number}")).collect();
    let many: Vec<_> = many.iter().map(|key| (key.as_str(), "")).collect();
    let refused = label(&daemon, &many, &[]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_eq!(
        daemon.node().await.metadata.unwrap().labels,
        labels(&[("zone", "b")])
    );
}

#[tokio::test]
async fn cordoned_node_creates_and_starts_nothing_else_is_allowed() {
    let mut daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.create(daemon.manifest("idle", "")).await.unwrap();
    let open = daemon.node().await;
    let schedulable = |node: &v1::Node| {
        let status = node.status.as_ref().unwrap();
        let found = status
            .conditions
            .iter()
            .find(|condition| condition.r#type == "Schedulable")
            .cloned();
        found.unwrap()
    };
    assert_eq!(schedulable(&open).status(), ConditionStatus::True);
    let cordoned = daemon.cordon("new kernel").await;
    let spec = cordoned.spec.clone().unwrap();
    assert!(spec.cordoned && spec.cordon_reason == "new kernel");
    let condition = schedulable(&cordoned);
    assert_eq!(condition.status(), ConditionStatus::False);
    assert!(condition.message.contains("new kernel"), "{}", condition.message);
    // A repeated cordon replaces the reason, and is not an error.
    daemon.cordon("").await;
    daemon.cordon("new kernel").await;
    daemon.kill_and_restart().await;
    let after = daemon.node().await;
    assert!(after.spec.as_ref().unwrap().cordoned, "it outlives the daemon");
    assert_eq!(schedulable(&after).transition_time, condition.transition_time);

    let no = (Code::FailedPrecondition, "NODE_CORDONED".to_owned());
    assert_eq!(refusal(&daemon.start_vm("idle").await.unwrap_err()), no);
    daemon
        .start_vm("web")
        .await
        .expect("it runs: there is nothing to do");
    let idle = daemon.get("idle").await.unwrap();
    assert_eq!(
        status(&idle).phase(),
        VmPhase::Stopped,
        "a refusal is no failed start"
    );
    assert_eq!(
        refusal(&daemon.create(daemon.manifest("new", "")).await.unwrap_err()),
        no
    );
    assert_eq!(
        refusal(&daemon.restart("idle", true).await.unwrap_err()),
        no,
        "it does not run: its restart is a start"
    );
    daemon.restart("web", true).await.unwrap();
    let web = daemon.get("web").await.unwrap();
    assert_eq!(status(&web).phase(), VmPhase::Running);
    let request = v1::CheckPlacementRequest {
        vm: Some(daemon.manifest("new", "")),
    };
    let answer = daemon.nodes().await.check_placement(request).await.unwrap();
    let answer = answer.into_inner();
    assert_eq!(answer.problems[0].reason, "NODE_CORDONED");
    daemon.stop("web", None).await.unwrap();
    daemon.delete("web", false).await.unwrap();

    let open = daemon.uncordon().await.unwrap();
    let spec = open.spec.clone().unwrap();
    assert!(!spec.cordoned && spec.cordon_reason.is_empty());
    daemon.uncordon().await.unwrap();
    daemon.start_vm("idle").await.unwrap();
}

/// Waits until the VM runs in another process than in `before`.
async fn runs_again(daemon: &Daemon, name: &str, before: &v1::Vm) {
    let pid = |status: &v1::VmStatus| status.instance.as_ref().map(|instance| instance.pid);
    let first = pid(status(before));
    let runs = |status: &v1::VmStatus| status.phase() == VmPhase::Running && pid(status) != first;
    daemon.wait(name, runs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn guest_reset_on_a_cordoned_node_boots_from_disk_again() {
    let daemon = Daemon::start().await;
    let (vm, _) = disk_boot::vm(&daemon, "web", "boots:root=/dev/vda1 v=6.1\n");
    let first = daemon.run_vm(vm).await;
    daemon.cordon("new kernel").await;
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("reset\n").await;
    runs_again(&daemon, "web", &first).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn run_policy_restarts_vms_on_a_cordoned_node() {
    let mut daemon = Daemon::configured("[restart]\nfirst_ms = 10\n").await;
    let first = daemon
        .run_with("web", "", |spec| {
            spec.run_policy = v1::RunPolicy::AlwaysOnUnlessStopped.into();
        })
        .await;
    daemon.cordon("new kernel").await;
    let kill =
        |vm: &v1::Vm| rustix::process::kill_process(vm_pid(vm), rustix::process::Signal::KILL).unwrap();
    kill(&first);
    runs_again(&daemon, "web", &first).await;
    // The same for an end that no daemon saw.
    let second = daemon.get("web").await.unwrap();
    daemon.kill();
    kill(&second);
    daemon.relaunch().await;
    runs_again(&daemon, "web", &second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_run_policy_on_a_cordoned_node_waits_for_uncordon() {
    let mut daemon = Daemon::configured("[restart]\nfirst_ms = 10\n").await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    daemon.cordon("new kernel").await;
    daemon
        .change("web", |spec| spec.run_policy = v1::RunPolicy::AlwaysOn.into())
        .await
        .unwrap();
    daemon.told("StartHeld", 1).await;
    daemon.kill_and_restart().await;
    daemon.told("StartHeld", 2).await;
    let web = daemon.get("web").await.unwrap();
    assert_eq!(status(&web).phase(), VmPhase::Stopped);
    daemon.uncordon().await.unwrap();
    daemon.wait_phase("web", VmPhase::Running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_on_a_full_node_keeps_its_room_against_a_start() {
    let daemon = Daemon::configured(&placement::room(300 << 20, 1_000_000)).await;
    daemon.run("a", "").await;
    daemon
        .create(placement::sized(&daemon, "b", 1, 200, 0))
        .await
        .unwrap();
    let (done, mut is_done) = tokio::sync::oneshot::channel::<()>();
    let mut client = daemon.client();
    let starts = tokio::spawn(async move {
        let mut refused = 0;
        while is_done
            .try_recv()
            .is_err_and(|error| error == TryRecvError::Empty)
        {
            let request = v1::StartVmRequest {
                name: "b".into(),
                ..Default::default()
            };
            let failure = client.start_vm(request).await.unwrap_err();
            assert_eq!(refusal(&failure).1, "INSUFFICIENT_MEMORY");
            refused += 1;
        }
        refused
    });
    for _ in 0..10 {
        daemon.restart("a", true).await.unwrap();
    }
    drop(done);
    assert!(starts.await.unwrap() > 0);
    daemon.kill_vm("a").await.unwrap();
    daemon.start_vm("b").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_with_more_memory_than_there_is_changes_nothing() {
    let daemon = Daemon::configured(&placement::room(400 << 20, 1_000_000)).await;
    let first = daemon.run("a", "").await;
    daemon.run("b", "").await;
    daemon
        .change("a", |spec| {
            spec.memory.as_mut().unwrap().size_bytes = 256 << 20;
        })
        .await
        .unwrap();
    let refused = daemon.restart("a", true).await.unwrap_err();
    assert_refused(&refused, Code::ResourceExhausted, "INSUFFICIENT_MEMORY");
    let still = daemon.get("a").await.unwrap();
    assert_eq!(
        (status(&still).phase(), vm_pid(&still)),
        (VmPhase::Running, vm_pid(&first))
    );
    daemon.kill_vm("b").await.unwrap();
    daemon.restart("a", true).await.unwrap();
    let committed = placement::node(&daemon).await.committed.unwrap();
    assert!(committed.memory_bytes > 256 << 20);
}

fn larger(spec: &mut v1::VmSpec) {
    spec.memory.as_mut().unwrap().size_bytes = 256 << 20;
}

/// Begins a restart whose guest does not power off; returns the id of its operation.
async fn restarting(daemon: &Daemon, name: &str) -> String {
    daemon.begin_restart(name).await.id
}

#[tokio::test(flavor = "multi_thread")]
async fn update_during_a_restart_that_has_no_room_is_refused() {
    let daemon = Daemon::configured(&placement::room(400 << 20, 1_000_000)).await;
    let first = daemon.run("a", "mock.power=ignore").await;
    daemon.run("b", "").await;
    restarting(&daemon, "a").await;
    let refused = daemon.change("a", larger).await.unwrap_err();
    assert_refused(&refused, Code::ResourceExhausted, "INSUFFICIENT_MEMORY");
    daemon.restart("a", true).await.unwrap();
    runs_again(&daemon, "a", &first).await;
    // With room for it, the room is taken at once: no other VM gets it in between.
    daemon.kill_vm("b").await.unwrap();
    restarting(&daemon, "a").await;
    daemon.change("a", larger).await.unwrap();
    let refused = daemon.start_vm("b").await.unwrap_err();
    assert_eq!(refusal(&refused).1, "INSUFFICIENT_MEMORY");
    daemon.restart("a", true).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_restart_gives_its_larger_room_back() {
    let daemon = Daemon::configured(&placement::room(400 << 20, 1_000_000)).await;
    daemon.run("a", "mock.power=ignore").await;
    let before = placement::node(&daemon).await.committed;
    daemon.change("a", larger).await.unwrap();
    let operation = restarting(&daemon, "a").await;
    assert_ne!(placement::node(&daemon).await.committed, before);
    daemon.cancel(&operation).await.unwrap();
    assert_eq!(placement::node(&daemon).await.committed, before);
    daemon.run("b", "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_below_the_disk_reserve_runs_again() {
    let mut daemon = Daemon::start().await;
    let first = daemon.run("web", "").await;
    daemon.kill();
    let config = daemon.path("config.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(config, format!("{text}\n[reserved]\ndisk_gib = 1000000\n")).unwrap();
    daemon.relaunch().await;
    daemon.restart("web", true).await.unwrap();
    runs_again(&daemon, "web", &first).await;
    daemon.kill_vm("web").await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_eq!(refusal(&refused).1, "INSUFFICIENT_DISK");
    // A VM that its policy starts for the first time is a new one.
    let vm = daemon.manifest_with("new", "", |spec| spec.run_policy = v1::RunPolicy::AlwaysOn.into());
    daemon.create(vm).await.unwrap();
    daemon
        .wait("new", |status| status.reason == "InsufficientDisk")
        .await;
}

#[tokio::test]
async fn change_of_the_node_with_stale_preconditions_is_refused() {
    let daemon = Daemon::start().await;
    let seen = daemon.node().await.metadata.unwrap();
    let expecting = |uid: &str, generation| {
        Some(v1::Preconditions {
            uid: uid.into(),
            generation,
        })
    };
    let mut nodes = daemon.nodes().await;
    let labels = |preconditions| v1::UpdateNodeLabelsRequest {
        set: [("zone".to_owned(), "a".to_owned())].into(),
        preconditions,
        ..Default::default()
    };
    let another = "00000000-0000-4000-8000-000000000000";
    for (preconditions, reason) in [
        (expecting(another, None), "UID_MISMATCH"),
        (
            expecting(&seen.uid, Some(seen.generation + 1)),
            "GENERATION_MISMATCH",
        ),
    ] {
        let refusals = [
            nodes
                .update_node_labels(labels(preconditions.clone()))
                .await
                .unwrap_err(),
            nodes
                .cordon_node(v1::CordonNodeRequest {
                    preconditions: preconditions.clone(),
                    ..Default::default()
                })
                .await
                .unwrap_err(),
            nodes
                .drain_node(v1::DrainNodeRequest {
                    preconditions: preconditions.clone(),
                    ..Default::default()
                })
                .await
                .unwrap_err(),
        ];
        for failure in refusals {
            assert_refused(&failure, Code::Aborted, reason);
        }
    }
    assert_eq!(daemon.node().await.metadata.unwrap(), seen);
    let as_seen = labels(expecting(&seen.uid, Some(seen.generation)));
    nodes.update_node_labels(as_seen.clone()).await.unwrap();
    // A retry finds the labels set already, and succeeds despite the newer generation.
    nodes.update_node_labels(as_seen).await.unwrap();
    let late = v1::CordonNodeRequest {
        preconditions: expecting(&seen.uid, Some(seen.generation)),
        ..Default::default()
    };
    let failure = nodes.cordon_node(late).await.unwrap_err();
    assert_refused(&failure, Code::Aborted, "GENERATION_MISMATCH");
    let uncordon = v1::UncordonNodeRequest {
        preconditions: expecting(another, None),
        ..Default::default()
    };
    let failure = nodes.uncordon_node(uncordon).await.unwrap_err();
    assert_refused(&failure, Code::Aborted, "UID_MISMATCH");
}

//! Migrations in which a VM could run twice or be lost: late decisions, messages of other nodes, writes that may have failed.

use std::fs;

use tonic::Code;
use vmmd_api::v1::{self, VmPhase};

use crate::{
    handover::network::Network,
    harness::{Daemon, assert_refused, refusal, status, uid},
    migration::{node, pair},
    pki::{self, Pki},
    verbs::within,
};

async fn label(daemon: &Daemon, vm: &str, value: &str) {
    let mut vm = daemon.get(vm).await.unwrap();
    vm.status = None;
    vm.metadata.as_mut().unwrap().labels = [("tier".to_owned(), value.to_owned())].into();
    daemon.replace(vm).await.unwrap();
}

#[tokio::test]
async fn vm_changed_before_its_migration_is_not_moved_as_it_was() {
    let (first, second) = pair().await;
    let before = first.run("web", "").await;
    let generation = before.metadata.as_ref().unwrap().generation;
    // While the other node is connected to, which may take long.
    first.fault("connected");
    let request = v1::MigrateVmRequest {
        name: "web".into(),
        target: pki::address(&second),
        preconditions: Some(v1::Preconditions {
            generation: Some(generation),
            ..Default::default()
        }),
        ..Default::default()
    };
    let mut migrations = first.migrations().await;
    let refused = tokio::spawn(async move { migrations.migrate_vm(request).await });
    first.reached("connected").await;
    label(&first, "web", "gold").await;
    first.release("connected");
    let refused = refused.await.unwrap().unwrap_err();
    assert_refused(&refused, Code::Aborted, "GENERATION_MISMATCH");
    // Between the look at the VM and the beginning.
    first.fault("begin");
    let operation = first.migrate("web", &second).await.unwrap();
    first.reached("begin").await;
    label(&first, "web", "silver").await;
    first.release("begin");
    let ended = first.fails(&operation).await;
    assert!(ended.message.contains("was changed"), "{ended:?}");
    let vm = first.get("web").await.unwrap();
    assert_eq!(
        (status(&vm).phase(), &status(&vm).migration),
        (VmPhase::Running, &None)
    );
    let operation = first.migrate("web", &second).await.unwrap();
    first.completes(&operation).await;
    let moved = second.waits_for("web", VmPhase::Running).await;
    assert_eq!(moved.metadata.unwrap().labels["tier"], "silver");
}

#[tokio::test]
async fn vm_restarted_before_its_migration_is_moved_as_it_runs() {
    let (first, second) = pair().await;
    first.run("web", "").await;
    first.fault("begin");
    let operation = first.migrate("web", &second).await.unwrap();
    first.reached("begin").await;
    first.kill_vm("web").await.unwrap();
    first.start_vm("web").await.unwrap();
    first.release("begin");
    first.completes(&operation).await;
    second.waits_for("web", VmPhase::Running).await;
}

#[tokio::test]
async fn late_decision_does_not_apply_to_a_later_migration() {
    use v1::MigrationResolution::Run;
    let (first, mut second) = pair().await;
    first.run("web", "").await;
    first.fault("given");
    let operation = first.migrate("web", &second).await.unwrap();
    first.ended(&operation).await;
    let seen = first.waits_for("web", VmPhase::Paused).await;
    let migration = status(&seen).migration.clone().unwrap();
    assert_eq!(
        (migration.number, migration.role()),
        (1, v1::MigrationRole::Source)
    );
    assert_eq!(migration.phase(), v1::MigrationPhase::HandedOver);
    assert_eq!(migration.peer, pki::address(&second));
    assert!(migration.waits_for_decision && migration.start_time.is_some());
    let other = second.get("web").await.unwrap();
    let there = status(&other).migration.clone().unwrap();
    assert_eq!((there.number, there.role()), (1, v1::MigrationRole::Target));
    assert_eq!(
        (there.phase(), there.peer.as_str()),
        (v1::MigrationPhase::Prepared, "node")
    );
    second.kill();
    for (uid, number, reason) in [
        (String::new(), 1, "INVALID_FIELDS"),
        (uid(&seen), 0, "INVALID_FIELDS"),
    ] {
        let request = v1::ResolveMigrationRequest {
            name: "web".into(),
            resolution: Run.into(),
            migration: number,
            preconditions: Some(v1::Preconditions {
                uid,
                ..Default::default()
            }),
            ..Default::default()
        };
        let refused = first
            .migrations()
            .await
            .resolve_migration(request)
            .await
            .unwrap_err();
        assert_refused(&refused, Code::InvalidArgument, reason);
    }
    first.resolve_as_seen(&seen, Run).await.unwrap();
    let vm = first.waits_for("web", VmPhase::Running).await;
    assert_eq!(status(&vm).migration, None);
    // The next one waits too.
    second.relaunch().await;
    within(async || second.resolve("web", v1::MigrationResolution::Drop).await.ok()).await;
    second.forgets("web").await;
    first.fault("given");
    let operation = first.migrate("web", &second).await.unwrap();
    first.ended(&operation).await;
    first.waits_for("web", VmPhase::Paused).await;
    let late = first.resolve_as_seen(&seen, Run).await.unwrap_err();
    assert_refused(&late, Code::FailedPrecondition, "NOTHING_TO_RESOLVE");
    let another = v1::Vm {
        metadata: Some(v1::ObjectMetadata {
            uid: "6f2d6d0e-6c3d-4f5b-9b1f-2f4f1f0c0001".into(),
            ..seen.metadata.clone().unwrap()
        }),
        ..first.get("web").await.unwrap()
    };
    let other = first.resolve_as_seen(&another, Run).await.unwrap_err();
    assert_refused(&other, Code::Aborted, "UID_MISMATCH");
}

#[tokio::test]
async fn prepared_target_learns_that_the_vm_is_elsewhere_or_deleted() {
    for (restarts, deletes) in [(false, false), (true, false), (false, true)] {
        let pki = Pki::new("ca");
        let (mut source, target, third) = (node(&pki).await, node(&pki).await, node(&pki).await);
        let network = Network::to(&target).await;
        source.run("web", "").await;
        target.fault("says-Ready");
        let operation = source.migrate_to("web", &network.address).await.unwrap();
        target.reached("says-Ready").await;
        network.up.send_replace(false);
        target.release("says-Ready");
        source.fails(&operation).await;
        source.waits_for("web", VmPhase::Running).await;
        if deletes {
            within(async || source.delete("web", true).await.ok()).await;
        } else {
            let operation = source.migrate("web", &third).await.unwrap();
            source.completes(&operation).await;
            third.waits_for("web", VmPhase::Running).await;
        }
        if restarts {
            source.kill_and_restart().await;
        }
        assert_eq!(target.phase("web").await, VmPhase::Paused);
        network.up.send_replace(true);
        target.forgets("web").await;
        target.wait_no_processes().await;
    }
}

#[tokio::test]
async fn a_hand_over_whose_write_may_have_failed_is_not_sent() {
    let unsure = "state/fault/store-unsure";
    for restarts in [false, true] {
        let (mut first, second) = pair().await;
        first.run("web", "").await;
        first.fault("received-Ready");
        let operation = first.migrate("web", &second).await.unwrap();
        first.reached("received-Ready").await;
        fs::create_dir_all(first.path("state/fault")).unwrap();
        fs::write(first.path(unsure), "").unwrap();
        first.release("received-Ready");
        let reached = first.path(unsure).with_extension("reached");
        let tried = async || within(async || fs::remove_file(&reached).ok()).await;
        // The hand-over, and twice its end: the store may have any of these.
        for _ in 0..3 {
            tried().await;
        }
        if restarts {
            first.kill_and_restart().await;
            for _ in 0..3 {
                tried().await;
            }
        }
        assert_eq!(second.phase("web").await, VmPhase::Paused, "nobody has committed");
        assert_eq!(first.phase("web").await, VmPhase::Paused, "nor taken it back");
        fs::remove_file(first.path(unsure)).unwrap();
        if !restarts {
            first.fails(&operation).await;
        }
        // The last write counts: the VM stays.
        first.waits_for("web", VmPhase::Running).await;
        second.forgets("web").await;
    }
}

#[tokio::test]
async fn a_received_machine_that_is_not_resumed_is_tried_again() {
    let (first, second) = pair().await;
    let locks = second.path("locks");
    first.run("web", &format!("mock.locks={}", locks.display())).await;
    first.migrate("web", &second).await.unwrap();
    let vm = second.wait("web", |status| status.reason == "ResumeFailed").await;
    assert_eq!(vm.phase(), VmPhase::Paused);
    assert!(vm.message.contains("No locks available"), "{vm:?}");
    let told = second.events("ResumeFailed").await;
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0].severity(), v1::EventSeverity::Warning);
    fs::write(locks, "").unwrap();
    second.waits_for("web", VmPhase::Running).await;
}

#[tokio::test]
async fn only_the_node_that_has_offered_a_vm_may_settle_it() {
    use vmmd_api::v1::{HandoverStep, peer_service_client::PeerServiceClient};
    let pki = Pki::new("ca");
    let (first, second) = (node(&pki).await, node(&pki).await);
    let vm = first.run("web", "").await;
    first.fault("received-Ready");
    let operation = first.migrate("web", &second).await.unwrap();
    first.reached("received-Ready").await;
    let stranger = pki.role("stranger", "peer");
    let mut peer = PeerServiceClient::new(pki.channel(&second, Some(&stranger)));
    for step in [HandoverStep::Prepare, HandoverStep::Commit, HandoverStep::Abort] {
        let request = v1::SettleVmRequest {
            name: "web".into(),
            uid: uid(&vm),
            migration: 1,
            step: step.into(),
        };
        let refused = peer.settle_vm(request).await.unwrap_err();
        assert_eq!(refusal(&refused).1, "OTHER_PEER", "{step:?}: {refused:?}");
    }
    let open = v1::receive_vm_request::Part::Open(v1::PeerVm {
        name: "web".into(),
        uid: uid(&vm),
        migration: 1,
    });
    let open = v1::ReceiveVmRequest { part: Some(open) };
    let refused = peer.receive_vm(tokio_stream::iter([open])).await.unwrap_err();
    assert_eq!(refusal(&refused).1, "OTHER_PEER", "{refused:?}");
    first.release("received-Ready");
    first.completes(&operation).await;
}

#[tokio::test]
async fn the_operation_of_a_handed_over_vm_ends_by_the_next_daemon() {
    for held in ["wrote-Given", "says-Commit", "received-Running", "wrote-Gone"] {
        let (mut first, second) = pair().await;
        first.run("web", "").await;
        first.fault(held);
        let operation = first.migrate("web", &second).await.unwrap();
        first.reached(held).await;
        first.kill();
        first.release(held);
        first.relaunch().await;
        let ended = first.completes(&operation).await;
        assert!(
            ended.message.contains(&pki::address(&second)),
            "{held}: {ended:?}"
        );
        first.forgets("web").await;
        second.waits_for("web", VmPhase::Running).await;
    }
}

//! Disks that come and go with the spec of a running VM.

use super::*;

#[tokio::test]
async fn disks_come_and_go_with_the_spec_while_the_vm_runs() {
    let daemon = Daemon::start().await;
    running_with_disk(&daemon, "").await;
    let changed = daemon
        .change("web", |spec| {
            spec.disks.remove(0);
            spec.disks.push(disk(&daemon, "data"));
        })
        .await
        .unwrap();
    assert_eq!((pending(&changed), generations(&changed)), (vec![], (2, 2)));
    assert_eq!(daemon.plugged("web").await, ["grouped", "data"]);
    let slots = |vm: &v1::Vm| -> Vec<_> {
        let disks = status(vm).disks.iter();
        disks
            .map(|disk| (disk.name.clone(), disk.pci_slot.unwrap()))
            .collect()
    };
    // "grouped" keeps its own; while both were there, "data" could not be where "root" was.
    let expected = [("grouped".to_owned(), 11), ("data".to_owned(), 12)];
    assert_eq!(slots(&changed), expected);
    let restarted = {
        daemon.stop("web", None).await.unwrap();
        daemon.start_vm("web").await.unwrap()
    };
    assert_eq!(slots(&restarted), expected);
}

#[tokio::test]
async fn disk_that_the_guest_keeps_is_pending_until_it_is_ejected() {
    let mut daemon = Daemon::start().await;
    running_with_disk(&daemon, "mock.eject=ignore").await;
    let without = daemon.changed("web", |spec| drop(spec.disks.remove(0))).await;
    let patient = |vm: v1::Vm| v1::UpdateVmRequest {
        grace_period: milliseconds(50),
        ..request(vm)
    };
    let kept = daemon.update(patient(without.clone())).await.unwrap();
    assert_eq!(names(&kept), ["grouped"]);
    assert_eq!(status(&kept).pending_changes.len(), 1);
    let change = status(&kept).pending_changes[0].clone();
    assert_eq!(
        (change.path.as_str(), change.desired.as_ref()),
        ("spec.disks[root]", None)
    );
    assert!(
        format!("{:?}", change.current).contains("/root.raw"),
        "{change:?}"
    );
    assert!(change.message.contains("did not eject"), "{change:?}");
    assert!(restart_required(&kept));
    assert_eq!(generations(&kept), (2, 1));
    assert_eq!(phase(status(&kept), "root"), Some(AttachmentPhase::Attached));
    assert_eq!(daemon.plugged("web").await, ["root", "grouped"]);
    // It is not taken from the guest by another daemon.
    daemon.kill_and_restart().await;
    let known = |status: &v1::VmStatus| status.disks.iter().all(|disk| disk.capacity_bytes == Some(4096));
    daemon.wait("web", known).await;
    assert_eq!(daemon.plugged("web").await, ["root", "grouped"]);
    assert_eq!(pending(&daemon.get("web").await.unwrap()).len(), 1);
    // The same manifest asks the guest again.
    let again = daemon.update(patient(without)).await.unwrap();
    assert_eq!((pending(&again).len(), generations(&again)), (1, (2, 1)));
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("eject root\n").await;
    let settled = |status: &v1::VmStatus| status.disks.len() == 1 && status.pending_changes.is_empty();
    daemon.wait("web", settled).await;
    let vm = daemon.get("web").await.unwrap();
    assert_eq!((generations(&vm), restart_required(&vm)), ((2, 2), false));
}

/// The update is durable before the deletion, so its answer is the VM that was updated and not that there is none.
#[tokio::test]
async fn an_update_that_a_deletion_overtakes_is_answered() {
    let daemon = Daemon::start().await;
    running_with_disk(&daemon, "mock.eject=ignore").await;
    let without = daemon.changed("web", |spec| drop(spec.disks.remove(0))).await;
    let update = daemon.update(request(without));
    let delete = async {
        let asked = |status: &v1::VmStatus| phase(status, "root") == Some(AttachmentPhase::Detaching);
        daemon.wait("web", asked).await;
        daemon.delete("web", true).await
    };
    let (updated, deleted) = tokio::join!(update, delete);
    deleted.unwrap();
    let updated = updated.unwrap();
    assert_eq!((names(&updated), generations(&updated).0), (vec!["grouped"], 2));
}

#[tokio::test]
async fn a_disk_that_comes_back_before_the_guest_ejected_it_stays() {
    let daemon = Daemon::start().await;
    running_with_disk(&daemon, "mock.eject=ignore").await;
    let root = disk(&daemon, "root");
    let without = daemon.changed("web", |spec| drop(spec.disks.remove(0))).await;
    let kept = daemon
        .update(v1::UpdateVmRequest {
            grace_period: milliseconds(50),
            ..request(without)
        })
        .await
        .unwrap();
    assert_eq!(pending(&kept).len(), 1);
    let refused = daemon.attach("web", root.clone()).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "BUSY");
    let back = daemon.change("web", |spec| spec.disks.push(root)).await.unwrap();
    assert_eq!((pending(&back).len(), generations(&back)), (0, (3, 3)));
    let told = status(&back)
        .disks
        .iter()
        .find(|disk| disk.name == "root")
        .unwrap();
    assert_eq!((told.pci_slot, told.message.as_str()), (Some(10), ""));
    // And force takes one from the machine that is no longer in the spec.
    daemon
        .update(v1::UpdateVmRequest {
            grace_period: milliseconds(50),
            ..request(daemon.changed("web", |spec| spec.disks.truncate(1)).await)
        })
        .await
        .unwrap();
    let gone = daemon.detach("web", "root", 0, true).await.unwrap();
    assert_eq!((pending(&gone).len(), generations(&gone)), (0, (4, 4)));
    assert_eq!(daemon.plugged("web").await, ["grouped"]);
}

#[tokio::test]
async fn failed_change_is_reported_and_the_others_are_made() {
    let daemon = Daemon::start().await;
    running_with_disk(&daemon, "mock.limit=refuse mock.bad=bad").await;
    let changed = daemon
        .change("web", |spec| {
            spec.disks[0].rate_limit = Some(limit(5000));
            spec.disks.push(disk(&daemon, "bad"));
            spec.disks.push(disk(&daemon, "good"));
        })
        .await
        .unwrap();
    assert_eq!(daemon.plugged("web").await, ["root", "grouped", "good"]);
    let said: Vec<_> = status(&changed)
        .pending_changes
        .iter()
        .map(|change| (change.path.as_str(), change.message.is_empty()))
        .collect();
    assert_eq!(
        said,
        [("spec.disks[bad]", false), ("spec.disks[root].rateLimit", false)]
    );
    assert!(restart_required(&changed));
    assert_eq!(phase(status(&changed), "bad"), Some(AttachmentPhase::Pending));
    assert_eq!(generations(&changed), (2, 1));
}

#[tokio::test]
async fn update_that_waits_for_the_guest_blocks_no_other() {
    let daemon = Daemon::start().await;
    running_with_disk(&daemon, "mock.eject=ignore").await;
    let without = daemon.changed("web", |spec| drop(spec.disks.remove(0))).await;
    let began = std::time::Instant::now();
    let detaching = |status: &v1::VmStatus| phase(status, "root") == Some(AttachmentPhase::Detaching);
    let (updated, ()) = tokio::join!(daemon.update(request(without)), async {
        let told = daemon.wait("web", detaching).await;
        assert_eq!(told.pending_changes.len(), 0, "it is under way");
        let other = daemon.change("web", |spec| cores(spec, 2)).await.unwrap();
        assert!(
            detaching(status(&other)),
            "the other update is answered while the guest is asked"
        );
        assert_eq!(pending(&other), ["spec.cpu.cores: 1 -> 2"]);
        daemon.kill_vm("web").await.unwrap();
    });
    let vm = updated.unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(25),
        "the guest's time to eject was waited for"
    );
    assert_eq!(names(&vm), ["grouped"]);
    assert_eq!(vm.spec.unwrap().cpu.unwrap().cores, 2);
    daemon.start_vm("web").await.unwrap();
    assert_eq!(daemon.plugged("web").await, ["grouped"]);
}

#[tokio::test]
async fn update_without_wait_is_answered_after_the_request() {
    let daemon = Daemon::start().await;
    running_with_disk(&daemon, "mock.eject=ignore").await;
    let without = daemon.changed("web", |spec| drop(spec.disks.remove(0))).await;
    let asked = daemon
        .update(v1::UpdateVmRequest {
            grace_period: milliseconds(300),
            no_wait: true,
            ..request(without.clone())
        })
        .await
        .unwrap();
    assert_eq!(phase(status(&asked), "root"), Some(AttachmentPhase::Detaching));
    assert_eq!((pending(&asked).len(), generations(&asked)), (0, (2, 1)));
    // The result is reported as with a wait.
    let failed = daemon
        .wait("web", |status| !status.pending_changes.is_empty())
        .await;
    assert_eq!(failed.pending_changes[0].path, "spec.disks[root]");
    assert_ne!(failed.pending_changes[0].message, "");
    // The same update again changes nothing, and waits for the operation in progress.
    let again = |no_wait| v1::UpdateVmRequest {
        grace_period: milliseconds(900),
        no_wait,
        ..request(without.clone())
    };
    let asked = daemon.update(again(true)).await.unwrap();
    assert_eq!(
        (phase(status(&asked), "root"), pending(&asked).len()),
        (Some(AttachmentPhase::Detaching), 0)
    );
    let waited = daemon.update(again(false)).await.unwrap();
    assert_eq!(
        (phase(status(&waited), "root"), pending(&waited).len()),
        (Some(AttachmentPhase::Attached), 1)
    );
}

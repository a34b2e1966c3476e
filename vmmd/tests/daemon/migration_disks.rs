//! Disks of the node go along with their VM, or stay where they are.

use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use tonic::Code;
use vmmd_api::v1::{self, MigrationResolution, OperationPhase, VmPhase, disk_spec::Source};

use crate::{
    disks::{named, qcow2, raw, state},
    harness::{Daemon, refusal, status},
    migration::{kill_vmm, pair, within},
    pki,
};

const SIZE: u64 = 1 << 20;

/// First block of a disk.
fn content(letter: u8) -> Vec<u8> {
    vec![letter; 4096]
}

/// Makes a disk that begins with such a block, and a VM that has it; the VM runs.
async fn run_with_disk(daemon: &Daemon, vm: &str, options: &str) -> v1::Disk {
    let mut disk = raw("data", SIZE);
    let metadata = disk.metadata.as_mut().unwrap();
    metadata.labels = [("tier".to_owned(), "gold".to_owned())].into();
    metadata.owner = "somebody".into();
    let disk = daemon.make(disk, None).await.unwrap();
    let file = fs::File::options().write(true).open(path(&disk)).unwrap();
    file.write_all_at(&content(b'a'), 0).unwrap();
    let mut manifest = daemon.manifest(vm, options);
    manifest.spec.as_mut().unwrap().disks.push(named("data"));
    daemon.create(manifest).await.unwrap();
    daemon.start_vm(vm).await.unwrap();
    disk
}

fn path(disk: &v1::Disk) -> PathBuf {
    PathBuf::from(&state(disk).path)
}

fn begins_with(path: &Path) -> Vec<u8> {
    let mut block = content(0);
    fs::File::open(path)
        .unwrap()
        .read_exact_at(&mut block, 0)
        .unwrap();
    block
}

impl Daemon {
    async fn has_no_disk(&self) {
        let refused = self.disk("data").await.unwrap_err();
        assert_eq!(refusal(&refused), (Code::NotFound, "DISK_NOT_FOUND".into()));
        let folder = self.path("state/disks");
        let left: Vec<_> = fs::read_dir(folder).into_iter().flatten().collect();
        assert!(left.is_empty(), "{left:?}");
    }

    async fn migrate_to(&self, vm: &str, to: &Daemon) -> v1::Operation {
        let request = v1::MigrateVmRequest {
            name: vm.into(),
            target: pki::address(to),
            ..Default::default()
        };
        let answer = self.migrations().await.migrate_vm(request).await.unwrap();
        answer.into_inner().operation.unwrap()
    }

    /// Expects that a migration fails; returns the reason. The VM continues here with its disk, and
    /// the other node keeps no part of the VM.
    async fn stays_here(&self, operation: &v1::Operation, other: &Daemon) -> String {
        let ended = self.ended(operation).await;
        assert!(
            matches!(ended.phase(), OperationPhase::Failed | OperationPhase::Cancelled),
            "{ended:?}"
        );
        other.forgets("web").await;
        within(async || other.vmm_processes().is_empty().then_some(())).await;
        let vm = self.waits_for("web", VmPhase::Running).await;
        assert_eq!(status(&vm).reason, "Running");
        let disk = self.disk("data").await.unwrap();
        assert_eq!(begins_with(&path(&disk)), content(b'a'));
        assert_eq!(state(&disk).used_by, ["web"]);
        ended.message
    }
}

#[tokio::test]
async fn a_disk_of_the_node_goes_along_with_its_vm_and_back() {
    let (first, second) = pair().await;
    let before = run_with_disk(&first, "web", "").await;
    let mut runs_on = (&first, &second);
    for letter in [b'b', b'c'] {
        let (from, to) = runs_on;
        let there = from.disk("data").await.unwrap();
        let file = fs::File::options().write(true).open(path(&there)).unwrap();
        file.write_all_at(&content(letter), 0).unwrap();
        let operation = from.migrate_to("web", to).await;
        let ended = from.ended(&operation).await;
        assert_eq!(ended.phase(), OperationPhase::Completed, "{ended:?}");
        from.has_no_disk().await;
        to.waits_for("web", VmPhase::Running).await;
        let after = to.disk("data").await.unwrap();
        let (was, is) = (before.metadata.clone().unwrap(), after.metadata.clone().unwrap());
        assert_eq!(
            (&is.name, &is.uid, &is.labels, &is.owner),
            (&was.name, &was.uid, &was.labels, &was.owner)
        );
        assert_eq!(after.spec, before.spec);
        assert_eq!(begins_with(&path(&after)), content(letter));
        assert_eq!(state(&after).used_by, ["web"]);
        runs_on = (to, from);
    }
    // It is a disk like any other there: it outlives the VM, and a restart of the daemon.
    let (mut on, _) = (first, second);
    on.delete("web", true).await.unwrap();
    on.kill_and_restart().await;
    assert_eq!(begins_with(&path(&on.disk("data").await.unwrap())), content(b'c'));
    on.remove("data").await.unwrap();
    on.has_no_disk().await;
}

#[tokio::test]
async fn qcow2_disks_and_overlays_move_whole_their_backing_stays() {
    let (first, second) = pair().await;
    first.make(raw("base", SIZE), None).await.unwrap();
    let overlay = v1::volume_spec::Source::OverlayOf("base".into());
    first.make(qcow2("over", SIZE), Some(overlay)).await.unwrap();
    first.make(qcow2("own", SIZE), None).await.unwrap();
    let mut manifest = first.manifest("web", "");
    let disks = &mut manifest.spec.as_mut().unwrap().disks;
    for name in ["over", "own"] {
        disks.push(v1::DiskSpec {
            name: format!("disk-{name}"),
            ..named(name)
        });
    }
    first.create(manifest).await.unwrap();
    first.start_vm("web").await.unwrap();
    let operation = first.migrate_to("web", &second).await;
    let ended = first.ended(&operation).await;
    assert_eq!(ended.phase(), OperationPhase::Completed, "{ended:?}");
    assert!(first.disk("over").await.is_err() && first.disk("own").await.is_err());
    first.disk("base").await.unwrap();
    first.remove("base").await.unwrap();
    assert_eq!(first.files().len(), 0);
    for name in ["over", "own"] {
        let disk = second.disk(name).await.unwrap();
        let spec = disk.spec.unwrap();
        assert_eq!((spec.format(), spec.size_bytes), (v1::DiskFormat::Qcow2, SIZE));
        assert_eq!(spec.source, None, "it needs nothing below it");
    }
    assert_eq!(second.files().len(), 2);
}

#[tokio::test]
async fn progress_of_disks_is_told() {
    let (first, second) = pair().await;
    run_with_disk(&first, "web", "mock.send=disks").await;
    let operation = first.migrate_to("web", &second).await;
    within(async || {
        let now = first.operation(&operation.id).await;
        let told = now.message.starts_with("disks: 3 of 8 MiB");
        told.then_some(())
    })
    .await;
}

#[tokio::test]
async fn target_with_the_disk_or_without_space_refuses_first() {
    let (first, second) = pair().await;
    run_with_disk(&first, "web", "").await;
    let other = second.make(raw("data", 4096), None).await.unwrap();
    let operation = first.migrate_to("web", &second).await;
    let why = first.stays_here(&operation, &second).await;
    assert!(why.contains("\"data\"") && why.contains("already"), "{why}");
    let still = second.disk("data").await.unwrap();
    assert_eq!(still.metadata.unwrap().uid, other.metadata.unwrap().uid);
    second.remove("data").await.unwrap();

    second.fault("no-room-for-disks");
    let operation = first.migrate_to("web", &second).await;
    let why = first.stays_here(&operation, &second).await;
    assert!(why.contains("\"data\"") && why.contains("0 bytes free"), "{why}");
    second.has_no_disk().await;
    assert_eq!(second.vmm_processes(), []);
}

#[tokio::test]
async fn a_disk_that_another_vm_names_stays_and_so_does_its_vm() {
    let (first, second) = pair().await;
    run_with_disk(&first, "web", "").await;
    let mut other = first.manifest("db", "");
    other.spec.as_mut().unwrap().disks.push(named("data"));
    first.create(other).await.unwrap();
    let request = v1::MigrateVmRequest {
        name: "web".into(),
        target: pki::address(&second),
        ..Default::default()
    };
    let refused = first.migrations().await.migrate_vm(request).await.unwrap_err();
    assert_eq!(
        refusal(&refused),
        (Code::FailedPrecondition, "MIGRATION_DISKS".into())
    );
    assert!(refused.message().contains("VM \"db\""), "{refused:?}");
}

#[tokio::test]
async fn what_fails_on_the_way_leaves_the_disk_where_it_was() {
    // A target without room, a cancel, a target's `vmm` and a target's daemon that are killed.
    let (first, mut second) = pair().await;
    run_with_disk(&first, "web", "mock.receive=full").await;
    let operation = first.migrate_to("web", &second).await;
    let why = first.stays_here(&operation, &second).await;
    assert!(why.contains("No space left on device"), "{why}");
    second.has_no_disk().await;
    first.delete("web", true).await.unwrap();
    first.remove("data").await.unwrap();

    run_with_disk(&first, "web", "mock.send=hang").await;
    for trouble in ["cancel", "vmm", "daemon"] {
        let operation = first.migrate_to("web", &second).await;
        second.waits_for("web", VmPhase::Starting).await;
        within(async || (second.vmm_processes().len() == 1).then_some(())).await;
        second.disk("data").await.unwrap();
        match trouble {
            "cancel" => {
                let mut operations = v1::operation_service_client::OperationServiceClient::new(
                    crate::harness::connect(first.folder.path()).await,
                );
                let id = operation.id.clone();
                operations
                    .cancel_operation(v1::CancelOperationRequest { id })
                    .await
                    .unwrap();
            }
            "vmm" => kill_vmm(&second),
            _ => second.kill_and_restart().await,
        }
        first.stays_here(&operation, &second).await;
        second.has_no_disk().await;
    }
}

#[tokio::test]
async fn a_daemon_that_dies_while_it_makes_disks_for_a_vm_leaves_none() {
    let (first, mut second) = pair().await;
    run_with_disk(&first, "web", "").await;
    second.fault("made-disks");
    let held = second.path("run/fault/made-disks").with_extension("reached");
    let operation = first.migrate_to("web", &second).await;
    within(async || held.exists().then_some(())).await;
    second.disk("data").await.unwrap();
    second.kill();
    fs::remove_file(second.path("run/fault/made-disks")).unwrap();
    second.relaunch().await;
    first.stays_here(&operation, &second).await;
    second.has_no_disk().await;
}

#[tokio::test]
async fn an_operators_decision_removes_no_disk() {
    use MigrationResolution::{Drop, Run};
    for (at_source, resolution) in [(true, Run), (true, Drop), (false, Run), (false, Drop)] {
        let (mut first, mut second) = pair().await;
        run_with_disk(&first, "web", "").await;
        first.fault("given");
        let operation = first.migrate_to("web", &second).await;
        first.ended(&operation).await;
        let left = if at_source {
            second.kill();
            &mut first
        } else {
            first.kill();
            second.kill_and_restart().await;
            &mut second
        };
        left.waits_for("web", VmPhase::Paused).await;
        left.resolve("web", resolution).await.unwrap();
        match resolution {
            Run => drop(left.waits_for("web", VmPhase::Running).await),
            _ => left.forgets("web").await,
        }
        left.kill_and_restart().await;
        let disk = left.disk("data").await.unwrap();
        assert_eq!(begins_with(&path(&disk)), content(b'a'));
    }
}

/// The migrated disks are not all disks of the VM's spec: read-only disks must exist on the target.
#[tokio::test]
async fn a_read_only_disk_of_the_node_must_be_there() {
    let (first, second) = pair().await;
    first.make(raw("data", SIZE), None).await.unwrap();
    let mut manifest = first.manifest("web", "");
    manifest.spec.as_mut().unwrap().disks.push(v1::DiskSpec {
        read_only: true,
        source: Some(Source::Disk("data".into())),
        ..named("data")
    });
    first.create(manifest).await.unwrap();
    first.start_vm("web").await.unwrap();
    let operation = first.migrate_to("web", &second).await;
    let ended = first.ended(&operation).await;
    assert_eq!(ended.phase(), OperationPhase::Failed, "{ended:?}");
    assert!(ended.message.contains("there is no disk \"data\""), "{ended:?}");
    second.make(raw("data", SIZE), None).await.unwrap();
    let operation = first.migrate_to("web", &second).await;
    let ended = first.ended(&operation).await;
    assert_eq!(ended.phase(), OperationPhase::Completed, "{ended:?}");
    for daemon in [&first, &second] {
        daemon.disk("data").await.unwrap();
    }
}

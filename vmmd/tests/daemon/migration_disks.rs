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
    harness::{Daemon, assert_refused, assert_says, status},
    images::of_path,
    migration::pair,
    verbs::within,
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
    daemon
        .run_with(vm, options, |spec| spec.disks.push(named("data")))
        .await;
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
        assert_refused(&refused, Code::NotFound, "DISK_NOT_FOUND");
        let folder = self.path("state/disks");
        let left: Vec<_> = fs::read_dir(folder).into_iter().flatten().collect();
        assert!(left.is_empty(), "{left:?}");
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
        other.wait_no_processes().await;
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
        let operation = from.migrate("web", to).await.unwrap();
        from.completes(&operation).await;
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
    first.run_vm(manifest).await;
    let operation = first.migrate("web", &second).await.unwrap();
    first.completes(&operation).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn disk_for_long_blocks_has_them_on_the_other_node() {
    let (first, mut second) = pair().await;
    // The mock looks for the header of a GPT where one for such blocks is.
    let mut bytes = vec![0; 1 << 20];
    bytes[4096..4104].copy_from_slice(b"EFI PART");
    let file = first.file("disk.raw", &bytes);
    first.import(of_path("long", &file)).await.unwrap();
    let image = v1::volume_spec::Source::Image(v1::ImageClone {
        name: "long".into(),
        clone: v1::DiskClone::Copy.into(),
    });
    let made = first.make(raw("data", SIZE), Some(image)).await.unwrap();
    assert_eq!(state(&made).logical_block_bytes, 4096);
    first
        .run_with("web", "", |spec| spec.disks.push(named("data")))
        .await;
    let operation = first.migrate("web", &second).await.unwrap();
    first.completes(&operation).await;
    second.kill_and_restart().await;
    let disk = second.disk("data").await.unwrap();
    assert_eq!(state(&disk).logical_block_bytes, 4096);
}

#[tokio::test]
async fn progress_of_disks_is_told() {
    let (first, second) = pair().await;
    run_with_disk(&first, "web", "mock.send=disks").await;
    let operation = first.migrate("web", &second).await.unwrap();
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
    let operation = first.migrate("web", &second).await.unwrap();
    let why = first.stays_here(&operation, &second).await;
    assert!(why.contains("\"data\"") && why.contains("already"), "{why}");
    let still = second.disk("data").await.unwrap();
    assert_eq!(still.metadata.unwrap().uid, other.metadata.unwrap().uid);
    second.remove("data").await.unwrap();

    second.fault("no-room-for-disks");
    let operation = first.migrate("web", &second).await.unwrap();
    let why = first.stays_here(&operation, &second).await;
    assert!(why.contains("\"data\"") && why.contains("0 bytes free"), "{why}");
    second.has_no_disk().await;
    assert_eq!(second.vmm_processes(), []);
}

#[tokio::test]
async fn a_disk_that_another_vm_names_stays_and_so_does_its_vm() {
    let (first, second) = pair().await;
    run_with_disk(&first, "web", "").await;
    let other = first.manifest_with("db", "", |spec| spec.disks.push(named("data")));
    first.create(other).await.unwrap();
    let refused = first.migrate("web", &second).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "MIGRATION_DISKS");
    assert_says(&refused, "VM \"db\"");
}

#[tokio::test]
async fn target_that_runs_out_of_disk_space_leaves_the_disk_there() {
    let (first, second) = pair().await;
    run_with_disk(&first, "web", "mock.receive=full").await;
    let operation = first.migrate("web", &second).await.unwrap();
    let why = first.stays_here(&operation, &second).await;
    assert!(why.contains("No space left on device"), "{why}");
    second.has_no_disk().await;
}

#[tokio::test]
async fn a_daemon_that_dies_while_it_makes_disks_for_a_vm_leaves_none() {
    let (first, mut second) = pair().await;
    run_with_disk(&first, "web", "").await;
    second.fault("made-disks");
    let operation = first.migrate("web", &second).await.unwrap();
    second.reached("made-disks").await;
    second.disk("data").await.unwrap();
    second.kill();
    second.release("made-disks");
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
        let operation = first.migrate("web", &second).await.unwrap();
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
    first
        .run_with("web", "", |spec| {
            spec.disks.push(v1::DiskSpec {
                read_only: true,
                source: Some(Source::Disk("data".into())),
                ..named("data")
            });
        })
        .await;
    let operation = first.migrate("web", &second).await.unwrap();
    let ended = first.fails(&operation).await;
    assert!(ended.message.contains("there is no disk \"data\""), "{ended:?}");
    second.make(raw("data", SIZE), None).await.unwrap();
    let operation = first.migrate("web", &second).await.unwrap();
    first.completes(&operation).await;
    for daemon in [&first, &second] {
        daemon.disk("data").await.unwrap();
    }
}

//! Snapshots of disks alone.

use std::os::unix::fs::MetadataExt as _;

use super::{
    archives::{parts, sealed},
    *,
};

impl Daemon {
    async fn disks_alone(&self, name: &str, paused: bool) -> Result<v1::Snapshot, Status> {
        let request = of_disks(name, "web", paused);
        let answer = self.snapshots().await.create_snapshot(request).await?;
        Ok(answer.into_inner().snapshot.unwrap())
    }

    /// Begins one of the VM "web", and waits until it has come to where it is held.
    async fn disks_alone_until(&self, held: &str) -> JoinHandle<Result<v1::Snapshot, Status>> {
        self.fault(held);
        let mut client = self.snapshots().await;
        let waiting = tokio::spawn(async move {
            let answer = client.create_snapshot(of_disks("one", "web", true)).await?;
            Ok(answer.into_inner().snapshot.unwrap())
        });
        self.reached(held).await;
        waiting
    }
}

/// A request for one of the disks of a VM.
pub fn of_disks(name: &str, vm: &str, paused: bool) -> v1::CreateSnapshotRequest {
    let mut request = create_request(name, vm, paused);
    let spec = request.snapshot.as_mut().unwrap().spec.as_mut().unwrap();
    spec.kind = v1::SnapshotKind::Disks.into();
    request
}

/// Waits for the first words of a guest that has booted.
async fn booted(daemon: &Daemon, vm: &str) {
    let mut console = Client::open(daemon, vm).await;
    console.expect(&format!("booted {vm}\r\n")).await;
}

#[tokio::test]
async fn running_vm_is_paused_for_its_disks_and_boots_from_them() {
    let daemon = Daemon::start().await;
    let image = with_disk(&daemon).await;
    let taken = daemon.disks_alone("one", true).await.unwrap();
    assert_eq!(taken.spec.unwrap().kind(), v1::SnapshotKind::Disks);
    let told = taken.status.unwrap();
    assert_eq!((told.size_bytes, told.written_bytes), (0, 0));
    assert_eq!(told.disks, ["root"]);
    assert_eq!(told.pause_duration.unwrap().nanos, 5_000_000);
    assert!(told.allocated_bytes > 0 && told.allocated_bytes <= 8192);
    assert_eq!(content(&daemon.snapshot_disk()), "until the snapshot");
    assert_eq!(content(&image), "behind the snapshot");
    assert_eq!(daemon.phase("web").await, VmPhase::Running);
    // A whole one says so too.
    let whole = daemon.snapshot("whole", "web", true).await.unwrap();
    assert_eq!(whole.spec.unwrap().kind(), v1::SnapshotKind::Full);

    let runs = daemon.restore("one", "", false).await.unwrap_err();
    let not_stopped = (Code::FailedPrecondition, "VM_NOT_STOPPED".to_owned());
    assert_eq!(refusal(&runs), not_stopped);
    daemon.kill_vm("web").await.unwrap();
    let vm = daemon.restore("one", "", false).await.unwrap();
    assert_eq!(status(&vm).phase(), VmPhase::Running);
    assert_eq!(content(&image), "until the snapshot");
    assert!(daemon.copies().is_empty());
    booted(&daemon, "web").await;

    // Other VMs boot from disks of their own, regardless of the memory option.
    for (name, on_demand) in [("copy", false), ("other", true)] {
        let vm = daemon.restore("one", name, on_demand).await.unwrap();
        assert_eq!(vm.spec.unwrap().disks[0].disk(), format!("{name}-root"));
        booted(&daemon, name).await;
    }
    let fresh = v1::RestoreVmRequest {
        snapshot: "one".into(),
        vm: "fresh".into(),
        identity: v1::RestoreIdentity::Fresh.into(),
        ..Default::default()
    };
    daemon.snapshots().await.restore_vm(fresh).await.unwrap();
    booted(&daemon, "fresh").await;
    assert_eq!(daemon.raw_disks().len(), 3);
    for disk in daemon.raw_disks() {
        assert_eq!(content(&disk), "until the snapshot");
    }
}

#[tokio::test]
async fn a_vm_that_is_paused_stays_so() {
    let daemon = Daemon::start().await;
    with_disk(&daemon).await;
    daemon.pause("web").await.unwrap();
    daemon.disks_alone("one", true).await.unwrap();
    assert_eq!(daemon.phase("web").await, VmPhase::Paused);
}

#[tokio::test]
async fn stopped_vm_starts_only_after_its_disks_are_copied() {
    let daemon = Daemon::start().await;
    let image = with_disk(&daemon).await;
    daemon.kill_vm("web").await.unwrap();
    fs::write(&image, [b"stopped".as_slice(), &[0; 4089]].concat()).unwrap();
    let whole = daemon.snapshot("one", "web", true).await.unwrap_err();
    assert_refused(&whole, Code::FailedPrecondition, "VM_NOT_RUNNING");
    assert_says(&whole, "--disks-only");

    // A copy is allowed without `paused`, as no guest waits for it.
    let waiting = daemon.disks_alone_until("snapshot-validated").await;
    let starting = daemon.begin_start("web");
    daemon.wait_phase("web", VmPhase::Starting).await;
    let second = daemon.disks_alone("two", false).await.unwrap_err();
    assert_eq!(refusal(&second).0, Code::FailedPrecondition);
    assert!(daemon.vmm_processes().is_empty() && !starting.is_finished());
    daemon.release("snapshot-validated");
    let taken = waiting.await.unwrap().unwrap();
    assert_eq!(taken.status.unwrap().pause_duration.unwrap().nanos, 0);
    starting.await.unwrap().unwrap();
    booted(&daemon, "web").await;
    assert_eq!(content(&daemon.snapshot_disk()), "stopped");

    daemon.kill_vm("web").await.unwrap();
    daemon.disks_alone("two", false).await.unwrap();
    assert_eq!(daemon.snapshot_names().await, ["one", "two"]);
}

#[tokio::test]
async fn disks_that_another_vm_may_write_to_are_not_copied() {
    let daemon = Daemon::start().await;
    with_disk(&daemon).await;
    daemon.kill_vm("web").await.unwrap();
    let mut other = daemon.manifest("other", "");
    let disks = daemon.get("web").await.unwrap().spec.unwrap().disks;
    other.spec.as_mut().unwrap().disks = disks;
    daemon.run_vm(other).await;
    let refused = daemon.disks_alone("one", false).await.unwrap_err();
    assert_eq!(refusal(&refused).0, Code::FailedPrecondition, "{refused}");
    assert!(daemon.snapshot_files().is_empty() && daemon.snapshot_names().await.is_empty());
    daemon.kill_vm("other").await.unwrap();
    daemon.disks_alone("one", false).await.unwrap();
    // The disk is closed again.
    daemon.start_vm("other").await.unwrap();
}

#[tokio::test]
async fn vm_without_own_disks_and_an_unknown_kind_are_refused() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let nothing = daemon.disks_alone("one", true).await.unwrap_err();
    assert_refused(&nothing, Code::FailedPrecondition, "SNAPSHOT_DISKS");
    let mut request = of_disks("one", "web", true);
    request.snapshot.as_mut().unwrap().spec.as_mut().unwrap().kind = 9;
    let unknown = daemon.snapshots().await.create_snapshot(request).await;
    let unknown = unknown.unwrap_err();
    assert_eq!(unknown.code(), Code::InvalidArgument);
    assert_says(&unknown, "snapshot.spec.kind");
    assert_eq!(daemon.phase("web").await, VmPhase::Running);
    assert!(daemon.snapshot_files().is_empty());
}

#[tokio::test]
async fn daemon_killed_during_a_disk_snapshot_leaves_the_vm_running() {
    let mut daemon = Daemon::start().await;
    with_disk_and(&daemon, "mock.save=stand").await;
    let mut client = daemon.snapshots().await;
    let taking = tokio::spawn(async move { client.create_snapshot(of_disks("one", "web", true)).await });
    daemon.wait_phase("web", VmPhase::Paused).await;
    daemon.kill();
    taking.await.unwrap().unwrap_err();
    daemon.relaunch().await;
    daemon.wait_phase("web", VmPhase::Running).await;
    assert!(daemon.snapshot_files().is_empty() && daemon.snapshot_names().await.is_empty());
}

#[tokio::test]
async fn one_goes_to_another_node() {
    let (here, there) = (Daemon::start().await, Daemon::start().await);
    with_disk(&here).await;
    let taken = here.disks_alone("one", true).await.unwrap();
    let archive = here.export_snapshot("one").await.unwrap();
    let imported = there.import_snapshot("", &archive).await.unwrap();
    assert_eq!(imported.spec, taken.spec);
    assert_eq!(imported.status, taken.status);
    there.restore("one", "copy", false).await.unwrap();
    booted(&there, "copy").await;
    assert_eq!(content(&there.raw_disks()[0]), "until the snapshot");
    assert!(fs::metadata(there.snapshot_disk()).unwrap().blocks() > 0);

    // One that says so and has memory too, and one of a kind that is not there.
    let mut with_memory = parts(&archive);
    with_memory[1].1[4] = 1;
    let mut unknown = parts(&archive);
    assert_eq!(unknown[0].1.pop(), Some(2));
    unknown[0].1.push(3);
    for wrong in [with_memory, unknown] {
        let refused = there.import_snapshot("two", &sealed(&wrong)).await.unwrap_err();
        let invalid = (Code::InvalidArgument, "ARCHIVE_INVALID".to_owned());
        assert_eq!(refusal(&refused), invalid, "{refused}");
    }
    assert_eq!(there.snapshot_names().await, ["one"]);
}

//! Snapshots, and VMs restored from them.

mod archives;
pub mod disks_alone;
mod frozen;
mod limits;
mod retention;

use std::{
    fs,
    path::{Path, PathBuf},
};

use rstest::rstest;
use rustix::process::{Signal, kill_process};
use tokio::task::JoinHandle;
use tonic::{Code, Status, transport::Channel};
use vmmd_api::v1::{
    self, ConditionStatus, VmPhase, nic_spec::Attachment, snapshot_service_client::SnapshotServiceClient,
};

use crate::{
    console::Client,
    disks::{named, raw},
    harness::{Daemon, assert_refused, assert_says, connect, end, metadata_of, refusal, status, vm_pid},
    namespace::Namespace,
    network::nic,
    verbs::{raw_file, within},
};

impl Daemon {
    pub async fn snapshots(&self) -> SnapshotServiceClient<Channel> {
        SnapshotServiceClient::new(connect(self.folder.path()).await)
    }

    pub async fn snapshot(&self, name: &str, vm: &str, paused: bool) -> Result<v1::Snapshot, Status> {
        let request = create_request(name, vm, paused);
        let answer = self.snapshots().await.create_snapshot(request).await?;
        Ok(answer.into_inner().snapshot.unwrap())
    }

    /// Begins a snapshot of the paused VM "web", and waits until that has so many files.
    async fn begin_snapshot(&self, name: &str, files: usize) -> JoinHandle<Result<v1::Snapshot, Status>> {
        let mut client = self.snapshots().await;
        let request = create_request(name, "web", true);
        let waiting = tokio::spawn(async move {
            let answer = client.create_snapshot(request).await?;
            Ok(answer.into_inner().snapshot.unwrap())
        });
        self.wait_snapshot_files(files).await;
        waiting
    }

    async fn wait_snapshot_files(&self, count: usize) {
        within(async || (self.snapshot_files().len() >= count).then_some(())).await;
    }

    async fn snapshot_names(&self) -> Vec<String> {
        self.snapshot_page(0, "").await.0
    }

    pub async fn restore(&self, snapshot: &str, vm: &str, on_demand: bool) -> Result<v1::Vm, Status> {
        let request = v1::RestoreVmRequest {
            snapshot: snapshot.into(),
            vm: vm.into(),
            on_demand,
            ..Default::default()
        };
        let answer = self.snapshots().await.restore_vm(request).await?;
        Ok(answer.into_inner().vm.unwrap())
    }

    /// Files that restores have left beside images instead of replacing the images.
    fn copies(&self) -> Vec<String> {
        let names = fs::read_dir(self.folder.path()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with('.')).collect()
    }

    /// Begins to restore a VM, and waits until that has come to where it is held.
    async fn restore_until(
        &self,
        held: &str,
        request: v1::RestoreVmRequest,
    ) -> JoinHandle<Result<v1::Vm, Status>> {
        self.fault(held);
        let mut client = self.snapshots().await;
        let waiting = tokio::spawn(async move {
            let answer = client.restore_vm(request).await?;
            Ok(answer.into_inner().vm.unwrap())
        });
        self.reached(held).await;
        waiting
    }

    /// Files of raw disks of the DiskService.
    fn raw_disks(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(self.path("state/disks")).unwrap();
        let paths = files.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().unwrap() == "raw").collect()
    }

    /// The one copy of a disk that is in a snapshot.
    fn snapshot_disk(&self) -> PathBuf {
        let mut files = self.snapshot_files().into_iter();
        files.find(|path| path.extension().unwrap() == "disk").unwrap()
    }

    /// Files of snapshots.
    fn snapshot_files(&self) -> Vec<PathBuf> {
        let Ok(folder) = fs::read_dir(self.path("state/snapshots")) else {
            return Vec::new();
        };
        folder.map(|entry| entry.unwrap().path()).collect()
    }
}

fn create_request(name: &str, vm: &str, paused: bool) -> v1::CreateSnapshotRequest {
    v1::CreateSnapshotRequest {
        snapshot: Some(v1::Snapshot {
            metadata: metadata_of(name),
            spec: Some(v1::SnapshotSpec {
                vm: vm.into(),
                ..Default::default()
            }),
            status: None,
        }),
        paused,
        ..Default::default()
    }
}

/// Restores the VM "web" with the request id "again".
fn with_id() -> v1::RestoreVmRequest {
    v1::RestoreVmRequest {
        snapshot: "one".into(),
        request_id: "again".into(),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_snapshot_is_taken_seen_and_deleted() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    let taken = daemon.snapshot("one", "web", false).await.unwrap();
    let told = taken.status.clone().unwrap();
    assert_eq!(told.vm_uid, vm.metadata.unwrap().uid);
    assert_eq!(told.vm_spec, vm.spec);
    assert_eq!((told.size_bytes, told.written_bytes), (15, 4096));
    assert_eq!(told.pause_duration.unwrap().nanos, 3_000_000);
    assert!(told.complete_time.is_some());
    let paused = daemon.snapshot("two", "web", true).await.unwrap();
    assert_eq!(paused.status.unwrap().pause_duration.unwrap().seconds, 2);
    assert_eq!(daemon.snapshot_names().await, ["one", "two"]);
    assert_eq!(daemon.snapshot_files().len(), 2);
    let request = v1::GetSnapshotRequest { name: "one".into() };
    let got = daemon.snapshots().await.get_snapshot(request).await.unwrap();
    assert_eq!(got.into_inner().snapshot.unwrap(), taken);

    let again = daemon.snapshot("one", "web", false).await.unwrap_err();
    assert_refused(&again, Code::AlreadyExists, "SNAPSHOT_EXISTS");

    daemon.delete_snapshot("one").await.unwrap();
    assert_eq!(daemon.snapshot_names().await, ["two"]);
    assert_eq!(daemon.snapshot_files().len(), 1);
    let gone = daemon.delete_snapshot("one").await.unwrap_err();
    assert_refused(&gone, Code::NotFound, "SNAPSHOT_NOT_FOUND");
    daemon.told_exactly("SnapshotCreated", 2).await;
    daemon.told_exactly("SnapshotDeleted", 1).await;
}

#[tokio::test]
async fn retry_after_deletion_makes_no_second_snapshot_or_vm() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let take = v1::CreateSnapshotRequest {
        request_id: "take".into(),
        ..create_request("one", "web", false)
    };
    let restore = v1::RestoreVmRequest {
        snapshot: "one".into(),
        vm: "copy".into(),
        request_id: "restore".into(),
        ..Default::default()
    };
    let mut client = daemon.snapshots().await;
    let taken = client.create_snapshot(take.clone()).await.unwrap().into_inner();
    let restored = client.restore_vm(restore.clone()).await.unwrap().into_inner();
    let again = client.create_snapshot(take.clone()).await.unwrap().into_inner();
    assert_eq!(again, taken);
    let again = client.restore_vm(restore.clone()).await.unwrap().into_inner();
    assert_eq!(again, restored);
    daemon.delete("copy", true).await.unwrap();
    daemon.delete_snapshot("one").await.unwrap();
    let refused = client.restore_vm(restore).await.unwrap_err();
    assert_eq!(refusal(&refused), crate::request::gone());
    let refused = client.create_snapshot(take).await.unwrap_err();
    assert_eq!(refusal(&refused), crate::request::gone());
    assert!(daemon.snapshot_names().await.is_empty());
}

#[tokio::test]
async fn a_stopped_vm_goes_on_from_its_snapshot_and_so_do_others() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.snapshot("one", "web", false).await.unwrap();
    let runs = daemon.restore("one", "", false).await.unwrap_err();
    assert_refused(&runs, Code::FailedPrecondition, "VM_NOT_STOPPED");
    daemon.kill_vm("web").await.unwrap();
    let vm = daemon.restore("one", "", false).await.unwrap();
    assert_eq!(status(&vm).phase(), VmPhase::Running);
    let mut console = Client::open(&daemon, "web").await;
    console.expect("restored from snapshot of web\r\n").await;
    for name in ["copy", "other"] {
        let vm = daemon.restore("one", name, true).await.unwrap();
        assert_eq!(vm.metadata.as_ref().unwrap().name, name);
        assert_eq!(status(&vm).phase(), VmPhase::Running);
        let mut console = Client::open(&daemon, name).await;
        console
            .expect("restored from snapshot of web on demand\r\n")
            .await;
    }
    // The next start is an ordinary one.
    daemon.kill_vm("copy").await.unwrap();
    daemon.start_vm("copy").await.unwrap();
    let mut console = Client::open(&daemon, "copy").await;
    console.expect("booted copy\r\n").await;
    // The snapshot outlives the VM that was restored from it, and recreates this VM.
    daemon.delete("web", true).await.unwrap();
    assert_eq!(daemon.snapshot_names().await, ["one"]);
    let vm = daemon.restore("one", "web", false).await.unwrap();
    assert_eq!(status(&vm).phase(), VmPhase::Running, "it is made anew");
}

#[tokio::test]
async fn state_dir_of_a_snapshot_belongs_to_its_first_vm_only() {
    let daemon = crate::shares::daemon().await;
    let mut vm = daemon.manifest("web", "");
    let folder = daemon.path("srv/data").display().to_string();
    vm.spec.as_mut().unwrap().state_dir.clone_from(&folder);
    daemon.run_vm(vm).await;
    daemon.snapshot("one", "web", false).await.unwrap();
    let copy = daemon.restore("one", "copy", false).await.unwrap();
    assert_eq!(copy.spec.unwrap().state_dir, "");
    daemon.kill_vm("web").await.unwrap();
    let vm = daemon.restore("one", "", false).await.unwrap();
    assert_eq!(vm.spec.unwrap().state_dir, folder);
}

#[tokio::test]
async fn addresses_of_nics_are_those_of_one_vm_of_a_snapshot_only() {
    let network = Namespace::new();
    network.ip("link add br0 type bridge");
    network.ip("link set br0 up");
    let daemon = Daemon::in_network(&network.0).await;
    daemon
        .run_with("web", "", |spec| {
            spec.nics = vec![nic("eth0", Attachment::Bridge("br0".into()))];
        })
        .await;
    daemon.snapshot("one", "web", false).await.unwrap();
    let in_use = (Code::FailedPrecondition, "NIC_ADDRESS_IN_USE".to_owned());
    let refused = daemon.restore("one", "first", false).await.unwrap_err();
    assert_eq!(refusal(&refused), in_use);
    daemon.delete("web", true).await.unwrap();
    let (first, second) = tokio::join!(
        daemon.restore("one", "first", false),
        daemon.restore("one", "second", false)
    );
    let refused = match (first, second) {
        (Ok(_), Err(refused)) | (Err(refused), Ok(_)) => refused,
        both => panic!("{both:?}"),
    };
    assert_eq!(refusal(&refused), in_use);
    assert_eq!(daemon.list().await.len(), 1);

    // Where something else keeps them apart they may have the same.
    let sharing = |identity: v1::RestoreIdentity| v1::RestoreVmRequest {
        snapshot: "one".into(),
        vm: "third".into(),
        share_addresses: true,
        identity: identity.into(),
        ..Default::default()
    };
    let mut client = daemon.snapshots().await;
    let fresh = client.restore_vm(sharing(v1::RestoreIdentity::Fresh)).await;
    assert_eq!(fresh.unwrap_err().code(), Code::InvalidArgument);
    client
        .restore_vm(sharing(v1::RestoreIdentity::Same))
        .await
        .unwrap();
    let macs = daemon
        .list()
        .await
        .into_iter()
        .map(|vm| status(&vm).nics[0].mac.clone());
    let macs: Vec<_> = macs.collect();
    assert_eq!(macs[0], macs[1]);
}

#[tokio::test]
async fn what_can_not_be_saved_is_refused_and_nothing_is_left() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("down", "")).await.unwrap();
    let down = daemon.snapshot("one", "down", false).await.unwrap_err();
    assert_refused(&down, Code::FailedPrecondition, "VM_NOT_RUNNING");
    let none = daemon.snapshot("one", "none", false).await.unwrap_err();
    assert_refused(&none, Code::NotFound, "VM_NOT_FOUND");
    let nameless = daemon.snapshot("No Name", "", false).await.unwrap_err();
    assert_eq!(nameless.code(), Code::InvalidArgument);
    daemon.run("full", "mock.save=refuse").await;
    let full = daemon.snapshot("one", "full", false).await.unwrap_err();
    assert_says(&full, "No space left on device");
    assert_eq!(daemon.phase("full").await, VmPhase::Running);
    daemon.run("sly", "mock.save=keep").await;
    let sly = daemon.snapshot("one", "sly", false).await.unwrap_err();
    assert_refused(&sly, Code::Internal, "VMM_MISBEHAVES");
    assert!(daemon.snapshot_names().await.is_empty() && daemon.snapshot_files().is_empty());
}

/// A VM with a raw disk by path, which is in the daemon's folder.
async fn with_disk(daemon: &Daemon) -> PathBuf {
    with_disk_and(daemon, "").await
}

/// The same with these options of the mock.
async fn with_disk_and(daemon: &Daemon, options: &str) -> PathBuf {
    with_image(daemon, options, |image| image.set_len(4096).unwrap()).await
}

/// The same, with what `make` makes of the empty image.
async fn with_image(daemon: &Daemon, options: &str, make: impl FnOnce(&mut fs::File)) -> PathBuf {
    let image = daemon.path("disk.raw");
    make(&mut fs::File::create(&image).unwrap());
    daemon
        .run_with("web", options, |spec| {
            spec.disks.push(v1::DiskSpec {
                // The mock writes some bytes, not blocks.
                cache: v1::DiskCache::Writeback.into(),
                // Fields of a path. The restore makes a disk of the DiskService, which has neither.
                beneath: daemon.folder.path().to_str().unwrap().into(),
                any_content: true,
                logical_block_bytes: 4096,
                ..raw_file("root", &image)
            });
        })
        .await;
    image
}

fn content(path: &Path) -> String {
    let bytes = fs::read(path).unwrap();
    assert_eq!(bytes.len(), 4096);
    let end = bytes.iter().position(|byte| *byte == 0).unwrap();
    String::from_utf8(bytes[..end].to_vec()).unwrap()
}

#[tokio::test]
async fn late_vmm_with_an_abandoned_snapshot_resumes_its_guest() {
    let mut daemon = Daemon::start().await;
    let vm = vm_pid(&daemon.run("web", "mock.save=stand").await);
    let mut snapshots = daemon.snapshots().await;
    let request = create_request("one", "web", false);
    let taking = tokio::spawn(async move { snapshots.create_snapshot(request).await });
    daemon.wait_phase("web", VmPhase::Paused).await;
    daemon.kill();
    taking.await.unwrap().unwrap_err();
    crate::harness::stop_process(vm);
    daemon.relaunch().await;
    let unknown = daemon.get("web").await.unwrap();
    assert_eq!(status(&unknown).conditions[0].status(), ConditionStatus::Unknown);
    kill_process(vm, Signal::CONT).unwrap();
    let now = daemon.wait_ready("web").await;
    assert_eq!((now.phase(), now.reason.as_str()), (VmPhase::Running, "Running"));
}

#[tokio::test]
async fn a_snapshot_has_the_disks_of_its_moment_and_gives_them_back() {
    let daemon = Daemon::start().await;
    let image = with_disk(&daemon).await;
    // Where blocks can be shared, the VM need not be paused for its disks.
    let shares = std::process::Command::new("cp")
        .args(["--reflink=always", "disk.raw", "shared.raw"])
        .current_dir(daemon.folder.path())
        .stderr(std::process::Stdio::null())
        .status();
    match daemon.snapshot("shared", "web", false).await {
        Ok(_) => assert!(shares.unwrap().success()),
        Err(refused) => {
            assert!(!shares.unwrap().success(), "{refused}");
            assert_refused(&refused, Code::FailedPrecondition, "SNAPSHOT_DISKS");
            assert!(daemon.snapshot_files().is_empty());
        }
    }
    let taken = daemon.snapshot("one", "web", true).await.unwrap();
    assert_eq!(taken.status.unwrap().disks, ["root"]);
    assert_eq!(content(&image), "behind the snapshot");

    let runs = daemon.restore("one", "", false).await.unwrap_err();
    assert_refused(&runs, Code::FailedPrecondition, "VM_NOT_STOPPED");
    assert_eq!(content(&image), "behind the snapshot", "nothing was touched");
    daemon.kill_vm("web").await.unwrap();
    let vm = daemon.restore("one", "", false).await.unwrap();
    assert_eq!(status(&vm).phase(), VmPhase::Running);
    assert_eq!(content(&image), "until the snapshot");
    assert!(daemon.copies().is_empty());

    // Another VM gets a disk of its own.
    let copy = daemon.restore("one", "copy", false).await.unwrap();
    let disk = &copy.spec.unwrap().disks[0];
    assert_eq!((disk.name.as_str(), disk.disk()), ("root", "copy-root"));
    let files = daemon.raw_disks();
    assert_eq!(files.len(), 1);
    assert_eq!(content(&files[0]), "until the snapshot");
    let disk = daemon.disk("copy-root").await.unwrap();
    assert_eq!(disk.status.unwrap().logical_block_bytes, 4096);

    // A fresh one boots.
    let fresh = |vm: &str| v1::RestoreVmRequest {
        snapshot: "one".into(),
        vm: vm.into(),
        identity: v1::RestoreIdentity::Fresh.into(),
        ..Default::default()
    };
    let mut client = daemon.snapshots().await;
    let taken = client.restore_vm(fresh("web")).await.unwrap_err();
    assert_refused(&taken, Code::AlreadyExists, "VM_EXISTS");
    let answer = client.restore_vm(fresh("fresh")).await.unwrap();
    let vm = answer.into_inner().vm.unwrap();
    assert_eq!(status(&vm).phase(), VmPhase::Running);
    assert_eq!(vm.spec.unwrap().disks[0].disk(), "fresh-root");
    let mut console = Client::open(&daemon, "fresh").await;
    console.expect("booted fresh\r\n").await;
}

#[tokio::test]
async fn a_snapshot_that_is_cancelled_ends_in_the_vmm_too() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.save=hang").await;
    let first = daemon.begin_snapshot("one", 1).await;
    daemon.wait_phase("web", VmPhase::Paused).await;
    let all = v1::ListOperationsRequest::default();
    let begun = daemon.operations().await.list_operations(all).await;
    let begun = begun.unwrap().into_inner().operations;
    assert_eq!(begun[0].r#type, "snapshot.create");
    daemon.cancel(&begun[0].id).await.unwrap();
    let cancelled = first.await.unwrap().unwrap_err();
    assert_refused(&cancelled, Code::Aborted, "CANCELLED");
    assert_says(&cancelled, "nothing was made");
    daemon.wait_phase("web", VmPhase::Running).await;
    assert!(daemon.snapshot_files().is_empty());
    daemon.snapshot("one", "web", true).await.unwrap();
}

#[tokio::test]
async fn a_snapshot_fails_when_a_disk_was_plugged_in_at_its_beginning() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.make(raw("data", 1 << 20), None).await.unwrap();
    daemon.fault("snapshot-validated");
    let first = daemon.begin_snapshot("one", 0).await;
    daemon.reached("snapshot-validated").await;
    let more = v1::DiskSpec {
        // The mock writes some bytes, not blocks.
        cache: v1::DiskCache::Writeback.into(),
        ..named("data")
    };
    daemon.attach("web", more).await.unwrap();
    daemon.release("snapshot-validated");
    let failed = first.await.unwrap().unwrap_err();
    assert_refused(&failed, Code::Aborted, "SNAPSHOT_VM_CHANGED");
    assert!(daemon.snapshot_names().await.is_empty() && daemon.snapshot_files().is_empty());
    let again = daemon.snapshot("one", "web", true).await.unwrap();
    assert_eq!(again.status.unwrap().disks, ["data"]);
}

#[tokio::test]
async fn second_snapshot_of_a_vm_is_refused_first_is_consistent() {
    let daemon = Daemon::start().await;
    let written = daemon.path("written");
    with_disk_and(&daemon, &format!("mock.save={}", written.display())).await;
    let first = daemon.begin_snapshot("one", 2).await;
    let second = daemon.snapshot("two", "web", true).await.unwrap_err();
    assert_refused(&second, Code::FailedPrecondition, "SNAPSHOT_UNDER_WAY");
    assert!(!first.is_finished());
    fs::write(&written, "").unwrap();
    first.await.unwrap().unwrap();
    assert_eq!(content(&daemon.snapshot_disk()), "until the snapshot");
    daemon.snapshot("two", "web", true).await.unwrap();
}

/// A daemon with a VM that is stopped, whose guest has written to its disk since it was taken the snapshot "one" of.
async fn stopped_behind_its_snapshot() -> (Daemon, PathBuf) {
    let daemon = Daemon::start().await;
    let image = with_disk(&daemon).await;
    daemon.snapshot("one", "web", true).await.unwrap();
    daemon.kill_vm("web").await.unwrap();
    assert_eq!(content(&image), "behind the snapshot");
    (daemon, image)
}

#[tokio::test]
async fn refused_or_failed_restore_leaves_the_disks_unchanged() {
    let (daemon, image) = stopped_behind_its_snapshot().await;
    daemon.cordon("maintenance").await;
    let refused = daemon.restore("one", "", false).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NODE_CORDONED");
    assert_eq!(content(&image), "behind the snapshot");
    daemon.uncordon().await.unwrap();

    let files = daemon.snapshot_files();
    let memory = files.iter().find(|path| path.extension().unwrap() == "snapshot");
    let intact = fs::read(memory.unwrap()).unwrap();
    fs::write(memory.unwrap(), "something else").unwrap();
    let failed = daemon.restore("one", "", false).await.unwrap_err();
    assert_says(&failed, "the snapshot is damaged");
    assert_eq!(content(&image), "behind the snapshot");
    assert!(daemon.copies().is_empty(), "{:?}", daemon.copies());
    assert_eq!(daemon.phase("web").await, VmPhase::Failed);

    fs::write(memory.unwrap(), intact).unwrap();
    daemon.restore("one", "", false).await.unwrap();
    assert_eq!(content(&image), "until the snapshot");
    assert!(daemon.copies().is_empty(), "{:?}", daemon.copies());
}

/// The restored machine survives the daemon, or ends with it.
#[rstest]
#[tokio::test]
async fn restored_vm_has_snapshot_disks_after_a_kill_and_a_retry(
    #[values("put-back", "put-back-committed")] held: &str,
    #[values(false, true)] ends: bool,
) {
    let (mut daemon, image) = stopped_behind_its_snapshot().await;
    let waiting = daemon.restore_until(held, with_id()).await;
    assert_eq!(content(&image), "behind the snapshot");
    daemon.kill();
    assert!(waiting.await.unwrap().is_err());
    if ends {
        daemon.vmm_processes().into_iter().for_each(end);
        daemon.release(held);
    }
    daemon.relaunch().await;
    assert_eq!(content(&image), "until the snapshot");
    assert!(daemon.copies().is_empty(), "{:?}", daemon.copies());
    let again = daemon.snapshots().await.restore_vm(with_id()).await.unwrap();
    let vm = again.into_inner().vm.unwrap();
    assert_eq!(status(&vm).phase(), VmPhase::Running);
    assert_eq!(content(&image), "until the snapshot");
}

#[tokio::test]
async fn late_vmm_of_a_restored_vm_keeps_its_disks() {
    let (mut daemon, image) = stopped_behind_its_snapshot().await;
    let waiting = daemon.restore_until("put-back", with_id()).await;
    daemon.kill();
    assert!(waiting.await.unwrap().is_err());
    daemon.release("put-back");
    let vmm = daemon.vmm_processes()[0];
    crate::harness::stop_process(vmm);
    daemon.relaunch().await;
    kill_process(vmm, Signal::CONT).unwrap();
    daemon.wait_ready("web").await;
    assert!(daemon.copies().is_empty(), "{:?}", daemon.copies());
    daemon.kill_vm("web").await.unwrap();
    daemon.start_vm("web").await.unwrap();
    assert_eq!(content(&image), "until the snapshot");
}

#[tokio::test]
async fn a_vm_whose_restore_fails_leaves_no_disk() {
    let daemon = Daemon::start().await;
    with_disk(&daemon).await;
    daemon.snapshot("one", "web", true).await.unwrap();
    let of_memory = daemon.snapshot_files();
    let of_memory = of_memory
        .iter()
        .find(|path| path.extension().unwrap() == "snapshot");
    fs::write(of_memory.unwrap(), "something else").unwrap();
    let failed = daemon.restore("one", "copy", false).await.unwrap_err();
    assert_says(&failed, "the snapshot is damaged");
    assert_eq!(daemon.names().await, ["web"]);
    assert_eq!(fs::read_dir(daemon.path("state/disks")).unwrap().count(), 0);
    let none = daemon.restore("none", "copy", false).await.unwrap_err();
    assert_refused(&none, Code::NotFound, "SNAPSHOT_NOT_FOUND");
    let name = daemon.restore("one", "No Name", false).await.unwrap_err();
    assert_eq!(name.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn disks_of_an_interrupted_restore_are_removed_then_made_anew() {
    let mut daemon = Daemon::start().await;
    with_disk(&daemon).await;
    daemon.snapshot("one", "web", true).await.unwrap();
    daemon.fault("restore");
    let failed = daemon.restore("one", "copy", false).await.unwrap_err();
    assert_eq!(failed.code(), Code::Internal, "{failed}");
    assert_eq!(daemon.raw_disks().len(), 1, "the disk was made");
    daemon.kill_and_restart().await;
    assert_eq!(daemon.raw_disks().len(), 0);
    daemon.told_exactly("Repaired", 1).await;
    daemon.restore("one", "copy", false).await.unwrap();
    // From here on the disk is one like any other.
    daemon.delete("copy", true).await.unwrap();
    daemon.kill_and_restart().await;
    assert_eq!(daemon.raw_disks().len(), 1);
}

#[tokio::test]
async fn vm_of_an_interrupted_restore_is_started_by_the_retry() {
    for identity in [v1::RestoreIdentity::Same, v1::RestoreIdentity::Fresh] {
        let mut daemon = Daemon::start().await;
        with_disk(&daemon).await;
        daemon.snapshot("one", "web", true).await.unwrap();
        let request = v1::RestoreVmRequest {
            vm: "copy".into(),
            identity: identity.into(),
            ..with_id()
        };
        let waiting = daemon.restore_until("restore-made", request.clone()).await;
        daemon.kill();
        assert!(waiting.await.unwrap().is_err());
        daemon.release("restore-made");
        daemon.relaunch().await;
        let made = daemon.get("copy").await.unwrap();
        assert_ne!(status(&made).phase(), VmPhase::Running, "{identity:?}");
        let again = daemon.snapshots().await.restore_vm(request).await.unwrap();
        let vm = again.into_inner().vm.unwrap();
        assert_eq!(status(&vm).phase(), VmPhase::Running, "{identity:?}");
        assert_eq!(vm.metadata.unwrap().uid, made.metadata.unwrap().uid);
        let says = match identity {
            v1::RestoreIdentity::Fresh => "booted copy\r\n",
            _ => "restored from snapshot of web\r\n",
        };
        Client::open(&daemon, "copy").await.expect(says).await;
        assert_eq!(daemon.raw_disks().len(), 1);
    }
}

#[tokio::test]
async fn snapshots_outlive_the_daemon_and_partial_ones_are_removed() {
    let mut daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.run("slow", "mock.save=hang").await;
    let taken = daemon.snapshot("one", "web", false).await.unwrap();
    let mut client = daemon.snapshots().await;
    let request = create_request("two", "slow", false);
    let waiting = tokio::spawn(async move { client.create_snapshot(request).await });
    daemon.wait_snapshot_files(2).await;
    daemon.kill_and_restart().await;
    assert!(waiting.await.unwrap().is_err());
    assert_eq!(daemon.snapshot_names().await, ["one"]);
    assert_eq!(daemon.snapshot_files().len(), 1);
    daemon.told_exactly("Repaired", 1).await;
    let request = v1::GetSnapshotRequest { name: "one".into() };
    let got = daemon.snapshots().await.get_snapshot(request).await.unwrap();
    assert_eq!(got.into_inner().snapshot.unwrap(), taken);
    daemon.restore("one", "copy", true).await.unwrap();
}

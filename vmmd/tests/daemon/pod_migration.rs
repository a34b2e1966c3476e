//! Live migration of VMs in pods, between two daemons with a launcher at each.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, FileType, Mode, mknodat, stat},
    process::Signal,
};
use tonic::{Code, Status};
use vmmd_api::v1::{self, ExitReason, OperationPhase, VmPhase, disk_spec::Source};

use crate::{
    disk_state::Loop,
    handover::network::Network,
    harness::{Daemon, assert_refused, assert_says, metadata_of, refusal, status, uid, vm_pid},
    migration::{kill_vmm, pair},
    namespace::Namespace,
    pods::{Pod, cgroup_of, pods},
    verbs::{condition, exit_reason, within},
};

/// A VM in a pod of the source, and a pod of the target that waits for the VM. The pods go first.
struct Stage {
    from: Pod,
    to: Pod,
    source: Daemon,
    target: Daemon,
    network: Network,
    /// The machine of the VM sends nothing before there is a file of this name.
    go: PathBuf,
}

impl Stage {
    /// Without launchers.
    async fn empty() -> Self {
        let (source, target) = pair().await;
        let network = Network::to(&target).await;
        fs::set_permissions(source.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (from, to) = (Pod::new(&source), Pod::new(&target));
        shares_volume(&from, &to);
        Self {
            go: source.path("go"),
            from,
            to,
            source,
            target,
            network,
        }
    }

    /// With a VM that runs.
    async fn new() -> Self {
        let mut stage = Self::empty().await;
        stage.runs("", |_| {}).await;
        stage
    }

    /// With a VM that sends nothing yet, and that moves.
    async fn moving() -> (Self, v1::Operation) {
        let mut stage = Self::empty().await;
        let options = format!("mock.send={}", stage.go.display());
        stage.runs(&options, |_| {}).await;
        let operation = stage.migrate().await.unwrap();
        stage.target.waits_for("web", VmPhase::Starting).await;
        within(async || (stage.target.vmm_processes().len() == 1).then_some(())).await;
        (stage, operation)
    }

    async fn runs(&mut self, options: &str, change: impl FnOnce(&mut v1::VmSpec)) -> v1::Vm {
        for pod in [&mut self.from, &mut self.to] {
            pod.launch();
            pod.says("WaitingForVm").await;
        }
        let vm = self.from.vm_with(&self.source, options, change);
        self.source.create(vm).await.unwrap();
        let vm = self.source.start_vm("web").await.unwrap();
        self.from.says("RUNNING").await;
        vm
    }

    async fn migrate(&self) -> Result<v1::Operation, Status> {
        self.migrate_to("web", &self.to.uid).await
    }

    async fn migrate_to(&self, vm: &str, pod: &str) -> Result<v1::Operation, Status> {
        let request = v1::MigrateVmRequest {
            name: vm.into(),
            target: self.network.address.clone(),
            target_pod: pod.into(),
            ..Default::default()
        };
        let answer = self.source.migrations().await.migrate_vm(request).await?;
        Ok(answer.into_inner().operation.unwrap())
    }

    /// The VM is in the pod of the target, and the one of the source has ended for that reason.
    async fn has_moved(&mut self) {
        self.source.forgets("web").await;
        assert_eq!(self.from.ended().await.code(), Some(0));
        let termination = self.from.read("termination");
        assert!(termination.starts_with("Migrated: "), "{termination}");
        assert!(!self.from.group.join("vmm").exists());
        let vm = self.target.waits_for("web", VmPhase::Running).await;
        assert_eq!(vm.spec.as_ref().unwrap().pod.as_ref().unwrap().uid, self.to.uid);
        self.to.says("RUNNING").await;
        self.to.type_in("over there\n");
        self.to.prints("over there").await;
    }

    /// The VM stays in its pod, and the one of the target waits.
    async fn stays(&mut self) {
        self.target.forgets("web").await;
        self.target.wait_no_processes().await;
        self.source.waits_for("web", VmPhase::Running).await;
        self.from.type_in("still here\n");
        self.from.prints("still here").await;
        let mut pods = pods(&self.target).await;
        within(async || {
            let uid = self.to.uid.clone();
            pods.get_pod(v1::GetPodRequest { uid }).await.ok().map(drop)
        })
        .await;
        assert_eq!(self.to.read("termination"), "");
    }

    /// The same VM moves at last.
    async fn moves(&mut self) {
        fs::write(&self.go, "").unwrap();
        let operation = self.migrate().await.unwrap();
        self.source.completes(&operation).await;
        self.has_moved().await;
    }
}

/// Gives the second pod the volume of the first.
fn shares_volume(from: &Pod, to: &Pod) {
    let image = |pod: &Pod| pod.folder.join("volumes/data/disk.img");
    fs::remove_file(image(to)).unwrap();
    fs::hard_link(image(from), image(to)).unwrap();
}

fn has_open(vm: &v1::Vm, path: &Path) -> bool {
    let files = fs::read_dir(format!("/proc/{}/fd", vm_pid(vm).as_raw_nonzero())).unwrap();
    let mut files = files.flatten();
    files.any(|file| fs::read_link(file.path()).is_ok_and(|found| found == path))
}

fn reason(operation: &v1::Operation) -> String {
    operation.error.as_ref().unwrap().reason()
}

/// The network of a pod, connected to nothing.
fn pod_network(address: &str) -> Namespace {
    let namespace = Namespace::new();
    namespace.ip("link set lo up");
    namespace.ip("link add eth0 type veth peer name cluster");
    namespace.ip("link set cluster up");
    namespace.ip(&format!("addr add {address}/24 dev eth0"));
    namespace.ip("link set eth0 up");
    namespace.ip("route add default dev eth0");
    namespace
}

#[tokio::test(flavor = "multi_thread")]
async fn vm_moves_to_a_pod_with_its_volume_and_network() {
    let mut stage = Stage::empty().await;
    let (here, there) = (pod_network("10.244.0.9"), pod_network("10.244.1.9"));
    // So the guest does not have the usual address.
    here.ip("route add 10.0.2.0/24 dev eth0");
    (stage.from.namespace, stage.to.namespace) = (Some(here), Some(there));
    let in_pod = |spec: &mut v1::VmSpec| {
        spec.nics.push(v1::NicSpec {
            name: "eth0".into(),
            attachment: Some(v1::nic_spec::Attachment::PodNetwork(v1::PodNetwork::default())),
            ..Default::default()
        });
    };
    let before = stage.runs("", in_pod).await;
    let shown = condition(status(&before), "Migratable");
    assert_eq!(shown.status(), v1::ConditionStatus::True, "{shown:?}");
    assert!(shown.message.contains("target_pod"), "{shown:?}");
    let operation = stage.migrate().await.unwrap();
    stage.source.completes(&operation).await;
    stage.has_moved().await;
    assert_eq!(stage.source.vmm_processes(), []);
    let after = stage.target.get("web").await.unwrap();
    let mut expected = before.spec.clone().unwrap();
    expected.pod.as_mut().unwrap().uid.clone_from(&stage.to.uid);
    assert_eq!((uid(&after), after.spec.clone()), (uid(&before), Some(expected)));
    assert_eq!(status(&after).nics[0].mac, status(&before).nics[0].mac);
    let group = format!("0::/pod{}/vmm\n", stage.to.uid);
    assert!(cgroup_of(vm_pid(&after)).contains(&group));
    assert!(has_open(&after, &stage.to.folder.join("volumes/data/disk.img")));
    let table = format!("run/pods/{}/table.json", uid(&after));
    assert!(!stage.source.path(&table).exists());
    let table = fs::read_to_string(stage.target.path(&table)).unwrap();
    assert!(table.contains(r#""address":"10.254.254.2""#), "{table}");
    stage.to.type_in("poweroff\n");
    assert_eq!(stage.to.ended().await.code(), Some(0));
    assert_eq!(stage.to.read("termination"), "GuestShutdown");
}

#[tokio::test]
async fn pod_that_cannot_have_the_vm_is_named_and_the_vm_stays() {
    let mut stage = Stage::new().await;
    stage.source.run("plain", "").await;
    for (vm, pod, code, reason) in [
        ("web", "", Code::FailedPrecondition, "MIGRATION_POD"),
        (
            "plain",
            stage.to.uid.as_str(),
            Code::FailedPrecondition,
            "MIGRATION_POD",
        ),
        ("web", "a/b", Code::InvalidArgument, "INVALID_FIELDS"),
    ] {
        let refused = stage.migrate_to(vm, pod).await.unwrap_err();
        assert_refused(&refused, code, reason);
        assert_says(&refused, "target_pod");
    }
    let unknown = Pod::new(&stage.target);
    let mut taken = Pod::new(&stage.target);
    taken.launch();
    taken.says("WaitingForVm").await;
    let other = taken.vm(&stage.target, |spec| spec.disks.clear());
    let other = v1::Vm {
        metadata: metadata_of("other"),
        ..other
    };
    stage.target.create(other).await.unwrap();
    let mut bare = Pod::new(&stage.target);
    fs::rename(
        bare.folder.join("volumes/data"),
        bare.folder.join("volumes/other"),
    )
    .unwrap();
    bare.launch();
    bare.says("WaitingForVm").await;
    let mut foreign = Pod::new(&stage.target);
    foreign.launch();
    foreign.says("WaitingForVm").await;
    for (pod, expected) in [
        (&unknown, "POD_NOT_CONNECTED"),
        (&taken, "POD_HAS_VM"),
        (&bare, "POD_VOLUME_NOT_FOUND"),
        // Its disk is another file.
        (&foreign, "MIGRATION_REFUSED"),
    ] {
        let operation = stage.migrate_to("web", &pod.uid).await.unwrap();
        let ended = stage.source.fails(&operation).await;
        assert_eq!(reason(&ended), expected, "{ended:?}");
    }
    stage.stays().await;
    stage.moves().await;
}

#[tokio::test]
async fn of_two_vms_for_one_pod_one_is_refused() {
    let stage = Stage::new().await;
    let mut second = Pod::new(&stage.source);
    second.launch();
    second.says("WaitingForVm").await;
    let vm = second.vm(&stage.source, |spec| spec.disks.clear());
    let vm = v1::Vm {
        metadata: metadata_of("db"),
        ..vm
    };
    stage.source.run_vm(vm).await;
    let reached = stage.target.path("run/fault/made-disks.reached");
    stage.target.fault("made-disks");
    let mut operations = Vec::new();
    for vm in ["web", "db"] {
        operations.push(stage.migrate_to(vm, &stage.to.uid).await.unwrap());
        within(async || fs::remove_file(&reached).ok()).await;
    }
    stage.target.release("made-disks");
    let mut refused = 0;
    for operation in &operations {
        let ended = stage.source.ended(operation).await;
        if ended.phase() != OperationPhase::Completed {
            assert_eq!(reason(&ended), "POD_HAS_VM", "{ended:?}");
            refused += 1;
        }
    }
    assert_eq!((refused, stage.target.list().await.len()), (1, 1));
}

#[tokio::test]
async fn aborted_migration_leaves_the_pod_for_another_attempt() {
    let (mut stage, operation) = Stage::moving().await;
    let busy = stage.to.vm(&stage.target, |_| {});
    let busy = v1::Vm {
        metadata: metadata_of("other"),
        ..busy
    };
    let refused = stage.target.create(busy).await.unwrap_err();
    assert_eq!(refusal(&refused).1, "POD_HAS_VM");
    stage.source.cancel(&operation.id).await.unwrap();
    let ended = stage.source.ended(&operation).await;
    assert_eq!(ended.phase(), OperationPhase::Cancelled, "{ended:?}");
    stage.stays().await;
    stage.moves().await;
}

#[tokio::test]
async fn pod_whose_vm_has_moved_gets_no_other_one() {
    let mut stage = Stage::new().await;
    stage.moves().await;
    for restarts in [false, true] {
        if restarts {
            stage.source.kill_and_restart().await;
        }
        let again = stage.from.vm(&stage.source, |_| {});
        let refused = stage.source.create(again).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "POD_MIGRATED");
        fs::write(stage.from.folder.join("termination"), "").unwrap();
        stage.from.launch();
        stage.has_moved().await;
    }
}

#[tokio::test]
async fn killed_source_daemon_ends_its_pod_as_migrated() {
    for held in ["wrote-Given", "says-Commit", "received-Running", "wrote-Gone"] {
        let mut stage = Stage::new().await;
        stage.source.fault(held);
        stage.migrate().await.unwrap();
        stage.source.reached(held).await;
        stage.source.kill();
        stage.source.release(held);
        stage.source.relaunch().await;
        stage.has_moved().await;
    }
    let mut stage = Stage::new().await;
    stage.source.fault("received-Ready");
    stage.migrate().await.unwrap();
    stage.source.reached("received-Ready").await;
    stage.source.kill();
    stage.source.release("received-Ready");
    stage.source.relaunch().await;
    stage.stays().await;
    stage.moves().await;
}

#[tokio::test]
async fn process_that_ends_after_the_hand_over_is_no_failure() {
    let mut stage = Stage::new().await;
    stage.source.fault("says-Commit");
    stage.migrate().await.unwrap();
    stage.source.reached("says-Commit").await;
    kill_vmm(&stage.source);
    stage.source.waits_for("web", VmPhase::Failed).await;
    stage.from.says("FAILED").await;
    stage.source.release("says-Commit");
    stage.has_moved().await;
}

#[tokio::test]
async fn killed_target_daemon_leaves_its_pod_connected() {
    for (held, moves) in [
        ("received-OfferVm", false),
        ("received-ReceiveVm", false),
        ("wrote-Prepared", false),
        ("received-Commit", true),
        ("wrote-Owned", true),
    ] {
        let mut stage = Stage::new().await;
        stage.target.fault(held);
        stage.migrate().await.unwrap();
        stage.target.reached(held).await;
        stage.target.kill();
        stage.target.release(held);
        stage.target.relaunch().await;
        stage.network.leads_to(&stage.target);
        if moves {
            stage.has_moved().await;
        } else {
            stage.stays().await;
            stage.moves().await;
        }
    }
}

#[tokio::test]
async fn killed_launcher_of_the_source_ends_vm_and_migration() {
    let (stage, operation) = Stage::moving().await;
    stage.from.signal(Signal::KILL);
    stage.source.fails(&operation).await;
    let vm = stage.source.waits_for("web", VmPhase::Failed).await;
    assert_eq!(exit_reason(&vm), ExitReason::LauncherGone);
    stage.target.forgets("web").await;
    stage.target.wait_no_processes().await;
    assert_eq!(stage.to.read("termination"), "");
    stage.source.delete("web", true).await.unwrap();
}

#[tokio::test]
async fn killed_launcher_of_the_target_leaves_the_vm_at_the_source() {
    let (mut stage, operation) = Stage::moving().await;
    stage.to.signal(Signal::KILL);
    stage.source.fails(&operation).await;
    stage.to.ended().await;
    stage.to.launch();
    stage.stays().await;
    stage.moves().await;
}

#[tokio::test]
async fn stopped_pod_of_the_source_takes_the_migration_back() {
    let (mut stage, operation) = Stage::moving().await;
    stage.from.signal(Signal::TERM);
    let ended = stage.source.fails(&operation).await;
    assert_eq!(reason(&ended), "POD_STOPPED", "{ended:?}");
    // The mock hears nothing while it sends.
    fs::write(&stage.go, "").unwrap();
    assert_eq!(stage.from.ended().await.code(), Some(0));
    assert_eq!(stage.from.read("termination"), "Stopped");
    stage.target.forgets("web").await;
    assert_eq!(stage.to.read("termination"), "");
}

#[tokio::test]
async fn stopped_pod_of_the_target_ends_and_the_vm_stays() {
    let (mut stage, operation) = Stage::moving().await;
    stage.to.signal(Signal::TERM);
    assert_eq!(stage.to.ended().await.code(), Some(0));
    assert!(stage.to.read("termination").starts_with("Stopped: "));
    stage.source.fails(&operation).await;
    fs::write(stage.to.folder.join("termination"), "").unwrap();
    stage.to.launch();
    stage.stays().await;
}

#[tokio::test]
async fn pod_stopped_at_the_hand_over_stops_the_vm_that_has_arrived() {
    let mut stage = Stage::new().await;
    stage.source.fault("received-Ready");
    let operation = stage.migrate().await.unwrap();
    stage.source.reached("received-Ready").await;
    stage.to.signal(Signal::TERM);
    assert_eq!(stage.to.read("termination"), "");
    stage.source.release("received-Ready");
    stage.source.completes(&operation).await;
    assert_eq!(stage.to.ended().await.code(), Some(0));
    assert_eq!(stage.to.read("termination"), "Stopped");
    assert_eq!(stage.target.phase("web").await, VmPhase::Stopped);
}

#[tokio::test]
async fn block_device_of_both_pods_stays_with_the_vm() {
    for (cache, moves) in [(v1::DiskCache::Writeback, false), (v1::DiskCache::None, true)] {
        let mut stage = Stage::empty().await;
        let path = stage.source.path("device");
        fs::File::create_new(&path).unwrap().set_len(1 << 20).unwrap();
        // As two nodes have the same device.
        let (Some(here), Some(there)) = (Loop::over(&path), Loop::over(&path)) else {
            return;
        };
        for (pod, device) in [(&stage.from, &here), (&stage.to, &there)] {
            let folder = pod.folder.join("devices");
            fs::create_dir(&folder).unwrap();
            let number = stat(&device.0).unwrap().st_rdev;
            let mode = Mode::RUSR | Mode::WUSR;
            mknodat(CWD, folder.join("raw"), FileType::BlockDevice, mode, number).unwrap();
        }
        let raw = |spec: &mut v1::VmSpec| {
            spec.disks = vec![v1::DiskSpec {
                name: "root".into(),
                source: Some(Source::PodVolume("raw".into())),
                cache: cache.into(),
                ..Default::default()
            }];
        };
        stage.runs("", raw).await;
        if moves {
            stage.moves().await;
            continue;
        }
        let operation = stage.migrate().await.unwrap();
        let ended = stage.source.fails(&operation).await;
        assert!(ended.message.contains("`cache: none`"), "{ended:?}");
        stage.stays().await;
    }
}

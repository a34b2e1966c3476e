//! Disks are attached to and detached from VMs, running or not.

use std::{fs, time::Duration};

use rstest::rstest;
use rustix::process::{Signal, kill_process};
use tokio::task::JoinHandle;
use tonic::{Code, Status};
use vmmd_api::v1::{self, AttachmentPhase, DiskSpec, VmPhase};

use crate::{
    console::Client,
    harness::{Daemon, assert_refused, assert_says, refusal, status, vm_pid},
    verbs::{fields, raw_file},
};

pub fn disk(daemon: &Daemon, name: &str) -> DiskSpec {
    let path = daemon.path(&format!("{name}.raw"));
    if !path.exists() {
        fs::write(&path, [0; 4096]).unwrap();
    }
    raw_file(name, &path)
}

impl Daemon {
    pub async fn attach(&self, vm: &str, disk: DiskSpec) -> Result<v1::Vm, Status> {
        let request = v1::AttachDiskRequest {
            vm: vm.into(),
            disk: Some(disk),
            ..Default::default()
        };
        Ok(self.client().attach_disk(request).await?.into_inner().vm.unwrap())
    }

    pub async fn detach(&self, vm: &str, disk: &str, timeout_ms: i32, force: bool) -> Result<v1::Vm, Status> {
        let request = v1::DetachDiskRequest {
            vm: vm.into(),
            disk: disk.into(),
            timeout: Some(vmmd_api::well_known::Duration {
                seconds: i64::from(timeout_ms / 1000),
                nanos: timeout_ms % 1000 * 1_000_000,
            }),
            force,
            ..Default::default()
        };
        Ok(self.client().detach_disk(request).await?.into_inner().vm.unwrap())
    }

    fn begin_attach(&self, vm: &str, disk: DiskSpec) -> JoinHandle<Result<(), Status>> {
        let mut client = self.client();
        let request = v1::AttachDiskRequest {
            vm: vm.into(),
            disk: Some(disk),
            ..Default::default()
        };
        tokio::spawn(async move { client.attach_disk(request).await.map(drop) })
    }

    fn begin_detach(&self, vm: &str, disk: &str) -> JoinHandle<Result<(), Status>> {
        let mut client = self.client();
        let request = v1::DetachDiskRequest {
            vm: vm.into(),
            disk: disk.into(),
            ..Default::default()
        };
        tokio::spawn(async move { client.detach_disk(request).await.map(drop) })
    }

    /// Names of the disks that the `vmm` reports.
    pub async fn plugged(&self, vm: &str) -> Vec<String> {
        let stats = self.stats(vm).await.unwrap();
        stats.into_iter().map(|disk| disk.name).collect()
    }

    pub async fn stats(&self, vm: &str) -> Result<Vec<v1::DiskStats>, Status> {
        let request = v1::GetVmDiskStatsRequest { vm: vm.into() };
        Ok(self.client().get_vm_disk_stats(request).await?.into_inner().disks)
    }
}

pub fn phase(vm: &v1::VmStatus, disk: &str) -> Option<AttachmentPhase> {
    let mut disks = vm.disks.iter();
    disks
        .find(|status| status.name == disk)
        .map(v1::DiskStatus::phase)
}

pub fn names(vm: &v1::Vm) -> Vec<&str> {
    let disks = &vm.spec.as_ref().unwrap().disks;
    disks.iter().map(|disk| disk.name.as_str()).collect()
}

pub fn generations(vm: &v1::Vm) -> (u64, u64) {
    (
        vm.metadata.as_ref().unwrap().generation,
        status(vm).observed_generation,
    )
}

#[tokio::test]
async fn a_disk_comes_and_goes_while_the_vm_runs() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    assert_eq!(generations(&vm), (1, 1));
    let vm = daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    assert_eq!((names(&vm), generations(&vm)), (vec!["data"], (2, 2)));
    let told = &status(&vm).disks[0];
    assert_eq!(
        (told.phase(), told.pci_slot, told.message.as_str()),
        (AttachmentPhase::Attached, Some(10), "")
    );
    assert!(told.path.ends_with("/data.raw"));
    assert_eq!(daemon.plugged("web").await, ["data"]);
    daemon
        .wait("web", |status| status.disks[0].capacity_bytes == Some(4096))
        .await;
    // It outlives a restart of the VM and one of the daemon.
    let again = daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    assert_eq!(generations(&again), (2, 2), "the same again changes nothing");
    daemon.stop("web", None).await.unwrap();
    let stopped = daemon.get("web").await.unwrap();
    assert_eq!(phase(status(&stopped), "data"), Some(AttachmentPhase::Pending));
    daemon.start_vm("web").await.unwrap();
    assert_eq!(daemon.plugged("web").await, ["data"]);
    let vm = daemon.detach("web", "data", 5000, false).await.unwrap();
    assert_eq!((names(&vm).len(), status(&vm).disks.len()), (0, 0));
    assert_eq!(daemon.plugged("web").await.len(), 0);
    let held = fs::File::options()
        .write(true)
        .open(daemon.path("data.raw"))
        .unwrap();
    assert!(lockable(&held), "the vmm and the daemon have let go of it");
    for reason in ["DiskAttached", "DiskDetached"] {
        let told = daemon.events(reason).await;
        assert_eq!(told.len(), 1, "{reason}: {told:?}");
        assert_eq!(told[0].object.as_ref().unwrap().name, "web");
    }
}

/// No OFD lock of somebody else is in the way of a lock for writing.
fn lockable(file: &fs::File) -> bool {
    // A POSIX lock of this process meets OFD locks as any other.
    rustix::fs::fcntl_lock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
}

#[tokio::test]
async fn a_disk_of_a_stopped_vm_changes_in_the_spec_only() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let vm = daemon.attach("web", disk(&daemon, "a")).await.unwrap();
    assert_eq!(phase(status(&vm), "a"), Some(AttachmentPhase::Pending));
    daemon.attach("web", disk(&daemon, "b")).await.unwrap();
    let vm = daemon.detach("web", "a", 0, false).await.unwrap();
    assert_eq!((names(&vm), generations(&vm)), (vec!["b"], (4, 0)));
    // The slot of the one that is gone is the lowest free one; the other keeps its own.
    let vm = daemon.attach("web", disk(&daemon, "c")).await.unwrap();
    let slots: Vec<_> = status(&vm)
        .disks
        .iter()
        .filter_map(|disk| disk.pci_slot)
        .collect();
    assert_eq!(slots, [11, 10]);
    daemon.start_vm("web").await.unwrap();
    assert_eq!(daemon.plugged("web").await, ["b", "c"]);
}

#[tokio::test]
async fn other_disk_of_a_used_name_is_refused_same_disk_is_accepted() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    let other = DiskSpec {
        read_only: true,
        ..disk(&daemon, "data")
    };
    let refused = daemon.attach("web", other).await.unwrap_err();
    assert_refused(&refused, Code::AlreadyExists, "DISK_EXISTS");
    // The serial that it would have anyway is the same disk.
    let same = DiskSpec {
        serial: "data".into(),
        ..disk(&daemon, "data")
    };
    daemon.attach("web", same).await.unwrap();
}

#[rstest]
#[case::path(|disk: &mut DiskSpec| disk.source = Some(v1::disk_spec::Source::Path("data".into())), "disk.path")]
#[case::format(|disk: &mut DiskSpec| disk.format = 0, "disk.format")]
#[case::group(|disk: &mut DiskSpec| disk.rate_group = "none".into(), "disk.rateGroup")]
#[case::queues(|disk: &mut DiskSpec| disk.queues = 17, "disk.queues")]
#[tokio::test]
async fn a_wrong_disk_is_refused_by_field_and_changes_nothing(
    #[case] change: impl Fn(&mut DiskSpec),
    #[case] field: &str,
) {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut wrong = disk(&daemon, "data");
    change(&mut wrong);
    let refused = daemon.attach("web", wrong).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_eq!(fields(&refused), [field]);
    let vm = daemon.get("web").await.unwrap();
    assert_eq!((names(&vm).len(), generations(&vm)), (0, (1, 1)));
}

#[rstest]
#[case::missing("", "DISK_NOT_FOUND", "does not exist")]
#[case::refused("mock.attach=image", "IMAGE_UNUSABLE", "the image is no good")]
#[case::locked("mock.attach=inuse", "DISK_IN_USE", "locked by somebody else")]
#[tokio::test]
async fn a_disk_that_cannot_be_plugged_in_leaves_the_spec(
    #[case] options: &str,
    #[case] reason: &str,
    #[case] words: &str,
) {
    let daemon = Daemon::start().await;
    daemon.run("web", options).await;
    let data = disk(&daemon, "data");
    if options.is_empty() {
        fs::remove_file(daemon.path("data.raw")).unwrap();
    }
    let refused = daemon.attach("web", data).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, reason);
    assert_says(&refused, words);
    assert_says(&refused, "\"data\"");
    let vm = daemon.get("web").await.unwrap();
    assert_eq!((names(&vm).len(), status(&vm).disks.len()), (0, 0));
    let (generation, observed) = generations(&vm);
    assert_eq!(generation, observed);
}

#[tokio::test]
async fn there_is_room_for_sixty_four_disks_and_then_a_clear_error() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    for index in 0..64 {
        daemon
            .attach("web", disk(&daemon, &format!("d{index}")))
            .await
            .unwrap();
    }
    let refused = daemon.attach("web", disk(&daemon, "more")).await.unwrap_err();
    assert_refused(&refused, Code::ResourceExhausted, "NO_FREE_SLOT");
    daemon.detach("web", "d7", 5000, false).await.unwrap();
    let vm = daemon.attach("web", disk(&daemon, "more")).await.unwrap();
    assert_eq!(status(&vm).disks.last().unwrap().pci_slot, Some(17));
}

#[tokio::test]
async fn a_guest_that_keeps_a_disk_has_it_until_it_is_forced() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.eject=ignore").await;
    daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    let refused = daemon.detach("web", "data", 100, false).await.unwrap_err();
    assert_refused(&refused, Code::DeadlineExceeded, "EJECT_TIMEOUT");
    let vm = daemon.get("web").await.unwrap();
    let told = &status(&vm).disks[0];
    assert_eq!(told.phase(), AttachmentPhase::Attached);
    assert!(told.message.contains("did not eject"), "{told:?}");
    assert_eq!(daemon.plugged("web").await, ["data"]);
    for timeout in [0, 100] {
        let vm = daemon.detach("web", "data", timeout, true).await.unwrap();
        assert_eq!(names(&vm).len(), 0);
        assert_eq!(daemon.plugged("web").await.len(), 0);
        daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    }
}

#[tokio::test]
async fn a_late_eject_ends_a_detach_that_was_given_up() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.eject=ignore").await;
    daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    daemon.detach("web", "data", 50, false).await.unwrap_err();
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("eject data\n").await;
    daemon.wait("web", |status| status.disks.is_empty()).await;
    assert_eq!(names(&daemon.get("web").await.unwrap()).len(), 0);
}

#[tokio::test]
async fn disk_that_the_guest_ejects_stays_in_the_spec() {
    let mut daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("eject data\n").await;
    let pending = |status: &v1::VmStatus| phase(status, "data") == Some(AttachmentPhase::Pending);
    let told = daemon.wait("web", pending).await;
    assert!(told.disks[0].message.contains("the guest ejected it"), "{told:?}");
    daemon.kill_and_restart().await;
    daemon.wait("web", pending).await;
    daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    assert_eq!(daemon.plugged("web").await, ["data"]);
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("eject data\n").await;
    daemon.wait("web", pending).await;
    daemon
        .detach("web", "data", 0, false)
        .await
        .expect("it is gone already");
}

#[tokio::test]
async fn a_wait_for_the_guest_is_in_nobodys_way() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.eject=ignore").await;
    daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    let detaching = tokio::join!(daemon.detach("web", "data", 3_600_000, false), async {
        daemon.wait_disk("web", "data", AttachmentPhase::Detaching).await;
        daemon.attach("web", disk(&daemon, "other")).await.unwrap();
        daemon.pause("web").await.unwrap();
        let again = daemon.attach("web", disk(&daemon, "data")).await.unwrap_err();
        assert_refused(&again, Code::FailedPrecondition, "BUSY");
        assert_eq!(daemon.list().await.len(), 1);
        daemon.kill_vm("web").await.unwrap();
    });
    let vm = detaching.0.expect("the machine is gone, and the disk with it");
    assert_eq!(names(&vm), ["other"]);
}

#[tokio::test]
async fn force_takes_over_a_detach_under_way_and_both_are_answered() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.eject=ignore").await;
    daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    let (patient, joined, forced) = tokio::join!(
        daemon.detach("web", "data", 3_600_000, false),
        async {
            daemon.wait_disk("web", "data", AttachmentPhase::Detaching).await;
            daemon.detach("web", "data", 1, false).await
        },
        async {
            daemon.wait_disk("web", "data", AttachmentPhase::Detaching).await;
            daemon.detach("web", "data", 100, true).await
        }
    );
    assert_eq!(names(&forced.unwrap()).len(), 0);
    assert!(patient.is_ok());
    // It came before the force and joined, or after and found nothing.
    assert!(joined.is_ok() || joined.unwrap_err().code() == Code::NotFound);
}

#[tokio::test]
async fn a_lost_event_does_not_hide_that_a_disk_is_gone() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.event=none").await;
    daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    let vm = daemon.detach("web", "data", 300, false).await.unwrap();
    assert_eq!(names(&vm).len(), 0);
}

#[tokio::test]
async fn a_paused_vm_takes_disks_and_gives_them_back_by_force_only() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.pause("web").await.unwrap();
    let vm = daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    assert_eq!(status(&vm).phase(), VmPhase::Paused);
    let refused = daemon.detach("web", "data", 100, false).await.unwrap_err();
    assert_eq!(refused.code(), Code::DeadlineExceeded);
    daemon.detach("web", "data", 100, true).await.unwrap();
}

#[tokio::test]
async fn a_vm_on_its_way_up_or_down_takes_no_disks() {
    let daemon = Daemon::start().await;
    daemon.define("up", "mock.boot=hang").await;
    let start = daemon.begin_start("up");
    daemon.wait_phase("up", VmPhase::Starting).await;
    let refused = daemon.attach("up", disk(&daemon, "data")).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "BUSY");
    daemon.kill_vm("up").await.unwrap();
    assert!(start.await.unwrap().is_err());

    daemon.run("down", "mock.power=ignore").await;
    let (stopped, refused) = tokio::join!(daemon.stop("down", Some(Duration::from_secs(3600))), async {
        daemon.wait_phase("down", VmPhase::Stopping).await;
        let refused = daemon.attach("down", disk(&daemon, "data")).await.unwrap_err();
        daemon.kill_vm("down").await.unwrap();
        refused
    });
    stopped.unwrap();
    assert_refused(&refused, Code::FailedPrecondition, "BUSY");
    let missing = daemon.detach("down", "none", 0, false).await.unwrap_err();
    assert_refused(&missing, Code::NotFound, "DISK_NOT_FOUND");
}

/// The daemon is killed before or after the `vmm` has carried out the request. The next daemon
/// adopts the `vmm`'s state.
#[rstest]
#[case::not_plugged_in("mock.attach=hang", 0)]
#[case::plugged_in("mock.attach=lost", 1)]
#[tokio::test]
async fn interrupted_attach_ends_as_the_vmm_has_it(#[case] options: &str, #[case] expected: usize) {
    let mut daemon = Daemon::start().await;
    let pid = vm_pid(&daemon.run("web", options).await);
    let attach = daemon.begin_attach("web", disk(&daemon, "data"));
    daemon.wait_disk("web", "data", AttachmentPhase::InProgress).await;
    while daemon.plugged("web").await.len() < expected {}
    daemon.kill_and_restart().await;
    assert!(attach.await.unwrap().is_err());
    daemon
        .wait("web", |status| {
            let settled = status.disks.iter().all(|disk| disk.capacity_bytes == Some(4096));
            status.disks.len() == expected && settled
        })
        .await;
    let vm = daemon.get("web").await.unwrap();
    assert_eq!((names(&vm).len(), vm_pid(&vm)), (expected, pid));
    let (generation, observed) = generations(&vm);
    assert_eq!(generation, observed);
}

#[rstest]
#[case::ejected_meanwhile(true)]
#[case::kept(false)]
#[tokio::test]
async fn interrupted_detach_ends_as_the_vmm_has_it(#[case] ejected: bool) {
    let mut daemon = Daemon::start().await;
    let vm = daemon.run("web", "mock.eject=ignore").await;
    daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    let detach = daemon.begin_detach("web", "data");
    daemon.wait_disk("web", "data", AttachmentPhase::Detaching).await;
    let socket = daemon.path(&format!("run/vms/{}/console.sock", crate::harness::uid(&vm)));
    daemon.kill();
    if ejected {
        let mut console = std::os::unix::net::UnixStream::connect(socket).unwrap();
        std::io::Write::write_all(&mut console, b"eject data\ndone\n").unwrap();
        // The echo comes after the eject.
        let mut text = Vec::new();
        while !text.ends_with(b"done\r\n") {
            let mut byte = [0];
            std::io::Read::read_exact(&mut console, &mut byte).unwrap();
            text.push(byte[0]);
        }
    }
    daemon.relaunch().await;
    assert!(detach.await.unwrap().is_err());
    if ejected {
        daemon.wait("web", |status| status.disks.is_empty()).await;
    } else {
        let attached = |status: &v1::VmStatus| {
            phase(status, "data") == Some(AttachmentPhase::Attached)
                && status.disks[0].capacity_bytes == Some(4096)
        };
        daemon.wait("web", attached).await;
        daemon.detach("web", "data", 0, true).await.unwrap();
    }
}

#[tokio::test]
async fn detach_that_a_deletion_ends_is_answered_after_the_write() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.eject=ignore").await;
    daemon.attach("web", disk(&daemon, "data")).await.unwrap();
    let detach = daemon.detach("web", "data", 60_000, false);
    tokio::pin!(detach);
    let detaching = daemon.wait_disk("web", "data", AttachmentPhase::Detaching);
    tokio::select! {
        answer = &mut detach => panic!("{answer:?}"),
        _ = detaching => {}
    }
    daemon.fault("ended");
    let mut client = daemon.client();
    let delete = tokio::spawn(async move {
        let request = v1::DeleteVmRequest {
            name: "web".into(),
            force: true,
            ..Default::default()
        };
        client.delete_vm(request).await
    });
    daemon.reached("ended").await;
    assert_eq!(daemon.vmm_processes(), [], "its process has ended");
    daemon.arm_in("state", "store-hangs");
    daemon.release("ended");
    let answer = tokio::time::timeout(Duration::from_secs(2), &mut detach).await;
    assert!(answer.is_err(), "{answer:?}");
    fs::remove_file(daemon.path("state/fault/store-hangs")).unwrap();
    detach.await.unwrap();
    delete.await.unwrap().unwrap();
}

/// Regardless of the interrupted operation, the spec, the `vmm` and the next daemon agree on the
/// disks in the end.
#[tokio::test]
async fn a_daemon_killed_at_any_moment_of_attach_and_detach_converges() {
    let mut daemon = Daemon::start().await;
    daemon.run("web", "").await;
    for round in 0..16_u64 {
        let name = format!("d{}", round / 2);
        let under_way = if round % 2 == 0 {
            daemon.begin_attach("web", disk(&daemon, &name))
        } else {
            daemon.begin_detach("web", &name)
        };
        // Not a wait for something: the moment of the kill is what varies.
        tokio::time::sleep(Duration::from_micros(round * 900)).await;
        daemon.kill_and_restart().await;
        drop(under_way.await.unwrap());
        // Known capacities mean that the new daemon has completed its first query of the vmm.
        let settled = |status: &v1::VmStatus| {
            let mut disks = status.disks.iter();
            disks.all(|disk| disk.phase() == AttachmentPhase::Attached && disk.capacity_bytes == Some(4096))
        };
        daemon.wait("web", settled).await;
        let vm = daemon.get("web").await.unwrap();
        assert_eq!(names(&vm), daemon.plugged("web").await, "round {round}");
    }
}

#[tokio::test]
async fn an_attach_that_hangs_ends_with_the_vm_and_leaves_no_disk() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.attach=hang").await;
    let (attach, ()) = tokio::join!(daemon.attach("web", disk(&daemon, "data")), async {
        daemon.wait_disk("web", "data", AttachmentPhase::InProgress).await;
        daemon.kill_vm("web").await.unwrap();
    });
    // The daemon may first notice the broken connection, or the end of the process.
    let (code, _) = refusal(&attach.unwrap_err());
    assert!(
        [Code::FailedPrecondition, Code::Unavailable].contains(&code),
        "{code:?}"
    );
    assert_eq!(names(&daemon.get("web").await.unwrap()).len(), 0);
}

#[tokio::test]
async fn a_vmm_that_does_not_know_of_disks_is_driven_as_before() {
    let mut daemon = Daemon::start().await;
    daemon
        .run_with("old", "mock.stats=refuse", |spec| {
            spec.disks = vec![disk(&daemon, "root")];
        })
        .await;
    daemon.kill_and_restart().await;
    let vm = daemon.get("old").await.unwrap();
    assert_eq!(phase(status(&vm), "root"), Some(AttachmentPhase::Attached));
    assert_eq!(daemon.stats("old").await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(names(&daemon.get("old").await.unwrap()), ["root"]);
}

#[tokio::test]
async fn a_vmm_that_does_not_answer_is_not_asked_for_disks() {
    let mut daemon = Daemon::start().await;
    let stuck = vm_pid(&daemon.run("web", "").await);
    crate::harness::stop_process(stuck);
    daemon.kill_and_restart().await;
    let refused = daemon.attach("web", disk(&daemon, "data")).await.unwrap_err();
    assert_refused(&refused, Code::Unavailable, "VMM_UNRESPONSIVE");
    assert_eq!(names(&daemon.get("web").await.unwrap()).len(), 0);
    kill_process(stuck, Signal::CONT).unwrap();
    daemon.wait_ready("web").await;
    daemon.attach("web", disk(&daemon, "data")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn boot_disk_of_a_running_vm_is_not_detached() {
    let daemon = Daemon::start().await;
    let (vm, _) = crate::disk_boot::vm(&daemon, "web", "boots:root=/dev/vda1 v=6.1\n");
    daemon.create(vm).await.unwrap();
    for place in ["stopped", "running", "with another disk"] {
        match place {
            "running" => drop(daemon.start_vm("web").await.unwrap()),
            "with another disk" => drop(daemon.attach("web", disk(&daemon, "data")).await.unwrap()),
            _ => {}
        }
        let before = daemon.get("web").await.unwrap();
        for force in [false, true] {
            let refused = daemon.detach("web", "root", 100, force).await.unwrap_err();
            assert_eq!(
                refusal(&refused),
                (Code::FailedPrecondition, "BOOT_DISK".into()),
                "{place}"
            );
        }
        // Its capacity may become known meanwhile.
        let after = daemon.get("web").await.unwrap();
        assert_eq!(
            (after.metadata, after.spec),
            (before.metadata, before.spec),
            "{place}"
        );
        assert_eq!(
            phase(status(&daemon.get("web").await.unwrap()), "root"),
            phase(before.status.as_ref().unwrap(), "root")
        );
    }
    assert_eq!(daemon.plugged("web").await, ["root", "data"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn disk_the_spec_needs_meanwhile_stays_after_its_detach() {
    let daemon = Daemon::start().await;
    let (vm, _) = crate::disk_boot::vm(&daemon, "web", "boots:root=/dev/vda1 v=6.1\n");
    let mut vm = vm;
    let spec = vm.spec.as_mut().unwrap();
    let linux = daemon.manifest("web", "mock.eject=ignore").spec.unwrap().boot;
    let from_disk = std::mem::replace(&mut spec.boot, linux);
    let running = daemon.run_vm(vm).await;
    let (detached, ()) = tokio::join!(daemon.detach("web", "root", 3_600_000, false), async {
        let detaching = |status: &v1::VmStatus| phase(status, "root") == Some(AttachmentPhase::Detaching);
        daemon.wait("web", detaching).await;
        daemon.change("web", |spec| spec.boot = from_disk).await.unwrap();
        crate::policies::end(&daemon, &running, "eject root");
    });
    let refused = detached.unwrap_err();
    assert_says(&refused, "spec.boot.fromDisk");
    let vm = daemon.get("web").await.unwrap();
    assert_eq!(names(&vm), ["root"]);
    assert_eq!(phase(status(&vm), "root"), Some(AttachmentPhase::Pending));
    // It is in the machine again after an attach, and the VM starts.
    daemon
        .attach("web", vm.spec.unwrap().disks.remove(0))
        .await
        .unwrap();
    assert_eq!(daemon.plugged("web").await, ["root"]);
    daemon.kill_vm("web").await.unwrap();
    daemon.start_vm("web").await.unwrap();
}

#[tokio::test]
async fn disk_without_a_file_is_not_attached_to_a_stopped_vm() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let missing = disk(&daemon, "data");
    fs::remove_file(daemon.path("data.raw")).unwrap();
    let refused = daemon.attach("web", missing).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "DISK_NOT_FOUND");
    assert_eq!(names(&daemon.get("web").await.unwrap()).len(), 0);
}

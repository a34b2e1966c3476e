//! Isolation of blocked callers and VMs: readers that do not read, and file systems that do not
//! answer.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{Read, Write},
    os::{
        fd::AsRawFd,
        unix::fs::{PermissionsExt, chown},
    },
    path::{Path, PathBuf},
};

use rustix::mount::{MountFlags, UnmountFlags};
use tokio::time::timeout;
use tonic::Code;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use vmmd_api::v1::{self, VmPhase};

use crate::{
    console::Client,
    disks::{copy_disk, raw},
    harness::{Daemon, MANY_USERS, PATIENCE, assert_refused, connect, refusal, status, uid, vm_pid},
    shares::{self, OWNER},
    verbs::raw_file,
};

/// A file system over a folder whose server never answers. On drop it is unmounted, and all its
/// waiting processes are released.
struct Dead {
    path: PathBuf,
    server: File,
}

impl Dead {
    fn over(path: &Path) -> Self {
        let server = File::options()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .expect("the test needs FUSE");
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other",
            server.as_raw_fd()
        );
        let options = CString::new(options).unwrap();
        rustix::mount::mount("dead", path, "fuse", MountFlags::empty(), &*options).unwrap();
        Self {
            path: path.to_owned(),
            server,
        }
    }

    /// In `nfs` of the daemon's folder, for the users of VMs; it answers to the mount.
    fn of(daemon: &Daemon) -> Self {
        fs::set_permissions(daemon.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let folder = daemon.path("nfs");
        fs::create_dir(&folder).unwrap();
        let mut dead = Self::over(&folder);
        dead.greet();
        dead
    }

    /// Answers as a working server (`struct fuse_init_out`, Linux's uapi/linux/fuse.h), so that
    /// further requests go to the server. A process that waits for an answer to a sent request is
    /// not killable.
    fn greet(&mut self) {
        let request = self.request();
        let mut reply = [80_u32.to_le_bytes(), [0; 4]].concat();
        reply.extend(&request[8..16]);
        // Version 7.31.
        reply.extend([7_u32.to_le_bytes(), 31_u32.to_le_bytes()].concat());
        reply.resize(80, 0);
        // The largest write, after the readahead and the flags, of which there are none.
        reply[36..40].copy_from_slice(&4096_u32.to_le_bytes());
        self.server.write_all(&reply).unwrap();
    }

    /// Has the `vmm` of "web" wait for this file system.
    async fn stick(&mut self, daemon: &Daemon) -> Client {
        let mut console = Client::open(daemon, "web").await;
        let words = format!("stick {}/file\n", self.path.display());
        console.type_in(&words).await;
        console.expect("stuck").await;
        self.request();
        console
    }

    /// The next request of the kernel, which is left as it is.
    fn request(&mut self) -> Vec<u8> {
        let mut request = vec![0; 1 << 16];
        let length = self.server.read(&mut request).unwrap();
        request.truncate(length);
        request
    }
}

impl Drop for Dead {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.path, UnmountFlags::DETACH);
    }
}

fn with_disk(daemon: &Daemon, name: &str, path: &Path) -> v1::Vm {
    daemon.manifest_with(name, "", |spec| spec.disks.push(raw_file("root", path)))
}

#[tokio::test]
async fn readers_of_logs_that_do_not_read_hold_up_nobody() {
    let daemon = Daemon::start().await;
    let loud = daemon.run("loud", "").await;
    let log = daemon.path(&format!("log/vms/{}/serial.log", uid(&loud)));
    fs::write(log, vec![b'x'; 1_500_000]).unwrap();
    let mut streams = Vec::new();
    for _ in 0..40 {
        let mut client = v1::vm_service_client::VmServiceClient::new(connect(daemon.folder.path()).await);
        let request = v1::GetVmLogsRequest {
            name: "loud".into(),
            ..Default::default()
        };
        streams.push(client.get_vm_logs(request).await.unwrap().into_inner());
    }
    for stream in &mut streams {
        // It has begun; the rest stays where it is.
        stream.message().await.unwrap().unwrap();
    }
    timeout(PATIENCE, daemon.run("other", ""))
        .await
        .expect("a start waits for readers of logs");
    daemon.delete("other", true).await.unwrap();
    // One that does read gets all of it.
    let mut stream = streams.pop().unwrap();
    let mut length = 0;
    while let Some(message) = stream.message().await.unwrap() {
        length += message.data.len();
    }
    assert!(length > 1 << 20, "{length}");
}

#[tokio::test]
async fn a_dead_file_system_delays_only_its_own_vms() {
    let daemon = Daemon::configured("limits = { file_seconds = 3 }\n").await;
    let folder = daemon.path("nfs");
    fs::create_dir(&folder).unwrap();
    let disk = folder.join("disk");
    fs::write(&disk, [0; 4096]).unwrap();
    const HUNG: usize = 24;
    for number in 0..HUNG {
        let vm = with_disk(&daemon, &format!("hung{number}"), &disk);
        daemon.create(vm).await.unwrap();
    }
    let dead = Dead::over(&folder);
    let start = |number| daemon.begin_start(&format!("hung{number}"));
    let starts: Vec<_> = (0..HUNG).map(start).collect();
    timeout(PATIENCE, daemon.run("other", ""))
        .await
        .expect("a start waits for the files of others");
    for start in starts {
        let refused = start.await.unwrap().unwrap_err();
        assert_refused(&refused, Code::Unavailable, "FILES_DO_NOT_ANSWER");
    }
    assert_eq!(daemon.phase("hung0").await, VmPhase::Failed);
    // This also releases the processes that wait in the kernel.
    drop(dead);
    daemon.start_vm("hung1").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_of_a_dead_file_system_delay_no_other_reads() {
    // More than one client may have answers being made.
    const READS: usize = 64;
    let daemon = Daemon::configured("limits = { file_seconds = 600 }\n").await;
    daemon.make(raw("data", 1 << 20), None).await.unwrap();
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let dead = Dead::over(&daemon.path("state/disks"));
    let disks = daemon.disks().await;
    let mut reads = tokio::task::JoinSet::new();
    for _ in 0..READS {
        let mut disks = disks.clone();
        let request = v1::GetDiskRequest { name: "data".into() };
        reads.spawn(async move { disks.get_disk(request).await.map(drop) });
    }
    let mut listing = disks.clone();
    // The daemon has all of them when it has one that was sent after them.
    reads.spawn(async move {
        listing
            .list_disks(v1::ListDisksRequest::default())
            .await
            .map(drop)
    });
    let others = async {
        daemon.get("web").await.unwrap();
        assert_eq!(daemon.list().await.len(), 1);
        let mut health = HealthClient::new(connect(daemon.folder.path()).await);
        let answer = health.check(HealthCheckRequest::default()).await.unwrap();
        assert_eq!(answer.into_inner().status(), ServingStatus::Serving);
    };
    timeout(PATIENCE, others)
        .await
        .expect("reads wait for the files of others");
    assert!(reads.try_join_next().is_none(), "the file system answers");
    drop(dead);
    timeout(PATIENCE, async { while reads.join_next().await.is_some() {} })
        .await
        .expect("reads wait for a file system that is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn mass_start_on_slow_storage_starts_all() {
    let many = std::env::var_os("VMMD_LONG").is_some();
    // 600 of 2,000 ms for each VM, 16 VMs at a time: the last VMs wait longer than 2,000 ms.
    let (count, extra) = if many { (1000, MANY_USERS) } else { (64, "") };
    // The mocks take no memory of a guest.
    let daemon = Daemon::configured(&format!(
        "{extra}limits = {{ file_seconds = 2 }}\n[overcommit]\ncpu = 1000\nvcpu = 1000\nmemory = 100\n"
    ))
    .await;
    for number in 0..count {
        let vm = daemon.manifest(&format!("vm{number}"), "");
        daemon.create(vm).await.unwrap();
    }
    let fault = daemon.path("run/fault");
    fs::create_dir_all(&fault).unwrap();
    fs::write(fault.join("slow-files"), "600").unwrap();
    let start = |number| daemon.begin_start(&format!("vm{number}"));
    let starts: Vec<_> = (0..count).map(start).collect();
    for start in starts {
        start.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_share_on_a_dead_file_system_delays_only_its_own_vms() {
    let daemon = shares::configured("limits = { file_seconds = 1 }\n").await;
    let folder = daemon.path("srv/nfs");
    let at = daemon.path("srv/nfs/data");
    fs::create_dir_all(&at).unwrap();
    chown(&at, Some(OWNER.0), Some(OWNER.1)).unwrap();
    const HUNG: usize = 24;
    for number in 0..HUNG {
        let mut vm = daemon.manifest(&format!("hung{number}"), "");
        let spec = vm.spec.as_mut().unwrap();
        // One half has a share there, the other one its own files.
        match number % 2 {
            0 => spec.shares.push(shares::share(&daemon, "srv/nfs/data")),
            _ => spec.state_dir = at.join(number.to_string()).display().to_string(),
        }
        daemon.create(vm).await.unwrap();
    }
    let mut web = daemon.manifest("web", "");
    let memory = web.spec.as_mut().unwrap().memory.as_mut().unwrap();
    memory.set_backing(v1::MemoryBacking::Shared);
    daemon.run_vm(web).await;

    let dead = Dead::over(&folder);
    let start = |number| daemon.begin_start(&format!("hung{number}"));
    let starts: Vec<_> = (0..HUNG).map(start).collect();
    timeout(PATIENCE, daemon.run("other", ""))
        .await
        .expect("a start waits for the shares of others");
    for start in starts {
        let refused = start.await.unwrap().unwrap_err();
        assert_refused(&refused, Code::Unavailable, "FILES_DO_NOT_ANSWER");
    }
    // A running VM does not get the share, and still accepts later requests.
    let share = shares::share(&daemon, "srv/nfs/data");
    let changed = daemon.change("web", |spec| spec.shares.push(share)).await;
    assert_refused(&changed.unwrap_err(), Code::Unavailable, "FILES_DO_NOT_ANSWER");
    timeout(PATIENCE, daemon.kill_vm("web"))
        .await
        .expect("a stop waits for a share")
        .unwrap();
    // This also releases the processes that wait in the kernel.
    drop(dead);
    daemon.start_vm("hung2").await.unwrap();
}

#[tokio::test]
async fn copies_of_whole_disks_that_hang_hold_up_nobody() {
    let daemon = Daemon::start().await;
    let (folder, good) = (daemon.path("nfs"), daemon.path("good"));
    fs::create_dir(&folder).unwrap();
    fs::write(&good, [7; 4096]).unwrap();
    let dead = Dead::over(&folder);
    let copy =
        |name: String, source: &Path| copy_disk(daemon.folder.path().to_owned(), name, source.to_owned());
    let mut copies = tokio::task::JoinSet::new();
    for number in 0..40 {
        copies.spawn(copy(format!("hung{number}"), &folder.join("disk")));
    }
    let other = timeout(PATIENCE, copy("other".into(), &good)).await;
    other.expect("a copy waits for the files of others").unwrap();
    let vm = timeout(PATIENCE, daemon.run("other", "")).await;
    vm.expect("a start waits for copies");
    assert!(copies.try_join_next().is_none(), "none of them is done");
    // This also releases the processes that wait in the kernel.
    drop(dead);
    while let Some(copied) = copies.join_next().await {
        copied.unwrap().unwrap_err();
    }
}

#[tokio::test]
async fn a_daemon_comes_up_beside_a_dead_file_system() {
    let mut daemon = Daemon::configured("limits = { file_seconds = 3 }\n").await;
    let folder = daemon.path("nfs");
    fs::create_dir(&folder).unwrap();
    let disk = folder.join("disk");
    fs::write(&disk, [0; 4096]).unwrap();
    daemon.create(with_disk(&daemon, "there", &disk)).await.unwrap();
    let there = daemon.start_vm("there").await.unwrap();
    let other = daemon.run("other", "").await;
    let dead = Dead::over(&folder);
    timeout(PATIENCE, daemon.kill_and_restart())
        .await
        .expect("the daemon's start waits for the files of a VM");
    for (name, before) in [("there", &there), ("other", &other)] {
        let vm = daemon.get(name).await.unwrap();
        assert_eq!(
            (vm_pid(&vm), status(&vm).phase()),
            (vm_pid(before), VmPhase::Running)
        );
    }
    daemon.stop("there", None).await.unwrap();
    drop(dead);
    daemon.start_vm("there").await.unwrap();
}

#[tokio::test]
async fn a_vmm_that_does_not_die_is_told_and_keeps_what_it_holds() {
    let daemon = Daemon::start().await;
    let mut dead = Dead::of(&daemon);
    let before = daemon.run("web", "").await;
    dead.stick(&daemon).await;
    daemon.begin_stop("web", true).await;
    let lingering = |status: &v1::VmStatus| status.conditions[0].reason == "VmmAlive";
    let stopping = daemon.wait("web", lingering).await;
    assert_eq!(stopping.phase(), VmPhase::Stopping);
    daemon.told_exactly("VmmAlive", 1).await;
    // The VM keeps its user id, and cannot be started a second time.
    let user = |vm: &v1::Vm| status(vm).instance.as_ref().unwrap().uid;
    assert_ne!(user(&daemon.run("other", "").await), user(&before));
    assert_eq!(refusal(&daemon.start_vm("web").await.unwrap_err()).1, "BUSY");
    drop(dead);
    daemon.wait_phase("web", VmPhase::Stopped).await;
    daemon.start_vm("web").await.unwrap();
}

#[tokio::test]
async fn stop_that_joins_the_stop_after_a_panic_is_kept() {
    let daemon = Daemon::start().await;
    let mut dead = Dead::of(&daemon);
    let mut vm = daemon.manifest("web", "");
    let policy = v1::RunPolicy::AlwaysOnUnlessStopped;
    vm.spec.as_mut().unwrap().set_run_policy(policy);
    daemon.run_vm(vm).await;
    let mut console = dead.stick(&daemon).await;
    // The run that ends with the panic does not end yet.
    console.type_in("halt\n").await;
    daemon.wait_phase("web", VmPhase::Stopping).await;
    daemon.begin_stop("web", false).await;
    drop(dead);
    let ended = daemon.wait_phase("web", VmPhase::Failed).await;
    let reason = ended.last_exit.as_ref().unwrap().reason();
    assert_eq!(reason, v1::ExitReason::GuestPanic);
    let next = ended.restart.as_ref().unwrap().next_start_time;
    assert_eq!(next, None, "the run policy starts it again");
}

#[tokio::test]
async fn a_start_that_is_given_up_and_whose_vmm_does_not_die_says_so() {
    let daemon = Daemon::start().await;
    let mut dead = Dead::of(&daemon);
    let words = format!("mock.boot=stick:{}/file", dead.path.display());
    daemon.create(daemon.manifest("web", &words)).await.unwrap();
    daemon.start_without_wait("web").await;
    dead.request();
    daemon.begin_stop("web", true).await;
    let lingering = |status: &v1::VmStatus| status.conditions[0].reason == "VmmAlive";
    daemon.wait("web", lingering).await;
    daemon.told_exactly("VmmAlive", 1).await;
    drop(dead);
    let stopped = daemon.wait_phase("web", VmPhase::Stopped).await;
    assert_ne!(stopped.conditions[0].reason, "VmmAlive");
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_by_force_does_not_wait_for_an_update_on_dead_files() {
    let daemon = Daemon::configured("limits = { file_seconds = 300 }\n").await;
    daemon.run("web", "").await;
    let folder = daemon.path("nfs");
    fs::create_dir(&folder).unwrap();
    let mut dead = Dead::over(&folder);
    dead.greet();
    let disk = with_disk(&daemon, "web", &folder.join("disk"))
        .spec
        .unwrap()
        .disks;
    let updates = daemon.change("web", |spec| spec.disks = disk);
    let stops = async {
        // The update waits for the file system.
        let asked = tokio::task::spawn_blocking(move || {
            dead.request();
            dead
        });
        let dead = asked.await.unwrap();
        timeout(PATIENCE, daemon.kill_vm("web"))
            .await
            .expect("a stop by force waits for an update")
            .unwrap();
        drop(dead);
    };
    let (updated, ()) = tokio::join!(updates, stops);
    assert_refused(&updated.unwrap_err(), Code::Aborted, "SUPERSEDED");
}

//! Directories of the node that are shared with guests: their server processes, the lifetime of
//! these processes, and refused directories.

use std::{
    fs,
    os::unix::fs::{MetadataExt, chown, symlink},
    path::PathBuf,
};

use rustix::process::{Pid, Signal, kill_process};
use tonic::{Code, Status};
use vmmd_api::v1::{self, SharePhase, VmPhase};

use crate::{
    harness::{Daemon, assert_says, metadata_of, refusal, status, temporary_folder, vm_pid},
    verbs::within,
};

pub const OWNER: (u32, u32) = (1234, 1235);

/// A daemon that allows shares below `srv`, where there is `data`, which belongs to [`OWNER`].
pub async fn daemon() -> Daemon {
    configured("").await
}

/// The same with more lines of configuration.
pub async fn configured(extra: &str) -> Daemon {
    let folder = temporary_folder();
    let srv = folder.path().join("srv");
    fs::create_dir_all(srv.join("data")).unwrap();
    chown(srv.join("data"), Some(OWNER.0), Some(OWNER.1)).unwrap();
    let program = folder.path().join("virtiofsd");
    symlink(env!("CARGO_BIN_EXE_mock-vmm"), &program).unwrap();
    let extra = format!("virtiofsd = {program:?}\nroots = {{ shares = [{srv:?}] }}\n{extra}");
    Daemon::in_folder(folder, &extra).await
}

pub fn share(daemon: &Daemon, path: &str) -> v1::ShareSpec {
    v1::ShareSpec {
        name: "data".into(),
        path: daemon.path(path).to_str().unwrap().into(),
        ..Default::default()
    }
}

fn vm(daemon: &Daemon, name: &str, shares: Vec<v1::ShareSpec>) -> v1::Vm {
    daemon.manifest_with(name, "", |spec| spec.shares = shares)
}

async fn create(daemon: &Daemon, vm: v1::Vm) -> Result<v1::Vm, Status> {
    let response = daemon.create_as(vm, false, false).await?;
    Ok(response.vm.unwrap())
}

/// A VM `web` that runs with the share `data`.
async fn running() -> (Daemon, v1::Vm) {
    let daemon = daemon().await;
    create(&daemon, vm(&daemon, "web", vec![share(&daemon, "srv/data")]))
        .await
        .unwrap();
    let vm = daemon.start_vm("web").await.unwrap();
    (daemon, vm)
}

pub fn served(status: &v1::VmStatus) -> Pid {
    let share = &status.shares[0];
    assert_eq!((share.name.as_str(), share.tag.as_str()), ("data", "data"));
    assert_eq!(share.phase(), SharePhase::Served);
    Pid::from_raw(share.pid.try_into().unwrap()).unwrap()
}

pub fn of(pid: Pid, file: &str) -> PathBuf {
    format!("/proc/{}/{file}", pid.as_raw_nonzero()).into()
}

pub fn is_alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(of(pid, "stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| !rest.starts_with(" Z"))
}

pub async fn until_gone(pid: Pid) {
    within(async || (!is_alive(pid)).then_some(())).await;
}

#[tokio::test]
async fn share_is_served_as_its_owner_in_own_namespaces() {
    let (daemon, vm) = running().await;
    let pid = served(status(&vm));
    let said = fs::read_to_string(of(pid, "status")).unwrap();
    let field = |name: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(field("Uid:"), ["1234"; 4].join(" "));
    assert_eq!(field("Gid:"), ["1235"; 4].join(" "));
    assert_eq!(field("Groups:"), "");
    assert_eq!(field("NoNewPrivs:"), "1");
    // chown, dac_override, fowner, fsetid, setgid, setuid, setpcap, sys_chroot, mknod, setfcap: over the mapped users alone.
    assert_eq!(u64::from_str_radix(&field("CapBnd:"), 16).unwrap(), 0x8804_01db);
    for namespace in ["user", "pid", "net", "ipc", "uts"] {
        let link = |pid: Pid| fs::read_link(of(pid, &format!("ns/{namespace}"))).unwrap();
        assert_ne!(link(pid), link(daemon.pid()), "{namespace}");
    }
    let file = daemon.path("srv/data/.served");
    let owner = fs::metadata(&file).unwrap();
    assert_eq!((owner.uid(), owner.gid()), OWNER);
    let wanted = [
        "--shared-dir=.",
        "--sandbox=chroot",
        "uids 0 1234 1",
        "gids 0 1235 1",
    ];
    let words = fs::read_to_string(&file).unwrap();
    for line in wanted {
        assert!(words.lines().any(|word| word == line), "{line}: {words}");
    }
    let cgroup = |pid: Pid| fs::read_to_string(of(pid, "cgroup")).unwrap();
    if !daemon.cgroups().is_empty() {
        assert_eq!(cgroup(pid), cgroup(vm_pid(&vm)));
    }
}

#[tokio::test]
async fn virtiofsd_opens_the_files_of_the_spec_and_its_own() {
    let daemon = daemon().await;
    let few = v1::ShareSpec {
        max_open_files: 256,
        ..share(&daemon, "srv/data")
    };
    create(&daemon, vm(&daemon, "web", vec![few])).await.unwrap();
    let pid = served(status(&daemon.start_vm("web").await.unwrap()));
    let limits = fs::read_to_string(of(pid, "limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files"));
    let words: Vec<_> = line.unwrap().split_whitespace().collect();
    assert_eq!(words[3..5], ["866", "866"]);
}

#[tokio::test]
async fn the_end_of_a_run_ends_its_shares_and_the_next_run_has_others() {
    let (daemon, vm) = running().await;
    let pid = served(status(&vm));
    daemon.kill_vm("web").await.unwrap();
    until_gone(pid).await;
    let stopped = daemon.wait_phase("web", VmPhase::Stopped).await;
    assert_eq!(stopped.shares[0].phase(), SharePhase::Pending);
    let vm = daemon.start_vm("web").await.unwrap();
    let again = served(status(&vm));
    assert_ne!(again, pid);
    kill_process(vm_pid(&vm), Signal::KILL).unwrap();
    until_gone(again).await;
    daemon.delete("web", true).await.unwrap();
    assert!(daemon.events("ShareFailed").await.is_empty());
}

#[tokio::test]
async fn a_process_that_is_killed_is_made_anew_and_told() {
    let (daemon, vm) = running().await;
    let pid = served(status(&vm));
    kill_process(pid, Signal::KILL).unwrap();
    let restored = daemon.wait("web", |status| status.shares[0].restarts == 1).await;
    assert_ne!(served(&restored), pid);
    let failed = daemon.told_exactly("ShareFailed", 1).await;
    assert!(failed[0].message.contains("was ended by signal 9"), "{failed:?}");
    daemon.told_exactly("ShareRestored", 1).await;
    assert_eq!(restored.phase(), VmPhase::Running);
}

#[tokio::test]
async fn starting_daemon_finds_servers_and_replaces_ended_ones() {
    let (mut daemon, vm) = running().await;
    let pid = served(status(&vm));
    daemon.kill_and_restart().await;
    let found = daemon
        .wait("web", |status| status.phase() == VmPhase::Running)
        .await;
    assert_eq!(served(&found), pid);
    daemon.kill();
    kill_process(pid, Signal::KILL).unwrap();
    daemon.relaunch().await;
    let found = daemon
        .wait("web", |status| {
            status.phase() == VmPhase::Running && status.shares[0].restarts == 1
        })
        .await;
    let new = served(&found);
    daemon.kill_vm("web").await.unwrap();
    until_gone(new).await;
}

#[tokio::test]
async fn replaced_directory_is_not_served_to_the_same_run() {
    let (daemon, vm) = running().await;
    let pid = served(status(&vm));
    fs::rename(daemon.path("srv/data"), daemon.path("srv/old")).unwrap();
    fs::create_dir(daemon.path("srv/data")).unwrap();
    chown(daemon.path("srv/data"), Some(OWNER.0), Some(OWNER.1)).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    let moved = |status: &v1::VmStatus| status.shares[0].message.contains("another directory");
    let status = daemon.wait("web", moved).await;
    assert_eq!(status.shares[0].phase(), SharePhase::Restarting);
    assert!(!daemon.path("srv/data/.served").exists());
    fs::remove_dir(daemon.path("srv/data")).unwrap();
    fs::rename(daemon.path("srv/old"), daemon.path("srv/data")).unwrap();
    daemon.wait("web", |status| status.shares[0].restarts == 1).await;
}

#[tokio::test]
async fn share_outside_the_roots_is_refused_at_creation_and_start() {
    let daemon = daemon().await;
    fs::create_dir(daemon.path("secret")).unwrap();
    chown(daemon.path("secret"), Some(OWNER.0), Some(OWNER.1)).unwrap();
    symlink("../secret", daemon.path("srv/out")).unwrap();
    symlink("data", daemon.path("srv/inside")).unwrap();
    fs::create_dir(daemon.path("srv/roots")).unwrap();
    for (path, reason) in [
        ("secret", "PATH_NOT_ALLOWED"),
        ("srv/out", "PATH_NOT_ALLOWED"),
        ("srv/inside", "PATH_NOT_ALLOWED"),
        ("srv/roots", "SHARE_OWNED_BY_ROOT"),
    ] {
        let refused = create(&daemon, vm(&daemon, "web", vec![share(&daemon, path)])).await;
        let expected = (Code::FailedPrecondition, reason.to_owned());
        assert_eq!(refusal(&refused.unwrap_err()), expected, "{path}");
    }
    // The path may change after the creation.
    create(&daemon, vm(&daemon, "web", vec![share(&daemon, "srv/later")]))
        .await
        .unwrap();
    let missing = daemon.start_vm("web").await.unwrap_err();
    assert_eq!(refusal(&missing).1, "SHARE_NOT_USABLE");
    symlink("../secret", daemon.path("srv/later")).unwrap();
    let leads_out = daemon.start_vm("web").await.unwrap_err();
    assert_eq!(refusal(&leads_out).1, "PATH_NOT_ALLOWED");
    assert!(fs::read_dir(daemon.path("secret")).unwrap().next().is_none());
}

#[tokio::test]
async fn a_vm_with_a_share_is_snapshotted_while_it_is_paused_alone() {
    let (daemon, _) = running().await;
    let mut snapshots = v1::snapshot_service_client::SnapshotServiceClient::new(
        crate::harness::connect(daemon.folder.path()).await,
    );
    let request = v1::CreateSnapshotRequest {
        snapshot: Some(v1::Snapshot {
            metadata: metadata_of("s"),
            spec: Some(v1::SnapshotSpec {
                vm: "web".into(),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let refused = snapshots.create_snapshot(request.clone()).await.unwrap_err();
    assert_eq!(refusal(&refused).1, "SNAPSHOT_SHARES");
    assert_says(&refused, "--paused");
    let paused = v1::CreateSnapshotRequest {
        paused: true,
        ..request.clone()
    };
    snapshots.create_snapshot(paused).await.unwrap();
    let gone = v1::DeleteSnapshotRequest {
        name: "s".into(),
        ..Default::default()
    };
    snapshots.delete_snapshot(gone).await.unwrap();
    daemon.change("web", |spec| spec.shares.clear()).await.unwrap();
    snapshots.create_snapshot(request).await.unwrap();
}

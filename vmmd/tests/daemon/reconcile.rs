//! Remains of VMs that a daemon finds at its start: it determines the true state, and no VM runs
//! twice.

use std::{fs, io::ErrorKind, os::unix::fs::MetadataExt as _};

use rstest::rstest;
use rustix::process::{Pid, Signal, kill_process};
use vmmd_api::v1::{ConditionStatus, VmPhase};

use crate::{
    harness::{Daemon, status, uid, vm_pid},
    survival::consistent,
};

/// A run: its record, its process, and its files, in every combination.
#[rstest]
#[tokio::test]
async fn what_is_left_of_a_run_is_taken_for_what_it_is(
    #[values(true, false)] alive: bool,
    #[values(true, false)] runtime_files: bool,
    #[values(true, false)] logs: bool,
    #[values(true, false)] cgroup: bool,
) {
    let mut daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    let (pid, folder) = (vm_pid(&vm), format!("vms/{}", uid(&vm)));
    daemon.run("other", "").await;
    let groups = daemon.cgroups();
    daemon.kill();
    if !alive {
        end(&daemon, pid).await;
    }
    if !runtime_files {
        fs::remove_dir_all(daemon.path("run").join(&folder)).unwrap();
    }
    if !logs {
        fs::remove_dir_all(daemon.path("log").join(&folder)).unwrap();
    }
    if !cgroup {
        for group in groups.iter().filter(|group| group.ends_with(uid(&vm))) {
            if alive {
                assert!(fs::remove_dir(group).is_err(), "a living process keeps its own");
                continue;
            }
            // One that ends leaves it a moment after /proc has forgotten its command line.
            while let Err(error) = fs::remove_dir(group) {
                assert_eq!(error.kind(), ErrorKind::ResourceBusy, "{error}");
                tokio::task::yield_now().await;
            }
        }
    }
    daemon.relaunch().await;

    let found = daemon.get("web").await.unwrap();
    let state = status(&found);
    if alive {
        assert_eq!((state.phase(), vm_pid(&found)), (VmPhase::Running, pid));
        let reachable = state.conditions[0].status() == ConditionStatus::True;
        assert_eq!(reachable, runtime_files, "{:?}", state.conditions);
        // There is no second one.
        let again = daemon.start_vm("web").await.unwrap();
        assert_eq!(vm_pid(&again), pid);
        assert_eq!(daemon.vmm_processes().len(), 2);
        let killed = daemon.kill_vm("web").await.unwrap();
        assert_eq!(status(&killed).phase(), VmPhase::Stopped);
    } else {
        assert_eq!(state.phase(), VmPhase::Failed);
    }
    consistent(&daemon).await;
    daemon.start_vm("web").await.unwrap();
    consistent(&daemon).await;
    assert_eq!(daemon.phase("other").await, VmPhase::Running);
}

/// The same without a record: the VM was made after the store that the daemon is given.
#[rstest]
#[tokio::test]
async fn remains_of_an_unknown_vm_are_removed_unless_it_runs(
    #[values(true, false)] alive: bool,
    #[values(true, false)] runtime_files: bool,
    #[values(true, false)] logs: bool,
) {
    let mut daemon = Daemon::start().await;
    daemon.kill();
    let (state, before) = (daemon.path("state"), daemon.path("state-before"));
    copy(&state, &before);
    daemon.relaunch().await;
    let vm = daemon.run("web", "").await;
    let (pid, folder) = (vm_pid(&vm), format!("vms/{}", uid(&vm)));
    let [run, log] = ["run", "log"].map(|name| daemon.path(name).join(&folder));
    let groups = daemon.cgroups();
    daemon.kill();
    if !alive {
        end(&daemon, pid).await;
    }
    if !runtime_files {
        fs::remove_dir_all(&run).unwrap();
    }
    if !logs {
        fs::remove_dir_all(&log).unwrap();
    }
    fs::remove_dir_all(&state).unwrap();
    fs::rename(&before, &state).unwrap();
    daemon.relaunch().await;

    assert!(daemon.get("web").await.is_err());
    let left = daemon.vmm_processes();
    assert_eq!(left.contains(&pid), alive, "what lives is left alone");
    assert_eq!(run.exists(), alive && runtime_files);
    // Without its lock and without cgroups there is no sign that it is this VM's process.
    let known_to_live = alive && (runtime_files || !groups.is_empty());
    assert_eq!(log.exists(), known_to_live && logs);
    assert!(groups.iter().all(|group| group.exists() == alive));
    let user = |pid: Pid| {
        fs::metadata(format!("/proc/{}", pid.as_raw_nonzero()))
            .unwrap()
            .uid()
    };
    let next = vm_pid(&daemon.run("next", "").await);
    assert!(!alive || user(next) != user(pid), "its user is nobody else's");
    daemon.delete("next", true).await.unwrap();
    if alive {
        end(&daemon, pid).await;
        daemon.kill_and_restart().await;
        assert!(!run.exists() && !log.exists() && groups.iter().all(|group| !group.exists()));
    }
}

/// Kills a `vmm` and waits until it is gone.
async fn end(daemon: &Daemon, pid: Pid) {
    kill_process(pid, Signal::KILL).unwrap();
    while daemon.vmm_processes().contains(&pid) {
        tokio::task::yield_now().await;
    }
}

fn copy(from: &std::path::Path, to: &std::path::Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

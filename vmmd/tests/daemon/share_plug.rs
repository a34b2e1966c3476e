//! Shares that come and go while the VM runs.

use std::{fs, io::ErrorKind, os::unix::fs::chown};

use rustix::process::Pid;
use tonic::Code;
use vmmd_api::v1::{self, MemoryBacking, SharePhase};

use crate::{
    console::Client,
    harness::{Daemon, assert_says, refusal, status, uid},
    shares::{OWNER, daemon, is_alive, of, served, share, until_gone},
    update,
    verbs::within,
};

/// A daemon with a running VM `web` that has no shares, in memory that processes can map.
pub async fn running(options: &str) -> Daemon {
    let daemon = daemon().await;
    let mut vm = daemon.manifest("web", options);
    let memory = vm.spec.as_mut().unwrap().memory.as_mut().unwrap();
    memory.set_backing(MemoryBacking::Shared);
    daemon.run_vm(vm).await;
    daemon
}

/// The VM of the manifest with the share `data`, or without shares. The answer comes when the machine has taken it over, or could not.
async fn change(daemon: &Daemon, with: bool) -> v1::Vm {
    let shares = with.then(|| share(daemon, "srv/data"));
    let changed = daemon.change("web", |spec| spec.shares = shares.into_iter().collect());
    changed.await.unwrap()
}

/// The change that adds the share is refused, and nothing is stored.
async fn refused(daemon: &Daemon, words: &str) {
    let shares = vec![share(daemon, "srv/data")];
    let changed = daemon.change("web", |spec| spec.shares = shares).await;
    let refused = changed.unwrap_err();
    assert_says(&refused, words);
    assert_eq!(daemon.get("web").await.unwrap().spec.unwrap().shares, []);
}

/// The same without waiting.
async fn begin(daemon: &Daemon, with: bool) {
    let shares = with.then(|| share(daemon, "srv/data"));
    let changed = daemon.changed("web", |spec| spec.shares = shares.into_iter().collect());
    let request = v1::UpdateVmRequest {
        no_wait: true,
        ..update::request(changed.await)
    };
    daemon.client().update_vm(request).await.unwrap();
}

/// Processes that serve the directory of the share `data`.
pub fn servers(daemon: &Daemon) -> Vec<Pid> {
    let entries = fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let pids = pids.filter_map(Pid::from_raw);
    pids.filter(|pid| {
        let folder = fs::read_link(of(*pid, "cwd"));
        folder.is_ok_and(|folder| folder == daemon.path("srv/data")) && is_alive(*pid)
    })
    .collect()
}

async fn until_not_served(daemon: &Daemon) {
    for pid in servers(daemon) {
        until_gone(pid).await;
    }
    assert_eq!(servers(daemon), []);
}

/// The daemon's notes about processes of shares; empty for a VM that has just gone.
pub fn notes(daemon: &Daemon, vm: &v1::Vm) -> Vec<String> {
    let entries = match fs::read_dir(daemon.path("run/vms").join(uid(vm))) {
        Err(gone) if gone.kind() == ErrorKind::NotFound => return Vec::new(),
        entries => entries.unwrap(),
    };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("share")).collect()
}

fn phase(status: &v1::VmStatus) -> Option<SharePhase> {
    status.shares.first().map(v1::ShareStatus::phase)
}

#[tokio::test]
async fn a_share_comes_and_goes_while_the_vm_runs_also_over_a_kill() {
    let mut daemon = running("").await;
    let attached = change(&daemon, true).await;
    let pid = served(status(&attached));
    assert!(is_alive(pid));
    assert_eq!(status(&attached).pending_changes, []);
    daemon.kill_and_restart().await;
    let found = daemon
        .wait("web", |status| phase(status) == Some(SharePhase::Served))
        .await;
    assert_eq!(served(&found), pid);

    let detached = change(&daemon, false).await;
    assert_eq!(
        (&status(&detached).shares, &status(&detached).pending_changes),
        (&Vec::new(), &Vec::new())
    );
    until_gone(pid).await;
    daemon.told_exactly("ShareDetached", 1).await;

    let again = served(status(&change(&daemon, true).await));
    assert_ne!(again, pid);
    assert_eq!(servers(&daemon), [again]);
    // The share belongs to the run: its process is restarted after an end, and ends with the VM.
    rustix::process::kill_process(again, rustix::process::Signal::KILL).unwrap();
    let restored = daemon.wait("web", |status| status.shares[0].restarts == 1).await;
    assert_ne!(served(&restored), again);
    daemon.kill_vm("web").await.unwrap();
    until_not_served(&daemon).await;
    daemon.told_exactly("ShareFailed", 1).await;
    // The next run begins with it.
    served(status(&daemon.start_vm("web").await.unwrap()));
}

#[tokio::test]
async fn a_share_that_is_gone_leaves_no_note_of_its_process() {
    let mut daemon = running("").await;
    let attached = change(&daemon, true).await;
    assert_eq!(notes(&daemon, &attached), ["share.data"]);
    let pid = served(status(&attached));
    // As daemons noted it that did not plug shares.
    daemon.kill();
    let folder = daemon.path("run/vms").join(uid(&attached));
    fs::rename(folder.join("share.data"), folder.join("share-0")).unwrap();
    daemon.relaunch().await;
    let found = daemon.wait("web", |status| !status.shares.is_empty()).await;
    assert_eq!(served(&found), pid);
    let detached = change(&daemon, false).await;
    until_gone(pid).await;
    within(async || notes(&daemon, &detached).is_empty().then_some(())).await;
}

#[tokio::test]
async fn share_that_cannot_be_attached_is_pending_with_a_reason() {
    let daemon = running("").await;
    let pending = |vm: &v1::Vm| {
        let status = status(vm);
        assert_eq!(phase(status), Some(SharePhase::Pending));
        let paths: Vec<_> = status.pending_changes.iter().map(|change| &change.path).collect();
        assert_eq!(paths, ["spec.shares[data]"]);
        assert_eq!(status.pending_changes[0].message, status.shares[0].message);
        status.shares[0].message.clone()
    };
    // The next start would refuse it too: nothing is stored.
    fs::rename(daemon.path("srv/data"), daemon.path("srv/away")).unwrap();
    refused(&daemon, "can't be opened").await;
    fs::rename(daemon.path("srv/away"), daemon.path("srv/data")).unwrap();
    chown(daemon.path("srv/data"), Some(0), Some(0)).unwrap();
    refused(&daemon, "root user").await;
    chown(daemon.path("srv/data"), Some(OWNER.0), Some(OWNER.1)).unwrap();

    fs::rename(daemon.path("virtiofsd"), daemon.path("away")).unwrap();
    let message = pending(&change(&daemon, true).await);
    assert!(message.contains("virtiofsd cannot be opened"), "{message}");
    fs::rename(daemon.path("away"), daemon.path("virtiofsd")).unwrap();

    assert_eq!(servers(&daemon), []);
    daemon.told_exactly("LiveChangeFailed", 1).await;
    served(status(&change(&daemon, true).await));
}

#[tokio::test]
async fn a_process_whose_share_the_machine_does_not_take_ends() {
    let daemon = running("mock.attach=image").await;
    let refused = change(&daemon, true).await;
    assert_eq!(phase(status(&refused)), Some(SharePhase::Pending));
    let message = &status(&refused).shares[0].message;
    assert!(message.contains("the process is no good"), "{message}");
    assert!(daemon.path("srv/data/.served").exists());
    until_not_served(&daemon).await;
    // It is taken from the spec without asking the guest.
    let without = change(&daemon, false).await;
    assert_eq!(status(&without).pending_changes, []);
    assert_eq!(phase(status(&without)), None);
}

#[tokio::test]
async fn machine_with_private_memory_gets_a_share_at_next_start() {
    let daemon = daemon().await;
    daemon.run("web", "").await;
    let changed = change(&daemon, true).await;
    assert_eq!(phase(status(&changed)), Some(SharePhase::Pending));
    let change = &status(&changed).pending_changes[0];
    assert_eq!(change.path, "spec.shares[data]");
    assert!(change.message.contains("private memory"), "{change:?}");
    assert_eq!(change.message, status(&changed).shares[0].message);
    assert_eq!(servers(&daemon), []);
    daemon.kill_vm("web").await.unwrap();
    served(status(&daemon.start_vm("web").await.unwrap()));
    // From this start on the memory is shared, with or without shares.
    assert_eq!(phase(status(&self::change(&daemon, false).await)), None);
    served(status(&self::change(&daemon, true).await));
}

#[tokio::test]
async fn a_share_is_not_changed_while_it_is_being_attached() {
    let daemon = running("mock.attach=hang").await;
    let mut console = Client::open(&daemon, "web").await;
    begin(&daemon, true).await;
    console.expect("a share is not plugged in").await;
    let read_only = || {
        let read_only = v1::ShareSpec {
            read_only: true,
            ..share(&daemon, "srv/data")
        };
        daemon.change("web", |spec| spec.shares = vec![read_only])
    };
    let busy = (Code::FailedPrecondition, "BUSY".to_owned());
    assert_eq!(refusal(&read_only().await.unwrap_err()), busy);
    // The same spec once more, then the spec without the share: neither update reports a false
    // state.
    begin(&daemon, true).await;
    begin(&daemon, false).await;
    assert_eq!(refusal(&read_only().await.unwrap_err()), busy);
    assert_eq!(daemon.get("web").await.unwrap().spec.unwrap().shares, []);
}

#[tokio::test]
async fn guest_keeps_a_share_until_it_ejects_it() {
    let daemon = running("mock.eject=ignore").await;
    let pid = served(status(&change(&daemon, true).await));
    let mut console = Client::open(&daemon, "web").await;
    // By itself: it is still in the spec.
    console.type_in("eject data\n").await;
    let ejected = daemon
        .wait("web", |status| phase(status) == Some(SharePhase::Pending))
        .await;
    let message = &ejected.shares[0].message;
    assert!(message.contains("the guest ejected it"), "{message}");
    until_gone(pid).await;
    daemon.told_exactly("ShareEjected", 1).await;

    let pid = served(status(&change(&daemon, true).await));
    begin(&daemon, false).await;
    let leaving = daemon
        .wait("web", |status| phase(status) == Some(SharePhase::Detaching))
        .await;
    assert_eq!(leaving.shares[0].pid, pid.as_raw_nonzero().get().cast_unsigned());
    console.type_in("eject data\n").await;
    daemon.wait("web", |status| status.shares.is_empty()).await;
    until_gone(pid).await;
    assert_eq!(daemon.events("ShareFailed").await, []);
}

#[tokio::test]
async fn share_that_is_in_the_spec_again_stays_after_a_late_eject() {
    let daemon = running("mock.eject=ignore").await;
    let pid = served(status(&change(&daemon, true).await));
    begin(&daemon, false).await;
    daemon
        .wait("web", |status| phase(status) == Some(SharePhase::Detaching))
        .await;
    let kept = change(&daemon, true).await;
    assert_eq!(served(status(&kept)), pid);
    assert_eq!(status(&kept).pending_changes, []);
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("eject data\n").await;
    daemon.told_exactly("ShareDetached", 1).await;
    let again = daemon
        .wait("web", |status| {
            phase(status) == Some(SharePhase::Served) && served(status) != pid
        })
        .await;
    assert_eq!(again.pending_changes, []);
    until_gone(pid).await;
    assert_eq!(servers(&daemon), [served(&again)]);
    assert_eq!(daemon.events("ShareEjected").await, []);
    // Without a request, the eject counts as the guest's own again.
    console.type_in("eject data\n").await;
    daemon.told_exactly("ShareEjected", 1).await;
}

#[tokio::test]
async fn daemon_killed_during_an_attach_leaves_the_machines_shares() {
    // The machine has the share, and the daemon has no answer.
    let mut daemon = running("mock.attach=lost").await;
    let mut console = Client::open(&daemon, "web").await;
    begin(&daemon, true).await;
    console.expect("a share is plugged in").await;
    let attaching = daemon.get("web").await.unwrap();
    assert_eq!(phase(status(&attaching)), Some(SharePhase::Attaching));
    let serves = servers(&daemon);
    daemon.kill_and_restart().await;
    let found = daemon
        .wait("web", |status| phase(status) == Some(SharePhase::Served))
        .await;
    assert_eq!(serves, [served(&found)]);
    assert_eq!(found.pending_changes, []);
    change(&daemon, false).await;
    until_not_served(&daemon).await;
}

#[tokio::test]
async fn virtiofsd_of_a_share_that_was_not_attached_ends() {
    let mut daemon = running("mock.attach=hang").await;
    let mut console = Client::open(&daemon, "web").await;
    begin(&daemon, true).await;
    console.expect("a share is not plugged in").await;
    daemon.kill();
    until_not_served(&daemon).await;
    daemon.relaunch().await;
    // The next daemon tries again; it is taken back before the machine has answered.
    let attaching = |status: &v1::VmStatus| phase(status) == Some(SharePhase::Attaching);
    daemon.wait("web", attaching).await;
    daemon.kill_vm("web").await.unwrap();
    until_not_served(&daemon).await;
    assert_eq!(daemon.events("ShareFailed").await, []);
}

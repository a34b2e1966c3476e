//! The files of a VM in a directory of its owner.

use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
    path::Path,
    time::Duration,
};

use serde_json::Value;
use tonic::Code;
use vmmd_api::v1::{self, VmPhase};

use crate::{
    console::Client,
    harness::{Daemon, PATIENCE, refusal},
    shares::{OWNER, daemon},
};

/// A VM whose files are in `srv/data`, which belongs to [`OWNER`].
fn vm(daemon: &Daemon, name: &str) -> v1::Vm {
    daemon.manifest_with(name, "", |spec| {
        spec.state_dir = daemon.path("srv/data").display().to_string();
    })
}

/// Waits until a file has a content that is as wanted.
async fn file(path: &Path, wanted: impl Fn(&str) -> bool) -> String {
    let found = async {
        loop {
            match fs::read_to_string(path) {
                Ok(content) if wanted(&content) => return content,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    let found = tokio::time::timeout(PATIENCE, found).await;
    found.unwrap_or_else(|_| panic!("{}: {:?}", path.display(), fs::read_to_string(path)))
}

fn phase(content: &str) -> VmPhase {
    let vm: v1::Vm = serde_json::from_str(content).unwrap();
    vm.status.unwrap().phase()
}

#[tokio::test]
async fn state_dir_has_the_spec_logs_and_counters_of_a_vm() {
    let mut daemon = daemon().await;
    let at = |name: &str| daemon.path("srv/data").join(name);
    let [description, serial, log, metrics] = ["vm.json", "serial.log", "vmm.log", "metrics.json"].map(at);
    fs::write(at("own"), "the owner's").unwrap();
    daemon.create(vm(&daemon, "web")).await.unwrap();
    let content = file(&description, |content| content.contains("\"web\"")).await;
    let written: v1::Vm = serde_json::from_str(&content).unwrap();
    assert_eq!(written.spec, daemon.get("web").await.unwrap().spec);
    assert!(!metrics.exists(), "it has not run");

    daemon.start_vm("web").await.unwrap();
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("hello\n").await;
    console.expect("hello").await;
    file(&description, |content| phase(content) == VmPhase::Running).await;
    let counters = file(&metrics, |_| true).await;
    let counters: Value = serde_json::from_str(&counters).unwrap();
    assert!(
        counters["name"] == "web" && counters["time"].is_string(),
        "{counters}"
    );
    file(&log, |content| content.contains("asked as part of")).await;
    daemon.kill_vm("web").await.unwrap();
    file(&serial, |content| {
        content.contains("booted web") && content.contains("hello")
    })
    .await;
    file(&description, |content| phase(content) == VmPhase::Stopped).await;

    for path in [&description, &serial, &log, &metrics] {
        let metadata = fs::metadata(path).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), OWNER, "{}", path.display());
        assert_eq!(metadata.mode() & 0o7777, 0o640);
    }
    // One that is being written has a dot in front of its name.
    let names = fs::read_dir(daemon.path("srv/data")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| !name.starts_with('.')).count(), 5);

    // A later daemon writes the files again, and continues.
    daemon.kill();
    fs::remove_file(&description).unwrap();
    fs::remove_file(&serial).unwrap();
    daemon.relaunch().await;
    file(&description, |content| phase(content) == VmPhase::Stopped).await;
    file(&serial, |content| content.contains("hello")).await;
    // The files stay when the VM is deleted.
    daemon.delete("web", false).await.unwrap();
    assert!(description.exists() && serial.exists());
}

#[tokio::test]
async fn state_dir_has_the_end_of_a_vm_deleted_at_once() {
    let daemon = daemon().await;
    let at = |name: &str| daemon.path("srv/data").join(name);
    for round in 0..5 {
        daemon.create(vm(&daemon, "web")).await.unwrap();
        daemon.start_vm("web").await.unwrap();
        let mut console = Client::open(&daemon, "web").await;
        let marker = format!("marker {round}");
        console.type_in(&format!("{marker}\n")).await;
        console.expect(&marker).await;
        daemon.delete("web", true).await.unwrap();
        let serial = fs::read_to_string(at("serial.log")).unwrap();
        assert!(serial.contains(&marker), "{serial}");
        let last: v1::Vm = serde_json::from_str(&fs::read_to_string(at("vm.json")).unwrap()).unwrap();
        let status = last.status.unwrap();
        assert_eq!(status.phase(), VmPhase::Terminating);
        assert!(status.last_exit.is_some(), "{status:?}");
    }
}

#[tokio::test]
async fn links_of_the_owner_are_not_followed_and_escapes_are_refused() {
    let daemon = daemon().await;
    fs::write(daemon.path("secret"), "secret").unwrap();
    fs::create_dir(daemon.path("other")).unwrap();
    symlink("../other", daemon.path("srv/out")).unwrap();
    for path in ["other", "srv/out"] {
        let mut vm = vm(&daemon, "web");
        vm.spec.as_mut().unwrap().state_dir = daemon.path(path).display().to_string();
        let refused = daemon.create(vm).await.unwrap_err();
        let expected = (Code::FailedPrecondition, "PATH_NOT_ALLOWED".to_owned());
        assert_eq!(refusal(&refused), expected, "{path}");
    }
    symlink("../../secret", daemon.path("srv/data/vm.json")).unwrap();
    daemon.create(vm(&daemon, "web")).await.unwrap();
    file(&daemon.path("srv/data/vm.json"), |content| {
        content.contains("\"web\"")
    })
    .await;
    assert_eq!(fs::read_to_string(daemon.path("secret")).unwrap(), "secret");

    // Two VMs can't have their files in one.
    let refused = daemon.create(vm(&daemon, "two")).await.unwrap_err();
    assert_eq!(refusal(&refused).1, "STATE_DIR_IN_USE");

    // The directory may change after the creation.
    fs::rename(daemon.path("srv/data"), daemon.path("srv/away")).unwrap();
    let missing = daemon.start_vm("web").await.unwrap_err();
    assert_eq!(refusal(&missing).1, "STATE_DIR_NOT_USABLE");
    symlink("../other", daemon.path("srv/data")).unwrap();
    let leads_out = daemon.start_vm("web").await.unwrap_err();
    assert_eq!(refusal(&leads_out).1, "PATH_NOT_ALLOWED");
    assert!(fs::read_dir(daemon.path("other")).unwrap().next().is_none());
    daemon.told("StateDirFailed", 1).await;
    fs::remove_file(daemon.path("srv/data")).unwrap();
    fs::rename(daemon.path("srv/away"), daemon.path("srv/data")).unwrap();
    daemon.start_vm("web").await.unwrap();
    file(&daemon.path("srv/data/vm.json"), |content| {
        phase(content) == VmPhase::Running
    })
    .await;
    daemon.told_exactly("StateDirRestored", 1).await;
}

#[tokio::test]
async fn link_instead_of_a_state_dir_does_not_reach_another_vms() {
    let daemon = daemon().await;
    let [job, other] = ["srv/data/state", "srv/other"].map(|path| daemon.path(path));
    fs::create_dir(&job).unwrap();
    fs::create_dir(&other).unwrap();
    let mut vm = vm(&daemon, "web");
    vm.spec.as_mut().unwrap().state_dir = job.display().to_string();
    daemon.create(vm).await.unwrap();
    file(&job.join("vm.json"), |content| content.contains("\"web\"")).await;
    // As its guest can do when `srv/data` is a share.
    fs::rename(&job, daemon.path("srv/data/old")).unwrap();
    symlink("../other", &job).unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    let expected = (Code::FailedPrecondition, "PATH_NOT_ALLOWED".to_owned());
    assert_eq!(refusal(&refused), expected);
    daemon.told("StateDirFailed", 1).await;
    assert!(fs::read_dir(&other).unwrap().next().is_none());
    let next = daemon.manifest_with("next", "", |spec| spec.state_dir = job.display().to_string());
    daemon.delete("web", false).await.unwrap();
    let refused = daemon.create(next).await.unwrap_err();
    assert_eq!(refusal(&refused), expected);
}

#[tokio::test]
async fn another_directory_is_written_to_from_then_on() {
    let daemon = daemon().await;
    daemon.create(vm(&daemon, "web")).await.unwrap();
    daemon.start_vm("web").await.unwrap();
    fs::create_dir(daemon.path("srv/next")).unwrap();
    let next = daemon.path("srv/next").display().to_string();
    let changed = daemon.change("web", |spec| spec.state_dir = next).await.unwrap();
    assert_eq!(changed.status.unwrap().pending_changes, []);
    file(&daemon.path("srv/next/vm.json"), |content| {
        phase(content) == VmPhase::Running
    })
    .await;
    let changed = daemon.change("web", |spec| spec.state_dir.clear()).await.unwrap();
    assert_eq!(changed.status.unwrap().pending_changes, []);
}

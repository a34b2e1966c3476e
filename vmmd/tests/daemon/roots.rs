//! Allowed places for the files of VMs. A start by the run policy takes only the files of the last
//! start.

use std::{fs, os::unix::fs::symlink, path::Path};

use rustix::process::{Signal, kill_process};
use tonic::{Code, Status};
use vmmd_api::v1::{self, RunPolicy, VmPhase, volume_spec::Source};

use crate::{
    disks::raw,
    harness::{Daemon, refusal, temporary_folder, uid, vm_pid},
    verbs::raw_file,
};

/// A daemon whose disks must be below `allowed`, and its kernels below `boot`.
async fn confined() -> Daemon {
    let folder = temporary_folder();
    let path = |name: &str| folder.path().join(name);
    for name in ["allowed", "boot", "other"] {
        fs::create_dir(path(name)).unwrap();
    }
    for name in ["allowed/disk", "other/disk"] {
        fs::write(path(name), [0; 4096]).unwrap();
    }
    for name in ["boot/kernel", "other/kernel"] {
        fs::write(path(name), [1; 4096]).unwrap();
    }
    symlink("../other/disk", path("allowed/link")).unwrap();
    symlink("../other/kernel", path("boot/link")).unwrap();
    symlink("kernel", path("boot/default")).unwrap();
    let roots = format!(
        "restart = {{ first_ms = 300 }}\nroots = {{ disks = [{:?}], kernels = [{:?}] }}\n",
        path("allowed"),
        path("boot")
    );
    Daemon::in_folder(folder, &roots).await
}

fn disk(path: &Path) -> v1::DiskSpec {
    raw_file("root", path)
}

/// A VM with these files of the daemon's folder.
fn vm(daemon: &Daemon, name: &str, kernel: &str, disk_path: &str) -> v1::Vm {
    let mut vm = daemon.manifest(name, "");
    let spec = vm.spec.as_mut().unwrap();
    let Some(v1::boot_spec::Source::Linux(linux)) = &mut spec.boot.as_mut().unwrap().source else {
        panic!("no kernel")
    };
    linux.kernel = daemon.path(kernel).to_str().unwrap().into();
    spec.disks.push(disk(&daemon.path(disk_path)));
    vm
}

async fn dry_run(daemon: &Daemon, vm: v1::Vm) -> Result<(), Status> {
    daemon.create_as(vm, false, true).await.map(drop)
}

fn not_allowed<T: std::fmt::Debug>(result: Result<T, Status>, what: &str) {
    let status = result.expect_err(what);
    let expected = (Code::FailedPrecondition, "PATH_NOT_ALLOWED".to_owned());
    assert_eq!(refusal(&status), expected, "{what}: {status}");
    assert!(status.message().contains("roots."), "{what}: {status}");
}

fn not_allowed_here<T: std::fmt::Debug>(result: Result<T, Status>, what: &str) {
    let status = result.expect_err(what);
    let expected = (Code::FailedPrecondition, "PATH_NOT_ALLOWED".to_owned());
    assert_eq!(refusal(&status), expected, "{what}: {status}");
    assert!(
        status.message().contains("others than the node's operator"),
        "{what}: {status}"
    );
}

#[tokio::test]
async fn path_outside_the_roots_is_refused_at_creation() {
    let daemon = confined().await;
    for (kernel, disk) in [("boot/kernel", "other/disk"), ("other/kernel", "allowed/disk")] {
        not_allowed(daemon.create(vm(&daemon, "web", kernel, disk)).await, disk);
    }
    // Nowhere does a path have a `..`.
    for (kernel, disk) in [
        ("boot/kernel", "allowed/../other/disk"),
        ("boot/../other/kernel", "allowed/disk"),
    ] {
        let refused = daemon.create(vm(&daemon, "web", kernel, disk)).await.unwrap_err();
        let invalid = (Code::InvalidArgument, "INVALID_FIELDS".to_owned());
        assert_eq!(refusal(&refused), invalid, "{refused}");
    }
    daemon
        .create(vm(&daemon, "web", "boot/default", "allowed/disk"))
        .await
        .unwrap();
    let update = v1::UpdateVmRequest {
        vm: Some(vm(&daemon, "web", "boot/kernel", "other/disk")),
        ..Default::default()
    };
    not_allowed(daemon.client().update_vm(update).await, "update");
    daemon.start_vm("web").await.unwrap();
    let path = "other/disk";
    for running in [true, false] {
        if !running {
            daemon.kill_vm("web").await.unwrap();
        }
        let more = v1::DiskSpec {
            name: "more".into(),
            ..disk(&daemon.path(path))
        };
        let refused = daemon.attach("web", more).await;
        assert!(
            refused
                .as_ref()
                .is_err_and(|status| status.message().starts_with("disk.path")),
            "{refused:?}"
        );
        not_allowed(refused, path);
    }
}

#[tokio::test]
async fn link_that_leaves_the_roots_is_refused_at_the_open() {
    let daemon = confined().await;
    for (name, kernel, disk) in [
        ("disk", "boot/kernel", "allowed/link"),
        ("kernel", "boot/link", "allowed/disk"),
    ] {
        let vm = vm(&daemon, name, kernel, disk);
        not_allowed(dry_run(&daemon, vm.clone()).await, name);
        // The link may be another one by the time of the start.
        daemon.create(vm).await.unwrap();
        not_allowed(daemon.start_vm(name).await, name);
    }
    daemon
        .create(vm(&daemon, "web", "boot/kernel", "allowed/disk"))
        .await
        .unwrap();
    daemon.start_vm("web").await.unwrap();
    let more = v1::DiskSpec {
        name: "more".into(),
        ..disk(&daemon.path("allowed/link"))
    };
    not_allowed(daemon.attach("web", more).await, "attach");
    for path in ["other/disk", "allowed/link"] {
        let source = daemon.path(path).to_str().unwrap().to_owned();
        not_allowed(
            daemon.make(raw("copy", 0), Some(Source::RawFile(source))).await,
            path,
        );
    }
    // Disks that the daemon keeps are elsewhere, and its own.
    daemon.make(raw("own", 4096), None).await.unwrap();
}

/// Two volumes are below one root. The user of one has made links and a device where the disk is looked for.
#[tokio::test]
async fn a_disk_beneath_a_volume_is_no_link_and_no_device() {
    let daemon = confined().await;
    for name in ["allowed/1", "allowed/2"] {
        fs::create_dir(daemon.path(name)).unwrap();
        fs::write(daemon.path(&format!("{name}/disk.img")), [0; 4096]).unwrap();
    }
    let file = daemon.path("allowed/1/disk.img");
    let in_volume = |name: &str| v1::DiskSpec {
        beneath: daemon.path("allowed/1").to_str().unwrap().into(),
        name: name.into(),
        ..disk(&file)
    };
    let mut web = vm(&daemon, "web", "boot/kernel", "allowed/disk");
    web.spec.as_mut().unwrap().disks = vec![in_volume("root")];
    daemon.create(web.clone()).await.unwrap();
    daemon
        .create(vm(&daemon, "other", "boot/kernel", "allowed/disk"))
        .await
        .unwrap();
    daemon.start_vm("other").await.unwrap();
    let resize = |name: &str| v1::ResizeVmDiskRequest {
        vm: name.into(),
        disk: "root".into(),
        size_bytes: Some(8192),
        ..Default::default()
    };
    let device = |path: &Path| {
        let mode = rustix::fs::Mode::RWXU;
        let kind = rustix::fs::FileType::CharacterDevice;
        rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, rustix::fs::makedev(1, 3)).unwrap();
    };
    let plant: [(&str, &dyn Fn()); 2] = [
        ("a link", &|| symlink("../2/disk.img", &file).unwrap()),
        ("a device", &|| device(&file)),
    ];
    for (what, plant) in plant {
        fs::remove_file(&file).unwrap();
        plant();
        let mut new = web.clone();
        new.metadata.as_mut().unwrap().name = "new".into();
        not_allowed_here(dry_run(&daemon, new).await, what);
        not_allowed_here(daemon.start_vm("web").await, what);
        let more = in_volume("more");
        not_allowed_here(daemon.attach("other", more).await, what);
        not_allowed_here(daemon.client().resize_vm_disk(resize("web")).await, what);
        let length = fs::metadata(daemon.path("allowed/2/disk.img")).unwrap().len();
        assert_eq!(length, 4096, "{what}");
    }
    fs::remove_file(&file).unwrap();
    fs::write(&file, [0; 4096]).unwrap();
    daemon.start_vm("web").await.unwrap();
    daemon.kill_vm("web").await.unwrap();
    daemon.client().resize_vm_disk(resize("web")).await.unwrap();
    assert_eq!(fs::metadata(&file).unwrap().len(), 8192);
}

#[tokio::test]
async fn start_by_run_policy_uses_the_same_files_as_the_last_start() {
    for (replaced, field) in [
        ("boot/kernel", "spec.boot.linux.kernel"),
        ("allowed/disk", "spec.disks[0].path"),
    ] {
        let mut daemon = confined().await;
        let mut web = vm(&daemon, "web", "boot/default", "allowed/disk");
        web.spec.as_mut().unwrap().run_policy = RunPolicy::AlwaysOnUnlessStopped.into();
        let first = daemon.run_vm(web).await;
        // A write by the guest does not make it another file.
        fs::write(daemon.path("allowed/disk"), [2; 8192]).unwrap();
        kill_process(vm_pid(&first), Signal::KILL).unwrap();
        daemon
            .wait("web", |status| {
                status.phase() == VmPhase::Running && status.counts.unwrap().automatic_starts == 1
            })
            .await;
        let new = daemon.path("new");
        fs::copy(daemon.path(replaced), &new).unwrap();
        fs::rename(&new, daemon.path(replaced)).unwrap();
        daemon.kill_and_restart().await;
        let second = daemon.get("web").await.unwrap();
        assert_eq!(uid(&second), uid(&first));
        kill_process(vm_pid(&second), Signal::KILL).unwrap();
        let failed = daemon.wait("web", |status| status.reason == "FileReplaced").await;
        assert!(failed.message.starts_with(field), "{}", failed.message);
        let third = daemon.start_vm("web").await.unwrap();
        // It is the known one from now on.
        let starts = |status: &v1::VmStatus| status.counts.unwrap().automatic_starts;
        let before = starts(third.status.as_ref().unwrap());
        kill_process(vm_pid(&third), Signal::KILL).unwrap();
        daemon
            .wait("web", |status| {
                status.phase() == VmPhase::Running && starts(status) > before
            })
            .await;
    }
}

#[tokio::test]
async fn foreign_signature_on_a_raw_disk_is_refused_unless_from_guest() {
    let mut head = vec![0; 4096];
    head[..4].copy_from_slice(b"QFI\xfb");
    let daemon = confined().await;
    let path = daemon.path("allowed/disk");
    fs::write(&path, &head).unwrap();
    let mut web = vm(&daemon, "web", "boot/kernel", "allowed/disk");
    let mismatch = (Code::FailedPrecondition, "IMAGE_FORMAT_MISMATCH".to_owned());
    let refused = dry_run(&daemon, web.clone()).await.unwrap_err();
    assert_eq!(refusal(&refused), mismatch, "{refused}");
    daemon.create(web.clone()).await.unwrap();
    assert_eq!(refusal(&daemon.start_vm("web").await.unwrap_err()), mismatch);
    let mut other = vm(&daemon, "other", "boot/kernel", "allowed/disk");
    other.spec.as_mut().unwrap().disks.clear();
    daemon.run_vm(other).await;
    let attach = |any_content| v1::AttachDiskRequest {
        vm: "other".into(),
        disk: Some(v1::DiskSpec {
            any_content,
            ..disk(&path)
        }),
        ..Default::default()
    };
    let refused = daemon.client().attach_disk(attach(false)).await.unwrap_err();
    assert_eq!(refusal(&refused), mismatch, "{refused}");
    daemon.client().attach_disk(attach(true)).await.unwrap();
    daemon.delete("other", true).await.unwrap();

    fs::write(&path, [0; 4096]).unwrap();
    daemon.start_vm("web").await.unwrap();
    fs::write(&path, &head).unwrap();
    daemon.kill_vm("web").await.unwrap();
    daemon.start_vm("web").await.unwrap();
    // Nor does it stand in the way of an update that is tried.
    web.metadata.as_mut().unwrap().labels = [("a".to_owned(), "b".to_owned())].into();
    let update = v1::UpdateVmRequest {
        vm: Some(web),
        apply: v1::ApplyMode::DryRun.into(),
        ..Default::default()
    };
    daemon.client().update_vm(update).await.unwrap();
}

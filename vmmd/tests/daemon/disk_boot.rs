//! VMs that boot the kernel that is installed on one of their disks.

use std::{fs, os::unix::fs::FileExt as _, path::PathBuf};

use rustix::process::Pid;
use tonic::Code;
use vmmd_api::v1;

use crate::{
    console::Client,
    disks::{named, raw, state},
    harness::{Daemon, assert_says, refusal, status, vm_pid},
    migration::pair,
    verbs::raw_file,
};

/// A VM with a disk that has `content` in its first sector.
pub fn vm(daemon: &Daemon, name: &str, content: &str) -> (v1::Vm, PathBuf) {
    let path = daemon.path(name);
    let mut bytes = content.as_bytes().to_vec();
    bytes.resize(1 << 20, 0);
    fs::write(&path, bytes).unwrap();
    let mut vm = daemon.manifest(name, "");
    let spec = vm.spec.get_or_insert_default();
    spec.boot = Some(v1::BootSpec {
        source: Some(v1::boot_spec::Source::FromDisk(v1::DiskBoot {
            disk: String::new(),
            cmdline_append: "more=1".into(),
        })),
    });
    spec.disks = vec![raw_file("root", &path)];
    (vm, path)
}

/// Content of the nameless files that a `vmm` has open.
fn nameless(pid: Pid) -> Vec<String> {
    let folder = format!("/proc/{}/fd", pid.as_raw_nonzero());
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let nameless = entries.filter(|path| {
        let to = fs::read_link(path).unwrap();
        let to = to.to_string_lossy();
        to.contains("/images/") && to.ends_with("(deleted)")
    });
    nameless.map(|path| fs::read_to_string(path).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kernel_on_the_disk_is_looked_for_anew_at_each_start() {
    let daemon = Daemon::start().await;
    let (vm, path) = vm(&daemon, "web", "boots:root=/dev/vda1 v=6.1\n");
    let first = daemon.run_vm(vm).await;
    assert_eq!(nameless(vm_pid(&first)), ["root=/dev/vda1 v=6.1"]);
    daemon.kill_vm("web").await.unwrap();
    let mut content = fs::read(&path).unwrap();
    content[..27].copy_from_slice(b"boots:root=/dev/vda1 v=6.2\n");
    fs::write(&path, content).unwrap();
    let second = daemon.start_vm("web").await.unwrap();
    assert_eq!(nameless(vm_pid(&second)), ["root=/dev/vda1 v=6.2"]);
    assert_eq!(
        fs::read_dir(daemon.path("state/images")).map_or(0, Iterator::count),
        0,
        "nothing is left there"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn guest_reset_boots_the_newly_installed_kernel() {
    let daemon = Daemon::start().await;
    let (vm, path) = vm(&daemon, "web", "boots:root=/dev/vda1 v=6.1\n");
    let first = daemon.run_vm(vm).await;
    let mut content = fs::read(&path).unwrap();
    content[..27].copy_from_slice(b"boots:root=/dev/vda1 v=6.2\n");
    fs::write(&path, content).unwrap();
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("reset\n").await;
    let pid = |vm: &v1::Vm| u32::try_from(vm_pid(vm).as_raw_nonzero().get()).unwrap();
    let is = |status: &v1::VmStatus| status.instance.as_ref().map_or(0, |instance| instance.pid);
    daemon
        .wait("web", |status| {
            status.phase() == v1::VmPhase::Running && is(status) != pid(&first)
        })
        .await;
    let second = daemon.get("web").await.unwrap();
    assert_eq!(nameless(vm_pid(&second)), ["root=/dev/vda1 v=6.2"]);
    // One that does so again and again boots the same copy.
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("reset\n").await;
    let resets = |status: &v1::VmStatus| status.counts.is_some_and(|counts| counts.guest_resets == 2);
    daemon.wait("web", resets).await;
    let third = daemon.get("web").await.unwrap();
    assert_eq!(vm_pid(&third), vm_pid(&second));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_moves_with_its_boot_disk_and_boots_it_at_a_reset() {
    let (first, second) = pair().await;
    let disk = first.make(raw("data", 1 << 20), None).await.unwrap();
    let file = fs::File::options().write(true).open(&state(&disk).path).unwrap();
    file.write_all_at(b"boots:root=/dev/vda1 v=6.1\n", 0).unwrap();
    let (mut vm, _) = vm(&first, "web", "");
    vm.spec.as_mut().unwrap().disks = vec![named("data")];
    first.run_vm(vm).await;
    let operation = first.migrate("web", &second).await.unwrap();
    first.completes(&operation).await;
    let there = second.waits_for("web", v1::VmPhase::Running).await;
    let mut console = Client::open(&second, "web").await;
    console.type_in("reset\n").await;
    let before = status(&there).instance.as_ref().unwrap().pid;
    let is = |status: &v1::VmStatus| status.instance.as_ref().map_or(0, |instance| instance.pid);
    second
        .wait("web", |status| {
            status.phase() == v1::VmPhase::Running && is(status) != before
        })
        .await;
    let after = second.get("web").await.unwrap();
    assert_eq!(nameless(vm_pid(&after)), ["root=/dev/vda1 v=6.1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_without_a_kernel_starts_nothing_and_stays_free() {
    let daemon = Daemon::start().await;
    let (vm, path) = vm(&daemon, "web", "nothing");
    daemon.create(vm).await.unwrap();
    for _ in 0..2 {
        let refused = daemon.start_vm("web").await.unwrap_err();
        assert_eq!(refusal(&refused).1, "KERNEL_NOT_FOUND");
        assert_says(
            &refused,
            "disk \"root\": no kernel was found on the disk: it has LVM",
        );
    }
    let mut content = fs::read(&path).unwrap();
    content[..15].copy_from_slice(b"boots:now it is");
    content[15] = b'\n';
    fs::write(&path, content).unwrap();
    daemon.start_vm("web").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_boot_from_no_disk_or_another_vms_disk_is_refused() {
    let daemon = Daemon::start().await;
    for (disk, disks) in [("", 0), ("data", 1)] {
        let (mut vm, _) = vm(&daemon, "web", "");
        let spec = vm.spec.get_or_insert_default();
        spec.disks.truncate(disks);
        let boot = spec.boot.as_mut().and_then(|boot| boot.source.as_mut());
        let Some(v1::boot_spec::Source::FromDisk(boot)) = boot else {
            panic!("it boots from a disk");
        };
        disk.clone_into(&mut boot.disk);
        let refused = daemon.create(vm).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(format!("{refused:?}").contains("fromDisk"), "{refused:?}");
    }
}

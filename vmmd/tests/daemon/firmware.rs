//! VMs that boot through firmware: the files of the firmware.

use std::{
    fs,
    os::unix::fs::{FileExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use tonic::Code;
use vmmd_api::v1::{self, FirmwareBoot, FirmwareType, boot_spec::Source};

use crate::{
    attach::disk,
    disks::{named, raw, state},
    harness::{Daemon, assert_refused, assert_says, temporary_folder, uid},
    migration::node_in,
    pki::Pki,
    verbs::raw_file,
};

/// Configuration of firmware in files of a folder. With `make` there are those of UEFI.
fn files(folder: &Path, make: bool) -> String {
    let path = |name: &str| folder.join(name);
    if make {
        fs::write(path("code"), [1; 4096]).unwrap();
        fs::write(path("template"), [2; 4096]).unwrap();
    }
    format!(
        "[firmware]\nuefi_code = {:?}\nuefi_variables = {:?}\nbios = {:?}\n",
        path("code"),
        path("template"),
        path("bios"),
    )
}

/// A daemon with such files in its folder.
async fn daemon(make: bool) -> Daemon {
    let folder = temporary_folder();
    let extra = files(folder.path(), make);
    Daemon::in_folder(folder, &extra).await
}

fn manifest(daemon: &Daemon) -> v1::Vm {
    let mut vm = daemon.manifest("web", "");
    let firmware = FirmwareBoot {
        r#type: FirmwareType::Uefi.into(),
        ..FirmwareBoot::default()
    };
    vm.spec.as_mut().unwrap().boot = Some(v1::BootSpec {
        source: Some(Source::Firmware(firmware)),
    });
    vm
}

fn variables(daemon: &Daemon, vm: &v1::Vm) -> PathBuf {
    daemon.path(&format!("state/vms/{}/nvram.fd", uid(vm)))
}

#[tokio::test]
async fn a_node_without_firmware_says_what_to_install() {
    let daemon = daemon(false).await;
    daemon.create(manifest(&daemon)).await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "FIRMWARE_NOT_FOUND");
    assert_says(&refused, "apt install ovmf");
}

#[tokio::test]
async fn variables_live_from_the_first_start_to_the_deletion() {
    let mut daemon = daemon(true).await;
    let vm = daemon.create(manifest(&daemon)).await.unwrap();
    let file = variables(&daemon, &vm);
    assert!(!file.exists());
    daemon.start_vm("web").await.unwrap();
    assert_eq!(fs::read(&file).unwrap(), [2; 4096]);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    // A new template changes no VM, and neither a restart of the VM nor one of the daemon changes the variables.
    fs::write(daemon.path("template"), [3; 4096]).unwrap();
    daemon.kill_vm("web").await.unwrap();
    fs::write(&file, [4; 4096]).unwrap();
    daemon.kill_and_restart().await;
    daemon.start_vm("web").await.unwrap();
    assert_eq!(fs::read(&file).unwrap(), [4; 4096]);
    daemon.delete("web", true).await.unwrap();
    assert!(!file.exists() && !file.parent().unwrap().exists());
}

#[tokio::test]
async fn a_start_can_begin_with_new_variables_and_another_choice() {
    let daemon = daemon(true).await;
    let vm = daemon
        .create(chosen(&daemon, &[("root", "uefi", false)]))
        .await
        .unwrap();
    let start = |reset_nvram| v1::StartVmRequest {
        name: "web".into(),
        reset_nvram,
        ..Default::default()
    };
    daemon.client().start_vm(start(false)).await.unwrap();
    let refused = daemon.client().start_vm(start(true)).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "VM_NOT_STOPPED");
    daemon.kill_vm("web").await.unwrap();
    let file = variables(&daemon, &vm);
    fs::write(&file, [4; 4096]).unwrap();
    daemon.client().start_vm(start(true)).await.unwrap();
    assert_eq!(fs::read(&file).unwrap(), [2; 4096]);
    daemon.kill_vm("web").await.unwrap();
    fs::write(daemon.path("root"), "bios".repeat(1 << 18)).unwrap();
    fs::write(daemon.path("bios"), [1; 4096]).unwrap();
    let started = daemon.client().start_vm(start(true)).await.unwrap().into_inner();
    assert_eq!(has(&started.vm.unwrap()), FirmwareType::Bios);
    assert!(!file.exists());
}

#[tokio::test]
async fn a_clone_has_variables_of_its_own() {
    let daemon = daemon(true).await;
    let vm = daemon.create(manifest(&daemon)).await.unwrap();
    daemon.start_vm("web").await.unwrap();
    daemon.snapshot("s", "web", true).await.unwrap();
    let other = daemon.restore("s", "other", false).await.unwrap();
    let (own, others) = (variables(&daemon, &vm), variables(&daemon, &other));
    assert!(own != others && own.exists() && others.exists());
    daemon.delete("other", true).await.unwrap();
    assert!(own.exists() && !others.exists());
}

#[tokio::test]
async fn variables_leave_the_node_with_a_migrated_vm() {
    let pki = Pki::new("ca");
    let node = async || {
        let folder = temporary_folder();
        let extra = files(folder.path(), true);
        node_in(folder, &pki, &extra).await
    };
    let (from, to) = (node().await, node().await);
    let vm = from.create(manifest(&from)).await.unwrap();
    from.start_vm("web").await.unwrap();
    from.migrate("web", &to).await.unwrap();
    from.forgets("web").await;
    let moved = to.get("web").await.unwrap();
    assert!(variables(&to, &moved).exists() && !variables(&from, &vm).exists());
}

/// A VM whose firmware the daemon chooses, with these disks: name, content, whether it is a CD-ROM.
fn chosen(daemon: &Daemon, disks: &[(&str, &str, bool)]) -> v1::Vm {
    let mut vm = manifest(daemon);
    let spec = vm.spec.as_mut().unwrap();
    let Some(Source::Firmware(firmware)) = &mut spec.boot.as_mut().unwrap().source else {
        panic!("it boots through firmware");
    };
    firmware.set_type(FirmwareType::Auto);
    let disks = disks.iter().map(|(name, content, cdrom)| {
        let path = daemon.path(name);
        let mut bytes = content.as_bytes().to_vec();
        bytes.resize(1 << 20, 0);
        fs::write(&path, bytes).unwrap();
        v1::DiskSpec {
            cdrom: *cdrom,
            ..raw_file(name, &path)
        }
    });
    spec.disks = disks.collect();
    vm
}

fn has(vm: &v1::Vm) -> FirmwareType {
    vm.status.as_ref().unwrap().firmware()
}

#[tokio::test]
async fn auto_takes_the_first_bootable_disk_and_stays_with_it() {
    let mut daemon = daemon(true).await;
    let made = daemon
        .create(chosen(&daemon, &[("root", "", false), ("cd", "cd-uefi", true)]))
        .await
        .unwrap();
    assert_eq!(has(&made), FirmwareType::Unspecified);
    let started = daemon.start_vm("web").await.unwrap();
    assert_eq!(has(&started), FirmwareType::Uefi);
    assert!(variables(&daemon, &made).exists());
    // The installed system may look otherwise, and expects the same firmware.
    daemon.kill_vm("web").await.unwrap();
    fs::write(daemon.path("root"), "bios".repeat(1 << 18)).unwrap();
    daemon.kill_and_restart().await;
    assert_eq!(has(&daemon.get("web").await.unwrap()), FirmwareType::Uefi);
    assert_eq!(has(&daemon.start_vm("web").await.unwrap()), FirmwareType::Uefi);
}

#[tokio::test]
async fn auto_refuses_disks_that_no_firmware_boots() {
    let daemon = daemon(true).await;
    let vm = chosen(&daemon, &[("root", "", false), ("cd", "uefi", true)]);
    daemon.create(vm).await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "BOOT_LOADER_NOT_FOUND");
    let reason = "it has no EFI system partition and no boot sector";
    assert_says(
        &refused,
        &format!("disk \"root\": {reason}; disk \"cd\": {reason}"),
    );
    assert_says(&refused, "spec.boot.fromDisk");
    assert_eq!(has(&daemon.get("web").await.unwrap()), FirmwareType::Unspecified);
    // A disk with a boot sector: there is no BIOS here.
    fs::write(daemon.path("root"), "bios".repeat(1 << 18)).unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "FIRMWARE_NOT_FOUND");
    assert_says(&refused, "apt install seabios");
}

#[tokio::test]
async fn auto_moves_with_the_vm() {
    let pki = Pki::new("ca");
    let node = async || {
        let folder = temporary_folder();
        let extra = files(folder.path(), true);
        node_in(folder, &pki, &extra).await
    };
    let (from, to) = (node().await, node().await);
    let image = from.make(raw("data", 1 << 20), None).await.unwrap();
    let file = fs::File::options().write(true).open(&state(&image).path).unwrap();
    file.write_all_at(b"uefi", 0).unwrap();
    let mut vm = chosen(&from, &[]);
    vm.spec.as_mut().unwrap().disks = vec![named("data")];
    from.run_vm(vm).await;
    let operation = from.migrate("web", &to).await.unwrap();
    from.completes(&operation).await;
    to.waits_for("web", v1::VmPhase::Running).await;
    assert_eq!(has(&to.get("web").await.unwrap()), FirmwareType::Uefi);
}

#[tokio::test]
async fn clock_zone_must_exist_on_the_node() {
    let daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "");
    let clock = vm.spec.as_mut().unwrap().clock.get_or_insert_default();
    clock.timezone = "Europe/Atlantis".into();
    daemon.create(vm).await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "TIMEZONE_NOT_FOUND");
    assert_says(&refused, "apt install tzdata");
}

#[tokio::test]
async fn sata_disks_come_and_go_while_the_vm_is_stopped() {
    let mut daemon = daemon(true).await;
    daemon.create(manifest(&daemon)).await.unwrap();
    daemon.start_vm("web").await.unwrap();
    let (one, two) = (sata(&daemon, "one"), sata(&daemon, "two"));
    let cd = v1::DiskSpec {
        cdrom: true,
        ..disk(&daemon, "cd")
    };
    let refused = daemon.attach("web", one.clone()).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "DISK_NOT_HOT_PLUGGABLE");
    assert_says(&refused, "stop the VM first");
    daemon.kill_vm("web").await.unwrap();
    for disk in [one, two, cd] {
        daemon.attach("web", disk).await.unwrap();
    }
    let ports = |vm: &v1::Vm| -> Vec<_> {
        let disks = &vm.status.as_ref().unwrap().disks;
        let of = |disk: &v1::DiskStatus| (disk.name.clone(), disk.pci_slot, disk.sata_port);
        disks
            .iter()
            .filter(|disk| disk.sata_port.is_some())
            .map(of)
            .collect()
    };
    let at = |name: &str, port| (name.to_owned(), None, Some(port));
    let started = daemon.start_vm("web").await.unwrap();
    assert_eq!(ports(&started), [at("one", 0), at("two", 1), at("cd", 2)]);
    let refused = daemon.detach("web", "one", 0, true).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "DISK_NOT_HOT_PLUGGABLE");
    daemon.kill_vm("web").await.unwrap();
    daemon.detach("web", "one", 0, false).await.unwrap();
    daemon.kill_and_restart().await;
    let started = daemon.start_vm("web").await.unwrap();
    assert_eq!(ports(&started), [at("two", 1), at("cd", 2)]);
}

fn sata(daemon: &Daemon, name: &str) -> v1::DiskSpec {
    v1::DiskSpec {
        bus: v1::DiskBus::Sata.into(),
        ..disk(daemon, name)
    }
}

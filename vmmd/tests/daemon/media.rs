//! Media of CD-ROM drives.

use std::fs;

use tonic::Code;
use vmmd_api::v1::{self, FirmwareBoot, boot_spec::Source, disk_spec::Source as Content};

use crate::{
    disks::{named, raw},
    harness::{Daemon, assert_refused, metadata_of, temporary_folder, vm_pid},
    update::masked,
};

/// A VM with an empty drive `cd`. Its guest prevents removals with `locked`.
async fn with_drive(locked: bool) -> (Daemon, v1::Vm) {
    let folder = temporary_folder();
    for name in ["code", "template"] {
        fs::write(folder.path().join(name), [1; 4096]).unwrap();
    }
    let path = |name: &str| folder.path().join(name);
    let config = format!(
        "[firmware]\nuefi_code = {:?}\nuefi_variables = {:?}\n",
        path("code"),
        path("template")
    );
    let daemon = Daemon::in_folder(folder, &config).await;
    let mut vm = daemon.manifest("web", "");
    let spec = vm.spec.as_mut().unwrap();
    spec.boot = Some(v1::BootSpec {
        source: Some(Source::Firmware(FirmwareBoot::default())),
    });
    spec.disks = vec![v1::DiskSpec {
        name: "cd".into(),
        cdrom: true,
        serial: if locked { "locked" } else { "" }.into(),
        ..Default::default()
    }];
    let vm = daemon.run_vm(vm).await;
    (daemon, vm)
}

/// The change of the medium to a content.
fn change(content: Option<Content>, format: v1::DiskFormat) -> v1::UpdateVmRequest {
    let paths = ["path", "disk", "format", "beneath"].map(|field| format!("spec.disks[cd].{field}"));
    let paths = paths.each_ref().map(String::as_str);
    masked("web", &paths, |spec| {
        spec.disks = vec![v1::DiskSpec {
            name: "cd".into(),
            source: content,
            format: format.into(),
            ..Default::default()
        }];
    })
}

async fn update(daemon: &Daemon, request: v1::UpdateVmRequest) -> v1::Vm {
    daemon
        .client()
        .update_vm(request)
        .await
        .unwrap()
        .into_inner()
        .vm
        .unwrap()
}

/// Puts a file of this size into the drive.
async fn insert(daemon: &Daemon, name: &str, size: u64) -> v1::Vm {
    let path = daemon.path(name);
    fs::File::create(&path).unwrap().set_len(size).unwrap();
    let content = Content::Path(path.to_str().unwrap().to_owned());
    update(daemon, change(Some(content), v1::DiskFormat::Raw)).await
}

fn pending(vm: &v1::Vm) -> Vec<(String, String)> {
    let changes = vm.status.as_ref().unwrap().pending_changes.iter();
    let changes = changes.map(|change| (change.path.clone(), change.message.clone()));
    changes.collect()
}

/// Size of the medium, as the `vmm` has it.
async fn size(daemon: &Daemon) -> u64 {
    let request = v1::GetVmStatsRequest { name: "web".into() };
    let stats = daemon.client().get_vm_stats(request).await.unwrap().into_inner();
    stats.stats.unwrap().disks[0].capacity_bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn media_come_and_go_in_a_running_vm() {
    let (mut daemon, vm) = with_drive(false).await;
    let pid = vm_pid(&vm);
    assert_eq!(size(&daemon).await, 0);
    for bytes in [1 << 20, 2 << 20] {
        let vm = insert(&daemon, &format!("{bytes}.iso"), bytes).await;
        assert_eq!((pending(&vm), size(&daemon).await), (vec![], bytes));
    }
    daemon.kill_and_restart().await;
    assert_eq!(size(&daemon).await, 2 << 20);
    daemon.kill_vm("web").await.unwrap();
    daemon.start_vm("web").await.unwrap();
    assert_eq!(size(&daemon).await, 2 << 20);
    let vm = update(&daemon, change(None, v1::DiskFormat::Unspecified)).await;
    assert_eq!((pending(&vm), size(&daemon).await), (vec![], 0));
    assert_ne!(vm_pid(&vm), pid);
    let seen = vm.metadata.clone();
    // The same again changes nothing.
    let vm = update(&daemon, change(None, v1::DiskFormat::Unspecified)).await;
    assert_eq!(vm.metadata, seen);
}

#[tokio::test(flavor = "multi_thread")]
async fn managed_disk_is_held_while_it_is_a_medium() {
    let (daemon, _) = with_drive(false).await;
    daemon.make(raw("drivers", 1 << 20), None).await.unwrap();
    let content = named("drivers").source;
    let vm = update(&daemon, change(content, v1::DiskFormat::Unspecified)).await;
    assert_eq!((pending(&vm), size(&daemon).await), (vec![], 1 << 20));
    let delete = || v1::DeleteDiskRequest {
        name: "drivers".into(),
        ..Default::default()
    };
    let refused = daemon.disks().await.delete_disk(delete()).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "DISK_IN_USE");
    update(&daemon, change(None, v1::DiskFormat::Unspecified)).await;
    daemon.disks().await.delete_disk(delete()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn guest_that_prevents_removal_keeps_its_medium_until_forced() {
    let (daemon, _) = with_drive(true).await;
    let vm = insert(&daemon, "a.iso", 1 << 20).await;
    let left = pending(&vm);
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(left[0].0, "spec.disks[cd].format");
    assert!(left[0].1.contains("prevents the removal"), "{left:?}");
    assert_eq!(size(&daemon).await, 0);
    let path = daemon.path("a.iso").to_str().unwrap().to_owned();
    let mut forced = change(Some(Content::Path(path)), v1::DiskFormat::Raw);
    forced.force_media = true;
    let vm = update(&daemon, forced).await;
    assert_eq!((pending(&vm), size(&daemon).await), (vec![], 1 << 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_drives_can_be_empty() {
    let daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "");
    vm.spec.as_mut().unwrap().disks = vec![v1::DiskSpec {
        name: "root".into(),
        ..Default::default()
    }];
    vm.metadata = metadata_of("web");
    let refused = daemon.create(vm).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

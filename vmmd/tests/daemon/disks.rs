//! Disks of the node: made, listed, used, made larger, deleted.

use std::{
    fs,
    os::unix::fs::{FileExt, MetadataExt},
    path::PathBuf,
    time::Duration,
};

use rstest::rstest;
use tonic::{Code, Status};
use vmmd_api::v1::{
    self, DiskFormat, DiskPreallocation, DiskSpec, disk_service_client::DiskServiceClient,
    volume_spec::Source,
};

use crate::{
    attach::names,
    harness::{Daemon, assert_refused, assert_says, connect, metadata_of, refusal, status, temporary_folder},
    verbs::{fields, within},
};

impl Daemon {
    pub async fn make(&self, mut disk: v1::Disk, source: Option<Source>) -> Result<v1::Disk, Status> {
        disk.spec.get_or_insert_default().source = source;
        let request = v1::CreateDiskRequest {
            disk: Some(disk),
            ..Default::default()
        };
        let mut client = DiskServiceClient::new(connect(self.folder.path()).await);
        Ok(client.create_disk(request).await?.into_inner().disk.unwrap())
    }

    pub async fn disks(&self) -> DiskServiceClient<tonic::transport::Channel> {
        DiskServiceClient::new(connect(self.folder.path()).await)
    }

    pub async fn disk(&self, name: &str) -> Result<v1::Disk, Status> {
        let request = v1::GetDiskRequest { name: name.into() };
        let answer = self.disks().await.get_disk(request).await?;
        Ok(answer.into_inner().disk.unwrap())
    }

    pub async fn all_disks(&self) -> Vec<String> {
        let list = self
            .disks()
            .await
            .list_disks(v1::ListDisksRequest::default())
            .await;
        let disks = list.unwrap().into_inner().disks;
        disks
            .into_iter()
            .map(|disk| disk.metadata.unwrap().name)
            .collect()
    }

    pub async fn grow(&self, name: &str, size_bytes: u64) -> Result<v1::Disk, Status> {
        let request = v1::UpdateDiskRequest {
            disk: Some(raw(name, size_bytes)),
            update_mask: Some(vmmd_api::well_known::FieldMask {
                paths: vec!["spec.size_bytes".into()],
            }),
            ..Default::default()
        };
        let response = self.disks().await.update_disk(request).await?;
        Ok(response.into_inner().disk.unwrap())
    }

    pub async fn remove(&self, name: &str) -> Result<(), Status> {
        let request = v1::DeleteDiskRequest {
            name: name.into(),
            ..Default::default()
        };
        self.disks().await.delete_disk(request).await.map(drop)
    }

    async fn grow_in(&self, vm: &str, disk: &str, size_bytes: u64) -> Result<v1::Vm, Status> {
        let request = v1::ResizeVmDiskRequest {
            vm: vm.into(),
            disk: disk.into(),
            size_bytes: Some(size_bytes),
            ..Default::default()
        };
        let answer = self.client().resize_vm_disk(request).await?;
        Ok(answer.into_inner().vm.unwrap())
    }

    /// Files of disks, without the metadata files beside them.
    pub fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path("state/disks"))
            .into_iter()
            .flatten()
            .flatten();
        let files = entries.map(|entry| entry.path());
        let of_disk = |path: &PathBuf| {
            let extension = path.extension().and_then(|extension| extension.to_str());
            matches!(extension, Some("raw" | "qcow2"))
        };
        files.filter(of_disk).collect()
    }
}

/// Has the daemon in `folder` make a disk that is a copy of a file.
pub async fn copy_disk(folder: PathBuf, name: String, source: PathBuf) -> Result<(), Status> {
    let mut disk = raw(&name, 0);
    disk.spec.get_or_insert_default().source = Some(Source::RawFile(source.to_str().unwrap().into()));
    let request = v1::CreateDiskRequest {
        disk: Some(disk),
        ..Default::default()
    };
    let mut client = DiskServiceClient::new(connect(&folder).await);
    client.create_disk(request).await.map(drop)
}

pub fn raw(name: &str, size_bytes: u64) -> v1::Disk {
    v1::Disk {
        metadata: metadata_of(name),
        spec: Some(v1::VolumeSpec {
            size_bytes,
            ..Default::default()
        }),
        status: None,
    }
}

pub fn qcow2(name: &str, size_bytes: u64) -> v1::Disk {
    let mut disk = raw(name, size_bytes);
    disk.spec.as_mut().unwrap().format = DiskFormat::Qcow2.into();
    disk
}

fn full(name: &str, size_bytes: u64) -> v1::Disk {
    let mut disk = raw(name, size_bytes);
    disk.spec.as_mut().unwrap().preallocation = DiskPreallocation::Full.into();
    disk
}

fn path(disk: &v1::Disk) -> PathBuf {
    state(disk).path.clone().into()
}

pub fn state(disk: &v1::Disk) -> &v1::VolumeStatus {
    disk.status.as_ref().unwrap()
}

fn size(disk: &v1::Disk) -> u64 {
    disk.spec.as_ref().unwrap().size_bytes
}

fn format(disk: &v1::Disk) -> DiskFormat {
    disk.spec.as_ref().unwrap().format()
}

/// The disk of the DiskService as a VM has it.
pub fn named(disk: &str) -> DiskSpec {
    DiskSpec {
        name: "data".into(),
        source: Some(v1::disk_spec::Source::Disk(disk.into())),
        ..Default::default()
    }
}

#[tokio::test]
async fn an_empty_raw_disk_is_a_sparse_file_that_only_root_can_open() {
    let mut daemon = Daemon::start().await;
    let mut labelled = raw("data", 64 << 20);
    labelled.metadata.as_mut().unwrap().labels = [("tier".to_owned(), "db".to_owned())].into();
    let made = daemon.make(labelled, None).await.unwrap();
    assert_eq!((format(&made), size(&made)), (DiskFormat::Raw, 64 << 20));
    assert!(made.metadata.as_ref().unwrap().create_time.is_some(), "{made:?}");
    assert!(state(&made).allocated_bytes < 1 << 20, "{made:?}");
    assert_eq!(state(&made).phase(), v1::DiskPhase::Ready);
    let metadata = fs::metadata(path(&made)).unwrap();
    assert_eq!(
        (metadata.len(), metadata.uid(), metadata.mode() & 0o7777),
        (64 << 20, 0, 0o600)
    );
    let folder = fs::metadata(daemon.path("state/disks")).unwrap();
    assert_eq!(folder.mode() & 0o7777, 0o700);
    daemon.kill_and_restart().await;
    assert_eq!(daemon.disk("data").await.unwrap(), made);
    assert_eq!(daemon.all_disks().await, ["data"]);
    daemon.remove("data").await.unwrap();
    assert_eq!(daemon.files(), Vec::<PathBuf>::new());
    assert_refused(
        &daemon.disk("data").await.unwrap_err(),
        Code::NotFound,
        "DISK_NOT_FOUND",
    );
    assert_eq!(daemon.remove("data").await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn space_of_a_preallocated_disk_is_reserved_also_on_growth() {
    let daemon = Daemon::start().await;
    let made = daemon.make(full("data", 4 << 20), None).await.unwrap();
    assert!(state(&made).allocated_bytes >= 4 << 20);
    let grown = daemon.grow("data", 8 << 20).await.unwrap();
    assert!(state(&grown).allocated_bytes >= 8 << 20);
}

#[tokio::test]
async fn a_copy_has_the_content_and_the_holes_of_its_source() {
    let daemon = Daemon::start().await;
    let source = daemon.path("source.raw");
    let file = fs::File::options()
        .create_new(true)
        .write(true)
        .open(&source)
        .unwrap();
    file.set_len(64 << 20).unwrap();
    file.write_all_at(&[7; 9000], 3 << 20).unwrap();
    let from = || Some(Source::RawFile(source.to_str().unwrap().to_owned()));
    let made = daemon.make(raw("data", 0), from()).await.unwrap();
    assert_eq!(size(&made), 64 << 20);
    assert_eq!(fs::read(path(&made)).unwrap(), fs::read(&source).unwrap());
    assert!(state(&made).allocated_bytes < 1 << 20);
    let larger = daemon.make(raw("larger", 65 << 20), from()).await.unwrap();
    assert_eq!(fs::metadata(path(&larger)).unwrap().len(), 65 << 20);
    let smaller = daemon.make(raw("smaller", 1 << 20), from()).await.unwrap_err();
    assert_eq!(smaller.code(), Code::InvalidArgument);
    assert_says(&smaller, "67108864");
    assert_eq!((daemon.all_disks().await.len(), daemon.files().len()), (2, 2));
}

#[rstest]
#[case::missing("none", "DISK_NOT_FOUND", "does not exist")]
#[case::directory("state", "DISK_UNUSABLE", "is a directory")]
#[case::odd("odd", "DISK_SIZE_INVALID", "1000 bytes")]
#[tokio::test]
async fn a_source_that_cannot_be_copied_is_named_and_nothing_is_left(
    #[case] file: &str,
    #[case] reason: &str,
    #[case] words: &str,
) {
    let daemon = Daemon::start().await;
    fs::write(daemon.path("odd"), [0; 1000]).unwrap();
    let source = Some(Source::RawFile(daemon.path(file).to_str().unwrap().to_owned()));
    let refused = daemon.make(raw("data", 0), source).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, reason);
    assert!(refused.message().starts_with("rawFile: \"/") && refused.message().contains(words));
    assert_eq!((daemon.all_disks().await.len(), daemon.files().len()), (0, 0));
    daemon
        .make(raw("data", 512), None)
        .await
        .expect("the name is free");
}

#[tokio::test]
async fn a_file_that_a_vm_writes_to_is_not_copied() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let disk = crate::attach::disk(&daemon, "root");
    let source = Source::RawFile(disk.path().to_owned());
    daemon.attach("web", disk).await.unwrap();
    let refused = daemon.make(raw("data", 0), Some(source)).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "DISK_IN_USE");
    assert_says(&refused, "VM \"web\"");
}

#[tokio::test]
async fn images_are_made_by_a_child_without_rights() {
    let daemon = Daemon::start().await;
    let made = daemon.make(qcow2("data", 1 << 30), None).await.unwrap();
    assert!(
        path(&made)
            .extension()
            .is_some_and(|extension| extension == "qcow2")
    );
    let words = |disk: &v1::Disk| {
        let bytes = fs::read(path(disk)).unwrap();
        String::from_utf8(bytes[4096..].to_vec()).unwrap()
    };
    let text = words(&made);
    let network = fs::read_link("/proc/self/ns/net").unwrap();
    assert!(
        text.starts_with("net=net:[") && !text.contains(network.to_str().unwrap()),
        "{text}"
    );
    assert!(text.contains("caps=0000000000000000 below=0"), "{text}");
    let overlay = Source::OverlayOf("data".into());
    let top = daemon.make(raw("top", 0), Some(overlay)).await.unwrap();
    assert_eq!((format(&top), size(&top)), (DiskFormat::Qcow2, 1 << 30));
    assert_eq!(state(&top).backing_disk, "data");
    assert_eq!(state(&daemon.disk("data").await.unwrap()).overlays, ["top"]);
    assert!(words(&top).contains("below=1"));
}

#[rstest]
#[case::fails("image-fails", Code::ResourceExhausted, "NODE_DISK_FULL", "make room")]
#[case::is_missing("missing", Code::FailedPrecondition, "VMM_NOT_FOUND", "install vmmd again")]
#[tokio::test]
async fn an_image_that_cannot_be_made_leaves_nothing(
    #[case] program: &str,
    #[case] code: Code,
    #[case] reason: &str,
    #[case] words: &str,
) {
    let folder = temporary_folder();
    let image = folder.path().join(program);
    if program != "missing" {
        fs::copy(env!("CARGO_BIN_EXE_mock-vmm-image"), &image).unwrap();
    }
    let daemon = Daemon::in_folder(folder, &format!("vmm_image = {image:?}\n")).await;
    let refused = daemon.make(qcow2("data", 1 << 20), None).await.unwrap_err();
    assert_eq!(refusal(&refused), (code, reason.into()));
    assert_says(&refused, words);
    assert_eq!((daemon.all_disks().await.len(), daemon.files().len()), (0, 0));
}

#[tokio::test]
async fn remains_of_an_interrupted_create_are_removed() {
    let folder = temporary_folder();
    let image = folder.path().join("image-hangs");
    fs::copy(env!("CARGO_BIN_EXE_mock-vmm-image"), &image).unwrap();
    let mut daemon = Daemon::in_folder(folder, &format!("vmm_image = {image:?}\n")).await;
    daemon.make(raw("kept", 512), None).await.unwrap();
    for name in ["stranger.raw", "0f3a2f64-6c0e-4c57-9e5f-3f4f0e8f7a11.raw"] {
        fs::write(daemon.path("state/disks").join(name), "x").unwrap();
    }
    let mut client = daemon.disks().await;
    let under_way = tokio::spawn(async move {
        let request = v1::CreateDiskRequest {
            disk: Some(qcow2("data", 1 << 20)),
            ..Default::default()
        };
        client.create_disk(request).await
    });
    within(async || (daemon.files().len() == 4).then_some(())).await;
    daemon.kill_and_restart().await;
    assert!(under_way.await.unwrap().is_err());
    assert_eq!(daemon.all_disks().await, ["kept"]);
    assert_eq!(daemon.files().len(), 3, "{:?}", daemon.files());
    daemon
        .make(raw("data", 512), None)
        .await
        .expect("the name is free");
}

/// The daemon is killed at many moments of a create and a delete.
#[tokio::test]
async fn records_and_files_agree_whenever_the_daemon_is_killed() {
    let mut daemon = Daemon::start().await;
    for round in 0..16_u64 {
        let mut client = daemon.disks().await;
        let under_way = tokio::spawn(async move {
            let request = v1::CreateDiskRequest {
                disk: Some(qcow2("data", 1 << 20)),
                ..Default::default()
            };
            let made = client.create_disk(request).await.is_ok();
            let request = v1::DeleteDiskRequest {
                name: "data".into(),
                ..Default::default()
            };
            (made, client.delete_disk(request).await.is_ok())
        });
        // Not a wait for something: the moment of the kill is what varies.
        tokio::time::sleep(Duration::from_micros(round * 1500)).await;
        daemon.kill_and_restart().await;
        let (made, deleted) = under_way.await.unwrap();
        let there = daemon.all_disks().await;
        assert_eq!(there.len(), daemon.files().len(), "round {round}");
        if deleted {
            assert!(there.is_empty(), "round {round}");
        }
        if !there.is_empty() {
            assert_eq!(size(&daemon.disk("data").await.unwrap()), 1 << 20, "{made}");
            daemon.remove("data").await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_full_state_file_system_is_said_and_nothing_is_left() {
    let folder = temporary_folder();
    let state = folder.path().join("state");
    fs::create_dir(&state).unwrap();
    rustix::mount::mount(
        "tmpfs",
        &state,
        "tmpfs",
        rustix::mount::MountFlags::empty(),
        Some(c"size=16m"),
    )
    .unwrap();
    let daemon = Daemon::in_folder(folder, "").await;
    let source = daemon.path("source.raw");
    fs::write(&source, vec![1; 32 << 20]).unwrap();
    let copy = Some(Source::RawFile(source.to_str().unwrap().to_owned()));
    for (disk, source, words) in [
        (full("data", 1 << 30), None, "1073741824 bytes are to be reserved"),
        (raw("data", 0), copy, "is full"),
    ] {
        let refused = daemon.make(disk, source).await.unwrap_err();
        assert_refused(&refused, Code::ResourceExhausted, "NODE_DISK_FULL");
        assert_says(&refused, words);
        assert_eq!((daemon.all_disks().await.len(), daemon.files().len()), (0, 0));
    }
    // A disk that is larger than the free space is refused before it takes space from others. The
    // refusal names the free space.
    let refused = daemon.make(full("data", 1 << 30), None).await.unwrap_err();
    let stat = rustix::fs::statvfs(&state).unwrap();
    let free = stat.f_bavail * stat.f_frsize;
    let words = refused.message();
    let told = words
        .split_once(" has ")
        .and_then(|(_, rest)| rest.split_once(" bytes free"));
    let told: u64 = told.unwrap().0.parse().unwrap();
    // The daemon writes a little itself all the time.
    assert!(told.abs_diff(free) < 1 << 20, "{words}: {free}");
    // A sparse disk may exceed the free space, with a warning, but not the file system.
    let refused = daemon.make(raw("data", 1 << 30), None).await.unwrap_err();
    assert_refused(&refused, Code::ResourceExhausted, "NODE_DISK_FULL");
    assert_says(&refused, "1073741824 bytes are more than the whole file system");
    assert_eq!(daemon.events("DiskLargerThanFree").await.len(), 0);
    daemon.make(raw("data", 16 << 20), None).await.unwrap();
    let [warning] = daemon.events("DiskLargerThanFree").await.try_into().unwrap();
    assert_eq!(warning.object.unwrap().name, "data");
    assert!(
        warning.message.contains("may take 16777216 bytes more"),
        "{}",
        warning.message
    );
    let refused = daemon.grow("data", 1 << 30).await.unwrap_err();
    assert_refused(&refused, Code::ResourceExhausted, "NODE_DISK_FULL");
    drop(daemon);
    rustix::mount::unmount(&state, rustix::mount::UnmountFlags::DETACH).unwrap();
}

#[tokio::test]
async fn a_second_disk_of_the_same_name_is_refused() {
    let daemon = Daemon::start().await;
    daemon.make(raw("data", 512), None).await.unwrap();
    let refused = daemon.make(raw("data", 512), None).await.unwrap_err();
    assert_refused(&refused, Code::AlreadyExists, "DISK_EXISTS");
    let wrong = daemon.make(v1::Disk::default(), None).await.unwrap_err();
    assert_eq!(fields(&wrong), ["disk.metadata.name", "disk.spec.sizeBytes"]);
}

#[tokio::test]
async fn a_disk_is_used_by_name_and_kept_while_a_spec_names_it() {
    let mut daemon = Daemon::start().await;
    daemon.make(qcow2("data-1", 1 << 20), None).await.unwrap();
    let vm = daemon
        .run_with("web", "", |spec| spec.disks = vec![named("data-1")])
        .await;
    let told = &status(&vm).disks[0];
    assert_eq!(told.capacity_bytes, Some(1 << 20));
    assert!(told.path.contains("/state/disks/"), "{told:?}");
    for _ in 0..2 {
        let refused = daemon.remove("data-1").await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "DISK_IN_USE");
        assert_says(&refused, "VM \"web\"");
        assert_eq!(state(&daemon.disk("data-1").await.unwrap()).used_by, ["web"]);
        daemon.kill_and_restart().await;
    }
    daemon.detach("web", "data", 5000, false).await.unwrap();
    daemon.remove("data-1").await.unwrap();
    // References to a missing disk are refused.
    let refused = daemon.attach("web", named("data-1")).await.unwrap_err();
    assert_refused(&refused, Code::NotFound, "DISK_NOT_FOUND");
    let vm = daemon.manifest_with("other", "", |spec| spec.disks = vec![named("data-1")]);
    let refused = daemon.create(vm).await.unwrap_err();
    assert!(
        refused
            .message()
            .starts_with("spec.disks[0].disk: there is no disk"),
        "{}",
        refused.message()
    );
    assert_eq!(daemon.list().await.len(), 1);
}

#[tokio::test]
async fn a_spec_has_the_format_of_a_disk_that_it_names() {
    let format = |vm: &v1::Vm, at: usize| vm.spec.as_ref().unwrap().disks[at].format();
    let mut daemon = Daemon::start().await;
    daemon.make(qcow2("data-1", 1 << 20), None).await.unwrap();
    daemon.make(raw("data-2", 1 << 20), None).await.unwrap();
    let vm = daemon.manifest_with("web", "", |spec| spec.disks = vec![named("data-1")]);
    let made = daemon.create(vm).await.unwrap();
    assert_eq!(format(&made, 0), DiskFormat::Qcow2);
    let second = DiskSpec {
        name: "second".into(),
        ..named("data-2")
    };
    daemon.start_vm("web").await.unwrap();
    let vm = daemon.attach("web", second.clone()).await.unwrap();
    assert_eq!(format(&vm, 1), DiskFormat::Raw);
    daemon.kill_and_restart().await;
    // With and without it, it is the same disk, and another format is not.
    for said in [DiskFormat::Unspecified, DiskFormat::Raw] {
        let again = DiskSpec {
            format: said.into(),
            ..second.clone()
        };
        let vm = daemon.attach("web", again).await.unwrap();
        assert_eq!(
            (vm.spec.as_ref().unwrap().disks.len(), format(&vm, 1)),
            (2, DiskFormat::Raw)
        );
    }
    let other = DiskSpec {
        format: DiskFormat::Qcow2.into(),
        ..second
    };
    let refused = daemon.attach("web", other).await.unwrap_err();
    assert_refused(&refused, Code::AlreadyExists, "DISK_EXISTS");
}

#[tokio::test]
async fn a_deleted_vm_and_a_failed_create_let_go_of_their_disks() {
    let daemon = Daemon::start().await;
    daemon.make(raw("data-1", 4096), None).await.unwrap();
    for _ in 0..2 {
        let vm = daemon.manifest_with("web", "", |spec| spec.disks = vec![named("data-1")]);
        daemon.create(vm.clone()).await.unwrap();
        let second = daemon.create(vm.clone()).await.unwrap_err();
        assert_refused(&second, Code::AlreadyExists, "VM_EXISTS");
        assert_eq!(state(&daemon.disk("data-1").await.unwrap()).used_by, ["web"]);
        daemon.start_vm("web").await.unwrap();
        daemon.delete("web", true).await.unwrap();
        daemon.create_as(vm, false, true).await.unwrap();
        assert!(state(&daemon.disk("data-1").await.unwrap()).used_by.is_empty());
    }
    daemon.remove("data-1").await.unwrap();
}

#[tokio::test]
async fn a_disk_has_one_writer_and_what_is_below_an_overlay_has_none() {
    let daemon = Daemon::start().await;
    daemon.make(raw("base", 1 << 20), None).await.unwrap();
    daemon.run("first", "").await;
    daemon.run("second", "").await;
    daemon.attach("first", named("base")).await.unwrap();
    let refused = daemon.attach("second", named("base")).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "DISK_IN_USE");
    assert_says(&refused, "VM \"first\"");
    let overlay = || Some(Source::OverlayOf("base".into()));
    let refused = daemon.make(raw("top", 0), overlay()).await.unwrap_err();
    assert_says(&refused, "VM \"first\"");
    daemon.detach("first", "data", 5000, false).await.unwrap();
    daemon
        .attach("second", named("base"))
        .await
        .expect("it is free again");
    daemon.detach("second", "data", 5000, false).await.unwrap();
    daemon.make(raw("top", 0), overlay()).await.unwrap();
    daemon.make(raw("other", 0), overlay()).await.unwrap();
    // Overlays of the same disk run at once; the disk itself can only be read, not changed or deleted.
    daemon.attach("first", named("top")).await.unwrap();
    daemon.attach("second", named("other")).await.unwrap();
    let third = DiskSpec {
        name: "third".into(),
        ..named("base")
    };
    let refusals = [
        daemon.attach("first", third.clone()).await.unwrap_err(),
        daemon.remove("base").await.unwrap_err(),
        daemon.grow("base", 2 << 20).await.unwrap_err(),
    ];
    for refused in refusals {
        assert_refused(&refused, Code::FailedPrecondition, "DISK_HAS_OVERLAYS");
        assert_says(&refused, "\"other\", \"top\"");
    }
    let reader = DiskSpec {
        read_only: true,
        ..third
    };
    let vm = daemon.attach("first", reader).await.unwrap();
    assert_eq!(names(&vm), ["data", "third"]);
}

#[rstest]
#[case::raw(raw("data-1", 1 << 20))]
#[case::qcow2(qcow2("data-1", 1 << 20))]
#[tokio::test]
async fn a_disk_grows_unused_in_a_stopped_and_in_a_running_vm(#[case] disk: v1::Disk) {
    let mut daemon = Daemon::start().await;
    daemon.make(disk, None).await.unwrap();
    assert_eq!(size(&daemon.grow("data-1", 2 << 20).await.unwrap()), 2 << 20);
    let vm = daemon.manifest_with("web", "", |spec| spec.disks = vec![named("data-1")]);
    daemon.create(vm).await.unwrap();
    let capacity = |vm: &v1::Vm| status(vm).disks[0].capacity_bytes;
    assert_eq!(size(&daemon.grow("data-1", 3 << 20).await.unwrap()), 3 << 20);
    assert_eq!(
        capacity(&daemon.grow_in("web", "data", 4 << 20).await.unwrap()),
        Some(4 << 20)
    );
    daemon.start_vm("web").await.unwrap();
    daemon
        .wait("web", |status| status.disks[0].capacity_bytes == Some(4 << 20))
        .await;
    assert_eq!(daemon.stats("web").await.unwrap()[0].capacity_bytes, 4 << 20);
    assert_eq!(size(&daemon.grow("data-1", 5 << 20).await.unwrap()), 5 << 20);
    assert_eq!(
        capacity(&daemon.grow_in("web", "data", 6 << 20).await.unwrap()),
        Some(6 << 20)
    );
    assert_eq!(daemon.stats("web").await.unwrap()[0].capacity_bytes, 6 << 20);
    assert_eq!(size(&daemon.disk("data-1").await.unwrap()), 6 << 20);
    daemon
        .grow("data-1", 6 << 20)
        .await
        .expect("the same size is no error");
    for refused in [
        daemon.grow("data-1", 1 << 20).await.unwrap_err(),
        daemon.grow_in("web", "data", 1 << 20).await.unwrap_err(),
    ] {
        assert_refused(&refused, Code::InvalidArgument, "SHRINK_REFUSED");
        let words = refused.message();
        assert!(words.contains("1048576") && words.contains("6291456"), "{words}");
    }
    for odd in [0, 1000, u64::MAX] {
        assert_eq!(
            daemon.grow_in("web", "data", odd).await.unwrap_err().code(),
            Code::InvalidArgument
        );
        assert_eq!(
            daemon.grow("data-1", odd).await.unwrap_err().code(),
            Code::InvalidArgument
        );
    }
    daemon.kill_and_restart().await;
    assert_eq!(size(&daemon.disk("data-1").await.unwrap()), 6 << 20);
}

#[tokio::test]
async fn a_plain_file_grows_too_and_a_read_only_disk_does_not() {
    let daemon = Daemon::start().await;
    let disk = crate::attach::disk(&daemon, "root");
    let reader = DiskSpec {
        name: "reader".into(),
        read_only: true,
        ..crate::attach::disk(&daemon, "other")
    };
    let vm = daemon.manifest_with("web", "", |spec| spec.disks = vec![disk, reader]);
    daemon.create(vm).await.unwrap();
    daemon.grow_in("web", "root", 8192).await.unwrap();
    assert_eq!(fs::metadata(daemon.path("root.raw")).unwrap().len(), 8192);
    let refused = daemon.grow_in("web", "root", 4096).await.unwrap_err();
    assert_refused(&refused, Code::InvalidArgument, "SHRINK_REFUSED");
    daemon.start_vm("web").await.unwrap();
    daemon.grow_in("web", "root", 16384).await.unwrap();
    assert_eq!(fs::metadata(daemon.path("root.raw")).unwrap().len(), 16384);
    let refused = daemon.grow_in("web", "reader", 1 << 20).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "DISK_READ_ONLY");
    let refused = daemon.grow_in("web", "none", 1 << 20).await.unwrap_err();
    assert_refused(&refused, Code::NotFound, "DISK_NOT_FOUND");
}

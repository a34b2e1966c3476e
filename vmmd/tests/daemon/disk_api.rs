//! The DiskService as a client sees it: operations, updates, lists, watches, and disks of files that were there.

use std::{collections::BTreeMap, fs, path::PathBuf};

use WatchEventType::{Added, Deleted, Modified, Synced};
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::{Code, Status, Streaming};
use vmmd_api::{
    v1::{
        self, DiskPhase, OperationPhase, UpdateDiskRequest, WatchDisksRequest, WatchDisksResponse,
        WatchEventType, volume_spec::Source,
    },
    well_known::FieldMask,
};

use crate::{
    attach::disk as file_disk,
    disks::{qcow2, raw, state},
    harness::{Daemon, PATIENCE, assert_refused, assert_says, refusal, temporary_folder},
    verbs::{fields, within},
};

/// A daemon of which `vmm-image` never ends.
async fn with_images_that_hang() -> Daemon {
    let folder = temporary_folder();
    let program = folder.path().join("image-hangs");
    fs::copy(env!("CARGO_BIN_EXE_mock-vmm-image"), &program).unwrap();
    Daemon::in_folder(folder, &format!("vmm_image = {program:?}\n")).await
}

impl Daemon {
    async fn begin_disk(&self, disk: v1::Disk) -> (v1::Disk, v1::Operation) {
        let request = v1::CreateDiskRequest {
            disk: Some(disk),
            no_wait: true,
            ..Default::default()
        };
        let answer = self.disks().await.create_disk(request).await.unwrap();
        let response = answer.into_inner();
        (response.disk.unwrap(), response.operation.unwrap())
    }

    async fn change_disk(&self, request: UpdateDiskRequest) -> Result<v1::Disk, Status> {
        let response = self.disks().await.update_disk(request).await?;
        Ok(response.into_inner().disk.unwrap())
    }

    async fn watch_disks(&self, request: WatchDisksRequest) -> Result<Streaming<WatchDisksResponse>, Status> {
        Ok(self.disks().await.watch_disks(request).await?.into_inner())
    }

    async fn watch_disks_from(&self, cursor: &str) -> Streaming<WatchDisksResponse> {
        let request = WatchDisksRequest {
            cursor: cursor.into(),
            ..Default::default()
        };
        self.watch_disks(request).await.unwrap()
    }

    /// Makes a disk of a file of the daemon's folder.
    async fn adopt(&self, name: &str, file: &str) -> Result<v1::Disk, Status> {
        self.make(raw(name, 0), Some(Source::Adopt(file.to_owned())))
            .await
    }

    /// Ends the daemon, removes its store and starts it again, as after a reinstallation.
    async fn forget_everything(&mut self) {
        self.kill();
        fs::remove_file(self.path("state/vmmd.redb")).unwrap();
        self.relaunch().await;
    }
}

fn labelled(name: &str, labels: &[(&str, &str)]) -> UpdateDiskRequest {
    let mut disk = raw(name, 0);
    let labels = labels
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    disk.metadata.as_mut().unwrap().labels = labels.collect();
    UpdateDiskRequest {
        disk: Some(disk),
        update_mask: mask(&["metadata.labels"]),
        ..Default::default()
    }
}

fn mask(paths: &[&str]) -> Option<FieldMask> {
    let paths = paths.iter().map(|path| (*path).to_owned()).collect();
    Some(FieldMask { paths })
}

fn metadata(disk: &v1::Disk) -> &v1::ObjectMetadata {
    disk.metadata.as_ref().unwrap()
}

fn expecting(uid: &str, generation: Option<u64>) -> Option<v1::Preconditions> {
    Some(v1::Preconditions {
        uid: uid.to_owned(),
        generation,
    })
}

/// Kinds and names up to SYNCED, and the cursor of that.
async fn catch_up(events: &mut Streaming<WatchDisksResponse>) -> (Vec<(WatchEventType, String)>, String) {
    let mut all = Vec::new();
    loop {
        let event = events.next().await.unwrap().unwrap();
        if event.r#type() == Synced {
            return (all, event.cursor);
        }
        all.push((event.r#type(), metadata(&event.disk.unwrap()).name.clone()));
    }
}

/// Waits until the watch says this of a disk; the event.
async fn until(
    events: &mut Streaming<WatchDisksResponse>,
    wanted: impl Fn(WatchEventType, &v1::Disk) -> bool,
) -> WatchDisksResponse {
    let looking = async {
        loop {
            let event = events.next().await.unwrap().unwrap();
            if event
                .disk
                .as_ref()
                .is_some_and(|disk| wanted(event.r#type(), disk))
            {
                return event;
            }
        }
    };
    timeout(PATIENCE, looking).await.unwrap()
}

#[tokio::test]
async fn a_disk_is_made_by_an_operation_whose_cancel_leaves_nothing() {
    let daemon = with_images_that_hang().await;
    let (disk, operation) = daemon.begin_disk(qcow2("data", 1 << 20)).await;
    assert_eq!(state(&disk).phase(), DiskPhase::Creating);
    assert_eq!(state(&disk).operation, operation.id);
    assert_eq!(state(&disk).conditions[0].status(), v1::ConditionStatus::False);
    // The disk is visible, but neither usable nor deletable.
    assert_eq!(daemon.disk("data").await.unwrap(), disk);
    for refused in [
        daemon.remove("data").await.unwrap_err(),
        daemon.grow("data", 2 << 20).await.unwrap_err(),
    ] {
        assert_refused(&refused, Code::FailedPrecondition, "DISK_NOT_READY");
    }
    within(async || (!daemon.files().is_empty()).then_some(())).await;
    let cancelled = daemon.cancel(&operation.id).await.unwrap();
    assert_eq!(cancelled.phase(), OperationPhase::Cancelled);
    assert_eq!(
        refusal(&daemon.disk("data").await.unwrap_err()).1,
        "DISK_NOT_FOUND"
    );
    assert_eq!(fs::read_dir(daemon.path("state/disks")).unwrap().count(), 0);
    daemon.wait_no_processes().await;
    daemon
        .make(raw("data", 512), None)
        .await
        .expect("the name is free");
}

#[tokio::test]
async fn an_operation_goes_on_when_its_caller_goes_away() {
    let daemon = with_images_that_hang().await;
    let begun = async {
        loop {
            // For a moment its name is taken, and nothing has begun yet.
            match daemon.disk("data").await {
                Ok(disk) if !state(&disk).operation.is_empty() => return disk,
                _ => {}
            }
        }
    };
    let disk = tokio::select! {
        made = daemon.make(qcow2("data", 1 << 20), None) => panic!("{made:?}"),
        disk = timeout(PATIENCE, begun) => disk.unwrap(),
    };
    let id = state(&disk).operation.clone();
    let goes_on = async {
        loop {
            match daemon.operation(&id).await.phase() {
                OperationPhase::Pending => {}
                phase => return phase,
            }
        }
    };
    let phase = timeout(PATIENCE, goes_on).await.unwrap();
    assert_eq!(phase, OperationPhase::InProgress);
    daemon.cancel(&id).await.unwrap();
}

#[tokio::test]
async fn the_progress_of_a_copy_moves_and_never_back() {
    let daemon = Daemon::start().await;
    let source = daemon.path("source.raw");
    fs::write(&source, vec![1; 96 << 20]).unwrap();
    let mut disk = raw("data", 0);
    disk.spec.as_mut().unwrap().source = Some(Source::RawFile(source.to_str().unwrap().to_owned()));
    // Reserved space is not shared with the source: every byte is copied.
    disk.spec.as_mut().unwrap().preallocation = v1::DiskPreallocation::Full.into();
    let (_, operation) = daemon.begin_disk(disk).await;
    let mut client = daemon.operations().await;
    let request = v1::WatchOperationRequest { id: operation.id };
    let stream = client.watch_operation(request).await.unwrap().into_inner();
    let seen: Vec<_> = stream
        .map(|seen| seen.unwrap().operation.unwrap())
        .collect()
        .await;
    let percents: Vec<_> = seen
        .iter()
        .map(|seen| seen.progress.map_or(0, |progress| progress.percent))
        .collect();
    assert!(percents.is_sorted(), "{percents:?}");
    let last = seen.last().unwrap();
    assert_eq!(
        (last.r#type.as_str(), last.phase()),
        ("disk.create", OperationPhase::Completed)
    );
    assert_eq!(percents.last(), Some(&100));
    assert_eq!(last.target.as_ref().unwrap().name, "data");
    assert_eq!(
        state(&daemon.disk("data").await.unwrap()).phase(),
        DiskPhase::Ready
    );
}

#[tokio::test]
async fn an_update_changes_what_is_in_its_mask_and_counts() {
    let mut daemon = Daemon::start().await;
    let made = daemon.make(raw("data", 1 << 20), None).await.unwrap();
    assert_eq!(metadata(&made).generation, 1);
    let mut request = labelled("data", &[("tier", "db")]);
    request.disk.as_mut().unwrap().metadata.as_mut().unwrap().owner = "me".into();
    let changed = daemon.change_disk(request).await.unwrap();
    assert_eq!(metadata(&changed).labels["tier"], "db");
    assert_eq!(
        (metadata(&changed).owner.as_str(), metadata(&changed).generation),
        ("", 2)
    );
    // The same again is no change.
    let same = daemon
        .change_disk(labelled("data", &[("tier", "db")]))
        .await
        .unwrap();
    assert_eq!(metadata(&same).generation, 2);
    let mut both = labelled("data", &[]);
    both.update_mask = mask(&["metadata.labels", "metadata.annotations", "spec.size_bytes"]);
    let disk = both.disk.as_mut().unwrap();
    disk.spec.as_mut().unwrap().size_bytes = 2 << 20;
    disk.metadata.as_mut().unwrap().annotations = [("a".to_owned(), "b".to_owned())].into();
    let grown = daemon.change_disk(both).await.unwrap();
    assert_eq!(grown.spec.as_ref().unwrap().size_bytes, 2 << 20);
    assert!(metadata(&grown).labels.is_empty() && metadata(&grown).annotations["a"] == "b");
    assert_eq!(metadata(&grown).generation, 4);
    for (paths, field) in [(&[][..], "updateMask"), (&["spec.format"], "updateMask.paths[0]")] {
        let request = UpdateDiskRequest {
            update_mask: mask(paths),
            ..labelled("data", &[])
        };
        let refused = daemon.change_disk(request).await.unwrap_err();
        assert_eq!(
            (refused.code(), fields(&refused)[0].as_str()),
            (Code::InvalidArgument, field)
        );
    }
    let shrunk = daemon.grow("data", 512).await.unwrap_err();
    assert_eq!(
        (refusal(&shrunk), fields(&shrunk)[0].as_str()),
        (
            (Code::InvalidArgument, "SHRINK_REFUSED".into()),
            "disk.spec.sizeBytes"
        )
    );
    daemon.kill_and_restart().await;
    assert_eq!(metadata(&daemon.disk("data").await.unwrap()), metadata(&grown));
}

#[tokio::test]
async fn a_late_change_does_not_hit_a_successor_of_the_same_name() {
    let mut daemon = Daemon::start().await;
    let first = daemon.make(raw("data", 512), None).await.unwrap();
    daemon.change_disk(labelled("data", &[("a", "b")])).await.unwrap();
    daemon.remove("data").await.unwrap();
    daemon.kill_and_restart().await;
    let second = daemon.make(raw("data", 512), None).await.unwrap();
    let generation = metadata(&second).generation;
    assert!(generation > 2, "generations never restart: {generation}");
    let old = &metadata(&first).uid;
    let refused = daemon
        .change_disk(UpdateDiskRequest {
            preconditions: expecting(old, None),
            ..labelled("data", &[])
        })
        .await
        .unwrap_err();
    assert_refused(&refused, Code::Aborted, "UID_MISMATCH");
    for (preconditions, reason) in [
        (expecting(old, None), "UID_MISMATCH"),
        (expecting("", Some(1)), "GENERATION_MISMATCH"),
    ] {
        let request = v1::DeleteDiskRequest {
            name: "data".into(),
            preconditions,
            ..Default::default()
        };
        let refused = daemon.disks().await.delete_disk(request).await.unwrap_err();
        assert_refused(&refused, Code::Aborted, reason);
    }
    let request = v1::DeleteDiskRequest {
        name: "data".into(),
        preconditions: expecting(&metadata(&second).uid, Some(generation)),
        ..Default::default()
    };
    daemon.disks().await.delete_disk(request).await.unwrap();
}

#[tokio::test]
async fn a_list_has_pages_bounded_by_number_and_by_length() {
    let daemon = Daemon::start().await;
    for number in 0..24 {
        let mut disk = raw(&format!("d{number:02}"), 512);
        let metadata = disk.metadata.as_mut().unwrap();
        metadata.labels = [("even".to_owned(), (number % 2 == 0).to_string())].into();
        metadata.annotations = [("long".to_owned(), "x".repeat(60 << 10))].into();
        daemon.make(disk, None).await.unwrap();
    }
    let pages = async |filter: v1::ObjectFilter, page_size| {
        let mut request = v1::ListDisksRequest {
            filter: Some(filter),
            page_size,
            ..Default::default()
        };
        let (mut names, mut lengths) = (Vec::new(), Vec::new());
        loop {
            let answer = daemon.disks().await.list_disks(request.clone()).await.unwrap();
            let page = answer.into_inner();
            lengths.push(page.disks.len());
            names.extend(page.disks.iter().map(|disk| metadata(disk).name.clone()));
            if page.next_page_token.is_empty() {
                return (names, lengths);
            }
            request.page_token = page.next_page_token;
        }
    };
    let (all, lengths) = pages(v1::ObjectFilter::default(), 0).await;
    assert_eq!((all.len(), all.is_sorted()), (24, true));
    // 17 of them are 1 MiB.
    assert_eq!(lengths, [17, 7]);
    let even = v1::ObjectFilter {
        labels: vec!["even=true".into()],
        ..Default::default()
    };
    let (even, lengths) = pages(even, 5).await;
    assert_eq!((even.len(), lengths), (12, vec![5, 5, 2]));
    let request = v1::ListDisksRequest {
        page_token: "x".into(),
        ..Default::default()
    };
    let refused = daemon.disks().await.list_disks(request).await.unwrap_err();
    assert_eq!(fields(&refused)[0], "pageToken");
}

#[tokio::test]
async fn a_watcher_sees_what_is_there_and_then_what_happens() {
    let daemon = Daemon::start().await;
    daemon.make(raw("there", 512), None).await.unwrap();
    let mut events = daemon.watch_disks_from("").await;
    assert_eq!(catch_up(&mut events).await.0, [(Added, "there".to_owned())]);
    daemon.make(raw("new", 512), None).await.unwrap();
    let ready = |disk: &v1::Disk| state(disk).phase() == DiskPhase::Ready;
    until(&mut events, |_, disk| metadata(disk).name == "new" && ready(disk)).await;
    let vm = daemon.manifest_with("web", "", |spec| spec.disks = vec![crate::disks::named("there")]);
    daemon.create(vm).await.unwrap();
    until(&mut events, |kind, disk| {
        kind == Modified && state(disk).used_by == ["web"]
    })
    .await;
    daemon.delete("web", true).await.unwrap();
    until(&mut events, |kind, disk| {
        kind == Modified && state(disk).used_by.is_empty()
    })
    .await;
    daemon.grow("there", 1024).await.unwrap();
    until(&mut events, |_, disk| {
        disk.spec.as_ref().unwrap().size_bytes == 1024 && ready(disk)
    })
    .await;
    daemon.remove("new").await.unwrap();
    until(&mut events, |kind, disk| {
        kind == Deleted && metadata(disk).name == "new"
    })
    .await;
    let request = WatchDisksRequest {
        filter: Some(v1::ObjectFilter {
            labels: vec!["tier=db".into()],
            ..Default::default()
        }),
        ..Default::default()
    };
    let mut filtered = daemon.watch_disks(request).await.unwrap();
    assert_eq!(catch_up(&mut filtered).await.0, []);
    daemon
        .change_disk(labelled("there", &[("tier", "db")]))
        .await
        .unwrap();
    until(&mut filtered, |kind, _| kind == Added).await;
    daemon.change_disk(labelled("there", &[])).await.unwrap();
    until(&mut filtered, |kind, _| kind == Deleted).await;
}

#[tokio::test]
async fn a_watch_goes_on_by_its_cursor_also_under_another_daemon() {
    let mut daemon = Daemon::start().await;
    for name in ["kept", "changed", "deleted"] {
        daemon.make(raw(name, 512), None).await.unwrap();
    }
    let mut events = daemon.watch_disks_from("").await;
    let (there, cursor) = catch_up(&mut events).await;
    assert_eq!(there.len(), 3);
    daemon
        .change_disk(labelled("changed", &[("a", "b")]))
        .await
        .unwrap();
    daemon.remove("deleted").await.unwrap();
    daemon.make(raw("new", 512), None).await.unwrap();
    let expected: BTreeMap<_, _> = [("changed", Modified), ("deleted", Deleted), ("new", Added)]
        .map(|(name, kind)| (name.to_owned(), kind))
        .into();
    let missed = async |daemon: &Daemon, cursor: &str| {
        let (told, cursor) = catch_up(&mut daemon.watch_disks_from(cursor).await).await;
        let told: BTreeMap<_, _> = told.into_iter().map(|(kind, name)| (name, kind)).collect();
        (told, cursor)
    };
    let (told, later) = missed(&daemon, &cursor).await;
    assert_eq!(told, expected);
    assert_eq!(missed(&daemon, &later).await.0, BTreeMap::new());
    daemon.kill_and_restart().await;
    // After a restart, the daemon does not know which of the existing disks have changed.
    let (mut told, _) = missed(&daemon, &cursor).await;
    assert_eq!(told.remove("kept"), Some(Modified));
    assert_eq!(told, expected);
    let (told, _) = missed(&daemon, &later).await;
    assert!(told.values().all(|kind| *kind == Modified), "{told:?}");
    // Those of VMs and of other filters are refused.
    let vms = daemon
        .client()
        .list_vms(v1::ListVmsRequest::default())
        .await
        .unwrap();
    let cursor = vms.into_inner().cursor;
    let request = WatchDisksRequest {
        cursor,
        ..Default::default()
    };
    let refused = daemon.watch_disks(request).await.unwrap_err();
    assert_eq!(fields(&refused)[0], "cursor");
    let other = Daemon::start().await;
    let request = WatchDisksRequest {
        cursor: later,
        ..Default::default()
    };
    let refused = other.watch_disks(request).await.unwrap_err();
    assert_refused(&refused, Code::OutOfRange, "CURSOR_EXPIRED");
}

#[tokio::test]
async fn files_of_an_earlier_installation_become_disks_again() {
    let mut daemon = Daemon::start().await;
    let mut base = qcow2("base", 1 << 20);
    base.metadata.as_mut().unwrap().labels = [("tier".to_owned(), "db".to_owned())].into();
    let base = daemon.make(base, None).await.unwrap();
    let top = daemon
        .make(raw("top", 0), Some(Source::OverlayOf("base".into())))
        .await
        .unwrap();
    let plain = daemon.make(raw("plain", 4096), None).await.unwrap();
    let path = |disk: &v1::Disk| state(disk).path.clone();
    daemon.forget_everything().await;
    assert_eq!(daemon.files().len(), 3, "nothing was touched");
    let told = daemon.told_exactly("DisksWithoutRecord", 1).await;
    assert!(told[0].message.contains("\"plain\""), "{told:?}");
    // The backing disk must be adopted first.
    let refused = daemon.adopt("", &path(&top)).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "BACKING_DISK_MISSING");
    let again = daemon.adopt("", &path(&base)).await.unwrap();
    assert_eq!(metadata(&again).uid, metadata(&base).uid);
    assert_eq!(
        (
            metadata(&again).name.as_str(),
            metadata(&again).labels["tier"].as_str()
        ),
        ("base", "db")
    );
    assert_eq!(again.spec.as_ref().unwrap().size_bytes, 1 << 20);
    let overlay = daemon.adopt("other-name", &path(&top)).await.unwrap();
    assert_eq!(
        (
            metadata(&overlay).name.as_str(),
            state(&overlay).backing_disk.as_str()
        ),
        ("other-name", "base")
    );
    let refused = daemon.adopt("twin", &path(&base)).await.unwrap_err();
    assert_refused(&refused, Code::AlreadyExists, "DISK_EXISTS");
    let refused = daemon.adopt("base", &path(&plain)).await.unwrap_err();
    assert_refused(&refused, Code::AlreadyExists, "DISK_EXISTS");
    daemon.adopt("", &path(&plain)).await.unwrap();
    daemon.kill_and_restart().await;
    assert_eq!(daemon.files().len(), 3);
    assert_eq!(daemon.disk("plain").await.unwrap().spec.unwrap().size_bytes, 4096);
    // All have one.
    daemon.told_exactly("DisksWithoutRecord", 1).await;
    // Without the metadata file, a name is required.
    daemon.forget_everything().await;
    fs::remove_file(PathBuf::from(path(&plain)).with_extension("json")).unwrap();
    let refused = daemon.adopt("", &path(&plain)).await.unwrap_err();
    assert_eq!(fields(&refused)[0], "disk.metadata.name");
    daemon.adopt("plain", &path(&plain)).await.unwrap();
}

#[tokio::test]
async fn only_files_that_the_daemon_left_are_adopted() {
    let daemon = Daemon::start().await;
    daemon.make(raw("data", 512), None).await.unwrap();
    let own = |name: &str| daemon.path("state/disks").join(name);
    let uid = "0f3a2f64-6c0e-4c57-9e5f-3f4f0e8f7a11";
    fs::write(daemon.path(&format!("{uid}.raw")), [0; 512]).unwrap();
    fs::write(own("stranger.raw"), [0; 512]).unwrap();
    fs::write(own(&format!("{uid}.qcow2")), [0; 512]).unwrap();
    fs::write(own("1f3a2f64-6c0e-4c57-9e5f-3f4f0e8f7a11.raw"), [0; 100]).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", own("2f3a2f64-6c0e-4c57-9e5f-3f4f0e8f7a11.raw")).unwrap();
    for (file, words) in [
        (
            daemon.path(&format!("{uid}.raw")),
            "in the folder of the daemon's disks",
        ),
        (own("stranger.raw"), "is not the name of a disk's file"),
        (own(&format!("{uid}.qcow2")), "is no qcow2 image"),
        (own("1f3a2f64-6c0e-4c57-9e5f-3f4f0e8f7a11.raw"), "100 bytes"),
        (
            own("2f3a2f64-6c0e-4c57-9e5f-3f4f0e8f7a11.raw"),
            "is not a regular file",
        ),
        (own("3f3a2f64-6c0e-4c57-9e5f-3f4f0e8f7a11.raw"), "does not exist"),
    ] {
        let refused = daemon.adopt("new", file.to_str().unwrap()).await.unwrap_err();
        assert!(
            refused.message().contains(words),
            "{file:?}: {}",
            refused.message()
        );
    }
    assert!(own("stranger.raw").exists() && own(&format!("{uid}.qcow2")).exists());
    daemon
        .make(raw("new", 512), None)
        .await
        .expect("the name is free");
}

#[tokio::test]
async fn image_of_another_format_is_copied_as_raw_only_on_request() {
    let daemon = Daemon::start().await;
    let source = daemon.path("source");
    let mut content = vec![0; 4096];
    content[..4].copy_from_slice(b"QFI\xfb");
    fs::write(&source, &content).unwrap();
    let from = || Some(Source::RawFile(source.to_str().unwrap().to_owned()));
    let refused = daemon.make(raw("data", 0), from()).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "IMAGE_FORMAT_MISMATCH");
    assert_says(&refused, "is a qcow2 image");
    assert_eq!(daemon.files(), Vec::<PathBuf>::new());
    let mut meant = raw("data", 0);
    meant.spec.as_mut().unwrap().any_content = true;
    let made = daemon.make(meant, from()).await.unwrap();
    assert_eq!(fs::read(&state(&made).path).unwrap(), content);
}

#[tokio::test]
async fn vm_answers_while_its_disk_grows_and_its_start_waits() {
    let daemon = with_images_that_hang().await;
    let image = v1::DiskSpec {
        format: v1::DiskFormat::Qcow2.into(),
        ..file_disk(&daemon, "root")
    };
    let vm = daemon.manifest_with("web", "", |spec| spec.disks = vec![image]);
    daemon.create(vm).await.unwrap();
    let mut client = daemon.client();
    let growing = tokio::spawn(async move {
        let request = v1::ResizeVmDiskRequest {
            vm: "web".into(),
            disk: "root".into(),
            size_bytes: Some(1 << 20),
            ..Default::default()
        };
        client.resize_vm_disk(request).await
    });
    daemon.wait_process().await;
    timeout(PATIENCE, daemon.attach("web", file_disk(&daemon, "data")))
        .await
        .expect("another request waits for the disk")
        .unwrap();
    daemon.start_without_wait("web").await;
    assert_eq!(daemon.vmm_processes().len(), 1, "the one that makes it larger");
    // The start that waits can be ended.
    timeout(PATIENCE, daemon.kill_vm("web"))
        .await
        .expect("a stop by force waits for the disk")
        .unwrap();
    daemon.delete("web", false).await.unwrap();
    growing.await.unwrap().unwrap_err();
}

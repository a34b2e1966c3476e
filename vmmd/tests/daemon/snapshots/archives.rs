//! Snapshots that go to another node, or come from anywhere.

use std::{fs, io::Write as _, os::unix::fs::MetadataExt as _};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};
use vmmd_api::v1::{
    self, export_snapshot_response::Message as Exported, import_snapshot_request::Message as Imported,
    volume_spec,
};

use super::{content, with_disk, with_image};
use crate::{
    console::Client,
    disks::raw,
    harness::{Daemon, assert_refused, assert_says, refusal},
    images::of_path,
    verbs::within,
};

/// Length of the header before the first part.
const BEGIN: usize = 16;
const RECORD: u32 = 1;
const FILE: u32 = 2;
const DATA: u32 = 3;
const END: u32 = 4;

impl Daemon {
    async fn begin_export(&self, name: &str) -> Result<Streaming<v1::ExportSnapshotResponse>, Status> {
        let request = v1::ExportSnapshotRequest { name: name.into() };
        let answer = self.snapshots().await.export_snapshot(request).await?;
        Ok(answer.into_inner())
    }

    pub(super) async fn export_snapshot(&self, name: &str) -> Result<Vec<u8>, Status> {
        let mut stream = self.begin_export(name).await?;
        let Some(Exported::Open(open)) = stream.message().await?.unwrap().message else {
            panic!("it does not begin with what is exported");
        };
        assert_eq!(open.snapshot.unwrap().metadata.unwrap().name, name);
        rest(stream).await
    }

    pub(super) async fn import_snapshot(&self, name: &str, archive: &[u8]) -> Result<v1::Snapshot, Status> {
        self.import_as(name, archive, "").await
    }

    async fn import_as(&self, name: &str, archive: &[u8], id: &str) -> Result<v1::Snapshot, Status> {
        let pieces = archive.chunks(100_000).map(data);
        let messages: Vec<_> = [open(name, id)].into_iter().chain(pieces).collect();
        let stream = tokio_stream::iter(messages);
        let answer = self.snapshots().await.import_snapshot(stream).await?;
        Ok(answer.into_inner().snapshot.unwrap())
    }

    pub(super) async fn delete_snapshot(&self, name: &str) -> Result<(), Status> {
        let request = v1::DeleteSnapshotRequest {
            name: name.into(),
            ..Default::default()
        };
        self.snapshots().await.delete_snapshot(request).await.map(drop)
    }

    /// Begins an import, and sends a part of an archive.
    async fn half_imported(&self, archive: &[u8]) -> Half {
        let (sender, receiver) = mpsc::channel(16);
        let mut client = self.snapshots().await;
        let answer = tokio::spawn(async move { client.import_snapshot(ReceiverStream::new(receiver)).await });
        sender.send(open("half", "")).await.unwrap();
        sender.send(data(&archive[..archive.len() / 2])).await.unwrap();
        self.wait_snapshot_files(2).await;
        Half { sender, answer }
    }

    async fn under_way(&self) -> Vec<v1::Operation> {
        let all = v1::ListOperationsRequest::default();
        let listed = self.operations().await.list_operations(all).await;
        let mut listed = listed.unwrap().into_inner().operations;
        listed.retain(|operation| {
            let phase = operation.phase();
            phase == v1::OperationPhase::Pending || phase == v1::OperationPhase::InProgress
        });
        listed
    }

    /// Waits until nothing is left of a snapshot, also of its name.
    async fn nothing_left(&self) {
        within(async || {
            let nothing = self.snapshot_files().is_empty() && self.under_way().await.is_empty();
            nothing.then_some(())
        })
        .await;
        assert!(self.snapshot_names().await.is_empty());
    }
}

/// An import that waits for more.
struct Half {
    sender: mpsc::Sender<v1::ImportSnapshotRequest>,
    answer: tokio::task::JoinHandle<Result<tonic::Response<v1::ImportSnapshotResponse>, Status>>,
}

fn open(name: &str, id: &str) -> v1::ImportSnapshotRequest {
    v1::ImportSnapshotRequest {
        message: Some(Imported::Open(v1::ImportSnapshotOpen {
            name: name.into(),
            size_bytes: 0,
        })),
        request_id: id.into(),
    }
}

fn data(bytes: &[u8]) -> v1::ImportSnapshotRequest {
    v1::ImportSnapshotRequest {
        message: Some(Imported::Data(bytes.to_vec())),
        ..Default::default()
    }
}

async fn rest(mut stream: Streaming<v1::ExportSnapshotResponse>) -> Result<Vec<u8>, Status> {
    let mut archive = Vec::new();
    while let Some(message) = stream.message().await? {
        match message.message {
            Some(Exported::Data(data)) => archive.extend(data),
            other => panic!("{other:?}"),
        }
    }
    Ok(archive)
}

/// Kind and content of each part.
pub(super) type Parts = Vec<(u32, Vec<u8>)>;

/// The parts of an archive.
pub(super) fn parts(archive: &[u8]) -> Parts {
    let (mut parts, mut rest) = (Vec::new(), &archive[BEGIN..]);
    while let Some((header, behind)) = rest.split_first_chunk::<8>() {
        let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let (content, behind) = behind.split_at(number(4) as usize);
        parts.push((number(0), content.to_vec()));
        rest = &behind[4..];
    }
    assert!(rest.is_empty());
    parts
}

/// An archive of these parts, whose checksums are right.
pub(super) fn sealed(parts: &[(u32, Vec<u8>)]) -> Vec<u8> {
    let mut archive = b"vmmdsnapshot\x01\0\0\0".to_vec();
    let mut checksum = crc32c::crc32c(&archive);
    for (kind, content) in parts {
        let length = u32::try_from(content.len()).unwrap().to_le_bytes();
        let part = [&kind.to_le_bytes(), &length, content.as_slice()].concat();
        checksum = crc32c::crc32c_append(checksum, &part);
        archive.extend(part);
        archive.extend(checksum.to_le_bytes());
    }
    archive
}

async fn exported() -> Vec<u8> {
    let daemon = Daemon::start().await;
    with_disk(&daemon).await;
    daemon.snapshot("one", "web", true).await.unwrap();
    daemon.export_snapshot("one").await.unwrap()
}

#[tokio::test]
async fn exported_snapshot_is_restored_as_a_new_vm_on_another_node() {
    let (here, there) = (Daemon::start().await, Daemon::start().await);
    with_disk(&here).await;
    let taken = here.snapshot("one", "web", true).await.unwrap();
    let archive = here.export_snapshot("one").await.unwrap();
    assert_eq!(sealed(&parts(&archive)), archive);
    let kinds: Vec<_> = parts(&archive).into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, [RECORD, FILE, DATA, FILE, DATA, END]);

    let imported = there.import_snapshot("", &archive).await.unwrap();
    let (before, after) = (taken.metadata.unwrap(), imported.metadata.clone().unwrap());
    assert_eq!((after.name.as_str(), after.uid == before.uid), ("one", false));
    assert_eq!(imported.spec, taken.spec);
    assert_eq!(imported.status, taken.status);
    there.told_exactly("SnapshotImported", 1).await;
    let vm = there.restore("one", "copy", false).await.unwrap();
    let disk = &vm.spec.unwrap().disks[0];
    assert_eq!((disk.name.as_str(), disk.disk()), ("root", "copy-root"));
    assert_eq!(content(&there.raw_disks()[0]), "until the snapshot");
    let mut console = Client::open(&there, "copy").await;
    console.expect("restored from snapshot of web\r\n").await;

    let again = there.import_snapshot("", &archive).await.unwrap_err();
    assert_refused(&again, Code::AlreadyExists, "SNAPSHOT_EXISTS");
    there.import_snapshot("two", &archive).await.unwrap();
    assert_eq!(there.snapshot_names().await, ["one", "two"]);
    let nameless = there.import_snapshot("No Name", &archive).await.unwrap_err();
    assert_eq!(nameless.code(), Code::InvalidArgument);
    // Another export is equal except for the name.
    let again = there.export_snapshot("two").await.unwrap();
    assert_eq!(parts(&again)[1..], parts(&archive)[1..]);
    let none = there.export_snapshot("three").await.unwrap_err();
    assert_refused(&none, Code::NotFound, "SNAPSHOT_NOT_FOUND");
}

#[tokio::test]
async fn a_vm_goes_on_from_its_snapshot_that_was_away() {
    let daemon = Daemon::start().await;
    let image = with_disk(&daemon).await;
    daemon.snapshot("one", "web", true).await.unwrap();
    let archive = daemon.export_snapshot("one").await.unwrap();
    daemon.delete_snapshot("one").await.unwrap();
    daemon.kill_vm("web").await.unwrap();
    assert_eq!(content(&image), "behind the snapshot");
    daemon.import_snapshot("", &archive).await.unwrap();
    daemon.restore("one", "", false).await.unwrap();
    assert_eq!(content(&image), "until the snapshot");
}

#[tokio::test]
async fn holes_stay_holes() {
    let (here, there) = (Daemon::start().await, Daemon::start().await);
    with_image(&here, "", |image| image.set_len(8 << 30).unwrap()).await;
    here.snapshot("one", "web", true).await.unwrap();
    let archive = here.export_snapshot("one").await.unwrap();
    assert!(archive.len() < 300_000, "{}", archive.len());
    there.import_snapshot("", &archive).await.unwrap();
    let files = there.snapshot_files();
    let disk = files.iter().find(|path| path.extension().unwrap() == "disk");
    let disk = fs::metadata(disk.unwrap()).unwrap();
    assert_eq!(disk.len(), 8 << 30);
    assert!(disk.blocks() * 512 < 1 << 20);
}

#[tokio::test]
async fn truncated_or_changed_archive_is_refused_and_leaves_nothing() {
    let archive = exported().await;
    let daemon = Daemon::start().await;
    let mut ends = vec![BEGIN];
    for (_, content) in parts(&archive) {
        ends.push(ends.last().unwrap() + 8 + content.len() + 4);
    }
    assert_eq!(ends.pop(), Some(archive.len()));
    let mut wrong = vec![Vec::new(), [archive.as_slice(), b"x"].concat()];
    for at in ends {
        // Before the part, in its header, in its content, in its checksum.
        for length in [at, at + 5, at + 9] {
            wrong.push(archive[..length].to_vec());
        }
        for byte in [at - 1, at, at + 4, at + 8] {
            let mut changed = archive.clone();
            changed[byte] ^= 1;
            wrong.push(changed);
        }
    }
    for archive in wrong {
        let refused = daemon.import_snapshot("", &archive).await.unwrap_err();
        assert_refused(&refused, Code::InvalidArgument, "ARCHIVE_DAMAGED");
        assert_says(&refused, "at byte");
        daemon.nothing_left().await;
    }
}

#[tokio::test]
async fn inconsistent_archive_is_refused_and_leaves_nothing() {
    let archive = exported().await;
    let daemon = Daemon::start().await;
    let with = |change: &dyn Fn(&mut Parts)| {
        let mut parts = parts(&archive);
        change(&mut parts);
        sealed(&parts)
    };
    let file = |number: u32, length: u64| {
        let content = [number.to_le_bytes().as_slice(), &length.to_le_bytes()].concat();
        (FILE, content)
    };
    let mut long = archive[..BEGIN + 8].to_vec();
    long[BEGIN + 4..].fill(0xff);
    for (reason, archive) in [
        ("ARCHIVE_DAMAGED", long),
        ("ARCHIVE_DAMAGED", with(&|parts| parts.swap(1, 3))),
        ("ARCHIVE_DAMAGED", with(&|parts| drop(parts.remove(0)))),
        ("ARCHIVE_DAMAGED", with(&|parts| parts[2].1[7] = 0x80)),
        ("ARCHIVE_DAMAGED", with(&|parts| parts[4].1[1] = 1)),
        ("ARCHIVE_INVALID", with(&|parts| parts[1] = file(0, u64::MAX))),
        ("ARCHIVE_INVALID", with(&|parts| parts[3] = file(1, 8192))),
        ("ARCHIVE_INVALID", with(&|parts| drop(parts.drain(3..5)))),
        ("ARCHIVE_INVALID", with(&|parts| parts.insert(5, file(2, 1)))),
        (
            "ARCHIVE_INVALID",
            with(&|parts| parts[0].1 = b"no record".to_vec()),
        ),
        // A field that no version has yet.
        (
            "ARCHIVE_INVALID",
            with(&|parts| parts[0].1.extend([0xf8, 0x3f, 1])),
        ),
    ] {
        let refused = daemon.import_snapshot("", &archive).await.unwrap_err();
        assert_refused(&refused, Code::InvalidArgument, reason);
        daemon.nothing_left().await;
    }
}

#[tokio::test]
async fn archive_without_disk_space_is_refused_before_its_data() {
    let mut parts = parts(&exported().await);
    // The last field of the record says how much room the files take: number 13, a varint.
    let record = &mut parts[0].1;
    let field = record.iter().rposition(|byte| *byte == 13 << 3).unwrap();
    record.truncate(field + 1);
    record.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]);
    let daemon = Daemon::start().await;
    let refused = daemon.import_snapshot("", &sealed(&parts)).await.unwrap_err();
    assert_refused(&refused, Code::ResourceExhausted, "NODE_DISK_FULL");
    daemon.nothing_left().await;
}

#[tokio::test]
async fn an_import_begins_with_what_it_is_and_has_data_then() {
    let daemon = Daemon::start().await;
    for messages in [vec![], vec![data(b"x")], vec![open("", ""), open("", "")]] {
        let stream = tokio_stream::iter(messages);
        let refused = daemon
            .snapshots()
            .await
            .import_snapshot(stream)
            .await
            .unwrap_err();
        assert_refused(&refused, Code::InvalidArgument, "INVALID_FIELDS");
    }
    daemon.nothing_left().await;
}

#[tokio::test]
async fn an_import_that_is_cancelled_or_left_leaves_nothing() {
    let archive = exported().await;
    let mut daemon = Daemon::start().await;

    let half = daemon.half_imported(&archive).await;
    let operation = daemon.under_way().await.pop().unwrap();
    assert_eq!(operation.r#type, "snapshot.import");
    let taken = daemon.import_snapshot("half", &archive).await.unwrap_err();
    assert_refused(&taken, Code::AlreadyExists, "SNAPSHOT_EXISTS");
    daemon.cancel(&operation.id).await.unwrap();
    let cancelled = half.answer.await.unwrap().unwrap_err();
    assert_refused(&cancelled, Code::Aborted, "CANCELLED");
    daemon.nothing_left().await;

    let half = daemon.half_imported(&archive).await;
    half.answer.abort();
    drop(half.sender);
    daemon.nothing_left().await;

    let half = daemon.half_imported(&archive).await;
    daemon.kill_and_restart().await;
    assert!(half.answer.await.unwrap().is_err());
    daemon.nothing_left().await;
    daemon.told_exactly("Repaired", 1).await;
    daemon.import_snapshot("half", &archive).await.unwrap();
}

#[tokio::test]
async fn an_import_with_an_id_is_made_once() {
    let archive = exported().await;
    let mut daemon = Daemon::start().await;
    let made = daemon.import_as("", &archive, "import").await.unwrap();
    assert_eq!(daemon.import_as("", &archive, "import").await.unwrap(), made);
    let other = daemon.import_as("two", &archive, "import").await.unwrap_err();
    assert_refused(&other, Code::AlreadyExists, "REQUEST_ID_REUSED");
    daemon.kill_and_restart().await;
    assert_eq!(daemon.import_as("", &archive, "import").await.unwrap(), made);
    daemon.delete_snapshot("one").await.unwrap();
    let refused = daemon.import_as("", &archive, "import").await.unwrap_err();
    assert_eq!(refusal(&refused), crate::request::gone());
}

/// Bytes of RAM of the daemon.
fn resident(daemon: &Daemon) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.pid().as_raw_nonzero())).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

#[tokio::test]
async fn a_client_that_stops_reading_costs_nothing_and_is_given_up() {
    const SIZE: usize = 128 << 20;
    let daemon = Daemon::start().await;
    with_image(&daemon, "", |image| image.write_all(&vec![7; SIZE]).unwrap()).await;
    daemon.snapshot("one", "web", true).await.unwrap();
    let before = resident(&daemon);
    let stream = daemon.begin_export("one").await.unwrap();
    // Another one is not held up, and nothing else is.
    let archive = daemon.export_snapshot("one").await.unwrap();
    assert!(archive.len() > SIZE);
    drop(archive);
    assert_eq!(daemon.snapshot_names().await, ["one"]);
    let more = resident(&daemon).saturating_sub(before);
    assert!(more < 32 << 20, "{more} bytes");
    let refused = daemon.delete_snapshot("one").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "SNAPSHOT_IN_USE");
    // With a short patience, the daemon gives the export up, and reports this to a client that
    // reads on.
    drop(stream);
    daemon.fault("export-patience");
    let mut stream = daemon.begin_export("one").await.unwrap();
    within(async || {
        let refused = daemon.delete_snapshot("one").await.err();
        if let Some(refused) = &refused {
            assert_eq!(refusal(refused).1, "SNAPSHOT_IN_USE");
        }
        refused.is_none().then_some(())
    })
    .await;
    stream.message().await.unwrap().unwrap();
    let stalled = rest(stream).await.unwrap_err();
    assert_refused(&stalled, Code::DeadlineExceeded, "EXPORT_STALLED");
}

#[tokio::test]
async fn a_disk_that_another_vm_has_by_now_is_not_put_back() {
    let daemon = Daemon::start().await;
    daemon.make(raw("data", 4096), None).await.unwrap();
    daemon.run_vm(with_named(&daemon, "web", "data")).await;
    daemon.snapshot("one", "web", true).await.unwrap();
    daemon.kill_vm("web").await.unwrap();
    daemon.detach("web", "root", 0, false).await.unwrap();
    daemon.create(with_named(&daemon, "other", "data")).await.unwrap();
    let refused = daemon.restore("one", "", false).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "DISK_IN_USE");
}

/// Makes an image of a content that is always the same.
async fn import_image(daemon: &Daemon, name: &str) {
    let path = daemon.path("golden.raw");
    fs::write(&path, vec![5; 8192]).unwrap();
    daemon.import(of_path(name, &path)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn imported_overlay_uses_the_image_of_the_other_node() {
    let (here, there) = (Daemon::start().await, Daemon::start().await);
    import_image(&here, "base").await;
    let of_image = volume_spec::Source::Image(v1::ImageClone {
        name: "base".into(),
        clone: v1::DiskClone::Overlay.into(),
    });
    here.make(raw("over", 0), Some(of_image)).await.unwrap();
    here.run_vm(with_named(&here, "web", "over")).await;
    here.snapshot("one", "web", true).await.unwrap();
    let archive = here.export_snapshot("one").await.unwrap();

    let missing = there.import_snapshot("", &archive).await.unwrap_err();
    assert_refused(&missing, Code::NotFound, "IMAGE_NOT_FOUND");
    there.nothing_left().await;
    import_image(&there, "other").await;
    there.import_snapshot("", &archive).await.unwrap();
    let used = there.remove_image("other").await.unwrap_err();
    assert_refused(&used, Code::FailedPrecondition, "IMAGE_IN_USE");
    there.restore("one", "copy", false).await.unwrap();
    let disk = there.disk("copy-root").await.unwrap();
    assert_eq!(disk.status.unwrap().backing_image, "other");
}

/// A VM with a disk of the DiskService.
fn with_named(daemon: &Daemon, name: &str, disk: &str) -> v1::Vm {
    daemon.manifest_with(name, "", |spec| {
        spec.disks.push(v1::DiskSpec {
            name: "root".into(),
            source: Some(v1::disk_spec::Source::Disk(disk.into())),
            cache: v1::DiskCache::Writeback.into(),
            ..Default::default()
        });
    })
}

#[tokio::test]
async fn a_disk_that_is_an_overlay_of_another_one_is_not_exported() {
    let daemon = Daemon::start().await;
    daemon.make(raw("base", 4096), None).await.unwrap();
    let below = volume_spec::Source::OverlayOf("base".into());
    daemon.make(raw("over", 0), Some(below)).await.unwrap();
    daemon.run_vm(with_named(&daemon, "web", "over")).await;
    daemon.snapshot("one", "web", true).await.unwrap();
    let refused = daemon.export_snapshot("one").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "SNAPSHOT_OVERLAY");
    daemon.delete_snapshot("one").await.unwrap();
}

//! Disks that go along.

use std::{
    cell::Cell,
    io,
    os::unix::fs::MetadataExt,
    sync::{Arc, Mutex},
};

use block::{
    Access, Content, Extent, Image, Operation, Qcow2Image, RawImage,
    content::PIECE,
    qcow2::create::{self, CreateOptions, Preallocation},
};
use devices::virtio::blk::{Blk, BlkOptions, OnError};
use rstest::rstest;
use vmm_base::sys::Iovecs;

use super::*;

/// Bytes of the disk: its last block is not whole.
const SIZE: u64 = (6 << 20) + 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Raw,
    Qcow2,
}

/// An image, and its file.
fn image(format: Format, size: u64) -> (Box<dyn Image>, File) {
    let file = tempfile::tempfile().unwrap();
    let same = file.try_clone().unwrap();
    match format {
        Format::Raw => {
            file.set_len(size).unwrap();
            (Box::new(RawImage::open(file.into(), false).unwrap()), same)
        }
        Format::Qcow2 => {
            let options = CreateOptions {
                size,
                cluster_size: create::CLUSTER_SIZE,
                preallocation: Preallocation::Off,
                backing: None,
            };
            create::create(file.try_clone().unwrap(), options).unwrap();
            let image = Qcow2Image::open(file.into(), false, Vec::new()).unwrap();
            (Box::new(image), same)
        }
    }
}

fn content_of(image: &dyn Image) -> Content {
    Content::new(image.access().unwrap(), image.capacity()).unwrap()
}

fn all_of(content: &mut Content) -> Vec<u8> {
    let (mut all, mut piece) = (Vec::new(), Vec::new());
    while (all.len() as u64) < content.capacity() {
        let start = all.len() as u64;
        content
            .read(&(start..content.capacity().min(start + PIECE)), &mut piece)
            .unwrap();
        all.extend(&piece);
    }
    all
}

/// A disk that a guest writes to, without the guest.
struct Guest {
    blk: Blk,
    content: Content,
}

fn options() -> BlkOptions {
    BlkOptions {
        name: "root".into(),
        serial: String::new(),
        queues: 1,
        logical_block: 512,
        on_error: OnError::Report,
        limiter: None,
    }
}

impl Guest {
    fn new(format: Format) -> Self {
        let (image, _) = image(format, SIZE);
        let mut content = content_of(&*image);
        content.write(0, &[1; 512]).unwrap();
        content.write(1 << 20, &vec![2; 300 << 10]).unwrap();
        content.write(SIZE - 512, &[3; 512]).unwrap();
        let blk = Blk::new(image, options());
        Self { blk, content }
    }

    fn mirrored(&self) -> Mirrored {
        Mirrored {
            name: "root".into(),
            mirror: self.blk.control().mirror().unwrap(),
        }
    }
}

/// The stream of a machine with that disk, which changes meanwhile.
fn stream(guest: &mut Guest) -> Vec<u8> {
    stream_with(guest, Duration::MAX)
}

/// The same when so long nothing may be sent.
fn stream_with(guest: &mut Guest, quiet: Duration) -> Vec<u8> {
    let (near, far) = UnixStream::pair().unwrap();
    let reading = thread::spawn(move || {
        let (mut bytes, mut far) = (Vec::new(), far);
        far.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let memory = memory();
    put(&memory, 0, 1);
    let mirrored = guest.mirrored();
    let changes = Arc::clone(mirrored.mirror.changes());
    let mut sender = Box::new(Sender::new(
        File::from(OwnedFd::from(near)),
        &memory,
        vec![mirrored],
    ));
    sender.quiet = quiet;
    let told = Cell::new((1, 0));
    sender
        .disks(&|done, total| told.set((done, total)), ALWAYS)
        .unwrap();
    assert_eq!(told.get(), (0, SIZE));
    assert_eq!(
        sender.written().disks,
        4096 + (300 << 10) + 512,
        "blocks of zeroes are left out"
    );
    sender.everything(&memory, ALWAYS).unwrap();
    guest.content.clear(1 << 20, 4096).unwrap();
    changes.mark(1 << 20, 4096);
    guest.content.write(5 << 20, &[4; 8192]).unwrap();
    changes.mark(5 << 20, 8192);
    assert_eq!(sender.changed_on_disks(), 3 * 4096);
    sender.disk_changes(ALWAYS).unwrap();
    assert_eq!(sender.changed_on_disks(), 0);
    sender.finish(&info(), machine(), ALWAYS).unwrap();
    reading.join().unwrap()
}

#[rstest]
fn disk_arrives_with_later_changes_in_any_format(
    #[values(Format::Raw, Format::Qcow2)] from: Format,
    #[values(Format::Raw, Format::Qcow2)] to: Format,
    #[values(Duration::MAX, Duration::ZERO)] quiet: Duration,
) {
    let mut guest = Guest::new(from);
    let bytes = stream_with(&mut guest, quiet);
    let (image, file) = image(to, SIZE);
    let mut disks = [ReceivedDisk::new("root", content_of(&*image))];
    receive(bytes.as_slice(), &memory(), &mut disks, None, &mut |_| Ok(())).unwrap();
    let [received] = &mut disks;
    let (wanted, found) = (all_of(&mut guest.content), all_of(&mut received.content));
    assert!(wanted == found, "the disk is another");
    let allocated = file.metadata().unwrap().blocks() * 512;
    assert!(allocated < 2 << 20, "{allocated} bytes of a sparse disk");
}

#[test]
fn a_disk_is_on_stable_storage_when_the_machine_was_received() {
    let bytes = stream(&mut Guest::new(Format::Raw));
    let log = Arc::new(Mutex::new(Vec::new()));
    let access = Logged(Arc::clone(&log));
    let content = Content::new(Box::new(access), SIZE).unwrap();
    receive(
        bytes.as_slice(),
        &memory(),
        &mut [ReceivedDisk::new("root", content)],
        None,
        &mut |_| Ok(()),
    )
    .unwrap();
    let log = log.lock().unwrap();
    assert!(
        log.iter().filter(|what| **what == "write").count() >= 4,
        "{log:?}"
    );
    assert_eq!(log.last(), Some(&"flush"), "{log:?}");
}

/// Records the operations.
struct Logged(Arc<Mutex<Vec<&'static str>>>);

impl Access for Logged {
    fn execute(&mut self, operation: Operation, _buffers: &mut Iovecs) -> io::Result<()> {
        let what = match operation {
            Operation::Flush => "flush",
            Operation::Write { .. } => "write",
            _ => "other",
        };
        self.0.lock().unwrap().push(what);
        Ok(())
    }

    fn extent(&self, _offset: u64) -> io::Result<Extent> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[test]
fn a_target_without_room_refuses_with_the_name_of_the_disk() {
    let bytes = stream(&mut Guest::new(Format::Raw));
    let content = Content::new(Box::new(Full), SIZE).unwrap();
    let error = receive(
        bytes.as_slice(),
        &memory(),
        &mut [ReceivedDisk::new("root", content)],
        None,
        &mut |_| Ok(()),
    )
    .unwrap_err();
    assert_eq!(error.to_string(), "writing disk root");
    let failure = crate::lifecycle::Failure::from(error);
    assert_eq!(failure.kind, vmm_protocol::vmm::ErrorKind::Resources);
}

/// A file system without room.
struct Full;

impl Access for Full {
    fn execute(&mut self, _operation: Operation, _buffers: &mut Iovecs) -> io::Result<()> {
        Err(io::ErrorKind::StorageFull.into())
    }

    fn extent(&self, _offset: u64) -> io::Result<Extent> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[test]
fn other_disks_than_expected_are_refused() {
    let bytes = stream(&mut Guest::new(Format::Raw));
    let refused = |disks: &[(&str, u64)]| {
        let mut disks: Vec<_> = disks
            .iter()
            .map(|(name, size)| ReceivedDisk::new(*name, content_of(&*image(Format::Raw, *size).0)))
            .collect();
        receive(bytes.as_slice(), &memory(), &mut disks, None, &mut |_| Ok(()))
            .unwrap_err()
            .to_string()
    };
    assert!(refused(&[]).contains("a disk that does not come along"));
    assert!(refused(&[("data", SIZE)]).contains("another disk than was expected"));
    assert!(refused(&[("root", SIZE + 512)]).contains("disk root has 6291968 bytes instead of 6292480"));
    assert!(refused(&[("root", SIZE), ("data", SIZE)]).contains("a disk before it is missing"));
}

#[test]
fn frames_of_disks_that_no_sender_sends_are_refused() {
    let named = |number: u32, size: u64, name: &str| {
        [&number.to_le_bytes()[..], &size.to_le_bytes(), name.as_bytes()].concat()
    };
    let blocks = |number: u32, offset: u64, data: &[u8]| {
        [&number.to_le_bytes()[..], &offset.to_le_bytes(), data].concat()
    };
    let cleared = |offset: u64, length: u64| blocks(0, offset, &length.to_le_bytes());
    let too_much = vec![1; usize::try_from(PIECE).unwrap() + 512];
    let root = (Kind::Disk, named(0, 8192, "root"));
    let section = prost::Message::encode_to_vec(&Section::new("snapshot", &info()));
    for (frames, why) in [
        (vec![(Kind::Disk, vec![0; 3])], "no number"),
        (vec![(Kind::Disk, vec![0; 11])], "no size"),
        (vec![(Kind::Disk, named(1, 8192, "root"))], "does not come along"),
        (vec![root.clone(), root.clone()], "does not come along"),
        (vec![(Kind::Blocks, blocks(0, 0, &[1; 512]))], "part of no disk"),
        (
            vec![root.clone(), (Kind::Blocks, blocks(1, 0, &[1; 512]))],
            "part of no disk",
        ),
        (vec![root.clone(), (Kind::Blocks, vec![0; 11])], "no offset"),
        (
            vec![root.clone(), (Kind::Blocks, blocks(0, 0, &[]))],
            "no whole sectors",
        ),
        (
            vec![root.clone(), (Kind::Blocks, blocks(0, 1, &[1; 512]))],
            "no whole sectors",
        ),
        (
            vec![root.clone(), (Kind::Blocks, blocks(0, 8192, &[1; 512]))],
            "beyond the end",
        ),
        (
            vec![root.clone(), (Kind::Blocks, blocks(0, u64::MAX - 511, &[1; 512]))],
            "beyond the end",
        ),
        (
            vec![root.clone(), (Kind::Blocks, blocks(0, 0, &too_much))],
            "more of a disk than",
        ),
        (
            vec![root.clone(), (Kind::Cleared, blocks(0, 0, &[0; 7]))],
            "no length",
        ),
        (
            vec![root.clone(), (Kind::Cleared, cleared(0, 0))],
            "no whole sectors",
        ),
        (
            vec![root.clone(), (Kind::Cleared, cleared(0, u64::MAX - 511))],
            "more of a disk than",
        ),
        (
            vec![root.clone(), (Kind::Cleared, cleared(4096, 8192))],
            "beyond the end",
        ),
        (
            vec![(Kind::Section, section), root.clone()],
            "a disk after the machine's state",
        ),
        (
            vec![(Kind::End, 1_u64.to_le_bytes().to_vec())],
            "a disk before it is missing",
        ),
    ] {
        let (image, _) = image(Format::Raw, 8192);
        let mut disks = [ReceivedDisk::new("root", content_of(&*image))];
        let bytes = beginning_with(&frames);
        let error = receive(bytes.as_slice(), &memory(), &mut disks, None, &mut |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains(why), "{why}: {error}");
    }
}

#[test]
fn a_terabyte_of_nothing_is_not_sent() {
    let (image, _) = image(Format::Raw, 1 << 40);
    let blk = Blk::new(image, options());
    let (near, _far) = UnixStream::pair().unwrap();
    let disks = vec![Mirrored {
        name: "root".into(),
        mirror: blk.control().mirror().unwrap(),
    }];
    let mut sender = Sender::new(File::from(OwnedFd::from(near)), &memory(), disks);
    let asked = Cell::new(0);
    let go_on = || {
        asked.set(asked.get() + 1);
        Ok(())
    };
    sender.disks(&|_, _| {}, &go_on).unwrap();
    // It is one extent.
    assert!(asked.get() < 20, "{}", asked.get());
    assert_eq!(sender.written().disks, 0);
}

//! Streams of a small memory: a complete stream is received, and a changed or truncated one is
//! refused.

use std::{
    fs::File,
    io::Read,
    os::{
        fd::OwnedFd,
        unix::{fs::MetadataExt, net::UnixStream},
    },
    sync::LazyLock,
    thread,
    time::Duration,
};

use proptest::{prelude::*, sample::Index};
use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;
use vmm_protocol::state::{self, Clock, Section, SnapshotInfo};

mod boot;
mod disks;

use super::{format::*, *};
use crate::{
    memory::{Backing, GuestRam, layout::RAM_MIN},
    snapshot::{
        SnapshotError,
        error::Place,
        format::PAGE_BYTES,
        saving::{GoOn, Sink},
    },
};

/// Two ranges of memory, as on both sides of a hole.
const RANGES: [(u64, usize); 2] = [(0, 600 * PAGE_BYTES), (1 << 32, 8 * PAGE_BYTES)];

fn memory() -> GuestMemory {
    let ranges = RANGES.map(|(address, length)| (GuestAddress(address), length));
    GuestMemory::from_ranges(&ranges).unwrap()
}

fn contents(memory: &GuestMemory) -> Vec<u8> {
    let mut all = Vec::new();
    for (address, length) in RANGES {
        let mut bytes = vec![0; length];
        memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        all.extend(bytes);
    }
    all
}

fn info() -> SnapshotInfo {
    SnapshotInfo {
        build: "1.2.3".into(),
        platform: "v1".into(),
        ..SnapshotInfo::default()
    }
}

fn machine() -> state::Machine {
    let clock = Clock {
        nanoseconds: 5,
        ..Clock::default()
    };
    state::Machine {
        sections: vec![Section::new("kvmclock", &clock), Section::new("other", &clock)],
    }
}

const ALWAYS: GoOn<'static> = &|| Ok(());

fn put(memory: &GuestMemory, address: u64, byte: u8) {
    memory.write_slice(&[byte], GuestAddress(address)).unwrap();
}

/// The stream of a machine that changes while it is sent, and its final memory.
fn stream() -> (Vec<u8>, Vec<u8>) {
    let (near, far) = UnixStream::pair().unwrap();
    let reading = thread::spawn(move || {
        let mut bytes = Vec::new();
        let mut far = far;
        far.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let memory = memory();
    for (address, byte) in [(0, 1), (0x3000, 2), (0x4fff, 3), (300 << 12, 4), (1 << 32, 5)] {
        put(&memory, address, byte);
    }
    let mut sender = Box::new(Sender::new(File::from(OwnedFd::from(near)), &memory, Vec::new()));
    sender.everything(&memory, ALWAYS).unwrap();
    put(&memory, 0x3000, 0);
    put(&memory, 0x5000, 7);
    sender.pages(&memory, vec![0x3000, 0x5000], ALWAYS).unwrap();
    assert_eq!(sender.written().memory, 6 * PAGE_BYTES as u64);
    let sent = sender.finish(&info(), machine(), ALWAYS).unwrap();
    let bytes = reading.join().unwrap();
    assert_eq!(sent, bytes.len() as u64);
    (bytes, contents(&memory))
}

static STREAM: LazyLock<(Vec<u8>, Vec<u8>)> = LazyLock::new(stream);

#[test]
fn what_is_sent_is_received_with_the_last_of_each_page() {
    let (bytes, wanted) = &*STREAM;
    let memory = memory();
    let received = receive(bytes.as_slice(), &memory, &mut [], None, &mut |_| Ok(())).unwrap();
    assert_eq!(&contents(&memory), wanted);
    assert_eq!(received.info, info());
    assert_eq!(received.machine.sections, machine().sections);
}

/// The stream of a machine whose memory is zero except for one page. `quiet` is the maximum silence
/// of the sender.
fn mostly_zeroes(quiet: Duration) -> Vec<u8> {
    let (near, far) = UnixStream::pair().unwrap();
    let reading = thread::spawn(move || {
        let (mut bytes, mut far) = (Vec::new(), far);
        far.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let memory = memory();
    put(&memory, 0x3000, 1);
    let mut sender = Box::new(Sender::new(File::from(OwnedFd::from(near)), &memory, Vec::new()));
    sender.quiet = quiet;
    sender.everything(&memory, ALWAYS).unwrap();
    sender.finish(&info(), machine(), ALWAYS).unwrap();
    reading.join().unwrap()
}

#[test]
fn zero_pages_are_not_sent_except_as_a_sign_of_life() {
    let (silent, lively) = (mostly_zeroes(Duration::MAX), mostly_zeroes(Duration::ZERO));
    let sign = FRAME + 16;
    // At least one for each range, and nowhere near one for each page.
    let signs = (lively.len() - silent.len()) / sign;
    assert!((2..20).contains(&signs), "{signs}");
    let wanted = memory();
    put(&wanted, 0x3000, 1);
    for bytes in [silent, lively] {
        let memory = memory();
        receive(bytes.as_slice(), &memory, &mut [], None, &mut |_| Ok(())).unwrap();
        assert!(contents(&memory) == contents(&wanted));
    }
}

#[test]
fn a_stream_that_is_cut_off_is_refused_with_the_place() {
    let bytes = &STREAM.0;
    for length in (0..bytes.len()).step_by(997).chain([bytes.len() - 1]) {
        let error = receive(&bytes[..length], &memory(), &mut [], None, &mut |_| Ok(())).unwrap_err();
        let SnapshotError::Damaged {
            place: Place::Stream { offset },
            why,
        } = error
        else {
            panic!("{length}: {error}")
        };
        assert!(
            offset <= length as u64 && why == "it ends there",
            "{length}: {why}"
        );
    }
}

#[test]
fn a_machine_with_other_memory_takes_nothing() {
    let other = GuestMemory::from_ranges(&[(GuestAddress(0), 16 * PAGE_BYTES)]).unwrap();
    let error = receive(STREAM.0.as_slice(), &other, &mut [], None, &mut |_| Ok(())).unwrap_err();
    assert!(matches!(error, SnapshotError::OtherMemory(_)), "{error}");
}

/// A stream with a valid beginning, followed by `frames`.
fn beginning_with(frames: &[(Kind, Vec<u8>)]) -> Vec<u8> {
    // The frame of the ranges: its length is in its bytes 4 to 7.
    let bytes = &STREAM.0;
    let length = u32::from_le_bytes(bytes[16..20].try_into().unwrap());
    let mut bytes = bytes[..12 + FRAME + length as usize].to_vec();
    for (kind, body) in frames {
        bytes.extend(frame(*kind, &[body]));
        bytes.extend(body);
    }
    bytes
}

fn hostile(frames: &[(Kind, Vec<u8>)]) -> SnapshotError {
    receive(
        beginning_with(frames).as_slice(),
        &memory(),
        &mut [],
        None,
        &mut |_| Ok(()),
    )
    .unwrap_err()
}

/// The received sections of a machine with `sections` and memory of zeroes.
fn received_with(sections: Vec<Section>) -> Vec<Section> {
    let (near, far) = UnixStream::pair().unwrap();
    let memory = memory();
    let sending = thread::spawn({
        let memory = memory.clone();
        move || {
            let mut sender = Box::new(Sender::new(File::from(OwnedFd::from(near)), &memory, Vec::new()));
            sender.everything(&memory, ALWAYS).unwrap();
            sender
                .finish(&info(), state::Machine { sections }, ALWAYS)
                .unwrap();
        }
    });
    let received = receive(far, &memory, &mut [], None, &mut |_| Ok(())).unwrap();
    sending.join().unwrap();
    received.machine.sections
}

#[test]
fn pages_of_zeroes_allocate_nothing_at_the_target() {
    let ram = || GuestRam::new(RAM_MIN, Backing::Shared).unwrap();
    let (source, target) = (ram(), ram());
    let (near, far) = UnixStream::pair().unwrap();
    let sending = thread::spawn(move || {
        let memory = source.memory();
        let mut sender = Box::new(Sender::new(File::from(OwnedFd::from(near)), memory, Vec::new()));
        sender.everything(memory, ALWAYS).unwrap();
        sender.pages(memory, vec![0, 0x1000, 0x8000], ALWAYS).unwrap();
        sender.finish(&info(), machine(), ALWAYS).unwrap();
    });
    receive(far, target.memory(), &mut [], None, &mut |_| Ok(())).unwrap();
    sending.join().unwrap();
    assert_eq!(target.file().unwrap().metadata().unwrap().blocks(), 0);
}

/// Counts the reads of a stream.
struct Counted<R>(R, usize);

impl<R: Read> Read for &mut Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.1 += 1;
        self.0.read(buffer)
    }
}

#[test]
fn scattered_pages_are_sent_and_received_many_at_once() {
    // A socket that keeps messages apart: each is one write.
    let socket = |kind| {
        use rustix::net::{AddressFamily, SocketFlags, socketpair};
        socketpair(AddressFamily::UNIX, kind, SocketFlags::empty(), None).unwrap()
    };
    let (near, far) = socket(rustix::net::SocketType::SEQPACKET);
    let reading = thread::spawn(move || {
        let (mut far, mut writes, mut bytes) = (File::from(far), 0, Vec::new());
        let mut message = vec![0; 1 << 20];
        while let Ok(length @ 1..) = far.read(&mut message) {
            writes += 1;
            bytes.extend_from_slice(&message[..length]);
        }
        (writes, bytes)
    });
    let memory = memory();
    let addresses: Vec<u64> = (0..600).step_by(2).map(|page| page << 12).collect();
    for address in &addresses {
        put(&memory, *address, 7);
    }
    let mut sender = Box::new(Sender::new(File::from(near), &memory, Vec::new()));
    sender.begin(ALWAYS).unwrap();
    sender.pages(&memory, addresses, ALWAYS).unwrap();
    sender.finish(&info(), machine(), ALWAYS).unwrap();
    let (writes, bytes) = reading.join().unwrap();
    // 300 frames of a page.
    assert!(writes < 30, "{writes}");
    let copy = self::memory();
    let mut stream = Counted(bytes.as_slice(), 0);
    receive(&mut stream, &copy, &mut [], None, &mut |_| Ok(())).unwrap();
    assert!(stream.1 < 30, "{}", stream.1);
    assert!(contents(&copy) == contents(&memory));
}

#[test]
fn a_section_longer_than_a_frame_is_received_whole() {
    let section = |length: usize| Section {
        kind: "virtio-pci".into(),
        version: 1,
        id: "gpu".into(),
        payload: (0..length).map(|at| at.to_le_bytes()[1]).collect(),
    };
    let overhead = prost::Message::encoded_len(&section(MAX_BODY_BYTES)) - MAX_BODY_BYTES;
    let just = section(MAX_BODY_BYTES - overhead);
    assert_eq!(prost::Message::encoded_len(&just), MAX_BODY_BYTES);
    let sent = vec![section(8 << 20), just, section(MAX_BODY_BYTES), section(5)];
    assert!(received_with(sent.clone()) == sent);
}

#[test]
fn frames_that_no_sender_sends_are_refused() {
    let pages = |address: u64, length: usize| [&address.to_le_bytes()[..], &vec![1; length]].concat();
    let zeroes = |address: u64, length: u64| [address.to_le_bytes(), length.to_le_bytes()].concat();
    let section = prost::Message::encode_to_vec(&Section::new("snapshot", &info()));
    let end = |frames: u64| frames.to_le_bytes().to_vec();
    for (frames, why) in [
        (vec![(Kind::Pages, vec![0; 7])], "no address"),
        (vec![(Kind::Pages, pages(0, 0))], "no whole pages"),
        (vec![(Kind::Pages, pages(1, PAGE_BYTES))], "no whole pages"),
        (vec![(Kind::Pages, pages(0, 4095))], "no whole pages"),
        (vec![(Kind::Pages, pages(0, 257 * PAGE_BYTES))], "more pages than"),
        (
            vec![(Kind::Pages, pages(600 << 12, PAGE_BYTES))],
            "outside of memory",
        ),
        (
            vec![(Kind::Pages, pages(599 << 12, 2 * PAGE_BYTES))],
            "outside of memory",
        ),
        (
            vec![(Kind::Pages, pages(u64::MAX - 4095, PAGE_BYTES))],
            "outside of memory",
        ),
        (vec![(Kind::Zeroes, vec![0; 15])], "no range"),
        (
            vec![(Kind::Zeroes, zeroes(0, u64::MAX - 4095))],
            "more pages than",
        ),
        (vec![(Kind::Zeroes, zeroes(1 << 31, 4096))], "outside of memory"),
        (vec![(Kind::Memory, Vec::new())], "ranges of memory again"),
        (vec![(Kind::Section, vec![0xff])], "can't be decoded"),
        (
            vec![(Kind::Section, section.clone()), (Kind::Zeroes, zeroes(0, 4096))],
            "memory after the machine's state",
        ),
        (vec![(Kind::Part, Vec::new())], "no part of a section"),
        (
            vec![(Kind::Part, vec![1]), (Kind::Section, vec![0xff])],
            "can't be decoded",
        ),
        (
            vec![(Kind::Part, vec![1]), (Kind::Zeroes, zeroes(0, 4096))],
            "memory after the machine's state",
        ),
        (
            vec![(Kind::Part, vec![1]), (Kind::Cleared, vec![0; 20])],
            "disk after the machine's state",
        ),
        (vec![(Kind::Part, vec![1]), (Kind::End, end(2))], "is cut off"),
        (vec![(Kind::Part, vec![0; MAX_BODY_BYTES]); 37], "longer than any"),
        (vec![(Kind::End, end(0))], "are missing"),
        (vec![(Kind::End, Vec::new())], "are missing"),
    ] {
        let error = hostile(&frames).to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    // Whole, but without the section that each has.
    let error = hostile(&[(Kind::End, end(1))]);
    assert!(matches!(error, SnapshotError::State(_)), "{error}");
    let many = vec![(Kind::Section, section); 1025];
    assert!(hostile(&many).to_string().contains("more sections than"));
}

#[test]
fn blocked_sender_polls_for_cancel_and_ends_with_its_peer() {
    let memory = memory();
    for page in 0..600 {
        put(&memory, page << 12, 1);
    }
    let (near, far) = UnixStream::pair().unwrap();
    near.set_write_timeout(Some(Duration::from_millis(1))).unwrap();
    let mut sender = Sender::new(
        File::from(OwnedFd::from(near.try_clone().unwrap())),
        &memory,
        Vec::new(),
    );
    let asked = std::cell::Cell::new(0);
    let go_on = || {
        asked.set(asked.get() + 1);
        if asked.get() < 1000 {
            Ok(())
        } else {
            Err(SnapshotError::Cancelled)
        }
    };
    let error = sender.everything(&memory, &go_on).unwrap_err();
    assert!(matches!(error, SnapshotError::Cancelled), "{error}");
    drop(far);
    let mut sender = Sender::new(File::from(OwnedFd::from(near)), &memory, Vec::new());
    let error = sender.everything(&memory, ALWAYS).unwrap_err();
    assert!(matches!(error, SnapshotError::Io { .. }), "{error}");
}

proptest! {
    #[test]
    fn a_stream_with_one_byte_changed_is_refused(at: Index, change in 1..=255_u8) {
        let mut bytes = STREAM.0.clone();
        let at = at.index(bytes.len());
        bytes[at] ^= change;
        prop_assert!(receive(bytes.as_slice(), &memory(), &mut [], None, &mut |_| Ok(())).is_err());
    }

    #[test]
    fn any_stream_is_refused_or_taken(bytes: Vec<u8>) {
        let start = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
        let _ = receive([start, bytes].concat().as_slice(), &memory(), &mut [], None, &mut |_| Ok(()));
    }
}

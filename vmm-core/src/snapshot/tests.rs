//! Snapshot files of a small memory: a reader gets the written content, and refuses a changed file.

use std::{
    fs::File,
    io::Read,
    ops::Range,
    os::unix::fs::MetadataExt,
    sync::{Arc, LazyLock, Mutex},
};

use devices::{
    display::{BootScreen, Framebuffer, VideoMemory},
    pci::BarMemory,
    virtio::{device::VirtioDevice, gpu::Gpu},
};
use proptest::{prelude::*, sample::Index};
use rfb::Size;
use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;
use vmm_protocol::state::{self, Clock, Section, SnapshotInfo, StateError};

use super::{
    error::Place,
    format::{HEADER, Header, MEMORY_OFFSET, PAGE, PAGE_BYTES, VERSION, encode_section},
    *,
};
use crate::{
    memory::{
        Backing, GuestRam,
        layout::{RAM_MAX, RAM_MIN},
    },
    migration::Sender,
    snapshot::saving::Sink,
};

/// Two ranges of memory, as on both sides of a hole.
const RANGES: [(u64, usize); 2] = [(0, 16 * PAGE_BYTES), (1 << 32, 8 * PAGE_BYTES)];
const END: u64 = MEMORY_OFFSET + 24 * PAGE;

fn memory() -> GuestMemory {
    let ranges = RANGES.map(|(address, length)| (GuestAddress(address), length));
    GuestMemory::from_ranges(&ranges).unwrap()
}

/// With something in some of its pages.
fn filled() -> GuestMemory {
    let memory = memory();
    for (address, byte) in [(0, 1), (0x3000, 2), (0x4fff, 3), (0xf000, 4), (1 << 32, 5)] {
        memory.write_slice(&[byte], GuestAddress(address)).unwrap();
    }
    memory
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
        time_unix_ms: 7,
        platform: "v1".into(),
        description: b"what it is".to_vec(),
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

fn written(memory: &GuestMemory) -> File {
    let file = tempfile::tempfile().unwrap();
    let mut writer = Writer::new(file.try_clone().unwrap(), memory).unwrap();
    writer.everything(memory, || Ok(())).unwrap();
    let length = writer.finish(&info(), machine()).unwrap();
    assert_eq!(length, file.metadata().unwrap().len());
    file
}

/// The file of [`filled`].
static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| bytes_of(&written(&filled())));

fn bytes_of(mut file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    std::io::Seek::rewind(&mut file).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Why these bytes are no snapshot.
fn refused(bytes: &[u8]) -> SnapshotError {
    match Snapshot::open(bytes).and_then(|snapshot| snapshot.check_memory()) {
        Err(error) => error,
        Ok(()) => panic!("it is taken"),
    }
}

#[test]
fn a_snapshot_gives_back_what_was_written() {
    let memory = filled();
    let file = written(&memory);
    let bytes = bytes_of(&file);
    let from_file = Snapshot::open(file).unwrap();
    assert_eq!((&from_file.info, &from_file.machine), (&info(), &machine()));
    assert_eq!(from_file.memory_bytes(), 24 * PAGE);
    from_file.check_memory().unwrap();
    let copy = self::memory();
    from_file.load(&copy).unwrap();
    assert_eq!(contents(&copy), contents(&memory));

    let from_bytes = Snapshot::open(bytes.as_slice()).unwrap();
    let copy = self::memory();
    from_bytes.load(&copy).unwrap();
    assert_eq!(contents(&copy), contents(&memory), "without holes");
}

#[test]
fn pages_of_zeroes_take_no_room() {
    let full = written(&filled()).metadata().unwrap().blocks() * 512;
    let empty = written(&memory()).metadata().unwrap().blocks() * 512;
    // A file system may need blocks of its own for scattered data.
    assert!((5 * PAGE..=8 * PAGE).contains(&(full - empty)), "{full} {empty}");
    assert!(empty <= 4 * PAGE, "{empty}");
}

#[test]
fn last_write_of_a_page_counts_also_of_zeroes() {
    let memory = filled();
    let file = tempfile::tempfile().unwrap();
    let mut writer = Writer::new(file.try_clone().unwrap(), &memory).unwrap();
    writer.everything(&memory, || Ok(())).unwrap();
    for (address, byte) in [(0x3000_u64, 0), (0x4fff, 9), (0x5000, 9), ((1 << 32) + 0x7000, 9)] {
        memory.write_slice(&[byte], GuestAddress(address)).unwrap();
    }
    writer.pages(&memory, [0x3000, 0x4000], || Ok(())).unwrap();
    let mut page = vec![0; PAGE_BYTES];
    for address in [0x5000, (1 << 32) + 0x7000] {
        memory.read_slice(&mut page, GuestAddress(address)).unwrap();
        writer.page_contents(address, &page).unwrap();
    }
    writer.finish(&info(), machine()).unwrap();
    let copy = self::memory();
    Snapshot::open(file).unwrap().load(&copy).unwrap();
    assert_eq!(contents(&copy), contents(&memory));
}

#[test]
fn memory_in_a_memfd_is_not_allocated_by_a_capture() {
    let ram = GuestRam::new(RAM_MIN, Backing::Shared).unwrap();
    for address in [0x3000, RAM_MIN - 4096] {
        ram.memory().write_obj(7_u8, GuestAddress(address)).unwrap();
    }
    let blocks = || ram.file().unwrap().metadata().unwrap().blocks();
    let before = blocks();
    let go_on = || Ok(());
    let writer = Writer::new(tempfile::tempfile().unwrap(), ram.memory()).unwrap();
    let sender = Sender::new(tempfile::tempfile().unwrap(), ram.memory(), Vec::new());
    let sinks: [Box<dyn Sink>; 2] = [Box::new(writer), Box::new(sender)];
    for mut sink in sinks {
        sink.everything(ram.memory(), &go_on).unwrap();
        // Pages that the guest gave back are named as changed.
        sink.pages(ram.memory(), vec![0x4000, 0x5000], &go_on).unwrap();
        assert_eq!(sink.written().memory % 4096, 0);
        assert!(sink.written().memory >= 2 * 4096);
        assert_eq!(blocks(), before);
    }
}

/// The memory of a screen.
struct Pixels(Mutex<Vec<u8>>);

impl BarMemory for Pixels {
    fn size(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }

    fn moved(&self, _address: Option<u64>) {}
}

impl VideoMemory for Pixels {
    fn take_changes(&self) -> Vec<Range<usize>> {
        Vec::new()
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.0.lock().unwrap()[offset..offset + bytes.len()]);
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        self.0.lock().unwrap()[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn clear(&self) {
        self.0.lock().unwrap().fill(0);
    }
}

/// The state of an adapter whose guest has drawn in the last row of a screen of that size.
fn screen(width: u32, height: u32) -> Section {
    let size = Size::new(width, height).unwrap();
    let bytes = usize::try_from(BootScreen::bar_size(size)).unwrap();
    let pixels = Pixels(Mutex::new(vec![0; bytes]));
    pixels.write(size.pixels() * 4 - 4, &[7; 4]);
    let framebuffer = Arc::new(Framebuffer::new(size));
    let boot = BootScreen::new(Arc::clone(&framebuffer), size, Arc::new(pixels));
    let gpu = Gpu::new(framebuffer, size).with_boot_screen(Arc::new(boot));
    VirtioDevice::save(&gpu).unwrap()
}

#[test]
fn a_large_screen_is_in_a_snapshot() {
    for (width, height) in [(1920, 1080), (4096, 2304)] {
        let sections = vec![screen(width, height)];
        assert!(sections[0].payload.len() > 4 << 20, "more than a frame");
        format::check_sections(&sections).unwrap();
        let file = tempfile::tempfile().unwrap();
        let writer = Writer::new(file.try_clone().unwrap(), &memory()).unwrap();
        let machine = state::Machine { sections };
        writer.finish(&info(), machine.clone()).unwrap();
        assert!(Snapshot::open(file).unwrap().machine == machine);
    }
}

#[test]
fn a_state_that_no_reader_takes_is_refused_with_its_part() {
    let section = |id: &str, bytes: u32| Section {
        id: id.into(),
        payload: vec![0; usize::try_from(bytes).unwrap()],
        ..Section::default()
    };
    let refused = |sections: &[Section]| format::check_sections(sections).unwrap_err().to_string();
    let error = refused(&[section("pit", 5), section("gpu", format::MAX_SECTION)]);
    assert!(error.starts_with("the state of gpu has 15"), "{error}");
    let half = format::MAX_SECTION - 100;
    let error = refused(&[
        section("gpu", half),
        section("balloon", half),
        section("pit", 1000),
    ]);
    assert!(error.contains("and that of the whole machine"), "{error}");
    // A bit for each page of the largest machine, in pieces of 4 KiB with their numbers.
    let balloon = RAM_MAX / PAGE / 8 / 4096 * (4096 + 32);
    assert!(balloon < format::MAX_SECTION.into());
}

#[test]
fn a_snapshot_that_was_not_finished_is_no_snapshot() {
    let memory = filled();
    let file = tempfile::tempfile().unwrap();
    let mut writer = Writer::new(file.try_clone().unwrap(), &memory).unwrap();
    writer.everything(&memory, || Ok(())).unwrap();
    assert!(matches!(Snapshot::open(file), Err(SnapshotError::Incomplete)));
    assert!(matches!(refused(b"#!/bin/sh"), SnapshotError::NoSnapshot));
    assert!(matches!(refused(&[7; 8192]), SnapshotError::NoSnapshot));
}

#[test]
fn a_machine_with_other_memory_does_not_take_it() {
    let snapshot = Snapshot::open(written(&filled())).unwrap();
    let other = GuestMemory::from_ranges(&[(GuestAddress(0), 24 * PAGE_BYTES)]).unwrap();
    assert!(matches!(
        snapshot.load(&other),
        Err(SnapshotError::OtherMemory(_))
    ));
}

#[test]
fn each_changed_byte_outside_of_memory_is_noticed() {
    let bytes = bytes_of(&written(&filled()));
    let end = usize::try_from(END).unwrap();
    let mut changed = bytes.clone();
    for at in (0..HEADER).chain(end..bytes.len()) {
        changed[at] ^= 0x10;
        let error = refused(&changed);
        let place = match &error {
            SnapshotError::Damaged { place, .. } => Some(place.clone()),
            _ => None,
        };
        match at {
            // The name and the version of the format, the file's length.
            0..8 => assert!(matches!(error, SnapshotError::NoSnapshot), "{at}: {error}"),
            8..12 => assert!(matches!(error, SnapshotError::Format { .. }), "{at}: {error}"),
            12..HEADER => assert_eq!(place, Some(Place::Header), "{at}"),
            _ if at < end + 24 * 4 => assert_eq!(place, Some(Place::Checksums), "{at}"),
            _ => assert!(matches!(place, Some(Place::Section { .. })), "{at}: {error}"),
        }
        changed[at] ^= 0x10;
    }
    Snapshot::open(changed.as_slice()).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn each_changed_byte_of_memory_is_noticed_in_its_page(at in any::<Index>(), bit in 0..8_u32) {
        let mut bytes = BYTES.clone();
        let at = usize::try_from(MEMORY_OFFSET).unwrap() + at.index(24 * PAGE_BYTES);
        bytes[at] ^= 1 << bit;
        let offset = at as u64 / PAGE * PAGE;
        match refused(&bytes) {
            SnapshotError::Damaged { place: Place::Page { offset: found, address }, .. } => {
                prop_assert_eq!(found, offset);
                let within = offset - MEMORY_OFFSET;
                prop_assert_eq!(address, if within < 16 * PAGE { within } else { within - 16 * PAGE + (1 << 32) });
            }
            error => prop_assert!(false, "{}", error),
        }
    }

    #[test]
    fn each_byte_in_the_gap_is_noticed(at in any::<Index>(), byte in 1..=u8::MAX) {
        let mut bytes = BYTES.clone();
        bytes[HEADER + at.index(usize::try_from(MEMORY_OFFSET).unwrap() - HEADER)] = byte;
        let error = refused(&bytes);
        prop_assert!(matches!(error, SnapshotError::Damaged { place: Place::Gap, .. }), "{}", error);
    }

    #[test]
    fn a_file_that_is_cut_or_has_more_is_refused_with_both_lengths(at in any::<Index>(), more in 1..9000_usize) {
        let bytes = BYTES.clone();
        let cut = at.index(bytes.len());
        let longer = [bytes.as_slice(), &vec![0; more]].concat();
        for changed in [&bytes[..cut], &longer] {
            match refused(changed) {
                SnapshotError::Length { found, written } => {
                    prop_assert_eq!((found, written), (changed.len() as u64, bytes.len() as u64));
                }
                SnapshotError::NoSnapshot => prop_assert!(cut < HEADER),
                error => prop_assert!(false, "{}", error),
            }
        }
    }
}

/// A file with these sections, whose checksums are right.
fn forged(sections: &[Section], change: impl FnOnce(&mut Header)) -> Vec<u8> {
    let bytes = BYTES.clone();
    let offset = usize::try_from(END).unwrap() + 24 * 4;
    let encoded: Vec<u8> = sections.iter().flat_map(encode_section).collect();
    let mut forged = [&bytes[..offset], &encoded].concat();
    let mut header = Header {
        file_length: forged.len() as u64,
        sections_offset: offset as u64,
        sections_length: encoded.len() as u64,
        sections: u32::try_from(sections.len()).unwrap(),
    };
    change(&mut header);
    forged[..HEADER].copy_from_slice(&header.encode());
    forged
}

fn sections() -> Vec<Section> {
    let bytes = BYTES.clone();
    let offset = usize::try_from(END).unwrap() + 24 * 4;
    let header = Header {
        file_length: bytes.len() as u64,
        sections_offset: offset as u64,
        sections_length: (bytes.len() - offset) as u64,
        sections: 4,
    };
    format::read_sections(&bytes.as_slice(), &header).unwrap()
}

#[test]
fn a_file_whose_checksums_are_right_is_not_believed_either() {
    let all = sections();
    Snapshot::open(forged(&all, |_| ()).as_slice()).unwrap();
    let error = refused(&forged(&all[1..], |_| ()));
    assert!(matches!(&error, SnapshotError::State(StateError::Missing { id }) if id == "snapshot"));
    let twice = [all.as_slice(), &all[..1]].concat();
    let error = refused(&forged(&twice, |_| ()));
    assert!(matches!(error, SnapshotError::State(StateError::Twice { .. })));
    let mut newer = all.clone();
    newer[0].version = 99;
    let error = refused(&forged(&newer, |_| ()));
    assert!(matches!(
        error,
        SnapshotError::State(StateError::UnknownVersion { .. })
    ));

    let fewer = refused(&forged(&all, |header| header.sections -= 1));
    assert!(fewer.to_string().contains("more bytes than sections"), "{fewer}");
    let more = refused(&forged(&all, |header| header.sections += 1));
    assert!(more.to_string().contains("the file ends in it"), "{more}");
    let many = refused(&forged(&all, |header| header.sections = u32::MAX));
    assert!(matches!(
        many,
        SnapshotError::Damaged {
            place: Place::Header,
            ..
        }
    ));
    let elsewhere = refused(&forged(&all, |header| header.sections_offset -= 4));
    assert!(matches!(
        elsewhere,
        SnapshotError::Damaged {
            place: Place::Header,
            ..
        }
    ));
}

#[test]
fn memory_that_is_not_where_it_must_be_is_refused() {
    let all = sections();
    let with = |change: fn(&mut state::SnapshotMemory)| {
        let mut memory: state::SnapshotMemory = all[1].open().unwrap();
        change(&mut memory);
        let mut changed = all.clone();
        changed[1] = Section::new("snapshot", &memory);
        refused(&forged(&changed, |_| ()))
    };
    let changes: [fn(&mut state::SnapshotMemory); 8] = [
        |it| it.ranges[0].length = u64::MAX - 4095,
        |it| it.ranges[1].address = 0,
        |it| it.ranges[1].address += 1,
        |it| it.ranges[0].length = 0,
        |it| it.ranges[1].file_offset = 0,
        |it| it.checksums_offset = 0,
        |it| it.ranges.truncate(1),
        |it| it.ranges.resize(65, state::SnapshotRange::default()),
    ];
    for change in changes {
        let error = with(change);
        assert!(
            matches!(
                error,
                SnapshotError::Damaged {
                    place: Place::Header,
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn a_format_of_a_later_program_is_named() {
    let mut bytes = BYTES.clone();
    bytes[8..12].copy_from_slice(&(VERSION + 1).to_le_bytes());
    assert_eq!(
        refused(&bytes).to_string(),
        "the snapshot has format 2, this program reads format 1"
    );
}

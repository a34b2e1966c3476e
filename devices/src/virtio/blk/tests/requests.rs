//! Tests of the answer to each request, and of its effect on the disk.

use proptest::prelude::*;
use rstest::rstest;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, bitmap::Bitmap};

use super::{
    super::request::{Header, Plan, Status},
    *,
};

#[test]
fn the_configuration_tells_size_and_blocks() {
    let mut driver = Disk::new(SECTORS).driver(false);
    let config = |driver: &Driver, offset, width| driver.rig.read(Area::Device, offset, width);
    assert_eq!(config(&driver, 0, 8), SECTORS as u64);
    assert_eq!(config(&driver, 0, 4), SECTORS as u64);
    assert_eq!(config(&driver, 12, 4), 254);
    assert_eq!(config(&driver, 20, 4), 512);
    assert_eq!((config(&driver, 24, 1), config(&driver, 26, 2)), (3, 8));
    assert_eq!(driver.offered() & F_RO, 0);
    assert_ne!(driver.offered() & F_FLUSH, 0);
    driver.rig.write(Area::Device, 0, 8, 1);
    assert_eq!(config(&driver, 0, 8), SECTORS as u64);
    driver = Disk::new(SECTORS).driver(true);
    assert_ne!(driver.offered() & F_RO, 0);
}

#[test]
fn the_identification_is_cut_off_at_20_bytes_and_at_the_buffer() {
    let mut driver = Disk::new(SECTORS).driver(false);
    assert_eq!(
        request(&mut driver, header(GET_ID, 0), 20),
        (b"serial-0123456789-to".to_vec(), OK)
    );
    assert_eq!(
        request(&mut driver, header(GET_ID, 0), 40),
        (b"serial-0123456789-to".to_vec(), OK)
    );
    assert_eq!(
        request(&mut driver, header(GET_ID, 0), 6),
        (b"serial".to_vec(), OK)
    );
    assert_eq!(request(&mut driver, header(GET_ID, 0), 0).1, OK);
}

#[rstest]
#[case::beyond_the_end(header(IN, SECTORS as u64), 512, IOERR)]
#[case::over_the_end(header(IN, SECTORS as u64 - 1), 1024, IOERR)]
#[case::sector_times_512_overflows(header(IN, u64::MAX), 512, IOERR)]
#[case::end_overflows(header(IN, (1 << 55) - 1), 512, IOERR)]
#[case::odd_read(header(IN, 0), 511, IOERR)]
#[case::odd_write([header(OUT, 0), vec![0; 513]].concat(), 0, IOERR)]
#[case::write_beyond_the_end([header(OUT, SECTORS as u64), vec![0; 512]].concat(), 0, IOERR)]
#[case::discard_with_a_flag([header(DISCARD, 0), vec![0; 8], vec![8, 0, 0, 0, 1, 0, 0, 0]].concat(), 0, UNSUPP)]
#[case::unknown(header(0x1234_5678, 0), 0, UNSUPP)]
#[case::short_header(vec![0; 15], 512, IOERR)]
#[case::no_header(vec![], 512, IOERR)]
fn what_can_not_be_done_is_answered_and_changes_nothing(
    #[case] readable: Vec<u8>,
    #[case] incoming: usize,
    #[case] status: u8,
) {
    let disk = Disk::new(SECTORS);
    let before = pattern(1, SECTORS * SECTOR_SIZE);
    disk.file.write_all_at(&before, 0).unwrap();
    let mut driver = disk.driver(false);
    assert_eq!(request(&mut driver, readable, incoming).1, status);
    assert_eq!(disk.content(), before);
    assert_eq!(
        driver.rig.device.counters().guest_faults.load(Ordering::Relaxed),
        1
    );
    assert!(driver.rig.sink.events().is_empty());
}

#[test]
fn a_read_only_disk_is_read_and_not_written() {
    let disk = Disk::new(SECTORS);
    let mut driver = disk.driver(true);
    assert_eq!(write(&mut driver, 0, &[1; 512]), IOERR);
    assert_eq!(read(&mut driver, 0, 512), (vec![0; 512], OK));
    assert_eq!(request(&mut driver, header(FLUSH, 0), 0).1, OK);
}

#[test]
fn header_data_and_status_may_be_split_anywhere() {
    let disk = Disk::new(SECTORS);
    let mut driver = disk.driver(false);
    let data = pattern(9, 1024);
    let readable = [header(OUT, 2), data.clone()].concat();
    for cut in [1, 8, 15, 16, 17, 500, 1039] {
        disk.file.write_all_at(&[0; 2048], 0).unwrap();
        let buffers = [
            Buffer::Readable(readable[..cut].into()),
            Buffer::Readable(readable[cut..].into()),
            Buffer::Writable(1),
        ];
        assert_eq!(driver.request(0, &buffers).1, [OK], "{cut}");
        assert_eq!(disk.content()[1024..2048], data);
    }
    for cuts in [
        [1, 1023, 1],
        [1024, 1, 0],
        [512, 512, 1],
        [1, 1, 1023],
        [0, 1024, 1],
        [3, 1021, 1],
    ] {
        let mut buffers = vec![Buffer::Readable(header(IN, 2))];
        buffers.extend(cuts.map(Buffer::Writable));
        let (used, mut written) = driver.request(0, &buffers);
        assert_eq!((used.written, written.pop()), (1025, Some(OK)), "{cuts:?}");
        assert_eq!(written, data);
    }
}

#[test]
fn a_request_without_room_for_the_status_comes_back_empty() {
    let disk = Disk::new(SECTORS);
    let mut driver = disk.driver(false);
    let readable = [header(OUT, 0), vec![1; 512]].concat();
    let (used, _) = driver.request(0, &[Buffer::Readable(readable)]);
    assert_eq!(used.written, 0);
    assert_eq!(disk.content()[..512], [0; 512]);
    assert_eq!(read(&mut driver, 0, 512).1, OK);
}

/// The one behind it is taken from the ring by then.
#[test]
fn requests_behind_one_that_makes_no_sense_are_served() {
    let disk = Disk::new(SECTORS);
    let mut driver = disk.driver(false);
    let sound = || [Buffer::Readable(header(IN, 0)), Buffer::Writable(513)];
    for _ in 0..3 {
        driver.offer(0, &sound());
        driver.offer(0, &[Buffer::Readable(header(IN, 0))]);
        driver.offer(0, &[Buffer::Readable(header(OUT, 0))]);
        driver.offer(0, &sound());
    }
    driver.kick(0);
    let mut written = Vec::new();
    while driver.under_way(0) > 0 {
        written.push(driver.wait_used(0).0.written);
    }
    written.sort_unstable();
    assert_eq!(written, [[0; 6], [513; 6]].concat());
}

#[test]
fn what_a_read_puts_into_memory_is_marked_dirty() {
    let disk = Disk::new(SECTORS);
    let mut driver = disk.driver(false);
    driver
        .rig
        .memory
        .iter()
        .for_each(|region| std::ops::Deref::deref(region).bitmap().start());
    driver.request(
        0,
        &[
            Buffer::Readable(header(IN, 0)),
            Buffer::Writable(8192),
            Buffer::Writable(1),
        ],
    );
    let dirty = |address: u64| {
        let (region, offset) = driver.rig.memory.to_region_addr(GuestAddress(address)).unwrap();
        region.bitmap().dirty_at(usize::try_from(offset.0).unwrap())
    };
    let begin = (18 << 20) + 16;
    for address in [begin, begin + 4096, begin + 8191] {
        assert!(dirty(address), "{address:#x}");
    }
    assert!(!dirty(begin + 16384));
}

#[test]
fn a_queue_full_of_requests_costs_few_interrupts() {
    let disk = Disk::new(SECTORS);
    let mut driver = disk.driver(false);
    driver.rig.pause();
    for sector in 0..60 {
        driver.offer(
            0,
            &[
                Buffer::Readable(header(IN, sector)),
                Buffer::Writable(512),
                Buffer::Writable(1),
            ],
        );
    }
    let before = driver.rig.device.counters().interrupts.load(Ordering::Relaxed);
    crate::component::Component::resume(&mut driver.rig.device).unwrap();
    while driver.under_way(0) > 0 {
        assert_eq!(driver.wait_used(0).1.pop(), Some(OK));
    }
    let interrupts = driver.rig.device.counters().interrupts.load(Ordering::Relaxed) - before;
    assert!(interrupts <= 30, "{interrupts}");
}

#[test]
fn a_file_that_became_shorter_gives_io_errors_and_the_rest_still_works() {
    let disk = Disk::new(SECTORS);
    let mut driver = disk.driver(false);
    disk.file.set_len(4096).unwrap();
    assert_eq!(read(&mut driver, 8, 512).1, IOERR);
    assert_eq!(read(&mut driver, 7, 1024).1, IOERR);
    assert_eq!(read(&mut driver, 7, 512).1, OK);
}

#[derive(Clone, Debug)]
enum Step {
    Write { sector: u64, sectors: usize, seed: u8 },
    Read { sector: u64, sectors: usize },
    Flush,
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let place = (0..SECTORS as u64 + 4, 0_usize..12);
    let step = prop_oneof![
        4 => (place.clone(), any::<u8>())
            .prop_map(|((sector, sectors), seed)| Step::Write { sector, sectors, seed }),
        4 => place.prop_map(|(sector, sectors)| Step::Read { sector, sectors }),
        1 => Just(Step::Flush),
        1 => Just(Step::Restart),
    ];
    proptest::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_device_agrees_with_a_model_disk(steps in steps()) {
        let disk = Disk::new(SECTORS);
        let mut driver = disk.driver(false);
        let mut model = vec![0; SECTORS * SECTOR_SIZE];
        for step in steps {
            match step {
                Step::Write { sector, sectors, seed } => {
                    let data = pattern(seed, sectors * SECTOR_SIZE);
                    let begin = usize::try_from(sector).unwrap() * SECTOR_SIZE;
                    let place = model.get_mut(begin..begin + data.len());
                    let expected = if place.is_some() { OK } else { IOERR };
                    if let Some(place) = place {
                        place.copy_from_slice(&data);
                    }
                    prop_assert_eq!(write(&mut driver, sector, &data), expected);
                }
                Step::Read { sector, sectors } => {
                    let begin = usize::try_from(sector).unwrap() * SECTOR_SIZE;
                    let (data, status) = read(&mut driver, sector, sectors * SECTOR_SIZE);
                    match model.get(begin..begin + sectors * SECTOR_SIZE) {
                        Some(expected) => prop_assert_eq!((&data[..], status), (expected, OK)),
                        None => prop_assert_eq!(status, IOERR),
                    }
                }
                Step::Flush => prop_assert_eq!(request(&mut driver, header(FLUSH, 0), 0).1, OK),
                Step::Restart => driver.start(ALL),
            }
        }
        prop_assert_eq!(disk.content(), model);
    }

    #[test]
    fn a_plan_never_leaves_the_disk(
        kind in prop_oneof![0_u32..16, any::<u32>()],
        sector in prop_oneof![0_u64..200, any::<u64>(), (u64::MAX / 512 - 2..=u64::MAX / 512 + 2)],
        outgoing in prop_oneof![(0_u32..40).prop_map(|n| n * 512), any::<u32>()],
        incoming in prop_oneof![(0_u32..40).prop_map(|n| n * 512), any::<u32>()],
        capacity in (0_u64..100).prop_map(|n| n * 512),
        read_only: bool,
    ) {
        let header = Header { kind: kind.into(), reserved: 0.into(), sector: sector.into() };
        match (Limits { block: 512, read_only, discard: false }).plan(capacity, &header, outgoing, incoming) {
            Plan::Read { offset, length } => {
                prop_assert_eq!((kind, length, offset / 512), (IN, incoming, sector));
                prop_assert!(offset + u64::from(length) <= capacity && length % 512 == 0);
            }
            Plan::Write { offset, length } => {
                prop_assert!(!read_only && kind == OUT && length == outgoing && offset / 512 == sector);
                prop_assert!(offset + u64::from(length) <= capacity && length % 512 == 0);
            }
            Plan::Flush => prop_assert_eq!(kind, FLUSH),
            Plan::Identify { length } => prop_assert!(kind == GET_ID && length <= 20 && length <= incoming),
            Plan::Discard { .. } => prop_assert!(false, "not on offer"),
            Plan::WriteZeroes { ranges } => {
                prop_assert!(!read_only && kind == WRITE_ZEROES);
                prop_assert!(ranges == outgoing && ranges % 16 == 0 && (1..=32).contains(&(ranges / 16)));
            }
            Plan::Complete(Status::Ok) => {
                prop_assert!(kind == IN && incoming == 0 || kind == OUT && outgoing == 0);
            }
            Plan::Complete(Status::Unsupported) => {
                prop_assert!(![IN, OUT, FLUSH, GET_ID, WRITE_ZEROES].contains(&kind));
            }
            Plan::Complete(Status::IoError) => prop_assert!([IN, OUT, DISCARD, WRITE_ZEROES].contains(&kind)),
        }
    }
}

//! Tests of the answer to each request, and of its effect on the disk.

use rstest::rstest;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, bitmap::Bitmap};

use super::*;

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

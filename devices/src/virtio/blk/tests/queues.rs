//! Tests of several queues, other block sizes, changes of the size, discards, and the corresponding
//! configuration.

use std::{fs, os::unix::fs::MetadataExt, path::PathBuf};

use rstest::rstest;

use super::*;

/// The shared suite again, with four queues.
struct FourQueues(Disk);

impl DeviceUnderTest for FourQueues {
    const FEATURES: u64 = ALL;
    const EAGER_QUEUES: &'static [u16] = &[0, 1, 2, 3];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let disk = Disk::new(SECTORS);
        let front = disk.front_with(false, queues(4));
        (Self(disk), Box::new(front))
    }

    fn probe(&mut self, driver: &mut Driver) {
        for queue in 0..4 {
            let data = pattern(queue as u8, 1024);
            let out = [header(OUT, u64::from(queue) * 2), data.clone()].concat();
            let (_, status) = driver.request(queue, &[Buffer::Readable(out), Buffer::Writable(1)]);
            assert_eq!(status, [OK]);
            let other = (queue + 1) % 4;
            let back = [
                Buffer::Readable(header(IN, u64::from(queue) * 2)),
                Buffer::Writable(1025),
            ];
            let (_, mut read) = driver.request(other, &back);
            assert_eq!(read.pop(), Some(OK));
            assert_eq!(read, data);
            assert_eq!(self.0.content()[usize::from(queue) * 1024..][..1024], data);
        }
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (2, vec![Buffer::Readable(header(IN, 0)), Buffer::Writable(4097)])
    }
}

crate::virtio_device_tests!(FourQueues);
crate::virtio_saved_device_tests!(FourQueues, "virtio-blk-4-queues");

fn config(driver: &Driver, offset: u64, width: usize) -> u64 {
    driver.rig.read(Area::Device, offset, width)
}

#[test]
fn the_configuration_tells_queues_limits_and_topology() {
    let disk = Disk::new(SECTORS);
    let driver = disk.driver_with(false, queues(4));
    assert_ne!(driver.offered() & (1 << 12), 0, "MQ");
    assert_eq!(config(&driver, 34, 2), 4);
    assert_eq!((config(&driver, 8, 4), config(&driver, 12, 4)), (16 << 20, 254));
    assert_eq!(config(&driver, 32, 1), 1, "writeback");
    // Discards and write-zeroes.
    assert_eq!(driver.offered() >> 13 & 3, 3);
    assert_eq!((config(&driver, 36, 4), config(&driver, 40, 4)), (1 << 22, 32));
    assert!(config(&driver, 44, 4) >= 1);
    assert_eq!((config(&driver, 48, 4), config(&driver, 52, 4)), (1 << 17, 32));
    assert_eq!(config(&driver, 56, 1), 1);

    let driver = disk.driver_with(true, options());
    assert_eq!(driver.offered() & (1 << 12 | 3 << 13), 0);
    for (offset, width) in [(36, 4), (40, 4), (44, 4), (48, 4), (52, 4)] {
        assert_eq!(config(&driver, offset, width), 0);
    }
}

#[test]
fn as_many_queues_as_asked_for_up_to_16() {
    for (asked, given) in [(0, 1), (1, 1), (16, 16), (17, 16), (u16::MAX, 16)] {
        let front = Disk::new(8).front_with(false, queues(asked));
        assert_eq!(front.queue_sizes().len(), given);
    }
}

#[test]
fn threads_are_named_for_disk_and_queue() {
    assert_eq!(thread_name("blk", "root", 0), "blk-root-q0");
    assert_eq!(thread_name("blk", "a-very-long-name", 3), "blk-a-very-l-q3");
    assert_eq!(thread_name("blk", "a-very-long-name", 15).len(), 15);
    assert_eq!(thread_name("blk", "ääääää", 3), "blk-ääää-q3");
}

#[test]
fn blocks_of_4096_are_asked_for_whole() {
    let disk = Disk::new(SECTORS);
    let mut driver = disk.driver_with(
        false,
        BlkOptions {
            logical_block: 4096,
            ..options()
        },
    );
    assert_eq!(config(&driver, 20, 4), 4096);
    assert_eq!((config(&driver, 24, 1), config(&driver, 26, 2)), (0, 1));
    let data = pattern(3, 8192);
    assert_eq!(write(&mut driver, 8, &data), OK);
    assert_eq!(read(&mut driver, 8, 8192), (data, OK));
    for (sector, length) in [(1, 4096), (8, 512), (0, 4608), (4, 4096)] {
        assert_eq!(read(&mut driver, sector, length).1, IOERR, "{sector} {length}");
        assert_eq!(write(&mut driver, sector, &vec![1; length]), IOERR);
    }
    let odd = BlkOptions {
        logical_block: 4096,
        ..options()
    };
    let error = Disk::new(9)
        .front_with(false, odd)
        .workers(&signals())
        .err()
        .unwrap();
    assert!(
        error
            .to_string()
            .contains("not a multiple of the logical block of 4096"),
        "{error}"
    );
}

fn signals() -> Arc<Signals> {
    let msix = crate::pci::msix::Msix::new(&crate::virtio::testing::MockMsi::default(), 1).unwrap();
    Arc::new(Signals::new(Arc::clone(msix.vectors()), 1))
}

#[test]
fn a_disk_that_grew_is_larger_at_once_and_its_driver_is_told() {
    let disk = Disk::new(SECTORS);
    let front = disk.front_with(false, queues(2));
    let control = front.control();
    let mut driver = Driver::new(Rig::new(Box::new(front)));
    driver.start(ALL);
    let end = SECTORS as u64;
    assert_eq!(read(&mut driver, end, 512).1, IOERR);
    let generation = driver.rig.read(Area::Common, 0x15, 1);
    control.grow(Some(2 * end * 512)).unwrap();
    driver.rig.msi.wait_for(0, 1);
    assert_eq!(
        (config(&driver, 0, 8), control.capacity()),
        (2 * end, 2 * end * 512)
    );
    assert_ne!(driver.rig.read(Area::Common, 0x15, 1), generation);
    assert_eq!(write(&mut driver, end, &[9; 512]), OK);
    assert_eq!(read(&mut driver, end, 512), (vec![9; 512], OK));
    let (_, status) = driver.request(
        1,
        &[Buffer::Readable(header(IN, 2 * end - 1)), Buffer::Writable(513)],
    );
    assert_eq!(status.last(), Some(&OK));

    // The same size again is nothing new; less, and no whole blocks, are refused.
    control.grow(Some(2 * end * 512)).unwrap();
    assert!(control.grow(Some(end * 512)).is_err());
    let refusal = control.grow(Some(2 * end * 512 + 1)).unwrap_err();
    assert_eq!(refusal.kind(), io::ErrorKind::InvalidInput);
    assert_eq!(driver.rig.msi.count(0), 1);
    assert_eq!(control.capacity(), 2 * end * 512);
    drop(driver);
    assert_eq!(
        control.grow(None).unwrap_err().kind(),
        io::ErrorKind::NotConnected
    );
    let _still_there = control.stats();
}

fn ranges(kind: u32, ranges: &[(u64, u32, u32)]) -> Vec<u8> {
    let range = |(sector, sectors, flags): &(u64, u32, u32)| {
        [
            &sector.to_le_bytes()[..],
            &sectors.to_le_bytes(),
            &flags.to_le_bytes(),
        ]
        .concat()
    };
    [header(kind, 0), ranges.iter().flat_map(range).collect()].concat()
}

#[test]
fn discards_give_space_back_and_zeroes_read_as_zero() {
    let sectors = 4096;
    let disk = Disk::new(sectors);
    let before = pattern(1, sectors * SECTOR_SIZE);
    disk.file.write_all_at(&before, 0).unwrap();
    disk.file.sync_all().unwrap();
    let full = disk.file.metadata().unwrap().blocks();
    let mut driver = disk.driver(false);
    let several = ranges(DISCARD, &[(0, 1024, 0), (2048, 512, 0)]);
    assert_eq!(request(&mut driver, several, 0).1, OK);
    let left = disk.file.metadata().unwrap().blocks();
    assert!(left + 1024 <= full, "{left} of {full}");
    for unmap in [0, 1] {
        disk.file.write_all_at(&before, 0).unwrap();
        let zeroes = ranges(WRITE_ZEROES, &[(3, 5, unmap), (100, 200, unmap), (7, 0, unmap)]);
        assert_eq!(request(&mut driver, zeroes, 0).1, OK);
        let mut expected = before.clone();
        expected[3 * 512..8 * 512].fill(0);
        expected[100 * 512..300 * 512].fill(0);
        assert!(disk.content() == expected, "unmap {unmap}");
    }
}

#[rstest]
#[case::no_range(ranges(DISCARD, &[]), IOERR)]
#[case::part_of_a_range([ranges(DISCARD, &[(0, 1, 0)]), vec![0]].concat(), IOERR)]
#[case::too_many(ranges(DISCARD, &[(0, 1, 0); 33]), IOERR)]
#[case::beyond_the_end(ranges(DISCARD, &[(SECTORS as u64, 1, 0)]), IOERR)]
#[case::second_over_the_end(ranges(WRITE_ZEROES, &[(0, 8, 0), (60, 5, 0)]), IOERR)]
#[case::overflow(ranges(WRITE_ZEROES, &[(u64::MAX, u32::MAX, 0)]), IOERR)]
#[case::too_long_to_discard(ranges(DISCARD, &[(0, (1 << 22) + 1, 0)]), IOERR)]
#[case::too_long_to_zero(ranges(WRITE_ZEROES, &[(0, (1 << 17) + 1, 0)]), IOERR)]
#[case::unmap_of_a_discard(ranges(DISCARD, &[(0, 8, 1)]), UNSUPP)]
#[case::unknown_flag(ranges(WRITE_ZEROES, &[(0, 8, 2)]), UNSUPP)]
#[case::unknown_flag_of_the_second(ranges(WRITE_ZEROES, &[(0, 8, 0), (8, 8, 0x8000_0001)]), UNSUPP)]
#[case::secure_erase(ranges(14, &[(0, 8, 0)]), UNSUPP)]
fn a_range_that_can_not_be_discarded_is_answered_and_nothing_is_done(
    #[case] readable: Vec<u8>,
    #[case] status: u8,
) {
    let disk = Disk::new(SECTORS);
    let before = pattern(1, SECTORS * SECTOR_SIZE);
    disk.file.write_all_at(&before, 0).unwrap();
    let mut driver = disk.driver(false);
    assert_eq!(request(&mut driver, readable, 0).1, status);
    assert!(disk.content() == before);
}

#[test]
fn discards_and_zeroes_are_refused_by_a_read_only_disk_and_when_not_negotiated() {
    let disk = Disk::new(SECTORS);
    let mut driver = disk.driver(true);
    for kind in [DISCARD, WRITE_ZEROES] {
        assert_eq!(request(&mut driver, ranges(kind, &[(0, 8, 0)]), 0).1, IOERR);
    }
    drop(driver);
    let mut driver = disk.driver(false);
    driver.start(F_FLUSH);
    for kind in [DISCARD, WRITE_ZEROES] {
        assert_eq!(request(&mut driver, ranges(kind, &[(0, 8, 0)]), 0).1, UNSUPP);
    }
}

#[test]
fn large_requests_in_many_buffers_are_done_whole_and_too_many_buffers_are_refused() {
    let sectors = 32 << 11;
    let disk = Disk::new(sectors);
    let mut driver = disk.driver(false);
    driver.start(ALL | 1 << 28);
    driver.indirect = true;
    let data: Vec<u8> = (0..254 * 65536_u32).map(|at| (at / 7) as u8).collect();
    let mut buffers = vec![Buffer::Readable(header(OUT, 8))];
    buffers.extend(data.chunks(65536).map(|chunk| Buffer::Readable(chunk.into())));
    buffers.push(Buffer::Writable(1));
    assert_eq!(driver.request(0, &buffers).1, [OK]);
    assert!(disk.content()[4096..][..data.len()] == data);
    let mut buffers = vec![Buffer::Readable(header(IN, 8))];
    buffers.resize(255, Buffer::Writable(65536));
    buffers.push(Buffer::Writable(1));
    let (_, mut back) = driver.request(0, &buffers);
    assert_eq!(back.pop(), Some(OK));
    assert!(back == data);
    for kind in [IN, OUT] {
        let part = if kind == IN {
            Buffer::Writable(512)
        } else {
            Buffer::Readable(vec![1; 512])
        };
        let mut buffers = vec![Buffer::Readable(header(kind, 0))];
        buffers.resize(256, part);
        buffers.push(Buffer::Writable(1));
        assert_eq!(driver.request(0, &buffers).0.last, Some(IOERR));
    }
    assert!(disk.content()[..4096].iter().all(|byte| *byte == 0));
    assert_eq!(read(&mut driver, 0, 512).1, OK);
}

#[test]
fn what_was_done_is_counted_by_kind() {
    let disk = Disk::new(SECTORS);
    let front = disk.front_with(false, queues(2));
    let control = front.control();
    let mut driver = Driver::new(Rig::new(Box::new(front)));
    driver.start(ALL);
    for queue in 0..2 {
        for _ in 0..3 {
            driver.request(queue, &[Buffer::Readable(header(IN, 0)), Buffer::Writable(1025)]);
        }
        let out = [header(OUT, 0), vec![1; 512]].concat();
        driver.request(queue, &[Buffer::Readable(out), Buffer::Writable(1)]);
    }
    request(&mut driver, header(FLUSH, 0), 0);
    request(&mut driver, ranges(WRITE_ZEROES, &[(0, 8, 0), (8, 8, 0)]), 0);
    request(&mut driver, header(GET_ID, 0), 20);
    // An invalid request has its own counter.
    read(&mut driver, 1 << 40, 512);
    until(|| control.stats().in_flight == 0);
    let stats = control.stats();
    let count = |stats: &OperationStats| (stats.requests, stats.bytes, stats.errors);
    assert_eq!(count(&stats.read), (6, 6 * 1024, 0));
    assert_eq!(count(&stats.write), (2, 1024, 0));
    assert_eq!(count(&stats.flush), (1, 0, 0));
    assert_eq!(count(&stats.discard), (1, 8192, 0));
    for stats in [&stats.read, &stats.write, &stats.flush, &stats.discard] {
        assert_eq!(stats.latency_us_log2.iter().sum::<u64>(), stats.requests);
        assert!(stats.total_ns > 0);
    }
}

/// Where the thread with that name sleeps: the number of its system call (proc(5), /proc/pid/syscall), if it does.
fn sleeps_in(name: &str) -> Option<libc::c_long> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let named =
        |path: &PathBuf| fs::read_to_string(path.join("comm")).is_ok_and(|found| found.trim() == name);
    let task = tasks.map(|task| task.unwrap().path()).find(named)?;
    let call = fs::read_to_string(task.join("syscall")).ok()?;
    call.split_whitespace().next()?.parse().ok()
}

/// The kernel counts a thread that sleeps in the io_uring as waiting for the disk.
#[test]
fn a_worker_without_requests_does_not_look_like_one_that_waits_for_the_disk() {
    let disk = Disk::new(SECTORS);
    let mut driver = disk.driver(false);
    driver.start(ALL);
    for seed in 0..3 {
        assert_eq!(write(&mut driver, 0, &pattern(seed, 4096)), OK);
        until(|| sleeps_in("blk-root-q0") == Some(libc::SYS_epoll_wait));
        assert_eq!(read(&mut driver, 0, 4096), (pattern(seed, 4096), OK));
    }
}

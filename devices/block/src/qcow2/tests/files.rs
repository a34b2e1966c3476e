//! Images in files: locks, descriptors, space, and the death of the process.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader},
    os::{
        fd::AsRawFd as _,
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use rustix::fs::{FlockOperation, fcntl_lock};
use vmm_base::{lacking, sys::event::wait_for};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    super::{
        check,
        create::{self, CreateOptions, Preallocation},
        header::Header,
    },
    support::Guest,
};
use crate::{
    Backing, Image, Operation, Qcow2Image, SECTOR,
    pool::Pool as RawPool,
    tests::model::{SECTORS, Step, run_on, steps},
    uring::UringEngine,
};

pub(super) fn file(path: &Path, flags: i32) -> File {
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false);
    options.custom_flags(flags).open(path).unwrap()
}

fn create(path: &Path, size: u64) {
    create_in(path, size, create::CLUSTER_SIZE);
}

pub(super) fn create_in(path: &Path, size: u64, cluster_size: u32) {
    create_with(path, size, |options| options.cluster_size = cluster_size);
}

/// Creates an image with changes of the usual options.
pub(super) fn create_with(path: &Path, size: u64, change: impl FnOnce(&mut CreateOptions)) {
    let mut options = CreateOptions {
        size,
        cluster_size: create::CLUSTER_SIZE,
        preallocation: Preallocation::Off,
        backing: None,
    };
    change(&mut options);
    create::create(file(path, 0), options).unwrap();
}

fn open(path: &Path) -> Qcow2Image {
    Qcow2Image::open(file(path, 0).into(), false, Vec::new()).unwrap()
}

pub(super) fn report(path: &Path) -> check::Report {
    let file = file(path, 0);
    let header = Header::read(&file).unwrap().unwrap();
    check::inspect(&file, &header).unwrap().unwrap().report
}

/// Checks the image with `qemu-img check`, if QEMU is installed.
pub(super) fn ask_qemu(path: &Path) {
    let output = Command::new("qemu-img").arg("check").arg("-q").arg(path).output();
    match output {
        // 3: leaks only (qemu-img(1)).
        Ok(output) => assert!(
            matches!(output.status.code(), Some(0 | 3)),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => lacking("qemu-img", error),
    }
}

#[test]
fn one_writes_or_several_read_and_images_below_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    create(&path, 1 << 20);
    let writer = open(&path);
    let again = |read_only| Qcow2Image::open(file(&path, 0).into(), read_only, Vec::new());
    assert!(again(false).unwrap_err().to_string().starts_with("in use by"));
    assert!(again(true).unwrap_err().to_string().starts_with("in use by"));
    let engine = writer.engine().unwrap();
    drop(writer);
    assert!(again(true).is_err());
    drop(engine);
    let readers = [again(true).unwrap(), again(true).unwrap()];
    assert!(again(false).is_err());
    drop(readers);
    let overlay = folder.path().join("overlay");
    create_with(&overlay, 1 << 20, |options| options.backing = Some("qcow2"));
    let below = vec![Backing::Qcow2(File::open(&path).unwrap().into())];
    let overlay = Qcow2Image::open(file(&overlay, 0).into(), false, below).unwrap();
    assert!(again(false).is_err());
    assert!(again(true).is_ok());
    drop(overlay);
    assert!(again(false).is_ok());
}

#[test]
fn descriptors_that_can_not_be_used_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    create(&path, 1 << 20);
    let error = |file: File, read_only| {
        Qcow2Image::open(file.into(), read_only, Vec::new())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(error(File::open(&path).unwrap(), false), "not open for writing");
    assert!(error(File::open(folder.path()).unwrap(), true).ends_with("directory"));
    let append = File::options().read(true).append(true).open(&path).unwrap();
    assert!(error(append, false).contains("appending"));
    assert!(Qcow2Image::open(File::open(&path).unwrap().into(), true, Vec::new()).is_ok());
}

#[test]
fn discards_shrink_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    create(&path, 64 << 20);
    let disk = open(&path);
    let mut guest = Guest::new(&disk);
    for part in 0..16 {
        guest.write(part << 20, &vec![1; 1 << 20]).unwrap();
    }
    guest.flush().unwrap();
    let allocated = || fs::metadata(&path).unwrap().blocks() * 512;
    assert!(allocated() >= 16 << 20);
    let discard = Operation::Discard {
        offset: 0,
        length: 64 << 20,
    };
    guest.request(discard, 0).unwrap();
    guest.flush().unwrap();
    assert!(allocated() < 1 << 20, "{}", allocated());
    drop((guest, disk));
    ask_qemu(&path);
}

#[test]
fn what_lies_in_one_piece_is_read_and_written_without_threads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    create_with(&path, 16 << 20, |options| {
        options.preallocation = Preallocation::Metadata;
    });
    let disk = open(&path);
    let mut guest = Guest::new(&disk);
    guest.write(1 << 20, &vec![1; 1 << 20]).unwrap();
    assert_eq!(guest.read(1 << 20, 4096).unwrap(), [1; 4096]);
    assert_eq!(guest.read((2 << 20) - 512, 1024).unwrap()[512..], [0; 512]);
    let ring = UringEngine::new(
        Arc::clone(disk.target.as_ref().unwrap()),
        Arc::new(RawPool::new(Arc::clone(disk.target.as_ref().unwrap()))),
    );
    // Where the kernel has rings.
    assert_eq!(disk.pool.threads() == 0, ring.is_ok());
    guest.flush().unwrap();
    assert!(disk.pool.threads() > 0);
}

#[test]
fn nobody_sleeps_beside_what_a_thread_is_done_with() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    create(&path, 1 << 20);
    let disk = open(&path);
    let mut guest = Guest::new(&disk);
    guest.write(0, &[1; 4096]).unwrap();
    let other = EventFd::new(EFD_NONBLOCK).unwrap();
    let write = Operation::Write {
        offset: 0,
        stable: false,
    };
    // The ring's own completion wakes the sleeper.
    guest.submit(0, write, 4096);
    let sleeps = guest.engine.commit_and_sleep(other.as_raw_fd(), None).unwrap();
    guest.engine.commit().unwrap();
    guest.take_all();
    // A thread's completion has called, and is not looked for.
    let _count = guest.engine.event().unwrap().read();
    guest.submit(0, Operation::Flush, 0);
    guest.engine.commit().unwrap();
    let late = Instant::now() + Duration::from_secs(60);
    wait_for(guest.engine.event().unwrap(), late).unwrap();
    guest.submit(1, write, 4096);
    assert!(!guest.engine.commit_and_sleep(other.as_raw_fd(), None).unwrap());
    guest.engine.commit().unwrap();
    guest.take_all();
    assert_eq!(guest.engine.in_flight(), 0);
    if !sleeps {
        lacking("io_uring", "there is no ring to sleep in");
    }
}

/// Runs `steps` on an image of [`SECTORS`] sectors, all written or all unwritten, and checks the
/// final image.
pub(super) fn does_what_a_disk_does(path: &Path, disk: Qcow2Image, steps: Vec<Step>, written: bool) {
    let size = (SECTORS * SECTOR) as usize;
    let mut guest = Guest::new(&disk);
    if written {
        guest.write(0, &vec![0; size]).unwrap();
    }
    run_on(disk.engine().unwrap(), steps, || guest.read(0, size).unwrap());
    drop((guest, disk));
    let found = report(path);
    assert_eq!((found.corruptions, found.leaks), (0, 0), "{found:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    /// With a ring beside the threads, where the kernel has it.
    #[test]
    fn an_image_in_a_file_does_what_a_disk_does(steps in steps(false), written: bool) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        create(&path, SECTORS * SECTOR);
        let disk = open(&path);
        does_what_a_disk_does(&path, disk, steps, written);
    }
}

/// Environment: the image that a child process writes to until it is killed.
const VICTIM: &str = "VMMD_TEST_QCOW2_VICTIM";
/// How it opens it.
const VICTIMS_FLAGS: &str = "VMMD_TEST_QCOW2_VICTIMS_FLAGS";
const VICTIM_SECTORS: u64 = 32 << 10;

/// The place and content of the writer's `number`th write.
fn victims_write(seed: u64, number: u64) -> (u64, usize) {
    let random = (seed ^ number)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .rotate_left(23);
    let length = 1 + random % 64;
    ((random >> 16) % (VICTIM_SECTORS - 64), length as usize)
}

/// Child process of the test below, not a test of its own: writes, flushes and reports each flush.
#[test]
fn victim() {
    let Some(path) = std::env::var_os(VICTIM) else {
        return;
    };
    let flags = std::env::var(VICTIMS_FLAGS).unwrap().parse().unwrap();
    let file = file(Path::new(&path), flags);
    let disk = Qcow2Image::open(file.into(), false, Vec::new()).unwrap();
    let mut guest = Guest::new(&disk);
    let seed = fs::metadata(&path).unwrap().ino();
    for number in 1.. {
        let (sector, count) = victims_write(seed, number);
        let data: Vec<u8> = (0..count * 64).flat_map(|_| u64::to_le_bytes(number)).collect();
        guest.write(sector * SECTOR, &data).unwrap();
        if number % 7 == 0 {
            let (sector, count) = victims_write(seed, number / 2);
            let zeroes = Operation::WriteZeroes {
                offset: sector * SECTOR,
                length: count as u64 * SECTOR,
                unmap: true,
            };
            guest.request(zeroes, 0).unwrap();
            // Written again, so that the content is known.
            let data: Vec<u8> = (0..count * 64).flat_map(|_| u64::to_le_bytes(number)).collect();
            guest.write(sector * SECTOR, &data).unwrap();
        }
        if number % 5 == 0 {
            guest.flush().unwrap();
            println!("flushed {number}");
        }
    }
}

#[test]
fn a_killed_process_leaves_a_consistent_image_with_all_that_was_flushed() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = folder.path().join("disk");
    for round in 0..6_u64 {
        let _ = fs::remove_file(&path);
        create(&path, VICTIM_SECTORS * SECTOR);
        let seed = fs::metadata(&path).unwrap().ino();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "qcow2::tests::files::victim", "--nocapture"])
            .env(VICTIM, &path)
            .env(VICTIMS_FLAGS, [0, libc::O_DIRECT][round as usize % 2].to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let flushed = |line: &str| line.strip_prefix("flushed ")?.parse::<u64>().ok();
        let mut last = 0;
        for line in lines.by_ref() {
            last = flushed(&line.unwrap()).unwrap_or(last);
            if last > 60 + round * 35 {
                break;
            }
        }
        // It is somewhere between two lines.
        std::thread::sleep(Duration::from_micros(round * 700));
        child.kill().unwrap();
        child.wait().unwrap();
        for line in lines {
            last = flushed(&line.unwrap()).unwrap_or(last);
        }
        assert!(last > 60, "the writer got nowhere");
        // The kernel lets go of a dead process's ring, and of the locks with it, when it finds the time.
        let file = file(&path, 0);
        fcntl_lock(&file, FlockOperation::LockExclusive).unwrap();
        drop(file);
        let found = report(&path);
        assert_eq!(found.corruptions, 0, "{found:?}");
        ask_qemu(&path);
        check_flushed(&path, seed, last);
        let found = report(&path);
        assert_eq!((found.corruptions, found.leaks), (0, 0), "{found:?}");
        ask_qemu(&path);
    }
}

fn check_flushed(path: &Path, seed: u64, last: u64) {
    // Number of the last flushed write of each sector; later writes may be present or not.
    let mut expected = vec![0; VICTIM_SECTORS as usize];
    let mut later = vec![Vec::new(); VICTIM_SECTORS as usize];
    // The writer was at most one flush and its writes ahead of its last report.
    for number in 1..=last + 20 {
        let mut places = vec![victims_write(seed, number)];
        if number % 7 == 0 {
            places.push(victims_write(seed, number / 2));
        }
        for (index, (sector, count)) in places.into_iter().enumerate() {
            for sector in sector as usize..sector as usize + count {
                if number <= last {
                    expected[sector] = number;
                } else {
                    later[sector].push(number);
                    if index == 1 {
                        later[sector].push(0);
                    }
                }
            }
        }
    }
    let disk = open(path);
    let mut guest = Guest::new(&disk);
    for part in 0..VICTIM_SECTORS / 1024 {
        let data = guest.read(part * 1024 * SECTOR, 1024 * SECTOR as usize).unwrap();
        for (sector, content) in (part as usize * 1024..).zip(data.chunks(SECTOR as usize)) {
            let value = u64::from_le_bytes(content[..8].try_into().unwrap());
            assert!(
                value == expected[sector] || later[sector].contains(&value),
                "sector {sector} holds {value}, not {} ({last} was flushed)",
                expected[sector]
            );
        }
    }
}

/// Images created by qemu-img are usable here and stay valid for qemu-img. Skipped without
/// qemu-img.
#[test]
fn images_of_qemu_are_used_and_stay_such() {
    const SIZE: usize = 4 << 20;
    let folder = tempfile::tempdir().unwrap();
    let (base, ours) = (folder.path().join("base"), folder.path().join("ours"));
    let mut content: Vec<u8> = (0..SIZE as u32).map(|at| (at / 3000 % 251) as u8).collect();
    content[SIZE / 2..SIZE / 2 + SIZE / 4].fill(0);
    fs::write(&base, &content).unwrap();
    let qemu_img = |arguments: &[&str], files: &[&Path]| {
        let output = Command::new("qemu-img").args(arguments).args(files).output();
        let output = output.map_err(|error| lacking("qemu-img", error)).ok()?;
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Some(())
    };
    for options in [
        "compat=1.1",
        "compat=0.10",
        "cluster_size=512,refcount_bits=1",
        "cluster_size=4k,refcount_bits=64",
        "cluster_size=2M,preallocation=metadata",
        "cluster_size=4k,compat=1.1 -c",
        "compat=0.10 -c",
    ] {
        let path = folder.path().join("disk");
        let mut arguments = vec!["convert", "-f", "raw", "-O", "qcow2", "-o"];
        arguments.extend(options.split(' '));
        if qemu_img(&arguments, &[&base, &path]).is_none() {
            return;
        }
        let disk = open(&path);
        let mut guest = Guest::new(&disk);
        assert!(guest.read(0, SIZE).unwrap() == content, "{options}");
        let mut expected = content.clone();
        for (at, length) in [(512, 512), (100 << 10, 70 << 10), (SIZE / 2 + 4096, 1536)] {
            guest.write(at as u64, &vec![0xfd; length]).unwrap();
            expected[at..at + length].fill(0xfd);
        }
        let zeroes = Operation::WriteZeroes {
            offset: 1 << 20,
            length: (512 << 10) + 512,
            unmap: true,
        };
        guest.request(zeroes, 0).unwrap();
        expected[1 << 20..(1 << 20) + (512 << 10) + 512].fill(0);
        disk.grow(Some(SIZE as u64 * 2)).unwrap();
        expected.resize(SIZE * 2, 0);
        drop((guest, disk));
        fs::write(&ours, &expected).unwrap();
        qemu_img(&["check", "-q"], &[&path]).unwrap();
        qemu_img(&["compare", "-q", "-f", "raw", "-F", "qcow2"], &[&ours, &path]).unwrap();
    }
}

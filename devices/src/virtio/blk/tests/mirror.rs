//! A disk that is copied while its driver writes.

use std::{
    ops::Range,
    os::fd::OwnedFd,
    sync::atomic::AtomicBool,
    thread::{self, JoinHandle},
};

use block::{
    Content, Image, Qcow2Image,
    content::{BLOCK, PIECE},
    qcow2::create::{self, CreateOptions, Preallocation},
};
use rstest::rstest;

use super::{storage::Storage, *};
use crate::{component::Component as _, virtio::blk::Mirror};

/// Bytes of the disk: its last block is not whole.
const CAPACITY: u64 = (4 << 20) + 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Raw,
    Qcow2,
}

fn image(kind: Kind) -> Box<dyn Image> {
    let file = tempfile::tempfile().unwrap();
    match kind {
        Kind::Raw => {
            file.set_len(CAPACITY).unwrap();
            Box::new(RawImage::open(file.into(), false).unwrap())
        }
        Kind::Qcow2 => {
            let options = CreateOptions {
                size: CAPACITY,
                cluster_size: create::CLUSTER_SIZE,
                preallocation: Preallocation::Off,
                backing: None,
            };
            create::create(file.try_clone().unwrap(), options).unwrap();
            Box::new(Qcow2Image::open(OwnedFd::from(file), false, Vec::new()).unwrap())
        }
    }
}

/// Copies all that the mirrored disk has.
fn copy_all(mirror: &mut Mirror, to: &mut [u8]) {
    let mut offset = 0;
    while offset < mirror.capacity() {
        let extent = mirror.extent(offset).unwrap();
        let end = offset + extent.length.min(PIECE);
        if !extent.is_hole {
            copy(mirror, &(offset..end), to);
        }
        offset = end;
    }
}

fn copy(mirror: &mut Mirror, range: &Range<u64>, to: &mut [u8]) {
    let mut data = Vec::new();
    mirror.read(range, &mut data).unwrap();
    to[range.start as usize..range.end as usize].copy_from_slice(&data);
}

/// Copies the changed ranges. Returns the number of bytes.
fn copy_changes(mirror: &mut Mirror, to: &mut [u8]) -> u64 {
    let (mut from, mut copied) = (0, 0);
    while let Some(range) = mirror.take(from).unwrap() {
        from = range.end;
        copied += range.end - range.start;
        copy(mirror, &range, to);
    }
    copied
}

/// Copies the disk and then its changes until told to stop, as a migration does.
fn copier(mut mirror: Mirror, stop: Arc<AtomicBool>) -> JoinHandle<(Mirror, Vec<u8>)> {
    thread::spawn(move || {
        let mut to = vec![0; CAPACITY as usize];
        copy_all(&mut mirror, &mut to);
        while !stop.load(Ordering::SeqCst) {
            copy_changes(&mut mirror, &mut to);
        }
        (mirror, to)
    })
}

/// Each copy contains all data that the device has acknowledged, for every interleaving of reads,
/// marks and writes.
#[rstest]
fn a_copy_of_a_disk_that_is_written_to_has_everything_in_the_end(
    #[values(Kind::Raw, Kind::Qcow2)] kind: Kind,
) {
    let front = Blk::new(image(kind), options());
    let control = front.control();
    let mut driver = Driver::new(Rig::new(Box::new(front)));
    driver.start(ALL);
    for sector in (0..CAPACITY / 512).step_by(7) {
        assert_eq!(write(&mut driver, sector, &[1; 512]), OK);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let copying = copier(control.mirror().unwrap(), Arc::clone(&stop));
    assert!(control.mirror().is_err(), "one at a time");
    let mut at = 1_u64;
    for round in 0..1500_u32 {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let sector = (at >> 33) % (CAPACITY / 512 - 16);
        let status = match round % 5 {
            3 => {
                let range = [
                    &sector.to_le_bytes()[..],
                    &9_u32.to_le_bytes(),
                    &1_u32.to_le_bytes(),
                ]
                .concat();
                request(&mut driver, [header(WRITE_ZEROES, 0), range].concat(), 0).1
            }
            4 => {
                let range = [&sector.to_le_bytes()[..], &16_u32.to_le_bytes(), &[0; 4]].concat();
                request(&mut driver, [header(DISCARD, 0), range].concat(), 0).1
            }
            _ => write(
                &mut driver,
                sector,
                &vec![round as u8 | 1; 512 * (1 + round as usize % 16)],
            ),
        };
        assert_eq!(status, OK);
    }
    driver.rig.pause();
    stop.store(true, Ordering::SeqCst);
    let (mut mirror, mut copied) = copying.join().unwrap();
    copy_changes(&mut mirror, &mut copied);
    assert_eq!(mirror.changed(), 0);
    let mut wanted = vec![0; CAPACITY as usize];
    copy_all(&mut mirror, &mut wanted);
    assert!(copied == wanted, "the copy differs");
    drop(mirror);
    // Without a mirror, changes are not marked, and a new copy can start.
    driver.rig.device.resume().unwrap();
    assert_eq!(write(&mut driver, 0, &[9; 512]), OK);
    let mirror = control.mirror().unwrap();
    assert_eq!(mirror.changed(), 0);
}

#[test]
fn a_change_is_marked_when_it_is_done_and_not_before_whether_it_succeeds_or_not() {
    let storage = Storage::new();
    let (mut driver, control) = storage.disk(1, OnError::Report);
    let mirror = control.mirror().unwrap();
    for (number, fails) in [(1, false), (2, true)] {
        storage.stall(true);
        storage.set_full(fails);
        let request = [header(OUT, number * 8), vec![7; 512]].concat();
        driver.submit(0, &[Buffer::Readable(request), Buffer::Writable(1)]);
        until(|| storage.asked().len() as u64 == number);
        assert_eq!(
            (mirror.changed(), mirror.take(0).unwrap()),
            (0, None),
            "it is on its way"
        );
        storage.stall(false);
        let status = driver.wait_used(0).1.pop();
        assert_eq!(status, Some(if fails { IOERR } else { OK }));
        // The driver has been told: it is marked by now.
        let range = mirror.take(0).unwrap().unwrap();
        assert_eq!(range, number * BLOCK..(number + 1) * BLOCK);
        assert_eq!(mirror.take(0).unwrap(), None);
    }
}

#[test]
fn a_disk_that_is_gone_or_has_grown_is_not_copied_on() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let image = RawImage::open(file.into(), false).unwrap();
    let front = Blk::new(Box::new(image), options());
    let control = front.control();
    let mut driver = Driver::new(Rig::new(Box::new(front)));
    driver.start(ALL);
    let mirror = control.mirror().unwrap();
    control.grow(Some(2 << 20)).unwrap();
    assert!(mirror.take(0).is_ok(), "nothing is there yet");
    assert_eq!(write(&mut driver, 2048, &[1; 512]), OK);
    assert!(mirror.take(0).is_err());
    drop(mirror);
    let mirror = control.mirror().unwrap();
    assert_eq!(mirror.capacity(), 2 << 20);
    drop(driver);
    assert!(mirror.take(0).is_err() && mirror.extent(0).is_err());
    assert!(control.mirror().is_err());
}

#[rstest]
fn what_was_never_written_is_a_hole(#[values(Kind::Raw, Kind::Qcow2)] kind: Kind) {
    let image = image(kind);
    let mut content = Content::new(image.access().unwrap(), CAPACITY).unwrap();
    let holes = |content: &Content| {
        let (mut offset, mut holes) = (0, 0);
        while offset < CAPACITY {
            let extent = content.extent(offset).unwrap();
            holes += if extent.is_hole { extent.length } else { 0 };
            offset += extent.length;
        }
        assert_eq!(offset, CAPACITY);
        holes
    };
    assert_eq!(holes(&content), CAPACITY);
    content.write(2 << 20, &[7; 4096]).unwrap();
    content.write(CAPACITY - 512, &[8; 512]).unwrap();
    content.flush().unwrap();
    assert!(holes(&content) >= CAPACITY - 2 * 65536 && holes(&content) < CAPACITY - 4096);
    let mut data = Vec::new();
    content.read(&(CAPACITY - 1024..CAPACITY), &mut data).unwrap();
    assert_eq!(data, [[0; 512], [8; 512]].concat());
    content.clear(2 << 20, 65536).unwrap();
    content.read(&(2 << 20..(2 << 20) + 4096), &mut data).unwrap();
    assert_eq!(data, [0; 4096]);
    assert!(content.write(0, &vec![0; PIECE as usize + 1]).is_err());
    assert!(content.write(CAPACITY, &[0; 512]).is_err());
}

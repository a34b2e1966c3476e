//! The engine against a disk in memory, as all engines are tested.

use std::thread;

use proptest::prelude::*;

use super::support::{Guest, Recorder, assert_sound, created, image, open, overlay, try_open};
use crate::{
    Image, Qcow2Image, SECTOR,
    qcow2::{
        Below,
        create::{CreateOptions, Preallocation},
    },
    tests::model::{SECTORS, run_on, steps},
};

const SIZE: u64 = SECTORS * SECTOR;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn it_does_what_a_disk_does(steps in steps(false), cluster_bits in 9_u32..=17, preallocate: bool) {
        let preallocation = if preallocate { Preallocation::Metadata } else { Preallocation::Off };
        let recorder = created(CreateOptions {
            size: SIZE,
            cluster_size: 1 << cluster_bits,
            preallocation,
            backing: None,
        });
        let disk = open(&recorder);
        let mut guest = Guest::new(&disk);
        run_on(disk.engine().unwrap(), steps, || guest.read(0, SIZE as usize).unwrap());
        drop((guest, disk));
        assert_sound(&recorder);
    }

    #[test]
    fn so_does_an_overlay_over_zeroes(steps in steps(false), cluster_bits in 9_u32..=16) {
        let below = Recorder::new(vec![0; SIZE as usize]);
        let recorder = overlay(SIZE, 1 << cluster_bits, "raw");
        let disk = try_open(&recorder, false, vec![Below::Raw(below)]).unwrap();
        let mut guest = Guest::new(&disk);
        run_on(disk.engine().unwrap(), steps, || guest.read(0, SIZE as usize).unwrap());
        drop((guest, disk));
        assert_sound(&recorder);
    }
}

/// Each writes every fourth sector, and reads it back; one of them discards and flushes far away.
pub(super) fn several_engines_write_at_once(disk: &Qcow2Image) {
    const ROUNDS: u64 = 300;
    thread::scope(|scope| {
        for lane in 0..4_u64 {
            let mut guest = Guest::new(disk);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let offset = (round * 37 % 1024 * 4 + lane) * SECTOR;
                    let data = [(lane * 50 + round % 50) as u8; SECTOR as usize];
                    guest.write(offset, &data).unwrap();
                    assert_eq!(guest.read(offset, data.len()).unwrap(), data);
                    if round % 16 == 0 {
                        guest.flush().unwrap();
                    }
                    if lane == 0 && round % 8 == 0 {
                        let offset = (4 << 20) + (round % 32) * (64 << 10);
                        guest.write(offset, &[1; 70 << 10]).unwrap();
                        let length = 64 << 10;
                        guest
                            .request(crate::Operation::Discard { offset, length }, 0)
                            .unwrap();
                    }
                }
            });
        }
    });
    let mut guest = Guest::new(disk);
    for lane in 0..4_u64 {
        for round in 0..ROUNDS {
            let offset = (round * 37 % 1024 * 4 + lane) * SECTOR;
            let data = [(lane * 50 + round % 50) as u8; SECTOR as usize];
            assert_eq!(guest.read(offset, data.len()).unwrap(), data);
        }
    }
}

#[test]
fn a_host_without_space_gives_errors_and_nothing_is_lost() {
    let recorder = image(8 << 20, 4096);
    let disk = open(&recorder);
    let mut guest = Guest::new(&disk);
    guest.write(0, &[1; 64 << 10]).unwrap();
    guest.flush().unwrap();
    *recorder.limit.lock().unwrap() = Some(recorder.content().len() as u64);
    let error = guest.write(1 << 20, &[2; 64 << 10]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    guest.write(4096, &[3; 512]).unwrap();
    guest.flush().unwrap();
    assert_eq!(guest.read(0, 4096).unwrap(), [1; 4096]);
    *recorder.limit.lock().unwrap() = None;
    guest.write(1 << 20, &[2; 64 << 10]).unwrap();
    guest.flush().unwrap();
    assert_eq!(guest.read(1 << 20, 64 << 10).unwrap(), vec![2; 64 << 10]);
    assert_eq!(guest.read(4096, 512).unwrap(), [3; 512]);
    drop((guest, disk));
    assert_sound(&recorder);
}

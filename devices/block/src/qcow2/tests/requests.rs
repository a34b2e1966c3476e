use std::sync::atomic::Ordering;

use super::support::{Guest, assert_sound, image, open, report};
use crate::{Image, Operation};

#[test]
fn discarded_clusters_read_as_zeroes_and_are_holes() {
    let recorder = image(4 << 20, 64 << 10);
    let disk = open(&recorder);
    let mut guest = Guest::new(&disk);
    guest.write(0, &vec![5; 1 << 20]).unwrap();
    guest.flush().unwrap();
    assert!(recorder.content().iter().filter(|byte| **byte == 5).count() >= 1 << 20);
    let discard = Operation::Discard {
        offset: 512,
        length: (1 << 20) - 512,
    };
    guest.request(discard, 0).unwrap();
    guest.flush().unwrap();
    let left = recorder.content().iter().filter(|byte| **byte == 5).count();
    assert!(left < (64 << 10) + 4096, "{left}");
    assert_eq!(guest.read(64 << 10, 960 << 10).unwrap(), vec![0; 960 << 10]);
    assert_eq!(report(&recorder).allocated, 1);
}

#[test]
fn clusters_that_were_discarded_before_a_flush_saw_them_are_holes_as_well() {
    let recorder = image(4 << 20, 64 << 10);
    let disk = open(&recorder);
    let mut guest = Guest::new(&disk);
    guest.write(0, &vec![5; 1 << 20]).unwrap();
    let discard = Operation::Discard {
        offset: 0,
        length: 1 << 20,
    };
    guest.request(discard, 0).unwrap();
    guest.flush().unwrap();
    assert!(!recorder.content().contains(&5));
    let report = report(&recorder);
    assert_eq!((report.corruptions, report.leaks, report.allocated), (0, 0, 0));
}

#[test]
fn zeroes_are_written_to_whole_and_to_parts_of_clusters() {
    for unmap in [false, true] {
        let recorder = image(4 << 20, 64 << 10);
        let disk = open(&recorder);
        let mut guest = Guest::new(&disk);
        guest.write(0, &vec![5; 1 << 20]).unwrap();
        let zeroes = Operation::WriteZeroes {
            offset: 1024,
            length: (512 << 10) + 512,
            unmap,
        };
        guest.request(zeroes, 0).unwrap();
        let mut expected = vec![5; 1 << 20];
        expected[1024..1536 + (512 << 10)].fill(0);
        assert!(guest.read(0, 1 << 20).unwrap() == expected);
        guest.flush().unwrap();
        let report = report(&recorder);
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
        assert_eq!(report.allocated, if unmap { 9 } else { 16 });
    }
}

#[test]
fn a_disk_grows_while_it_is_used() {
    let recorder = image(1 << 20, 512);
    let disk = open(&recorder);
    let mut guest = Guest::new(&disk);
    guest.write(0, &[1; 512]).unwrap();
    assert!(guest.write(1 << 20, &[1; 512]).is_err());
    assert!(guest.read((1 << 20) - 512, 1024).is_err());
    disk.grow(Some(20 << 20)).unwrap();
    assert_eq!(disk.capacity(), 20 << 20);
    guest.write((20 << 20) - 512, &[2; 512]).unwrap();
    assert!(disk.grow(Some(10 << 20)).is_err());
    assert!(disk.grow(Some((20 << 20) + 100)).is_err());
    guest.flush().unwrap();
    drop((guest, disk));
    assert_sound(&recorder);
    let disk = open(&recorder);
    let mut guest = Guest::new(&disk);
    assert_eq!(guest.read(0, 512).unwrap(), [1; 512]);
    assert_eq!(guest.read((20 << 20) - 512, 512).unwrap(), [2; 512]);
}

#[test]
fn once_the_host_could_not_make_something_stable_no_flush_succeeds_again() {
    let recorder = image(1 << 20, 4096);
    let disk = open(&recorder);
    let mut guest = Guest::new(&disk);
    guest.write(0, &[1; 4096]).unwrap();
    guest.flush().unwrap();
    guest.write(8192, &[2; 4096]).unwrap();
    recorder.fails_once.store(true, Ordering::Relaxed);
    for _ in 0..2 {
        let error = guest.flush().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
    // The tables describe the last stable state.
    drop(guest);
    drop(disk);
    let disk = open(&recorder);
    let mut guest = Guest::new(&disk);
    assert_eq!(guest.read(0, 4096).unwrap(), [1; 4096]);
    guest.flush().unwrap();
}

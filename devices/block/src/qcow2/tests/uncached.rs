//! Images past the page cache.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::Arc,
};

use proptest::prelude::*;
use rustix::fs::{OFlags, fcntl_getfl};
use tempfile::TempDir;

use super::{
    super::{Uncached, create::CLUSTER_SIZE, medium::Medium},
    files::{ask_qemu, create_in, create_with, does_what_a_disk_does, file},
    model::several_engines_write_at_once,
    support::Guest,
};
use crate::{
    Backing, Qcow2Image, SECTOR,
    target::{Alignment, Target},
    tests::model::{SECTORS, steps},
};

/// As of a disk with blocks of 4 KiB.
const COARSE: Alignment = Alignment {
    memory: 1024,
    offset: 4096,
};

/// Where O_DIRECT is more likely than in the folder for temporary files, which may be in memory.
fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap()
}

fn image(folder: &TempDir, size: u64) -> PathBuf {
    let path = folder.path().join("disk");
    create_in(&path, size, CLUSTER_SIZE);
    path
}

fn direct(path: &Path) -> File {
    file(path, libc::O_DIRECT)
}

fn open(path: &Path) -> Qcow2Image {
    Qcow2Image::open(direct(path).into(), false, Vec::new()).unwrap()
}

fn coarse(path: &Path) -> Arc<Target> {
    Arc::new(Target::extended_by_writes(direct(path), COARSE))
}

#[test]
fn with_o_direct_nothing_goes_through_the_page_cache() {
    let folder = folder();
    let path = image(&folder, 1 << 20);
    let opened = direct(&path);
    let observer = opened.try_clone().unwrap();
    let disk = Qcow2Image::open(opened.into(), false, Vec::new()).unwrap();
    assert!(fcntl_getfl(&observer).unwrap().contains(OFlags::DIRECT));
    assert_ne!(disk.target.as_ref().unwrap().alignment(), Alignment::NONE);
    let mut guest = Guest::new(&disk);
    guest.write(512, &[1; 512]).unwrap();
    guest.flush().unwrap();
    assert_eq!(guest.read(512, 512).unwrap(), [1; 512]);
    // All of them: the locks belong to the open file.
    drop((guest, disk, observer));
    ask_qemu(&path);
}

#[test]
fn what_lies_below_goes_through_the_page_cache() {
    let folder = folder();
    let path = image(&folder, 1 << 20);
    let below = folder.path().join("below");
    fs::write(&below, [7; 4096]).unwrap();
    let lower = File::open(&below).unwrap();
    rustix::fs::fcntl_setfl(&lower, OFlags::DIRECT).unwrap();
    let observer = lower.try_clone().unwrap();
    fs::remove_file(&path).unwrap();
    create_with(&path, 1 << 20, |options| options.backing = Some("raw"));
    let below = vec![Backing::Raw(lower.into())];
    let disk = Qcow2Image::open(direct(&path).into(), false, below).unwrap();
    assert!(!fcntl_getfl(&observer).unwrap().contains(OFlags::DIRECT));
    let mut guest = Guest::new(&disk);
    guest.write(512, &[1; 512]).unwrap();
    assert_eq!(guest.read(0, 1024).unwrap(), [[7; 512], [1; 512]].concat());
}

#[test]
fn a_file_that_ends_within_a_block_is_filled_up_when_it_is_there_to_be_written() {
    let folder = folder();
    let path = image(&folder, 1 << 20);
    let length = fs::metadata(&path).unwrap().len();
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(length + 100)
        .unwrap();
    let read_only = Qcow2Image::open(direct(&path).into(), true, Vec::new()).unwrap();
    assert_eq!(Guest::new(&read_only).read(0, 512).unwrap(), [0; 512]);
    assert_eq!(fs::metadata(&path).unwrap().len(), length + 100);
    drop(read_only);
    let mut guest = Guest::new(&open(&path));
    guest.write(0, &[1; 512]).unwrap();
    assert_eq!(guest.read(0, 1024).unwrap(), [[1; 512], [0; 512]].concat());
    drop(guest);
    assert!(fs::metadata(&path).unwrap().len().is_multiple_of(512));
    ask_qemu(&path);
}

#[test]
fn what_is_no_qcow2_image_stays_as_it_is() {
    let folder = folder();
    let path = folder.path().join("disk");
    for content in [&b""[..], &[1; 700], &[0; 4096]] {
        fs::write(&path, content).unwrap();
        assert!(Qcow2Image::open(direct(&path).into(), false, Vec::new()).is_err());
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

#[test]
fn bytes_of_any_place_and_length_are_read_and_written() {
    let folder = folder();
    let path = folder.path().join("file");
    let medium = Uncached::new(coarse(&path));
    let mut model = vec![0_u8; 600 << 10];
    let places = [
        (0, 8),
        (4090, 12),
        (8191, 1),
        (100, 300_000),
        (131_072, 131_072),
        (262_143, 8195),
        (500_000, 5),
    ];
    for (number, (offset, length)) in (1..).zip(places) {
        let data = vec![number; length];
        medium.write_at(&data, offset as u64).unwrap();
        model[offset..offset + length].copy_from_slice(&data);
        let mut found = vec![9; model.len()];
        medium.read_at(&mut found, 0).unwrap();
        assert!(found == model, "{number}");
    }
    assert!(medium.size().unwrap().is_multiple_of(4096));
    for (offset, length) in [(4000, 200), (131_000, 70_000), (590_000, 10_000), (1 << 20, 512)] {
        medium.punch(offset, length).unwrap();
        let end = model.len().min((offset + length) as usize);
        model.get_mut(offset as usize..end).unwrap_or_default().fill(0);
    }
    let before = medium.size().unwrap();
    assert_eq!(before, 503_808, "punching does not extend it");
    medium.allocate_zeroes(300_000, 300_000).unwrap();
    model[300_000..600_000].fill(0);
    assert_eq!(medium.size().unwrap(), 602_112);
    let mut found = vec![9; 10_000];
    medium.read_at(&mut found, 297_000).unwrap();
    assert!(found == model[297_000..307_000]);
}

/// Clusters that are smaller than blocks: data of one engine lies in a block with data of another, and with tables.
#[test]
fn several_engines_write_to_parts_of_the_same_blocks_at_once() {
    let folder = folder();
    for cluster in [512, 4096, CLUSTER_SIZE] {
        let path = folder.path().join(cluster.to_string());
        create_in(&path, 8 << 20, cluster);
        let disk = Qcow2Image::open_uncached(coarse(&path), false, Vec::new()).unwrap();
        several_engines_write_at_once(&disk);
        drop(disk);
        ask_qemu(&path);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// With rings and threads on blocks that are larger than sectors, and sometimes larger than clusters.
    #[test]
    fn an_image_of_large_blocks_does_what_a_disk_does(
        steps in steps(false),
        written: bool,
        cluster in prop_oneof![Just(512_u32), Just(4096), Just(CLUSTER_SIZE)],
        large_blocks: bool,
    ) {
        let folder = folder();
        let path = folder.path().join("disk");
        create_in(&path, SECTORS * SECTOR, cluster);
        let disk = if large_blocks {
            Qcow2Image::open_uncached(coarse(&path), false, Vec::new()).unwrap()
        } else {
            open(&path)
        };
        does_what_a_disk_does(&path, disk, steps, written);
    }
}

mod hold;
mod mirror;
mod model;
mod queues;
mod requests;
mod rings;
mod shown;
mod storage;
mod throttle;

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use block::{Operation, RawImage};

use super::*;
use crate::virtio::{
    fault::DeviceEvent,
    testing::{Area, Buffer, Driver, Rig, suite::DeviceUnderTest},
};

const SECTORS: usize = 64;
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

/// All of the device's own.
const ALL: u64 = !(3 << 28);
const F_RO: u64 = 1 << 5;
const F_FLUSH: u64 = 1 << 9;

fn options() -> BlkOptions {
    BlkOptions {
        name: "root".into(),
        serial: String::new(),
        queues: 1,
        logical_block: 512,
        on_error: OnError::Report,
        limiter: None,
    }
}

/// With that many queues.
fn queues(queues: u16) -> BlkOptions {
    BlkOptions { queues, ..options() }
}

struct Disk {
    file: File,
}

impl Disk {
    fn new(sectors: usize) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(sectors as u64 * SECTOR_SIZE as u64).unwrap();
        Self { file }
    }

    fn front_with(&self, read_only: bool, options: BlkOptions) -> Blk {
        let image = RawImage::open(self.file.try_clone().unwrap().into(), read_only).unwrap();
        Blk::new(Box::new(image), options)
    }

    fn front(&self, read_only: bool) -> Box<dyn VirtioDevice> {
        let serial = "serial-0123456789-too-long".into();
        Box::new(self.front_with(read_only, BlkOptions { serial, ..options() }))
    }

    fn driver_with(&self, read_only: bool, options: BlkOptions) -> Driver {
        let mut driver = Driver::new(Rig::new(Box::new(self.front_with(read_only, options))));
        driver.start(ALL);
        driver
    }

    fn driver(&self, read_only: bool) -> Driver {
        let mut driver = Driver::new(Rig::new(self.front(read_only)));
        driver.start(ALL);
        driver
    }

    fn content(&self) -> Vec<u8> {
        let mut content = vec![0; usize::try_from(self.file.metadata().unwrap().len()).unwrap()];
        self.file.read_exact_at(&mut content, 0).unwrap();
        content
    }
}

const SECTOR_SIZE: usize = 512;

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

/// Sends a request with readable bytes and `incoming` writable bytes. Returns the bytes written
/// before the status, and the status, which is the last byte.
fn request(driver: &mut Driver, readable: Vec<u8>, incoming: usize) -> (Vec<u8>, u8) {
    let writable = Buffer::Writable(u32::try_from(incoming + 1).unwrap());
    let (used, mut written) = driver.request(0, &[Buffer::Readable(readable), writable]);
    assert!(used.written as usize <= incoming + 1);
    if used.written as usize == incoming + 1 {
        written.pop();
    }
    (written, used.last.unwrap())
}

fn write(driver: &mut Driver, sector: u64, data: &[u8]) -> u8 {
    request(driver, [&header(OUT, sector), data].concat(), 0).1
}

fn read(driver: &mut Driver, sector: u64, length: usize) -> (Vec<u8>, u8) {
    request(driver, header(IN, sector), length)
}

fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| seed.wrapping_add(u8::try_from(at % 251).unwrap()))
        .collect()
}

impl DeviceUnderTest for Disk {
    const FEATURES: u64 = ALL;
    const EAGER_QUEUES: &'static [u16] = &[0];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let disk = Self::new(SECTORS);
        let front = disk.front(false);
        (disk, front)
    }

    fn probe(&mut self, driver: &mut Driver) {
        let data = pattern(7, 1024);
        assert_eq!(write(driver, 5, &data), OK);
        assert_eq!(read(driver, 5, 1024), (data.clone(), OK));
        assert_eq!(request(driver, header(FLUSH, 0), 0).1, OK);
        assert_eq!(self.content()[5 * SECTOR_SIZE..][..1024], data);
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (
            0,
            vec![
                Buffer::Readable(header(IN, 0)),
                Buffer::Writable(4096),
                Buffer::Writable(1),
            ],
        )
    }
}

fn until(what: impl Fn() -> bool) {
    let begin = Instant::now();
    while !what() {
        assert!(begin.elapsed() < crate::virtio::testing::PATIENCE);
        std::thread::yield_now();
    }
}

crate::virtio_device_tests!(Disk);
crate::virtio_saved_device_tests!(Disk, "virtio-blk");

#[test]
fn a_restored_disk_has_the_size_that_its_driver_knows_and_a_smaller_image_is_refused() {
    use crate::component::Component as _;

    let disk = Disk::new(SECTORS);
    let mut driver = Driver::new(Rig::new(disk.front(false)));
    driver.start(ALL);
    let known = driver.rig.read(Area::Device, 0, 8);
    driver.rig.pause();
    let section = driver.rig.device.save().unwrap();
    let smaller = Disk::new(SECTORS - 8);
    let error = driver.rig.restored(smaller.front(false), &section).err().unwrap();
    assert_eq!(error.to_string(), "field `capacity`: the image is smaller");
    let larger = Disk::new(SECTORS + 8);
    driver.rig = driver.rig.restored(larger.front(false), &section).unwrap();
    assert_eq!(driver.rig.read(Area::Device, 0, 8), known);
}

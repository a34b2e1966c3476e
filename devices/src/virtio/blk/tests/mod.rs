mod hold;
mod model;
mod queues;
mod rings;
mod shown;
mod storage;
mod throttle;

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Instant,
};

use proptest::prelude::*;
use rstest::rstest;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, bitmap::Bitmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    request::{Header, Plan, Status},
    *,
};
use crate::{
    block::{Completion, Engine, Geometry, Operation, RawImage, Request},
    virtio::{
        fault::DeviceEvent,
        testing::{Area, Buffer, Driver, Rig, suite::DeviceUnderTest},
    },
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

/// Sends a request with its readable bytes and that many writable ones; gives what was written, and the status.
fn request(driver: &mut Driver, readable: Vec<u8>, incoming: usize) -> (Vec<u8>, u8) {
    let writable = Buffer::Writable(u32::try_from(incoming + 1).unwrap());
    let (used, mut written) = driver.request(0, &[Buffer::Readable(readable), writable]);
    assert_eq!(used.written as usize, incoming + 1);
    let status = written.pop().unwrap();
    (written, status)
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

crate::virtio_device_tests!(Disk);

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
    let (id, status) = request(&mut driver, header(GET_ID, 0), 40);
    assert_eq!((&id[..20], status), (&b"serial-0123456789-to"[..], OK));
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

/// Fails as a host does.
struct BadImage(io::ErrorKind);

impl Image for BadImage {
    fn capacity(&self) -> u64 {
        4096
    }
    fn read_only(&self) -> bool {
        false
    }
    fn geometry(&self) -> Geometry {
        Geometry {
            physical_block: 4096,
            optimal_io: 0,
            discard_granularity: None,
        }
    }
    fn grow(&self, _capacity: Option<u64>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn engine(&self) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(BadEngine {
            kind: self.0,
            done: Vec::new(),
        }))
    }
}

struct BadEngine {
    kind: io::ErrorKind,
    done: Vec<Completion>,
}

impl Engine for BadEngine {
    fn submit(&mut self, request: Request) {
        let result = Err(self.kind.into());
        self.done.push(Completion {
            token: request.token,
            result,
            buffers: request.buffers,
        });
    }
    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn completed(&mut self) -> Option<Completion> {
        self.done.pop()
    }
    fn in_flight(&self) -> usize {
        self.done.len()
    }
    fn depth(&self) -> usize {
        8
    }
    fn event(&self) -> Option<&EventFd> {
        None
    }
    fn wait(&mut self, _deadline: Instant) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn errors_of_the_host_become_io_errors_a_counter_and_an_event() {
    let front = Blk::new(Box::new(BadImage(io::ErrorKind::StorageFull)), options());
    let mut driver = Driver::new(Rig::new(Box::new(front)));
    driver.start(ALL);
    for _ in 0..20 {
        assert_eq!(write(&mut driver, 0, &[0; 512]), IOERR);
        assert_eq!(read(&mut driver, 0, 512).1, IOERR);
        assert_eq!(request(&mut driver, header(FLUSH, 0), 0).1, IOERR);
    }
    let event = driver.rig.sink.wait();
    let expected = |message: &str| message.starts_with("write to the image: ");
    assert!(
        matches!(&event, DeviceEvent::BackendError(message) if expected(message)),
        "{event:?}"
    );
    // The last answer may be seen before its fault is counted.
    assert!(
        driver
            .rig
            .device
            .counters()
            .backend_faults
            .load(Ordering::Relaxed)
            >= 59
    );
    assert!(driver.rig.sink.events().len() <= 5);
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

/// Notes what it is asked to do, and does requests only when told to.
struct SlowImage(Arc<SlowState>);

struct SlowState {
    asked: Mutex<Vec<Operation>>,
    waiting: Mutex<Vec<Request>>,
    done: Mutex<Vec<Request>>,
    event: EventFd,
}

struct SlowEngine(Arc<SlowState>);

impl SlowState {
    /// The last request completes first: any order is allowed.
    fn finish_all(&self) {
        self.done
            .lock()
            .unwrap()
            .append(&mut self.waiting.lock().unwrap());
        self.event.write(1).unwrap();
    }
}

impl Image for SlowImage {
    fn capacity(&self) -> u64 {
        1 << 20
    }
    fn read_only(&self) -> bool {
        false
    }
    fn geometry(&self) -> Geometry {
        Geometry {
            physical_block: 4096,
            optimal_io: 0,
            discard_granularity: None,
        }
    }
    fn grow(&self, _capacity: Option<u64>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn engine(&self) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(SlowEngine(self.0.clone())))
    }
}

impl Engine for SlowEngine {
    fn submit(&mut self, request: Request) {
        let operation = request.operation;
        self.0.waiting.lock().unwrap().push(request);
        self.0.asked.lock().unwrap().push(operation);
    }
    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn completed(&mut self) -> Option<Completion> {
        let Request { token, buffers, .. } = self.0.done.lock().unwrap().pop()?;
        Some(Completion {
            token,
            result: Ok(()),
            buffers,
        })
    }
    fn in_flight(&self) -> usize {
        // One lock after the other: `finish_all` takes them in the other order.
        let waiting = self.0.waiting.lock().unwrap().len();
        waiting + self.0.done.lock().unwrap().len()
    }
    fn depth(&self) -> usize {
        4
    }
    fn event(&self) -> Option<&EventFd> {
        Some(&self.0.event)
    }
    /// As if all were done in time, if there is any.
    fn wait(&mut self, deadline: Instant) -> io::Result<()> {
        if Instant::now() < deadline {
            self.0.finish_all();
        }
        Ok(())
    }
}

fn slow() -> (Arc<SlowState>, Driver) {
    let state = Arc::new(SlowState {
        asked: Mutex::default(),
        waiting: Mutex::default(),
        done: Mutex::default(),
        event: EventFd::new(EFD_NONBLOCK).unwrap(),
    });
    let front = Blk::new(Box::new(SlowImage(state.clone())), options());
    let mut driver = Driver::new(Rig::new(Box::new(front)));
    driver.start(ALL);
    (state, driver)
}

fn until(what: impl Fn() -> bool) {
    let begin = Instant::now();
    while !what() {
        assert!(begin.elapsed() < crate::virtio::testing::PATIENCE);
        std::thread::yield_now();
    }
}

#[test]
fn requests_beyond_an_engines_depth_wait_and_all_are_answered_in_any_order() {
    let (state, mut driver) = slow();
    for sector in 0..10 {
        driver.offer(0, &[Buffer::Readable(header(IN, sector)), Buffer::Writable(513)]);
    }
    driver.kick(0);
    for (asked, left) in [(4, 6), (8, 2), (10, 0)] {
        until(|| state.asked.lock().unwrap().len() == asked);
        state.finish_all();
        while driver.under_way(0) > left {
            assert_eq!(driver.wait_used(0).1.pop(), Some(OK));
        }
    }
}

#[test]
fn a_pause_waits_for_requests_under_way_or_fails_and_the_device_goes_on() {
    use crate::component::Component;
    let (state, mut driver) = slow();
    driver.submit(0, &[Buffer::Readable(header(IN, 0)), Buffer::Writable(513)]);
    until(|| state.asked.lock().unwrap().len() == 1);
    assert!(driver.rig.device.pause(Instant::now()).is_err());
    state.finish_all();
    assert_eq!(driver.wait_used(0).1.pop(), Some(OK));
    driver.submit(0, &[Buffer::Readable(header(IN, 0)), Buffer::Writable(513)]);
    until(|| state.asked.lock().unwrap().len() == 2);
    driver.rig.pause();
    assert_eq!(driver.try_used(0).unwrap().1.pop(), Some(OK));
    driver.rig.device.resume().unwrap();
}

#[test]
fn writes_are_stable_when_answered_if_the_driver_can_not_flush() {
    for (features, expected) in [(ALL, false), (ALL & !F_FLUSH, true)] {
        let (state, mut driver) = slow();
        driver.start(features);
        driver.submit(
            0,
            &[
                Buffer::Readable([header(OUT, 1), vec![0; 512]].concat()),
                Buffer::Writable(1),
            ],
        );
        until(|| !state.waiting.lock().unwrap().is_empty());
        state.finish_all();
        driver.wait_used(0);
        let asked = state.asked.lock().unwrap().clone();
        assert_eq!(
            asked,
            [Operation::Write {
                offset: 512,
                stable: expected
            }]
        );
    }
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
            Plan::Answer(Status::Ok) => {
                prop_assert!(kind == IN && incoming == 0 || kind == OUT && outgoing == 0);
            }
            Plan::Answer(Status::Unsupported) => {
                prop_assert!(![IN, OUT, FLUSH, GET_ID, WRITE_ZEROES].contains(&kind));
            }
            Plan::Answer(Status::IoError) => prop_assert!([IN, OUT, DISCARD, WRITE_ZEROES].contains(&kind)),
        }
    }
}

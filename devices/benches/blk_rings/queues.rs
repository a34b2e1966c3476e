//! Cost of the queue, compared with the queue of the crate virtio-queue. The benchmark measures
//! four steps: taking a chain, iterating over its descriptors, returning the chain, and deciding
//! about the interrupt. One thread is both the driver and the device. The cost of the driver's part
//! is measured alone and subtracted.
//!
//! For two devices, the benchmark also measures the work for a request (see [`Work`]), including
//! its system call. These rows contain only times, because callgrind does not count instructions of
//! the kernel.
//!
//! The benchmark uses the crate's iterators unchanged. The project's queue additionally checks that
//! all buffers lie in guest memory, that the readable buffers come first, and that the chain is
//! complete. A device on the crate's queue would have to do these checks.
//!
//! Callgrind counts the instructions. It runs this program twice with different numbers of
//! requests, so that neither figure contains work that is not done per request. The counts are the
//! same in each run.

use std::{
    hint::black_box,
    path::Path,
    process::Command,
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use devices::virtio::{
    chain::Chain,
    queue::{Queue, QueueState},
};
use virtio_queue::{QueueOwnedT as _, QueueT as _};
use vm_memory::{GuestAddress, GuestMemoryBackend as _, VolatileMemory as _, VolatileSlice};
use vmm_base::GuestMemory;

use super::{
    cpu_time,
    guest::descriptor,
    median, repeat, turns,
    work::{Hand, REQUEST, Work},
};

/// Entries of the queue.
const SIZE: u16 = 256;
const STATE: QueueState = QueueState {
    index: 0,
    size: SIZE,
    desc_table: 0x1_0000,
    avail_ring: 0x2_0000,
    used_ring: 0x3_0000,
    next_avail: 0,
    next_used: 0,
};
/// Indirect tables, one cache line each.
const TABLES: u64 = 0x4_0000;
/// Buffers, one page for each chain.
const BUFFERS: u64 = 0x10_0000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Layout of a driver's chain in a ring: length and flags of each buffer.
struct Shape {
    name: &'static str,
    buffers: &'static [(u32, u16)],
    indirect: bool,
    work: Work,
}

const BLOCK_REQUEST: &[(u32, u16)] = &[(16, 0), (4096, WRITE), (1, WRITE)];
const SHAPES: [Shape; 7] = [
    shape("block, 3 descriptors", BLOCK_REQUEST, false),
    shape("block, 3 in an indirect table", BLOCK_REQUEST, true),
    shape("network, 2 descriptors", &[(12, 0), (1500, 0)], false),
    shape("network, 1 descriptor", &[(1526, WRITE)], false),
    shape("entropy, 1 descriptor", &[(64, WRITE)], false),
    whole(
        "entropy, whole request of 64 bytes",
        &[(64, WRITE)],
        Work::Entropy,
    ),
    whole(
        "balloon, whole request of 256 pages",
        &[(REQUEST, 0)],
        Work::Balloon,
    ),
];
/// Chains that are available at once.
const BATCHES: [u16; 2] = [1, 16];

const fn shape(name: &'static str, buffers: &'static [(u32, u16)], indirect: bool) -> Shape {
    Shape {
        name,
        buffers,
        indirect,
        work: Work::Queue,
    }
}

const fn whole(name: &'static str, buffers: &'static [(u32, u16)], work: Work) -> Shape {
    Shape {
        work,
        ..shape(name, buffers, false)
    }
}

/// Where the buffers of a chain are.
fn buffer(number: u64) -> u64 {
    BUFFERS + number * 0x2000
}

/// Implementation of the device's side.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// No device: measures the cost of the driver.
    Nobody,
    Ours,
    Crate,
}

impl Side {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Nobody, "nobody"),
        (Self::Ours, "ours"),
        (Self::Crate, "crate"),
    ];
}

type Slice<'a> = VolatileSlice<'a, vm_memory::bitmap::MS<'a, GuestMemory>>;

struct Rings<'a> {
    avail: Slice<'a>,
    desc: Slice<'a>,
    tables: Slice<'a>,
    next: u16,
}

impl<'a> Rings<'a> {
    fn new(memory: &'a GuestMemory) -> Self {
        let slice = |address, length| memory.get_slice(GuestAddress(address), length).unwrap();
        let size = usize::from(SIZE);
        Self {
            avail: slice(STATE.avail_ring, 6 + 2 * size),
            desc: slice(STATE.desc_table, 16 * size),
            tables: slice(TABLES, 64 * size),
            next: 0,
        }
    }

    /// Makes that many chains available, as a driver with EVENT_IDX that wants an interrupt for the last one.
    fn offer(&mut self, shape: &Shape, batch: u16) {
        let room = SIZE / shape.buffers.len() as u16;
        for _ in 0..batch {
            let number = self.next % room;
            let head = if shape.indirect {
                number
            } else {
                number * shape.buffers.len() as u16
            };
            for (at, (length, flags)) in (0_u16..).zip(shape.buffers) {
                let address = buffer(number.into()) + u64::from(at) * 0x10;
                let last = usize::from(at) + 1 == shape.buffers.len();
                let (more, base) = (if last { 0 } else { NEXT }, if shape.indirect { 0 } else { head });
                let entry = descriptor((address, *length, flags | more, base + at + 1));
                let (table, place) = if shape.indirect {
                    (&self.tables, usize::from(number) * 64)
                } else {
                    (&self.desc, usize::from(head) * 16)
                };
                table.get_ref(place + usize::from(at) * 16).unwrap().store(entry);
            }
            if shape.indirect {
                let table = TABLES + u64::from(number) * 64;
                let entry = descriptor((table, shape.buffers.len() as u32 * 16, INDIRECT, 0));
                self.desc.get_ref(usize::from(head) * 16).unwrap().store(entry);
            }
            let slot = usize::from(self.next % SIZE);
            self.number(4 + 2 * slot).store(head, Ordering::Relaxed);
            self.next = self.next.wrapping_add(1);
        }
        let event = 4 + 2 * usize::from(SIZE);
        self.number(event)
            .store(self.next.wrapping_sub(1), Ordering::Relaxed);
        self.number(2).store(self.next, Ordering::Release);
    }

    fn number(&self, offset: usize) -> &AtomicU16 {
        self.avail.get_atomic_ref(offset).unwrap()
    }
}

/// Takes all that is available and gives it back. Says how many chains, and how many bytes their buffers have.
trait Device {
    fn serve(&mut self, memory: &GuestMemory, hand: &mut Hand) -> (u16, u64);
}

struct Ours {
    queue: Queue,
    chain: Chain,
}

impl Device for Ours {
    fn serve(&mut self, memory: &GuestMemory, hand: &mut Hand) -> (u16, u64) {
        let (mut count, mut bytes) = (0, 0);
        self.queue.disable_notification().unwrap();
        while self.queue.pop(&mut self.chain).unwrap() {
            for segment in self.chain.readable().iter().chain(self.chain.writable()) {
                bytes += u64::from(black_box(segment).length);
            }
            hand.ours(memory, &self.chain);
            let written = self.chain.writable_len();
            self.queue.add_used(self.chain.head(), written).unwrap();
            count += 1;
        }
        assert!(self.queue.needs_interrupt().unwrap());
        assert!(!self.queue.enable_notification().unwrap());
        (count, bytes)
    }
}

impl Device for virtio_queue::Queue {
    fn serve(&mut self, memory: &GuestMemory, hand: &mut Hand) -> (u16, u64) {
        let (mut count, mut bytes) = (0, 0);
        self.disable_notification(memory).unwrap();
        while let Some(chain) = self.iter(memory).unwrap().next() {
            let (head, mut written) = (chain.head_index(), 0);
            for descriptor in chain {
                let length = black_box(&descriptor).len();
                bytes += u64::from(length);
                hand.theirs(memory, &descriptor);
                if descriptor.is_write_only() {
                    written += length;
                }
            }
            self.add_used(memory, head, written).unwrap();
            count += 1;
        }
        assert!(self.needs_notification(memory).unwrap());
        assert!(!self.enable_notification(memory).unwrap());
        (count, bytes)
    }
}

struct Nobody(u16, u64);

impl Device for Nobody {
    fn serve(&mut self, _memory: &GuestMemory, _hand: &mut Hand) -> (u16, u64) {
        (self.0, self.1)
    }
}

struct Bench<'a> {
    memory: &'a GuestMemory,
    rings: Rings<'a>,
    shape: &'a Shape,
    batch: u16,
    hand: Hand,
}

impl<'a> Bench<'a> {
    fn new(memory: &'a GuestMemory, shape: &'a Shape, batch: u16) -> Self {
        let hand = Hand::new(shape.work);
        for number in 0..u64::from(SIZE) {
            hand.prepare(memory, GuestAddress(buffer(number)));
        }
        Self {
            memory,
            rings: Rings::new(memory),
            shape,
            batch,
            hand,
        }
    }

    fn turn(&mut self, device: &mut impl Device) {
        self.rings.offer(self.shape, self.batch);
        let (count, bytes) = device.serve(self.memory, &mut self.hand);
        let length: u64 = self
            .shape
            .buffers
            .iter()
            .map(|(length, _)| u64::from(*length))
            .sum();
        assert_eq!((count, bytes), (self.batch, length * u64::from(self.batch)));
    }

    /// Runs `drive` with a step that serves as many chains as it gives.
    fn with<T>(mut self, side: Side, drive: impl FnOnce(&mut dyn FnMut() -> u64) -> T) -> T {
        let batch = u64::from(self.batch);
        match side {
            Side::Nobody => {
                let length: u64 = self
                    .shape
                    .buffers
                    .iter()
                    .map(|(length, _)| u64::from(*length))
                    .sum();
                let mut device = Nobody(self.batch, length * batch);
                drive(&mut || {
                    self.turn(&mut device);
                    batch
                })
            }
            Side::Ours => {
                let queue = Queue::new(&STATE, SIZE, true, self.memory.clone()).unwrap();
                let mut device = Ours {
                    queue,
                    chain: Chain::new(),
                };
                drive(&mut || {
                    self.turn(&mut device);
                    batch
                })
            }
            Side::Crate => {
                let state = virtio_queue::QueueState {
                    max_size: SIZE,
                    event_idx_enabled: true,
                    size: SIZE,
                    ready: true,
                    desc_table: STATE.desc_table,
                    avail_ring: STATE.avail_ring,
                    used_ring: STATE.used_ring,
                    next_avail: 0,
                    next_used: 0,
                };
                let mut device = virtio_queue::Queue::try_from(state).unwrap();
                assert!(device.is_valid(self.memory));
                drive(&mut || {
                    self.turn(&mut device);
                    batch
                })
            }
        }
    }
}

/// As a machine has it: a hole below 4 GiB, here smaller.
fn memory() -> GuestMemory {
    let ranges = [(GuestAddress(0), 16 << 20), (GuestAddress(17 << 20), 1 << 20)];
    GuestMemory::from_ranges(&ranges).unwrap()
}

/// CPU time for each chain, in nanoseconds.
fn nanos(shape: &Shape, batch: u16, side: Side, time: Duration) -> f64 {
    let memory = memory();
    Bench::new(&memory, shape, batch).with(side, |step| {
        let (this, mut count) = (Path::new("/proc/thread-self"), 0);
        let begin = cpu_time(this);
        repeat(time, || count += step());
        (cpu_time(this) - begin).as_nanos() as f64 / count as f64
    })
}

/// Serves that many chains; what callgrind runs.
pub(super) fn serve(arguments: &[String]) {
    let [shape, batch, side, count] = arguments else {
        panic!("--serve SHAPE BATCH SIDE COUNT");
    };
    let shape = &SHAPES[shape.parse::<usize>().unwrap()];
    let side = Side::ALL[side.parse::<usize>().unwrap()].0;
    let count: u64 = count.parse().unwrap();
    let memory = memory();
    Bench::new(&memory, shape, batch.parse().unwrap()).with(side, |step| {
        let mut served = 0;
        while served < count {
            served += step();
        }
    });
}

/// Instructions for each chain; `None` where there is no valgrind.
fn instructions(shape: usize, batch: u16, side: usize) -> Option<f64> {
    let total = |count: u64| {
        let output = Command::new("valgrind")
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg(std::env::current_exe().unwrap())
            .arg("--serve")
            .args([shape, usize::from(batch), side].map(|number| number.to_string()))
            .arg(count.to_string())
            .output()
            .ok()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
        let line = text.lines().find_map(|line| line.split_once("Collected :"));
        Some(line.expect("callgrind's sum").1.trim().parse::<f64>().unwrap())
    };
    // As many as the rings have entries more: no turn of the ring is half done in one of them.
    let (few, many) = (u64::from(SIZE) * 3, u64::from(SIZE) * 19);
    Some((total(many)? - total(few)?) / (many - few) as f64)
}

/// Measures all shapes, shows them, and gives them as JSON.
pub(super) fn run(time: Duration, rounds: usize) -> Vec<String> {
    eprintln!(
        "taking and giving back a chain      ours    crate    ratio   ours    crate    ratio (ns, instructions)"
    );
    let mut rows = Vec::new();
    for (number, shape) in SHAPES.iter().enumerate() {
        for batch in BATCHES {
            let turns = turns::take(rounds, |_| {
                Side::ALL.map(|(side, _)| nanos(shape, batch, side, time))
            });
            let of = |figure: &dyn Fn(&[f64; 3]) -> f64| median(turns.counted.iter().map(figure));
            let (ours, theirs) = (
                of(&|[nobody, ours, _]| ours - nobody),
                of(&|[nobody, _, theirs]| theirs - nobody),
            );
            let ratio = of(&|[nobody, ours, theirs]| (ours - nobody) / (theirs - nobody));
            let counted = [0, 1, 2].map(|side| instructions(number, batch, side));
            let counts = match counted {
                [Some(nobody), Some(ours), Some(theirs)] => Some([ours - nobody, theirs - nobody]),
                _ => None,
            };
            let [mine, other] = counts.unwrap_or([f64::NAN; 2]);
            eprintln!(
                "{:<32} {ours:>7.1} {theirs:>8.1} {ratio:>8.2} {mine:>6.0} {other:>8.0} {:>8.2}",
                format!("{}, {batch}", shape.name),
                mine / other
            );
            let counts = counts.map_or("null".into(), |[ours, theirs]| format!("[{ours:.1},{theirs:.1}]"));
            rows.push(format!(
                r#"{{"chain":"{}","batch":{batch},"ours_ns":{ours:.1},"crate_ns":{theirs:.1},"ratio":{ratio:.3},"instructions":{counts}}}"#,
                shape.name
            ));
        }
    }
    rows
}

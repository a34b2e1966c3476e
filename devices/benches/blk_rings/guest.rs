//! A driver: indirect tables, EVENT_IDX, notifications when the device asks for them. It waits for answers in one of two
//! ways.

use std::{
    fs::{self, File},
    path::PathBuf,
    sync::atomic::{AtomicU16, AtomicU32, Ordering, fence},
    time::Duration,
};

use block::RawImage;
use devices::virtio::{
    blk::{Blk, BlkOptions, OnError},
    testing::{Driver, Rig},
};
use vm_memory::{GuestAddress, GuestMemoryBackend as _, VolatileMemory as _, VolatileSlice};
use vmm_base::GuestMemory;

use super::{BLOCK, DATA, Figures, Offsets, between_looks, cpu_time, places::Places, repeat};

/// Indirect tables of requests, one behind the other as Linux' allocator for small objects has them. In pages of their own
/// they would all compete for the same few places of a processor's cache.
const TABLES: u64 = 24 << 20;
const TABLE: usize = 64;
/// Headers and status bytes of requests, in one cache line each, as far apart as Linux' block layer has them (its own
/// `struct request` comes before each of the driver's).
const HEADERS: u64 = 25 << 20;
const HEADER: usize = 448;
/// Where the status byte is from the header on.
const STATUS: usize = 16;

/// How the driver waits for answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// The driver polls the used ring continuously, as SPDK's driver does. This mode measures the
    /// device alone.
    Polling,
    /// As Linux' does, it asks for an interrupt when there is nothing to do. Here that wakes a thread that sleeps, which the
    /// device's thread does and a guest without a hypervisor around it does not have: it is measured along.
    Interrupts,
}

impl Wait {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Polling => "polling",
            Self::Interrupts => "interrupts",
        }
    }
}

struct Requests<'a> {
    wait: Wait,
    driver: Driver,
    size: u16,
    avail: Slice<'a>,
    used: Slice<'a>,
    /// The descriptor table.
    desc: Slice<'a>,
    /// From [`TABLES`] on.
    tables: Slice<'a>,
    /// From [`HEADERS`] on.
    headers: Slice<'a>,
    next_avail: u16,
    last_used: u16,
    offsets: Offsets,
    kicks: u64,
}

type Slice<'a> = VolatileSlice<'a, vm_memory::bitmap::MS<'a, GuestMemory>>;

pub(super) fn run(file: File, bytes: u64, depth: u16, wait: Wait, time: Duration, places: Places) -> Figures {
    places.ask();
    let image = RawImage::open(file.into(), true).unwrap();
    let options = BlkOptions {
        name: "bench".into(),
        serial: String::new(),
        queues: 1,
        logical_block: 512,
        on_error: OnError::Report,
        limiter: None,
    };
    let rig = Rig::new(Box::new(Blk::new(Box::new(image), options)));
    let memory = rig.memory.clone();
    let mut driver = Driver::new(rig);
    driver.start(u64::MAX);
    let ring = &driver.rings[0];
    let slice = |address, length| memory.get_slice(GuestAddress(address), length).unwrap();
    let size = ring.size;
    let mut requests = Requests {
        wait,
        size,
        avail: slice(ring.avail, 6 + 2 * usize::from(size)),
        used: slice(ring.used, 6 + 8 * usize::from(size)),
        desc: slice(ring.desc, 16 * usize::from(size)),
        tables: slice(TABLES, usize::from(depth) * TABLE),
        headers: slice(HEADERS, usize::from(depth) * HEADER),
        driver,
        next_avail: 0,
        last_used: 0,
        offsets: Offsets::new(bytes),
        kicks: 0,
    };
    for slot in 0..depth {
        requests.offer(slot);
    }
    requests.kick_if_wanted(0);
    requests.turn();
    // It has its name since it answered.
    let worker = worker();
    places.has_serve(&worker);
    requests.turn();
    let begin = cpu_time(&worker);
    let mut count = 0;
    let elapsed = repeat(time, || count += requests.turn());
    let cpu = cpu_time(&worker).saturating_sub(begin);
    Figures {
        requests: count,
        elapsed,
        cpu,
        kicks: requests.kicks,
    }
}

/// The device's thread.
fn worker() -> PathBuf {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    tasks
        .map(|task| task.unwrap().path())
        .find(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.contains("bench-q")))
        .expect("the worker's thread")
}

/// A descriptor's address, length, flags and next one, as they lie in memory.
pub(super) fn descriptor((address, length, flags, next): (u64, u32, u16, u16)) -> [u64; 2] {
    [
        address,
        u64::from(length) | u64::from(flags) << 32 | u64::from(next) << 48,
    ]
}

impl Requests<'_> {
    /// Writes a request's descriptors, as drivers do for each request.
    fn describe(&self, slot: u16) {
        let (table, header) = (usize::from(slot) * TABLE, usize::from(slot) * HEADER);
        let data = DATA + u64::from(slot) * BLOCK;
        let header = HEADERS + header as u64;
        let status = header + STATUS as u64;
        let entries = [(header, 16, 1, 1), (data, BLOCK as u32, 3, 2), (status, 1, 2, 0)].map(descriptor);
        for (at, entry) in entries.into_iter().enumerate() {
            self.tables.get_ref(table + at * 16).unwrap().store(entry);
        }
        self.desc
            .get_ref(usize::from(slot) * 16)
            .unwrap()
            .store(descriptor((TABLES + table as u64, 48, 4, 0)));
    }

    fn offer(&mut self, slot: u16) {
        self.describe(slot);
        let sector = self.offsets.next() / 512;
        self.headers
            .get_ref(usize::from(slot) * HEADER)
            .unwrap()
            .store([0, sector]);
        let place = 4 + 2 * usize::from(self.next_avail % self.size);
        self.avail16(place).store(slot, Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
        self.avail16(2).store(self.next_avail, Ordering::Release);
    }

    fn kick_if_wanted(&mut self, old: u16) {
        fence(Ordering::SeqCst);
        let event = self
            .used16(4 + 8 * usize::from(self.size))
            .load(Ordering::Relaxed);
        let new = self.next_avail;
        if new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old) {
            self.kicks += 1;
            self.driver.kick(0);
        }
    }

    /// Takes all answers, waiting for the first, and asks again for each. Gives how many.
    fn turn(&mut self) -> u64 {
        let old = self.next_avail;
        let index = self.wait();
        let mut count = 0;
        while self.last_used != index {
            let place = 4 + 8 * usize::from(self.last_used % self.size);
            let element = self.used.get_atomic_ref::<AtomicU32>(place).unwrap();
            let slot = element.load(Ordering::Relaxed) as u16;
            let status = usize::from(slot) * HEADER + STATUS;
            assert_eq!(self.headers.get_ref::<u8>(status).unwrap().load(), 0);
            self.last_used = self.last_used.wrapping_add(1);
            self.offer(slot);
            count += 1;
        }
        self.kick_if_wanted(old);
        count
    }

    /// The used index, once it has moved.
    fn wait(&self) -> u16 {
        let index = || self.used16(2).load(Ordering::Acquire);
        let moved = || index() != self.last_used;
        let event = self.avail16(4 + 2 * usize::from(self.size));
        match self.wait {
            Wait::Polling => {
                // No interrupt for a long time.
                event.store(self.last_used.wrapping_add(1 << 15), Ordering::Relaxed);
                let mut looks = 0_u64;
                while !moved() {
                    looks += 1;
                    assert!(looks < 1 << 30, "no answer");
                    between_looks(looks);
                }
            }
            Wait::Interrupts => {
                if !moved() {
                    // An interrupt at the next answer.
                    event.store(self.last_used, Ordering::SeqCst);
                    fence(Ordering::SeqCst);
                    assert!(self.driver.rig.msi.wait_until(moved), "no answer");
                }
            }
        }
        index()
    }

    fn avail16(&self, offset: usize) -> &AtomicU16 {
        self.avail.get_atomic_ref(offset).unwrap()
    }

    fn used16(&self, offset: usize) -> &AtomicU16 {
        self.used.get_atomic_ref(offset).unwrap()
    }
}

//! A driver: sets the device up, puts requests into real rings, takes the answers.

use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;

use super::{Area, Rig};

const FEATURES_OK: u8 = 8;
const DRIVER_OK: u8 = 4;
/// Where rings are; 64 KiB for each queue.
const RINGS: u64 = 1 << 20;
/// Where they are after [`Driver::relocate`].
const OTHER_RINGS: u64 = 8 << 20;
const RING_SPACE: u64 = 1 << 16;
/// Where buffers are taken from, round and round. Above the hole.
const DATA: u64 = 18 << 20;
const DATA_END: u64 = 60 << 20;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A part of a request.
#[derive(Clone, Debug)]
pub enum Buffer {
    /// For the device to read.
    Readable(Vec<u8>),
    /// For the device to write, that many bytes.
    Writable(u32),
}

/// Used entry from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    pub head: u16,
    pub written: u32,
    /// The last writable byte, whether it counts as written or not: some devices have their status there.
    pub last: Option<u8>,
}

/// One queue as its driver keeps it.
pub struct Ring {
    pub index: u16,
    pub size: u16,
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
    free: Vec<u16>,
    /// Descriptors and writable buffers of each request under way, by head.
    pending: Vec<Option<(Vec<u16>, Vec<(u64, u32)>)>>,
    next_avail: u16,
    last_used: u16,
    event_idx: bool,
}

impl Ring {
    fn new(base: u64, index: u16, size: u16, event_idx: bool) -> Self {
        let desc = base + u64::from(index) * RING_SPACE;
        let avail = desc + u64::from(size) * 16;
        let used = (avail + u64::from(size) * 2 + 6).next_multiple_of(4096);
        Self {
            index,
            size,
            desc,
            avail,
            used,
            free: (0..size).rev().collect(),
            pending: vec![None; size.into()],
            next_avail: 0,
            last_used: 0,
            event_idx,
        }
    }

    /// Writes one descriptor.
    pub fn describe(&self, memory: &GuestMemory, at: u16, address: u64, length: u32, flags: u16, next: u16) {
        describe(memory, self.desc, at, address, length, flags, next);
    }

    /// Makes a chain available.
    pub fn offer(&mut self, memory: &GuestMemory, head: u16) {
        let slot = self.avail + 4 + u64::from(self.next_avail % self.size) * 2;
        memory.write_obj(head, GuestAddress(slot)).unwrap();
        self.next_avail = self.next_avail.wrapping_add(1);
        memory
            .store(self.next_avail, GuestAddress(self.avail + 2), Ordering::Release)
            .unwrap();
    }

    /// Sets the available index.
    pub fn set_avail_index(&self, memory: &GuestMemory, index: u16) {
        memory
            .store(index, GuestAddress(self.avail + 2), Ordering::Release)
            .unwrap();
    }

    fn wants_kick(&self, memory: &GuestMemory, old: u16) -> bool {
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event: u16 = memory
                .read_obj(GuestAddress(self.used + 4 + u64::from(self.size) * 8))
                .unwrap();
            let new = self.next_avail;
            return new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old);
        }
        memory.read_obj::<u16>(GuestAddress(self.used)).unwrap() & 1 == 0
    }

    /// Whether the device gave something back that was not taken yet.
    pub fn has_used(&self, memory: &GuestMemory) -> bool {
        memory
            .load::<u16>(GuestAddress(self.used + 2), Ordering::Acquire)
            .unwrap()
            != self.last_used
    }
}

/// Writes one descriptor of a table.
pub fn describe(memory: &GuestMemory, table: u64, at: u16, address: u64, length: u32, flags: u16, next: u16) {
    let raw =
        u128::from(address) | u128::from(length) << 64 | u128::from(flags) << 96 | u128::from(next) << 112;
    memory
        .write_slice(&raw.to_le_bytes(), GuestAddress(table + u64::from(at) * 16))
        .unwrap();
}

pub struct Driver {
    pub rig: Rig,
    pub rings: Vec<Ring>,
    pub features: u64,
    /// Whether requests are described by indirect tables.
    pub indirect: bool,
    base: u64,
    next_data: u64,
    kicks: u64,
}

impl Driver {
    pub fn new(rig: Rig) -> Self {
        Self {
            rig,
            rings: Vec::new(),
            features: 0,
            indirect: false,
            base: RINGS,
            next_data: DATA,
            kicks: 0,
        }
    }

    /// Moves rings and buffers to another place at the next start, so that a test can watch the old
    /// place.
    pub fn relocate(&mut self) {
        self.base = OTHER_RINGS;
        self.next_data = DATA + (DATA_END - DATA) / 2;
    }

    /// Back to where rings and buffers are at first.
    pub fn relocate_back(&mut self) {
        self.base = RINGS;
        self.next_data = DATA;
    }

    /// Feature bits on offer.
    pub fn offered(&self) -> u64 {
        self.rig.write(Area::Common, 0, 4, 0);
        let low = self.rig.read(Area::Common, 4, 4);
        self.rig.write(Area::Common, 0, 4, 1);
        low | self.rig.read(Area::Common, 4, 4) << 32
    }

    /// Negotiates the offered features of `wanted` and VERSION_1, up to FEATURES_OK.
    pub fn negotiate(&mut self, wanted: u64) {
        let rig = &self.rig;
        rig.reset_device();
        rig.write(Area::Common, 0x14, 1, 1);
        rig.write(Area::Common, 0x14, 1, 3);
        self.features = self.offered() & (wanted | 1 << 32);
        for half in 0..2 {
            rig.write(Area::Common, 8, 4, half);
            rig.write(Area::Common, 0xc, 4, self.features >> (32 * half) & 0xffff_ffff);
        }
        rig.write(Area::Common, 0x14, 1, u64::from(FEATURES_OK | 3));
        assert_eq!(rig.status(), FEATURES_OK | 3, "the features are refused");
    }

    /// Sets all queues up with empty rings: vector 0 for the configuration, n + 1 for queue n.
    pub fn set_up_queues(&mut self) {
        let rig = &self.rig;
        rig.write(Area::Common, 0x10, 2, 0);
        let count = rig.read(Area::Common, 0x12, 2) as u16;
        let event_idx = self.features >> 29 & 1 == 1;
        self.rings.clear();
        for index in 0..count {
            rig.write(Area::Common, 0x16, 2, index.into());
            let size = rig.read(Area::Common, 0x18, 2) as u16;
            let ring = Ring::new(self.base, index, size, event_idx);
            let zeroes = vec![0; RING_SPACE as usize];
            rig.memory.write_slice(&zeroes, GuestAddress(ring.desc)).unwrap();
            self.rings.push(ring);
            self.place_queue(index);
        }
    }

    /// Writes the queue's location to the device, and enables the queue.
    pub fn place_queue(&self, index: u16) {
        let (rig, ring) = (&self.rig, &self.rings[usize::from(index)]);
        rig.write(Area::Common, 0x16, 2, index.into());
        rig.write(Area::Common, 0x1a, 2, u64::from(index) + 1);
        assert_eq!(rig.read(Area::Common, 0x1a, 2), u64::from(index) + 1);
        for (register, address) in [(0x20, ring.desc), (0x28, ring.avail), (0x30, ring.used)] {
            rig.write(Area::Common, register, 4, address & 0xffff_ffff);
            rig.write(Area::Common, register + 4, 4, address >> 32);
        }
        rig.write(Area::Common, 0x1c, 2, 1);
        assert_eq!(rig.read(Area::Common, 0x1c, 2), 1);
    }

    pub fn driver_ok(&self) {
        self.rig
            .write(Area::Common, 0x14, 1, u64::from(FEATURES_OK | DRIVER_OK | 3));
    }

    /// Starts the device from any state.
    pub fn start(&mut self, wanted: u64) {
        self.negotiate(wanted);
        self.set_up_queues();
        self.driver_ok();
        assert_eq!(self.rig.status(), 0xf);
    }

    /// Puts a request into a ring without notifying the device. Gives its head.
    pub fn offer(&mut self, queue: u16, buffers: &[Buffer]) -> u16 {
        let mut placed = Vec::new();
        for buffer in buffers {
            let length = match buffer {
                Buffer::Readable(bytes) => bytes.len() as u32,
                Buffer::Writable(length) => *length,
            };
            if self.next_data + u64::from(length) > DATA_END {
                self.next_data = DATA;
            }
            let address = self.next_data;
            self.next_data += u64::from(length);
            if let Buffer::Readable(bytes) = buffer {
                self.rig.memory.write_slice(bytes, GuestAddress(address)).unwrap();
            }
            placed.push((
                address,
                length,
                if matches!(buffer, Buffer::Writable(_)) {
                    WRITE
                } else {
                    0
                },
            ));
        }
        let memory = &self.rig.memory;
        let ring = &mut self.rings[usize::from(queue)];
        let writable = placed
            .iter()
            .filter(|part| part.2 == WRITE)
            .map(|part| (part.0, part.1))
            .collect();
        let chain = |count: usize| (0..count).map(move |at| if at + 1 < count { NEXT } else { 0 });
        let descriptors: Vec<u16> = if self.indirect {
            let table = self.next_data.next_multiple_of(16);
            self.next_data = table + placed.len() as u64 * 16;
            for (at, ((address, length, flags), next)) in placed.iter().zip(chain(placed.len())).enumerate() {
                describe(
                    memory,
                    table,
                    at as u16,
                    *address,
                    *length,
                    flags | next,
                    at as u16 + 1,
                );
            }
            let head = ring.free.pop().expect("the ring is full");
            ring.describe(memory, head, table, placed.len() as u32 * 16, INDIRECT, 0);
            vec![head]
        } else {
            let at = ring.free.len() - placed.len();
            let descriptors = ring.free.split_off(at);
            for (at, ((address, length, flags), next)) in placed.iter().zip(chain(placed.len())).enumerate() {
                let following = descriptors.get(at + 1).copied().unwrap_or(0);
                ring.describe(
                    memory,
                    descriptors[at],
                    *address,
                    *length,
                    flags | next,
                    following,
                );
            }
            descriptors
        };
        let head = descriptors[0];
        ring.pending[usize::from(head)] = Some((descriptors, writable));
        ring.offer(memory, head);
        head
    }

    /// Notifies the device whether it wants that or not.
    pub fn kick(&mut self, queue: u16) {
        self.kicks += 1;
        self.rig
            .write(Area::Notify, u64::from(queue) * 4, 2, queue.into());
    }

    /// Offers a request and notifies the device if it asked for that.
    pub fn submit(&mut self, queue: u16, buffers: &[Buffer]) -> u16 {
        let old = self.rings[usize::from(queue)].next_avail;
        let head = self.offer(queue, buffers);
        if self.rings[usize::from(queue)].wants_kick(&self.rig.memory, old) {
            self.kick(queue);
        }
        head
    }

    /// How often the device was notified.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Returns the next used entry and the data that the device wrote, or `None` if no entry is
    /// available.
    pub fn try_used(&mut self, queue: u16) -> Option<(Used, Vec<u8>)> {
        let memory = &self.rig.memory;
        let ring = &mut self.rings[usize::from(queue)];
        if !ring.has_used(memory) {
            return None;
        }
        let slot = ring.used + 4 + u64::from(ring.last_used % ring.size) * 8;
        let element: u64 = memory.read_obj(GuestAddress(slot)).unwrap();
        let mut used = Used {
            head: element as u16,
            written: (element >> 32) as u32,
            last: None,
        };
        ring.last_used = ring.last_used.wrapping_add(1);
        if ring.event_idx {
            // Interrupt at the next one.
            let event = GuestAddress(ring.avail + 4 + u64::from(ring.size) * 2);
            memory.store(ring.last_used, event, Ordering::SeqCst).unwrap();
            fence(Ordering::SeqCst);
        }
        let (descriptors, writable) = ring.pending[usize::from(used.head)]
            .take()
            .expect("given back what was not asked");
        ring.free.extend(descriptors.into_iter().rev());
        let mut written = Vec::new();
        for (address, length) in writable {
            let mut bytes = vec![0; length as usize];
            memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
            written.extend(bytes);
        }
        assert!(
            used.written as usize <= written.len(),
            "more written than there is room for: {used:?}"
        );
        used.last = written.last().copied();
        written.truncate(used.written as usize);
        Some((used, written))
    }

    /// Waits for the interrupt and returns the next used entry.
    pub fn wait_used(&mut self, queue: u16) -> (Used, Vec<u8>) {
        let (rig, ring) = (&self.rig, &self.rings[usize::from(queue)]);
        let came = rig.msi.wait_until(|| ring.has_used(&rig.memory));
        assert!(came, "no answer on queue {queue}; status {:#x}", rig.status());
        self.try_used(queue).unwrap()
    }

    /// One request from beginning to end.
    pub fn request(&mut self, queue: u16, buffers: &[Buffer]) -> (Used, Vec<u8>) {
        let head = self.submit(queue, buffers);
        let answer = self.wait_used(queue);
        assert_eq!(answer.0.head, head);
        answer
    }

    /// Asks for no interrupts (without EVENT_IDX).
    pub fn suppress_interrupts(&self, queue: u16, suppress: bool) {
        let ring = &self.rings[usize::from(queue)];
        self.rig
            .memory
            .store(u16::from(suppress), GuestAddress(ring.avail), Ordering::SeqCst)
            .unwrap();
    }

    /// Requests under way.
    pub fn under_way(&self, queue: u16) -> usize {
        self.rings[usize::from(queue)].pending.iter().flatten().count()
    }

    /// Waits for the interrupt that says that the device needs a reset.
    pub fn wait_needs_reset(&self) {
        let rig = &self.rig;
        let came = rig.msi.wait_until(|| rig.status() & 0x40 != 0);
        assert!(
            came,
            "the device does not ask for a reset; status {:#x}",
            rig.status()
        );
    }
}

//! Our queue beside the one of the crate virtio-queue, with the crate's mock driver: the same chains, the same used ring and the
//! same notifications, step by step; and what becomes of rings that make no sense.

use std::collections::VecDeque;

use proptest::prelude::*;
use virtio_queue::{
    Error, QueueOwnedT, QueueT,
    desc::{RawDescriptor, split::Descriptor},
    mock::{AvailRing, DescriptorTable, MockSplitQueue, UsedRing},
};
use vm_memory::{Bytes, GuestAddress};
use vmm_base::{GuestMemory, ram::Segment};

use crate::virtio::{
    chain::{Chain, MAX_SEGMENTS},
    fault::RingError,
    queue::{Queue, QueueState},
};

const SIZE: u16 = 16;
const STATE: QueueState = QueueState {
    index: 0,
    size: SIZE,
    desc_table: 0x1000,
    avail_ring: 0x2000,
    used_ring: 0x3000,
    next_avail: 0,
    next_used: 0,
};
const USED_EVENT: GuestAddress = GuestAddress(STATE.avail_ring + 4 + 2 * SIZE as u64);
const AVAIL_EVENT: GuestAddress = GuestAddress(STATE.used_ring + 4 + 8 * SIZE as u64);
const TABLE: u64 = 0x8_0000;
const DATA: u64 = 0x10_0000;
/// Where the mock driver has its indirect tables.
const MOCK_TABLES: u64 = 0x3000_0000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn memory() -> GuestMemory {
    GuestMemory::from_ranges(&[
        (GuestAddress(0), 0x20_0000),
        (GuestAddress(MOCK_TABLES), 0x1_0000),
    ])
    .unwrap()
}

fn crates_queue(state: &QueueState, event_idx_enabled: bool) -> virtio_queue::Queue {
    virtio_queue::Queue::try_from(virtio_queue::QueueState {
        max_size: SIZE,
        size: state.size,
        ready: true,
        event_idx_enabled,
        desc_table: state.desc_table,
        avail_ring: state.avail_ring,
        used_ring: state.used_ring,
        next_avail: state.next_avail,
        next_used: state.next_used,
    })
    .unwrap()
}

/// A chain's buffers, readable ones and writable ones, without those of no length.
type Parts = [Vec<(u64, u32)>; 2];

fn parts_of(chain: &Chain) -> Parts {
    let list = |segments: &[Segment]| {
        segments
            .iter()
            .map(|part| (part.address.0, part.length))
            .collect()
    };
    [list(chain.readable()), list(chain.writable())]
}

fn parts(descriptors: impl Iterator<Item = Descriptor>) -> Parts {
    let mut parts = Parts::default();
    for descriptor in descriptors.filter(|descriptor| descriptor.len() > 0) {
        parts[usize::from(descriptor.is_write_only())].push((descriptor.addr().0, descriptor.len()));
    }
    parts
}

fn raw((address, length, flags, next): (u64, u32, u16, u16)) -> RawDescriptor {
    Descriptor::new(address, length, flags, next).into()
}

#[test]
fn the_mock_drivers_chains_are_taken_and_given_back_as_the_crates_queue_does() {
    let memory = memory();
    // Its used ring lies over the second half of its available ring, so half of the entries can be used.
    let mut driver = MockSplitQueue::new(&memory, SIZE);
    for length in [1, 2, 3, 1] {
        driver.add_chain(length).unwrap();
    }
    for length in [1, 4, 16] {
        driver.add_indirect_chain(length).unwrap();
    }
    let state = QueueState {
        index: 0,
        size: SIZE,
        desc_table: driver.desc_table_addr().0,
        avail_ring: driver.avail_addr().0,
        used_ring: driver.used_addr().0,
        next_avail: 0,
        next_used: 0,
    };
    let mut ours = Queue::new(&state, SIZE, false, memory.clone()).unwrap();
    let mut theirs: virtio_queue::Queue = driver.create_queue().unwrap();
    assert!(theirs.is_valid(&memory));
    let mut chain = Chain::new();
    let mut taken = Vec::new();
    while let Some(expected) = theirs.iter(&memory).unwrap().next() {
        assert_eq!(ours.pop(&mut chain), Ok(true));
        assert_eq!(chain.head(), expected.head_index());
        taken.push(chain.head());
        assert_eq!(parts_of(&chain), parts(expected));
    }
    assert_eq!((ours.pop(&mut chain), taken.len()), (Ok(false), 7));
    for (at, head) in (0_u16..).zip(taken) {
        ours.add_used(head, 100 + u32::from(at)).unwrap();
        let element = driver.used().ring().ref_at(at.into()).unwrap().load();
        assert_eq!((element.id(), element.len()), (head.into(), 100 + u32::from(at)));
        assert_eq!(driver.used().idx().load(), at + 1);
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// The driver makes a chain of buffers available: length (16 bytes each) and whether each is writable, in an indirect
    /// table or not.
    Offer(Vec<(u32, bool)>, bool),
    /// The driver wants an interrupt so many entries from the used index on.
    UsedEvent(i16),
    /// The driver wants no interrupts (without EVENT_IDX).
    NoInterrupt(bool),
    Pop,
    /// Puts the last taken chain back.
    Unpop,
    /// One of those taken is given back, with that many bytes written.
    AddUsed(prop::sample::Index, u32),
    Interrupt,
    EnableNotification,
    DisableNotification,
}

fn step() -> impl Strategy<Value = Step> {
    let buffer = (0_u32..4, any::<bool>());
    let offer = (prop::collection::vec(buffer, 1..5), any::<bool>());
    prop_oneof![
        6 => offer.prop_map(|(buffers, indirect)| Step::Offer(buffers, indirect)),
        2 => (-3_i16..4).prop_map(Step::UsedEvent),
        1 => any::<bool>().prop_map(Step::NoInterrupt),
        6 => Just(Step::Pop),
        1 => Just(Step::Unpop),
        5 => (any::<prop::sample::Index>(), any::<u32>()).prop_map(|(which, length)| Step::AddUsed(which, length)),
        3 => Just(Step::Interrupt),
        2 => Just(Step::EnableNotification),
        2 => Just(Step::DisableNotification),
    ]
}

/// A queue in memory of its own, with the crate's mock of a driver.
struct Side {
    memory: GuestMemory,
}

impl Side {
    fn new(start: QueueState) -> Self {
        let memory = memory();
        for address in [STATE.avail_ring + 2, STATE.used_ring + 2] {
            let index = if address < STATE.used_ring {
                start.next_avail
            } else {
                start.next_used
            };
            memory.write_obj(index, GuestAddress(address)).unwrap();
        }
        Self { memory }
    }

    fn describe(&self, table: u64, at: u16, descriptor: (u64, u32, u16, u16)) {
        DescriptorTable::new(&self.memory, GuestAddress(table), 256)
            .store(at, raw(descriptor))
            .unwrap();
    }

    fn index(&self, ring: u64) -> u16 {
        self.memory.read_obj(GuestAddress(ring + 2)).unwrap()
    }

    /// Adds an entry to the available ring. The mock's type for rings clears the indexes when it is made and does not wrap.
    fn make_available(&self, head: u16) {
        let index = self.index(STATE.avail_ring);
        let place = STATE.avail_ring + 4 + 2 * u64::from(index % SIZE);
        self.memory.write_obj(head, GuestAddress(place)).unwrap();
        self.memory
            .write_obj(index.wrapping_add(1), GuestAddress(STATE.avail_ring + 2))
            .unwrap();
    }

    /// The whole used ring but the field that says when to notify.
    fn used(&self) -> Vec<u8> {
        let mut bytes = vec![0; 4 + 8 * usize::from(SIZE)];
        self.memory
            .read_slice(&mut bytes, GuestAddress(STATE.used_ring))
            .unwrap();
        bytes
    }

    fn set(&self, value: u16, address: GuestAddress) {
        self.memory.write_obj(value, address).unwrap();
    }

    fn get(&self, address: GuestAddress) -> u16 {
        self.memory.read_obj(address).unwrap()
    }
}

/// Both queues, and the driver's state.
struct Both {
    event_idx: bool,
    sides: [Side; 2],
    ours: Queue,
    theirs: virtio_queue::Queue,
    /// Descriptors that the driver may use.
    free: Vec<u16>,
    /// Those of each chain, by its head.
    chains: Vec<Vec<u16>>,
    taken: VecDeque<u16>,
    /// Given back since the interrupt was last decided.
    added: bool,
    no_interrupt: bool,
}

impl Both {
    fn new(start: u16, event_idx: bool) -> Self {
        let state = QueueState {
            next_avail: start,
            next_used: start,
            ..STATE
        };
        let sides = [Side::new(state), Side::new(state)];
        Self {
            event_idx,
            ours: Queue::new(&state, SIZE, event_idx, sides[0].memory.clone()).unwrap(),
            theirs: crates_queue(&state, event_idx),
            sides,
            free: (0..SIZE).collect(),
            chains: vec![Vec::new(); SIZE.into()],
            taken: VecDeque::new(),
            added: false,
            no_interrupt: false,
        }
    }

    fn offer(&mut self, mut buffers: Vec<(u32, bool)>, indirect: bool) {
        buffers.sort_by_key(|(_, writable)| *writable);
        let wanted = if indirect { 1 } else { buffers.len() };
        if self.free.len() < wanted {
            return;
        }
        let own: Vec<u16> = self.free.drain(..wanted).collect();
        let head = own[0];
        let table = TABLE + u64::from(head) * 0x100;
        for (at, (length, writable)) in buffers.iter().enumerate() {
            let last = at + 1 == buffers.len();
            let next = if indirect {
                at as u16 + 1
            } else {
                *own.get(at + 1).unwrap_or(&0)
            };
            let flags = if last { 0 } else { NEXT } | if *writable { WRITE } else { 0 };
            let address = DATA + u64::from(head) * 0x100 + at as u64 * 0x40;
            let entry = (address, length * 16, flags, next);
            let place = if indirect {
                (table, at as u16)
            } else {
                (STATE.desc_table, own[at])
            };
            self.sides
                .iter()
                .for_each(|side| side.describe(place.0, place.1, entry));
        }
        for side in &self.sides {
            if indirect {
                let entry = (table, buffers.len() as u32 * 16, INDIRECT, 0);
                side.describe(STATE.desc_table, head, entry);
            }
            side.make_available(head);
        }
        self.chains[usize::from(head)] = own;
    }

    fn pop(&mut self) {
        let mut chain = Chain::new();
        let found = self.ours.pop(&mut chain).unwrap();
        let expected = self.theirs.iter(&self.sides[1].memory).unwrap().next();
        assert_eq!(found, expected.is_some());
        if let Some(expected) = expected {
            assert_eq!(chain.head(), expected.head_index());
            assert_eq!(parts_of(&chain), parts(expected));
            self.taken.push_back(chain.head());
        }
    }

    fn add_used(&mut self, which: prop::sample::Index, length: u32) {
        if self.taken.is_empty() {
            return;
        }
        let head = self.taken.remove(which.index(self.taken.len())).unwrap();
        self.ours.add_used(head, length).unwrap();
        self.theirs.add_used(&self.sides[1].memory, head, length).unwrap();
        self.added = true;
        self.free
            .append(&mut std::mem::take(&mut self.chains[usize::from(head)]));
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Offer(buffers, indirect) => self.offer(buffers, indirect),
            Step::UsedEvent(ahead) => {
                let index = self.theirs.next_used().wrapping_add_signed(ahead);
                self.sides.iter().for_each(|side| side.set(index, USED_EVENT));
            }
            Step::NoInterrupt(wanted) => {
                self.no_interrupt = wanted;
                let flags = GuestAddress(STATE.avail_ring);
                self.sides
                    .iter()
                    .for_each(|side| side.set(u16::from(wanted), flags));
            }
            Step::Pop => self.pop(),
            Step::Unpop => {
                // Only the chain taken last can be: the driver has it in that place of its ring.
                if let Some(head) = self.taken.back().copied() {
                    let last = self.theirs.next_avail().wrapping_sub(1);
                    let place = GuestAddress(STATE.avail_ring + 4 + 2 * u64::from(last % SIZE));
                    if self.sides[0].get(place) == head {
                        self.taken.pop_back();
                        self.ours.unpop(1);
                        self.theirs.go_to_previous_position();
                    }
                }
            }
            Step::AddUsed(which, length) => self.add_used(which, length),
            Step::Interrupt => {
                let wanted = self.theirs.needs_notification(&self.sides[1].memory).unwrap();
                let added = std::mem::take(&mut self.added);
                // The crate's queue ignores the flag. Without EVENT_IDX it also ignores whether
                // entries were added.
                let expected = wanted && (self.event_idx || added && !self.no_interrupt);
                assert_eq!(self.ours.needs_interrupt().unwrap(), expected);
            }
            Step::EnableNotification => {
                let left = self.theirs.enable_notification(&self.sides[1].memory).unwrap();
                assert_eq!(self.ours.enable_notification().unwrap(), left);
                let [ours, theirs] = &self.sides;
                assert_eq!(ours.get(AVAIL_EVENT), theirs.get(AVAIL_EVENT));
            }
            Step::DisableNotification => {
                self.theirs.disable_notification(&self.sides[1].memory).unwrap();
                self.ours.disable_notification().unwrap();
            }
        }
    }

    fn check(&self) {
        let [ours, theirs] = &self.sides;
        assert_eq!(ours.used(), theirs.used());
        let state = self.ours.state();
        assert_eq!(
            (state.next_avail, state.next_used),
            (self.theirs.next_avail(), self.theirs.next_used())
        );
        assert_eq!(
            u64::from(self.ours.available()),
            u64::from(theirs.index(STATE.avail_ring).wrapping_sub(state.next_avail))
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_driver_and_a_device_do_both_queues_do_the_same(
        start in prop_oneof![Just(0_u16), (u16::MAX - 20)..=u16::MAX, any::<u16>()],
        event_idx in any::<bool>(),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut both = Both::new(start, event_idx);
        for step in steps {
            both.step(step);
            both.check();
        }
    }
}

/// Reaction of the crate's queue to a ring.
#[derive(Debug, PartialEq, Eq)]
enum Crates {
    /// It refuses the ring.
    Refuses,
    /// It gives a chain of so many descriptors and says nothing.
    Gives(usize),
}

fn crates_answer(memory: &GuestMemory) -> Crates {
    let mut queue = crates_queue(&STATE, false);
    assert!(queue.is_valid(memory));
    match queue.iter(memory) {
        Err(Error::InvalidAvailRingIndex) => Crates::Refuses,
        Err(error) => panic!("{error}"),
        Ok(mut iter) => Crates::Gives(iter.next().unwrap().count()),
    }
}

#[test]
fn what_our_queue_refuses_the_crates_mostly_cuts_short_or_passes_on() {
    let chain = |descriptors: &[(u64, u32, u16, u16)]| descriptors.to_vec();
    let data = DATA;
    let many = MAX_SEGMENTS + 1;
    // Each case: the queue's descriptors, the number of descriptors in an indirect table, our
    // error, the crate's chain.
    let cases = [
        (
            "the next one is not in the table",
            chain(&[(data, 1, NEXT, SIZE)]),
            0,
            RingError::Chain(0),
            Crates::Gives(1),
        ),
        (
            "a loop",
            chain(&[(data, 1, NEXT, 1), (data, 1, NEXT, 0)]),
            0,
            RingError::Chain(0),
            Crates::Gives(SIZE.into()),
        ),
        (
            "an indirect table of half a descriptor",
            chain(&[(TABLE, 24, INDIRECT, 0)]),
            1,
            RingError::Chain(0),
            Crates::Gives(0),
        ),
        (
            "an indirect table of nothing",
            chain(&[(TABLE, 0, INDIRECT, 0)]),
            1,
            RingError::Chain(0),
            Crates::Gives(0),
        ),
        (
            "an indirect table that is not in memory",
            chain(&[(1 << 40, 16, INDIRECT, 0)]),
            1,
            RingError::Chain(0),
            Crates::Gives(0),
        ),
        (
            "a buffer, then a broken table",
            chain(&[(data, 1, NEXT, 1), (TABLE, 24, INDIRECT, 0)]),
            1,
            RingError::Chain(0),
            Crates::Gives(1),
        ),
        (
            "more than 2^32 bytes",
            chain(&[(data, u32::MAX, NEXT | WRITE, 1), (data, 1, WRITE, 0)]),
            0,
            RingError::Buffer {
                address: data,
                length: u32::MAX,
            },
            Crates::Gives(1),
        ),
        (
            "too many buffers",
            chain(&[(TABLE, many as u32 * 16, INDIRECT, 0)]),
            many,
            RingError::ChainLength(0),
            Crates::Gives(many),
        ),
        (
            "a readable buffer behind a writable one",
            chain(&[(data, 1, NEXT | WRITE, 1), (data, 1, 0, 0)]),
            0,
            RingError::Order(0),
            Crates::Gives(2),
        ),
        (
            "a buffer that is not in memory",
            chain(&[(1 << 40, 1, 0, 0)]),
            0,
            RingError::Buffer {
                address: 1 << 40,
                length: 1,
            },
            Crates::Gives(1),
        ),
    ];
    for (what, descriptors, indirect, error, expected) in cases {
        let side = Side::new(STATE);
        for (at, descriptor) in (0..).zip(descriptors) {
            side.describe(STATE.desc_table, at, descriptor);
        }
        for at in 0..indirect {
            let flags = if at + 1 == indirect { 0 } else { NEXT };
            let entry = raw((DATA, 1, flags, at as u16 + 1));
            side.memory
                .write_obj(entry, GuestAddress(TABLE + at as u64 * 16))
                .unwrap();
        }
        side.make_available(0);
        let mut queue = Queue::new(&STATE, SIZE, false, side.memory.clone()).unwrap();
        assert_eq!(queue.pop(&mut Chain::new()), Err(error), "{what}");
        assert_eq!(crates_answer(&side.memory), expected, "{what}");
    }
}

#[test]
fn a_table_in_a_table_is_refused_by_ours_and_cut_short_by_the_crates() {
    let side = Side::new(STATE);
    side.describe(STATE.desc_table, 0, (TABLE, 32, INDIRECT, 0));
    side.describe(TABLE, 0, (DATA, 1, NEXT, 1));
    side.describe(TABLE, 1, (TABLE, 32, INDIRECT, 0));
    side.make_available(0);
    let mut queue = Queue::new(&STATE, SIZE, false, side.memory.clone()).unwrap();
    assert_eq!(queue.pop(&mut Chain::new()), Err(RingError::Chain(0)));
    assert_eq!(crates_answer(&side.memory), Crates::Gives(1));
}

#[test]
fn indexes_that_make_no_sense_are_an_error_of_ours_and_of_the_crates_iterator_only() {
    // A head beyond the table: the crate's gives a chain without descriptors.
    let side = Side::new(STATE);
    side.make_available(SIZE);
    let mut ours = Queue::new(&STATE, SIZE, false, side.memory.clone()).unwrap();
    assert_eq!(ours.pop(&mut Chain::new()), Err(RingError::HeadIndex(SIZE)));
    assert_eq!(crates_answer(&side.memory), Crates::Gives(0));
    // More available than the ring has room for: its iterator refuses, its `pop_descriptor_chain` finds nothing.
    side.set(SIZE + 1, GuestAddress(STATE.avail_ring + 2));
    let mut ours = Queue::new(&STATE, SIZE, false, side.memory.clone()).unwrap();
    assert_eq!(ours.pop(&mut Chain::new()), Err(RingError::AvailableIndex(0)));
    assert_eq!(crates_answer(&side.memory), Crates::Refuses);
    let mut theirs = crates_queue(&STATE, false);
    assert!(theirs.pop_descriptor_chain(&side.memory).is_none());
}

#[test]
fn both_refuse_the_same_places_and_sizes_but_a_ring_at_address_0() {
    let memory = memory();
    let places = [
        0,
        1,
        2,
        4,
        8,
        16,
        0x1000,
        0x1f_ff80,
        0x1f_fff0,
        0x20_0000,
        u64::MAX - 15,
    ];
    for size in [0, 1, 2, 15, SIZE, 2 * SIZE, 0x8000] {
        for place in places {
            for part in 0..3 {
                let mut state = QueueState { size, ..STATE };
                let address = [&mut state.desc_table, &mut state.avail_ring, &mut state.used_ring];
                *address.into_iter().nth(part).unwrap() = place;
                let theirs = virtio_queue::Queue::try_from(virtio_queue::QueueState {
                    max_size: SIZE,
                    size,
                    ready: true,
                    desc_table: state.desc_table,
                    avail_ring: state.avail_ring,
                    used_ring: state.used_ring,
                    ..virtio_queue::QueueState::default()
                });
                let theirs = theirs.is_ok_and(|queue| queue.is_valid(&memory));
                let ours = Queue::new(&state, SIZE, false, memory.clone());
                assert_eq!(ours.is_ok(), theirs, "{state:x?}: {:?}", ours.err());
            }
        }
    }
    // The crate takes an available ring at 0 for one that was not set.
    let state = QueueState {
        avail_ring: 0,
        ..STATE
    };
    assert_eq!(
        Queue::new(&state, SIZE, false, memory.clone())
            .unwrap()
            .pop(&mut Chain::new()),
        Ok(false)
    );
    let refused = crates_queue(&state, false).iter(&memory).map(|_| ());
    assert!(matches!(refused, Err(Error::QueueNotReady)), "{refused:?}");
}

#[test]
fn the_crates_rings_are_laid_out_as_ours() {
    let memory = memory();
    let avail = AvailRing::new(&memory, GuestAddress(STATE.avail_ring), SIZE);
    let used = UsedRing::new(&memory, GuestAddress(STATE.used_ring), SIZE);
    let table = DescriptorTable::new(&memory, GuestAddress(STATE.desc_table), SIZE);
    let mut queue = Queue::new(&STATE, SIZE, false, memory.clone()).unwrap();
    for round in 0..SIZE {
        table.store(round, raw((DATA, 8, WRITE, 0))).unwrap();
        avail.ring().ref_at(round.into()).unwrap().store(round);
        avail.idx().store(round + 1);
        let mut chain = Chain::new();
        assert_eq!((queue.pop(&mut chain), chain.head()), (Ok(true), round));
        queue.add_used(round, 8).unwrap();
        let element = used.ring().ref_at(round.into()).unwrap().load();
        assert_eq!(
            (used.idx().load(), element.id(), element.len()),
            (round + 1, round.into(), 8)
        );
    }
}

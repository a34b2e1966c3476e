//! Random drivers and devices on one queue: the order in which chains are taken, also after chains were put back, the
//! used ring, and the interrupts.

use std::collections::VecDeque;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;

use crate::virtio::{
    chain::Chain,
    fault::RingError,
    queue::{Queue, QueueState},
};

const SIZE: u16 = 16;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const TABLES: u64 = 0x3000;
const DATA: u64 = 0x8000;

/// Flags of descriptors (virtio 1.3, 2.7.5).
const WRITE: u64 = 2 << 32;
const INDIRECT: u64 = 4 << 32;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The driver makes that many chains available, if it has them.
    Offer(u16),
    /// The device takes that many, if there are.
    Take(u16),
    /// The device puts this number of taken and unreturned chains back into the ring.
    PutBack(u16),
    /// The device gives all that it has taken back.
    GiveBack,
    /// The driver wants an interrupt for the entry at this distance from the used index.
    UsedEvent(i16),
    /// The driver wants no interrupts (without EVENT_IDX).
    NoInterrupt(bool),
    /// The device asks whether the driver wants an interrupt.
    Interrupt,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1..=SIZE).prop_map(Step::Offer),
        (1..=SIZE).prop_map(Step::Take),
        (1..=SIZE).prop_map(Step::PutBack),
        Just(Step::GiveBack),
        (-3_i16..4).prop_map(Step::UsedEvent),
        any::<bool>().prop_map(Step::NoInterrupt),
        Just(Step::Interrupt),
    ]
}

/// The driver's side.
struct Driver {
    memory: GuestMemory,
    next: u16,
    free: VecDeque<u16>,
    /// How often each head was used: its buffer's length, so that it is known from when the descriptor is.
    uses: Vec<u64>,
}

impl Driver {
    fn new(next: u16, heads: Vec<u16>) -> Self {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap();
        memory.write_obj(next, GuestAddress(AVAIL + 2)).unwrap();
        Self {
            memory,
            next,
            free: heads.into(),
            uses: vec![0; usize::from(SIZE)],
        }
    }

    /// Makes the chain at the front of the free ones available; every other one has an indirect table.
    fn offer(&mut self) -> Option<(u16, u32)> {
        let head = self.free.pop_front()?;
        let length = self.uses[usize::from(head)] + 1;
        self.uses[usize::from(head)] = length;
        let buffer = [DATA, length | WRITE];
        let (place, table) = (u64::from(head) * 16, TABLES + u64::from(head) * 256);
        if head % 2 == 0 {
            self.put(place, buffer);
        } else {
            self.put(table, buffer);
            self.put(place, [table, 16 | INDIRECT]);
        }
        self.put_head(head);
        Some((head, length as u32))
    }

    fn put(&self, place: u64, descriptor: [u64; 2]) {
        self.memory.write_obj(descriptor, GuestAddress(place)).unwrap();
    }

    fn put_head(&mut self, head: u16) {
        let entry = AVAIL + 4 + u64::from(self.next % SIZE) * 2;
        self.memory.write_obj(head, GuestAddress(entry)).unwrap();
        self.next = self.next.wrapping_add(1);
        self.memory.write_obj(self.next, GuestAddress(AVAIL + 2)).unwrap();
    }

    fn queue(&self, start: u16, event_idx: bool) -> Queue {
        let state = QueueState {
            size: SIZE,
            desc_table: 0,
            avail_ring: AVAIL,
            used_ring: USED,
            next_avail: start,
            next_used: start,
            ..QueueState::default()
        };
        Queue::new(&state, SIZE, event_idx, self.memory.clone()).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn chains_are_taken_in_order_and_given_back_as_the_driver_wants(
        start in prop_oneof![Just(0), Just(u16::MAX - 20), any::<u16>()],
        heads in Just((0..SIZE).collect::<Vec<_>>()).prop_shuffle(),
        event_idx: bool,
        steps in prop::collection::vec(step(), 1..100),
    ) {
        let mut driver = Driver::new(start, heads);
        let mut queue = driver.queue(start, event_idx);
        let (mut used, mut told, mut event, mut silent) = (start, start, 0_u16, false);
        let mut chain = Chain::new();
        let mut available = VecDeque::new();
        let mut taken = VecDeque::new();
        for step in steps {
            match step {
                Step::Offer(count) => available.extend((0..count).map_while(|_| driver.offer())),
                Step::Take(count) => for _ in 0..count {
                    let found = queue.pop(&mut chain).unwrap();
                    let found = found.then(|| (chain.head(), chain.writable_len()));
                    let expected = available.pop_front();
                    prop_assert_eq!(found, expected);
                    taken.extend(expected);
                },
                Step::PutBack(count) => {
                    let count = count.min(taken.len() as u16);
                    queue.unpop(count);
                    for _ in 0..count {
                        available.push_front(taken.pop_back().unwrap());
                    }
                }
                Step::GiveBack => for (head, length) in taken.drain(..) {
                    queue.add_used(head, length).unwrap();
                    driver.free.push_back(head);
                    let element = USED + 4 + u64::from(used % SIZE) * 8;
                    let element: [u32; 2] = driver.memory.read_obj(GuestAddress(element)).unwrap();
                    used = used.wrapping_add(1);
                    let index: u16 = driver.memory.read_obj(GuestAddress(USED + 2)).unwrap();
                    prop_assert_eq!((element, index), ([head.into(), length], used));
                },
                Step::UsedEvent(ahead) => {
                    event = used.wrapping_add_signed(ahead);
                    let place = GuestAddress(AVAIL + 4 + u64::from(SIZE) * 2);
                    driver.memory.write_obj(event, place).unwrap();
                }
                Step::NoInterrupt(wanted) => {
                    silent = wanted;
                    driver.memory.write_obj(u16::from(wanted), GuestAddress(AVAIL)).unwrap();
                }
                Step::Interrupt => {
                    let added = used.wrapping_sub(told);
                    let passed = (0..added).any(|entry| told.wrapping_add(entry) == event);
                    let expected = if event_idx { passed } else { added > 0 && !silent };
                    prop_assert_eq!(queue.needs_interrupt(), Ok(expected));
                    told = used;
                }
            }
            prop_assert_eq!(usize::from(queue.available()), available.len());
        }
    }
}

#[test]
fn a_head_that_makes_no_sense_is_found_when_it_is_its_turn() {
    let mut driver = Driver::new(0, (0..SIZE).collect());
    let mut queue = driver.queue(0, true);
    assert!(driver.offer().is_some() && driver.offer().is_some());
    driver.put_head(SIZE);
    let mut chain = Chain::new();
    assert!(queue.pop(&mut chain).unwrap() && queue.pop(&mut chain).unwrap());
    assert_eq!(queue.pop(&mut chain), Err(RingError::HeadIndex(SIZE)));
}

use proptest::prelude::*;
use rstest::rstest;
use vm_memory::{Bytes, GuestAddress};
use vmm_base::{GuestMemory, ram::TooShort};

use crate::virtio::{
    chain::{Chain, MAX_SEGMENTS},
    fault::RingError,
    queue::{Queue, QueueState},
};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const DATA: u64 = 0x10_0000;
const TABLE: u64 = 0x8_0000;

const STATE: QueueState = QueueState {
    index: 0,
    size: 16,
    desc_table: 0x1000,
    avail_ring: 0x2000,
    used_ring: 0x3000,
    next_avail: 0,
    next_used: 0,
};

/// 2 MiB with a hole of 4 KiB in the data at 0x18_0000.
fn memory() -> GuestMemory {
    GuestMemory::from_ranges(&[(GuestAddress(0), 0x18_0000), (GuestAddress(0x18_1000), 0x8_0000)]).unwrap()
}

fn queue(memory: &GuestMemory) -> Queue {
    Queue::new(&STATE, 16, false, memory.clone()).unwrap()
}

fn describe(memory: &GuestMemory, table: u64, descriptors: &[(u64, u32, u16, u16)]) {
    for (at, (address, length, flags, next)) in (0..).zip(descriptors) {
        let raw = u128::from(*address)
            | u128::from(*length) << 64
            | u128::from(*flags) << 96
            | u128::from(*next) << 112;
        memory
            .write_slice(&raw.to_le_bytes(), GuestAddress(table + at * 16))
            .unwrap();
    }
}

fn offer(memory: &GuestMemory, heads: &[u16]) {
    for (at, head) in (0..).zip(heads) {
        memory
            .write_obj(*head, GuestAddress(STATE.avail_ring + 4 + at * 2))
            .unwrap();
    }
    memory
        .write_obj(heads.len() as u16, GuestAddress(STATE.avail_ring + 2))
        .unwrap();
}

fn used(memory: &GuestMemory, at: u64) -> (u32, u32) {
    let element: u64 = memory
        .read_obj(GuestAddress(STATE.used_ring + 4 + at * 8))
        .unwrap();
    (element as u32, (element >> 32) as u32)
}

fn used_index(memory: &GuestMemory) -> u16 {
    memory.read_obj(GuestAddress(STATE.used_ring + 2)).unwrap()
}

#[test]
fn a_chain_is_split_into_what_is_read_and_what_is_written() {
    let memory = memory();
    let mut queue = queue(&memory);
    memory.write_slice(b"0123456789", GuestAddress(DATA)).unwrap();
    describe(
        &memory,
        STATE.desc_table,
        &[
            (DATA, 4, NEXT, 1),
            (DATA + 4, 6, NEXT, 2),
            (DATA + 100, 0, NEXT | WRITE, 3),
            (DATA + 200, 5, NEXT | WRITE, 4),
            (DATA + 300, 5, WRITE, 0),
        ],
    );
    offer(&memory, &[0]);
    let mut chain = Chain::new();
    assert!(queue.pop(&mut chain).unwrap());
    assert_eq!(
        (chain.head(), chain.readable_len(), chain.writable_len()),
        (0, 10, 10)
    );
    assert_eq!((chain.readable().len(), chain.writable().len()), (2, 2));
    let mut bytes = [0; 6];
    chain.read(&memory, 2, &mut bytes).unwrap();
    assert_eq!(&bytes, b"234567");
    assert_eq!(
        chain.read_obj::<u64>(&memory, 2),
        Ok(u64::from_le_bytes(*b"23456789"))
    );
    assert_eq!(chain.read_obj::<u64>(&memory, 3), Err(TooShort));
    assert_eq!(chain.read_obj::<u64>(&memory, u32::MAX), Err(TooShort));
    chain.write(&memory, 3, b"abcd").unwrap();
    memory
        .read_slice(&mut bytes[..2], GuestAddress(DATA + 203))
        .unwrap();
    assert_eq!(&bytes[..2], b"ab");
    memory
        .read_slice(&mut bytes[..2], GuestAddress(DATA + 300))
        .unwrap();
    assert_eq!(&bytes[..2], b"cd");
    assert_eq!(chain.write(&memory, 7, b"abcd"), Err(TooShort));
    let lengths: Vec<_> = chain
        .writable_slices(&memory, 4, 3)
        .map(|slice| slice.unwrap().len())
        .collect();
    assert_eq!(lengths, [1, 2]);
    assert!(chain.writable_slices(&memory, 8, 3).any(|slice| slice.is_err()));
    assert!(!queue.pop(&mut chain).unwrap());
}

#[test]
fn chains_can_be_put_back_and_taken_again() {
    let memory = memory();
    let mut queue = queue(&memory);
    describe(
        &memory,
        STATE.desc_table,
        &[(DATA, 1, WRITE, 0), (DATA, 2, WRITE, 0)],
    );
    offer(&memory, &[0, 1]);
    let mut chain = Chain::new();
    assert!(queue.pop(&mut chain).unwrap() && queue.pop(&mut chain).unwrap());
    queue.unpop(1);
    assert!(queue.pop(&mut chain).unwrap());
    assert_eq!((chain.head(), chain.writable_len()), (1, 2));
}

/// A worker looks at one chain ahead, and puts it back when the one before has to wait: as often as that happens, it may take its batch.
#[test]
fn what_was_put_back_does_not_count_as_taken() {
    let memory = memory();
    let mut queue = queue(&memory);
    describe(
        &memory,
        STATE.desc_table,
        &[(DATA, 1, WRITE, 0), (DATA, 2, WRITE, 0)],
    );
    offer(&memory, &[0, 1]);
    let mut chain = Chain::new();
    queue.set_budget(1);
    for _ in 0..3 {
        assert!(queue.pop(&mut chain).unwrap());
        queue.unpop(1);
    }
    assert!(queue.pop(&mut chain).unwrap() && !queue.exhausted());
    assert!(!queue.pop(&mut chain).unwrap() && queue.exhausted());
}

#[test]
fn what_waits_to_be_taken_is_shown_to_others() {
    let memory = memory();
    let started = QueueState {
        next_avail: u16::MAX - 1,
        ..STATE
    };
    let backlog = Queue::new(&started, 16, false, memory.clone()).unwrap().backlog();
    // Indexes run free.
    let index = GuestAddress(STATE.avail_ring + 2);
    for (available, waiting) in [
        (u16::MAX - 1, 0),
        (u16::MAX, 1),
        (3, 5),
        (14, 16),
        (15, 0),
        (9999, 0),
    ] {
        memory.write_obj(available, index).unwrap();
        assert_eq!(backlog.waiting(), waiting, "{available}");
    }
    memory.write_obj(3_u16, index).unwrap();
    backlog.set_taken(2);
    assert_eq!(backlog.waiting(), 1);
    // Chains that were put back wait again.
    backlog.set_taken(0);
    assert_eq!(backlog.waiting(), 3);
}

#[test]
fn several_chains_are_given_back_at_once_and_count_for_the_interrupt() {
    let memory = memory();
    let state = QueueState {
        next_used: 14,
        next_avail: 14,
        ..STATE
    };
    let mut queue = Queue::new(&state, 16, true, memory.clone()).unwrap();
    // The driver wants to hear of entry 14: the first of those.
    memory
        .write_obj(14_u16, GuestAddress(STATE.avail_ring + 4 + 32))
        .unwrap();
    queue.add_used_together(&[(3, 30), (4, 40), (5, 50)]).unwrap();
    assert_eq!(
        (used(&memory, 14), used(&memory, 15), used(&memory, 0)),
        ((3, 30), (4, 40), (5, 50))
    );
    assert_eq!(used_index(&memory), 17);
    assert!(queue.needs_interrupt().unwrap());
    assert!(!queue.needs_interrupt().unwrap(), "told twice");
    assert_eq!(
        queue.add_used_together(&[(3, 0), (16, 0)]),
        Err(RingError::HeadIndex(16))
    );
    assert_eq!(
        queue.add_used_together(&[(16, 0), (3, 0)]),
        Err(RingError::HeadIndex(16))
    );
    assert!(
        queue.add_used_together(&[(1, 0); 100]).is_err(),
        "more than the ring has"
    );
    assert_eq!(used_index(&memory), 17);
    queue.add_used_together(&[]).unwrap();
}

#[test]
fn the_event_index_asks_for_an_interrupt_exactly_when_it_is_passed() {
    let memory = memory();
    for (start, added, event, wanted) in [
        (0_u16, 1_u16, 0_u16, true),
        (0, 1, 1, false),
        (0, 3, 2, true),
        (0, 3, 3, false),
        (5, 1, 4, false),
        (u16::MAX, 2, u16::MAX, true),
        (u16::MAX, 2, 0, true),
        (u16::MAX, 2, 1, false),
    ] {
        let state = QueueState {
            next_used: start,
            ..STATE
        };
        let mut queue = Queue::new(&state, 16, true, memory.clone()).unwrap();
        memory
            .write_obj(event, GuestAddress(STATE.avail_ring + 4 + 32))
            .unwrap();
        for _ in 0..added {
            queue.add_used(0, 0).unwrap();
        }
        assert_eq!(
            queue.needs_interrupt().unwrap(),
            wanted,
            "{start} + {added}, event {event}"
        );
    }
}

/// Whether a driver that has added buffers up to the index `new` notifies (2.7.10.1).
fn notifies(memory: &GuestMemory, old: u16, new: u16) -> bool {
    let event: u16 = memory
        .read_obj(GuestAddress(STATE.used_ring + 4 + 16 * 8))
        .unwrap();
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[test]
fn with_the_event_index_notifications_are_off_on_or_on_after_some_buffers() {
    let memory = memory();
    for start in [0_u16, 5, u16::MAX] {
        let state = QueueState {
            next_avail: start,
            ..STATE
        };
        let index = |ahead: u16| start.wrapping_add(ahead);
        let set = |ahead: u16| {
            let place = GuestAddress(STATE.avail_ring + 2);
            memory.write_obj(index(ahead), place).unwrap();
        };
        set(0);
        let mut queue = Queue::new(&state, 16, true, memory.clone()).unwrap();
        queue.disable_notification().unwrap();
        assert!((1..=16).all(|ahead| !notifies(&memory, start, index(ahead))));
        assert!(!queue.enable_notification().unwrap());
        assert!(notifies(&memory, start, index(1)));
        assert!(!notifies(&memory, index(1), index(2)));
        // The call reports available buffers, with or without a notification for them.
        set(1);
        assert!(queue.enable_notification().unwrap());
        assert_eq!(queue.available(), 1);
        set(17);
        assert_eq!(queue.available(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_chain_is_walked_as_the_specification_reads(
        direct in prop::collection::vec(descriptor(), 16),
        table in prop::collection::vec(descriptor(), 1..20),
        head in 0_u16..16,
    ) {
        let memory = memory();
        describe(&memory, STATE.desc_table, &direct);
        describe(&memory, TABLE, &table);
        offer(&memory, &[head]);
        let mut chain = Chain::new();
        let result = queue(&memory).pop(&mut chain);
        match simple_walk(&direct, &table, head) {
            Some((readable, writable)) => {
                prop_assert_eq!(result, Ok(true));
                let lengths = |segments: &[vmm_base::ram::Segment]| -> Vec<(u64, u32)> {
                    segments.iter().map(|segment| (segment.address.0, segment.length)).collect()
                };
                prop_assert_eq!(lengths(chain.readable()), readable);
                prop_assert_eq!(lengths(chain.writable()), writable);
            }
            None => prop_assert!(result.is_err()),
        }
    }
}

fn descriptor() -> impl Strategy<Value = (u64, u32, u16, u16)> {
    let place = (0_u64..16, 0_u32..3).prop_map(|(at, length)| (DATA + at * 0x100, length * 0x80));
    let place = prop_oneof![12 => place, 1 => Just((0x17_ff00, 0x200)), 1 => Just((u64::MAX - 5, 16))];
    let flags = prop_oneof![6 => Just(NEXT), 4 => Just(NEXT | WRITE), 3 => Just(WRITE), 1 => Just(0)];
    let plain =
        (place, flags, 0_u16..20).prop_map(|((address, length), flags, next)| (address, length, flags, next));
    let length = prop_oneof![6 => (0_u32..20).prop_map(|entries| entries * 16), 1 => Just(17_u32), 1 => Just(u32::MAX)];
    let indirect = (length, 0_u16..8).prop_map(|(length, flags)| (TABLE, length, flags | INDIRECT, 0));
    prop_oneof![6 => plain, 1 => indirect]
}

type Buffers = Vec<(u64, u32)>;

/// The readable and the writable buffers; `None` when the driver must not make such a chain.
fn simple_walk(
    direct: &[(u64, u32, u16, u16)],
    table: &[(u64, u32, u16, u16)],
    head: u16,
) -> Option<(Buffers, Buffers)> {
    let (mut readable, mut writable) = (Vec::new(), Vec::new());
    let (mut at, mut indirect, mut steps) = (usize::from(head), None, 0);
    loop {
        let (address, length, flags, next) = match indirect {
            // Behind the table there are zeroes.
            Some(entries) if at < entries => table.get(at).copied().unwrap_or((0, 0, 0, 0)),
            None if at < direct.len() => direct[at],
            _ => return None,
        };
        steps += 1;
        if steps > indirect.unwrap_or(direct.len()) {
            return None;
        }
        if flags & INDIRECT != 0 {
            let entries = (length / 16) as usize;
            if indirect.is_some() || length % 16 != 0 || entries > usize::from(u16::MAX) {
                return None;
            }
            (at, indirect, steps) = (0, Some(entries), 0);
            continue;
        }
        if flags & WRITE == 0 && !writable.is_empty() {
            return None;
        }
        let end = u128::from(address) + u128::from(length);
        if length > 0 && end > 0x18_0000 {
            return None;
        }
        if length > 0 {
            let side = if flags & WRITE != 0 {
                &mut writable
            } else {
                &mut readable
            };
            side.push((address, length));
        }
        if flags & NEXT == 0 {
            return Some((readable, writable));
        }
        at = next.into();
    }
}

#[test]
fn a_state_that_makes_no_sense_makes_no_queue() {
    let memory = memory();
    let bad = |change: fn(&mut QueueState)| {
        let mut state = STATE;
        change(&mut state);
        Queue::new(&state, 16, false, memory.clone()).err()
    };
    assert_eq!(bad(|_| {}), None);
    for change in [
        (|state| state.size = 0) as fn(&mut QueueState),
        |state| state.size = 15,
        |state| state.size = 32,
        |state| state.size = 0x8000,
    ] {
        assert!(matches!(bad(change), Some(RingError::Size(_))));
    }
    for change in [
        (|state| state.desc_table = 0x1008) as fn(&mut QueueState),
        |state| state.avail_ring = 0x2001,
        |state| state.used_ring = 0x3002,
        |state| state.desc_table = !0xf,
        |state| state.avail_ring = 0x18_0000,
        |state| state.used_ring = 0x17_ff80,
    ] {
        assert!(matches!(bad(change), Some(RingError::Placement { .. })));
    }
}

#[rstest]
#[case::next_behind_the_table(&[(DATA, 1, NEXT, 16)], RingError::Chain(0))]
#[case::a_loop(&[(DATA, 1, NEXT, 1), (DATA, 1, NEXT, 0)], RingError::Chain(0))]
#[case::half_a_descriptor(&[(TABLE, 24, INDIRECT, 0)], RingError::Chain(0))]
#[case::an_empty_table(&[(TABLE, 0, INDIRECT, 0)], RingError::Chain(0))]
#[case::a_table_outside_memory(&[(1 << 40, 16, INDIRECT, 0)], RingError::Chain(0))]
#[case::a_buffer_then_a_broken_table(&[(DATA, 1, NEXT, 1), (TABLE, 24, INDIRECT, 0)], RingError::Chain(0))]
#[case::a_table_in_a_table(&[(TABLE, 16, INDIRECT, 0)], RingError::Chain(0))]
#[case::readable_behind_writable(&[(DATA, 1, NEXT | WRITE, 1), (DATA, 1, 0, 0)], RingError::Order(0))]
#[case::outside_memory(&[(1 << 40, 1, 0, 0)], RingError::Buffer { address: 1 << 40, length: 1 })]
#[case::too_long(&[(DATA, u32::MAX, WRITE, 0)], RingError::Buffer { address: DATA, length: u32::MAX })]
fn a_broken_chain_has_the_error_of_its_kind(
    #[case] descriptors: &[(u64, u32, u16, u16)],
    #[case] error: RingError,
) {
    let memory = memory();
    describe(&memory, STATE.desc_table, descriptors);
    describe(&memory, TABLE, &[(TABLE, 32, INDIRECT, 0)]);
    offer(&memory, &[0]);
    assert_eq!(queue(&memory).pop(&mut Chain::new()), Err(error));
}

#[test]
fn an_index_or_a_head_beyond_the_ring_is_an_error() {
    let memory = memory();
    offer(&memory, &[16]);
    assert_eq!(
        queue(&memory).pop(&mut Chain::new()),
        Err(RingError::HeadIndex(16))
    );
    offer(&memory, &[0; 17]);
    assert_eq!(
        queue(&memory).pop(&mut Chain::new()),
        Err(RingError::AvailableIndex(0))
    );
}

/// An available ring at address 0 is a ring as any other.
#[test]
fn a_ring_at_address_0_is_used() {
    let state = QueueState {
        avail_ring: 0,
        ..STATE
    };
    let mut queue = Queue::new(&state, 16, false, memory()).unwrap();
    assert_eq!(queue.pop(&mut Chain::new()), Ok(false));
}

#[test]
fn a_chain_may_be_long_but_not_without_end() {
    let memory = memory();
    let table = |count: usize| -> Vec<(u64, u32, u16, u16)> {
        (1..=count)
            .map(|at| (DATA, 1, if at == count { 0 } else { NEXT }, at as u16))
            .collect()
    };
    for (count, fits) in [(MAX_SEGMENTS, true), (MAX_SEGMENTS + 1, false)] {
        let mut queue = queue(&memory);
        describe(&memory, TABLE, &table(count));
        describe(
            &memory,
            STATE.desc_table,
            &[(TABLE, count as u32 * 16, INDIRECT, 0)],
        );
        offer(&memory, &[0]);
        let result = queue.pop(&mut Chain::new());
        assert_eq!(
            result,
            if fits {
                Ok(true)
            } else {
                Err(RingError::ChainLength(0))
            }
        );
    }
}

proptest! {
    #[test]
    fn whatever_is_in_the_rings_a_chain_that_is_taken_lies_in_memory_and_all_ends(
        descriptors in prop::collection::vec(
            (prop_oneof![0_u64..0x20_2000, any::<u64>()], prop_oneof![0_u32..0x2000, any::<u32>()], 0_u16..8, 0_u16..18),
            16,
        ),
        table in prop::collection::vec((0_u64..0x20_0000, 0_u32..64, 0_u16..8, 0_u16..6), 4),
        heads in prop::collection::vec(0_u16..18, 0..40),
    ) {
        let memory = memory();
        let mut queue = queue(&memory);
        let placed: Vec<_> = descriptors.iter().map(|(address, length, flags, next)| {
            // An indirect table more often than chance would have it.
            if flags & INDIRECT != 0 && length % 2 == 0 { (TABLE, 64, *flags, *next) } else { (*address, *length, *flags, *next) }
        }).collect();
        describe(&memory, STATE.desc_table, &placed);
        describe(&memory, TABLE, &table);
        offer(&memory, &heads);
        let mut chain = Chain::new();
        let mut taken = 0;
        while let Ok(true) = queue.pop(&mut chain) {
            taken += 1;
            prop_assert!(taken <= 16);
            let sum = |segments: &[vmm_base::ram::Segment]| segments.iter().map(|segment| u64::from(segment.length)).sum::<u64>();
            prop_assert_eq!(sum(chain.readable()), u64::from(chain.readable_len()));
            prop_assert_eq!(sum(chain.writable()), u64::from(chain.writable_len()));
            for segment in chain.readable().iter().chain(chain.writable()) {
                prop_assert!(segment.length > 0);
                prop_assert!(vm_memory::GuestMemoryBackend::check_range(&memory, segment.address, segment.length as usize));
            }
            for slice in chain.writable_slices(&memory, 0, chain.writable_len()) {
                prop_assert!(slice.is_ok());
            }
            prop_assert_eq!(queue.add_used(chain.head(), 0), Ok(()));
        }
    }
}

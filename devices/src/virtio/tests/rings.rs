//! Tests of the rings' locations, and of the time when entries become visible to the driver.

use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;

use crate::virtio::{
    chain::Chain,
    fault::RingError,
    queue::{Queue, QueueState},
};

const SIZE: u16 = 8;
const DATA: u64 = 0x8000;

/// A queue whose parts begin at these places.
fn state(desc_table: u64, avail_ring: u64, used_ring: u64) -> QueueState {
    QueueState {
        size: SIZE,
        desc_table,
        avail_ring,
        used_ring,
        ..QueueState::default()
    }
}

fn offer(memory: &GuestMemory, state: &QueueState, index: u16) {
    let head = index % SIZE;
    let descriptor = [DATA + u64::from(head) * 16, 16 | 2 << 32];
    let place = state.desc_table + u64::from(head) * 16;
    memory.write_obj(descriptor, GuestAddress(place)).unwrap();
    let place = state.avail_ring + 4 + u64::from(head) * 2;
    memory.write_obj(head, GuestAddress(place)).unwrap();
    memory
        .write_obj(index + 1, GuestAddress(state.avail_ring + 2))
        .unwrap();
}

fn used(memory: &GuestMemory, state: &QueueState) -> u16 {
    memory.read_obj(GuestAddress(state.used_ring + 2)).unwrap()
}

fn element(memory: &GuestMemory, state: &QueueState, index: u16) -> [u32; 2] {
    let place = state.used_ring + 4 + u64::from(index % SIZE) * 8;
    memory.read_obj(GuestAddress(place)).unwrap()
}

#[test]
fn a_part_may_lie_in_two_regions_of_memory_that_follow_each_other() {
    let ranges = [(GuestAddress(0), 0x2000), (GuestAddress(0x2000), 0x8000)];
    let memory = GuestMemory::from_ranges(&ranges).unwrap();
    // One after the other crosses the border, at a different place in each.
    for state in [
        state(0x2000 - 40 / 16 * 16, 0x3000, 0x4000),
        state(0x3000, 0x2000 - 10, 0x4000),
        state(0x3000, 0x4000, 0x2000 - 20),
        state(0x3000, 0x4000, 0x5000),
    ] {
        let zeroes = [0_u8; 0x100];
        for place in [state.avail_ring, state.used_ring] {
            memory.write_slice(&zeroes, GuestAddress(place)).unwrap();
        }
        let mut queue = Queue::new(&state, SIZE, true, memory.clone()).unwrap();
        let mut chain = Chain::new();
        for index in 0..3 * SIZE {
            offer(&memory, &state, index);
            assert_eq!(queue.pop(&mut chain), Ok(true));
            assert_eq!(chain.writable()[0].address.0, DATA + u64::from(index % SIZE) * 16);
            queue.add_used(chain.head(), u32::from(index)).unwrap();
            assert_eq!(used(&memory, &state), index + 1);
            assert_eq!(
                element(&memory, &state, index),
                [u32::from(index % SIZE), u32::from(index)]
            );
            assert_eq!(queue.enable_notification(), Ok(false));
        }
    }
}

#[test]
fn a_part_that_is_not_wholly_in_memory_is_refused() {
    let ranges = [(GuestAddress(0), 0x2000), (GuestAddress(0x3000), 0x1000)];
    let memory = GuestMemory::from_ranges(&ranges).unwrap();
    for (state, part) in [
        (state(0x2000 - 0x70, 0, 0x100), "descriptor table"),
        (state(0, 0x2000 - 20, 0x100), "available ring"),
        (state(0, 0x100, 0x4000 - 68), "used ring"),
        (state(0, 0x100, 0x2000), "used ring"),
    ] {
        let refused = Queue::new(&state, SIZE, true, memory.clone()).map(|_| ());
        assert!(
            matches!(refused, Err(RingError::Placement { part: found, .. }) if found == part),
            "{refused:?}"
        );
    }
}

#[test]
fn what_is_put_into_the_used_ring_is_seen_when_it_is_shown() {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
    let state = state(0x1000, 0x2000, 0x3000);
    let mut queue = Queue::new(&state, SIZE, true, memory.clone()).unwrap();
    queue.put_used(3, 30).unwrap();
    queue.put_used(5, 50).unwrap();
    assert_eq!(queue.put_used(SIZE, 0), Err(RingError::HeadIndex(SIZE)));
    assert_eq!(used(&memory, &state), 0);
    queue.show_used().unwrap();
    assert_eq!(used(&memory, &state), 2);
    assert_eq!(element(&memory, &state, 0), [3, 30]);
    assert_eq!(element(&memory, &state, 1), [5, 50]);
    // A query for the interrupt publishes the entries first.
    queue.put_used(1, 10).unwrap();
    assert_eq!(queue.needs_interrupt(), Ok(true));
    assert_eq!(used(&memory, &state), 3);
    assert_eq!(queue.needs_interrupt(), Ok(false));
    // On an error no entry of the call is added; earlier entries stay.
    queue.put_used(2, 20).unwrap();
    assert_eq!(
        queue.add_used_together(&[(4, 0), (SIZE, 0)]),
        Err(RingError::HeadIndex(SIZE))
    );
    queue.show_used().unwrap();
    assert_eq!(used(&memory, &state), 4);
    assert_eq!(element(&memory, &state, 3), [2, 20]);
}

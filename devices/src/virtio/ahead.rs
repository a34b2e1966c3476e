//! Which chains come next in an available ring.
//!
//! The driver's processor has just written what a device reads to take a chain: the ring's entry, the descriptor, and
//! mostly an indirect table. One after the other they come from its cache, each time for about the price of a hundred
//! instructions, or of the whole rest of taking the chain. Here several entries are read at a time, and what they lead to is
//! fetched meanwhile.

use std::sync::atomic::Ordering;

use super::{
    descriptor::{descriptor, place},
    window::Window,
};
use crate::{GuestMemory, ram};

/// So many entries are read at a time. Processors fetch about ten cache lines at once.
const AHEAD: usize = 8;

/// Heads of the next chains.
#[derive(Debug, Default)]
pub(super) struct Heads {
    list: [u16; AHEAD],
    /// Free-running index of the first of them.
    first: u16,
    count: u16,
}

impl Heads {
    /// The head that was read for the chain with that free-running index.
    #[inline]
    pub(super) fn get(&self, index: u16) -> Option<u16> {
        let at = index.wrapping_sub(self.first);
        if at >= self.count {
            return None;
        }
        self.list.get(usize::from(at)).copied()
    }

    /// Reads those of the chains from `index` on, of which `available` are, from the ring `avail` of `size` entries, a power
    /// of two. Has the processor fetch what they lead to in the descriptor table `desc` and in `memory`.
    pub(super) fn read(
        &mut self,
        index: u16,
        available: u16,
        size: u16,
        [avail, desc]: [&Window; 2],
        memory: &GuestMemory,
    ) {
        (self.first, self.count) = (index, 0);
        // Nothing is gained by looking ahead to what is looked at next.
        let fetches = available > 1;
        for (entry, at) in self.list.iter_mut().zip(0..available) {
            let slot = index.wrapping_add(at) & size.wrapping_sub(1);
            let Some(head) = avail.load(u64::from(slot).wrapping_mul(2).wrapping_add(4), Ordering::Relaxed)
            else {
                break;
            };
            *entry = u16::from_le(head);
            self.count = at.wrapping_add(1);
            if fetches {
                desc.fetch(place(*entry));
            }
        }
        if !fetches {
            return;
        }
        for head in self
            .list
            .iter()
            .take(self.count.into())
            .filter(|head| **head < size)
        {
            let Some(descriptor) = desc.read::<[u64; 2]>(place(*head)).map(descriptor) else {
                continue;
            };
            if descriptor.refers_to_indirect_table() {
                ram::fetch_to_read(memory, descriptor.addr());
            }
        }
    }
}

//! Read-ahead of the next chains in an available ring.
//!
//! To take a chain, a device reads the ring's entry, the descriptor, and usually an indirect table.
//! The driver's processor has just written all three, so each read fetches a cache line from the
//! driver's cache. Each such fetch costs about a hundred instructions, as much as all other work
//! for taking the chain. This module reads several entries at a time and meanwhile fetches the
//! memory that they refer to.

use std::sync::atomic::Ordering;

use vmm_base::{GuestMemory, ram};

use super::{
    descriptor::{descriptor, place},
    window::Window,
};

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

    /// Reads the heads of the chains from `index` on from the ring `avail`. `available` is the
    /// number of available chains. `size` is the number of entries of the ring and is a power of
    /// two. Prefetches the descriptors of the chains from the table `desc` and their indirect
    /// tables from `memory`.
    pub(super) fn read(
        &mut self,
        index: u16,
        available: u16,
        size: u16,
        [avail, desc]: [&Window; 2],
        memory: &GuestMemory,
    ) {
        (self.first, self.count) = (index, 0);
        // For a single chain a prefetch has no benefit, because the caller reads the chain next.
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

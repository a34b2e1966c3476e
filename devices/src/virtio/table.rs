//! Descriptor tables in guest memory (virtio 1.3, 2.7.5).

use std::ops::Range;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, VolatileMemory};

use super::{chain::GuestSlice, window::Window};
use crate::GuestMemory;

/// Bytes of a descriptor (2.7.5).
pub(super) const DESCRIPTOR: u32 = 16;

/// A copy of one (2.7.5).
pub(super) struct Descriptor {
    pub address: u64,
    pub length: u32,
    /// VRING_DESC_F_*.
    pub flags: u32,
    pub next: u16,
}

/// A descriptor table.
pub(super) struct Table<'a> {
    entries: u16,
    place: Place<'a>,
}

/// Where a descriptor table is.
enum Place<'a> {
    /// The queue's own.
    Window(&'a Window),
    /// An indirect one, in one piece.
    Slice(GuestSlice<'a>),
    /// An indirect one in several pieces, or not in memory.
    Scattered(&'a GuestMemory, u64),
}

impl<'a> Table<'a> {
    /// The queue's own.
    pub(super) fn of(window: &'a Window, entries: u16) -> Self {
        Self {
            entries,
            place: Place::Window(window),
        }
    }

    /// An indirect one.
    pub(super) fn indirect(memory: &'a GuestMemory, address: u64, entries: u16) -> Self {
        let length = usize::from(entries).saturating_mul(DESCRIPTOR as usize);
        let place = match GuestMemoryBackend::get_slice(memory, GuestAddress(address), length) {
            Ok(slice) => Place::Slice(slice),
            Err(_) => Place::Scattered(memory, address),
        };
        Self { entries, place }
    }

    /// `None` when there is none with that index, or its memory is not there.
    pub(super) fn get(&self, index: u16) -> Option<Descriptor> {
        if index >= self.entries {
            return None;
        }
        let offset = u64::from(index).wrapping_mul(DESCRIPTOR.into());
        let [address, rest]: [u64; 2] = match &self.place {
            Place::Window(window) => window.read(offset)?,
            Place::Slice(slice) => slice.get_ref(usize::try_from(offset).ok()?).ok()?.load(),
            Place::Scattered(memory, address) => {
                memory.read_obj(GuestAddress(address.checked_add(offset)?)).ok()?
            }
        };
        let rest = u64::from_le(rest);
        Some(Descriptor {
            address: u64::from_le(address),
            length: u32::try_from(rest & u64::from(u32::MAX)).ok()?,
            flags: u32::try_from(rest >> 32 & 0xffff).ok()?,
            next: u16::try_from(rest >> 48).ok()?,
        })
    }
}

/// Where there is guest memory: ranges of addresses with gaps between them, for looking up many buffers.
#[derive(Debug)]
pub(super) struct Extent(Vec<Range<u64>>);

impl Extent {
    pub(super) fn of(memory: &GuestMemory) -> Self {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        // They are in order.
        for region in memory.iter() {
            let start = region.start_addr().0;
            let end = start.saturating_add(region.len());
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        Self(ranges)
    }

    /// Whether all of a buffer is in it.
    pub(super) fn holds(&self, address: u64, length: u32) -> bool {
        let Some(end) = address.checked_add(length.into()) else {
            return false;
        };
        self.0
            .iter()
            .any(|range| range.start <= address && end <= range.end)
    }
}

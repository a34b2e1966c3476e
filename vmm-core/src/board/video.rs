//! The memory of a screen that guests use without a driver: a memory slot of KVM that goes where its BAR goes.

use std::{
    iter,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use devices::{display::VideoMemory, log_limit::LogLimit, pci::BarMemory};
use vm_memory::{Bytes, GuestMemoryRegion, MemoryRegionAddress};

use crate::{
    kvm::{Region, SLOT_PAGE, SlotError, SlotId, Vm},
    memory::{RamError, guest},
};

/// Granularity of changes: the pages of a memory slot.
const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == SLOT_PAGE);

/// See the module.
pub(super) struct Video {
    vm: Arc<Vm>,
    region: Arc<Region>,
    state: Mutex<State>,
    limit: LogLimit,
}

#[derive(Default)]
struct State {
    /// The slot and its guest-physical address, while the BAR is on the bus.
    placed: Option<(SlotId, u64)>,
    /// Pending changes of a removed slot.
    left: Vec<Range<usize>>,
}

impl Video {
    /// `bytes` of memory, which the guest does not see yet.
    pub(super) fn new(vm: &Arc<Vm>, bytes: u64) -> Result<Self, RamError> {
        Ok(Self {
            vm: Arc::clone(vm),
            region: Arc::new(guest::detached_region(bytes)?),
            state: Mutex::default(),
            limit: LogLimit::new(),
        })
    }

    fn take(&self, slot: SlotId, address: u64) -> Result<Vec<Range<usize>>, SlotError> {
        let mut changes: Vec<Range<usize>> = Vec::new();
        for page in self.vm.take_dirty(slot)?.addresses() {
            let start = usize::try_from(page.saturating_sub(address)).unwrap_or(usize::MAX);
            let end = start.saturating_add(PAGE);
            match changes.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => changes.push(start..end),
            }
        }
        Ok(changes)
    }

    fn place(&self, state: &mut State, address: Option<u64>) -> Result<(), SlotError> {
        if let Some((slot, old)) = state.placed.take() {
            // If the changes cannot be read, the whole memory counts as changed. The slot is
            // removed in any case, since another device may get its address.
            let left = self.take(slot, old);
            self.vm.remove_slot(slot)?;
            state.left = left.unwrap_or_else(|_| iter::once(0..usize::MAX).collect());
        }
        if let Some(address) = address {
            let slot = self.vm.add_slot_at(&self.region, address)?;
            state.placed = Some((slot, address));
            self.vm.start_guest_dirty_log(slot)?;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BarMemory for Video {
    fn size(&self) -> u64 {
        self.region.len()
    }

    /// Without a KVM slot, the guest reads ones and its writes are lost.
    fn moved(&self, address: Option<u64>) {
        let mut state = self.lock();
        if let Err(error) = self.place(&mut state, address)
            && self.limit.allow().is_some()
        {
            tracing::error!(%error, "the memory of the screen can't be placed");
        }
    }
}

impl VideoMemory for Video {
    fn take_changes(&self) -> Vec<Range<usize>> {
        let mut state = self.lock();
        let mut changes = std::mem::take(&mut state.left);
        if let Some((slot, address)) = state.placed {
            match self.take(slot, address) {
                Ok(new) => changes.extend(new),
                Err(error) if self.limit.allow().is_some() => {
                    tracing::error!(%error, "what the guest has drawn can't be learnt");
                }
                Err(_) => {}
            }
        }
        changes.sort_unstable_by_key(|range| range.start);
        changes
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let read = self.region.read(bytes, MemoryRegionAddress(offset as u64));
        if let Some(rest) = bytes.get_mut(read.unwrap_or(0)..) {
            rest.fill(0);
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        // Bytes beyond the end are lost, as the trait specifies.
        let _written = self.region.write(bytes, MemoryRegionAddress(offset as u64));
    }

    fn clear(&self) {
        if let Err(error) = guest::drop_pages(&self.region)
            && self.limit.allow().is_some()
        {
            tracing::error!(%error, "the memory of the screen can't be cleared");
        }
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    clippy::single_range_in_vec_init
)]
mod tests {
    use super::*;
    use crate::kvm::Host;

    fn video() -> (Arc<Vm>, Video) {
        let host = Host::open().unwrap_or_else(|error| panic!("these tests need KVM: {error}"));
        let vm = Vm::create(&host).unwrap();
        let video = Video::new(&vm, 1 << 20).unwrap();
        (vm, video)
    }

    #[test]
    fn the_memory_goes_where_its_bar_goes_and_keeps_what_it_holds() {
        let (vm, video) = video();
        assert!(vm.slots().is_empty());
        video.write(PAGE, b"drawn");
        for address in [0x8000_0000, 0x12_0000_0000] {
            video.moved(Some(address));
            let places: Vec<_> = vm.slots().into_iter().map(|(_, range)| range).collect();
            assert_eq!(places, vec![address..address + (1 << 20)]);
            let mut bytes = [0; 5];
            video.read(PAGE, &mut bytes);
            assert_eq!(&bytes, b"drawn");
        }
        video.moved(None);
        assert!(vm.slots().is_empty());
    }

    #[test]
    fn all_pages_are_dirty_at_first_and_dirt_outlives_the_slot() {
        let (_vm, video) = video();
        assert!(video.take_changes().is_empty());
        video.moved(Some(0x8000_0000));
        assert_eq!(video.take_changes(), vec![0..1 << 20]);
        assert!(video.take_changes().is_empty());
        video.moved(Some(0x9000_0000));
        video.moved(None);
        assert_eq!(video.take_changes(), vec![0..1 << 20]);
        assert!(video.take_changes().is_empty());
    }

    #[test]
    fn cleared_memory_reads_as_zeroes_where_it_is() {
        let (_vm, video) = video();
        video.moved(Some(0x8000_0000));
        video.write(PAGE, b"drawn");
        video.clear();
        let mut bytes = [1; 5];
        video.read(PAGE, &mut bytes);
        assert_eq!(bytes, [0; 5]);
    }

    #[test]
    fn what_is_beyond_the_end_reads_as_zeroes_and_is_not_written() {
        let (_vm, video) = video();
        video.write((1 << 20) - 2, &[7; 4]);
        let mut bytes = [1; 4];
        video.read((1 << 20) - 2, &mut bytes);
        assert_eq!(bytes, [7, 7, 0, 0]);
    }
}

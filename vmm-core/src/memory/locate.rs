//! Which guest address a host address stands for, for the handler of a signal: no lock, no allocation.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Maximum number of recorded regions of guest RAM: RAM below and above the MMIO hole, and added
/// slots. A lookup does not find further regions.
const REGIONS: usize = 64;

/// A region of guest RAM in this process. Free while `length` is 0.
struct Region {
    host: AtomicUsize,
    length: AtomicUsize,
    guest: AtomicU64,
}

static TABLE: [Region; REGIONS] = [const {
    Region {
        host: AtomicUsize::new(0),
        length: AtomicUsize::new(0),
        guest: AtomicU64::new(0),
    }
}; REGIONS];

/// `length` taken, the rest not written yet.
const TAKEN: usize = usize::MAX;

/// Remembers that guest RAM at `guest` is at `host` in this process, `length` bytes.
pub fn insert(host: usize, length: usize, guest: u64) {
    for region in &TABLE {
        let free = region
            .length
            .compare_exchange(0, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        if free.is_ok() {
            region.host.store(host, Ordering::Relaxed);
            region.guest.store(guest, Ordering::Relaxed);
            region.length.store(length, Ordering::Release);
            return;
        }
    }
}

/// Forgets the region that begins at `host`.
pub fn remove(host: usize) {
    for region in &TABLE {
        let length = region.length.load(Ordering::Acquire);
        if length != 0 && length != TAKEN && region.host.load(Ordering::Relaxed) == host {
            region.length.store(0, Ordering::Release);
        }
    }
}

/// The guest address that `host` stands for; `None` when it is no guest RAM.
pub fn guest_address(host: usize) -> Option<u64> {
    TABLE.iter().find_map(|region| {
        let length = region.length.load(Ordering::Acquire);
        let offset = host.checked_sub(region.host.load(Ordering::Relaxed))?;
        let inside = length != TAKEN && offset < length;
        let guest = region.guest.load(Ordering::Relaxed);
        inside.then(|| guest.saturating_add(offset as u64))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Backing, GuestRam};
    use vm_memory::{GuestAddress, GuestMemoryBackend};

    #[test]
    fn addresses_of_guest_ram_are_found_as_long_as_it_lives() {
        let ram = GuestRam::new(5 << 30, Backing::Private).unwrap();
        let hosts = [0, 0x1234, 4 << 30, (6 << 30) - 1].map(|guest| {
            let host = ram.memory().get_host_address(GuestAddress(guest)).unwrap() as usize;
            assert_eq!(guest_address(host), Some(guest));
            host
        });
        let first_behind = hosts[3] + 1;
        assert_ne!(guest_address(first_behind), Some(6 << 30));
        drop(ram);
        assert!(hosts.iter().all(|host| guest_address(*host).is_none()));
    }
}

//! Memory slots: which guest-physical ranges are host memory, and which of their pages were written.
//!
//! A slot can be added and removed while vCPUs run. What always holds:
//! - No two slots overlap; each begins and ends at a page.
//! - The host memory of a slot is mapped as long as KVM knows the slot.
//! - A page that [`Vm::take_dirty`] names is protected again before the call returns: a later write names it again.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fmt, io,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
    KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY, KVMIO, kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1,
    kvm_enable_cap, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, VmFd};
use vm_memory::{GuestMemoryRegion, GuestRegionMmap};
use vmm_base::dirty::DirtyBitmap;
use vmm_sys_util::{ioctl::ioctl_with_ref, ioctl_iowr_nr};

use super::{host::KvmError, vm::Vm};

ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);

/// KVM's unit of slot sizes, in bytes.
pub const PAGE: u64 = 4096;
/// The most pages of one slot (the kernel's `KVM_MEM_MAX_NR_PAGES`, include/linux/kvm_host.h).
const PAGES_MAX: u64 = (1 << 31) - 1;
const WORD_BITS: u64 = 64;
/// How many words of a dirty bitmap one `KVM_CLEAR_DIRTY_LOG` covers (64 MiB of guest memory): the kernel holds the lock of
/// its MMU for that long.
const CLEAR_WORDS: usize = 256;

/// Guest memory as a slot shows it.
pub type Region = GuestRegionMmap<DirtyBitmap>;

/// Names a slot of one VM. A slot that is added later never has the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlotId {
    /// KVM's number, which is used again.
    number: u32,
    generation: u64,
}

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory slot {}", self.number)
    }
}

/// Error of an operation on a memory slot.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// Not whole pages, empty, or past the end of the address space.
    #[error("a memory slot of {length:#x} bytes at {start:#x}: it needs whole pages of {PAGE} bytes")]
    Unaligned {
        /// Guest-physical address.
        start: u64,
        /// In bytes.
        length: u64,
    },
    /// More pages than one slot can have.
    #[error("a memory slot of {0:#x} bytes: KVM takes at most {PAGES_MAX} pages of {PAGE} bytes")]
    TooLarge(u64),
    /// The range overlaps another slot.
    #[error("a memory slot at {wanted:x?} overlaps the one at {present:x?}")]
    Overlap {
        /// As asked for.
        wanted: Range<u64>,
        /// Range of the other slot.
        present: Range<u64>,
    },
    /// KVM has no more.
    #[error("all of KVM's {0} memory slots are in use")]
    TooMany(u32),
    /// Removed already, or of another VM.
    #[error("there is no {0} any more")]
    Unknown(SlotId),
    /// A query of dirty pages for a slot without a dirty log.
    #[error("the pages of {0} are not logged")]
    NotLogged(SlotId),
    /// KVM refused.
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

/// Pages of one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyPages {
    /// Guest-physical address of the slot.
    start: u64,
    /// A bit per page.
    words: Vec<u64>,
}

impl DirtyPages {
    /// How many there are.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Their guest-physical addresses, in order.
    pub fn addresses(&self) -> impl Iterator<Item = u64> {
        (0_u64..).zip(&self.words).flat_map(move |(index, word)| {
            let first = index.saturating_mul(WORD_BITS);
            (0..WORD_BITS)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| self.start.saturating_add((first | bit).saturating_mul(PAGE)))
        })
    }
}

/// Whether the pages of a slot are logged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Log {
    Off,
    /// Begun; nothing was taken since.
    Begun,
    On,
    /// The slot is gone.
    Removed,
}

struct Slot {
    id: SlotId,
    range: Range<u64>,
    region: Arc<Region>,
    /// `KVM_MEM_READONLY`, or none.
    base_flags: u32,
    /// Held across the ioctls that concern the log. Taken after the table's lock, never before.
    log: Mutex<Log>,
}

impl Slot {
    fn pages(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start) / PAGE
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the slot in KVM: its flags and its size; size 0 removes the slot.
    fn set(&self, fd: &VmFd, flags: u32, size: u64) -> Result<(), KvmError> {
        let region = kvm_userspace_memory_region {
            slot: self.id.number,
            flags: flags | self.base_flags,
            guest_phys_addr: self.range.start,
            memory_size: size,
            userspace_addr: self.region.as_ptr().addr() as u64,
        };
        // SAFETY: the range stays mapped as long as the region lives, and the VM's table holds the
        // region as long as KVM has the slot. This process accesses memory that the guest writes
        // through volatile accesses only.
        unsafe { fd.set_user_memory_region(region) }.map_err(KvmError::ioctl("KVM_SET_USER_MEMORY_REGION"))
    }
}

/// All slots of a VM.
pub(super) struct Slots {
    used: Mutex<Table>,
    limit: u32,
    /// `KVM_CLEAR_DIRTY_LOG` protects pages, `KVM_GET_DIRTY_LOG` does not.
    manual_protect: bool,
}

#[derive(Default)]
struct Table {
    slots: BTreeMap<u32, Arc<Slot>>,
    generation: u64,
}

impl Slots {
    pub(super) fn new(fd: &VmFd) -> Result<Self, KvmError> {
        let limit = u32::try_from(fd.check_extension_int(Cap::NrMemslots)).unwrap_or(0);
        let offered = fd.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
        // With all bits set in the beginning, a log begins without a walk through the page tables of the whole guest.
        let wanted = KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET;
        let flags = u32::try_from(offered).unwrap_or(0) & wanted;
        let manual_protect = flags & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0;
        if manual_protect {
            fd.enable_cap(&kvm_enable_cap {
                cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
                args: [flags.into(), 0, 0, 0],
                ..Default::default()
            })
            .map_err(KvmError::ioctl(
                "KVM_ENABLE_CAP of KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2",
            ))?;
        }
        Ok(Self {
            used: Mutex::default(),
            limit,
            manual_protect,
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, id: SlotId) -> Result<Arc<Slot>, SlotError> {
        let table = self.table();
        let slot = table.slots.get(&id.number).filter(|slot| slot.id == id);
        slot.cloned().ok_or(SlotError::Unknown(id))
    }
}

impl Table {
    /// A slot for `region` at `start`, if there is room for it.
    fn place(&self, region: Arc<Region>, start: u64, limit: u32) -> Result<Slot, SlotError> {
        let length = region.len();
        let end = start.checked_add(length).filter(|_| length > 0);
        let end = end.filter(|end| start.is_multiple_of(PAGE) && end.is_multiple_of(PAGE));
        let range = start..end.ok_or(SlotError::Unaligned { start, length })?;
        if length / PAGE > PAGES_MAX {
            return Err(SlotError::TooLarge(length));
        }
        let overlaps = |slot: &&Arc<Slot>| slot.range.start < range.end && range.start < slot.range.end;
        if let Some(other) = self.slots.values().find(overlaps) {
            return Err(SlotError::Overlap {
                wanted: range,
                present: other.range.clone(),
            });
        }
        let number = (0..limit).find(|number| !self.slots.contains_key(number));
        Ok(Slot {
            id: SlotId {
                number: number.ok_or(SlotError::TooMany(limit))?,
                generation: self.generation,
            },
            range,
            region,
            base_flags: 0,
            log: Mutex::new(Log::Off),
        })
    }
}

impl Vm {
    /// Shows `region` to the guest, at the region's address. The VM holds on to the region until the slot is removed.
    pub fn add_slot(&self, region: &Arc<Region>) -> Result<SlotId, SlotError> {
        self.add_slot_at(region, region.start_addr().0)
    }

    /// [`add_slot`](Self::add_slot) at the guest-physical address `start` instead of the region's
    /// address.
    pub fn add_slot_at(&self, region: &Arc<Region>, start: u64) -> Result<SlotId, SlotError> {
        self.insert_slot(region, start, 0)
    }

    /// [`add_slot_at`](Self::add_slot_at) for memory that the guest cannot write: its writes are MMIO.
    pub fn add_read_only_slot(&self, region: &Arc<Region>, start: u64) -> Result<SlotId, SlotError> {
        self.insert_slot(region, start, KVM_MEM_READONLY)
    }

    fn insert_slot(&self, region: &Arc<Region>, start: u64, flags: u32) -> Result<SlotId, SlotError> {
        let mut table = self.slots.table();
        let mut slot = table.place(Arc::clone(region), start, self.slots.limit)?;
        slot.base_flags = flags;
        slot.set(self.fd(), 0, region.len())?;
        let id = slot.id;
        table.generation = table.generation.saturating_add(1);
        table.slots.insert(id.number, Arc::new(slot));
        Ok(id)
    }

    /// Removes a slot. The guest's accesses to its range are MMIO from then on.
    pub fn remove_slot(&self, id: SlotId) -> Result<(), SlotError> {
        let slot = self.slots.find(id)?;
        let mut table = self.slots.table();
        let mut log = slot.log();
        if *log == Log::Removed {
            return Err(SlotError::Unknown(id));
        }
        slot.set(self.fd(), 0, 0)?;
        if *log != Log::Off {
            slot.region.get_mmap().bitmap().stop();
        }
        *log = Log::Removed;
        table.slots.remove(&id.number);
        Ok(())
    }

    /// The slots that there are, with their guest-physical addresses.
    pub fn slots(&self) -> Vec<(SlotId, Range<u64>)> {
        let table = self.slots.table();
        let slots = table.slots.values();
        slots.map(|slot| (slot.id, slot.range.clone())).collect()
    }

    /// Begins to log which pages of a slot are written, by the guest and by this process. Does nothing when they are
    /// logged already.
    pub fn start_dirty_log(&self, id: SlotId) -> Result<(), SlotError> {
        self.start_log(id, true)
    }

    /// [`start_dirty_log`](Self::start_dirty_log) of the guest's writes alone, for memory that this
    /// process does not write to. While no RAM is logged, no write has to check for dirty marks.
    pub fn start_guest_dirty_log(&self, id: SlotId) -> Result<(), SlotError> {
        self.start_log(id, false)
    }

    fn start_log(&self, id: SlotId, own_writes: bool) -> Result<(), SlotError> {
        let slot = self.slots.find(id)?;
        let mut log = slot.log();
        match *log {
            Log::Begun | Log::On => return Ok(()),
            Log::Removed => return Err(SlotError::Unknown(id)),
            Log::Off => {}
        }
        if own_writes {
            slot.region.get_mmap().bitmap().start();
        }
        if let Err(error) = slot.set(self.fd(), KVM_MEM_LOG_DIRTY_PAGES, slot.region.len()) {
            slot.region.get_mmap().bitmap().stop();
            return Err(error.into());
        }
        *log = Log::Begun;
        Ok(())
    }

    /// Ends the log of a slot, and forgets it. Does nothing when there is none.
    pub fn stop_dirty_log(&self, id: SlotId) -> Result<(), SlotError> {
        let slot = self.slots.find(id)?;
        let mut log = slot.log();
        match *log {
            Log::Off => return Ok(()),
            Log::Removed => return Err(SlotError::Unknown(id)),
            Log::Begun | Log::On => {}
        }
        slot.set(self.fd(), 0, slot.region.len())?;
        slot.region.get_mmap().bitmap().stop();
        *log = Log::Off;
        Ok(())
    }

    /// The pages that the guest or this process wrote since the last call; all pages at the first
    /// call of a log. Read the pages after the call: a later write marks its page again.
    pub fn take_dirty(&self, id: SlotId) -> Result<DirtyPages, SlotError> {
        let slot = self.slots.find(id)?;
        let mut log = slot.log();
        if !matches!(*log, Log::Begun | Log::On) {
            return Err(SlotError::NotLogged(id));
        }
        // A write of this process marks its page after it has changed it, so a mark that is taken here belongs to a write
        // that is seen when the page is read.
        let own = slot.region.get_mmap().bitmap().take();
        let mut words = self
            .fd()
            .get_dirty_log(id.number, slot.region.size())
            .map_err(KvmError::ioctl("KVM_GET_DIRTY_LOG"))?;
        if *log == Log::Begun {
            fill(&mut words, slot.pages());
        }
        if self.slots.manual_protect {
            for (index, chunk) in words.chunks_mut(CLEAR_WORDS).enumerate() {
                let first = index.saturating_mul(CLEAR_WORDS) as u64 * WORD_BITS;
                self.protect(&slot, first, chunk)?;
            }
        }
        for (word, own) in words.iter_mut().zip(own) {
            *word |= own;
        }
        *log = Log::On;
        Ok(DirtyPages {
            start: slot.range.start,
            words,
        })
    }

    /// Has KVM name the pages of `bits`, the first of which is page `first` of the slot, at their next write.
    fn protect(&self, slot: &Slot, first: u64, bits: &mut [u64]) -> Result<(), KvmError> {
        if bits.iter().all(|word| *word == 0) {
            return Ok(());
        }
        let count = (bits.len() as u64 * WORD_BITS).min(slot.pages().saturating_sub(first));
        let clear = kvm_clear_dirty_log {
            slot: slot.id.number,
            num_pages: u32::try_from(count).unwrap_or(u32::MAX),
            first_page: first,
            __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 {
                dirty_bitmap: bits.as_mut_ptr().cast(),
            },
        };
        // SAFETY: the ioctl reads one bit per page, `count` bits, which `bits` has.
        let result = unsafe { ioctl_with_ref(self.fd(), KVM_CLEAR_DIRTY_LOG(), &clear) };
        if result < 0 {
            return Err(KvmError::Ioctl {
                operation: "KVM_CLEAR_DIRTY_LOG",
                source: io::Error::last_os_error(),
            });
        }
        Ok(())
    }
}

/// Sets the bits of `pages` pages.
fn fill(words: &mut [u64], pages: u64) {
    for (index, word) in (0_u64..).zip(words) {
        let rest = pages.saturating_sub(index.saturating_mul(WORD_BITS));
        *word = match rest {
            WORD_BITS.. => u64::MAX,
            rest => (1 << rest) - 1,
        };
    }
}

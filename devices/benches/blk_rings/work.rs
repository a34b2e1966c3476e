//! Work of a device for a request, besides taking and returning the request. The work is the same
//! with either queue. It relates the cost of the queue to the cost of the complete request.

use std::fs::File;

use devices::virtio::chain::Chain;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use vm_memory::{Bytes as _, GuestMemoryBackend as _, ReadVolatile as _};
use vmm_base::GuestMemory;

/// Page numbers in a request to the balloon: what Linux' driver sends at once.
pub(super) const PAGES: usize = 256;
const NUMBER: usize = size_of::<u32>();
/// Bytes of such a request.
pub(super) const REQUEST: u32 = (PAGES * NUMBER) as u32;
/// The first of the pages, in a part of memory that nothing else is in.
const FIRST: u32 = 0x800;
const PAGE: u64 = 4096;

/// Kind of work for a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Nothing: the queue alone.
    Queue,
    /// Fills buffers with random bytes.
    Entropy,
    /// Gives pages back to the host.
    Balloon,
}

/// Who does it.
pub(super) struct Hand {
    work: Work,
    random: File,
    /// Stands for guest memory that is shared, of which pages are given back by a system call on its file.
    pages: File,
}

impl Hand {
    pub(super) fn new(work: Work) -> Self {
        let pages = memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&pages, 16 << 20).unwrap();
        Self {
            work,
            random: File::open("/dev/urandom").unwrap(),
            pages: pages.into(),
        }
    }

    /// Writes the driver's data into the buffer of a request at `address`.
    pub(super) fn prepare(&self, memory: &GuestMemory, address: vm_memory::GuestAddress) {
        if self.work == Work::Balloon {
            for number in 0..PAGES as u32 {
                let at = address.0 + u64::from(number) * NUMBER as u64;
                // The last page first, as a guest's allocator may give them.
                let page = FIRST + PAGES as u32 - 1 - number;
                memory
                    .write_obj(page.to_le(), vm_memory::GuestAddress(at))
                    .unwrap();
            }
        }
    }

    /// With a chain of ours.
    pub(super) fn ours(&mut self, memory: &GuestMemory, chain: &Chain) {
        match self.work {
            Work::Queue => {}
            Work::Entropy => {
                for slice in chain.writable_slices(memory, 0, chain.writable_len()) {
                    self.random.read_exact_volatile(&mut slice.unwrap()).unwrap();
                }
            }
            Work::Balloon => {
                let mut bytes = [0; PAGES * NUMBER];
                chain.read(memory, 0, &mut bytes).unwrap();
                self.give(&bytes);
            }
        }
    }

    /// With a descriptor of the crate.
    pub(super) fn theirs(
        &mut self,
        memory: &GuestMemory,
        descriptor: &virtio_queue::desc::split::Descriptor,
    ) {
        match self.work {
            Work::Queue => {}
            Work::Entropy => {
                for slice in memory.get_slices(descriptor.addr(), descriptor.len() as usize) {
                    self.random.read_exact_volatile(&mut slice.unwrap()).unwrap();
                }
            }
            Work::Balloon => {
                let mut bytes = [0; PAGES * NUMBER];
                memory.read_slice(&mut bytes, descriptor.addr()).unwrap();
                self.give(&bytes);
            }
        }
    }

    /// Gives these pages back: one system call for neighbours.
    fn give(&self, bytes: &[u8]) {
        let numbers = bytes.as_chunks::<NUMBER>().0;
        let mut numbers: Vec<_> = numbers.iter().map(|number| u32::from_le_bytes(*number)).collect();
        numbers.sort_unstable();
        for run in numbers.chunk_by(|page, next| page + 1 == *next) {
            let (start, length) = (u64::from(run[0] - FIRST) * PAGE, run.len() as u64 * PAGE);
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.pages, how, start, length).unwrap();
        }
    }
}

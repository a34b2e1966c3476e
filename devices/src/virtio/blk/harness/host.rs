//! The host's side of a [`Harness`](super::Harness): an image whose requests are done when the test says so.

use std::{
    collections::HashSet,
    fs::File,
    io,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Instant,
};

use block::{Completion, Engine, Geometry, Image, Operation, Request};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::USED;
use crate::virtio::fault::Counters;

/// State and behaviour of the mock host; shared with the engine.
pub struct Host {
    pub file: File,
    pub capacity: u64,
    pub read_only: bool,
    pub block: u32,
    /// Requests submitted and not done.
    pub waiting: Vec<Request>,
    done: Vec<Completion>,
    /// How many of the next requests fail.
    pub failures: usize,
    /// Requests are done as soon as they are submitted.
    pub eager: bool,
    /// Only `completed` returns finished requests, one at a time; `at_hand` returns none.
    pub shy: bool,
    /// Most requests at once.
    pub depth: usize,
    /// The driver's memory. For each call of `completed`, `seen` records the used ring's index and
    /// the number of waiting requests.
    pub watched: Option<GuestMemory>,
    pub seen: Vec<(u16, usize)>,
    /// Where interrupts are counted, and how many there were each time that requests were handed over.
    pub told: Option<Arc<Counters>>,
    pub commits: Vec<u64>,
}

impl Host {
    /// Does the `index`th (modulo how many there are) of the waiting requests; false when there is none.
    pub fn finish(&mut self, index: usize) -> bool {
        let Some(index) = index.checked_rem(self.waiting.len()) else {
            return false;
        };
        let request = self.waiting.remove(index);
        self.carry_out(request);
        true
    }

    fn carry_out(&mut self, mut request: Request) {
        let transfer = !matches!(request.operation, Operation::Flush);
        let result = if self.failures > 0 && transfer {
            self.failures -= 1;
            Err(io::ErrorKind::StorageFull.into())
        } else {
            self.try_carry_out(&mut request)
        };
        self.done.push(Completion {
            token: request.token,
            result,
            buffers: request.buffers,
        });
    }

    fn try_carry_out(&self, request: &mut Request) -> io::Result<()> {
        match request.operation {
            Operation::Read { offset } => request.buffers.read_exact_at(&self.file, offset),
            Operation::Write { offset, .. } => request.buffers.write_all_at(&self.file, offset, false),
            Operation::Flush => Ok(()),
            Operation::Discard { offset, length } | Operation::WriteZeroes { offset, length, .. } => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                Ok(fallocate(&self.file, flags, offset, length)?)
            }
        }
    }

    /// Checks the guarantees that a device gives to the host.
    fn check(&self, request: &Request) {
        let tokens: HashSet<u32> = self.waiting.iter().map(|request| request.token).collect();
        assert!(!tokens.contains(&request.token), "a token twice");
        let length = request.buffers.len() as u64;
        let (offset, length) = match request.operation {
            Operation::Read { offset } => (offset, length),
            Operation::Write { offset, .. } => {
                assert!(!self.read_only);
                (offset, length)
            }
            Operation::Flush => return assert_eq!(length, 0),
            Operation::Discard {
                offset,
                length: range,
            }
            | Operation::WriteZeroes {
                offset,
                length: range,
                ..
            } => {
                assert!(!self.read_only && length == 0);
                (offset, range)
            }
        };
        assert!(length > 0 && offset.checked_add(length).is_some_and(|end| end <= self.capacity));
        assert!(offset.is_multiple_of(self.block.into()) && length.is_multiple_of(self.block.into()));
    }
}

/// The image and its engine.
pub(crate) struct Mock {
    pub host: Arc<Mutex<Host>>,
    pub event: EventFd,
}

impl Image for Mock {
    fn capacity(&self) -> u64 {
        self.host.lock().unwrap().capacity
    }
    fn read_only(&self) -> bool {
        self.host.lock().unwrap().read_only
    }
    fn geometry(&self) -> Geometry {
        Geometry {
            physical_block: 4096,
            optimal_io: 65536,
            discard_granularity: Some(4096),
        }
    }
    fn engine(&self) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(Self {
            host: self.host.clone(),
            event: EventFd::new(EFD_NONBLOCK)?,
        }))
    }
    fn grow(&self, capacity: Option<u64>) -> io::Result<()> {
        let mut host = self.host.lock().unwrap();
        host.capacity = capacity.unwrap_or(host.capacity);
        host.file.set_len(host.capacity)
    }
    fn commit(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Engine for Mock {
    fn submit(&mut self, request: Request) {
        assert!(self.in_flight() < self.depth(), "more than the engine takes");
        let mut host = self.host.lock().unwrap();
        host.check(&request);
        if host.eager {
            host.carry_out(request);
        } else {
            host.waiting.push(request);
        }
    }
    fn commit(&mut self) -> io::Result<()> {
        let mut host = self.host.lock().unwrap();
        if let Some(counters) = &host.told {
            let interrupts = counters.interrupts.load(Ordering::Relaxed);
            host.commits.push(interrupts);
        }
        Ok(())
    }
    fn completed(&mut self) -> Option<Completion> {
        let mut host = self.host.lock().unwrap();
        if let Some(memory) = &host.watched {
            let index = memory.read_obj(GuestAddress(USED + 2)).unwrap();
            let waiting = host.waiting.len();
            host.seen.push((index, waiting));
        }
        host.done.pop()
    }
    fn at_hand(&mut self) -> Option<Completion> {
        let shy = self.host.lock().unwrap().shy;
        if shy { None } else { self.completed() }
    }
    fn in_flight(&self) -> usize {
        let host = self.host.lock().unwrap();
        host.waiting.len() + host.done.len()
    }
    fn depth(&self) -> usize {
        self.host.lock().unwrap().depth
    }
    fn event(&self) -> Option<&EventFd> {
        let eager = self.host.lock().unwrap().eager;
        (!eager).then_some(&self.event)
    }
    fn wait(&mut self, _deadline: Instant) -> io::Result<()> {
        self.host.lock().unwrap().finish(0);
        Ok(())
    }
}

/// A host with that many bytes of storage.
pub fn host(capacity: u64, read_only: bool, block: u32) -> Host {
    let file = File::from(memfd_create("disk", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(capacity).unwrap();
    Host {
        file,
        capacity,
        read_only,
        block,
        waiting: Vec::new(),
        done: Vec::new(),
        failures: 0,
        eager: false,
        shy: false,
        depth: 8,
        watched: None,
        seen: Vec::new(),
        told: None,
        commits: Vec::new(),
    }
}

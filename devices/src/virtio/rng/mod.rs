//! The entropy device (virtio 1.3, 5.4): each buffer is filled with random bytes.

use std::{fs::File, io, sync::Arc, time::Instant};

use vm_memory::ReadVolatile;
use vmm_base::GuestMemory;

use super::{
    chain::Chain,
    device::{DeviceKind, Drained, Progress, QueueHandler, VirtioDevice, WorkerSpec},
    fault::Fault,
    session::Session,
    signals::Signals,
};
use crate::state::{Section, StateError, message};

/// The device's only queue.
const REQUESTS: u16 = 0;
const QUEUE_SIZES: [u16; 1] = [64];
/// Most bytes that one request gets; the driver sees how many it got (5.4.6).
const MAX_BYTES: u32 = 64 << 10;

/// The front. It has no configuration and no features of its own.
pub struct Rng {
    source: Option<File>,
}

impl Rng {
    /// `source` never blocks and never ends: /dev/urandom.
    pub fn new(source: File) -> Self {
        Self { source: Some(source) }
    }
}

impl VirtioDevice for Rng {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Entropy
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        0
    }

    fn read_config(&self, _offset: usize, _data: &mut [u8]) {}

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn reset(&mut self) {}

    fn workers(&mut self, _signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        let source = self.source.take().ok_or(io::ErrorKind::AlreadyExists)?;
        let handler = Box::new(RngHandler {
            source,
            chain: Chain::new(),
        });
        Ok(vec![WorkerSpec {
            kind: vmm_base::thread::ThreadKind::Worker,
            name: "rng".into(),
            queues: vec![REQUESTS],
            handler,
        }])
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new("rng", &message::VirtioRng {}))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        section.open::<message::VirtioRng>().map(|_| ())
    }
}

struct RngHandler {
    source: File,
    chain: Chain,
}

impl RngHandler {
    /// Fills the request's buffers; gives the number of bytes.
    fn fill(&mut self, memory: &GuestMemory) -> io::Result<u32> {
        let wanted = self.chain.writable_len().min(MAX_BYTES);
        for slice in self.chain.writable_slices(memory, 0, wanted) {
            let mut slice = slice.map_err(io::Error::other)?;
            self.source
                .read_exact_volatile(&mut slice)
                .map_err(io::Error::other)?;
        }
        Ok(wanted)
    }
}

impl QueueHandler for RngHandler {
    fn start(&mut self, _session: &mut Session) -> Result<(), Fault> {
        Ok(())
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        while session.pop(queue, &mut self.chain)? {
            let head = self.chain.head();
            if self.chain.writable_len() == 0 {
                return Err(Fault::Guest {
                    queue,
                    head,
                    reason: "no buffer to fill",
                });
            }
            let filled = self.fill(session.memory());
            session.add_used(queue, head, *filled.as_ref().unwrap_or(&0))?;
            filled.map_err(|error| Fault::Backend("read random bytes", error))?;
        }
        Ok(Progress::Done)
    }

    fn event(&mut self, _session: &mut Session, _token: u32) -> Result<(), Fault> {
        Ok(())
    }

    fn drain(&mut self, _session: &mut Session, _deadline: Instant) -> Result<Drained, Fault> {
        Ok(Drained::Quiet)
    }

    fn reset(&mut self) {}

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new("rng", &message::VirtioRngQueue {}))
    }

    fn restore(&mut self, section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        section.open::<message::VirtioRngQueue>().map(|_| ())
    }
}

#[cfg(test)]
mod tests;

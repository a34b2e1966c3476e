//! The back: takes requests from both queues and answers them.

use std::time::Instant;

use vmm_base::GuestMemory;

use super::command::{HEADER, MAX_REQUEST, Renderer};
use crate::{
    state::{Section, StateError},
    virtio::{
        chain::Chain,
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        session::Session,
    },
};

pub(super) struct GpuHandler {
    renderer: Renderer,
    chain: Chain,
    request: Vec<u8>,
}

impl GpuHandler {
    pub fn new(renderer: Renderer) -> Self {
        Self {
            renderer,
            chain: Chain::new(),
            request: Vec::new(),
        }
    }

    /// Carries out the request in the chain; gives the number of bytes of the response.
    fn answer(&mut self, session: &Session) -> Result<u32, &'static str> {
        let length = usize::try_from(self.chain.readable_len()).unwrap_or(usize::MAX);
        let room = usize::try_from(self.chain.writable_len()).unwrap_or(0);
        if !(HEADER..=MAX_REQUEST).contains(&length) {
            return Err("a request of a length that none has");
        }
        self.request.resize(length, 0);
        if self.chain.read(session.memory(), 0, &mut self.request).is_err() {
            return Err("a request that can't be read");
        }
        let (response, refused) = self.renderer.execute(session.memory(), &self.request);
        if refused {
            session.count_guest_fault();
        }
        // Drivers give the cursor's commands no room for a response.
        let response = response.get(..room.min(response.len())).unwrap_or_default();
        if self.chain.write(session.memory(), 0, response).is_err() {
            return Err("no place for the response");
        }
        Ok(u32::try_from(response.len()).unwrap_or(0))
    }
}

impl QueueHandler for GpuHandler {
    fn start(&mut self, _session: &mut Session) -> Result<(), Fault> {
        self.renderer.shared.set_driven(true);
        Ok(())
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        while session.pop(queue, &mut self.chain)? {
            let head = self.chain.head();
            match self.answer(session) {
                Ok(written) => session.add_used(queue, head, written)?,
                Err(reason) => return Err(Fault::Guest { queue, head, reason }),
            }
        }
        Ok(Progress::Done)
    }

    fn event(&mut self, _session: &mut Session, _token: u32) -> Result<(), Fault> {
        Ok(())
    }

    fn drain(&mut self, _session: &mut Session, _deadline: Instant) -> Result<Drained, Fault> {
        Ok(Drained::Quiet)
    }

    fn reset(&mut self) {
        self.renderer.shared.set_driven(false);
        self.renderer.reset();
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new("gpu", &self.renderer.save()))
    }

    fn restore(&mut self, section: &Section, memory: &GuestMemory) -> Result<(), StateError> {
        self.renderer.restore(&section.open()?, memory)
    }
}

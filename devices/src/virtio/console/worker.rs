//! Worker of the console: prints the driver's output, and delivers typed input.

use std::{sync::Arc, time::Instant};

use vmm_base::GuestMemory;

use super::shared::{BACKLOG, Shared};
use crate::{
    state::{Section, StateError},
    virtio::{
        chain::Chain,
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        session::{EventSet, Session},
    },
};

const RECEIVE: u16 = 0;
/// Token of input that has come.
const WAKE: u32 = 0;
/// Maximum output from one buffer, in bytes. Drivers send at most a page. The history would drop
/// more in any case.
const MAX_BYTES: u32 = 1 << 20;
/// Bytes copied at once.
const PIECE: u32 = 4096;

pub(super) struct ConsoleHandler {
    shared: Arc<Shared>,
    chain: Chain,
    scratch: Vec<u8>,
}

impl ConsoleHandler {
    pub fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            chain: Chain::new(),
            scratch: vec![0; BACKLOG],
        }
    }

    /// Hands input over as long as there is some, and buffers.
    fn deliver(&mut self, session: &mut Session) -> Result<Progress, Fault> {
        while self.shared.waiting() > 0 {
            if !session.pop(RECEIVE, &mut self.chain)? {
                return Ok(Progress::Done);
            }
            let head = self.chain.head();
            let room = usize::try_from(self.chain.writable_len()).unwrap_or(usize::MAX);
            let most = room.min(self.scratch.len());
            let space = self.scratch.get_mut(..most).unwrap_or_default();
            let count = self.shared.peek(space);
            let input = space.get(..count).unwrap_or_default();
            if input.is_empty() || self.chain.write(session.memory(), 0, input).is_err() {
                return Err(Fault::Guest {
                    queue: RECEIVE,
                    head,
                    reason: "no buffer to fill",
                });
            }
            session.add_used(RECEIVE, head, u32::try_from(count).unwrap_or(u32::MAX))?;
            self.shared.taken(count);
        }
        // Buffers are taken when there is something for them. A ring that makes no sense is found now.
        if session.pop(RECEIVE, &mut self.chain)? {
            session.unpop(RECEIVE);
        }
        Ok(Progress::Waiting)
    }

    fn print(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        while session.pop(queue, &mut self.chain)? {
            let end = self.chain.readable_len().min(MAX_BYTES);
            let mut offset = 0;
            while offset < end {
                let length = end.saturating_sub(offset).min(PIECE);
                let piece = self.scratch.get_mut(..length as usize).unwrap_or_default();
                if self.chain.read(session.memory(), offset, piece).is_err() {
                    break;
                }
                self.shared.print(piece);
                offset = offset.saturating_add(length);
            }
            session.add_used(queue, self.chain.head(), 0)?;
        }
        Ok(Progress::Done)
    }
}

impl QueueHandler for ConsoleHandler {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        self.shared.set_paused(false);
        session.watch(self.shared.wake(), WAKE, EventSet::IN)
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        if queue == RECEIVE {
            self.deliver(session)
        } else {
            self.print(session, queue)
        }
    }

    fn event(&mut self, session: &mut Session, _token: u32) -> Result<(), Fault> {
        // The worker is the only reader. After a spurious event the counter is empty.
        let _count = self.shared.wake().read();
        session.kick_again(RECEIVE);
        Ok(())
    }

    fn drain(&mut self, _session: &mut Session, _deadline: Instant) -> Result<Drained, Fault> {
        self.shared.set_paused(true);
        Ok(Drained::Quiet)
    }

    /// Input stays: it is the next driver's.
    fn reset(&mut self) {
        self.shared.set_paused(false);
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new("console", &self.shared.save()))
    }

    fn restore(&mut self, section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        self.shared.set_paused(true);
        self.shared.restore(&section.open()?)
    }
}

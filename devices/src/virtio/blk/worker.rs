//! The worker: takes requests from the queue, has them carried out, answers.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;

use super::request::{HEADER, Header, ID_LENGTH, Limits, Plan, Status};
use crate::{
    GuestMemory,
    block::{Completion, Engine, Operation, Request},
    sys::Iovecs,
    virtio::{
        chain::Chain,
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        session::{EventSet, Session},
    },
};

/// Token of the engine's event.
const COMPLETIONS: u32 = 0;

/// The driver is told of answers at the latest when others have taken that long since.
const MAX_HOLD: Duration = Duration::from_micros(250);

/// A request under way; kept for the next one, which saves allocations.
struct Slot {
    chain: Chain,
    /// `None` while the engine has them.
    buffers: Option<Iovecs>,
    plan: Plan,
    queue: u16,
}

/// The back.
pub(super) struct BlkHandler {
    engine: Box<dyn Engine>,
    limits: Limits,
    id: [u8; ID_LENGTH],
    /// By token. Emptied at each start: the buffers hold on to guest memory.
    slots: Vec<Slot>,
    free: Vec<u32>,
    memory: Option<Arc<GuestMemory>>,
    /// Without a negotiated flush the cache is write-through (5.2.6.2): each write is stable when answered.
    stable_writes: bool,
    /// Since when the driver has not been told of answers.
    held_since: Option<Instant>,
}

impl BlkHandler {
    pub(super) fn new(engine: Box<dyn Engine>, limits: Limits, id: [u8; ID_LENGTH]) -> Self {
        Self {
            engine,
            limits,
            id,
            slots: Vec::new(),
            free: Vec::new(),
            memory: None,
            stable_writes: true,
            held_since: None,
        }
    }

    /// A slot that nobody uses; `None` when the engine has all that it takes.
    fn free_slot(&mut self, memory: &Arc<GuestMemory>, queue: u16) -> Option<u32> {
        if self.engine.in_flight() >= self.engine.depth() {
            return None;
        }
        if let Some(token) = self.free.pop() {
            return Some(token);
        }
        let token = u32::try_from(self.slots.len()).ok()?;
        self.slots.push(Slot {
            chain: Chain::new(),
            buffers: Some(Iovecs::new(Arc::clone(memory))),
            plan: Plan::Flush,
            queue,
        });
        Some(token)
    }

    /// Deals with the request in slot `token`, which was just taken from the queue.
    fn begin(&mut self, session: &mut Session, memory: &GuestMemory, token: u32) -> Result<(), Fault> {
        let Some(slot) = self.slots.get_mut(token as usize) else {
            return Ok(());
        };
        let chain = &slot.chain;
        let Some(incoming) = chain.writable_len().checked_sub(1) else {
            self.free.push(token);
            return Err(Fault::Guest {
                queue: slot.queue,
                head: chain.head(),
                reason: "no place for the status",
            });
        };
        slot.plan = match (
            chain.read_obj::<Header>(memory, 0),
            chain.readable_len().checked_sub(HEADER),
        ) {
            (Ok(header), Some(outgoing)) => self.limits.plan(&header, outgoing, incoming),
            _ => Plan::Answer(Status::IoError),
        };
        let Some(mut buffers) = slot.buffers.take() else {
            return Err(Fault::Bug("a free slot without buffers".into()));
        };
        buffers.clear();
        let (appended, operation) = match slot.plan {
            Plan::Read { offset, length } => (
                buffers.append(chain.writable(), 0, length),
                Operation::Read { offset },
            ),
            Plan::Write { offset, length } => (
                buffers.append(chain.readable(), HEADER, length),
                Operation::Write {
                    offset,
                    stable: self.stable_writes,
                },
            ),
            Plan::Flush => {
                // It may take long: the driver is told of what is done.
                self.held_since = None;
                session.flush_interrupts()?;
                (Ok(()), Operation::Flush)
            }
            Plan::Identify { length } => {
                let id = self.id.get(..length as usize).unwrap_or(&self.id);
                let written = chain.write(memory, 0, id);
                slot.buffers = Some(buffers);
                let status = if written.is_ok() {
                    Status::Ok
                } else {
                    Status::IoError
                };
                return self.answer(session, memory, token, status);
            }
            Plan::Answer(status) => {
                slot.buffers = Some(buffers);
                session.count_guest_fault();
                return self.answer(session, memory, token, status);
            }
        };
        if appended.is_err() {
            slot.buffers = Some(buffers);
            return self.answer(session, memory, token, Status::IoError);
        }
        self.engine.submit(Request {
            token,
            operation,
            buffers,
        });
        Ok(())
    }

    /// Answers what has completed. After errors of the host the first is given, when all are answered.
    fn complete(&mut self, session: &mut Session, memory: &GuestMemory) -> Result<(), Fault> {
        let mut failed = None;
        while let Some(Completion {
            token,
            result,
            buffers,
        }) = self.engine.completed()
        {
            let Some(slot) = self.slots.get_mut(token as usize) else {
                continue;
            };
            slot.buffers = Some(buffers);
            if let Plan::Read { length, .. } = slot.plan {
                // Also after an error: a part may have been written.
                slot.chain.mark_written(memory, 0, length);
            }
            let status = match result {
                Ok(()) => Status::Ok,
                Err(error) => {
                    failed.get_or_insert((slot.plan, error));
                    Status::IoError
                }
            };
            self.answer(session, memory, token, status)?;
        }
        match failed {
            None => Ok(()),
            Some((plan, error)) => Err(backend_fault(plan, error)),
        }
    }

    /// Writes the status into the last writable byte and gives the request back.
    fn answer(
        &mut self,
        session: &mut Session,
        memory: &GuestMemory,
        token: u32,
        status: Status,
    ) -> Result<(), Fault> {
        let Some(slot) = self.slots.get(token as usize) else {
            return Ok(());
        };
        let (chain, length) = (&slot.chain, slot.chain.writable_len());
        // Cannot fail: the chain was checked when it was taken.
        let _ = chain.write(memory, length.saturating_sub(1), &[status.byte()]);
        let (queue, head) = (slot.queue, chain.head());
        self.free.push(token);
        session.add_used(queue, head, length)?;
        let now = Instant::now();
        let since = *self.held_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= MAX_HOLD {
            self.tell_driver(session)?;
        }
        Ok(())
    }

    fn tell_driver(&mut self, session: &mut Session) -> Result<(), Fault> {
        self.held_since = None;
        session.flush_interrupts()
    }

    fn commit(&mut self) -> Result<(), Fault> {
        self.engine
            .commit()
            .map_err(|error| Fault::Backend("submit requests", error))
    }

    fn take(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        let Some(memory) = self.memory.clone() else {
            return Ok(Progress::Done);
        };
        loop {
            let Some(token) = self.free_slot(&memory, queue) else {
                // The engine is full; completions make room.
                self.commit()?;
                self.complete(session, &memory)?;
                if self.engine.in_flight() >= self.engine.depth() {
                    return Ok(Progress::Waiting);
                }
                continue;
            };
            let slot = self.slots.get_mut(token as usize);
            let Some(slot) = slot else {
                return Ok(Progress::Done);
            };
            slot.queue = queue;
            let taken = session.pop(queue, &mut slot.chain);
            if !matches!(taken, Ok(true)) {
                self.free.push(token);
                taken?;
                self.commit()?;
                self.complete(session, &memory)?;
                return Ok(Progress::Done);
            }
            self.begin(session, &memory, token)?;
        }
    }
}

impl QueueHandler for BlkHandler {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        self.stable_writes = !session.has_feature(VIRTIO_BLK_F_FLUSH);
        self.memory = Some(Arc::new(session.memory().clone()));
        self.slots.clear();
        self.free.clear();
        match self.engine.event() {
            Some(event) => session.watch(event, COMPLETIONS, EventSet::IN),
            None => Ok(()),
        }
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        self.held_since = None;
        self.take(session, queue)
    }

    fn event(&mut self, session: &mut Session, _token: u32) -> Result<(), Fault> {
        // The counter's value says nothing; completions do.
        if let Some(event) = self.engine.event() {
            let _ = event.read();
        }
        let Some(memory) = self.memory.clone() else {
            return Ok(());
        };
        let full = self.engine.in_flight() >= self.engine.depth();
        let result = self.complete(session, &memory);
        if full {
            session.kick_again(0);
        }
        result
    }

    fn drain(&mut self, session: &mut Session, deadline: Instant) -> Result<Drained, Fault> {
        let Some(memory) = self.memory.clone() else {
            return Ok(Drained::Quiet);
        };
        self.commit()?;
        loop {
            self.complete(session, &memory)?;
            if self.engine.in_flight() == 0 {
                // Nothing holds on to guest memory any more.
                self.slots.clear();
                self.free.clear();
                return Ok(Drained::Quiet);
            }
            if Instant::now() >= deadline {
                return Ok(Drained::Late);
            }
            self.engine
                .wait(deadline)
                .map_err(|error| Fault::Backend("wait for requests", error))?;
        }
    }

    fn reset(&mut self) {
        self.memory = None;
    }
}

fn backend_fault(plan: Plan, error: io::Error) -> Fault {
    let what = match plan {
        Plan::Read { .. } => "read from the image",
        Plan::Write { .. } => "write to the image",
        _ => "flush the image",
    };
    Fault::Backend(what, error)
}

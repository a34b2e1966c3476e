//! Engine of a qcow2 image. io_uring reads and writes ranges that are contiguous in the file, as in
//! a raw image. Threads ([`pool`](super::pool)) do everything else, and all requests if the kernel
//! forbids io_uring.
//!
//! Invariant: while a request is in the ring, its clusters count as in use
//! ([`Disk::place`](super::disk::Disk::place)), so no other request removes them.

use std::{
    io,
    os::fd::RawFd,
    sync::Arc,
    time::{Duration, Instant},
};

use vmm_base::sys::event::wait_for;
use vmm_sys_util::eventfd::EventFd;

use super::{disk::Place, pool::Pool};
use crate::{
    engine::{Completion, Engine, Operation, Request},
    pool::{Job, Mailbox, Pool as RawPool, copy, event},
    target::Target,
    uring::UringEngine,
};

/// Most requests at once: a virtqueue's size.
const DEPTH: usize = 256;
/// How long a dropped engine waits for the host.
const PATIENCE: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug)]
pub(super) struct Qcow2Engine {
    pool: Arc<Pool>,
    ring: Option<UringEngine>,
    /// Where the requests in the ring are carried out, by their tokens: these are small numbers.
    places: Vec<Option<Place>>,
    /// Where the threads' completions lie; its event is the ring's.
    mailbox: Arc<Mailbox>,
    /// For the threads at the next commit.
    submitted: Vec<Job>,
    /// Requests that the threads have, or will.
    pooled: usize,
    /// Completions that [`wait`](Engine::wait) came upon.
    ended: Vec<Completion>,
}

impl Qcow2Engine {
    /// With a ring on `file`, the image's own, if there is one and the kernel has rings.
    pub(super) fn new(pool: Arc<Pool>, file: Option<&Arc<Target>>) -> io::Result<Self> {
        let ring = file.and_then(|file| {
            let raw = Arc::new(RawPool::new(Arc::clone(file)));
            UringEngine::new(Arc::clone(file), raw).ok()
        });
        let event = match ring.as_ref().and_then(Engine::event) {
            Some(event) => Arc::new(event.try_clone()?),
            None => event()?,
        };
        Ok(Self {
            pool,
            ring,
            places: Vec::new(),
            mailbox: Arc::new(Mailbox::new(event)),
            submitted: Vec::new(),
            pooled: 0,
            ended: Vec::new(),
        })
    }

    /// Where in the file a request can be carried out as it is.
    fn place(&self, request: &Request) -> Option<(Place, Operation)> {
        let length = request.buffers.len() as u64;
        match request.operation {
            Operation::Read { offset } => {
                let place = self.pool.place(offset, length, false)?;
                Some((place, Operation::Read { offset: place.offset }))
            }
            Operation::Write {
                offset,
                stable: false,
            } => {
                let place = self.pool.place(offset, length, true)?;
                let write = Operation::Write {
                    offset: place.offset,
                    stable: false,
                };
                Some((place, write))
            }
            _ => None,
        }
    }

    /// The ring is done with that request.
    fn unplace(&mut self, token: u32) {
        if let Some(place) = self.places.get_mut(token as usize).and_then(Option::take) {
            self.pool.unplace(&place);
        }
    }

    /// Hands the submitted jobs to the threads.
    fn commit_jobs(&mut self) {
        if !self.submitted.is_empty()
            && let Err(error) = self.pool.begin(&mut self.submitted)
        {
            for Job { request, mailbox } in self.submitted.drain(..) {
                mailbox.put(Completion {
                    token: request.token,
                    result: Err(copy(&error)),
                    buffers: request.buffers,
                });
            }
        }
    }

    /// A request that the ring or a thread is done with. `ask` is how the ring is asked.
    fn next(&mut self, ask: fn(&mut UringEngine) -> Option<Completion>) -> Option<Completion> {
        if let Some(completion) = self.ended.pop() {
            return Some(completion);
        }
        if let Some(completion) = self.ring.as_mut().and_then(ask) {
            self.unplace(completion.token);
            return Some(completion);
        }
        let completion = self.mailbox.take()?;
        self.pooled = self.pooled.saturating_sub(1);
        Some(completion)
    }
}

impl Engine for Qcow2Engine {
    fn submit(&mut self, mut request: Request) {
        if self.ring.is_some()
            && let Some((place, operation)) = self.place(&request)
            && let Some(ring) = self.ring.as_mut()
        {
            let index = request.token as usize;
            if index >= self.places.len() {
                self.places.resize(index.saturating_add(1), None);
            }
            if let Some(slot) = self.places.get_mut(index) {
                *slot = Some(place);
            }
            request.operation = operation;
            ring.submit(request);
            return;
        }
        self.pooled = self.pooled.saturating_add(1);
        self.submitted.push(Job {
            request,
            mailbox: Arc::clone(&self.mailbox),
        });
    }

    fn commit(&mut self) -> io::Result<()> {
        self.commit_jobs();
        match self.ring.as_mut() {
            Some(ring) => ring.commit(),
            None => Ok(()),
        }
    }

    fn completed(&mut self) -> Option<Completion> {
        self.next(UringEngine::completed)
    }

    fn at_hand(&mut self) -> Option<Completion> {
        self.next(UringEngine::at_hand)
    }

    fn in_flight(&self) -> usize {
        let ring = self.ring.as_ref().map_or(0, Engine::in_flight);
        ring.saturating_add(self.pooled).saturating_add(self.ended.len())
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn event(&self) -> Option<&EventFd> {
        Some(self.mailbox.event())
    }

    fn commit_and_sleep(&mut self, other: RawFd, limit: Option<Duration>) -> io::Result<bool> {
        self.commit_jobs();
        match self.ring.as_mut() {
            // The threads have already signalled their completions, perhaps before the last look at
            // `other`.
            Some(ring) if self.ended.is_empty() && self.mailbox.is_empty() => {
                ring.commit_and_sleep(other, limit)
            }
            _ => Ok(false),
        }
    }

    fn other_called(&mut self) -> bool {
        self.ring.as_mut().is_some_and(Engine::other_called)
    }

    fn forget_other(&mut self) {
        if let Some(ring) = self.ring.as_mut() {
            ring.forget_other();
        }
    }

    fn is_prompt(&self) -> bool {
        self.ring.as_ref().is_some_and(Engine::is_prompt)
    }

    fn wait(&mut self, deadline: Instant) -> io::Result<()> {
        self.commit()?;
        while self.in_flight() > 0 {
            if let Some(completion) = self.completed() {
                self.ended.push(completion);
                break;
            }
            if Instant::now() >= deadline {
                break;
            }
            wait_for(self.mailbox.event(), deadline)?;
        }
        Ok(())
    }
}

impl Drop for Qcow2Engine {
    fn drop(&mut self) {
        // Normally no request is in flight, because the owner has waited.
        let deadline = Instant::now().checked_add(PATIENCE);
        while let Some(ring) = self.ring.as_mut().filter(|ring| ring.in_flight() > 0) {
            if let Some(completion) = ring.completed() {
                self.unplace(completion.token);
                continue;
            }
            let Some(deadline) = deadline.filter(|deadline| Instant::now() < *deadline) else {
                // The host may still write to clusters that others would take.
                self.pool.fail();
                break;
            };
            if ring.wait(deadline).is_err() {
                self.pool.fail();
                break;
            }
        }
    }
}

//! The engine for raw images: io_uring, with threads ([`pool`](super::pool)) for what it can't do.
//!
//! A request is a call in the ring until it is done: short reads and writes are continued, interrupted ones made again.
//! These leave the ring for the pool: discards of block devices, and zeroings that the file system has no call for.

use std::{io, sync::Arc, time::Instant};

use vmm_sys_util::eventfd::EventFd;

use super::{
    engine::{Completion, Engine, Operation, Request},
    pool::{Job, Mailbox, Pool, copy, event},
    target::{Kind, Target, unsupported, zeroing},
};
use crate::sys::{
    Iovecs,
    event::wait_for,
    ring::{Call, Return, Ring},
};

/// Most requests at once: a virtqueue's size.
const DEPTH: u32 = 256;

/// A request in the ring, by its tag.
#[derive(Clone, Copy, Debug)]
struct Running {
    token: u32,
    /// What is left of it.
    operation: Operation,
}

/// An engine on a ring of its own.
#[derive(Debug)]
pub(super) struct UringEngine {
    ring: Ring,
    target: Arc<Target>,
    pool: Arc<Pool>,
    mailbox: Arc<Mailbox>,
    running: Vec<Running>,
    free: Vec<u32>,
    /// Requests that ended without having been in the ring.
    ended: Vec<Completion>,
    /// Requests in the pool.
    pooled: usize,
    /// Calls were pushed outside of `submit`, or the kernel took none for the time being.
    unsent: bool,
}

impl UringEngine {
    /// Fails where the kernel has no io_uring or forbids it.
    pub(super) fn new(target: Arc<Target>, pool: Arc<Pool>) -> io::Result<Self> {
        let event = event()?;
        Ok(Self {
            ring: Ring::new(&target.file, DEPTH, Arc::clone(&event))?,
            target,
            pool,
            mailbox: Arc::new(Mailbox::new(event)),
            running: Vec::new(),
            free: Vec::new(),
            ended: Vec::new(),
            pooled: 0,
            unsent: false,
        })
    }

    /// The call that carries out (the rest of) an operation; `None` when the ring can't.
    fn call(&self, operation: Operation) -> Option<Call> {
        match operation {
            Operation::Read { offset } => Some(Call::Read(offset)),
            Operation::Write { offset, stable } => Some(Call::Write { offset, stable }),
            Operation::Flush => Some(Call::Sync),
            Operation::Discard { .. } if self.target.kind != Kind::File => None,
            Operation::Discard { offset, length } => allocate(true, offset, length),
            Operation::WriteZeroes {
                offset,
                length,
                unmap,
            } => allocate(unmap, offset, length),
        }
    }

    fn push(&mut self, running: Running, buffers: Iovecs, patient: bool) {
        let Running { token, operation } = running;
        let Some(call) = self.call(operation) else {
            return self.give_to_pool(Request {
                token,
                operation,
                buffers,
            });
        };
        let tag = match self.free.pop() {
            Some(tag) => {
                if let Some(place) = self.running.get_mut(tag as usize) {
                    *place = running;
                }
                tag
            }
            None => {
                self.running.push(running);
                u32::try_from(self.running.len().saturating_sub(1)).unwrap_or(u32::MAX)
            }
        };
        if let Err((buffers, error)) = self.ring.push(tag, call, buffers, patient) {
            self.free.push(tag);
            self.ended.push(Completion {
                token,
                result: Err(error),
                buffers,
            });
        }
    }

    fn give_to_pool(&mut self, request: Request) {
        self.pooled = self.pooled.saturating_add(1);
        self.pool.begin([Job {
            request,
            mailbox: Arc::clone(&self.mailbox),
        }]);
    }

    /// What becomes of a call that came back: the request's end, or nothing yet.
    fn judge(&mut self, back: Return) -> Option<Completion> {
        let Return {
            tag,
            result,
            mut buffers,
        } = back;
        let Running { token, operation } = *self.running.get(tag as usize)?;
        self.free.push(tag);
        let result = match u32::try_from(result) {
            Ok(count) => match advance(operation, count, &mut buffers) {
                Ok(None) => Ok(()),
                Ok(Some(operation)) => {
                    self.push_again(Running { token, operation }, buffers, false);
                    return None;
                }
                Err(error) => Err(error),
            },
            Err(_) => match io::Error::from_raw_os_error(result.saturating_neg()) {
                error if error.kind() == io::ErrorKind::Interrupted => {
                    self.push_again(Running { token, operation }, buffers, false);
                    return None;
                }
                error if error.kind() == io::ErrorKind::WouldBlock => {
                    self.push_again(Running { token, operation }, buffers, true);
                    return None;
                }
                error if unsupported(&error) && is_allocation(operation) => {
                    self.give_to_pool(Request {
                        token,
                        operation,
                        buffers,
                    });
                    return None;
                }
                error => Err(error),
            },
        };
        Some(Completion {
            token,
            result,
            buffers,
        })
    }

    fn push_again(&mut self, running: Running, buffers: Iovecs, patient: bool) {
        self.unsent = true;
        self.push(running, buffers, patient);
    }
}

impl UringEngine {
    /// Hands what is in the ring to the kernel.
    fn send(&mut self) {
        let Err(error) = self.ring.submit() else {
            return;
        };
        if matches!(
            error.raw_os_error(),
            Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM)
        ) {
            // It is tried again when completions are looked for.
            self.unsent = true;
        }
        while let Some((tag, buffers)) = self.ring.abandoned() {
            if let Some(running) = self.running.get(tag as usize) {
                self.ended.push(Completion {
                    token: running.token,
                    result: Err(copy(&error)),
                    buffers,
                });
                self.free.push(tag);
            }
        }
        let _on = self.mailbox.event().write(1);
    }
}

impl Engine for UringEngine {
    fn submit(&mut self, request: Request) {
        let Request {
            token,
            operation,
            buffers,
        } = request;
        self.push(Running { token, operation }, buffers, false);
    }

    fn commit(&mut self) -> io::Result<()> {
        self.send();
        Ok(())
    }

    fn completed(&mut self) -> Option<Completion> {
        loop {
            if let Some(completion) = self.ended.pop() {
                return Some(completion);
            }
            if let Some(back) = self.ring.returned() {
                match self.judge(back) {
                    Some(completion) => return Some(completion),
                    None => continue,
                }
            }
            if let Some(completion) = self.mailbox.take() {
                self.pooled = self.pooled.saturating_sub(1);
                return Some(completion);
            }
            if !std::mem::take(&mut self.unsent) {
                return None;
            }
            self.send();
            if self.unsent {
                return None;
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.ring
            .under_way()
            .saturating_add(self.ended.len())
            .saturating_add(self.pooled)
    }

    fn depth(&self) -> usize {
        DEPTH as usize
    }

    fn event(&self) -> Option<&EventFd> {
        Some(self.mailbox.event())
    }

    fn wait(&mut self, deadline: Instant) -> io::Result<()> {
        self.send();
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

fn is_allocation(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Discard { .. } | Operation::WriteZeroes { .. }
    )
}

fn allocate(unmap: bool, offset: u64, length: u64) -> Option<Call> {
    Some(Call::Allocate {
        mode: i32::try_from(zeroing(unmap).bits()).ok()?,
        offset,
        length,
    })
}

/// What is left of an operation when `count` bytes of it are done; `None` when it is complete.
fn advance(operation: Operation, count: u32, buffers: &mut Iovecs) -> io::Result<Option<Operation>> {
    let (offset, at_end) = match operation {
        Operation::Read { offset } => (offset, io::ErrorKind::UnexpectedEof),
        Operation::Write { offset, .. } => (offset, io::ErrorKind::WriteZero),
        _ => return Ok(None),
    };
    buffers.skip(count as usize);
    if buffers.is_empty() {
        return Ok(None);
    }
    if count == 0 {
        return Err(at_end.into());
    }
    let offset = offset.saturating_add(count.into());
    Ok(Some(match operation {
        Operation::Write { stable, .. } => Operation::Write { offset, stable },
        _ => Operation::Read { offset },
    }))
}

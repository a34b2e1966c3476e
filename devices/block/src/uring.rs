//! Engine for raw images: io_uring, with threads ([`pool`](super::pool)) for unsupported
//! operations.
//!
//! A request stays a call in the ring until it is done: short reads and writes are continued,
//! interrupted ones repeated. These requests leave the ring for the pool: discards of block
//! devices, zeroings without a matching call of the file system, and requests that direct I/O
//! cannot take unchanged or at this moment (see [`direct`](super::direct)).
//!
//! A read of data in the page cache is a copy, and a ring makes the copy when it receives the read. A
//! single read is cheaper as a direct system call, so the engine tries that first ([`Cached`]).

use std::{
    io,
    ops::Range,
    os::fd::RawFd,
    sync::Arc,
    time::{Duration, Instant},
};

use vmm_base::sys::{
    Iovecs,
    event::wait_for,
    ring::{Call, Held, Return, Ring},
};
use vmm_sys_util::eventfd::EventFd;

use super::{
    engine::{Completion, Engine, Operation, Request},
    pool::{Job, Mailbox, Pool, copy, event},
    target::{Alignment, Kind, Target, unsupported, zeroing},
};

/// Most requests at once: a virtqueue's size.
const DEPTH: u32 = 256;

/// Reads that are not tried after one that was not in the page cache: others near it are probably not there either.
const COLD: u32 = 16;

/// State of a request in the ring. Its tag there is its token.
#[derive(Debug)]
struct Running {
    /// Rest of the operation.
    operation: Operation,
    /// Range held in the image's [`changing`](Target::changing) ranges.
    changes: Option<Range<u64>>,
}

/// Action after the return of a call.
enum Verdict {
    /// Its request is at its end.
    Over(io::Result<()>),
    /// That is left to be done; `patient` by a kernel thread that may wait.
    Again { operation: Operation, patient: bool },
    /// The pool may know another way.
    Elsewhere,
}

/// Whether single reads are worth a try from the page cache.
#[derive(Debug)]
struct Cached {
    /// The image is read through the page cache, and its file system supports RWF_NOWAIT.
    able: bool,
    /// Reads that are not to be tried.
    skipped: u32,
}

impl Cached {
    /// For an image that is read through the page cache, or past it.
    fn new(able: bool) -> Self {
        Self { able, skipped: 0 }
    }

    /// Whether the next read is to be tried. Asked once for each.
    fn is_worth_trying(&mut self) -> bool {
        if !self.able {
            return false;
        }
        match self.skipped.checked_sub(1) {
            Some(left) => {
                self.skipped = left;
                false
            }
            None => true,
        }
    }

    /// Records the result of a tried read of `length` bytes. `Ok` holds the number of bytes read.
    fn learn(&mut self, length: usize, result: &io::Result<usize>) {
        match result {
            Ok(count) if *count == length => {}
            Ok(_) => self.skipped = COLD,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN) => self.skipped = COLD,
                // Errors of the image come again in the ring, where they are dealt with.
                Some(libc::EIO) => {}
                // The file system, or the kernel, can't.
                _ => self.able = false,
            },
        }
    }
}

/// An engine on a ring of its own.
#[derive(Debug)]
pub(super) struct UringEngine {
    ring: Ring<Running>,
    target: Arc<Target>,
    pool: Arc<Pool>,
    mailbox: Arc<Mailbox>,
    /// Requests that ended without having been in the ring.
    ended: Vec<Completion>,
    cached: Cached,
    /// A read that nothing else is under way beside, which the page cache may have.
    alone: Option<Request>,
    /// Requests in the pool.
    pooled: usize,
    /// Calls were pushed outside of `submit`, or the kernel took none for the time being.
    unsent: bool,
}

impl UringEngine {
    /// Fails where the kernel has no io_uring or forbids it.
    pub(super) fn new(target: Arc<Target>, pool: Arc<Pool>) -> io::Result<Self> {
        let event = event()?;
        let ring = Ring::new(&target.file, DEPTH, event)?;
        Ok(Self::on(ring, target, pool))
    }

    /// As on a kernel before 6.1.
    #[cfg(test)]
    pub(super) fn undeferred(target: Arc<Target>, pool: Arc<Pool>) -> io::Result<Self> {
        let ring = Ring::undeferred(&target.file, DEPTH, event()?)?;
        Ok(Self::on(ring, target, pool))
    }

    fn on(ring: Ring<Running>, target: Arc<Target>, pool: Arc<Pool>) -> Self {
        Self {
            mailbox: Arc::new(Mailbox::new(Arc::clone(ring.event()))),
            cached: Cached::new(target.alignment() == Alignment::NONE),
            ring,
            target,
            pool,
            alone: None,
            ended: Vec::new(),
            pooled: 0,
            unsent: false,
        }
    }

    /// The call that carries out (the rest of) an operation; `None` when the ring can't.
    fn call(&self, operation: Operation, buffers: &Iovecs) -> Option<Call> {
        if !self.target.takes(operation, buffers) {
            return None;
        }
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

    /// Makes a read that is alone, or begins it.
    fn begin_alone(&mut self) {
        let Some(Request {
            token,
            operation: Operation::Read { offset },
            mut buffers,
        }) = self.alone.take()
        else {
            return;
        };
        let length = buffers.len();
        let result = buffers.read_cached_at(&self.target.file, offset);
        self.cached.learn(length, &result);
        let count = result.unwrap_or(0);
        if count == length {
            let result = Ok(());
            return self.ended.push(Completion {
                token,
                result,
                buffers,
            });
        }
        let offset = offset.saturating_add(count as u64);
        let operation = Operation::Read { offset };
        self.begin(Request {
            token,
            operation,
            buffers,
        });
    }

    /// Begins a request.
    fn begin(&mut self, request: Request) {
        let Request {
            token,
            operation,
            buffers,
        } = request;
        let change = self.target.changes(operation, &buffers);
        let now = match &change {
            Some((changing, range)) => changing.try_lock(range),
            None => true,
        };
        let changes = change.map(|(_, range)| range);
        if now {
            let note = Running { operation, changes };
            self.push(token, Held { note, buffers }, false);
        } else {
            self.give_to_pool(token, operation, buffers);
        }
    }

    /// It is not in the ring any more.
    fn let_go(&self, changes: Option<Range<u64>>) {
        if let (Some(changing), Some(range)) = (self.target.changing(), changes) {
            changing.unlock(&range);
        }
    }

    fn push(&mut self, token: u32, held: Held<Running>, patient: bool) {
        let operation = held.note.operation;
        let Some(call) = self.call(operation, &held.buffers) else {
            self.let_go(held.note.changes);
            return self.give_to_pool(token, operation, held.buffers);
        };
        if let Err((held, error)) = self.ring.push(token, call, held, patient) {
            self.finish(token, Err(error), held);
        }
    }

    /// Ends a request.
    fn finish(&mut self, token: u32, result: io::Result<()>, held: Held<Running>) {
        self.let_go(held.note.changes);
        self.ended.push(Completion {
            token,
            result,
            buffers: held.buffers,
        });
    }

    fn give_to_pool(&mut self, token: u32, operation: Operation, buffers: Box<Iovecs>) {
        self.pooled = self.pooled.saturating_add(1);
        let request = Request {
            token,
            operation,
            buffers,
        };
        self.pool.begin([Job {
            request,
            mailbox: Arc::clone(&self.mailbox),
        }]);
    }

    /// Processes a returned call. Returns the completion if the request has ended.
    fn apply(&mut self, back: Return<Running>) -> Option<Completion> {
        let (token, Held { note, mut buffers }) = (back.tag, back.held);
        let Running { operation, changes } = note;
        let result = match classify(operation, back.result, &mut buffers) {
            Verdict::Over(result) => self.target.outcome(operation, result),
            Verdict::Again { operation, patient } => {
                self.unsent = true;
                let note = Running { operation, changes };
                self.push(token, Held { note, buffers }, patient);
                return None;
            }
            Verdict::Elsewhere => {
                self.let_go(changes);
                self.give_to_pool(token, operation, buffers);
                return None;
            }
        };
        self.let_go(changes);
        Some(Completion {
            token,
            result,
            buffers,
        })
    }
}

impl UringEngine {
    /// Hands the calls in the ring to the kernel.
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
        while let Some((token, held)) = self.ring.abandoned() {
            self.finish(token, Err(copy(&error)), held);
        }
        let _on = self.mailbox.event().write(1);
    }
}

impl Engine for UringEngine {
    fn submit(&mut self, request: Request) {
        if let Some(alone) = self.alone.take() {
            self.begin(alone);
        } else if matches!(request.operation, Operation::Read { .. })
            && self.ring.under_way() == 0
            && self.cached.is_worth_trying()
        {
            // Unless there are more by then, `commit` makes it.
            self.alone = Some(request);
            return;
        }
        self.begin(request);
    }

    fn commit(&mut self) -> io::Result<()> {
        self.begin_alone();
        self.send();
        Ok(())
    }

    fn completed(&mut self) -> Option<Completion> {
        loop {
            if let Some(completion) = self.ended.pop() {
                return Some(completion);
            }
            if let Some(back) = self.ring.returned() {
                match self.apply(back) {
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

    fn at_hand(&mut self) -> Option<Completion> {
        loop {
            if let Some(completion) = self.ended.pop() {
                return Some(completion);
            }
            let back = self.ring.at_hand()?;
            if let Some(completion) = self.apply(back) {
                return Some(completion);
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.ring
            .under_way()
            .saturating_add(self.ended.len())
            .saturating_add(self.pooled)
            .saturating_add(usize::from(self.alone.is_some()))
    }

    fn depth(&self) -> usize {
        DEPTH as usize
    }

    fn event(&self) -> Option<&EventFd> {
        Some(self.mailbox.event())
    }

    fn commit_and_sleep(&mut self, other: RawFd, limit: Option<Duration>) -> io::Result<bool> {
        self.begin_alone();
        // The pool has already signalled its completions, perhaps before the last look at `other`.
        let told = !self.ended.is_empty() || !self.mailbox.is_empty();
        if told || self.unsent || self.ring.under_way() == 0 && limit.is_none() {
            return Ok(false);
        }
        self.ring.wait_beside(other, limit)
    }

    fn other_called(&mut self) -> bool {
        self.ring.other_called()
    }

    fn forget_other(&mut self) {
        self.ring.forget_other();
    }

    fn is_prompt(&self) -> bool {
        self.target.alignment() == Alignment::NONE
    }

    fn wait(&mut self, deadline: Instant) -> io::Result<()> {
        self.begin_alone();
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

fn allocate(unmap: bool, offset: u64, length: u64) -> Option<Call> {
    Some(Call::Allocate {
        mode: i32::try_from(zeroing(unmap).bits()).ok()?,
        offset,
        length,
    })
}

/// Classifies the return of `operation`, the rest of a request. `result` is the value of the system
/// call, or the negative error number. `buffers` belongs to the request; the transferred part is
/// consumed.
fn classify(operation: Operation, result: i32, buffers: &mut Iovecs) -> Verdict {
    if let Ok(count) = u32::try_from(result) {
        return advance(operation, count, buffers);
    }
    let error = io::Error::from_raw_os_error(result.saturating_neg());
    let is_allocation = matches!(
        operation,
        Operation::Discard { .. } | Operation::WriteZeroes { .. }
    );
    match error.kind() {
        io::ErrorKind::Interrupted => Verdict::Again {
            operation,
            patient: false,
        },
        io::ErrorKind::WouldBlock => Verdict::Again {
            operation,
            patient: true,
        },
        _ if is_allocation && unsupported(&error) => Verdict::Elsewhere,
        _ => Verdict::Over(Err(error)),
    }
}

/// When `count` bytes of an operation are done.
fn advance(operation: Operation, count: u32, buffers: &mut Iovecs) -> Verdict {
    let (offset, at_end) = match operation {
        Operation::Read { offset } => (offset, io::ErrorKind::UnexpectedEof),
        Operation::Write { offset, .. } => (offset, io::ErrorKind::WriteZero),
        _ => return Verdict::Over(Ok(())),
    };
    buffers.skip(count as usize);
    if buffers.is_empty() {
        return Verdict::Over(Ok(()));
    }
    if count == 0 {
        return Verdict::Over(Err(at_end.into()));
    }
    let offset = offset.saturating_add(count.into());
    let operation = match operation {
        Operation::Write { stable, .. } => Operation::Write { offset, stable },
        _ => Operation::Read { offset },
    };
    Verdict::Again {
        operation,
        patient: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno(number: i32) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(number))
    }

    /// Returns the indices of the tried reads, of `reads` in total.
    fn tried(cached: &mut Cached, reads: u32, result: &io::Result<usize>) -> Vec<u32> {
        let mut tried = Vec::new();
        for read in 0..reads {
            if cached.is_worth_trying() {
                tried.push(read);
                cached.learn(4096, result);
            }
        }
        tried
    }

    #[test]
    fn what_is_in_the_page_cache_is_tried_each_time() {
        let mut cached = Cached::new(true);
        assert_eq!(tried(&mut cached, 3, &Ok(4096)), [0, 1, 2]);
        assert_eq!(tried(&mut cached, 3, &errno(libc::EIO)), [0, 1, 2]);
    }

    #[test]
    fn after_one_that_is_not_there_some_are_left_to_the_ring() {
        let mut cached = Cached::new(true);
        assert_eq!(tried(&mut cached, 35, &errno(libc::EAGAIN)), [0, 17, 34]);
        let mut cached = Cached::new(true);
        cached.learn(4096, &Ok(512));
        assert_eq!(tried(&mut cached, 20, &Ok(4096)), [16, 17, 18, 19]);
    }

    #[test]
    fn where_it_can_not_be_said_none_is_tried_again() {
        for number in [libc::EOPNOTSUPP, libc::ENOSYS, libc::EPERM, libc::EINVAL] {
            let mut cached = Cached::new(true);
            assert_eq!(tried(&mut cached, 100, &errno(number)), [0]);
        }
        assert!(tried(&mut Cached::new(false), 3, &Ok(4096)).is_empty());
    }
}

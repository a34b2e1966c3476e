//! Threads that carry out the requests on one image, and the engines that hand them over.

use std::{
    collections::VecDeque,
    io, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::EventFd;

use super::disk::Disk;
use crate::{
    block::{
        engine::{Completion, Engine, Operation, Request},
        pool::{Job, Mailbox, event},
    },
    sys::{Iovecs, event::wait_for},
};

/// Requests of one image that are carried out at once.
const THREADS: usize = 4;
/// imago goes a little deep, and a panic of it must be told.
const STACK_BYTES: usize = 512 << 10;
/// Requests of one engine under way at once.
const DEPTH: usize = 128;
/// How long changes of tables may wait for the guest's flush.
const COMMIT_AFTER: Duration = Duration::from_secs(1);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The threads of one image. They end when the last engine and the image are gone; then everything is committed.
#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    disk: Arc<Disk>,
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Pool {
    /// The threads begin with the first engine.
    pub(super) fn new(disk: Arc<Disk>) -> Arc<Self> {
        let shared = Arc::new(Shared {
            disk,
            queue: Mutex::default(),
            work: Condvar::new(),
        });
        Arc::new(Self {
            shared,
            threads: Mutex::default(),
        })
    }

    /// Makes the disk larger.
    pub(super) fn grow(&self, capacity: u64) -> io::Result<()> {
        self.shared.guarded(|disk| disk.grow(capacity))
    }

    pub(super) fn engine(self: &Arc<Self>) -> io::Result<PoolEngine> {
        let mut threads = locked(&self.threads);
        while threads.len() < THREADS {
            let shared = Arc::clone(&self.shared);
            let name = format!("qcow2-{}", threads.len());
            let builder = thread::Builder::new().name(name).stack_size(STACK_BYTES);
            threads.push(builder.spawn(move || shared.work())?);
        }
        Ok(PoolEngine {
            pool: Arc::clone(self),
            mailbox: Arc::new(Mailbox::new(event()?)),
            submitted: Vec::new(),
            in_flight: 0,
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        locked(&self.shared.queue).closed = true;
        self.shared.work.notify_all();
        for thread in mem::take(&mut *locked(&self.threads)) {
            if thread.join().is_err() {
                tracing::error!("a thread of a qcow2 image panicked");
            }
        }
        self.shared.commit();
    }
}

impl Shared {
    /// The life of a thread.
    fn work(&self) {
        while let Some(job) = self.next() {
            let Job { request, mailbox } = job;
            mailbox.put(self.carry_out(request));
        }
    }

    /// The next request; `None` when there will be no more.
    fn next(&self) -> Option<Job> {
        let mut queue = locked(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            if queue.closed {
                return None;
            }
            if !self.disk.uncommitted() {
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waited = self.work.wait_timeout(queue, COMMIT_AFTER);
            let timeout;
            (queue, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() && queue.jobs.is_empty() {
                drop(queue);
                self.commit();
                queue = locked(&self.queue);
            }
        }
    }

    fn commit(&self) {
        if !self.disk.uncommitted() {
            return;
        }
        if let Err(error) = self.guarded(|disk| disk.flush()) {
            tracing::warn!("changes of a qcow2 image can't be written: {error}");
        }
    }

    fn carry_out(&self, request: Request) -> Completion {
        let Request {
            token,
            operation,
            mut buffers,
        } = request;
        let result = self.guarded(|disk| carry_out(disk, operation, &mut buffers));
        Completion {
            token,
            result,
            buffers,
        }
    }

    /// A panic, of a library that did not expect what it found, is an error of the image.
    fn guarded(&self, action: impl FnOnce(&Disk) -> io::Result<()>) -> io::Result<()> {
        catch_unwind(AssertUnwindSafe(|| action(&self.disk))).unwrap_or_else(|_| {
            self.disk.fail();
            Err(io::Error::other("the qcow2 driver failed"))
        })
    }
}

fn carry_out(disk: &Disk, operation: Operation, buffers: &mut Iovecs) -> io::Result<()> {
    match operation {
        Operation::Read { offset } => disk.read(buffers, offset),
        Operation::Write { offset, stable } => {
            disk.write(buffers, offset)?;
            if stable { disk.flush() } else { Ok(()) }
        }
        Operation::Flush => disk.flush(),
        Operation::Discard { offset, length } => disk.discard(offset, length),
        Operation::WriteZeroes {
            offset,
            length,
            unmap,
        } => disk.write_zeroes(offset, length, unmap),
    }
}

/// An engine on a pool.
#[derive(Debug)]
pub(super) struct PoolEngine {
    pool: Arc<Pool>,
    mailbox: Arc<Mailbox>,
    submitted: Vec<Job>,
    in_flight: usize,
}

impl Engine for PoolEngine {
    fn submit(&mut self, request: Request) {
        self.in_flight = self.in_flight.saturating_add(1);
        self.submitted.push(Job {
            request,
            mailbox: Arc::clone(&self.mailbox),
        });
    }

    fn commit(&mut self) -> io::Result<()> {
        let several = self.submitted.len() > 1;
        if self.submitted.is_empty() {
            return Ok(());
        }
        let jobs = self.submitted.drain(..);
        locked(&self.pool.shared.queue).jobs.extend(jobs);
        if several {
            self.pool.shared.work.notify_all();
        } else {
            self.pool.shared.work.notify_one();
        }
        Ok(())
    }

    fn completed(&mut self) -> Option<Completion> {
        let completion = self.mailbox.take()?;
        self.in_flight = self.in_flight.saturating_sub(1);
        Some(completion)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn event(&self) -> Option<&EventFd> {
        Some(self.mailbox.event())
    }

    fn wait(&mut self, deadline: Instant) -> io::Result<()> {
        self.commit()?;
        while self.in_flight > 0 && self.mailbox.is_empty() && Instant::now() < deadline {
            wait_for(self.mailbox.event(), deadline)?;
        }
        Ok(())
    }
}

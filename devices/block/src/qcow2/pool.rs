//! Threads that carry out the requests on one image.

use std::{
    collections::VecDeque,
    io, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use vmm_base::{
    sys::Iovecs,
    thread::{self, ThreadKind},
};

use super::disk::{Disk, Place};
use crate::{
    content::Extent,
    engine::{Completion, Operation, Request},
    pool::Job,
};

/// Requests of one image that are carried out at once.
const THREADS: usize = 4;
/// How long the end of an image waits for requests under way.
const PATIENCE: Duration = Duration::from_secs(10);
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
    /// No thread is busy.
    rested: Condvar,
    /// The last automatic commit failed.
    failing: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Threads that carry something out.
    busy: usize,
    /// Threads end when there are no jobs.
    closed: bool,
    /// The pool's owner does not wait for the threads.
    abandoned: bool,
}

impl Pool {
    /// The threads start with their first request.
    pub(super) fn new(disk: Arc<Disk>) -> Arc<Self> {
        let shared = Arc::new(Shared {
            disk,
            queue: Mutex::default(),
            work: Condvar::new(),
            rested: Condvar::new(),
            failing: AtomicBool::new(false),
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

    /// Writes the changes of tables that wait for a flush.
    pub(super) fn commit(&self) -> io::Result<()> {
        match self.shared.disk.uncommitted() {
            true => self.shared.guarded(|disk| disk.flush()),
            false => Ok(()),
        }
    }

    /// Carries out a request on the caller's thread.
    pub(super) fn execute(&self, operation: Operation, buffers: &mut Iovecs) -> io::Result<()> {
        self.shared.guarded(|disk| carry_out(disk, operation, buffers))
    }

    /// See [`Disk::extent`].
    pub(super) fn extent(&self, offset: u64) -> io::Result<Extent> {
        self.shared.guarded(|disk| disk.extent(offset))
    }

    /// Has requests done.
    pub(super) fn begin(&self, jobs: &mut Vec<Job>) -> io::Result<()> {
        self.start_threads()?;
        let several = jobs.len() > 1;
        locked(&self.shared.queue).jobs.extend(jobs.drain(..));
        if several {
            self.shared.work.notify_all();
        } else {
            self.shared.work.notify_one();
        }
        Ok(())
    }

    /// See [`Disk::place`]; a panic is an error of the image.
    pub(super) fn place(&self, offset: u64, length: u64, write: bool) -> Option<Place> {
        let disk = &self.shared.disk;
        catch_unwind(AssertUnwindSafe(|| disk.place(offset, length, write))).unwrap_or_else(|_| {
            disk.fail();
            None
        })
    }

    /// See [`Disk::unplace`].
    pub(super) fn unplace(&self, place: &Place) {
        self.shared.disk.unplace(place);
    }

    /// From now on every request fails.
    pub(super) fn fail(&self) {
        self.shared.disk.fail();
    }

    /// How many threads there are by now.
    #[cfg(test)]
    pub(super) fn threads(&self) -> usize {
        locked(&self.threads).len()
    }

    /// All that there are to be; the first time that there is work for them.
    fn start_threads(&self) -> io::Result<()> {
        let mut threads = locked(&self.threads);
        while threads.len() < THREADS {
            let shared = Arc::clone(&self.shared);
            let name = format!("qcow2-{}", threads.len());
            match thread::spawn(ThreadKind::Storage, name, move || shared.work()) {
                Ok(thread) => threads.push(thread),
                // Fewer are slower.
                Err(error) if threads.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut queue = locked(&self.shared.queue);
        queue.closed = true;
        self.shared.work.notify_all();
        let waited = self
            .shared
            .rested
            .wait_timeout_while(queue, PATIENCE, |queue| queue.busy > 0 || !queue.jobs.is_empty());
        let (mut queue, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            // A host with stuck storage must not block the drop: the last thread commits when it
            // ends.
            queue.abandoned = true;
            return;
        }
        drop(queue);
        for thread in mem::take(&mut *locked(&self.threads)) {
            let _panics_are_caught = thread.join();
        }
        self.shared.commit();
    }
}

impl Shared {
    /// The life of a thread.
    fn work(&self) {
        while let Some(job) = self.next() {
            let Job { request, mailbox } = job;
            let completion = self.carry_out(request);
            // When the completion of the last request is delivered, no thread is busy.
            let last = self.rest(locked(&self.queue));
            mailbox.put(completion);
            if last {
                self.commit();
            }
        }
    }

    /// Marks a thread as idle. Returns whether it was the last thread of an abandoned image.
    fn rest(&self, mut queue: MutexGuard<'_, Queue>) -> bool {
        queue.busy = queue.busy.saturating_sub(1);
        if queue.busy == 0 {
            self.rested.notify_all();
        }
        queue.abandoned && queue.busy == 0 && queue.jobs.is_empty()
    }

    /// The next request; `None` when there will be no more.
    fn next(&self) -> Option<Job> {
        let mut queue = locked(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                queue.busy = queue.busy.saturating_add(1);
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
                queue.busy = queue.busy.saturating_add(1);
                drop(queue);
                self.commit();
                self.rest(locked(&self.queue));
                queue = locked(&self.queue);
            }
        }
    }

    fn commit(&self) {
        if !self.disk.uncommitted() {
            return;
        }
        match self.guarded(|disk| disk.flush()) {
            Ok(()) => self.failing.store(false, Ordering::Relaxed),
            // It is tried again and again, and said once.
            Err(error) => {
                if !self.failing.swap(true, Ordering::Relaxed) {
                    tracing::warn!("changes of a qcow2 image can't be written yet: {error}");
                }
            }
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

    /// Turns a panic of the library on unexpected data into an error of the image.
    fn guarded<T>(&self, action: impl FnOnce(&Disk) -> io::Result<T>) -> io::Result<T> {
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

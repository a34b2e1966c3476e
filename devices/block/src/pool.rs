//! Threads that carry requests out by waiting for them: for what io_uring can't do, and for everything where the kernel
//! forbids io_uring.
//!
//! An image has one [`Pool`] for all its engines. A thread is made when there is work and none is idle; all end when
//! the image and its engines are gone. Each engine has a [`Mailbox`], where its completions lie until it takes them.

use std::{
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::Instant,
};

use vmm_base::{
    sys::event::wait_for,
    thread::{self, ThreadKind},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{
    direct::Bounce,
    engine::{Completion, Engine, Request},
    target::Target,
};

/// Most threads of an image: what keeps a disk busy that does several requests at once, at little memory.
const MAX_THREADS: usize = 16;

/// Most requests of a [`PoolEngine`] at once.
const DEPTH: usize = 256;

/// Completions on their way from threads to an engine.
#[derive(Debug)]
pub(super) struct Mailbox {
    done: Mutex<VecDeque<Completion>>,
    /// Length of `done`, to look at without the lock.
    count: AtomicUsize,
    event: Arc<EventFd>,
}

impl Mailbox {
    pub(super) fn new(event: Arc<EventFd>) -> Self {
        Self {
            done: Mutex::default(),
            count: AtomicUsize::new(0),
            event,
        }
    }

    pub(super) fn put(&self, completion: Completion) {
        let mut done = locked(&self.done);
        done.push_back(completion);
        self.count.store(done.len(), Ordering::Release);
        // The engine takes all before it waits.
        if done.len() == 1 {
            // Fails only when the counter is full, and then the event is on.
            let _on = self.event.write(1);
        }
    }

    pub(super) fn take(&self) -> Option<Completion> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut done = locked(&self.done);
        let completion = done.pop_front();
        self.count.store(done.len(), Ordering::Release);
        completion
    }

    /// On when something was put in.
    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }
}

/// A request and the mailbox for its completion.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) request: Request,
    pub(super) mailbox: Arc<Mailbox>,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: Vec<JoinHandle<()>>,
    idle: usize,
    closing: bool,
}

#[derive(Debug)]
struct Shared {
    target: Arc<Target>,
    state: Mutex<State>,
    work: Condvar,
}

/// The threads of one image.
#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
}

impl Pool {
    pub(super) fn new(target: Arc<Target>) -> Self {
        let shared = Shared {
            target,
            state: Mutex::default(),
            work: Condvar::new(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Queues jobs for the pool's threads. If no thread can be started, the jobs complete with that
    /// error.
    pub(super) fn begin(&self, jobs: impl IntoIterator<Item = Job>) {
        let mut state = locked(&self.shared.state);
        state.jobs.extend(jobs);
        while state.jobs.len() > state.idle && state.threads.len() < MAX_THREADS {
            if let Err(error) = self.add_thread(&mut state) {
                if state.threads.is_empty() {
                    fail(&mut state.jobs, &error);
                }
                break;
            }
        }
        match state.jobs.len() {
            0 => {}
            1 => self.shared.work.notify_one(),
            _ => self.shared.work.notify_all(),
        }
    }

    fn add_thread(&self, state: &mut State) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = thread::spawn(ThreadKind::Storage, "blk-pool", move || shared.serve())?;
        state.threads.push(thread);
        // It takes a job, or finds none, before it counts itself.
        state.idle = state.idle.saturating_add(1);
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = locked(&self.shared.state);
        state.closing = true;
        state.jobs.clear();
        let threads = std::mem::take(&mut state.threads);
        let all_idle = state.idle == threads.len();
        drop(state);
        self.shared.work.notify_all();
        // The image is closed on return, unless the host's storage is at work still.
        if all_idle {
            for thread in threads {
                let _panics_are_caught = thread.join();
            }
        }
    }
}

impl Shared {
    /// Main loop of a thread. The thread counts as idle except while it runs a job.
    fn serve(&self) {
        let mut bounce = Bounce::default();
        let mut state = locked(&self.state);
        loop {
            if state.closing {
                return;
            }
            let Some(Job { request, mailbox }) = state.jobs.pop_front() else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.idle = state.idle.saturating_sub(1);
            drop(state);
            mailbox.put(self.carry_out(request, &mut bounce));
            state = locked(&self.state);
            state.idle = state.idle.saturating_add(1);
        }
    }

    fn carry_out(&self, request: Request, bounce: &mut Bounce) -> Completion {
        let Request {
            token,
            operation,
            mut buffers,
        } = request;
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.target.execute(operation, &mut buffers, bounce)
        }))
        .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
        Completion {
            token,
            result,
            buffers,
        }
    }
}

fn fail(jobs: &mut VecDeque<Job>, error: &io::Error) {
    for Job { request, mailbox } in jobs.drain(..) {
        mailbox.put(Completion {
            token: request.token,
            result: Err(copy(error)),
            buffers: request.buffers,
        });
    }
}

/// The same error again.
pub(super) fn copy(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(number) => io::Error::from_raw_os_error(number),
        None => error.kind().into(),
    }
}

/// An event for completions.
pub(super) fn event() -> io::Result<Arc<EventFd>> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An engine that has everything done by threads.
#[derive(Debug)]
pub(super) struct PoolEngine {
    pool: Arc<Pool>,
    mailbox: Arc<Mailbox>,
    submitted: Vec<Job>,
    in_flight: usize,
}

impl PoolEngine {
    pub(super) fn new(pool: Arc<Pool>) -> io::Result<Self> {
        Ok(Self {
            pool,
            mailbox: Arc::new(Mailbox::new(event()?)),
            submitted: Vec::new(),
            in_flight: 0,
        })
    }
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
        if !self.submitted.is_empty() {
            self.pool.begin(self.submitted.drain(..));
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
        Some(&self.mailbox.event)
    }

    fn wait(&mut self, deadline: Instant) -> io::Result<()> {
        self.commit()?;
        while self.in_flight > 0 && self.mailbox.is_empty() && Instant::now() < deadline {
            wait_for(&self.mailbox.event, deadline)?;
        }
        Ok(())
    }
}

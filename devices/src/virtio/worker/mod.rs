//! The threads that run the backs of devices.
//!
//! ```text
//!            Start                      ring fault, failed start
//!  parked ──────────▶ serving ──────────────────────────────────▶ broken
//!    ▲                 │    │                                        │
//!    └──── Stop ───────┘    └── panic, Fault::Bug ──▶ dead           │
//!    ▲                                                               │
//!    └──────────────────────── Stop ─────────────────────────────────┘
//! ```
//!
//! Made when the VM is built; from then on a worker does what its command channel says. *Parked*: waits for a
//! command, touches neither guest memory nor the backend. *Serving*: owns a [`Session`]; between any two calls of the
//! handler it looks for commands. *Broken*: DEVICE_NEEDS_RESET is set; waits to be stopped. *Dead*: the VM is
//! failing; a stop is answered with an error. Once a stop was answered with queue states, the worker is parked.

mod thread;
mod verdict;

use std::{
    io,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use self::thread::Worker;
use super::{
    device::WorkerSpec,
    fault::{Counters, EventSink, LogLimit},
    queue::QueueState,
    signals::Signals,
};
use crate::{GuestMemory, thread::ThreadKind};

/// How long an ending worker is waited for before it is left alone.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// What the workers and the transport of a device share.
pub(super) struct Shared {
    /// "disk root"
    pub name: String,
    pub memory: GuestMemory,
    /// Of all queues.
    pub max_sizes: Vec<u16>,
    /// Of all queues.
    pub kicks: Vec<Arc<EventFd>>,
    pub signals: Arc<Signals>,
    pub counters: Arc<Counters>,
    pub sink: Arc<dyn EventSink>,
    pub log_limit: LogLimit,
}

/// Why a worker did not stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopError {
    /// The deadline passed; it serves on.
    Late,
    /// It is dead.
    Gone,
}

type StopResult = Result<Vec<QueueState>, StopError>;

enum Command {
    Start {
        states: Vec<QueueState>,
        features: u64,
    },
    Stop {
        /// Until when, for a pause. A reset (`None`) takes as long as it takes.
        deadline: Option<Instant>,
        reply: SyncSender<StopResult>,
    },
    Exit,
}

struct Handle {
    queues: Vec<u16>,
    commands: Sender<Command>,
    wake: Arc<EventFd>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
    /// `None` once it was waited for.
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    fn send(&self, command: Command) {
        // Fails only if the thread is gone; the missing answer tells that.
        if self.commands.send(command).is_ok() && self.wake.write(1).is_err() {
            tracing::error!("a worker's eventfd refused a write");
        }
    }

    fn start(&self, states: &[QueueState], features: u64) {
        let own = |state: &&QueueState| self.queues.contains(&state.index);
        let states = states.iter().filter(own).copied().collect();
        self.send(Command::Start { states, features });
    }
}

/// All workers of a device.
pub(super) struct Workers {
    handles: Vec<Handle>,
}

impl Workers {
    /// Makes the threads, parked.
    pub fn spawn(shared: &Arc<Shared>, specs: Vec<WorkerSpec>) -> io::Result<Self> {
        let mut workers = Self {
            handles: Vec::with_capacity(specs.len()),
        };
        for spec in specs {
            let (sender, commands) = mpsc::channel();
            let wake = Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
            let worker = Worker {
                shared: Arc::clone(shared),
                handler: spec.handler,
                commands,
                wake: Arc::clone(&wake),
            };
            let (alive, ended) = mpsc::channel::<()>();
            let thread = crate::thread::spawn(ThreadKind::Worker, spec.name, move || {
                let _until_the_end = alive;
                worker.run();
            })?;
            let thread = Some(thread);
            workers.handles.push(Handle {
                queues: spec.queues,
                commands: sender,
                wake,
                ended,
                thread,
            });
        }
        Ok(workers)
    }

    /// Starts all, each with those of `states` that are its own.
    pub fn start(&self, states: &[QueueState], features: u64) {
        for handle in &self.handles {
            handle.start(states, features);
        }
    }

    /// Begins to stop all for a reset; the answer comes in its own time.
    pub fn stop(&self) -> Stopping {
        let stop = |handle: &Handle| {
            let (reply, answer) = mpsc::sync_channel(1);
            handle.send(Command::Stop {
                deadline: None,
                reply,
            });
            answer
        };
        Stopping {
            waiting: self.handles.iter().map(stop).collect(),
            gone: false,
        }
    }

    /// Stops all until `deadline`, or none. Workers that stopped are started again when another can't.
    pub fn pause(&self, deadline: Instant, features: u64) -> StopResult {
        let stop = |handle: &Handle| {
            // Without a buffer: the worker stops only if the answer is taken.
            let (reply, answer) = mpsc::sync_channel(0);
            handle.send(Command::Stop {
                deadline: Some(deadline),
                reply,
            });
            answer
        };
        let answers: Vec<_> = self.handles.iter().map(stop).collect();
        let results: Vec<StopResult> = answers
            .iter()
            .map(
                |answer| match answer.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(result) => result,
                    Err(RecvTimeoutError::Timeout) => Err(StopError::Late),
                    Err(RecvTimeoutError::Disconnected) => Err(StopError::Gone),
                },
            )
            .collect();
        let failed = results
            .iter()
            .filter_map(|result| result.as_ref().err().copied())
            .next_back();
        let Some(error) = failed else {
            return Ok(results.into_iter().flatten().flatten().collect());
        };
        for (handle, result) in self.handles.iter().zip(&results) {
            if let Ok(states) = result {
                handle.start(states, features);
            }
        }
        Err(error)
    }

    /// None of them: what is left in a device whose workers were taken out.
    pub fn none() -> Self {
        Self { handles: Vec::new() }
    }

    /// Ends all for good, for as long as it takes: first what is under way, then the threads, and with them the backs
    /// and what these hold open.
    pub fn end(mut self) {
        let mut stopping = self.stop();
        while !stopping.wait(later(EXIT_TIMEOUT)) && !stopping.gone() {}
        for handle in &mut self.handles {
            handle.send(Command::Exit);
            if handle.thread.take().is_some_and(|thread| thread.join().is_err()) {
                tracing::error!("a worker ended with a panic");
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for handle in &self.handles {
            handle.send(Command::Exit);
        }
        let deadline = later(EXIT_TIMEOUT);
        for handle in &mut self.handles {
            let Some(thread) = handle.thread.take() else {
                continue;
            };
            // A thread that hangs in the host's kernel must not hang its owner.
            let left = deadline.saturating_duration_since(Instant::now());
            if handle.ended.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
                tracing::warn!("a worker does not end");
            } else if thread.join().is_err() {
                tracing::error!("a worker ended with a panic");
            }
        }
    }
}

/// A stop for a reset, under way.
pub(super) struct Stopping {
    waiting: Vec<Receiver<StopResult>>,
    gone: bool,
}

impl Stopping {
    /// Waits for all workers until `deadline` (one in the past only looks). True when they are parked.
    pub fn wait(&mut self, deadline: Instant) -> bool {
        let gone = &mut self.gone;
        self.waiting.retain(|answer| {
            let left = deadline.saturating_duration_since(Instant::now());
            let result = if left.is_zero() {
                answer.try_recv()
            } else {
                answer.recv_timeout(left).map_err(as_try)
            };
            match result {
                Ok(Ok(_)) => false,
                Ok(Err(_)) | Err(TryRecvError::Disconnected) => {
                    *gone = true;
                    false
                }
                Err(TryRecvError::Empty) => true,
            }
        });
        self.waiting.is_empty() && !self.gone
    }

    /// Whether a worker is dead, so that it will never be stopped.
    pub fn gone(&self) -> bool {
        self.gone
    }
}

fn as_try(error: RecvTimeoutError) -> TryRecvError {
    match error {
        RecvTimeoutError::Timeout => TryRecvError::Empty,
        RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
    }
}
fn later(span: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(span).unwrap_or(now)
}

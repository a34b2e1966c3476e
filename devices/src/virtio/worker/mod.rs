//! Threads that run the backs of devices.
//!
//! ```text
//!            Start                      ring fault, failed start
//!  parked ──────────▶ serving ──────────────────────────────────▶ broken
//!    ▲                 │ ▲  │                                        │
//!    │    master off,  │ │  └── panic, Fault::Bug ──▶ dead           │
//!    │    drained      ▼ │ master on                                 │
//!    ├── Pause,Reset ─ halted                                        │
//!    │                                                               │
//!    └── Pause, Reset: drained ──────────────────────────────────────┘
//! ```
//!
//! The workers are created when the VM is built. Afterwards each worker follows its command
//! channel. *Parked*: waits for a command, accesses neither guest memory nor the backend.
//! *Serving*: owns a session; checks for commands between any two calls of the handler. *Halted*:
//! as parked, but continues when the driver enables the function as a bus master. *Broken*:
//! DEVICE_NEEDS_RESET is set; waits for a stop. *Dead*: the VM is failing; answers a stop with an
//! error.
//!
//! Invariant: a worker answers a pause or a reset with success, and drops its handler, only when
//! the handler is drained. A drain ends early only through its own reason: a pause through its
//! deadline, a cleared bus-master enable through setting it again. Commands that arrive during a
//! drain join it. If the owner of a thread stops waiting, the thread continues the drain
//! until the process ends.

mod thread;

use std::{
    io,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use vmm_base::GuestMemory;
use vmm_sys_util::eventfd::EventFd;

use self::thread::Worker;
use super::{
    device::{QueueHandler, WorkerSpec},
    fault::{Counters, EventSink},
    queue::QueueState,
    session::WakeEvent,
    signals::Signals,
};
use crate::{
    log_limit::LogLimit,
    state::{Section, StateError, check},
};

/// How long an ending worker is waited for before it is left alone.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// State that the workers and the transport of a device share.
pub(crate) struct Shared {
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

/// Why a worker did not pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopError {
    /// The deadline passed; it serves on.
    Late,
    /// It is dead.
    Gone,
}

/// A worker is dead: its handler was not drained and never will be, so requests may still be under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a worker thread is dead, requests that it took may still be under way")]
pub(crate) struct Gone;

type PauseResult = Result<Vec<QueueState>, StopError>;
type ResetResult = Result<(), Gone>;

type Visit = Box<dyn FnOnce(&mut dyn QueueHandler) + Send>;

enum Command {
    Start {
        states: Vec<QueueState>,
        features: u64,
    },
    /// Drain until `deadline`, or serve on.
    Pause {
        deadline: Instant,
        reply: SyncSender<PauseResult>,
    },
    /// Drain for as long as it takes, then reset the handler.
    Reset {
        reply: SyncSender<ResetResult>,
    },
    /// The driver enabled or disabled the function as a bus master. The worker replies when it
    /// complies.
    BusMaster {
        on: bool,
        reply: SyncSender<()>,
    },
    /// Call this with the parked handler. A worker that is not parked drops the call.
    Visit(Visit),
    /// Drain for as long as it takes, then end the thread.
    Exit,
}

struct Handle {
    queues: Vec<u16>,
    commands: Sender<Command>,
    wake_event: Arc<WakeEvent>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
    /// `None` once it was waited for.
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    fn send(&self, command: Command) {
        // The send fails only if the thread is gone. The caller then notices the missing answer.
        if self.commands.send(command).is_ok() && self.wake_event.ring().is_err() {
            tracing::error!("a worker's eventfd refused a write");
        }
    }

    fn start(&self, states: &[QueueState], features: u64) {
        let own = |state: &&QueueState| self.queues.contains(&state.index);
        let states = states.iter().filter(own).copied().collect();
        self.send(Command::Start { states, features });
    }

    /// Makes the worker call `call`. The receiver gets no value if the worker is not parked, is
    /// dead, or panics in `call`.
    fn visit<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut dyn QueueHandler) -> T + Send + 'static,
    ) -> Receiver<T> {
        let (reply, result) = mpsc::sync_channel(1);
        let visit: Visit = Box::new(move |handler| {
            let _nobody_waits = reply.send(call(handler));
        });
        self.send(Command::Visit(visit));
        result
    }
}

/// All workers of a device.
pub(crate) struct Workers {
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
            let wake_event = Arc::new(WakeEvent::new()?);
            let worker = Worker {
                shared: Arc::clone(shared),
                handler: spec.handler,
                commands,
                wake_event: Arc::clone(&wake_event),
                bus_master: false,
            };
            let (alive, ended) = mpsc::channel::<()>();
            let thread = vmm_base::thread::spawn(spec.kind, spec.name, move || {
                let _until_the_end = alive;
                worker.run();
            })?;
            let thread = Some(thread);
            workers.handles.push(Handle {
                queues: spec.queues,
                commands: sender,
                wake_event,
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

    /// Starts a reset of all workers; the answers arrive later. A reset in progress continues and
    /// also answers this one.
    pub fn reset(&self) -> Stopping {
        let reset = |handle: &Handle| {
            let (reply, answer) = mpsc::sync_channel(1);
            handle.send(Command::Reset { reply });
            answer
        };
        Stopping {
            waiting: self.handles.iter().map(reset).collect(),
            gone: false,
        }
    }

    /// Allows or forbids all workers to take requests and to access guest memory, for this and all
    /// later sessions. Returns when all workers comply, or at `deadline`. Requests that are then in
    /// progress end later.
    pub fn set_bus_master(&self, on: bool, deadline: Option<Instant>) {
        let tell = |handle: &Handle| {
            let (reply, answer) = mpsc::sync_channel(1);
            handle.send(Command::BusMaster { on, reply });
            answer
        };
        let answers: Vec<_> = self.handles.iter().map(tell).collect();
        let Some(deadline) = deadline else { return };
        for answer in answers {
            let _done_or_late = answer.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }

    /// Stops all until `deadline`, or none. Workers that stopped are started again when another can't.
    pub fn pause(&self, deadline: Instant, features: u64) -> PauseResult {
        let stop = |handle: &Handle| {
            // Without a buffer: the worker stops only if the answer is taken.
            let (reply, answer) = mpsc::sync_channel(0);
            handle.send(Command::Pause { deadline, reply });
            answer
        };
        let answers: Vec<_> = self.handles.iter().map(stop).collect();
        let results: Vec<PauseResult> = answers
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

    /// The state of each back; `name` is the device's. All workers are parked.
    pub fn save(&self, name: &str) -> Result<Vec<Section>, StateError> {
        let results: Vec<_> = self
            .handles
            .iter()
            .map(|handle| handle.visit(|handler| handler.save()))
            .collect();
        results
            .into_iter()
            .map(|result| result.recv().unwrap_or_else(|_| Err(gone(name))))
            .collect()
    }

    /// Each back takes over its section. All workers are parked and were never started.
    pub fn restore(&self, name: &str, sections: &[Section], memory: &GuestMemory) -> Result<(), StateError> {
        check(
            sections.len() == self.handles.len(),
            "workers",
            "not as many as the device has",
        )?;
        for (handle, section) in self.handles.iter().zip(sections) {
            let (section, memory) = (section.clone(), memory.clone());
            let result = handle.visit(move |handler| handler.restore(&section, &memory));
            result.recv().unwrap_or_else(|_| Err(gone(name)))?;
        }
        Ok(())
    }

    /// Returns an empty set of workers, for a device whose workers were taken.
    pub fn none() -> Self {
        Self { handles: Vec::new() }
    }

    /// Ends all workers without a time limit: first the requests in progress, then the threads with
    /// the backs and their open descriptors. Returns an error if a worker is dead. Its requests may
    /// then stay in progress indefinitely.
    pub fn end(mut self) -> Result<(), Gone> {
        let drained = self.reset().wait_all();
        for handle in &mut self.handles {
            handle.send(Command::Exit);
            if handle.thread.take().is_some_and(|thread| thread.join().is_err()) {
                tracing::error!("a worker ended with a panic");
            }
        }
        drained
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
            // A thread that waits for the host's storage must not hold up its owner. It keeps all that its requests
            // need, guest memory too, until they end or the process does.
            let left = deadline.saturating_duration_since(Instant::now());
            if handle.ended.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
                tracing::warn!("a worker is left behind with requests under way");
            } else if thread.join().is_err() {
                tracing::error!("a worker ended with a panic");
            }
        }
    }
}

/// A reset under way.
pub(crate) struct Stopping {
    waiting: Vec<Receiver<ResetResult>>,
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
                Ok(Ok(())) => false,
                Ok(Err(Gone)) | Err(TryRecvError::Disconnected) => {
                    *gone = true;
                    false
                }
                Err(TryRecvError::Empty) => true,
            }
        });
        self.waiting.is_empty() && !self.gone
    }

    /// Waits for all workers, however long they take.
    fn wait_all(self) -> Result<(), Gone> {
        let parked = |answer: &Receiver<ResetResult>| matches!(answer.recv(), Ok(Ok(())));
        // Also after one that is dead the others are waited for.
        let undrained = self.waiting.iter().filter(|answer| !parked(answer)).count();
        if undrained == 0 { Ok(()) } else { Err(Gone) }
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

fn gone(name: &str) -> StateError {
    StateError::not_migratable(name, "a worker thread is not parked, or is gone")
}

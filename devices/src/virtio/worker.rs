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

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use vmm_sys_util::{
    epoll::EpollEvent,
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

use super::{
    device::{Drained, Progress, QueueHandler, WorkerSpec},
    fault::{Counters, DeviceEvent, EventSink, Fault, LogLimit},
    queue::{Queue, QueueState},
    session::{Session, Setup, Wake},
    signals::Signals,
};
use crate::GuestMemory;

/// How long a drain may take before commands are looked at again, when it has to succeed.
const DRAIN_ROUND: Duration = Duration::from_millis(500);
/// Faults in a row during a drain, after which the handler is taken for defective.
const MAX_DRAIN_FAULTS: u32 = 64;
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
            let thread = std::thread::Builder::new().name(spec.name).spawn(move || {
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

/// How a session ended.
enum Next {
    Park,
    /// A pause whose asker is gone: serve on.
    Again(Vec<QueueState>, u64),
    Dead,
    Exit,
}

/// What a fault does to a session.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Health {
    Good,
    Broken,
    Dead,
}

/// The thread's own.
struct Worker {
    shared: Arc<Shared>,
    handler: Box<dyn QueueHandler>,
    commands: Receiver<Command>,
    wake: Arc<EventFd>,
}

impl Worker {
    fn run(mut self) {
        while let Ok(command) = self.commands.recv() {
            match command {
                Command::Start { states, features } => {
                    let mut next = self.serve(&states, features);
                    while let Next::Again(states, features) = next {
                        next = self.serve(&states, features);
                    }
                    match next {
                        Next::Park | Next::Again(..) => {}
                        Next::Dead => return self.refuse(),
                        Next::Exit => return,
                    }
                }
                Command::Stop { deadline, reply } => {
                    if deadline.is_none() && !self.reset_handler() {
                        return self.refuse();
                    }
                    let _nobody_waits = reply.send(Ok(Vec::new()));
                }
                Command::Exit => return,
            }
        }
    }

    /// Answers for a dead handler. What it holds is not dropped: a destructor could panic again, or wait.
    fn refuse(self) {
        std::mem::forget(self.handler);
        while let Ok(command) = self.commands.recv() {
            match command {
                Command::Start { .. } => {}
                Command::Stop { reply, .. } => {
                    let _nobody_waits = reply.send(Err(StopError::Gone));
                }
                Command::Exit => return,
            }
        }
    }

    fn serve(&mut self, states: &[QueueState], features: u64) -> Next {
        let setup = Setup {
            memory: &self.shared.memory,
            features,
            states,
            max_sizes: &self.shared.max_sizes,
            kicks: &self.shared.kicks,
            command: &self.wake,
            signals: Arc::clone(&self.shared.signals),
            counters: Arc::clone(&self.shared.counters),
        };
        let mut session = match Session::new(setup) {
            Ok(session) => session,
            Err(fault) => return self.failed_start(fault, None),
        };
        if let Err(fault) = guard(|| self.handler.start(&mut session)) {
            return self.failed_start(fault, Some(session));
        }
        let mut events = [EpollEvent::default(); 16];
        let mut last = u16::MAX;
        loop {
            let block = !session.has_ready();
            let count = match session.wait(block, &mut events) {
                Ok(count) => count,
                Err(error) => {
                    let bug = Fault::Bug(format!("epoll: {error}"));
                    self.fault(&mut session, bug);
                    return Next::Dead;
                }
            };
            for event in events.get(..count).unwrap_or_default() {
                let health = match Session::wake_of(event) {
                    Some(Wake::Command) => match self.obey(&mut session) {
                        Some(next) => return next,
                        None => Health::Good,
                    },
                    Some(Wake::Queue(queue)) => {
                        Counters::bump(&self.shared.counters.kicks);
                        session.kick_again(queue);
                        Health::Good
                    }
                    Some(Wake::Handler(token)) => self.event(&mut session, token),
                    None => Health::Good,
                };
                match health {
                    Health::Good => {}
                    Health::Broken => return self.broken(Some(session)),
                    Health::Dead => return Next::Dead,
                }
            }
            if let Some(queue) = session.take_ready(last) {
                last = queue;
                match self.kick(&mut session, queue) {
                    Health::Good => {}
                    Health::Broken => return self.broken(Some(session)),
                    Health::Dead => return Next::Dead,
                }
            }
        }
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Health {
        let result = session.on(queue, (), Queue::disable_notification).and_then(|()| {
            let progress = guard(|| self.handler.kick(session, queue))?;
            if session.queue(queue).is_some_and(|ring| ring.exhausted()) {
                session.kick_again(queue);
            } else if progress == Progress::Done {
                session.ask_for_kick(queue)?;
            }
            Ok(())
        });
        self.finish(session, result)
    }

    fn event(&mut self, session: &mut Session, token: u32) -> Health {
        session.lift_budgets();
        let result = guard(|| self.handler.event(session, token));
        self.finish(session, result)
    }

    fn finish(&mut self, session: &mut Session, result: Result<(), Fault>) -> Health {
        let flushed = session.flush_interrupts();
        match result.and(flushed) {
            Ok(()) => Health::Good,
            Err(fault) => self.fault(session, fault),
        }
    }

    /// Does what the command channel says; gives how the session ends, if it does.
    fn obey(&mut self, session: &mut Session) -> Option<Next> {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Start { .. }) => {}
                Ok(Command::Stop { deadline, reply }) => {
                    if let Some(next) = self.stop(session, deadline, &reply) {
                        return Some(next);
                    }
                }
                Ok(Command::Exit) | Err(TryRecvError::Disconnected) => {
                    let deadline = later(DRAIN_ROUND);
                    let _late_or_not = guard(|| self.handler.drain(session, deadline));
                    return Some(Next::Exit);
                }
                Err(TryRecvError::Empty) => return None,
            }
        }
    }

    /// `None` when the session goes on.
    fn stop(
        &mut self,
        session: &mut Session,
        deadline: Option<Instant>,
        reply: &SyncSender<StopResult>,
    ) -> Option<Next> {
        let mut faults = 0_u32;
        session.lift_budgets();
        loop {
            let round = deadline.unwrap_or_else(|| later(DRAIN_ROUND));
            match guard(|| self.handler.drain(session, round)) {
                Ok(Drained::Quiet) => return self.stopped(session, deadline.is_some(), reply),
                Ok(Drained::Late) => {}
                Err(fault) => {
                    faults = faults.saturating_add(1);
                    let fault = if faults < MAX_DRAIN_FAULTS {
                        fault
                    } else {
                        Fault::Bug(format!("draining does not end: {fault}"))
                    };
                    if self.fault(session, fault) == Health::Dead {
                        let _nobody_waits = reply.send(Err(StopError::Gone));
                        return Some(Next::Dead);
                    }
                }
            }
            match deadline {
                Some(deadline) if Instant::now() >= deadline => {
                    // What was made ready meanwhile is not lost: the rings say it.
                    let _nobody_waits = reply.send(Err(StopError::Late));
                    return None;
                }
                Some(_) => {}
                // The machine may be going away while the host's storage hangs.
                None => match self.commands.try_recv() {
                    Ok(Command::Exit) | Err(TryRecvError::Disconnected) => return Some(Next::Exit),
                    Ok(Command::Stop { reply, .. }) => {
                        let _nobody_waits = reply.send(Err(StopError::Late));
                    }
                    Ok(Command::Start { .. }) | Err(TryRecvError::Empty) => {}
                },
            }
        }
    }

    fn stopped(
        &mut self,
        session: &mut Session,
        pause: bool,
        reply: &SyncSender<StopResult>,
    ) -> Option<Next> {
        if pause {
            if let Err(fault) = session.flush_interrupts() {
                self.fault(session, fault);
            }
            let states = session.states();
            return match reply.send(Ok(states.clone())) {
                Ok(()) => Some(Next::Park),
                Err(_) => Some(Next::Again(states, session.features())),
            };
        }
        if !self.reset_handler() {
            let _nobody_waits = reply.send(Err(StopError::Gone));
            return Some(Next::Dead);
        }
        let _nobody_waits = reply.send(Ok(session.states()));
        Some(Next::Park)
    }

    /// False when the handler is dead.
    fn reset_handler(&mut self) -> bool {
        match guard(|| {
            self.handler.reset();
            Ok(())
        }) {
            Ok(()) => true,
            Err(fault) => {
                self.report_bug(&fault);
                false
            }
        }
    }

    fn failed_start(&mut self, fault: Fault, session: Option<Session>) -> Next {
        if matches!(fault, Fault::Bug(_)) {
            self.report_bug(&fault);
            return Next::Dead;
        }
        if matches!(fault, Fault::Backend(..)) {
            Counters::bump(&self.shared.counters.backend_faults);
        }
        self.need_reset(&fault);
        self.broken(session)
    }

    /// Waits to be stopped.
    fn broken(&mut self, mut session: Option<Session>) -> Next {
        while let Ok(command) = self.commands.recv() {
            match (command, &mut session) {
                (Command::Start { .. }, _) => {}
                (Command::Exit, _) => return Next::Exit,
                (Command::Stop { deadline, reply }, Some(session)) => {
                    match self.stop(session, deadline, &reply) {
                        // Still broken.
                        None | Some(Next::Again(..)) => {}
                        Some(next) => return next,
                    }
                }
                (Command::Stop { deadline, reply }, None) => {
                    if deadline.is_none() && !self.reset_handler() {
                        let _nobody_waits = reply.send(Err(StopError::Gone));
                        return Next::Dead;
                    }
                    if reply.send(Ok(Vec::new())).is_ok() {
                        return Next::Park;
                    }
                }
            }
        }
        Next::Exit
    }

    /// The one place that decides what a fault means.
    fn fault(&self, session: &mut Session, fault: Fault) -> Health {
        let shared = &self.shared;
        match fault {
            Fault::Guest { queue, head, .. } => {
                Counters::bump(&shared.counters.guest_faults);
                if let Some(held_back) = shared.log_limit.allow() {
                    tracing::warn!(device = shared.name, %held_back, "{fault}");
                }
                session.kick_again(queue);
                let returned = session
                    .add_used(queue, head, 0)
                    .and_then(|()| session.flush_interrupts());
                match returned {
                    Ok(()) => Health::Good,
                    Err(fault) => {
                        Counters::bump(&shared.counters.ring_faults);
                        self.need_reset(&fault);
                        Health::Broken
                    }
                }
            }
            Fault::Ring { .. } => {
                Counters::bump(&shared.counters.ring_faults);
                self.need_reset(&fault);
                Health::Broken
            }
            Fault::Backend(what, error) => {
                Counters::bump(&shared.counters.backend_faults);
                if let Some(held_back) = shared.log_limit.allow() {
                    tracing::warn!(device = shared.name, %held_back, %error, "{what}");
                    shared.sink.report(
                        &shared.name,
                        DeviceEvent::BackendError(format!("{what}: {error}")),
                    );
                }
                Health::Good
            }
            Fault::Bug(_) => {
                self.report_bug(&fault);
                Health::Dead
            }
        }
    }

    fn need_reset(&self, fault: &Fault) {
        let shared = &self.shared;
        shared.signals.need_reset();
        if let Some(held_back) = shared.log_limit.allow() {
            tracing::warn!(device = shared.name, %held_back, "the device needs a reset: {fault}");
            shared
                .sink
                .report(&shared.name, DeviceEvent::NeedsReset(describe(fault)));
        }
    }

    fn report_bug(&self, fault: &Fault) {
        tracing::error!(device = self.shared.name, "{fault}");
        self.shared.signals.need_reset();
        self.shared
            .sink
            .report(&self.shared.name, DeviceEvent::Failed(describe(fault)));
    }
}

/// The fault with its cause.
fn describe(fault: &Fault) -> String {
    match fault {
        Fault::Backend(what, error) => format!("{what}: {error}"),
        other => other.to_string(),
    }
}

fn later(span: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(span).unwrap_or(now)
}

/// Calls into a handler; a panic becomes a fault.
fn guard<T>(call: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(Fault::Bug(panic_text(panic.as_ref()))))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("of unknown kind"))
}

//! Main loop of a worker thread, the drains of its handler, and the meaning of faults.

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TryRecvError},
    },
    time::{Duration, Instant},
};

use vmm_sys_util::epoll::EpollEvent;

use super::{
    super::{
        device::{Drained, Progress, QueueHandler},
        fault::{Counters, DeviceEvent, Fault, words},
        queue::{Queue, QueueState},
        session::{Session, Setup, Wake, WakeEvent},
    },
    Command, Gone, PauseResult, ResetResult, Shared, StopError, later,
};

/// How long a drain may take before commands are looked at again.
const DRAIN_ROUND: Duration = Duration::from_millis(500);
/// Faults in a row during a drain, after which the handler is taken for defective.
const MAX_DRAIN_FAULTS: u32 = 64;

/// How a session ended. In all but `Dead` the handler is drained.
enum Next {
    Park,
    /// Serve again from these states: after a pause whose asker is gone, or once the function is a bus master.
    Again(Vec<QueueState>, u64),
    Dead,
    Exit,
}

/// Effect of a fault on a session.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Health {
    Good,
    Broken,
    Dead,
}

/// Reasons for a drain, with their waiting callers. More may arrive during the drain. A cleared
/// bus-master bit of the worker is a further reason.
#[derive(Default)]
struct StopRequest {
    pause: Option<(Instant, SyncSender<PauseResult>)>,
    resets: Vec<SyncSender<ResetResult>>,
    /// Replies to callers that cleared bus-master enable.
    halts: Vec<SyncSender<()>>,
    exit: bool,
}

impl StopRequest {
    /// Whether nothing was asked for that needs a drain.
    fn is_empty(&self) -> bool {
        self.pause.is_none() && self.halts.is_empty() && !self.is_for_good()
    }

    fn is_for_good(&self) -> bool {
        self.exit || !self.resets.is_empty()
    }

    /// Reports to all waiting callers that the handler will never be drained.
    fn fail(self) {
        if let Some((_, reply)) = self.pause {
            let _nobody_waits = reply.send(Err(StopError::Gone));
        }
        for reply in self.resets {
            let _nobody_waits = reply.send(Err(Gone));
        }
    }
}

/// The thread's own.
pub(super) struct Worker {
    pub shared: Arc<Shared>,
    pub handler: Box<dyn QueueHandler>,
    pub commands: Receiver<Command>,
    pub wake_event: Arc<WakeEvent>,
    /// Whether the function may read and write guest memory (PCI 3.0, 6.2.2: bus master). While it may not, no session
    /// begins.
    pub bus_master: bool,
}

impl Worker {
    pub(super) fn run(mut self) {
        while let Ok(command) = self.commands.recv() {
            let next = match command {
                Command::Start { states, features } => {
                    let mut next = Next::Again(states, features);
                    while let Next::Again(states, features) = next {
                        next = match self.halt(&states) {
                            None => self.serve(&states, features),
                            Some(end) => end,
                        };
                    }
                    next
                }
                // Parked already.
                command => self.obey_parked(command, &[]).unwrap_or(Next::Park),
            };
            match next {
                Next::Park | Next::Again(..) => {}
                Next::Dead => return self.refuse(),
                Next::Exit => return,
            }
        }
    }

    /// Answers commands for a dead handler. Leaks the handler: a destructor could panic again or
    /// block, and requests in progress may still use its resources.
    fn refuse(self) {
        std::mem::forget(self.handler);
        while let Ok(command) = self.commands.recv() {
            match command {
                Command::Start { .. } | Command::BusMaster { .. } | Command::Visit(_) => {}
                Command::Pause { reply, .. } => {
                    let _nobody_waits = reply.send(Err(StopError::Gone));
                }
                Command::Reset { reply } => {
                    let _nobody_waits = reply.send(Err(Gone));
                }
                Command::Exit => return,
            }
        }
    }

    /// Waits, drained and with queues as `states` say, until the function is a bus master. `None` when it is.
    fn halt(&mut self, states: &[QueueState]) -> Option<Next> {
        while !self.bus_master {
            let Ok(command) = self.commands.recv() else {
                return Some(Next::Exit);
            };
            if let Some(next) = self.obey_parked(command, states) {
                return Some(next);
            }
        }
        None
    }

    /// Does as a command says while the handler is drained and there is no session; `states` are the queues' of the
    /// session that may follow. `None` when the worker waits on.
    fn obey_parked(&mut self, command: Command, states: &[QueueState]) -> Option<Next> {
        match command {
            Command::Start { .. } => None,
            Command::Pause { reply, .. } => reply.send(Ok(states.to_vec())).is_ok().then_some(Next::Park),
            Command::Reset { reply } => {
                if !self.reset_handler() {
                    let _nobody_waits = reply.send(Err(Gone));
                    return Some(Next::Dead);
                }
                let _nobody_waits = reply.send(Ok(()));
                Some(Next::Park)
            }
            Command::BusMaster { on, reply } => {
                self.bus_master = on;
                let _nobody_waits = reply.send(());
                None
            }
            Command::Visit(visit) => {
                let visited = guard(|| {
                    visit(&mut *self.handler);
                    Ok(())
                });
                let fault = visited.err()?;
                self.shared.report_bug(&fault);
                Some(Next::Dead)
            }
            Command::Exit => Some(Next::Exit),
        }
    }

    fn serve(&mut self, states: &[QueueState], features: u64) -> Next {
        let setup = Setup {
            memory: &self.shared.memory,
            features,
            states,
            max_sizes: &self.shared.max_sizes,
            kicks: &self.shared.kicks,
            wake_event: &self.wake_event,
            signals: Arc::clone(&self.shared.signals),
            counters: Arc::clone(&self.shared.counters),
        };
        let mut session = match Session::new(setup) {
            Ok(session) => session,
            Err(fault) => return self.failed_start(&fault, None),
        };
        if let Err(fault) = guard(|| self.handler.start(&mut session)) {
            return self.failed_start(&fault, Some(session));
        }
        let mut events = [EpollEvent::default(); 16];
        let mut last = u16::MAX;
        loop {
            let block = !session.has_ready();
            let count = match session.wait(block, &mut events) {
                Ok(count) => count,
                Err(error) => {
                    let bug = Fault::Bug(format!("epoll: {error}"));
                    self.shared.handle_fault(&mut session, bug);
                    return Next::Dead;
                }
            };
            let events = events.get(..count).unwrap_or_default();
            let wakes = events.iter().filter_map(Session::wake_of);
            // Commands come first: a handler that sleeps in the meantime is not woken again for them.
            if wakes.clone().any(|wake| wake == Wake::Command)
                && let Some(next) = self.obey(&mut session)
            {
                return next;
            }
            for wake in wakes {
                let health = match wake {
                    Wake::Command => Health::Good,
                    Wake::Queue(queue) => {
                        Counters::bump(&self.shared.counters.kicks);
                        session.kick_again(queue);
                        Health::Good
                    }
                    Wake::Handler(token) => self.event(&mut session, token),
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
            let exhausted = session.queue(queue).is_some_and(|ring| ring.exhausted());
            if progress == Progress::Done && !exhausted {
                session.ask_for_kick(queue)?;
            } else if exhausted {
                session.kick_again(queue);
            }
            Ok(())
        });
        if result.is_err() {
            // The handler was interrupted while notifications were off. The next kick continues
            // with the rest of the ring.
            session.kick_again(queue);
        }
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
            Ok(_) => Health::Good,
            Err(fault) => self.shared.handle_fault(session, fault),
        }
    }

    /// Executes the commands in the channel. Returns the end of the session, if a command ends it.
    fn obey(&mut self, session: &mut Session) -> Option<Next> {
        self.wake_event.silence();
        loop {
            let command = match self.commands.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Disconnected) => Command::Exit,
                Err(TryRecvError::Empty) => return None,
            };
            if let Some(next) = self.obey_one(session, command) {
                return Some(next);
            }
        }
    }

    fn obey_one(&mut self, session: &mut Session, command: Command) -> Option<Next> {
        if matches!(command, Command::Start { .. }) {
            return None;
        }
        let mut request = StopRequest::default();
        self.join(&mut request, command);
        if request.is_empty() {
            return None;
        }
        self.stop(session, request)
    }

    /// False when the handler is dead.
    fn reset_handler(&mut self) -> bool {
        match guard(|| {
            self.handler.reset();
            Ok(())
        }) {
            Ok(()) => true,
            Err(fault) => {
                self.shared.report_bug(&fault);
                false
            }
        }
    }

    fn failed_start(&mut self, fault: &Fault, session: Option<Session>) -> Next {
        if matches!(fault, Fault::Bug(_)) {
            self.shared.report_bug(fault);
            return Next::Dead;
        }
        if matches!(fault, Fault::Backend(..)) {
            Counters::bump(&self.shared.counters.backend_faults);
        }
        self.shared.need_reset(fault);
        self.broken(session)
    }

    /// Waits for a stop. Requests in progress end meanwhile, or in the drain.
    fn broken(&mut self, mut session: Option<Session>) -> Next {
        loop {
            let command = self.commands.recv().unwrap_or(Command::Exit);
            let next = match &mut session {
                Some(session) => self.obey_one(session, command),
                None => self.obey_parked(command, &[]),
            };
            match next {
                // Drained or not, the device stays broken. Only a reset helps.
                None | Some(Next::Again(..)) => {}
                Some(next) => return next,
            }
        }
    }
}

impl Worker {
    /// Takes a command while there is a session. A start is none: the worker was started. Nor is a visit: the handler
    /// is not parked.
    fn join(&mut self, request: &mut StopRequest, command: Command) {
        match command {
            Command::Start { .. } | Command::Visit(_) => {}
            Command::Pause { reply, .. } if request.is_for_good() => {
                let _nobody_waits = reply.send(Err(StopError::Late));
            }
            Command::Pause { deadline, reply } => request.pause = Some((deadline, reply)),
            Command::Reset { reply } => request.resets.push(reply),
            Command::BusMaster { on, reply } => {
                self.bus_master = on;
                if on {
                    // Dropping the reply ends the wait of the halt's caller.
                    request.halts.clear();
                    let _nobody_waits = reply.send(());
                } else {
                    request.halts.push(reply);
                }
            }
            Command::Exit => request.exit = true,
        }
    }

    /// Drains for `request` and for all reasons that join it. Returns `None` if no reason remains
    /// before the handler is drained. Then the session continues and finds new requests in the
    /// rings.
    fn stop(&mut self, session: &mut Session, mut request: StopRequest) -> Option<Next> {
        let mut faults = 0_u32;
        session.lift_budgets();
        loop {
            let round = later(DRAIN_ROUND);
            let round = request
                .pause
                .as_ref()
                .map_or(round, |(deadline, _)| round.min(*deadline));
            match guard(|| self.handler.drain(session, round)) {
                Ok(Drained::Quiet) => return Some(self.drained(session, request)),
                Ok(Drained::Late) => {}
                Err(fault) => {
                    faults = faults.saturating_add(1);
                    let fault = if faults < MAX_DRAIN_FAULTS {
                        fault
                    } else {
                        Fault::Bug(format!("draining does not end: {fault}"))
                    };
                    if self.shared.handle_fault(session, fault) == Health::Dead {
                        request.fail();
                        return Some(Next::Dead);
                    }
                }
            }
            loop {
                match self.commands.try_recv() {
                    Ok(command) => self.join(&mut request, command),
                    Err(TryRecvError::Empty) => break,
                    // No sender of commands remains.
                    Err(TryRecvError::Disconnected) => {
                        request.exit = true;
                        break;
                    }
                }
            }
            if let Some((_, reply)) = request.pause.take_if(|(deadline, _)| Instant::now() >= *deadline) {
                let _nobody_waits = reply.send(Err(StopError::Late));
            }
            if request.pause.is_none() && !request.is_for_good() && self.bus_master {
                return None;
            }
        }
    }

    /// Notifies all waiting callers after the drain.
    fn drained(&mut self, session: &mut Session, request: StopRequest) -> Next {
        if request.is_for_good() {
            if !self.reset_handler() {
                request.fail();
                return Next::Dead;
            }
            // A pause that was asked for before: the device is as after power-on.
            if let Some((_, reply)) = request.pause {
                let _nobody_waits = reply.send(Ok(Vec::new()));
            }
            for reply in &request.resets {
                let _nobody_waits = reply.send(Ok(()));
            }
            return if request.exit { Next::Exit } else { Next::Park };
        }
        if let Err(fault) = session.flush_interrupts() {
            self.shared.handle_fault(session, fault);
        }
        for reply in &request.halts {
            let _nobody_waits = reply.send(());
        }
        let states = session.states();
        if let Some((_, reply)) = request.pause
            && reply.send(Ok(states.clone())).is_ok()
        {
            return Next::Park;
        }
        Next::Again(states, session.features())
    }
}

impl Shared {
    /// Decides the consequences of a fault. All decisions are in this function.
    fn handle_fault(&self, session: &mut Session, fault: Fault) -> Health {
        match fault {
            Fault::Guest { queue, head, .. } => {
                Counters::bump(&self.counters.guest_faults);
                if let Some(held_back) = self.log_limit.allow() {
                    tracing::warn!(device = self.name, %held_back, "{fault}");
                }
                let returned = session
                    .add_used(queue, head, 0)
                    .and_then(|()| session.flush_interrupts());
                match returned {
                    Ok(_) => Health::Good,
                    Err(fault) => {
                        Counters::bump(&self.counters.ring_faults);
                        self.need_reset(&fault);
                        Health::Broken
                    }
                }
            }
            Fault::Ring { .. } => {
                Counters::bump(&self.counters.ring_faults);
                self.need_reset(&fault);
                Health::Broken
            }
            Fault::Backend(what, error) => {
                Counters::bump(&self.counters.backend_faults);
                if let Some(held_back) = self.log_limit.allow() {
                    tracing::warn!(device = self.name, %held_back, %error, "{what}");
                    self.report(DeviceEvent::BackendError(reason(what, &error)));
                }
                Health::Good
            }
            Fault::Held(what, error) => {
                Counters::bump(&self.counters.backend_faults);
                if let Some(held_back) = self.log_limit.allow() {
                    tracing::warn!(device = self.name, %held_back, %error, "{what}: requests are held");
                }
                // The machine depends on it, and it comes once for each pause.
                self.report(DeviceEvent::Held(reason(what, &error)));
                Health::Good
            }
            Fault::Bug(_) => {
                self.report_bug(&fault);
                Health::Dead
            }
        }
    }

    fn need_reset(&self, fault: &Fault) {
        self.signals.need_reset();
        if let Some(held_back) = self.log_limit.allow() {
            tracing::warn!(device = self.name, %held_back, "the device needs a reset: {fault}");
            self.report(DeviceEvent::NeedsReset(describe(fault)));
        }
    }

    fn report_bug(&self, fault: &Fault) {
        tracing::error!(device = self.name, "{fault}");
        self.signals.need_reset();
        self.report(DeviceEvent::Failed(describe(fault)));
    }

    fn report(&self, event: DeviceEvent) {
        self.sink.report(&self.name, event);
    }
}

fn reason(what: &str, error: &io::Error) -> String {
    format!("{what}: {}", words(error))
}

/// The fault with its cause.
fn describe(fault: &Fault) -> String {
    match fault {
        Fault::Backend(what, error) | Fault::Held(what, error) => reason(what, error),
        other => other.to_string(),
    }
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

//! What one worker thread does.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TryRecvError},
    },
    time::{Duration, Instant},
};

use vmm_sys_util::{epoll::EpollEvent, eventfd::EventFd};

use super::{
    super::{
        device::{Drained, Progress, QueueHandler},
        fault::{Counters, Fault},
        queue::{Queue, QueueState},
        session::{Session, Setup, Wake},
    },
    Command, Shared, StopError, StopResult, later,
    verdict::{Health, guard},
};

/// How long a drain may take before commands are looked at again, when it has to succeed.
const DRAIN_ROUND: Duration = Duration::from_millis(500);
/// Faults in a row during a drain, after which the handler is taken for defective.
const MAX_DRAIN_FAULTS: u32 = 64;

/// How a session ended.
enum Next {
    Park,
    /// A pause whose asker is gone: serve on.
    Again(Vec<QueueState>, u64),
    Dead,
    Exit,
}

/// The thread's own.
pub(super) struct Worker {
    pub shared: Arc<Shared>,
    pub handler: Box<dyn QueueHandler>,
    pub commands: Receiver<Command>,
    pub wake: Arc<EventFd>,
}

impl Worker {
    pub(super) fn run(mut self) {
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
                    self.shared.judge(&mut session, bug);
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
            // It was interrupted, with notifications off: what is left in the ring is not forgotten.
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
            Err(fault) => self.shared.judge(session, fault),
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
                    if self.shared.judge(session, fault) == Health::Dead {
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
                self.shared.judge(session, fault);
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
}

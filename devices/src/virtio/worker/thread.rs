//! Main loop of a worker thread.

use std::sync::{
    Arc,
    mpsc::{Receiver, TryRecvError},
};

use vmm_sys_util::epoll::EpollEvent;

use super::{
    super::{
        bell::Bell,
        device::{Progress, QueueHandler},
        fault::{Counters, Fault},
        queue::{Queue, QueueState},
        session::{Session, Setup, Wake},
    },
    Command, Gone, Shared, StopError,
    stop::StopRequest,
    verdict::{Health, guard},
};

/// How a session ended. In all but `Dead` the handler is drained.
pub(super) enum Next {
    Park,
    /// Serve again from these states: after a pause whose asker is gone, or once the function is a bus master.
    Again(Vec<QueueState>, u64),
    Dead,
    Exit,
}

/// The thread's own.
pub(super) struct Worker {
    pub shared: Arc<Shared>,
    pub handler: Box<dyn QueueHandler>,
    pub commands: Receiver<Command>,
    pub bell: Arc<Bell>,
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
            bell: &self.bell,
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
        self.bell.silence();
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
    pub(super) fn reset_handler(&mut self) -> bool {
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

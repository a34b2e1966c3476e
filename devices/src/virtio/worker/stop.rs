//! Why a worker drains its handler, and the drain itself.

use std::{
    sync::mpsc::{SyncSender, TryRecvError},
    time::{Duration, Instant},
};

use super::{
    super::{device::Drained, fault::Fault, session::Session},
    Command, Gone, PauseResult, ResetResult, StopError, later,
    thread::{Next, Worker},
    verdict::{Health, guard},
};

/// How long a drain may take before commands are looked at again.
const DRAIN_ROUND: Duration = Duration::from_millis(500);
/// Faults in a row during a drain, after which the handler is taken for defective.
const MAX_DRAIN_FAULTS: u32 = 64;

/// Reasons for a drain, with their waiting callers. More may arrive during the drain. A cleared
/// bus-master bit of the worker is a further reason.
#[derive(Default)]
pub(super) struct StopRequest {
    pause: Option<(Instant, SyncSender<PauseResult>)>,
    resets: Vec<SyncSender<ResetResult>>,
    /// Replies to callers that cleared bus-master enable.
    halts: Vec<SyncSender<()>>,
    exit: bool,
}

impl StopRequest {
    /// Whether nothing was asked for that needs a drain.
    pub(super) fn is_empty(&self) -> bool {
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

impl Worker {
    /// Takes a command while there is a session. A start is none: the worker was started. Nor is a visit: the handler
    /// is not parked.
    pub(super) fn join(&mut self, request: &mut StopRequest, command: Command) {
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
    pub(super) fn stop(&mut self, session: &mut Session, mut request: StopRequest) -> Option<Next> {
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

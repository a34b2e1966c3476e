//! Stop, and what follows the end of a process: nothing, a start, or the VM's deletion.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use tokio::{task::spawn_blocking, time::Instant};
use vm_lifecycle::handover::Source;
use vm_lifecycle::{
    exit::{Asked, Evidence, classify, count},
    policy::Occasion,
    stop::{self, Effect, Stage, Stopping, Then},
};
use vmm_protocol::vmm::{self, PowerButton, Resume, request::Op};
use vmmd_api::v1::{self, EventSeverity, ExitReason, ExitStatus, StopResult, VmPhase};
use vmmd_host::{capacity::Demand, clock, failure::Failure, fault, lock, text};
use vmmd_objects::{
    context::Context,
    operation::{Detail, Handle, Pending, Progress, Type},
};
use vmmd_store::store_failure;
use vmmd_store::{Intent, handover::Handover};

use super::{
    Actor, answer,
    handover::DELETE_FAILED,
    respond, superseded,
    work::{Change, Stop, Work},
};
use crate::{
    control::Client,
    disk::moved,
    paths::{LogDir, NonVolatileDir, RuntimeDir},
    registry::vms::command::Life,
    state_dir,
    vm::{
        instance::{Instance, Unreaped, exit_record},
        machine::change,
        start::clean_up,
    },
};

impl Actor {
    /// Begins a stop: graceful within `grace`, or by force.
    pub(super) fn begin_stop(&mut self, grace: Option<Duration>, operation: Handle, then: Then) {
        let asked = match grace {
            Some(_) => Asked::PowerOff,
            None => Asked::Kill,
        };
        self.begin_stop_as(asked, grace, operation, then);
    }

    /// The same for another reason than a request.
    pub(super) fn begin_stop_as(
        &mut self,
        asked: Asked,
        grace: Option<Duration>,
        operation: Handle,
        then: Then,
    ) {
        let (phase, (reason, message)) = match then {
            Then::Delete => (VmPhase::Terminating, self.leaving()),
            Then::Stay | Then::Start => (VmPhase::Stopping, ("Stopping", String::new())),
        };
        // A panicked guest does not hear its power button.
        let panicked = self.panicked();
        let grace = grace.filter(|_| !panicked);
        let asked = if panicked { Asked::Panicked } else { asked };
        let mut stop = Stop::new(operation, asked, then);
        match std::mem::take(&mut self.work) {
            Work::Start(mut start) => {
                start.cancel.cancel();
                stop.operation.commit();
                stop.operation
                    .progress(Progress::steps(0, 1), "waiting for the end of the start");
                // An earlier stop of this start ends with it.
                stop.also = start
                    .stop
                    .take()
                    .map(|old| self.take_over(old))
                    .unwrap_or_default();
                start.stop = Some(stop);
                self.work = Work::Start(start);
            }
            Work::Stop(old) => {
                (stop.state.stage, stop.state.deadline) = (old.state.stage, old.state.deadline);
                stop.also = self.take_over(old);
                self.step_stop(&mut stop, stop::Input::TakeOver);
                self.work = Work::Stop(stop);
            }
            Work::Change(Change { reply, .. }) => {
                respond(reply, Err(superseded(&self.record.name)));
                self.step_stop(&mut stop, stop::Input::Begin { grace, paused: true });
                self.work = Work::Stop(stop);
            }
            Work::None => {
                let paused = self.view.phase == VmPhase::Paused;
                self.step_stop(&mut stop, stop::Input::Begin { grace, paused });
                self.work = Work::Stop(stop);
            }
        }
        self.enter(phase, reason, message);
    }

    /// Reason and message of the VM's removal from this node, for its status and watchers.
    fn leaving(&self) -> (&'static str, String) {
        match (self.handover(), &self.record.handover) {
            (Handover::Source(Source::Gone(_)), Some(record)) => {
                ("Moved", format!("handed over to {}", record.peer))
            }
            _ => ("Deleting", String::new()),
        }
    }

    /// The operations that end with the stop that takes the place of `old`; a restart gives way at once.
    fn take_over(&self, old: Stop) -> Vec<Handle> {
        let mut also = old.also;
        if old.state.then == Then::Start || old.undoes {
            old.operation.give_way(&superseded(&self.record.name));
        } else {
            also.push(old.operation);
        }
        also
    }

    /// Turns the stop under way into a plain stop, if the VM was to restart or its start is being
    /// undone.
    pub(super) async fn turn_into_stop(&mut self, life: &Life) -> Pending {
        let operation = self.operation(Type::VmStop, &life.context, life.deadline);
        let pending = operation.pending();
        self.evacuated = life.evacuate;
        if !life.evacuate {
            self.note_stop(life.grace, &life.context).await;
        }
        let gives_way = superseded(&self.record.name);
        let stop = match &mut self.work {
            Work::Start(start) => start.stop.as_mut(),
            Work::Stop(stop) => Some(stop),
            Work::None | Work::Change(_) => None,
        };
        if let Some(stop) = stop {
            if stop.state.stage != Stage::Asked {
                operation.commit();
            }
            let old = std::mem::replace(&mut stop.operation, operation);
            (stop.state.then, stop.undoes, stop.is_cancelled) = (Then::Stay, false, false);
            stop.tell();
            old.give_way(&gives_way);
        }
        self.publish();
        pending
    }

    fn client(&self) -> Option<Client> {
        Some(self.instance.as_ref()?.client()?.traced(&self.trace))
    }

    /// Carries out the effects of an input on a stop.
    pub(super) fn step_stop(&mut self, stop: &mut Stop, input: stop::Input) {
        let reachable = self.client().is_some();
        for effect in stop.state.step(input, Instant::now().into_std(), reachable) {
            match effect {
                Effect::Commit => {
                    stop.operation.commit();
                }
                Effect::Report => stop.tell(),
                Effect::PressButton { resume } => self.press_button(resume),
                Effect::End => {
                    if let Some(client) = self.client() {
                        send(client, vec![Op::Stop(vmm::Stop {})]);
                    }
                }
                Effect::Kill => {
                    if let Some(instance) = &self.instance {
                        instance.process.kill();
                    }
                }
                Effect::Linger => {
                    let progress = Progress::steps(1, 2);
                    stop.operation.progress(progress, Unreaped::Vmm.message());
                    let lives = |instance: &Instance| instance.exited.is_none();
                    if self.instance.as_ref().is_some_and(lives) {
                        self.on_lingering(Unreaped::Vmm);
                    }
                }
            }
        }
    }

    /// Asks the guest to power off. Without a connection to the `vmm` the request is sent after the
    /// reconnect; the grace time runs meanwhile.
    pub(super) fn press_button(&self, paused: bool) {
        let Some(client) = self.client() else { return };
        // A paused guest could not hear it.
        let resume = paused.then_some(Op::Resume(Resume {}));
        let ops = resume.into_iter().chain([Op::PowerButton(PowerButton {})]);
        send(client, ops.collect());
        self.shut_down_late();
    }

    /// A later request may shorten the time that an earlier one gave, not lengthen it.
    pub(super) fn hasten(&mut self, grace: Option<Duration>) {
        let Work::Stop(mut stop) = std::mem::take(&mut self.work).into_stop_or(&mut self.work) else {
            return;
        };
        self.step_stop(&mut stop, stop::Input::Hasten(grace));
        self.work = Work::Stop(stop);
    }

    pub(super) fn on_deadline(&mut self) {
        let Work::Stop(mut stop) = std::mem::take(&mut self.work).into_stop_or(&mut self.work) else {
            return;
        };
        if stop.state.stage == Stage::Asked {
            if !stop.operation.commit() {
                // A cancel was quicker: it arrives in a moment.
                stop.state.deadline = None;
                self.work = Work::Stop(stop);
                return self.publish();
            }
            tracing::info!(
                vm = self.record.name,
                "the guest did not power off in time: it is ended"
            );
        }
        self.step_stop(&mut stop, stop::Input::Deadline);
        self.work = Work::Stop(stop);
        self.publish();
    }

    /// The process has ended.
    pub(super) async fn on_exit(&mut self, signal: Option<i32>) -> ControlFlow<()> {
        let Some(instance) = self.instance.take() else {
            return ControlFlow::Continue(());
        };
        let mut work = std::mem::take(&mut self.work);
        let asked = if let Work::Stop(stop) = &work {
            stop.state.asked
        } else {
            Asked::Nothing
        };
        let evidence = self.gather(asked, signal, instance.ended.clone()).await;
        let exit = classify(&evidence);
        tracing::info!(
            vm = self.record.name,
            pid = instance.process.pid(),
            reason = exit.status.reason().as_str_name(),
            detail = exit.status.message,
            "the vmm process has ended"
        );
        let reason = exit.status.reason();
        let message = exit.status.message.clone();
        if let Work::Stop(stop) = &mut work {
            stop.exit = Some(exit.status.clone());
        }
        let told = self.settle_disks();
        let ran_ms = self.end_run(&instance, exit.status);
        change::hold_disks(&self.host, &self.record);
        let then = if let Work::Stop(stop) = &work {
            stop.state.then
        } else {
            // The end is unrelated to the last request.
            self.about = Default::default();
            Then::Stay
        };
        let deleting = then == Then::Delete;
        if then == Then::Start {
            // Before the claim of the run ends.
            let demand = Demand::of(&self.spec);
            self.host.ledger.expect(&self.record.name, Some(demand));
        }
        if then == Then::Stay {
            self.record.evacuated = self.evacuated;
            let reason = self.record.exit_reason().unwrap_or(reason);
            self.plan(Occasion::Ended(reason), ran_ms);
        }
        fault::hold(&self.host.config.run_dir, "ended").await;
        // A detach is answered when its change is durable, also if the daemon ends before the deletion is done.
        let written = (deleting && told.is_empty()) || self.persist().await;
        // The exit record stays where it is as long as it is nowhere else.
        if deleting || written {
            self.clean_up().await;
        }
        drop(instance);
        if !deleting {
            self.enter(exit.phase, exit.reason, message);
            self.tell_restart();
        }
        for (result, waiters) in told {
            answer(waiters, &result.map(|()| self.state()));
        }
        match work {
            Work::Stop(stop) => return self.after_stop(stop).await,
            Work::Change(Change { reply, .. }) => {
                let message = format!("VM \"{}\" ended meanwhile", self.record.name);
                respond(reply, Err(Failure::precondition("NOT_RUNNING", message)));
            }
            Work::None | Work::Start(_) => {}
        }
        ControlFlow::Continue(())
    }

    /// Notes the end of a run in the record. Returns how long it was, in milliseconds.
    fn end_run(&mut self, instance: &Instance, exit: ExitStatus) -> u64 {
        let counts = self.record.counts.get_or_insert_default();
        counts.guest_resets += instance.guest_resets;
        counts.crash_resets += instance.crash_resets;
        // A panic was already counted with its event.
        if !(exit.reason() == ExitReason::GuestPanic && instance.panicked) {
            count(counts, exit.reason());
        }
        self.record.stop = None;
        self.record.last_exit = Some(exit);
        let run = self.record.instance.take().unwrap_or_default();
        let by_wall_clock = || text::now_ms().saturating_sub(run.started_ms);
        clock::elapsed_ms(run.started_since_boot).unwrap_or_else(by_wall_clock)
    }

    async fn gather(&self, asked: Asked, signal: Option<i32>, told: Option<vmm::ExitRecord>) -> Evidence {
        let (host, uid) = (Arc::clone(&self.host), self.uid);
        let found = spawn_blocking(move || {
            let group = host.cgroups.as_ref().map(|parent| parent.group(uid));
            let record = exit_record(&RuntimeDir::of(&host.config, uid).exit());
            (record, group.is_some_and(|group| group.oom_killed()))
        });
        let (record, oom_killed) = found.await.unwrap_or_default();
        Evidence {
            record: record.or(told),
            asked,
            oom_killed,
            signal,
            node_restarted: false,
            now_ms: text::now_ms(),
        }
    }

    async fn clean_up(&self) {
        let (host, uid) = (Arc::clone(&self.host), self.uid);
        let result = spawn_blocking(move || clean_up(&host, uid)).await;
        if let Ok(Err(error)) = result {
            tracing::warn!(vm = self.record.name, %error, "clean up after a run");
        }
    }

    /// Continues after the VM has stopped.
    pub(super) async fn after_stop(&mut self, stop: Stop) -> ControlFlow<()> {
        let Stop {
            operation,
            also,
            undoes,
            state: Stopping { then, .. },
            exit,
            ..
        } = stop;
        if then == Then::Delete {
            return self.delete(operation, also).await;
        }
        let message = self.stopped_message();
        for other in also {
            other.complete_with(&message, self.state(), stopped(&exit));
        }
        match then {
            Then::Start => self.start_again(operation).await,
            Then::Stay | Then::Delete => {
                self.about = Default::default();
                if undoes {
                    operation.cancelled("the start was cancelled: the VM is stopped");
                } else {
                    operation.complete_with(&message, self.state(), stopped(&exit));
                }
            }
        }
        ControlFlow::Continue(())
    }

    /// Describes the end of a stop for the client: it mentions a kill, for example after the grace
    /// time.
    fn stopped_message(&self) -> String {
        let exit = self.record.last_exit.as_ref();
        match exit.map(|exit| (exit.reason(), exit.message.as_str())) {
            Some((ExitReason::Killed | ExitReason::GuestPanic, why)) if !why.is_empty() => {
                format!("the VM was killed: {why}")
            }
            _ => "the VM is stopped".to_owned(),
        }
    }

    /// The operation under way is to end early, where that is possible.
    pub(super) async fn on_cancel(&mut self) {
        match std::mem::take(&mut self.work) {
            Work::Start(start) => {
                // Its end says the rest.
                start.cancel.cancel();
                self.work = Work::Start(start);
            }
            Work::Stop(stop) if stop.state.stage == Stage::Asked => {
                let message = "the stop was cancelled: the guest runs on. Its power button had been pressed already, so \
                               that it may still power itself off";
                self.record.stop = None;
                // A restart may have taken more room than the machine needs.
                let runs = change::machine(&self.record, &self.spec);
                self.give_back(Demand::of(&runs));
                self.intend(Intent::Running).await;
                self.enter(VmPhase::Running, "StopCancelled", message);
                stop.operation.cancelled(message);
                for other in stop.also {
                    other.give_way(&superseded(&self.record.name));
                }
                self.about = Default::default();
            }
            other => self.work = other,
        }
    }

    /// Deletes a VM without a process. The record is removed first. If the daemon is killed before
    /// the end, its next start removes the rest, which belongs to no record then.
    pub(super) async fn delete(&mut self, operation: Handle, also: Vec<Handle>) -> ControlFlow<()> {
        operation.commit();
        operation.progress(Progress::steps(1, 2), "removing what the node keeps for the VM");
        let lock = RuntimeDir::of(&self.host.config, self.uid).lock();
        if !matches!(lock::released(&lock).await, Ok(true)) {
            let message = format!(
                "a process of VM \"{}\" is alive but can't be reached",
                self.record.name
            );
            self.forget_delete().await;
            operation.fail(&Failure::precondition("OLD_PROCESS_ALIVE", message));
            complete_all(also, &self.state());
            return ControlFlow::Continue(());
        }
        let before = self.view.clone();
        let (reason, message) = self.leaving();
        self.enter(VmPhase::Terminating, reason, message);
        fault::hold(&self.host.config.run_dir, "delete").await;
        // The other node writes the files of a VM that moves to that node, or that did not arrive
        // here.
        let _files = match self.handover().is_under_way() {
            false => Some(state_dir::write_last(&self.host, self.uid, &self.state()).await),
            true => None,
        };
        let (uids, context) = (self.disks_of_other_node(), Context::daemon());
        let removed = moved::remove(&self.host, &self.record.name, &uids, &context).await;
        let buried = match removed {
            Ok(()) => self.bury().await.map_err(store_failure),
            Err(failure) => Err(failure),
        };
        let buried = match buried {
            Ok(revision) => revision,
            Err(failure) => {
                let phase = match before.phase {
                    VmPhase::Terminating => VmPhase::Stopped,
                    phase => phase,
                };
                self.enter(phase, DELETE_FAILED, failure.message.clone());
                self.forget_delete().await;
                operation.fail(&failure);
                complete_all(also, &self.state());
                return ControlFlow::Continue(());
            }
        };
        self.clean_up().await;
        let logs = LogDir::of(&self.host.config, self.uid);
        let variables = NonVolatileDir::of(&self.host.config, self.uid);
        let remove = move || logs.remove().and(variables.remove());
        if let Ok(Err(error)) = spawn_blocking(remove).await {
            tracing::warn!(vm = self.record.name, %error, "remove the VM's logs and its non-volatile memory");
        }
        self.host.disks.give_back(&self.record.name, None);
        self.host.ledger.expect(&self.record.name, None);
        self.host.vms.remove(&self.record.name, buried);
        self.host.state_dirs.forget(self.uid);
        self.tell(EventSeverity::Normal, "Deleted", "the VM was deleted");
        self.answer_updates();
        operation.complete_with("the VM is deleted", self.state(), None);
        complete_all(also, &self.state());
        if let Some(operation) = self.handed_over.take().filter(|_| self.has_moved()) {
            let peer = self.record.handover.as_ref().map_or("", |record| &record.peer);
            operation.complete(format!("the VM runs on {peer}"));
        }
        ControlFlow::Break(())
    }
}

/// Detail of a completed stop.
fn stopped(exit: &Option<ExitStatus>) -> Option<Detail> {
    Some(Detail::Stopped(StopResult { exit: exit.clone() }))
}

/// Ends operations that had the same end.
fn complete_all(operations: Vec<Handle>, vm: &Arc<v1::Vm>) {
    for operation in operations {
        operation.complete_with("the VM is stopped", Arc::clone(vm), None);
    }
}

impl Work {
    /// Itself when it is a stop; anything else goes back to `place`.
    fn into_stop_or(self, place: &mut Self) -> Self {
        match self {
            Self::Stop(_) => self,
            other => {
                *place = other;
                Self::None
            }
        }
    }
}

/// Sends requests in order and ignores their results: only the end of the process counts.
fn send(client: Client, ops: Vec<Op>) {
    tokio::spawn(async move {
        for op in ops {
            if let Err(error) = client.request(op, &[]).await {
                tracing::debug!(%error, "a vmm did not take a request");
            }
        }
    });
}

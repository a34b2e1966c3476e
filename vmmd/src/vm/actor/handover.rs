//! The VM's part of a migration: [`vm_lifecycle::handover`] decides, the record is written, then it is done.

use std::{ops::ControlFlow, time::Duration};

use tokio::{sync::oneshot, time::timeout};
use vm_lifecycle::handover::{Effect, Message, Resolution, Source, SourceEvent, Target, TargetEvent};
use vm_lifecycle::{admission::Situation, stop::Then};
use vmm_protocol::vmm::{MigrationDisks, MigrationRound, UnlockDisks, request::Op};
use vmmd_api::v1::{EventSeverity, VmPhase};
use vmmd_host::{
    failure::{Failure, Kind},
    fault, text,
};
use vmmd_objects::{
    context::Context,
    operation::{Handle, Progress, Type},
};
use vmmd_store::store_failure;
use vmmd_store::{
    AbortRecord, HandoverRecord, VmRecord,
    handover::{self, Handover},
};

use super::{Actor, work::Work};
use crate::{
    registry::vms::command::{Begin, Begun, HandoverRequest, Purpose, Restore, ResumeMigration},
    vm::{api::describe::MIGRATING, migratable::migratable},
};

/// Timeout for the release of a machine's disks. The guest's writes become durable meanwhile.
const UNLOCK: Duration = Duration::from_secs(10);
/// The reason of a VM whose removal could not be written.
pub(super) const DELETE_FAILED: &str = "DeleteFailed";
const MIB: u64 = 1 << 20;
/// Message of a machine that was received.
const RECEIVED: &str = "received from another node, which decides what follows";

/// Message of a machine whose guest is about to run.
const RESUMES: &str = "the VM is this node's: its guest is about to run";
/// Targets that have not confirmed that a migration is over, of all VMs; each is asked again and again.
const MAX_ABORTS: usize = 4096;

/// Messages for the other daemon, and whether the VM still exists.
type Step = (Result<Vec<Message>, Failure>, ControlFlow<()>);

fn failed(failure: Failure) -> Step {
    (Err(failure), ControlFlow::Continue(()))
}

impl Actor {
    pub(super) fn handover(&self) -> Handover {
        handover::of(self.record.handover.as_ref())
    }

    /// Number of the migration that the record is of, or the last one.
    fn migration(&self) -> u64 {
        self.record.handover.as_ref().map_or(0, |record| record.migration)
    }

    pub(super) async fn on_handover(
        &mut self,
        request: HandoverRequest,
        reply: oneshot::Sender<Result<Vec<Message>, Failure>>,
    ) -> ControlFlow<()> {
        let (said, flow) = match request {
            HandoverRequest::Begin(begin, begun) => {
                let (result, flow) = self.begin_migration(*begin).await;
                let result = result.map(|it| {
                    if let Err(lost) = begun.send(it) {
                        // Its task has ended: the migration is taken back.
                        let left = self.left_migration(lost.migration);
                        let _ = self.host.attend.send(left);
                    }
                    Vec::new()
                });
                (result, flow)
            }
            HandoverRequest::Source { migration, event } if migration == self.migration() => {
                self.on_source(event).await
            }
            HandoverRequest::Resume { migration } if migration == self.migration() => self.restarted().await,
            HandoverRequest::Source { .. } | HandoverRequest::Resume { .. } => {
                (Ok(Vec::new()), ControlFlow::Continue(()))
            }
            HandoverRequest::Receive {
                from,
                migration,
                stream,
                context,
                started,
            } => {
                let restore = Restore {
                    file: Some(stream),
                    on_demand: false,
                    stream: true,
                    bytes: 0,
                    machine: None,
                    rollback: None,
                };
                match self.offered_by(&from) {
                    Ok(()) => self.begin_receive(migration, restore, &context, started).await,
                    Err(failure) => failed(failure),
                }
            }
            HandoverRequest::Target { from, message } => match self.offered_by(&from) {
                Ok(()) => self.on_target(message).await,
                Err(failure) => failed(failure),
            },
            HandoverRequest::Expire {
                migration,
                unless_begun,
            } => {
                let begun = self.instance.is_some() || !matches!(self.work, Work::None);
                match self.handover() {
                    Handover::Target(Target::Idle(over)) if over < migration && !(unless_begun && begun) => {
                        let (aborted, flow) = self.on_target(Message::Abort(migration)).await;
                        (aborted.map(|_| vec![Message::Refuse(migration)]), flow)
                    }
                    // Something may have stood in the way of the removal.
                    Handover::Source(Source::Gone(over)) if over == migration => {
                        let (removed, flow) = self.on_source(SourceEvent::Tick).await;
                        (removed.map(|_| vec![Message::Refuse(migration)]), flow)
                    }
                    // The same. A VM that has just been offered once more has the same record, and stays.
                    Handover::Target(Target::Idle(over)) if over == migration && self.is_leaving() => {
                        let flow = self.remove().await;
                        (Ok(vec![Message::Refuse(migration)]), flow)
                    }
                    _ => (Ok(Vec::new()), ControlFlow::Continue(())),
                }
            }
            HandoverRequest::Runs => {
                self.resuming = false;
                if let Handover::Target(Target::Owned(last)) = self.handover() {
                    let own = Handover::Source(Source::Owner {
                        last,
                        migrating: false,
                    });
                    self.record.handover = Some(handover::record(own));
                    self.persist().await;
                }
                self.act_on_panic();
                (Ok(Vec::new()), ControlFlow::Continue(()))
            }
            HandoverRequest::Waits { reason, why } => {
                if self.view.phase == VmPhase::Paused {
                    let is_new = self.view.reason != reason;
                    self.enter(VmPhase::Paused, reason, &why);
                    if is_new {
                        self.tell(EventSeverity::Warning, reason, &why);
                    }
                }
                (Ok(Vec::new()), ControlFlow::Continue(()))
            }
            HandoverRequest::Resolve {
                migration,
                resolution,
                context,
            } => self.resolve(migration, resolution, &context).await,
        };
        let _ = reply.send(said);
        if flow.is_continue() {
            self.publish();
        }
        flow
    }

    /// Request to continue a migration.
    fn left_migration(&self, migration: u64) -> ResumeMigration {
        let record = self.record.handover.as_ref();
        ResumeMigration::Left {
            uid: self.uid,
            name: self.record.name.clone(),
            migration,
            target: record.map(|record| record.peer.clone()).unwrap_or_default(),
        }
    }

    /// Checks that a message about an incoming VM is from the node that has offered the VM.
    fn offered_by(&self, from: &str) -> Result<(), Failure> {
        let offered = self.record.handover.as_ref().map_or("", |record| &record.peer);
        if matches!(self.handover(), Handover::Source(_)) || offered.is_empty() || offered == from {
            return Ok(());
        }
        let message = format!(
            "VM \"{}\" was offered by \"{}\", not by \"{}\"",
            self.record.name,
            text::brief(offered),
            text::brief(from)
        );
        Err(Failure::precondition("OTHER_PEER", message))
    }

    /// Begins a migration of the VM as it is now.
    async fn begin_migration(&mut self, begin: Begin) -> (Result<Begun, Failure>, ControlFlow<()>) {
        let checked = self.may_migrate(&begin);
        let client = match checked {
            Ok(client) => client,
            Err(failure) => return (Err(failure), ControlFlow::Continue(())),
        };
        let next = HandoverRecord {
            peer: begin.peer.clone(),
            disks: begin.disks,
            began_ms: text::now_ms(),
            operation: begin.operation,
            ..HandoverRecord::default()
        };
        let (said, flow) = self.step_source(SourceEvent::Begin, Some(next)).await;
        let begun = said.map(|_| {
            self.migration = Some(begin.reporter);
            self.give_up = Some(begin.give_up);
            self.enter(VmPhase::Running, MIGRATING, format!("to {}", begin.peer));
            Begun {
                migration: self.migration(),
                record: self.record.clone(),
                client,
            }
        });
        (begun, flow)
    }

    /// Ends the migration from this node, which is not beyond its point of no return.
    pub(super) fn give_up_migration(&mut self, why: Failure) {
        if let Some(give_up) = self.give_up.take() {
            // A migration that has ended meanwhile does not listen.
            let _ = give_up.send(why);
        }
    }

    fn may_migrate(&self, begin: &Begin) -> Result<crate::control::Client, Failure> {
        let name = &self.record.name;
        match self.situation() {
            Situation::Running => {}
            Situation::Migrating => {
                let message = format!("VM \"{name}\" is being migrated already");
                return Err(Failure::precondition("MIGRATING", message));
            }
            _ => {
                let message = format!("VM \"{name}\" does not run, or something is under way");
                return Err(Failure::precondition("VM_NOT_RUNNING", message));
            }
        }
        if begin.generation != self.record.generation {
            let message = format!(
                "VM \"{name}\" was changed in the moment in which its migration was to begin: it has generation {}, not {}; ask again",
                self.record.generation, begin.generation
            );
            return Err(Failure::new(Kind::Aborted, "GENERATION_MISMATCH", message));
        }
        migratable(&self.host, &self.record, &self.spec)?;
        if self.host.aborts.len() >= MAX_ABORTS {
            let message = format!(
                "{MAX_ABORTS} targets of earlier migrations from this node have not confirmed that those are over: wait until these nodes can be reached"
            );
            return Err(Failure::new(Kind::Exhausted, "TOO_MANY_ABORTS", message));
        }
        self.client_for(Purpose::Migration)
    }

    async fn on_source(&mut self, event: SourceEvent) -> Step {
        // The machine that was sent has ended since, so the migration ends as well.
        let goes_on = matches!(
            event,
            SourceEvent::Sent | SourceEvent::Received(Message::Ready(_))
        );
        let ended = self.instance.is_none() || matches!(self.work, Work::Start(_) | Work::Stop(_));
        let over = if !goes_on {
            None
        } else if self.acts_on_panic() {
            Some(guest_panicked())
        } else if ended {
            let message = format!("VM \"{}\" has ended meanwhile", self.record.name);
            Some(Failure::new(Kind::Aborted, "NOT_RUNNING", message))
        } else {
            self.reset_in_migration.map(|_| guest_reset())
        };
        let event = if over.is_some() {
            SourceEvent::Cancel
        } else {
            event
        };
        let mut step = self.step_source(event, None).await;
        if let Some(over) = over
            && step.0.is_ok()
        {
            step.0 = Err(over);
        }
        match self.handover() {
            Handover::Source(Source::Given(_)) if event != SourceEvent::Tick => {
                let peer = self.record.handover.as_ref().map_or("", |it| &it.peer);
                let message = format!(
                    "handed over to {peer}, which has not confirmed that the VM runs there; if that node is gone for good, decide with `vmmctl \
                     migrate resolve`"
                );
                self.enter(VmPhase::Paused, "HandedOver", message);
                self.give_disks_away().await;
            }
            Handover::Source(Source::Owner { migrating: false, .. }) => {
                self.migration = None;
                if self.view.reason == MIGRATING && self.view.phase == VmPhase::Running {
                    self.enter(VmPhase::Running, "Running", "");
                }
                self.reboot_after_migration().await;
            }
            _ => {}
        }
        step
    }

    /// Releases the disks so that the target can lock them as soon as it receives the commit. A
    /// failure loses nothing: after the target's answer the process ends, and its locks with it.
    async fn give_disks_away(&mut self) {
        let disks = self.record.instance.as_ref().and_then(|run| run.spec.as_ref());
        let writes = disks.is_some_and(|spec| spec.disks.iter().any(|disk| !disk.read_only));
        let Ok(client) = self.running_client() else {
            return;
        };
        if !writes {
            return;
        }
        let name = &self.record.name;
        match timeout(UNLOCK, client.request(Op::UnlockDisks(UnlockDisks {}), &[])).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(vm = name, %error, "give the disks of a VM to another node"),
            Err(_) => tracing::warn!(vm = name, "a vmm does not give its disks away"),
        }
    }

    /// A step of the source; a migration begins with `begin`.
    async fn step_source(&mut self, event: SourceEvent, begin: Option<HandoverRecord>) -> Step {
        let Some(before) = self.handover().source() else {
            return failed(not_here());
        };
        let (after, effects) = before.on(event);
        let abort = handover::abort(&self.record, &effects);
        let after = match self.handover() {
            // It is noted as the source's when there is something to note.
            same @ Handover::Target(_) if before == after => same,
            _ => Handover::Source(after),
        };
        self.step(after, effects, begin, abort).await
    }

    async fn on_target(&mut self, message: Message) -> Step {
        let loaded = self.instance.is_some() && matches!(self.work, Work::None);
        match self.handover().received(message, loaded) {
            Some((after, effects)) => self.step(after, effects, None, None).await,
            None => failed(not_here()),
        }
    }

    /// Makes the next state durable, and then does what follows.
    async fn step(
        &mut self,
        after: Handover,
        effects: Vec<Effect>,
        begin: Option<HandoverRecord>,
        abort: Option<AbortRecord>,
    ) -> Step {
        let changed = after != self.handover();
        // A record that was read at the daemon's start, or whose write failed, may not be durable.
        if (changed || (self.unsure && !effects.is_empty()))
            && let Err(failure) = self.write(after, begin, abort).await
        {
            return failed(failure);
        }
        self.carry_out(effects).await
    }

    /// Makes the next state durable; `begin` belongs to a migration that begins, and `abort` to one that is taken back. After an error the
    /// earlier state is the safe one: the new one has had no effect yet. The store may have either until the next write succeeds.
    async fn write(
        &mut self,
        next: Handover,
        begin: Option<HandoverRecord>,
        abort: Option<AbortRecord>,
    ) -> Result<(), Failure> {
        let before = self.record.handover.clone();
        let known = begin.or_else(|| before.clone()).unwrap_or_default();
        let (record, arrived) = handover::next(next, known);
        let stage = record.stage();
        self.record.handover = Some(record);
        self.unsure = true;
        let written = self.host.store.put_handover(&self.record, abort.as_ref()).await;
        if let Err(error) = written {
            self.record.handover = before;
            return Err(store_failure(error));
        }
        self.unsure = false;
        fault::hold(&self.host.config.run_dir, &format!("wrote-{stage:?}")).await;
        arrived.iter().for_each(|uid| self.host.disks.arrived(uid));
        if let Some(abort) = abort {
            // A send fails only while the daemon ends. The next daemon reads the store.
            let was_read = false;
            let _ = self.host.attend.send(ResumeMigration::Abort { abort, was_read });
        }
        Ok(())
    }

    async fn carry_out(&mut self, effects: Vec<Effect>) -> Step {
        let mut said = Vec::new();
        let mut flow = ControlFlow::Continue(());
        for effect in effects {
            match effect {
                Effect::Send(message) => {
                    // A VM that this node refuses is removed. The source's abort then concerns a
                    // migration that is over.
                    if matches!(message, Message::Refuse(_))
                        && matches!(self.handover(), Handover::Target(Target::Idle(_)))
                    {
                        flow = self.remove().await;
                    }
                    said.push(message);
                }
                Effect::Run => {
                    if self.view.phase == VmPhase::Paused && self.view.reason == MIGRATING {
                        self.enter(VmPhase::Paused, MIGRATING, RESUMES);
                    }
                    self.let_run();
                }
                Effect::Kill => flow = self.remove().await,
            }
        }
        (Ok(said), flow)
    }

    /// Disks of the VM that are to go with it, now that it is removed: the other node has it, and its disks.
    pub(super) fn disks_of_other_node(&self) -> Vec<Vec<u8>> {
        match (self.handover(), &self.record.handover) {
            (Handover::Source(Source::Gone(_)) | Handover::Target(Target::Idle(_)), Some(record)) => {
                record.disks.clone()
            }
            _ => Vec::new(),
        }
    }

    /// Whether the other node has confirmed that the VM is its own.
    pub(super) fn has_moved(&self) -> bool {
        handover::has_moved(self.record.handover.as_ref())
    }

    /// Its removal has begun, and may have failed.
    fn is_leaving(&self) -> bool {
        self.view.phase == VmPhase::Terminating || self.view.reason == DELETE_FAILED
    }

    /// Ends the machine, if there is one, and removes the VM from this node.
    async fn remove(&mut self) -> ControlFlow<()> {
        let stop = match &self.work {
            Work::Stop(stop) => Some(stop),
            Work::Start(start) => start.stop.as_ref(),
            Work::None | Work::Change(_) => None,
        };
        if stop.is_some_and(|stop| stop.state.then == Then::Delete) {
            return ControlFlow::Continue(());
        }
        let operation = self.operation(Type::VmDelete, &Context::daemon(), None);
        if self.instance.is_none() && matches!(self.work, Work::None) {
            return self.delete(operation, Vec::new()).await;
        }
        self.begin_stop(None, operation, Then::Delete);
        ControlFlow::Continue(())
    }

    async fn begin_receive(
        &mut self,
        migration: u64,
        restore: Restore,
        context: &Context,
        started: oneshot::Sender<Result<(), Failure>>,
    ) -> Step {
        let expected = match self.handover() {
            Handover::Target(Target::Idle(over)) => over.saturating_add(1) == migration,
            _ => false,
        };
        if !expected || self.instance.is_some() || !matches!(self.work, Work::None) {
            return failed(not_here());
        }
        let operation = self.operation(Type::VmMigrate, context, None);
        self.receiving = Some(started);
        self.begin_start(operation, Some(Box::new(restore)), false).await;
        if matches!(self.work, Work::Start(_)) {
            return (Ok(Vec::new()), ControlFlow::Continue(()));
        }
        let flow = self.remove().await;
        let message = self.view.message.clone();
        let failure = Failure::precondition("MIGRATION_REFUSED", message);
        (Err(failure), flow)
    }

    /// Handles a received machine: the machine stays paused.
    pub(super) fn on_received(&mut self) {
        if let Some(run) = self.record.instance.as_mut() {
            run.started = true;
        }
        self.enter(VmPhase::Paused, MIGRATING, RECEIVED);
        if let Some(started) = self.receiving.take() {
            let _ = started.send(Ok(()));
        }
    }

    /// The machine could not be received: nothing of the VM stays.
    pub(super) async fn not_received(&mut self, failure: Failure, operation: Handle) -> ControlFlow<()> {
        self.record.instance = None;
        operation.fail(&failure);
        if let Some(started) = self.receiving.take() {
            let _ = started.send(Err(failure));
        }
        self.remove().await
    }

    /// Carries out an operator's decision. The other node is gone, so no message is sent to it.
    async fn resolve(&mut self, migration: u64, resolution: Resolution, context: &Context) -> Step {
        if let Err(failure) = self.expected(context) {
            return failed(failure);
        }
        if migration != self.migration() || !self.handover().waits() {
            return failed(nothing_to_resolve(&self.record.name, migration));
        }
        self.admitted(context);
        self.end_resolved();
        // The state of the other node is unknown, so the disks of the VM stay.
        let before = self.record.handover.clone();
        if let Some(record) = &mut self.record.handover {
            record.disks.clear();
            record.peer.clear();
        }
        let step = match self.handover() {
            Handover::Source(_) => self.on_source(SourceEvent::Resolve(resolution)).await,
            Handover::Target(target) => {
                let (after, effects) = target.on(TargetEvent::Resolve(resolution));
                self.step(Handover::Target(after), effects, None, None).await
            }
        };
        if step.0.is_err() {
            self.record.handover = before;
        }
        step
    }

    /// Continues with what an earlier daemon left.
    pub(super) async fn resume_handover(&mut self) -> ControlFlow<()> {
        if self.record.handover.is_none() {
            return ControlFlow::Continue(());
        }
        let (run, _) = self.host.vms.now();
        // It has just been offered.
        if matches!(self.handover(), Handover::Target(Target::Idle(_))) && self.record.made_run == run {
            return ControlFlow::Continue(());
        }
        if self.handover().waits()
            && self.instance.is_some()
            && matches!(self.handover(), Handover::Target(_))
        {
            self.enter(VmPhase::Paused, MIGRATING, RECEIVED);
        }
        let (said, flow) = self.restarted().await;
        let is_done = said.is_ok() && !self.handover().is_under_way();
        if let Err(failure) = said {
            tracing::error!(vm = self.record.name, %failure, "continue with a migration");
        }
        if flow.is_continue() && !is_done {
            let left = self.left_migration(self.migration());
            // A send fails only while the daemon ends. The next daemon begins here again.
            let _ = self.host.attend.send(left);
        }
        flow
    }

    /// Continues from the record after a start of the daemon. The record is written again first: a record that could be read may not be durable.
    async fn restarted(&mut self) -> Step {
        match self.handover() {
            Handover::Source(Source::Owner {
                last,
                migrating: false,
            }) => {
                // As daemons have written it that kept the target here until it had confirmed that the migration is over.
                let peer = self.record.handover.as_ref().map_or("", |record| &record.peer);
                let abort = (!peer.is_empty()).then(|| AbortRecord {
                    uid: self.record.uid.clone(),
                    name: self.record.name.clone(),
                    peer: peer.to_owned(),
                    migration: last,
                });
                let is_paused = self.view.phase == VmPhase::Paused && self.view.reason == MIGRATING;
                if (is_paused || abort.is_some())
                    && let Err(failure) = self.write(self.handover(), None, abort).await
                {
                    return failed(failure);
                }
                if is_paused {
                    self.let_run();
                }
                (Ok(Vec::new()), ControlFlow::Continue(()))
            }
            Handover::Source(_) => self.on_source(SourceEvent::Restarted).await,
            Handover::Target(target) => {
                let (after, effects) = target.on(TargetEvent::Restarted);
                self.step(Handover::Target(after), effects, None, None).await
            }
        }
    }

    pub(super) fn on_migration_disks(&mut self, disks: MigrationDisks) {
        let Some(reporter) = &self.migration else {
            return;
        };
        let message = format!(
            "disks: {} of {} MiB",
            disks.done_bytes / MIB,
            disks.total_bytes / MIB
        );
        reporter.progress(Progress::bytes(disks.done_bytes, disks.total_bytes), &message);
    }

    pub(super) fn on_migration_round(&mut self, round: MigrationRound) {
        let Some(reporter) = &self.migration else {
            return;
        };
        let slowed = match round.throttle_percent {
            0 => String::new(),
            percent => format!(", the guest is slowed by {} %", percent.min(100)),
        };
        let message = format!(
            "round {}: {} MiB sent, {} MiB changed meanwhile, {} MiB/s{slowed}",
            round.number,
            round.sent_bytes / MIB,
            round.dirty_bytes / MIB,
            round.bytes_per_second / MIB
        );
        let total = round.sent_bytes.saturating_add(round.dirty_bytes);
        reporter.progress(Progress::bytes(round.sent_bytes, total), &message);
    }
}

/// Failure of a migration whose guest reboots.
pub(super) fn guest_reset() -> Failure {
    let message = "the guest has reset its machine, and boots the kernel that is on its disk by now";
    Failure::new(Kind::Aborted, "GUEST_RESET", message)
}

/// Why a migration is given up whose guest has panicked.
pub(super) fn guest_panicked() -> Failure {
    let message = "the guest's kernel has panicked, and the action of `spec.onPanic` follows on this node";
    Failure::new(Kind::Aborted, "GUEST_PANICKED", message)
}

/// Failure of a migration whose VM's pod is being stopped.
pub(super) fn pod_stops() -> Failure {
    let message = "the pod of the VM is being stopped, and the VM stops with the pod";
    Failure::new(Kind::Aborted, "POD_STOPPED", message)
}

/// Why an operator's decision is refused.
pub fn nothing_to_resolve(name: &str, migration: u64) -> Failure {
    let message = format!(
        "migration {migration} of VM \"{name}\" does not wait for a decision: look at the VM's `status.migration`"
    );
    Failure::precondition("NOTHING_TO_RESOLVE", message)
}

fn not_here() -> Failure {
    let message = "the VM is not in a state in which this migration can continue";
    Failure::new(Kind::Aborted, "MIGRATION_OVER", message)
}

/// Refused for a VM that does not run, or whose spec only a restart can apply.
pub fn runs_as_wanted(record: &VmRecord) -> Result<(), Failure> {
    let name = &record.name;
    let Some(run) = &record.instance else {
        let message = format!("VM \"{name}\" does not run: start it, or create it on the other node");
        return Err(Failure::precondition("VM_NOT_RUNNING", message));
    };
    let spec = run.spec.as_ref().or(record.spec.as_ref());
    if record.spec.is_some() && record.spec.as_ref() != spec {
        let message = format!(
            "the spec of VM \"{name}\" was changed since its start, which only a restart can apply: restart it, or undo the change"
        );
        return Err(Failure::precondition("RESTART_REQUIRED", message));
    }
    Ok(())
}

/// The spec and the addresses of the running machine. Refused as by [`runs_as_wanted`].
pub fn as_it_runs(record: &VmRecord) -> Result<(vmmd_api::v1::VmSpec, vmmd_store::Hardware), Failure> {
    runs_as_wanted(record)?;
    let run = record.instance.clone().unwrap_or_default();
    let spec = run.spec.or_else(|| record.spec.clone()).unwrap_or_default();
    let hardware = run.hardware.or_else(|| record.hardware.clone());
    Ok((spec, hardware.unwrap_or_default()))
}

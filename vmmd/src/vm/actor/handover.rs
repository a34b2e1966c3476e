//! The VM's part of a migration: [`proto::handover`] decides, the record is written, then it is done.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use proto::{
    handover::{Effect, Message, Resolution, Source, SourceEvent, Target, TargetEvent},
    v1::{ExitReason, VmPhase},
    vmm::{ErrorKind, MigrationDisks, MigrationRound, Resume, UnlockDisks, request::Op},
};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};

use super::{Actor, work::Work};
use crate::{
    context::Context,
    control,
    failure::{Failure, Kind, store_failure},
    fault,
    operation::{Handle, Progress, Type},
    registry::vms::command::{Attend, HandoverRequest, Restore, hand_over},
    store::{HandoverStage, handover::Handover},
    vm::{
        api::describe::MIGRATING,
        lifecycle::{admission::Situation, policy::Occasion, stop::Then},
    },
};

/// How long a machine may take to resume.
const RESUME: Duration = Duration::from_secs(20);
/// How long a machine may take to give its disks away: what the guest has written becomes durable.
const UNLOCK: Duration = Duration::from_secs(10);
/// Waits between two tries to resume a machine whose disks somebody else has.
const FIRST_WAIT: Duration = Duration::from_millis(5);
const LAST_WAIT: Duration = Duration::from_secs(1);
/// After so long it is told.
const QUIET: Duration = Duration::from_secs(1);

/// The reason of a VM whose removal could not be written.
pub(super) const DELETE_FAILED: &str = "DeleteFailed";
const MIB: u64 = 1 << 20;
/// What is said of a machine that was received.
const RECEIVED: &str = "received from another node, which decides what follows";

/// Where the target of a migration that begins is, and the UUIDs of the disks that go along.
type Begin<'a> = Option<(&'a str, Vec<Vec<u8>>)>;

/// What is to be said to the other daemon, and whether the VM is still there.
type Step = (Result<Vec<Message>, Failure>, ControlFlow<()>);

fn failed(failure: Failure) -> Step {
    (Err(failure), ControlFlow::Continue(()))
}

impl Actor {
    pub(super) fn handover(&self) -> Handover {
        Handover::of(self.record.handover.as_ref())
    }

    pub(super) async fn on_handover(
        &mut self,
        request: HandoverRequest,
        reply: oneshot::Sender<Result<Vec<Message>, Failure>>,
    ) -> ControlFlow<()> {
        let (said, flow) = match request {
            HandoverRequest::Begin {
                peer,
                reporter,
                give_up,
                disks,
            } => {
                let begun = self.begin_migration(&peer, disks).await;
                if begun.0.is_ok() {
                    self.migration = Some(reporter);
                    self.give_up = give_up;
                }
                begun
            }
            HandoverRequest::Source { event } => self.on_source(event).await,
            HandoverRequest::Told { migration } => {
                self.forget_peer(migration).await;
                (Ok(Vec::new()), ControlFlow::Continue(()))
            }
            HandoverRequest::Receive {
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
                    put_back: None,
                };
                self.begin_receive(migration, restore, &context, started).await
            }
            HandoverRequest::Target { message } => self.on_target(message).await,
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
                if let Handover::Target(Target::Owned(last)) = self.handover() {
                    let own = Handover::Source(Source::Owner {
                        last,
                        migrating: false,
                    });
                    self.record.handover = Some(own.record(""));
                    self.persist().await;
                }
                (Ok(Vec::new()), ControlFlow::Continue(()))
            }
            HandoverRequest::Waits { why } => {
                if self.view.phase == VmPhase::Paused {
                    self.enter(VmPhase::Paused, "DiskInUse", why);
                }
                (Ok(Vec::new()), ControlFlow::Continue(()))
            }
            HandoverRequest::Resolve(resolution) => self.resolve(resolution).await,
        };
        let _ = reply.send(said);
        flow
    }

    async fn begin_migration(&mut self, peer: &str, disks: Vec<Vec<u8>>) -> Step {
        let situation = self.situation();
        if situation == Situation::Migrating {
            let message = format!("VM \"{}\" is being migrated already", self.record.name);
            return failed(Failure::precondition("MIGRATING", message));
        }
        if situation != Situation::Running {
            let message = format!(
                "VM \"{}\" does not run, or something is under way",
                self.record.name
            );
            return failed(Failure::precondition("VM_NOT_RUNNING", message));
        }
        let (said, flow) = self.step_source(SourceEvent::Begin, Some((peer, disks))).await;
        let Handover::Source(Source::Owner {
            last,
            migrating: true,
        }) = self.handover()
        else {
            return (said, flow);
        };
        self.enter(VmPhase::Running, MIGRATING, format!("to {peer}"));
        // Nothing is said yet: the number is what the caller needs.
        (said.map(|_| vec![Message::Prepare(last)]), flow)
    }

    async fn on_source(&mut self, event: SourceEvent) -> Step {
        // What was sent is of a machine that has ended since: that is its end, as without a migration.
        let goes_on = matches!(event, SourceEvent::Sent | SourceEvent::Heard(Message::Ready(_)));
        let ended = self.instance.is_none() || matches!(self.work, Work::Start(_) | Work::Stop(_));
        let over = if !goes_on {
            None
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
            Handover::Source(Source::Given(_)) => {
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

    /// The target can lock the disks as soon as it hears the commit. What goes wrong here is no loss: the locks go when the target has answered,
    /// with the process.
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

    /// The target knows that the migration is over.
    async fn forget_peer(&mut self, migration: u64) {
        if let Some(record) = &mut self.record.handover
            && record.stage() == HandoverStage::Owner
            && record.migration == migration
        {
            record.peer.clear();
            self.persist().await;
        }
    }

    async fn step_source(&mut self, event: SourceEvent, begin: Begin<'_>) -> Step {
        let before = match self.handover() {
            Handover::Source(source) => source,
            Handover::Target(Target::Owned(last)) => Source::Owner {
                last,
                migrating: false,
            },
            Handover::Target(_) => return failed(not_here()),
        };
        let (after, effects) = before.on(event);
        if let Err(failure) = self.write(before != after, Handover::Source(after), begin).await {
            return failed(failure);
        }
        self.carry_out(effects).await
    }

    async fn on_target(&mut self, message: Message) -> Step {
        let before = match self.handover() {
            Handover::Target(target) => target,
            // It ran here since, and may be on its way further.
            Handover::Source(Source::Owner { last, .. } | Source::Given(last) | Source::Gone(last)) => {
                match message {
                    Message::Commit(it) if it <= last => {
                        return (Ok(vec![Message::Running(it)]), ControlFlow::Continue(()));
                    }
                    _ => return failed(not_here()),
                }
            }
        };
        let loaded = self.instance.is_some() && matches!(self.work, Work::None);
        self.step_target(before, TargetEvent::Heard { message, loaded })
            .await
    }

    async fn step_target(&mut self, before: Target, event: TargetEvent) -> Step {
        let (after, effects) = before.on(event);
        if let Err(failure) = self.write(before != after, Handover::Target(after), None).await {
            return failed(failure);
        }
        self.carry_out(effects).await
    }

    /// Makes the next state durable; `begin` is what a migration begins with.
    async fn write(&mut self, changed: bool, handover: Handover, begin: Begin<'_>) -> Result<(), Failure> {
        if !changed {
            return Ok(());
        }
        let before = self.record.handover.clone();
        let known = before.clone().unwrap_or_default();
        let (peer, disks) = begin.unwrap_or((known.peer.as_str(), known.disks));
        let mut next = handover.record(peer);
        // Of a VM that is here for good, all disks are its own.
        if handover.is_under_way() {
            next.disks = disks;
        } else {
            disks.iter().for_each(|uid| self.host.disks.arrived(uid));
        }
        self.record.handover = Some(next);
        let written = self.host.store.put(&self.record).await;
        written.map_err(|error| {
            // It may have been written: an earlier state is the safe one, since nothing of the new one was done.
            self.record.handover = before;
            store_failure(error)
        })?;
        let stage = handover.record("").stage();
        fault::hold(&self.host.config.run_dir, &format!("wrote-{stage:?}")).await;
        Ok(())
    }

    async fn carry_out(&mut self, effects: Vec<Effect>) -> Step {
        let mut said = Vec::new();
        let mut flow = ControlFlow::Continue(());
        for effect in effects {
            match effect {
                Effect::Send(message) => {
                    // What this node does not take is of no use here: the source's abort concerns a migration that is over by then.
                    if matches!(message, Message::Refuse(_))
                        && matches!(self.handover(), Handover::Target(Target::Idle(_)))
                    {
                        flow = self.remove().await;
                    }
                    said.push(message);
                }
                Effect::Run => self.let_run(),
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

    /// Its removal has begun, and may have failed.
    fn is_leaving(&self) -> bool {
        self.view.phase == VmPhase::Terminating || self.view.reason == DELETE_FAILED
    }

    /// Lets the machine run, if there is one. While its `vmm` can't be reached, that waits for [`Self::on_connected`].
    pub(super) fn let_run(&mut self) {
        let Ok(client) = self.running_client() else {
            if self.instance.is_none() {
                let reason = self.record.exit_reason().unwrap_or(ExitReason::Lost);
                self.plan(Occasion::Ended(reason), 0);
            }
            return;
        };
        let (host, name) = (Arc::clone(&self.host), self.record.name.clone());
        tokio::spawn(async move {
            let began = Instant::now();
            let mut wait = FIRST_WAIT;
            let mut told = false;
            loop {
                match timeout(RESUME, client.request(Op::Resume(Resume {}), &[])).await {
                    Ok(Ok(_)) => {
                        let _ = hand_over(&host.vms, &name, HandoverRequest::Runs).await;
                        return;
                    }
                    // The other side gives its disks away when it hears that it is to, or ends.
                    Ok(Err(control::Error::Refused(refusal))) if refusal.kind() == ErrorKind::InUse => {
                        if !told && began.elapsed() > QUIET {
                            told = true;
                            let why = format!("{}: the VM goes on when nobody else has it", refusal.message);
                            tracing::warn!(vm = name, why, "a VM waits for its disks after a migration");
                            let _ = hand_over(&host.vms, &name, HandoverRequest::Waits { why }).await;
                        }
                    }
                    Ok(Err(error)) => {
                        tracing::warn!(vm = name, %error, "resume a VM after a migration");
                        return;
                    }
                    Err(_) => {
                        tracing::error!(
                            vm = name,
                            "a VM does not resume after a migration: it is asked again"
                        );
                    }
                }
                sleep(wait).await;
                wait = (wait * 2).min(LAST_WAIT);
            }
        });
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
        self.begin_start(operation, Some(Box::new(restore))).await;
        if matches!(self.work, Work::Start(_)) {
            return (Ok(Vec::new()), ControlFlow::Continue(()));
        }
        let flow = self.remove().await;
        let message = self.view.message.clone();
        let failure = Failure::precondition("MIGRATION_REFUSED", message);
        (Err(failure), flow)
    }

    /// The machine is there, and stays paused.
    pub(super) fn on_received(&mut self) {
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

    async fn resolve(&mut self, resolution: Resolution) -> Step {
        let waits = match self.handover() {
            Handover::Source(source) => source.waits(),
            Handover::Target(target) => target.waits(),
        };
        if let Some(record) = self.record.handover.as_mut().filter(|_| waits) {
            // What the other node has is not known: nothing that a guest has written is removed for that.
            record.disks.clear();
        }
        let step = match self.handover() {
            Handover::Source(source) if source.waits() => {
                self.on_source(SourceEvent::Resolve(resolution)).await
            }
            Handover::Target(target) if target.waits() => {
                self.step_target(target, TargetEvent::Resolve(resolution)).await
            }
            _ => {
                let message = format!("no migration of VM \"{}\" waits for a decision", self.record.name);
                return failed(Failure::precondition("NOTHING_TO_RESOLVE", message));
            }
        };
        // The other node is gone: nobody is told.
        if let Some(record) = &mut self.record.handover
            && record.stage() == HandoverStage::Owner
        {
            record.peer.clear();
            self.persist().await;
        }
        step
    }

    /// Goes on with what an earlier daemon left.
    pub(super) async fn resume_handover(&mut self) -> ControlFlow<()> {
        let Some(record) = self.record.handover.clone() else {
            return ControlFlow::Continue(());
        };
        let (run, _) = self.host.vms.now();
        let step = match self.handover() {
            // It has just been offered.
            Handover::Target(Target::Idle(_)) if self.record.made_run == run => {
                return ControlFlow::Continue(());
            }
            Handover::Source(Source::Owner { migrating: false, .. }) => {
                if self.view.phase == VmPhase::Paused && self.view.reason == MIGRATING {
                    self.let_run();
                }
                (Ok(Vec::new()), ControlFlow::Continue(()))
            }
            Handover::Source(_) => self.on_source(SourceEvent::Restarted).await,
            Handover::Target(target) => {
                if target.waits() && self.instance.is_some() {
                    self.enter(VmPhase::Paused, MIGRATING, RECEIVED);
                }
                self.step_target(target, TargetEvent::Restarted).await
            }
        };
        let (said, flow) = step;
        if let Err(failure) = said {
            tracing::error!(vm = self.record.name, %failure, "go on with a migration");
        }
        if flow.is_continue() {
            let left = Attend {
                uid: self.uid,
                name: self.record.name.clone(),
                migration: record.migration,
                target: record.peer,
            };
            // Nobody hears it when the daemon ends, and the next one begins here again.
            let _ = self.host.attend.send(left);
        }
        flow
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

/// Why a migration is given up whose guest boots anew.
pub fn guest_reset() -> Failure {
    let message = "the guest has reset its machine, and boots the kernel that is on its disk by now";
    Failure::new(Kind::Aborted, "GUEST_RESET", message)
}

fn not_here() -> Failure {
    let message = "the VM is not in a state in which this migration can go on";
    Failure::new(Kind::Aborted, "MIGRATION_OVER", message)
}

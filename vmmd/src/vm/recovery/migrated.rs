//! The migration of an unusable VM: [`vm_lifecycle::handover`] decides as for every other VM. Requests that need a usable VM are refused. The
//! rest works: an operator decides, the source repeats its messages, and the VM is removed when the other node has it.

use vm_lifecycle::handover::{Effect, Message, Source, SourceEvent, Target, TargetEvent};
use vmm_protocol::vmm::{Resume, request::Op};
use vmmd_host::failure::Failure;
use vmmd_objects::context::Context;
use vmmd_store::handover::{self, Handover};
use vmmd_store::store_failure;

use super::unusable::{Unusable, Why};
use crate::{
    registry::vms::command::{HandoverRequest, ResumeMigration},
    vm::{actor::nothing_to_resolve, instance::Instance},
};

/// Messages to the other daemon, and whether the VM is gone.
type Step = (Result<Vec<Message>, Failure>, bool);

impl Unusable {
    fn handover(&self) -> Handover {
        handover::of(self.record.handover.as_ref())
    }

    fn migration_number(&self) -> u64 {
        self.record.handover.as_ref().map_or(0, |record| record.migration)
    }

    /// A migration that an earlier daemon has left. The process of an unreachable VM is looked for: the VM continues then.
    pub(super) fn left_migration(&self) -> Option<ResumeMigration> {
        let record = self.record.handover.as_ref()?;
        let is_left = self.handover().is_under_way() && !matches!(self.why, Why::Unreachable(_));
        is_left.then(|| ResumeMigration::Left {
            uid: self.uid,
            name: self.record.name.clone(),
            migration: record.migration,
            target: record.peer.clone(),
        })
    }

    /// Disks of the VM that go with the VM, as another node has it.
    pub(super) fn disks_of_other_node(&self) -> Vec<Vec<u8>> {
        match (self.handover(), &self.record.handover) {
            (Handover::Source(Source::Gone(_)) | Handover::Target(Target::Idle(_)), Some(record)) => {
                record.disks.clone()
            }
            _ => Vec::new(),
        }
    }

    pub(super) async fn on_handover(&mut self, request: HandoverRequest) -> Step {
        // The stage of the migration is in the record. Only one node can decide without it: the other one, when the VM is deleted here.
        if matches!(self.why, Why::Record(_)) {
            let mut failure = self.refusal();
            if matches!(request, HandoverRequest::Resolve { .. }) {
                failure.message += "; to continue it on the other node, delete it here with `vmmctl delete vm NAME --force` first, and then \
                                    decide there with `vmmctl migrate resolve NAME --run`";
            }
            return (Err(failure), false);
        }
        let number = self.migration_number();
        match (request, self.handover()) {
            (HandoverRequest::Source { migration, event }, Handover::Source(source))
                if migration == number =>
            {
                self.on_source(source, event).await
            }
            (HandoverRequest::Resume { migration }, state) if migration == number => match state {
                Handover::Source(Source::Owner { migrating: false, .. }) => (Ok(Vec::new()), false),
                Handover::Source(source) => self.on_source(source, SourceEvent::Restarted).await,
                Handover::Target(target) => {
                    let (after, effects) = target.on(TargetEvent::Restarted);
                    self.step(Handover::Target(after), effects).await
                }
            },
            (HandoverRequest::Source { .. } | HandoverRequest::Resume { .. }, _) => (Ok(Vec::new()), false),
            (HandoverRequest::Expire { migration, .. }, Handover::Source(source @ Source::Gone(over)))
                if over == migration =>
            {
                let (removed, gone) = self.on_source(source, SourceEvent::Tick).await;
                (removed.map(|_| vec![Message::Refuse(migration)]), gone)
            }
            (HandoverRequest::Expire { migration, .. }, Handover::Target(Target::Idle(over)))
                if over <= migration =>
            {
                let removed = self.remove(&Context::daemon()).await;
                let gone = removed.is_ok();
                (removed.map(|_| vec![Message::Refuse(migration)]), gone)
            }
            (HandoverRequest::Expire { .. }, _) => (Ok(Vec::new()), false),
            (HandoverRequest::Target { from, message }, state) if matches!(message, Message::Abort(_)) => {
                let peer = self.record.handover.as_ref().map_or("", |record| &record.peer);
                match state.received(message, false) {
                    Some((after, effects)) if peer == from => self.step(after, effects).await,
                    _ => (Err(self.refusal()), false),
                }
            }
            (
                HandoverRequest::Resolve {
                    migration,
                    resolution,
                    context,
                },
                state,
            ) => {
                if let Err(failure) = self.expected(&context) {
                    return (Err(failure), false);
                }
                if migration != number || !state.waits() {
                    let failure = nothing_to_resolve(&self.record.name, migration);
                    return (Err(failure), false);
                }
                // The other node is gone, and its state is unknown: no message is sent, and the disks of the VM stay.
                let before = self.record.handover.clone();
                if let Some(record) = &mut self.record.handover {
                    record.disks.clear();
                    record.peer.clear();
                }
                let step = match state {
                    Handover::Source(source) => {
                        self.on_source(source, SourceEvent::Resolve(resolution)).await
                    }
                    Handover::Target(target) => {
                        let (after, effects) = target.on(TargetEvent::Resolve(resolution));
                        self.step(Handover::Target(after), effects).await
                    }
                };
                if self.handover() == state {
                    self.record.handover = before;
                }
                step
            }
            // A guest that comes here would run in a VM that no request can change.
            (
                HandoverRequest::Begin(..)
                | HandoverRequest::Receive { .. }
                | HandoverRequest::Target { .. }
                | HandoverRequest::Runs
                | HandoverRequest::Waits { .. },
                _,
            ) => (Err(self.refusal()), false),
        }
    }

    async fn on_source(&mut self, source: Source, event: SourceEvent) -> Step {
        let (after, effects) = source.on(event);
        self.step(Handover::Source(after), effects).await
    }

    /// Makes the next state durable, and then does what follows. The record may not be durable, so each step writes it.
    async fn step(&mut self, after: Handover, effects: Vec<Effect>) -> Step {
        if after == self.handover() && effects.is_empty() {
            return (Ok(Vec::new()), false);
        }
        let abort = handover::abort(&self.record, &effects);
        let before = self.record.handover.clone();
        let (next, arrived) = handover::next(after, before.clone().unwrap_or_default());
        self.record.handover = Some(next);
        if let Err(error) = self.host.store.put_handover(&self.record, abort.as_ref()).await {
            self.record.handover = before;
            return (Err(store_failure(error)), false);
        }
        arrived.iter().for_each(|uid| self.host.disks.arrived(uid));
        if let Some(abort) = abort {
            let was_read = false;
            let _ = self.host.attend.send(ResumeMigration::Abort { abort, was_read });
        }
        self.show();
        let (mut said, mut gone) = (Vec::new(), false);
        for effect in effects {
            match effect {
                Effect::Send(message) => said.push(message),
                Effect::Run => self.let_run(),
                Effect::Kill => match self.remove(&Context::daemon()).await {
                    Ok(_) => gone = true,
                    Err(failure) => return (Err(failure), false),
                },
            }
        }
        (Ok(said), gone)
    }

    /// The VM is this node's: its guest continues, if its process can be reached.
    fn let_run(&self) {
        let Some(client) = self.instance.as_ref().and_then(Instance::client) else {
            return;
        };
        let name = self.record.name.clone();
        tokio::spawn(async move {
            if let Err(error) = client.request(Op::Resume(Resume {}), &[]).await {
                tracing::warn!(vm = name, %error, "resume an unusable VM after a migration");
            }
        });
    }
}

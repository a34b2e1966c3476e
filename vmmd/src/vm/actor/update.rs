//! Updates of the spec: recorded, then applied to the running machine as far as that can be done.
//!
//! What is to be done follows from the record alone, by what its spec says and what its run has ([`change::pending`]): a
//! change that fails stays pending and says why; the next update, the same one too, tries it again; the next start has
//! all of them.

mod live;

use std::time::Duration;

use proto::{
    model::{Violations, vm::Manifest},
    v1::{self, AttachmentPhase, EventSeverity},
    well_known,
};
use tokio::time::Instant;

pub use self::live::LiveChanges;
use self::live::Waiter;
use super::{
    Actor, LifeReply, answer,
    attachments::{Attachments, PlugKind},
    respond, superseded,
};
use crate::{
    context::Context,
    failure::Failure,
    node::check,
    store::VmRecord,
    text,
    vm::{
        admission::{self, Applied},
        change::{self, Live, Verdict},
        create, machine,
        start::store_failure,
    },
};

/// How long the guest may take to eject a disk when nothing is given.
const DEFAULT_EJECT: Duration = Duration::from_secs(30);
/// How long it may take to power off when nothing is given.
const DEFAULT_GRACE: Duration = Duration::from_secs(60);

/// What a VM is to be from now on.
#[derive(Debug)]
pub struct Update {
    /// The validated manifest.
    pub manifest: Manifest,
    /// Its spec as it came, with the formats of disks filled in.
    pub spec: v1::VmSpec,
    /// Of the manifest; empty when it has none.
    pub uid: String,
    /// Of the manifest.
    pub create_time: Option<well_known::Timestamp>,
    /// Of the manifest: what the VM's must be, if it has one.
    pub generation: Option<u64>,
    /// What is to be done with it.
    pub mode: v1::ApplyMode,
    /// How long the guest may take for what it is asked.
    pub grace: Option<Duration>,
    /// Who asks.
    pub context: Context,
}

impl Actor {
    pub(super) async fn on_update(&mut self, update: Update, reply: LifeReply) {
        let policy = self.spec.run_policy;
        let done = self.update(&update).await;
        let applied = match done {
            Ok(Some(applied)) => applied,
            Ok(None) => return respond(reply, Ok(self.would_be(&update))),
            Err(failure) => return respond(reply, Err(failure)),
        };
        let (mut plugs, mut paths) = (Vec::new(), Vec::new());
        if applied == Applied::Live {
            let deadline = Instant::now() + update.grace.unwrap_or(DEFAULT_EJECT);
            self.disks.live.failed.clear();
            self.apply_processors().await;
            (plugs, paths) = self.apply_live(deadline);
        }
        self.publish();
        let restart = update.mode == v1::ApplyMode::Restart;
        self.disks.live.wait(Waiter {
            reply,
            restart: restart.then_some(update.grace.unwrap_or(DEFAULT_GRACE)),
            context: update.context,
            plugs,
            paths,
        });
        if policy != self.spec.run_policy {
            self.reconsider().await;
        }
    }

    /// Checks an update and records it; `None` when it is only to be checked.
    async fn update(&mut self, update: &Update) -> Result<Option<Applied>, Failure> {
        let admitted = admission::admit_update(self.situation());
        let applied = admitted.map_err(|refusal| refusal.into_failure(&self.record.name))?;
        if self.has_begun(&update.context) {
            // An earlier daemon has written it, and was not there to answer. What was written since is newer.
            return Ok(Some(applied));
        }
        self.preconditions(update)?;
        check::could_ever(&self.host, &update.manifest.spec).await?;
        self.no_attach_in_between(update)?;
        let begun = self.record.begun.clone();
        if update.mode != v1::ApplyMode::DryRun {
            self.admitted(&update.context);
        }
        let record = self.with(update);
        let taken = self.take_disks(update);
        if taken.is_err() || update.mode == v1::ApplyMode::DryRun {
            self.record.begun = begun;
            change::hold_disks(&self.host, &self.record);
            return taken.map(|()| None);
        }
        if record == self.record {
            return Ok(Some(applied));
        }
        if let Err(error) = self.host.store.put(&record).await {
            self.record.begun = begun;
            change::hold_disks(&self.host, &self.record);
            return Err(store_failure(error));
        }
        self.commit(record, update);
        Ok(Some(applied))
    }

    fn preconditions(&self, update: &Update) -> Result<(), Failure> {
        self.expected(&update.context)?;
        let of_manifest = v1::Preconditions {
            uid: update.uid.clone(),
            generation: update.generation,
        };
        self.expected(&Context {
            preconditions: of_manifest,
            ..update.context.clone()
        })?;
        let mut found = Violations::default();
        let created = text::timestamp(self.record.created_ms);
        if update.create_time.is_some() && update.create_time != created {
            found.add("metadata.createTime", "is set by the daemon: leave it out");
        }
        Ok(found.or(())?)
    }

    /// A disk that is being attached can't be changed before it is.
    fn no_attach_in_between(&self, update: &Update) -> Result<(), Failure> {
        let disk = |spec: &v1::VmSpec, name: &str| spec.disks.iter().find(|disk| disk.name == name).cloned();
        let before = self.record.spec.clone().unwrap_or_default();
        let changed = |name: &&String| disk(&before, name) != disk(&update.spec, name);
        let mut names = names(&before).chain(names(&update.spec)).filter(changed);
        match names.find(|name| self.disks.is_attaching(name)) {
            Some(name) => Err(self.busy(name)),
            None => Ok(()),
        }
    }

    /// The record after the update; the same when it changes nothing.
    fn with(&self, update: &Update) -> VmRecord {
        let mut record = self.record.clone();
        let none = crate::store::Hardware::default();
        let old = record.hardware.clone().unwrap_or_default();
        let of_run = record.instance.as_ref().and_then(|run| run.hardware.clone());
        let new = machine::reallocate(
            &update.manifest.spec,
            &old,
            of_run.as_ref().unwrap_or(&none),
            || create::random_mac(&self.host),
        );
        let before = record.spec.clone().unwrap_or_default();
        let same = change::compare(
            &change::effective(&before, &old),
            &change::effective(&update.spec, &new),
        );
        let metadata = &update.manifest.metadata;
        let kept = record.labels == metadata.labels
            && record.annotations == metadata.annotations
            && record.owner == metadata.owner;
        if !same.is_empty() || !kept {
            record.labels.clone_from(&metadata.labels);
            record.annotations.clone_from(&metadata.annotations);
            record.owner.clone_from(&metadata.owner);
            record.spec = Some(update.spec.clone());
            record.hardware = Some(new);
            record.generation += 1;
        }
        let gone: Vec<_> = change::running_disks(&record)
            .iter()
            .map(|disk| disk.name.clone())
            .filter(|name| !names(&update.spec).any(|other| other == name))
            .collect();
        let pending = change::pending(&record);
        if let Some(run) = &mut record.instance {
            let kept = |name: &String| {
                let wanted = names(&update.spec).any(|other| other == name);
                let was_wanted = names(&before).any(|other| other == name);
                let under_way = self.disks.get(name).is_some_and(|known| known.plug.is_some());
                !wanted || was_wanted && under_way
            };
            run.ejecting.retain(kept);
            for name in gone {
                if !run.ejecting.contains(&name) {
                    run.ejecting.push(name);
                }
            }
        }
        for change in pending {
            if let Verdict::Live(live @ (Live::RunPolicy | Live::DropGroup(_))) = &change.verdict {
                change::take_over(&mut record, live);
            }
        }
        change::settle(&mut record);
        record
    }

    /// Takes the disks of the DiskService that the VM has not yet.
    fn take_disks(&self, update: &Update) -> Result<(), Failure> {
        let before = self.record.spec.clone().unwrap_or_default();
        let known: Vec<_> = change::running_disks(&self.record)
            .iter()
            .chain(&before.disks)
            .map(|disk| (&disk.name, disk.disk(), disk.read_only))
            .collect();
        let disks = update.spec.disks.iter().zip(&update.manifest.spec.disks);
        for (index, (wire, disk)) in disks.enumerate() {
            if !known.contains(&(&wire.name, wire.disk(), wire.read_only)) {
                let disks = std::slice::from_ref(disk);
                let field = |_| format!("spec.disks[{index}].disk");
                self.host.disks.take(&self.record.name, disks, field)?;
            }
        }
        Ok(())
    }

    fn commit(&mut self, record: VmRecord, update: &Update) {
        let changed = record.generation != self.record.generation;
        let removed: Vec<_> = names(&self.record.spec.clone().unwrap_or_default())
            .filter(|name| !names(&update.spec).any(|other| other == *name))
            .cloned()
            .collect();
        let back: Vec<_> = names(&update.spec)
            .filter(|name| !self.spec.disks.iter().any(|disk| disk.name.as_str() == *name))
            .cloned()
            .collect();
        self.record = record;
        self.disks.live.supersede();
        if changed {
            self.spec = update.manifest.spec.clone();
        }
        for name in &removed {
            let in_machine = change::running_disks(&self.record)
                .iter()
                .any(|disk| disk.name == *name);
            if !in_machine {
                self.disks.remove(name);
            }
        }
        for name in &back {
            self.take_back(name);
        }
        change::hold_disks(&self.host, &self.record);
        if changed {
            let message = format!("the spec has generation {} now", self.record.generation);
            self.about = (update.context.clone(), String::new());
            self.tell(EventSeverity::Normal, "SpecChanged", &message);
        }
    }

    /// A disk that was to leave the machine stays.
    fn take_back(&mut self, name: &str) {
        let Some(known) = self.disks.get_mut(name) else {
            return;
        };
        let detaching = known.plug.take_if(|plug| plug.kind != PlugKind::Attach);
        known.message.clear();
        if let Some(plug) = detaching {
            known.phase = AttachmentPhase::Attached;
            plug.task.abort();
            answer(plug.waiters, &Err(superseded(&self.record.name)));
        }
    }

    /// What the VM would be after an update, with the machine as far changed as that can be done.
    fn would_be(&self, update: &Update) -> std::sync::Arc<v1::Vm> {
        let mut record = self.with(update);
        for change in change::pending(&record) {
            if let Verdict::Live(live) = &change.verdict {
                change::take_over(&mut record, live);
            }
        }
        change::settle(&mut record);
        let (instance, disks) = (self.instance.as_ref(), Attachments::default());
        let mut view = self.view.clone();
        let spec = &update.manifest.spec;
        std::sync::Arc::new(view.describe(&self.host, self.uid, &record, spec, instance, &disks))
    }
}

fn names(spec: &v1::VmSpec) -> impl Iterator<Item = &String> {
    spec.disks.iter().map(|disk| &disk.name)
}

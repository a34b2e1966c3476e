//! Updates of the spec. An update is recorded, then applied to the running machine as far as
//! possible.
//!
//! The pending changes follow from the record alone, from the spec and the state of the run
//! ([`change::pending`]). A failed change stays pending with its reason. The next update, including
//! an identical one, retries it. The next start applies all changes.

mod live;

use std::time::Duration;

use tokio::time::Instant;
use vmmd_api::v1::{self, AttachmentPhase, EventSeverity};
use vmmd_spec::{
    Violations, mask,
    vm::{Manifest, VmSpec},
};

pub use self::live::LiveChanges;
use vm_lifecycle::admission::{self, Applied, Situation};
use vmmd_host::{
    capacity::placement,
    failure::{Failure, Kind},
    text,
};
use vmmd_objects::{context::Context, event::Object};
use vmmd_store::VmRecord;
use vmmd_store::store_failure;

use self::live::Waiter;
use super::{
    Actor, answer,
    attachments::{Attachments, PlugKind},
    plugged::What,
    probes::Occasion,
    respond, superseded,
};
use crate::{
    files,
    node::check,
    registry::{
        disks::Disks,
        vms::command::{LifeReply, Update},
    },
    share,
    vm::{
        api::create,
        machine::{
            self,
            change::{self, Live, Verdict},
            secret,
        },
    },
};

/// How long the guest may take to eject a disk when nothing is given.
pub(super) const DEFAULT_EJECT: Duration = Duration::from_secs(30);
/// How long it may take to power off when nothing is given.
const DEFAULT_GRACE: Duration = Duration::from_secs(60);

/// Desired state of a VM.
#[derive(Debug)]
struct Desired {
    /// The validated manifest.
    manifest: Manifest,
    /// Its spec as clients see it.
    spec: v1::VmSpec,
}

impl Update {
    /// Returns the VM that `present` becomes with this update.
    ///
    /// # Errors
    ///
    /// All violations of the request, or an item on the mask's path that does not exist.
    pub fn desired(&self, present: &v1::Vm, disks: &Disks) -> Result<v1::Vm, Failure> {
        let mut vm = match &self.mask {
            Some(mask) => mask.apply(present, &self.vm).map_err(inapplicable)?,
            None => self.vm.clone(),
        };
        for disk in vm.spec.iter_mut().flat_map(|spec| &mut spec.disks) {
            disks.fill_in(disk);
        }
        Ok(vm)
    }
}

fn inapplicable(error: mask::Error) -> Failure {
    match &error {
        mask::Error::NotThere { list, .. } => {
            let reason = match list.as_str() {
                "disks" => "DISK_NOT_FOUND",
                "rate_groups" => "RATE_GROUP_NOT_FOUND",
                _ => "ITEM_NOT_FOUND",
            };
            Failure::new(Kind::NotFound, reason, error.to_string())
        }
        mask::Error::NotGiven { list, .. } => Failure::field(&format!("spec.{list}"), error),
        mask::Error::Descriptors(_) => Failure::internal(error.to_string()),
    }
}

impl Desired {
    fn new(vm: v1::Vm) -> Result<Self, Failure> {
        Ok(Self {
            manifest: Manifest::try_from(&vm)?,
            spec: vm.spec.unwrap_or_default(),
        })
    }
}

impl Actor {
    pub(super) async fn on_update(&mut self, update: Update, reply: LifeReply) {
        let (policy, on_panic) = (self.spec.run_policy, self.spec.on_panic);
        let access = self.spec.access.clone();
        let generation = self.record.generation;
        let (applied, desired) = match self.admit_update(&update) {
            Ok(admitted) => admitted,
            Err(failure) => return respond(reply, Err(failure)),
        };
        match self.update(&update, &desired).await {
            Ok(()) if update.mode == v1::ApplyMode::DryRun => {
                return respond(reply, Ok(self.would_be(&desired)));
            }
            Ok(()) => {}
            Err(failure) => return respond(reply, Err(failure)),
        }
        let (mut plugs, mut paths) = (Vec::new(), Vec::new());
        if applied == Applied::Live {
            let deadline = Instant::now() + update.grace.unwrap_or(DEFAULT_EJECT);
            self.disks.live.failed.clear();
            self.disks.live.force_media = update.force_media;
            self.apply_processors().await;
            let joins = generation == self.record.generation;
            (plugs, paths) = self.apply_live(deadline, joins);
        }
        self.publish();
        let restart = update.mode == v1::ApplyMode::Restart;
        if update.no_wait && !restart {
            (plugs, paths) = (Vec::new(), Vec::new());
        }
        self.disks.live.wait(Waiter {
            reply,
            restart: restart.then_some(update.grace.unwrap_or(DEFAULT_GRACE)),
            context: update.context,
            plugs,
            paths,
        });
        let is_new = policy != self.spec.run_policy;
        if is_new || on_panic != self.spec.on_panic {
            self.reconsider(is_new).await;
        }
        self.probe_guest(Occasion::Changed);
        if access != self.spec.access {
            self.set_access();
        }
        if on_panic != self.spec.on_panic {
            if let Some(instance) = &mut self.instance {
                instance.paused_for_panic = false;
            }
            self.act_on_panic();
        }
    }

    /// Checks whether an update is permitted now. Returns where it takes effect, and the desired
    /// VM.
    fn admit_update(&self, update: &Update) -> Result<(Applied, Desired), Failure> {
        let admitted = admission::admit_update(self.situation());
        let applied = admitted.map_err(|refusal| refusal.into_failure(&self.record.name))?;
        let present = self.state();
        if self.has_begun(&update.context) {
            // An earlier daemon wrote this update without an answer. The record may contain newer
            // changes.
            let mut present = present.as_ref().clone();
            self.with_secrets(&mut present)?;
            return Ok((applied, Desired::new(present)?));
        }
        self.preconditions(update)?;
        let mut desired = update.desired(&present, &self.host.disks)?;
        self.with_secrets(&mut desired)?;
        Ok((applied, Desired::new(desired)?))
    }

    /// Records an update, unless it is a dry run.
    async fn update(&mut self, update: &Update, desired: &Desired) -> Result<(), Failure> {
        if self.has_begun(&update.context) {
            return Ok(());
        }
        let spec = &desired.manifest.spec;
        if spec.pod != self.spec.pod {
            return Err(Failure::field("spec.pod", "is fixed at the creation of the VM"));
        }
        self.unless_stopped(self.check(spec)).await?;
        self.no_attach_in_between(desired)?;
        let begun = self.record.begun.clone();
        if update.mode != v1::ApplyMode::DryRun {
            self.admitted(&update.context);
        }
        let record = self.with(desired);
        let mut taken = self.take_disks(desired);
        // The start that follows a restart finds room for the spec that is stored then.
        let had = self.instance.as_ref().map(|instance| instance.claim.demand());
        let had = had.filter(|_| self.situation() == Situation::Stopping { restarting: true });
        if taken.is_ok() && had.is_some() {
            taken = self.grow(spec).await;
        }
        if taken.is_err() || update.mode == v1::ApplyMode::DryRun {
            self.record.begun = begun;
            change::hold_disks(&self.host, &self.record);
            if let Some(had) = had {
                self.give_back(had);
            }
            return taken;
        }
        if record == self.record {
            return Ok(());
        }
        if let Err(error) = self.host.store.put(&record).await {
            self.record.begun = begun;
            change::hold_disks(&self.host, &self.record);
            if let Some(had) = had {
                self.give_back(had);
            }
            return Err(store_failure(error));
        }
        self.commit(record, desired, &update.context);
        Ok(())
    }

    /// Whether the node could run the VM with this spec.
    async fn check(&self, spec: &VmSpec) -> Result<(), Failure> {
        check::could_ever(&self.host, spec).await?;
        placement::refuse(&files::outside(spec, &self.host.config.roots, Some(&self.spec)))?;
        placement::refuse(&share::check(&self.host, spec, Some(&self.spec)).await?)?;
        let vm = (self.uid, self.record.name.as_str());
        placement::refuse(&check::changed(&self.host, vm, spec, Some(&self.spec)).await?)
    }

    /// Puts back what clients are not shown.
    fn with_secrets(&self, vm: &mut v1::Vm) -> Result<(), Failure> {
        let present = self.record.spec.as_ref();
        match &mut vm.spec {
            Some(spec) => Ok(secret::restore(spec, present, self.host.store.key())?),
            None => Ok(()),
        }
    }

    fn preconditions(&self, update: &Update) -> Result<(), Failure> {
        self.expected(&update.context)?;
        let metadata = update.vm.metadata.clone().unwrap_or_default();
        let of_manifest = v1::Preconditions {
            uid: metadata.uid,
            generation: (metadata.generation != 0).then_some(metadata.generation),
        };
        self.expected(&Context {
            preconditions: of_manifest,
            ..update.context.clone()
        })?;
        let mut found = Violations::default();
        let created = text::timestamp(self.record.created_ms);
        if update.mask.is_none() && metadata.create_time.is_some() && metadata.create_time != created {
            found.add("metadata.createTime", "is set by the daemon: leave it out");
        }
        Ok(found.or(())?)
    }

    /// Refuses changes of a device that is being attached. The machine receives the settings from
    /// the beginning of the attach.
    fn no_attach_in_between(&self, desired: &Desired) -> Result<(), Failure> {
        let disk = |spec: &v1::VmSpec, name: &str| spec.disks.iter().find(|disk| disk.name == name).cloned();
        let before = self.record.spec.clone().unwrap_or_default();
        let changed = |name: &&String| disk(&before, name) != disk(&desired.spec, name);
        let mut names = names(&before).chain(names(&desired.spec)).filter(changed);
        if let Some(name) = names.find(|name| self.disks.is_attaching(name)) {
            return Err(self.busy(name));
        }
        let nics = desired.spec.nics.iter().filter(|nic| !before.nics.contains(nic));
        let shares = desired.spec.shares.iter();
        let shares = shares.filter(|share| !before.shares.contains(share));
        let nics = nics.map(|nic| (What::Nic, &nic.name));
        let mut changed = nics.chain(shares.map(|share| (What::Share, &share.name)));
        match changed.find(|(what, name)| self.is_attaching(*what, name)) {
            Some((what, name)) => Err(what.is_being_attached(name)),
            None => Ok(()),
        }
    }

    /// The record after the update; the same when it changes nothing.
    fn with(&self, desired: &Desired) -> VmRecord {
        let mut record = self.record.clone();
        let none = vmmd_store::Hardware::default();
        let old = record.hardware.clone().unwrap_or_default();
        let of_run = record.instance.as_ref().and_then(|run| run.hardware.clone());
        let new = machine::reallocate(
            &desired.manifest.spec,
            &old,
            of_run.as_ref().unwrap_or(&none),
            |nic| create::chosen_mac(&self.host, nic),
        );
        let before = record.spec.clone().unwrap_or_default();
        let same = change::compare(
            &change::effective(&before, &old),
            &change::effective(&desired.spec, &new),
        );
        let metadata = &desired.manifest.metadata;
        let kept = record.labels == metadata.labels
            && record.annotations == metadata.annotations
            && record.owner == metadata.owner;
        if !same.is_empty() || !kept {
            record.labels.clone_from(&metadata.labels);
            record.annotations.clone_from(&metadata.annotations);
            record.owner.clone_from(&metadata.owner);
            record.spec = Some(desired.spec.clone());
            record.hardware = Some(new);
            record.generation += 1;
        }
        let gone: Vec<_> = change::running_disks(&record)
            .iter()
            .map(|disk| disk.name.clone())
            .filter(|name| !names(&desired.spec).any(|other| other == name))
            .collect();
        let pending = change::pending(&record);
        if let Some(run) = &mut record.instance {
            let kept = |name: &String| {
                let wanted = names(&desired.spec).any(|other| other == name);
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
            if let Verdict::Live(
                live @ (Live::RunPolicy
                | Live::StateDir
                | Live::OnPanic
                | Live::Probes
                | Live::AccessCredentials
                | Live::DropGroup(_)),
            ) = &change.verdict
            {
                change::take_over(&mut record, live);
            }
        }
        change::settle(&mut record);
        record
    }

    /// Takes the disks of the DiskService that the VM has not yet.
    fn take_disks(&self, desired: &Desired) -> Result<(), Failure> {
        let before = self.record.spec.clone().unwrap_or_default();
        let known: Vec<_> = change::running_disks(&self.record)
            .iter()
            .chain(&before.disks)
            .map(|disk| (&disk.name, disk.disk(), disk.read_only))
            .collect();
        let disks = desired.spec.disks.iter().zip(&desired.manifest.spec.disks);
        for (index, (wire, disk)) in disks.enumerate() {
            if !known.contains(&(&wire.name, wire.disk(), wire.read_only)) {
                let disks = std::slice::from_ref(disk);
                let field = |_| format!("spec.disks[{index}].disk");
                self.host.disks.take(&self.record.name, disks, field)?;
            }
        }
        Ok(())
    }

    fn commit(&mut self, record: VmRecord, desired: &Desired, context: &Context) {
        let changed = record.generation != self.record.generation;
        let removed: Vec<_> = names(&self.record.spec.clone().unwrap_or_default())
            .filter(|name| !names(&desired.spec).any(|other| other == *name))
            .cloned()
            .collect();
        let back: Vec<_> = names(&desired.spec)
            .filter(|name| !self.spec.disks.iter().any(|disk| disk.name.as_str() == *name))
            .cloned()
            .collect();
        self.record = record;
        if changed {
            let before = std::mem::replace(&mut self.spec, desired.manifest.spec.clone());
            self.keep_plugged(&before);
            let vm = Object::Vm(self.record.name.clone(), self.uid);
            if before.cloud_init != self.spec.cloud_init
                && let Some(draft) = create::unknown_user_data(vm, &self.spec)
            {
                self.host.events.emit(draft.of(context.clone()));
            }
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
            self.about = (context.clone(), String::new());
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

    /// Returns the VM after an update, assuming that all live changes succeed.
    fn would_be(&self, desired: &Desired) -> std::sync::Arc<v1::Vm> {
        let mut record = self.with(desired);
        for change in change::pending(&record) {
            if let Verdict::Live(live) = &change.verdict {
                change::take_over(&mut record, live);
            }
        }
        change::settle(&mut record);
        let (instance, disks) = (self.instance.as_ref(), Attachments::default());
        let mut view = self.view.clone();
        let spec = &desired.manifest.spec;
        std::sync::Arc::new(view.describe(&self.host, self.uid, &record, spec, instance, &disks))
    }
}

fn names(spec: &v1::VmSpec) -> impl Iterator<Item = &String> {
    spec.disks.iter().map(|disk| &disk.name)
}

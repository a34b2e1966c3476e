//! Live changes of a running machine: their begin, progress and end.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use serde_json::Value as Json;
use tokio::{task::AbortHandle, time::Instant};
use vm_lifecycle::admission::{Verdict as Admitted, admit};
use vmm_protocol::vmm::{UpdateNic, set_rate_limit::Target};
use vmmd_api::v1::{self, EventSeverity};
use vmmd_host::failure::Failure;
use vmmd_objects::context::Context;
use vmmd_spec::{Violations, disk::RateLimit, vm::VmSpec};
use vmmd_store::VmRecord;

use super::DEFAULT_EJECT;
use crate::{
    control::Client,
    registry::vms::command::{Life, LifeReply, Request},
    share::Unkept,
    vm::{
        actor::{
            Actor,
            attachments::Attachments,
            balloon, nics,
            plug::{self, Outcome, Plugged},
            plugged::{self, What},
            respond,
            row::Row,
            shares,
        },
        machine::change::{self, Change, Live, Verdict},
    },
};

/// Live changes under way, other than disk plugs, and the results of past ones.
#[derive(Debug, Default)]
pub struct LiveChanges {
    under_way: BTreeSet<String>,
    /// Requests to the machine about limits and the memory target: they must reach it in their order.
    row: Row,
    /// Attaches and detaches of NICs and shares that are waited for, by path.
    plugs: BTreeMap<String, AbortHandle>,
    /// NICs and shares, by path, that the guest was asked to eject and still has.
    asked: BTreeSet<String>,
    /// Generation of the plugs. A report from the machine from an older generation is stale.
    pub(in super::super) plugs_changed: u64,
    /// By path: why it could not be applied.
    pub(in crate::vm) failed: BTreeMap<String, String>,
    /// The last update takes media out of drives although the guest prevents that.
    pub(super) force_media: bool,
    waiters: Vec<Waiter>,
}

/// Caller that waits for the result of an update.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) reply: LifeReply,
    pub(super) context: Context,
    /// To be restarted when something is left, with this much time for the guest.
    pub(super) restart: Option<Duration>,
    /// Disks that are plugged or unplugged for it, with the serial numbers of that.
    pub(super) plugs: Vec<(String, u64)>,
    /// Paths of what else is changed for it.
    pub(super) paths: Vec<String>,
}

impl Attachments {
    /// Returns the pending changes that are not under way, each with the reason.
    pub fn left(&self, record: &VmRecord) -> Vec<(Change, String)> {
        let mut left = Vec::new();
        for change in change::pending(record) {
            let known = match &change.verdict {
                Verdict::Live(Live::Attach(name) | Live::Detach(name)) => self.get(name),
                _ => None,
            };
            let under_way = self.live.under_way.contains(&change.path);
            if under_way || known.is_some_and(|known| known.plug.is_some()) {
                continue;
            }
            let failed = self.live.failed.get(&change.path);
            let why = known.map(|known| &known.message).or(failed).cloned();
            let why = why.or_else(|| change.why_restart().map(str::to_owned));
            left.push((change, why.unwrap_or_default()));
        }
        left
    }
}

impl LiveChanges {
    /// The run has ended, or a new one begins.
    pub(in super::super) fn clear(&mut self) {
        self.under_way.clear();
        self.failed.clear();
        self.asked.clear();
        self.plugs_changed += 1;
        for task in std::mem::take(&mut self.plugs).into_values() {
            task.abort();
        }
    }

    /// Whether a change is being carried out.
    pub fn is_under_way(&self, path: &str) -> bool {
        self.under_way.contains(path)
    }

    /// Ends a change and aborts its task.
    pub(in super::super) fn end(&mut self, path: &str) {
        self.plugs_changed += 1;
        self.under_way.remove(path);
        self.failed.remove(path);
        if let Some(task) = self.plugs.remove(path) {
            task.abort();
        }
    }

    /// Whether the guest was asked to eject the device that is gone.
    pub(in super::super) fn was_asked(&mut self, path: &str) -> bool {
        self.asked.remove(path)
    }

    /// Answers when nothing is under way any more that is waited for.
    pub(super) fn wait(&mut self, waiter: Waiter) {
        self.waiters.push(waiter);
    }
}

impl Actor {
    /// Begins all changes that a running machine supports. Returns the plugs with their serial
    /// numbers, and the paths that the caller waits for: the changes that begin here, and with
    /// `joins` also the plugs of an earlier update.
    pub(super) fn apply_live(&mut self, deadline: Instant, joins: bool) -> (Vec<(String, u64)>, Vec<String>) {
        let (mut plugs, mut paths) = (Vec::new(), Vec::new());
        let client = self.running_client();
        for change in change::pending(&self.record) {
            let (live, client) = match (&change.verdict, &client) {
                // See `apply_processors`.
                (Verdict::Restart | Verdict::Live(Live::Processors), _) => continue,
                (Verdict::Live(live), Ok(client)) => (live.clone(), client.clone()),
                (Verdict::Live(_), Err(failure)) => {
                    let message = failure.message.clone();
                    self.disks.live.failed.insert(change.path, message);
                    continue;
                }
            };
            if let Live::Attach(name) | Live::Detach(name) = &live {
                let begins = self.disks.plug(name).is_none();
                if begins {
                    self.begin_plug(&live, client, deadline);
                }
                if let Some(plug) = self.disks.plug(name).filter(|_| begins || joins) {
                    plugs.push((name.clone(), plug.serial));
                }
                continue;
            }
            let path = change.path.clone();
            if self.begin_live(change, client, deadline) {
                paths.push(path);
            }
        }
        (plugs, paths)
    }

    /// Begins a change of the machine that is no plug of a disk. One that is under way is followed by another when it is over.
    pub(in super::super) fn begin_live(&mut self, change: Change, client: Client, deadline: Instant) -> bool {
        let Change {
            path,
            desired,
            verdict,
            ..
        } = change;
        let Verdict::Live(live) = verdict else {
            return false;
        };
        if !self.disks.live.under_way.insert(path.clone()) {
            return true;
        }
        let (record, of) = (self.record.clone(), path.clone());
        match &live {
            Live::AttachNic(name)
            | Live::DetachNic(name)
            | Live::AttachShare(name)
            | Live::DetachShare(name) => {
                let (host, uid, name) = (Arc::clone(&self.host), self.uid, name.clone());
                self.disks.live.plugs_changed += 1;
                if matches!(live, Live::DetachNic(_) | Live::DetachShare(_)) {
                    self.disks.live.asked.insert(path.clone());
                }
                let task = self.disks.tasks.spawn(async move {
                    let result = match &live {
                        Live::AttachShare(_) => {
                            let result = shares::attach(host, client, uid, record, &name).await;
                            return Outcome::ShareAttached(of, live, desired, result);
                        }
                        Live::AttachNic(_) => nics::attach(host, client, uid, record, &name).await,
                        Live::DetachShare(_) => plugged::detach(client, What::Share, &name, deadline).await,
                        _ => plugged::detach(client, What::Nic, &name, deadline).await,
                    };
                    Outcome::Applied(of, live, desired, result)
                });
                self.disks.live.plugs.insert(path, task);
            }
            Live::Medium(name) => {
                let disk = self.spec.disks.iter().find(|disk| disk.name.as_str() == name);
                let Some(disk) = disk.cloned() else {
                    self.disks.live.under_way.remove(&path);
                    return false;
                };
                let (host, force) = (Arc::clone(&self.host), self.disks.live.force_media);
                let hardware = record.instance.and_then(|run| run.hardware);
                let hardware = hardware.or(record.hardware).unwrap_or_default();
                let mut turn = self.disks.live.row.join();
                self.disks.tasks.spawn(async move {
                    turn.come().await;
                    let result = plug::change_medium(host, client, disk, hardware, force).await;
                    Outcome::Medium(of, live, desired, result)
                });
            }
            Live::NicAccess(name) => {
                let (host, uid, name) = (Arc::clone(&self.host), self.uid, name.clone());
                let mut turn = self.disks.live.row.join();
                self.disks.tasks.spawn(async move {
                    turn.come().await;
                    let result = nics::admit(&host, uid, &record, &name).await;
                    Outcome::Applied(of, live, desired, result)
                });
            }
            _ => {
                let memory_bytes = change::running_memory(&record);
                let spec = record.spec.unwrap_or_default();
                let mut turn = self.disks.live.row.join();
                self.disks.tasks.spawn(async move {
                    turn.come().await;
                    let result = carry_out(client, &live, &spec, memory_bytes).await;
                    Outcome::Applied(of, live, desired, result)
                });
            }
        }
        true
    }

    fn begin_plug(&mut self, live: &Live, client: Client, deadline: Instant) {
        match live {
            Live::Attach(name) => {
                let disk = self.spec.disks.iter().find(|disk| disk.name.as_str() == name);
                if let Some(disk) = disk.cloned() {
                    self.plug_in(client, disk, Vec::new());
                }
            }
            Live::Detach(name) => self.unplug(client, name, deadline, false, Vec::new()),
            _ => {}
        }
    }

    /// A share is plugged in, or could not be.
    pub(in super::super) async fn on_share_attached(
        &mut self,
        path: String,
        live: &Live,
        applied: &Json,
        result: Result<Option<Unkept>, Failure>,
    ) {
        let result = match result {
            Ok(process) => {
                if let Some((_, name)) = What::of(live).filter(|_| self.disks.live.is_under_way(&path)) {
                    self.keep_share(name, process);
                }
                Ok(())
            }
            Err(failure) => Err(failure),
        };
        self.on_applied(path, live, applied, result).await;
    }

    /// A drive has another medium, or keeps its own.
    pub(in super::super) async fn on_medium(
        &mut self,
        path: String,
        live: &Live,
        applied: &Json,
        result: Result<Plugged, Failure>,
    ) {
        let result = match (result, live) {
            (Ok(Plugged { ids, known }), Live::Medium(name)) if self.disks.live.is_under_way(&path) => {
                self.record.files.extend(known);
                if let Some(instance) = &mut self.instance {
                    instance.set_disk(name, Some(ids));
                }
                Ok(())
            }
            (result, _) => result.map(|_| ()),
        };
        self.on_applied(path, live, applied, result).await;
        change::hold_disks(&self.host, &self.record);
        self.look();
    }

    /// Handles the end of a change of the machine; `applied` is the new value.
    pub(in super::super) async fn on_applied(
        &mut self,
        path: String,
        live: &Live,
        applied: &Json,
        result: Result<(), Failure>,
    ) {
        // The change belongs to a run that has ended.
        if !self.disks.live.under_way.remove(&path) {
            return;
        }
        self.disks.live.plugs.remove(&path);
        self.disks.live.plugs_changed += 1;
        let pending = change::pending(&self.record);
        let pending = pending.into_iter().find(|change| change.path == path);
        match (result, pending) {
            (Ok(()), Some(change)) if change.desired == *applied => {
                let mut record = self.record.clone();
                change::take_over(&mut record, live);
                change::settle(&mut record);
                self.record = record;
                self.persist().await;
            }
            // Another update has come in between.
            (Ok(()), _) => {
                self.apply_live(Instant::now() + DEFAULT_EJECT, false);
                self.take_back_unwanted(live);
            }
            (Err(failure), _) => {
                let message = format!("{path} could not be applied: {}", failure.message);
                self.tell(EventSeverity::Warning, "LiveChangeFailed", &message);
                self.disks.live.failed.insert(path, failure.message);
            }
        }
        self.publish();
    }

    /// Answers updates of which nothing is under way any more, and restarts where that is asked for.
    pub(in super::super) async fn settle_updates(&mut self) {
        if self.disks.live.waiters.is_empty() {
            return;
        }
        for waiter in std::mem::take(&mut self.disks.live.waiters) {
            let mut plugs = waiter.plugs.iter();
            let plugging = plugs.any(|(name, serial)| {
                let plug = self.disks.get(name).and_then(|known| known.plug.as_ref());
                plug.is_some_and(|plug| plug.serial == *serial)
            });
            let mut paths = waiter.paths.iter();
            if plugging || paths.any(|path| self.disks.live.under_way.contains(path)) {
                self.disks.live.waiters.push(waiter);
            } else {
                self.settle_update(waiter).await;
            }
        }
    }

    /// Answers all updates of a deleted VM. Each is recorded, and the machine that it waited for has ended.
    pub(in super::super) fn answer_updates(&mut self) {
        for waiter in std::mem::take(&mut self.disks.live.waiters) {
            respond(waiter.reply, Ok(self.state()));
        }
    }

    async fn settle_update(&mut self, waiter: Waiter) {
        let Waiter {
            reply,
            context,
            restart,
            ..
        } = waiter;
        let left = self.disks.left(&self.record);
        let grace = restart.filter(|_| self.instance.is_some() && !left.is_empty());
        let situation = self.situation();
        let admitted = admit(situation, Request::Restart);
        let life = Life {
            grace,
            ..Life::new(context, Request::Restart, reply)
        };
        match admitted {
            Admitted::Begin if grace.is_some() && self.permitted(&life).is_ok() => {
                if let Err(failure) = self.grow(&self.spec).await {
                    return respond(life.reply, Err(failure));
                }
                // A restart that begins never ends the actor.
                let _ = self.begin(situation, life).await;
            }
            Admitted::Join if grace.is_some() => self.join(life).await,
            _ => respond(life.reply, Ok(self.state())),
        }
    }
}

/// Requests a change that is one request from a running machine with `memory_bytes` of guest RAM.
async fn carry_out(client: Client, live: &Live, spec: &v1::VmSpec, memory_bytes: u64) -> Result<(), Failure> {
    let valid = |limit: Option<v1::RateLimit>| {
        RateLimit::new(&mut Violations::default(), "limit", &limit.unwrap_or_default())
    };
    match live {
        Live::DiskLimit(name) => {
            let disk = spec.disks.iter().find(|disk| disk.name == *name);
            let limit = valid(disk.and_then(|disk| disk.rate_limit));
            plug::limit(client, Target::Disk(name.clone()), limit).await
        }
        Live::GroupLimit(name) => {
            let group = spec.rate_groups.iter().find(|group| group.name == *name);
            let limit = valid(group.and_then(|group| group.limit));
            plug::limit(client, Target::Group(name.clone()), limit).await
        }
        Live::NicLink(name) | Live::NicReceiveLimit(name) | Live::NicTransmitLimit(name) => {
            let nic = spec.nics.iter().find(|nic| nic.name == *name);
            let nic = nic.cloned().unwrap_or_default();
            let mut update = UpdateNic {
                name: name.clone(),
                ..UpdateNic::default()
            };
            match live {
                Live::NicLink(_) => update.link_up = Some(!nic.link_down),
                Live::NicReceiveLimit(_) => update.receive_limit = Some(valid(nic.receive_limit).into()),
                _ => update.transmit_limit = Some(valid(nic.transmit_limit).into()),
            }
            plug::update_nic(client, update).await
        }
        Live::BalloonTarget => {
            let valid = VmSpec::try_from(spec).ok();
            let held = valid.and_then(|spec| Some(spec.balloon?.held_bytes(memory_bytes)));
            balloon::tell(client, held.unwrap_or(0)).await
        }
        Live::RunPolicy
        | Live::StateDir
        | Live::OnPanic
        | Live::Probes
        | Live::AccessCredentials
        | Live::DropGroup(_)
        | Live::Processors
        | Live::Attach(_)
        | Live::Detach(_)
        | Live::AttachNic(_)
        | Live::DetachNic(_)
        | Live::AttachShare(_)
        | Live::DetachShare(_)
        | Live::Medium(_)
        | Live::NicAccess(_) => Ok(()),
    }
}

//! Requests about the VM's disks, and what becomes of them.
//!
//! ```text
//!            attach                 vmm has it                 detach
//!   (none) ──────────▶ InProgress ─────────────▶ Attached ──────────────▶ Detaching
//!      ▲                   │ refused                ▲  │ the guest         │   │
//!      └───────────────────┴────────────────────────┼──│ ejects it         │   │ gone
//!      ▲                                            │  ▼                   │   │
//!      │                                  attach    Pending                │   │
//!      │                                     (in the spec, not in the      │   │
//!      │                                      machine)    too late, refused│   │
//!      │                                            └──────────────────────┘   │
//!      └───────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A disk is in the spec from before the `vmm` is asked to plug it in until after it is gone. Of two daemons, one of
//! which ended in between, the second goes by what the `vmm` has: `attaching` and `ejecting` of the instance's record
//! say what to make of a disk that it has not. One that a guest ejects without having been asked stays in the spec, as
//! `Pending`: the guest does not decide what a VM has. It is plugged in again by an attach of the same disk, or by the
//! next start.

use std::time::Duration;

use proto::{
    model::{
        Violations,
        disk::{Disk, Limit, RateLimit},
        vm::{MAX_DISKS, VmSpec},
    },
    v1::{self, AttachmentPhase},
    vmm::{self, request::Op},
};
use tokio::time::Instant;

use super::{
    Actor, DiskRequest, Reply, Target, answer,
    attachments::{Attachment, Plug, PlugKind},
    plug::{self, AttachError, Outcome, no_disk},
};
use crate::{
    control::Client,
    failure::{Failure, Kind},
    ledger::FileId,
    store::VmRecord,
    vm::{
        admission::{self, Place, admit_disk},
        machine,
        start::store_failure,
    },
};

impl Actor {
    pub(super) async fn on_disk_request(&mut self, request: DiskRequest, reply: Reply) {
        let asked = match &request {
            DiskRequest::Attach(_) => admission::DiskRequest::Attach,
            DiskRequest::Detach { .. } => admission::DiskRequest::Detach,
            DiskRequest::Resize { .. } => admission::DiskRequest::Resize,
            DiskRequest::Limit(..) => admission::DiskRequest::Limit,
        };
        let place = match admit_disk(self.situation(), asked) {
            Ok(place) => place,
            Err(refusal) => return answer([reply], &Err(refusal.into_failure(&self.record.name))),
        };
        let result = match request {
            DiskRequest::Attach(wire) => self.attach(place, wire, reply).await,
            DiskRequest::Detach { disk, timeout, force } => {
                self.detach(place, &disk, timeout, force, reply).await
            }
            DiskRequest::Resize { disk, size } => self.resize(place, &disk, size, reply).await,
            DiskRequest::Limit(target, limit) => self.limit(place, target, limit, reply).await,
        };
        if let Err((failure, reply)) = result {
            answer([reply], &Err(failure));
        }
    }

    /// For asking the `vmm`, or why that can't be.
    pub(super) fn running_client(&self) -> Result<Client, Failure> {
        let Some(instance) = &self.instance else {
            let refusal = admission::Refusal::NotRunning;
            return Err(refusal.into_failure(&self.record.name));
        };
        instance.client().ok_or_else(|| {
            let message = format!("the vmm process of VM \"{}\" doesn't answer", self.record.name);
            Failure::new(Kind::Unavailable, "VMM_UNRESPONSIVE", message)
        })
    }

    async fn attach(
        &mut self,
        place: Place,
        wire: v1::DiskSpec,
        reply: Reply,
    ) -> Result<(), (Failure, Reply)> {
        let disk = match validate(&wire) {
            Ok(disk) => disk,
            Err(violations) => return Err((violations.into(), reply)),
        };
        let name = disk.name.to_string();
        let client = match place {
            Place::Machine => match self.running_client() {
                Ok(client) => Some(client),
                Err(failure) => return Err((failure, reply)),
            },
            Place::Spec => None,
        };
        if let Some(known) = self.spec.disks.iter().find(|known| known.name == disk.name) {
            if *known != disk {
                let message = format!("VM \"{}\" has another disk \"{name}\" already", self.record.name);
                return Err((Failure::new(Kind::Exists, "DISK_EXISTS", message), reply));
            }
            return self.attach_again(client, disk, reply).await;
        }
        if let Err(failure) = self.add_to_spec(wire, &disk, client.is_some()).await {
            return Err((failure, reply));
        }
        match client {
            Some(client) => self.plug_in(client, disk, vec![reply]),
            None => {
                self.publish();
                answer([reply], &Ok(self.state()));
            }
        }
        Ok(())
    }

    /// The same disk is in the spec already.
    async fn attach_again(
        &mut self,
        client: Option<Client>,
        disk: Disk,
        reply: Reply,
    ) -> Result<(), (Failure, Reply)> {
        let name = disk.name.to_string();
        match self.disks.plug(&name) {
            Some(plug) if plug.kind == PlugKind::Attach => {
                plug.waiters.push(reply);
                return Ok(());
            }
            Some(_) => return Err((self.busy(&name), reply)),
            None => {}
        }
        let attachment = self.disks.get(&name);
        let ejected = attachment.is_some_and(|attachment| attachment.phase == AttachmentPhase::Pending);
        match client {
            Some(client) if ejected => {
                let noted = self.change_run(|run| run.attaching.push(name)).await;
                match noted {
                    Ok(()) => self.plug_in(client, disk, vec![reply]),
                    Err(failure) => return Err((failure, reply)),
                }
            }
            _ => {
                let run = self.record.instance.as_ref();
                // Who wants it takes back an earlier detach that the guest has not heeded.
                if run.is_some_and(|run| run.ejecting.contains(&name)) {
                    let noted = self.change_run(|run| run.ejecting.retain(|noted| *noted != name));
                    if let Err(failure) = noted.await {
                        return Err((failure, reply));
                    }
                }
                answer([reply], &Ok(self.state()));
            }
        }
        Ok(())
    }

    fn busy(&self, disk: &str) -> Failure {
        let message = format!(
            "disk \"{disk}\" of VM \"{}\" is being attached or detached: wait, or detach it with force",
            self.record.name
        );
        Failure::precondition("BUSY", message)
    }

    async fn add_to_spec(&mut self, wire: v1::DiskSpec, disk: &Disk, running: bool) -> Result<(), Failure> {
        let name = disk.name.to_string();
        let hardware = self.record.hardware.clone().unwrap_or_default();
        let slot = machine::free_slot(&hardware).filter(|_| self.spec.disks.len() < MAX_DISKS);
        let Some(slot) = slot else {
            let message = format!(
                "VM \"{}\" has {MAX_DISKS} disks, as many as there are slots: detach one first",
                self.record.name
            );
            return Err(Failure::new(Kind::Exhausted, "NO_FREE_SLOT", message));
        };
        let mut record = self.record.clone();
        let spec = record.spec.get_or_insert_default();
        spec.disks.push(wire);
        let index = spec.disks.len() - 1;
        let spec = VmSpec::try_from(&*spec).map_err(|violations| renamed(violations, index))?;
        record
            .hardware
            .get_or_insert_default()
            .disk_slots
            .insert(name.clone(), slot);
        record.generation += 1;
        if let Some(run) = record.instance.as_mut().filter(|_| running) {
            run.attaching.push(name.clone());
        }
        let disks = std::slice::from_ref(disk);
        self.host
            .disks
            .take(&self.record.name, disks, |_| "disk".to_owned())?;
        if let Err(error) = self.host.store.put(&record).await {
            self.host.disks.give_back(&self.record.name, Some(&name));
            return Err(store_failure(error));
        }
        (self.record, self.spec) = (record, spec);
        Ok(())
    }

    fn plug_in(&mut self, client: Client, disk: Disk, waiters: Vec<Reply>) {
        let name = disk.name.to_string();
        let serial = self.disks.serial();
        let hardware = self.record.hardware.clone().unwrap_or_default();
        let (host, of) = (std::sync::Arc::clone(&self.host), name.clone());
        let task = self.disks.tasks.spawn(async move {
            let result = plug::attach(host, client, disk, hardware).await;
            Outcome::Attached(of, serial, result)
        });
        let attachment = self.disks.entry(&name);
        *attachment = Attachment::new(AttachmentPhase::InProgress, "");
        attachment.plug = Some(Plug {
            kind: PlugKind::Attach,
            serial,
            waiters,
            task,
        });
        self.publish();
    }

    async fn detach(
        &mut self,
        place: Place,
        name: &str,
        timeout: Duration,
        force: bool,
        reply: Reply,
    ) -> Result<(), (Failure, Reply)> {
        if !self.spec.disks.iter().any(|disk| disk.name.as_str() == name) {
            return Err((no_disk(name), reply));
        }
        let attachment = self.disks.get(name);
        let absent = attachment.is_some_and(|attachment| attachment.phase == AttachmentPhase::Pending);
        if place == Place::Spec || absent {
            if let Err(failure) = self.remove_from_spec(name).await {
                return Err((failure, reply));
            }
            self.publish();
            answer([reply], &Ok(self.state()));
            return Ok(());
        }
        let client = match self.running_client() {
            Ok(client) => client,
            Err(failure) => return Err((failure, reply)),
        };
        let mut deadline = Instant::now() + timeout;
        let mut waiters = vec![reply];
        match self.disks.plug(name) {
            Some(Plug {
                kind: PlugKind::Detach {
                    deadline: earlier, ..
                },
                waiters: others,
                task,
                ..
            }) => {
                if !force {
                    others.append(&mut waiters);
                    return Ok(());
                }
                // Force has a say in the one under way: not later than both.
                deadline = deadline.min(*earlier);
                task.abort();
                waiters.append(others);
            }
            Some(_) => {
                let Some(reply) = waiters.pop() else { return Ok(()) };
                return Err((self.busy(name), reply));
            }
            None => {
                let noted = self.change_run(|run| {
                    if !run.ejecting.iter().any(|noted| noted == name) {
                        run.ejecting.push(name.to_owned());
                    }
                });
                if let Err(failure) = noted.await {
                    let Some(reply) = waiters.pop() else { return Ok(()) };
                    return Err((failure, reply));
                }
            }
        }
        self.unplug(client, name, deadline, force, waiters);
        Ok(())
    }

    fn unplug(&mut self, client: Client, name: &str, deadline: Instant, force: bool, waiters: Vec<Reply>) {
        let serial = self.disks.serial();
        let of = name.to_owned();
        let task = self.disks.tasks.spawn(async move {
            let result = plug::detach(client, of.clone(), deadline, force).await;
            Outcome::Detached(of, serial, result)
        });
        let attachment = self.disks.entry(name);
        attachment.phase = AttachmentPhase::Detaching;
        attachment.message.clear();
        attachment.plug = Some(Plug {
            kind: PlugKind::Detach { deadline, force },
            serial,
            waiters,
            task,
        });
        self.publish();
    }

    async fn resize(
        &mut self,
        place: Place,
        name: &str,
        size: u64,
        reply: Reply,
    ) -> Result<(), (Failure, Reply)> {
        let found = self.spec.disks.iter().find(|disk| disk.name.as_str() == name);
        let Some(disk) = found.cloned() else {
            return Err((no_disk(name), reply));
        };
        if disk.read_only {
            let message = format!("disk \"{name}\" of VM \"{}\" is read-only", self.record.name);
            return Err((Failure::precondition("DISK_READ_ONLY", message), reply));
        }
        if place == Place::Spec {
            // Here and not in a task, so that the VM is not started meanwhile.
            let grown = plug::resize_file(&self.host, &self.spec, name, size).await;
            return match grown {
                Ok(_) => {
                    self.publish();
                    answer([reply], &Ok(self.state()));
                    Ok(())
                }
                Err(failure) => Err((failure, reply)),
            };
        }
        let attachment = self.disks.get(name);
        let settled = attachment.is_none_or(|attachment| attachment.phase == AttachmentPhase::Attached);
        match self.running_client() {
            Ok(_) if !settled => Err((self.busy(name), reply)),
            Ok(client) => {
                let (host, of) = (std::sync::Arc::clone(&self.host), name.to_owned());
                self.disks.tasks.spawn(async move {
                    let result = plug::resize(host, client, disk, size).await;
                    Outcome::Resized(of, reply, result)
                });
                Ok(())
            }
            Err(failure) => Err((failure, reply)),
        }
    }

    async fn limit(
        &mut self,
        place: Place,
        target: Target,
        limit: RateLimit,
        reply: Reply,
    ) -> Result<(), (Failure, Reply)> {
        let client = match place {
            Place::Machine => match self.running_client() {
                Ok(client) => Some(client),
                Err(failure) => return Err((failure, reply)),
            },
            Place::Spec => None,
        };
        let before = match self.present_limit(&target) {
            Ok(before) => before,
            Err(failure) => return Err((failure, reply)),
        };
        if let Err(failure) = self.store_limit(&target, Some(limit)).await {
            return Err((failure, reply));
        }
        let Some(client) = client else {
            self.publish();
            answer([reply], &Ok(self.state()));
            return Ok(());
        };
        self.disks.tasks.spawn(async move {
            let result = plug::limit(client, target.clone(), limit).await;
            Outcome::Limited(target, before, reply, result)
        });
        Ok(())
    }

    fn present_limit(&self, target: &Target) -> Result<Option<RateLimit>, Failure> {
        match target {
            Target::Disk(name) => {
                let disk = self.spec.disks.iter().find(|disk| disk.name.as_str() == name);
                match &disk.ok_or_else(|| no_disk(name))?.limit {
                    Limit::None => Ok(None),
                    Limit::Own(limit) => Ok(Some(*limit)),
                    Limit::Group(group) => {
                        let message = format!(
                            "disk \"{name}\" shares the limit of rate group \"{group}\": set that of the group"
                        );
                        Err(Failure::precondition("DISK_IN_RATE_GROUP", message))
                    }
                }
            }
            Target::Group(name) => {
                let mut groups = self.spec.rate_groups.iter();
                match groups.find(|group| group.name.as_str() == name) {
                    Some(group) => Ok(Some(group.limit)),
                    None => {
                        let message = format!("the VM has no rate group \"{}\"", crate::text::brief(name));
                        Err(Failure::new(Kind::NotFound, "RATE_GROUP_NOT_FOUND", message))
                    }
                }
            }
        }
    }

    async fn store_limit(&mut self, target: &Target, limit: Option<RateLimit>) -> Result<(), Failure> {
        let wire = limit.map(|limit| v1::RateLimit {
            bytes_per_second: limit.bytes_per_second,
            operations_per_second: limit.operations_per_second,
            burst_bytes: limit.burst_bytes,
            burst_operations: limit.burst_operations,
        });
        self.change_spec(|record| {
            let spec = record.spec.get_or_insert_default();
            match target {
                Target::Disk(name) => {
                    let disk = spec.disks.iter_mut().find(|disk| disk.name == *name);
                    if let Some(disk) = disk {
                        disk.rate_limit = wire;
                    }
                }
                Target::Group(name) => {
                    let group = spec.rate_groups.iter_mut().find(|group| group.name == *name);
                    if let Some(group) = group {
                        group.limit = wire;
                    }
                }
            }
        })
        .await
    }

    /// What came of a task.
    pub(super) async fn on_outcome(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Attached(name, serial, result) => {
                if let Some(plug) = self.disks.take_plug(&name, serial) {
                    self.on_attached(&name, result, plug.waiters).await;
                }
            }
            Outcome::Detached(name, serial, result) => {
                if let Some(plug) = self.disks.take_plug(&name, serial) {
                    self.on_detached(&name, result, plug.waiters).await;
                }
            }
            Outcome::Resized(name, reply, result) => {
                if let (Ok(size), Some(_)) = (&result, &self.instance) {
                    self.disks.entry(&name).capacity = *size;
                    self.publish();
                }
                answer([reply], &result.map(|_| self.state()));
            }
            Outcome::Limited(target, before, reply, result) => {
                if result.is_err()
                    && let Err(failure) = self.store_limit(&target, before).await
                {
                    tracing::error!(vm = self.record.name, %failure, "a limit that was refused stays in the spec");
                }
                self.publish();
                answer([reply], &result.map(|()| self.state()));
            }
            Outcome::State(state) => self.on_state(state),
            Outcome::Looked(changes, Ok(_)) if changes != self.disks.changes() => self.look(),
            Outcome::Looked(_, Ok(disks)) => self.converge(&disks).await,
            Outcome::Looked(_, Err(error)) => {
                tracing::debug!(vm = self.record.name, %error, "the vmm does not say which disks it has");
            }
        }
    }

    async fn on_attached(
        &mut self,
        name: &str,
        result: Result<Vec<FileId>, AttachError>,
        waiters: Vec<Reply>,
    ) {
        match result {
            Ok(ids) => {
                self.settle_attached(name, Some(ids)).await;
                self.look();
                answer(waiters, &Ok(self.state()));
            }
            Err(AttachError::Refused(failure)) => {
                tracing::info!(vm = self.record.name, disk = name, %failure, "a disk could not be attached");
                self.drop_disk(name).await;
                answer(waiters, &Err(failure));
            }
            Err(AttachError::Unknown(failure)) => {
                tracing::warn!(vm = self.record.name, disk = name, %failure, "an attach is unclear");
                self.disks.entry(name).message.clone_from(&failure.message);
                self.publish();
                self.look();
                answer(waiters, &Err(failure));
            }
        }
    }

    async fn settle_attached(&mut self, name: &str, ids: Option<Vec<FileId>>) {
        if let (Some(instance), Some(ids)) = (&mut self.instance, ids) {
            instance.set_disk(name, Some(ids));
        }
        let attachment = self.disks.entry(name);
        attachment.phase = AttachmentPhase::Attached;
        attachment.message.clear();
        let generation = self.record.generation;
        if let Some(run) = &mut self.record.instance {
            run.attaching.retain(|noted| noted != name);
            if run.attaching.is_empty() {
                run.generation = generation;
            }
        }
        self.persist().await;
        self.publish();
    }

    async fn on_detached(&mut self, name: &str, result: Result<(), Failure>, waiters: Vec<Reply>) {
        match result {
            Ok(()) => {
                self.drop_disk(name).await;
                answer(waiters, &Ok(self.state()));
            }
            Err(failure) => {
                tracing::info!(vm = self.record.name, disk = name, %failure, "a disk could not be detached");
                let attachment = self.disks.entry(name);
                attachment.phase = AttachmentPhase::Attached;
                attachment.message.clone_from(&failure.message);
                self.publish();
                if failure.kind == Kind::Unavailable {
                    self.look();
                }
                answer(waiters, &Err(failure));
            }
        }
    }

    /// A disk is gone from the machine.
    pub(super) async fn on_disk_gone(&mut self, gone: vmm::DiskDetached) {
        let vmm::DiskDetached { name, forced } = gone;
        tracing::info!(
            vm = self.record.name,
            disk = name,
            forced,
            "a disk is gone from the machine"
        );
        if !self.spec.disks.iter().any(|disk| disk.name.as_str() == name) {
            return;
        }
        let asked = self
            .record
            .instance
            .as_ref()
            .is_some_and(|run| run.ejecting.contains(&name));
        let plug = self.disks.get_mut(&name).and_then(|known| known.plug.take());
        match plug {
            Some(plug) if plug.kind != PlugKind::Attach => {
                plug.task.abort();
                self.drop_disk(&name).await;
                answer(plug.waiters, &Ok(self.state()));
            }
            // An answer about it is on its way, and says the last word.
            Some(plug) => self.disks.entry(&name).plug = Some(plug),
            None if asked => self.drop_disk(&name).await,
            None => self.ejected(&name),
        }
    }

    /// The guest has ejected a disk by itself.
    fn ejected(&mut self, name: &str) {
        if let Some(instance) = &mut self.instance {
            instance.set_disk(name, None);
        }
        self.disks.remove(name);
        *self.disks.entry(name) = Attachment::new(
            AttachmentPhase::Pending,
            "the guest ejected it; attach it again, or start the VM anew, to plug it in",
        );
        self.publish();
    }

    /// Removes a disk that the machine does not have from the spec, whatever the store says to that: what it keeps is
    /// put right at the next start of the daemon.
    async fn drop_disk(&mut self, name: &str) {
        let (record, spec) = self.without(name);
        let spec = spec.unwrap_or_else(|_| self.spec.clone());
        (self.record, self.spec) = (record, spec);
        self.forget_disk(name);
        self.persist().await;
        self.publish();
    }

    /// Removes a disk that the machine does not have from the spec.
    async fn remove_from_spec(&mut self, name: &str) -> Result<(), Failure> {
        let (record, spec) = self.without(name);
        let spec = spec?;
        self.host.store.put(&record).await.map_err(store_failure)?;
        (self.record, self.spec) = (record, spec);
        self.forget_disk(name);
        Ok(())
    }

    fn without(&self, name: &str) -> (VmRecord, Result<VmSpec, Violations>) {
        let mut record = self.record.clone();
        let spec = without_disk(&mut record, name);
        (record, spec)
    }

    fn forget_disk(&mut self, name: &str) {
        self.disks.remove(name);
        self.host.disks.give_back(&self.record.name, Some(name));
        if let Some(instance) = &mut self.instance {
            instance.set_disk(name, None);
        }
    }

    /// Writes a changed spec; nothing is changed when that fails.
    async fn change_spec(&mut self, change: impl FnOnce(&mut VmRecord)) -> Result<(), Failure> {
        let mut record = self.record.clone();
        change(&mut record);
        record.generation += 1;
        let generation = record.generation;
        if let Some(run) = record.instance.as_mut().filter(|run| run.attaching.is_empty()) {
            run.generation = generation;
        }
        let spec = VmSpec::try_from(&*record.spec.get_or_insert_default())?;
        self.host.store.put(&record).await.map_err(store_failure)?;
        (self.record, self.spec) = (record, spec);
        Ok(())
    }

    /// Writes a changed record of the run; nothing is changed when that fails.
    async fn change_run(
        &mut self,
        change: impl FnOnce(&mut crate::store::InstanceRecord),
    ) -> Result<(), Failure> {
        let mut record = self.record.clone();
        change(record.instance.get_or_insert_default());
        self.host.store.put(&record).await.map_err(store_failure)?;
        self.record = record;
        Ok(())
    }

    /// Asks the `vmm` which disks it has.
    pub(super) fn look(&mut self) {
        if let Some(client) = self.instance.as_ref().and_then(|instance| instance.client()) {
            let changes = self.disks.changes();
            self.disks
                .tasks
                .spawn(async move { Outcome::Looked(changes, plug::look(client).await) });
        }
    }

    /// Makes what is known agree with what the machine has. What is under way is left to its own end.
    async fn converge(&mut self, present: &[vmm::DiskStats]) {
        if self.instance.is_none() {
            return;
        }
        let names: Vec<_> = self.spec.disks.iter().map(|disk| disk.name.to_string()).collect();
        for name in &names {
            if self.disks.plug(name).is_some() {
                continue;
            }
            let run = self.record.instance.clone().unwrap_or_default();
            let stats = present.iter().find(|stats| stats.name == *name);
            match stats {
                Some(stats) => {
                    if run.attaching.contains(name) {
                        self.settle_attached(name, None).await;
                    }
                    let attachment = self.disks.entry(name);
                    attachment.capacity = stats.capacity_bytes;
                    if attachment.phase != AttachmentPhase::Attached {
                        *attachment = Attachment::new(AttachmentPhase::Attached, "");
                        attachment.capacity = stats.capacity_bytes;
                    }
                }
                None if run.attaching.contains(name) || run.ejecting.contains(name) => {
                    tracing::info!(
                        vm = self.record.name,
                        disk = name,
                        "not in the machine: leaves the spec"
                    );
                    self.drop_disk(name).await;
                }
                None => {
                    let known = self.disks.get(name);
                    if known.is_none_or(|known| known.phase != AttachmentPhase::Pending) {
                        self.ejected(name);
                    }
                }
            }
        }
        for stats in present.iter().filter(|stats| !names.contains(&stats.name)) {
            // Left by an attach whose end nobody saw.
            tracing::warn!(
                vm = self.record.name,
                disk = stats.name,
                "a disk that is not in the spec is taken away"
            );
            if let Some(client) = self.instance.as_ref().and_then(|instance| instance.client()) {
                let op = Op::DetachDisk(vmm::DetachDisk {
                    name: stats.name.clone(),
                    force: true,
                });
                tokio::spawn(async move { client.request(op, &[]).await.is_ok() });
            }
        }
        self.publish();
    }

    /// Ends what is under way with disks, because the process has ended: an attach has failed, a detach is done.
    /// Returns who is to be told, once the record is written.
    pub(super) fn settle_disks(&mut self) -> Vec<(Result<(), Failure>, Vec<Reply>)> {
        let mut told = Vec::new();
        let plugs = self.disks.end_plugs();
        // An attach whose end nobody saw has failed, too.
        let run = self.record.instance.clone().unwrap_or_default();
        for name in run.attaching {
            let (record, spec) = self.without(&name);
            if let Ok(spec) = spec {
                (self.record, self.spec) = (record, spec);
                self.forget_disk(&name);
            }
        }
        for (name, plug) in plugs {
            if plug.kind == PlugKind::Attach {
                let message = format!(
                    "VM \"{}\" ended while disk \"{name}\" was attached",
                    self.record.name
                );
                told.push((Err(Failure::precondition("NOT_RUNNING", message)), plug.waiters));
                continue;
            }
            let (record, spec) = self.without(&name);
            if let Ok(spec) = spec {
                (self.record, self.spec) = (record, spec);
                self.forget_disk(&name);
            }
            told.push((Ok(()), plug.waiters));
        }
        self.disks.clear();
        told
    }
}

/// Removes a disk from a record, with its slot and what is noted of it.
pub fn without_disk(record: &mut VmRecord, name: &str) -> Result<VmSpec, Violations> {
    let spec = record.spec.get_or_insert_default();
    spec.disks.retain(|disk| disk.name != name);
    let spec = VmSpec::try_from(&*spec);
    if let Some(hardware) = &mut record.hardware {
        hardware.disk_slots.remove(name);
    }
    record.generation += 1;
    let generation = record.generation;
    if let Some(run) = &mut record.instance {
        run.attaching.retain(|noted| noted != name);
        run.ejecting.retain(|noted| noted != name);
        if run.attaching.is_empty() {
            run.generation = generation;
        }
    }
    spec
}

fn validate(wire: &v1::DiskSpec) -> Result<Disk, Violations> {
    let mut found = Violations::default();
    match Disk::new(&mut found, "disk", wire) {
        Some(disk) => found.or(disk),
        None => Err(found),
    }
}

/// Problems of a spec with the disk at `index` added, as problems of a request that has that disk only.
fn renamed(violations: Violations, index: usize) -> Failure {
    let prefix = format!("spec.disks[{index}]");
    let renamed = violations.0.into_iter().map(|mut violation| {
        if let Some(rest) = violation.field.strip_prefix(&prefix) {
            violation.field = format!("disk{rest}");
        } else if violation.field == "spec.disks" {
            violation.field = "disk".to_owned();
            violation.description = format!("together with the VM's other disks: {}", violation.description);
        }
        violation
    });
    Violations(renamed.collect()).into()
}

//! Attaching: the disk goes into the spec, then into the machine.

use vm_lifecycle::admission::Place;
use vmmd_api::v1::{self, AttachmentPhase};
use vmmd_host::{
    capacity::placement,
    failure::{Failure, Kind},
    ledger::FileId,
};
use vmmd_spec::{
    Violations,
    disk::{Bus, Disk, MAX_SATA, Source},
    vm::{MAX_DISKS_AND_NICS, VmSpec},
};
use vmmd_store::store_failure;

use crate::{
    control::Client,
    files,
    node::check,
    registry::vms::command::Reply,
    vm::{
        actor::{
            Actor, answer,
            attachments::{Attachment, Plug, PlugKind},
            plug::{self, AttachError, Outcome, Plugged},
        },
        machine::{
            self,
            change::{self, Live},
            limits,
        },
    },
};

impl Actor {
    pub(super) async fn attach(
        &mut self,
        place: Place,
        mut wire: v1::DiskSpec,
        reply: Reply,
    ) -> Result<(), (Failure, Reply)> {
        self.host.disks.fill_in(&mut wire);
        let mut disk = match validate(&wire) {
            Ok(disk) => disk,
            Err(violations) => return Err((violations.into(), reply)),
        };
        disk.set_pod(self.spec.pod.as_ref());
        let name = disk.name.to_string();
        let client = match place {
            Place::Machine if disk.bus != Bus::Virtio => {
                return Err((machine::no_hot_plug("attached", &name), reply));
            }
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
        // An update has taken it from the spec, and the guest has not ejected it yet.
        if change::running_disks(&self.record)
            .iter()
            .any(|known| known.name == name)
        {
            return Err((self.busy(&name), reply));
        }
        if let Err(failure) = self.add_to_spec(wire, &disk, client.is_some()).await {
            return Err((failure, reply));
        }
        match client {
            Some(client) => self.plug_in(client, disk, vec![reply]),
            None => {
                self.publish();
                let message = format!("disk \"{name}\" is in the spec: the next start plugs it in");
                self.tell(v1::EventSeverity::Normal, "DiskAttached", &message);
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
        let plugged = change::running_disks(&self.record)
            .iter()
            .any(|known| known.name == name);
        match client {
            Some(client) if !plugged => {
                let noted = self.change_run(|run| run.attaching.push(name)).await;
                match noted {
                    Ok(()) => self.plug_in(client, disk, vec![reply]),
                    Err(failure) => return Err((failure, reply)),
                }
            }
            _ => {
                let run = self.record.instance.as_ref();
                // An attach withdraws an earlier detach that the guest has not completed.
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

    async fn add_to_spec(&mut self, wire: v1::DiskSpec, disk: &Disk, running: bool) -> Result<(), Failure> {
        let name = disk.name.to_string();
        let hardware = self.record.hardware.clone().unwrap_or_default();
        let of_run = self.record.instance.as_ref().and_then(|run| run.hardware.clone());
        let slot = machine::free_slot(disk.bus, &[&hardware, &of_run.unwrap_or_default()]).filter(|_| {
            let spec = &self.spec;
            spec.disks.len() + spec.nics.len() + spec.shares.len() < MAX_DISKS_AND_NICS
        });
        let Some(slot) = slot else {
            let message = match disk.bus {
                Bus::Virtio => format!(
                    "VM \"{}\" has {MAX_DISKS_AND_NICS} disks, NICs and shares, as many as there are slots: detach one first",
                    self.record.name
                ),
                Bus::Sata { .. } => format!(
                    "VM \"{}\" has {MAX_SATA} disks on DISK_BUS_SATA, as many as there are ports: detach one first",
                    self.record.name
                ),
            };
            return Err(Failure::new(Kind::Exhausted, "NO_FREE_SLOT", message));
        };
        let mut record = self.record.clone();
        let spec = record.spec.get_or_insert_default();
        spec.disks.push(wire);
        let index = spec.disks.len() - 1;
        let spec = VmSpec::try_from(&*spec).map_err(|violations| renamed(violations, index))?;
        let mut problems = files::outside(&spec, &self.host.config.roots, Some(&self.spec));
        if !running {
            // A machine that runs opens it in a moment.
            let vm = (self.uid, self.record.name.as_str());
            let checking = check::changed(&self.host, vm, &spec, Some(&self.spec));
            problems.extend(self.unless_stopped(checking).await?);
        }
        for problem in &mut problems {
            // The request has that disk only.
            problem.message = problem
                .message
                .replacen(&format!("spec.disks[{index}]"), "disk", 1);
        }
        placement::refuse(&problems)?;
        record
            .hardware
            .get_or_insert_default()
            .disk_slots
            .insert(name.clone(), slot);
        record.generation += 1;
        if let Source::Path { path, .. } = &disk.source {
            // The request names the file that is at the path now.
            record.files.remove(&files::key(path));
        }
        if let Some(run) = record.instance.as_mut().filter(|_| running) {
            run.attaching.push(name.clone());
        }
        let disks = std::slice::from_ref(disk);
        let taken = self
            .host
            .disks
            .take(&self.record.name, disks, |_| "disk".to_owned());
        taken.map_err(|failure| match failure.reason {
            // The request is about that disk, as one for a VM is about the VM.
            "DISK_NOT_FOUND" => Failure {
                kind: Kind::NotFound,
                ..failure
            },
            _ => failure,
        })?;
        if let Err(error) = self.host.store.put(&record).await {
            change::hold_disks(&self.host, &self.record);
            return Err(store_failure(error));
        }
        (self.record, self.spec) = (record, spec);
        Ok(())
    }

    pub(in crate::vm::actor) fn plug_in(&mut self, client: Client, disk: Disk, waiters: Vec<Reply>) {
        let name = disk.name.to_string();
        let serial = self.disks.serial();
        let hardware = self.record.hardware.clone().unwrap_or_default();
        let (host, of) = (std::sync::Arc::clone(&self.host), name.clone());
        let (limited, uid) = (std::sync::Arc::clone(&self.host), self.uid);
        let spec = change::machine(&self.record, &self.spec);
        let known = files::any_of(&self.record.files);
        let task = self.disks.tasks.spawn(async move {
            // The disk's buffers take memory, its threads are tasks.
            let paths = files::named(&spec, &host.sources());
            let renewing = host
                .pools
                .files
                .run(&paths, move || limits::renew(&limited, uid, &spec));
            if let Err(error) = renewing.await {
                tracing::error!(%uid, %error, "set the limits of a running VM again");
            }
            let result = plug::attach(host, client, disk, known, hardware).await;
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

    pub(super) async fn on_attached(
        &mut self,
        name: &str,
        result: Result<Plugged, AttachError>,
        waiters: Vec<Reply>,
    ) {
        match result {
            Ok(Plugged { ids, known }) => {
                self.record.files.extend(known);
                self.settle_attached(name, Some(ids)).await;
                self.look();
                answer(waiters, &Ok(self.state()));
            }
            Err(AttachError::Refused(failure)) => {
                tracing::info!(vm = self.record.name, disk = name, %failure, "a disk could not be attached");
                let run = self.record.instance.as_ref();
                let noted = run.is_some_and(|run| run.attaching.iter().any(|noted| noted == name));
                let dropped = noted && self.drop_disk(name).await.is_ok();
                if !dropped {
                    // An update has put it into the spec, where it stays.
                    *self.disks.entry(name) =
                        Attachment::new(AttachmentPhase::Pending, failure.message.clone());
                    self.publish();
                }
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

    pub(super) async fn settle_attached(&mut self, name: &str, ids: Option<Vec<FileId>>) {
        if let (Some(instance), Some(ids)) = (&mut self.instance, ids) {
            instance.set_disk(name, Some(ids));
        }
        let attachment = self.disks.entry(name);
        attachment.phase = AttachmentPhase::Attached;
        attachment.message.clear();
        if let Some(run) = &mut self.record.instance {
            run.attaching.retain(|noted| noted != name);
        }
        change::take_over(&mut self.record, &Live::Attach(name.to_owned()));
        change::settle(&mut self.record);
        self.persist().await;
        self.publish();
        let message = format!("disk \"{name}\" is plugged in");
        self.tell(v1::EventSeverity::Normal, "DiskAttached", &message);
    }
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

//! Detaching: the guest ejects the disk, or it is taken away, and then it leaves the spec.

use std::time::Duration;

use tokio::time::Instant;
use vm_lifecycle::admission::Place;
use vmm_protocol::vmm;
use vmmd_api::v1::{AttachmentPhase, EventSeverity};
use vmmd_host::failure::{Failure, Kind};
use vmmd_spec::vm::Boot;

use crate::{
    control::Client,
    registry::vms::command::Reply,
    vm::{
        actor::{
            Actor, answer,
            attachments::{Attachment, Plug, PlugKind},
            plug::{self, Outcome, no_disk},
        },
        machine::{
            self,
            change::{self, Live},
        },
    },
};

impl Actor {
    pub(super) async fn detach(
        &mut self,
        place: Place,
        name: &str,
        timeout: Duration,
        force: bool,
        reply: Reply,
    ) -> Result<(), (Failure, Reply)> {
        let in_machine = change::running_disks(&self.record)
            .iter()
            .any(|disk| disk.name == name);
        if !in_machine && !self.spec.disks.iter().any(|disk| disk.name.as_str() == name) {
            return Err((no_disk(name), reply));
        }
        // A detach must leave a valid spec.
        if let Err(failure) = self.can_spare(name) {
            return Err((failure, reply));
        }
        let attachment = self.disks.get(name);
        let absent = attachment.is_some_and(|attachment| attachment.phase == AttachmentPhase::Pending);
        if place == Place::Spec || absent {
            if let Err(failure) = self.remove_from_spec(name).await {
                return Err((failure, reply));
            }
            self.publish();
            let message = format!("disk \"{name}\" is not in the spec any more");
            self.tell(EventSeverity::Normal, "DiskDetached", &message);
            answer([reply], &Ok(self.state()));
            return Ok(());
        }
        if change::is_on_sata(change::running_disks(&self.record), name) {
            return Err((machine::no_hot_plug("detached", name), reply));
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

    /// Refused when the VM needs the disk, by its spec.
    fn can_spare(&self, name: &str) -> Result<(), Failure> {
        if let Boot::Disk { disk, .. } = &self.spec.boot
            && disk.as_str() == name
        {
            let message = format!(
                "VM \"{}\" boots from disk \"{name}\" (spec.boot.fromDisk): name another disk there first",
                self.record.name
            );
            return Err(Failure::precondition("BOOT_DISK", message));
        }
        self.without(name).1.map(drop).map_err(Failure::from)
    }

    pub(in crate::vm::actor) fn unplug(
        &mut self,
        client: Client,
        name: &str,
        deadline: Instant,
        force: bool,
        waiters: Vec<Reply>,
    ) {
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

    pub(super) async fn on_detached(&mut self, name: &str, result: Result<(), Failure>, waiters: Vec<Reply>) {
        match result {
            Ok(()) => self.end_detach(name, waiters).await,
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
    pub(in crate::vm::actor) async fn on_disk_gone(&mut self, gone: vmm::DiskDetached) {
        let vmm::DiskDetached { name, forced } = gone;
        tracing::info!(
            vm = self.record.name,
            disk = name,
            forced,
            "a disk is gone from the machine"
        );
        let in_spec = self.spec.disks.iter().any(|disk| disk.name.as_str() == name);
        if !in_spec
            && !change::running_disks(&self.record)
                .iter()
                .any(|disk| disk.name == name)
        {
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
                self.end_detach(&name, plug.waiters).await;
            }
            // An answer about it is on its way, and says the last word.
            Some(plug) => self.disks.entry(&name).plug = Some(plug),
            None if asked || !in_spec => self.end_detach(&name, Vec::new()).await,
            None => self.ejected(&name),
        }
    }

    /// The machine does not have a disk any more, as was asked.
    async fn end_detach(&mut self, name: &str, waiters: Vec<Reply>) {
        let dropped = self.drop_disk(name).await;
        if dropped.is_ok() {
            self.tell_detached(name);
        }
        answer(waiters, &dropped.map(|()| self.state()));
    }

    fn tell_detached(&self, name: &str) {
        let message = format!("disk \"{name}\" is gone from the machine");
        self.tell(EventSeverity::Normal, "DiskDetached", &message);
    }

    /// Records that the guest has ejected a disk without a request.
    pub(super) fn ejected(&mut self, name: &str) {
        if let Some(instance) = &mut self.instance {
            instance.set_disk(name, None);
        }
        if let Some(run) = &mut self.record.instance {
            run.ejecting.retain(|noted| noted != name);
        }
        change::take_over(&mut self.record, &Live::Detach(name.to_owned()));
        self.disks.remove(name);
        *self.disks.entry(name) = Attachment::new(
            AttachmentPhase::Pending,
            "the guest ejected it; attach it again, or restart the VM, to plug it in",
        );
        self.publish();
        let message = format!("the guest has ejected disk \"{name}\" by itself; it is still in the spec");
        self.tell(EventSeverity::Warning, "DiskEjected", &message);
    }
}

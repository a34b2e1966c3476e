//! Reconciles the known state of the disks with the machine, while the machine runs and after its
//! end.

use vmm_protocol::vmm::{self, request::Op};
use vmmd_api::v1::AttachmentPhase;
use vmmd_host::failure::Failure;

use crate::{
    registry::vms::command::Reply,
    vm::{
        actor::{
            Actor,
            attachments::{Attachment, PlugKind},
            plug::{self, Outcome},
        },
        machine::change,
    },
};

impl Actor {
    /// Asks the `vmm` which disks, NICs and shares it has.
    pub(in crate::vm::actor) fn look(&mut self) {
        self.look_at_plugged();
        if let Some(client) = self.instance.as_ref().and_then(|instance| instance.client()) {
            let changes = self.disks.changes();
            self.disks
                .tasks
                .spawn(async move { Outcome::Looked(changes, plug::look(client).await) });
        }
    }

    /// Reconciles the known state with the machine's disks. Skips disks with an operation under
    /// way.
    pub(super) async fn converge(&mut self, present: &[vmm::DiskStats]) {
        if self.instance.is_none() {
            return;
        }
        let names: Vec<_> = self.spec.disks.iter().map(|disk| disk.name.to_string()).collect();
        let of_run = change::running_disks(&self.record)
            .iter()
            .map(|disk| disk.name.clone());
        let of_run: Vec<_> = of_run.collect();
        for name in &names {
            if self.disks.plug(name).is_some() {
                continue;
            }
            let run = self.record.instance.clone().unwrap_or_default();
            let stats = present.iter().find(|stats| stats.name == *name);
            match stats {
                Some(stats) => {
                    if run.attaching.contains(name) || !of_run.contains(name) {
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
                    self.leave(name).await;
                }
                // An update has put it into the spec; the machine never had it.
                None if !of_run.contains(name) => self.disks.entry(name).phase = AttachmentPhase::Pending,
                None => {
                    let known = self.disks.get(name);
                    if known.is_none_or(|known| known.phase != AttachmentPhase::Pending) {
                        self.ejected(name);
                    }
                }
            }
        }
        // The machine keeps a disk that an update removed from the spec until the guest ejects it.
        for name in of_run.iter().filter(|name| !names.contains(name)) {
            match present.iter().find(|stats| stats.name == *name) {
                Some(stats) => self.disks.entry(name).capacity = stats.capacity_bytes,
                None if self.disks.plug(name).is_none() => self.leave(name).await,
                None => {}
            }
        }
        let known = |stats: &&vmm::DiskStats| names.contains(&stats.name) || of_run.contains(&stats.name);
        for stats in present.iter().filter(|stats| !known(stats)) {
            // An attach with an unknown result has left this disk.
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

    async fn leave(&mut self, name: &str) {
        if let Err(failure) = self.drop_disk(name).await {
            tracing::warn!(vm = self.record.name, disk = name, %failure, "a disk stays in the spec");
        }
    }

    /// Ends the operations on disks because the process has ended: an attach has failed, a detach
    /// is done. Returns the waiters with their results; the caller answers them once the record is
    /// written.
    pub(in crate::vm::actor) fn settle_disks(&mut self) -> Vec<(Result<(), Failure>, Vec<Reply>)> {
        let mut told = Vec::new();
        let plugs = self.disks.end_plugs();
        // An attach with an unknown result has failed, too.
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
            let dropped = spec.map(|spec| {
                (self.record, self.spec) = (record, spec);
                self.forget_disk(&name);
            });
            told.push((dropped.map_err(Failure::from), plug.waiters));
        }
        self.disks.clear();
        told
    }
}

//! Another size for a disk that the VM has.

use std::sync::Arc;

use vm_lifecycle::admission::Place;
use vmmd_api::v1::AttachmentPhase;
use vmmd_host::failure::Failure;
use vmmd_spec::disk::Disk;

use crate::{
    registry::vms::command::Reply,
    vm::{
        actor::{
            Actor,
            plug::{self, Outcome, no_disk},
        },
        machine::change,
    },
};

impl Actor {
    pub(super) async fn resize(
        &mut self,
        place: Place,
        name: &str,
        size: u64,
        reply: Reply,
    ) -> Result<(), (Failure, Reply)> {
        // The one that the machine has may be another than the spec says by now.
        let in_machine = change::running_disks(&self.record)
            .iter()
            .find(|disk| disk.name == name);
        let in_spec = || self.spec.disks.iter().find(|disk| disk.name.as_str() == name);
        let found = in_machine.and_then(change::validated);
        let Some(disk) = found.or_else(|| in_spec().cloned()) else {
            return Err((no_disk(name), reply));
        };
        if disk.read_only {
            let message = format!("disk \"{name}\" of VM \"{}\" is read-only", self.record.name);
            return Err((Failure::precondition("DISK_READ_ONLY", message), reply));
        }
        if place == Place::Spec {
            self.resize_offline(disk, size, reply);
            return Ok(());
        }
        let attachment = self.disks.get(name);
        let settled = attachment.is_none_or(|attachment| attachment.phase == AttachmentPhase::Attached);
        match self.running_client() {
            Ok(_) if !settled => Err((self.busy(name), reply)),
            Ok(client) => {
                let (host, of) = (Arc::clone(&self.host), name.to_owned());
                self.disks.tasks.spawn(async move {
                    let result = plug::resize(host, client, disk, size).await;
                    Outcome::Resized(of, reply, result)
                });
                Ok(())
            }
            Err(failure) => Err((failure, reply)),
        }
    }

    /// Resizes the file of a VM without a process. A copy of the tables or a reservation can take minutes: a start waits for
    /// it, other requests do not.
    fn resize_offline(&mut self, disk: Disk, size: u64, reply: Reply) {
        let (host, offline) = (Arc::clone(&self.host), Arc::clone(&self.disks.offline));
        let name = disk.name.to_string();
        // In a task of its own: a VM that is deleted meanwhile does not leave a disk of the DiskService half noted.
        let whole = tokio::spawn(async move {
            let _offline = offline.lock_owned().await;
            plug::resize_file(&host, &disk, size).await
        });
        self.disks.tasks.spawn(async move {
            let ended = whole.await;
            let result = ended.unwrap_or_else(|error| Err(Failure::internal(error.to_string())));
            Outcome::Resized(name, reply, result)
        });
    }
}

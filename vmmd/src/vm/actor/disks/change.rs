//! Another size for a disk that the VM has.

use proto::v1::AttachmentPhase;

use crate::{
    failure::Failure,
    vm::{
        actor::{
            Actor, Reply, answer,
            plug::{self, Outcome, no_disk},
        },
        admission::Place,
        change,
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
}

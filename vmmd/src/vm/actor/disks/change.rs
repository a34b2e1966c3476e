//! Another size or another limit for a disk that the VM has.

use std::sync::Arc;

use proto::{
    model::disk::{Disk, Limit, RateLimit},
    v1::{self, AttachmentPhase},
};

use crate::{
    failure::{Failure, Kind},
    vm::{
        actor::{
            Actor, Reply, Target, answer,
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

    pub(super) async fn limit(
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
        let live = &mut self.disks.live;
        let number = live.limits.entry(target.clone()).or_default().begin(before);
        let mut turn = live.row.join();
        self.disks.tasks.spawn(async move {
            turn.come().await;
            let result = plug::limit(client, target.clone(), limit).await;
            Outcome::Limited(target, number, limit, reply, result)
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

    pub(super) async fn store_limit(
        &mut self,
        target: &Target,
        limit: Option<RateLimit>,
    ) -> Result<(), Failure> {
        let wire = limit.map(|limit| v1::RateLimit {
            bytes_per_second: limit.bytes_per_second,
            operations_per_second: limit.operations_per_second,
            burst_bytes: limit.burst_bytes,
            burst_operations: limit.burst_operations,
        });
        self.change_spec(|record| {
            let of_run = record.instance.iter_mut().filter_map(|run| run.spec.as_mut());
            for spec in record.spec.iter_mut().chain(of_run) {
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
            }
        })
        .await
    }
}

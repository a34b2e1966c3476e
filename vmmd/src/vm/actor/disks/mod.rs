//! Requests about the VM's disks, and their state machine.
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
//! The spec has a disk before the `vmm` receives the request to plug the disk in, and until the
//! disk is gone from the machine. After a restart, the daemon relies on the disks that the `vmm`
//! reports. `attaching` and `ejecting` of the instance's record say how to treat a disk that the
//! `vmm` does not report.
//!
//! A disk that a guest ejects without a request stays in the spec as `Pending`: the guest does not
//! decide which disks a VM has. An attach of the same disk or the next start plugs the disk in
//! again.

mod attach;
mod change;
mod converge;
mod detach;
mod spec;

pub use self::spec::without_disk;
use vm_lifecycle::admission::{self, admit_disk};
use vmmd_host::failure::{Failure, Kind};
use vmmd_objects::context::Context;

use super::{Actor, answer, plug::Outcome};
use crate::{
    control::Client,
    registry::vms::command::{DiskRequest, Reply},
};

impl Actor {
    pub(super) async fn on_disk_request(&mut self, context: &Context, request: DiskRequest, reply: Reply) {
        let asked = match &request {
            DiskRequest::Attach(_) => admission::DiskRequest::Attach,
            DiskRequest::Detach { .. } => admission::DiskRequest::Detach,
            DiskRequest::Resize { .. } => admission::DiskRequest::Resize,
        };
        let place = match admit_disk(self.situation(), asked) {
            Ok(place) => place,
            Err(refusal) => return answer([reply], &Err(refusal.into_failure(&self.record.name))),
        };
        if let Err(failure) = self.expected(context) {
            return answer([reply], &Err(failure));
        }
        if let DiskRequest::Detach { disk, .. } = &request
            && self.has_begun(context)
            && !self.spec.disks.iter().any(|known| known.name.as_str() == disk)
        {
            return answer([reply], &Ok(self.state()));
        }
        self.admitted(context);
        let result = match request {
            DiskRequest::Attach(wire) => self.attach(place, wire, reply).await,
            DiskRequest::Detach { disk, timeout, force } => {
                self.detach(place, &disk, timeout, force, reply).await
            }
            DiskRequest::Resize { disk, size } => self.resize(place, &disk, size, reply).await,
        };
        if let Err((failure, reply)) = result {
            answer([reply], &Err(failure));
        }
    }

    /// Returns the client of the running `vmm`, or the reason why there is none.
    pub(super) fn running_client(&self) -> Result<Client, Failure> {
        let Some(instance) = &self.instance else {
            let refusal = admission::Refusal::NotRunning;
            return Err(refusal.into_failure(&self.record.name));
        };
        let client = instance.client().map(|client| client.traced(&self.trace));
        client.ok_or_else(|| {
            let message = format!("the vmm process of VM \"{}\" doesn't answer", self.record.name);
            Failure::new(Kind::Unavailable, "VMM_UNRESPONSIVE", message)
        })
    }

    pub(super) fn busy(&self, disk: &str) -> Failure {
        let message = format!(
            "disk \"{disk}\" of VM \"{}\" is being attached or detached: wait, or detach it with force",
            self.record.name
        );
        Failure::precondition("BUSY", message)
    }

    /// Handles the result of a disk task.
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
                }
                self.publish();
                answer([reply], &result.map(|_| self.state()));
            }
            Outcome::Applied(path, live, applied, result) => {
                self.on_applied(path, &live, &applied, result).await;
            }
            Outcome::Medium(path, live, applied, result) => {
                self.on_medium(path, &live, &applied, result).await;
            }
            Outcome::Guest(guest) => self.on_looked_at_guest(guest),
            Outcome::Access(number, result) => self.on_access(number, result).await,
            Outcome::State(state) => self.on_state(state),
            Outcome::Identified(disks) => self.on_identified(disks),
            Outcome::ShareAttached(path, live, applied, result) => {
                self.on_share_attached(path, &live, &applied, result).await;
            }
            Outcome::PluggedLooked(changes, Ok(stats)) => self.converge_plugged(changes, &stats).await,
            Outcome::PluggedLooked(_, Err(error)) => {
                tracing::debug!(vm = self.record.name, %error, "the vmm does not say which NICs and shares it has");
            }
            Outcome::Looked(changes, Ok(_)) if changes != self.disks.changes() => self.look(),
            Outcome::Looked(_, Ok(disks)) => self.converge(&disks).await,
            Outcome::Looked(_, Err(error)) => {
                tracing::debug!(vm = self.record.name, %error, "the vmm does not say which disks it has");
            }
        }
    }
}

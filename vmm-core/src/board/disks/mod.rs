//! The disks of a machine, which can be attached and detached while the machine runs.
//!
//! ```text
//!            attach             image open          eject, force, reset           image closed
//!  (nothing) ──────▶ opening ──────────▶ fitted ─────────────────────────▶ leaving ─────────────▶ told as detached
//!                       └──────────────────────── detach ────────────────────▲
//! ```
//!
//! An *opening* disk has its name and its slot, and is on no bus. A thread opens the image, and no
//! other thread waits for the open, however long the host takes. Pauses, resumes and resets
//! meanwhile ignore the disk, which is plugged in after them. A detach and the end of the machine
//! cancel it.
//!
//! A *fitted* disk has its function on the PCI bus. The guest's eject takes the function off the
//! bus on the vCPU's thread, and does nothing else. The owner of this struct does the rest on the
//! next notification: a fitted disk whose function is not on the bus leaves.
//!
//! A *leaving* disk ends on a thread of its own, however long the image's host takes for the
//! requests in flight. The disk's name stays taken until then; its slot does not. All waits for it
//! have a deadline: those of a forced detach, of a pause and a reset (the disk may still write to
//! guest memory), and of the end of the machine.

mod opening;
#[cfg(test)]
mod tests;

use std::{
    io,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use block::Image;
use devices::{
    component::Component,
    pci::HotPlug,
    virtio::{
        blk::{BlkControl, OperationStats},
        rate::Limiter,
        transport::VirtioPciDevice,
    },
};
use tracing::error;
use vmm_protocol::{
    machine,
    vmm::{self, ErrorKind},
};
use vmmd_spec::{disk::RateLimit, topology::Topology};

use self::opening::{Opener, Opening};
use super::{
    assemble::{
        Fds, Sockets,
        disk::{self, Groups, Locks},
    },
    leaving::{Leaving, Phase},
};
use crate::{
    lifecycle::{Detached, Failure, LimitTarget, Pluggable, Progress, Token},
    migration::Mirrored,
};

/// Time that the requests in flight of a forcibly detached disk have before the caller gets an
/// error about the delay.
const FORCE_TIMEOUT: Duration = Duration::from_secs(10);

/// A disk in its slot.
pub(super) struct Fitted {
    pub name: String,
    pub slot: u8,
    /// The guest can write to it.
    pub writable: bool,
    pub device: VirtioPciDevice,
    pub control: BlkControl,
    /// Its own, or its group's.
    pub limiter: Option<Arc<Limiter>>,
    pub group: Option<String>,
}

/// See the module.
pub(super) struct Disks {
    opening: Vec<Opening>,
    fitted: Vec<Fitted>,
    leaving: Vec<Leaving>,
    groups: Groups,
    topology: Topology,
    sockets: Sockets,
    hotplug: Arc<HotPlug>,
    /// How images of disks that are attached are opened.
    opener: Opener,
    /// Results that the driver has not collected yet.
    answers: Vec<(Token, Result<(), Failure>)>,
}

impl Disks {
    /// Disks of a machine that notifies its guest of changes through `hotplug`.
    pub fn new(sockets: Sockets, hotplug: Arc<HotPlug>, spec: &machine::Machine) -> Self {
        let groups = spec.rate_groups.iter();
        let groups = groups.map(|(name, limit)| (name.clone(), Limiter::new(disk::limits(*limit))));
        Self::with(
            sockets,
            hotplug,
            groups.collect(),
            spec.topology,
            Arc::new(disk::open),
        )
    }

    fn with(
        sockets: Sockets,
        hotplug: Arc<HotPlug>,
        groups: Groups,
        topology: Topology,
        opener: Opener,
    ) -> Self {
        Self {
            opening: Vec::new(),
            fitted: Vec::new(),
            leaving: Vec::new(),
            groups,
            topology,
            sockets,
            hotplug,
            opener,
            answers: Vec::new(),
        }
    }

    /// Adds a disk that exists when the machine is switched on.
    pub fn fit(&mut self, spec: &machine::Disk, fds: &mut Fds, locks: Locks) -> Result<(), Failure> {
        let image = disk::open_locked(spec, fds, locks)?;
        self.fit_open(spec, image)
    }

    /// The same with an image that is open.
    pub fn fit_open(&mut self, spec: &machine::Disk, image: Box<dyn Image>) -> Result<(), Failure> {
        let fitted = disk::plug(&self.sockets, &self.groups, spec, image)?;
        self.fitted.push(fitted);
        Ok(())
    }

    /// Components of the disks that take part in the machine's pause, resume and reset.
    pub fn components(&mut self) -> impl Iterator<Item = &mut dyn Component> {
        self.fitted
            .iter_mut()
            .map(|disk| &mut disk.device as &mut dyn Component)
    }

    /// Slots of the disks that the guest has, by the names of their components.
    pub fn slots(&self) -> impl Iterator<Item = (u8, String)> {
        self.fitted
            .iter()
            .map(|disk| (disk.slot, disk.device.name().to_owned()))
    }

    /// See [`Machine::attach_disk`](crate::lifecycle::Machine::attach_disk).
    pub fn attach(&mut self, token: Token, wire: &vmm::Disk, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        let spec = machine::Disk::new(wire, fds.len(), self.topology, |group| {
            self.groups.contains_key(group)
        });
        let spec = spec.map_err(|violations| Failure {
            kind: ErrorKind::Invalid,
            message: violations.to_string(),
        })?;
        let refused = |message| {
            Err(Failure {
                kind: ErrorKind::State,
                message,
            })
        };
        self.sweep();
        if self.opening.iter().any(|opening| opening.spec.name == spec.name) {
            return refused(format!("a disk {} is being attached already", spec.name));
        }
        if self.fitted.iter().any(|disk| disk.name == spec.name) {
            return refused(format!("there is a disk {} already", spec.name));
        }
        if self.leaving.iter().any(|disk| disk.name == spec.name) {
            return refused(format!("a disk {} is still being taken away", spec.name));
        }
        let slot = spec.slot.number();
        let reserved = |opening: &Opening| opening.spec.slot.number() == slot;
        if self.sockets.pci.is_taken(slot) || self.opening.iter().any(reserved) {
            return refused(format!("PCI slot {slot} is taken"));
        }
        let notifier = self.sockets.notifier.clone();
        let opening = Opening::begin(&self.opener, token, spec, Fds::new(fds), notifier)?;
        self.opening.push(opening);
        Ok(())
    }

    /// Plugs in the disks whose images are open, and queues an error for those whose images failed
    /// to open.
    fn plug_opened(&mut self) {
        let mut opened = Vec::new();
        self.opening.retain(|opening| match opening.take() {
            None => true,
            Some(image) => {
                opened.push((opening.token, opening.spec.clone(), image));
                false
            }
        });
        for (token, spec, image) in opened {
            let result = image
                .and_then(|image| disk::plug(&self.sockets, &self.groups, &spec, image))
                .map(|fitted| {
                    self.hotplug.plugged(fitted.slot);
                    self.fitted.push(fitted);
                });
            self.answers.push((token, result));
        }
    }

    /// See [`Machine::detach_disk`](crate::lifecycle::Machine::detach_disk).
    pub fn detach(&mut self, token: Token, name: &str, force: bool) -> Result<Progress, Failure> {
        self.sweep();
        if let Some(index) = self.opening.iter().position(|opening| opening.spec.name == name) {
            let opening = self.opening.remove(index);
            let failure = Failure {
                kind: ErrorKind::State,
                message: format!("disk {name} was detached before its image was open"),
            };
            self.answers.push((opening.token, Err(failure)));
            self.leaving.push(opening.cancel(force));
        }
        match self.fitted.iter().position(|disk| disk.name == name) {
            Some(index) if force => {
                let disk = self.fitted.remove(index);
                self.hotplug.withdraw(disk.slot, || {
                    self.sockets.pci.remove_by_force(disk.slot, &self.sockets.mmio);
                });
                self.leave(disk, true);
            }
            Some(index) => {
                if let Some(disk) = self.fitted.get(index) {
                    self.hotplug.ask(disk.slot);
                }
            }
            None if self.leaving.iter().any(|disk| disk.name == name) => {}
            None => return Err(not_found(name)),
        }
        match self.leaving.iter_mut().find(|disk| disk.name == name) {
            Some(disk) if force => {
                disk.waiting.push((token, Instant::now() + FORCE_TIMEOUT));
                Ok(Progress::Pending)
            }
            _ => Ok(Progress::Done),
        }
    }

    /// Has those leave that the guest ejected.
    fn sweep(&mut self) {
        let pci = &self.sockets.pci;
        let ejected: Vec<Fitted> = self
            .fitted
            .extract_if(.., |disk| !pci.holds(disk.slot, &disk.device.function()))
            .collect();
        for disk in ejected {
            self.leave(disk, false);
        }
    }

    fn leave(&mut self, disk: Fitted, forced: bool) {
        let rest = (disk.control, disk.limiter);
        let notifier = self.sockets.notifier.clone();
        let which = (Pluggable::Disk, disk.name, forced);
        self.leaving
            .push(Leaving::end(which, disk.device, rest, notifier));
    }

    /// See [`Machine::collect_detached`](crate::lifecycle::Machine::collect_detached).
    pub fn collect_detached(&mut self) -> Vec<Detached> {
        self.sweep();
        let gone = self
            .leaving
            .extract_if(.., |disk| disk.look(Instant::now()) == Phase::Gone);
        gone.map(|disk| {
            let waiting = disk.waiting.into_iter();
            self.answers.extend(waiting.map(|(token, _)| (token, Ok(()))));
            Detached {
                what: Pluggable::Disk,
                name: disk.name,
                forced: disk.forced,
            }
        })
        .collect()
    }

    /// See [`Machine::collect_answers`](crate::lifecycle::Machine::collect_answers).
    pub fn collect_answers(&mut self) -> Vec<(Token, Result<(), Failure>)> {
        self.plug_opened();
        let now = Instant::now();
        for disk in &mut self.leaving {
            self.answers.extend(disk.give_up(now));
        }
        std::mem::take(&mut self.answers)
    }

    /// See [`Machine::next_deadline`](crate::lifecycle::Machine::next_deadline).
    pub fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.leaving.iter().flat_map(|disk| &disk.waiting);
        waiting.map(|(_, deadline)| *deadline).min()
    }

    /// Waits until nothing that is off the bus touches guest memory any more.
    pub fn wait_for_leaving(&mut self, deadline: Instant) -> Result<Option<String>, Failure> {
        self.sweep();
        let mut devices = self.leaving.iter_mut().filter(|disk| disk.has_device);
        let still = devices.find_map(|disk| disk.ends_after(deadline).transpose());
        still.transpose()
    }

    /// See [`Machine::resize_disk`](crate::lifecycle::Machine::resize_disk).
    pub fn resize(&self, name: &str, capacity: Option<u64>) -> Result<(), Failure> {
        let found = self.fitted.iter().find(|disk| disk.name == name);
        let disk = found.ok_or_else(|| not_found(name))?;
        let before = disk.control.capacity();
        if let Some(smaller) = capacity.filter(|capacity| *capacity < before) {
            return Err(Failure {
                kind: ErrorKind::Invalid,
                message: format!("disk {name} has {before} bytes and can't shrink to {smaller}"),
            });
        }
        disk.control.grow(capacity).map_err(|error| Failure {
            kind: match error.kind() {
                io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => ErrorKind::Invalid,
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Resources,
                _ => ErrorKind::Image,
            },
            message: format!("growing disk {name}: {error}"),
        })
    }

    /// See [`Machine::commit_disks`](crate::lifecycle::Machine::commit_disks).
    pub fn commit(&self) -> Result<(), Failure> {
        for disk in &self.fitted {
            disk.control.commit().map_err(|error| Failure {
                kind: ErrorKind::Image,
                message: format!("writing what disk {} holds back: {error}", disk.name),
            })?;
        }
        Ok(())
    }

    /// Begins to copy these disks, while their guest uses them.
    pub fn mirror(&self, names: &[String]) -> Result<Vec<Mirrored>, Failure> {
        let mirrored = names.iter().map(|name| {
            let found = self.fitted.iter().find(|disk| disk.name == *name);
            let disk = found.ok_or_else(|| not_found(name))?;
            let mirror = disk.control.mirror().map_err(|error| Failure {
                kind: ErrorKind::Image,
                message: format!("copying disk {name}: {error}"),
            })?;
            Ok(Mirrored {
                name: name.clone(),
                mirror,
            })
        });
        mirrored.collect()
    }

    /// See [`Machine::unlock_disks`](crate::lifecycle::Machine::unlock_disks).
    pub fn unlock(&self) -> Result<(), Failure> {
        for disk in self.fitted.iter().filter(|disk| disk.writable) {
            match disk.control.unlock() {
                Ok(()) => {}
                // No other process takes this image over: the receiver of a migration continues
                // with a copy.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                Err(error) => {
                    return Err(Failure {
                        kind: ErrorKind::Image,
                        message: format!("giving disk {} to another process: {error}", disk.name),
                    });
                }
            }
        }
        Ok(())
    }

    /// Takes the locks again that [`unlock`](Self::unlock) gave up: all, or none.
    pub fn lock(&self) -> Result<(), Failure> {
        for (index, disk) in self.fitted.iter().enumerate().filter(|(_, disk)| disk.writable) {
            let (kind, why) = match disk.control.lock() {
                Ok(true) => continue,
                // An image that does not support unlocking is still locked.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => continue,
                Ok(false) => (ErrorKind::InUse, "in use by another VM or program".to_owned()),
                Err(error) => (ErrorKind::Image, format!("lock the image: {error}")),
            };
            for taken in self.fitted.iter().take(index).filter(|disk| disk.writable) {
                if let Err(error) = taken.control.unlock() {
                    error!(disk = taken.name, %error, "giving a lock back");
                }
            }
            return Err(Failure {
                kind,
                message: format!("disk {}: {why}", disk.name),
            });
        }
        Ok(())
    }

    /// See [`Machine::set_rate_limit`](crate::lifecycle::Machine::set_rate_limit).
    pub fn set_rate_limit(&mut self, target: &LimitTarget, limit: RateLimit) -> Result<(), Failure> {
        let limits = disk::limits(limit);
        let name = match target {
            LimitTarget::Group(name) => {
                let group = self.groups.get(name).ok_or_else(|| Failure {
                    kind: ErrorKind::NotFound,
                    message: format!("there is no rate group {name}"),
                })?;
                group.set(limits);
                return Ok(());
            }
            LimitTarget::Disk(name) => name,
        };
        let disk = self.fitted.iter_mut().find(|disk| disk.name == *name);
        let disk = disk.ok_or_else(|| not_found(name))?;
        match (&disk.group, &disk.limiter) {
            (Some(group), _) => {
                return Err(Failure {
                    kind: ErrorKind::State,
                    message: format!("disk {name} has the limit of rate group {group}: change that one"),
                });
            }
            (None, Some(limiter)) => limiter.set(limits),
            (None, None) => {
                let limiter = Limiter::new(limits);
                disk.control.set_limiter(Some(Arc::clone(&limiter)));
                disk.limiter = Some(limiter);
            }
        }
        Ok(())
    }

    /// See [`Machine::disk_stats`](crate::lifecycle::Machine::disk_stats).
    pub fn stats(&self) -> Vec<vmm::DiskStats> {
        let mut disks: Vec<&Fitted> = self.fitted.iter().collect();
        disks.sort_by_key(|disk| disk.slot);
        disks.into_iter().map(stats).collect()
    }

    /// See [`Machine::holds_requests`](crate::lifecycle::Machine::holds_requests).
    pub fn holds_requests(&self) -> bool {
        self.fitted.iter().any(|disk| disk.control.stats().held > 0)
    }
}

fn not_found(name: &str) -> Failure {
    Failure {
        kind: ErrorKind::NotFound,
        message: format!("there is no disk {name}"),
    }
}

fn stats(disk: &Fitted) -> vmm::DiskStats {
    let stats = disk.control.stats();
    let operation = |stats: &OperationStats| {
        Some(vmm::OperationStats {
            requests: stats.requests,
            bytes: stats.bytes,
            errors: stats.errors,
            total_ns: stats.total_ns,
            latency_us_log2: stats.latency_us_log2.to_vec(),
        })
    };
    vmm::DiskStats {
        name: disk.name.clone(),
        capacity_bytes: disk.control.capacity(),
        read: operation(&stats.read),
        write: operation(&stats.write),
        flush: operation(&stats.flush),
        discard: operation(&stats.discard),
        in_flight: stats.in_flight,
        throttled: stats.throttled,
        held: stats.held,
        waiting: stats.waiting,
    }
}

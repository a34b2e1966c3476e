//! The disks of a machine, which come and go while it lives.
//!
//! ```text
//!            attach              eject, force, reset           image closed
//!  (nothing) ──────▶ fitted ─────────────────────────▶ leaving ─────────────▶ told as detached
//! ```
//!
//! A *fitted* disk has its function on the PCI bus. The guest's eject takes the function off the bus on the vCPU's
//! thread, and nothing more; what follows is done by the owner of this struct when it is told: a fitted disk whose
//! function is no longer on the bus leaves. A *leaving* disk ends on a thread of its own, however long its image's
//! host takes for the requests under way; its name is taken until then, its slot is not. Nobody waits for it but with
//! a deadline: who takes it away by force, a pause and a reset (it may still write to guest memory), and the end of the
//! machine.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    time::{Duration, Instant},
};

use devices::{
    component::Component,
    pci::HotPlug,
    rate::Limiter,
    thread::{self, ThreadKind},
    virtio::{
        blk::{BlkControl, OperationStats},
        transport::VirtioPciDevice,
    },
};
use proto::{
    model::{disk::RateLimit, machine, topology::Topology},
    vmm::{self, ErrorKind},
};
use tracing::error;

use super::assemble::{
    Fds, Sockets,
    disk::{self, Groups},
};
use crate::lifecycle::{Detached, Failure, LimitTarget, Notice};

/// How long a disk that is taken away by force may take for its requests under way before whoever asked is told that
/// it takes longer.
const FORCE_TIMEOUT: Duration = Duration::from_secs(10);

/// A disk in its slot.
pub(super) struct Fitted {
    pub name: String,
    pub slot: u8,
    pub device: VirtioPciDevice,
    pub control: BlkControl,
    /// Its own, or its group's.
    pub limiter: Option<Arc<Limiter>>,
    pub group: Option<String>,
}

/// A disk that is off the bus.
struct Leaving {
    name: String,
    forced: bool,
    /// Says that it is gone. Disconnected without that when it will never be: requests are under way for ever.
    gone: Receiver<()>,
    state: LeavingState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LeavingState {
    /// Requests are under way.
    Draining,
    /// Its threads have ended and its image is closed.
    Gone,
    /// Nobody knows what its requests do.
    Lost,
}

/// See the module.
pub(super) struct Disks {
    fitted: Vec<Fitted>,
    leaving: Vec<Leaving>,
    groups: Groups,
    topology: Topology,
    sockets: Sockets,
    hotplug: Arc<HotPlug>,
}

impl Disks {
    /// Of a machine whose guest is told of changes through `hotplug`.
    pub fn new(sockets: Sockets, hotplug: Arc<HotPlug>, spec: &machine::Machine) -> Self {
        let groups = spec.rate_groups.iter();
        let groups = groups.map(|(name, limit)| (name.clone(), Limiter::new(disk::limits(*limit))));
        Self {
            fitted: Vec::new(),
            leaving: Vec::new(),
            groups: groups.collect(),
            topology: spec.topology,
            sockets,
            hotplug,
        }
    }

    /// Puts in a disk that is there when the machine is switched on.
    pub fn fit(&mut self, spec: &machine::Disk, fds: &mut Fds) -> Result<(), Failure> {
        let fitted = disk::build(&self.sockets, &self.groups, spec, fds)?;
        self.fitted.push(fitted);
        Ok(())
    }

    /// Those that the machine's pause, resume and reset are for.
    pub fn components(&mut self) -> impl Iterator<Item = &mut dyn Component> {
        self.fitted
            .iter_mut()
            .map(|disk| &mut disk.device as &mut dyn Component)
    }

    /// See [`Machine::attach_disk`](crate::lifecycle::Machine::attach_disk).
    pub fn attach(&mut self, wire: &vmm::Disk, fds: Vec<OwnedFd>) -> Result<(), Failure> {
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
        if self.fitted.iter().any(|disk| disk.name == spec.name) {
            return refused(format!("there is a disk {} already", spec.name));
        }
        if self.leaving.iter().any(|disk| disk.name == spec.name) {
            return refused(format!("a disk {} is still being taken away", spec.name));
        }
        let slot = spec.slot.number();
        if self.sockets.pci.is_taken(slot) {
            return refused(format!("PCI device {slot} is taken"));
        }
        self.fit(&spec, &mut Fds::new(fds))?;
        self.hotplug.plugged(slot);
        Ok(())
    }

    /// See [`Machine::detach_disk`](crate::lifecycle::Machine::detach_disk).
    pub fn detach(&mut self, name: &str, force: bool) -> Result<(), Failure> {
        self.sweep();
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
                return Ok(());
            }
            None if self.leaving.iter().any(|disk| disk.name == name) => {}
            None => return Err(not_found(name)),
        }
        if !force {
            return Ok(());
        }
        let deadline = Instant::now() + FORCE_TIMEOUT;
        if self
            .leaving
            .iter_mut()
            .all(|disk| disk.name != name || disk.wait(deadline))
        {
            return Ok(());
        }
        Err(Failure {
            kind: ErrorKind::Internal,
            message: format!(
                "disk {name} is taken away from the guest, but requests to its image did not end in time; the image is \
                 closed when they do"
            ),
        })
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
        let (here, gone) = channel::<()>();
        let notifier = self.sockets.notifier.clone();
        let name = disk.name.clone();
        let end = move || {
            match disk.device.end() {
                Ok(()) => {
                    // Nobody receives this when the machine is gone.
                    let _machine_is_gone = here.send(());
                }
                Err(error) => error!(disk = disk.name, %error, "a disk can't be ended"),
            }
            drop(here);
            notifier.notify(Notice::Unplugged);
        };
        // Without a thread the disk is dropped here, which does not wait until it is drained: it is never told as gone.
        if let Err(error) = thread::spawn(ThreadKind::Helper, "unplug", end) {
            error!(disk = name, %error, "starting a thread that ends a disk");
        }
        self.leaving.push(Leaving {
            name,
            forced,
            gone,
            state: LeavingState::Draining,
        });
    }

    /// See [`Machine::collect_detached`](crate::lifecycle::Machine::collect_detached).
    pub fn collect_detached(&mut self) -> Vec<Detached> {
        self.sweep();
        let gone = self.leaving.extract_if(.., |disk| disk.wait(Instant::now()));
        gone.map(|disk| Detached {
            name: disk.name,
            forced: disk.forced,
        })
        .collect()
    }

    /// Waits until nothing that is off the bus touches guest memory or an image any more.
    pub fn wait_for_leaving(&mut self, deadline: Instant) -> Result<(), Failure> {
        self.sweep();
        match self
            .leaving
            .iter_mut()
            .find_map(|disk| (!disk.wait(deadline)).then_some(disk))
        {
            None => Ok(()),
            Some(disk) => Err(Failure {
                kind: ErrorKind::Internal,
                message: format!(
                    "requests of disk {}, which is being taken away, did not end",
                    disk.name
                ),
            }),
        }
    }

    /// With the vCPUs stopped: the new guest finds the slots as they are. A disk that the old one was asked for goes: it
    /// has no use of it any more, and whoever asked for it still waits.
    pub fn reset(&mut self, deadline: Instant) -> Result<(), Failure> {
        for slot in self.hotplug.reset() {
            self.sockets.pci.remove(slot, &self.sockets.mmio);
        }
        self.wait_for_leaving(deadline)
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

impl Leaving {
    /// Whether it is gone by then. One that is lost is not waited for.
    fn wait(&mut self, deadline: Instant) -> bool {
        if self.state == LeavingState::Draining {
            let left = deadline.saturating_duration_since(Instant::now());
            self.state = match self.gone.recv_timeout(left) {
                Ok(()) => LeavingState::Gone,
                Err(RecvTimeoutError::Timeout) => LeavingState::Draining,
                Err(RecvTimeoutError::Disconnected) => LeavingState::Lost,
            };
        }
        self.state == LeavingState::Gone
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

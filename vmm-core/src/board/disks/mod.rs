//! The disks of a machine, which can be attached and detached while the machine runs, as
//! [`plugs`](super::plugs) says.
//!
//! A disk that is attached is *opening* first: it has its name and its slot, and is on no bus. A
//! thread opens the image, and no other thread waits for the open, however long the host takes.
//! Pauses, resumes and resets meanwhile ignore the disk, which is plugged in after them. A detach
//! and the end of the machine cancel it.

mod opening;
#[cfg(test)]
mod tests;

use std::{
    io,
    ops::{Deref, DerefMut},
    os::fd::OwnedFd,
    sync::Arc,
};

use block::Image;
use devices::{
    ahci::{Drive, MediumError, Tray},
    pci::HotPlug,
    virtio::blk::{BlkControl, OperationStats},
    virtio::rate::Limiter,
};
use tracing::error;
use vmm_protocol::{
    machine::{self, DiskPlace},
    vmm::{self, ErrorKind, set_rate_limit::Target},
};
use vmmd_spec::{disk::RateLimit, topology::Topology};

use self::opening::{Opener, Opening, Purpose};
use super::{
    assemble::{
        Fds, Sockets,
        disk::{self, Groups},
    },
    plugs::Plugs,
};
use crate::{
    lifecycle::{Failure, Pluggable, Progress, Token, with_causes},
    migration::Mirrored,
};

/// Controls of a disk.
pub(super) struct Disk {
    /// The guest can write to it.
    pub writable: bool,
    /// Tray of a CD-ROM drive.
    pub tray: Option<Arc<Tray>>,
    pub control: BlkControl,
    /// Its own, or its group's.
    pub limiter: Option<Arc<Limiter>>,
    pub group: Option<String>,
}

/// See the module.
pub(super) struct Disks {
    plugs: Plugs<Disk>,
    opening: Vec<Opening>,
    groups: Groups,
    topology: Topology,
    /// How images of disks that are attached are opened.
    opener: Opener,
    /// Those at the ports of the SATA controller, by name, in the order of the spec. The controller is a component of
    /// its own.
    drives: Vec<(String, Disk)>,
}

impl Deref for Disks {
    type Target = Plugs<Disk>;

    fn deref(&self) -> &Plugs<Disk> {
        &self.plugs
    }
}

impl DerefMut for Disks {
    fn deref_mut(&mut self) -> &mut Plugs<Disk> {
        &mut self.plugs
    }
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
            plugs: Plugs::new(Pluggable::Disk, sockets, hotplug),
            opening: Vec::new(),
            groups,
            topology,
            opener,
            drives: Vec::new(),
        }
    }

    /// Adds a disk that exists when the machine is switched on.
    pub fn fit(&mut self, spec: &machine::Disk, image: Box<dyn Image>) -> Result<(), Failure> {
        let disk = disk::plug(&self.plugs.sockets, &self.groups, spec, image)?;
        self.plugs.fit(disk);
        Ok(())
    }

    /// The same for a port of the SATA controller; gives the drive.
    pub fn fit_drive(
        &mut self,
        spec: &machine::Disk,
        cdrom: bool,
        image: Box<dyn Image>,
    ) -> Result<Drive, Failure> {
        let (drive, disk) = disk::drive(&self.groups, spec, cdrom, image)?;
        self.drives.push((spec.name.clone(), disk));
        Ok(drive)
    }

    /// All disks, with their names.
    fn all(&self) -> impl Iterator<Item = (&str, &Disk)> {
        let plugged = self.plugs.iter().map(|disk| (disk.name.as_str(), &disk.control));
        plugged.chain(self.drives.iter().map(|(name, disk)| (name.as_str(), disk)))
    }

    /// The one of that name.
    fn named(&self, name: &str) -> Result<&Disk, Failure> {
        match self.drives.iter().find(|(drive, _)| drive == name) {
            Some((_, disk)) => Ok(disk),
            None => Ok(&self.plugs.get(name)?.control),
        }
    }

    /// Begins to attach a disk. The result comes from [`collect_answers`](Self::collect_answers); an
    /// error of this call is final.
    pub fn attach(&mut self, token: Token, wire: &vmm::Disk, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        let spec = machine::Disk::new(wire, fds.len(), self.topology, |group| {
            self.groups.contains_key(group)
        });
        let spec = spec?;
        let refused = |message| Err(Failure::of(ErrorKind::State, message));
        if self.opening.iter().any(|opening| opening.spec.name == spec.name) {
            return refused(format!("a disk {} is being attached already", spec.name));
        }
        let DiskPlace::Virtio(slot) = spec.place else {
            return refused(format!(
                "disk {}: a SATA disk is not plugged into a running machine",
                spec.name
            ));
        };
        if self.drives.iter().any(|(drive, _)| *drive == spec.name) {
            return refused(format!("there is a disk {} already", spec.name));
        }
        if self
            .opening
            .iter()
            .any(|opening| opening.spec.place == spec.place)
        {
            return refused(format!("PCI slot {} is taken", slot.number()));
        }
        self.plugs.check_free(&spec.name, slot)?;
        let notifier = self.sockets.notifier.clone();
        let purpose = Purpose::Attach;
        let opening = Opening::begin(&self.opener, token, spec, purpose, Fds::new(fds), notifier)?;
        self.opening.push(opening);
        Ok(())
    }

    /// Begins to replace the medium of a CD-ROM drive. The result comes from [`collect_answers`](Self::collect_answers);
    /// an error of this call is final.
    pub fn change_medium(
        &mut self,
        token: Token,
        wire: &vmm::Disk,
        force: bool,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Failure> {
        let spec = machine::Disk::new(wire, fds.len(), self.topology, |group| {
            self.groups.contains_key(group)
        })?;
        self.tray(&spec.name)?;
        if self.opening.iter().any(|opening| opening.spec.name == spec.name) {
            let message = format!("the medium of drive {} is being changed already", spec.name);
            return Err(Failure::of(ErrorKind::State, message));
        }
        let purpose = Purpose::Medium { force };
        let notifier = self.sockets.notifier.clone();
        let opening = Opening::begin(&self.opener, token, spec, purpose, Fds::new(fds), notifier)?;
        self.opening.push(opening);
        Ok(())
    }

    /// The tray of the CD-ROM drive of that name.
    fn tray(&self, name: &str) -> Result<&Arc<Tray>, Failure> {
        self.named(name)?.tray.as_ref().ok_or_else(|| {
            let message = format!("disk {name} is no CD-ROM drive");
            Failure::of(ErrorKind::Invalid, message)
        })
    }

    /// Puts a medium into a drive.
    fn load(&self, name: &str, image: Box<dyn Image>, force: bool) -> Result<(), Failure> {
        self.tray(name)?.change(image, force).map_err(|error| {
            let kind = match error {
                MediumError::Prevented => ErrorKind::State,
                MediumError::Gone => ErrorKind::Internal,
                MediumError::Image(_) => ErrorKind::Image,
            };
            Failure::of(kind, format!("disk {name}: {}", with_causes(&error)))
        })
    }

    /// Plugs in the disks whose images are open, and queues an error for those whose images failed
    /// to open.
    fn plug_opened(&mut self) {
        let mut opened = Vec::new();
        self.opening.retain(|opening| match opening.take() {
            None => true,
            Some(image) => {
                opened.push((opening.token, opening.spec.clone(), opening.purpose, image));
                false
            }
        });
        for (token, spec, purpose, image) in opened {
            if let Purpose::Medium { force } = purpose {
                let result = image.and_then(|image| self.load(&spec.name, image, force));
                self.plugs.answer(token, result);
                continue;
            }
            let disk = image.and_then(|image| disk::plug(&self.plugs.sockets, &self.groups, &spec, image));
            let result = disk.map(|disk| self.plugs.attach(disk));
            self.plugs.answer(token, result);
        }
    }

    /// Asks the guest for a disk, or takes it away. A disk whose image is not open yet is not
    /// attached, and its attach request gets an error.
    pub fn detach(&mut self, token: Token, name: &str, force: bool) -> Result<Progress, Failure> {
        if self.drives.iter().any(|(drive, _)| drive == name) {
            let message = format!("disk {name}: a SATA disk stays in a running machine");
            return Err(Failure::of(ErrorKind::State, message));
        }
        if let Some(index) = self.opening.iter().position(|opening| opening.spec.name == name) {
            let opening = self.opening.remove(index);
            let failure = Failure::of(
                ErrorKind::State,
                format!("disk {name} was detached before its image was open"),
            );
            self.plugs.answer(opening.token, Err(failure));
            self.plugs.add_leaving(opening.cancel(force));
        }
        self.plugs.detach(token, name, force)
    }

    /// See [`Machine::collect_answers`](crate::lifecycle::Machine::collect_answers).
    pub fn collect_answers(&mut self) -> Vec<(Token, Result<(), Failure>)> {
        self.plug_opened();
        self.plugs.collect_answers()
    }

    /// Enlarges a disk, and notifies the guest. `None` for the current size of a block device.
    pub fn resize(&self, name: &str, capacity: Option<u64>) -> Result<(), Failure> {
        let control = &self.named(name)?.control;
        let before = control.capacity();
        if let Some(smaller) = capacity.filter(|capacity| *capacity < before) {
            return Err(Failure::of(
                ErrorKind::Invalid,
                format!("disk {name} has {before} bytes and can't shrink to {smaller}"),
            ));
        }
        control.grow(capacity).map_err(|error| {
            Failure::of(
                match error.kind() {
                    io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => ErrorKind::Invalid,
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Resources,
                    _ => ErrorKind::Image,
                },
                format!("growing disk {name}: {error}"),
            )
        })
    }

    /// See [`Machine::commit_disks`](crate::lifecycle::Machine::commit_disks).
    pub fn commit(&self) -> Result<(), Failure> {
        for (name, disk) in self.all() {
            disk.control.commit().map_err(|error| {
                Failure::of(
                    ErrorKind::Image,
                    format!("writing what disk {name} holds back: {error}"),
                )
            })?;
        }
        Ok(())
    }

    /// Begins to copy these disks, while their guest uses them.
    pub fn mirror(&self, names: &[String]) -> Result<Vec<Mirrored>, Failure> {
        let mirrored = names.iter().map(|name| {
            let control = &self.named(name)?.control;
            let mirror = control
                .mirror()
                .map_err(|error| Failure::of(ErrorKind::Image, format!("copying disk {name}: {error}")))?;
            Ok(Mirrored {
                name: name.clone(),
                mirror,
            })
        });
        mirrored.collect()
    }

    /// Gives up the locks of the disks that the guest can write to, with all that it has written
    /// durable.
    pub fn unlock(&self) -> Result<(), Failure> {
        for (name, disk) in self.all().filter(|(_, disk)| disk.writable) {
            match disk.control.unlock() {
                Ok(()) => {}
                // No other process takes this image over: the receiver of a migration continues
                // with a copy.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                Err(error) => {
                    return Err(Failure::of(
                        ErrorKind::Image,
                        format!("giving disk {name} to another process: {error}"),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Takes the locks again that [`unlock`](Self::unlock) gave up: all, or none.
    pub fn lock(&self) -> Result<(), Failure> {
        let writable = || self.all().filter(|(_, disk)| disk.writable);
        for (index, (name, disk)) in writable().enumerate() {
            let (kind, why) = match disk.control.lock() {
                Ok(true) => continue,
                // An image that does not support unlocking is still locked.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => continue,
                Ok(false) => (ErrorKind::InUse, "in use by another VM or program".to_owned()),
                Err(error) => (ErrorKind::Image, format!("lock the image: {error}")),
            };
            for (taken, disk) in writable().take(index) {
                if let Err(error) = disk.control.unlock() {
                    error!(disk = taken, %error, "giving a lock back");
                }
            }
            return Err(Failure::of(kind, format!("disk {name}: {why}")));
        }
        Ok(())
    }

    /// Changes the limit of a disk, or of a group.
    pub fn set_rate_limit(&mut self, target: &Target, limit: RateLimit) -> Result<(), Failure> {
        let limits = disk::limits(limit);
        let name = match target {
            Target::Group(name) => {
                let group = self.groups.get(name).ok_or_else(|| {
                    Failure::of(ErrorKind::NotFound, format!("there is no rate group {name}"))
                })?;
                group.set(limits);
                return Ok(());
            }
            Target::Disk(name) => name,
        };
        let drive = self.drives.iter_mut().find(|(drive, _)| drive == name);
        let disk = match drive {
            Some((_, disk)) => disk,
            None => &mut self.plugs.get_mut(name)?.control,
        };
        match (&disk.group, &disk.limiter) {
            (Some(group), _) => {
                return Err(Failure::of(
                    ErrorKind::State,
                    format!("disk {name} has the limit of rate group {group}: change that one"),
                ));
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

    /// Counters of the disks, in the order of their slots, then of their ports.
    pub fn stats(&self) -> Vec<vmm::DiskStats> {
        let plugged = self.plugs.by_slot().into_iter();
        let plugged = plugged.map(|disk| stats(&disk.name, &disk.control));
        let drives = self.drives.iter().map(|(name, disk)| stats(name, disk));
        plugged.chain(drives).collect()
    }

    /// See [`Machine::holds_requests`](crate::lifecycle::Machine::holds_requests).
    pub fn holds_requests(&self) -> bool {
        self.all().any(|(_, disk)| disk.control.stats().held > 0)
    }
}

fn stats(name: &str, disk: &Disk) -> vmm::DiskStats {
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
        name: name.to_owned(),
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

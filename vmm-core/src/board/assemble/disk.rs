//! A disk.

use std::{collections::BTreeMap, sync::Arc};

use block::{Backing, Content, Image, OpenError, Qcow2Image, RawImage};
use devices::{
    ahci::{Drive, DriveOptions, NoMedium},
    virtio::{
        blk::{Blk, BlkOptions, OnError},
        rate::{Limiter, Limits},
    },
};
use vmm_protocol::{
    machine::{Disk, DiskLimit, DiskPlace, Machine},
    vmm::ErrorKind,
};
use vmmd_spec::disk::{self, Format, RateLimit};

use super::{Failure, Fds, Sockets};
use crate::{
    board::{self, plugs::Plugged},
    lifecycle::with_causes,
    memory::layout::Map,
    migration::ReceivedDisk,
};

/// The machine's rate groups, by name.
pub(in crate::board) type Groups = BTreeMap<String, Arc<Limiter>>;

/// When images that the guest can write to are locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::board) enum Locks {
    /// When they are opened.
    AtOnce,
    /// Later: another `vmm` has them.
    Later,
}

/// Images that are open before the machine is built, by the names of their disks.
pub(super) type Images = BTreeMap<String, Box<dyn Image>>;

/// Opens the images of the disks `names`, whose content is about to be received.
pub(super) fn open_received(
    spec: &Machine,
    fds: &mut Fds,
    names: &[String],
) -> Result<(Images, Vec<ReceivedDisk>), Failure> {
    let mut images = Images::new();
    let mut disks = Vec::new();
    for name in names {
        let invalid = |why: &str| {
            Failure::of(
                ErrorKind::Invalid,
                format!("disk {name} cannot be received: it {why}"),
            )
        };
        let disk = spec.disks.iter().find(|disk| disk.name == *name);
        let disk = disk.ok_or_else(|| invalid("is not one of the machine's"))?;
        if disk.read_only {
            return Err(invalid("is not to be written to"));
        }
        let image = open(disk, fds)?;
        let content = image
            .access()
            .and_then(|access| Content::new(access, image.capacity()));
        let content = content.map_err(|error| invalid(&format!("can't be written: {error}")))?;
        disks.push(ReceivedDisk::new(name.as_str(), content));
        images.insert(name.clone(), image);
    }
    Ok((images, disks))
}

/// Opens the image of `spec`, which takes as long as its file takes.
pub(in crate::board) fn open(spec: &Disk, fds: &mut Fds) -> Result<Box<dyn Image>, Failure> {
    open_locked(spec, fds, Locks::AtOnce)
}

/// The same with a choice of when the image is locked.
pub(in crate::board) fn open_locked(
    spec: &Disk,
    fds: &mut Fds,
    locks: Locks,
) -> Result<Box<dyn Image>, Failure> {
    open_image(spec, fds, locks).map_err(|failure| Failure {
        message: format!("disk {}: {}", spec.name, failure.message),
        ..failure
    })
}

/// Puts a disk with this image into its PCI slot.
pub(in crate::board) fn plug(
    sockets: &Sockets,
    groups: &Groups,
    spec: &Disk,
    image: Box<dyn Image>,
) -> Result<Plugged<board::disks::Disk>, Failure> {
    let name = format!("disk {}", spec.name);
    let DiskPlace::Virtio(slot) = spec.place else {
        let message = format!("{name}: a SATA disk is not plugged into a slot");
        return Err(Failure::of(ErrorKind::Invalid, message));
    };
    let (limiter, group) = limiter(groups, spec);
    let options = BlkOptions {
        name: spec.name.clone(),
        serial: spec.serial.clone(),
        queues: spec.queues,
        logical_block: spec.logical_block,
        on_error: on_error(spec),
        limiter: limiter.clone(),
    };
    let mut device = Blk::new(image, options);
    if sockets.map == Map::Bios {
        device = device.with_bios();
    }
    let control = device.control();
    let device = sockets.plug(&name, slot, Box::new(device))?;
    Ok(Plugged {
        name: spec.name.clone(),
        slot: slot.number(),
        device,
        control: board::disks::Disk {
            writable: !spec.read_only && spec.format != Format::Iso,
            tray: None,
            control,
            limiter,
            group,
        },
    })
}

/// A drive of the SATA controller with this image, and its control.
pub(in crate::board) fn drive(
    groups: &Groups,
    spec: &Disk,
    cdrom: bool,
    image: Box<dyn Image>,
) -> Result<(Drive, board::disks::Disk), Failure> {
    let (limiter, group) = limiter(groups, spec);
    let options = DriveOptions {
        name: spec.name.clone(),
        serial: spec.serial.clone(),
        cdrom,
        on_error: on_error(spec),
        limiter: limiter.clone(),
    };
    let name = format!("disk {}", spec.name);
    let drive = Drive::new(image, options);
    let drive = drive.map_err(Failure::during(ErrorKind::Invalid, &name))?;
    let control = board::disks::Disk {
        writable: !cdrom,
        tray: drive.tray(),
        control: drive.control(),
        limiter,
        group,
    };
    Ok((drive, control))
}

/// The limiter of a disk, and the group that it belongs to.
fn limiter(groups: &Groups, spec: &Disk) -> (Option<Arc<Limiter>>, Option<String>) {
    match &spec.limit {
        DiskLimit::None => (None, None),
        DiskLimit::Own(limit) => (Some(Limiter::new(limits(*limit))), None),
        DiskLimit::Group(group) => (groups.get(group).cloned(), Some(group.clone())),
    }
}

fn on_error(spec: &Disk) -> OnError {
    match spec.on_error {
        disk::OnError::Report => OnError::Report,
        disk::OnError::Pause => OnError::Hold,
    }
}

/// Converts a rate limit to the options of a limiter.
pub(in crate::board) fn limits(limit: RateLimit) -> Limits {
    Limits {
        bytes_per_second: limit.bytes_per_second,
        operations_per_second: limit.operations_per_second,
        burst_bytes: limit.burst_bytes,
        burst_operations: limit.burst_operations,
    }
}

fn open_image(spec: &Disk, fds: &mut Fds, locks: Locks) -> Result<Box<dyn Image>, Failure> {
    let Some(fd) = spec.fd else {
        return Ok(Box::new(NoMedium));
    };
    let fd = fds.take(fd)?;
    let later = locks == Locks::Later && !spec.read_only;
    match spec.format {
        Format::Qcow2 if later => Err(Failure::of(
            ErrorKind::Invalid,
            "a qcow2 image that the guest can write to does not go to another process",
        )),
        Format::Raw => {
            let image = match later {
                true => RawImage::open_unlocked(fd, false),
                false => RawImage::open(fd, spec.read_only),
            };
            let image = image.map_err(failure)?;
            Ok(Box::new(image.with_discard_granularity(spec.discard_granularity)))
        }
        Format::Iso => Ok(Box::new(RawImage::open_iso(fd).map_err(failure)?)),
        Format::Qcow2 => {
            let mut backing = Vec::with_capacity(spec.backing.len());
            for below in &spec.backing {
                let fd = fds.take(below.fd)?;
                backing.push(match below.format {
                    Format::Qcow2 => Backing::Qcow2(fd),
                    // The spec's validation lets no others through.
                    Format::Raw | Format::Iso => Backing::Raw(fd),
                });
            }
            let image = Qcow2Image::open(fd, spec.read_only, backing).map_err(failure)?;
            Ok(Box::new(image))
        }
    }
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn failure(error: OpenError) -> Failure {
    Failure::of(
        match error {
            OpenError::Host(..) => ErrorKind::Resources,
            OpenError::InUse => ErrorKind::InUse,
            _ => ErrorKind::Image,
        },
        with_causes(&error),
    )
}

//! Disks of a machine.

use vmmd_spec::{
    Violations,
    disk::{BootOrder, DEFAULT_QUEUES, Format, MAX_QUEUES, MAX_SATA, MAX_SERIAL, OnError, RateLimit},
    pci::{PciSlot, SATA_PORTS},
    topology::Topology,
};

use super::{Claims, FdIndex, boot_order};
use crate::vmm;

/// Longest chain of images below an overlay.
pub const MAX_BACKING: usize = 16;

/// Rate limit of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskLimit {
    /// Nothing.
    None,
    /// A limit of its own.
    Own(RateLimit),
    /// A group's limit, by the group's name.
    Group(String),
}

/// An image below an overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingImage {
    /// Open for reading.
    pub fd: FdIndex,
    /// [`Format::Raw`] or [`Format::Qcow2`].
    pub format: Format,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Unique in the machine, not empty.
    pub name: String,
    /// Image file or block device; `None` is a CD-ROM drive without a medium.
    pub fd: Option<FdIndex>,
    /// How it is to be read.
    pub format: Format,
    /// The images below a qcow2 overlay, the nearest first.
    pub backing: Vec<BackingImage>,
    /// The guest can't write to it.
    pub read_only: bool,
    /// 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Bytes of a logical block: 512 or 4096.
    pub logical_block: u32,
    /// Discard granularity of a block device's queue, in bytes; 0 without discard support. `None`
    /// if not read.
    pub discard_granularity: Option<u32>,
    /// Action on an error of the host.
    pub on_error: OnError,
    /// What limits it.
    pub limit: DiskLimit,
    /// What GET_ID answers.
    pub serial: String,
    /// Where it is.
    pub place: DiskPlace,
    /// Position in the boot order.
    pub boot_order: Option<BootOrder>,
}

/// Where a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskPlace {
    /// A virtio-blk device in this slot.
    Virtio(PciSlot),
    /// At this port of the SATA controller.
    Sata {
        /// Below [`MAX_SATA`].
        port: u8,
        /// A CD-ROM drive, else a disk.
        cdrom: bool,
    },
}

impl Disk {
    /// Validates a disk that is plugged into a machine with that many vCPUs and groups of these
    /// names. `wire` came with `fds` descriptors. Does not check whether the machine already uses
    /// that slot or name.
    pub fn new(
        wire: &vmm::Disk,
        fds: usize,
        topology: Topology,
        is_group: impl Fn(&str) -> bool,
    ) -> Result<Self, Violations> {
        let mut claims = Claims::of(fds);
        let disk = disk(&mut claims, wire, topology, is_group);
        claims.found.or(disk)
    }
}

pub(super) fn disk(
    claims: &mut Claims,
    wire: &vmm::Disk,
    topology: Topology,
    is_group: impl Fn(&str) -> bool,
) -> Disk {
    let field = format!("disk {}", wire.name);
    if wire.name.is_empty() {
        claims.add("disk", "has no name");
    }
    if wire.serial.len() > MAX_SERIAL {
        claims.add(&field, "serial too long");
    }
    let format = image_format(claims, &field, wire.format);
    if wire.empty && !wire.cdrom {
        claims.add(&field, "only a CD-ROM drive can be empty");
    }
    let fd = (!wire.empty).then(|| claims.fd(&field, wire.fd));
    Disk {
        name: wire.name.clone(),
        fd,
        format,
        backing: backing(claims, &field, wire, format),
        read_only: wire.read_only || wire.cdrom || format == Format::Iso,
        queues: queues(claims, &field, wire.queues, topology),
        logical_block: match wire.logical_block_bytes {
            0 | 512 => 512,
            4096 => 4096,
            other => {
                let wrong = format_args!("logical block must be 512 or 4096 bytes, is {other}");
                claims.add(&field, wrong);
                512
            }
        },
        discard_granularity: wire.discard_granularity_bytes,
        on_error: match vmm::OnError::try_from(wire.on_error) {
            Ok(vmm::OnError::Unspecified | vmm::OnError::Report) => OnError::Report,
            Ok(vmm::OnError::Pause) => OnError::Pause,
            Err(_) => {
                let wrong = format_args!("unknown on_error {}", wire.on_error);
                claims.add(&field, wrong);
                OnError::Report
            }
        },
        limit: match (&wire.rate_limit, wire.rate_group.as_str()) {
            (None, "") => DiskLimit::None,
            (Some(limit), "") => DiskLimit::Own(limit.into()),
            (limit, group) => {
                if limit.is_some() {
                    claims.add(&field, "a limit of its own and a rate group");
                }
                if !is_group(group) {
                    let wrong = format_args!("there is no rate group {group}");
                    claims.add(&field, wrong);
                }
                DiskLimit::Group(group.to_owned())
            }
        },
        serial: wire.serial.clone(),
        place: place(claims, &field, wire),
        boot_order: boot_order(
            claims,
            &field,
            wire.boot_order,
            wire.sata_port.is_none().then_some(wire.pci_slot),
        ),
    }
}

fn place(claims: &mut Claims, field: &str, wire: &vmm::Disk) -> DiskPlace {
    let Some(port) = wire.sata_port else {
        if wire.cdrom {
            claims.add(field, "a CD-ROM drive is at a SATA port");
        }
        return DiskPlace::Virtio(claims.slot(field, wire.pci_slot));
    };
    let port = u8::try_from(port)
        .ok()
        .filter(|port| usize::from(*port) < MAX_SATA);
    let port = port.unwrap_or_else(|| {
        claims.add(field, format_args!("SATA port must be 0 to {}", MAX_SATA - 1));
        0
    });
    if !claims.slots.insert(SATA_PORTS.start + u32::from(port)) {
        claims.add(field, format_args!("SATA port {port} is taken"));
    }
    if !wire.cdrom && wire.read_only {
        claims.add(field, "a SATA disk can be written to");
    }
    let cdrom = wire.cdrom;
    DiskPlace::Sata { port, cdrom }
}

fn image_format(claims: &mut Claims, field: &str, value: i32) -> Format {
    match vmm::ImageFormat::try_from(value) {
        Ok(vmm::ImageFormat::Unspecified | vmm::ImageFormat::Raw) => Format::Raw,
        Ok(vmm::ImageFormat::Qcow2) => Format::Qcow2,
        Ok(vmm::ImageFormat::Iso) => Format::Iso,
        Err(_) => {
            claims.add(field, format_args!("unknown format {value}"));
            Format::Raw
        }
    }
}

fn backing(claims: &mut Claims, field: &str, wire: &vmm::Disk, format: Format) -> Vec<BackingImage> {
    if !wire.backing.is_empty() && format != Format::Qcow2 {
        claims.add(field, "only a qcow2 image has others below it");
    }
    if wire.backing.len() > MAX_BACKING {
        let wrong = format_args!(
            "at most {MAX_BACKING} images below it, are {}",
            wire.backing.len()
        );
        claims.add(field, wrong);
        return Vec::new();
    }
    let numbered = wire.backing.iter().enumerate();
    let images = numbered.map(|(index, wire)| {
        let field = format!("{field}, backing {index}");
        let format = image_format(claims, &field, wire.format);
        if format == Format::Iso {
            claims.add(&field, "is no format of a backing image");
        }
        BackingImage {
            fd: claims.fd(&field, wire.fd),
            format,
        }
    });
    images.collect()
}

fn queues(claims: &mut Claims, field: &str, wanted: u32, topology: Topology) -> u16 {
    let number = match wanted {
        0 => topology.cores().clamp(1, DEFAULT_QUEUES),
        _ => wanted,
    };
    if number > MAX_QUEUES {
        claims.add(field, format_args!("at most {MAX_QUEUES} queues, are {number}"));
        return 1;
    }
    u16::try_from(number).unwrap_or(1)
}

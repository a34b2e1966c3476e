//! Disks: as a VM's spec has them, as the DiskService makes them, and the limits of what may flow.

mod limit;
mod new;

use std::path::{Path, PathBuf};

pub use self::{
    limit::{Limit, MAX_RATE, MIN_BYTES_PER_SECOND, RateGroup, RateLimit},
    new::{Content, MAX_SIZE, NewDisk, Preallocation, SECTOR, size},
};
use vmmd_api::v1::{self, disk_spec::Source as WireSource};

use super::{
    Violations,
    cloud_init::{self, SeedType},
    name::Name,
    pci::{PciSlot, SATA_PORTS},
    pod::{PodUid, PodVolume},
    vm::{absolute, name},
};

/// Longest serial in bytes (virtio 1.3, 5.2.6.1).
pub const MAX_SERIAL: usize = 20;
/// Queues of a disk that asks for no number, if there are as many vCPUs.
pub const DEFAULT_QUEUES: u32 = 4;
/// Most queues of a disk.
pub const MAX_QUEUES: u32 = 16;
/// Most disks on the bus SATA: as many as ICH9's controller has ports.
pub const MAX_SATA: usize = (SATA_PORTS.end - SATA_PORTS.start) as usize;

/// A disk of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Unique in the VM.
    pub name: Name,
    /// Where its content is.
    pub source: Source,
    /// The guest can't write to it. Always so for an ISO image.
    pub read_only: bool,
    /// At most [`MAX_SERIAL`] printable ASCII characters.
    pub serial: String,
    /// Whether the page cache is used.
    pub cache: Cache,
    /// 1 to [`MAX_QUEUES`]; 0 lets the `vmm` choose.
    pub queues: u32,
    /// 512 or 4096.
    pub logical_block: u32,
    /// Action when the node cannot carry out a request.
    pub on_error: OnError,
    /// How much may flow.
    pub limit: Limit,
    /// Raw content may begin as an image of another format does.
    pub any_content: bool,
    /// Where the guest finds it.
    pub bus: Bus,
    /// Position in the boot order.
    pub boot_order: Option<BootOrder>,
}

/// Bus on which a guest finds a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bus {
    /// A PCI function of its own.
    #[default]
    Virtio,
    /// A port of the SATA controller.
    Sata {
        /// A CD-ROM drive, else a disk.
        cdrom: bool,
    },
}

/// Position of a disk or NIC in the boot order of firmware.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootOrder(u8);

impl BootOrder {
    /// The last position.
    pub const MAX: u8 = 16;

    /// The position of a value of the API; none for 0. Notes a value above [`MAX`](Self::MAX).
    pub fn new(found: &mut Violations, field: &str, value: u32) -> Option<Self> {
        match u8::try_from(value) {
            Ok(0) => None,
            Ok(position) if position <= Self::MAX => Some(Self(position)),
            _ => {
                let most = Self::MAX;
                found.add(
                    format_args!("{field}.bootOrder"),
                    format_args!("must be 1 to {most}, or 0 for the default order, is {value}"),
                );
                None
            }
        }
    }

    /// Sorts devices as firmware tries them: those with a position first.
    pub fn sort<T>(devices: &mut [T], position: impl Fn(&T) -> Option<Self>) {
        devices.sort_by_key(|device| position(device).map_or(u8::MAX, |position| position.0));
    }
}

impl From<BootOrder> for u32 {
    fn from(position: BootOrder) -> Self {
        position.0.into()
    }
}

/// Where a disk's content is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file or block device of the node.
    Path {
        /// Absolute.
        path: PathBuf,
        /// How it is to be read.
        format: Format,
        /// A folder above it in which guests or other users of the node can make files.
        beneath: Option<PathBuf>,
    },
    /// A disk of the DiskService.
    Disk {
        /// Its name.
        name: Name,
        /// Format given in the manifest, if any; never ISO.
        format: Option<Format>,
    },
    /// A volume of the VM's pod: the file `disk.img` in a directory, or a block device.
    Pod {
        /// The volume.
        volume: PodVolume,
        /// How it is to be read.
        format: Format,
    },
    /// The seed of cloud-init, which the daemon makes.
    Seed,
    /// None: a CD-ROM drive without a medium.
    Empty,
}

/// How a disk image is to be read. Never guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Byte for byte.
    Raw,
    /// QCOW version 2 or 3.
    Qcow2,
    /// Byte for byte, with an ISO 9660 file system, never written to.
    Iso,
}

/// Whether the node's page cache is between the guest and the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Not where the file system can do without.
    #[default]
    Auto,
    /// Not at all (O_DIRECT).
    None,
    /// It is.
    Writeback,
}

/// Action when the node cannot carry out a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The guest gets an error.
    #[default]
    Report,
    /// The VM is paused.
    Pause,
}

impl Bus {
    /// Whether the number is the address of a disk on this bus: a PCI slot, or one of [`SATA_PORTS`].
    pub fn has(self, number: u32) -> bool {
        match self {
            Self::Virtio => PciSlot::try_from(number).is_ok(),
            Self::Sata { .. } => SATA_PORTS.contains(&number),
        }
    }
}

impl Disk {
    /// Validates `disk`; `field` is its path: `spec.disks[1]`, or `disk` in a request of its own.
    pub fn new(found: &mut Violations, field: &str, disk: &v1::DiskSpec) -> Option<Self> {
        let name = name(found, &format!("{field}.name"), &disk.name);
        let source = source(found, field, disk);
        let iso = matches!(
            source,
            Some(
                Source::Path {
                    format: Format::Iso,
                    ..
                } | Source::Pod {
                    format: Format::Iso,
                    ..
                }
            )
        );
        let cache = match v1::DiskCache::try_from(disk.cache) {
            Ok(v1::DiskCache::Unspecified) => Cache::Auto,
            Ok(v1::DiskCache::None) => Cache::None,
            Ok(v1::DiskCache::Writeback) => Cache::Writeback,
            Err(_) => unknown(found, field, "cache", disk.cache),
        };
        let on_error = match v1::DiskErrorPolicy::try_from(disk.on_error) {
            Ok(v1::DiskErrorPolicy::Unspecified | v1::DiskErrorPolicy::Report) => OnError::Report,
            Ok(v1::DiskErrorPolicy::Pause) => OnError::Pause,
            Err(_) => unknown(found, field, "onError", disk.on_error),
        };
        if disk.queues > MAX_QUEUES {
            found.add(
                format_args!("{field}.queues"),
                format_args!(
                    "must be 1 to {MAX_QUEUES}, or 0 to have it chosen, is {}",
                    disk.queues
                ),
            );
        }
        if ![0, 512, 4096].contains(&disk.logical_block_bytes) {
            found.add(
                format_args!("{field}.logicalBlockBytes"),
                format_args!(
                    "must be 512 (also when 0) or 4096, is {}",
                    disk.logical_block_bytes
                ),
            );
        }
        let limit = limit::of_disk(found, field, disk);
        let raw_file = |source: &Source| {
            matches!(
                source,
                Source::Path {
                    format: Format::Raw,
                    ..
                }
            )
        };
        if disk.any_content && source.as_ref().is_some_and(|source| !raw_file(source)) {
            found.add(
                format_args!("{field}.anyContent"),
                "is for a `path` with DISK_FORMAT_RAW only",
            );
        }
        let bus = bus(found, field, disk, iso);
        let boot_order = BootOrder::new(found, field, disk.boot_order);
        let name = name?;
        let serial = serial(found, field, &disk.serial, &name);
        Some(Self {
            name,
            source: source?,
            read_only: disk.read_only || iso || disk.cdrom,
            serial,
            cache,
            queues: disk.queues,
            logical_block: disk.logical_block_bytes.max(512),
            on_error,
            limit,
            any_content: disk.any_content,
            bus,
            boot_order,
        })
    }

    /// The disk with the data of this form.
    pub fn seed(kind: SeedType) -> Option<Self> {
        let name = Name::try_from(cloud_init::SEED).ok()?;
        Some(Self {
            name,
            source: Source::Seed,
            read_only: true,
            serial: cloud_init::SEED.to_owned(),
            cache: Cache::Writeback,
            queues: 1,
            logical_block: 512,
            on_error: OnError::Report,
            limit: Limit::None,
            any_content: true,
            bus: match kind {
                SeedType::NoCloud | SeedType::ConfigDrive | SeedType::Ignition => Bus::Virtio,
                // Windows Setup has no driver for virtio.
                SeedType::Sysprep => Bus::Sata { cdrom: true },
            },
            boot_order: None,
        })
    }

    /// The disk of the DiskService that it is, if any.
    pub fn named(&self) -> Option<&Name> {
        match &self.source {
            Source::Disk { name, .. } => Some(name),
            Source::Path { .. } | Source::Pod { .. } | Source::Seed | Source::Empty => None,
        }
    }

    /// Notes the VM's pod, which has the volume of the disk.
    pub fn set_pod(&mut self, pod: Option<&PodUid>) {
        if let Source::Pod { volume, .. } = &mut self.source {
            volume.pod = pod.cloned();
        }
    }
}

/// The bus, with the conditions of SATA. `iso` says whether the content is an ISO image by its format.
fn bus(found: &mut Violations, field: &str, disk: &v1::DiskSpec, iso: bool) -> Bus {
    let cdrom = disk.cdrom;
    match v1::DiskBus::try_from(disk.bus) {
        Ok(v1::DiskBus::Unspecified) if !cdrom => return Bus::Virtio,
        Ok(v1::DiskBus::Unspecified | v1::DiskBus::Sata) => {}
        Ok(v1::DiskBus::Virtio) => {
            if cdrom {
                let wrong = "must be DISK_BUS_SATA, or left out, with `cdrom`";
                found.add(format_args!("{field}.bus"), wrong);
            }
            return Bus::Virtio;
        }
        Err(_) => return unknown(found, field, "bus", disk.bus),
    }
    if disk.queues > 1 {
        let wrong = "must be left out with DISK_BUS_SATA: such a disk has one queue of 32 requests";
        found.add(format_args!("{field}.queues"), wrong);
    }
    if disk.logical_block_bytes == 4096 {
        let wrong = "must be 512, or left out, with DISK_BUS_SATA";
        found.add(format_args!("{field}.logicalBlockBytes"), wrong);
    }
    if !cdrom && (disk.read_only || iso) {
        let wrong = "a disk on DISK_BUS_SATA can be written to: set `cdrom`, or use DISK_BUS_VIRTIO";
        found.add(
            format_args!("{field}.{}", if iso { "format" } else { "readOnly" }),
            wrong,
        );
    }
    Bus::Sata { cdrom }
}

fn unknown<T: Default>(found: &mut Violations, field: &str, what: &str, value: i32) -> T {
    found.add(
        format_args!("{field}.{what}"),
        format_args!("unknown value {value}"),
    );
    T::default()
}

fn source(found: &mut Violations, field: &str, disk: &v1::DiskSpec) -> Option<Source> {
    let format_field = format!("{field}.format");
    let format = match v1::DiskFormat::try_from(disk.format) {
        Ok(format) => known(format),
        Err(_) => {
            found.add(&format_field, format_args!("unknown value {}", disk.format));
            None
        }
    };
    let given = disk.format != i32::from(v1::DiskFormat::Unspecified);
    if !disk.beneath.is_empty() && !matches!(disk.source, Some(WireSource::Path(_))) {
        found.add(format_args!("{field}.beneath"), "is for a `path` only");
    }
    match &disk.source {
        Some(WireSource::Disk(disk)) => {
            let name = name(found, &format!("{field}.disk"), disk);
            if format == Some(Format::Iso) {
                found.add(
                    &format_field,
                    "must be left out when `disk` is given, or be that disk's: DISK_FORMAT_RAW or DISK_FORMAT_QCOW2",
                );
                return None;
            }
            Some(Source::Disk { name: name?, format })
        }
        Some(WireSource::PodVolume(volume)) => Some(Source::Pod {
            volume: PodVolume::new(found, &format!("{field}.podVolume"), volume)?,
            format: format.unwrap_or(Format::Raw),
        }),
        None if disk.cdrom => {
            if given {
                found.add(&format_field, "must be left out in an empty CD-ROM drive");
            }
            Some(Source::Empty)
        }
        None => {
            found.add(
                format_args!("{field}.path"),
                "must be given, unless `disk` names a disk of the DiskService or `podVolume` a volume of the VM's pod",
            );
            None
        }
        Some(WireSource::Path(path)) => {
            let path = absolute(found, format_args!("{field}.path"), path);
            if !given {
                found.add(
                    &format_field,
                    "must be given with `path`: DISK_FORMAT_RAW, DISK_FORMAT_QCOW2 or DISK_FORMAT_ISO; it is never guessed",
                );
            }
            let beneath = match (disk.beneath.as_str(), &path) {
                ("", _) | (_, None) => None,
                (folder, Some(path)) => Some(beneath(found, field, folder, path)?),
            };
            Some(Source::Path {
                path: path?,
                format: format?,
                beneath,
            })
        }
    }
}

/// The folder that `path` is below.
fn beneath(found: &mut Violations, field: &str, folder: &str, path: &Path) -> Option<PathBuf> {
    let field = format!("{field}.beneath");
    let folder = absolute(found, &field, folder)?;
    if path == folder || !path.starts_with(&folder) {
        found.add(
            &field,
            format_args!("must be a folder above `path`, is \"{}\"", folder.display()),
        );
        return None;
    }
    Some(folder)
}

fn known(format: v1::DiskFormat) -> Option<Format> {
    match format {
        v1::DiskFormat::Unspecified => None,
        v1::DiskFormat::Raw => Some(Format::Raw),
        v1::DiskFormat::Qcow2 => Some(Format::Qcow2),
        v1::DiskFormat::Iso => Some(Format::Iso),
    }
}

fn serial(found: &mut Violations, field: &str, serial: &str, name: &Name) -> String {
    let printable = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
    if serial.len() > MAX_SERIAL || !serial.bytes().all(printable) {
        found.add(
            format_args!("{field}.serial"),
            format_args!("must be at most {MAX_SERIAL} printable ASCII characters"),
        );
    }
    if serial.is_empty() {
        name.as_str().chars().take(MAX_SERIAL).collect()
    } else {
        serial.to_owned()
    }
}

#[cfg(test)]
mod tests;

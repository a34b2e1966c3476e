//! Disks: as a VM's spec has them, as the DiskService makes them, and the limits of what may flow.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use super::{
    Violations,
    name::Name,
    vm::{absolute, labels, name},
};
use crate::{v1, vmm};

/// Longest serial in bytes (virtio 1.3, 5.2.6.1).
pub const MAX_SERIAL: usize = 20;
/// Most queues of a disk.
pub const MAX_QUEUES: u32 = 16;
/// Sizes are multiples of this many bytes (virtio 1.3, 5.2: sectors).
pub const SECTOR: u64 = 512;
/// Largest disk of the DiskService in bytes.
pub const MAX_SIZE: u64 = 64 << 40;
/// Least limit of bytes per second: below it one request of a page would wait for more than a second.
pub const MIN_BYTES_PER_SECOND: u64 = 4096;
/// Most of anything in a limit: far above what a disk can do, far below where sums overflow.
pub const MAX_RATE: u64 = 1 << 40;

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
    /// What follows when the node can't carry out a request.
    pub on_error: OnError,
    /// How much may flow.
    pub limit: Limit,
    /// Place in the firmware's order, from 1; `None` is not tried.
    pub boot_order: Option<u32>,
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
    },
    /// A disk of the DiskService.
    Disk {
        /// Its name.
        name: Name,
        /// What the manifest says about its format, if anything; never ISO.
        format: Option<Format>,
    },
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

/// What follows when the node can't carry out a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The guest gets an error.
    #[default]
    Report,
    /// The VM is paused.
    Pause,
}

/// How much may flow to and from a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Limit {
    /// All that the node can do.
    #[default]
    None,
    /// A limit of its own.
    Own(RateLimit),
    /// That of a group of the VM.
    Group(Name),
}

/// Token buckets. 0 is no limit; a burst of 0 is what flows in 100 ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimit {
    /// 0 or [`MIN_BYTES_PER_SECOND`] to [`MAX_RATE`].
    pub bytes_per_second: u64,
    /// At most [`MAX_RATE`].
    pub operations_per_second: u64,
    /// What may flow at once after a pause.
    pub burst_bytes: u64,
    /// See `burst_bytes`.
    pub burst_operations: u64,
}

/// A limit that several disks of a VM share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateGroup {
    /// Unique in the VM.
    pub name: Name,
    /// The limit.
    pub limit: RateLimit,
}

/// A disk that the DiskService is to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDisk {
    /// Unique among the node's disks.
    pub name: Name,
    /// Free key-value pairs.
    pub labels: BTreeMap<String, String>,
    /// Raw or qcow2, never ISO.
    pub format: Format,
    /// In bytes, a multiple of [`SECTOR`]. `None` is the size of the source.
    pub size: Option<u64>,
    /// What is reserved at once.
    pub preallocation: Preallocation,
    /// What is in it.
    pub content: Content,
}

/// What is in a new disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeroes.
    Empty,
    /// A copy of this raw file or block device.
    RawFile(PathBuf),
    /// What is in another disk of the DiskService, until it is written to.
    OverlayOf(Name),
}

/// What space is reserved at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// None.
    #[default]
    Off,
    /// That of the tables of a qcow2 image.
    Metadata,
    /// All.
    Full,
}

impl Disk {
    /// Validates `disk`; `field` is its path: `spec.disks[1]`, or `disk` in a request of its own.
    pub fn new(found: &mut Violations, field: &str, disk: &v1::DiskSpec) -> Option<Self> {
        let name = name(found, &format!("{field}.name"), &disk.name);
        let source = source(found, field, disk);
        let iso = matches!(
            source,
            Some(Source::Path {
                format: Format::Iso,
                ..
            })
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
        let limit = limit(found, field, disk);
        let name = name?;
        let serial = serial(found, field, &disk.serial, &name);
        Some(Self {
            name,
            source: source?,
            read_only: disk.read_only || iso,
            serial,
            cache,
            queues: disk.queues,
            logical_block: disk.logical_block_bytes.max(512),
            on_error,
            limit,
            boot_order: (disk.boot_order > 0).then_some(disk.boot_order),
        })
    }

    /// What a `vmm` is told of it, but for its descriptors and its slot. `format` is that of its image.
    pub fn machine(&self, format: Format) -> vmm::Disk {
        let (rate_limit, rate_group) = match &self.limit {
            Limit::None => (None, String::new()),
            Limit::Own(limit) => (Some((*limit).into()), String::new()),
            Limit::Group(name) => (None, name.to_string()),
        };
        let on_error = match self.on_error {
            OnError::Report => vmm::OnError::Report,
            OnError::Pause => vmm::OnError::Pause,
        };
        vmm::Disk {
            name: self.name.to_string(),
            read_only: self.read_only,
            serial: self.serial.clone(),
            format: vmm::ImageFormat::from(format).into(),
            queues: self.queues,
            logical_block_bytes: self.logical_block,
            on_error: on_error.into(),
            rate_limit,
            rate_group,
            ..Default::default()
        }
    }

    /// The disk of the DiskService that it is, if any.
    pub fn named(&self) -> Option<&Name> {
        match &self.source {
            Source::Disk { name, .. } => Some(name),
            Source::Path { .. } => None,
        }
    }
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
    match (disk.path.is_empty(), disk.disk.is_empty()) {
        (false, false) => {
            found.add(
                field,
                "give either `path` (a file of the node) or `disk` (a disk of the DiskService), not both",
            );
            None
        }
        (true, false) => {
            let name = name(found, &format!("{field}.disk"), &disk.disk);
            if format == Some(Format::Iso) {
                found.add(
                    &format_field,
                    "must be left out when `disk` is given, or be that disk's: DISK_FORMAT_RAW or DISK_FORMAT_QCOW2",
                );
                return None;
            }
            Some(Source::Disk { name: name?, format })
        }
        (true, true) => {
            found.add(
                format_args!("{field}.path"),
                "must be given, unless `disk` names a disk of the DiskService",
            );
            None
        }
        (false, true) => {
            let path = absolute(found, format_args!("{field}.path"), &disk.path);
            if !given {
                found.add(
                    &format_field,
                    "must be given with `path`: DISK_FORMAT_RAW, DISK_FORMAT_QCOW2 or DISK_FORMAT_ISO; it is never guessed",
                );
            }
            Some(Source::Path {
                path: path?,
                format: format?,
            })
        }
    }
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

fn limit(found: &mut Violations, field: &str, disk: &v1::DiskSpec) -> Limit {
    match (&disk.rate_limit, disk.rate_group.as_str()) {
        (None, "") => Limit::None,
        (Some(limit), "") => Limit::Own(RateLimit::new(found, &format!("{field}.rateLimit"), limit)),
        (None, group) => name(found, &format!("{field}.rateGroup"), group).map_or(Limit::None, Limit::Group),
        (Some(_), _) => {
            found.add(
                field,
                "give either `rateLimit` (of its own) or `rateGroup` (shared), not both",
            );
            Limit::None
        }
    }
}

impl RateLimit {
    /// Validates `limit`; `field` is its path.
    pub fn new(found: &mut Violations, field: &str, limit: &v1::RateLimit) -> Self {
        let bytes = limit.bytes_per_second;
        if bytes != 0 && !(MIN_BYTES_PER_SECOND..=MAX_RATE).contains(&bytes) {
            found.add(
                format_args!("{field}.bytesPerSecond"),
                format_args!("must be {MIN_BYTES_PER_SECOND} to {MAX_RATE}, or 0 for no limit, is {bytes}"),
            );
        }
        for (what, value) in [
            ("operationsPerSecond", limit.operations_per_second),
            ("burstBytes", limit.burst_bytes),
            ("burstOperations", limit.burst_operations),
        ] {
            if value > MAX_RATE {
                found.add(
                    format_args!("{field}.{what}"),
                    format_args!("must be at most {MAX_RATE}, is {value}"),
                );
            }
        }
        for (burst, value, rate, per_second) in [
            ("burstBytes", limit.burst_bytes, "bytesPerSecond", bytes),
            (
                "burstOperations",
                limit.burst_operations,
                "operationsPerSecond",
                limit.operations_per_second,
            ),
        ] {
            if value != 0 && per_second == 0 {
                found.add(
                    format_args!("{field}.{burst}"),
                    format_args!("needs `{rate}`: without that limit everything flows at once"),
                );
            }
        }
        Self {
            bytes_per_second: bytes,
            operations_per_second: limit.operations_per_second,
            burst_bytes: limit.burst_bytes,
            burst_operations: limit.burst_operations,
        }
    }
}

impl From<RateLimit> for vmm::RateLimit {
    fn from(limit: RateLimit) -> Self {
        Self {
            bytes_per_second: limit.bytes_per_second,
            operations_per_second: limit.operations_per_second,
            burst_bytes: limit.burst_bytes,
            burst_operations: limit.burst_operations,
        }
    }
}

impl From<&vmm::RateLimit> for RateLimit {
    fn from(limit: &vmm::RateLimit) -> Self {
        Self {
            bytes_per_second: limit.bytes_per_second,
            operations_per_second: limit.operations_per_second,
            burst_bytes: limit.burst_bytes,
            burst_operations: limit.burst_operations,
        }
    }
}

impl From<Format> for vmm::ImageFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Raw => Self::Raw,
            Format::Qcow2 => Self::Qcow2,
            Format::Iso => Self::Iso,
        }
    }
}

impl From<&RateGroup> for vmm::RateGroup {
    fn from(group: &RateGroup) -> Self {
        Self {
            name: group.name.to_string(),
            limit: Some(group.limit.into()),
        }
    }
}

impl RateGroup {
    /// Validates `group`; `field` is its path.
    pub fn new(found: &mut Violations, field: &str, group: &v1::RateGroup) -> Option<Self> {
        let name = name(found, &format!("{field}.name"), &group.name);
        let limit = group.limit.unwrap_or_default();
        let limit = RateLimit::new(found, &format!("{field}.limit"), &limit);
        Some(Self { name: name?, limit })
    }
}

/// Notes what is wrong with the size of a disk of the DiskService.
pub fn size(found: &mut Violations, field: impl fmt::Display, bytes: u64) {
    if bytes == 0 || bytes > MAX_SIZE || !bytes.is_multiple_of(SECTOR) {
        found.add(
            field,
            format_args!("must be a multiple of {SECTOR} from {SECTOR} to {MAX_SIZE} (64 TiB), is {bytes}"),
        );
    }
}

impl TryFrom<&v1::CreateDiskRequest> for NewDisk {
    type Error = Violations;

    fn try_from(request: &v1::CreateDiskRequest) -> Result<Self, Violations> {
        let mut found = Violations::default();
        let Some(disk) = &request.disk else {
            found.add("disk", "must be given");
            return Err(found);
        };
        for (field, set) in [
            ("disk.uid", !disk.uid.is_empty()),
            ("disk.state", disk.state.is_some()),
        ] {
            if set {
                found.add(field, "is set by the daemon: leave it out");
            }
        }
        let new_name = name(&mut found, "disk.name", &disk.name);
        labels(&mut found, "disk.labels", &disk.labels);
        let content = content(&mut found, request.source.as_ref());
        let format = new_format(&mut found, disk.format, content.as_ref());
        let preallocation = preallocation(&mut found, disk.preallocation, format, content.as_ref());
        let from_source = !matches!(content, Some(Content::Empty));
        if disk.size_bytes != 0 || !from_source {
            size(&mut found, "disk.sizeBytes", disk.size_bytes);
        }
        match (new_name, content) {
            (Some(name), Some(content)) => found.or(Self {
                name,
                labels: disk.labels.clone(),
                format,
                size: (disk.size_bytes != 0).then_some(disk.size_bytes),
                preallocation,
                content,
            }),
            _ => Err(found),
        }
    }
}

fn content(found: &mut Violations, source: Option<&v1::create_disk_request::Source>) -> Option<Content> {
    match source {
        None => Some(Content::Empty),
        Some(v1::create_disk_request::Source::RawFile(path)) => {
            absolute(found, "rawFile", path).map(Content::RawFile)
        }
        Some(v1::create_disk_request::Source::OverlayOf(below)) => {
            name(found, "overlayOf", below).map(Content::OverlayOf)
        }
    }
}

fn new_format(found: &mut Violations, format: i32, content: Option<&Content>) -> Format {
    let overlay = matches!(content, Some(Content::OverlayOf(_)));
    let copy = matches!(content, Some(Content::RawFile(_)));
    let problem = match v1::DiskFormat::try_from(format) {
        Ok(v1::DiskFormat::Unspecified) if overlay => return Format::Qcow2,
        Ok(v1::DiskFormat::Qcow2) if !copy => return Format::Qcow2,
        Ok(v1::DiskFormat::Unspecified | v1::DiskFormat::Raw) if !overlay => return Format::Raw,
        Ok(v1::DiskFormat::Qcow2) => {
            "must be DISK_FORMAT_RAW (or left out): a copy of a raw file is raw".to_owned()
        }
        Ok(v1::DiskFormat::Iso) => {
            "must be DISK_FORMAT_RAW or DISK_FORMAT_QCOW2; an ISO image is attached to a VM by its path"
                .to_owned()
        }
        Ok(v1::DiskFormat::Unspecified | v1::DiskFormat::Raw) => {
            "must be DISK_FORMAT_QCOW2 (or left out): an overlay is a qcow2 image".to_owned()
        }
        Err(_) => format!("unknown value {format}"),
    };
    found.add("disk.format", problem);
    Format::Raw
}

fn preallocation(
    found: &mut Violations,
    value: i32,
    format: Format,
    content: Option<&Content>,
) -> Preallocation {
    let field = "disk.preallocation";
    let preallocation = match v1::DiskPreallocation::try_from(value) {
        Ok(v1::DiskPreallocation::Unspecified | v1::DiskPreallocation::Off) => Preallocation::Off,
        Ok(v1::DiskPreallocation::Metadata) => Preallocation::Metadata,
        Ok(v1::DiskPreallocation::Full) => Preallocation::Full,
        Err(_) => unknown(found, "disk", "preallocation", value),
    };
    if preallocation != Preallocation::Off && matches!(content, Some(Content::OverlayOf(_))) {
        found.add(
            field,
            "must be DISK_PREALLOCATION_OFF (or left out) for an overlay",
        );
    } else if preallocation == Preallocation::Metadata && format == Format::Raw {
        found.add(
            field,
            "must be DISK_PREALLOCATION_OFF or DISK_PREALLOCATION_FULL for a raw disk, which has no tables",
        );
    }
    preallocation
}

#[cfg(test)]
mod tests;

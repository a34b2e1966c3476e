//! Disks that the DiskService is to make.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use super::{
    super::{
        Violations,
        metadata::labels,
        name::Name,
        vm::{absolute, name},
    },
    Format, unknown,
};
use crate::v1;

/// Sizes are multiples of this many bytes (virtio 1.3, 5.2: sectors).
pub const SECTOR: u64 = 512;
/// Largest disk of the DiskService in bytes.
pub const MAX_SIZE: u64 = 64 << 40;
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

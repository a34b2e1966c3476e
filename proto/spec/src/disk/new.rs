//! Disks that the DiskService is to make.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use vmmd_api::v1;

use super::{
    super::{
        Violations,
        metadata::{self, Metadata},
        name::Name,
        vm::{absolute, name},
    },
    Format, unknown,
};

/// Sizes are multiples of this many bytes (virtio 1.3, 5.2: sectors).
pub const SECTOR: u64 = 512;
/// Largest disk of the DiskService in bytes.
pub const MAX_SIZE: u64 = 64 << 40;

/// A disk that the DiskService is to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDisk {
    /// Unique among the node's disks; `None` takes the one that is written beside an adopted file.
    pub name: Option<Name>,
    /// For selecting disks.
    pub labels: BTreeMap<String, String>,
    /// For clients to keep.
    pub annotations: BTreeMap<String, String>,
    /// Owner of the disk; empty if not set.
    pub owner: String,
    /// Raw or qcow2, never ISO. `None` takes that of an adopted file.
    pub format: Option<Format>,
    /// In bytes, a multiple of [`SECTOR`]. `None` is the size of the source.
    pub size: Option<u64>,
    /// Space reserved at creation.
    pub preallocation: Preallocation,
    /// Content of the disk.
    pub content: Content,
    /// A raw source is raw although it begins as an image of another format does.
    pub any_content: bool,
}

/// Content of a new disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeroes.
    Empty,
    /// A copy of this raw file or block device.
    RawFile(PathBuf),
    /// Content of another disk of the DiskService, as an overlay.
    OverlayOf(Name),
    /// Content of an image of the ImageService.
    Image {
        /// Its name.
        name: Name,
        /// The disk is an overlay of it, and no copy.
        overlay: bool,
    },
    /// This file of the daemon's folder, which no disk has.
    Adopted(PathBuf),
}

/// Space reserved at creation.
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

/// Records a violation for an invalid size of a disk of the DiskService.
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
        if disk.status.is_some() {
            found.add("disk.status", "is set by the daemon: leave it out");
        }
        let metadata = disk.metadata.clone().unwrap_or_default();
        metadata::refuse_given(&mut found, "disk.metadata", &metadata);
        let spec = disk.spec.clone().unwrap_or_default();
        let content = content(&mut found, spec.source.as_ref());
        let adopted = matches!(content, Some(Content::Adopted(_)));
        let (unnamed, mut named) = (adopted && metadata.name.is_empty(), metadata);
        if unnamed {
            // Stands for the one that is found beside the file.
            named.name = "adopted".to_owned();
        }
        let metadata = Metadata::new(&mut found, "disk.metadata", &named);
        let format = new_format(&mut found, spec.format, content.as_ref());
        let preallocation = preallocation(&mut found, spec.preallocation, format, content.as_ref());
        if spec.size_bytes != 0 || matches!(content, Some(Content::Empty)) {
            size(&mut found, "disk.spec.sizeBytes", spec.size_bytes);
        }
        if spec.size_bytes != 0 && adopted {
            found.add(
                "disk.spec.sizeBytes",
                "must be left out with `adopt`: the file has its size",
            );
        }
        if spec.any_content && !matches!(content, None | Some(Content::RawFile(_))) {
            found.add("disk.spec.anyContent", "is for a `rawFile` only");
        }
        match (metadata, content) {
            (Some(metadata), Some(content)) => found.or(Self {
                name: (!unnamed).then_some(metadata.name),
                labels: metadata.labels,
                annotations: metadata.annotations,
                owner: metadata.owner,
                format,
                size: (spec.size_bytes != 0).then_some(spec.size_bytes),
                preallocation,
                content,
                any_content: spec.any_content,
            }),
            _ => Err(found),
        }
    }
}

fn content(found: &mut Violations, source: Option<&v1::volume_spec::Source>) -> Option<Content> {
    use v1::volume_spec::Source;
    match source {
        None => Some(Content::Empty),
        Some(Source::RawFile(path)) => absolute(found, "disk.spec.rawFile", path).map(Content::RawFile),
        Some(Source::OverlayOf(below)) => name(found, "disk.spec.overlayOf", below).map(Content::OverlayOf),
        Some(Source::Image(image)) => {
            let named = name(found, "disk.spec.image.name", &image.name);
            let overlay = match v1::DiskClone::try_from(image.clone) {
                Ok(v1::DiskClone::Unspecified | v1::DiskClone::Copy) => false,
                Ok(v1::DiskClone::Overlay) => true,
                Err(_) => unknown(found, "disk.spec.image", "clone", image.clone),
            };
            named.map(|name| Content::Image { name, overlay })
        }
        Some(Source::Adopt(path)) => absolute(found, "disk.spec.adopt", path).map(Content::Adopted),
    }
}

fn new_format(found: &mut Violations, format: i32, content: Option<&Content>) -> Option<Format> {
    let overlay = is_overlay(content);
    let copy = matches!(
        content,
        Some(Content::RawFile(_) | Content::Image { overlay: false, .. })
    );
    let adopted = matches!(content, Some(Content::Adopted(_)));
    let problem = match v1::DiskFormat::try_from(format) {
        Ok(v1::DiskFormat::Unspecified) if adopted => return None,
        Ok(v1::DiskFormat::Unspecified) if overlay => return Some(Format::Qcow2),
        Ok(v1::DiskFormat::Qcow2) if !copy => return Some(Format::Qcow2),
        Ok(v1::DiskFormat::Unspecified | v1::DiskFormat::Raw) if !overlay => return Some(Format::Raw),
        Ok(v1::DiskFormat::Qcow2) => {
            "must be DISK_FORMAT_RAW (or left out): a copy of a raw file or an image is raw".to_owned()
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
    found.add("disk.spec.format", problem);
    None
}

fn is_overlay(content: Option<&Content>) -> bool {
    matches!(
        content,
        Some(Content::OverlayOf(_) | Content::Image { overlay: true, .. })
    )
}

fn preallocation(
    found: &mut Violations,
    value: i32,
    format: Option<Format>,
    content: Option<&Content>,
) -> Preallocation {
    let field = "disk.spec.preallocation";
    let preallocation = match v1::DiskPreallocation::try_from(value) {
        Ok(v1::DiskPreallocation::Unspecified | v1::DiskPreallocation::Off) => Preallocation::Off,
        Ok(v1::DiskPreallocation::Metadata) => Preallocation::Metadata,
        Ok(v1::DiskPreallocation::Full) => Preallocation::Full,
        Err(_) => unknown(found, "disk.spec", "preallocation", value),
    };
    if preallocation != Preallocation::Off && is_overlay(content) {
        found.add(
            field,
            "must be DISK_PREALLOCATION_OFF (or left out) for an overlay",
        );
    } else if preallocation == Preallocation::Metadata && format == Some(Format::Raw) {
        found.add(
            field,
            "must be DISK_PREALLOCATION_OFF or DISK_PREALLOCATION_FULL for a raw disk, which has no tables",
        );
    } else if preallocation != Preallocation::Off && matches!(content, Some(Content::Adopted(_))) {
        found.add(
            field,
            "must be DISK_PREALLOCATION_OFF (or left out) for a file that is there",
        );
    }
    preallocation
}

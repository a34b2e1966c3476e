//! Arguments of the disk commands.

use std::time::Duration;

use clap::Args;
use vmmd_api::v1::{DiskBus, DiskCache, DiskClone, DiskErrorPolicy, DiskFormat, DiskPreallocation};

use super::{
    FORMAT, HELP, Label, Output, Timeout, disk_name, duration, image_name, size,
    value::{Words, words},
    vm_name,
};
use crate::{complete, manifest::quantity};

/// Formats of a disk that vmmd manages.
const DISK_FORMATS: Words<DiskFormat> = &[
    ("raw", DiskFormat::Raw, "Byte for byte"),
    ("qcow2", DiskFormat::Qcow2, "QEMU's format, with overlays"),
];
/// Formats of an image file of the node.
pub const IMAGE_FORMATS: Words<DiskFormat> = &[
    ("raw", DiskFormat::Raw, "Byte for byte; also for block devices"),
    ("qcow2", DiskFormat::Qcow2, "QEMU's format"),
    ("iso", DiskFormat::Iso, "Content of a CD-ROM; read-only"),
];
/// How a disk is made from an image.
pub const CLONES: Words<DiskClone> = &[
    (
        "copy",
        DiskClone::Copy,
        "Copy the content; the file system shares the blocks where it can",
    ),
    (
        "overlay",
        DiskClone::Overlay,
        "Store only the differences from the image; the image cannot be deleted while the disk exists",
    ),
];
const PREALLOCATIONS: Words<DiskPreallocation> = &[
    ("off", DiskPreallocation::Off, "Allocate space at the first write"),
    (
        "metadata",
        DiskPreallocation::Metadata,
        "Allocate only the tables of qcow2",
    ),
    ("full", DiskPreallocation::Full, "Allocate all space now"),
];
/// Buses on which a guest finds a disk.
pub const BUSES: Words<DiskBus> = &[
    ("virtio", DiskBus::Virtio, "A virtio-blk device"),
    (
        "sata",
        DiskBus::Sata,
        "A port of an AHCI controller, for guests without virtio drivers; needs firmware",
    ),
];
/// Use of the node's page cache.
pub const CACHES: Words<DiskCache> = &[
    ("none", DiskCache::None, "Bypass the page cache (O_DIRECT)"),
    (
        "writeback",
        DiskCache::Writeback,
        "Use the page cache; a flush by the guest still reaches stable storage",
    ),
];
/// Actions after an error of the node.
pub const ERROR_POLICIES: Words<DiskErrorPolicy> = &[
    (
        "report",
        DiskErrorPolicy::Report,
        "The guest gets an input/output error",
    ),
    (
        "pause",
        DiskErrorPolicy::Pause,
        "The VM is paused; `vmmctl resume` tries again",
    ),
];

/// `create disk`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl create disk data --size 20Gi
  vmmctl create disk fast --size 20Gi --preallocation full
  vmmctl create disk base --from-file /srv/vm/debian.raw
  vmmctl create disk web --from-image debian13 --size 40Gi
  vmmctl create disk web-root --overlay-of base --size 40Gi
  vmmctl create disk --adopt /var/lib/vmmd/disks/5c1fd9a0-77a4-4b5f-9b34-0d6a0c8c6d2e.raw")]
pub struct CreateDisk {
    /// Name of the disk. With --adopt, the earlier name when not given
    #[arg(value_parser = disk_name, add = complete::disks(), required_unless_present = "adopt")]
    pub name: Option<String>,
    /// Size that the guest sees, as in 10Gi; not needed with --from-file or --overlay-of
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = size,
        required_unless_present_any = ["from_file", "from_image", "overlay_of", "adopt"],
        conflicts_with = "adopt"
    )]
    pub size: Option<u64>,
    /// Format of the disk; raw when not given, qcow2 for an overlay
    #[arg(long, value_parser = words(DISK_FORMATS))]
    pub format: Option<DiskFormat>,
    /// When space is allocated; off when not given
    #[arg(long, value_name = "MODE", value_parser = words(PREALLOCATIONS))]
    pub preallocation: Option<DiskPreallocation>,
    /// Copy this raw file of the node
    #[arg(long, value_name = "PATH", conflicts_with = "overlay_of")]
    pub from_file: Option<String>,
    /// Make the disk from this image
    #[arg(long, value_name = "IMAGE", value_parser = image_name, add = complete::images(), conflicts_with_all = ["from_file", "overlay_of", "adopt"])]
    pub from_image: Option<String>,
    /// How the disk is made from the image; copy when not given
    #[arg(long, value_name = "MODE", value_parser = words(CLONES), requires = "from_image")]
    pub clone: Option<DiskClone>,
    /// Accept a raw file that begins like an image of another format
    #[arg(long, requires = "from_file")]
    pub any_content: bool,
    /// Store only the differences from this disk; while the overlay exists, this disk cannot be
    /// written to or deleted
    #[arg(long, value_name = "DISK", value_parser = disk_name, add = complete::disks())]
    pub overlay_of: Option<String>,
    /// Adopt this file, which an earlier installation of vmmd left in its folder, without a copy
    #[arg(long, value_name = "PATH", conflicts_with_all = ["from_file", "overlay_of", "preallocation"])]
    pub adopt: Option<String>,
    /// Do not wait for the end: print the operation
    #[arg(long)]
    pub no_wait: bool,
    /// Label
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `update disk`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl update disk data --size 40Gi               # a disk that vmmd manages
  vmmctl update disk root --vm web --size 20Gi      # a file that the VM's spec names
  vmmctl update disk db --vm web --rescan           # a block device that has grown")]
pub struct UpdateDisk {
    /// Name of the disk: a disk that vmmd manages, or with --vm a disk of that VM
    #[arg(value_parser = disk_name, add = complete::disks())]
    pub name: String,
    /// VM whose spec has the disk; for files and block devices that the spec names by path
    #[arg(long, value_parser = vm_name, add = complete::vms())]
    pub vm: Option<String>,
    /// New size, as in 20Gi; never smaller than the present size
    #[arg(long, value_name = "SIZE", value_parser = size, required_unless_present = "rescan")]
    pub size: Option<u64>,
    /// Take over the present size of a block device of the node
    #[arg(long, requires = "vm", conflicts_with = "size")]
    pub rescan: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `attach`.
#[derive(Debug, Args)]
#[command(
    override_usage = "\
vmmctl attach VM --disk DISK [OPTIONS]
       vmmctl attach VM --path PATH --format FORMAT [OPTIONS]",
    after_help = "\
Examples:
  vmmctl attach web --disk data
  vmmctl attach web --disk data --on-error pause --bps 200Mi --iops 2000
  vmmctl attach web --path /srv/vm/scratch.qcow2 --format qcow2
  vmmctl attach web --path /srv/iso/debian.iso --format iso --name cd"
)]
pub struct Attach {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Disk that vmmd manages
    #[arg(long, value_parser = disk_name, add = complete::disks(), required_unless_present = "path", conflicts_with_all = ["path", "format"])]
    pub disk: Option<String>,
    /// Image file or block device of the node
    #[arg(long, value_name = "PATH", requires = "format")]
    pub path: Option<String>,
    /// Format of the file; never guessed
    #[arg(long, value_parser = words(IMAGE_FORMATS))]
    pub format: Option<DiskFormat>,
    /// Accept a raw file that begins like an image of another format
    #[arg(long, requires = "path")]
    pub any_content: bool,
    /// Name of the disk in the VM; the name of the disk, or of the file without its extension, when not given
    #[arg(long)]
    pub name: Option<String>,
    /// The guest cannot write to the disk
    #[arg(long)]
    pub read_only: bool,
    /// Bus on which the guest finds the disk; virtio when not given. A disk on sata is attached while the VM is stopped
    #[arg(long, value_parser = words(BUSES))]
    pub bus: Option<DiskBus>,
    /// A CD-ROM drive on the bus sata, with the disk or file as its medium
    #[arg(long)]
    pub cdrom: bool,
    /// Position in the boot order of firmware, 1 to 16 [default: behind all disks with a position]
    #[arg(long, value_name = "N")]
    pub boot_order: Option<u32>,
    /// Serial that the guest reads (/dev/disk/by-id/virtio-SERIAL); the name when not given
    #[arg(long)]
    pub serial: Option<String>,
    /// Use of the node's page cache; none when not given, where the file system supports that
    #[arg(long, value_parser = words(CACHES))]
    pub cache: Option<DiskCache>,
    /// Queues, each with a thread: 1 to 16; the number of vCPUs, at most 4, when not given
    #[arg(long, value_name = "N")]
    pub queues: Option<u32>,
    /// Bytes of a block: 512 (when not given) or 4096
    #[arg(long, value_name = "BYTES", value_parser = quantity::bytes)]
    pub block_size: Option<u64>,
    /// Action when the node cannot carry out a request; report when not given
    #[arg(long, value_name = "ACTION", value_parser = words(ERROR_POLICIES))]
    pub on_error: Option<DiskErrorPolicy>,
    #[command(flatten)]
    pub limits: Limits,
    /// Rate group of the VM that the disk belongs to
    #[arg(long, value_name = "GROUP", conflicts_with_all = ["bps", "iops", "burst", "burst_ops"])]
    pub rate_group: Option<String>,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// Limits on the throughput of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub struct Limits {
    /// Bytes per second, as in 100Mi; 0 is no limit
    #[arg(long, value_name = "BYTES", value_parser = quantity::bytes)]
    pub bps: Option<u64>,
    /// Requests per second; 0 is no limit
    #[arg(long, value_name = "N")]
    pub iops: Option<u64>,
    /// Bytes allowed at once after a pause; the amount of 100 ms when 0 or not given
    #[arg(long, value_name = "BYTES", value_parser = quantity::bytes)]
    pub burst: Option<u64>,
    /// Requests allowed at once after a pause; the amount of 100 ms when 0 or not given
    #[arg(long, value_name = "N")]
    pub burst_ops: Option<u64>,
}

/// `detach`.
#[derive(Debug, Args)]
pub struct Detach {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Names of disks in the VM
    #[arg(required = true, value_name = "DISK")]
    pub disks: Vec<String>,
    /// How long the guest may take to release the disk, at most 1h (30s when not given)
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Remove the disk even when the guest has not released it in time: the guest loses unwritten
    /// data
    #[arg(long)]
    pub force: bool,
}

/// `insert`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl insert web cdrom /srv/iso/virtio-win.iso
  vmmctl insert web cdrom drivers --force")]
pub struct Insert {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Name of the drive: a disk of the VM with `cdrom`
    pub drive: String,
    /// ISO image on the node, or the name of a disk that vmmd manages
    #[arg(value_name = "PATH|DISK")]
    pub medium: String,
    /// Replace the present medium although the guest prevents its removal
    #[arg(long)]
    pub force: bool,
}

/// `eject`.
#[derive(Debug, Args)]
pub struct Eject {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Name of the drive: a disk of the VM with `cdrom`
    pub drive: String,
    /// Eject the medium although the guest prevents its removal
    #[arg(long)]
    pub force: bool,
}

/// `limit`.
#[derive(Debug, Args)]
#[command(
    override_usage = "\
vmmctl limit VM --disk DISK [--bps BYTES] [--iops N] [--burst BYTES] [--burst-ops N]
       vmmctl limit VM --group GROUP [--bps BYTES] [--iops N] [--burst BYTES] [--burst-ops N]
       vmmctl limit VM --disk DISK --none",
    after_help = "\
Examples:
  vmmctl limit web --disk data --bps 200Mi --burst 1Gi
  vmmctl limit web --disk data --iops 0       # removes the limit on requests; the limit on bytes stays
  vmmctl limit web --group shared --none"
)]
pub struct Limit {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Name of a disk in the VM
    #[arg(long, required_unless_present = "group", conflicts_with = "group")]
    pub disk: Option<String>,
    /// Name of a rate group of the VM
    #[arg(long)]
    pub group: Option<String>,
    #[command(flatten)]
    pub limits: Limits,
    /// Remove all limits; without this flag, limits that are not named stay
    #[arg(long, conflicts_with_all = ["bps", "iops", "burst", "burst_ops"])]
    pub none: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `stats`.
#[derive(Debug, Args)]
pub struct Stats {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Only these disks; the whole VM without a name
    #[arg(value_name = "DISK")]
    pub disks: Vec<String>,
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
}

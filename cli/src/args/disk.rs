//! Arguments of the disk commands.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{FORMAT, HELP, Label, Output, Timeout, disk_name, duration, image_name, size, vm_name};
use crate::complete;
use crate::manifest::quantity;

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
    /// Name of the disk; with --adopt the one that it had, when not given.
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
    /// How it is kept: raw when not given, qcow2 for an overlay.
    #[arg(long, value_enum)]
    pub format: Option<DiskFormat>,
    /// Whether its space is reserved now, or taken when it is written to (when not given).
    #[arg(long, value_enum)]
    pub preallocation: Option<Preallocation>,
    /// Copy this raw file of the node.
    #[arg(long, value_name = "PATH", conflicts_with = "overlay_of")]
    pub from_file: Option<String>,
    /// Make it of this image.
    #[arg(long, value_name = "IMAGE", value_parser = image_name, add = complete::images(), conflicts_with_all = ["from_file", "overlay_of", "adopt"])]
    pub from_image: Option<String>,
    /// Whether it has the content of the image for itself (when not given), or keeps what differs from it.
    #[arg(long, value_enum, requires = "from_image")]
    pub clone: Option<CloneMode>,
    /// The file is raw although it begins as an image of another format does.
    #[arg(long, requires = "from_file")]
    pub any_content: bool,
    /// Store only the differences from this disk; while the overlay exists, this disk cannot be
    /// written to or deleted
    #[arg(long, value_name = "DISK", value_parser = disk_name, add = complete::disks())]
    pub overlay_of: Option<String>,
    /// Make a disk of this file, which an earlier installation of vmmd left in its folder, as it is.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["from_file", "overlay_of", "preallocation"])]
    pub adopt: Option<String>,
    /// Do not wait until it is made: print the operation.
    #[arg(long)]
    pub no_wait: bool,
    /// Label.
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
    /// Print the created disk in this form
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// How a disk that vmmd keeps is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiskFormat {
    /// Byte for byte.
    Raw,
    /// QEMU's format, with overlays.
    Qcow2,
}

/// How a disk is made of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CloneMode {
    /// It has the content for itself: blocks are shared where the file system can, else copied.
    Copy,
    /// Store only the differences from the image; the image cannot be deleted while the disk exists
    Overlay,
}

/// When space is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preallocation {
    /// When it is written to.
    Off,
    /// Only that of qcow2's own tables.
    Metadata,
    /// All of it, now.
    Full,
}

/// `resize disk`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl resize disk data --size 40Gi               # one that vmmd keeps
  vmmctl resize disk root --vm web --size 20Gi      # a file that the VM's spec names
  vmmctl resize disk db --vm web --rescan           # a block device that has grown")]
pub struct ResizeDisk {
    /// Name of the disk: a disk that vmmd keeps, or with --vm a disk of that VM
    #[arg(value_parser = disk_name, add = complete::disks())]
    pub name: String,
    /// The VM in whose spec the disk is; for files and block devices that the spec names by path.
    #[arg(long, value_parser = vm_name, add = complete::vms())]
    pub vm: Option<String>,
    /// The new size, as in 20Gi; never smaller than now.
    #[arg(long, value_name = "SIZE", value_parser = size, required_unless_present = "rescan")]
    pub size: Option<u64>,
    /// Take the size that a block device of the node has by now.
    #[arg(long, requires = "vm", conflicts_with = "size")]
    pub rescan: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
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
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// A disk that vmmd keeps.
    #[arg(long, value_parser = disk_name, add = complete::disks(), required_unless_present = "path", conflicts_with_all = ["path", "format"])]
    pub disk: Option<String>,
    /// An image file or a block device of the node.
    #[arg(long, value_name = "PATH", requires = "format")]
    pub path: Option<String>,
    /// Format of the file; never guessed
    #[arg(long, value_enum)]
    pub format: Option<ImageFormat>,
    /// The file is raw although it begins as an image of another format does.
    #[arg(long, requires = "path")]
    pub any_content: bool,
    /// Name of the disk in the VM; that of the disk, or of the file without its extension, when not given.
    #[arg(long)]
    pub name: Option<String>,
    /// The guest can't write to it.
    #[arg(long)]
    pub read_only: bool,
    /// Serial that the guest reads (/dev/disk/by-id/virtio-SERIAL); the name when not given
    #[arg(long)]
    pub serial: Option<String>,
    /// Whether the node's page cache is between guest and disk; none where that works, when not given.
    #[arg(long, value_enum)]
    pub cache: Option<Cache>,
    /// Queues, each with a thread: 1 to 16; the number of vCPUs, at most 4, when not given.
    #[arg(long, value_name = "N")]
    pub queues: Option<u32>,
    /// Bytes of a block: 512 (when not given) or 4096.
    #[arg(long, value_name = "BYTES", value_parser = quantity::bytes)]
    pub block_size: Option<u64>,
    /// Action when the node cannot carry out a request; report when not given
    #[arg(long, value_enum)]
    pub on_error: Option<OnError>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub limits: Limits,
    /// The VM's rate group that it belongs to.
    #[arg(long, value_name = "GROUP", conflicts_with_all = ["bps", "iops", "burst", "burst_ops"])]
    pub rate_group: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// Format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ImageFormat {
    /// Byte for byte; also for block devices.
    Raw,
    /// QEMU's format.
    Qcow2,
    /// A CD-ROM's content; read-only.
    Iso,
}

/// Whether the node's page cache is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Cache {
    /// No (O_DIRECT).
    None,
    /// Yes; a flush by the guest still reaches stable storage
    Writeback,
}

/// Action after an error of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnError {
    /// The guest gets an input/output error.
    Report,
    /// The VM is paused; `vmmctl resume` tries again.
    Pause,
}

/// How much may flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub struct Limits {
    /// Bytes per second, as in 100Mi; 0 is no limit.
    #[arg(long, value_name = "BYTES", value_parser = quantity::bytes)]
    pub bps: Option<u64>,
    /// Requests per second; 0 is no limit.
    #[arg(long, value_name = "N")]
    pub iops: Option<u64>,
    /// Bytes that may flow at once after a pause; what flows in 100 ms when 0 or not given.
    #[arg(long, value_name = "BYTES", value_parser = quantity::bytes)]
    pub burst: Option<u64>,
    /// Requests that may flow at once after a pause; what flows in 100 ms when 0 or not given.
    #[arg(long, value_name = "N")]
    pub burst_ops: Option<u64>,
}

/// `detach`.
#[derive(Debug, Args)]
pub struct Detach {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Names of disks in the VM.
    #[arg(required = true, value_name = "DISK")]
    pub disks: Vec<String>,
    /// How long the guest may take to let go of it, at most 1h (30s when not given).
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Remove the disk even when the guest has not released it in time: the guest loses unwritten
    /// data
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
  vmmctl limit web --disk data --iops 0       # no limit on requests, that on bytes stays
  vmmctl limit web --group shared --none"
)]
pub struct Limit {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Name of a disk in the VM.
    #[arg(long, required_unless_present = "group", conflicts_with = "group")]
    pub disk: Option<String>,
    /// Name of a rate group of the VM.
    #[arg(long)]
    pub group: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub limits: Limits,
    /// Remove all limits; without this flag, limits that are not named stay
    #[arg(long, conflicts_with_all = ["bps", "iops", "burst", "burst_ops"])]
    pub none: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// `stats`.
#[derive(Debug, Args)]
pub struct Stats {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Only these disks; all when none is named.
    #[arg(value_name = "DISK")]
    pub disks: Vec<String>,
    /// How to print them.
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
}

//! The command line.

use std::os::fd::RawFd;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Creates, describes, resizes, checks and imports disk images that no VM uses.
///
/// Normally vmmd starts this program. Every file is an inherited descriptor.
#[derive(Debug, Parser)]
#[command(name = "vmm-image", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Makes an empty file an image
    Create(Create),
    /// Says what an image is
    Info(Which),
    /// Enlarges an image that is not in use
    Resize(Resize),
    /// Looks for corruption and leaks in an image that no other program writes to
    Check(Check),
    /// Finds the kernel that is installed on a disk, and copies it and its initial RAM disk
    Boot(Boot),
    /// Says which firmware boots a disk
    Firmware(Firmware),
    /// Makes a raw image of a file of any known format, compressed or not; says how far it is in lines of JSON
    Import(Import),
}

/// Which image.
#[derive(Debug, Args)]
pub struct Which {
    /// Descriptor of the image
    #[arg(long, value_name = "FD")]
    pub fd: RawFd,
    /// Its format
    #[arg(long)]
    pub format: Format,
    /// The result is one JSON object in any case
    #[arg(long)]
    pub json: bool,
}

/// The images below it, the nearest first.
#[derive(Debug, Args)]
pub struct Below {
    /// Descriptor of an image below it, followed by its format; the nearest first
    #[arg(long, value_name = "FD")]
    pub backing_fd: Vec<RawFd>,
    /// Format of the image below it with the same position
    #[arg(long, value_name = "FORMAT")]
    pub backing_format: Vec<Format>,
}

#[derive(Debug, Args)]
pub struct Create {
    #[command(flatten)]
    pub which: Which,
    /// Size of the disk in bytes; an overlay has that of the image below if it is not said
    #[arg(long, value_name = "BYTES", required_unless_present = "backing_fd")]
    pub size: Option<u64>,
    /// Space that is taken at once
    #[arg(long, default_value = "off")]
    pub preallocation: Preallocation,
    #[command(flatten)]
    pub below: Below,
}

#[derive(Debug, Args)]
pub struct Resize {
    #[command(flatten)]
    pub which: Which,
    /// New size of the disk in bytes, not less than it has
    #[arg(long, value_name = "BYTES")]
    pub size: u64,
    #[command(flatten)]
    pub below: Below,
}

/// A disk of a VM.
#[derive(Debug, Args)]
pub struct Disk {
    /// Descriptor of the image, open for reading; no lock is taken
    #[arg(long, value_name = "FD")]
    pub fd: RawFd,
    /// Its format
    #[arg(long)]
    pub format: Format,
    #[command(flatten)]
    pub below: Below,
    /// Length of the disk's logical blocks in bytes, as the guest will see them
    #[arg(long, value_name = "BYTES", default_value = "512")]
    pub logical_block: u64,
}

#[derive(Debug, Args)]
pub struct Firmware {
    #[command(flatten)]
    pub disk: Disk,
    /// The guest finds the disk in a CD-ROM drive
    #[arg(long)]
    pub cdrom: bool,
}

#[derive(Debug, Args)]
pub struct Boot {
    #[command(flatten)]
    pub disk: Disk,
    /// Descriptor of an empty file for the kernel
    #[arg(long, value_name = "FD")]
    pub kernel_fd: RawFd,
    /// Descriptor of an empty file for the initial RAM disk
    #[arg(long, value_name = "FD")]
    pub initrd_fd: RawFd,
}

#[derive(Debug, Args)]
pub struct Import {
    /// Descriptor of the file
    #[arg(long, value_name = "FD")]
    pub fd: RawFd,
    /// Descriptor of the image that is to be made: an empty file
    #[arg(long, value_name = "FD")]
    pub to_fd: RawFd,
    /// Descriptor of an empty file for intermediate data
    #[arg(long, value_name = "FD")]
    pub scratch_fd: RawFd,
    /// Most bytes that the disk may have
    #[arg(long, value_name = "BYTES")]
    pub max_size: u64,
    /// Bytes that are to stay free on the file system
    #[arg(long, value_name = "BYTES", default_value = "0")]
    pub keep_free: u64,
    /// The file holds layers of an OCI image one after the other, of which this is the length of the next; the disk is in one of them
    #[arg(long, value_name = "BYTES")]
    pub layer: Vec<u64>,
}

#[derive(Debug, Args)]
pub struct Check {
    #[command(flatten)]
    pub which: Which,
    /// Frees what leaked, if nothing is corrupt
    #[arg(long)]
    pub repair: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Byte for byte
    Raw,
    /// QEMU's format, version 2 or 3
    Qcow2,
}

impl Format {
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Preallocation {
    /// Only the parts that the format requires
    Off,
    /// The tables of a qcow2 image
    Metadata,
    /// Everything
    Full,
}

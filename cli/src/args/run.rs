//! The command line of `run`.

use std::path::PathBuf;

use clap::Args;

use super::{Label, Timeout, disk::CloneMode, image_name, size, vm_name};
use crate::complete;

/// `run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl run debian13 --name web --kernel /srv/vm/vmlinuz --initrd /srv/vm/initrd.img \\
    --cpus 2 --memory 2Gi --disk-size 20Gi --nic bridge=br0 --ssh-key ~/.ssh/id_ed25519.pub
  vmmctl run debian13 --kernel /srv/vm/vmlinuz --user-data web.yaml --console
  vmmctl delete vm web --with-disks")]
pub struct Run {
    /// The image that the VM's disk is made of.
    #[arg(value_parser = image_name, add = complete::images())]
    pub image: String,
    /// Name of the VM; that of the image with some digits when not given.
    #[arg(long, value_parser = vm_name)]
    pub name: Option<String>,
    /// Virtual CPUs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cpus: u32,
    /// Guest RAM: bytes, or with a suffix as in 512Mi or 2Gi.
    #[arg(long, value_name = "SIZE", default_value = "1Gi", value_parser = size)]
    pub memory: u64,
    /// Size of the disk; that of the image when not given.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub disk_size: Option<u64>,
    /// Whether the disk has the content of the image for itself (when not given), or keeps what differs from it.
    #[arg(long, value_enum)]
    pub clone: Option<CloneMode>,
    /// Kernel on the node: a bzImage, or an ELF with a PVH entry.
    #[arg(long, value_name = "PATH")]
    pub kernel: String,
    /// Initial RAM disk on the node.
    #[arg(long, value_name = "PATH")]
    pub initrd: Option<String>,
    /// Kernel command line.
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "root=/dev/vda1 console=ttyS0",
        allow_hyphen_values = true
    )]
    pub cmdline: String,
    /// File with user data for cloud-init.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub user_data: Option<PathBuf>,
    /// Public SSH key for the image's default user: a file, or the key itself. May be given several times.
    #[arg(long = "ssh-key", value_name = "FILE|KEY")]
    pub ssh_keys: Vec<String>,
    /// What the guest calls itself; the name of the VM when not given.
    #[arg(long)]
    pub hostname: Option<String>,
    /// Network interface, as in `vmmctl create --nic`.
    #[arg(long = "nic", value_name = "KEY=VALUE,…")]
    pub nics: Vec<String>,
    /// Label of the VM and its disk.
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
    /// Attach the terminal to its serial console.
    #[arg(long)]
    pub console: bool,
    /// Print nothing of the progress.
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

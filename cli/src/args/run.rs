//! The command line of `run`.

use std::time::Duration;

use clap::Args;
use vmmd_api::v1::RunPolicy;

use super::{
    Label, Timeout, cloud_init::CloudInit, disk::CloneMode, duration, image_name, operation, size, vm_name,
};
use crate::complete;

/// `run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl run debian13 --name web --cpus 2 --memory 2Gi --disk-size 20Gi --network lan --publish 8080:80 \\
    --ssh-key ~/.ssh/id_ed25519.pub --wait
  vmmctl run debian13 --user-data web.yaml --console
  vmmctl stop web && vmmctl delete vm web --with-disks")]
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
    /// Kernel on the node instead of the one on the disk: a bzImage, or an ELF with a PVH entry.
    #[arg(long, value_name = "PATH", requires = "cmdline")]
    pub kernel: Option<String>,
    /// Initial RAM disk on the node, for that kernel.
    #[arg(long, value_name = "PATH", requires = "kernel")]
    pub initrd: Option<String>,
    /// Kernel command line; for the kernel on the disk, text to append to its own command line
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub cmdline: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub cloud_init: CloudInit,
    /// Network of the node to be in.
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Port of the node that leads to one of the VM: 8080:80, or 53:53/udp. May be given several times.
    #[arg(long, value_name = "PORT:PORT", requires = "network")]
    pub publish: Vec<String>,
    /// Further network interface, as in `vmmctl create --nic`.
    #[arg(long = "nic", value_name = "KEY=VALUE,…")]
    pub nics: Vec<String>,
    /// Directory of the node that the guest can mount: /srv/data, or /srv/data,mount=/data to have it mounted there, with keys as in
    /// `vmmctl share add`.
    #[arg(long = "share", value_name = "PATH[,KEY=VALUE…]")]
    pub shares: Vec<String>,
    /// Directory of the node where the daemon keeps the VM's description, logs and counters.
    #[arg(long, value_name = "PATH")]
    pub state_dir: Option<String>,
    /// Starts by the node: always-on-unless-stopped (default; also after a power-off by the guest), always-on, rerun-on-failure, manual,
    /// always-off.
    #[arg(long, value_name = "POLICY", value_parser = operation::run_policy)]
    pub run_policy: Option<RunPolicy>,
    /// Label of the VM and its disk.
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
    /// Wait until the guest's SSH server answers, for so long at most.
    #[arg(long, value_name = "DURATION", value_parser = duration, num_args = 0..=1, require_equals = true, default_missing_value = "5m")]
    pub wait: Option<Duration>,
    /// Attach the terminal to its serial console.
    #[arg(long, conflicts_with = "wait")]
    pub console: bool,
    /// Print nothing of the progress.
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

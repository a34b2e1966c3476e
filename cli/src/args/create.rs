//! Arguments of the commands that define VMs and disks: `apply`, `create`, `edit`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use vmmd_api::v1::{KeyboardLayout, PanicPolicy, RunPolicy};

use super::{
    FORMAT, HELP, Label, Output, Patch, Timeout,
    cloud_init::CloudInit,
    disk::{CreateDisk, ResizeDisk},
    duration,
    image::Import,
    network::{CreateNetwork, UpdateNetwork},
    nic::{AttachNic, UpdateNic},
    node::LabelNode,
    operation,
    resources::Resources,
    share::AddShare,
    size,
    snapshot::CreateSnapshot,
    vm_name,
};
use crate::complete;

/// `apply`.
#[derive(Debug, Args)]
pub struct Apply {
    /// Manifest with VMs and disks as YAML or JSON; `-` is standard input. May be given several times.
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Start the VMs that do not run.
    #[arg(long)]
    pub start: bool,
    /// Restart the VMs that run with something that only a start can change.
    #[arg(long)]
    pub restart: bool,
    /// How long guests may take to let go of disks (30s when not given), and to power off with --restart (60s); at most 1h.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub grace: Option<Duration>,
    /// Let the daemon check everything, print the changes, and change nothing. For new disks, only
    /// the manifest is checked
    #[arg(long, conflicts_with = "restart")]
    pub dry_run: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// `edit`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true
)]
#[command(override_usage = "\
vmmctl edit NAME [OPTIONS]
       vmmctl edit vm NAME [OPTIONS]")]
pub struct Edit {
    /// Of what; a VM when nothing is said.
    #[command(subcommand)]
    pub what: Option<EditWhat>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub vm: EditVm,
}

/// What is edited.
#[derive(Debug, Subcommand)]
pub enum EditWhat {
    /// Change a VM, as without this word. After a concurrent change by another client nothing is
    /// applied, and the edited text is kept
    Vm(EditVm),
}

/// `edit vm`.
#[derive(Debug, Args)]
pub struct EditVm {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms(), required = true)]
    pub name: Option<String>,
    /// Restart it when something is left that only a start can change.
    #[arg(long)]
    pub restart: bool,
    /// How long the guest may take to let go of disks (30s when not given), and to power off with --restart (60s); at most
    /// 1h.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub grace: Option<Duration>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// `create`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true
)]
#[command(override_usage = "\
vmmctl create NAME --kernel PATH [OPTIONS]
       vmmctl create NAME --from-disk --disk disk=NAME [OPTIONS]
       vmmctl create -f FILE [OPTIONS]
       vmmctl create disk|image|network|snapshot|nic|share … [OPTIONS]")]
pub struct Create {
    /// Of what; a VM when nothing is said.
    #[command(subcommand)]
    pub what: Option<CreateWhat>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub vm: CreateVm,
}

/// What is created.
#[derive(Debug, Subcommand)]
pub enum CreateWhat {
    /// Create a VM: the same as without this word.
    Vm(Box<CreateVm>),
    /// Create a disk: empty, a copy of a file, or an overlay of another disk.
    Disk(Box<CreateDisk>),
    /// Make an image of a file or an OCI image: the same as `image import`
    Image(Box<Import>),
    /// Make a network: the same as `network create`
    Network(CreateNetwork),
    /// Take a snapshot of a VM: the same as `snapshot create`
    Snapshot(CreateSnapshot),
    /// Add a NIC to a VM: the same as `nic attach`
    Nic(AttachNic),
    /// Share a directory of the node with a VM: the same as `share add`
    Share(AddShare),
}

/// What is changed.
#[derive(Debug, Subcommand)]
pub enum UpdateWhat {
    /// Change fields of a VM: the same as `patch`
    Vm(Box<Patch>),
    /// Make a disk larger: the same as `resize disk`
    Disk(ResizeDisk),
    /// Change a network while VMs are in it: the same as `network update`
    Network(UpdateNetwork),
    /// Change a NIC of a VM: the same as `nic update`
    Nic(UpdateNic),
    /// Set and remove labels of the node: the same as `node label`
    Node(LabelNode),
}

/// `create vm`.
#[derive(Debug, Args)]
pub struct CreateVm {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms(), required_unless_present = "files", conflicts_with = "files")]
    pub name: Option<String>,
    /// Manifest with VMs and disks as YAML or JSON; `-` is standard input. May be given several times.
    #[arg(
        short,
        long = "filename",
        value_name = "FILE",
        conflicts_with_all = ["kernel", "initrd", "cmdline", "cpus", "memory", "disks", "rate_groups", "nics", "shares", "state_dir", "run_policy", "labels", "user_data", "ssh_keys", "hostname"]
    )]
    pub files: Vec<PathBuf>,
    /// Kernel on the node: a bzImage, or an ELF with a PVH entry.
    #[arg(long, value_name = "PATH", required_unless_present_any = ["files", "from_disk"])]
    pub kernel: Option<String>,
    /// Initial RAM disk on the node.
    #[arg(long, value_name = "PATH")]
    pub initrd: Option<String>,
    /// Boot the kernel that is installed on the first disk.
    #[arg(long, conflicts_with_all = ["kernel", "initrd", "files"])]
    pub from_disk: bool,
    /// Kernel command line (console=ttyS0 when not given); with --from-disk, text to append to the
    /// disk's own command line
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub cmdline: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub cloud_init: CloudInit,
    /// Virtual CPUs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cpus: u32,
    /// Guest RAM: bytes, or with a suffix as in 512Mi or 2Gi.
    #[arg(long, value_name = "SIZE", default_value = "512Mi", value_parser = size)]
    pub memory: u64,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub resources: Resources,
    /// Disk: a raw image or block device on the node, or disk=NAME for one that vmmd keeps, or
    /// path=/srv/a.qcow2,format=qcow2. More keys, as in `vmmctl attach`: name, any-content, serial, readonly, cache, queues,
    /// block-size, on-error, bps, iops, burst, burst-ops, rate-group.
    #[arg(long = "disk", value_name = "PATH|KEY=VALUE,…")]
    pub disks: Vec<String>,
    /// Limit that several disks share (rate-group=NAME in --disk): name=NAME[,bps=100Mi][,iops=500][,burst=…][,burst-ops=…].
    #[arg(long = "rate-group", value_name = "KEY=VALUE,…")]
    pub rate_groups: Vec<String>,
    /// Network interface: network=lan, bridge=br0 or tap=tap0. In a network: address=10.80.0.9,
    /// publish=8080:80+53/udp (ports of the node that lead to the VM). More keys: name=eth0,
    /// mac=52:54:00:12:34:56, queues=4, mtu=9000, backend=vhost (the node's kernel carries its
    /// packets), link=down, off=tso+uso (offloads to hide from the guest: checksum, tso, uso,
    /// merge), rx-bps=100Mi, rx-pps=20000, tx-bps=…, tx-pps=… (limits on received and sent traffic,
    /// in bytes and packets a second)
    #[arg(long = "nic", value_name = "KEY=VALUE,…")]
    pub nics: Vec<String>,
    /// Directory of the node that the guest can mount: /srv/data, with keys as in `vmmctl share add`.
    #[arg(long = "share", value_name = "PATH[,KEY=VALUE…]")]
    pub shares: Vec<String>,
    /// Directory of the node where the daemon keeps the VM's description, logs and counters.
    #[arg(long, value_name = "PATH")]
    pub state_dir: Option<String>,
    /// Starts by the node: always-on-unless-stopped (default; also after a power-off by the guest), always-on, rerun-on-failure, manual,
    /// always-off.
    #[arg(long, value_name = "POLICY", value_parser = operation::run_policy)]
    pub run_policy: Option<RunPolicy>,
    /// Action after a panic of the guest's kernel: restart, stop, pause or ignore (by the run policy when not given).
    #[arg(long, value_name = "RULE", value_parser = operation::panic_policy, conflicts_with = "files")]
    pub on_panic: Option<PanicPolicy>,
    /// Create the VM without a balloon: the node cannot reclaim guest memory
    #[arg(long, conflicts_with_all = ["files", "free_page_reporting"])]
    pub no_balloon: bool,
    /// The node gets pages that the guest has freed back at once.
    #[arg(long, conflicts_with = "files")]
    pub free_page_reporting: bool,
    /// A screen with a keyboard and a tablet. The guest's keyboard is set to us (when not given), de, dk, fr, gb, es or jp.
    #[arg(long, value_name = "LAYOUT", value_parser = keyboard_layout, num_args = 0..=1, default_missing_value = "us", conflicts_with = "files")]
    pub display: Option<KeyboardLayout>,
    /// A console beside the serial port, hvc0 in Linux: `vmmctl console --hvc`.
    #[arg(long, conflicts_with = "files")]
    pub virtio_console: bool,
    /// Label.
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
    /// Start it too.
    #[arg(long)]
    pub start: bool,
    /// Let the daemon check everything, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Print the created VM in this form (with --dry-run: the VM that would be created)
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

fn keyboard_layout(text: &str) -> Result<KeyboardLayout, String> {
    match text {
        "us" => Ok(KeyboardLayout::Us),
        "de" => Ok(KeyboardLayout::De),
        "dk" => Ok(KeyboardLayout::Dk),
        "fr" => Ok(KeyboardLayout::Fr),
        "gb" => Ok(KeyboardLayout::Gb),
        "es" => Ok(KeyboardLayout::Es),
        "jp" => Ok(KeyboardLayout::Jp),
        _ => Err("must be us, de, dk, fr, gb, es or jp".to_owned()),
    }
}

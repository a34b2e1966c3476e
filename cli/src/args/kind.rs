//! The verbs for objects of every kind: `get`, `describe`, `create`, `update`, `edit`, `delete`.

use std::{marker::PhantomData, path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use vmmd_api::v1::{self, EventSeverity, VmPhase};

use super::{
    FORMAT, HELP, Output, Selector, Timeout, Yes,
    disk::{CreateDisk, UpdateDisk},
    image::CreateImage,
    network::{CreateNetwork, UpdateNetwork},
    node::LabelNode,
    part::{AddNic, AddShare, OfVm, RemovePart, UpdateNic},
    patch::UpdateVm,
    snapshot::CreateSnapshot,
    value::{Words, age, disk_name, named, operation_id, vm_name, words},
    vm::{CreateVm, EditVm},
};
use crate::{
    client::{Kind, Watched},
    complete,
};

/// Kinds of `get`.
#[derive(Debug, Subcommand)]
pub enum Get {
    /// List VMs
    #[command(visible_alias = "vms")]
    Vm(GetVm),
    /// List the disks that vmmd manages
    #[command(visible_alias = "disks")]
    Disk(WatchedList<v1::Disk>),
    /// List images
    #[command(visible_alias = "images")]
    Image(WatchedList<v1::Image>),
    /// List networks
    #[command(visible_alias = "networks")]
    Network(GetNetwork),
    /// List snapshots
    #[command(visible_alias = "snapshots")]
    Snapshot(List<v1::Snapshot>),
    /// List the NICs of a VM
    #[command(visible_alias = "nics")]
    Nic(OfVm),
    /// List the shares of a VM
    #[command(visible_alias = "shares")]
    Share(OfVm),
    /// Show the guest of a running VM, by its agent: operating system, addresses, file systems, users
    Guest(GetGuest),
    /// List the SSH keys of a user of a running guest, by the agent in the guest
    #[command(visible_alias = "ssh-keys")]
    SshKey(SshKeys),
    /// List operations: all in progress, and all that ended in the last hour
    #[command(visible_alias = "operations")]
    Operation(GetOperation),
    /// List or follow the events of the node
    #[command(visible_alias = "events")]
    Event(GetEvent),
    /// Show the node: capacity, committed resources, conditions
    #[command(visible_alias = "nodes")]
    Node(GetNode),
    /// List VMs, disks, images, networks and snapshots
    All,
}

/// Kinds of `describe`.
#[derive(Debug, Subcommand)]
pub enum Describe {
    /// Show everything about VMs
    #[command(visible_alias = "vms")]
    Vm(Names<v1::Vm>),
    /// Show everything about disks that vmmd manages
    #[command(visible_alias = "disks")]
    Disk(Names<v1::Disk>),
    /// Show everything about images
    #[command(visible_alias = "images")]
    Image(Names<v1::Image>),
    /// Show everything about networks, with their address assignments
    #[command(visible_alias = "networks")]
    Network(Names<v1::Network>),
    /// Show everything about snapshots
    #[command(visible_alias = "snapshots")]
    Snapshot(Names<v1::Snapshot>),
    /// Show everything about the node
    Node,
}

/// Kinds of `create`.
#[derive(Debug, Subcommand)]
pub enum Create {
    /// Create a VM from options, or the objects of a manifest
    Vm(Box<CreateVm>),
    /// Create a disk: empty, a copy of a file or image, or an overlay of another disk
    Disk(Box<CreateDisk>),
    /// Create an image from a URL, a file of the node or an OCI image
    Image(Box<CreateImage>),
    /// Create a network: a bridge with addresses, DHCP, and a way to the outside
    Network(Box<CreateNetwork>),
    /// Take a snapshot of a VM; a running VM continues
    Snapshot(CreateSnapshot),
    /// Add a NIC to a VM; a running VM gets it at once
    Nic(AddNic),
    /// Let SSH keys log in as a user of a running guest, by the agent in the guest
    SshKey(ChangeSshKeys),
    /// Share a directory of the node with a VM; a running VM with shared memory gets it at once,
    /// another VM at its next start
    Share(AddShare),
}

/// Kinds of `update`.
#[derive(Debug, Subcommand)]
pub enum Update {
    /// Change fields of a VM, one by one or by a merge patch
    Vm(Box<UpdateVm>),
    /// Make a disk larger; a running guest sees it at once
    Disk(UpdateDisk),
    /// Change a network while VMs are in it
    Network(Box<UpdateNetwork>),
    /// Change a NIC of a VM: its link and limits at once, the rest at the next start
    Nic(UpdateNic),
    /// Set (KEY=VALUE) and remove (KEY-) labels of the node
    Node(LabelNode),
}

/// Kinds of `edit`.
#[derive(Debug, Subcommand)]
pub enum Edit {
    /// Edit the manifest of a VM. After a concurrent change by another client, nothing is applied
    /// and the edited text is kept
    Vm(EditVm),
    /// Edit the manifest of a disk: labels, annotations, owner and a larger size
    Disk(EditDisk),
    /// Edit the manifest of a network: all fields but its address ranges, gateway and MTU
    Network(EditNetwork),
}

/// Kinds of `delete`.
#[derive(Debug, Subcommand)]
pub enum Delete {
    /// Delete stopped VMs; their disks stay
    #[command(visible_alias = "vms")]
    Vm(DeleteVm),
    /// Delete disks with their content; refused while a VM or an overlay needs one
    #[command(visible_alias = "disks")]
    Disk(DeleteDisk),
    /// Delete images that nothing uses
    #[command(visible_alias = "images")]
    Image(DeleteNamed<v1::Image>),
    /// Delete networks that no VM's spec names
    #[command(visible_alias = "networks")]
    Network(DeleteNamed<v1::Network>),
    /// Delete snapshots; VMs that were restored from them are not affected
    #[command(visible_alias = "snapshots")]
    Snapshot(DeleteNamed<v1::Snapshot>),
    /// Remove a NIC from a VM; the guest of a running VM is asked to eject it first
    Nic(RemovePart),
    /// Remove SSH keys of a user of a running guest, by the agent in the guest
    SshKey(ChangeSshKeys),
    /// Remove a share from a VM; the guest of a running VM is asked to eject it first
    Share(RemovePart),
}

/// Reads the name of an object: `NAME` or `KIND/NAME`.
fn name<K: Kind>(text: &str) -> Result<String, String> {
    named(text, K::WORD, K::ONE)
}

/// Options of a list.
#[derive(Debug, Default, Args)]
pub struct List<K: Kind> {
    /// Only these objects; all without a name
    #[arg(value_parser = name::<K>, add = complete::names::<K>())]
    pub names: Vec<String>,
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
    /// Only objects with this label (KEY=VALUE, KEY!=VALUE or KEY); several must all match
    #[arg(short = 'l', long, value_delimiter = ',')]
    pub selector: Vec<Selector>,
    /// Print no line with the names of the columns
    #[arg(long)]
    pub no_headers: bool,
    #[arg(skip)]
    pub kind: PhantomData<K>,
}

/// Options of a list that can be watched.
#[derive(Debug, Default, Args)]
pub struct WatchedList<K: Watched> {
    #[command(flatten)]
    pub list: List<K>,
    /// Keep printing changes as they happen
    #[arg(short, long)]
    pub watch: bool,
}

/// `get vm`.
#[derive(Debug, Default, Args)]
pub struct GetVm {
    #[command(flatten)]
    pub all: WatchedList<v1::Vm>,
    /// Only VMs in one of these phases
    #[arg(long = "phase", value_parser = words(PHASES), value_delimiter = ',', ignore_case = true)]
    pub phases: Vec<VmPhase>,
}

/// Phases of a VM.
pub const PHASES: Words<VmPhase> = &[
    ("pending", VmPhase::Pending, ""),
    ("starting", VmPhase::Starting, ""),
    ("running", VmPhase::Running, ""),
    ("paused", VmPhase::Paused, ""),
    ("stopping", VmPhase::Stopping, ""),
    ("stopped", VmPhase::Stopped, ""),
    ("failed", VmPhase::Failed, ""),
    ("terminating", VmPhase::Terminating, ""),
];

/// `get network`.
#[derive(Debug, Default, Args)]
pub struct GetNetwork {
    #[command(flatten)]
    pub all: WatchedList<v1::Network>,
    /// The same as -o json
    #[arg(long, conflicts_with = "output")]
    pub json: bool,
}

/// `get guest`.
#[derive(Debug, Args)]
pub struct GetGuest {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
}

/// `get ssh-key`.
#[derive(Debug, Args)]
pub struct SshKeys {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Name of the user in the guest
    pub user: String,
}

/// `create ssh-key`, `delete ssh-key`.
#[derive(Debug, Args)]
pub struct ChangeSshKeys {
    #[command(flatten)]
    pub of: SshKeys,
    /// Public keys, or files with public keys
    #[arg(required = true, value_name = "KEY|FILE")]
    pub keys: Vec<String>,
}

/// `get node`.
#[derive(Debug, Args)]
pub struct GetNode {
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
}

/// `get operation`.
#[derive(Debug, Args)]
pub struct GetOperation {
    /// Only the operation with this id
    #[arg(value_parser = operation_id, add = complete::operations())]
    pub id: Option<String>,
    /// Only operations on this VM
    #[arg(long, conflicts_with = "id", value_parser = vm_name, add = complete::vms())]
    pub vm: Option<String>,
    /// Only operations on this disk
    #[arg(long, conflicts_with_all = ["id", "vm"])]
    pub disk: Option<String>,
    /// Only operations that have not ended
    #[arg(long, conflicts_with = "id")]
    pub active: bool,
    /// Keep printing changes of the named operation until it has ended
    #[arg(short, long, requires = "id")]
    pub watch: bool,
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
    /// Print no line with the names of the columns
    #[arg(long)]
    pub no_headers: bool,
}

/// `get event`.
#[derive(Debug, Args)]
pub struct GetEvent {
    /// Keep printing events as they happen, across restarts of vmmd
    #[arg(short, long)]
    pub watch: bool,
    /// Only events of this VM
    #[arg(long, value_name = "NAME", value_parser = vm_name, add = complete::vms())]
    pub vm: Option<String>,
    /// Only events of at least this severity
    #[arg(long, value_parser = words(SEVERITIES))]
    pub severity: Option<EventSeverity>,
    /// Only events of this last time, as in 30s or 2h
    #[arg(long, value_name = "DURATION", value_parser = age)]
    pub since: Option<Duration>,
    /// Only the newest N events
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub limit: u32,
    /// How to print: one JSON document per line
    #[arg(short, long, value_parser = ["json"])]
    pub output: Option<String>,
}

const SEVERITIES: Words<EventSeverity> = &[
    ("normal", EventSeverity::Normal, "All events"),
    ("warning", EventSeverity::Warning, "Events that need attention"),
];

/// Names of objects.
#[derive(Debug, Default, Args)]
pub struct Names<K: Kind> {
    /// Names, as NAME or KIND/NAME
    #[arg(required = true, value_name = "NAME", value_parser = name::<K>, add = complete::names::<K>())]
    pub names: Vec<String>,
    #[arg(skip)]
    pub kind: PhantomData<K>,
}

/// `edit disk`.
#[derive(Debug, Args)]
pub struct EditDisk {
    /// Name of the disk
    #[arg(value_parser = disk_name, add = complete::disks())]
    pub name: String,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `edit network`.
#[derive(Debug, Args)]
pub struct EditNetwork {
    /// Name of the network
    #[arg(value_parser = disk_name, add = complete::names::<v1::Network>())]
    pub name: String,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `delete image`, `delete network`, `delete snapshot`.
#[derive(Debug, Default, Args)]
pub struct DeleteNamed<K: Kind> {
    #[command(flatten)]
    pub names: Names<K>,
    /// Do not fail for objects that do not exist
    #[arg(long)]
    pub ignore_not_found: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `delete disk`.
#[derive(Debug, Args)]
pub struct DeleteDisk {
    /// Names of disks, as NAME or disk/NAME
    #[arg(value_name = "NAME", value_parser = disk_name, add = complete::disks(), required_unless_present = "all")]
    pub names: Vec<String>,
    /// All disks that no VM and no other disk uses
    #[arg(long, conflicts_with = "names")]
    pub all: bool,
    /// Do not fail for disks that do not exist
    #[arg(long)]
    pub ignore_not_found: bool,
    #[command(flatten)]
    pub yes: Yes,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `delete vm`.
#[derive(Debug, Args)]
pub struct DeleteVm {
    #[command(flatten)]
    pub which: Deleted,
    /// Kill running VMs first
    #[arg(long)]
    pub force: bool,
    /// Also delete, with their content, the disks that the VMs' specs name and vmmd manages
    #[arg(long, conflicts_with_all = ["files", "no_wait"])]
    pub with_disks: bool,
    /// Do not wait for the end: print the operation
    #[arg(long, conflicts_with = "files")]
    pub no_wait: bool,
    /// Do not fail for VMs and disks that do not exist
    #[arg(long)]
    pub ignore_not_found: bool,
    #[command(flatten)]
    pub yes: Yes,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// Objects to delete.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Deleted {
    /// Names of VMs, as NAME or vm/NAME
    #[arg(value_name = "NAME", value_parser = vm_name, add = complete::vms())]
    pub names: Vec<String>,
    /// VMs with this label (KEY=VALUE, KEY!=VALUE or KEY); several must all match
    #[arg(short = 'l', long, value_delimiter = ',')]
    pub selector: Vec<Selector>,
    /// All VMs
    #[arg(long)]
    pub all: bool,
    /// Objects of a manifest, VMs first; `-` is standard input. May be given several times
    #[arg(short, long = "filename", value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

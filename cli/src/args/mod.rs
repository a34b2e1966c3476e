//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::contexts::Connection;

pub mod cloud_init;
mod create;
mod diff;
pub mod disk;
pub mod image;
pub mod label;
pub mod memory;
pub mod migration;
pub mod network;
pub mod nic;
pub mod node;
mod objects;
pub mod observe;
pub mod operation;
pub mod patch;
pub mod resources;
pub mod run;
pub mod share;
mod show;
pub mod snapshot;
pub mod ssh;
mod targets;
mod value;
mod verbs;
pub mod wait;

pub use self::create::{Apply, Create, CreateVm, CreateWhat, Edit, EditVm, EditWhat, UpdateWhat};
pub use self::diff::Diff;
use self::disk::{Attach, Detach, Limit, ResizeDisk, Stats};
pub use self::objects::{Delete, List, Names, WatchedList};
pub use self::patch::Patch;
pub use self::show::{Describe, DescribeWhat, FORMAT, Get, GetVm, GetWhat, HELP, Phase};
pub use self::targets::{Targets, Timeout, Yes};
pub use self::value::{Label, Selector, age, disk_name, duration, image_name, operation_id, size, vm_name};
pub use self::verbs::{
    Act, Console, DeleteDisk, DeleteObjects, DeleteVm, DeleteWhat, Ending, PortForward, Restart, Screenshot,
    SendKey, Start, Stop, Type, Vnc,
};
pub use self::wait::Wait;
pub use crate::output::format::Output;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  another error
  2  wrong command line
  3  there is no such VM, disk, operation, or file of the node
  4  it exists already, or differs from what is asked for
  5  not possible in its present state
  6  a manifest, a value or a file is not valid
  7  vmmd can't be reached, or ended the connection
  8  not allowed
  9  the node has not enough memory or space, the VM no free slot, or the like
  10 no answer in time (also of a guest that does not let go of a disk)
  11 cancelled
  12 the certificate of vmmd can't be trusted
  13 done, but a guest that was to power off had to be killed
With several names, the code is that of the first failure; all the others are still tried.";

/// Creates, starts, stops and watches virtual machines and their disks through vmmd.
#[derive(Debug, Parser)]
#[command(name = "vmmctl", version, max_term_width = 100, after_long_help = EXIT_CODES)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub connection: Connection,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// `config`.
#[derive(Debug, Subcommand)]
pub enum Config {
    /// List the contexts.
    GetContexts,
    /// Use a context when none is named.
    UseContext {
        /// Name of the context.
        name: String,
    },
    /// Make or change a context: with --endpoint, --ca, --cert and --key, or with --socket.
    SetContext {
        /// Name of the context.
        name: String,
    },
    /// Delete a context.
    DeleteContext {
        /// Name of the context.
        name: String,
    },
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create or change VMs and disks to match a manifest
    Apply(Apply),
    /// Create a VM or an object of another kind; it must not exist
    Create(Box<Create>),
    /// List VMs, or objects of another kind
    #[command(visible_aliases = ["list", "ls"])]
    Get(Get),
    /// Show everything about VMs, or about objects of another kind
    Describe(Describe),
    /// Change a VM in an editor ($VISUAL, $EDITOR or vi).
    Edit(Edit),
    /// Print what `apply` would change; ends with 4 when that is something.
    Diff(Diff),
    /// Change fields of a VM by a merge patch, or one by one.
    Patch(Box<Patch>),
    /// Change a VM or an object of another kind, field by field
    Update {
        /// Kind of the object.
        #[command(subcommand)]
        what: UpdateWhat,
    },
    /// Set (KEY=VALUE) and remove (KEY-) labels of VMs and disks.
    Label(label::Label),
    /// Set (KEY=VALUE) and remove (KEY-) annotations of VMs and disks.
    Annotate(label::Label),
    /// Wait until VMs are as they are to be, or an operation has ended.
    Wait(Wait),
    /// Start stopped VMs.
    Start(Start),
    /// Press the reset button of running VMs: their guests are not asked.
    Reset(Act),
    /// Do something with an operation.
    Operation {
        /// What.
        #[command(subcommand)]
        what: operation::Operation,
    },
    /// Ask guests to power off; kill guests that still run when the grace period ends
    Stop(Stop),
    /// Stop VMs, then start them.
    Restart(Restart),
    /// Hold the vCPUs of running VMs.
    Pause(Act),
    /// Resume paused VMs
    Resume(Act),
    /// Delete stopped VMs (their disks stay), or objects of another kind
    #[command(visible_alias = "rm")]
    Delete(DeleteObjects),
    /// Add a disk to a VM; one that runs gets it at once.
    Attach(Box<Attach>),
    /// Take a disk from a VM; one that runs is asked to let go of it first.
    Detach(Detach),
    /// Make a disk larger; a running guest sees it at once.
    Resize {
        /// Of what.
        #[command(subcommand)]
        what: Resize,
    },
    /// Make a VM of an image and start it.
    Run(Box<run::Run>),
    /// Import images, which disks are made of, list and delete them.
    Image {
        /// What.
        #[command(subcommand)]
        what: image::Image,
    },
    /// Give a VM another NIC, take one away, or change one.
    Nic {
        /// What.
        #[command(subcommand)]
        what: nic::Nic,
    },
    /// Share a directory of the node with a VM, take a share away, or list them.
    Share {
        /// What.
        #[command(subcommand)]
        what: share::Share,
    },
    /// Make, show and delete networks of the node.
    Network {
        /// What.
        #[command(subcommand)]
        what: network::Network,
    },
    /// Change the resources of a VM
    Set {
        /// Of what.
        #[command(subcommand)]
        what: memory::Set,
    },
    /// Change how much may flow through a disk of a VM, or through a group of them.
    Limit(Limit),
    /// Show the usage and counters of a running VM: processors, memory, NICs, disks with their
    /// latencies
    Stats(Stats),
    /// Show what running VMs use of the node, again and again.
    Top(observe::Top),
    /// Show the events of the node
    Events(observe::Events),
    /// Print the output of a guest's serial port, or the log of its vmm
    Logs(observe::Logs),
    /// Collect everything about a VM into one archive for troubleshooting
    Diagnose(observe::Diagnose),
    /// Take, list and delete snapshots of VMs.
    Snapshot {
        /// What.
        #[command(subcommand)]
        what: snapshot::Snapshot,
    },
    /// Restore a VM from a snapshot.
    Restore(snapshot::Restore),
    /// Create VMs from a snapshot; they share the memory that none of them changes.
    Clone(snapshot::Clone),
    /// Move a running VM to another node.
    Migrate(migration::Migrate),
    /// Attach the terminal to a VM's serial console; ^] leaves.
    Console(Console),
    /// Show the screen of a VM in a VNC viewer, or let viewers connect.
    Vnc(Vnc),
    /// Make ports of this machine lead to ports of a VM in a network of its node, through vmmd.
    PortForward(PortForward),
    /// Log in to a VM in a network of its node by SSH, through vmmd: no address or port of it has to be reachable from here.
    Ssh(ssh::Ssh),
    /// Copy files to and from such a VM.
    Scp(ssh::Scp),
    /// Write a picture of the screen of a VM to a PNG file.
    Screenshot(Screenshot),
    /// Press keys on the keyboard of a VM.
    SendKey(SendKey),
    /// Type a text on the keyboard of a VM.
    Type(Type),
    /// Show the node (capacity, committed resources, conditions), cordon, drain and uncordon it,
    /// check whether a VM fits
    Node(node::Node),
    /// Keep how to reach the vmmd of other nodes, by name.
    Config {
        /// What.
        #[command(subcommand)]
        what: Config,
    },
    /// Print the completion script for a shell.
    Completion {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Print the versions of vmmctl and vmmd.
    Version {
        /// Only that of vmmctl; needs no daemon.
        #[arg(long)]
        client: bool,
    },
    /// Write man pages and completion scripts (for packagers).
    #[command(hide = true)]
    Generate {
        /// Folder to write them into.
        directory: PathBuf,
    },
}

/// `resize`.
#[derive(Debug, Subcommand)]
pub enum Resize {
    /// Make a disk larger.
    Disk(ResizeDisk),
}

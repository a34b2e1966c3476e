//! The command line.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};

use crate::contexts::Connection;

mod alias;
pub mod disk;
pub mod image;
pub mod kind;
pub mod migration;
pub mod network;
pub mod node;
pub mod observe;
pub mod part;
pub mod patch;
pub mod snapshot;
pub mod ssh;
pub mod value;
pub mod verbs;
pub mod vm;
pub mod wait;

pub use self::alias::canonical;
pub use self::value::{
    Label, LabelChange, Selector, age, disk_name, duration, image_name, operation_id, size, vm_name,
};
pub use self::verbs::Targets;
pub use crate::output::format::Output;

/// Name of the value of `--output`.
pub const FORMAT: &str = "FORMAT";
/// Help text for the value of `--output`.
pub const HELP: &str = "How to print: wide, yaml, json, name, jsonpath='{.metadata.name}' (a line for each object), or \
                        custom-columns=NAME:.metadata.name,PHASE:.status.phase";

const AFTER_HELP: &str = "\
The grammar is VERB KIND NAME. The kinds are vm, disk, image, network, snapshot, nic, share, operation, event and node.
Without a kind, a verb is for VMs. `vmmctl help get` lists the kinds of a verb.

Exit codes:
  0  done
  1  another error
  2  wrong command line
  3  the VM, disk, operation, or file of the node does not exist
  4  the object exists already, or differs from the request
  5  not possible in the present state
  6  a manifest, a value or a file is not valid
  7  vmmd cannot be reached, or ended the connection
  8  not allowed
  9  the node has not enough memory or space, or the VM no free slot
  10 no answer in time (also of a guest that does not release a disk)
  11 cancelled
  12 the certificate of vmmd is not trusted
  13 done, but a guest that did not power off was killed
With several names, the code is that of the first failure; all the others are still tried.";

/// Manages virtual machines, their disks, images and networks through vmmd
#[derive(Debug, Parser)]
#[command(name = "vmmctl", version, max_term_width = 100, after_long_help = AFTER_HELP)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(flatten)]
    pub connection: Connection,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// `config`.
#[derive(Debug, Subcommand)]
pub enum Config {
    /// List the contexts
    GetContexts,
    /// Select the context for commands without --context
    UseContext {
        /// Name of the context
        name: String,
    },
    /// Create or change a context: with --endpoint, --ca, --cert and --key, or with --socket
    SetContext {
        /// Name of the context
        name: String,
    },
    /// Delete a context
    DeleteContext {
        /// Name of the context
        name: String,
    },
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List VMs or objects of another kind
    #[command(subcommand, visible_aliases = ["list", "ls"], disable_help_subcommand = true)]
    Get(kind::Get),
    /// Show everything about VMs or objects of another kind
    #[command(subcommand, disable_help_subcommand = true)]
    Describe(kind::Describe),
    /// Create a VM or an object of another kind; it must not exist
    #[command(subcommand, disable_help_subcommand = true)]
    Create(kind::Create),
    /// Change a VM or an object of another kind, field by field
    #[command(subcommand, disable_help_subcommand = true)]
    Update(kind::Update),
    /// Change a VM, a disk or a network in an editor ($VISUAL, $EDITOR or vi)
    #[command(subcommand, disable_help_subcommand = true)]
    Edit(kind::Edit),
    /// Delete stopped VMs (their disks stay), or objects of another kind
    #[command(subcommand, visible_alias = "rm", disable_help_subcommand = true)]
    Delete(kind::Delete),
    /// Create or change VMs, disks and networks to match a manifest
    Apply(vm::Apply),
    /// Print the changes that `apply` would make; ends with 4 if there are any
    Diff(vm::Files),
    /// Create a VM from an image and start it
    Run(Box<vm::Run>),
    /// Start stopped VMs
    Start(verbs::Start),
    /// Ask guests to power off; kill guests that still run when the grace period ends
    Stop(verbs::Stop),
    /// Stop VMs, then start them
    Restart(verbs::Restart),
    /// Press the reset button of running VMs, without the consent of their guests
    Reset(verbs::Act),
    /// Send a non-maskable interrupt to running VMs: many systems write a crash dump, or show where they hang
    Nmi(verbs::Act),
    /// Pause the vCPUs of running VMs
    Pause(verbs::Act),
    /// Resume paused VMs
    Resume(verbs::Act),
    /// Wait for a state of VMs, or for the end of an operation
    Wait(wait::Wait),
    /// Add a disk to a VM; a running VM gets it at once
    Attach(Box<disk::Attach>),
    /// Remove disks from a VM; the guest of a running VM is asked to release them first
    Detach(disk::Detach),
    /// Put a medium into a CD-ROM drive of a VM, also while the VM runs
    Insert(disk::Insert),
    /// Take the medium out of a CD-ROM drive of a VM, also while the VM runs
    Eject(disk::Eject),
    /// Change the throughput limits of a disk of a VM, or of a group of disks
    Limit(disk::Limit),
    /// Change the resources of a VM
    #[command(subcommand, disable_help_subcommand = true)]
    Set(vm::Set),
    /// Set (KEY=VALUE) and remove (KEY-) labels of VMs and disks
    Label(verbs::Labels),
    /// Set (KEY=VALUE) and remove (KEY-) annotations of VMs and disks
    Annotate(verbs::Labels),
    /// Show the usage and counters of a running VM: processors, memory, NICs, disks with their
    /// latencies
    Stats(disk::Stats),
    /// Show the resource usage of running VMs, repeatedly
    Top(observe::Top),
    /// Print the output of a guest's serial port, or the log of its vmm
    Logs(observe::Logs),
    /// Collect everything about a VM into one archive for troubleshooting
    Diagnose(observe::Diagnose),
    /// Attach the terminal to the serial console of a VM; ^] detaches
    Console(verbs::Console),
    /// Show the screen of a VM in a VNC viewer, or let viewers connect
    Vnc(verbs::Vnc),
    /// Write a picture of the screen of a VM to a PNG file
    Screenshot(verbs::Screenshot),
    /// Press keys on the keyboard of a VM
    SendKey(verbs::SendKey),
    /// Type a text on the keyboard of a VM
    Type(verbs::Type),
    /// Forward ports of this machine to ports of a VM in a network of its node, through vmmd
    PortForward(verbs::PortForward),
    /// Connect to programs of a guest by the socket device of its VM (AF_VSOCK), without a network
    #[command(subcommand, disable_help_subcommand = true)]
    Vsock(verbs::Vsock),
    /// Connect to programs of a guest by the channels of its VM (virtio-serial ports), without a network
    #[command(subcommand, disable_help_subcommand = true)]
    Channel(verbs::Channel),
    /// Run a command in the guest of a VM, by the agent in the guest
    Exec(verbs::Exec),
    /// Copy a file to or from the guest of a VM, by the agent in the guest
    Cp(verbs::Cp),
    /// Open a shell in a guest: by SSH over the socket device or the network of its VM, else at its serial console
    Shell(ssh::Shell),
    /// Log in to a VM in a network of its node by SSH, through vmmd: no port of the VM must be reachable from here
    Ssh(ssh::Ssh),
    /// Copy files to and from a VM in a network of its node, through vmmd
    Scp(ssh::Scp),
    /// Restore a VM from a snapshot
    Restore(snapshot::Restore),
    /// Create VMs from a snapshot; they share memory until they change it
    Clone(snapshot::Clone),
    /// Move a running VM to another node
    #[command(subcommand, disable_help_subcommand = true)]
    Migrate(migration::Migrate),
    /// Upload and prune images
    #[command(subcommand)]
    Image(image::Image),
    /// Export and import snapshots
    #[command(subcommand)]
    Snapshot(snapshot::Snapshot),
    /// Cordon, drain and uncordon the node, and check whether a VM fits
    #[command(subcommand)]
    Node(node::Node),
    /// Cancel an operation
    #[command(subcommand)]
    Operation(Operation),
    /// Manage named connections to the vmmd of other nodes
    #[command(subcommand)]
    Config(Config),
    /// Print the completion script for a shell
    Completion {
        /// Name of the shell
        shell: clap_complete::Shell,
    },
    /// Print the versions of vmmctl and vmmd
    Version {
        /// Print only the version of vmmctl; needs no daemon
        #[arg(long)]
        client: bool,
    },
    /// Write man pages and completion scripts (for packagers)
    #[command(hide = true)]
    Generate {
        /// Folder to write them into
        directory: PathBuf,
    },
}

/// Verbs of `operation`.
#[derive(Debug, Subcommand)]
pub enum Operation {
    /// End an operation early: a start leaves the VM stopped, a graceful stop leaves it running
    Cancel {
        /// Id of the operation, as `vmmctl get operation` shows it
        #[arg(value_parser = operation_id, add = crate::complete::operations())]
        id: String,
        #[command(flatten)]
        timeout: Timeout,
    },
}

/// How long a change may take.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Timeout {
    /// Give up after this time, at most 1h; a start or stop in progress is cancelled
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
}

/// Confirmation that data may be destroyed.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Yes {
    /// Do not ask before data is destroyed; required without a terminal
    #[arg(short = 'y', long)]
    pub yes: bool,
}

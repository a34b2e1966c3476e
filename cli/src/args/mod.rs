//! The command line.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};

use proto::v1::RunPolicy;

use crate::manifest::quantity;

pub mod disk;
pub mod memory;
pub mod node;
pub mod observe;
pub mod operation;
pub mod resources;
mod value;

use self::disk::{Attach, CreateDisk, Detach, GetDisk, Limit, ResizeDisk, Stats};
use self::resources::Resources;
pub use self::value::{Label, Selector, duration};

/// Where vmmd listens by default.
pub const SOCKET: &str = "/run/vmmd/vmmd.sock";

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  another error
  2  wrong command line
  3  there is no such VM or disk
  4  it exists already, or differs from what is asked for
  5  not possible in its present state
  6  a manifest, a value or a file is not valid
  7  vmmd can't be reached
  8  not allowed
  9  the node has not enough memory or space, the VM no free slot, or the like
  10 no answer in time (also of a guest that does not let go of a disk), or cancelled
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

/// Which daemon.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Which vmmd")]
pub struct Connection {
    /// Context of the configuration file, with how to reach a vmmd [env: VMMCTL_CONTEXT=]
    #[arg(long, global = true, display_order = 900, value_name = "NAME")]
    pub context: Option<String>,
    /// Socket of a vmmd on this node [env: VMMD_SOCKET=] [default: /run/vmmd/vmmd.sock]
    #[arg(
        long,
        global = true,
        display_order = 901,
        value_name = "PATH",
        conflicts_with = "endpoint"
    )]
    pub socket: Option<PathBuf>,
    /// A vmmd over TCP: https://HOST:PORT. Needs the next three
    #[arg(long, global = true, display_order = 902, value_name = "URL")]
    pub endpoint: Option<String>,
    /// CA of the certificate of that vmmd, PEM
    #[arg(long, global = true, display_order = 903, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Your certificate for it, PEM
    #[arg(long, global = true, display_order = 904, value_name = "FILE")]
    pub cert: Option<PathBuf>,
    /// The key of your certificate, PEM
    #[arg(long, global = true, display_order = 905, value_name = "FILE")]
    pub key: Option<PathBuf>,
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
    /// Make VMs and disks be as a manifest says: create them, or change those that exist.
    Apply(Apply),
    /// Create a VM or a disk from a manifest or from flags; it must not exist.
    Create(Box<Create>),
    /// List VMs or disks.
    Get {
        /// Of what.
        #[command(subcommand)]
        what: Get,
    },
    /// Show everything about a VM or a disk.
    Describe {
        /// Of what.
        #[command(subcommand)]
        what: Describe,
    },
    /// Change a VM in an editor ($VISUAL, $EDITOR or vi).
    Edit {
        /// Of what.
        #[command(subcommand)]
        what: Edit,
    },
    /// Start stopped VMs.
    Start(Start),
    /// Press the reset button of running VMs: their guests are not asked.
    Reset(Names),
    /// Do something with an operation.
    Operation {
        /// What.
        #[command(subcommand)]
        what: operation::Operation,
    },
    /// Ask guests to power off; kill those that have not when the grace period ends.
    Stop(Stop),
    /// Stop VMs, then start them.
    Restart(Restart),
    /// Hold the vCPUs of running VMs.
    Pause(Names),
    /// Let paused VMs go on.
    Resume(Names),
    /// Delete stopped VMs (their disks stay), or disks with what is on them.
    Delete(Delete),
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
    /// Change what a VM has to do with.
    Set {
        /// Of what.
        #[command(subcommand)]
        what: memory::Set,
    },
    /// Change how much may flow through a disk of a VM, or through a group of them.
    Limit(Limit),
    /// Show what a running VM uses and has done: processors, memory, NICs, disks with their latencies.
    Stats(Stats),
    /// Show what running VMs use of the node, again and again.
    Top(observe::Top),
    /// Show what has happened on the node.
    Events(observe::Events),
    /// Print what a guest wrote to its serial port, or the log of its vmm.
    Logs(observe::Logs),
    /// Collect everything about a VM into one archive, for whoever is to find out what is wrong.
    Diagnose(observe::Diagnose),
    /// Attach the terminal to a VM's serial console; ^] leaves.
    Console(Console),
    /// Show the node (capacity, what is committed, conditions), take it out of use and back, ask whether a VM fits.
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
    /// Let the daemon check everything, print what would change, and change nothing. Of new disks only the manifest is
    /// checked.
    #[arg(long, conflicts_with = "restart")]
    pub dry_run: bool,
}

/// `edit`.
#[derive(Debug, Subcommand)]
pub enum Edit {
    /// Change a VM. When it was changed by somebody else meanwhile nothing is applied, and what was written is kept.
    Vm(EditVm),
}

/// `edit vm`.
#[derive(Debug, Args)]
pub struct EditVm {
    /// Name of the VM.
    pub name: String,
    /// Restart it when something is left that only a start can change.
    #[arg(long)]
    pub restart: bool,
    /// How long the guest may take to let go of disks (30s when not given), and to power off with --restart (60s); at most
    /// 1h.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub grace: Option<Duration>,
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
       vmmctl create -f FILE [OPTIONS]
       vmmctl create disk NAME [OPTIONS]")]
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
    Vm(CreateVm),
    /// Create a disk: empty, a copy of a file, or an overlay of another disk.
    Disk(CreateDisk),
}

/// `create vm`.
#[derive(Debug, Args)]
pub struct CreateVm {
    /// Name of the VM.
    #[arg(required_unless_present = "files", conflicts_with = "files")]
    pub name: Option<String>,
    /// Manifest with VMs and disks as YAML or JSON; `-` is standard input. May be given several times.
    #[arg(
        short,
        long = "filename",
        value_name = "FILE",
        conflicts_with_all = ["kernel", "initrd", "cmdline", "cpus", "memory", "disks", "rate_groups", "nics", "run_policy", "labels"]
    )]
    pub files: Vec<PathBuf>,
    /// Kernel on the node: a bzImage, or an ELF with a PVH entry.
    #[arg(long, value_name = "PATH", required_unless_present = "files")]
    pub kernel: Option<String>,
    /// Initial RAM disk on the node.
    #[arg(long, value_name = "PATH")]
    pub initrd: Option<String>,
    /// Kernel command line.
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "console=ttyS0",
        allow_hyphen_values = true
    )]
    pub cmdline: String,
    /// Virtual CPUs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cpus: u32,
    /// Guest RAM: bytes, or with a suffix as in 512Mi or 2Gi.
    #[arg(long, value_name = "SIZE", default_value = "512Mi", value_parser = quantity::bytes)]
    pub memory: u64,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub resources: Resources,
    /// Disk: a raw image or block device on the node, or disk=NAME for one that vmmd keeps, or
    /// path=/srv/a.qcow2,format=qcow2. More keys, as in `vmmctl attach`: name, serial, readonly, cache, queues,
    /// block-size, on-error, bps, iops, burst, burst-ops, rate-group, boot-order.
    #[arg(long = "disk", value_name = "PATH|KEY=VALUE,…")]
    pub disks: Vec<String>,
    /// Limit that several disks share (rate-group=NAME in --disk): name=NAME[,bps=100Mi][,iops=500][,burst=…][,burst-ops=…].
    #[arg(long = "rate-group", value_name = "KEY=VALUE,…")]
    pub rate_groups: Vec<String>,
    /// Network interface: bridge=br0 or tap=tap0 [,mac=52:54:00:12:34:56][,name=eth0].
    #[arg(long = "nic", value_name = "KEY=VALUE,…")]
    pub nics: Vec<String>,
    /// When the node starts it by itself: always-on-unless-stopped (when not given), always-on, rerun-on-failure, manual,
    /// always-off.
    #[arg(long, value_name = "POLICY", value_parser = operation::run_policy)]
    pub run_policy: Option<RunPolicy>,
    /// The guest can't be asked to give memory back.
    #[arg(long, conflicts_with_all = ["files", "free_page_reporting"])]
    pub no_balloon: bool,
    /// The node gets pages that the guest has freed back at once.
    #[arg(long, conflicts_with = "files")]
    pub free_page_reporting: bool,
    /// Label.
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
    /// Start it too.
    #[arg(long)]
    pub start: bool,
    /// Let the daemon check everything, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Print what was made (with --dry-run: what would be) in this form.
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
}

/// `get`.
#[derive(Debug, Subcommand)]
pub enum Get {
    /// List VMs.
    #[command(visible_alias = "vms")]
    Vm(GetVm),
    /// List the disks that vmmd keeps.
    #[command(visible_alias = "disks")]
    Disk(GetDisk),
    /// List what takes long: what is under way, and what has ended in the last hour.
    #[command(visible_alias = "operations")]
    Operation(operation::GetOperation),
}

/// `get vm`.
#[derive(Debug, Args)]
pub struct GetVm {
    /// Only these; all when none is named.
    pub names: Vec<String>,
    /// How to print them.
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
    /// Go on printing changes as they happen.
    #[arg(short, long)]
    pub watch: bool,
    /// Only VMs with this label (KEY=VALUE, KEY!=VALUE or KEY); several must all hold.
    #[arg(
        short = 'l',
        long = "selector",
        value_name = "SELECTOR",
        value_delimiter = ','
    )]
    pub selectors: Vec<Selector>,
    /// Only VMs in this phase; in any of several.
    #[arg(
        long = "phase",
        value_enum,
        value_name = "PHASE",
        value_delimiter = ',',
        ignore_case = true
    )]
    pub phases: Vec<Phase>,
    /// Leave out the line with the columns' names.
    #[arg(long)]
    pub no_headers: bool,
}

/// A phase of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "as in the API")]
pub enum Phase {
    Pending,
    Starting,
    Running,
    Paused,
    Migrating,
    Stopping,
    Stopped,
    Failed,
    Terminating,
}

impl Phase {
    /// As the daemon takes it.
    pub fn wire(self) -> proto::v1::VmPhase {
        use proto::v1::VmPhase;
        match self {
            Self::Pending => VmPhase::Pending,
            Self::Starting => VmPhase::Starting,
            Self::Running => VmPhase::Running,
            Self::Paused => VmPhase::Paused,
            Self::Migrating => VmPhase::Migrating,
            Self::Stopping => VmPhase::Stopping,
            Self::Stopped => VmPhase::Stopped,
            Self::Failed => VmPhase::Failed,
            Self::Terminating => VmPhase::Terminating,
        }
    }
}

/// `describe`.
#[derive(Debug, Subcommand)]
pub enum Describe {
    /// Show everything about VMs.
    #[command(visible_alias = "vms")]
    Vm(Names),
    /// Show everything about disks that vmmd keeps.
    #[command(visible_alias = "disks")]
    Disk(DiskNames),
}

/// `resize`.
#[derive(Debug, Subcommand)]
pub enum Resize {
    /// Make a disk larger.
    Disk(ResizeDisk),
}

/// Names of disks.
#[derive(Debug, Args)]
pub struct DiskNames {
    /// Names of disks.
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}

/// Names of VMs.
#[derive(Debug, Args)]
pub struct Names {
    /// Names of VMs.
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}

/// `start`.
#[derive(Debug, Args)]
pub struct Start {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub names: Names,
    /// Do not wait for the end: print the operation that has begun.
    #[arg(long)]
    pub no_wait: bool,
}

/// How a guest is made to end.
#[derive(Clone, Copy, Debug, Args)]
pub struct Ending {
    /// Do not wait for the end: print the operation that has begun.
    #[arg(long)]
    pub no_wait: bool,
    /// How long guests may take to power off, at most 1h (60s when not given).
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub grace: Option<Duration>,
    /// Kill them at once, as if the power failed.
    #[arg(long, conflicts_with = "grace")]
    pub force: bool,
}

/// `stop`.
#[derive(Debug, Args)]
pub struct Stop {
    /// Names of VMs.
    #[arg(required_unless_present = "all", value_name = "NAME")]
    pub names: Vec<String>,
    /// All VMs that run.
    #[arg(long, conflicts_with = "names")]
    pub all: bool,
    /// The node goes down: VMs whose run policy starts them are started when it is up again.
    #[arg(long)]
    pub evacuate: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ending: Ending,
}

/// `restart`.
#[derive(Debug, Args)]
pub struct Restart {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub names: Names,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ending: Ending,
}

/// `delete`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true
)]
#[command(override_usage = "\
vmmctl delete [OPTIONS] NAME…
       vmmctl delete disk [OPTIONS] NAME…")]
pub struct Delete {
    /// Of what; VMs when nothing is said.
    #[command(subcommand)]
    pub what: Option<DeleteWhat>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub vms: DeleteVm,
}

/// What is deleted.
#[derive(Debug, Subcommand)]
pub enum DeleteWhat {
    /// Delete VMs: the same as without this word.
    #[command(visible_alias = "vms")]
    Vm(DeleteVm),
    /// Delete disks with what is on them. Refused while a VM or an overlay needs one.
    #[command(visible_alias = "disks")]
    Disk(DeleteDisk),
}

/// `delete disk`.
#[derive(Debug, Args)]
pub struct DeleteDisk {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub names: DiskNames,
    /// Do not fail for disks that are not there.
    #[arg(long)]
    pub ignore_not_found: bool,
}

/// `delete vm`.
#[derive(Debug, Args)]
pub struct DeleteVm {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub names: Names,
    /// Kill them first when they run.
    #[arg(long)]
    pub force: bool,
    /// Do not wait for the end: print the operation that has begun.
    #[arg(long)]
    pub no_wait: bool,
    /// Do not fail for VMs that are not there.
    #[arg(long)]
    pub ignore_not_found: bool,
}

/// `console`.
#[derive(Debug, Args)]
pub struct Console {
    /// Name of the VM.
    pub name: String,
    /// Leave out what was printed before.
    #[arg(long)]
    pub no_replay: bool,
}

/// How VMs and disks are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table with more columns.
    Wide,
    /// Manifests that can be applied again.
    Yaml,
    /// Canonical JSON.
    Json,
    /// Names alone.
    Name,
}

/// How what is no manifest is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NodeOutput {
    /// YAML.
    Yaml,
    /// Canonical JSON.
    Json,
}

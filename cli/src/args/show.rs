//! Looking at VMs and disks: `get`, `describe`.

use clap::{Args, Subcommand, ValueEnum};

use vmmd_api::v1;

use super::{List, Names, WatchedList, nic::ListNics, operation, share::ListShares};
use crate::output::format::Output;

/// `get`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true
)]
pub struct Get {
    /// Of what; VMs when nothing is said.
    #[command(subcommand)]
    pub what: Option<GetWhat>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub vms: GetVm,
}

/// What is listed.
#[derive(Debug, Subcommand)]
pub enum GetWhat {
    /// List VMs: the same as without this word.
    #[command(visible_alias = "vms")]
    Vm(GetVm),
    /// List the disks that vmmd keeps.
    #[command(visible_alias = "disks")]
    Disk(WatchedList<v1::Disk>),
    /// List operations: all in progress, and all that ended in the last hour
    #[command(visible_alias = "operations")]
    Operation(operation::GetOperation),
    /// Show the node.
    #[command(visible_alias = "nodes")]
    Node(GetNode),
    /// List images
    #[command(visible_alias = "images")]
    Image(WatchedList<v1::Image>),
    /// List networks
    #[command(visible_alias = "networks")]
    Network(super::network::ListNetworks),
    /// List snapshots
    #[command(visible_alias = "snapshots")]
    Snapshot(List<v1::Snapshot>),
    /// List the NICs of a VM
    #[command(visible_alias = "nics")]
    Nic(ListNics),
    /// List the shares of a VM
    #[command(visible_alias = "shares")]
    Share(ListShares),
    /// Show events: as `vmmctl events`.
    #[command(visible_alias = "events")]
    Event(super::observe::Events),
    /// List VMs, then disks, images, networks and snapshots.
    All,
}

/// `get node`.
#[derive(Debug, Args)]
pub struct GetNode {
    /// How to print it.
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
}

/// Name of the value of `--output`.
pub const FORMAT: &str = "FORMAT";
/// Help text for the value of `--output`.
pub const HELP: &str = "How to print: wide, yaml, json, name, jsonpath='{.metadata.name}' (a line each), or \
                        custom-columns=NAME:.metadata.name,PHASE:.status.phase";

/// `get vm`.
#[derive(Debug, Default, Args)]
pub struct GetVm {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub all: WatchedList<v1::Vm>,
    /// Only VMs in this phase; in any of several.
    #[arg(
        long = "phase",
        value_enum,
        value_name = "PHASE",
        value_delimiter = ',',
        ignore_case = true
    )]
    pub phases: Vec<Phase>,
}

/// A phase of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "as in the API")]
pub enum Phase {
    Pending,
    Starting,
    Running,
    Paused,
    Stopping,
    Stopped,
    Failed,
    Terminating,
}

impl Phase {
    /// As the daemon takes it.
    pub fn wire(self) -> v1::VmPhase {
        use v1::VmPhase;
        match self {
            Self::Pending => VmPhase::Pending,
            Self::Starting => VmPhase::Starting,
            Self::Running => VmPhase::Running,
            Self::Paused => VmPhase::Paused,
            Self::Stopping => VmPhase::Stopping,
            Self::Stopped => VmPhase::Stopped,
            Self::Failed => VmPhase::Failed,
            Self::Terminating => VmPhase::Terminating,
        }
    }
}

/// `describe`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true
)]
pub struct Describe {
    /// Of what; VMs when nothing is said.
    #[command(subcommand)]
    pub what: Option<DescribeWhat>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub vms: Names<v1::Vm>,
}

/// What is described.
#[derive(Debug, Subcommand)]
pub enum DescribeWhat {
    /// Show everything about VMs: the same as without this word.
    #[command(visible_alias = "vms")]
    Vm(Names<v1::Vm>),
    /// Show everything about disks that vmmd keeps.
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
    /// Show everything about the node.
    Node,
}

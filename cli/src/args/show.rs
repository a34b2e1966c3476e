//! Looking at VMs and disks: `get`, `describe`.

use clap::{Args, Subcommand, ValueEnum};

use super::{DiskNames, Names, Selector, disk::GetDisk, operation, vm_name};

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
    #[arg(value_parser = vm_name)]
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

//! What is done to VMs and disks that exist: `start`, `stop`, `restart`, `delete`, `console`.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::duration;

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

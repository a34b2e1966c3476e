//! The command line of migrations.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use super::{duration, size, vm_name};
use crate::complete;

/// `migrate`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "\
Examples:
  vmmctl migrate web --to node-2.example:7443
  vmmctl migrate web --to node-2.example:7443 --downtime-limit 100ms --bandwidth 200Mi
  vmmctl migrate cancel web"
)]
pub struct Migrate {
    /// Operation on a migration in progress
    #[command(subcommand)]
    pub what: Option<MigrateVerb>,
    /// The VM.
    #[arg(required = true, value_parser = vm_name, add = complete::vms())]
    pub name: Option<String>,
    /// Where vmmd listens on the other node.
    #[arg(long, value_name = "HOST:PORT", required = true)]
    pub to: Option<String>,
    /// How long the guest may stand still while the rest of its memory and disks is sent; 300ms when not given.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub downtime_limit: Option<Duration>,
    /// Action for a guest that changes its memory and disks too fast for the limit; always-safe
    /// when not given
    #[arg(long, value_enum)]
    pub policy: Option<Policy>,
    /// The same as `--policy prefer-forced`.
    #[arg(long, conflicts_with = "policy")]
    pub force: bool,
    /// How much is sent per second at most.
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub bandwidth: Option<u64>,
    /// Give up after this time, at most 1h; the VM stays here then.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Do not wait for the end: print the operation.
    #[arg(long)]
    pub detach: bool,
}

/// Action for a guest that changes its memory and disks too fast. The virtual CPUs of a slowed
/// guest stand still for 20 to 99 % of the time.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Policy {
    /// Nothing: it stays here when 30 rounds have not helped.
    AlwaysSafe,
    /// It is slowed when 30 rounds have not helped, and stays here when 30 more have not.
    PreferSafe,
    /// It is slowed as soon as a round does not help enough, and stays here when 30 have not.
    PreferForced,
    /// The same, and when 30 rounds have not helped, it stands still for as long as it takes.
    AlwaysForced,
}

/// `migrate cancel`, `migrate resolve`.
#[derive(Debug, Subcommand)]
pub enum MigrateVerb {
    /// Take a migration back: the VM stays here. Not possible any more when it was handed over.
    Cancel {
        /// The VM.
        #[arg(value_parser = vm_name, add = complete::vms())]
        name: String,
    },
    /// Decide what becomes of a VM whose migration can't end, because the other node is gone for good.
    Resolve(Resolve),
}

/// `migrate resolve`.
#[derive(Debug, Args)]
pub struct Resolve {
    /// The VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// It runs here. It must not run on the other node, now or later.
    #[arg(long, conflicts_with = "drop", required_unless_present = "drop")]
    pub run: bool,
    /// It is removed from this node.
    #[arg(long)]
    pub drop: bool,
    /// Number of the migration, as in `status.migration`: refused when another one waits. The one that waits when not given.
    #[arg(long, value_name = "NUMBER")]
    pub migration: Option<u64>,
}

//! The command line of migrations.

use std::time::Duration;

use clap::{Args, Subcommand};
use vmmd_api::v1::MigrationPolicy;

use super::{
    duration, size,
    value::{Words, words},
    vm_name,
};
use crate::complete;

/// `migrate`.
#[derive(Debug, Subcommand)]
pub enum Migrate {
    /// Move a running VM to another node
    Vm(MigrateVm),
    /// Cancel a migration: the VM stays here. Not possible after the hand-over
    Cancel {
        /// Name of the VM
        #[arg(value_parser = vm_name, add = complete::vms())]
        name: String,
    },
    /// Decide about a VM whose migration cannot end because the other node is lost
    Resolve(Resolve),
}

/// Actions for a guest that changes its memory and disks too fast.
const POLICIES: Words<MigrationPolicy> = &[
    (
        "always-safe",
        MigrationPolicy::AlwaysSafe,
        "No action; the migration fails after 30 rounds",
    ),
    (
        "prefer-safe",
        MigrationPolicy::PreferSafe,
        "Slow the vCPUs by 20 to 99 % after 30 rounds; the migration fails after 30 more",
    ),
    (
        "prefer-forced",
        MigrationPolicy::PreferForced,
        "Slow the vCPUs by 20 to 99 % when a round does not help enough; the migration fails after 30 rounds",
    ),
    (
        "always-forced",
        MigrationPolicy::AlwaysForced,
        "As prefer-forced, but after 30 rounds the guest is paused for as long as the rest takes",
    ),
];

/// `migrate vm`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl migrate vm web --to node-2.example:7443
  vmmctl migrate vm web --to node-2.example:7443 --downtime-limit 100ms --bandwidth 200Mi
  vmmctl migrate cancel web")]
pub struct MigrateVm {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Address at which vmmd listens on the other node
    #[arg(long, value_name = "HOST:PORT")]
    pub to: String,
    /// Uid of the pod on the other node that gets the VM, for a VM in a pod
    #[arg(long, value_name = "UID")]
    pub target_pod: Option<String>,
    /// How long the guest may be paused while the rest of its memory and disks is sent; 300ms when not given
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub downtime_limit: Option<Duration>,
    /// Action for a guest that changes its memory and disks too fast for the limit; always-safe
    /// when not given
    #[arg(long, value_parser = words(POLICIES))]
    pub policy: Option<MigrationPolicy>,
    /// The same as `--policy prefer-forced`
    #[arg(long, conflicts_with = "policy")]
    pub force: bool,
    /// Maximum number of bytes to send per second
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub bandwidth: Option<u64>,
    /// Cancel the migration after this time, at most 1h; the VM stays here
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Do not wait for the end: print the operation
    #[arg(long)]
    pub detach: bool,
}

/// `migrate resolve`.
#[derive(Debug, Args)]
pub struct Resolve {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Run the VM here. It must not run on the other node, now or later
    #[arg(long, conflicts_with = "drop", required_unless_present = "drop")]
    pub run: bool,
    /// Remove the VM from this node
    #[arg(long)]
    pub drop: bool,
    /// Number of the migration, as in `status.migration`; refused when another migration waits. The waiting migration when not given
    #[arg(long, value_name = "NUMBER")]
    pub migration: Option<u64>,
}

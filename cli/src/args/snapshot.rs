//! The command line of snapshots.

use std::{path::PathBuf, time::Duration};

use clap::{ArgGroup, Args, Subcommand};

use vmmd_api::v1::SnapshotConsistency;

use super::{
    Label, Timeout, age, disk_name,
    value::{Words, words},
    vm_name,
};
use crate::complete;

/// Verbs of `snapshot`.
#[derive(Debug, Subcommand)]
pub enum Snapshot {
    /// Write a snapshot to a file, for `snapshot import` on this node or another one
    Export(ExportSnapshot),
    /// Create a snapshot from a file of `snapshot export`
    Import(ImportSnapshot),
}

/// `create snapshot`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("retention").args(["keep_last", "max_age"]).multiple(true))]
#[command(after_help = "\
Examples:
  vmmctl create snapshot web-1 --vm web
  vmmctl create snapshot web-2 --vm web --paused
  vmmctl create snapshot web-disks --vm web --disks-only     # also for a stopped VM
  vmmctl create snapshot web-clean --vm web --disks-only --consistency agent
  vmmctl create snapshot web-20261128 --vm web --keep-last 7 --max-age 14d")]
pub struct CreateSnapshot {
    /// Name of the snapshot
    #[arg(value_parser = disk_name)]
    pub name: String,
    /// VM to take the snapshot of
    #[arg(long, value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Pause the VM from the beginning to the end, not only while its state is saved
    #[arg(long)]
    pub paused: bool,
    /// Copy the disks without memory: a VM that is restored from the snapshot boots. The VM may be stopped
    #[arg(long)]
    pub disks_only: bool,
    /// State of the guest's file systems on the copied disks; with --disks-only
    #[arg(long, value_name = "STATE", value_parser = words(CONSISTENCIES), default_value = "crash")]
    pub consistency: SnapshotConsistency,
    /// When the snapshot is complete, delete all but this number of the VM's snapshots, counting
    /// this one. Only snapshots with the same --retention-group that were created with --keep-last
    /// or --max-age are ever deleted
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep_last: Option<u32>,
    /// When the snapshot is complete, delete snapshots of the VM that are older than this, such as 36h or 14d
    #[arg(long, value_name = "DURATION", value_parser = age)]
    pub max_age: Option<Duration>,
    /// Retention group that separates snapshots of the VM with different retentions, such as daily
    /// and monthly
    #[arg(long, value_name = "NAME", requires = "retention")]
    pub retention_group: Option<String>,
    /// Label
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
    #[command(flatten)]
    pub timeout: Timeout,
}

const CONSISTENCIES: Words<SnapshotConsistency> = &[
    ("crash", SnapshotConsistency::Crash, "As after a power cut"),
    (
        "agent",
        SnapshotConsistency::Agent,
        "Frozen by the agent in the guest; crash where it cannot",
    ),
    (
        "require-agent",
        SnapshotConsistency::RequireAgent,
        "Frozen by the agent in the guest; fail where it cannot",
    ),
];

/// `snapshot export`.
#[derive(Debug, Args)]
#[command(after_help = "\
The file contains the memory and the disks of the guest and the secrets of its spec, not encrypted. Only its owner can read it.

Examples:
  vmmctl snapshot export web-1 -o web-1.vmmsnapshot
  vmmctl snapshot export web-1 -o - | ssh other vmmctl snapshot import -")]
pub struct ExportSnapshot {
    /// Name of the snapshot
    #[arg(value_parser = disk_name, add = complete::snapshots())]
    pub name: String,
    /// File to write, replaced when the whole snapshot has arrived; - for standard output.
    /// NAME.vmmsnapshot when not given
    #[arg(short, long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// Print no progress
    #[arg(short, long)]
    pub quiet: bool,
}

/// `snapshot import`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl snapshot import web-1.vmmsnapshot
  vmmctl snapshot import web-1.vmmsnapshot --name before-upgrade
  vmmctl restore before-upgrade --vm copy")]
pub struct ImportSnapshot {
    /// File to read; - for standard input
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub file: PathBuf,
    /// Name of the snapshot; its earlier name when not given
    #[arg(long, value_parser = disk_name)]
    pub name: Option<String>,
    /// Print no progress
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `restore`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl stop --force web && vmmctl restore web-1    # the VM of the snapshot
  vmmctl restore web-1 --vm copy                     # a new VM")]
pub struct Restore {
    /// Name of the snapshot
    #[arg(value_parser = disk_name, add = complete::snapshots())]
    pub snapshot: String,
    /// Name of the VM; the VM of the snapshot, which must be stopped, when not given. A VM that does not exist is created
    #[arg(long, value_parser = vm_name)]
    pub vm: Option<String>,
    /// Read memory when the guest accesses it, instead of copying it first
    #[arg(long)]
    pub on_demand: bool,
    /// Create a new VM with new addresses that boots from copies of the disks; memory is not restored
    #[arg(long, requires = "vm", conflicts_with = "on_demand")]
    pub fresh: bool,
    /// Allow NIC addresses that other VMs have too. Something else must keep these VMs apart
    #[arg(long, requires = "vm", conflicts_with = "fresh")]
    pub share_addresses: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `clone`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl clone web-1 web-a web-b web-c
  vmmctl clone web-1 web-a --fresh                   # boots, with new addresses")]
pub struct Clone {
    /// Name of the snapshot
    #[arg(value_parser = disk_name, add = complete::snapshots())]
    pub snapshot: String,
    /// Names of the new VMs
    #[arg(required = true, value_name = "VM", value_parser = vm_name)]
    pub vms: Vec<String>,
    /// Copy memory instead of sharing it
    #[arg(long)]
    pub copy: bool,
    /// Give the VMs new addresses and boot them from copies of the disks; memory is not restored
    #[arg(long, conflicts_with = "copy")]
    pub fresh: bool,
    /// Allow equal NIC addresses. Something else must keep these VMs apart
    #[arg(long, conflicts_with = "fresh")]
    pub share_addresses: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

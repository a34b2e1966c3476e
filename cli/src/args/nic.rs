//! Arguments of the NIC commands.

use clap::{Args, Subcommand};

use super::{Timeout, vm_name};
use crate::complete;

/// `nic`.
#[derive(Debug, Subcommand)]
pub enum Nic {
    /// Give a VM another NIC; one that runs gets it at once.
    #[command(visible_aliases = ["add", "create"])]
    Attach(AttachNic),
    /// Take a NIC from a VM; the guest of one that runs is asked to eject it first.
    #[command(visible_aliases = ["rm", "delete"])]
    Detach(DetachNic),
    /// List the NICs of a VM.
    #[command(visible_alias = "list")]
    Ls(ListNics),
    /// Change a NIC: its link and its limits at once, the rest at the next start.
    Update(UpdateNic),
}

/// How the change is made.
#[derive(Debug, Args)]
pub struct NicChange {
    /// Restart the VM when something is left that only a start can change.
    #[arg(long)]
    pub restart: bool,
    /// Let the daemon check everything, print what would change, and change nothing.
    #[arg(long, conflicts_with = "restart")]
    pub dry_run: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// `nic attach`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl nic attach web bridge=br0
  vmmctl nic attach web bridge=br1,name=lan,queues=4,mtu=9000")]
pub struct AttachNic {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Properties of the NIC, as in `vmmctl create --nic`
    #[arg(value_name = "KEY=VALUE,…")]
    pub nic: String,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub options: NicChange,
}

/// `nic ls`.
#[derive(Debug, Args)]
pub struct ListNics {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
}

/// `nic detach`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl nic detach web lan")]
pub struct DetachNic {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Name of the NIC.
    pub name: String,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub options: NicChange,
}

/// `nic update`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl nic update web eth0 link=down
  vmmctl nic update web eth0 rx-bps=100Mi,tx-bps=100Mi,tx-pps=20000
  vmmctl nic update web eth0 tx-pps=0                # no limit any more
  vmmctl nic update web eth0 queues=4,off=tso --restart")]
pub struct UpdateNic {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Name of the NIC.
    pub name: String,
    /// Properties to change, as in `vmmctl create --nic`, without the name
    #[arg(value_name = "KEY=VALUE,…")]
    pub nic: String,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub options: NicChange,
}

//! Arguments of the verbs for parts of a VM's spec: NICs and shares.

use clap::Args;

use super::{Timeout, vm_name};
use crate::complete;

/// How a change of a VM's spec is applied.
#[derive(Debug, Args)]
pub struct Applied {
    /// Restart the VM if a part of the change waits for the next start
    #[arg(long)]
    pub restart: bool,
    /// Let the daemon check everything, print the changes, and change nothing
    #[arg(long, conflicts_with = "restart")]
    pub dry_run: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `get nic`, `get share`.
#[derive(Debug, Args)]
pub struct OfVm {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
}

/// `create nic`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl create nic web bridge=br0
  vmmctl create nic web bridge=br1,name=lan,queues=4,mtu=9000")]
pub struct AddNic {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Properties of the NIC, as in `vmmctl create vm --nic`
    #[arg(value_name = "KEY=VALUE,…")]
    pub nic: String,
    #[command(flatten)]
    pub options: Applied,
}

/// `update nic`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl update nic web eth0 link=down
  vmmctl update nic web eth0 rx-bps=100Mi,tx-bps=100Mi,tx-pps=20000
  vmmctl update nic web eth0 tx-pps=0                # removes this limit
  vmmctl update nic web eth0 queues=4,off=tso --restart")]
pub struct UpdateNic {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Name of the NIC
    pub name: String,
    /// Properties to change, as in `vmmctl create vm --nic`, without the name
    #[arg(value_name = "KEY=VALUE,…")]
    pub nic: String,
    #[command(flatten)]
    pub options: Applied,
}

/// `create share`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl create share web /srv/data                       # in the guest: mount -t virtiofs data /mnt
  vmmctl create share web /srv/models,name=models,ro,cache=always
  vmmctl create share web /srv/site,mount=/srv/site --restart  # cloud-init in the guest mounts it
  vmmctl create share web /srv/home,uid-map=0:100000:65536,gid-map=0:100000:65536,xattr

Keys: name=, tag=, ro, cache=auto|always|never, writeback, xattr, acl, uid-map=GUEST:NODE:COUNT, gid-map=GUEST:NODE:COUNT (several
with + between them), open-files=, mount= (for guests with cloud-init).")]
pub struct AddShare {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Directory on the node, and properties of the share. Without name=, the share has the name of
    /// the directory
    #[arg(value_name = "PATH[,KEY=VALUE…]")]
    pub share: String,
    #[command(flatten)]
    pub options: Applied,
}

/// `delete nic`, `delete share`.
#[derive(Debug, Args)]
pub struct RemovePart {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Name of the NIC or share
    pub name: String,
    #[command(flatten)]
    pub options: Applied,
}

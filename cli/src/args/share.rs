//! Arguments of the share commands.

use clap::{Args, Subcommand};

use super::{nic::NicChange, vm_name};
use crate::complete;

/// `share`.
#[derive(Debug, Subcommand)]
pub enum Share {
    /// Share a directory of the node with a VM; one that runs with shared memory gets it at once, another one from the next start on.
    #[command(visible_aliases = ["attach", "create"])]
    Add(AddShare),
    /// Take a share from a VM; the guest of one that runs is asked to eject it first.
    #[command(visible_aliases = ["detach", "delete"])]
    Rm(RemoveShare),
    /// List the shares of a VM.
    #[command(visible_alias = "list")]
    Ls(ListShares),
}

/// `share add`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl share add web /srv/data                       # in the guest: mount -t virtiofs data /mnt
  vmmctl share add web /srv/models,name=models,ro,cache=always
  vmmctl share add web /srv/site,mount=/srv/site --restart  # the guest's cloud-init mounts it
  vmmctl share add web /srv/home,uid-map=0:100000:65536,gid-map=0:100000:65536,xattr

Keys: name=, tag=, ro, cache=auto|always|never, writeback, xattr, acl, uid-map=GUEST:NODE:COUNT, gid-map=GUEST:NODE:COUNT (several
with + between them), open-files=, mount= (for guests with cloud-init).")]
pub struct AddShare {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Directory on the node, and properties of the share; the share has the directory's name when
    /// no name is given
    #[arg(value_name = "PATH[,KEY=VALUE…]")]
    pub share: String,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub options: NicChange,
}

/// `share rm`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl share rm web data")]
pub struct RemoveShare {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Name of the share.
    pub name: String,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub options: NicChange,
}

/// `share ls`.
#[derive(Debug, Args)]
pub struct ListShares {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
}

//! Arguments of the commands for existing VMs and disks: `start`, `stop`, `restart`, `delete`,
//! `console`, `vnc`, `screenshot`, `send-key`, `type`.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, Subcommand};

use vmmd_api::v1;

use super::{
    Delete, Selector, Targets, Timeout, Yes, disk_name, duration, nic::DetachNic, share::RemoveShare, vm_name,
};
use crate::complete;

/// `reset`, `pause`, `resume`.
#[derive(Debug, Args)]
pub struct Act {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub targets: Targets,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// `start`.
#[derive(Debug, Args)]
pub struct Start {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub targets: Targets,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
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
    #[command(flatten)]
    #[allow(missing_docs)]
    pub targets: Targets,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
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
    pub targets: Targets,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
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
       vmmctl delete [OPTIONS] -l SELECTOR|--all
       vmmctl delete [OPTIONS] -f FILE
       vmmctl delete disk|image|network|snapshot [OPTIONS] NAME…
       vmmctl delete nic|share [OPTIONS] VM NAME")]
pub struct DeleteObjects {
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
    /// Delete disks with their content; refused while a VM or an overlay needs one
    #[command(visible_alias = "disks")]
    Disk(DeleteDisk),
    /// Delete images
    #[command(visible_alias = "images")]
    Image(Delete<v1::Image>),
    /// Delete networks that no VM's spec names
    #[command(visible_alias = "networks")]
    Network(Delete<v1::Network>),
    /// Delete snapshots; VMs that were restored from them are not affected
    #[command(visible_alias = "snapshots")]
    Snapshot(Delete<v1::Snapshot>),
    /// Take a NIC from a VM: the same as `nic detach`
    Nic(DetachNic),
    /// Take a share from a VM: the same as `share rm`
    Share(RemoveShare),
}

/// `delete disk`.
#[derive(Debug, Args)]
pub struct DeleteDisk {
    /// Names of disks, as NAME or disk/NAME.
    #[arg(value_name = "NAME", value_parser = disk_name, add = complete::disks(), required_unless_present = "all")]
    pub names: Vec<String>,
    /// All disks that no VM and no other disk uses.
    #[arg(long, conflicts_with = "names")]
    pub all: bool,
    /// Do not fail for disks that are not there.
    #[arg(long)]
    pub ignore_not_found: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub yes: Yes,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// `delete vm`.
#[derive(Debug, Args)]
pub struct DeleteVm {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub doomed: Doomed,
    /// Kill them first when they run.
    #[arg(long)]
    pub force: bool,
    /// Also delete, with their content, the disks in the VMs' specs that vmmd keeps
    #[arg(long, conflicts_with_all = ["files", "no_wait"])]
    pub with_disks: bool,
    /// Do not wait for the end: print the operation that has begun.
    #[arg(long, conflicts_with = "files")]
    pub no_wait: bool,
    /// Do not fail for VMs and disks that are not there.
    #[arg(long)]
    pub ignore_not_found: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub yes: Yes,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// VMs and disks to delete.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Doomed {
    /// Names of VMs, as NAME or vm/NAME.
    #[arg(value_name = "NAME", value_parser = vm_name, add = complete::vms())]
    pub names: Vec<String>,
    /// VMs with this label (KEY=VALUE, KEY!=VALUE or KEY); several must all hold.
    #[arg(
        short = 'l',
        long = "selector",
        value_name = "SELECTOR",
        value_delimiter = ','
    )]
    pub selectors: Vec<Selector>,
    /// All VMs.
    #[arg(long)]
    pub all: bool,
    /// VMs and disks of a manifest, VMs first; `-` is standard input. May be given several times.
    #[arg(short, long = "filename", value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

/// `console`.
#[derive(Debug, Default, Args)]
pub struct Console {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Leave out earlier output
    #[arg(long)]
    pub no_replay: bool,
    /// The serial port, which every VM has.
    #[arg(long)]
    pub serial: bool,
    /// The virtio-console (hvc0), of a VM that has one.
    #[arg(long, conflicts_with = "serial")]
    pub hvc: bool,
    /// Exclude other clients from typing
    #[arg(long)]
    pub exclusive: bool,
    /// Only read.
    #[arg(long, conflicts_with_all = ["exclusive", "force", "send_break"])]
    pub read_only: bool,
    /// Take the console from other clients that type there; they keep read access
    #[arg(long)]
    pub force: bool,
    /// Begin with a break of the serial line: Linux takes the next key as a SysRq command.
    #[arg(long, conflicts_with = "hvc")]
    pub send_break: bool,
}

/// `vnc`.
#[derive(Debug, Args)]
pub struct Vnc {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Start no viewer, but let viewers connect at this address until ^C; port 0 takes a free one. The address
    /// alone opens the screen; with --password the viewer needs the printed password.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Start no viewer, but print the address of a page that shows the screen in a browser of the node. It is good for one connection
    /// and for a minute.
    #[arg(long, conflicts_with_all = ["listen", "password"])]
    pub web: bool,
    /// Start no viewer, but print where one can connect on the node, and a password. It is good for one connection and for a minute;
    /// with --listen until ^C.
    #[arg(long)]
    pub password: bool,
    /// Look only: keys and the pointer are ignored.
    #[arg(long)]
    pub view_only: bool,
}

/// `port-forward`.
#[derive(Clone, Debug, Default, Args)]
#[command(after_help = "\
Examples:
  vmmctl port-forward web 8080:80
  vmmctl port-forward web 0.0.0.0:8443:443 5432
  ssh -o ProxyCommand='vmmctl port-forward --stdio %h %p' root@web")]
pub struct PortForward {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Port of the guest, or [ADDRESS:]PORT:GUEST-PORT. The address is 127.0.0.1 when not given; port 0 takes a free one.
    #[arg(required = true, value_name = "PORT")]
    pub ports: Vec<Forward>,
    /// NIC whose address is used; the first one that has an address in a network of the node when not given.
    #[arg(long)]
    pub nic: Option<String>,
    /// Forward standard input and output, for one connection, instead of a port.
    #[arg(long)]
    pub stdio: bool,
}

/// A port of the guest, and where it is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// Address on this machine, when one is given.
    pub listen: Option<SocketAddr>,
    /// Port of the guest.
    pub port: u16,
}

impl std::str::FromStr for Forward {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (listen, port) = match text.rsplit_once(':') {
            None => (None, text),
            Some((listen, port)) => {
                let wrong = "must be PORT:GUEST-PORT or ADDRESS:PORT:GUEST-PORT";
                let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
                let address = listen.parse().map(local);
                (
                    Some(address.or_else(|_| listen.parse()).map_err(|_| wrong)?),
                    port,
                )
            }
        };
        let port = port.parse().ok().filter(|port| *port != 0);
        let port = port.ok_or("the port of the guest must be 1 to 65535")?;
        Ok(Self { listen, port })
    }
}

/// `screenshot`.
#[derive(Debug, Args)]
pub struct Screenshot {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// PNG file to write; `-` is standard output.
    pub file: PathBuf,
}

/// `send-key`.
#[derive(Debug, Args)]
pub struct SendKey {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Keys to press one after the other, such as `enter`, `f2` or `a`; with `+` between them, at once: `ctrl+alt+delete`.
    #[arg(required = true, value_name = "KEY")]
    pub keys: Vec<String>,
}

/// `type`.
#[derive(Debug, Args)]
pub struct Type {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// What to type. With a character that the VM's keyboard layout does not have, nothing is typed.
    pub text: String,
    /// Press Enter behind it.
    #[arg(short, long)]
    pub enter: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_reached_where_it_is_said() {
        let forward = |text: &str| {
            text.parse::<Forward>()
                .map(|forward| (forward.listen, forward.port))
        };
        assert_eq!(forward("80"), Ok((None, 80)));
        assert_eq!(forward("8080:80"), Ok((Some(([127, 0, 0, 1], 8080).into()), 80)));
        assert_eq!(forward("0.0.0.0:0:80"), Ok((Some(([0, 0, 0, 0], 0).into()), 80)));
        assert_eq!(
            forward("[::1]:8080:80"),
            Ok((Some("[::1]:8080".parse().unwrap()), 80))
        );
        for wrong in [
            "",
            "0",
            "8080:0",
            "65536",
            "host:1:80",
            "::1:8080:80",
            "1.2.3.4:80",
        ] {
            assert!(forward(wrong).is_err(), "{wrong}");
        }
    }
}

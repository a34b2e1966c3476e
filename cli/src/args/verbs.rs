//! Arguments of the verbs for existing VMs: `start`, `stop`, `label`, `console`, `vnc`, `port-forward` and others.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, Subcommand};

use super::{Selector, Timeout, duration, vm_name};
use crate::complete;

/// VMs by name, by label, or all.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Targets {
    /// Names of VMs, as NAME or vm/NAME
    #[arg(value_name = "NAME", value_parser = vm_name, add = complete::vms())]
    pub names: Vec<String>,
    /// VMs with this label (KEY=VALUE, KEY!=VALUE or KEY); several must all match
    #[arg(short = 'l', long, value_delimiter = ',')]
    pub selector: Vec<Selector>,
    /// All VMs that the verb applies to
    #[arg(long)]
    pub all: bool,
}

/// `reset`, `pause`, `resume`.
#[derive(Debug, Args)]
pub struct Act {
    #[command(flatten)]
    pub targets: Targets,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `start`.
#[derive(Debug, Args)]
pub struct Start {
    #[command(flatten)]
    pub act: Act,
    /// Do not wait for the end: print the operation
    #[arg(long)]
    pub no_wait: bool,
    /// Begin with new UEFI variables: boot entries and enrolled keys are lost
    #[arg(long)]
    pub reset_nvram: bool,
}

/// How a run ends.
#[derive(Clone, Copy, Debug, Args)]
pub struct Ending {
    /// Do not wait for the end: print the operation
    #[arg(long)]
    pub no_wait: bool,
    /// How long guests may take to power off, at most 1h (60s when not given)
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub grace: Option<Duration>,
    /// Kill the VMs at once, as a power failure does
    #[arg(long, conflicts_with = "grace")]
    pub force: bool,
}

/// `stop`.
#[derive(Debug, Args)]
pub struct Stop {
    #[command(flatten)]
    pub act: Act,
    /// Stop for a shutdown of the node: run policies start the VMs again after the boot
    #[arg(long)]
    pub evacuate: bool,
    #[command(flatten)]
    pub ending: Ending,
}

/// `restart`.
#[derive(Debug, Args)]
pub struct Restart {
    #[command(flatten)]
    pub act: Act,
    #[command(flatten)]
    pub ending: Ending,
}

/// `label`, `annotate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl label web db tier=front old-
  vmmctl label disk/data tier=db
  vmmctl label -l tier=front zone=a
  vmmctl annotate web contact=ops@example.com")]
pub struct Labels {
    /// Names of VMs (and of disks, as disk/NAME), then pairs to set (KEY=VALUE) and to remove (KEY-)
    #[arg(required = true, value_name = "NAME|KEY=VALUE|KEY-", add = complete::vms())]
    pub words: Vec<String>,
    /// VMs with this label (KEY=VALUE, KEY!=VALUE or KEY); several must all match
    #[arg(short = 'l', long, value_delimiter = ',')]
    pub selector: Vec<Selector>,
    /// All VMs
    #[arg(long, conflicts_with = "selector")]
    pub all: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `console`.
#[derive(Debug, Default, Args)]
pub struct Console {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Leave out earlier output
    #[arg(long)]
    pub no_replay: bool,
    /// Use the serial port, which every VM has (default)
    #[arg(long)]
    pub serial: bool,
    /// Use the virtio-console (hvc0)
    #[arg(long, conflicts_with = "serial")]
    pub hvc: bool,
    /// Exclude other clients from writing
    #[arg(long)]
    pub exclusive: bool,
    /// Only read
    #[arg(long, conflicts_with_all = ["exclusive", "force", "send_break"])]
    pub read_only: bool,
    /// Take the console from other clients that write to it; they keep read access
    #[arg(long)]
    pub force: bool,
    /// Begin with a break of the serial line: Linux takes the next key as a SysRq command
    #[arg(long, conflicts_with = "hvc")]
    pub send_break: bool,
}

/// `vnc`.
#[derive(Debug, Args)]
pub struct Vnc {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Start no viewer, but let viewers connect to this address until ^C; port 0 selects a free port. Anyone who
    /// reaches the address sees the screen, unless --password requires the printed password
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Start no viewer, but print the address of a page that shows the screen in a browser of the node. The address is valid for
    /// one connection and one minute
    #[arg(long, conflicts_with_all = ["listen", "password"])]
    pub web: bool,
    /// Start no viewer, but print an address of the node for viewers, and a password. Both are valid for one connection and one
    /// minute, with --listen until ^C
    #[arg(long)]
    pub password: bool,
    /// Ignore keys and the pointer
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
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Port of the guest, or [ADDRESS:]PORT:GUEST-PORT. The address is 127.0.0.1 when not given; port 0 selects a free port
    #[arg(required = true, value_name = "PORT")]
    pub ports: Vec<Forward>,
    /// NIC to connect to; the first NIC with an address in a network of the node when not given
    #[arg(long)]
    pub nic: Option<String>,
    /// Forward standard input and output, for one connection, instead of a port
    #[arg(long)]
    pub stdio: bool,
}

/// `vsock`.
#[derive(Debug, Subcommand)]
pub enum Vsock {
    /// Connect standard input and output to a port of the guest
    Connect(VsockPort),
    /// Wait for one connection of the guest to a port of the host, and connect standard input and output to it
    Listen(VsockPort),
}

/// Verbs of `channel`.
#[derive(Debug, Subcommand)]
pub enum Channel {
    /// Connect standard input and output to the program of the guest that has a channel open
    Connect(ChannelPlace),
}

/// Arguments of `channel connect`.
#[derive(Debug, Args)]
#[command(after_help = "\
The VM needs the channel in `spec.channels` (`--channel` of `create vm` and `run`). A Linux guest has it as
/dev/virtio-ports/NAME.

Examples:
  vmmctl channel connect web com.example.metrics.0")]
pub struct ChannelPlace {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Name of the channel
    pub channel: String,
}

/// Arguments of `vsock connect` and `vsock listen`.
#[derive(Debug, Args)]
#[command(after_help = "\
The VM needs `spec.vsock` (`--vsock` of `create vm` and `run`). The host has the CID 2.

Examples:
  vmmctl vsock connect web 1024
  vmmctl vsock listen web 9999 > report.json        # the guest sends it to CID 2, port 9999
  ssh -o ProxyCommand='vmmctl vsock connect %h 22' root@web")]
pub struct VsockPort {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Port, 0 to 4294967294
    #[arg(value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    pub port: u32,
}

/// `exec`.
#[derive(Debug, Args)]
#[command(after_help = "\
The VM needs `spec.guestAgent` (`--guest-agent` of `create vm` and `run`), and qemu-guest-agent in the guest. The exit code is that of the
command, or 128 and the number of the signal that ended it. Codes of vmmctl's own failures are the same as those of other
commands: use `vmmctl ssh` where a program must tell them apart, or where a terminal is needed.

Examples:
  vmmctl exec web -- uname -r
  vmmctl exec web -- sh -c 'df -h / | tail -n 1'
  echo 'hello' | vmmctl exec -i web -- tee /etc/motd")]
pub struct Exec {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Pass standard input to the command, which starts at the end of the input
    #[arg(short = 'i', long)]
    pub stdin: bool,
    /// Environment variable of the command, instead of the agent's environment
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// Time limit; a command that exceeds the limit receives SIGTERM
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Program of the guest, and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// `cp`.
#[derive(Debug, Args)]
#[command(after_help = "\
The VM needs `spec.guestAgent`, and qemu-guest-agent in the guest. A new file in the guest belongs to root. `vmmctl scp` copies
folders, and is faster.

Examples:
  vmmctl cp notes.txt web:/root/
  vmmctl cp web:/var/log/syslog .
  vmmctl cp web:/etc/hosts - | grep db")]
pub struct Cp {
    /// File to copy: FILE, VM:PATH with an absolute path in the guest, or - for standard input
    #[arg(value_name = "FILE|VM:PATH|-")]
    pub source: String,
    /// Where to: FILE, VM:PATH, or - for standard output. With / at the end of PATH, the file keeps its name
    #[arg(value_name = "FILE|VM:PATH|-")]
    pub target: String,
    /// Print no progress
    #[arg(short, long)]
    pub quiet: bool,
}

/// A port of the guest, and the address of this machine that leads to it.
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
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// PNG file to write; `-` is standard output
    pub file: PathBuf,
}

/// `send-key`.
#[derive(Debug, Args)]
pub struct SendKey {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Keys to press one after the other, such as `enter`, `f2` or `a`; with `+` between them, at once: `ctrl+alt+delete`
    #[arg(required = true, value_name = "KEY")]
    pub keys: Vec<String>,
}

/// `type`.
#[derive(Debug, Args)]
pub struct Type {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Text to type. A text with a character that the VM's keyboard layout lacks is refused
    pub text: String,
    /// Press Enter after the text
    #[arg(short, long)]
    pub enter: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_port_is_read() {
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

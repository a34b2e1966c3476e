//! The command line of `ssh` and `scp`.

use clap::Args;

use crate::complete;

/// How a VM is reached.
#[derive(Clone, Debug, Args)]
pub struct Reach {
    /// Port of the guest's SSH server.
    #[arg(short, long, default_value = "22", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// NIC whose address is used; the first one that has an address in a network of the node when not given.
    #[arg(long)]
    pub nic: Option<String>,
    /// File with your private key, as with ssh -i.
    #[arg(short, long, value_name = "FILE")]
    pub identity: Option<std::path::PathBuf>,
}

/// `ssh`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl ssh web
  vmmctl ssh debian@web -- uptime
  vmmctl ssh web -- -L 8080:localhost:80 -N        # what begins with - is an option of ssh")]
pub struct Ssh {
    /// Name of the VM, with the user there in front: USER@VM. Without USER, vmmctl selects the default user of the VM's image if the VM has SSH
    /// keys and the image's name contains that of a distribution; otherwise ssh selects the user.
    #[arg(value_name = "[USER@]VM", value_parser = crate::command::ssh::place, add = complete::vms())]
    pub vm: crate::command::ssh::Place,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub reach: Reach,
    /// Options of ssh, then the command to run there; a shell when there is none.
    #[arg(last = true, value_name = "ARGUMENT")]
    pub rest: Vec<String>,
}

/// `scp`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl scp notes.txt debian@web:/tmp/
  vmmctl scp -r web:/var/log/nginx .")]
pub struct Scp {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub reach: Reach,
    /// Copy folders too.
    #[arg(short, long)]
    pub recursive: bool,
    /// Files from where, and to where: of the VM as [USER@]VM:PATH. All of one command are of one VM.
    #[arg(required = true, num_args = 2.., value_name = "FILE|[USER@]VM:PATH")]
    pub files: Vec<String>,
}

//! The command line of `ssh` and `scp`.

use clap::Args;

use super::vm_name;
use crate::complete;

/// How to connect to the SSH server of a VM.
#[derive(Clone, Debug, Args)]
pub struct Reach {
    /// Port of the guest's SSH server
    #[arg(short, long, default_value = "22", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// NIC to connect to; the first NIC with an address in a network of the node when not given
    #[arg(long)]
    pub nic: Option<String>,
    /// Connect by the socket device of the VM (`spec.vsock`) instead of the network; systemd from version 256 on starts an SSH server for
    /// it in the guest. The default for a VM without an address in a network of its node
    #[arg(long, conflicts_with = "nic")]
    pub vsock: bool,
    /// File with your private key, as with ssh -i
    #[arg(short, long, value_name = "FILE")]
    pub identity: Option<std::path::PathBuf>,
}

/// `ssh`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl ssh web
  vmmctl ssh debian@web -- uptime
  vmmctl ssh web -- -L 8080:localhost:80 -N        # words that begin with - are options of ssh")]
pub struct Ssh {
    /// Name of the VM, optionally with the user: USER@VM. Without USER, vmmctl selects the default user of the VM's image if the VM has SSH
    /// keys and the name of the image contains the name of a distribution; otherwise ssh selects the user
    #[arg(value_name = "[USER@]VM", value_parser = place, add = complete::vms())]
    pub vm: Place,
    #[command(flatten)]
    pub reach: Reach,
    /// Options of ssh, then the command to run in the guest; a shell when not given
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
    pub reach: Reach,
    /// Copy folders too
    #[arg(short, long)]
    pub recursive: bool,
    /// Source files, then the destination. Files of the VM are written [USER@]VM:PATH. One command copies from or to one VM
    #[arg(required = true, num_args = 2.., value_name = "FILE|[USER@]VM:PATH")]
    pub files: Vec<String>,
}

/// `shell`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl shell web
  vmmctl shell web --user debian
  vmmctl shell web --console                       # for a guest in which no SSH key is yours")]
pub struct Shell {
    /// Name of the VM, optionally with the user: USER@VM
    #[arg(value_name = "[USER@]VM", value_parser = place, add = complete::vms())]
    pub vm: Place,
    /// Name of the user in the guest; the default is that of `vmmctl ssh`
    #[arg(short, long, value_parser = user)]
    pub user: Option<String>,
    /// File with your private key, as with ssh -i
    #[arg(short, long, value_name = "FILE")]
    pub identity: Option<std::path::PathBuf>,
    /// Use the serial console, without an attempt to log in by SSH
    #[arg(long, conflicts_with_all = ["user", "identity"])]
    pub console: bool,
}

/// A user of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Name of the user, if the command line has one.
    pub user: Option<String>,
    /// Name of the VM
    pub vm: String,
}

/// Reads `USER@VM` or `VM`.
pub fn place(text: &str) -> Result<Place, String> {
    let (user, vm) = match text.rsplit_once('@') {
        Some((user, vm)) => (Some(user), vm),
        None => (None, text),
    };
    if let Some(user) = user {
        user_name(user)?;
    }
    if vm.is_empty() {
        return Err("must contain the name of a VM".to_owned());
    }
    Ok(Place {
        user: user.map(str::to_owned),
        vm: vm_name(vm)?,
    })
}

fn user(name: &str) -> Result<String, String> {
    user_name(name)?;
    Ok(name.to_owned())
}

/// Refuses names that ssh would take for an option, or for something else.
fn user_name(user: &str) -> Result<(), String> {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "._-+\\".contains(letter);
    if user.is_empty() || user.starts_with('-') || !user.chars().all(allowed) {
        return Err(format!("\"{user}\" is not a valid name of a user"));
    }
    Ok(())
}

impl Place {
    /// As ssh has it.
    pub fn word(&self) -> String {
        match &self.user {
            Some(user) => format!("{user}@{}", self.vm),
            None => self.vm.clone(),
        }
    }
}

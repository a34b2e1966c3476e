//! The command line of `ssh` and `scp`.

use clap::Args;

use super::vm_name;
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
    #[arg(value_name = "[USER@]VM", value_parser = place, add = complete::vms())]
    pub vm: Place,
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

/// A user of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Name of the user, if the command line has one.
    pub user: Option<String>,
    /// Name of the VM.
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
        return Err("names no VM".to_owned());
    }
    Ok(Place {
        user: user.map(str::to_owned),
        vm: vm_name(vm)?,
    })
}

/// A user that ssh would take for an option, or for something else, is none.
fn user_name(user: &str) -> Result<(), String> {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "._-+\\".contains(letter);
    if user.is_empty() || user.starts_with('-') || !user.chars().all(allowed) {
        return Err(format!("\"{user}\" can't be a user of a VM"));
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

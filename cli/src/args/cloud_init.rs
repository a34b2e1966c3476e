//! Cloud-init flags for the first boot of a guest.

use std::path::PathBuf;

use clap::Args;

/// Flags for cloud-init.
#[derive(Debug, Default, Args)]
pub struct CloudInit {
    /// File with user data for cloud-init; `-` is standard input.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub user_data: Option<PathBuf>,
    /// Public SSH key for the image's default user: a file, or the key itself. May be given several times.
    #[arg(long = "ssh-key", value_name = "FILE|KEY")]
    pub ssh_keys: Vec<String>,
    /// Host name of the guest (the name of the VM when not given); needs cloud-init in the guest
    #[arg(long, value_name = "NAME")]
    pub hostname: Option<String>,
}

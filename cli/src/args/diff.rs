//! The command line of `diff`.

use std::path::PathBuf;

use clap::Args;

/// `diff`.
#[derive(Debug, Args)]
pub struct Diff {
    /// Manifest with VMs and disks as YAML or JSON; `-` is standard input. May be given several times.
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
}

//! Arguments of `top`, `logs` and `diagnose`.

use std::{path::PathBuf, time::Duration};

use clap::Args;

use super::{age, duration, vm_name};
use crate::complete;

/// `top`.
#[derive(Debug, Args)]
pub struct Top {
    /// Only these VMs; all running VMs without a name
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub names: Vec<String>,
    /// Print the table once, from two samples, and end; the default when the output is no terminal
    #[arg(short = '1', long)]
    pub once: bool,
    /// Time between two samples
    #[arg(short, long, value_name = "DURATION", default_value = "2s", value_parser = duration)]
    pub interval: Duration,
}

/// `logs`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl logs web --tail 50 -f
  vmmctl logs web --vmm --since 10m
  vmmctl logs web --previous")]
pub struct Logs {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Keep printing new lines, across restarts of vmmd
    #[arg(short, long)]
    pub follow: bool,
    /// Output of the guest's serial port (default)
    #[arg(long, conflicts_with = "vmm")]
    pub serial: bool,
    /// Log of the vmm process that runs the VM
    #[arg(long)]
    pub vmm: bool,
    /// Log of the run before the last one
    #[arg(long, conflicts_with = "follow")]
    pub previous: bool,
    /// Only the last lines of the log
    #[arg(short = 'n', long, value_name = "LINES")]
    pub tail: Option<usize>,
    /// Only lines newer than this, as in 30s or 2h. Needs --vmm, as lines of the serial port have no
    /// times
    #[arg(long, value_name = "DURATION", value_parser = age, requires = "vmm")]
    pub since: Option<Duration>,
    /// Print control characters and sequences of the guest too, which act on your terminal
    #[arg(long)]
    pub raw: bool,
}

/// `diagnose`.
#[derive(Debug, Args)]
pub struct Diagnose {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Archive to write, a .tar.gz file; it must not exist
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

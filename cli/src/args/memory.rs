//! Arguments of the commands for a VM's memory.

use clap::{Args, Subcommand};

use super::{Timeout, size, vm_name};
use crate::complete;

/// What is set.
#[derive(Debug, Subcommand)]
pub enum Set {
    /// Set how much of its memory a VM keeps; the VM returns spare memory above this size to the
    /// node
    Memory(SetMemory),
}

/// `set memory`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl set memory web --target 512Mi
  vmmctl set memory web --all")]
pub struct SetMemory {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Memory that the guest keeps: from 64Mi to all its memory, a multiple of 2Mi
    #[arg(long, value_name = "SIZE", value_parser = size, required_unless_present = "all")]
    pub target: Option<u64>,
    /// The guest gets all of its memory back.
    #[arg(long, conflicts_with = "target")]
    pub all: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

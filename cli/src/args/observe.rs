//! Arguments of the commands that observe a node and its VMs.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};

use super::{age, duration, vm_name};
use crate::complete;

/// `events`.
#[derive(Debug, Args)]
pub struct Events {
    /// Keep printing events as they happen, across restarts of vmmd
    #[arg(short, long)]
    pub watch: bool,
    /// Only those of this VM.
    #[arg(long, value_name = "NAME", value_parser = vm_name, add = complete::vms())]
    pub vm: Option<String>,
    /// Only those at least this severe.
    #[arg(long, value_enum)]
    pub severity: Option<Severity>,
    /// Only events of this time, as in 30s or 2h.
    #[arg(long, value_name = "DURATION", value_parser = age)]
    pub since: Option<Duration>,
    /// As many of the newest at most.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub limit: u32,
    /// How to print them: one JSON document a line.
    #[arg(short, long, value_enum)]
    pub output: Option<LineOutput>,
}

/// How severe an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Severity {
    /// Anything.
    Normal,
    /// Events that need attention
    Warning,
}

/// How a stream of things is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LineOutput {
    /// Canonical JSON, one document a line.
    Json,
}

/// `top`.
#[derive(Debug, Args)]
pub struct Top {
    /// Only these VMs; all that run when none is named.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub names: Vec<String>,
    /// Print the table once, from two samples, and end; the default when the output is no terminal.
    #[arg(short = '1', long)]
    pub once: bool,
    /// Time between two samples.
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
    /// Name of the VM.
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
    /// Only the last lines of what there is.
    #[arg(short = 'n', long, value_name = "LINES")]
    pub tail: Option<usize>,
    /// Only lines newer than this, as in 30s or 2h. Lines of the serial port have no times, those
    /// of the vmm have
    #[arg(long, value_name = "DURATION", value_parser = age, requires = "vmm")]
    pub since: Option<Duration>,
    /// Print control characters and sequences of the guest too: they act on your terminal.
    #[arg(long)]
    pub raw: bool,
}

/// `diagnose`.
#[derive(Debug, Args)]
pub struct Diagnose {
    /// Name of the VM.
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Archive to write, a .tar.gz; it must not exist.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

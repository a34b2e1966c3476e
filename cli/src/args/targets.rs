//! Which VMs a verb is for, and how long it may take.

use std::time::Duration;

use clap::Args;

use super::{Selector, duration, vm_name};
use crate::complete;

/// VMs by name, by label, or all.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Targets {
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
    /// All VMs for which there is something to do.
    #[arg(long)]
    pub all: bool,
}

/// How long a change may take.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Timeout {
    /// Give up when it has not ended after this time, at most 1h; a start or stop that is under way is cancelled then.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
}

/// Leave to destroy data.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Yes {
    /// Do not ask before data is destroyed; required without a terminal to ask on
    #[arg(short = 'y', long)]
    pub yes: bool,
}

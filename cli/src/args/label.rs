//! The command line of `label` and `annotate`.

use clap::Args;

use super::{Selector, Timeout};
use crate::complete;

/// `label`, `annotate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl label web db tier=front old-
  vmmctl label disk/data tier=db
  vmmctl label -l tier=front zone=a
  vmmctl annotate web contact=ops@example.com")]
pub struct Label {
    /// Names of VMs (and of disks, as disk/NAME), then what to set (KEY=VALUE) and to take away (KEY-).
    #[arg(required = true, value_name = "NAME|KEY=VALUE|KEY-", add = complete::vms())]
    pub words: Vec<String>,
    /// VMs with this label (KEY=VALUE, KEY!=VALUE or KEY); several must all hold.
    #[arg(
        short = 'l',
        long = "selector",
        value_name = "SELECTOR",
        value_delimiter = ','
    )]
    pub selectors: Vec<Selector>,
    /// All VMs.
    #[arg(long, conflicts_with = "selectors")]
    pub all: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

//! `get operation` and `operation`.

use clap::{Args, Subcommand};
use vmmd_api::v1::{PanicPolicy, RunPolicy};

use super::{FORMAT, HELP, Output, Timeout, operation_id, vm_name};
use crate::complete;

/// `get operation`.
#[derive(Debug, Args)]
pub struct GetOperation {
    /// Only that with this id.
    #[arg(value_parser = operation_id, add = complete::operations())]
    pub id: Option<String>,
    /// Only those of this VM.
    #[arg(long, conflicts_with = "id", value_parser = vm_name, add = complete::vms())]
    pub vm: Option<String>,
    /// Only those of this disk.
    #[arg(long, conflicts_with_all = ["id", "vm"])]
    pub disk: Option<String>,
    /// Only operations that have not ended
    #[arg(long, conflicts_with = "id")]
    pub active: bool,
    /// Keep printing changes of the named operation until it has ended
    #[arg(short, long, requires = "id")]
    pub watch: bool,
    /// How to print them.
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
    /// Leave out the line with the columns' names.
    #[arg(long)]
    pub no_headers: bool,
}

/// `operation`.
#[derive(Debug, Subcommand)]
pub enum Operation {
    /// End it early: a start leaves the VM stopped, a graceful stop leaves it running.
    Cancel {
        /// Its id, as `get operation` shows it.
        #[arg(value_parser = operation_id, add = complete::operations())]
        id: String,
        #[command(flatten)]
        #[allow(missing_docs)]
        timeout: Timeout,
    },
}

/// A run policy: `manual` or `RUN_POLICY_MANUAL`.
pub fn run_policy(text: &str) -> Result<RunPolicy, String> {
    let word = text.to_ascii_uppercase().replace('-', "_");
    let name = format!("RUN_POLICY_{}", word.trim_start_matches("RUN_POLICY_"));
    RunPolicy::from_str_name(&name)
        .filter(|policy| *policy != RunPolicy::Unspecified)
        .ok_or_else(|| {
            "must be one of always-on-unless-stopped, always-on, rerun-on-failure, manual, always-off".into()
        })
}

/// A rule for panics: `restart` or `PANIC_POLICY_RESTART`.
pub fn panic_policy(text: &str) -> Result<PanicPolicy, String> {
    let word = text.to_ascii_uppercase().replace('-', "_");
    let name = format!("PANIC_POLICY_{}", word.trim_start_matches("PANIC_POLICY_"));
    PanicPolicy::from_str_name(&name)
        .filter(|policy| *policy != PanicPolicy::Unspecified)
        .ok_or_else(|| "must be one of restart, stop, pause, ignore".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_policy_is_read_in_both_ways_of_writing() {
        for (text, policy) in [
            ("manual", RunPolicy::Manual),
            ("always-on", RunPolicy::AlwaysOn),
            ("ALWAYS_OFF", RunPolicy::AlwaysOff),
            ("RUN_POLICY_RERUN_ON_FAILURE", RunPolicy::RerunOnFailure),
        ] {
            assert_eq!(run_policy(text), Ok(policy));
        }
        for wrong in ["", "unspecified", "never"] {
            assert!(run_policy(wrong).is_err(), "{wrong}");
        }
    }
}

//! The daemon's share of a VM's start, which vmmd records in its journal.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{
    median,
    table::{Row, render},
};
use crate::Case;
use crate::node::Kernel;
use crate::vm::{Vm, VmSpec};

/// The fields of a journal entry, which are texts.
#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "F_DAEMON_US")]
    daemon: String,
    #[serde(rename = "F_VMM_US")]
    vmm: String,
}

/// Starts a VM `runs` times and renders the medians.
pub fn run(runs: u32) -> Result<String> {
    let case = Case::new("bench-start");
    let vm = Vm::create(&case, "", &VmSpec::busybox(Kernel::Cloud612));
    for _ in 0..runs {
        vm.ctl("start");
        vm.ctl("stop --force");
    }
    let journal = case.node().sh(&format!(
        "journalctl -u vmmd -o json --no-pager F_VM={} | grep F_DAEMON_US",
        vm.name()
    ));
    let entries = journal
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<Vec<Entry>, _>>();
    let entries = entries.context("read vmmd's journal")?;
    ensure!(
        entries.len() == runs as usize,
        "{} starts in the journal, not {runs}",
        entries.len()
    );
    let milliseconds = |value: &dyn Fn(&Entry) -> &String| {
        median(
            entries
                .iter()
                .map(|entry| value(entry).parse::<f64>().unwrap_or(f64::NAN) / 1000.0),
        )
    };
    let (daemon, vmm) = (
        milliseconds(&|entry| &entry.daemon),
        milliseconds(&|entry| &entry.vmm),
    );
    let rows = [
        Row::new("vmmd: checks, files, store, taps, fork", vec![daemon]),
        Row::new("vmm: fork to a running machine", vec![vmm]),
    ];
    Ok(format!(
        "### StartVm\n\nWhose time a start is, in milliseconds of this node; medians of {runs}. vmmd's share is \
         {:.0} %.\n\n{}\n",
        100.0 * daemon / (daemon + vmm),
        render(&["ms"], &rows),
    ))
}

//! KVM's counters of a VM, which debugfs has by process: `/sys/kernel/debug/kvm/<pid>-<fd>/`.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result, ensure};

/// Counter by name, for all vCPUs together.
pub type Counters = BTreeMap<String, u64>;

/// Reads all counters of the process' VM.
pub fn read(pid: u32) -> Result<Counters> {
    let prefix = format!("{pid}-");
    let mut counters = Counters::new();
    for entry in fs::read_dir("/sys/kernel/debug/kvm").context("read KVM's counters (is debugfs mounted?)")? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with(&prefix) {
            continue;
        }
        for file in fs::read_dir(entry.path())? {
            let file = file?;
            let name = file.file_name().to_string_lossy().into_owned();
            let text = fs::read_to_string(file.path()).unwrap_or_default();
            if let Ok(value) = text.trim().parse() {
                counters.insert(name, value);
            }
        }
    }
    ensure!(
        counters.contains_key("exits"),
        "process {pid} has no VM with counters"
    );
    Ok(counters)
}

//! Start to init: design's start rows, from `measure start` in the node.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use serde::Deserialize;

use super::{
    measured, median,
    table::{Row, render},
};
use crate::{Node, node::Kernel, wait::Deadline};

/// Names of the VMMs in `measure`, ours first.
const NAMES: [&str; 3] = ["vmm", "microvm", "q35"];
/// Counters that are the same thing as another one, or no events.
const NO_EXITS: [&str; 6] = [
    "max_mmu_page_hash_collisions",
    "nx_lpage_splits",
    "pages_1g",
    "pages_2m",
    "pages_4k",
    "max_mmu_rmap_size",
];

#[derive(Deserialize)]
struct Line<T> {
    vmm: String,
    result: T,
}

#[derive(Deserialize)]
struct First {
    first_instruction_us: f64,
}

#[derive(Deserialize)]
struct Start {
    first_instruction_us: f64,
    init_us: f64,
    exits_to_init: BTreeMap<String, u64>,
    idle_exits_per_second: f64,
    memory: Memory,
}

#[derive(Deserialize)]
struct Memory {
    guest_kib: f64,
    written_kib: f64,
    unshared_files_kib: f64,
    shared_kib: f64,
}

/// Measures and renders.
pub fn run(node: &Node, runs: u32) -> Result<String> {
    let guests = node.guests();
    let of_guest = format!(
        "--kernel {} --initrd {} --vmm /usr/lib/vmmd/vmm --runs {runs}",
        guests.vmlinuz(Kernel::Cloud612),
        guests.initrd(Kernel::Cloud612),
    );
    let all = |what: &str| format!("{what} {of_guest}");
    let deadline = || Deadline::seconds(u64::from(runs) * 600);
    let starts = measured(node, &all("start"), deadline())?;
    let tiny = measured(node, &all("first --tiny"), deadline())?;
    Ok(report(&starts, &tiny, runs))
}

/// The median of a figure of each VMM.
fn medians<T>(lines: &[Line<T>], value: impl Fn(&T) -> f64) -> Vec<f64> {
    let of = |vmm: &str| {
        let results = lines.iter().filter(|line| line.vmm == vmm);
        median(results.map(|line| value(&line.result)))
    };
    NAMES.map(of).to_vec()
}

fn report(lines: &[Line<Start>], tiny: &[Line<First>], runs: u32) -> String {
    let row = |name: &str, value: &dyn Fn(&Start) -> f64| Row::new(name, medians(lines, value));
    let times = [
        row("process start to first guest instruction, ms", &|start| {
            start.first_instruction_us / 1000.0
        }),
        Row::new(
            "the same with a kernel of some bytes, no initramfs, ms",
            medians(tiny, |first| first.first_instruction_us / 1000.0),
        ),
        row("process start to init, ms", &|start| start.init_us / 1000.0),
        row("VM exits to init", &|start| counter(start, "exits")),
        row("nested page faults to init", &|start| counter(start, "pf_taken")),
        row("idle VM exits/s", &|start| start.idle_exits_per_second),
        row("memory beyond guest RAM at idle: written, MiB", &|start| {
            start.memory.written_kib / 1024.0
        }),
        row(
            "memory beyond guest RAM at idle: program and libraries, MiB",
            &|start| (start.memory.unshared_files_kib + start.memory.shared_kib) / 1024.0,
        ),
        row("guest RAM in use at idle, MiB", &|start| {
            start.memory.guest_kib / 1024.0
        }),
    ];
    let kinds: BTreeSet<&str> = lines
        .iter()
        .flat_map(|line| line.result.exits_to_init.keys())
        .map(String::as_str)
        .filter(|kind| !NO_EXITS.contains(kind))
        .collect();
    let kinds = kinds
        .into_iter()
        .map(|kind| row(&format!("`{kind}`"), &|start| counter(start, kind)));
    let kinds: Vec<Row> = kinds
        .filter(|row| row.values.iter().any(|value| *value > 0.0))
        .collect();
    format!(
        "### Start to init\n\n1 vCPU, 256 MiB, the same kernel and initramfs, no disk, no network; medians of {runs} \
         runs in turn.\n\n{}\nKVM's counters from start to init:\n\n{}\n",
        render(&NAMES, &times),
        render(&NAMES, &kinds),
    )
}

#[allow(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn counter(start: &Start, name: &str) -> f64 {
    start.exits_to_init.get(name).copied().unwrap_or(0) as f64
}

//! Cost of a disk request, from `measure disk` in the node.

use anyhow::Result;
use serde::Deserialize;

use super::{
    Line, measured,
    table::{Row, render},
    turns,
};
use crate::{Case, Node, node::Kernel, storage::Format, wait::Deadline};

/// Size of the images in MiB.
const SIZE: u64 = 192;
/// Jobs of `measure` and their names in the tables.
const JOBS: [(&str, &str); 7] = [
    ("randread-qd1", "4 KiB random read, QD 1"),
    ("randwrite-qd1", "4 KiB random write, QD 1"),
    ("randread-qd32", "4 KiB random read, QD 32"),
    ("randwrite-qd32", "4 KiB random write, QD 32"),
    ("read-128k", "128 KiB sequential read, QD 4"),
    ("write-128k", "128 KiB sequential write, QD 4"),
    ("write-fsync", "4 KiB random write and fsync, QD 1"),
];
/// Subjects of each comparison, ours first: names in `measure`, and names of the columns.
const TABLES: [(&str, &[(&str, &str)]); 2] = [
    (
        "Raw image",
        &[("vmm-raw", "vmm"), ("microvm-raw", "microvm"), ("q35-raw", "q35")],
    ),
    ("qcow2 image", &[("vmm-qcow2", "vmm"), ("q35-qcow2", "q35")]),
];

/// How often all guests have their turn in a job before the next job. Then all are booted again, until there were as many
/// turns as runs are wanted.
const TURNS: u32 = 2;

#[derive(Deserialize)]
struct Cost {
    job: String,
    us_per_request: f64,
    exits_per_request: f64,
    host_cpu_us_per_request: f64,
}

impl super::Cost for Cost {
    fn job(&self) -> &str {
        &self.job
    }
}

/// Figure of a table: its name and its value.
type Figure = (&'static str, fn(&Cost) -> f64);

const FIGURES: [Figure; 3] = [
    ("time for each request", |cost| cost.us_per_request),
    ("VM exits for each request", |cost| cost.exits_per_request),
    ("host CPU time for each request", |cost| {
        cost.host_cpu_us_per_request
    }),
];

/// Measures and renders.
pub fn run(node: &Node, runs: u32) -> Result<String> {
    let case = Case::new("bench-disk");
    let initrd = case.storage_initrd(Kernel::Cloud612);
    let raw = case.image("disk", Format::Raw, SIZE);
    let qcow2 = case.image("disk", Format::Qcow2, SIZE);
    // The images are allocated and written completely, like those of a disk in use.
    node.sh(&format!(
        "for i in 'raw {raw}' 'qcow2 {qcow2}'; do qemu-io -f $i -c 'write -P 0x5a 0 {SIZE}M' >/dev/null || exit; done; sync"
    ));
    let boots = runs.div_ceil(TURNS);
    let arguments = format!(
        "disk --kernel {} --initrd {initrd} --vmm /usr/lib/vmmd/vmm --raw {raw} --qcow2 {qcow2} --runs {boots} \
         --turns {TURNS}",
        node.guests().vmlinuz(Kernel::Cloud612),
    );
    let lines = measured(node, &arguments, Deadline::seconds(u64::from(boots) * 1800))?;
    Ok(report(&lines, boots))
}

fn report(lines: &[Line<Cost>], boots: u32) -> String {
    let mut text = format!(
        "### Disk\n\n1 vCPU, 1 queue, fio with io_uring in the same guest, an allocated image of {SIZE} MiB past the node's \
         page cache; QEMU with aio=io_uring and an I/O thread; the vCPU on one processor, the VMM's other threads on \
         another. All guests are up with the same job; one at a time runs, for a quarter of a second, six times in a turn; \
         {TURNS} turns in each of {boots} boots. Figures are medians, ratios are medians of each turn's ratio, with their \
         quartiles. Time and CPU are in microseconds of this node; host CPU is the VMM's beside the guest's.{}\n\n",
        stood_still(lines),
    );
    for (title, subjects) in TABLES {
        let names: Vec<&str> = subjects.iter().map(|(_, name)| *name).collect();
        for (figure, value) in FIGURES {
            let rows = JOBS.map(|(job, name)| {
                let of = |(subject, _): &(&str, &str)| turns(lines, subject, job, |cost| Some(value(cost)));
                Row::of_turns(name, &subjects.iter().map(of).collect::<Vec<_>>())
            });
            text += &format!("{title}, {figure}:\n\n{}\n", render(&names, &rows));
        }
    }
    text
}

/// Names the VMMs whose guests stood still, which the emulated processor can cause.
fn stood_still(lines: &[Line<Cost>]) -> String {
    let mut names: Vec<&str> = lines
        .iter()
        .filter(|line| line.stood_still.is_some())
        .map(|line| line.vmm.as_str())
        .collect();
    if names.is_empty() {
        return String::new();
    }
    names.sort_unstable();
    format!(
        " Turns and boots that do not count, because a guest stood still: {} ({}).",
        names.len(),
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_of_every_subject_is_in_its_table() {
        let line = |vmm: &str, exits: f64| {
            let cost = |(job, _): (&str, &str)| {
                serde_json::json!({
                    "job": job, "requests": 1, "us_per_request": 100.0, "exits_per_request": exits,
                    "host_cpu_us_per_request": 10.0
                })
            };
            let line = serde_json::json!({ "vmm": vmm, "run": 0, "result": JOBS.map(cost) });
            serde_json::from_value::<Line<Cost>>(line).expect("a line of measure")
        };
        let lines = [
            line("vmm-raw", 1.0),
            line("microvm-raw", 2.0),
            line("q35-raw", 4.0),
            line("vmm-qcow2", 3.0),
            line("q35-qcow2", 6.0),
        ];
        let text = report(&lines, 1);
        let row = "| 1.00 | 2.00 | 4.00 | 0.50 (0.50–0.50) | 0.25 (0.25–0.25) |";
        assert_eq!(text.matches(row).count(), JOBS.len(), "{text}");
        let row = "| 3.00 | 6.00 | 0.50 (0.50–0.50) |";
        assert_eq!(text.matches(row).count(), JOBS.len(), "{text}");
        assert!(!text.contains("stood still"), "{text}");
    }

    #[test]
    fn guests_that_stood_still_are_named() {
        let line = |vmm: &str| {
            let line = serde_json::json!({ "vmm": vmm, "run": 3, "stood_still": "read-128k" });
            serde_json::from_value::<Line<Cost>>(line).expect("a line of measure")
        };
        let text = report(&[line("q35-raw"), line("microvm-raw")], 1);
        assert!(text.contains("stood still: 2 (microvm-raw, q35-raw)."), "{text}");
    }
}

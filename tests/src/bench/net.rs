//! Cost of a packet, from `measure net` in the node.

use anyhow::Result;
use serde::Deserialize;

use super::{
    Line, measured,
    table::{Row, render},
    turns, with_measure,
};
use crate::{Node, guest, node::Kernel, wait::Deadline};

/// Jobs of `measure` and their names in the tables.
const JOBS: [(&str, &str); 11] = [
    ("tcp-out-1", "TCP from the guest, 1 stream, MiB"),
    ("tcp-out-4", "TCP from the guest, 4 streams, MiB"),
    ("tcp-in-1", "TCP to the guest, 1 stream, MiB"),
    ("tcp-in-4", "TCP to the guest, 4 streams, MiB"),
    ("tcp-vm-1", "TCP from one guest to another, 1 stream, MiB"),
    ("tcp-vm-4", "TCP from one guest to another, 4 streams, MiB"),
    ("udp-out-64", "UDP of 64 bytes from the guest, packet"),
    ("udp-out-1400", "UDP of 1,400 bytes from the guest, packet"),
    ("udp-in-64", "UDP of 64 bytes to the guest, packet"),
    ("udp-in-1400", "UDP of 1,400 bytes to the guest, packet"),
    ("ping", "there and back, one at a time"),
];
/// Subjects of each comparison, ours first, and the number of figures. With vhost-net the process
/// does not read or write packets.
const TABLES: [(&str, [&str; 2], usize); 2] = [
    ("Without vhost-net", ["vmm", "qemu"], FIGURES.len()),
    ("With vhost-net", ["vmm-vhost", "qemu-vhost"], FIGURES.len() - 1),
];

/// How often all guests have their turn in a job. Then all are booted again, until there were as many turns as runs are wanted.
const TURNS: u32 = 3;

#[derive(Deserialize)]
struct Cost {
    job: String,
    us_per_unit: f64,
    exits_per_unit: f64,
    host_cpu_us_per_unit: f64,
    calls_per_unit: f64,
}

impl super::Cost for Cost {
    fn job(&self) -> &str {
        &self.job
    }
}

/// Figure of a table: its name and its value.
type Figure = (&'static str, fn(&Cost) -> f64);

const FIGURES: [Figure; 4] = [
    ("time", |cost| cost.us_per_unit),
    ("VM exits", |cost| cost.exits_per_unit),
    ("host CPU time", |cost| cost.host_cpu_us_per_unit),
    ("reads and writes of the VMM's process", |cost| {
        cost.calls_per_unit
    }),
];

/// Measures and renders.
pub fn run(node: &Node, runs: u32) -> Result<String> {
    let boots = runs.div_ceil(TURNS);
    let of_guest = with_measure(node, Kernel::Cloud612, guest::initrd_with)?;
    let arguments = format!("net {of_guest} --runs {boots} --turns {TURNS}");
    let lines = measured(node, &arguments, Deadline::seconds(u64::from(boots) * 1200))?;
    Ok(report(&lines, boots))
}

fn report(lines: &[Line<Cost>], boots: u32) -> String {
    let mut text = format!(
        "### Network\n\n1 vCPU, 1 pair of queues, a tap on a bridge, traffic between the guest and the node; QEMU's microvm with \
         virtio-net-pci. The vCPU is on one processor, the VMM's other threads (vhost's too) on another. One guest at a time, or two of \
         a kind, has traffic, for a second and a half; {TURNS} turns in each of {boots} boots. Figures are medians, ratios are medians of each \
         turn's ratio, with their quartiles. Time and CPU are in microseconds of this node; host CPU is that of the VMM's process and \
         of vhost's thread, beside the guest's. What is lost on the way is not counted.\n\n",
    );
    for (title, names, figures) in TABLES {
        for (figure, value) in FIGURES.iter().take(figures) {
            let rows = JOBS.map(|(job, name)| {
                let of = |subject: &str| turns(lines, subject, job, |cost| Some(value(cost)));
                Row::of_turns(name, &names.map(of))
            });
            text += &format!("{title}, {figure}:\n\n{}\n", render(&names, &rows));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_of_every_subject_is_in_its_table() {
        let line = |vmm: &str, exits: f64| {
            let cost = |(job, _): (&str, &str)| {
                serde_json::json!({
                    "job": job, "units": 1, "us_per_unit": 100.0, "exits_per_unit": exits, "host_cpu_us_per_unit": 10.0,
                    "calls_per_unit": 5.0
                })
            };
            let line = serde_json::json!({ "vmm": vmm, "run": 0, "result": JOBS.map(cost) });
            serde_json::from_value::<Line<Cost>>(line).expect("a line of measure")
        };
        let lines = [
            line("vmm", 1.0),
            line("qemu", 2.0),
            line("vmm-vhost", 3.0),
            line("qemu-vhost", 4.0),
        ];
        let text = report(&lines, 1);
        for row in [
            "| 1.00 | 2.00 | 0.50 (0.50–0.50) |",
            "| 3.00 | 4.00 | 0.75 (0.75–0.75) |",
        ] {
            assert_eq!(text.matches(row).count(), JOBS.len(), "{text}");
        }
    }
}

//! Cost of a screen with a viewer, from `measure screen` in the node.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde::Deserialize;

use super::{
    Line, measured, native,
    table::{Ratio, Row, compared, render},
    turns, with_measure,
};
use crate::{Node, guest, node::Kernel, wait::Deadline};

const SUBJECTS: [&str; 2] = ["vmm", "q35"];
/// Jobs of `measure`: their names there and in the tables, and the unit of their costs. Scrolling
/// text is the same in each second, independent of the number of updates. A skipped picture costs
/// nothing.
const SHOWN: [(&str, &str, Per); 3] = [
    (
        "text",
        "A text console that scrolls by 20 lines each second",
        Per::Second,
    ),
    (
        "terminal",
        "A terminal in X that fills the screen and scrolls by 20 lines each second",
        Per::Second,
    ),
    (
        "pictures",
        "Four pictures each second that fill the screen",
        Per::Update,
    ),
];

/// Unit of a cost.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Per {
    Second,
    Update,
}

const ENCODINGS: [(&str, &str); 4] = [
    ("raw", "Raw"),
    ("hextile", "Hextile"),
    ("tight", "Tight"),
    ("zrle", "ZRLE"),
];
const FIGURES: [(&str, &str, f64); 3] = [
    ("bytes_per_second", "sent, KiB", 1024.0),
    ("host_cpu_us_per_second", "host CPU time, ms", 1e3),
    ("exits_per_second", "VM exits", 1.0),
];
/// From one update to the next.
const PERIOD: &str = "us_per_frame";
/// Job, figure, name of the row, and divisor for the unit.
const OTHERS: [(&str, &str, &str, f64); 8] = [
    (
        "idle",
        "host_cpu_us_per_second",
        "idle, with a client: host CPU time, ms each second",
        1e3,
    ),
    (
        "idle",
        "sleeps_per_second",
        "idle: how often threads beside the vCPU woke up, each second",
        1.0,
    ),
    ("idle", "updates", "idle: updates", 1.0),
    ("key", "us", "from a key to the update with its letter, ms", 1e3),
    (
        "line on ttyS0",
        "exits",
        "a line of 80 bytes on the serial port: VM exits",
        1.0,
    ),
    (
        "line on hvc0",
        "exits",
        "the same on the virtio-console: VM exits",
        1.0,
    ),
    (
        "line on ttyS0",
        "host_cpu_us",
        "a line on the serial port: host CPU time, µs",
        1.0,
    ),
    (
        "line on hvc0",
        "host_cpu_us",
        "the same on the virtio-console: host CPU time, µs",
        1.0,
    ),
];

/// How often both guests have their turn in a boot.
const TURNS: u32 = 3;

#[derive(Deserialize)]
struct Cost {
    job: String,
    figures: BTreeMap<String, f64>,
}

impl super::Cost for Cost {
    fn job(&self) -> &str {
        &self.job
    }
}

impl Cost {
    fn figure(&self, name: &str, unit: f64) -> Option<f64> {
        Some(self.figures.get(name)? / unit)
    }
}

/// A flood of the serial port without a guest: the benchmark of the crate `devices`, which runs on this machine and not in the node.
#[derive(Deserialize)]
struct Flood {
    rows: Vec<Way>,
}

#[derive(Deserialize)]
struct Way {
    /// Additional cost of a byte: `exit` or `none`.
    exit: String,
    /// How many MiB readers were attached for.
    mib: u64,
    read_ns: f64,
    alone_ns: f64,
    /// The lower quartile, the median and the upper one.
    ratio: [f64; 3],
}

/// Measures and renders.
pub fn run(node: &Node, runs: u32) -> Result<String> {
    let of_guest = with_measure(node, Kernel::Generic612, guest::screen_initrd_with)?;
    let desktop = node.guests().desktop("");
    let there = node.ssh(&format!("test -e {desktop}/disk.raw"))?;
    ensure!(
        there.success(),
        "the node has no desktop: make bench builds one that has it"
    );
    let flood = native("vmmd-devices", "serial_flood", &[])?;
    let boots = runs.div_ceil(TURNS);
    let arguments = format!("screen {of_guest} --desktop {desktop} --runs {boots} --turns {TURNS}");
    let lines = measured(node, &arguments, Deadline::seconds(u64::from(boots) * 1200))?;
    Ok(report(&lines, boots) + &report_flood(&lines, &flood))
}

fn report(lines: &[Line<Cost>], boots: u32) -> String {
    let mut text = format!(
        "### The screen\n\n1 vCPU, 256 MiB, Debian's generic kernel with its driver for virtio-gpu, 1920 × 1080; QEMU's q35 with virtio-gpu-pci and its VNC server. One \
         client on a UNIX socket asks for each update as soon as it has the one before, in one encoding and CopyRect, and reads over the pixels without \
         decoding them. The vCPU is on one processor, the VMM's other threads on another, with the client. \
         The terminal is xterm in a whole Debian of 768 MiB, whose X server draws with the processor. {TURNS} turns in each of {boots} boots. Figures are medians, \
         ratios are medians of each turn's ratio, with their quartiles. Host CPU is that of the VMM's process beside the guest's.\n\n",
    );
    let of = |job: &str, figure: &dyn Fn(&Cost) -> Option<f64>| -> [Vec<(u32, f64)>; 2] {
        SUBJECTS.map(|subject| turns(lines, subject, job, figure))
    };
    for (shown, title, per) in SHOWN {
        let mut table = |what: &str, figure: &dyn Fn(&Cost) -> Option<f64>| {
            let rows = ENCODINGS
                .map(|(encoding, name)| Row::of_turns(name, &of(&format!("{shown}, {encoding}"), figure)));
            text += &format!("{title}, {what}:\n\n{}\n", render(&SUBJECTS, &rows));
        };
        table("from one update to the next, ms", &|cost| {
            cost.figure(PERIOD, 1e3)
        });
        for (figure, what, unit) in FIGURES {
            match per {
                Per::Second => table(&format!("{what} each second"), &|cost| cost.figure(figure, unit)),
                Per::Update => table(&format!("{what} for each update"), &|cost| {
                    Some(cost.figure(figure, unit)? * cost.figure(PERIOD, 1e6)?)
                }),
            }
        }
    }
    let rows = OTHERS
        .map(|(job, figure, name, unit)| Row::of_turns(name, &of(job, &|cost| cost.figure(figure, unit))));
    text + &format!("Other figures:\n\n{}\n", render(&SUBJECTS, &rows))
}

/// Jobs of `measure` with and without readers of the console.
const READERS: [&str; 2] = ["flood, readers", "flood, nobody"];
/// Figures of a flood.
const FLOOD: [(&str, &str); 3] = [
    ("us_per_kib", "hvc0, a guest in the node: µs for each KiB"),
    ("host_cpu_us_per_kib", "the same: host CPU time of the VMM, µs"),
    ("exits_per_kib", "the same: VM exits"),
];

fn report_flood(lines: &[Line<Cost>], flood: &Flood) -> String {
    // Only ours is flooded.
    let of =
        |figure: &str| READERS.map(|job| turns(lines, SUBJECTS[0], job, |cost| cost.figure(figure, 1.0)));
    let ways = flood.rows.iter().map(|way| {
        let what = match way.exit.as_str() {
            "none" => "without exits",
            _ => "with 1 µs for the exit of each",
        };
        let [low, value, high] = way.ratio;
        let quartiles = Some((low, high));
        Row {
            name: format!("ttyS0, {} MiB {what}: ns for each byte", way.mib),
            values: vec![way.read_ns, way.alone_ns],
            ratios: Some(vec![Some(Ratio { value, quartiles })]),
        }
    });
    let rows: Vec<Row> = FLOOD
        .map(|(figure, name)| Row::of_turns(name, &of(figure)))
        .into_iter()
        .chain(ways)
        .collect();
    format!(
        "A guest that floods a console which ten clients are attached to, five of which never read, beside one that nobody is attached to, in turns. \
         In the node it is a guest that prints on hvc0; the serial port is written to by a thread without a guest on the machine that runs the node, \
         with what an exit costs on a real processor and without. The guest has a processor of its own, and so have the VMM's threads; the readers have a third in \
         the node, and share the VMM's on the machine that runs it:\n\n{}\n",
        compared(&["with readers", "with none"], "ratio", &rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_of_every_job_is_in_its_table() {
        let line = |vmm: &str, value: f64| {
            let shown = SHOWN.iter().flat_map(|(shown, _, per)| {
                ENCODINGS.map(|(encoding, _)| {
                    // With `value` ms from one update to the next, 1,000 each second are `value` for each update.
                    let each = if *per == Per::Update { 1e3 } else { value };
                    let mut figures: BTreeMap<_, _> =
                        FIGURES.map(|(name, _, unit)| (name, each * unit)).into();
                    figures.insert(PERIOD, value * 1e3);
                    serde_json::json!({ "job": format!("{shown}, {encoding}"), "figures": figures })
                })
            });
            let others = OTHERS.map(|(job, figure, _, unit)| serde_json::json!({ "job": job, "figures": { figure: value * unit } }));
            let result: Vec<_> = shown.chain(others).collect();
            let line = serde_json::json!({ "vmm": vmm, "run": 0, "result": result });
            serde_json::from_value::<Line<Cost>>(line).expect("a line of measure")
        };
        let text = report(&[line("vmm", 1.0), line("q35", 2.0)], 1);
        let rows = SHOWN.len() * (FIGURES.len() + 1) * ENCODINGS.len() + OTHERS.len();
        assert_eq!(
            text.matches("| 1.00 | 2.00 | 0.50 (0.50–0.50) |").count(),
            rows,
            "{text}"
        );
    }

    #[test]
    fn a_flood_with_readers_is_compared_with_one_that_has_none() {
        let figures: BTreeMap<_, _> = FLOOD.map(|(name, _)| (name, 1.0)).into();
        let result = serde_json::json!([{"job": READERS[0], "figures": figures}, {"job": READERS[1], "figures": figures}]);
        let line = serde_json::json!({ "vmm": "vmm", "run": 0, "result": result });
        let way = r#"{"exit":"exit","mib":48,"read_ns":1.0,"alone_ns":1.0,"ratio":[1.0,1.0,1.0]}"#;
        let flood = format!(r#"{{"rows":[{way},{way}]}}"#);
        let text = report_flood(
            &[serde_json::from_value(line).expect("a line of measure")],
            &serde_json::from_str(&flood).expect("what the benchmark prints"),
        );
        assert!(text.contains("| | with readers | with none | ratio |"), "{text}");
        assert_eq!(
            text.matches("| 1.00 | 1.00 | 1.00 (1.00–1.00) |").count(),
            5,
            "{text}"
        );
    }
}

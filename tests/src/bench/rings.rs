//! A disk's rings without a guest, beside the same io_uring without virtio: the benchmark of the crate `devices`, which
//! runs on this machine and not in the node.

use anyhow::Result;
use serde::Deserialize;

use super::{
    native,
    table::{Ratio, Row, render},
};

#[derive(Deserialize)]
struct Report {
    /// A number to the other processor and back.
    handoff_ns: f64,
    rows: Vec<Figures>,
    queues: Vec<Chain>,
}

/// Our queue and the one of the crate virtio-queue: taking a chain and giving it back.
#[derive(Deserialize)]
struct Chain {
    chain: String,
    /// Chains that are available at once.
    batch: u32,
    ours_ns: f64,
    crate_ns: f64,
    ratio: f64,
    /// Ours and theirs; not counted without valgrind.
    instructions: Option<[f64; 2]>,
}

#[derive(Deserialize)]
struct Figures {
    cache: String,
    depth: u32,
    driver: String,
    ring_per_second: f64,
    /// Without a thread beside it that polls.
    unwatched_ring_per_second: f64,
    virtio_per_second: f64,
    ratio: f64,
    unwatched_ratio: f64,
    ring_cpu_ns: f64,
    virtio_cpu_ns: f64,
    cpu_ratio: f64,
}

/// Runs it, building it first, and renders.
pub fn run() -> Result<String> {
    let report = native("vmmd-devices", "blk_rings", &["--features", "testing"])?;
    Ok(render_report(&report))
}

fn render_report(report: &Report) -> String {
    let rows = report.rows.iter().flat_map(|figures| {
        let row = |what: &str, values: [f64; 2], ratio: f64| Row {
            name: format!(
                "{}, depth {}, {}: {what}",
                figures.cache, figures.depth, figures.driver
            ),
            values: values.to_vec(),
            ratios: Some(vec![Some(Ratio {
                value: ratio,
                quartiles: None,
            })]),
        };
        let rate = |ring: f64| [figures.virtio_per_second, ring];
        let unwatched = || {
            let values = rate(figures.unwatched_ring_per_second);
            row(
                "requests/s, nobody beside the ring",
                values,
                figures.unwatched_ratio,
            )
        };
        let cpu = [figures.virtio_cpu_ns, figures.ring_cpu_ns];
        let rows = [
            Some(row("requests/s", rate(figures.ring_per_second), figures.ratio)),
            (figures.driver == "polling").then(unwatched),
            Some(row("CPU, ns for each request", cpu, figures.cpu_ratio)),
        ];
        rows.into_iter().flatten()
    });
    let rows: Vec<Row> = rows.collect();
    format!(
        "### A disk's rings without a guest\n\n4 KiB random reads through a virtio-blk device whose driver is a thread of the \
         benchmark, beside a loop on io_uring alone; on the machine that runs the node. CPU time is that of the thread \
         that serves the disk. A driver that polls looks at the used ring all the time; beside the loop a thread looks at \
         its progress as often then, since it takes its part of the core where two processors share one. A driver with \
         interrupts sleeps, and waking that thread is measured along. Driver and worker are on two processors: a number \
         takes {:.0} ns to the other one and back, and at depth 1 each request's time has such a way in it, and the \
         driver's own work. Worker and loop take turns of a fortieth of a second on the same processor, which \
         changes from turn to turn; a turn in which the host took a processor away is not counted. Figures are medians, \
         ratios are medians of each turn's ratio.\n\n{}\n",
        report.handoff_ns,
        render(&["virtio-blk", "ring alone"], &rows)
    ) + &render_queues(&report.queues)
}

fn render_queues(chains: &[Chain]) -> String {
    let rows = chains.iter().flat_map(|chain| {
        let name = |what: &str| format!("{}, {} at once: {what}", chain.chain, chain.batch);
        let time = Row {
            name: name("ns"),
            values: vec![chain.ours_ns, chain.crate_ns],
            ratios: Some(vec![Some(Ratio {
                value: chain.ratio,
                quartiles: None,
            })]),
        };
        let counts = chain.instructions;
        let counts = counts.map(|counts| Row::new(name("instructions"), counts.to_vec()));
        std::iter::once(time).chain(counts)
    });
    format!(
        "\n### The queue beside that of the crate virtio-queue\n\nWhat a device does with a chain: it takes the chain, goes through its \
         descriptors, gives the chain back, and decides about interrupts and notifications (with EVENT_IDX) once for all that were \
         available at once. Our queue also finds out that the chain is whole, that readable buffers come first and that all lie in \
         guest memory; the crate's iterators leave that to the device. A whole request is what the device does for it as well: \
         it reads random bytes, or sorts 256 page numbers that are neighbours and gives the pages back. One thread is the driver \
         too; what the driver does is measured alone and taken off. Instructions are counted by callgrind, which sees none of the \
         kernel's, and are the same in each run; times are CPU time, medians of turns on a machine that others share.\n\n{}\n",
        render(&["ours", "virtio-queue"], &rows.collect::<Vec<_>>())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_cpu_time_have_their_ratio() {
        let line = r#"{"benchmark":"blk_rings","handoff_ns":321,"rows":[{"cache":"direct","depth":32,"driver":"polling","block_bytes":4096,
            "ring_per_second":1000,"unwatched_ring_per_second":1200,"virtio_per_second":900,"ratio":0.92,"unwatched_ratio":0.74,"ring_cpu_ns":500,
            "virtio_cpu_ns":600,"cpu_ratio":1.3,"kicks_per_request":0.1}],"queues":[
            {"chain":"entropy, 1 descriptor","batch":16,"ours_ns":25,"crate_ns":100,"ratio":0.24,"instructions":[396.0,990.0]},
            {"chain":"block","batch":1,"ours_ns":25,"crate_ns":100,"ratio":0.25,"instructions":null}]}"#;
        let text = render_report(&serde_json::from_str(line).expect("figures"));
        assert!(text.contains("takes 321 ns to the other"), "{text}");
        assert!(
            text.contains("| direct, depth 32, polling: requests/s | 900 | 1,000 | 0.92 |"),
            "{text}"
        );
        assert!(
            text.contains(
                "| direct, depth 32, polling: requests/s, nobody beside the ring | 900 | 1,200 | 0.74 |"
            ),
            "{text}"
        );
        assert!(
            text.contains("| direct, depth 32, polling: CPU, ns for each request | 600 | 500 | 1.30 |"),
            "{text}"
        );
        assert!(
            text.contains("| entropy, 1 descriptor, 16 at once: ns | 25.0 | 100 | 0.24 |"),
            "{text}"
        );
        assert!(
            text.contains("| entropy, 1 descriptor, 16 at once: instructions | 396 | 990 | 0.40 |"),
            "{text}"
        );
        assert!(!text.contains("block, 1 at once: instructions"), "{text}");
    }
}

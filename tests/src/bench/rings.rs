//! A disk's rings without a guest, beside the same io_uring without virtio: the benchmark of the crate `devices`, which
//! runs on this machine and not in the node.

use anyhow::{Context, Result};
use serde::Deserialize;

use super::{
    native,
    table::{Row, render},
};

#[derive(Deserialize)]
struct Report {
    rows: Vec<Figures>,
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
    ring_cpu_ns: f64,
    virtio_cpu_ns: f64,
}

/// Runs it, building it first, and renders.
pub fn run() -> Result<String> {
    let line = native("vmmd-devices", "blk_rings", &["--features", "testing"])?;
    let report = serde_json::from_str(&line).context("read the benchmark's figures")?;
    Ok(render_report(&report))
}

fn render_report(report: &Report) -> String {
    let rows = report.rows.iter().flat_map(|figures| {
        let row = |what: &str, values: [f64; 2]| {
            let of = (&figures.cache, figures.depth, &figures.driver);
            Row::new(
                format!("{}, depth {}, {}: {what}", of.0, of.1, of.2),
                values.to_vec(),
            )
        };
        let unwatched = [figures.virtio_per_second, figures.unwatched_ring_per_second];
        let rows = [
            Some(row(
                "requests/s",
                [figures.virtio_per_second, figures.ring_per_second],
            )),
            (figures.driver == "polling").then(|| row("requests/s, nobody beside the ring", unwatched)),
            Some(row(
                "CPU, ns for each request",
                [figures.virtio_cpu_ns, figures.ring_cpu_ns],
            )),
        ];
        rows.into_iter().flatten()
    });
    let rows: Vec<Row> = rows.collect();
    format!(
        "### A disk's rings without a guest\n\n4 KiB random reads through a virtio-blk device whose driver is a thread of the \
         benchmark, beside a loop on io_uring alone; on the machine that runs the node. CPU time is that of the thread \
         that serves the disk. A driver that polls looks at the used ring all the time; beside the loop a thread looks at \
         its progress as often then, since it takes its part of the core where two processors share one. A driver with \
         interrupts sleeps, and waking that thread is measured along.\n\n{}\n",
        render(&["virtio-blk", "ring alone"], &rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_cpu_time_have_their_ratio() {
        let line = r#"{"benchmark":"blk_rings","rows":[{"cache":"direct","depth":32,"driver":"polling","block_bytes":4096,
            "ring_per_second":1000,"unwatched_ring_per_second":1200,"virtio_per_second":900,"ratio":0.9,"ring_cpu_ns":500,"virtio_cpu_ns":600,
            "kicks_per_request":0.1}]}"#;
        let text = render_report(&serde_json::from_str(line).expect("figures"));
        assert!(
            text.contains("| direct, depth 32, polling: requests/s | 900 | 1,000 | 0.90 |"),
            "{text}"
        );
        assert!(
            text.contains(
                "| direct, depth 32, polling: requests/s, nobody beside the ring | 900 | 1,200 | 0.75 |"
            ),
            "{text}"
        );
        assert!(
            text.contains("| direct, depth 32, polling: CPU, ns for each request | 600 | 500 | 1.20 |"),
            "{text}"
        );
    }
}

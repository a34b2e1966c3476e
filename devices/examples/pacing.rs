//! Judges the pacing policy of a disk's worker by a model, over the whole grid of parameters. The
//! tests of `virtio::blk::simulation` cover a part of the grid. The model and the policy are
//! compiled from the files of that module.
//!
//! `cargo run --release -p vmmd-devices --example pacing` prints one JSON object on stdout.

#![allow(
    clippy::arithmetic_side_effects,
    clippy::cast_precision_loss,
    clippy::expect_used,
    clippy::indexing_slicing
)]

#[path = "../src/virtio/blk/pace.rs"]
mod pace;
#[path = "../src/virtio/blk/simulation/mod.rs"]
mod simulation;

use simulation::{Point, Row, grid, share, simulate};

/// A group of points in JSON.
fn group(name: &str, rows: &[Row], is: impl Fn(&Point) -> bool) -> String {
    let some: Vec<&Row> = rows.iter().filter(|row| is(&row.point)).collect();
    let of = |policy: usize, least: f64| share(some.iter().copied(), |row| row.parts()[policy] >= least);
    let worst = some.iter().map(|row| row.parts()[0]).fold(f64::MAX, f64::min);
    format!(
        r#"{{"name":"{name}","points":{},"new":{:.4},"old":{:.4},"never":{:.4},"always":{:.4},"least":{:.4},"worst":{worst:.4},"reachable":{:.4},"latency":{:.4},"brief":{:.4}}}"#,
        some.len(),
        of(0, 0.95),
        of(1, 0.95),
        of(2, 0.95),
        of(3, 0.95),
        of(0, 0.85),
        of(4, 0.85),
        share(some.iter().copied(), |row| row.added() <= 0.1),
        share(some.iter().copied(), Row::holds_briefly),
    )
}

/// The points at which the policy is far from the best, or adds latency.
fn print_far(rows: &[Row]) {
    for row in rows {
        let [part, .., reachable] = row.parts();
        if part < 0.85 || row.added() > 0.1 {
            let added = row.added();
            eprintln!("{:?}: {part:.2} of {reachable:.2}, p99 {added:+.2}", row.point);
        }
    }
}

fn main() {
    let rows = simulate(&grid());
    print_far(&rows);
    let mut groups = Vec::new();
    for latency in [10, 30, 100, 300, 1000, 10_000] {
        let name = format!("device {latency} µs");
        groups.push(group(&name, &rows, |point| point.latency == latency * 1000));
    }
    for interrupt in [500, 7000, 100_000_u64] {
        let name = format!("interrupt {} µs", interrupt as f64 / 1000.0);
        groups.push(group(&name, &rows, |point| point.interrupt == interrupt));
    }
    for exit in [1, 7, 50] {
        let name = format!("exit {exit} µs");
        groups.push(group(&name, &rows, |point| point.exit == exit * 1000));
    }
    for depth in [1, 4, 16, 32, 128] {
        groups.push(group(&format!("depth {depth}"), &rows, |point| {
            point.depth == depth
        }));
    }
    for (processors, name) in [(1, "one processor"), (2, "two processors")] {
        groups.push(group(name, &rows, |point| point.processors == processors));
    }
    groups.push(group("all", &rows, |_| true));
    println!(r#"{{"benchmark":"pacing","groups":[{}]}}"#, groups.join(","));
}

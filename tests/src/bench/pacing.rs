//! When a disk's worker polls, sleeps and interrupts, judged by a model: the simulation of the crate `devices`, which uses the
//! policy's own code and runs on this machine.

use anyhow::{Context, Result};
use serde::Deserialize;

use super::figures;

#[derive(Deserialize)]
struct Report {
    groups: Vec<Group>,
}

/// Points of the grid with a common property. All figures except `worst` are fractions of their
/// number.
#[derive(Deserialize)]
struct Group {
    name: String,
    points: u32,
    /// Where a policy has at least 0.95 of the throughput of the best of the old policy, never holding back and always
    /// polling: the policy itself, and these.
    new: f64,
    old: f64,
    never: f64,
    always: f64,
    /// Where the policy has at least 0.85 of it.
    least: f64,
    /// Its smallest part of it.
    worst: f64,
    /// Points at which the informed policy has at least 0.85 of it. That policy knows more than a
    /// worker can.
    reachable: f64,
    /// Where it adds no more than a tenth of the time that the device has a request to the p99 of never holding back.
    latency: f64,
    /// Where it holds completions back no longer than a sixteenth of what requests take.
    brief: f64,
}

/// Runs it, building it first, and renders.
pub fn run() -> Result<String> {
    let arguments = "run -q --locked --release -p vmmd-devices --example pacing";
    let line = figures("pacing", &arguments.split(' ').collect::<Vec<_>>())?;
    let report = serde_json::from_str(&line).context("read the simulation's figures")?;
    Ok(render(&report))
}

fn render(report: &Report) -> String {
    let mut text = String::from(
        "### Pacing\n\nA model of one vCPU, the worker of a queue and a device, over a grid: a device that takes 10 µs to 10 ms, for one \
         request at a time or for many; 1 to 50 µs for an exit; 0.5 to 100 µs for an interrupt; 1 to 128 requests at once; one \
         processor or two. The columns say at which part of the points a policy has at least 0.95 of the throughput of the best \
         of three: the policy of before, never holding completions back (and sleeping at once), and always polling. The others are \
         about the policy itself: where it has at least 0.85; its worst point; where at least 0.85 is reached by a policy under the \
         same rules that knows how many requests the driver has and whether it is busy; where the policy adds no more than a tenth \
         of what the device takes to the p99 of never holding back; and where it holds completions back (99 times of 100) no \
         longer than a sixteenth of what requests take, give or take a round of the worker. The figures are the same in each run.\n\n\
         | points | number | the policy | the old one | never hold | always poll | 0.85 | worst | 0.85 in reach | latency | held |\n\
         |---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    for group in &report.groups {
        let Group { name, points, .. } = group;
        let parts = [
            group.new,
            group.old,
            group.never,
            group.always,
            group.least,
            group.worst,
            group.reachable,
            group.latency,
            group.brief,
        ];
        let cells: Vec<String> = parts.iter().map(|part| format!("{part:.3}")).collect();
        text += &format!("| {name} | {points} | {} |\n", cells.join(" | "));
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_has_its_row() {
        let line = r#"{"benchmark":"pacing","groups":[{"name":"depth 4","points":216,"new":0.8657,"old":0.6898,"never":0.5602,
            "always":0.9306,"least":0.9213,"worst":0.6157,"reachable":0.9,"latency":0.9907,"brief":1}]}"#;
        let text = render(&serde_json::from_str(line).expect("figures"));
        let row =
            "| depth 4 | 216 | 0.866 | 0.690 | 0.560 | 0.931 | 0.921 | 0.616 | 0.900 | 0.991 | 1.000 |\n";
        assert!(text.contains(row), "{text}");
    }
}

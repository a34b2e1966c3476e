//! The daemon with many VMs, against its budgets: the benchmark of the crate `vmmd`, which runs on this machine and not in
//! the node. Its VMs are mock `vmm` processes.

use anyhow::Result;
use serde::Deserialize;

use super::native;

/// Most memory of the daemon, in MiB.
const MEMORY: f64 = 50.0;
/// Longest answer to a call other than the work that it starts, in milliseconds.
const CALL: f64 = 5.0;

/// Until a daemon that was killed has its VMs under control again, in milliseconds.
const CONTROL: f64 = 2000.0;

#[derive(Deserialize)]
struct Report {
    vms: u32,
    calls: Vec<Call>,
    empty_pss_kib: f64,
    rss_kib: f64,
    pss_kib: f64,
    idle_seconds: u32,
    idle_cpu_ms: f64,
    idle_wakeups: u64,
}

/// How long calls of one kind took.
#[derive(Deserialize)]
pub struct Call {
    /// Which.
    pub call: String,
    /// How many.
    pub count: u32,
    /// The median, in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile, in milliseconds.
    pub p99_ms: f64,
}

/// Runs it, building it first, and renders.
pub fn run() -> Result<String> {
    let report = native("vmmd", "fleet", &[])?;
    Ok(render(&report))
}

fn render(report: &Report) -> String {
    let Report {
        vms,
        idle_seconds,
        idle_wakeups,
        ..
    } = report;
    let memory =
        |name: &str, kib: f64, budget: &str| format!("| {name} | {:.1} | {budget} |\n", kib / 1024.0);
    let mut text = format!(
        "### The daemon with {vms} VMs\n\nvmmd as it is packaged, on the machine that runs the node; the VMs are mock `vmm` \
         processes that run and do nothing. The budgets are what the project has set itself.\n\n\
         | | | budget |\n|---|---:|---:|\n"
    );
    text += &memory("memory (RSS), MiB", report.rss_kib, &format!("{MEMORY:.0}"));
    text += &memory("memory (PSS), MiB", report.pss_kib, "");
    text += &memory("memory before the first VM (PSS), MiB", report.empty_pss_kib, "");
    text += &format!(
        "| CPU time in {idle_seconds} s without a call, ms | {:.1} | idle |\n\
         | times that a thread went to sleep in them | {idle_wakeups} | idle |\n\n\
         | call | calls | p50, ms | p99, ms | budget, ms |\n|---|---:|---:|---:|---:|\n",
        report.idle_cpu_ms
    );
    for call in &report.calls {
        let (name, budget) = match call.call.as_str() {
            "ListVms" => (format!("ListVms, {vms} VMs"), format!("{CALL:.0}")),
            // The work that it starts is a process with a machine.
            "StartVm" => ("StartVm, until the mock runs".to_owned(), String::new()),
            "Restart" => (
                format!("start after a kill, until all {vms} VMs are under control"),
                format!("{CONTROL:.0}"),
            ),
            name => (name.to_owned(), format!("{CALL:.0}")),
        };
        text += &format!(
            "| {name} | {} | {:.2} | {:.2} | {budget} |\n",
            call.count, call.p50_ms, call.p99_ms
        );
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stand_beside_their_budgets() {
        let line = r#"{"benchmark":"fleet","vms":200,"calls":[
            {"call":"GetVm","count":10,"p50_ms":0.25,"p99_ms":1.5},
            {"call":"ListVms","count":10,"p50_ms":2,"p99_ms":3},
            {"call":"StartVm","count":200,"p50_ms":7,"p99_ms":9},
            {"call":"Restart","count":20,"p50_ms":70,"p99_ms":90}],
            "empty_pss_kib":10240,"rss_kib":30720,"pss_kib":25600,"idle_seconds":60,"idle_cpu_ms":1.25,"idle_wakeups":3}"#;
        let text = render(&serde_json::from_str(line).expect("figures"));
        for row in [
            "| memory (RSS), MiB | 30.0 | 50 |",
            "| memory before the first VM (PSS), MiB | 10.0 |  |",
            "| CPU time in 60 s without a call, ms | 1.2 | idle |",
            "| times that a thread went to sleep in them | 3 | idle |",
            "| GetVm | 10 | 0.25 | 1.50 | 5 |",
            "| ListVms, 200 VMs | 10 | 2.00 | 3.00 | 5 |",
            "| StartVm, until the mock runs | 200 | 7.00 | 9.00 |  |",
            "| start after a kill, until all 200 VMs are under control | 20 | 70.00 | 90.00 | 2000 |",
        ] {
            assert!(text.contains(row), "no {row:?} in {text}");
        }
    }
}

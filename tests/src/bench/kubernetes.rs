//! The Kubernetes agent and controller with many VMs on many nodes: the benchmark of the crate `vmmd-kubernetes-tests`, which runs on this
//! machine with a real control plane. Nodes are mocks of vmmd.

use std::{collections::BTreeMap, fmt::Write as _};

use anyhow::Result;
use serde::Deserialize;

use super::{native, program};

#[derive(Deserialize)]
struct Report {
    vms: u32,
    nodes: u32,
    idle_seconds: u32,
    created_seconds: f64,
    running_seconds: f64,
    deleted_seconds: f64,
    together: Times,
    alone: Times,
    control_plane_bytes: f64,
    controller: Part,
    agents: Part,
}

/// From a VM's creation to Running.
#[derive(Deserialize)]
struct Times {
    count: u32,
    p50_seconds: f64,
    p99_seconds: f64,
}

/// The controller, or all agents.
#[derive(Deserialize)]
struct Part {
    processes: u32,
    empty_rss_bytes: f64,
    rss_bytes: f64,
    pss_bytes: f64,
    start_cpu_seconds: f64,
    start_requests_per_vm: f64,
    idle_cpu_seconds: f64,
    idle_requests_per_vm_and_minute: f64,
    start_requests: BTreeMap<String, f64>,
    idle_requests: BTreeMap<String, f64>,
}

/// Runs it, building it first, and renders.
pub fn run() -> Result<String> {
    program("vmmd-kube", "vmmd-kube")?;
    let report = native("vmmd-kubernetes-tests", "vms", &[])?;
    Ok(render(&report))
}

fn render(report: &Report) -> String {
    let Report {
        vms,
        nodes,
        idle_seconds,
        controller,
        agents,
        ..
    } = report;
    let mut text = format!(
        "### The Kubernetes agent and controller with {vms} VMs on {nodes} nodes\n\nThe control plane is Kubernetes 1.20.2 with etcd, on \
         the same machine as everything else; agents and controller are as they are packaged, one process for each node. Their vmmds are mocks, \
         whose guests run at once and do nothing. Requests are those to the API server, with watches and the nodes' leases and heartbeats; the controller \
         works without leader election, which would add one in a second.\n\n\
         | | controller | all agents | one agent |\n|---|---:|---:|---:|\n"
    );
    let mut row = |name: &str, digits: usize, value: &dyn Fn(&Part) -> f64| {
        let (one, all) = (value(controller), value(agents));
        let each = all / f64::from(agents.processes.max(1));
        let _ = writeln!(
            text,
            "| {name} | {one:.digits$} | {all:.digits$} | {each:.digits$} |"
        );
    };
    let mebibytes = |bytes: f64| bytes / f64::from(1 << 20);
    row("memory (RSS), MiB", 1, &|part| mebibytes(part.rss_bytes));
    row("memory (PSS), MiB", 1, &|part| mebibytes(part.pss_bytes));
    row("memory before the first VM (RSS), MiB", 1, &|part| {
        mebibytes(part.empty_rss_bytes)
    });
    row("CPU time until all run, s", 2, &|part| part.start_cpu_seconds);
    row(
        &format!("CPU time in {idle_seconds} s without a change, s"),
        2,
        &|part| part.idle_cpu_seconds,
    );
    row(
        &format!("requests in a minute without a change, for each of {vms} VMs"),
        3,
        &|part| part.idle_requests_per_vm_and_minute,
    );
    let _ = writeln!(
        text,
        "\nUntil it runs, a VM takes {:.1} requests of the controller and {:.1} of its agent. The control plane has {:.0} MiB (RSS).\n\n\
         | | VMs | p50, s | p99, s |\n|---|---:|---:|---:|",
        controller.start_requests_per_vm,
        agents.start_requests_per_vm,
        mebibytes(report.control_plane_bytes),
    );
    for (name, times) in [
        ("from creation to Running, all created at once", &report.together),
        (
            &*format!("the same, one after another, with {vms} others"),
            &report.alone,
        ),
    ] {
        let Times {
            count,
            p50_seconds,
            p99_seconds,
        } = times;
        let _ = writeln!(text, "| {name} | {count} | {p50_seconds:.2} | {p99_seconds:.2} |");
    }
    let _ = writeln!(
        text,
        "\nAll were created within {:.0} s, ran after {:.0} s, and were gone {:.0} s after the first one was deleted. Requests by their kind:\n\n\
         | | controller, until all run | agents, until all run | controller, {idle_seconds} s | agents, {idle_seconds} s |\n\
         |---|---:|---:|---:|---:|",
        report.created_seconds, report.running_seconds, report.deleted_seconds,
    );
    let columns = [
        &controller.start_requests,
        &agents.start_requests,
        &controller.idle_requests,
        &agents.idle_requests,
    ];
    let mut kinds: Vec<_> = columns.iter().flat_map(|column| column.keys()).collect();
    kinds.sort();
    kinds.dedup();
    for kind in kinds {
        let counts = columns.map(|column| column.get(kind).copied().unwrap_or_default());
        let [a, b, c, d] = counts;
        let _ = writeln!(text, "| {kind} | {a:.0} | {b:.0} | {c:.0} | {d:.0} |");
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_controller_and_of_all_agents() {
        let part = |processes: u32| {
            format!(
                r#"{{"processes":{processes},"empty_rss_bytes":1048576,"rss_bytes":10485760,"empty_pss_bytes":1,"pss_bytes":5242880,
                "start_cpu_seconds":3,"start_requests_per_vm":12.5,"idle_cpu_seconds":0.5,
                "idle_requests_per_vm_and_minute":0.25,"start_requests":{{"get pods":5}},"idle_requests":{{"patch leases":{processes}}}}}"#
            )
        };
        let line = format!(
            r#"{{"benchmark":"vms","vms":1000,"nodes":50,"idle_seconds":60,"created_seconds":20,"running_seconds":100,"deleted_seconds":80,
            "together":{{"count":1000,"p50_seconds":40,"p99_seconds":90}},"alone":{{"count":20,"p50_seconds":0.5,"p99_seconds":0.75}},
            "control_plane_bytes":524288000,"controller":{},"agents":{}}}"#,
            part(1),
            part(50)
        );
        let text = render(&serde_json::from_str(&line).expect("figures"));
        for row in [
            "| memory (RSS), MiB | 10.0 | 10.0 | 0.2 |",
            "| CPU time in 60 s without a change, s | 0.50 | 0.50 | 0.01 |",
            "| requests in a minute without a change, for each of 1000 VMs | 0.250 | 0.250 | 0.005 |",
            "| from creation to Running, all created at once | 1000 | 40.00 | 90.00 |",
            "| the same, one after another, with 1000 others | 20 | 0.50 | 0.75 |",
            "| get pods | 5 | 5 | 0 | 0 |",
            "| patch leases | 0 | 0 | 1 | 50 |",
            "The control plane has 500 MiB",
        ] {
            assert!(text.contains(row), "no {row:?} in {text}");
        }
    }
}

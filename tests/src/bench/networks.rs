//! The daemon with many networks and many addresses: a benchmark of the crate `vmmd`, which runs on this machine, in a network
//! namespace of its own. Its VMs are mock `vmm` processes.

use anyhow::Result;
use serde::Deserialize;

use super::{fleet::Call, native, program};

#[derive(Deserialize)]
struct Report {
    networks: u32,
    leases: u32,
    calls: Vec<Call>,
    empty_pss_kib: f64,
    networks_pss_kib: f64,
    rss_kib: f64,
    pss_kib: f64,
    helpers: u32,
    helpers_pss_kib: f64,
    rules: u32,
    ruleset_bytes: f64,
    idle_seconds: u32,
    idle_cpu_ms: f64,
    idle_nft_cpu_ms: f64,
}

/// Runs it, building it first, and renders.
pub fn run() -> Result<String> {
    // The daemon finds it beside itself.
    program("vmmd-network", "vmmd-netd")?;
    let report = native("vmmd", "networks", &[])?;
    Ok(render(&report))
}

fn render(report: &Report) -> String {
    let Report {
        networks,
        leases,
        helpers,
        rules,
        idle_seconds,
        ..
    } = report;
    let mut text = format!(
        "### The daemon with {networks} networks and {leases} leases\n\nvmmd as it is packaged, in a network namespace of the machine \
         that runs the node. Each network has IPv4, IPv6 and NAT, and 1,000 leases at most; the VMs that have them are mock \
         `vmm` processes. A lease is a part of StartVm: what it costs is the difference to a VM without NICs. Each minute the \
         daemon compares the node with its records once.\n\n| | |\n|---|---:|\n"
    );
    let mut row = |name: &str, value: f64| text += &format!("| {name} | {value:.1} |\n");
    row("memory (RSS), MiB", report.rss_kib / 1024.0);
    row("memory (PSS), MiB", report.pss_kib / 1024.0);
    row(
        "memory with the networks and no VM (PSS), MiB",
        report.networks_pss_kib / 1024.0,
    );
    row(
        "memory before the first network (PSS), MiB",
        report.empty_pss_kib / 1024.0,
    );
    row(
        &format!("memory of {helpers} helper processes (PSS), MiB"),
        report.helpers_pss_kib / 1024.0,
    );
    row(
        "memory of a helper process (PSS), MiB",
        report.helpers_pss_kib / 1024.0 / f64::from((*helpers).max(1)),
    );
    row(
        &format!("CPU time in {idle_seconds} s without a call, daemon, ms"),
        report.idle_cpu_ms,
    );
    row("the same, nft, ms", report.idle_nft_cpu_ms);
    row("ruleset, MiB of text", report.ruleset_bytes / 1024.0 / 1024.0);
    text += &format!("| rules | {rules} |\n");
    text += "\n| call | calls | p50, ms | p99, ms |\n|---|---:|---:|---:|\n";
    for call in &report.calls {
        let name = match call.call.as_str() {
            "StartVm, no NIC" => "StartVm, a VM without NICs".to_owned(),
            "StartVm, few leases" => "StartVm, a NIC beside few leases".to_owned(),
            "StartVm, many leases" => format!("StartVm, a NIC beside {leases} leases"),
            "GetNetwork" => "GetNetwork, a network with leases".to_owned(),
            "ListNetworks" => format!("ListNetworks, {networks} networks, {leases} leases"),
            "CreateNetwork" => format!("CreateNetwork, up to {networks} networks, no lease"),
            "CreateNetwork, many leases" => format!("CreateNetwork, {networks} networks, {leases} leases"),
            "DeleteNetwork, many leases" => format!("DeleteNetwork, {networks} networks, {leases} leases"),
            "nft alone" => "nft that replaces the whole ruleset, alone".to_owned(),
            name => name.to_owned(),
        };
        text += &format!(
            "| {name} | {} | {:.2} | {:.2} |\n",
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
    fn figures_are_told_with_what_they_are_of() {
        let line = r#"{"benchmark":"networks","networks":200,"leases":1000,"calls":[
            {"call":"StartVm, no NIC","count":20,"p50_ms":5,"p99_ms":6},
            {"call":"StartVm, many leases","count":20,"p50_ms":100,"p99_ms":200},
            {"call":"nft alone","count":5,"p50_ms":300,"p99_ms":301}],
            "empty_pss_kib":10240,"networks_pss_kib":15360,"rss_kib":30720,"pss_kib":25600,"helpers":200,"helpers_pss_kib":204800,
            "rules":20000,"ruleset_bytes":5242880,"idle_seconds":60,"idle_cpu_ms":12.25,"idle_nft_cpu_ms":340,"idle_wakeups":3}"#;
        let text = render(&serde_json::from_str(line).expect("figures"));
        for row in [
            "### The daemon with 200 networks and 1000 leases",
            "| memory (RSS), MiB | 30.0 |",
            "| memory with the networks and no VM (PSS), MiB | 15.0 |",
            "| memory of 200 helper processes (PSS), MiB | 200.0 |",
            "| memory of a helper process (PSS), MiB | 1.0 |",
            "| CPU time in 60 s without a call, daemon, ms | 12.2 |",
            "| the same, nft, ms | 340.0 |",
            "| ruleset, MiB of text | 5.0 |",
            "| rules | 20000 |",
            "| StartVm, a VM without NICs | 20 | 5.00 | 6.00 |",
            "| StartVm, a NIC beside 1000 leases | 20 | 100.00 | 200.00 |",
            "| nft that replaces the whole ruleset, alone | 5 | 300.00 | 301.00 |",
        ] {
            assert!(text.contains(row), "no {row:?} in {text}");
        }
    }
}

//! What many VMs cost the daemon: its memory, what it does while nobody asks for anything, how long its answers take, and
//! how soon after a kill it has them under control again.
//! The VMs are mock `vmm` processes, the daemon is the one that is packaged.
//!
//! `RUST_LOG=info cargo bench -p vmmd --bench fleet -- [--vms N] [--idle SECONDS]` prints one JSON object on stdout. Needs
//! root, as the daemon does.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a benchmark may fail loudly, and its counts are far below 2^52"
)]

#[allow(dead_code, reason = "the other benchmarks use more of it")]
mod measure;

use std::time::Duration;

use clap::Parser;
use measure::{Calls, memory, since, threads};
use serde_json::json;
use vmmd_api::v1::{self, ConditionStatus};
use vmmd_testing::harness::{Daemon, status};

/// More than the machine has: mock guests need none of it.
const CONFIG: &str = "[overcommit]\ncpu = 1000\nvcpu = 1000\nmemory = 1000\n";
/// Calls that are measured of each kind that changes nothing.
const CALLS: usize = 2000;

/// How often the daemon is killed.
const KILLS: usize = 20;

#[derive(Parser)]
struct Arguments {
    /// How many VMs.
    #[arg(long, default_value_t = 200)]
    vms: usize,
    /// For how many seconds nobody asks for anything.
    #[arg(long, default_value_t = 60)]
    idle: u64,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let Arguments { vms, idle, .. } = Arguments::parse();
    let mut daemon = Daemon::configured(CONFIG).await;
    let empty = memory(daemon.pid().as_raw_nonzero().get());

    let (mut create, mut start) = (Calls::new("CreateVm"), Calls::new("StartVm"));
    for number in 0..vms {
        let name = format!("vm{number:03}");
        create
            .time(daemon.create(daemon.manifest(&name, "")))
            .await
            .unwrap();
        start.time(daemon.start_vm(&name)).await.unwrap();
    }
    let (mut get, mut list) = (Calls::new("GetVm"), Calls::new("ListVms"));
    for number in 0..CALLS {
        let name = format!("vm{:03}", number % vms);
        get.time(daemon.get(&name)).await.unwrap();
        assert_eq!(list.time(daemon.list()).await.len(), vms);
    }
    let pid = daemon.pid().as_raw_nonzero().get();
    let full = memory(pid);

    let before = threads(pid);
    tokio::time::sleep(Duration::from_secs(idle)).await;
    let (cpu_ns, wakeups) = since(pid, &before);
    let mut restart = Calls::new("Restart");
    for _ in 0..KILLS {
        daemon.kill();
        restart.time(back(&mut daemon, vms)).await;
    }
    let calls = [get, list, create, start, restart].map(Calls::figures);
    let report = json!({
        "benchmark": "fleet",
        "vms": vms,
        "calls": calls,
        "empty_pss_kib": empty.1,
        "rss_kib": full.0,
        "pss_kib": full.1,
        "idle_seconds": idle,
        "idle_cpu_ms": cpu_ns as f64 / 1e6,
        "idle_wakeups": wakeups,
    });
    println!("{report}");
}

/// Starts a daemon that was killed; it is back when all VMs are under its control.
async fn back(daemon: &mut Daemon, vms: usize) {
    daemon.relaunch().await;
    let ready = |vm: &v1::Vm| status(vm).conditions[0].status() == ConditionStatus::True;
    while daemon.list().await.iter().filter(|vm| ready(vm)).count() < vms {
        tokio::task::yield_now().await;
    }
}

//! What many networks and many addresses in one cost: the daemon's memory and that of the helper processes, the round in which the
//! daemon compares the node with its records, and how long it takes to make and delete a network, to give a VM an address, and to put the
//! ruleset into the kernel.
//!
//! The VMs are mock `vmm` processes, the daemon is the one that is packaged, and all is in a network namespace of the benchmark's own.
//! `RUST_LOG=info cargo bench -p vmmd --bench networks -- [--networks N] [--leases N] [--idle SECONDS]` prints one JSON object on
//! stdout. Needs root, as the daemon does, and nft.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a benchmark may fail loudly, and its counts are far below 2^52"
)]

#[allow(dead_code, reason = "the other benchmarks use more of it")]
mod measure;

use std::{fs, time::Duration};

use clap::Parser;
use measure::{Calls, children, memory, since, threads};
use serde_json::{Value, json};
use tonic::transport::Channel;
use vmmd_api::v1::{self, NicSpec, network_service_client::NetworkServiceClient, nic_spec::Attachment};
use vmmd_testing::harness::{Daemon, connect};
use vmmd_testing::namespace::Namespace;

/// More than the machine has: mock guests need none of it.
const CONFIG: &str = "[overcommit]\ncpu = 1000\nvcpu = 1000\nmemory = 1000\n";
/// NICs of each VM that fills the large network: a daemon of the tests has users for 250 VMs, and a bridge has 1,024 ports.
const NICS: usize = 8;
/// Calls that are measured of each kind that changes nothing.
const CALLS: usize = 200;
/// VMs that are started, and networks that are made and deleted, where each takes long.
const FEW: usize = 20;
/// VMs that run at once, of those.
const RUNNING: usize = 200;
/// Leases of a network: its bridge has 1,024 ports.
const LEASES: usize = 1000;

#[derive(Parser)]
struct Arguments {
    /// How many networks.
    #[arg(long, default_value_t = 200)]
    networks: usize,
    /// How many NICs have an address.
    #[arg(long, default_value_t = 1000)]
    leases: usize,
    /// For how many seconds nobody asks for anything: a round for each minute.
    #[arg(long, default_value_t = 60)]
    idle: u64,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let Arguments {
        networks,
        leases,
        idle,
        ..
    } = Arguments::parse();
    // The daemon goes before the namespace.
    let namespace = Namespace::new();
    let folder = tempfile::Builder::new()
        .prefix("vmmd")
        .tempdir_in("/tmp")
        .unwrap();
    let daemon = Daemon::with(folder, CONFIG, Some(namespace.0.clone())).await;
    let pid = daemon.pid().as_raw_nonzero().get();
    let mut client = NetworkServiceClient::new(connect(daemon.folder.path()).await);
    let empty = memory(pid).1;

    let mut create = Calls::new("CreateNetwork");
    for number in 0..networks {
        create
            .time(create_network(&mut client, &format!("net{number}"), number))
            .await;
    }
    let with_networks = memory(pid).1;
    let helpers = helpers(&daemon);
    let helpers_pss: u64 = helpers.iter().map(|pid| memory(*pid).1).sum();

    // Each start beside one of a VM without NICs, which is what the address is not.
    let mut none = Calls::new("StartVm, no NIC");
    let mut first = Calls::new("StartVm, few leases");
    for number in 0..FEW {
        start(&daemon, &format!("none{number}"), (0, 0), &mut none).await;
        start(&daemon, &format!("few{number}"), (1, 0), &mut first).await;
    }
    let mut fill = Calls::new("fill");
    for number in 0..leases.saturating_sub(2 * FEW).div_ceil(NICS) {
        let (name, network) = (format!("vm{number}"), number * NICS / LEASES + 1);
        assert!(network < networks, "{leases} leases need more networks");
        start(&daemon, &name, (NICS, network), &mut fill).await;
        if number >= RUNNING {
            daemon.kill_vm(&name).await.unwrap();
        }
    }
    let mut last = Calls::new("StartVm, many leases");
    for number in 0..FEW {
        start(&daemon, &format!("many{number}"), (1, 1), &mut last).await;
    }
    let (mut get, mut list) = (Calls::new("GetNetwork"), Calls::new("ListNetworks"));
    for _ in 0..CALLS {
        let request = v1::GetNetworkRequest { name: "net1".into() };
        let answer = get.time(client.get_network(request)).await.unwrap();
        let status = answer.into_inner().network.unwrap().status.unwrap();
        let least = leases.min(LEASES) - 2 * FEW;
        assert!(status.ready && status.leases.len() >= least, "{}", status.message);
        let answer = list
            .time(client.list_networks(v1::ListNetworksRequest::default()))
            .await;
        assert_eq!(answer.unwrap().into_inner().networks.len(), networks);
    }
    let full = memory(pid);

    let (before, ticks) = (threads(pid), children(pid));
    tokio::time::sleep(Duration::from_secs(idle)).await;
    let (cpu_ns, wakeups) = since(pid, &before);
    let nft_ms = (children(pid) - ticks) * 10;

    let mut apply = Calls::new("nft alone");
    let (rules, bytes) = reapply(&namespace, &daemon, &mut apply).await;

    let mut create_more = Calls::new("CreateNetwork, many leases");
    let mut delete = Calls::new("DeleteNetwork, many leases");
    for number in networks..networks + FEW {
        let name = format!("net{number}");
        create_more.time(create_network(&mut client, &name, number)).await;
        let request = v1::DeleteNetworkRequest {
            name,
            ..Default::default()
        };
        delete.time(client.delete_network(request)).await.unwrap();
    }
    let calls = [none, first, last, get, list, create, create_more, delete, apply].map(Calls::figures);
    let report = json!({
        "benchmark": "networks",
        "networks": networks,
        "leases": leases,
        "calls": calls,
        "empty_pss_kib": empty,
        "networks_pss_kib": with_networks,
        "rss_kib": full.0,
        "pss_kib": full.1,
        "helpers": helpers.len(),
        "helpers_pss_kib": helpers_pss,
        "rules": rules,
        "ruleset_bytes": bytes,
        "idle_seconds": idle,
        "idle_cpu_ms": cpu_ns as f64 / 1e6,
        "idle_nft_cpu_ms": nft_ms,
        "idle_wakeups": wakeups,
    });
    println!("{report}");
}

/// Makes a network with addresses of IPv4, 4,094 of them, and of IPv6.
async fn create_network(client: &mut NetworkServiceClient<Channel>, name: &str, number: usize) {
    let spec = v1::NetworkSpec {
        ipv4_cidr: format!("10.{}.{}.0/20", number / 16, number % 16 * 16),
        ipv6_cidr: format!("fd00:0:0:{number:x}::/64"),
        ..v1::NetworkSpec::default()
    };
    let network = v1::Network {
        metadata: Some(v1::ObjectMetadata {
            name: name.into(),
            ..v1::ObjectMetadata::default()
        }),
        spec: Some(spec),
        status: None,
    };
    let request = v1::CreateNetworkRequest {
        network: Some(network),
        request_id: String::new(),
    };
    client.create_network(request).await.unwrap();
}

/// Starts a VM with that many NICs in the network with a number.
async fn start(daemon: &Daemon, name: &str, (nics, network): (usize, usize), calls: &mut Calls) {
    let mut vm = daemon.manifest(name, "");
    let nics = (0..nics).map(|number| NicSpec {
        name: format!("eth{number}"),
        attachment: Some(Attachment::Network(format!("net{network}"))),
        ..NicSpec::default()
    });
    vm.spec.as_mut().unwrap().nics = nics.collect();
    daemon.create(vm).await.unwrap();
    calls.time(daemon.start_vm(name)).await.unwrap();
}

/// The helper processes of the networks.
fn helpers(daemon: &Daemon) -> Vec<i32> {
    let folders = fs::read_dir(daemon.path("run/networks")).unwrap();
    let pids = folders.map(|folder| {
        let known = fs::read(folder.unwrap().path().join("server.json")).unwrap();
        let known: Value = serde_json::from_slice(&known).unwrap();
        i32::try_from(known["pid"].as_i64().unwrap()).unwrap()
    });
    pids.collect()
}

/// Puts the ruleset of the daemon into the kernel of another namespace; how many rules it has, and how many bytes it is as text.
async fn reapply(namespace: &Namespace, daemon: &Daemon, calls: &mut Calls) -> (usize, usize) {
    let listed: Value = serde_json::from_str(&namespace.run("nft -j list ruleset")).unwrap();
    let objects = listed["nftables"].as_array().unwrap().iter();
    let rules = objects.filter(|object| object.get("rule").is_some()).count();
    let text = format!("flush ruleset\n{}", namespace.run("nft list ruleset"));
    let file = daemon.path("ruleset.nft");
    fs::write(&file, &text).unwrap();
    let other = Namespace::new();
    let command = format!("nft -f {}", file.display());
    for _ in 0..5 {
        calls.time(async { other.run(&command) }).await;
    }
    (rules, text.len())
}

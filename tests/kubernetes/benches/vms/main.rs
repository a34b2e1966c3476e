//! Costs of many VMs on many nodes for `vmmd-kube`: memory and processor time of the agents and of
//! the controller, requests to the API server, and the time from a VM's creation to Running.
//!
//! The control plane is the real one (`build.sh`). Agents and controller are the packaged programs,
//! one process for each node. Their vmmds are mocks in this process, whose guests run at once and
//! do nothing.
//!
//! `cargo build --release -p vmmd-kube && cargo bench -p vmmd-kubernetes-tests --bench vms -- [--vms N] [--nodes N] [--idle SECONDS]`
//! prints one JSON object on stdout.
#![allow(
    missing_docs,
    dead_code,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a benchmark may fail loudly, its counts are far below 2^52, and the tests use more of the mock"
)]

// The mock of vmmd is a part of the tests of vmmd-kube.
#[path = "../../../../vmmd/kube/tests/mock"]
mod mock {
    pub mod ledger;
    pub mod migration;
    mod node;
    pub mod pods;
    pub mod role;
    pub mod storage;
    pub mod streams;
    pub mod trap;
    pub mod vmmd;
}
mod scrape;

// Dependencies of the mock.
use tokio_stream as _;
use tonic as _;
use tonic_types as _;
use tower as _;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{task::JoinSet, time::sleep};
use vmmd_kubernetes_tests::{
    api::Api,
    cluster::{Cluster, NAMESPACE},
    eventually,
    program::Program,
    vms::VMS,
};

use mock::{ledger::Ledger, vmmd::Vmmd};
use scrape::{Figures, Scraper};

/// First metrics port of the agents, one port for each node; the controller's port is the one
/// before.
const METRICS: usize = 20_001;
/// Tasks that create VMs at the same time.
const CREATORS: usize = 4;
/// VMs that are created one after another when the others are there.
const ALONE: usize = 20;
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(1200);

struct Arguments {
    vms: usize,
    nodes: usize,
    idle: u64,
}

impl Arguments {
    fn parse() -> Self {
        let mut arguments = Self {
            vms: 1000,
            nodes: 50,
            idle: 60,
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().unwrap().parse::<usize>().unwrap();
            match word.as_str() {
                "--vms" => arguments.vms = value(),
                "--nodes" => arguments.nodes = value(),
                "--idle" => arguments.idle = value() as u64,
                // Cargo's.
                "--bench" => {}
                other => panic!("no such option: {other}"),
            }
        }
        arguments
    }
}

/// When each VM was seen to run first.
type Seen = Arc<Mutex<BTreeMap<String, Instant>>>;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let Arguments { vms, nodes, idle } = Arguments::parse();
    let mut cluster = Cluster::start().await;
    install(&cluster);
    let ledger = Ledger::default();
    let mut vmmds: Vec<_> = (0..nodes)
        .map(|number| Vmmd::start(&name(number), &ledger))
        .collect();
    let mut controller = controller(&cluster).await;
    let mut agents = agents(&cluster, &vmmds).await;
    nodes_ready(&cluster, nodes).await;
    let scraper = Scraper::new(METRICS - 1, nodes);
    let empty = scraper.scrape(&mut controller, &mut agents).await;

    let seen = watch(&cluster);
    let began = Instant::now();
    let asked = create_all(&cluster, vms).await;
    let created = began.elapsed();
    all_run(&mut controller, &seen, vms).await;
    let running = began.elapsed();
    let up = scraper.scrape(&mut controller, &mut agents).await;
    let together = times(&asked, &seen);
    eprintln!("{vms} VMs run after {:.0} s", running.as_secs_f64());

    // Lets the follow-up reconciliations of the last changes end.
    sleep(Duration::from_secs(10)).await;
    let before = scraper.scrape(&mut controller, &mut agents).await;
    sleep(Duration::from_secs(idle)).await;
    let after = scraper.scrape(&mut controller, &mut agents).await;

    let mut asked = BTreeMap::new();
    for number in vms..vms + ALONE {
        asked.insert(vm_name(number), Instant::now());
        create(&cluster.api, number).await;
        all_run(&mut controller, &seen, number + 1).await;
    }
    let alone = times(&asked, &seen);

    let memory = cluster.memory();
    let began = Instant::now();
    for number in 0..vms + ALONE {
        let path = format!("{VMS}/{}", vm_name(number));
        cluster.api.delete(&path).await.unwrap();
    }
    eventually("all VMs are gone", PATIENCE, async || {
        let left = vmmds.iter().map(|vmmd| vmmd.state.vms().len()).sum::<usize>();
        if left == 0 {
            Ok(())
        } else {
            Err(format!("{left} are left"))
        }
    })
    .await;
    let deleted = began.elapsed();
    assert_eq!(ledger.twice(), [""; 0]);

    let minutes = idle as f64 / 60.0;
    let report = json!({
        "benchmark": "vms",
        "vms": vms,
        "nodes": nodes,
        "idle_seconds": idle,
        "created_seconds": created.as_secs_f64(),
        "running_seconds": running.as_secs_f64(),
        "deleted_seconds": deleted.as_secs_f64(),
        "together": quantiles(&together),
        "alone": quantiles(&alone),
        "control_plane_bytes": memory,
        "controller": part(&empty.controller, &up.controller, &before.controller, &after.controller, vms, minutes),
        "agents": part(&empty.agents, &up.agents, &before.agents, &after.agents, vms, minutes),
    });
    println!("{report}");
    drop((controller, agents));
    // Their runtimes must not be dropped in this one.
    vmmds.iter_mut().for_each(Vmmd::stop);
}

/// Figures of the controller, or the sums of all agents.
fn part(empty: &Figures, up: &Figures, before: &Figures, after: &Figures, vms: usize, minutes: f64) -> Value {
    let started = up.requests_since(empty);
    let idle = after.requests_since(before);
    json!({
        "processes": after.processes,
        "empty_rss_bytes": empty.rss_bytes,
        "empty_pss_bytes": empty.pss_bytes,
        "rss_bytes": after.rss_bytes,
        "pss_bytes": after.pss_bytes,
        "start_cpu_seconds": up.cpu_seconds - empty.cpu_seconds,
        "start_requests_per_vm": started.values().sum::<f64>() / vms as f64,
        "idle_cpu_seconds": after.cpu_seconds - before.cpu_seconds,
        "idle_requests_per_vm_and_minute": idle.values().sum::<f64>() / vms as f64 / minutes,
        "start_requests": started,
        "idle_requests": idle,
    })
}

fn name(node: usize) -> String {
    format!("node-{node}")
}

fn vm_name(number: usize) -> String {
    format!("vm-{number:04}")
}

fn install(cluster: &Cluster) {
    let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../vmmd/kube/manifests");
    cluster.kubectl(&["apply", "-k", manifests.to_str().unwrap()]);
    cluster.kubectl(&[
        "wait",
        "--for=condition=Established",
        "crd",
        "--all",
        "--timeout=60s",
    ]);
}

fn program(cluster: &Cluster, name: &str, arguments: Vec<String>) -> Program {
    let executable = vmmd_testing::program("vmmd-kube");
    let mut program = Program::new(name, &executable, arguments, &cluster.path("logs"))
        // As packaged.
        .env("VMMD_KUBE_LOG", "info,kube=warn");
    program.launch();
    program
}

async fn controller(cluster: &Cluster) -> Program {
    let config = cluster
        .service_account("controller", NAMESPACE, "vmmd-kube-controller")
        .await;
    let arguments = vec![
        "controller".to_owned(),
        format!("--kubeconfig={}", config.display()),
        "--runtime-class=vmmd".to_owned(),
        // On a machine that does all of this at once, a lease may be lost, and the controller ends.
        "--no-leader-election".to_owned(),
        format!("--metrics=127.0.0.1:{}", METRICS - 1),
    ];
    program(cluster, "controller", arguments)
}

async fn agents(cluster: &Cluster, vmmds: &[Vmmd]) -> Vec<Program> {
    let mut agents = Vec::new();
    let config = cluster
        .service_account("agents", NAMESPACE, "vmmd-kube-agent")
        .await;
    for (number, vmmd) in vmmds.iter().enumerate() {
        let arguments = vec![
            "agent".to_owned(),
            format!("--kubeconfig={}", config.display()),
            format!("--node-name={}", name(number)),
            format!("--socket={}", vmmd.socket.display()),
            format!("--address={}", cluster.address(11)),
            format!("--lock-file={}", vmmd.lock_file().display()),
            format!("--metrics=127.0.0.1:{}", METRICS + number),
        ];
        agents.push(program(cluster, &format!("agent-{number}"), arguments));
    }
    agents
}

async fn nodes_ready(cluster: &Cluster, nodes: usize) {
    eventually("all nodes are ready", PATIENCE, async || {
        let all = cluster.api.list("/api/v1/nodes").await?;
        let ready = all.iter().filter(|node| {
            let taints = node["spec"]["taints"].as_array().map_or(0, Vec::len);
            let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
            // Its own taint is the only one.
            taints == 1
                && conditions
                    .clone()
                    .any(|one| one["type"] == "Ready" && one["status"] == "True")
        });
        match ready.count() {
            ready if ready == nodes => Ok(()),
            ready => Err(format!("{ready} of {nodes}")),
        }
    })
    .await;
}

async fn create(api: &Api, number: usize) {
    let vm = json!({
        "apiVersion": "vmmd.dev/v1alpha1",
        "kind": "VirtualMachine",
        "metadata": {"name": vm_name(number), "namespace": "default"},
        "spec": {
            "vm": {
                // The mock's nodes have eight processors.
                "cpu": {"cores": 1, "coreFractionPercent": 20},
                "memory": {"sizeBytes": "128Mi"},
                "boot": {"linux": {"kernel": "/srv/vmlinuz"}},
                "runPolicy": "always_on",
            },
        },
    });
    api.post(VMS, &vm).await.unwrap();
}

/// Creates them, a few at a time; when each was asked for.
async fn create_all(cluster: &Cluster, vms: usize) -> BTreeMap<String, Instant> {
    let mut asked = BTreeMap::new();
    let mut tasks = JoinSet::new();
    for number in 0..vms {
        if tasks.len() >= CREATORS {
            tasks.join_next().await.unwrap().unwrap();
        }
        asked.insert(vm_name(number), Instant::now());
        let api = cluster.api.clone();
        tasks.spawn(async move { create(&api, number).await });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    asked
}

/// Follows all VMs.
fn watch(cluster: &Cluster) -> Seen {
    let seen = Seen::default();
    let (api, noted) = (cluster.api.clone(), Arc::clone(&seen));
    tokio::spawn(async move {
        loop {
            // It ends after some minutes, and begins with all that are there.
            let _ = api
                .watch(VMS, |vm| {
                    if vm["status"]["phase"] == "Running" {
                        let name = vm["metadata"]["name"].as_str().unwrap().to_owned();
                        noted.lock().unwrap().entry(name).or_insert_with(Instant::now);
                    }
                })
                .await;
            sleep(Duration::from_millis(100)).await;
        }
    });
    seen
}

async fn all_run(controller: &mut Program, seen: &Seen, vms: usize) {
    let end = Instant::now() + PATIENCE;
    let mut told = Instant::now();
    loop {
        let count = seen.lock().unwrap().len();
        if count >= vms {
            return;
        }
        assert!(Instant::now() < end, "{count} of {vms} run");
        if told.elapsed() > Duration::from_secs(30) {
            controller.check().unwrap();
            eprintln!("{count} of {vms} VMs run");
            told = Instant::now();
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// From the request to Running.
fn times(asked: &BTreeMap<String, Instant>, seen: &Seen) -> Vec<Duration> {
    let seen = seen.lock().unwrap();
    let times = asked
        .iter()
        .map(|(name, asked)| seen[name].saturating_duration_since(*asked));
    times.collect()
}

fn quantiles(times: &[Duration]) -> Value {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let at = |percent: usize| {
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted[rank - 1].as_secs_f64()
    };
    json!({"count": sorted.len(), "p50_seconds": at(50), "p99_seconds": at(99)})
}

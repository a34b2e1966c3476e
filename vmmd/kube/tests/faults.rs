//! Everything is killed at random, and pods, machines and guests come and go meanwhile: no VM ever runs on two nodes, and all is as it should
//! be when that ends.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use serde_json::json;
use vmmd_api::v1::ExitReason;

use crate::mock::{Cluster, Program, api, vmmd, wait};

const NODES: usize = 2;
const MACHINES: usize = 4;
/// `VMMD_KUBE_ROUNDS` for more.
const ROUNDS: u64 = 25;

/// Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(end).unwrap()).unwrap()
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn no_vm_runs_twice_and_all_converges_whatever_is_killed() {
    let seed = number("VMMD_KUBE_SEED").unwrap_or_else(|| (1 << 40) | u64::from(std::process::id()));
    println!("VMMD_KUBE_SEED={seed}");
    let rounds = number("VMMD_KUBE_ROUNDS").unwrap_or(ROUNDS);
    let mut random = Random(seed);
    let mut cluster = Cluster::start(NODES);
    let mut agents: BTreeMap<usize, Program> = (0..NODES).map(|node| (node, cluster.agent(node))).collect();
    wait("the nodes", || {
        let there = |node: usize| {
            cluster
                .api
                .store(|store| store.get(&api::node(&format!("n{node}"))))
        };
        (0..NODES).all(|node| there(node).is_ok())
    });
    let mut controllers = [cluster.controller(), cluster.controller()];
    for index in 0..MACHINES {
        create(&cluster, &format!("m{index}"));
    }
    for round in 0..rounds {
        if round % 5 == 4 {
            // Otherwise a run seldom lives as long as a migration takes.
            std::thread::sleep(Duration::from_millis(1500));
        }
        schedule(&cluster, &mut random);
        let name = format!("m{}", random.below(MACHINES));
        match random.below(12) {
            0 => {
                let node = random.below(NODES);
                agents.remove(&node);
                agents.insert(node, cluster.agent(node));
            }
            1 => {
                let index = random.below(2);
                controllers[index] = cluster.controller();
            }
            2 => {
                cluster.api.stop();
                pause(&mut random);
                cluster.api.resume();
            }
            3 => {
                let node = random.below(NODES);
                cluster.vmmds[node].stop();
                pause(&mut random);
                cluster.vmmds[node].resume();
            }
            4 => {
                let pod = cluster.machine(&name)["status"]["run"]["pod"]
                    .as_str()
                    .map(str::to_owned);
                let grace = [None, Some(0)][random.below(2)];
                if let Some(pod) = pod {
                    cluster.delete_pod(&pod, grace);
                }
            }
            5 => {
                cluster.delete_machine(&name);
            }
            6 => {
                let state = &cluster.vmmds[random.below(NODES)].state;
                let names = running(state);
                if !names.is_empty() {
                    let reason = [ExitReason::Stopped, ExitReason::Killed][random.below(2)];
                    state.end(&names[random.below(names.len())], reason);
                }
            }
            // A node is drained of one VM, or one is moved by request.
            7 => {
                let run = cluster.machine(&name)["status"].clone();
                if let (Some(pod), Some(node)) = (run["run"]["pod"].as_str(), run["node"].as_str()) {
                    cluster.cordon(node, true);
                    cluster.delete_pod(pod, None);
                }
            }
            8 => {
                // One that was deleted some rounds ago may be gone by now.
                cluster.annotate_if_there(&name, "vmmd.dev/migrate", &round.to_string());
            }
            9 => uncordon(&cluster),
            _ => pause(&mut random),
        }
        if cluster.machine(&name).is_null() {
            create(&cluster, &name);
        }
        assert_eq!(
            cluster.ledger.twice(),
            Vec::<String>::new(),
            "round {round} of seed {seed}"
        );
    }
    uncordon(&cluster);
    println!("{} moves in {rounds} rounds", cluster.ledger.moves().len());
    let scheduling = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(seed);
            while scheduling.load(Ordering::Relaxed) {
                schedule(&cluster, &mut random);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| converge(&cluster)));
        scheduling.store(false, Ordering::Relaxed);
        if let Err(panic) = result {
            println!("{:#?}", cluster.pods());
            std::panic::resume_unwind(panic);
        }
    });
    assert_eq!(cluster.ledger.twice(), Vec::<String>::new(), "seed {seed}");
}

fn uncordon(cluster: &Cluster) {
    for node in 0..NODES {
        cluster.cordon(&format!("n{node}"), false);
    }
}

/// A machine; the first one has a disk that is made for each run, and is not moved.
fn create(cluster: &Cluster, name: &str) {
    cluster.create_with(name, "always_on", |spec| {
        if name != "m0" {
            return;
        }
        spec["vm"]["disks"] = json!([{"name": "scratch"}]);
        spec["volumes"] = json!([{"name": "scratch", "emptyDisk": {"size": "1Mi"}}]);
    });
}

/// Every machine runs, each with the one VM and the one pod of its last run; then all are deleted, and nothing is left.
fn converge(cluster: &Cluster) {
    let names: Vec<_> = (0..MACHINES).map(|index| format!("m{index}")).collect();
    wait("every machine runs", || {
        names.iter().all(|name| {
            let machine = cluster.machine(name);
            if machine.is_null() {
                // It was still being deleted.
                create(cluster, name);
            }
            machine["status"]["phase"] == "Running" && machine["metadata"]["deletionTimestamp"].is_null()
        }) && count(cluster) == MACHINES
    });
    wait("one pod for each", || cluster.pods().len() == MACHINES);
    for name in &names {
        cluster.delete_machine(name);
    }
    let disks = || -> usize {
        let vmmds = cluster.vmmds.iter();
        vmmds.map(|vmmd| vmmd.state.storage.disks().len()).sum()
    };
    wait("nothing is left", || {
        names.iter().all(|name| cluster.machine(name).is_null())
            && cluster.pods().is_empty()
            && count(cluster) == 0
            && disks() == 0
    });
}

fn count(cluster: &Cluster) -> usize {
    cluster.vmmds.iter().map(|vmmd| vmmd.state.vms().len()).sum()
}

fn running(state: &vmmd::State) -> Vec<String> {
    let vms = state.vms().into_iter();
    let running = vms.filter(|vm| vm.status.as_ref().is_some_and(|status| status.instance.is_some()));
    running.map(|vm| vm.metadata.unwrap().name).collect()
}

/// As the scheduler does, without other reasons than that a VM is not moved to where it is.
fn schedule(cluster: &Cluster, random: &mut Random) {
    for pod in cluster.pods() {
        if pod["spec"]["nodeName"].is_null() {
            let node = format!("n{}", random.below(NODES));
            let terms = "requiredDuringSchedulingIgnoredDuringExecution";
            let terms = &pod["spec"]["affinity"]["nodeAffinity"][terms]["nodeSelectorTerms"];
            if terms[0]["matchFields"][0]["values"][0] == node {
                continue;
            }
            cluster.bind(pod["metadata"]["name"].as_str().unwrap(), &node);
        }
    }
}

fn pause(random: &mut Random) {
    std::thread::sleep(Duration::from_millis(u64::try_from(random.below(500)).unwrap()));
}

/// Launcher pods: agents, controllers, the API server, vmmds and kubelets fail, and pods are deleted, also by force.
#[test]
fn no_launched_vm_runs_twice_whatever_is_killed() {
    let seed = number("VMMD_KUBE_SEED").unwrap_or_else(|| (1 << 40) | u64::from(std::process::id()));
    println!("VMMD_KUBE_SEED={seed}");
    let rounds = number("VMMD_KUBE_ROUNDS").unwrap_or(ROUNDS);
    let mut random = Random(seed);
    let mut cluster = Cluster::start(NODES);
    let kubelets: Vec<_> = (0..NODES).map(|node| cluster.kubelet(node)).collect();
    let mut agents: BTreeMap<usize, Program> =
        (0..NODES).map(|node| (node, cluster.pod_agent(node))).collect();
    let mut controllers = [cluster.launcher_controller(), cluster.launcher_controller()];
    let names: Vec<_> = (0..MACHINES).map(|index| format!("m{index}")).collect();
    for name in &names {
        cluster.create_launched(name, "always_on", |_| {});
    }
    for round in 0..rounds {
        schedule(&cluster, &mut random);
        let name = &names[random.below(MACHINES)];
        let node = random.below(NODES);
        match random.below(10) {
            0 => {
                agents.remove(&node);
                agents.insert(node, cluster.pod_agent(node));
            }
            1 => {
                let index = random.below(2);
                controllers[index] = cluster.launcher_controller();
            }
            2 => {
                cluster.api.stop();
                pause(&mut random);
                cluster.api.resume();
            }
            3 => {
                cluster.vmmds[node].stop();
                pause(&mut random);
                cluster.vmmds[node].resume();
            }
            4 | 5 => {
                let pod = cluster.machine(name)["status"]["run"]["pod"].clone();
                let grace = [None, Some(0)][random.below(2)];
                if let Some(pod) = pod.as_str() {
                    cluster.delete_pod(pod, grace);
                }
            }
            6 => {
                let state = &cluster.vmmds[node].state;
                let running = running(state);
                if !running.is_empty() {
                    let reason = [ExitReason::Stopped, ExitReason::GuestShutdown][random.below(2)];
                    state.end(&running[random.below(running.len())], reason);
                }
            }
            7 => kubelets[node].away.store(true, Ordering::SeqCst),
            8 => kubelets
                .iter()
                .for_each(|kubelet| kubelet.away.store(false, Ordering::SeqCst)),
            _ => pause(&mut random),
        }
        assert_eq!(
            cluster.ledger.twice(),
            Vec::<String>::new(),
            "round {round} of seed {seed}"
        );
    }
    for kubelet in &kubelets {
        kubelet.away.store(false, Ordering::SeqCst);
    }
    let mut scheduled = || schedule(&cluster, &mut random);
    wait("every machine runs", || {
        scheduled();
        names
            .iter()
            .all(|name| cluster.machine(name)["status"]["phase"] == "Running")
            && count(&cluster) == MACHINES
            && cluster.pods().len() == MACHINES
    });
    for name in &names {
        cluster.delete_machine(name);
    }
    let left = || -> usize {
        let vmmds = cluster.vmmds.iter();
        vmmds
            .map(|vmmd| vmmd.state.vms().len() + vmmd.state.storage.disks().len())
            .sum()
    };
    wait("nothing is left", || {
        names.iter().all(|name| cluster.machine(name).is_null()) && cluster.pods().is_empty() && left() == 0
    });
    assert_eq!(cluster.ledger.twice(), Vec::<String>::new(), "seed {seed}");
}

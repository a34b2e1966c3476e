//! Everything is killed at random, and pods, machines and guests come and go meanwhile: no VM ever runs on two nodes, and all is as it should
//! be when that ends.

use std::{collections::BTreeMap, sync::atomic::Ordering, time::Duration};

use serde_json::json;
use vmmd_api::v1::ExitReason;

use crate::mock::{Cluster, Program, vmmd, wait, wait_until};

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

fn uncordon(cluster: &Cluster) {
    for node in 0..NODES {
        cluster.cordon(&format!("n{node}"), false);
    }
}

fn pause(random: &mut Random) {
    std::thread::sleep(Duration::from_millis(u64::try_from(random.below(500)).unwrap()));
}

/// Agents, controllers, the API server, vmmds and kubelets fail, VMs are moved, and pods are deleted, also by force.
#[test]
fn no_vm_runs_twice_whatever_is_killed() {
    let seed = number("VMMD_KUBE_SEED").unwrap_or_else(|| (1 << 40) | u64::from(std::process::id()));
    println!("VMMD_KUBE_SEED={seed}");
    let rounds = number("VMMD_KUBE_ROUNDS").unwrap_or(ROUNDS);
    let mut random = Random(seed);
    let mut cluster = Cluster::start(NODES);
    let kubelets: Vec<_> = (0..NODES).map(|node| cluster.kubelet(node)).collect();
    let mut agents: BTreeMap<usize, Program> = (0..NODES).map(|node| (node, cluster.agent(node))).collect();
    let mut controllers = [cluster.controller(), cluster.controller()];
    let names: Vec<_> = (0..MACHINES).map(|index| format!("m{index}")).collect();
    cluster.create_claim("root", "ReadWriteMany");
    for name in &names {
        // The first one has a disk that is made for each run, and is not moved.
        cluster.create_with(name, "always_on", |spec| {
            if *name != "m0" {
                spec["volumes"] = json!([{"name": "root", "persistentVolumeClaim": {"claimName": "root"}}]);
            }
        });
    }
    for round in 0..rounds {
        if round % 5 == 4 {
            // Otherwise a run seldom lives as long as a migration takes.
            std::thread::sleep(Duration::from_millis(1500));
        }
        schedule(&cluster, &mut random);
        let name = &names[random.below(MACHINES)];
        let node = random.below(NODES);
        match random.below(14) {
            0 => {
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
            9 | 10 => cluster.annotate(name, "vmmd.dev/migrate", &round.to_string()),
            11 => cluster.cordon(&format!("n{node}"), true),
            12 => uncordon(&cluster),
            _ => pause(&mut random),
        }
        assert_eq!(
            cluster.ledger.twice(),
            Vec::<String>::new(),
            "round {round} of seed {seed}"
        );
    }
    uncordon(&cluster);
    println!("{} moves in {rounds} rounds", cluster.ledger.moves().len());
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
    let mut left = String::new();
    let gone = wait_until(|| {
        let machines = names.iter().filter(|name| !cluster.machine(name).is_null());
        let machines: Vec<_> = machines.collect();
        let vmmds = cluster.vmmds.iter();
        let nodes = vmmds.map(|vmmd| (vmmd.state.vms(), vmmd.state.storage.disks()));
        let nodes: Vec<_> = nodes.collect();
        let pods = cluster.pods();
        left = format!("machines {machines:?}, pods {pods:?}, VMs and disks of the nodes {nodes:?}");
        machines.is_empty()
            && pods.is_empty()
            && nodes
                .iter()
                .all(|(vms, disks)| vms.is_empty() && disks.is_empty())
    });
    assert!(gone, "seed {seed}: left are {left}");
    assert_eq!(cluster.ledger.twice(), Vec::<String>::new(), "seed {seed}");
}

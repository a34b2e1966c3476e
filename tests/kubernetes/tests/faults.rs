//! Programs are killed without a word, at random moments: no VM runs twice, none is lost, all converges, nothing is left.
//!
//! There are 40 rounds, and 200 with `VMMD_LONG`.

use std::{
    env,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::time::sleep;
use vmmd_kubernetes_tests::{
    eventually,
    faults::{self, Fault, Random},
    fleet::Fleet,
    vms::Vm,
};

/// After a fault a lease has to run out, and programs that ask again wait ever longer in between.
const PATIENCE: Duration = Duration::from_secs(150);

fn kill(fault: Fault, fleet: &mut Fleet, random: &mut Random) {
    match fault {
        Fault::Agent(node) => fleet.nodes[node].agent.kill(),
        Fault::Controller(number) => fleet.controllers[number].kill(),
        Fault::Daemon(node) => fleet.nodes[node].daemon.kill(),
        Fault::Vmm(node) => {
            let processes = fleet.nodes[node].daemon.vmm_processes();
            if !processes.is_empty() {
                // It may have ended meanwhile.
                let _ = kill_process(processes[random.below(processes.len())], Signal::KILL);
            }
        }
        Fault::ApiServer => fleet.cluster.api_server.kill(),
        Fault::Etcd => fleet.cluster.etcd.kill(),
    }
}

async fn mend(fault: Fault, fleet: &mut Fleet) {
    match fault {
        Fault::Agent(node) => fleet.nodes[node].agent.launch(),
        Fault::Controller(number) => fleet.controllers[number].launch(),
        Fault::Daemon(node) => fleet.nodes[node].daemon.relaunch().await,
        Fault::Vmm(_) => {}
        Fault::ApiServer => fleet.cluster.api_server.launch(),
        Fault::Etcd => fleet.cluster.etcd.launch(),
    }
}

#[tokio::test]
async fn no_vm_runs_twice_or_is_lost_whatever_is_killed() {
    let long = env::var_os("VMMD_LONG").is_some();
    let rounds = faults::rounds(if long { 200 } else { 40 });
    let seed = faults::seed();
    let mut random = Random::new(seed);
    let mut fleet = Fleet::start(2, 2).await;
    let mut names: Vec<String> = Vec::new();
    let mut made = 0;
    for _ in 0..6 {
        create(&mut fleet, &mut names, &mut made);
    }
    fleet.all_run(&names, PATIENCE).await;
    let mut longest = Duration::ZERO;
    let began = Instant::now();
    for round in 0..rounds {
        // A request just before the fault.
        let mut drained = None;
        match random.below(5) {
            0 if names.len() < 10 => create(&mut fleet, &mut names, &mut made),
            1 if names.len() > 3 => {
                let name = names.swap_remove(random.below(names.len()));
                fleet.cluster.kubectl(&["delete", "vmmvm", &name, "--wait=false"]);
            }
            2 => {
                let name = &names[random.below(names.len())];
                let wish = format!("vmmd.dev/migrate={round}");
                fleet
                    .cluster
                    .kubectl(&["annotate", "--overwrite", "vmmvm", name, &wish]);
            }
            3 => drained = Some(drain(&fleet, random.below(2)).await),
            _ => {}
        }
        sleep(Duration::from_millis(random.below(800) as u64)).await;
        let faults = Fault::any(&mut random).and_another(&mut random);
        println!("round {round}: {faults:?}, VMs {names:?}");
        for fault in &faults {
            kill(*fault, &mut fleet, &mut random);
        }
        sleep(Duration::from_millis(random.below(3000) as u64)).await;
        for fault in &faults {
            mend(*fault, &mut fleet).await;
        }
        let mended = Instant::now();
        if let Some(node) = drained {
            fleet.cluster.ready().await;
            uncordon(&fleet, &node).await;
        }
        fleet.recovered(&names, PATIENCE).await;
        longest = longest.max(mended.elapsed());
        println!(
            "round {round}: converged {:.1} s later",
            mended.elapsed().as_secs_f32()
        );
        assert_eq!(fleet.ran_twice(), [""; 0], "round {round}");
    }
    println!("{} moves that the daemons told of", fleet.moves().await);
    println!(
        "{rounds} rounds of seed {seed} in {:.0} s, the longest way back took {:.1} s",
        began.elapsed().as_secs_f32(),
        longest.as_secs_f32()
    );
    for (program, times) in fleet.ended_by_themselves() {
        println!("{program} ended by itself and was started again {times} times");
    }
    fleet
        .cluster
        .kubectl(&["delete", "vmmvm", "--all", "--wait=false"]);
    fleet.nothing_left(PATIENCE).await;
}

/// Every third one has a disk that is made for each run, and is not moved.
fn create(fleet: &mut Fleet, names: &mut Vec<String>, made: &mut usize) {
    let name = format!("vm-{made}");
    let mut vm = fleet.vm(&name);
    if made.is_multiple_of(3) {
        vm["spec"]["vm"]["disks"] = json!([{"name": "scratch"}]);
        vm["spec"]["volumes"] = json!([{"name": "scratch", "emptyDisk": {"size": "1Mi"}}]);
    }
    *made += 1;
    fleet.cluster.apply(&vm);
    names.push(name);
}

/// Does the same as `kubectl drain`, without a wait for its end.
async fn drain(fleet: &Fleet, number: usize) -> String {
    let node = fleet.nodes[number].name.clone();
    fleet.cluster.kubectl(&["cordon", &node]);
    let pods = format!("/api/v1/namespaces/default/pods?fieldSelector=spec.nodeName={node}");
    for pod in fleet.cluster.api.list(&pods).await.unwrap() {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let eviction = json!({
            "apiVersion": "policy/v1beta1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": "default"},
        });
        let path = format!("/api/v1/namespaces/default/pods/{name}/eviction");
        // It may have gone meanwhile.
        let _ = fleet.cluster.api.post(&path, &eviction).await;
    }
    node
}

async fn uncordon(fleet: &Fleet, node: &str) {
    let schedulable = json!({"spec": {"unschedulable": null}});
    let path = format!("/api/v1/nodes/{node}");
    eventually("the node is uncordoned", PATIENCE, async || {
        fleet.cluster.api.patch(&path, &schedulable).await
    })
    .await;
}

/// The processes of all VMs.
fn processes(fleet: &Fleet) -> Vec<Vec<Pid>> {
    let nodes = fleet.nodes.iter();
    nodes
        .map(|node| {
            let mut pids = node.daemon.vmm_processes();
            pids.sort_unstable_by_key(|pid| pid.as_raw_nonzero());
            pids
        })
        .collect()
}

#[tokio::test]
async fn vms_run_on_while_the_api_server_is_away() {
    let away = Duration::from_secs(if env::var_os("VMMD_LONG").is_some() {
        300
    } else {
        60
    });
    let mut fleet = Fleet::start(2, 2).await;
    let names: Vec<String> = (0..6).map(|number| format!("vm-{number}")).collect();
    for name in &names {
        fleet.cluster.apply(&fleet.vm(name));
    }
    fleet.all_run(&names, PATIENCE).await;
    let (before, vms) = (processes(&fleet), fleet.vms().await.unwrap());
    fleet.cluster.api_server.kill();
    sleep(away).await;
    assert_eq!(processes(&fleet), before);
    // vmmd restarts a VM that ends meanwhile.
    let killed = before.iter().flatten().next().copied().unwrap();
    kill_process(killed, Signal::KILL).unwrap();
    let running = Duration::from_secs(20);
    eventually("it runs again", running, async || {
        let running = processes(&fleet).concat();
        // It may be there for a moment yet.
        match running.contains(&killed) {
            false if running.len() == names.len() => Ok(()),
            _ => Err(format!("{running:?} run, and {killed:?} was killed")),
        }
    })
    .await;
    let before = processes(&fleet);
    fleet.cluster.api_server.launch();
    fleet.cluster.ready().await;
    fleet.recovered(&names, PATIENCE).await;
    fleet.nodes_ready(PATIENCE).await;
    assert_eq!(processes(&fleet), before);
    let after = fleet.vms().await.unwrap();
    let runs = |vms: &[Vm]| -> Vec<(String, i64, String)> {
        vms.iter()
            .map(|vm| (vm.name.clone(), vm.epoch, vm.node.clone()))
            .collect()
    };
    assert_eq!(runs(&after), runs(&vms), "the same runs as before");
    assert_eq!(fleet.ran_twice(), [""; 0]);
    fleet
        .cluster
        .kubectl(&["delete", "vmmvm", "--all", "--wait=false"]);
    fleet.nothing_left(PATIENCE).await;
}

#[tokio::test]
async fn a_vm_of_a_node_that_is_cut_off_runs_nowhere_else() {
    let mut fleet = Fleet::start(2, 2).await;
    let names = ["one".to_owned(), "two".to_owned(), "three".to_owned()];
    for name in &names {
        fleet.cluster.apply(&fleet.vm(name));
    }
    fleet.all_run(&names, PATIENCE).await;
    let vms = fleet.vms().await.unwrap();
    let node = vms[0].node.clone();
    let number = fleet.nodes.iter().position(|found| found.name == node).unwrap();
    fleet.nodes[number].agent.kill();
    let cluster = &fleet.cluster;
    cluster.kubectl(&[
        "wait",
        "node",
        &node,
        "--for=condition=Ready=unknown",
        "--timeout=120s",
    ]);
    let pod = cluster.kubectl(&["get", "vmmvm", &vms[0].name, "-o=jsonpath={.status.run.pod}"]);
    // An operator does this after the loss of a node.
    cluster.kubectl(&[
        "delete",
        "pod",
        &pod,
        "--force",
        "--grace-period=0",
        "--wait=false",
    ]);
    eventually("it is said that nobody knows", PATIENCE, async || {
        let now = fleet.vms().await?;
        let vm = now.iter().find(|vm| vm.name == vms[0].name).unwrap();
        if vm.phase == "Unknown" {
            Ok(())
        } else {
            Err(format!("{vm:?}"))
        }
    })
    .await;
    // Longer than anything that could start it elsewhere takes.
    let end = Instant::now() + Duration::from_secs(30);
    while Instant::now() < end {
        let running = fleet.running().await;
        let of_it = running
            .iter()
            .flatten()
            .filter(|run| run.uid == vms[0].uid)
            .count();
        assert_eq!(of_it, 1, "{running:?}");
        sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(fleet.ran_twice(), [""; 0]);
    fleet.nodes[number].agent.launch();
    // Its pod was deleted, so that run ends, and another one follows by the run policy.
    fleet.recovered(&names, PATIENCE).await;
    fleet.nodes_ready(PATIENCE).await;
    let after = fleet.vms().await.unwrap();
    let epoch = |of: &[Vm]| of.iter().find(|vm| vm.uid == vms[0].uid).unwrap().epoch;
    assert_eq!(epoch(&after), epoch(&vms) + 1);
    assert_eq!(fleet.ran_twice(), [""; 0]);
    fleet
        .cluster
        .kubectl(&["delete", "vmmvm", "--all", "--wait=false"]);
    fleet.nothing_left(PATIENCE).await;
}

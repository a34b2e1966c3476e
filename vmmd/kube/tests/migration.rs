//! VMs are moved to other nodes: when their node is drained, and by request.

use std::{
    sync::{Mutex, mpsc},
    time::Duration,
};

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use vmmd_api::v1::{ExitReason, VmPhase};

use crate::mock::{
    Cluster, Program, api,
    migration::{Hold, refused},
    trap::Verdict,
    vmmd::lock,
    wait,
};

/// Evicts a pod, as a drain of its node does.
fn evict(cluster: &Cluster, pod: &str, node: &str) {
    cluster.cordon(node, true);
    cluster.delete_pod(pod, None);
}

fn bind(cluster: &Cluster, pod: &str, node: &str) {
    wait(&format!("pod {pod}"), || cluster.pod(pod).is_object());
    assert!(cluster.bind(pod, node));
}

fn migration(cluster: &Cluster, machine: &str) -> Value {
    cluster.machine(machine)["status"]["migration"].clone()
}

/// Waits until the one VM runs there, and nothing else is left of its runs.
fn settled(cluster: &Cluster, machine: &str, pod: &str, node: usize) {
    wait(&format!("{machine} runs as {pod}"), || {
        let status = cluster.machine(machine)["status"].clone();
        status["phase"] == "Running"
            && status["run"]["pod"] == pod
            && status["node"] == format!("n{node}")
            && cluster.pods().len() == 1
            && cluster.pod(pod)["status"]["phase"] == "Running"
    });
    wait("one VM is left", || {
        let vms = cluster.vmmds.iter().map(|vmmd| vmmd.state.vms().len());
        vms.enumerate()
            .all(|(index, count)| count == usize::from(index == node))
    });
    let vm = &cluster.vmmds[node].state.vms()[0];
    assert_eq!(vm.status.as_ref().unwrap().phase(), VmPhase::Running);
    let metadata = vm.metadata.as_ref().unwrap();
    let uid = cluster.pod(pod)["metadata"]["uid"].as_str().unwrap().to_owned();
    assert_eq!(metadata.labels["vmmd.dev/pod-uid"], uid);
    assert_eq!(metadata.labels["vmmd.dev/node"], format!("n{node}"));
    assert_eq!(metadata.annotations["vmmd.dev/pod"], format!("shop/{pod}"));
    assert!(cluster.ledger.twice().is_empty());
}

fn moves(cluster: &Cluster) -> Vec<(String, String)> {
    cluster.ledger.moves()
}

fn moved(from: &str, to: &str) -> (String, String) {
    (from.to_owned(), to.to_owned())
}

/// A cluster of two nodes with one VM on the first one, and its programs.
struct Scene {
    cluster: Cluster,
    agents: [Option<Program>; 2],
    controller: Option<Program>,
}

impl Scene {
    fn new(policy: &str, change: impl FnOnce(&mut Value)) -> Self {
        let cluster = Cluster::start(2);
        let controller = Some(cluster.controller());
        let agents = [0, 1].map(|node| Some(cluster.agent(node)));
        for node in ["n0", "n1"] {
            wait("the nodes", || {
                cluster.api.store(|store| store.get(&api::node(node))).is_ok()
            });
        }
        cluster.create_with("web", policy, change);
        cluster.annotate("web", "vmmd.dev/start", "1");
        cluster.run("web", 1, "n0");
        Self {
            cluster,
            agents,
            controller,
        }
    }
}

#[test]
fn a_vm_of_a_drained_node_is_moved_and_runs_on() {
    let scene = Scene::new("always_on", |_| {});
    let cluster = &scene.cluster;
    let before = cluster.vmmds[0].state.vms()[0].metadata.clone().unwrap();
    let node = cluster.api.store(|store| store.get(&api::node("n1"))).unwrap();
    assert_eq!(node["metadata"]["labels"]["vmmd.dev/migration"], "");
    evict(cluster, "web-1", "n0");
    wait("the second pod", || cluster.pod("web-2").is_object());
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    assert_eq!(
        cluster.pod("web-2")["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"],
        json!([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n0"]}]}])
    );
    wait("the phase", || {
        cluster.machine("web")["status"]["phase"] == "Migrating"
    });
    bind(cluster, "web-2", "n1");
    settled(cluster, "web", "web-2", 1);
    assert_eq!(moves(cluster), [moved("n0", "n1")]);
    assert_eq!(cluster.ledger.epochs(), [1], "it was started once");
    let after = cluster.vmmds[1].state.vms()[0].metadata.clone().unwrap();
    assert_eq!((after.name, after.uid), (before.name, before.uid));
    assert!(!after.annotations.contains_key("vmmd.dev/moving-to"));
    assert_eq!(migration(cluster, "web")["phase"], "Succeeded");
    let events = cluster.api.store(|store| store.list(&api::events("shop")));
    for reason in ["MigrationPlanned", "Migrating", "Migrated"] {
        assert!(events.iter().any(|event| event["reason"] == reason), "{reason}");
    }
    // Its next end is that of any run.
    let name = cluster.vmmds[1].state.vms()[0].metadata.clone().unwrap().name;
    cluster.vmmds[1].state.end(&name, ExitReason::Stopped);
    cluster.run("web", 3, "n1");
    cluster.delete_machine("web");
    wait("nothing is left", || {
        cluster.machine("web").is_null() && cluster.pods().is_empty()
    });
    assert!(cluster.vmmds.iter().all(|vmmd| vmmd.state.vms().is_empty()));
}

#[test]
fn a_pod_that_is_deleted_is_no_eviction() {
    let scene = Scene::new("always_on", |_| {});
    let cluster = &scene.cluster;
    cluster.delete_pod("web-1", None);
    cluster.run("web", 2, "n1");
    assert!(moves(cluster).is_empty());
    // The Eviction API of Kubernetes 1.26 says that it is one.
    let condition = json!({"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"});
    let patch = json!({"status": {"conditions": [condition]}});
    let key = api::pod("shop", "web-2");
    cluster
        .api
        .store(|store| {
            store.patch(&key, "status", &patch)?;
            store.delete(&key, &crate::mock::store::Deletion::default())
        })
        .unwrap();
    bind(cluster, "web-3", "n0");
    settled(cluster, "web", "web-3", 0);
    assert_eq!(moves(cluster), [moved("n1", "n0")]);
}

#[test]
fn a_vm_is_moved_by_annotation_to_and_fro() {
    let scene = Scene::new("manual", |_| {});
    let cluster = &scene.cluster;
    for (turn, (pod, node)) in [("web-2", 1), ("web-3", 0), ("web-4", 1)].into_iter().enumerate() {
        cluster.annotate("web", "vmmd.dev/migrate", &turn.to_string());
        bind(cluster, pod, &format!("n{node}"));
        settled(cluster, "web", pod, node);
    }
    assert_eq!(cluster.ledger.epochs(), [1]);
    assert_eq!(moves(cluster).len(), 3);
}

#[test]
fn a_vm_that_vmmd_does_not_move_stays_when_it_was_asked_for() {
    let scene = Scene::new("always_on", |_| {});
    let cluster = &scene.cluster;
    let moves_of_source = &cluster.vmmds[0].state.moves;
    *lock(&moves_of_source.refusal) = Some(refused("MIGRATION_DISKS", "disk root is a qcow2 image"));
    cluster.annotate("web", "vmmd.dev/migrate", "1");
    bind(cluster, "web-2", "n1");
    wait("it is said", || {
        migration(cluster, "web")["reason"] == "MigrationDisks"
    });
    settled(cluster, "web", "web-1", 0);
    *lock(&moves_of_source.refusal) = None;
    *lock(&moves_of_source.failure) = Some("its memory changes too fast".to_owned());
    cluster.annotate("web", "vmmd.dev/migrate", "2");
    bind(cluster, "web-3", "n1");
    wait("it is said", || {
        migration(cluster, "web")["message"] == "its memory changes too fast"
    });
    settled(cluster, "web", "web-1", 0);
    *lock(&moves_of_source.failure) = None;
    cluster.annotate("web", "vmmd.dev/migrate", "3");
    bind(cluster, "web-4", "n1");
    settled(cluster, "web", "web-4", 1);
    assert_eq!(cluster.ledger.epochs(), [1]);
}

#[test]
fn vm_that_cannot_migrate_is_stopped_with_grace_and_restarted() {
    let scene = Scene::new("always_on", |spec| {
        spec["terminationGracePeriodSeconds"] = 20.into();
    });
    let cluster = &scene.cluster;
    let source = &cluster.vmmds[0].state;
    *lock(&source.moves.hold) = Hold::Offered;
    *lock(&source.stubborn) = true;
    evict(cluster, "web-1", "n0");
    bind(cluster, "web-2", "n1");
    wait("it is moved", || {
        source.calls().iter().any(|call| call.starts_with("migrate "))
    });
    // More than half of the guest's time.
    std::thread::sleep(Duration::from_secs(11));
    assert!(!source.calls().iter().any(|call| call.starts_with("stop ")));
    cluster.vmmds[1]
        .state
        .moves
        .lives
        .fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    cluster.run("web", 3, "n1");
    settled(cluster, "web", "web-3", 1);
    let calls = source.calls();
    let stop = calls.iter().find(|call| call.starts_with("stop ")).unwrap();
    let grace: i64 = stop.rsplit('=').next().unwrap().parse().unwrap();
    assert!((11..=20).contains(&grace), "{stop}");
    assert_eq!(cluster.ledger.epochs(), [1, 3]);
    let events = cluster.api.store(|store| store.list(&api::events("shop")));
    let said = events
        .iter()
        .find(|event| event["reason"] == "NotMigrated")
        .unwrap();
    assert!(
        said["note"].as_str().unwrap().contains("a daemon was restarted"),
        "{said}"
    );
}

#[test]
fn who_wants_no_migration_has_none() {
    let scene = Scene::new("always_on", |spec| {
        spec["migration"] = json!({"eviction": "Stop"});
    });
    let cluster = &scene.cluster;
    evict(cluster, "web-1", "n0");
    cluster.run("web", 2, "n1");
    assert!(moves(cluster).is_empty());
    assert_eq!(migration(cluster, "web")["reason"], "StoppedByPolicy");
    // Nor is a migration made when the guest has no time.
    let patch = json!({"spec": {"migration": null}});
    let key = api::machine("shop", "web");
    cluster.api.store(|store| store.patch(&key, "", &patch)).unwrap();
    cluster.cordon("n1", true);
    cluster.delete_pod("web-2", Some(0));
    cluster.run("web", 3, "n0");
    assert!(moves(cluster).is_empty());
}

#[test]
fn deletion_of_the_second_pod_ends_an_unfinished_migration() {
    let scene = Scene::new("always_on", |_| {});
    let cluster = &scene.cluster;
    cluster.annotate("web", "vmmd.dev/migrate", "1");
    wait("the second pod", || {
        migration(cluster, "web")["podUid"].is_string() && cluster.pod("web-2").is_object()
    });
    cluster.delete_pod("web-2", None);
    wait("it is said", || {
        migration(cluster, "web")["reason"] == "TargetGone"
    });
    settled(cluster, "web", "web-1", 0);
    *lock(&cluster.vmmds[0].state.moves.hold) = Hold::Given;
    cluster.annotate("web", "vmmd.dev/migrate", "2");
    bind(cluster, "web-3", "n1");
    let source = &cluster.vmmds[0].state;
    wait("it is handed over", || {
        source.vms()[0].status.as_ref().unwrap().reason == "HandedOver"
    });
    cluster.delete_pod("web-3", None);
    *lock(&source.moves.hold) = Hold::Nowhere;
    // The run is that of the deleted pod: the VM is stopped where it has come to, and there is another one.
    cluster.run("web", 4, "n0");
    settled(cluster, "web", "web-4", 0);
    assert_eq!(cluster.ledger.epochs(), [1, 4]);
}

#[test]
fn vm_of_a_node_lost_after_the_hand_over_is_of_the_target() {
    let mut scene = Scene::new("always_on", |_| {});
    let cluster = &scene.cluster;
    *lock(&cluster.vmmds[0].state.moves.hold) = Hold::Given;
    evict(cluster, "web-1", "n0");
    bind(cluster, "web-2", "n1");
    let source = &cluster.vmmds[0].state;
    wait("it is handed over", || {
        source.vms()[0].status.as_ref().unwrap().reason == "HandedOver"
    });
    scene.agents[0].take().unwrap().kill();
    *lock(&source.moves.hold) = Hold::Nowhere;
    wait("it is the other node's", || {
        let status = cluster.machine("web")["status"].clone();
        status["run"]["pod"] == "web-2" && status["phase"] == "Running"
    });
    // No run begins elsewhere until the first node has reported the end of its own.
    let name = cluster.vmmds[1].state.vms()[0].metadata.clone().unwrap().name;
    cluster.vmmds[1].state.end(&name, ExitReason::Stopped);
    wait("the run has ended", || {
        cluster.machine("web")["status"]["run"]["end"] == "StoppedByRequest"
    });
    wait("its pod is gone", || cluster.pod("web-2").is_null());
    assert!(cluster.pod("web-1").is_object());
    assert!(cluster.pod("web-3").is_null());
    let _back = cluster.agent(0);
    cluster.run("web", 3, "n1");
    settled(cluster, "web", "web-3", 1);
}

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Source,
    Target,
    Controller,
    ApiBefore,
    ApiAfter,
    Vmmd(usize),
}

const VICTIMS: [Victim; 7] = [
    Victim::Source,
    Victim::Target,
    Victim::Controller,
    Victim::ApiBefore,
    Victim::ApiAfter,
    Victim::Vmmd(0),
    Victim::Vmmd(1),
];

/// Drains a node, and kills somebody at that call which changes something. The number of calls.
fn drain_with_a_kill(at: usize, victim: Victim) -> usize {
    let mut scene = Scene::new("always_on", |_| {});
    let (send, killed) = mpsc::channel();
    let pid = match victim {
        Victim::Source => scene.agents[0].as_ref().map(Program::pid),
        Victim::Target => scene.agents[1].as_ref().map(Program::pid),
        Victim::Controller => scene.controller.as_ref().map(Program::pid),
        _ => None,
    };
    scene.cluster.ledger.trap.arm(at, move |call| {
        if let Some(pid) = pid {
            kill_process(pid, Signal::KILL).unwrap();
        }
        let _ = send.send(call.to_owned());
        match victim {
            Victim::ApiBefore => Verdict::Refuse,
            Victim::ApiAfter => Verdict::Lose,
            _ => Verdict::Pass,
        }
    });
    evict(&scene.cluster, "web-1", "n0");
    let mut at_call = String::new();
    let mut mended = |scene: &mut Scene| {
        let Ok(call) = killed.try_recv() else { return };
        at_call = call;
        match victim {
            Victim::Source => scene.agents[0] = Some(scene.cluster.agent(0)),
            Victim::Target => scene.agents[1] = Some(scene.cluster.agent(1)),
            Victim::Controller => scene.controller = Some(scene.cluster.controller()),
            Victim::ApiBefore | Victim::ApiAfter => {
                scene.cluster.api.stop();
                scene.cluster.api.resume();
            }
            Victim::Vmmd(node) => {
                scene.cluster.vmmds[node].stop();
                scene.cluster.vmmds[node].resume();
            }
        }
    };
    wait(
        &format!("the machine runs elsewhere, {victim:?} at call {at}"),
        || {
            mended(&mut scene);
            for pod in scene.cluster.pods() {
                if pod["spec"]["nodeName"].is_null() {
                    scene
                        .cluster
                        .bind(pod["metadata"]["name"].as_str().unwrap(), "n1");
                }
            }
            let status = scene.cluster.machine("web")["status"].clone();
            status["node"] == "n1" && status["phase"] == "Running" && scene.cluster.pods().len() == 1
        },
    );
    wait("one VM is left", || {
        mended(&mut scene);
        scene.cluster.vmmds[0].state.vms().is_empty()
    });
    let run = scene.cluster.machine("web")["status"]["run"].clone();
    settled(&scene.cluster, "web", run["pod"].as_str().unwrap(), 1);
    scene.cluster.delete_machine("web");
    wait(&format!("nothing is left, {victim:?} at call {at}"), || {
        mended(&mut scene);
        let vms = scene.cluster.vmmds.iter();
        scene.cluster.machine("web").is_null()
            && scene.cluster.pods().is_empty()
            && vms.map(|vmmd| vmmd.state.vms().len()).sum::<usize>() == 0
    });
    let context = format!("{victim:?} at call {at}, {at_call:?}");
    if !matches!(victim, Victim::Vmmd(_)) {
        // Only a vmmd that dies before the hand-over ends a migration.
        assert_eq!(moves(&scene.cluster), [moved("n0", "n1")], "{context}");
        assert_eq!(scene.cluster.ledger.epochs(), [1], "{context}");
    }
    assert!(scene.cluster.ledger.twice().is_empty(), "{context}");
    scene.cluster.ledger.trap.calls().len()
}

/// With `VMMD_LONG` each program at each call, else one of them.
#[test]
fn a_drain_moves_the_vm_whoever_is_killed_at_whichever_step() {
    // The calls up to the end of the deletion; a kill adds some.
    let calls = drain_with_a_kill(usize::MAX, Victim::Controller);
    println!("a migration and the deletion of the VM take {calls} calls");
    let long = std::env::var_os("VMMD_LONG").is_some();
    let mut cases = Vec::new();
    for at in 0..calls {
        for (index, victim) in VICTIMS.into_iter().enumerate() {
            if long || at % VICTIMS.len() == index {
                cases.push((at, victim));
            }
        }
    }
    let cases = Mutex::new(cases.into_iter());
    let work = || {
        loop {
            let next = lock(&cases).next();
            let Some((at, victim)) = next else { return };
            drain_with_a_kill(at, victim);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(work);
        }
    });
}

//! VMs are moved to other nodes: away from a cordoned node, and by request.

use std::sync::mpsc;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use vmmd_api::v1::{ExitReason, VmPhase};

use crate::mock::{
    Cluster, Program, api,
    kubelet::Kubelet,
    migration::{Hold, refused},
    pods::not_connected,
    trap::Verdict,
    vmmd::lock,
    wait,
};

/// A cluster of two nodes with one VM on the first one, and its programs.
struct Scene {
    cluster: Cluster,
    agents: [Option<Program>; 2],
    controller: Option<Program>,
    _kubelets: [Kubelet; 2],
}

/// With a disk that both nodes reach.
fn shared(spec: &mut Value) {
    spec["volumes"] = json!([{"name": "root", "persistentVolumeClaim": {"claimName": "root"}}]);
}

impl Scene {
    fn new(policy: &str, change: impl FnOnce(&mut Value)) -> Self {
        Self::with_claim("ReadWriteMany", "v1", policy, change)
    }

    fn with_claim(mode: &str, version: &'static str, policy: &str, change: impl FnOnce(&mut Value)) -> Self {
        let cluster = Cluster::start(2);
        *lock(&cluster.api.inner.policy) = version;
        cluster.create_claim("root", mode);
        cluster.create_with("web", policy, |spec| {
            shared(spec);
            change(spec);
        });
        cluster.annotate("web", "vmmd.dev/start", "1");
        let scene = Self {
            agents: [0, 1].map(|node| Some(cluster.agent(node))),
            controller: Some(cluster.controller()),
            _kubelets: [0, 1].map(|node| cluster.kubelet(node)),
            cluster,
        };
        scene.cluster.run("web", 1, "n0");
        scene
    }

    fn migration(&self) -> Value {
        self.cluster.machine("web")["status"]["migration"].clone()
    }

    fn bind(&self, pod: &str, node: &str) {
        wait(&format!("pod {pod}"), || self.cluster.pod(pod).is_object());
        assert!(self.cluster.bind(pod, node));
    }

    /// Waits until the last migration has failed for this reason.
    fn fails(&self, reason: &str) {
        wait(reason, || {
            let migration = self.migration();
            migration["phase"] == "Failed" && migration["reason"] == reason
        });
    }

    /// Waits until the one VM runs there, and nothing else is left of its runs.
    fn settled(&self, pod: &str, node: usize) {
        settled(&self.cluster, pod, node);
    }

    /// Whether there is the budget of the VM.
    fn budget(&self, version: &str) -> Value {
        let all = api::budget(version, "shop", "");
        let found = self.cluster.api.store(|store| store.list(&all));
        assert!(found.len() <= 1, "{found:?}");
        found.into_iter().next().unwrap_or_default()
    }

    /// Reasons of the events at the VirtualMachine.
    fn has_event(&self, reason: &str) -> bool {
        let events = self.cluster.api.store(|store| store.list(&api::events("shop")));
        let mut of_it = events
            .iter()
            .filter(|event| event["regarding"]["kind"] == "VirtualMachine");
        of_it.any(|event| event["reason"] == reason)
    }

    fn migrate_calls(&self) -> usize {
        let calls = self.cluster.vmmds[0].state.calls();
        calls.iter().filter(|call| call.starts_with("migrate ")).count()
    }
}

fn settled(cluster: &Cluster, pod: &str, node: usize) {
    wait(&format!("web runs as {pod}"), || {
        let machine = cluster.machine("web");
        let status = &machine["status"];
        status["phase"] == "Running"
            && status["run"]["pod"] == pod
            && status["node"] == format!("n{node}")
            && cluster.pods().len() == 1
            && machine["metadata"]["labels"]["vmmd.dev/migrating-from"].is_null()
    });
    let uid = cluster.pod(pod)["metadata"]["uid"].as_str().unwrap().to_owned();
    wait("one VM is left, which is that of its agent", || {
        let vms = cluster.vmmds.iter().map(|vmmd| vmmd.state.vms());
        vms.enumerate().all(|(index, vms)| {
            let marked = vms.iter().all(|vm| {
                let metadata = vm.metadata.as_ref().unwrap();
                metadata.labels["vmmd.dev/pod-uid"] == uid
                    && metadata.labels["vmmd.dev/node"] == format!("n{node}")
                    && metadata.annotations["vmmd.dev/pod"] == format!("shop/{pod}")
                    && vm.status.as_ref().unwrap().phase() == VmPhase::Running
            });
            vms.len() == usize::from(index == node) && marked
        })
    });
    assert_eq!(cluster.ledger.twice(), Vec::<String>::new());
}

fn moved(from: &str, to: &str) -> (String, String) {
    (from.to_owned(), to.to_owned())
}

#[test]
fn vm_leaves_a_cordoned_node_and_continues_to_run() {
    let scene = Scene::new("always_on", |_| {});
    let cluster = &scene.cluster;
    let before = cluster.vmmds[0].state.vms()[0].metadata.clone().unwrap();
    wait("a budget", || scene.budget("v1").is_object());
    let budget = scene.budget("v1");
    let machine = cluster.machine("web")["metadata"]["uid"].clone();
    let wanted = json!({"minAvailable": 1, "selector": {"matchLabels": {"vmmd.dev/machine-uid": machine}}});
    assert_eq!(budget["spec"], wanted);
    assert_eq!(budget["metadata"]["ownerReferences"][0]["uid"], machine);
    cluster.cordon("n0", true);
    wait("the phase", || {
        cluster.machine("web")["status"]["phase"] == "Migrating"
    });
    let from = cluster.machine("web")["metadata"]["labels"]["vmmd.dev/migrating-from"].clone();
    assert_eq!(from, "n0");
    scene.bind("web-2", "n1");
    scene.settled("web-2", 1);
    assert_eq!(cluster.ledger.moves(), [moved("n0", "n1")]);
    assert_eq!(cluster.ledger.epochs(), [1], "it was started once");
    let after = cluster.vmmds[1].state.vms()[0].metadata.clone().unwrap();
    assert_eq!((after.name, after.uid), (before.name.clone(), before.uid));
    assert_eq!(scene.migration()["phase"], "Succeeded");
    for reason in ["MigrationPlanned", "Migrating", "Migrated"] {
        assert!(scene.has_event(reason), "{reason}");
    }
    // Its next end is that of any run.
    cluster.vmmds[1].state.end(&before.name, ExitReason::Stopped);
    cluster.run("web", 3, "n1");
    cluster.delete_machine("web");
    wait("nothing is left", || {
        let vms = cluster.vmmds.iter().map(|vmmd| vmmd.state.vms().len());
        cluster.machine("web").is_null() && cluster.pods().is_empty() && vms.sum::<usize>() == 0
    });
}

#[test]
fn vm_is_moved_by_annotation_to_and_fro() {
    let scene = Scene::new("manual", |_| {});
    for (turn, (pod, node)) in [("web-2", 1), ("web-3", 0), ("web-4", 1)].into_iter().enumerate() {
        scene
            .cluster
            .annotate("web", "vmmd.dev/migrate", &turn.to_string());
        scene.bind(pod, &format!("n{node}"));
        scene.settled(pod, node);
    }
    assert_eq!(scene.cluster.ledger.epochs(), [1]);
    assert_eq!(scene.cluster.ledger.moves().len(), 3);
}

#[test]
fn vm_with_the_volume_of_one_node_may_be_evicted() {
    let scene = Scene::with_claim("ReadWriteOnce", "v1", "always_on", |_| {});
    scene.cluster.annotate("web", "vmmd.dev/migrate", "1");
    scene.fails("VolumeNotShared");
    scene.cluster.cordon("n0", true);
    scene.cluster.delete_pod("web-1", None);
    scene.cluster.run("web", 2, "n1");
    assert!(scene.budget("v1").is_null());
    assert!(scene.cluster.ledger.moves().is_empty());
}

#[test]
fn policy_to_stop_has_no_budget_and_ignores_a_cordon() {
    let scene = Scene::with_claim("ReadWriteMany", "v1beta1", "always_on", |_| {});
    wait("a budget of the old version", || {
        scene.budget("v1beta1").is_object()
    });
    let key = api::machine("shop", "web");
    let stop = json!({"spec": {"migration": {"eviction": "Stop"}}});
    let cluster = &scene.cluster;
    cluster.api.store(|store| store.patch(&key, "", &stop)).unwrap();
    wait("no budget", || scene.budget("v1beta1").is_null());
    cluster.cordon("n0", true);
    cluster.annotate("web", "note", "1");
    wait("the change is known", || {
        let machine = cluster.machine("web");
        machine["status"]["observedGeneration"] == machine["metadata"]["generation"]
    });
    assert!(scene.migration().is_null());
}

#[test]
fn second_pod_that_is_refused_leaves_the_vm_where_it_is() {
    let scene = Scene::new("always_on", |_| {});
    *lock(&scene.cluster.api.inner.quota) = Some("exceeded quota: vms".to_owned());
    scene.cluster.annotate("web", "vmmd.dev/migrate", "1");
    scene.fails("TargetRefused");
    assert_eq!(scene.migration()["message"], "exceeded quota: vms");
    scene.settled("web-1", 0);
    *lock(&scene.cluster.api.inner.quota) = None;
    scene.cluster.annotate("web", "vmmd.dev/migrate", "2");
    scene.bind("web-3", "n1");
    scene.settled("web-3", 1);
}

#[test]
fn refusal_of_vmmd_is_an_event_and_one_that_passes_is_repeated() {
    let scene = Scene::new("always_on", |_| {});
    let refusal = &scene.cluster.vmmds[0].state.moves.refusal;
    *lock(refusal) = Some(refused("MIGRATION_DISKS", "disk root is a qcow2 image"));
    scene.cluster.annotate("web", "vmmd.dev/migrate", "1");
    scene.bind("web-2", "n1");
    wait("an event", || scene.has_event("MigrationDisks"));
    let uid = scene.cluster.pod("web-2")["metadata"]["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    wait("the launcher waits", || {
        let reports = scene.cluster.vmmds[1].state.pods.reports(&uid);
        reports.iter().any(|report| report.1 == "AwaitsMigration")
    });
    scene.cluster.delete_pod("web-2", None);
    scene.fails("TargetGone");
    scene.settled("web-1", 0);
    *lock(refusal) = Some(not_connected());
    let before = scene.migrate_calls();
    scene.cluster.annotate("web", "vmmd.dev/migrate", "2");
    scene.bind("web-3", "n1");
    wait("it is repeated", || scene.migrate_calls() >= before + 2);
    *lock(refusal) = None;
    scene.settled("web-3", 1);
    assert_eq!(scene.cluster.ledger.epochs(), [1]);
}

#[test]
fn source_that_ends_meanwhile_ends_the_migration() {
    let scene = Scene::new("always_on", |_| {});
    let state = scene.cluster.vmmds[0].state.clone();
    *lock(&state.moves.hold) = Hold::Offered;
    scene.cluster.annotate("web", "vmmd.dev/migrate", "1");
    scene.bind("web-2", "n1");
    wait("it is offered", || !scene.cluster.vmmds[1].state.vms().is_empty());
    let name = state.vms()[0].metadata.clone().unwrap().name;
    state.end(&name, ExitReason::GuestShutdown);
    scene.fails("SourceGone");
    scene.cluster.run("web", 3, "n1");
    scene.settled("web-3", 1);
    assert_eq!(scene.cluster.ledger.epochs(), [1, 3]);
}

#[test]
fn evicted_pod_of_a_moved_vm_keeps_the_result() {
    let mut scene = Scene::new("always_on", |_| {});
    let hold = scene.cluster.vmmds[0].state.moves.hold.clone();
    *lock(&hold) = Hold::Offered;
    scene.cluster.cordon("n0", true);
    scene.bind("web-2", "n1");
    wait("it is offered", || !scene.cluster.vmmds[1].state.vms().is_empty());
    // The controller is away while the VM is handed over, and a drain evicts the pod.
    scene.controller = None;
    *lock(&hold) = Hold::Nowhere;
    wait("the first pod has ended", || {
        let pod = scene.cluster.pod("web-1");
        pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] == "Migrated"
    });
    scene.cluster.delete_pod("web-1", None);
    scene.controller = Some(scene.cluster.controller());
    scene.settled("web-2", 1);
    assert_eq!(scene.cluster.ledger.epochs(), [1]);
}

#[test]
fn deletion_of_the_machine_ends_a_migration_and_both_pods() {
    let scene = Scene::new("always_on", |_| {});
    *lock(&scene.cluster.vmmds[0].state.moves.hold) = Hold::Offered;
    scene.cluster.annotate("web", "vmmd.dev/migrate", "1");
    scene.bind("web-2", "n1");
    wait("it is offered", || !scene.cluster.vmmds[1].state.vms().is_empty());
    scene.cluster.delete_machine("web");
    wait("nothing is left", || {
        let vms = scene.cluster.vmmds.iter().map(|vmmd| vmmd.state.vms().len());
        scene.cluster.machine("web").is_null() && scene.cluster.pods().is_empty() && vms.sum::<usize>() == 0
    });
    assert!(scene.cluster.ledger.moves().is_empty());
}

/// Which fault happens at a call: the end of a program, or one of the API server.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Controller,
    Agent(usize),
    Api(Verdict),
}

#[test]
fn vm_is_moved_whatever_fails_at_each_step() {
    // Counts the calls of a whole migration first.
    let calls = move_with_a_fault(None).len();
    let faults = [
        Fault::Controller,
        Fault::Agent(0),
        Fault::Agent(1),
        Fault::Api(Verdict::Refuse),
        Fault::Api(Verdict::Lose),
    ];
    let long = std::env::var_os("VMMD_LONG").is_some();
    for at in 0..calls {
        for (index, fault) in faults.into_iter().enumerate() {
            // Otherwise one of them.
            if long || at % faults.len() == index {
                move_with_a_fault(Some((fault, at)));
            }
        }
    }
}

/// A migration with a fault at this call. Returns all calls.
fn move_with_a_fault(fault: Option<(Fault, usize)>) -> Vec<String> {
    let mut scene = Scene::new("manual", |_| {});
    wait("a budget", || scene.budget("v1").is_object());
    let (send, killed) = mpsc::channel();
    let (pid, verdict) = match fault {
        None => (None, Verdict::Pass),
        Some((Fault::Controller, _)) => (scene.controller.as_ref().map(Program::pid), Verdict::Pass),
        Some((Fault::Agent(node), _)) => (scene.agents[node].as_ref().map(Program::pid), Verdict::Pass),
        Some((Fault::Api(verdict), _)) => (None, verdict),
    };
    let at = fault.map_or(usize::MAX, |(_, at)| at);
    scene.cluster.ledger.trap.arm(at, move |_| {
        if let Some(pid) = pid {
            kill_process(pid, Signal::KILL).unwrap();
            send.send(()).unwrap();
        }
        verdict
    });
    scene.cluster.cordon("n0", true);
    wait(&format!("it is moved with {fault:?}"), || {
        if killed.try_recv().is_ok() {
            match fault.unwrap().0 {
                Fault::Agent(node) => scene.agents[node] = Some(scene.cluster.agent(node)),
                _ => scene.controller = Some(scene.cluster.controller()),
            }
        }
        scene.cluster.bind("web-2", "n1");
        scene.migration()["phase"] == "Succeeded" && scene.cluster.pods().len() == 1
    });
    scene.settled("web-2", 1);
    assert_eq!(scene.cluster.ledger.epochs(), [1], "{fault:?}");
    scene.cluster.ledger.trap.calls()
}

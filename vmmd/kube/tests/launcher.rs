//! Runs in launcher pods: the controller, the agent of a node, a kubelet and its launchers.

use serde_json::{Value, json};
use vmmd_api::v1::{ExitReason, disk_spec::Source, nic_spec::Attachment};

use crate::mock::{Cluster, api, kubelet::ADDRESS, trap::Verdict, vmmd::lock, wait};

const HASH: &str = "$6$salt$aVerySecretHash";
/// The same in base64, as Secrets have it.
const HASH_CODED: &str = "JDYkc2FsdCRhVmVyeVNlY3JldEhhc2g=";

fn ready(cluster: &Cluster, name: &str) -> (String, String, String) {
    let machine = cluster.machine(name);
    let conditions = machine["status"]["conditions"].as_array().cloned();
    let mut conditions = conditions.into_iter().flatten();
    let ready = conditions.find(|one| one["type"] == "Ready").unwrap_or_default();
    let text = |name: &str| ready[name].as_str().unwrap_or_default().to_owned();
    (text("status"), text("reason"), text("message"))
}

fn phase(cluster: &Cluster, name: &str) -> String {
    let machine = cluster.machine(name);
    machine["status"]["phase"].as_str().unwrap_or_default().to_owned()
}

/// Name in vmmd of the only VM.
fn vm_name(cluster: &Cluster) -> String {
    cluster.vmmds[0].state.vms()[0].metadata.clone().unwrap().name
}

fn put(cluster: &Cluster, resource: &str, name: &str, mut object: Value) {
    object["metadata"]["name"] = name.into();
    let key = api::core(resource, "shop", "");
    cluster.api.store(|store| store.create(key, object)).unwrap();
}

fn uid(cluster: &Cluster, pod: &str) -> String {
    cluster.pod(pod)["metadata"]["uid"].as_str().unwrap().to_owned()
}

#[test]
fn run_of_a_machine_is_a_vm_in_an_ordinary_pod() {
    let cluster = Cluster::start(1);
    let (_controller, _agent) = (cluster.controller(), cluster.agent(0));
    let _kubelet = cluster.kubelet(0);
    let state = &cluster.vmmds[0].state;
    cluster.create_with("web", "always_on_unless_stopped", |spec| {
        spec["vm"]["cloudInit"] = json!({});
        spec["cloudInitFrom"] = json!({"passwordHash": {"secretKeyRef": {"name": "login", "key": "hash"}}});
    });
    put(
        &cluster,
        "secrets",
        "login",
        json!({"data": {"hash": HASH_CODED}}),
    );
    cluster.run("web", 1, "n0");
    let vm = state.vms().remove(0);
    let metadata = vm.metadata.unwrap();
    assert_eq!(metadata.labels["vmmd.dev/pod-uid"], uid(&cluster, "web-1"));
    assert_eq!(metadata.annotations["vmmd.dev/pod"], "shop/web-1");
    let spec = vm.spec.unwrap();
    assert_eq!(spec.pod.unwrap().uid, uid(&cluster, "web-1"));
    assert!(matches!(
        &spec.nics[0].attachment,
        Some(Attachment::PodNetwork(_))
    ));
    assert!(matches!(&spec.disks[0].source, Some(Source::Disk(_))));
    let seed = spec.cloud_init.unwrap();
    assert_eq!((&*seed.password_hash, &*seed.hostname), (HASH, "web"));
    assert_eq!(seed.instance_id, spec.smbios.unwrap().uuid);
    wait("the address", || {
        cluster.machine("web")["status"]["addresses"] == json!([ADDRESS])
    });
    assert_eq!(ready(&cluster, "web").0, "True");
    // Only the Secret contains it.
    let all = cluster.api.store(|store| store.log.clone());
    for (_, _, key, object) in all.iter().filter(|(_, _, key, _)| key.resource != "secrets") {
        let text = object.to_string();
        assert!(
            !text.contains("aVerySecretHash") && !text.contains(HASH_CODED),
            "{key:?}: {text}"
        );
    }
    // The guest powers off, and this policy begins another run: its own identity stays.
    let mac = spec.nics[0].mac.clone();
    state.end(&metadata.name, ExitReason::GuestShutdown);
    cluster.run("web", 2, "n0");
    assert_eq!(state.vms()[0].spec.as_ref().unwrap().nics[0].mac, mac);
    wait("the disk of the first run is gone", || {
        state.storage.disks().len() == 1
    });
    // A stop in vmmd ends the runs.
    state.end(&metadata.name, ExitReason::Stopped);
    wait("stopped", || phase(&cluster, "web") == "Stopped");
    wait("nothing is left in vmmd", || {
        state.vms().is_empty() && state.storage.disks().is_empty()
    });
    assert_eq!(
        ready(&cluster, "web"),
        ("False".into(), "Stopped".into(), "it ended".into())
    );
    assert_eq!(cluster.machine("web")["status"]["run"]["end"], "StoppedByRequest");
    cluster.delete_machine("web");
    wait("all is gone", || {
        cluster.machine("web").is_null() && cluster.pods().is_empty()
    });
    assert_eq!(cluster.ledger.epochs(), [1, 2]);
}

#[test]
fn deleted_pod_ends_its_vm_and_the_next_run_begins() {
    let cluster = Cluster::start(2);
    let _controller = cluster.controller();
    let (_one, _two) = (cluster.agent(0), cluster.agent(1));
    let _kubelets = [cluster.kubelet(0), cluster.kubelet(1)];
    cluster.create("web", "always_on_unless_stopped");
    cluster.run("web", 1, "n0");
    cluster.delete_pod("web-1", None);
    cluster.run("web", 2, "n1");
    assert_eq!(cluster.ledger.twice(), Vec::<String>::new());
    let state = &cluster.vmmds[0].state;
    wait("nothing is left on the first node", || {
        state.vms().is_empty() && state.storage.disks().is_empty()
    });
}

#[test]
fn lost_node_keeps_its_run_even_after_a_forced_deletion() {
    let cluster = Cluster::start(2);
    let _controller = cluster.controller();
    let (_one, _two) = (cluster.agent(0), cluster.agent(1));
    let kubelet = cluster.kubelet(0);
    cluster.create("web", "always_on");
    cluster.run("web", 1, "n0");
    kubelet.away.store(true, std::sync::atomic::Ordering::SeqCst);
    // As the controller of nodes and the garbage collector of pods do.
    let lost = json!({"status": {"phase": "Failed", "conditions": [
        {"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"},
    ]}});
    let key = api::pod("shop", "web-1");
    cluster
        .api
        .store(|store| store.patch(&key, "status", &lost))
        .unwrap();
    wait("unknown", || phase(&cluster, "web") == "Unknown");
    assert_eq!(ready(&cluster, "web").1, "NodeUnreachable");
    cluster.delete_pod("web-1", Some(0));
    // A change of the VirtualMachine makes the controller look again.
    cluster.annotate("web", "note", "1");
    wait("the deletion is known", || {
        !cluster.pod("web-1")["metadata"]["deletionTimestamp"].is_null()
    });
    assert_eq!(cluster.machine("web")["status"]["epoch"], 1);
    assert!(cluster.pod("web-2").is_null());
    kubelet.away.store(false, std::sync::atomic::Ordering::SeqCst);
    wait("the next run", || cluster.pod("web-2").is_object());
    assert!(
        cluster.vmmds[0]
            .state
            .vms()
            .iter()
            .all(|vm| vm.status.as_ref().unwrap().instance.is_none())
    );
}

#[test]
fn pod_that_no_machine_names_gets_no_vm() {
    let cluster = Cluster::start(1);
    let _agent = cluster.agent(0);
    let state = &cluster.vmmds[0].state;
    let launcher = |vm: &str, run: i64, uid: &str| vmmd_api::v1::Pod {
        uid: uid.to_owned(),
        namespace: "shop".to_owned(),
        name: format!("web-{run}"),
        vm: vm.to_owned(),
        run,
        ..vmmd_api::v1::Pod::default()
    };
    cluster.create("web", "always_on");
    let status =
        json!({"status": {"epoch": 2, "run": {"pod": "web-2", "podUid": "p-2", "digest": "x", "epoch": 2}}});
    let key = api::machine("shop", "web");
    cluster
        .api
        .store(|store| store.patch(&key, "status", &status))
        .unwrap();
    for (vm, run, uid, reason) in [
        ("none", 1, "p-0", "NoVirtualMachine"),
        ("web", 1, "p-1", "OldEpoch"),
        ("web", 2, "p-9", "OtherPod"),
        ("web", 2, "p-2", "SpecChanged"),
    ] {
        state.pods.connect(launcher(vm, run, uid));
        wait(reason, || {
            state.pods.report(uid).is_some_and(|report| report.1 == reason)
        });
        assert_eq!(state.pods.reports(uid).len(), 1);
        state.pods.disconnect(uid);
    }
    // A run that the controller has not begun: the agent waits, and reads it again.
    state.pods.connect(launcher("web", 3, "p-3"));
    let read = || {
        let requests = lock(&cluster.api.inner.requests);
        let path = "GET /apis/vmmd.dev/v1alpha1/namespaces/shop/virtualmachines/web";
        requests.iter().filter(|one| *one == path).count()
    };
    let before = read();
    wait("the agent asks again", || read() >= before + 3);
    assert_eq!(state.pods.reports("p-3"), []);
    assert!(state.vms().is_empty());
    assert!(!state.calls().iter().any(|call| call.starts_with("create ")));
}

#[test]
fn agent_reads_virtual_machines_and_writes_events_only() {
    let cluster = Cluster::start(1);
    let controller = cluster.controller();
    cluster.create("web", "always_on");
    wait("a pod", || cluster.pod("web-1")["metadata"]["uid"].is_string());
    wait("it is noted", || {
        cluster.machine("web")["status"]["run"]["podUid"].is_string()
    });
    controller.kill();
    assert!(cluster.bind("web-1", "n0"));
    lock(&cluster.api.inner.requests).clear();
    let _kubelet = cluster.kubelet(0);
    let _agent = cluster.agent(0);
    let state = &cluster.vmmds[0].state;
    wait("a VM", || !state.vms().is_empty());
    wait("an event", || {
        let events = cluster.api.store(|store| store.list(&api::events("shop")));
        events.iter().any(|event| event["reason"] == "Created")
    });
    let requests = lock(&cluster.api.inner.requests).clone();
    let allowed = |request: &String| {
        request == "GET /apis/vmmd.dev/v1alpha1/namespaces/shop/virtualmachines/web"
            // The VMs that leave the node.
            || request == "GET /apis/vmmd.dev/v1alpha1/virtualmachines"
            || request.starts_with("POST /apis/events.k8s.io/v1/namespaces/shop/events")
            || request.starts_with("PATCH /apis/events.k8s.io/v1/namespaces/shop/events")
    };
    let others: Vec<_> = requests.iter().filter(|request| !allowed(request)).collect();
    assert!(others.is_empty(), "{others:?}");
}

#[test]
fn changed_spec_replaces_a_run_that_has_no_vm() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _kubelet = cluster.kubelet(0);
    cluster.create("web", "manual");
    cluster.annotate("web", "vmmd.dev/start", "1");
    wait("a pod", || cluster.pod("web-1").is_object());
    wait("it is noted", || {
        cluster.machine("web")["status"]["run"]["podUid"].is_string()
    });
    // Before the agent has read the VirtualMachine.
    let key = api::machine("shop", "web");
    let change = json!({"spec": {"vm": {"cpu": {"cores": 2}}}});
    cluster.api.store(|store| store.patch(&key, "", &change)).unwrap();
    assert!(cluster.bind("web-1", "n0"));
    let _agent = cluster.agent(0);
    cluster.run("web", 2, "n0");
    let spec = cluster.vmmds[0].state.vms()[0].spec.clone().unwrap();
    assert_eq!(spec.cpu.unwrap().cores, 2);
    assert_eq!(cluster.machine("web")["status"]["failures"], 0);
    assert_eq!(cluster.ledger.epochs(), [2]);
}

#[test]
fn image_is_imported_with_the_passwords_of_the_pod() {
    let cluster = Cluster::start(1);
    let (_controller, _agent) = (cluster.controller(), cluster.agent(0));
    let _kubelet = cluster.kubelet(0);
    let state = &cluster.vmmds[0].state;
    let config = json!({"auths": {"registry.example": {"username": "ci", "password": "one"}}});
    let config = k8s_openapi::ByteString(config.to_string().into_bytes());
    put(
        &cluster,
        "secrets",
        "pull",
        json!({"data": {".dockerconfigjson": serde_json::to_value(config).unwrap()}}),
    );
    cluster.create_with("web", "always_on", |spec| {
        spec["imagePullSecrets"] = json!([{"name": "pull"}]);
        spec["volumes"] = json!([{"name": "root", "containerDisk": {"image": "registry.example/debian:13"}}]);
    });
    wait("a pod", || cluster.pod("web-1").is_object());
    assert!(cluster.bind("web-1", "n0"));
    let pod = uid(&cluster, "web-1");
    wait("it waits", || {
        state
            .pods
            .report(&pod)
            .is_some_and(|report| report.1 == "ImportingImage")
    });
    assert_eq!(phase(&cluster, "web"), "Starting");
    let source = state.storage.images()[0].spec.clone().unwrap().source.unwrap();
    let vmmd_api::v1::image_spec::Source::Oci(source) = source else {
        panic!("{source:?}");
    };
    assert_eq!(source.credentials.unwrap().password, "one");
    state.storage.end_imports(None);
    wait("it runs", || phase(&cluster, "web") == "Running");
}

#[test]
fn claims_are_volumes_of_the_pod_by_their_mode() {
    let cluster = Cluster::start(1);
    let (_controller, _agent) = (cluster.controller(), cluster.agent(0));
    let _kubelet = cluster.kubelet(0);
    put(
        &cluster,
        "persistentvolumeclaims",
        "data",
        json!({"spec": {"volumeMode": "Block"}}),
    );
    cluster.create_with("web", "always_on", |spec| {
        spec["vm"]["disks"] = json!([{"name": "root"}, {"name": "data"}]);
        spec["vm"]["shares"] = json!([{"name": "site"}]);
        spec["volumes"] = json!([
            {"name": "root", "persistentVolumeClaim": {"claimName": "root"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "site", "persistentVolumeClaim": {"claimName": "site", "readOnly": true}},
        ]);
    });
    wait("a claim is missing", || {
        let text = cluster.machine("web")["status"]["conditions"].to_string();
        text.contains("there is no PersistentVolumeClaim root")
    });
    for name in ["root", "site"] {
        put(&cluster, "persistentvolumeclaims", name, json!({"spec": {}}));
    }
    cluster.run("web", 1, "n0");
    let container = cluster.pod("web-1")["spec"]["containers"][0].clone();
    let mounts = json!([
        {"name": "root", "mountPath": "/vmmd/volumes/root", "readOnly": false},
        {"name": "site", "mountPath": "/vmmd/volumes/site", "readOnly": true},
    ]);
    assert_eq!(container["volumeMounts"], mounts);
    let devices = json!([{"name": "data", "devicePath": "/vmmd/devices/data"}]);
    assert_eq!(container["volumeDevices"], devices);
    let spec = cluster.vmmds[0].state.vms()[0].spec.clone().unwrap();
    let sources: Vec<_> = spec
        .disks
        .iter()
        .map(|disk| disk.source.clone().unwrap())
        .collect();
    assert_eq!(
        sources,
        ["root", "data"].map(|name| Source::PodVolume(name.to_owned()))
    );
    assert_eq!(
        (&*spec.shares[0].pod_volume, spec.shares[0].read_only),
        ("site", true)
    );
}

#[test]
fn vm_stays_over_a_restart_of_vmmd_and_ends_with_its_launcher() {
    let mut cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let agent = cluster.agent(0);
    let kubelet = cluster.kubelet(0);
    cluster.create("web", "manual");
    cluster.annotate("web", "vmmd.dev/start", "1");
    cluster.run("web", 1, "n0");
    // vmmd, the kubelet and the agent restart.
    drop(kubelet);
    cluster.vmmds[0].stop();
    agent.kill();
    let pod = uid(&cluster, "web-1");
    let state = cluster.vmmds[0].state.clone();
    state.pods.disconnect(&pod);
    cluster.vmmds[0].resume();
    let _agent = cluster.agent(0);
    let calls = state.calls().len();
    wait("the agent is at work", || {
        let folder = cluster.vmmds[0].plugins();
        folder.join("vmmd.dev-vm.sock").exists()
    });
    assert_eq!(state.vms().len(), 1);
    assert_eq!(state.calls().len(), calls);
    // The launcher has died meanwhile.
    state.end(&vm_name(&cluster), ExitReason::Killed);
    wait("the VM is gone", || {
        state.vms().is_empty() && state.storage.disks().is_empty()
    });
    assert_eq!(cluster.ledger.epochs(), [1]);
}

#[test]
fn agent_that_is_killed_at_each_step_makes_one_vm() {
    // Counts the calls of a whole run first.
    let calls = run_with_a_kill(None);
    let steps = calls.iter().filter(|call| call.starts_with("n0: ")).count();
    assert!(steps >= 1, "{calls:?}");
    for at in 0..calls.len() {
        run_with_a_kill(Some(at));
    }
}

/// A run from its beginning to its end, in which the agent is killed at this call. Returns all calls.
fn run_with_a_kill(at: Option<usize>) -> Vec<String> {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _kubelet = cluster.kubelet(0);
    let mut agent = cluster.agent(0);
    cluster.create("web", "manual");
    let pid = agent.pid();
    let (send, killed) = std::sync::mpsc::channel();
    cluster.ledger.trap.arm(at.unwrap_or(usize::MAX), move |_| {
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        send.send(()).unwrap();
        Verdict::Pass
    });
    cluster.annotate("web", "vmmd.dev/start", "1");
    let mut revive = || {
        if killed.try_recv().is_ok() {
            agent = cluster.agent(0);
        }
    };
    wait("a pod", || {
        revive();
        cluster.pod("web-1").is_object()
    });
    assert!(cluster.bind("web-1", "n0"));
    wait("it runs", || {
        revive();
        phase(&cluster, "web") == "Running"
    });
    cluster.delete_machine("web");
    let state = &cluster.vmmds[0].state;
    wait(&format!("nothing is left after a kill at {at:?}"), || {
        revive();
        let left = !state.vms().is_empty() || !state.storage.disks().is_empty();
        cluster.machine("web").is_null() && cluster.pods().is_empty() && !left
    });
    assert_eq!(cluster.ledger.epochs(), [1], "kill at {at:?}");
    assert_eq!(cluster.ledger.twice(), Vec::<String>::new());
    cluster.ledger.trap.calls()
}

//! Behavior of the agent for a node, its pods and its VMs.

use serde_json::json;
use vmmd_api::v1::ExitReason;

use crate::mock::{Cluster, api, vmmd::lock, wait};

/// How long a guest has, by a call that stops it.
fn seconds(stop: &str) -> i64 {
    stop.rsplit('=').next().unwrap().parse().unwrap()
}

#[test]
fn a_vmmd_becomes_a_node() {
    let cluster = Cluster::start(1);
    let _agent = cluster.agent(0);
    let node = || {
        cluster
            .api
            .store(|store| store.get(&api::node("n0")))
            .unwrap_or_default()
    };
    wait("the node has a status", || {
        node()["status"]["conditions"].is_array()
    });
    wait("it is ready", || {
        let conditions = node()["status"]["conditions"].clone();
        conditions
            .as_array()
            .unwrap()
            .iter()
            .any(|one| one["type"] == "Ready" && one["status"] == "True")
    });
    let node = node();
    assert_eq!(
        node["spec"]["taints"],
        json!([{"key": "vmmd.dev/vm", "effect": "NoSchedule"}])
    );
    assert_eq!(node["metadata"]["labels"]["vmmd.dev/vm"], "");
    assert_eq!(node["status"]["allocatable"]["cpu"], "8000m");
    assert_eq!(node["status"]["allocatable"]["memory"], (8_u64 << 30).to_string());
    assert_eq!(
        node["status"]["nodeInfo"]["containerRuntimeVersion"],
        "vmmd://1.2.3"
    );
    let lease = || {
        cluster
            .api
            .store(|store| store.get(&api::lease("kube-node-lease", "n0")))
    };
    wait("the node has a lease", || lease().is_ok());
    assert_eq!(
        lease().unwrap()["metadata"]["ownerReferences"][0]["uid"],
        node["metadata"]["uid"]
    );
}

#[test]
fn a_node_is_not_ready_without_vmmd_and_ready_again_with_it() {
    let mut cluster = Cluster::start(1);
    let _agent = cluster.agent(0);
    let ready = |cluster: &Cluster, wanted: &str| {
        let node = cluster
            .api
            .store(|store| store.get(&api::node("n0")))
            .unwrap_or_default();
        let conditions = node["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        conditions
            .iter()
            .any(|one| one["type"] == "Ready" && one["status"] == wanted)
    };
    wait("ready", || ready(&cluster, "True"));
    cluster.vmmds[0].stop();
    wait("not ready", || ready(&cluster, "False"));
    cluster.vmmds[0].resume();
    wait("ready again", || ready(&cluster, "True"));
}

#[test]
fn node_stays_ready_over_an_agent_restart_and_updates_labels() {
    let cluster = Cluster::start(1);
    let features = &cluster.vmmds[0].state.cpu_features;
    *lock(features) = ["avx", "avx2"].map(str::to_owned).to_vec();
    let agent = cluster.agent(0);
    let get = || {
        cluster
            .api
            .store(|store| store.get(&api::node("n0")))
            .unwrap_or_default()
    };
    let label = |name: &str| get()["metadata"]["labels"][format!("cpu.vmmd.dev/{name}")].clone();
    let not_ready = |node: &serde_json::Value| {
        let conditions = node["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        conditions.any(|one| one["type"] == "Ready" && one["status"] != "True")
    };
    wait("the node has a status", || {
        get()["status"]["conditions"].is_array()
    });
    assert_eq!(label("avx2"), "true");
    agent.kill();
    *lock(features) = vec!["avx".to_owned()];
    let others = json!({"metadata": {"labels": {"rack": "7"}}});
    cluster
        .api
        .store(|store| store.patch(&api::node("n0"), "", &others))
        .unwrap();
    let written = || {
        let requests = lock(&cluster.api.inner.requests);
        let status = requests
            .iter()
            .filter(|one| *one == "PATCH /api/v1/nodes/n0/status");
        status.count()
    };
    let before = written();
    let _agent = cluster.agent(0);
    wait("the label is gone", || label("avx2").is_null());
    wait("the status is written again", || written() > before);
    assert_eq!(
        (label("avx"), get()["metadata"]["labels"]["rack"].clone()),
        (json!("true"), json!("7"))
    );
    let log = cluster.api.store(|store| store.log.clone());
    let nodes = log.iter().filter(|(_, _, key, _)| *key == api::node("n0"));
    assert!(nodes.clone().count() >= 3);
    assert!(
        !nodes.into_iter().any(|(_, _, _, node)| not_ready(node)),
        "{log:?}"
    );
}

#[test]
fn a_node_without_kvm_is_not_ready() {
    let cluster = Cluster::start(1);
    *lock(&cluster.vmmds[0].state.no_kvm) = true;
    let _agent = cluster.agent(0);
    wait("it says so", || {
        let node = cluster
            .api
            .store(|store| store.get(&api::node("n0")))
            .unwrap_or_default();
        let conditions = node["status"]["conditions"].as_array().cloned();
        conditions.into_iter().flatten().any(|one| {
            one["type"] == "Ready"
                && one["status"] == "False"
                && one["reason"] == "KvmUnavailable"
                && one["message"] == "/dev/kvm is missing"
        })
    });
}

#[test]
fn pod_has_one_address_of_each_family_with_many_nics() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    cluster.create_with("web", "always_on", |spec| {
        spec["vm"]["nics"] = json!([{"name": "a", "network": "front"}, {"name": "b", "network": "back"}]);
    });
    cluster.run("web", 1, "n0");
    let status = cluster.pod("web-1")["status"].clone();
    assert_eq!(status["podIPs"], json!([{"ip": "10.0.0.7"}, {"ip": "fd00::7"}]));
    assert_eq!(status["podIP"], "10.0.0.7");
}

#[test]
fn an_agent_that_was_killed_finds_its_vms_again() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let agent = cluster.agent(0);
    cluster.create("web", "always_on");
    cluster.run("web", 1, "n0");
    agent.kill();
    let name = cluster.vmmds[0].state.vms()[0].metadata.clone().unwrap().name;
    cluster.vmmds[0].state.end(&name, ExitReason::Stopped);
    let _agent = cluster.agent(0);
    wait("the pod says that the VM has ended", || {
        cluster.pod("web-1")["status"]["reason"] == "StoppedByRequest"
            || cluster.machine("web")["status"]["epoch"] == 2
    });
    assert_eq!(cluster.ledger.epochs(), [1]);
}

#[test]
fn vms_continue_without_the_api_server_and_deletions_follow() {
    let mut cluster = Cluster::start(1);
    let controller = cluster.controller();
    let agent = cluster.agent(0);
    for name in ["kept", "dropped"] {
        cluster.create(name, "always_on_unless_stopped");
        cluster.run(name, 1, "n0");
    }
    cluster.api.stop();
    // An agent that starts without the API server does not stop existing VMs either.
    agent.kill();
    let _agent = cluster.agent(0);
    cluster.delete_machine("dropped");
    controller.kill();
    let calls = cluster.vmmds[0].state.calls().len();
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(cluster.vmmds[0].state.vms().len(), 2);
    assert_eq!(cluster.vmmds[0].state.calls().len(), calls);
    cluster.api.resume();
    let _controller = cluster.controller();
    wait("the deleted one is gone", || cluster.machine("dropped").is_null());
    assert_eq!(cluster.vmmds[0].state.vms().len(), 1);
    assert_eq!(cluster.machine("kept")["status"]["phase"], "Running");
    assert_eq!(cluster.ledger.epochs(), [1, 1]);
}

#[test]
fn guest_has_its_grace_period_and_a_forced_pod_waits() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    *lock(&cluster.vmmds[0].state.stubborn) = true;
    cluster.create("web", "manual");
    cluster
        .api
        .store(|store| {
            store.patch(
                &api::machine("shop", "web"),
                "",
                &json!({"metadata": {"annotations": {"vmmd.dev/start": "1"}}}),
            )
        })
        .unwrap();
    cluster.run("web", 1, "n0");
    cluster.delete_pod("web-1", None);
    let stop = || {
        let calls = cluster.vmmds[0].state.calls().into_iter();
        calls.rev().find(|call| call.starts_with("stop "))
    };
    wait("the guest is asked", || stop().is_some());
    let grace = seconds(&stop().unwrap());
    assert!((1..=30).contains(&grace), "{grace}");
    // Somebody has no patience.
    assert!(cluster.pod("web-1").is_object());
    cluster.delete_pod("web-1", Some(0));
    wait("the pod is gone", || cluster.pod("web-1").is_null());
    assert!(cluster.vmmds[0].state.vms().is_empty());
    assert!(
        cluster.vmmds[0]
            .state
            .calls()
            .last()
            .unwrap()
            .ends_with("force=true")
    );
}

#[test]
fn guest_has_its_grace_period_after_a_deletion_without_agent() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let agent = cluster.agent(0);
    cluster.create("web", "always_on");
    cluster.run("web", 1, "n0");
    agent.kill();
    cluster.delete_pod("web-1", Some(3));
    let deletion = cluster.pod("web-1")["metadata"]["deletionTimestamp"].clone();
    let deletion: jiff::Timestamp = deletion.as_str().unwrap().parse().unwrap();
    wait("the pod was to be gone", || jiff::Timestamp::now() > deletion);
    let _agent = cluster.agent(0);
    wait("the pod is gone", || cluster.pod("web-1").is_null());
    let calls = cluster.vmmds[0].state.calls();
    let place = |verb: &str| calls.iter().position(|call| call.starts_with(verb)).unwrap();
    assert!(place("stop ") < place("delete "), "{calls:?}");
    let grace = seconds(&calls[place("stop ")]);
    assert!((1..=3).contains(&grace), "{calls:?}");
}

#[test]
fn a_vm_whose_pod_was_torn_out_is_stopped() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let agent = cluster.agent(0);
    cluster.create("web", "rerun_on_failure");
    cluster.run("web", 1, "n0");
    agent.kill();
    cluster
        .api
        .store(|store| store.tear_out(&api::pod("shop", "web-1")));
    let _agent = cluster.agent(0);
    wait("the VM is gone", || {
        let vms = cluster.vmmds[0].state.vms();
        vms.iter()
            .all(|vm| vm.metadata.as_ref().unwrap().labels["vmmd.dev/epoch"] != "1")
    });
}

#[test]
fn next_run_begins_on_the_node_with_the_vm_of_the_forced_pod() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let agent = cluster.agent(0);
    cluster.create("web", "always_on");
    cluster.run("web", 1, "n0");
    agent.kill();
    cluster
        .api
        .store(|store| store.tear_out(&api::pod("shop", "web-1")));
    wait("the next pod", || cluster.pod("web-2").is_object());
    assert!(cluster.bind("web-2", "n0"));
    let _agent = cluster.agent(0);
    wait("it runs", || cluster.pod("web-2")["status"]["phase"] == "Running");
    assert_eq!(cluster.ledger.epochs(), [1, 2]);
}

#[test]
fn vm_is_created_after_its_namesake_is_gone_and_only_once() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let agent = cluster.agent(0);
    let state = &cluster.vmmds[0].state;
    cluster.create("web", "manual");
    cluster.annotate("web", "vmmd.dev/start", "1");
    wait("a pod", || cluster.pod("web-1").is_object());
    let manifest = cluster.pod("web-1")["metadata"]["annotations"]["vmmd.dev/manifest"].clone();
    let manifest: serde_json::Value = serde_json::from_str(manifest.as_str().unwrap()).unwrap();
    let name = manifest["metadata"]["name"].as_str().unwrap();
    state.put(name);
    assert!(cluster.bind("web-1", "n0"));
    wait("the machine says what it waits for", || {
        let text = cluster.machine("web")["status"]["conditions"].to_string();
        text.contains("VmExists") && text.contains(name)
    });
    // Another agent gets the same answer to the same request.
    agent.kill();
    state.remove(name);
    let agent = cluster.agent(0);
    wait("the VM runs", || {
        cluster.machine("web")["status"]["phase"] == "Running"
    });
    agent.kill();
    state.remove(name);
    // As if the API server had not been told of the VM.
    let untold = json!({"status": {"phase": "Pending", "containerStatuses": null}});
    let key = api::pod("shop", "web-1");
    cluster
        .api
        .store(|store| store.patch(&key, "status", &untold))
        .unwrap();
    let _agent = cluster.agent(0);
    wait("the VM is missed", || {
        cluster.pod("web-1")["status"]["reason"] == "VmRemoved"
    });
    assert_eq!(cluster.ledger.epochs(), [1]);
}

#[test]
fn what_vmmd_refuses_is_said_in_the_status() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    let refusal = tonic::Status::failed_precondition("there is no kernel /srv/vmlinuz");
    *lock(&cluster.vmmds[0].state.refusal) = Some(refusal);
    cluster.create("web", "always_on");
    wait("a pod", || cluster.pod("web-1").is_object());
    assert!(cluster.bind("web-1", "n0"));
    wait("it fails", || {
        cluster.machine("web")["status"]["phase"] == "Failed"
    });
    let text = cluster.machine("web")["status"]["conditions"].to_string();
    assert!(text.contains("there is no kernel /srv/vmlinuz"), "{text}");
    assert_eq!(cluster.machine("web")["status"]["failures"], 1);
}

#[test]
fn vm_that_names_a_file_of_the_node_fails_there() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent_with(0, &["--no-node-files"]);
    cluster.create("web", "always_on");
    wait("a pod", || cluster.pod("web-1").is_object());
    assert!(cluster.bind("web-1", "n0"));
    wait("it fails", || {
        cluster.pod("web-1")["status"]["reason"] == "NodeFilesNotAllowed"
    });
    let message = cluster.pod("web-1")["status"]["message"].clone();
    assert!(
        message.as_str().unwrap().starts_with("spec.vm.boot.linux: "),
        "{message}"
    );
    assert!(cluster.vmmds[0].state.calls().is_empty());
}

#[test]
fn no_node_files_with_disks_anywhere_ends_the_agent() {
    let cluster = Cluster::start(1);
    *lock(&cluster.vmmds[0].state.disk_roots) = vec!["/srv".to_owned(), "/".to_owned()];
    let mut agent = cluster.agent_with(0, &["--no-node-files"]);
    wait("it ends", || agent.has_ended());
    assert!(cluster.api.store(|store| store.get(&api::node("n0"))).is_err());
}

#[test]
fn unanswered_creation_is_not_repeated_for_a_deleted_vm() {
    for answers_gone in [true, false] {
        let cluster = Cluster::start(1);
        let _controller = cluster.controller();
        let _agent = cluster.agent(0);
        let state = &cluster.vmmds[0].state;
        *lock(&state.answers_gone) = answers_gone;
        *lock(&state.cut) = true;
        cluster.create("web", "always_on");
        cluster.run("web", 1, "n0");
        cluster.delete_machine("web");
        wait("the pod is gone", || cluster.pods().is_empty());
        wait("the machine is gone", || cluster.machine("web").is_null());
        let calls = state.calls();
        let creations = calls.iter().filter(|call| call.starts_with("create "));
        assert_eq!(creations.count(), 1, "{calls:?}");
        assert!(state.vms().is_empty());
    }
}

#[test]
fn vm_deleted_before_its_answer_is_not_created_again() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    let state = &cluster.vmmds[0].state;
    *lock(&state.cut) = true;
    cluster.create("web", "rerun_on_failure");
    wait("a pod", || cluster.pod("web-1").is_object());
    assert!(cluster.bind("web-1", "n0"));
    wait("a VM", || !state.vms().is_empty());
    state.remove(&state.vms()[0].metadata.clone().unwrap().name);
    wait("the pod says so", || {
        let machine = cluster.machine("web");
        machine["status"]["conditions"]
            .to_string()
            .contains("the VM was removed from vmmd")
    });
    assert_eq!(cluster.ledger.epochs(), [1]);
}

#[test]
fn a_pod_that_the_controller_did_not_make_runs_nothing() {
    let cluster = Cluster::start(1);
    let _agent = cluster.agent(0);
    let forged = json!({
        "metadata": {
            "name": "forged",
            "labels": {"vmmd.dev/machine-uid": "x", "vmmd.dev/epoch": "1"},
            "annotations": {"vmmd.dev/manifest": "{\"metadata\":{\"name\":\"forged\"}}"},
            "finalizers": ["vmmd.dev/vm-gone"],
        },
        "spec": {"nodeName": "n0", "containers": []},
    });
    cluster
        .api
        .store(|store| store.create(api::pod("shop", ""), forged))
        .unwrap();
    wait("it fails", || {
        cluster.pod("forged")["status"]["reason"] == "NoVirtualMachine"
    });
    assert!(cluster.vmmds[0].state.calls().is_empty());
    cluster.delete_pod("forged", None);
    wait("it goes", || cluster.pod("forged").is_null());
}

#[test]
fn of_two_agents_of_a_node_one_runs() {
    let cluster = Cluster::start(1);
    let _first = cluster.agent(0);
    wait("the node", || {
        cluster.api.store(|store| store.get(&api::node("n0"))).is_ok()
    });
    let mut second = cluster.agent(0);
    wait("the second ends", || second.has_ended());
}

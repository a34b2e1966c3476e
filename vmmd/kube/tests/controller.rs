//! Behavior of the controller, with agents and without.

use serde_json::json;

use crate::mock::{Cluster, api, vmmd::lock, wait};

#[test]
fn a_pod_that_was_never_bound_can_be_deleted() {
    let cluster = Cluster::start(0);
    let _controller = cluster.controller();
    cluster.create("web", "always_on");
    // One that is deleted before it is noted is made again under the same number.
    wait("a pod that is noted", || {
        cluster.machine("web")["status"]["run"]["podUid"].is_string()
    });
    cluster.delete_pod("web-1", None);
    wait("another pod", || cluster.pod("web-2").is_object());
    assert!(cluster.pod("web-1").is_null());
    cluster.delete_machine("web");
    wait("the machine is gone", || cluster.machine("web").is_null());
    assert!(cluster.pods().is_empty());
}

#[test]
fn pod_without_a_node_is_deleted_after_a_failed_request() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let pod = "/api/v1/namespaces/shop/pods/web-1";
    cluster.create("web", "always_on");
    wait("a pod that is noted", || {
        cluster.machine("web")["status"]["run"]["podUid"].is_string()
    });
    let late = cluster.pod("web-1");
    cluster.ledger.trap.fail(&format!("PATCH {pod}"));
    cluster.delete_pod("web-1", None);
    wait("the pod is released", || cluster.pod("web-1").is_null());
    wait("another pod", || cluster.pod("web-2").is_object());
    // One of an earlier run.
    cluster.ledger.trap.fail(&format!("DELETE {pod}"));
    cluster.create_again(late, None);
    wait("the late pod is gone", || cluster.pod("web-1").is_null());
    assert!(cluster.ledger.trap.has_failed());
}

#[test]
fn refused_pod_is_in_the_status_and_created_when_allowed() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let (_agent, _kubelet) = (cluster.agent(0), cluster.kubelet(0));
    let quota = &cluster.api.inner.quota;
    *lock(quota) = Some("exceeded quota: vms".to_owned());
    cluster.create("web", "always_on");
    let scheduled = || {
        let conditions = cluster.machine("web")["status"]["conditions"].clone();
        let conditions = conditions.as_array().cloned().unwrap_or_default();
        conditions
            .into_iter()
            .find(|one| one["type"] == "Scheduled")
            .unwrap_or_default()
    };
    wait("it is said", || scheduled()["reason"] == "FailedCreate");
    assert_eq!(scheduled()["status"], "False");
    assert!(
        scheduled()["message"]
            .as_str()
            .unwrap()
            .contains("exceeded quota: vms")
    );
    // Retries, with growing intervals, change nothing.
    let tries = || {
        let requests = lock(&cluster.api.inner.requests);
        requests
            .iter()
            .filter(|one| *one == "POST /api/v1/namespaces/shop/pods")
            .count()
    };
    let first = tries();
    wait("it is tried again", || tries() > first);
    assert_eq!(scheduled()["reason"], "FailedCreate");
    *lock(quota) = None;
    cluster.run("web", 1, "n0");
    assert_eq!(scheduled()["reason"], "Bound");
}

#[test]
fn pod_deleted_during_an_outage_is_noticed_by_the_next_list() {
    let mut cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    let kubelet = cluster.kubelet(0);
    cluster.create("web", "always_on");
    cluster.run("web", 1, "n0");
    drop(kubelet);
    cluster.delete_pod("web-1", None);
    wait("the machine is stopping", || {
        cluster.machine("web")["status"]["phase"] == "Stopping"
    });
    cluster.api.stop();
    // No event about the pod follows, and nothing else has changed.
    cluster.api.store(|store| {
        store.tear_out(&api::pod("shop", "web-1"));
        store.forget("pods");
    });
    cluster.api.resume();
    wait("the next run has a pod", || cluster.pod("web-2").is_object());
}

#[test]
fn a_late_pod_of_an_earlier_run_goes_away() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let (_agent, _kubelet) = (cluster.agent(0), cluster.kubelet(0));
    cluster.create("web", "always_on");
    cluster.run("web", 1, "n0");
    let late = cluster.pod("web-1");
    cluster.delete_pod("web-1", None);
    cluster.run("web", 2, "n0");
    // As of a controller that was held up: one is not bound yet, the other one is.
    for node in [None, Some("n0")] {
        cluster.create_again(late.clone(), node);
        wait("the late pod is gone", || cluster.pod("web-1").is_null());
    }
    assert_eq!(cluster.machine("web")["status"]["phase"], "Running");
    assert_eq!(cluster.ledger.epochs(), [1, 2]);
}

#[test]
fn another_controller_takes_over() {
    let cluster = Cluster::start(1);
    let first = cluster.elected_controller();
    let lease = || {
        cluster
            .api
            .store(|store| store.get(&api::lease("vmmd-system", "vmmd-kube-controller")))
    };
    wait("a lease", || lease().is_ok());
    let _second = cluster.elected_controller();
    let (_agent, _kubelet) = (cluster.agent(0), cluster.kubelet(0));
    cluster.create("web", "always_on");
    cluster.run("web", 1, "n0");
    let holder = lease().unwrap()["spec"]["holderIdentity"].clone();
    first.kill();
    cluster.create("db", "always_on");
    wait("another holder", || {
        lease().unwrap()["spec"]["holderIdentity"] != holder
    });
    cluster.run("db", 1, "n0");
    cluster.delete_machine("web");
    wait("the first machine is gone", || cluster.machine("web").is_null());
    assert_eq!(cluster.ledger.epochs(), [1, 1]);
}

#[test]
fn controller_ends_on_request_with_and_without_the_lease() {
    let cluster = Cluster::start(0);
    let asked = |request: &str| lock(&cluster.api.inner.requests).iter().any(|one| one == request);
    let alone = cluster.controller();
    wait("it works", || {
        asked("GET /apis/vmmd.dev/v1alpha1/virtualmachines")
    });
    assert!(alone.terminate().success());
    let path = "/apis/coordination.k8s.io/v1/namespaces/vmmd-system/leases";
    let held = json!({
        "metadata": {"name": "vmmd-kube-controller"},
        "spec": {"holderIdentity": "another", "leaseDurationSeconds": 3600},
    });
    let key = api::lease("vmmd-system", "");
    cluster.api.store(|store| store.create(key, held)).unwrap();
    let waiting = cluster.elected_controller();
    wait("it asks for the lease", || {
        asked(&format!("GET {path}/vmmd-kube-controller"))
    });
    assert!(waiting.terminate().success());
    let lease = cluster
        .api
        .store(|store| store.get(&api::lease("vmmd-system", "vmmd-kube-controller")));
    assert_eq!(lease.unwrap()["spec"]["holderIdentity"], "another");
    // The holder of the lease gives it back.
    let key = api::lease("vmmd-system", "vmmd-kube-controller");
    cluster.api.store(|store| store.tear_out(&key));
    let leads = cluster.elected_controller();
    wait("it has the lease", || {
        cluster
            .api
            .store(|store| store.get(&key))
            .is_ok_and(|lease| lease["spec"]["holderIdentity"].is_string())
    });
    assert!(leads.terminate().success());
    let lease = cluster.api.store(|store| store.get(&key)).unwrap();
    assert!(lease["spec"]["holderIdentity"].is_null(), "{lease}");
}

#[test]
fn two_controllers_that_both_work_do_no_harm() {
    let cluster = Cluster::start(1);
    let _controllers = [cluster.controller(), cluster.controller()];
    let (_agent, _kubelet) = (cluster.agent(0), cluster.kubelet(0));
    for index in 0..5 {
        cluster.create(&format!("m{index}"), "always_on");
    }
    for index in 0..5 {
        cluster.run(&format!("m{index}"), 1, "n0");
    }
    assert_eq!(cluster.pods().len(), 5);
    assert_eq!(cluster.ledger.epochs(), [1; 5]);
    assert!(cluster.ledger.twice().is_empty());
}

#[test]
fn invalid_spec_is_in_the_status_and_retried_after_a_fix() {
    let cluster = Cluster::start(0);
    let _controller = cluster.controller();
    cluster.create("web", "sometimes");
    wait("invalid", || {
        cluster.machine("web")["status"]["phase"] == "Invalid"
    });
    let text = cluster.machine("web")["status"]["conditions"].to_string();
    assert!(text.contains("spec.vm.runPolicy"), "{text}");
    assert!(cluster.pods().is_empty());
    let mend = json!({"spec": {"vm": {"runPolicy": "always_on"}}});
    cluster
        .api
        .store(|store| store.patch(&api::machine("shop", "web"), "", &mend))
        .unwrap();
    wait("a pod", || cluster.pod("web-1").is_object());
}

#[test]
fn a_cluster_at_rest_asks_nothing() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let (_agent, _kubelet) = (cluster.agent(0), cluster.kubelet(0));
    for index in 0..3 {
        let name = format!("m{index}");
        cluster.create(&name, "always_on");
        cluster.run(&name, 1, "n0");
    }
    let mut before = cluster.api.requests();
    wait(
        "nothing is asked for three seconds but for the lease and the node",
        || {
            std::thread::sleep(std::time::Duration::from_secs(3));
            let now = cluster.api.requests();
            let asked = now - before;
            before = now;
            asked <= 3
        },
    );
    println!("requests for 3 VMs, from nothing to rest: {before}");
}

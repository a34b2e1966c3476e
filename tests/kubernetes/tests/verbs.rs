//! What people type.

use std::time::Duration;

use vmmd_kubernetes_tests::{eventually, fleet::Fleet, session::Session};

const PATIENCE: Duration = Duration::from_secs(60);

/// The placeholder of a VM's run.
fn pod(fleet: &Fleet, name: &str) -> String {
    fleet
        .cluster
        .kubectl(&["get", "vmmvm", name, "-o=jsonpath={.status.run.pod}"])
}

async fn node_of(fleet: &Fleet, name: &str) -> String {
    let vms = fleet.vms().await.unwrap();
    vms.into_iter().find(|vm| vm.name == name).unwrap().node
}

#[tokio::test]
async fn a_vm_is_listed_described_followed_and_deleted() {
    let fleet = Fleet::start(1, 1).await;
    let cluster = &fleet.cluster;
    cluster.apply(&fleet.vm("web"));
    fleet.all_run(&["web".into()], PATIENCE).await;
    let listed = cluster.kubectl(&["get", "vmmvm", "-o", "wide"]);
    assert!(
        listed
            .lines()
            .nth(1)
            .is_some_and(|line| line.contains("Running") && line.contains("node-0")),
        "{listed}"
    );
    let described = cluster.kubectl(&["describe", "vmmvm", "web"]);
    assert!(
        described.contains("Events:") && !described.contains("Events:  <none>"),
        "{described}"
    );
    let pod = pod(&fleet, "web");
    let described = cluster.kubectl(&["describe", "pod", &pod]);
    assert!(
        described.contains("Successfully assigned default/"),
        "{described}"
    );
    let pods = cluster.kubectl(&["get", "pod", &pod]);
    assert!(pods.contains("1/1") && pods.contains("Running"), "{pods}");

    let mut logs = Session::start(cluster.command(&["logs", "-f", &pod]));
    logs.expect("booted", PATIENCE).await;
    cluster.kubectl(&["delete", "vmmvm", "web", "--timeout=60s"]);
    assert!(logs.end(PATIENCE).await, "logs -f ends with the VM");
    assert!(cluster.refused(&["get", "vmmvm", "web"]).contains("NotFound"));
    fleet.nothing_left(PATIENCE).await;
}

#[tokio::test]
async fn a_node_is_cordoned_drained_and_uncordoned() {
    let fleet = Fleet::start(2, 1).await;
    let cluster = &fleet.cluster;
    cluster.kubectl(&["cordon", "node-0"]);
    let names: Vec<String> = (0..4).map(|number| format!("vm-{number}")).collect();
    for name in &names[..2] {
        cluster.apply(&fleet.vm(name));
    }
    fleet.all_run(&names[..2], PATIENCE).await;
    for name in &names[..2] {
        assert_eq!(node_of(&fleet, name).await, "node-1", "the other one is cordoned");
    }
    cluster.kubectl(&["uncordon", "node-0"]);
    cluster.kubectl(&["cordon", "node-1"]);
    for name in &names[2..] {
        cluster.apply(&fleet.vm(name));
    }
    fleet.all_run(&names, PATIENCE).await;
    for name in &names[2..] {
        assert_eq!(node_of(&fleet, name).await, "node-0");
    }
    let drained = cluster.kubectl(&["drain", "node-1", "--ignore-daemonsets", "--timeout=120s"]);
    assert!(drained.contains("evicted"), "{drained}");
    assert_eq!(
        fleet.nodes[1].daemon.vmm_processes(),
        [],
        "nothing runs when the drain has ended"
    );
    fleet.all_run(&names, PATIENCE).await;
    for name in &names {
        assert_eq!(node_of(&fleet, name).await, "node-0");
    }
    cluster.kubectl(&["uncordon", "node-1"]);
    let mut vm = fleet.vm("back");
    vm["spec"]["nodeSelector"] = serde_json::json!({"kubernetes.io/hostname": "node-1"});
    cluster.apply(&vm);
    let all: Vec<_> = names.into_iter().chain(["back".to_owned()]).collect();
    fleet.all_run(&all, PATIENCE).await;
    assert_eq!(fleet.ran_twice(), [""; 0]);
    cluster.kubectl(&["delete", "vmmvm", "--all", "--timeout=60s"]);
    fleet.nothing_left(PATIENCE).await;
}

#[tokio::test]
async fn a_spec_that_vmmd_refuses_is_refused_with_the_path_of_the_field() {
    let fleet = Fleet::start(1, 1).await;
    let mut vm = fleet.vm("bad");
    vm["spec"]["vm"]["memory"]["sizeBytes"] = 5.into();
    // By the schema at admission, or by the controller in the status.
    let file = fleet.cluster.path("home/bad.json");
    std::fs::write(&file, vm.to_string()).unwrap();
    let output = fleet.cluster.run(&["apply", "-f", file.to_str().unwrap()]);
    let said = if output.status.success() {
        fleet.cluster.kubectl(&[
            "wait",
            "vmmvm/bad",
            "--for=condition=Valid=false",
            "--timeout=30s",
        ]);
        fleet.cluster.kubectl(&["get", "vmmvm", "bad", "-o", "yaml"])
    } else {
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(said.contains("spec.vm.memory.sizeBytes"), "{said}");
    assert_eq!(fleet.nodes[0].daemon.list().await, []);
}

#[tokio::test]
async fn a_vm_whose_starts_fail_is_not_said_to_run() {
    let fleet = Fleet::start(1, 1).await;
    let cluster = &fleet.cluster;
    let mut vm = fleet.vm("bad");
    // As on a node whose KVM runs no guests.
    vm["spec"]["vm"]["boot"]["linux"]["cmdline"] = "mock.boot=kvm".into();
    cluster.apply(&vm);
    let path = "-o=jsonpath={.status.phase} {.status.conditions[?(@.type=='Ready')]}";
    let ready = eventually("the status says why", PATIENCE, async || {
        let found = cluster.kubectl(&["get", "vmmvm", "bad", path]);
        if found.contains("KVM can't run guests") {
            Ok(found)
        } else {
            Err(found)
        }
    })
    .await;
    assert!(ready.starts_with("Starting "), "{ready}");
    let pods = cluster.kubectl(&["get", "pods"]);
    assert!(pods.contains("StartFailed") && pods.contains("0/1"), "{pods}");
    cluster.kubectl(&["delete", "vmmvm", "bad", "--timeout=60s"]);
    fleet.nothing_left(PATIENCE).await;
}

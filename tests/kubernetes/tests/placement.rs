//! The scheduler places VMs as their specs say.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Value, json};
use vmmd_kubernetes_tests::{eventually, fleet::Fleet};

const PATIENCE: Duration = Duration::from_secs(120);

fn tolerating(mut vm: Value) -> Value {
    vm["spec"]["tolerations"] = json!([{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}]);
    vm
}

fn labelled(mut vm: Value, app: &str) -> Value {
    vm["spec"]["podMetadata"] = json!({"labels": {"app": app}});
    vm
}

/// A term of affinity to pods with this label on one node.
fn beside(app: &str) -> Value {
    json!({"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"app": app}}, "topologyKey": "kubernetes.io/hostname"},
    ]})
}

#[tokio::test]
async fn twenty_vms_are_placed_by_requests_affinity_taints_and_spread() {
    // Twelve cores each.
    let cores = "[overcommit]\ncpu = CORES\nvcpu = 1000\n";
    let processors = std::thread::available_parallelism().unwrap().get();
    let cores = cores.replace(
        "CORES",
        &format!("{:.3}", 12.0 / f64::from(u32::try_from(processors).unwrap())),
    );
    let fleet = Fleet::start_with(2, 2, &cores).await;
    let cluster = &fleet.cluster;
    cluster.kubectl(&["taint", "node", "node-1", "dedicated=vms:NoSchedule"]);

    let mut vms = Vec::new();
    for number in 0..4 {
        vms.push(fleet.vm(&format!("plain-{number}")));
        let mut vm = tolerating(fleet.vm(&format!("chosen-{number}")));
        vm["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "node-1"});
        vms.push(vm);
    }
    for number in 0..6 {
        let mut vm = labelled(tolerating(fleet.vm(&format!("spread-{number}"))), "spread");
        vm["spec"]["topologySpreadConstraints"] = json!([{
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "spread"}},
        }]);
        vms.push(vm);
    }
    for number in 0..2 {
        let mut vm = labelled(tolerating(fleet.vm(&format!("apart-{number}"))), "apart");
        vm["spec"]["affinity"] = json!({"podAntiAffinity": beside("apart")});
        vms.push(vm);
    }
    for number in 0..4 {
        let mut vm = labelled(tolerating(fleet.vm(&format!("group-{number}"))), "group");
        vm["spec"]["affinity"] = json!({"podAffinity": beside("group")});
        vms.push(vm);
    }
    assert_eq!(vms.len(), 20);
    cluster.apply(&json!({"apiVersion": "v1", "kind": "List", "items": vms}));
    let mut names: Vec<String> = vms
        .iter()
        .map(|vm| vm["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    fleet.all_run(&names, PATIENCE).await;

    let places: BTreeMap<_, _> = fleet
        .vms()
        .await
        .unwrap()
        .into_iter()
        .map(|vm| (vm.name, vm.node))
        .collect();
    let of = |prefix: &str| -> Vec<&str> {
        let found = places.iter().filter(|(name, _)| name.starts_with(prefix));
        found.map(|(_, node)| node.as_str()).collect()
    };
    assert_eq!(of("plain-"), ["node-0"; 4], "they do not tolerate the taint");
    assert_eq!(of("chosen-"), ["node-1"; 4]);
    assert_eq!(
        of("spread-").iter().filter(|node| **node == "node-0").count(),
        3,
        "{places:?}"
    );
    let mut apart = of("apart-");
    apart.sort_unstable();
    assert_eq!(apart, ["node-0", "node-1"]);
    let group = of("group-");
    assert!(group.iter().all(|node| *node == group[0]), "{group:?}");

    // Four cores are left, all on one node.
    let mut large = tolerating(fleet.vm("large"));
    large["spec"]["vm"]["cpu"]["cores"] = 5.into();
    cluster.apply(&large);
    eventually("it is said why the large one waits", PATIENCE, async || {
        let events = cluster.kubectl(&["get", "events", "--field-selector=reason=FailedScheduling"]);
        if events.contains("large") && events.contains("Insufficient cpu") {
            Ok(())
        } else {
            Err(events)
        }
    })
    .await;
    fleet.converged(&names).await.unwrap_err();
    // One core more on each node.
    cluster.kubectl(&["delete", "vmmvm", "plain-0", "chosen-0"]);
    names.retain(|name| name != "plain-0" && name != "chosen-0");
    names.push("large".into());
    fleet.all_run(&names, PATIENCE).await;
    fleet.end(PATIENCE).await;
}

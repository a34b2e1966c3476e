//! VMs go to other nodes while they run.

use std::time::Duration;

use serde_json::{Value, json};
use vmmd_kubernetes_tests::{
    eventually,
    fleet::Fleet,
    vms::{VMS, Vm},
};

const PATIENCE: Duration = Duration::from_secs(120);

/// The VMs by name, with how often each was started, in all runs.
async fn vms(fleet: &Fleet) -> Vec<Vm> {
    let mut vms = fleet.vms().await.unwrap();
    vms.sort_by(|one, other| one.name.cmp(&other.name));
    vms
}

/// Reasons of the events of a VM's migrations.
fn events(fleet: &Fleet, name: &str) -> String {
    let of = format!("--field-selector=involvedObject.kind=VirtualMachine,involvedObject.name={name}");
    let format = "-o=jsonpath={range .items[*]}{.reason}{'\\n'}{end}";
    fleet.cluster.kubectl(&["get", "events", &of, format])
}

async fn migration(fleet: &Fleet, name: &str) -> Value {
    let vm = fleet.cluster.api.get(&format!("{VMS}/{name}")).await.unwrap();
    vm["status"]["migration"].clone()
}

/// Console output of a VM's mock since its arrival in this `vmm`.
fn log(fleet: &Fleet, name: &str) -> String {
    let pod = ["get", "vmmvm", name, "-o=jsonpath={.status.run.pod}"];
    let pod = fleet.cluster.kubectl(&pod);
    fleet.cluster.kubectl(&["logs", &pod])
}

#[tokio::test]
async fn a_drain_moves_all_vms_and_holds_a_disruption_budget() {
    let fleet = Fleet::start(2, 2).await;
    let cluster = &fleet.cluster;
    cluster.kubectl(&["cordon", "node-0"]);
    let names: Vec<String> = (0..4).map(|number| format!("vm-{number}")).collect();
    for name in &names {
        let mut vm = fleet.vm(name);
        vm["spec"]["podMetadata"] = json!({"labels": {"app": "web"}});
        cluster.apply(&vm);
    }
    fleet.all_run(&names, PATIENCE).await;
    let before = vms(&fleet).await;
    assert!(before.iter().all(|vm| vm.node == "node-1"), "{before:?}");
    cluster.apply(&json!({
        "apiVersion": "policy/v1beta1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"minAvailable": 3, "selector": {"matchLabels": {"app": "web"}}},
    }));
    eventually("the budget is known", PATIENCE, async || {
        let allowed = ["get", "pdb", "web", "-o=jsonpath={.status.disruptionsAllowed}"];
        match cluster.kubectl(&allowed).as_str() {
            "1" => Ok(()),
            other => Err(other.to_owned()),
        }
    })
    .await;
    cluster.kubectl(&["uncordon", "node-0"]);
    let drained = cluster.run(&["drain", "node-1", "--ignore-daemonsets", "--timeout=180s"]);
    let said = String::from_utf8_lossy(&drained.stderr).into_owned();
    assert!(drained.status.success(), "{said}");
    assert!(
        said.contains("would violate the pod's disruption budget"),
        "{said}"
    );
    assert_eq!(fleet.nodes[1].daemon.vmm_processes(), []);
    fleet.all_run(&names, PATIENCE).await;
    let after = vms(&fleet).await;
    for (before, after) in before.iter().zip(&after) {
        assert_eq!((&*after.node, after.restarts), ("node-0", 0), "{after:?}");
        assert_eq!(after.epoch, before.epoch + 1, "{after:?}");
        assert_eq!(migration(&fleet, &after.name).await["phase"], "Succeeded");
        let events = events(&fleet, &after.name);
        for reason in ["MigrationPlanned", "Migrating", "Migrated"] {
            assert!(events.lines().any(|line| line == reason), "{reason}: {events}");
        }
        // It was not booted again.
        let printed = log(&fleet, &after.name);
        let boots = printed.matches("booted").count();
        assert!(boots == 1 && printed.contains("received machine"), "{printed}");
    }
    cluster.kubectl(&["uncordon", "node-1"]);
    fleet.end(PATIENCE).await;
}

#[tokio::test]
async fn a_vm_is_moved_by_annotation_to_and_fro() {
    let fleet = Fleet::start(2, 1).await;
    let cluster = &fleet.cluster;
    let mut vm = fleet.vm("web");
    vm["spec"]["vm"]["runPolicy"] = "manual".into();
    cluster.apply(&vm);
    cluster.kubectl(&["annotate", "vmmvm", "web", "vmmd.dev/start=1"]);
    fleet.all_run(&["web".into()], PATIENCE).await;
    for turn in 0..4 {
        let before = vms(&fleet).await;
        let annotation = format!("vmmd.dev/migrate=turn {turn}");
        cluster.kubectl(&["annotate", "--overwrite", "vmmvm", "web", &annotation]);
        let node = &before[0].node;
        eventually("it is on the other node", PATIENCE, async || {
            let now = vms(&fleet).await;
            if now[0].node == *node || now[0].phase != "Running" {
                return Err(format!("{now:?}"));
            }
            Ok(())
        })
        .await;
        fleet.all_run(&["web".into()], PATIENCE).await;
    }
    let after = vms(&fleet).await;
    assert_eq!((after[0].epoch, after[0].restarts), (5, 0));
    let described = cluster.kubectl(&["describe", "vmmvm", "web"]);
    assert!(
        described.contains("Migrated") && described.contains("Succeeded"),
        "{described}"
    );
    fleet.end(PATIENCE).await;
}

#[tokio::test]
async fn a_vm_that_can_not_be_moved_is_stopped_and_started_elsewhere() {
    let fleet = Fleet::start(2, 1).await;
    let cluster = &fleet.cluster;
    // One has a disk of its node. The other one's processor share fits nowhere else.
    let mut disk = fleet.vm("disk");
    disk["spec"]["vm"]["disks"] = json!([{"name": "scratch"}]);
    disk["spec"]["volumes"] = json!([{"name": "scratch", "emptyDisk": {"size": "1Mi"}}]);
    let mut bound = fleet.vm("bound");
    bound["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "node-1"});
    // vmmd moves no guest whose disk is a qcow2 image.
    let image = cluster.path("image.qcow2");
    let made = std::process::Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&image)
        .arg("1M")
        .status();
    assert!(made.unwrap().success());
    let mut refused = fleet.vm("refused");
    refused["spec"]["vm"]["disks"] = json!([{"name": "root", "path": image, "format": "qcow2"}]);
    cluster.kubectl(&["cordon", "node-0"]);
    for vm in [&disk, &bound, &refused] {
        cluster.apply(vm);
    }
    let names = ["bound", "disk", "refused"].map(str::to_owned);
    fleet.all_run(&names, PATIENCE).await;
    cluster.kubectl(&["uncordon", "node-0"]);
    cluster.kubectl(&["drain", "node-1", "--ignore-daemonsets", "--timeout=180s"]);
    for (name, reason) in [
        ("bound", "NoNodeFits"),
        ("disk", "DisksStay"),
        ("refused", "MigrationDisks"),
    ] {
        let last = migration(&fleet, name).await;
        assert_eq!(
            (&last["phase"], &last["reason"]),
            (&"Failed".into(), &reason.into()),
            "{last}"
        );
        assert!(events(&fleet, name).contains("NotMigrated"));
    }
    eventually("those that may be are elsewhere", PATIENCE, async || {
        let vms = vms(&fleet).await;
        let places: Vec<_> = vms.iter().map(|vm| (&*vm.name, &*vm.phase, &*vm.node)).collect();
        match places.as_slice() {
            [
                ("bound", "Scheduling", _),
                ("disk", "Running", "node-0"),
                ("refused", "Running", "node-0"),
            ] => Ok(()),
            _ => Err(format!("{places:?}")),
        }
    })
    .await;
    cluster.kubectl(&["uncordon", "node-1"]);
    fleet.all_run(&names, PATIENCE).await;
    fleet.end(PATIENCE).await;
}

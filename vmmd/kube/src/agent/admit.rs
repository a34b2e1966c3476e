//! The fence: whether a pod is the one that has the VM.
//!
//! vmmd verifies only the uid of a pod. The launcher gives all other words. Therefore the
//! VirtualMachine decides: it names the pod by number of the run, name and uid, and the hash of the
//! spec with which the run began. A pod cannot name the VM of another VirtualMachine: its uid is not
//! that of the other run.

use vmmd_api::v1;

use crate::{
    crd::{Role, VirtualMachine},
    launcher::{self, state::SPEC_CHANGED},
    run::Plan,
    spec::Invalid,
};

/// Reason of a pod whose VM another client has deleted from vmmd.
pub const VM_REMOVED: &str = "VmRemoved";

/// Whether a pod is the one that has the VM.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// It is: the plan of the run.
    Admit(Box<Plan>),
    /// The controller has not noted the pod yet.
    NotYet,
    /// The VM is to come to it from this node.
    Await(String),
    /// It is, and the VM may have left it for another pod. The launcher has the end from vmmd.
    Leaves,
    /// It is not, and never will be.
    Refuse {
        /// One CamelCase word.
        reason: &'static str,
        /// The same for people.
        message: String,
    },
}

/// Decides by the VirtualMachine that the launcher names; `None` when there is none.
pub fn admit(pod: &v1::Pod, machine: Option<&VirtualMachine>) -> Admission {
    let refuse = |reason, message: String| Admission::Refuse { reason, message };
    let Some(machine) = machine else {
        let message = format!(
            "there is no VirtualMachine {} in namespace {}",
            pod.vm, pod.namespace
        );
        return refuse("NoVirtualMachine", message);
    };
    let status = machine.status.clone().unwrap_or_default();
    let run = match status.role(pod.run, &pod.name, Some(&pod.uid)) {
        // vmmd decides which pod has the VM.
        Role::Run(_) if status.moving().is_some() => return Admission::Leaves,
        Role::Run(run) if run.from.is_some() => {
            let message = "the VM was moved to this node, and was removed from vmmd".to_owned();
            return refuse(VM_REMOVED, message);
        }
        Role::Run(run) => run,
        Role::NotYet => return Admission::NotYet,
        Role::Old => {
            let message = format!(
                "the pod is of run {}, and the VirtualMachine is in run {}",
                pod.run,
                status.run_epoch()
            );
            return refuse("OldEpoch", message);
        }
        Role::Other => {
            return refuse(
                "OtherPod",
                "the run of the VirtualMachine has another pod".to_owned(),
            );
        }
        Role::Target(migration) => return Admission::Await(migration.from.clone()),
    };
    let plan = match launcher::plan(machine) {
        Ok(plan) => plan,
        // The controller has begun the run with another spec.
        Err(Invalid(text)) => return refuse(SPEC_CHANGED, text),
    };
    if plan.digest() != run.digest {
        let message = "the VirtualMachine has another spec than at the beginning of the run".to_owned();
        return refuse(SPEC_CHANGED, message);
    }
    Admission::Admit(Box::new(plan))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::run::tests::machine;

    /// The VirtualMachine in run 3, whose pod is `p-3`.
    fn noted(change: impl FnOnce(&mut Value)) -> VirtualMachine {
        let spec = |value: &mut Value| {
            value["spec"]["vm"]["boot"] = json!({"fromDisk": {}});
            value["spec"]["vm"]["disks"] = json!([{"name": "root"}]);
            value["spec"]["volumes"] = json!([{"name": "root", "emptyDisk": {"size": "1Gi"}}]);
        };
        let digest = launcher::plan(&machine(spec)).unwrap().digest();
        machine(|value| {
            spec(value);
            value["status"] = json!({
                "epoch": 3,
                "run": {"pod": "web-3", "podUid": "p-3", "digest": digest, "epoch": 3},
            });
            change(value);
        })
    }

    fn pod(run: i64, name: &str, uid: &str) -> v1::Pod {
        v1::Pod {
            uid: uid.to_owned(),
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            vm: "web".to_owned(),
            run,
            ..v1::Pod::default()
        }
    }

    #[test]
    fn only_the_noted_pod_is_admitted() {
        type Change = fn(&mut Value);
        let table: [(i64, &str, &str, Change, &str); 11] = [
            (3, "web-3", "p-3", |_| {}, "Admit"),
            (
                3,
                "web-3",
                "p-3",
                |it| it["status"]["run"]["podUid"] = Value::Null,
                "NotYet",
            ),
            (3, "web-3", "p-3", |it| it["status"] = Value::Null, "NotYet"),
            (4, "web-4", "p-4", |_| {}, "NotYet"),
            (2, "web-2", "p-2", |_| {}, "OldEpoch"),
            // With the number of another run.
            (2, "web-3", "p-3", |_| {}, "OldEpoch"),
            (3, "web-3", "p-other", |_| {}, "OtherPod"),
            (3, "other", "p-3", |_| {}, "OtherPod"),
            (
                3,
                "web-3",
                "p-3",
                |it| it["spec"]["vm"]["cpu"]["cores"] = 3.into(),
                SPEC_CHANGED,
            ),
            (
                3,
                "web-3",
                "p-3",
                |it| it["spec"]["volumes"][0]["emptyDisk"]["size"] = "2Gi".into(),
                SPEC_CHANGED,
            ),
            (
                3,
                "web-3",
                "p-3",
                |it| it["spec"]["vm"]["disks"][0]["path"] = "/dev/sda".into(),
                SPEC_CHANGED,
            ),
        ];
        for (index, (run, name, uid, change, wanted)) in table.into_iter().enumerate() {
            let found = match admit(&pod(run, name, uid), Some(&noted(change))) {
                Admission::Admit(_) => "Admit",
                Admission::NotYet => "NotYet",
                Admission::Await(_) | Admission::Leaves => "Moves",
                Admission::Refuse { reason, .. } => reason,
            };
            assert_eq!(found, wanted, "{index}");
        }
        let gone = admit(&pod(3, "web-3", "p-3"), None);
        assert!(matches!(
            gone,
            Admission::Refuse {
                reason: "NoVirtualMachine",
                ..
            }
        ));
    }

    #[test]
    fn moving_vm_is_created_for_neither_of_its_pods() {
        // The phase of the migration from run 3 to run 4, and the answers for both pods.
        let table = [
            ("Placing", "Admit", "Await"),
            ("Moving", "Leaves", "Await"),
            ("Failed", "Admit", "OldEpoch"),
            ("Succeeded", "OldEpoch", VM_REMOVED),
        ];
        for (phase, source, target) in table {
            let machine = noted(|it| {
                let status = &mut it["status"];
                status["epoch"] = 4.into();
                status["migration"] = json!({
                    "phase": phase, "epoch": 4, "pod": "web-4", "podUid": "p-4", "sourcePod": "web-3",
                    "sourceUid": "p-3", "from": "n1", "evicted": false, "timeoutSeconds": 600,
                    "force": false, "startTime": "2026-01-02T03:04:05Z",
                });
                if phase == "Succeeded" {
                    status["run"] =
                        json!({"pod": "web-4", "podUid": "p-4", "digest": "x", "epoch": 4, "from": "n1"});
                }
            });
            let of = |run: i64| match admit(
                &pod(run, &format!("web-{run}"), &format!("p-{run}")),
                Some(&machine),
            ) {
                Admission::Admit(_) => "Admit",
                Admission::NotYet => "NotYet",
                Admission::Await(_) => "Await",
                Admission::Leaves => "Leaves",
                Admission::Refuse { reason, .. } => reason,
            };
            assert_eq!((of(3), of(4)), (source, target), "{phase}");
        }
    }

    #[test]
    fn change_that_has_its_effect_elsewhere_refuses_nothing() {
        let machine = noted(|value| {
            value["metadata"]["generation"] = 9.into();
            value["spec"]["nodeSelector"] = json!({"rack": "7"});
        });
        let found = admit(&pod(3, "web-3", "p-3"), Some(&machine));
        assert!(matches!(found, Admission::Admit(_)), "{found:?}");
    }
}

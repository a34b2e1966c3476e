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

/// Whether a pod is the one that has the VM.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// It is: the plan of the run.
    Admit(Box<Plan>),
    /// The controller has not noted the pod yet.
    NotYet,
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
        Role::Target(_) => {
            let message = "a VM in a launcher pod cannot be moved".to_owned();
            return refuse("MigrationNotSupported", message);
        }
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
    fn change_that_has_its_effect_elsewhere_refuses_nothing() {
        let machine = noted(|value| {
            value["metadata"]["generation"] = 9.into();
            value["spec"]["nodeSelector"] = json!({"rack": "7"});
        });
        let found = admit(&pod(3, "web-3", "p-3"), Some(&machine));
        assert!(matches!(found, Admission::Admit(_)), "{found:?}");
    }
}

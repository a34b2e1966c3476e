//! Pods of runs outside of all reconciliations.
//!
//! - Launcher pods that were deleted, and of which nothing runs any more: their finalizer is removed.
//!   A pod that reports the success of a migration stays until the status has the result.
//! - Pods of an earlier run that an outdated controller has created late: no agent runs them, and
//!   no other component deletes them.

use std::{collections::BTreeMap, pin::pin, time::Duration};

use futures::StreamExt as _;
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::OwnerReference};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
    runtime::{
        WatchStreamExt as _,
        reflector::{ObjectRef, Store},
        watcher,
    },
};
use serde_json::json;
use tokio::time::MissedTickBehavior;

use crate::{
    backoff::{Watches, watching},
    clients::Clients,
    crd::{Role, VirtualMachine},
    launcher::state,
    names,
};

/// How often it is tried again to change pods.
const RETRY: Duration = Duration::from_secs(5);

/// Looks after them. `machines` are the VirtualMachines as the controller knows them. Never returns.
pub async fn run(clients: Clients, machines: Store<VirtualMachine>) {
    let pods = Api::<Pod>::all(clients.watches);
    let config = watching().labels(names::MACHINE_UID);
    let mut pods = pin!(watcher(pods, config).backoff(Watches::new()).touched_objects());
    // Pods for which nothing could be done yet, by uid.
    let mut failed: BTreeMap<Option<String>, Pod> = BTreeMap::new();
    let mut retry = tokio::time::interval(RETRY);
    retry.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let due = tokio::select! {
            event = pods.next() => match event {
                Some(Ok(pod)) => vec![pod],
                Some(Err(error)) => {
                    tracing::debug!("pods: {error}");
                    continue;
                }
                None => return,
            },
            _ = retry.tick(), if !failed.is_empty() => failed.values().cloned().collect(),
        };
        for pod in due {
            failed.remove(&pod.uid());
            match look_after(&clients.calls, &machines, &pod).await {
                Ok(true) => {}
                Ok(false) => drop(failed.insert(pod.uid(), pod)),
                Err(error) => {
                    tracing::warn!(pod = pod.name_any(), "{error}; tried again");
                    failed.insert(pod.uid(), pod);
                }
            }
        }
    }
}

/// Whether nothing is left to be done.
async fn look_after(client: &Client, machines: &Store<VirtualMachine>, pod: &Pod) -> kube::Result<bool> {
    if is_orphan(pod) {
        if is_awaited(client, pod).await? {
            return Ok(false);
        }
        release(client, pod).await?;
    } else if pod.metadata.deletion_timestamp.is_none() {
        delete_stale(client, machines, pod).await?;
    }
    Ok(true)
}

/// Whether the status of the VirtualMachine lacks the success of a migration that the pod reports.
async fn is_awaited(client: &Client, pod: &Pod) -> kube::Result<bool> {
    let Some(owner) = owner(pod).filter(|_| state::has_migrated(pod)) else {
        return Ok(false);
    };
    let machines = Api::<VirtualMachine>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let status = machines
        .get_opt(&owner.name)
        .await?
        .and_then(|machine| machine.status);
    let moving = status.as_ref().and_then(|status| status.moving());
    Ok(moving.is_some_and(|migration| Some(&migration.source_uid) == pod.metadata.uid.as_ref()))
}

/// The API server is asked about a VirtualMachine only when the pod is not the one that the controller knows of. It does not wait until the
/// controller knows all: the store wakes one waiter only, and the controller itself is one.
async fn delete_stale(client: &Client, machines: &Store<VirtualMachine>, pod: &Pod) -> kube::Result<()> {
    let Some(owner) = owner(pod) else { return Ok(()) };
    let namespace = pod.namespace().unwrap_or_default();
    let known = machines.get(&ObjectRef::new(&owner.name).within(&namespace));
    if known.is_some() && !is_stale(pod, owner, known.as_deref()) {
        return Ok(());
    }
    let machines = Api::<VirtualMachine>::namespaced(client.clone(), &namespace);
    let machine = machines.get_opt(&owner.name).await?;
    if !is_stale(pod, owner, machine.as_ref()) {
        return Ok(());
    }
    let parameters = DeleteParams {
        preconditions: Some(Preconditions {
            uid: pod.uid(),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    let pods = Api::<Pod>::namespaced(client.clone(), &namespace);
    match pods.delete(&pod.name_any(), &parameters).await {
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        deleted => deleted.map(drop),
    }
}

fn owner(pod: &Pod) -> Option<&OwnerReference> {
    let kind = |owner: &&OwnerReference| owner.kind == "VirtualMachine" && owner.controller == Some(true);
    pod.owner_references().iter().find(kind)
}

/// Whether a pod belongs to a run that is over. A missing VirtualMachine proves nothing: an API
/// server reports all as missing for a moment after its start, and the garbage collector deletes
/// the pods of a removed one.
fn is_stale(pod: &Pod, owner: &OwnerReference, machine: Option<&VirtualMachine>) -> bool {
    let Some(machine) = machine else { return false };
    if machine.metadata.uid.as_ref() != Some(&owner.uid) {
        return true;
    }
    let Some(status) = &machine.status else {
        return false;
    };
    let epoch: Option<i64> = pod.labels().get(names::EPOCH).and_then(|text| text.parse().ok());
    epoch.is_some_and(|epoch| {
        let role = status.role(epoch, &pod.name_any(), pod.metadata.uid.as_deref());
        matches!(role, Role::Old | Role::Other)
    })
}

/// Whether the finalizer of a pod has to be removed here.
fn is_orphan(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
        && pod.finalizers().iter().any(|name| name == names::VM_GONE)
        && state::is_gone(pod)
}

/// Over the version that was seen: when the pod has changed since, the watch says so.
async fn release(client: &Client, pod: &Pod) -> kube::Result<()> {
    let pods = Api::<Pod>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let finalizers: Vec<_> = pod
        .finalizers()
        .iter()
        .filter(|name| *name != names::VM_GONE)
        .collect();
    let patch = json!({"metadata": {
        "uid": pod.uid(),
        "resourceVersion": pod.resource_version(),
        "finalizers": finalizers,
    }});
    match pods
        .patch(&pod.name_any(), &PatchParams::default(), &Patch::Merge(patch))
        .await
    {
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        patched => patched.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::machine;

    #[test]
    fn only_pods_that_can_never_be_bound_are_released() {
        let table = [
            (true, "", true, true),
            (false, "", true, false),
            (true, "n1", true, false),
            (true, "", false, false),
        ];
        for (deleted, node, finalizer, orphan) in table {
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {
                    "deletionTimestamp": deleted.then_some("2026-01-02T03:04:05Z"),
                    "finalizers": if finalizer { vec![names::VM_GONE] } else { vec![] },
                },
                "spec": {"containers": [], "nodeName": node},
            }))
            .unwrap();
            assert_eq!(is_orphan(&pod), orphan, "{deleted} {node:?} {finalizer}");
        }
    }

    #[test]
    fn launcher_pod_is_released_when_its_container_has_ended() {
        let running = json!({"running": {}});
        let ended = json!({"terminated": {"exitCode": 137}});
        let table = [
            (true, &ended, true),
            (true, &running, false),
            (false, &ended, false),
        ];
        for (deleted, state, orphan) in table {
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {
                    "deletionTimestamp": deleted.then_some("2026-01-02T03:04:05Z"),
                    "deletionGracePeriodSeconds": 0,
                    "finalizers": [names::VM_GONE],
                },
                "spec": {"containers": [{"name": "vm"}], "nodeName": "n1", "restartPolicy": "Never"},
                "status": {"containerStatuses": [{
                    "name": "vm", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state,
                }]},
            }))
            .unwrap();
            assert_eq!(is_orphan(&pod), orphan, "{deleted} {state}");
        }
    }

    #[test]
    fn only_pods_of_runs_that_are_over_are_stale() {
        let at = |epoch: i64, uid: Option<&str>| {
            machine(|value| value["status"] = json!({"epoch": epoch, "run": {"pod": "web-3", "podUid": uid}}))
        };
        let table = [
            (None, false),
            (
                Some(machine(|value| value["metadata"]["uid"] = "u-2".into())),
                true,
            ),
            (Some(machine(|_| {})), false),
            (Some(at(2, Some("p-2"))), false),
            (Some(at(3, None)), false),
            (Some(at(3, Some("p-3"))), false),
            (Some(at(3, Some("p-other"))), true),
            (Some(at(4, None)), true),
        ];
        let pod: Pod = serde_json::from_value(json!({"metadata": {
            "name": "web-3",
            "uid": "p-3",
            "labels": {names::EPOCH: "3"},
            "ownerReferences": [
                {"apiVersion": "vmmd.dev/v1alpha1", "kind": "VirtualMachine", "name": "web", "uid": "u-1", "controller": true},
            ],
        }}))
        .unwrap();
        for (index, (machine, stale)) in table.into_iter().enumerate() {
            assert_eq!(
                is_stale(&pod, owner(&pod).unwrap(), machine.as_ref()),
                stale,
                "{index}"
            );
        }
    }
}

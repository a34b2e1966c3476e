//! Placeholder pods that were deleted before they were bound: no node has anything of them, and no agent will ever take their finalizer away.

use std::pin::pin;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
    runtime::{WatchStreamExt as _, watcher},
};
use serde_json::json;

use crate::{
    arguments::Clients,
    backoff::{Watches, watching},
    names,
};

/// Takes the finalizer from each such pod. Never returns.
pub async fn run(clients: Clients) {
    let pods = Api::<Pod>::all(clients.watches);
    let config = watching().labels(names::MACHINE_UID);
    let mut pods = pin!(watcher(pods, config).backoff(Watches::new()).touched_objects());
    while let Some(event) = pods.next().await {
        match event {
            Ok(pod) if is_orphan(&pod) => release(&clients.calls, &pod).await,
            Ok(_) => {}
            Err(error) => tracing::debug!("pods: {error}"),
        }
    }
}

/// The API server binds no pod that is being deleted.
fn is_orphan(pod: &Pod) -> bool {
    let bound = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    pod.metadata.deletion_timestamp.is_some()
        && bound.unwrap_or_default().is_empty()
        && pod.finalizers().iter().any(|name| name == names::VM_GONE)
}

/// Over the version that was seen: when the pod has changed since, the watch says so.
async fn release(client: &Client, pod: &Pod) {
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
    let result = pods
        .patch(&pod.name_any(), &PatchParams::default(), &Patch::Merge(patch))
        .await;
    if let Err(error) = result {
        tracing::warn!(pod = pod.name_any(), "can't release: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}

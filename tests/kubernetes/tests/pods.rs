//! VMs as pods of machines with a real kubelet.

use std::time::Duration;

use serde_json::json;
use vmmd_kubernetes_tests::{
    cluster::Cluster,
    eventually,
    machine::{self, BUSYBOX, Machine},
};

#[tokio::test]
async fn an_ordinary_pod_runs_on_a_machine() {
    let _network = machine::enter_network();
    let cluster = Cluster::start_in(machine::NETWORK).await;
    let _machine = Machine::start(&cluster, 1).await;
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ordinary"},
        "spec": {
            "automountServiceAccountToken": false,
            "containers": [{"name": "one", "image": BUSYBOX, "imagePullPolicy": "Never"}],
            "terminationGracePeriodSeconds": 0,
        },
    }));
    eventually("the pod runs", Duration::from_secs(60), async || {
        let pod = cluster
            .api
            .get("/api/v1/namespaces/default/pods/ordinary")
            .await?;
        match pod["status"]["phase"].as_str() {
            Some("Running") => Ok(()),
            _ => Err(pod["status"].to_string()),
        }
    })
    .await;
    cluster.kubectl(&["delete", "pod", "ordinary"]);
}

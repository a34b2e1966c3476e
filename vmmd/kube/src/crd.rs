//! The custom resource: a virtual machine that Kubernetes places.
#![allow(clippy::duplicated_attributes, reason = "columns of one type are several")]

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    schema,
    sources::{CloudInitFrom, SecretName, Sources, Volume},
};

/// What a virtual machine is to be, and where it may run.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "vmmd.dev",
    version = "v1alpha1",
    kind = "VirtualMachine",
    namespaced,
    status = "VirtualMachineStatus",
    shortname = "vmmvm",
    derive = "PartialEq",
    doc = "A virtual machine that a vmmd of the cluster runs.",
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.node"),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.addresses[0]"),
    printcolumn(
        name = "Restarts",
        type_ = "integer",
        json_path = ".status.restarts",
        priority = 1
    ),
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".status.epoch", priority = 1),
    printcolumn(name = "Pod", type_ = "string", json_path = ".status.run.pod", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSpec {
    /// The virtual machine as in the `spec` of vmmd's manifests. Its run policy also decides whether a run that has ended, on whatever
    /// node, is followed by another one.
    #[schemars(schema_with = "schema::vm_spec")]
    pub vm: Map<String, Value>,
    /// Disks and shares of the VM whose content is not named in `vm`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Volume>,
    /// Parts of the guest's cloud-init that are in Secrets and ConfigMaps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init_from: Option<CloudInitFrom>,
    /// Secrets of type kubernetes.io/dockerconfigjson with passwords for the registries of container disks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<SecretName>,
    /// How long the guest may take to power off, in seconds; 60 when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub termination_grace_period_seconds: Option<i64>,
    /// Labels and annotations of the placeholder pods, for Services and PodDisruptionBudgets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_metadata: Option<PodMetadata>,
    /// As in a pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// As in a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub affinity: Option<Value>,
    /// As in a pod. That of the taint of vmmd's nodes is there in any case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::any_objects")]
    pub tolerations: Vec<Value>,
    /// As in a pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::any_objects")]
    pub topology_spread_constraints: Vec<Value>,
    /// As in a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// As in a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<String>,
}

impl VirtualMachineSpec {
    /// What the agent fills in.
    pub fn sources(&self) -> Sources {
        Sources {
            volumes: self.volumes.clone(),
            cloud_init_from: self.cloud_init_from.clone(),
            image_pull_secrets: self.image_pull_secrets.clone(),
        }
    }
}

/// Labels and annotations of placeholder pods.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct PodMetadata {
    /// Labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// What is true of a virtual machine now.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VirtualMachineStatus {
    /// Invalid, Pending, Scheduling, Starting, Running, Restarting, Stopping, Stopped, Failed, or Unknown when its node does not report.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub phase: String,
    /// The generation of the spec that this is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Number of the last run. It grows before each new placeholder pod; an agent runs no VM of another number.
    pub epoch: i64,
    /// The last run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<Run>,
    /// Runs in a row that failed.
    pub failures: u32,
    /// When the next run begins after a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_run_time: Option<String>,
    /// The value of the annotation vmmd.dev/start when the last run began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<String>,
    /// The node that the last run is on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Addresses of the guest.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Starts by the run policy on the same node in this run.
    pub restarts: i32,
    /// Valid, Scheduled, Ready.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// One run: a placeholder pod, and the VM on the node that the scheduler has given it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Run {
    /// Name of the placeholder pod.
    pub pod: String,
    /// Its uid. An agent runs the VM of this pod only; unset until the pod is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// SHA-256 of the VM that the pod names.
    pub digest: String,
    /// How it ended: Succeeded, Failed, StoppedByRequest, or Lost when the pod was deleted before the VM had ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<String>,
}

/// One aspect of the state.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    /// One CamelCase word.
    #[serde(rename = "type")]
    pub kind: String,
    /// True, False or Unknown.
    pub status: String,
    /// Why, one CamelCase word.
    pub reason: String,
    /// The same for people.
    pub message: String,
    /// When `status` last changed.
    pub last_transition_time: String,
}

#[cfg(test)]
mod tests {
    use kube::CustomResourceExt as _;

    use super::*;

    const MANIFEST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/manifests/crd.yaml");

    /// `vmmd-kube crd > vmmd/kube/manifests/crd.yaml` makes it current.
    #[test]
    fn the_manifest_is_what_the_code_says() {
        let written = std::fs::read_to_string(MANIFEST).unwrap();
        assert!(
            written == crate::crd_yaml().unwrap(),
            "vmmd/kube/manifests/crd.yaml is old"
        );
    }

    #[test]
    fn the_schema_is_structural() {
        fn check(path: &str, schema: &Value) {
            let open = schema["x-kubernetes-preserve-unknown-fields"] == true;
            let either = schema["x-kubernetes-int-or-string"] == true;
            assert!(schema["type"].is_string() || open || either, "{path} has no type");
            for banned in ["$ref", "oneOf", "anyOf", "allOf"] {
                assert!(schema[banned].is_null(), "{path} has {banned}");
            }
            for (name, field) in schema["properties"].as_object().into_iter().flatten() {
                check(&format!("{path}.{name}"), field);
            }
            for inner in ["items", "additionalProperties"] {
                if schema[inner].is_object() {
                    check(&format!("{path}[]"), &schema[inner]);
                }
            }
        }
        let crd = serde_json::to_value(VirtualMachine::crd()).unwrap();
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        check("", schema);
        let vm = &schema["properties"]["spec"]["properties"]["vm"]["properties"];
        assert_eq!(vm["cpu"]["properties"]["cores"]["type"], "integer");
        let size = &vm["memory"]["properties"]["sizeBytes"];
        assert_eq!(size["x-kubernetes-int-or-string"], true);
        let policies = vm["runPolicy"]["enum"].as_array().unwrap();
        assert!(policies.contains(&"manual".into()) && policies.contains(&"RUN_POLICY_MANUAL".into()));
    }
}

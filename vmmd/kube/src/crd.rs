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

/// Desired state of a virtual machine, and where it may run.
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
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".status.epoch", priority = 1),
    printcolumn(name = "Pod", type_ = "string", json_path = ".status.run.pod", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSpec {
    /// The virtual machine as in the `spec` of vmmd's manifests. Its run policy also decides
    /// whether another run follows a run that has ended, on any node.
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
    /// How the VM is moved to another node while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationPolicy>,
    /// How long the guest may take to power off, in seconds; 60 when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub termination_grace_period_seconds: Option<i64>,
    /// Labels and annotations of the launcher pods, for Services and PodDisruptionBudgets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_metadata: Option<PodMetadata>,
    /// As in a pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// As in a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub affinity: Option<Value>,
    /// As in a pod.
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
    /// Whether the VM is ready for traffic, as in a pod; when not given, whether the VM runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub readiness_probe: Option<Value>,
    /// The run ends when this probe fails, as in a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub liveness_probe: Option<Value>,
    /// The other probes begin after this one has succeeded, as in a pod; when not given, after the VM runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub startup_probe: Option<Value>,
}

impl VirtualMachineSpec {
    /// Parts of the VM that the agent fills in.
    pub fn sources(&self) -> Sources {
        Sources {
            volumes: self.volumes.clone(),
            cloud_init_from: self.cloud_init_from.clone(),
            image_pull_secrets: self.image_pull_secrets.clone(),
        }
    }
}

/// How a VM is moved.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct MigrationPolicy {
    /// Effect of `kubectl cordon` and `kubectl drain` of the node: Migrate, the default, moves the VM
    /// when that is possible, and evictions of the pod are refused meanwhile. Stop: an eviction ends
    /// the run.
    pub eviction: Eviction,
    /// How long a migration may take, in seconds; 600 when not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86400))]
    pub timeout_seconds: Option<i64>,
    /// A guest that changes its memory too fast is slowed, instead of staying where it is.
    pub force: bool,
}

/// Effect of a cordoned node on a running VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum Eviction {
    #[default]
    Migrate,
    Stop,
}

/// Labels and annotations of launcher pods.
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

/// Present state of a virtual machine.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VirtualMachineStatus {
    /// Invalid, Pending, Scheduling, Starting, Running, Migrating, Stopping, Stopped, Failed, or Unknown when its node does not report.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub phase: String,
    /// The generation of the spec that this is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The largest number that a run has had. It grows before each new launcher pod.
    pub epoch: i64,
    /// The last run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<Run>,
    /// The last migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<Migration>,
    /// Runs in a row that failed.
    pub failures: u32,
    /// When the next run begins after a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_run_time: Option<String>,
    /// The value of the annotation vmmd.dev/start when the last run began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<String>,
    /// The value of the annotation vmmd.dev/migrate that was acted upon last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migrate: Option<String>,
    /// The node that the last run is on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Addresses of the guest.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Valid, Scheduled, Ready.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// One run: a launcher pod, and the VM on the node that the scheduler has given it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Run {
    /// Name of the launcher pod.
    pub pod: String,
    /// Its uid. An agent runs the VM of this pod only; unset until the pod is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// SHA-256 of the VM that the pod names.
    pub digest: String,
    /// How it ended: Succeeded, Failed, StoppedByRequest, or Lost when the pod was deleted before the VM had ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<String>,
    /// Its number, when a larger one has been given away since, to a migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
    /// The node that the VM was moved from. No VM is created for such a run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

/// A VM's way from the node of its run to another one. When it succeeds, the run is that of the second launcher pod.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Migration {
    /// Placing until the launcher of the second pod runs; Moving from then on until the pods report the
    /// result; Succeeded, or Failed.
    pub phase: MigrationPhase,
    /// Number of the run that the VM gets.
    pub epoch: i64,
    /// Name of the second launcher pod.
    pub pod: String,
    /// Its uid; unset until the pod is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// Name of the launcher pod that the VM leaves.
    pub source_pod: String,
    /// Its uid.
    pub source_uid: String,
    /// The node of the VM was cordoned.
    pub evicted: bool,
    /// The node that the VM leaves.
    pub from: String,
    /// The node that it is moved to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Where the vmmd of that node is reached, as HOST:PORT.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// How long it may take, in seconds.
    pub timeout_seconds: i64,
    /// The guest may be slowed.
    pub force: bool,
    /// When it began.
    pub start_time: String,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_time: Option<String>,
    /// Why it failed, one CamelCase word.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The same for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// How far a migration is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum MigrationPhase {
    #[default]
    Placing,
    Moving,
    Succeeded,
    Failed,
}

impl Migration {
    /// Whether the second launcher pod may get the VM yet.
    pub fn is_under_way(&self) -> bool {
        matches!(self.phase, MigrationPhase::Placing | MigrationPhase::Moving)
    }
}

/// Role of a launcher pod for a VirtualMachine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Role<'a> {
    /// That of its run.
    Run(&'a Run),
    /// The pod that its VM is to be moved to.
    Target(&'a Migration),
    /// The pod is not noted yet, or the known VirtualMachine is older than the pod.
    NotYet,
    /// Another pod has been noted for that number.
    Other,
    /// The pod of a run, or of a migration, that is over.
    Old,
}

impl VirtualMachineStatus {
    /// Number of the last run.
    pub fn run_epoch(&self) -> i64 {
        self.run.as_ref().and_then(|run| run.epoch).unwrap_or(self.epoch)
    }

    /// The migration that is under way.
    pub fn under_way(&self) -> Option<&Migration> {
        self.migration
            .as_ref()
            .filter(|migration| migration.is_under_way())
    }

    /// The migration whose result only the pods can report.
    pub fn moving(&self) -> Option<&Migration> {
        self.migration
            .as_ref()
            .filter(|migration| migration.phase == MigrationPhase::Moving)
    }

    /// Role of the pod with this number, name and uid.
    pub fn role(&self, epoch: i64, name: &str, uid: Option<&str>) -> Role<'_> {
        let run = self.run.as_ref().filter(|_| self.run_epoch() == epoch);
        let target = self.under_way().filter(|migration| migration.epoch == epoch);
        let (pod, noted, role) = match (run, target) {
            (Some(run), _) => (&run.pod, &run.pod_uid, Role::Run(run)),
            (None, Some(migration)) => (&migration.pod, &migration.pod_uid, Role::Target(migration)),
            (None, None) if epoch > self.epoch => return Role::NotYet,
            (None, None) if epoch == self.epoch && self.run.is_none() => return Role::NotYet,
            (None, None) => return Role::Old,
        };
        match noted {
            None => Role::NotYet,
            Some(noted) if Some(noted.as_str()) == uid && pod == name => role,
            Some(_) => Role::Other,
        }
    }
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

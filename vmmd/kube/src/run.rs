//! The run of a VirtualMachine as the controller plans it: the VM, and the parts of its pod that
//! follow from the fields of the VirtualMachine beside the VM.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Pod, PodSpec, Toleration},
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{ObjectMeta, OwnerReference},
    },
};
use kube::{Resource as _, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use vmmd_api::v1;

use crate::{
    crd::VirtualMachine,
    names,
    sources::{self, Sources},
    spec::{Invalid, Requests},
};

/// How pods of runs are made.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Memory that is requested beyond what vmmd sets aside for a VM, in bytes.
    pub overhead: u64,
    /// Image of the launcher.
    pub launcher_image: String,
    /// Port at which the vmmds of other nodes are reached.
    pub migration_port: u16,
}

/// A VirtualMachine's run before it has begun: the VM of vmmd, and the text that identifies it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The VM, with open places for the sources.
    pub vm: v1::Vm,
    /// `spec.vm` as JSON. The run is bound to it.
    pub manifest: String,
    /// Sources that the agent fills in.
    pub sources: Sources,
}

impl Plan {
    /// SHA-256 of the VM and the sources.
    pub fn digest(&self) -> String {
        if self.sources.is_empty() {
            return names::digest(self.manifest.as_bytes());
        }
        let sources = serde_json::to_string(&self.sources).unwrap_or_default();
        // No JSON has a NUL.
        names::digest(format!("{}\0{sources}", self.manifest).as_bytes())
    }
}

/// The VM of a VirtualMachine with this manifest, with open places for the sources.
///
/// # Errors
///
/// Returns all errors of the VM and its sources.
pub fn vm(
    machine: &VirtualMachine,
    manifest: &Map<String, Value>,
    sources: &Sources,
) -> Result<v1::Vm, Invalid> {
    let namespace = machine.namespace().unwrap_or_default();
    let uid = machine.uid().unwrap_or_default();
    let name = names::vm_name(&namespace, &machine.name_any(), &uid);
    let mut vm = sources::vm(&name, manifest, sources)?;
    if let Some(seed) = vm.spec.as_mut().and_then(|spec| spec.cloud_init.as_mut())
        && seed.hostname.is_empty()
    {
        seed.hostname = machine.name_any();
    }
    Ok(vm)
}

/// The pod of the run with this number, without containers and volumes.
///
/// # Errors
///
/// Returns the scheduling fields that are no part of a pod.
pub fn base(machine: &VirtualMachine, epoch: i64) -> Result<Pod, Invalid> {
    let spec = &machine.spec;
    let given = spec.pod_metadata.clone().unwrap_or_default();
    let mut labels = given.labels;
    labels.insert(names::MACHINE_UID.to_owned(), machine.uid().unwrap_or_default());
    labels.insert(names::EPOCH.to_owned(), epoch.to_string());
    let metadata = ObjectMeta {
        name: Some(names::pod_name(&machine.name_any(), epoch)),
        namespace: machine.namespace(),
        labels: Some(labels),
        annotations: Some(given.annotations).filter(|all| !all.is_empty()),
        owner_references: Some(vec![owner(machine)]),
        finalizers: Some(vec![names::VM_GONE.to_owned()]),
        ..ObjectMeta::default()
    };
    let given = spec.tolerations.iter().enumerate();
    let given = given.map(|(index, item)| part(&format!("tolerations[{index}]"), item));
    let mut tolerations: Vec<Toleration> = given.collect::<Result<_, _>>()?;
    // A VM of a node that does not report starts nowhere else, so nothing is gained by ending it when the node reports again.
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        if !tolerations.iter().any(|one| one.key.as_deref() == Some(key)) {
            tolerations.push(Toleration {
                key: Some(key.to_owned()),
                operator: Some("Exists".to_owned()),
                effect: Some("NoExecute".to_owned()),
                ..Toleration::default()
            });
        }
    }
    let spread = spec.topology_spread_constraints.iter().enumerate();
    let spread = spread.map(|(index, item)| part(&format!("topologySpreadConstraints[{index}]"), item));
    let pod_spec = PodSpec {
        affinity: spec
            .affinity
            .as_ref()
            .map(|affinity| part("affinity", affinity))
            .transpose()?,
        node_selector: Some(spec.node_selector.clone()).filter(|selector| !selector.is_empty()),
        tolerations: Some(tolerations),
        topology_spread_constraints: Some(spread.collect::<Result<_, _>>()?),
        priority_class_name: spec.priority_class_name.clone(),
        scheduler_name: spec.scheduler_name.clone(),
        termination_grace_period_seconds: Some(grace(machine)),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        ..PodSpec::default()
    };
    Ok(Pod {
        metadata,
        spec: Some(pod_spec),
        status: None,
    })
}

/// Time for the guest to power off, in seconds.
pub fn grace(machine: &VirtualMachine) -> i64 {
    machine.spec.termination_grace_period_seconds.unwrap_or(60)
}

/// Resources of a node as requests of a container, and the limits that the API server requires.
pub fn resources(wanted: &Requests) -> (BTreeMap<String, Quantity>, BTreeMap<String, Quantity>) {
    let bytes = |bytes: u64| Quantity(bytes.to_string());
    let mut requests = BTreeMap::from([
        ("cpu".to_owned(), Quantity(format!("{}m", wanted.cpu_millis))),
        ("memory".to_owned(), bytes(wanted.memory_bytes)),
    ]);
    let mut limits = BTreeMap::new();
    for (name, size) in [
        ("hugepages-2Mi", wanted.huge_pages_2m_bytes),
        ("hugepages-1Gi", wanted.huge_pages_1g_bytes),
    ] {
        if size != 0 {
            requests.insert(name.to_owned(), bytes(size));
            limits.insert(name.to_owned(), bytes(size));
        }
    }
    (requests, limits)
}

/// Whether a pod is that of this VirtualMachine's run.
pub fn belongs(pod: &Pod, machine: &VirtualMachine, epoch: i64) -> bool {
    let owned = pod
        .owner_references()
        .iter()
        .any(|owner| owner.controller == Some(true) && Some(&owner.uid) == machine.metadata.uid.as_ref());
    owned && pod.labels().get(names::EPOCH) == Some(&epoch.to_string())
}

/// The reference of an object that goes with a VirtualMachine.
pub fn owner(machine: &VirtualMachine) -> OwnerReference {
    OwnerReference {
        api_version: VirtualMachine::api_version(&()).into_owned(),
        kind: VirtualMachine::kind(&()).into_owned(),
        name: machine.name_any(),
        uid: machine.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// A field of the VirtualMachine as a part of a pod.
///
/// # Errors
///
/// Returns the field with the error.
pub fn part<T: DeserializeOwned>(field: &str, value: &Value) -> Result<T, Invalid> {
    serde_json::from_value(value.clone()).map_err(|error| Invalid(format!("spec.{field}: {error}")))
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;

    /// A VirtualMachine as the API server would give it.
    pub fn machine(change: impl FnOnce(&mut Value)) -> VirtualMachine {
        let mut value = json!({
            "apiVersion": "vmmd.dev/v1alpha1",
            "kind": "VirtualMachine",
            "metadata": {"name": "web", "namespace": "shop", "uid": "u-1", "generation": 1, "resourceVersion": "7"},
            "spec": {"vm": {
                "cpu": {"cores": 2},
                "memory": {"sizeBytes": "256Mi"},
                "boot": {"fromDisk": {}},
                "disks": [{"name": "root"}],
            }, "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "web"}}]},
        });
        change(&mut value);
        serde_json::from_value(value).unwrap()
    }

    /// Settings of tests.
    pub fn settings() -> Settings {
        Settings {
            overhead: 16 << 20,
            launcher_image: "vmmd-pod:test".to_owned(),
            migration_port: 7443,
        }
    }
}

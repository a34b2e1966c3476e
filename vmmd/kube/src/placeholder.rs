//! The placeholder pod of a run. The scheduler places the pod, and the pod names the VM for the
//! node's agent.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{
        Container, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolumeClaimVolumeSource, Pod,
        PodSpec, PreferredSchedulingTerm, ResourceRequirements, Toleration, Volume,
    },
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{ObjectMeta, OwnerReference},
    },
};
use kube::{Resource as _, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::Value;
use vmmd_api::v1::{self, RunPolicy};

use crate::{
    crd::VirtualMachine,
    names,
    sources::{self, Sources},
    spec::{self, Invalid},
};

/// How placeholder pods are made.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Memory that is requested beyond what vmmd sets aside for a VM, in bytes.
    pub overhead: u64,
    /// The RuntimeClass of placeholder pods; none when not given.
    pub runtime_class: Option<String>,
}

/// A VirtualMachine's run before it has begun: the VM of vmmd, and its canonical JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The VM.
    pub vm: v1::Vm,
    /// The VM as the pod carries it.
    pub manifest: String,
    /// Sources that the agent fills in.
    pub sources: Sources,
}

impl Plan {
    /// Plan of a VirtualMachine in its present state.
    ///
    /// # Errors
    ///
    /// Returns all errors of its VM, or the scheduling fields that are no part of a pod.
    pub fn of(machine: &VirtualMachine) -> Result<Self, Invalid> {
        let namespace = machine.namespace().unwrap_or_default();
        let uid = machine.uid().unwrap_or_default();
        let name = names::vm_name(&namespace, &machine.name_any(), &uid);
        let sources = machine.spec.sources();
        let mut vm = sources::vm(&name, &machine.spec.vm, &sources)?;
        if let Some(seed) = vm.spec.as_mut().and_then(|spec| spec.cloud_init.as_mut())
            && seed.hostname.is_empty()
        {
            seed.hostname = machine.name_any();
        }
        let manifest = serde_json::to_string(&vm).map_err(|error| Invalid(error.to_string()))?;
        let plan = Self {
            vm,
            manifest,
            sources,
        };
        // Only the creation of a pod shows whether the scheduling fields are valid.
        pod(machine, &plan, 0, &Settings::default())?;
        Ok(plan)
    }

    /// SHA-256 of the VM and the sources in the pod.
    pub fn digest(&self) -> String {
        digest(&self.manifest, self.annotation().as_deref())
    }

    /// The sources as the pod carries them; `None` when there are none.
    fn annotation(&self) -> Option<String> {
        if self.sources.is_empty() {
            return None;
        }
        serde_json::to_string(&self.sources).ok()
    }
}

/// SHA-256 of the annotations with the VM and its sources.
pub fn digest(manifest: &str, sources: Option<&str>) -> String {
    match sources {
        None => names::digest(manifest.as_bytes()),
        // No JSON has a NUL.
        Some(sources) => names::digest(format!("{manifest}\0{sources}").as_bytes()),
    }
}

/// The pod of the run with this number.
///
/// # Errors
///
/// What of the scheduling fields is no part of a pod.
pub fn pod(machine: &VirtualMachine, plan: &Plan, epoch: i64, settings: &Settings) -> Result<Pod, Invalid> {
    let spec = &machine.spec;
    let given = spec.pod_metadata.clone().unwrap_or_default();
    let mut labels = given.labels;
    labels.insert(names::MACHINE_UID.to_owned(), machine.uid().unwrap_or_default());
    labels.insert(names::EPOCH.to_owned(), epoch.to_string());
    let mut annotations = given.annotations;
    annotations.insert(names::MANIFEST.to_owned(), plan.manifest.clone());
    annotations.remove(names::SOURCES);
    annotations.extend(plan.annotation().map(|text| (names::SOURCES.to_owned(), text)));
    let metadata = ObjectMeta {
        name: Some(names::pod_name(&machine.name_any(), epoch)),
        namespace: machine.namespace(),
        labels: Some(labels),
        annotations: Some(annotations),
        owner_references: Some(vec![owner(machine)]),
        finalizers: Some(vec![names::VM_GONE.to_owned()]),
        ..ObjectMeta::default()
    };
    let mut node_selector = spec.node_selector.clone();
    node_selector.insert(names::NODE.to_owned(), String::new());
    let mut tolerations = vec![Toleration {
        key: Some(names::NODE.to_owned()),
        operator: Some("Exists".to_owned()),
        effect: Some("NoSchedule".to_owned()),
        ..Toleration::default()
    }];
    for (index, toleration) in spec.tolerations.iter().enumerate() {
        tolerations.push(part(&format!("tolerations[{index}]"), toleration)?);
    }
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
    let restart_policy = match spec::run_policy(&plan.vm) {
        RunPolicy::Manual | RunPolicy::AlwaysOff => "Never",
        RunPolicy::RerunOnFailure => "OnFailure",
        _ => "Always",
    };
    let pod_spec = PodSpec {
        containers: vec![container(plan, settings.overhead)?],
        volumes: Some(claims(&plan.sources)).filter(|volumes| !volumes.is_empty()),
        affinity: spec
            .affinity
            .as_ref()
            .map(|affinity| part("affinity", affinity))
            .transpose()?,
        node_selector: Some(node_selector),
        tolerations: Some(tolerations),
        topology_spread_constraints: Some(spread.collect::<Result<_, _>>()?),
        priority_class_name: spec.priority_class_name.clone(),
        scheduler_name: spec.scheduler_name.clone(),
        runtime_class_name: settings.runtime_class.clone(),
        restart_policy: Some(restart_policy.to_owned()),
        termination_grace_period_seconds: Some(spec.termination_grace_period_seconds.unwrap_or(60)),
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

/// The pod that a VM is moved to while it runs: on another node than `from`, whose vmmd can take it. One with the same processor is preferred, as
/// one that lacks a feature is refused by vmmd.
///
/// # Errors
///
/// As for [`pod`].
pub fn target(
    machine: &VirtualMachine,
    plan: &Plan,
    epoch: i64,
    settings: &Settings,
    (from, cpu_model): (&str, Option<&str>),
) -> Result<Pod, Invalid> {
    let mut pod = pod(machine, plan, epoch, settings)?;
    let spec = pod.spec.get_or_insert_default();
    let selector = spec.node_selector.get_or_insert_default();
    selector.insert(names::MIGRATION.to_owned(), String::new());
    let requirement = |key: &str, operator: &str, value: &str| NodeSelectorRequirement {
        key: key.to_owned(),
        operator: operator.to_owned(),
        values: Some(vec![value.to_owned()]),
    };
    let affinity = spec.affinity.get_or_insert_default();
    let affinity = affinity.node_affinity.get_or_insert_default();
    let required = affinity
        .required_during_scheduling_ignored_during_execution
        .get_or_insert_default();
    // One of the terms has to be fulfilled.
    if required.node_selector_terms.is_empty() {
        required.node_selector_terms.push(NodeSelectorTerm::default());
    }
    for term in &mut required.node_selector_terms {
        let elsewhere = requirement("metadata.name", "NotIn", from);
        term.match_fields.get_or_insert_default().push(elsewhere);
    }
    if let Some(model) = cpu_model.filter(|model| !model.is_empty()) {
        let same = requirement(names::CPU_MODEL, "In", model);
        affinity
            .preferred_during_scheduling_ignored_during_execution
            .get_or_insert_default()
            .push(PreferredSchedulingTerm {
                weight: 100,
                preference: NodeSelectorTerm {
                    match_expressions: Some(vec![same]),
                    match_fields: None,
                },
            });
    }
    Ok(pod)
}

/// Whether a pod is a placeholder of this VirtualMachine's run.
pub fn belongs(pod: &Pod, machine: &VirtualMachine, epoch: i64) -> bool {
    let owned = pod
        .owner_references()
        .iter()
        .any(|owner| owner.controller == Some(true) && Some(&owner.uid) == machine.metadata.uid.as_ref());
    owned && pod.labels().get(names::EPOCH) == Some(&epoch.to_string())
}

fn owner(machine: &VirtualMachine) -> OwnerReference {
    OwnerReference {
        api_version: VirtualMachine::api_version(&()).into_owned(),
        kind: VirtualMachine::kind(&()).into_owned(),
        name: machine.name_any(),
        uid: machine.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Claims as volumes of the pod: the scheduler places the pod at the claims' volumes, and no claim
/// is removed while the pod exists.
fn claims(sources: &Sources) -> Vec<Volume> {
    let claims = sources.volumes.iter().filter_map(|volume| {
        let claim = volume.persistent_volume_claim.as_ref()?;
        Some(Volume {
            name: volume.name.clone(),
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: claim.claim_name.clone(),
                read_only: Some(claim.read_only),
            }),
            ..Volume::default()
        })
    });
    claims.collect()
}

fn container(plan: &Plan, overhead: u64) -> Result<Container, Invalid> {
    let wanted = spec::requests(&sources::closed(&plan.vm, &plan.sources), overhead)?;
    let bytes = |bytes: u64| Quantity(bytes.to_string());
    let mut requests = BTreeMap::from([
        ("cpu".to_owned(), Quantity(format!("{}m", wanted.cpu_millis))),
        ("memory".to_owned(), bytes(wanted.memory_bytes)),
    ]);
    // The API server wants these as limits too.
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
    Ok(Container {
        name: names::CONTAINER.to_owned(),
        image: Some(names::IMAGE.to_owned()),
        image_pull_policy: Some("Never".to_owned()),
        // Otherwise `kubectl attach -it` gives its terminal no raw mode.
        stdin: Some(true),
        tty: Some(true),
        resources: Some(ResourceRequirements {
            requests: Some(requests),
            limits: Some(limits).filter(|limits| !limits.is_empty()),
            claims: None,
        }),
        ..Container::default()
    })
}

fn part<T: DeserializeOwned>(field: &str, value: &Value) -> Result<T, Invalid> {
    serde_json::from_value(value.clone()).map_err(|error| Invalid(format!("spec.{field}: {error}")))
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;
    use vmmd_spec::{overhead, vm::Manifest};

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
                "boot": {"linux": {"kernel": "/srv/vmlinuz"}},
            }},
        });
        change(&mut value);
        serde_json::from_value(value).unwrap()
    }

    /// Settings of tests.
    pub fn settings() -> Settings {
        Settings {
            overhead: 16 << 20,
            runtime_class: Some("vmmd".to_owned()),
        }
    }

    #[test]
    fn the_pod_asks_for_what_the_vm_takes_and_goes_to_no_other_node() {
        let machine = machine(|value| {
            value["spec"]["affinity"] = json!({"podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}],
            }});
            value["spec"]["tolerations"] = json!([
                {"key": "gpu", "operator": "Exists"},
                {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
            ]);
            value["spec"]["podMetadata"] = json!({"labels": {"app": "web"}});
        });
        let plan = Plan::of(&machine).unwrap();
        let pod = serde_json::to_value(pod(&machine, &plan, 3, &settings()).unwrap()).unwrap();
        assert_eq!(pod["metadata"]["name"], "web-3");
        assert_eq!(
            pod["metadata"]["labels"],
            json!({"app": "web", "vmmd.dev/epoch": "3", "vmmd.dev/machine-uid": "u-1"})
        );
        assert_eq!(pod["metadata"]["finalizers"], json!(["vmmd.dev/vm-gone"]));
        let spec = &pod["spec"];
        assert_eq!(
            spec["containers"][0]["resources"],
            json!({"requests": {"cpu": "2000m", "memory": memory(&plan.vm).to_string()}})
        );
        assert_eq!(spec["nodeSelector"], json!({"vmmd.dev/vm": ""}));
        let tolerations = spec["tolerations"].as_array().unwrap();
        let keys: Vec<_> = tolerations
            .iter()
            .map(|one| one["key"].as_str().unwrap())
            .collect();
        let (not_ready, unreachable) = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable");
        assert_eq!(keys, ["vmmd.dev/vm", "gpu", unreachable, not_ready]);
        assert_eq!(tolerations[2]["tolerationSeconds"], 60);
        assert_eq!(spec["terminationGracePeriodSeconds"], 60);
        assert_eq!(spec["restartPolicy"], "Always");
        assert_eq!(spec["runtimeClassName"], "vmmd");
        let key = &spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0];
        assert_eq!(key["topologyKey"], "kubernetes.io/hostname");
    }

    /// Memory that a node needs for a VM, by its vmmd and the settings of tests.
    fn memory(vm: &v1::Vm) -> u64 {
        let spec = Manifest::try_from(vm).unwrap().spec;
        spec.memory_bytes + overhead::memory(&spec) + settings().overhead
    }

    #[test]
    fn pod_with_volumes_requests_the_memory_that_vmmd_reserves() {
        let asked = |change: &dyn Fn(&mut Value)| {
            let machine = machine(|value| change(&mut value["spec"]));
            let pod = pod(&machine, &Plan::of(&machine).unwrap(), 3, &settings()).unwrap();
            let pod = serde_json::to_value(pod).unwrap();
            pod["spec"]["containers"][0]["resources"]["requests"]["memory"].clone()
        };
        let empty = json!({"name": "data", "emptyDisk": {"size": "1Gi"}});
        let image = json!({"name": "data", "containerDisk": {"image": "registry.example/debian:13"}});
        let claim = json!({"name": "data", "persistentVolumeClaim": {"claimName": "web"}});
        let (plain, said) = (
            json!({"name": "data"}),
            json!({"name": "data", "format": "qcow2"}),
        );
        let whole = |format: &str| json!({"name": "data", "path": "/srv/data", "format": format});
        let share = json!({"name": "data", "path": "/srv/data"});
        // The volume, its disk or share, and one without a volume that is the same to vmmd.
        for (volume, kind, joined, whole) in [
            (&empty, "disks", &plain, &whole("raw")),
            (&image, "disks", &plain, &whole("qcow2")),
            (&claim, "disks", &plain, &whole("raw")),
            (&claim, "disks", &said, &whole("qcow2")),
            (&claim, "shares", &plain, &share),
        ] {
            let joined = asked(&|spec| {
                spec["volumes"] = json!([volume]);
                spec["vm"][kind] = json!([joined]);
            });
            let whole = asked(&|spec| spec["vm"][kind] = json!([whole]));
            assert_eq!(joined, whole, "{volume} {kind}");
        }
        assert_ne!(
            asked(&|spec| spec["vm"]["disks"] = json!([whole("raw")])),
            asked(&|spec| spec["vm"]["disks"] = json!([whole("qcow2")]))
        );
    }

    #[test]
    fn vm_is_moved_to_a_node_that_fits_its_pod() {
        let named = json!({"key": "metadata.name", "operator": "NotIn", "values": ["n1"]});
        let zone =
            |zone: &str| json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]});
        let required = "requiredDuringSchedulingIgnoredDuringExecution";
        let machine = machine(|value| {
            value["spec"]["affinity"] =
                json!({"nodeAffinity": {required: {"nodeSelectorTerms": [zone("a"), zone("b")]}}});
            value["spec"]["nodeSelector"] = json!({"rack": "7"});
        });
        let plan = Plan::of(&machine).unwrap();
        let made = target(&machine, &plan, 4, &settings(), ("n1", Some("EPYC"))).unwrap();
        let spec = serde_json::to_value(made).unwrap()["spec"].take();
        let terms = &spec["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"];
        for (index, name) in ["a", "b"].into_iter().enumerate() {
            let mut wanted = zone(name);
            wanted["matchFields"] = json!([named]);
            assert_eq!(terms[index], wanted);
        }
        assert_eq!(
            spec["nodeSelector"],
            json!({"rack": "7", "vmmd.dev/vm": "", "vmmd.dev/migration": ""})
        );
        let preferred = &spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"];
        let expression = &preferred[0]["preference"]["matchExpressions"][0];
        assert_eq!(
            *expression,
            json!({"key": "vmmd.dev/cpu-model", "operator": "In", "values": ["EPYC"]})
        );
        // Without a wish of its own.
        let machine = self::machine(|_| {});
        let plan = Plan::of(&machine).unwrap();
        let made = target(&machine, &plan, 4, &settings(), ("n1", None)).unwrap();
        let spec = serde_json::to_value(made).unwrap()["spec"].take();
        assert_eq!(
            spec["affinity"]["nodeAffinity"],
            json!({required: {"nodeSelectorTerms": [{"matchFields": [named]}]}})
        );
    }

    #[test]
    fn what_is_no_part_of_a_pod_is_named() {
        let machine = machine(|value| value["spec"]["affinity"] = json!({"nodeAffinity": "x"}));
        let error = Plan::of(&machine).unwrap_err();
        assert!(error.0.starts_with("spec.affinity: "), "{error}");
    }

    #[test]
    fn the_manifest_is_read_back_as_the_same_vm() {
        let plan = Plan::of(&machine(|_| {})).unwrap();
        let read: v1::Vm = serde_json::from_str(&plan.manifest).unwrap();
        assert_eq!(read, plan.vm);
    }

    #[test]
    fn the_pod_names_its_claims_and_carries_what_is_to_be_filled_in() {
        let with = |claim: &str| {
            machine(|value| {
                value["spec"]["vm"]["disks"] = json!([{"name": "data"}, {"name": "tmp"}]);
                value["spec"]["volumes"] = json!([
                    {"name": "data", "persistentVolumeClaim": {"claimName": claim}},
                    {"name": "tmp", "emptyDisk": {"size": "1Gi"}},
                ]);
            })
        };
        let machine = with("web");
        let plan = Plan::of(&machine).unwrap();
        let made = serde_json::to_value(pod(&machine, &plan, 3, &settings()).unwrap()).unwrap();
        assert_eq!(
            made["spec"]["volumes"],
            json!([{"name": "data", "persistentVolumeClaim": {"claimName": "web", "readOnly": false}}])
        );
        let carried = |name: &str| made["metadata"]["annotations"][name].as_str().unwrap();
        let sources: Sources = serde_json::from_str(carried(names::SOURCES)).unwrap();
        assert_eq!(sources, machine.spec.sources());
        let digest = digest(carried(names::MANIFEST), Some(carried(names::SOURCES)));
        assert_eq!(plan.digest(), digest);
        // The VM is the same, and yet it is another run.
        let other = Plan::of(&with("db")).unwrap();
        assert_eq!(other.manifest, plan.manifest);
        assert_ne!(other.digest(), plan.digest());
        // An annotation of the user is not accepted as the sources.
        let plain = self::machine(|value| {
            value["spec"]["podMetadata"] = json!({"annotations": {names::SOURCES: "{}"}});
        });
        let plan = Plan::of(&plain).unwrap();
        let made = pod(&plain, &plan, 3, &settings()).unwrap();
        assert!(!made.annotations().contains_key(names::SOURCES));
    }

    #[test]
    fn a_pod_belongs_to_one_run_of_one_machine() {
        let machine = machine(|_| {});
        let plan = Plan::of(&machine).unwrap();
        let pod = pod(&machine, &plan, 3, &settings()).unwrap();
        assert!(belongs(&pod, &machine, 3));
        assert!(!belongs(&pod, &machine, 4));
        let other = self::machine(|value| value["metadata"]["uid"] = "u-2".into());
        assert!(!belongs(&pod, &other, 3));
    }
}

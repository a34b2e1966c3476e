//! The placeholder pod of a run. The scheduler places the pod, and the pod names the VM for the
//! node's agent.

use k8s_openapi::api::core::v1::{
    Container, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolumeClaimVolumeSource, Pod,
    PreferredSchedulingTerm, ResourceRequirements, Toleration, Volume,
};
use kube::ResourceExt as _;
use vmmd_api::v1::RunPolicy;

use crate::{
    crd::VirtualMachine,
    names,
    run::{self, Plan, Settings},
    sources::{self, Sources},
    spec::{self, Invalid},
};

/// The pod of the run with this number.
///
/// # Errors
///
/// What of the scheduling fields is no part of a pod.
pub fn pod(machine: &VirtualMachine, plan: &Plan, epoch: i64, settings: &Settings) -> Result<Pod, Invalid> {
    let mut pod = run::base(machine, epoch)?;
    let mut annotations = pod.annotations().clone();
    annotations.insert(names::MANIFEST.to_owned(), plan.manifest.clone());
    annotations.extend(plan.annotation().map(|text| (names::SOURCES.to_owned(), text)));
    pod.metadata.annotations = Some(annotations);
    let restart_policy = match spec::run_policy(&plan.vm) {
        RunPolicy::Manual | RunPolicy::AlwaysOff => "Never",
        RunPolicy::RerunOnFailure => "OnFailure",
        _ => "Always",
    };
    let spec = pod.spec.get_or_insert_default();
    spec.containers = vec![container(plan, settings.overhead)?];
    spec.volumes = Some(claims(&plan.sources)).filter(|volumes| !volumes.is_empty());
    spec.node_selector
        .get_or_insert_default()
        .insert(names::NODE.to_owned(), String::new());
    spec.tolerations.get_or_insert_default().insert(
        0,
        Toleration {
            key: Some(names::NODE.to_owned()),
            operator: Some("Exists".to_owned()),
            effect: Some("NoSchedule".to_owned()),
            ..Toleration::default()
        },
    );
    spec.runtime_class_name.clone_from(&settings.runtime_class);
    spec.restart_policy = Some(restart_policy.to_owned());
    Ok(pod)
}

/// The plan of a placeholder pod: the VM as the pod carries it.
///
/// # Errors
///
/// Returns all errors of the VM, or the scheduling fields that are no part of a pod.
pub fn plan(machine: &VirtualMachine) -> Result<Plan, Invalid> {
    let sources = machine.spec.sources();
    let vm = run::vm(machine, &machine.spec.vm, &sources)?;
    let manifest = serde_json::to_string(&vm).map_err(|error| Invalid(error.to_string()))?;
    let plan = Plan {
        vm,
        manifest,
        sources,
    };
    // Only the creation of a pod shows whether the scheduling fields are valid.
    pod(machine, &plan, 0, &Settings::default())?;
    Ok(plan)
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
    let (requests, limits) = run::resources(&wanted);
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use vmmd_api::v1;
    use vmmd_spec::{overhead, vm::Manifest};

    use super::*;
    use crate::run::{
        digest,
        tests::{machine, settings},
    };

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
        let plan = super::plan(&machine).unwrap();
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
            let pod = pod(&machine, &super::plan(&machine).unwrap(), 3, &settings()).unwrap();
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
        let plan = super::plan(&machine).unwrap();
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
        let machine = crate::run::tests::machine(|_| {});
        let plan = super::plan(&machine).unwrap();
        let made = target(&machine, &plan, 4, &settings(), ("n1", None)).unwrap();
        let spec = serde_json::to_value(made).unwrap()["spec"].take();
        assert_eq!(
            spec["affinity"]["nodeAffinity"],
            json!({required: {"nodeSelectorTerms": [{"matchFields": [named]}]}})
        );
    }

    #[test]
    fn the_manifest_is_read_back_as_the_same_vm() {
        let plan = super::plan(&machine(|_| {})).unwrap();
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
        let plan = super::plan(&machine).unwrap();
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
        let other = super::plan(&with("db")).unwrap();
        assert_eq!(other.manifest, plan.manifest);
        assert_ne!(other.digest(), plan.digest());
        // An annotation of the user is not accepted as the sources.
        let plain = crate::run::tests::machine(|value| {
            value["spec"]["podMetadata"] = json!({"annotations": {names::SOURCES: "{}"}});
        });
        let plan = super::plan(&plain).unwrap();
        let made = pod(&plain, &plan, 3, &settings()).unwrap();
        assert!(!made.annotations().contains_key(names::SOURCES));
    }

    #[test]
    fn what_is_no_part_of_a_pod_is_named() {
        let machine = machine(|value| value["spec"]["affinity"] = json!({"nodeAffinity": "x"}));
        let error = super::plan(&machine).unwrap_err();
        assert!(error.0.starts_with("spec.affinity: "), "{error}");
    }

    #[test]
    fn a_pod_belongs_to_one_run_of_one_machine() {
        let machine = machine(|_| {});
        let plan = super::plan(&machine).unwrap();
        let pod = super::pod(&machine, &plan, 3, &settings()).unwrap();
        assert!(run::belongs(&pod, &machine, 3));
        assert!(!run::belongs(&pod, &machine, 4));
        let other = crate::run::tests::machine(|value| value["metadata"]["uid"] = "u-2".into());
        assert!(!run::belongs(&pod, &other, 3));
    }
}

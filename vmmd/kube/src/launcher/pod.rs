//! The launcher pod of a run.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::core::v1::{
        Capabilities, ConfigMapVolumeSource, Container, EnvVar, EnvVarSource, ExecAction, KeyToPath,
        NodeSelectorRequirement, NodeSelectorTerm, ObjectFieldSelector, PersistentVolumeClaim,
        PersistentVolumeClaimVolumeSource, Pod, Probe, ResourceRequirements, SeccompProfile,
        SecretVolumeSource, SecurityContext, Volume, VolumeDevice, VolumeMount,
    },
    apimachinery::pkg::api::resource::Quantity,
};
use kube::ResourceExt as _;
use serde_json::Value;
use vmmd_api::v1;

use super::{CPU_RESOURCE, VM_RESOURCE, spec};
use crate::{
    crd::VirtualMachine,
    names,
    provision::{Kind, images::DOCKER_CONFIG},
    run::{self, Plan, Settings, part},
    sources::{Sources, ValueFrom},
    spec::{Invalid, requests},
};

/// The program in the image.
const PROGRAM: &str = "/vmmd-pod";
/// Memory of the launcher and its probes, in bytes.
const LAUNCHER_MEMORY: u64 = 16 << 20;
/// User and group of the launcher.
const USER: i64 = 65532;
/// Time in seconds between two questions whether a VM runs, while it starts and afterwards.
const STARTUP_PERIOD: i32 = 2;
const READINESS_PERIOD: i32 = 10;

/// A claim, as far as a launcher pod depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claimed {
    /// Its volume is a block device.
    pub block: bool,
    /// Pods on several nodes can write to it at a time (ReadWriteMany).
    pub write_many: bool,
    /// Pods on several nodes can read it at a time (ReadWriteMany, ReadOnlyMany).
    pub read_many: bool,
}

impl From<&PersistentVolumeClaim> for Claimed {
    fn from(claim: &PersistentVolumeClaim) -> Self {
        let spec = claim.spec.as_ref();
        let modes = spec
            .and_then(|spec| spec.access_modes.as_deref())
            .unwrap_or_default();
        let has = |mode: &str| modes.iter().any(|one| one == mode);
        Self {
            block: spec.and_then(|spec| spec.volume_mode.as_deref()) == Some("Block"),
            write_many: has("ReadWriteMany"),
            read_many: has("ReadWriteMany") || has("ReadOnlyMany"),
        }
    }
}

/// The claims of a VirtualMachine by their names.
pub type Claims = BTreeMap<String, Claimed>;

/// Names of the claims of a VirtualMachine.
pub fn claims(sources: &Sources) -> BTreeSet<&str> {
    let claims = sources
        .volumes
        .iter()
        .filter_map(|volume| volume.persistent_volume_claim.as_ref());
    claims.map(|claim| claim.claim_name.as_str()).collect()
}

/// The pod of the run with this number.
///
/// # Errors
///
/// Returns the fields that are no part of a pod, or a block device that is to be a share.
pub fn pod(
    machine: &VirtualMachine,
    plan: &Plan,
    epoch: i64,
    settings: &Settings,
    claims: &Claims,
) -> Result<Pod, Invalid> {
    let mut pod = run::base(machine, epoch)?;
    let mut container = container(machine, plan, epoch, settings)?;
    let mut volumes = Vec::new();
    let (mut mounts, mut devices) = (Vec::new(), Vec::new());
    let mut single_node = false;
    for volume in &plan.sources.volumes {
        let Some(claim) = &volume.persistent_volume_claim else {
            continue;
        };
        let name = &volume.name;
        let claimed = claims.get(&claim.claim_name).copied().unwrap_or_default();
        single_node |= !if claim.read_only {
            claimed.read_many
        } else {
            claimed.write_many
        };
        if claimed.block {
            let shares = plan.vm.spec.iter().flat_map(|spec| &spec.shares);
            if shares.into_iter().any(|share| share.name == *name) {
                return Err(Invalid(format!(
                    "spec.volumes: the claim {} of volume {name} is a block device, and cannot be a share",
                    claim.claim_name
                )));
            }
            devices.push(VolumeDevice {
                name: name.clone(),
                device_path: format!("/vmmd/devices/{name}"),
            });
        } else {
            mounts.push(VolumeMount {
                read_only: Some(claim.read_only),
                ..mount(name, format!("/vmmd/volumes/{name}"))
            });
        }
        volumes.push(Volume {
            name: name.clone(),
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: claim.claim_name.clone(),
                read_only: Some(claim.read_only),
            }),
            ..Volume::default()
        });
    }
    for ((kind, object), keys) in values(&plan.sources) {
        let volume = values_volume(kind, &object, &keys);
        mounts.push(VolumeMount {
            read_only: Some(true),
            ..mount(&volume.name, format!("/vmmd/secrets/{}", volume.name))
        });
        volumes.push(volume);
    }
    container.volume_mounts = Some(mounts).filter(|all| !all.is_empty());
    container.volume_devices = Some(devices).filter(|all| !all.is_empty());
    if single_node {
        pod.annotations_mut()
            .insert(names::SINGLE_NODE.to_owned(), String::new());
    }
    let spec = pod.spec.get_or_insert_default();
    spec.containers = vec![container];
    spec.volumes = Some(volumes).filter(|all| !all.is_empty());
    // The launcher ends with the run. vmmd restarts the VM in a run.
    spec.restart_policy = Some("Never".to_owned());
    Ok(pod)
}

/// A pod that the scheduler places on another node than this one.
pub fn away_from(mut pod: Pod, node: &str) -> Pod {
    let spec = pod.spec.get_or_insert_default();
    let affinity = spec.affinity.get_or_insert_default();
    let required = affinity
        .node_affinity
        .get_or_insert_default()
        .required_during_scheduling_ignored_during_execution
        .get_or_insert_default();
    // One of the terms has to be fulfilled.
    if required.node_selector_terms.is_empty() {
        required.node_selector_terms.push(NodeSelectorTerm::default());
    }
    for term in &mut required.node_selector_terms {
        let elsewhere = NodeSelectorRequirement {
            key: "metadata.name".to_owned(),
            operator: "NotIn".to_owned(),
            values: Some(vec![node.to_owned()]),
        };
        term.match_fields.get_or_insert_default().push(elsewhere);
    }
    pod
}

fn mount(name: &str, path: String) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path,
        ..VolumeMount::default()
    }
}

/// Secrets and ConfigMaps of a VirtualMachine with the keys that it names.
fn values(sources: &Sources) -> BTreeMap<(Kind, String), BTreeSet<String>> {
    let mut found = BTreeMap::<_, BTreeSet<_>>::new();
    let mut add = |kind, name: &str, key: &str| {
        found
            .entry((kind, name.to_owned()))
            .or_default()
            .insert(key.to_owned());
    };
    let from = sources.cloud_init_from.iter();
    for value in from.flat_map(|from| {
        let single = from.single().into_iter().filter_map(|(_, value)| value);
        single.chain(&from.ssh_authorized_keys)
    }) {
        let ValueFrom {
            secret_key_ref,
            config_map_key_ref,
        } = value;
        if let Some(one) = secret_key_ref {
            add(Kind::Secret, &one.name, &one.key);
        }
        if let Some(one) = config_map_key_ref {
            add(Kind::ConfigMap, &one.name, &one.key);
        }
    }
    let pulls = sources
        .volumes
        .iter()
        .any(|volume| volume.container_disk.is_some());
    for secret in sources.image_pull_secrets.iter().filter(|_| pulls) {
        add(Kind::Secret, &secret.name, DOCKER_CONFIG);
    }
    found
}

/// The kubelet starts the container when the object and all of these keys exist.
fn values_volume(kind: Kind, object: &str, keys: &BTreeSet<String>) -> Volume {
    let items: Vec<_> = keys
        .iter()
        .map(|key| KeyToPath {
            key: key.clone(),
            path: key.clone(),
            mode: None,
        })
        .collect();
    let mut volume = Volume {
        name: names::values_volume(kind == Kind::Secret, object),
        ..Volume::default()
    };
    match kind {
        Kind::Secret => {
            volume.secret = Some(SecretVolumeSource {
                secret_name: Some(object.to_owned()),
                items: Some(items),
                ..SecretVolumeSource::default()
            });
        }
        Kind::ConfigMap => {
            volume.config_map = Some(ConfigMapVolumeSource {
                name: object.to_owned(),
                items: Some(items),
                ..ConfigMapVolumeSource::default()
            });
        }
    }
    volume
}

fn container(
    machine: &VirtualMachine,
    plan: &Plan,
    epoch: i64,
    settings: &Settings,
) -> Result<Container, Invalid> {
    let extra = settings.overhead.saturating_add(LAUNCHER_MEMORY);
    let wanted = requests(&spec::closed(&plan.vm, &plan.sources), extra)?;
    let (mut requests, mut limits) = run::resources(&wanted);
    let memory = Quantity(wanted.memory_bytes.to_string());
    limits.insert("memory".to_owned(), memory);
    let one = || Quantity("1".to_owned());
    let places = [VM_RESOURCE.to_owned()].into_iter().chain(cpu_resource(&plan.vm));
    for name in places {
        requests.insert(name.clone(), one());
        limits.insert(name, one());
    }
    let field = |name: &str, path: &str| EnvVar {
        name: name.to_owned(),
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector {
                api_version: None,
                field_path: path.to_owned(),
            }),
            ..EnvVarSource::default()
        }),
        value: None,
    };
    let value = |name: &str, value: String| EnvVar {
        name: name.to_owned(),
        value: Some(value),
        value_from: None,
    };
    Ok(Container {
        name: names::CONTAINER.to_owned(),
        image: Some(settings.launcher_image.clone()),
        command: Some(vec![PROGRAM.to_owned()]),
        env: Some(vec![
            field("VMMD_POD_NAMESPACE", "metadata.namespace"),
            field("VMMD_POD_NAME", "metadata.name"),
            field("VMMD_POD_UID", "metadata.uid"),
            value("VMMD_POD_VM", machine.name_any()),
            value("VMMD_POD_RUN", epoch.to_string()),
            value("VMMD_POD_GRACE_SECONDS", run::grace(machine).to_string()),
        ]),
        // Otherwise `kubectl attach -it` gives its terminal no raw mode.
        stdin: Some(true),
        tty: Some(true),
        resources: Some(ResourceRequirements {
            requests: Some(requests),
            limits: Some(limits),
            claims: None,
        }),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            capabilities: Some(Capabilities {
                drop: Some(vec!["ALL".to_owned()]),
                add: None,
            }),
            read_only_root_filesystem: Some(true),
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            run_as_group: Some(USER),
            seccomp_profile: Some(SeccompProfile {
                type_: "RuntimeDefault".to_owned(),
                localhost_profile: None,
            }),
            ..SecurityContext::default()
        }),
        // The other probes begin when the VM runs: an import may take hours before.
        startup_probe: Some(probe(
            "startupProbe",
            machine.spec.startup_probe.as_ref(),
            STARTUP_PERIOD,
        )?),
        readiness_probe: Some(probe(
            "readinessProbe",
            machine.spec.readiness_probe.as_ref(),
            READINESS_PERIOD,
        )?),
        liveness_probe: machine
            .spec
            .liveness_probe
            .as_ref()
            .map(|given| part("livenessProbe", given))
            .transpose()?,
        ..Container::default()
    })
}

/// Resource of the nodes that support the VM's processor model; `None` for the processor of the node.
fn cpu_resource(vm: &v1::Vm) -> Option<String> {
    let model = &vm.spec.as_ref()?.cpu.as_ref()?.model;
    let any = model.is_empty() || model == "host";
    (!any).then(|| format!("{CPU_RESOURCE}{model}"))
}

/// A probe of the VirtualMachine, or the question to the launcher whether the VM runs.
fn probe(field: &str, given: Option<&Value>, period: i32) -> Result<Probe, Invalid> {
    match given {
        Some(given) => part(field, given),
        None => Ok(Probe {
            exec: Some(ExecAction {
                command: Some(vec![PROGRAM.to_owned(), "ready".to_owned()]),
            }),
            period_seconds: Some(period),
            timeout_seconds: Some(5),
            // A failed startup probe would end the run.
            failure_threshold: Some(if field == "startupProbe" { i32::MAX } else { 1 }),
            ..Probe::default()
        }),
    }
}

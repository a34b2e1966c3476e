//! Next step of the agent for a placeholder pod, or for a VM without its pod: pure functions.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::ResourceExt as _;
use vmmd_api::v1::{self, VmPhase};

use super::pod_status;
use crate::{
    crd::{MigrationPhase, Role, VirtualMachine, VirtualMachineStatus},
    names,
    provision::{RunPod, has_process, is_unstarted},
    run,
    sources::{self, Allowed, Sources},
};

/// Time for vmmd beyond a guest's grace period, before the VM is removed in any case.
const PATIENCE: SignedDuration = SignedDuration::from_secs(5);

/// How long the controller may take to say what becomes of an evicted pod's VM.
const DECISION: SignedDuration = SignedDuration::from_secs(20);

/// Next step of the agent.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// No step, until something changes.
    Idle,
    /// No step, until that time has passed or something changes.
    Wait(Duration),
    /// Ask the API server whether the pod is the one that is to have the VM, and make and start it.
    Create,
    /// Start the VM, which was made and never started.
    Start,
    /// Have the guest powered off within that time.
    Stop(Duration),
    /// Take the VM away, with its process when there is one.
    Remove,
    /// The VM is not there any more: the pod may go, unless the VM was moved, or is to come.
    Release,
    /// The VM is not there any more, and its pod is: it was moved, or removed.
    Missing,
    /// Ask the API server whether the VM is to be moved, and move it; or have it stopped.
    Leave,
    /// The VM was moved here, or is on its way: ask the API server whether it is the pod's.
    TakeOver,
    /// Report the status to the API server.
    Report(Box<PodStatus>),
    /// Ask the API server whether the pod is gone; then stop the VM, and take it away.
    CheckPod,
}

/// Whether a pod is a placeholder, and not a pod that came to the node in another way. The removal
/// of the label does not change this.
pub fn is_placeholder(pod: &Pod) -> bool {
    let finalized = pod.finalizers().iter().any(|name| name == names::VM_GONE);
    finalized || pod.labels().contains_key(names::MACHINE_UID)
}

/// The number of a pod's run.
pub fn epoch(pod: &Pod) -> Option<i64> {
    pod.labels().get(names::EPOCH)?.parse().ok()
}

/// The node as the pure functions need it.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Its name.
    pub node: &'a str,
    /// Its address.
    pub host: &'a str,
}

/// Returns the step for a pod that is bound to this node, and its VM. `deadline` is the end of the
/// guest's time when the pod is being deleted, once known.
pub fn for_pod(
    pod: &Pod,
    vm: Option<&v1::Vm>,
    place: Place<'_>,
    deadline: Option<Timestamp>,
    now: Timestamp,
) -> Step {
    let host = place.host;
    let deleted = pod.metadata.deletion_timestamp.as_ref();
    if !is_placeholder(pod) && vm.is_none() {
        // No part of it runs here.
        return if deleted.is_some() {
            Step::Release
        } else {
            foreign(pod, host, now)
        };
    }
    // Until the result for the VM is reported.
    let leaves = leaves_for(pod).is_some_and(|epoch| pod_status::migration(pod, epoch).is_none());
    if let Some(vm) = vm
        && is_incoming(vm, place.node)
    {
        return Step::TakeOver;
    }
    if let Some(deleted) = deleted {
        let Some(vm) = vm else { return Step::Release };
        let forced = pod.metadata.deletion_grace_period_seconds == Some(0);
        return match deadline {
            None if !forced && (has_process(vm) || is_stopping(vm) || leaves) => Step::Leave,
            Some(deadline) if !forced => end(vm, deadline, now),
            _ => end(vm, deleted.0, now),
        };
    }
    if leaves {
        return if vm.is_some() { Step::Leave } else { Step::Missing };
    }
    if is_terminal(pod) {
        // No VM may run for it, regardless of the component that reported the end.
        return match vm {
            Some(vm) if has_process(vm) => Step::Stop(grace(pod)),
            _ => Step::Idle,
        };
    }
    let Some(vm) = vm else {
        return if had_vm(pod) { Step::Missing } else { Step::Create };
    };
    if is_unstarted(vm) {
        return Step::Start;
    }
    let status = pod_status::of(pod, vm, host, now);
    if pod_status::differs(pod, &status) {
        Step::Report(Box::new(status))
    } else {
        Step::Idle
    }
}

/// Number of the run that the VM of a pod is to get elsewhere.
fn leaves_for(pod: &Pod) -> Option<i64> {
    pod.annotations().get(names::LEAVES)?.parse().ok()
}

/// Name in vmmd of a pod's VM.
pub fn vm_name(pod: &Pod) -> Option<String> {
    let vm: v1::Vm = serde_json::from_str(pod.annotations().get(names::MANIFEST)?).ok()?;
    Some(vm.metadata?.name)
}

/// Uid of the pod that a VM is of, or is moved to.
pub fn key(vm: &v1::Vm, node: &str) -> Option<String> {
    let metadata = vm.metadata.as_ref()?;
    if is_incoming(vm, node) {
        let (_, uid) = metadata.annotations.get(names::MOVING)?.rsplit_once('/')?;
        return Some(uid.to_owned());
    }
    let own = metadata
        .labels
        .get(names::AGENT)
        .is_some_and(|agent| agent == node);
    metadata.labels.get(names::POD_UID).filter(|_| own).cloned()
}

/// Whether a VM is that of another node's agent, and was moved here or is on its way.
pub fn is_incoming(vm: &v1::Vm, node: &str) -> bool {
    let Some(metadata) = &vm.metadata else {
        return false;
    };
    metadata.annotations.contains_key(names::MOVING)
        && metadata
            .labels
            .get(names::AGENT)
            .is_none_or(|agent| agent != node)
}

/// For a VM without a pod on this node.
pub fn without_pod(vm: &v1::Vm) -> Step {
    let terminating = vm
        .status
        .as_ref()
        .is_some_and(|status| status.phase() == VmPhase::Terminating);
    if terminating { Step::Idle } else { Step::CheckPod }
}

/// For a VM that is to go. `deadline` is when its guest's time is over.
pub fn end(vm: &v1::Vm, deadline: Timestamp, now: Timestamp) -> Step {
    let phase = vm.status.as_ref().map(v1::VmStatus::phase).unwrap_or_default();
    let left = deadline.duration_since(now);
    match phase {
        VmPhase::Terminating => Step::Idle,
        VmPhase::Stopped | VmPhase::Failed => Step::Remove,
        VmPhase::Stopping => {
            let left = left + PATIENCE;
            match Duration::try_from(left) {
                Ok(left) if !left.is_zero() => Step::Wait(left),
                _ => Step::Remove,
            }
        }
        _ => match Duration::try_from(left) {
            Ok(left) if !left.is_zero() => Step::Stop(left),
            _ => Step::Remove,
        },
    }
}

fn foreign(pod: &Pod, host: &str, now: Timestamp) -> Step {
    let message = "this node runs only VirtualMachines";
    let status = pod_status::waiting(pod, "NotAVirtualMachine", message, host, now);
    if pod_status::differs(pod, &status) && !is_terminal(pod) {
        Step::Report(Box::new(status))
    } else {
        Step::Idle
    }
}

fn grace(pod: &Pod) -> Duration {
    let seconds = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.termination_grace_period_seconds);
    Duration::from_secs(u64::try_from(seconds.unwrap_or(60)).unwrap_or_default())
}

fn is_terminal(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether the API server has a report about a VM of this pod.
fn had_vm(pod: &Pod) -> bool {
    let containers = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref());
    containers
        .into_iter()
        .flatten()
        .any(|container| container.container_id.is_some())
}

fn is_stopping(vm: &v1::Vm) -> bool {
    vm.status
        .as_ref()
        .is_some_and(|status| status.phase() == VmPhase::Stopping)
}

/// Whether a pod is the one that is to have the VM.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// It is: the VM, and the sources to fill in.
    Admit(Box<v1::Vm>, Box<Sources>),
    /// It is, and only this agent can report whether the VM was moved away.
    Moving,
    /// The VM is to be moved to it from this node.
    Await(String),
    /// It is, and the VM was moved here.
    TakeOver,
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

/// Decides by the VirtualMachine that owns the pod; `None` when there is no such VirtualMachine, or
/// one with another uid. `allowed` are the things of the node that its VM may name.
pub fn admit(pod: &Pod, machine: Option<&VirtualMachine>, node: &str, allowed: &Allowed) -> Admission {
    let refuse = |reason, message: &str| Admission::Refuse {
        reason,
        message: message.to_owned(),
    };
    let Some(machine) = machine else {
        return refuse(
            "NoVirtualMachine",
            "there is no VirtualMachine that owns this pod",
        );
    };
    let Some(epoch) = epoch(pod) else {
        return refuse("NoEpoch", "the pod has no number of a run");
    };
    let status = machine.status.clone().unwrap_or_default();
    let role = status.role(epoch, &pod.name_any(), pod.metadata.uid.as_deref());
    let digest = match role {
        Role::Old => {
            let text = format!(
                "the pod is of run {epoch}, and there is a run {} by now",
                status.epoch
            );
            return refuse("OldEpoch", &text);
        }
        Role::Other => return refuse("OtherPod", "the run of the VirtualMachine has another pod"),
        Role::NotYet => return Admission::NotYet,
        // It is moved to a pod that names the same VM.
        Role::Target(_) => status.run.as_ref().map(|run| run.digest.clone()),
        Role::Run(run) => Some(run.digest.clone()),
    };
    let manifest = pod
        .annotations()
        .get(names::MANIFEST)
        .map(String::as_str)
        .unwrap_or_default();
    let sources = pod.annotations().get(names::SOURCES).map(String::as_str);
    if Some(run::digest(manifest, sources)) != digest {
        return refuse(
            "ManifestChanged",
            "the pod's VM is not the one that the controller has noted",
        );
    }
    match role {
        Role::Run(_) if status.moving().is_some() => return Admission::Moving,
        Role::Run(run) if run.from.is_some() => return Admission::TakeOver,
        _ => {}
    }
    let sources = sources.map_or_else(|| Ok(Sources::default()), serde_json::from_str);
    let (vm, sources) = match serde_json::from_str(manifest).and_then(|vm| Ok((vm, sources?))) {
        Ok(both) => both,
        Err(error) => return refuse("InvalidManifest", &error.to_string()),
    };
    if let Some(field) = sources::of_node(&vm, allowed) {
        let text = format!(
            "{field}: names something of the node that its agent does not allow: VMs have only volumes, networks and the ports of \
             `--published-ports` here"
        );
        return refuse("NodeFilesNotAllowed", &text);
    }
    match role {
        Role::Target(migration) => Admission::Await(migration.from.clone()),
        _ => Admission::Admit(Box::new(run_pod(pod).marked(vm, node)), Box::new(sources)),
    }
}

/// A pod as objects that were made for it name it.
pub fn run_pod(pod: &Pod) -> RunPod {
    let label = |key: &str| pod.labels().get(key).cloned().unwrap_or_default();
    RunPod {
        namespace: pod.namespace().unwrap_or_default(),
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        machine: label(names::MACHINE_UID),
        epoch: label(names::EPOCH),
    }
}

/// Fate of a VM whose pod is being deleted, or has the note that its VM leaves.
#[derive(Clone, Debug, PartialEq)]
pub enum Departure {
    /// The guest is powered off until then.
    Stop(Timestamp),
    /// It is moved, as the VirtualMachine's migration says.
    Move,
    /// The controller has not decided yet, or prepares it.
    Wait,
    /// It stays.
    Stay,
}

/// By the status of the VirtualMachine. `evicted`: whether the pod was, as the controller sees it too.
pub fn departure(pod: &Pod, status: &VirtualMachineStatus, evicted: bool, now: Timestamp) -> Departure {
    let uid = pod.metadata.uid.as_deref();
    let role = epoch(pod).map(|epoch| status.role(epoch, &pod.name_any(), uid));
    let is_run = matches!(role, Some(Role::Run(_)));
    let deleted = pod.metadata.deletion_timestamp.as_ref().map(|time| time.0);
    if is_run && let Some(migration) = status.under_way() {
        return match migration.phase {
            MigrationPhase::Moving => Departure::Move,
            _ => Departure::Wait,
        };
    }
    let Some(deadline) = deleted else {
        return Departure::Stay;
    };
    let over = status
        .migration
        .as_ref()
        .is_some_and(|last| last.evicted && Some(last.source_uid.as_str()) == uid);
    // Without a controller it is stopped, as by a deletion.
    let waited = now.duration_since(deadline).saturating_add(deletion_grace(pod));
    if is_run && evicted && !over && waited < DECISION {
        Departure::Wait
    } else {
        Departure::Stop(stop_deadline(pod, deadline, now))
    }
}

/// Deadline for the guest of a pod that was to be gone by `deletion`, when it is known since `now`
/// that the VM stays. As with a kubelet, the guest has its whole grace period: neither the time of
/// a migration nor an absence of the agent counts.
pub fn stop_deadline(pod: &Pod, deletion: Timestamp, now: Timestamp) -> Timestamp {
    let whole = now.checked_add(deletion_grace(pod)).unwrap_or(Timestamp::MAX);
    deletion.max(whole)
}

fn deletion_grace(pod: &Pod) -> SignedDuration {
    let seconds = pod.metadata.deletion_grace_period_seconds;
    SignedDuration::from_secs(seconds.unwrap_or_default())
}

#[cfg(test)]
mod tests;

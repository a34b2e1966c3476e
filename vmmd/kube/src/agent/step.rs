//! What the agent does next for a placeholder pod, or for a VM whose pod is not there: pure functions.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::ResourceExt as _;
use proto::v1::{self, VmPhase};

use super::pod_status;
use crate::{crd::VirtualMachine, names, placeholder, sources::Sources};

/// How long vmmd may take beyond a guest's grace period, before the VM is taken away whatever it does.
const PATIENCE: SignedDuration = SignedDuration::from_secs(5);

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Nothing, until something changes.
    Idle,
    /// Nothing, until that time has passed or something changes.
    Wait(Duration),
    /// Ask the API server whether the pod is the one that is to have the VM, and make and start it.
    Create,
    /// Start the VM, which was made and never started.
    Start,
    /// Have the guest powered off within that time.
    Stop(Duration),
    /// Take the VM away, with its process when there is one.
    Remove,
    /// The VM is not there any more: the pod may go.
    Release,
    /// Tell the API server.
    Report(Box<PodStatus>),
    /// Ask the API server whether the pod is gone; then stop the VM, and take it away.
    CheckPod,
}

/// Whether a pod is a placeholder, and not one that came to the node in another way.
pub fn is_placeholder(pod: &Pod) -> bool {
    pod.labels().contains_key(names::MACHINE_UID)
}

/// The number of a pod's run.
pub fn epoch(pod: &Pod) -> Option<i64> {
    pod.labels().get(names::EPOCH)?.parse().ok()
}

/// For a pod that is bound to this node, and its VM.
pub fn for_pod(pod: &Pod, vm: Option<&v1::Vm>, host: &str, now: Timestamp) -> Step {
    let deleted = pod.metadata.deletion_timestamp.as_ref();
    if !is_placeholder(pod) {
        // Nothing of it runs here.
        return if deleted.is_some() {
            Step::Release
        } else {
            foreign(pod, host, now)
        };
    }
    if let Some(deleted) = deleted {
        let Some(vm) = vm else { return Step::Release };
        return end(vm, deleted.0, now);
    }
    if is_terminal(pod) {
        // Nothing is to run for it any more, whoever has said that it has ended.
        return match vm {
            Some(vm) if has_process(vm) => Step::Stop(grace(pod)),
            _ => Step::Idle,
        };
    }
    let Some(vm) = vm else {
        return if had_vm(pod) {
            let message = "the VM was removed from vmmd";
            Step::Report(Box::new(pod_status::failed(pod, "VmRemoved", message, host, now)))
        } else {
            Step::Create
        };
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

/// Whether the API server was told of a VM of this pod.
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

fn has_process(vm: &v1::Vm) -> bool {
    let phase = vm.status.as_ref().map(v1::VmStatus::phase).unwrap_or_default();
    !matches!(
        phase,
        VmPhase::Stopped | VmPhase::Stopping | VmPhase::Failed | VmPhase::Terminating
    )
}

/// vmmd was ended between the two.
fn is_unstarted(vm: &v1::Vm) -> bool {
    let status = vm.status.clone().unwrap_or_default();
    let counts = status.counts.unwrap_or_default();
    status.phase() == VmPhase::Stopped
        && status.last_exit.is_none()
        && status.operation.is_empty()
        && counts.starts == 0
        && counts.failed_starts == 0
}

/// Whether a pod is the one that is to have the VM.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// It is: the VM, and what is to be filled in.
    Admit(Box<v1::Vm>, Box<Sources>),
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

/// By what the VirtualMachine says that owns the pod; `None` when there is none, or one with another uid.
pub fn admit(pod: &Pod, machine: Option<&VirtualMachine>, node: &str) -> Admission {
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
    if epoch < status.epoch {
        let text = format!(
            "the pod is of run {epoch}, and there is a run {} by now",
            status.epoch
        );
        return refuse("OldEpoch", &text);
    }
    // What this says may be older than the pod.
    let Some(run) = status.run.filter(|_| epoch == status.epoch) else {
        return Admission::NotYet;
    };
    let Some(noted) = &run.pod_uid else {
        return Admission::NotYet;
    };
    if Some(noted) != pod.metadata.uid.as_ref() || run.pod != pod.name_any() {
        return refuse("OtherPod", "the run of the VirtualMachine has another pod");
    }
    let manifest = pod
        .annotations()
        .get(names::MANIFEST)
        .map(String::as_str)
        .unwrap_or_default();
    let sources = pod.annotations().get(names::SOURCES).map(String::as_str);
    if placeholder::digest(manifest, sources) != run.digest {
        return refuse(
            "ManifestChanged",
            "the pod's VM is not the one that the controller has noted",
        );
    }
    let sources = sources.map_or_else(|| Ok(Sources::default()), serde_json::from_str);
    match serde_json::from_str(manifest).and_then(|vm| Ok((vm, sources?))) {
        Ok((vm, sources)) => Admission::Admit(Box::new(marked(vm, pod, node)), Box::new(sources)),
        Err(error) => refuse("InvalidManifest", &error.to_string()),
    }
}

/// A VM with what the agent knows it again by.
pub fn marked(mut vm: v1::Vm, pod: &Pod, node: &str) -> v1::Vm {
    let metadata = vm.metadata.get_or_insert_default();
    let own = pod.labels();
    let label = |key: &str| own.get(key).cloned().unwrap_or_default();
    metadata.labels.extend([
        (names::MACHINE_UID.to_owned(), label(names::MACHINE_UID)),
        (names::EPOCH.to_owned(), label(names::EPOCH)),
        (names::POD_UID.to_owned(), pod.uid().unwrap_or_default()),
        (names::AGENT.to_owned(), node.to_owned()),
    ]);
    let pod = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    metadata.annotations.insert(names::POD.to_owned(), pod);
    names::MANAGER.clone_into(&mut metadata.owner);
    if let Some(spec) = &mut vm.spec
        && spec.run_policy() == v1::RunPolicy::AlwaysOn
    {
        // vmmd stops no VM of that policy; of ends here the controller makes new runs.
        spec.set_run_policy(v1::RunPolicy::AlwaysOnUnlessStopped);
    }
    vm
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;

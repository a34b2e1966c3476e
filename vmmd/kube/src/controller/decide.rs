//! Next action of the controller for a VirtualMachine: a pure function of the API server's state.
//!
//! One VM never runs twice. A run is a number (the epoch), a pod of that number, and the pod's uid.
//! All three are in the status, which is only written over the version that was read. The next run
//! begins when the API server reports that the pod does not exist. This happens only after the
//! removal of its finalizer. The controller removes the finalizer when the kubelet has reported that
//! all containers have terminated ([`crate::launcher::state`]). An agent starts a VM only for the pod
//! whose uid the status names: a late pod of an outdated controller never becomes a VM. During a
//! migration there is a second pod, see [`super::migration`]: then both have to be gone.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use vmmd_api::v1::RunPolicy;

use super::{migration, status};
use crate::{
    crd::{Run, VirtualMachine, VirtualMachineStatus},
    launcher::{self, state},
    names,
    run::{self, Plan},
    spec::{self, Invalid},
};

/// How long the first run after a failed one waits.
const FIRST_WAIT: SignedDuration = SignedDuration::from_secs(10);
/// How long it waits at most: twice as long after each failure in a row.
const LONGEST_WAIT: SignedDuration = SignedDuration::from_secs(300);

/// How soon it is looked again whether the name of a run's pod is free.
const NAME_TAKEN: SignedDuration = SignedDuration::from_secs(10);

/// Known state of a VirtualMachine.
pub struct Seen<'a> {
    /// It.
    pub machine: &'a VirtualMachine,
    /// The pod with the name of its last run's.
    pub pod: Option<&'a Pod>,
    /// The node of the pod is cordoned.
    pub cordoned: bool,
    /// The pod with the name of that which the VM is, or was last, to be moved to.
    pub target: Option<&'a Pod>,
    /// The pod with the name of that which the VM left last.
    pub source: Option<&'a Pod>,
    /// Whether there is a PodDisruptionBudget of the VM; `None`: not known.
    pub budget: Option<bool>,
    /// Port at which the vmmds of other nodes are reached.
    pub migration_port: u16,
    /// The time.
    pub now: Timestamp,
}

/// Next action. The state is read again afterwards.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// Note that the pod must be gone before the VirtualMachine is.
    AddFinalizer,
    /// The pod is gone.
    RemoveFinalizer,
    /// Write the status.
    Write(Box<VirtualMachineStatus>),
    /// Make the pod of the run that the status names.
    CreatePod(Box<Plan>),
    /// Make the pod that the VM is to be moved to.
    CreateTarget {
        /// The VM.
        plan: Box<Plan>,
        /// Number of the run that it gets.
        epoch: i64,
        /// The node that it leaves.
        from: String,
    },
    /// Set, or remove, the label with the node that the VM leaves.
    Label(Option<String>),
    /// Make, or delete, the PodDisruptionBudget of the VM.
    SetBudget(bool),
    /// Delete this pod with its grace period.
    DeletePod {
        /// Its name.
        pod: String,
        /// Its uid.
        uid: String,
    },
    /// Look again after that.
    Wait(SignedDuration),
    /// Nothing.
    Idle,
}

/// The next thing to do.
pub fn next(seen: &Seen<'_>) -> Act {
    let machine = seen.machine;
    let old = machine.status.clone().unwrap_or_default();
    let deleting = machine.metadata.deletion_timestamp.is_some();
    let finalized = machine.finalizers().iter().any(|name| name == names::POD_GONE);
    let (own, foreign) = sort(seen.pod, machine, &old);
    if !finalized {
        return if deleting { Act::Idle } else { Act::AddFinalizer };
    }
    // The name is taken by a pod that no agent will ever run.
    if let Some(act) = foreign.and_then(delete).filter(|_| !deleting) {
        return act;
    }
    let label = old.under_way().map(|one| names::label_value(&one.from));
    if machine.labels().get(names::MIGRATING_FROM) != label.as_ref() {
        return Act::Label(label);
    }
    let plan = launcher::plan(machine);
    if let Some(act) = migration::next(seen, &old, own, plan.as_ref().ok()) {
        return act;
    }
    let left_over = migration::left_over(seen, &old);
    if let Some(act) = left_over.and_then(delete) {
        return act;
    }
    match own {
        None if left_over.is_some() => write_if_new(&old, status::of(seen, &old, None, None)),
        None if deleting => Act::RemoveFinalizer,
        None => without_pod(seen, &old, plan),
        Some(pod) if deleting => {
            delete(pod).unwrap_or_else(|| write_if_new(&old, status::of(seen, &old, Some(pod), None)))
        }
        Some(pod) => with_pod(seen, &old, pod, plan.as_ref()),
    }
}

/// The pod of the last run; or one that has only its name and is not being deleted.
fn sort<'a>(
    pod: Option<&'a Pod>,
    machine: &VirtualMachine,
    status: &VirtualMachineStatus,
) -> (Option<&'a Pod>, Option<&'a Pod>) {
    let (Some(pod), Some(run)) = (pod, &status.run) else {
        return (None, None);
    };
    let ours = run::belongs(pod, machine, status.run_epoch());
    let own = match &run.pod_uid {
        Some(uid) => pod.metadata.uid.as_ref() == Some(uid),
        None => ours,
    };
    if own {
        return (Some(pod), None);
    }
    (None, Some(pod).filter(|_| ours))
}

/// Deletes a pod; `None` when it is being deleted already.
pub fn delete(pod: &Pod) -> Option<Act> {
    let live = pod.metadata.deletion_timestamp.is_none();
    pod.uid().filter(|_| live).map(|uid| Act::DeletePod {
        pod: pod.name_any(),
        uid,
    })
}

fn with_pod(seen: &Seen<'_>, old: &VirtualMachineStatus, pod: &Pod, plan: Result<&Plan, &Invalid>) -> Act {
    let mut new = status::of(seen, old, Some(pod), plan.err());
    let Some(run) = &mut new.run else {
        return Act::Idle;
    };
    run.pod_uid = pod.uid();
    let changed = plan.is_ok_and(|plan| plan.digest() != run.digest);
    let end = state::end(pod, changed);
    if run.end.is_none() && end.is_some() {
        run.end = end;
        note_end(&mut new, seen.now);
    }
    if let Act::Write(new) = write_if_new(old, new.clone()) {
        return Act::Write(new);
    }
    let Ok(plan) = plan else { return Act::Idle };
    let budget = migration::wants_budget(seen.machine, pod, plan);
    if new.run.as_ref().is_some_and(|run| run.end.is_none()) && seen.budget != Some(budget) {
        return Act::SetBudget(budget);
    }
    let policy = spec::run_policy(&plan.vm);
    // The pod of a run that has ended stays, with its log, as long as there is no other run.
    let over = policy == RunPolicy::AlwaysOff
        || (new.run.as_ref().is_some_and(|run| run.end.is_some()) && wanted(seen.machine, &new, policy));
    if !over {
        return migration::retry(seen, old, pod).map_or(Act::Idle, Act::Wait);
    }
    match wait(&new, seen.now).filter(|_| policy != RunPolicy::AlwaysOff) {
        Some(left) => Act::Wait(left),
        None => delete(pod).unwrap_or(Act::Idle),
    }
}

fn without_pod(seen: &Seen<'_>, old: &VirtualMachineStatus, plan: Result<Plan, Invalid>) -> Act {
    let mut new = status::of(seen, old, None, plan.as_ref().err());
    let Ok(plan) = plan else {
        return write_if_new(old, new);
    };
    let policy = spec::run_policy(&plan.vm);
    if let Some(run) = &mut new.run {
        match &run.pod_uid {
            // The controller ended between the two steps.
            None if run.digest == plan.digest() && policy != RunPolicy::AlwaysOff => {
                if let Some(other) = seen
                    .pod
                    .filter(|pod| !run::belongs(pod, seen.machine, old.run_epoch()))
                {
                    let new = status::name_taken(new, old, &other.name_any(), seen.now);
                    return match write_if_new(old, new) {
                        Act::Idle => Act::Wait(NAME_TAKEN),
                        act => act,
                    };
                }
                return match write_if_new(old, new) {
                    Act::Idle => Act::CreatePod(Box::new(plan)),
                    act => act,
                };
            }
            // The spec has changed meanwhile: a run without a pod is no run, but its number is spent.
            None => run.end = Some("Replaced".to_owned()),
            Some(_) if run.end.is_none() => {
                run.end = Some("Lost".to_owned());
            }
            Some(_) => {}
        }
    }
    if !wanted(seen.machine, &new, policy) {
        return write_if_new(old, new);
    }
    if let Some(left) = wait(&new, seen.now) {
        return match write_if_new(old, new) {
            Act::Idle => Act::Wait(left),
            act => act,
        };
    }
    new.epoch = old.epoch + 1;
    new.run = Some(Run {
        pod: names::pod_name(&seen.machine.name_any(), new.epoch),
        digest: plan.digest(),
        epoch: Some(new.epoch),
        ..Run::default()
    });
    new.migrate = seen.machine.annotations().get(names::MIGRATE).cloned();
    new.start = seen.machine.annotations().get(names::START).cloned();
    new.next_run_time = None;
    "Pending".clone_into(&mut new.phase);
    Act::Write(Box::new(new))
}

/// Whether there is to be a run after the last one, which is over.
fn wanted(machine: &VirtualMachine, status: &VirtualMachineStatus, policy: RunPolicy) -> bool {
    let end = status.run.as_ref().and_then(|run| run.end.as_deref());
    let start = machine.annotations().get(names::START);
    let requested = start.is_some() && start != status.start.as_ref();
    if end == Some("Replaced") {
        return policy != RunPolicy::AlwaysOff;
    }
    match policy {
        RunPolicy::AlwaysOff => false,
        _ if requested => true,
        RunPolicy::Manual => false,
        RunPolicy::AlwaysOn => true,
        RunPolicy::RerunOnFailure => matches!(end, None | Some("Failed" | "Lost")),
        RunPolicy::AlwaysOnUnlessStopped | RunPolicy::Unspecified => end != Some(names::STOPPED),
    }
}

/// Counts a failure, and says when the next run may begin.
fn note_end(status: &mut VirtualMachineStatus, now: Timestamp) {
    if status.run.as_ref().and_then(|run| run.end.as_deref()) != Some("Failed") {
        status.failures = 0;
        status.next_run_time = None;
        return;
    }
    let factor = 1_i32.checked_shl(status.failures.min(16)).unwrap_or(i32::MAX);
    let wait = FIRST_WAIT
        .checked_mul(factor)
        .unwrap_or(LONGEST_WAIT)
        .min(LONGEST_WAIT);
    status.failures = status.failures.saturating_add(1);
    status.next_run_time = now.checked_add(wait).ok().map(|time| time.to_string());
}

/// How long the next run has to wait yet.
fn wait(status: &VirtualMachineStatus, now: Timestamp) -> Option<SignedDuration> {
    let time: Timestamp = status.next_run_time.as_ref()?.parse().ok()?;
    let left = time.duration_since(now);
    left.is_positive().then_some(left)
}

fn write_if_new(old: &VirtualMachineStatus, new: VirtualMachineStatus) -> Act {
    if *old == new {
        Act::Idle
    } else {
        Act::Write(Box::new(new))
    }
}

#[cfg(test)]
mod tests;

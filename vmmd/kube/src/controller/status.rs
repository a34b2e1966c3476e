//! Status of a VirtualMachine, from its pod.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::runtime::events::EventType;

use super::decide::Seen;
use crate::{
    crd::{Condition, Migration, MigrationPhase, VirtualMachineStatus},
    launcher::state,
    spec::Invalid,
};

/// Reason of the condition `Ready` while a pod of somebody else has the name of the next run's.
const NAME_TAKEN: &str = "PodNameTaken";

/// Reason of the condition `Scheduled` while the API server refuses the pod of a run.
const FAILED_CREATE: &str = "FailedCreate";

/// The status after `old`, apart from what only [`super::decide`] sets.
pub fn of(
    seen: &Seen<'_>,
    old: &VirtualMachineStatus,
    pod: Option<&Pod>,
    invalid: Option<&Invalid>,
) -> VirtualMachineStatus {
    let mut new = old.clone();
    new.observed_generation = seen.machine.metadata.generation;
    let status = pod.and_then(|pod| pod.status.clone()).unwrap_or_default();
    let bound = pod.and_then(|pod| pod.spec.as_ref()?.node_name.clone());
    let unreachable = pod.and_then(|pod| state::unreachable(pod, seen.now));
    if pod.is_some() {
        new.node.clone_from(&bound);
    }
    let ips = status.pod_ips.unwrap_or_default();
    new.addresses = ips.into_iter().map(|ip| ip.ip).collect();
    new.phase = match pod {
        None if invalid.is_some() => "Invalid",
        None => match old.run.as_ref().and_then(|run| run.end.as_deref()) {
            Some("Failed") => "Failed",
            _ if awaits_pod(old) => "Pending",
            _ => "Stopped",
        },
        Some(_) if unreachable.is_some() => "Unknown",
        Some(_) if old.under_way().is_some() => "Migrating",
        Some(pod) => state::phase(pod),
    }
    .to_owned();
    let conditions = status.conditions.unwrap_or_default();
    let find = |kind: &str| conditions.iter().find(|condition| condition.type_ == kind);
    let ready = match (pod, &unreachable) {
        (None, _) => condition("Ready", "False", "NotRunning", ""),
        (Some(_), Some(message)) => condition("Ready", "Unknown", "NodeUnreachable", message),
        (Some(pod), None) => {
            let (reason, message) = state::why(pod);
            let of = find("Ready").filter(|of| of.status == "True");
            copy("Ready", of, &reason, &message)
        }
    };
    let scheduled = match (&bound, pod) {
        (Some(node), _) => condition("Scheduled", "True", "Bound", &format!("to node {node}")),
        (None, Some(_)) => copy("Scheduled", find("PodScheduled"), "Waiting", ""),
        // It is so until there is a pod, or none is wanted.
        (None, None) => match old.conditions.iter().find(|one| one.reason == FAILED_CREATE) {
            Some(refused) if awaits_pod(old) => refused.clone(),
            _ => condition("Scheduled", "False", "NoPod", ""),
        },
    };
    let valid = match invalid {
        Some(Invalid(text)) => condition("Valid", "False", "InvalidSpec", text),
        None => condition("Valid", "True", "Valid", ""),
    };
    new.conditions = [valid, scheduled, ready]
        .into_iter()
        .map(|condition| keep_time(condition, old, seen.now))
        .collect();
    new
}

/// Whether the run has no pod yet.
fn awaits_pod(status: &VirtualMachineStatus) -> bool {
    let run = status.run.as_ref();
    run.is_some_and(|run| run.end.is_none() && run.pod_uid.is_none())
}

/// That the name of the pod of the next run is taken by another pod.
pub fn name_taken(
    new: VirtualMachineStatus,
    old: &VirtualMachineStatus,
    pod: &str,
    now: Timestamp,
) -> VirtualMachineStatus {
    let message = format!("there is a pod {pod} of somebody else: the next run waits until that is deleted");
    let taken = keep_time(condition("Ready", "False", NAME_TAKEN, &message), old, now);
    with(new, taken)
}

/// That the API server refuses the pod of the run.
pub fn failed_create(old: VirtualMachineStatus, message: &str, now: Timestamp) -> VirtualMachineStatus {
    let failed = keep_time(condition("Scheduled", "False", FAILED_CREATE, message), &old, now);
    with(old, failed)
}

fn with(mut status: VirtualMachineStatus, new: Condition) -> VirtualMachineStatus {
    match status.conditions.iter_mut().find(|one| one.kind == new.kind) {
        Some(condition) => *condition = new,
        None => status.conditions.push(new),
    }
    status
}

/// Events for a new status: type, reason and message.
pub fn news(old: &VirtualMachineStatus, new: &VirtualMachineStatus) -> Vec<(EventType, String, String)> {
    let news = new.conditions.iter().filter(|condition| {
        let wrong =
            condition.kind == "Valid" && condition.status == "False" || condition.reason == NAME_TAKEN;
        let known = old.conditions.iter().any(|before| {
            before.kind == condition.kind
                && before.reason == condition.reason
                && before.message == condition.message
        });
        wrong && !known
    });
    let news = news.map(|one| (EventType::Warning, one.reason.clone(), one.message.clone()));
    news.chain(migration_news(old.migration.as_ref(), new.migration.as_ref()))
        .collect()
}

fn migration_news(old: Option<&Migration>, new: Option<&Migration>) -> Option<(EventType, String, String)> {
    let new = new?;
    let same = |old: &&Migration| {
        (old.phase, old.epoch, &old.source_uid, &old.start_time)
            == (new.phase, new.epoch, &new.source_uid, &new.start_time)
    };
    if old.filter(same).is_some() {
        return None;
    }
    let (from, pod) = (&new.from, &new.pod);
    let to = new.to.as_deref().unwrap_or("another node");
    let (type_, reason, note) = match new.phase {
        MigrationPhase::Placing => (
            EventType::Normal,
            "MigrationPlanned",
            format!("Pod {pod} is placed, to which the VM is moved from {from}"),
        ),
        MigrationPhase::Moving => (
            EventType::Normal,
            "Migrating",
            format!("The VM is moved from {from} to {to}"),
        ),
        MigrationPhase::Succeeded => (
            EventType::Normal,
            "Migrated",
            format!("The VM was moved from {from} to {to}, and is that of pod {pod}"),
        ),
        MigrationPhase::Failed => (
            EventType::Warning,
            "NotMigrated",
            format!(
                "The VM was not moved from {from}: {}: {}",
                new.reason, new.message
            ),
        ),
    };
    Some((type_, reason.to_owned(), note))
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Condition {
    Condition {
        kind: kind.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: String::new(),
    }
}

fn copy(kind: &str, of: Option<&PodCondition>, reason: &str, message: &str) -> Condition {
    let Some(of) = of else {
        return condition(kind, "False", reason, message);
    };
    let reason = match of.reason.as_deref() {
        Some(own) if !own.is_empty() => own,
        _ if of.status == "True" => kind,
        _ => reason,
    };
    let message = of
        .message
        .as_deref()
        .filter(|own| !own.is_empty())
        .unwrap_or(message);
    condition(kind, &of.status, reason, message)
}

fn keep_time(mut new: Condition, old: &VirtualMachineStatus, now: Timestamp) -> Condition {
    let before = old.conditions.iter().find(|before| before.kind == new.kind);
    new.last_transition_time = match before {
        Some(before) if before.status == new.status => before.last_transition_time.clone(),
        _ => now.to_string(),
    };
    new
}

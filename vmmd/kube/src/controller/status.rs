//! Status of a VirtualMachine, from its pod and the pod's node.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, PodCondition};
use kube::{ResourceExt as _, runtime::events::EventType};

use super::decide::Seen;
use crate::{
    crd::{Condition, Migration, MigrationPhase, VirtualMachineStatus},
    launcher::state,
    names,
    spec::Invalid,
};

/// Reason of the condition `Ready` while a pod of somebody else has the name of the next run's.
const NAME_TAKEN: &str = "PodNameTaken";

/// Reason of the condition `Migrated` of a VM that cannot be moved.
const NOT_SUPPORTED: &str = "NotSupported";

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
    let launcher = pod.filter(|pod| state::is_launcher(pod));
    let unreachable = match launcher {
        Some(pod) => state::unreachable(pod, seen.now),
        // Nodes are read for pods of virtual nodes alone.
        None if seen.launcher => None,
        None => bound.as_ref().and_then(|name| unreachable(name, seen.node)),
    };
    if pod.is_some() {
        new.node.clone_from(&bound);
    }
    let ips = status.pod_ips.unwrap_or_default().into_iter().map(|ip| ip.ip);
    let conditions = status.conditions.iter().flatten();
    let local = conditions.filter(|one| one.type_ == names::NODE_LOCAL);
    let local = local.filter_map(|one| one.message.as_deref());
    let local = local.flat_map(|named| named.split(',').map(str::to_owned));
    new.addresses = ips.chain(local).collect();
    let containers = status.container_statuses.unwrap_or_default();
    let container = containers.first();
    new.restarts = container.map_or(0, |container| container.restart_count);
    let waits = container.is_some_and(|container| {
        container
            .state
            .as_ref()
            .is_some_and(|state| state.waiting.is_some())
    });
    let phase = status.phase.unwrap_or_default();
    // On a virtual node only the agent writes the phase of a pod.
    let ended = launcher.is_none() && matches!(&*phase, "Succeeded" | "Failed");
    let deleting = pod.is_some_and(|pod| pod.metadata.deletion_timestamp.is_some());
    new.phase = match pod {
        None if invalid.is_some() => "Invalid",
        None => match old.run.as_ref().and_then(|run| run.end.as_deref()) {
            Some("Failed") => "Failed",
            _ if awaits_pod(old) => "Pending",
            _ => "Stopped",
        },
        Some(_) if unreachable.is_some() && !ended => "Unknown",
        Some(_) if old.under_way().is_some() => "Migrating",
        Some(_) if let Some(pod) = launcher => state::phase(pod),
        Some(_) if deleting => "Stopping",
        Some(_) if bound.is_none() => "Scheduling",
        Some(_) => match &*phase {
            // The VM has ended, or its start has failed, and vmmd starts it again.
            "Running" if waits => "Restarting",
            "Running" => "Running",
            "Succeeded" => "Stopped",
            "Failed" => "Failed",
            _ => "Starting",
        },
    }
    .to_owned();
    let conditions = status.conditions.unwrap_or_default();
    let find = |kind: &str| conditions.iter().find(|condition| condition.type_ == kind);
    let ready = match (pod, &unreachable) {
        (None, _) => condition("Ready", "False", "NotRunning", ""),
        (Some(_), Some(message)) => condition("Ready", "Unknown", "NodeUnreachable", message),
        (Some(_), None) if let Some(pod) = launcher => {
            let (reason, message) = state::why(pod);
            let of = find("Ready").filter(|of| of.status == "True");
            copy("Ready", of, &reason, &message)
        }
        (Some(_), None) => {
            let message = status.message.as_deref().unwrap_or_default();
            let reason = status.reason.as_deref().unwrap_or("NotReady");
            copy("Ready", find("Ready"), reason, message)
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
    let wish = seen.machine.annotations().get(names::MIGRATE);
    let refused = wish.filter(|wish| seen.launcher && Some(*wish) != old.migrate.as_ref());
    let refused = refused.map(|_| {
        let message =
            "a VM in a launcher pod cannot be moved: delete the pod, and its next run may be elsewhere";
        condition("Migrated", "False", NOT_SUPPORTED, message)
    });
    new.conditions = [valid, scheduled, ready]
        .into_iter()
        .chain(refused)
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
        let wrong = condition.kind == "Valid" && condition.status == "False"
            || [NAME_TAKEN, NOT_SUPPORTED].contains(&&*condition.reason);
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
    let from = &new.from;
    let to = new.to.as_deref().unwrap_or("another node");
    let (type_, reason, note) = match new.phase {
        MigrationPhase::Placing => (
            EventType::Normal,
            "MigrationPlanned",
            format!(
                "A node is looked for to which the VM can be moved from {from}, by pod {}",
                new.pod
            ),
        ),
        MigrationPhase::Moving => (
            EventType::Normal,
            "Migrating",
            format!("The VM is moved from {from} to {to}"),
        ),
        MigrationPhase::Succeeded => (
            EventType::Normal,
            "Migrated",
            format!(
                "The VM was moved from {from} to {to}, and is that of pod {}",
                new.pod
            ),
        ),
        MigrationPhase::Failed => {
            let then = if new.evicted {
                "it is stopped instead, and its next run is elsewhere when there is one"
            } else {
                "it stays where it is"
            };
            (
                EventType::Warning,
                "NotMigrated",
                format!(
                    "The VM was not moved from {from}, {then}: {}: {}",
                    new.reason, new.message
                ),
            )
        }
    };
    Some((type_, reason.to_owned(), note))
}

/// How the run of a pod has ended; `None` when it has not. `changed`: the VirtualMachine has another
/// spec than the run.
pub fn end(pod: &Pod, changed: bool) -> Option<String> {
    if state::is_launcher(pod) {
        return state::end(pod, changed);
    }
    let status = pod.status.as_ref()?;
    let end = match status.phase.as_deref()? {
        "Succeeded" if status.reason.as_deref() == Some(names::STOPPED) => names::STOPPED,
        "Succeeded" => "Succeeded",
        "Failed" => "Failed",
        _ => return None,
    };
    Some(end.to_owned())
}

/// Why nothing is known of what runs on a node; `None` when it reports.
fn unreachable(name: &str, node: Option<&Node>) -> Option<String> {
    let waits =
        "the VM may still run there, and is not started elsewhere until the node says that it is gone";
    let Some(node) = node else {
        return Some(format!("there is no node {name}: {waits}"));
    };
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|condition| condition.type_ == "Ready")?;
    (ready.status == "Unknown").then(|| format!("node {} does not report: {waits}", node.name_any()))
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

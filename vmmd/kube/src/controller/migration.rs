//! Next action of the controller for a migration: pure functions, as [`super::decide`].
//!
//! ```text
//!              eviction, annotation
//!   (none) ──────────────────────────▶ Placing ──second pod waits for the VM──▶ Moving ──an agent: moved──▶ Succeeded
//!      │  it cannot be moved              │  nothing fits, a pod goes, ...        │  source's agent: it stays
//!      └──────────────▶ Failed ◀──────────┴───────────────────────────────────────┘
//! ```
//!
//! The migration is in the status, beside the run, and written with it over the version that was
//! read. So the pod that has the VM changes in one step. In `Placing` no agent has moved anything,
//! and the controller may give the migration up. From `Moving` on it may not: the agent of the VM's
//! node may have asked vmmd to move the VM, at any time. One of these then reports the result:
//!
//! - that agent, once vmmd reports that the VM is gone, or that it stays, after the request cannot
//!   be carried out any longer;
//! - the other node's agent, once the VM runs there: vmmd lets no VM run on two nodes;
//! - the removal of the source's pod, by its agent, or by an operator with the knowledge that the
//!   node is off.
//!
//! An agent does not release a pod of a migration as long as the status names the pod.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod, PodCondition};
use kube::ResourceExt as _;

use super::{
    decide::{Act, Seen},
    status,
};
use crate::{
    crd::{Eviction, Migration, MigrationPhase, Run, VirtualMachine, VirtualMachineStatus},
    names,
    run::{self, Plan},
};

/// How long a second pod may take until it is on a node that waits for the VM.
const PLACING: SignedDuration = SignedDuration::from_secs(120);
/// How long the scheduler may find no node for it.
const UNSCHEDULABLE: SignedDuration = SignedDuration::from_secs(20);

/// Default time limit of a migration, in seconds.
const TIMEOUT: i64 = 600;

/// Whether a pod is being deleted in order to empty its node. This is so after a call of the
/// Eviction API, where Kubernetes reports it (1.26), and on a cordoned node, as `kubectl drain`
/// cordons first. A deletion without time for the guest wants no migration.
pub fn is_evicted(pod: &Pod, node: Option<&Node>) -> bool {
    let metadata = &pod.metadata;
    if metadata.deletion_timestamp.is_none() || metadata.deletion_grace_period_seconds == Some(0) {
        return false;
    }
    let cordoned = node
        .and_then(|node| node.spec.as_ref())
        .is_some_and(|spec| spec.unschedulable == Some(true));
    let evicted = condition(pod, "DisruptionTarget")
        .is_some_and(|one| one.status == "True" && one.reason.as_deref() == Some("EvictionByEvictionAPI"));
    cordoned || evicted
}

fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|one| one.type_ == kind)
}

/// Next action for the migration that is under way, or that is to begin; `None` without a
/// migration. `run` is the pod of the last run, as long as it exists.
pub fn next(
    seen: &Seen<'_>,
    old: &VirtualMachineStatus,
    run: Option<&Pod>,
    plan: Option<&Plan>,
) -> Option<Act> {
    let machine = seen.machine;
    match old.under_way() {
        Some(migration) if migration.phase == MigrationPhase::Moving => {
            Some(moving(seen, old, migration, run))
        }
        Some(migration) => Some(placing(seen, old, migration, run, plan)),
        None if machine.metadata.deletion_timestamp.is_some() => None,
        // It would be forgotten: the status has one migration.
        None if left_over(seen, old).is_some() => None,
        None => begin(seen, old, run?, plan?),
    }
}

/// The pod that a migration has left over: the second one of one that has failed, the first one of one that has succeeded.
pub fn left_over<'a>(seen: &Seen<'a>, old: &VirtualMachineStatus) -> Option<&'a Pod> {
    let migration = old.migration.as_ref()?;
    let pod = match migration.phase {
        MigrationPhase::Succeeded => seen.source?,
        MigrationPhase::Failed => seen.target?,
        MigrationPhase::Placing | MigrationPhase::Moving => return None,
    };
    let epoch = pod.labels().get(names::EPOCH)?.parse().ok()?;
    // A later run may have had the name.
    let is_run = old.run.as_ref().and_then(|run| run.pod_uid.as_ref()) == pod.metadata.uid.as_ref();
    (run::belongs(pod, seen.machine, epoch) && !is_run).then_some(pod)
}

fn begin(seen: &Seen<'_>, old: &VirtualMachineStatus, pod: &Pod, plan: &Plan) -> Option<Act> {
    let run = old.run.as_ref()?;
    let uid = pod.uid().filter(|uid| run.pod_uid.as_ref() == Some(uid))?;
    let from = pod.spec.as_ref()?.node_name.clone()?;
    if status::end(pod, false).is_some() || run.end.is_some() {
        return None;
    }
    let wish = seen.machine.annotations().get(names::MIGRATE);
    let wished = wish.filter(|wish| Some(*wish) != old.migrate.as_ref());
    let evicted = is_evicted(pod, seen.node);
    let tried = old
        .migration
        .as_ref()
        .is_some_and(|last| last.evicted && last.source_uid == uid);
    let live = pod.metadata.deletion_timestamp.is_none();
    if !(evicted && !tried || live && wished.is_some()) {
        return None;
    }
    let mut new = old.clone();
    new.migrate = wish.cloned();
    let policy = seen.machine.spec.migration.clone().unwrap_or_default();
    let mut migration = Migration {
        source_pod: run.pod.clone(),
        source_uid: uid,
        evicted,
        from,
        timeout_seconds: policy.timeout_seconds.unwrap_or(TIMEOUT),
        force: policy.force,
        start_time: seen.now.to_string(),
        ..Migration::default()
    };
    if let Some((reason, message)) = stays(seen.machine, run, pod, plan, evicted) {
        fail(&mut migration, reason, message, seen.now);
    } else {
        new.epoch = old.epoch.saturating_add(1);
        migration.epoch = new.epoch;
        migration.pod = names::pod_name(&seen.machine.name_any(), new.epoch);
        if let Some(run) = &mut new.run {
            run.epoch = Some(old.run_epoch());
        }
    }
    new.migration = Some(migration);
    Some(Act::Write(Box::new(new)))
}

/// Why a VM is not moved although it should be.
fn stays(
    machine: &VirtualMachine,
    run: &Run,
    pod: &Pod,
    plan: &Plan,
    evicted: bool,
) -> Option<(&'static str, &'static str)> {
    let policy = machine.spec.migration.clone().unwrap_or_default();
    let containers = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref());
    let runs = containers.into_iter().flatten().any(|container| {
        container
            .state
            .as_ref()
            .is_some_and(|state| state.running.is_some())
    });
    if evicted && policy.eviction == Eviction::Stop {
        Some((
            "StoppedByPolicy",
            "spec.migration.eviction says that it is stopped",
        ))
    } else if !runs {
        Some(("NotRunning", "it does not run"))
    } else if plan.digest() != run.digest {
        Some((
            "SpecChanged",
            "its spec was changed since its run began: the next run has the new one",
        ))
    } else if plan.sources.make_disks() {
        Some((
            "DisksStay",
            "it has disks that were made on its node for this run",
        ))
    } else {
        None
    }
}

fn fail(migration: &mut Migration, reason: &str, message: impl Into<String>, now: Timestamp) {
    migration.phase = MigrationPhase::Failed;
    migration.end_time = Some(now.to_string());
    migration.reason = reason.to_owned();
    migration.message = message.into();
}

fn write_failure(
    old: &VirtualMachineStatus,
    reason: &str,
    message: impl Into<String>,
    now: Timestamp,
) -> Act {
    let mut new = old.clone();
    if let Some(migration) = &mut new.migration {
        fail(migration, reason, message, now);
    }
    Act::Write(Box::new(new))
}

fn placing(
    seen: &Seen<'_>,
    old: &VirtualMachineStatus,
    migration: &Migration,
    run: Option<&Pod>,
    plan: Option<&Plan>,
) -> Act {
    let give_up = |reason: &str, message: &str| write_failure(old, reason, message, seen.now);
    let Some(source) = run else {
        return give_up("SourceGone", "its pod is gone");
    };
    if seen.machine.metadata.deletion_timestamp.is_some() {
        return give_up("Deleted", "it is being deleted");
    }
    if status::end(source, false).is_some() {
        return give_up("NotRunning", "its run has ended");
    }
    if source.metadata.deletion_grace_period_seconds == Some(0) {
        return give_up("Forced", "its pod was deleted without a grace period");
    }
    let digest = old.run.as_ref().map(|run| &run.digest);
    let Some(plan) = plan.filter(|plan| Some(&plan.digest()) == digest) else {
        return give_up("SpecChanged", "its spec was changed meanwhile");
    };
    let began: Option<Timestamp> = migration.start_time.parse().ok();
    let since = began.map_or(SignedDuration::MAX, |began| seen.now.duration_since(began));
    if since >= PLACING {
        return give_up("NotPlaced", "no other node was ready to take it in time");
    }
    let left = PLACING - since;
    let Some(target) = seen.target else {
        if migration.pod_uid.is_some() {
            return give_up("TargetGone", "the target pod is gone");
        }
        let model = seen.node.and_then(|node| node.labels().get(names::CPU_MODEL));
        return Act::CreateTarget {
            plan: Box::new(plan.clone()),
            epoch: migration.epoch,
            from: migration.from.clone(),
            cpu_model: model.cloned(),
        };
    };
    let noted = migration.pod_uid.as_ref();
    let belongs = run::belongs(target, seen.machine, migration.epoch);
    if !belongs || noted.is_some_and(|noted| Some(noted) != target.metadata.uid.as_ref()) {
        return give_up("PodNameTaken", "another pod has the name of the target pod");
    }
    if target.metadata.deletion_timestamp.is_some() {
        return give_up("TargetGone", "the target pod was deleted");
    }
    if status::end(target, false).is_some() {
        let message = target.status.as_ref().and_then(|status| status.message.clone());
        return give_up("TargetRefused", &message.unwrap_or_default());
    }
    let mut new = status::of(seen, old, Some(source), None);
    let Some(change) = &mut new.migration else {
        return Act::Idle;
    };
    change.pod_uid = target.uid();
    if noted.is_some() && awaits(target) {
        let node = target.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let address = seen
            .target_node
            .and_then(|node| node.annotations().get(names::MIGRATION_ADDRESS));
        let Some(address) = address else {
            return give_up("TargetRefused", "its node does not say where its vmmd is reached");
        };
        change.phase = MigrationPhase::Moving;
        change.to = node;
        change.address = Some(address.clone());
    }
    if new != *old {
        return Act::Write(Box::new(new));
    }
    let scheduled = condition(target, "PodScheduled");
    match scheduled.filter(|one| one.status == "False" && one.reason.as_deref() == Some("Unschedulable")) {
        Some(one) if since >= UNSCHEDULABLE => {
            let message = one.message.as_deref().unwrap_or("the scheduler finds no node");
            give_up("NoNodeFits", message)
        }
        Some(_) => Act::Wait(UNSCHEDULABLE - since),
        None => Act::Wait(left),
    }
}

/// Whether the agent of the pod's node waits for the VM.
fn awaits(pod: &Pod) -> bool {
    let containers = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref());
    let reasons = containers.into_iter().flatten().filter_map(|container| {
        let waiting = container.state.as_ref()?.waiting.as_ref()?;
        waiting.reason.as_deref()
    });
    reasons.into_iter().any(|reason| reason == names::AWAITS)
}

fn moving(seen: &Seen<'_>, old: &VirtualMachineStatus, migration: &Migration, run: Option<&Pod>) -> Act {
    let kind = names::migration_condition(migration.epoch);
    let says = |pod: Option<&Pod>, status: &str| {
        pod.and_then(|pod| condition(pod, &kind))
            .is_some_and(|one| one.status == status)
    };
    let target = seen
        .target
        .filter(|target| target.metadata.uid == migration.pod_uid);
    if run.is_none() || says(run, "True") || says(target, "True") {
        return Act::Write(Box::new(succeed(old, migration, seen.now)));
    }
    if let Some(failure) = run.and_then(|pod| condition(pod, &kind)) {
        let (reason, message) = (failure.reason.as_deref(), failure.message.as_deref());
        return write_failure(
            old,
            reason.unwrap_or("Failed"),
            message.unwrap_or_default(),
            seen.now,
        );
    }
    let new = status::of(seen, old, run, None);
    if new != *old {
        return Act::Write(Box::new(new));
    }
    match run {
        Some(pod) if pod.annotations().get(names::LEAVES) != Some(&migration.epoch.to_string()) => {
            Act::Wake {
                pod: pod.name_any(),
                uid: pod.uid().unwrap_or_default(),
                epoch: migration.epoch,
            }
        }
        _ => Act::Idle,
    }
}

/// The VM is that of the second pod from here on.
fn succeed(old: &VirtualMachineStatus, migration: &Migration, now: Timestamp) -> VirtualMachineStatus {
    let mut new = old.clone();
    let digest = old.run.as_ref().map(|run| run.digest.clone());
    new.run = Some(Run {
        pod: migration.pod.clone(),
        pod_uid: migration.pod_uid.clone(),
        digest: digest.unwrap_or_default(),
        end: None,
        epoch: Some(migration.epoch),
        from: Some(migration.from.clone()),
    });
    new.node.clone_from(&migration.to);
    new.migration = Some(Migration {
        phase: MigrationPhase::Succeeded,
        end_time: Some(now.to_string()),
        ..migration.clone()
    });
    new
}

#[cfg(test)]
mod tests;

//! Next action of the controller for a migration: pure functions, as [`super::decide`].
//!
//! ```text
//!        cordoned node, annotation
//!   (none) ───────────────────────▶ Placing ──launcher of the second pod runs──▶ Moving ──source: Migrated──▶ Succeeded
//!      │  it cannot be moved           │  nothing fits, a pod ends, ...            │  second pod has ended
//!      └─────────────▶ Failed ◀────────┴────────────────────────────────────────────┘
//! ```
//!
//! The migration is in the status, beside the run, and written with it over the version that was
//! read. So the pod that has the VM changes in one step. In `Placing` no agent has moved anything,
//! and the controller may give the migration up. From `Moving` on it may not: the agent of the VM's
//! node may have asked vmmd to move the VM, at any time. vmmd alone decides which of two nodes has
//! the VM, and the pods report the result:
//!
//! - The launcher that the VM has left ends with the reason `Migrated`. When the node of that
//!   launcher does not report, a second pod whose VM runs proves the same.
//! - A second pod that has ended has no VM, and never gets one. At the time limit, or when the VM
//!   has no other pod, the controller deletes the second pod and waits for its end. A VM that is
//!   handed over at that moment ends with the pod.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::ResourceExt as _;
use vmmd_api::v1;

use super::{
    decide::{self, Act, Seen},
    status,
};
use crate::{
    crd::{Eviction, Migration, MigrationPhase, Run, VirtualMachine, VirtualMachineStatus},
    launcher::state,
    names,
    run::{self, Plan},
};

/// Time for a second pod until its launcher runs.
const PLACING: SignedDuration = SignedDuration::from_secs(120);
/// Time in which the scheduler may find no node for it.
const UNSCHEDULABLE: SignedDuration = SignedDuration::from_secs(20);
/// Wait after a failed migration before the next one leaves the same cordoned node.
const RETRY: SignedDuration = SignedDuration::from_secs(120);
/// Default time limit of a migration, in seconds.
const TIMEOUT: i64 = 600;

/// Whether evictions of the pod are to be refused, because its VM is moved instead.
pub fn wants_budget(machine: &VirtualMachine, pod: &Pod, plan: &Plan) -> bool {
    policy(machine).eviction == Eviction::Migrate && bound_to_node(pod, plan).is_none()
}

fn policy(machine: &VirtualMachine) -> crate::crd::MigrationPolicy {
    machine.spec.migration.clone().unwrap_or_default()
}

/// Next action for the migration that is under way, or that is to begin; `None` without a
/// migration. `run` is the pod of the last run, as long as it exists.
pub fn next(
    seen: &Seen<'_>,
    old: &VirtualMachineStatus,
    run: Option<&Pod>,
    plan: Option<&Plan>,
) -> Option<Act> {
    match old.under_way() {
        Some(migration) if migration.phase == MigrationPhase::Moving => {
            Some(moving(seen, old, migration, run))
        }
        Some(migration) => Some(placing(seen, old, migration, run, plan)),
        None if seen.machine.metadata.deletion_timestamp.is_some() => None,
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

/// Time until the next migration away from a cordoned node; `None` when none is to follow.
pub fn retry(seen: &Seen<'_>, old: &VirtualMachineStatus, run: &Pod) -> Option<SignedDuration> {
    let last = old.migration.as_ref()?;
    let same = Some(&last.source_uid) == run.metadata.uid.as_ref();
    let failed = last.evicted && last.phase == MigrationPhase::Failed && same;
    let ended: Timestamp = last.end_time.as_ref()?.parse().ok()?;
    let left = RETRY - seen.now.duration_since(ended);
    (seen.cordoned && failed && left.is_positive()).then_some(left)
}

fn begin(seen: &Seen<'_>, old: &VirtualMachineStatus, pod: &Pod, plan: &Plan) -> Option<Act> {
    let run = old.run.as_ref()?;
    let uid = pod.uid().filter(|uid| run.pod_uid.as_ref() == Some(uid))?;
    let from = pod.spec.as_ref()?.node_name.clone()?;
    let ends = run.end.is_some() || pod.metadata.deletion_timestamp.is_some() || state::is_gone(pod);
    if ends {
        return None;
    }
    let wish = seen.machine.annotations().get(names::MIGRATE);
    let wished = wish.is_some() && wish != old.migrate.as_ref();
    let stays = stays(run, pod, plan);
    let policy = policy(seen.machine);
    let evicted = seen.cordoned
        && policy.eviction == Eviction::Migrate
        && stays.is_none()
        && retry(seen, old, pod).is_none();
    if !evicted && !wished {
        return None;
    }
    let mut new = old.clone();
    new.migrate = wish.cloned();
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
    if let Some((reason, message)) = stays {
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
fn stays(run: &Run, pod: &Pod, plan: &Plan) -> Option<(&'static str, &'static str)> {
    if state::phase(pod) != "Running" {
        Some(("NotRunning", "it does not run"))
    } else if plan.digest() != run.digest {
        Some((
            "SpecChanged",
            "its spec was changed since its run began: the next run has the new one",
        ))
    } else {
        bound_to_node(pod, plan)
    }
}

/// Why the VM of a pod runs on this one node only.
fn bound_to_node(pod: &Pod, plan: &Plan) -> Option<(&'static str, &'static str)> {
    if plan.sources.make_disks() {
        Some((
            "DisksStay",
            "it has disks that were made on its node for this run",
        ))
    } else if pod.annotations().contains_key(names::SINGLE_NODE) {
        Some((
            "VolumeNotShared",
            "it uses a claim without an access mode for several nodes",
        ))
    } else {
        refused_by_vmmd(plan.vm.spec.as_ref()?)
    }
}

/// Why vmmd moves no such VM, with its reason.
fn refused_by_vmmd(spec: &v1::VmSpec) -> Option<(&'static str, &'static str)> {
    let is_image = |disk: &v1::DiskSpec| disk.format() == v1::DiskFormat::Qcow2 && !disk.read_only;
    if !spec.shares.is_empty() {
        Some(("MigrationShares", "it has shares"))
    } else if spec.disks.iter().any(is_image) {
        Some(("MigrationDisks", "it writes to a qcow2 image in a claim"))
    } else {
        None
    }
}

fn fail(migration: &mut Migration, reason: &str, message: impl Into<String>, now: Timestamp) {
    migration.phase = MigrationPhase::Failed;
    migration.end_time = Some(now.to_string());
    reason.clone_into(&mut migration.reason);
    migration.message = message.into();
}

/// The status after the failure of the migration that is under way.
pub fn failed(
    old: &VirtualMachineStatus,
    reason: &str,
    message: impl Into<String>,
    now: Timestamp,
) -> VirtualMachineStatus {
    let mut new = old.clone();
    if let Some(migration) = &mut new.migration {
        fail(migration, reason, message, now);
    }
    new
}

fn placing(
    seen: &Seen<'_>,
    old: &VirtualMachineStatus,
    migration: &Migration,
    run: Option<&Pod>,
    plan: Option<&Plan>,
) -> Act {
    let give_up = |reason: &str, message: &str| Act::Write(Box::new(failed(old, reason, message, seen.now)));
    if seen.machine.metadata.deletion_timestamp.is_some() {
        return give_up("Deleted", "it is being deleted");
    }
    let source = run.filter(|pod| pod.metadata.deletion_timestamp.is_none() && !state::is_gone(pod));
    let Some(source) = source else {
        return give_up("SourceGone", "its pod has ended, or is being deleted");
    };
    let digest = old.run.as_ref().map(|run| &run.digest);
    let Some(plan) = plan.filter(|plan| Some(&plan.digest()) == digest) else {
        return give_up("SpecChanged", "its spec was changed meanwhile");
    };
    let since = since(migration, seen.now);
    if since >= PLACING {
        return give_up(
            "NotPlaced",
            "the launcher of the second pod did not run on another node in time",
        );
    }
    let left = PLACING - since;
    let Some(target) = seen.target else {
        if migration.pod_uid.is_some() {
            return give_up("TargetGone", "the second pod was deleted");
        }
        return Act::CreateTarget {
            plan: Box::new(plan.clone()),
            epoch: migration.epoch,
            from: migration.from.clone(),
        };
    };
    let noted = migration.pod_uid.as_ref();
    let belongs = run::belongs(target, seen.machine, migration.epoch);
    if !belongs || noted.is_some_and(|noted| Some(noted) != target.metadata.uid.as_ref()) {
        return give_up("PodNameTaken", "another pod has the name of the second pod");
    }
    if target.metadata.deletion_timestamp.is_some() {
        return give_up("TargetGone", "the second pod was deleted");
    }
    if state::is_gone(target) {
        let (reason, message) = state::why(target);
        return give_up("TargetRefused", &format!("{reason}: {message}"));
    }
    let mut new = status::of(seen, old, Some(source), None);
    if let Some(change) = &mut new.migration {
        change.pod_uid = target.uid();
        if noted.is_some()
            && let Some(address) = address(target, seen.migration_port)
        {
            change.phase = MigrationPhase::Moving;
            change.to = target.spec.as_ref().and_then(|spec| spec.node_name.clone());
            change.address = Some(address);
        }
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

/// Time since the beginning of a migration.
fn since(migration: &Migration, now: Timestamp) -> SignedDuration {
    let began: Option<Timestamp> = migration.start_time.parse().ok();
    began.map_or(SignedDuration::MAX, |began| now.duration_since(began))
}

fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|one| one.type_ == kind)
}

/// Where the vmmd of a pod's node is reached, when the pod's launcher runs there.
fn address(pod: &Pod, port: u16) -> Option<String> {
    let host = pod.status.as_ref()?.host_ip.as_deref()?;
    if !state::launcher_runs(pod) {
        return None;
    }
    Some(match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    })
}

fn moving(seen: &Seen<'_>, old: &VirtualMachineStatus, migration: &Migration, run: Option<&Pod>) -> Act {
    let target = seen
        .target
        .filter(|target| target.metadata.uid == migration.pod_uid);
    let source = run.filter(|pod| !state::is_gone(pod));
    let lost = source.is_none_or(|pod| state::unreachable(pod, seen.now).is_some());
    let runs_there = target.is_some_and(|target| state::phase(target) == "Running");
    if run.is_some_and(state::has_migrated) || lost && runs_there {
        return Act::Write(Box::new(succeed(old, migration, seen.now)));
    }
    let deleting = seen.machine.metadata.deletion_timestamp.is_some();
    let limit = SignedDuration::from_secs(migration.timeout_seconds.max(0)) + PLACING;
    let left = limit - since(migration, seen.now);
    let ends = deleting || source.is_none() || !left.is_positive();
    let Some(target) = target.filter(|target| !state::is_gone(target)) else {
        let (reason, message) = match (seen.target, source) {
            _ if deleting => ("Deleted", "it is being deleted".to_owned()),
            (_, None) => ("SourceGone", "its pod has ended".to_owned()),
            _ if !left.is_positive() => ("TimedOut", "it was not moved within the time limit".to_owned()),
            (Some(pod), _) => {
                let (reason, message) = state::why(pod);
                (
                    "TargetGone",
                    format!("the second pod has ended: {reason}: {message}"),
                )
            }
            (None, _) => ("TargetGone", "the second pod was deleted".to_owned()),
        };
        return Act::Write(Box::new(failed(old, reason, message, seen.now)));
    };
    if ends && let Some(act) = decide::delete(target) {
        return act;
    }
    let new = status::of(seen, old, run, None);
    if new != *old {
        return Act::Write(Box::new(new));
    }
    match ends {
        true => Act::Idle,
        false => Act::Wait(left),
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

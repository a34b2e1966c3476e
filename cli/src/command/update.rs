//! Changes of an existing VM: the request to the daemon, and the report of its result.

use std::time::Duration;

use vmmd_api::{
    v1::{self, ApplyMode, VmPhase},
    well_known,
};

use super::difference;
use crate::{
    args::vm::SetMemory,
    client::{Client, DISKS, Kind as _, WORK, about_vm, empty_answer, send},
    failure::{Failure, Result},
    manifest::quantity,
    output,
};

/// Grace period that the daemon uses for a power-off by default.
const DEFAULT_GRACE: Duration = Duration::from_secs(60);

/// Report for a VM without changes.
pub const UNCHANGED: &str = "unchanged";

/// How a VM is changed.
#[derive(Clone, Copy, Debug, Default)]
pub struct How {
    /// Only report the changes.
    pub dry_run: bool,
    /// Restart the VM if a change waits for the next start.
    pub restart: bool,
    /// Grace period for requests to the guest.
    pub grace: Option<Duration>,
    /// Change media although the guest prevents their removal.
    pub force_media: bool,
}

/// Result of a change.
#[derive(Debug, Default, PartialEq)]
pub struct Done {
    /// Summary in a few words.
    pub text: String,
    /// One line for each change.
    pub lines: Vec<String>,
}

/// A change of some fields of a VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change {
    /// VM with the new values.
    pub vm: v1::Vm,
    /// The fields, as paths of an update mask.
    pub paths: Vec<String>,
}

/// Changes a VM to match `wanted`.
pub async fn update(client: &Client, wanted: v1::Vm, there: &v1::Vm, how: How) -> Result<Done> {
    let name = wanted.name().to_owned();
    let now = send(client, wanted, None, how).await;
    said(there, &now.map_err(|failure| explained(failure, &name))?)
}

/// Changes some fields of a VM; `change` builds the change from the existing VM. Concurrent changes
/// of other fields stay.
pub async fn rewrite(
    client: &Client,
    name: &str,
    how: How,
    change: impl FnOnce(&v1::Vm) -> Result<Change>,
) -> Result<Done> {
    let there = client.get(name).await?;
    let mut change = change(&there)?;
    if change.paths.is_empty() {
        return said(&there, &there);
    }
    // Refused for another VM with the same name.
    let uid = there.metadata.clone().unwrap_or_default().uid;
    change.vm.metadata.get_or_insert_default().uid = uid;
    let now = self::change(client, change, how).await;
    said(&there, &now.map_err(|failure| explained(failure, name))?)
}

/// Changes some fields of a VM; returns the changed VM, or the failure of the daemon.
pub async fn change(client: &Client, change: Change, how: How) -> Result<v1::Vm> {
    let Change { mut vm, paths } = change;
    vm.status = None;
    if let Some(metadata) = &mut vm.metadata {
        metadata.generation = 0;
    }
    send(client, vm, Some(well_known::FieldMask { paths }), how).await
}

async fn send(
    client: &Client,
    vm: v1::Vm,
    update_mask: Option<well_known::FieldMask>,
    how: How,
) -> Result<v1::Vm> {
    let apply = match how {
        How { dry_run: true, .. } => ApplyMode::DryRun,
        How { restart: true, .. } => ApplyMode::Restart,
        _ => ApplyMode::Unspecified,
    };
    let request = v1::UpdateVmRequest {
        vm: Some(vm),
        update_mask,
        apply: apply.into(),
        grace_period: how.grace.map(Into::into),
        force_media: how.force_media,
        ..Default::default()
    };
    let limit = how.grace.unwrap_or(DEFAULT_GRACE) + WORK;
    let answer = send!(client.limit(limit), client.vms, update_vm, request).await;
    answer?.vm.ok_or_else(empty_answer)
}

/// Adds to a failure of an update the command that helps.
fn explained(failure: Failure, name: &str) -> Failure {
    match &*failure.reason {
        "DISK_NOT_FOUND" => failure.about("vm", name).hint(DISKS),
        _ => about_vm(failure, name),
    }
}

/// Reason for a pending change of a field, for the end of a line; empty without one.
pub fn waits(vm: &v1::Vm, path: &str) -> String {
    let pending = vm.status.iter().flat_map(|status| &status.pending_changes);
    let mut found = pending.filter(|change| change.path == path);
    found
        .next()
        .map(|change| format!(" {}", at_next_start(change)))
        .unwrap_or_default()
}

/// Reports the change from the VM `there` to the VM `now`.
fn said(there: &v1::Vm, now: &v1::Vm) -> Result<Done> {
    let status = now.status.clone().unwrap_or_default();
    let pending = &status.pending_changes;
    let waits = |difference: &str| {
        let below = |path: &str| {
            let rest = difference.strip_prefix(path)?;
            rest.starts_with([':', '.', '[']).then_some(())
        };
        pending.iter().find(|change| below(&change.path).is_some())
    };
    let differences = difference::of_vms(there, now)?;
    let runs = !matches!(
        status.phase(),
        VmPhase::Pending | VmPhase::Stopped | VmPhase::Failed | VmPhase::Unspecified
    );
    let run = |vm: &v1::Vm| {
        let instance = vm.status.as_ref()?.instance.as_ref()?;
        Some((instance.pid, instance.start_time))
    };
    let restarted = run(now).is_some() && run(there).is_some() && run(now) != run(there);
    let mut lines: Vec<_> = differences
        .iter()
        .map(|difference| match waits(difference) {
            Some(change) => format!("{difference} {}", at_next_start(change)),
            None if runs && !restarted && difference.starts_with("spec.") => format!("{difference} (live)"),
            None => difference.clone(),
        })
        .collect();
    // Pending changes from an earlier update.
    for change in pending {
        let mut told = differences.iter().filter_map(|difference| waits(difference));
        if !told.any(|told| told.path == change.path) {
            lines.push(format!(
                "{} {}",
                difference::of_pending(change),
                at_next_start(change)
            ));
        }
    }
    let mut text = if differences.is_empty() {
        UNCHANGED
    } else {
        "changed"
    }
    .to_owned();
    if restarted {
        text += ", restarted";
    }
    Ok(Done { text, lines })
}

fn at_next_start(change: &v1::PendingChange) -> String {
    match change.message.as_str() {
        "" => "(at the next start)".to_owned(),
        why => format!("(at the next start: {why})"),
    }
}

/// `set memory`.
pub async fn memory(client: &Client, args: &SetMemory) -> Result<()> {
    let (name, target) = (&args.name, args.target.unwrap_or_default());
    let balloon = v1::BalloonSpec {
        target_bytes: target,
        ..Default::default()
    };
    let change = Change {
        vm: v1::Vm {
            metadata: super::metadata(name, &[]),
            spec: Some(v1::VmSpec {
                balloon: Some(balloon),
                ..Default::default()
            }),
            ..Default::default()
        },
        paths: vec!["spec.balloon.target_bytes".to_owned()],
    };
    let vm = self::change(client, change, How::default()).await;
    let vm = vm.map_err(|failure| about_vm(failure, name))?;
    let waits = waits(&vm, "spec.balloon.targetBytes");
    if target == 0 {
        return output::line(format!("vm/{name} gets all of its memory back{waits}"));
    }
    output::line(format!(
        "vm/{name} is asked to keep {}{waits}",
        quantity::show(target)
    ))
}

//! Changes of a VM that exists: what is asked of the daemon, and what is said of what came of it.

use std::time::Duration;

use proto::v1::{self, ApplyMode, VmPhase};

use super::difference;
use crate::{
    client::{Client, DISKS, WORK, about_vm, empty_answer, send},
    failure::Result,
};

/// What the daemon gives a guest to power off when nothing is said.
const DEFAULT_GRACE: Duration = Duration::from_secs(60);

/// What is said of a VM that is as wanted.
pub const UNCHANGED: &str = "unchanged";

/// How often a change is made anew of what somebody else has changed meanwhile.
pub const TRIES: u32 = 5;

/// How a VM is changed.
#[derive(Clone, Copy, Debug, Default)]
pub struct How {
    /// Only say what would be.
    pub dry_run: bool,
    /// Restart it when something is left that needs that.
    pub restart: bool,
    /// How long the guest may take for what it is asked.
    pub grace: Option<Duration>,
}

/// What came of it.
#[derive(Debug, Default, PartialEq)]
pub struct Done {
    /// In a few words.
    pub text: String,
    /// One change each.
    pub lines: Vec<String>,
}

/// Makes a VM the one that is wanted.
pub async fn update(client: &Client, wanted: v1::Vm, there: &v1::Vm, how: How) -> Result<Done> {
    let name = wanted.metadata.clone().unwrap_or_default().name;
    let apply = match how {
        How { dry_run: true, .. } => ApplyMode::DryRun,
        How { restart: true, .. } => ApplyMode::Restart,
        _ => ApplyMode::Unspecified,
    };
    let request = v1::UpdateVmRequest {
        vm: Some(wanted),
        apply: apply.into(),
        grace_period: how.grace.map(Into::into),
        ..Default::default()
    };
    let limit = how.grace.unwrap_or(DEFAULT_GRACE) + WORK;
    let answer = send!(client.limit(limit), client.vms, update_vm, request).await;
    let answer = answer.map_err(|failure| match &*failure.reason {
        "DISK_NOT_FOUND" => failure.about("vm", &name).hint(DISKS),
        _ => about_vm(failure, &name),
    });
    let vm = answer?.vm;
    said(there, &vm.ok_or_else(empty_answer)?)
}

/// Makes a VM what `wanted` makes of it. When somebody else changes it between the two, it is read and changed anew.
pub async fn rewrite(
    client: &Client,
    name: &str,
    how: How,
    wanted: impl Fn(&v1::Vm) -> Result<v1::Vm>,
) -> Result<Done> {
    let mut tries = 0;
    loop {
        tries += 1;
        let there = client.get(name).await?;
        let mut vm = wanted(&there)?;
        let known = there.metadata.clone().unwrap_or_default();
        let metadata = vm.metadata.get_or_insert_default();
        (metadata.uid, metadata.generation) = (known.uid, known.generation);
        vm.status = None;
        match update(client, vm, &there, how).await {
            Err(failure) if &*failure.reason == "GENERATION_MISMATCH" && tries < TRIES => {}
            done => return done,
        }
    }
}

/// What to say of a VM that was `there` and is `now`.
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
    // What an earlier change has left.
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

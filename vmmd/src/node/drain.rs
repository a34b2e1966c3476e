//! Drains the node: cordons it and stops all VMs, several at once, each gracefully and then by
//! force.
//!
//! The wanted state of the VMs stays unchanged: a VM whose run policy wants it to run starts again
//! when the node is uncordoned. A cancel of the drain also cancels the stops in progress and leaves
//! the other VMs running. A daemon that finds a drain of an earlier daemon ends it as cancelled.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::{
    sync::{Semaphore, oneshot},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use vmmd_api::v1::{DrainMetadata, DrainResult, ExitReason, Vm, VmPhase};
use vmmd_host::failure::{Failure, Kind};
use vmmd_objects::{
    context::Context,
    event::{Draft, Object},
    operation::{Detail, Handle, Metadata, Pending, Progress, Type, interrupted},
};

use super::operate;
use crate::{
    host::Host,
    registry::vms::command::{Command, Life, Request},
};

/// Guests that are asked to power off at the same time.
const AT_ONCE: usize = 16;
/// VMs that a message names.
const NAMED: usize = 10;

/// Begins to drain the node. Refused as NODE_DRAINING while another drain is under way.
pub async fn drain(
    host: &Arc<Host>,
    reason: String,
    grace: Duration,
    deadline: Option<Duration>,
    context: Context,
) -> Result<Pending, Failure> {
    // Checked and noted in one step, so that of two drains one is refused.
    let begin = host.node.change_if(&context.preconditions, |record| {
        if record.draining {
            let message = "the node is being drained already: wait, or cancel that operation first";
            return Err(Failure::precondition("NODE_DRAINING", message));
        }
        record.draining = true;
        Ok(())
    });
    begin.await?;
    if let Err(failure) = operate::cordon(host, reason, &context).await {
        settle(host).await;
        return Err(failure);
    }
    let operation = host
        .operations
        .begin(Type::NodeDrain, &Object::Node, &context, deadline);
    let pending = operation.pending();
    tell(
        host,
        Draft::normal(Object::Node, "DrainStarted", "all VMs are being stopped"),
        &context,
        &operation,
    );
    tokio::spawn(run(Arc::clone(host), operation, grace, context));
    Ok(pending)
}

/// Ends a drain that an earlier daemon was at.
pub async fn give_up(host: &Host) {
    if host.node.record().draining {
        settle(host).await;
        let message = "the daemon was restarted while the node was drained: the drain is cancelled, the node stays \
                       cordoned, and running VMs continue; drain it again";
        let mut draft = Draft::warning(Object::Node, "DrainCancelled", message);
        for operation in host.operations.left(&Object::Node) {
            operation.id().clone_into(&mut draft.operation);
            operation.give_way(&interrupted(message));
        }
        host.events.emit(draft);
    }
}

/// VMs with a process, or with one in the making, by name.
fn remaining(host: &Host) -> Vec<String> {
    let vms = host.vms.list();
    let running = vms.iter().filter(|vm| {
        let status = vm.status.as_ref();
        status.is_some_and(|status| status.instance.is_some() || status.phase() == VmPhase::Starting)
    });
    let names = running.filter_map(|vm| vm.metadata.as_ref());
    names.map(|metadata| metadata.name.clone()).collect()
}

async fn run(host: Arc<Host>, operation: Handle, grace: Duration, context: Context) {
    let mut stopped = Stopped::default();
    // All VMs: one that waits for its run policy makes room too.
    let all = host.vms.list();
    let all = all.iter().filter_map(|vm| vm.metadata.as_ref());
    let all = all.map(|metadata| metadata.name.clone()).collect();
    let mut problems = round(&host, &operation, grace, &context, (all, &mut stopped)).await;
    // A start that was admitted before the cordon may come up meanwhile: looked for once more.
    let left = remaining(&host);
    if !operation.token().is_cancelled() && !left.is_empty() {
        problems = round(&host, &operation, grace, &context, (left, &mut stopped)).await;
    }
    settle(&host).await;
    let left = remaining(&host);
    if operation.token().is_cancelled() && !left.is_empty() {
        let message = format!(
            "the drain was cancelled: the node stays cordoned, and these VMs continue: {}",
            some(&left, ", ")
        );
        tell(
            &host,
            Draft::warning(Object::Node, "DrainCancelled", &message),
            &context,
            &operation,
        );
        operation.cancelled(message);
    } else if left.is_empty() {
        tell(
            &host,
            Draft::normal(Object::Node, "Drained", "no VM runs any more"),
            &context,
            &operation,
        );
        let Stopped { all, killed } = stopped;
        let result = DrainResult {
            stopped: all.into_iter().collect(),
            killed: killed.into_iter().collect(),
        };
        operation.complete_as("no VM runs any more", Detail::Drained(result));
    } else {
        let message = format!(
            "these VMs still run: {} ({})",
            some(&left, ", "),
            some(&problems, "; ")
        );
        tell(
            &host,
            Draft::warning(Object::Node, "DrainFailed", &message),
            &context,
            &operation,
        );
        operation.fail(&Failure::new(Kind::Internal, "NODE_NOT_DRAINED", message));
    }
}

/// Names of the VMs that a drain has stopped.
#[derive(Default)]
struct Stopped {
    all: BTreeSet<String>,
    /// Those of them whose guests did not power off in time.
    killed: BTreeSet<String>,
}

/// The first of them, and how many more there are: a message goes to clients in a header of HTTP/2, which is short.
fn some(texts: &[String], separator: &str) -> String {
    let first: Vec<_> = texts.iter().take(NAMED).map(String::as_str).collect();
    let first = first.join(separator);
    match texts.len().saturating_sub(NAMED) {
        0 => first,
        more => format!("{first}{separator}and {more} more"),
    }
}

/// Stops these VMs; what went wrong with them.
async fn round(
    host: &Arc<Host>,
    operation: &Handle,
    grace: Duration,
    context: &Context,
    (names, stopped): (Vec<String>, &mut Stopped),
) -> Vec<String> {
    let (mut stops, mut problems) = (JoinSet::new(), Vec::new());
    let (turns, cancelled) = (Arc::new(Semaphore::new(AT_ONCE)), operation.token());
    for name in names {
        let (host, turns) = (Arc::clone(host), Arc::clone(&turns));
        stops.spawn(stop(
            host,
            name,
            grace,
            context.clone(),
            (turns, cancelled.clone()),
        ));
    }
    loop {
        tell_progress(operation, stopped.all.len(), remaining(host));
        match stops.join_next().await {
            Some(Ok(Ok(end))) => {
                if let Some((name, killed)) = end {
                    stopped.killed.extend(killed.then(|| name.clone()));
                    stopped.all.insert(name);
                }
            }
            Some(Ok(Err(problem))) => problems.push(problem),
            Some(Err(error)) => problems.push(error.to_string()),
            None => return problems,
        }
    }
}

fn tell_progress(operation: &Handle, stopped: usize, remaining: Vec<String>) {
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    let progress = Progress::vms(count(stopped), count(stopped.saturating_add(remaining.len())));
    let message = match remaining.as_slice() {
        [] => "no VM runs any more".to_owned(),
        names => format!("stopping {}", some(names, ", ")),
    };
    operation.metadata(Metadata::Drain(DrainMetadata { remaining }));
    operation.progress(progress, message);
}

/// Stops one VM. Its name and whether it had to be killed; `None` when there was nothing to stop.
async fn stop(
    host: Arc<Host>,
    name: String,
    grace: Duration,
    context: Context,
    (turns, cancelled): (Arc<Semaphore>, CancellationToken),
) -> Result<Option<(String, bool)>, String> {
    let problem = |failure: Failure| format!("VM \"{name}\": {}", failure.message);
    let Some(entry) = host.vms.get(&name) else {
        return Ok(None);
    };
    let mut state = entry.state.clone();
    let (_turn, pending) = loop {
        let turn = tokio::select! {
            turn = turns.acquire() => turn,
            () = cancelled.cancelled() => return Ok(None),
        };
        state.mark_unchanged();
        let (reply, answer) = oneshot::channel();
        let life = Life {
            grace: Some(grace),
            evacuate: true,
            ..Life::new(context.clone(), Request::Stop, reply)
        };
        // One that is gone meanwhile runs no more.
        if entry.mailbox.send(Command::Life(life)).await.is_err() {
            return Ok(None);
        }
        let Ok(answer) = answer.await else {
            return Ok(None);
        };
        match answer {
            // A migration, or a deletion as at its end, decides, and changes the VM's state. Meanwhile the turn is another VM's.
            Err(failure) if matches!(failure.reason, "MIGRATING" | "BEING_DELETED") => {
                drop(turn);
                tokio::select! {
                    changed = state.changed() => if changed.is_err() {
                        return Ok(None);
                    },
                    () = cancelled.cancelled() => return Err(problem(failure)),
                }
            }
            answer => break (turn, answer.map_err(problem)?.pending),
        }
    };
    let Some(pending) = pending else {
        return Ok(None);
    };
    let end = |vm: Option<Arc<Vm>>| Some((name.clone(), vm.is_some_and(|vm| was_killed(&vm))));
    let mut ended = Box::pin(pending.clone().ended());
    tokio::select! {
        ended = &mut ended => return ended.map(end).map_err(problem),
        () = cancelled.cancelled() => {}
    }
    // A stop that cannot be cancelled is almost complete.
    let _ = host.operations.cancel(&pending.operation().id);
    ended.await.map(end).map_err(problem)
}

fn was_killed(vm: &Vm) -> bool {
    let exit = vm.status.as_ref().and_then(|status| status.last_exit.as_ref());
    exit.is_some_and(|exit| exit.reason() == ExitReason::Killed)
}

/// Notes that no drain is under way.
async fn settle(host: &Host) {
    let settled = host.node.change(|record| {
        record.draining = false;
        Ok(())
    });
    if let Err(error) = settled.await {
        tracing::error!(%error, "note the end of a drain");
    }
}

fn tell(host: &Host, draft: Draft, context: &Context, operation: &Handle) {
    let mut draft = draft.of(context.clone());
    draft.operation = operation.id().to_owned();
    host.events.emit(draft);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_ten_vms_and_counts_the_others() {
        let names: Vec<_> = (0..1000).map(|number| format!("vm{number}")).collect();
        assert_eq!(some(&names[..2], ", "), "vm0, vm1");
        let text = some(&names, ", ");
        assert!(text.ends_with("vm9, and 990 more") && text.len() < 80, "{text}");
    }
}

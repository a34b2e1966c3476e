//! Verbs that change what a VM does: on several VMs at once, each with a result of its own.

use std::time::Duration;

use proto::v1::{self, VmPhase};
use tokio::task::JoinSet;

use crate::{
    args::Ending,
    client::{Client, QUICK, WORK, about_vm, send},
    failure::{Code, Failure, Result},
    output,
};

/// What the daemon gives a guest to power off when nothing is said.
const DEFAULT_GRACE: Duration = Duration::from_secs(60);

/// What is to be done with a VM.
#[derive(Clone, Debug)]
pub enum Verb {
    /// Start it.
    Start {
        /// Do not wait for the end.
        no_wait: bool,
    },
    /// Stop it; because the node goes down.
    Stop(Ending, bool),
    /// Press its reset button.
    Reset,
    /// Stop it, then start it.
    Restart(Ending),
    /// Hold its vCPUs.
    Pause,
    /// Let it go on.
    Resume,
    /// Delete it.
    Delete {
        /// Also when it runs.
        force: bool,
        /// One that is not there is no failure.
        ignore_not_found: bool,
        /// Do not wait for the end.
        no_wait: bool,
    },
}

/// Does `verb` to all named VMs at the same time; prints each success when the ones before it are done.
pub async fn each(client: &Client, names: &[String], verb: &Verb) -> Result<(), Vec<Failure>> {
    let mut tasks = JoinSet::new();
    for (index, name) in names.iter().cloned().enumerate() {
        let (client, verb) = (client.clone(), verb.clone());
        tasks.spawn(async move { (index, one(&client, &name, &verb).await) });
    }
    let mut results: Vec<_> = names.iter().map(|_| None).collect();
    let mut failures = Vec::new();
    let mut next = 0;
    while let Some(done) = tasks.join_next().await {
        let (index, result) = done.map_err(|error| vec![Failure::new(Code::Other, error.to_string())])?;
        if let Some(place) = results.get_mut(index) {
            *place = Some(result);
        }
        while let Some(result) = results.get_mut(next).and_then(Option::take) {
            next += 1;
            match result {
                Ok(Some(text)) => output::line(text).map_err(|failure| vec![failure])?,
                Ok(None) => {}
                Err(failure) => failures.push(failure),
            }
        }
    }
    super::all(failures)
}

/// Stops all VMs that have a process.
pub async fn stop_all(client: &Client, ending: Ending, evacuate: bool) -> Result<(), Vec<Failure>> {
    let vms = client
        .list(v1::VmFilter::default())
        .await
        .map_err(|failure| vec![failure])?;
    let running = vms.into_iter().filter(|vm| {
        let phase = vm
            .status
            .as_ref()
            .map_or(VmPhase::Unspecified, v1::VmStatus::phase);
        !matches!(phase, VmPhase::Pending | VmPhase::Stopped | VmPhase::Failed)
    });
    let names: Vec<_> = running.filter_map(|vm| Some(vm.metadata?.name)).collect();
    each(client, &names, &Verb::Stop(ending, evacuate)).await
}

/// Does `verb` to one VM; the line to print, if any.
async fn one(client: &Client, name: &str, verb: &Verb) -> Result<Option<String>> {
    let owned = name.to_owned();
    let done = match *verb {
        Verb::Start { no_wait } => {
            let request = v1::StartVmRequest {
                name: owned,
                no_wait,
                ..Default::default()
            };
            let answer = send!(WORK, client.vms, start_vm, request).await;
            answer.map(|answer| told("started", "starting", no_wait, answer.operation))
        }
        Verb::Stop(
            Ending {
                grace,
                force,
                no_wait,
            },
            evacuate,
        ) => {
            let request = v1::StopVmRequest {
                name: owned,
                grace_period: grace.map(Into::into),
                force,
                evacuate,
                no_wait,
                ..Default::default()
            };
            let answer = send!(limit(grace), client.vms, stop_vm, request).await;
            answer.map(|answer| told("stopped", "stopping", no_wait, answer.operation))
        }
        Verb::Restart(Ending {
            grace,
            force,
            no_wait,
        }) => {
            let request = v1::RestartVmRequest {
                name: owned,
                grace_period: grace.map(Into::into),
                force,
                no_wait,
                ..Default::default()
            };
            let answer = send!(limit(grace), client.vms, restart_vm, request).await;
            answer.map(|answer| told("restarted", "restarting", no_wait, answer.operation))
        }
        Verb::Reset => {
            let request = v1::ResetVmRequest {
                name: owned,
                ..Default::default()
            };
            send!(QUICK, client.vms, reset_vm, request)
                .await
                .map(|_| "reset".to_owned())
        }
        Verb::Pause => send!(
            QUICK,
            client.vms,
            pause_vm,
            v1::PauseVmRequest {
                name: owned,
                ..Default::default()
            }
        )
        .await
        .map(|_| "paused".to_owned()),
        Verb::Resume => send!(
            QUICK,
            client.vms,
            resume_vm,
            v1::ResumeVmRequest {
                name: owned,
                ..Default::default()
            }
        )
        .await
        .map(|_| "resumed".to_owned()),
        Verb::Delete {
            force,
            ignore_not_found,
            no_wait,
        } => {
            let request = v1::DeleteVmRequest {
                name: owned,
                force,
                no_wait,
                ..Default::default()
            };
            match send!(WORK, client.vms, delete_vm, request).await {
                Err(failure) if ignore_not_found && failure.code == Code::NotFound => return Ok(None),
                result => result.map(|answer| told("deleted", "deleting", no_wait, answer.operation)),
            }
        }
    };
    match done {
        Ok(done) => Ok(Some(format!("vm/{name} {done}"))),
        Err(failure) => Err(about_vm(failure, name)),
    }
}

/// What was done; or, when that was not waited for, what has begun.
fn told(done: &str, begun: &str, no_wait: bool, operation: Option<v1::Operation>) -> String {
    match operation.filter(|_| no_wait) {
        Some(operation) => format!("{begun} (operation/{})", operation.id),
        None => done.to_owned(),
    }
}

fn limit(grace: Option<Duration>) -> Duration {
    grace.unwrap_or(DEFAULT_GRACE) + WORK
}

//! The verbs for a VM, and their requests to the daemon.

use std::time::Duration;

use vmmd_api::v1::{self, VmPhase};

use super::Done;
use crate::{
    args::Ending,
    client::{Client, QUICK, WORK, send},
    failure::{Code, Failure, Result},
};

/// Grace period that the daemon uses for a power-off by default.
const DEFAULT_GRACE: Duration = Duration::from_secs(60);

/// How much longer than the daemon vmmctl waits, so that the daemon says what became of an operation whose time is over.
const LATE: Duration = Duration::from_secs(2);

/// Verb for a VM.
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
    /// Resume it.
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

impl Verb {
    /// As in "to stop".
    pub fn word(&self) -> &'static str {
        match self {
            Self::Start { .. } => "start",
            Self::Stop(..) => "stop",
            Self::Reset => "reset",
            Self::Restart(_) => "restart",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Delete { .. } => "delete",
        }
    }

    /// Whether there is something to do to a VM in this phase.
    pub fn is_for(&self, phase: VmPhase) -> bool {
        let down = is_down(phase);
        match self {
            Self::Start { .. } => down,
            Self::Stop(..) | Self::Restart(_) => !down,
            Self::Reset | Self::Pause => phase == VmPhase::Running,
            Self::Resume => phase == VmPhase::Paused,
            Self::Delete { .. } => true,
        }
    }

    /// Whether it takes as long as guests take to power off.
    pub fn waits_for_guests(&self) -> bool {
        matches!(self, Self::Stop(..) | Self::Restart(_))
    }

    /// Does it to one VM.
    pub async fn carry_out(&self, client: &Client, name: &str) -> Result<Done> {
        let name = name.to_owned();
        match *self {
            Self::Start { no_wait } => start(client, name, no_wait).await,
            Self::Stop(ending, evacuate) => stop(client, name, ending, evacuate).await,
            Self::Restart(ending) => restart(client, name, ending).await,
            Self::Reset => {
                let request = v1::ResetVmRequest {
                    name,
                    ..Default::default()
                };
                done(
                    "reset",
                    send!(client.limit(QUICK), client.vms, reset_vm, request).await,
                )
            }
            Self::Pause => {
                let request = v1::PauseVmRequest {
                    name,
                    ..Default::default()
                };
                done(
                    "paused",
                    send!(client.limit(QUICK), client.vms, pause_vm, request).await,
                )
            }
            Self::Resume => {
                let request = v1::ResumeVmRequest {
                    name,
                    ..Default::default()
                };
                done(
                    "resumed",
                    send!(client.limit(QUICK), client.vms, resume_vm, request).await,
                )
            }
            Self::Delete {
                force,
                ignore_not_found,
                no_wait,
            } => delete(client, name, force, ignore_not_found, no_wait).await,
        }
    }
}

/// Whether a VM in this phase has no process.
pub fn is_down(phase: VmPhase) -> bool {
    matches!(phase, VmPhase::Pending | VmPhase::Stopped | VmPhase::Failed)
}

async fn start(client: &Client, name: String, no_wait: bool) -> Result<Done> {
    let request = v1::StartVmRequest {
        name,
        no_wait,
        timeout: client.timeout().map(Into::into),
        ..Default::default()
    };
    match send!(wait(client, WORK), client.vms, start_vm, request).await {
        // As with `stop` of a stopped VM: the VM runs already, and no operation has begun.
        Ok(answer) if answer.operation.is_none() => Ok(said("runs already")),
        Ok(answer) => Ok(told("started", "starting", no_wait, answer.operation)),
        // An older daemon returns this error.
        Err(failure) if &*failure.reason == "ALREADY_RUNNING" => Ok(said("runs already")),
        Err(failure) => Err(failure),
    }
}

async fn stop(client: &Client, name: String, ending: Ending, evacuate: bool) -> Result<Done> {
    let Ending {
        grace,
        force,
        no_wait,
    } = ending;
    let request = v1::StopVmRequest {
        name,
        grace_period: grace.map(Into::into),
        force,
        evacuate,
        no_wait,
        timeout: client.timeout().map(Into::into),
        ..Default::default()
    };
    let answer = send!(limit(client, grace), client.vms, stop_vm, request).await?;
    let asked = !force && !no_wait && answer.operation.is_some();
    if asked && was_killed(answer.vm.as_ref()) {
        return Ok(killed("killed", answer.vm.as_ref(), grace));
    }
    if asked && last_exit(answer.vm.as_ref()) == v1::ExitReason::GuestPanic {
        return Ok(panicked(answer.vm.as_ref()));
    }
    Ok(told("stopped", "stopping", no_wait, answer.operation))
}

async fn restart(client: &Client, name: String, ending: Ending) -> Result<Done> {
    let Ending {
        grace,
        force,
        no_wait,
    } = ending;
    let request = v1::RestartVmRequest {
        name,
        grace_period: grace.map(Into::into),
        force,
        no_wait,
        timeout: client.timeout().map(Into::into),
        ..Default::default()
    };
    let answer = send!(limit(client, grace), client.vms, restart_vm, request).await?;
    if !force && !no_wait && answer.operation.is_some() && was_killed(answer.vm.as_ref()) {
        return Ok(killed("killed and started again", answer.vm.as_ref(), grace));
    }
    Ok(told("restarted", "restarting", no_wait, answer.operation))
}

async fn delete(
    client: &Client,
    name: String,
    force: bool,
    ignore_not_found: bool,
    no_wait: bool,
) -> Result<Done> {
    let request = v1::DeleteVmRequest {
        name,
        force,
        no_wait,
        timeout: client.timeout().map(Into::into),
        ..Default::default()
    };
    match send!(wait(client, WORK), client.vms, delete_vm, request).await {
        Err(failure) if ignore_not_found && failure.code == Code::NotFound => Ok(Done::default()),
        Err(failure) => Err(failure),
        Ok(answer) => Ok(told("deleted", "deleting", no_wait, answer.operation)),
    }
}

fn said(text: impl Into<String>) -> Done {
    Done {
        text: Some(text.into()),
        warning: None,
    }
}

fn done<T>(text: &str, answer: Result<T>) -> Result<Done> {
    answer.map(|_| said(text))
}

/// Reports the completed verb; without waiting, reports the operation in progress.
fn told(done: &str, begun: &str, no_wait: bool, operation: Option<v1::Operation>) -> Done {
    match operation.filter(|_| no_wait) {
        Some(operation) => said(format!("{begun} (operation/{})", operation.id)),
        None => said(done),
    }
}

/// Whether the last run was killed.
fn was_killed(vm: Option<&v1::Vm>) -> bool {
    last_exit(vm) == v1::ExitReason::Killed
}

fn last_exit(vm: Option<&v1::Vm>) -> v1::ExitReason {
    let exit = vm.and_then(|vm| vm.status.as_ref()?.last_exit.as_ref());
    exit.map_or(v1::ExitReason::Unspecified, v1::ExitStatus::reason)
}

/// A guest that was asked to power off, and had to be killed.
fn killed(text: &str, vm: Option<&v1::Vm>, grace: Option<Duration>) -> Done {
    let name = vm
        .and_then(|vm| vm.metadata.as_ref())
        .map_or("", |metadata| &metadata.name);
    let grace = grace.unwrap_or(DEFAULT_GRACE).as_secs();
    let message = format!("vm/{name}: its guest did not power off within {grace} s and was killed");
    let warning = Failure::new(Code::Killed, message).hint("what it had not written to its disks is lost");
    Done {
        text: Some(text.to_owned()),
        warning: Some(warning),
    }
}

/// A guest that could not be asked to power off.
fn panicked(vm: Option<&v1::Vm>) -> Done {
    let metadata = vm.and_then(|vm| vm.metadata.as_ref());
    let name = metadata.map_or("", |metadata| &metadata.name);
    let message = format!("vm/{name}: its guest's kernel had panicked, and it was killed");
    let warning = Failure::new(Code::Killed, message).hint("what it had not written to its disks is lost");
    Done {
        text: Some("killed".to_owned()),
        warning: Some(warning),
    }
}

/// How long to wait for an operation: longer than the daemon, which cancels it at the user's timeout and says so.
fn wait(client: &Client, usual: Duration) -> Duration {
    client.timeout().map_or(usual, |timeout| timeout + LATE)
}

fn limit(client: &Client, grace: Option<Duration>) -> Duration {
    wait(client, grace.unwrap_or(DEFAULT_GRACE) + WORK)
}

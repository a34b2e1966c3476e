//! Verbs that change the state of VMs: on several VMs at once, each with its own result.

use std::time::Duration;

use vmmd_api::v1::{self, VmPhase};

use super::work::{AT_ONCE, guarded, side_by_side};
use crate::{
    args::{
        Targets,
        verbs::{Act, Ending},
    },
    client::{Client, Kind, QUICK, Query, WORK, about_vm, send},
    failure::{Code, Failure, Result},
    output,
};

/// Number of guests to wait for at a time when they are asked to power off.
const GUESTS_AT_ONCE: usize = 64;

/// Result of a verb.
#[derive(Debug, Default)]
pub struct Done {
    /// Text to print after the VM's name; `None` prints nothing.
    pub text: Option<String>,
    /// Warning about a verb that succeeded.
    pub warning: Option<Failure>,
}

/// Applies `verb` to the VMs that the command line selects.
pub async fn run(client: &Client, act: &Act, verb: &Verb) -> Result<(), Vec<Failure>> {
    let client = client.with_timeout(act.timeout.timeout);
    let names = names(&client, &act.targets, |phase| verb.is_for(phase)).await?;
    if names.is_empty() {
        eprintln!("There are no VMs to {}.", verb.word());
    }
    each(&client, names, verb).await
}

/// Returns the names of the VMs that the command line selects. VMs without an explicit name count
/// only in a phase that the verb applies to.
pub async fn names(
    client: &Client,
    targets: &Targets,
    is_for: impl Fn(VmPhase) -> bool,
) -> Result<Vec<String>> {
    if !targets.names.is_empty() {
        return Ok(targets.names.clone());
    }
    let query = Query {
        labels: targets.selector.iter().map(ToString::to_string).collect(),
        ..Default::default()
    };
    let vms = client.objects::<v1::Vm>(&query).await?.into_iter();
    let meant = vms.filter(|vm| is_for(phase(vm)));
    Ok(meant.filter_map(|vm| Some(vm.metadata?.name)).collect())
}

/// The phase of a VM.
pub fn phase(vm: &v1::Vm) -> VmPhase {
    vm.status
        .as_ref()
        .map_or(VmPhase::Unspecified, v1::VmStatus::phase)
}

/// Applies `verb` to all named VMs side by side; prints each success when all earlier ones are done.
pub async fn each(client: &Client, names: Vec<String>, verb: &Verb) -> Result<(), Vec<Failure>> {
    let at_once = if verb.waits_for_guests() {
        GUESTS_AT_ONCE
    } else {
        AT_ONCE
    };
    let work = |name: String| {
        let (client, verb) = (client.clone(), verb.clone());
        async move {
            let result = one(&client, &name, &verb).await;
            (name, result)
        }
    };
    let mut failures = Vec::new();
    let printed = side_by_side(names, at_once, work, |(name, result)| {
        match result {
            Ok(Done { text, warning }) => {
                failures.extend(warning);
                text.map_or(Ok(()), |text| output::line(format!("vm/{name} {text}")))?;
            }
            Err(failure) => failures.push(failure),
        }
        Ok(())
    });
    guarded(client, printed).await?;
    super::all(failures)
}

async fn one(client: &Client, name: &str, verb: &Verb) -> Result<Done> {
    match verb.carry_out(client, name).await {
        Ok(done) => Ok(done),
        Err(failure) => {
            let failure = client.name_the_silent(failure, name).await;
            Err(about_vm(failure, name))
        }
    }
}

/// Grace period that the daemon uses for a power-off by default.
const DEFAULT_GRACE: Duration = Duration::from_secs(60);

/// Time that vmmctl waits longer than the daemon, so that the daemon reports the result at its time limit.
const LATE: Duration = Duration::from_secs(2);

/// Verb for a VM.
#[derive(Clone, Debug)]
pub enum Verb {
    /// Start it.
    Start {
        /// Do not wait for the end.
        no_wait: bool,
        /// Begin with new UEFI variables.
        reset_nvram: bool,
    },
    /// Stop it; `true` for a shutdown of the node.
    Stop(Ending, bool),
    /// Press its reset button.
    Reset,
    /// Give its vCPUs a non-maskable interrupt.
    Nmi,
    /// Stop it, then start it.
    Restart(Ending),
    /// Pause its vCPUs.
    Pause,
    /// Resume it.
    Resume,
    /// Delete it.
    Delete {
        /// Kill a running VM first.
        force: bool,
        /// Accept a VM that does not exist.
        ignore_not_found: bool,
        /// Do not wait for the end.
        no_wait: bool,
    },
}

impl Verb {
    /// The verb in a sentence: "to stop".
    pub fn word(&self) -> &'static str {
        match self {
            Self::Start { .. } => "start",
            Self::Stop(..) => "stop",
            Self::Reset => "reset",
            Self::Nmi => "send an NMI to",
            Self::Restart(_) => "restart",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Delete { .. } => "delete",
        }
    }

    /// Whether the verb applies to a VM in this phase.
    pub fn is_for(&self, phase: VmPhase) -> bool {
        let down = is_down(phase);
        match self {
            Self::Start { .. } => down,
            Self::Stop(..) | Self::Restart(_) => !down,
            Self::Reset | Self::Nmi | Self::Pause => phase == VmPhase::Running,
            Self::Resume => phase == VmPhase::Paused,
            Self::Delete { .. } => true,
        }
    }

    /// Whether the verb waits for guests to power off.
    pub fn waits_for_guests(&self) -> bool {
        matches!(self, Self::Stop(..) | Self::Restart(_))
    }

    /// Applies the verb to one VM.
    pub async fn carry_out(&self, client: &Client, name: &str) -> Result<Done> {
        let name = name.to_owned();
        match *self {
            Self::Start { no_wait, reset_nvram } => start(client, name, no_wait, reset_nvram).await,
            Self::Stop(ending, evacuate) => stop(client, name, ending, evacuate).await,
            Self::Restart(ending) => restart(client, name, ending).await,
            Self::Reset => {
                let request = v1::ResetVmRequest {
                    name,
                    ..Default::default()
                };
                let answer = send!(client.limit(QUICK), client.vms, reset_vm, request).await;
                answer.map(|_| said("reset"))
            }
            Self::Nmi => {
                let request = v1::InjectNmiRequest {
                    name,
                    ..Default::default()
                };
                let answer = send!(client.limit(QUICK), client.vms, inject_nmi, request).await;
                answer.map(|_| said("interrupted"))
            }
            Self::Pause => {
                let request = v1::PauseVmRequest {
                    name,
                    ..Default::default()
                };
                let answer = send!(client.limit(QUICK), client.vms, pause_vm, request).await;
                answer.map(|_| said("paused"))
            }
            Self::Resume => {
                let request = v1::ResumeVmRequest {
                    name,
                    ..Default::default()
                };
                let answer = send!(client.limit(QUICK), client.vms, resume_vm, request).await;
                answer.map(|_| said("resumed"))
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

async fn start(client: &Client, name: String, no_wait: bool, reset_nvram: bool) -> Result<Done> {
    let request = v1::StartVmRequest {
        name,
        no_wait,
        reset_nvram,
        timeout: client.timeout().map(Into::into),
        ..Default::default()
    };
    match send!(wait(client, WORK), client.vms, start_vm, request).await {
        // The VM runs already, and no operation has begun.
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
        return Ok(killed("killed", answer.vm.as_ref(), &too_slow(grace)));
    }
    if asked && last_exit(answer.vm.as_ref()) == v1::ExitReason::GuestPanic {
        return Ok(killed(
            "killed",
            answer.vm.as_ref(),
            "the kernel of the guest had panicked, and the guest was killed",
        ));
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
        let why = too_slow(grace);
        return Ok(killed("killed and started again", answer.vm.as_ref(), &why));
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

/// A guest that was killed instead of powered off, and the reason.
fn killed(text: &str, vm: Option<&v1::Vm>, why: &str) -> Done {
    let message = format!("vm/{}: {why}", vm.map_or("", Kind::name));
    let warning =
        Failure::new(Code::Killed, message).hint("data that the guest had not written to its disks is lost");
    Done {
        text: Some(text.to_owned()),
        warning: Some(warning),
    }
}

fn too_slow(grace: Option<Duration>) -> String {
    let grace = grace.unwrap_or(DEFAULT_GRACE).as_secs();
    format!("the guest did not power off within {grace} s and was killed")
}

/// How long to wait for an operation: longer than the daemon, which cancels the operation at the user's timeout.
fn wait(client: &Client, usual: Duration) -> Duration {
    client.timeout().map_or(usual, |timeout| timeout + LATE)
}

fn limit(client: &Client, grace: Option<Duration>) -> Duration {
    wait(client, grace.unwrap_or(DEFAULT_GRACE) + WORK)
}

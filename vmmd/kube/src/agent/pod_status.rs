//! Status of a placeholder pod, from its VM in vmmd.

use std::net::IpAddr;

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{
        ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
        ContainerStatus, HostIP, Pod, PodCondition, PodIP, PodStatus,
    },
    apimachinery::pkg::apis::meta::v1::Time,
};
use vmmd_api::{
    v1::{self, ConditionStatus, ExitReason, RunPolicy, VmPhase},
    well_known,
};

use crate::{names, spec};

/// How a run of a VM stands, in the words of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It is being started, or will be again.
    Waiting,
    /// It has a process.
    Running,
    /// It has ended, and nothing starts it again.
    Ended(End),
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest has powered off.
    Succeeded,
    /// Somebody has stopped it.
    Stopped,
    /// Anything else.
    Failed,
}

/// Of a VM. vmmd notes the next start before it says that a run has ended.
pub fn stage(vm: &v1::Vm) -> Stage {
    let status = vm.status.clone().unwrap_or_default();
    match status.phase() {
        VmPhase::Running | VmPhase::Paused | VmPhase::Stopping => return Stage::Running,
        VmPhase::Stopped | VmPhase::Failed | VmPhase::Terminating => {}
        VmPhase::Unspecified | VmPhase::Pending | VmPhase::Starting => return Stage::Waiting,
    }
    let next = status
        .restart
        .as_ref()
        .and_then(|restart| restart.next_start_time.as_ref());
    let Some(exit) = &status.last_exit else {
        // A failed start counts as an end too. Without an exit, the VM was never started.
        return Stage::Waiting;
    };
    if next.is_some() {
        return Stage::Waiting;
    }
    let end = match exit.reason() {
        ExitReason::GuestShutdown => End::Succeeded,
        ExitReason::Stopped | ExitReason::Killed => End::Stopped,
        _ => End::Failed,
    };
    let again = match spec::run_policy(vm) {
        RunPolicy::AlwaysOn | RunPolicy::AlwaysOnUnlessStopped => end != End::Stopped,
        RunPolicy::RerunOnFailure => end == End::Failed,
        _ => false,
    };
    if again { Stage::Waiting } else { Stage::Ended(end) }
}

/// Status of a pod with an existing VM.
pub fn of(pod: &Pod, vm: &v1::Vm, host: &str, now: Timestamp) -> PodStatus {
    let status = vm.status.clone().unwrap_or_default();
    let metadata = vm.metadata.clone().unwrap_or_default();
    let stage = stage(vm);
    let ready_condition = status.conditions.iter().find(|one| one.r#type == "Ready");
    let ready =
        stage == Stage::Running && ready_condition.is_some_and(|one| one.status() == ConditionStatus::True);
    let exit = status.last_exit.as_ref();
    let terminated = exit.map(|exit| terminated(exit, &metadata.uid));
    let state = match stage {
        Stage::Waiting => ContainerState {
            waiting: Some(ContainerStateWaiting {
                reason: Some(waiting_reason(exit).to_owned()),
                message: Some(status.message.clone()).filter(|text| !text.is_empty()),
            }),
            ..ContainerState::default()
        },
        Stage::Running => ContainerState {
            running: Some(ContainerStateRunning {
                started_at: status
                    .instance
                    .as_ref()
                    .and_then(|instance| time(instance.start_time.as_ref())),
            }),
            ..ContainerState::default()
        },
        Stage::Ended(_) => ContainerState {
            terminated: terminated.clone(),
            ..ContainerState::default()
        },
    };
    let restarts = status.counts.as_ref().map_or(0, |counts| counts.automatic_starts);
    let container = ContainerStatus {
        name: names::CONTAINER.to_owned(),
        image: names::IMAGE.to_owned(),
        container_id: Some(format!("vmmd://{}", metadata.uid)),
        ready,
        started: Some(stage == Stage::Running),
        restart_count: i32::try_from(restarts).unwrap_or(i32::MAX),
        last_state: terminated
            .filter(|_| !matches!(stage, Stage::Ended(_)))
            .map(|terminated| ContainerState {
                terminated: Some(terminated),
                ..ContainerState::default()
            }),
        state: Some(state),
        ..ContainerStatus::default()
    };
    let (phase, reason) = match stage {
        Stage::Waiting if !has_run(&status) => ("Pending", None),
        Stage::Waiting | Stage::Running => ("Running", None),
        Stage::Ended(End::Succeeded) => ("Succeeded", None),
        Stage::Ended(End::Stopped) => ("Succeeded", Some(names::STOPPED.to_owned())),
        Stage::Ended(End::Failed) => ("Failed", Some(status.reason.clone())),
    };
    let why = match (ready, ready_condition) {
        (true, _) => (String::new(), String::new()),
        (false, Some(one)) if stage == Stage::Running => (one.reason.clone(), one.message.clone()),
        (false, _) => (status.reason.clone(), status.message.clone()),
    };
    let (ips, local) = (pod_ips(&status, true), pod_ips(&status, false));
    let mut new = base(pod, host, now);
    new.phase = Some(phase.to_owned());
    new.reason = reason;
    new.message = Some(status.message).filter(|text| !text.is_empty());
    new.pod_ip = ips.first().map(|ip| ip.ip.clone());
    new.pod_ips = Some(ips).filter(|ips| !ips.is_empty());
    new.container_statuses = Some(vec![container]);
    let mut conditions = conditions(pod, ready, why, now);
    conditions.extend(node_local(pod, &local, now));
    new.conditions = Some(conditions);
    new
}

/// Says which addresses others can't use. Each node may give the same ones to its VMs, and Services would lead to a VM of another node.
fn node_local(pod: &Pod, addresses: &[PodIP], now: Timestamp) -> Option<PodCondition> {
    let named: Vec<_> = addresses.iter().map(|address| address.ip.as_str()).collect();
    let message = Some(named.join(",")).filter(|named| !named.is_empty())?;
    let old = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let before = old
        .into_iter()
        .flatten()
        .find(|one| one.type_ == names::NODE_LOCAL);
    Some(PodCondition {
        type_: names::NODE_LOCAL.to_owned(),
        status: "True".to_owned(),
        message: Some(message),
        last_transition_time: before
            .and_then(|before| before.last_transition_time.clone())
            .or_else(|| Some(Time(seconds(now)))),
        ..PodCondition::default()
    })
}

/// The first address of each family, of NICs in routed networks or of the others: the API server takes no more.
fn pod_ips(status: &v1::VmStatus, routed: bool) -> Vec<PodIP> {
    let nics = status.nics.iter().filter(|nic| nic.routed == routed);
    let addresses = nics.flat_map(|nic| nic.addresses.iter());
    let mut ips: Vec<IpAddr> = Vec::new();
    for address in addresses {
        let ip = address.split('/').next().unwrap_or_default().parse::<IpAddr>();
        ips.extend(
            ip.ok()
                .filter(|ip| ips.iter().all(|known| known.is_ipv4() != ip.is_ipv4())),
        );
    }
    ips.into_iter().map(|ip| PodIP { ip: ip.to_string() }).collect()
}

/// Why there is no process, as the state of a container says it.
fn waiting_reason(exit: Option<&v1::ExitStatus>) -> &'static str {
    match exit.map(v1::ExitStatus::reason) {
        None => "ContainerCreating",
        Some(ExitReason::StartFailed) => "StartFailed",
        Some(_) => "CrashLoopBackOff",
    }
}

/// Whether a start came to a run.
fn has_run(status: &v1::VmStatus) -> bool {
    let counts = status.counts.unwrap_or_default();
    status.last_exit.is_some() && counts.starts > counts.failed_starts
}

/// The status of a pod that has no VM and will get none.
pub fn failed(pod: &Pod, reason: &str, message: &str, host: &str, now: Timestamp) -> PodStatus {
    let mut new = base(pod, host, now);
    new.phase = Some("Failed".to_owned());
    new.reason = Some(reason.to_owned());
    new.message = Some(message.to_owned());
    new.conditions = Some(conditions(
        pod,
        false,
        (reason.to_owned(), message.to_owned()),
        now,
    ));
    new
}

/// Status of a pod whose VM cannot be created yet.
pub fn waiting(pod: &Pod, reason: &str, message: &str, host: &str, now: Timestamp) -> PodStatus {
    let mut new = base(pod, host, now);
    new.phase = Some("Pending".to_owned());
    let state = ContainerState {
        waiting: Some(ContainerStateWaiting {
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
        }),
        ..ContainerState::default()
    };
    new.container_statuses = Some(vec![ContainerStatus {
        name: names::CONTAINER.to_owned(),
        image: names::IMAGE.to_owned(),
        state: Some(state),
        ..ContainerStatus::default()
    }]);
    new.conditions = Some(conditions(
        pod,
        false,
        (reason.to_owned(), message.to_owned()),
        now,
    ));
    new
}

/// Condition of a pod about the end of a migration.
pub fn migration(pod: &Pod, epoch: i64) -> Option<&PodCondition> {
    let kind = names::migration_condition(epoch);
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|one| one.type_ == kind)
}

/// All conditions of a pod, with that of how a migration has ended.
pub fn with_migration(
    pod: &Pod,
    epoch: i64,
    moved: bool,
    (reason, message): (&str, &str),
    now: Timestamp,
) -> Vec<PodCondition> {
    let old = pod.status.as_ref().and_then(|status| status.conditions.clone());
    let mut conditions = old.unwrap_or_default();
    let kind = names::migration_condition(epoch);
    conditions.retain(|one| one.type_ != kind);
    conditions.push(PodCondition {
        type_: kind,
        status: if moved { "True" } else { "False" }.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.chars().take(1000).collect()),
        last_transition_time: Some(Time(seconds(now))),
        ..PodCondition::default()
    });
    conditions
}

/// Whether the API server has to be told: everything but times of conditions that did not change.
pub fn differs(pod: &Pod, new: &PodStatus) -> bool {
    let old = pod.status.clone().unwrap_or_default();
    let said = |status: &PodStatus| {
        (
            status.phase.clone(),
            status.reason.clone(),
            status.message.clone(),
            status.pod_ips.clone(),
            status.conditions.clone(),
            containers(status),
        )
    };
    said(&old) != said(new)
}

/// The API server writes an empty last state where there is none.
fn containers(status: &PodStatus) -> Option<Vec<ContainerStatus>> {
    let mut containers = status.container_statuses.clone()?;
    for container in &mut containers {
        let last = container.last_state.take();
        container.last_state = last.filter(|last| *last != ContainerState::default());
    }
    Some(containers)
}

fn base(pod: &Pod, host: &str, now: Timestamp) -> PodStatus {
    let old = pod.status.clone().unwrap_or_default();
    PodStatus {
        host_ip: Some(host.to_owned()),
        host_ips: Some(vec![HostIP { ip: host.to_owned() }]),
        start_time: old.start_time.or(Some(Time(now))),
        qos_class: old.qos_class,
        ..PodStatus::default()
    }
}

/// Those of others, such as the scheduler's, stay.
fn conditions(
    pod: &Pod,
    ready: bool,
    (reason, message): (String, String),
    now: Timestamp,
) -> Vec<PodCondition> {
    let old = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.clone())
        .unwrap_or_default();
    let own = ["Initialized", "Ready", "ContainersReady"];
    let mut new: Vec<_> = old
        .iter()
        .filter(|one| !own.contains(&&*one.type_) && one.type_ != names::NODE_LOCAL)
        .cloned()
        .collect();
    for kind in own {
        let is = ready || kind == "Initialized";
        let status = if is { "True" } else { "False" };
        let before = old.iter().find(|one| one.type_ == kind && one.status == status);
        let text = |text: &str| Some(text.to_owned()).filter(|text| !is && !text.is_empty());
        new.push(PodCondition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: text(&reason),
            message: text(&message),
            last_transition_time: before
                .and_then(|before| before.last_transition_time.clone())
                .or_else(|| Some(Time(seconds(now)))),
            ..PodCondition::default()
        });
    }
    new
}

/// The API server keeps whole seconds only.
fn seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

fn time(time: Option<&well_known::Timestamp>) -> Option<Time> {
    Timestamp::from_second(time?.seconds).ok().map(Time)
}

fn terminated(exit: &v1::ExitStatus, uid: &str) -> ContainerStateTerminated {
    let reason = exit.reason();
    let code = match reason {
        ExitReason::GuestShutdown | ExitReason::Stopped => 0,
        // As of a process that was killed.
        ExitReason::Killed | ExitReason::OutOfMemory => 137,
        _ => 1,
    };
    let word = reason.as_str_name().trim_start_matches("EXIT_REASON_");
    let word = if reason == ExitReason::OutOfMemory {
        "OOMKilled".to_owned()
    } else {
        crate::daemon::camel(word)
    };
    ContainerStateTerminated {
        container_id: Some(format!("vmmd://{uid}")),
        exit_code: code,
        reason: Some(word),
        message: Some(exit.message.clone()).filter(|text| !text.is_empty()),
        finished_at: time(exit.time.as_ref()),
        ..ContainerStateTerminated::default()
    }
}

#[cfg(test)]
mod tests;

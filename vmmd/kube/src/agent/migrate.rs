//! Source's part of a migration (see `controller::migration`): has vmmd move VMs away.
//!
//! The agent watches VirtualMachines that leave its node, and writes nothing about them but events.
//! For each one in the phase `Moving` there is one task. It asks vmmd to move the VM to the second
//! pod, and asks again after a refusal that may pass. The hand-over of the two vmmds alone decides
//! which node has the VM: the task can end at any time, and a restarted agent begins again. The
//! controller ends a migration at its time limit by the deletion of the second pod, whose vmmd then
//! takes no VM.

use std::{collections::HashMap, pin::pin, time::Duration};

use futures::StreamExt as _;
use kube::{
    Api, Client, Resource as _, ResourceExt as _,
    runtime::{
        WatchStreamExt as _,
        events::{Event, EventType, Recorder},
        watcher,
    },
};
use prost::Message as _;
use tokio::task::AbortHandle;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use vmmd_api::{
    v1::{self, OperationPhase},
    well_known,
};

use crate::{
    backoff::{Watches, watching},
    crd::{Migration, VirtualMachine},
    daemon::{self, CALL, Daemon, same, within},
    names,
};

/// Wait before the first repetition of a request; doubled each time.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(15);
/// How often vmmd is asked for the state of a migration.
const POLL: Duration = Duration::from_secs(1);
/// Reasons of failures that may pass, although their code does not say so.
const TRANSIENT: [&str; 6] = [
    "GenerationMismatch",
    "Migrating",
    "MigrationRefused",
    "PodHasVm",
    "RequestIdReused",
    "VmExists",
];

/// Clients for migrations.
#[derive(Clone)]
pub struct Mover {
    /// The API server, for the watch.
    pub watches: Client,
    /// The local vmmd.
    pub daemon: Daemon,
    /// Name of the Kubernetes node.
    pub node: String,
    /// Publishes events of VirtualMachines.
    pub recorder: Recorder,
}

/// Result of one request to vmmd.
enum Outcome {
    /// The VM is not here any more.
    Gone,
    /// The VM stays. Another request may succeed.
    Again(String),
    /// The VM stays, for this reason.
    Stays { reason: String, message: String },
}

/// The tasks by the uids of VirtualMachines, each with the uid of the second pod.
#[derive(Default)]
struct Tasks(HashMap<String, (String, AbortHandle)>);

impl Tasks {
    fn end(&mut self, machine: &VirtualMachine) {
        if let Some((_, task)) = self.0.remove(&machine.uid().unwrap_or_default()) {
            task.abort();
        }
    }

    /// Begins a task for a VirtualMachine that is to be moved, and ends one that is not needed.
    fn update(&mut self, mover: &Mover, machine: VirtualMachine) {
        let uid = machine.uid().unwrap_or_default();
        let status = machine.status.clone().unwrap_or_default();
        let moving = status.moving().and_then(|one| Some((one, one.pod_uid.clone()?)));
        let Some((migration, target)) = moving.filter(|(one, _)| one.from == mover.node) else {
            return self.end(&machine);
        };
        if self.0.get(&uid).is_some_and(|(known, _)| *known == target) {
            return;
        }
        self.end(&machine);
        let (mover, migration) = (mover.clone(), migration.clone());
        let task = tokio::spawn(async move { mover.move_away(&machine, &migration).await });
        self.0.insert(uid, (target, task.abort_handle()));
    }
}

/// Whether another request may succeed after this failure.
fn judge(status: &Status) -> Outcome {
    let (reason, message) = daemon::explain(status);
    // An operator may have cancelled the migration.
    let lasts = daemon::refused(status) || matches!(status.code(), Code::Aborted | Code::AlreadyExists);
    match lasts && !TRANSIENT.contains(&&*reason) {
        true => Outcome::Stays { reason, message },
        false => Outcome::Again(format!("{reason}: {message}")),
    }
}

impl Mover {
    /// Moves VMs away. Never returns.
    pub async fn run(self) {
        let selector = format!("{}={}", names::MIGRATING_FROM, names::label_value(&self.node));
        let machines = Api::<VirtualMachine>::all(self.watches.clone());
        let mut events = pin!(watcher(machines, watching().labels(&selector)).backoff(Watches::new()));
        let mut tasks = Tasks::default();
        // Tasks of VirtualMachines that a new list has not shown yet.
        let mut before = HashMap::new();
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Init) => before.extend(std::mem::take(&mut tasks.0)),
                Ok(watcher::Event::InitApply(machine)) => {
                    let uid = machine.uid().unwrap_or_default();
                    tasks.0.extend(before.remove_entry(&uid));
                    tasks.update(&self, machine);
                }
                Ok(watcher::Event::InitDone) => {
                    before.drain().for_each(|(_, (_, task))| task.abort());
                }
                Ok(watcher::Event::Apply(machine)) => tasks.update(&self, machine),
                Ok(watcher::Event::Delete(machine)) => tasks.end(&machine),
                Err(error) => tracing::warn!("watch of VirtualMachines: {error}"),
            }
        }
    }

    async fn move_away(&self, machine: &VirtualMachine, migration: &Migration) {
        let (mut attempt, mut wait) = (0_u32, FIRST_WAIT);
        loop {
            match self.attempt(machine, migration, attempt).await {
                Ok(Outcome::Gone) => return,
                Ok(Outcome::Stays { reason, message }) => {
                    return self.tell(machine, migration, &reason, &message).await;
                }
                Ok(Outcome::Again(message)) => {
                    tracing::info!(vm = machine.name_any(), "not moved: {message}; again in {wait:?}");
                    attempt = attempt.saturating_add(1);
                }
                // Without an answer the same request is repeated.
                Err(status) => {
                    tracing::warn!(
                        vm = machine.name_any(),
                        "{}: {}; again in {wait:?}",
                        status.code(),
                        status.message()
                    );
                }
            }
            tokio::time::sleep(wait).await;
            wait = wait.saturating_mul(2).min(LONGEST_WAIT);
        }
    }

    /// Asks vmmd once, and waits for the end of the migration.
    async fn attempt(
        &self,
        machine: &VirtualMachine,
        migration: &Migration,
        attempt: u32,
    ) -> Result<Outcome, Status> {
        let namespace = machine.namespace().unwrap_or_default();
        let name = names::vm_name(
            &namespace,
            &machine.name_any(),
            &machine.uid().unwrap_or_default(),
        );
        let found = self.daemon.vm(&name).await?;
        let Some(vm) = found.filter(|vm| daemon::launcher_uid(vm) == Some(&migration.source_uid)) else {
            return Ok(Outcome::Gone);
        };
        let target = migration.pod_uid.clone().unwrap_or_default();
        let request = v1::MigrateVmRequest {
            name,
            target: migration.address.clone().unwrap_or_default(),
            timeout: Some(well_known::Duration {
                seconds: migration.timeout_seconds,
                nanos: 0,
            }),
            force: migration.force,
            request_id: format!("kube-migrate-{target}-{attempt}"),
            target_pod: target,
            preconditions: Some(v1::Preconditions {
                generation: vm.metadata.as_ref().map(|metadata| metadata.generation),
                ..same(&vm)
            }),
            ..v1::MigrateVmRequest::default()
        };
        match within(CALL, self.daemon.migrations.clone().migrate_vm(request)).await {
            Ok(answer) => {
                let id = answer.operation.map(|operation| operation.id).unwrap_or_default();
                self.follow(&id).await
            }
            // Without a reason it is not vmmd that answers.
            Err(status) if status.get_error_details().error_info().is_none() => Err(status),
            Err(status) => Ok(judge(&status)),
        }
    }

    /// Waits for the end of an operation.
    async fn follow(&self, id: &str) -> Result<Outcome, Status> {
        loop {
            let Some(operation) = self.daemon.operation(id).await? else {
                return Ok(Outcome::Again("vmmd does not know the operation".to_owned()));
            };
            match operation.phase() {
                OperationPhase::Completed => return Ok(Outcome::Gone),
                OperationPhase::Failed | OperationPhase::Cancelled => {
                    let error = operation.error.unwrap_or_default();
                    let details = error.encode_to_vec().into();
                    return Ok(judge(&Status::with_details(
                        error.code.into(),
                        error.message,
                        details,
                    )));
                }
                _ => tokio::time::sleep(POLL).await,
            }
        }
    }

    /// Publishes why vmmd does not move the VM. A failure does not stop the work.
    async fn tell(&self, machine: &VirtualMachine, migration: &Migration, reason: &str, message: &str) {
        let to = migration.to.as_deref().unwrap_or_default();
        let note = format!("vmmd does not move the VM to {to}: {message}");
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(note.chars().take(1000).collect()),
            action: "Migrate".to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, &machine.object_ref(&())).await {
            tracing::debug!("event {reason}: {error}");
        }
    }
}

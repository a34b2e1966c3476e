//! Agent's part of a migration (see `controller::migration`). The agent asks vmmd to move a VM,
//! reports the result, and takes over a VM that was moved here.
//!
//! vmmd's hand-over alone decides which node runs the VM. The reports to the API server follow from
//! it:
//!
//! - Before the request to vmmd, the agent marks the VM with its target pod ([`names::MOVING`]).
//!   The request names the generation of the VM with this mark. Before a report that the VM stays,
//!   the agent removes the mark. vmmd refuses the removal as long as the VM may leave. Afterwards,
//!   a late request of a killed agent names a VM that has changed.
//! - A marked VM that is missing here has been moved. So has a VM that runs on the other node.
//! - The mark moves with the VM: the other node's agent recognizes the VM by it.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt as _, runtime::events::EventType};
use serde_json::json;
use tonic::Status;
use tonic_types::StatusExt as _;
use vmmd_api::{
    v1::{self, OperationPhase, VmPhase},
    well_known,
};

use super::{
    pod_status,
    step::{self, Departure},
    work::{After, Worker, duration},
};
use crate::{
    controller::is_evicted,
    crd::{Migration, MigrationPhase, Role, VirtualMachine, VirtualMachineStatus},
    daemon::{self, CALL, name, pod_uid, same, within},
    names,
    provision::Error,
};

/// How soon it is looked again at what somebody else does.
const AGAIN: Duration = Duration::from_secs(1);
/// The same, for an action that may never happen.
const LATER: Duration = Duration::from_secs(5);

/// The VirtualMachine that owns a pod.
pub enum Owner {
    /// It.
    Found(Box<VirtualMachine>),
    /// There is none, or another one of its name.
    Gone,
    /// An API server says that it knows nothing of VirtualMachines, as it does for a moment after its start.
    Unknown,
}

impl Owner {
    fn status(self) -> Option<VirtualMachineStatus> {
        match self {
            Self::Found(machine) => Some(machine.status.unwrap_or_default()),
            _ => None,
        }
    }
}

impl Worker {
    /// Reads the owner from the API server, not from the agent's memory.
    pub async fn owner(&self, pod: &Pod) -> Result<Owner, Error> {
        let owner = pod
            .owner_references()
            .iter()
            .find(|owner| owner.controller == Some(true));
        let Some(owner) = owner else {
            return Ok(Owner::Gone);
        };
        let namespace = pod.namespace().unwrap_or_default();
        let machines = Api::<VirtualMachine>::namespaced(self.client.clone(), &namespace);
        match machines.get(&owner.name).await {
            Ok(machine) if machine.metadata.uid.as_ref() == Some(&owner.uid) => {
                Ok(Owner::Found(Box::new(machine)))
            }
            Ok(_) => Ok(Owner::Gone),
            Err(kube::Error::Api(status)) if status.is_not_found() => {
                let of_it = status.details.as_ref().is_some_and(|it| it.name == owner.name);
                Ok(if of_it { Owner::Gone } else { Owner::Unknown })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// For a pod that is being deleted, or whose VM is to leave.
    pub async fn leave(&self, pod: &Pod, vm: &v1::Vm) -> Result<After, Error> {
        let deleted = pod.metadata.deletion_timestamp.as_ref().map(|time| time.0);
        let nodes = Api::<Node>::all(self.client.clone());
        let node = match deleted {
            Some(_) => nodes.get_opt(&self.node).await?,
            None => None,
        };
        let evicted = is_evicted(pod, node.as_ref());
        if let Some(deletion) = deleted
            && !evicted
            && !pod.annotations().contains_key(names::LEAVES)
        {
            let deadline = step::stop_deadline(pod, deletion, Timestamp::now());
            return Ok(After::Stop(deadline));
        }
        let status = match self.owner(pod).await? {
            Owner::Unknown => return Ok(After::Again(LATER)),
            owner => owner.status().unwrap_or_default(),
        };
        match step::departure(pod, &status, evicted, Timestamp::now()) {
            Departure::Stop(deadline) => Ok(After::Stop(deadline)),
            Departure::Wait => Ok(After::Again(AGAIN)),
            Departure::Stay => Ok(After::Done),
            Departure::Move => match status.moving() {
                Some(migration) => self.move_away(pod, &name(vm), migration).await,
                None => Ok(After::Again(AGAIN)),
            },
        }
    }

    /// For a pod whose VM is not there any more.
    pub async fn missing(&self, pod: &Pod) -> Result<After, Error> {
        let status = match self.owner(pod).await? {
            Owner::Unknown => return Ok(After::Again(LATER)),
            owner => owner.status().unwrap_or_default(),
        };
        if let Some(after) = self.is_named(pod, &status).await? {
            return Ok(after);
        }
        let role = step::epoch(pod).map(|epoch| self.role(pod, epoch, &status));
        if matches!(role, Some(Role::Old)) {
            // It has left, and the controller deletes the pod.
            return Ok(After::Again(LATER));
        }
        if let Some(vm) = self.find(pod, &pod.uid().unwrap_or_default()).await? {
            return Ok(After::Vm(Box::new(vm)));
        }
        self.removed(pod).await
    }

    /// Next action before a pod without a VM may be reported as over: a migration may name the pod.
    pub async fn is_named(&self, pod: &Pod, status: &VirtualMachineStatus) -> Result<Option<After>, Error> {
        let role = step::epoch(pod).map(|epoch| self.role(pod, epoch, status));
        match (role, status.moving(), step::vm_name(pod)) {
            (Some(Role::Run(_)), Some(migration), Some(vm)) => {
                self.move_away(pod, &vm, migration).await.map(Some)
            }
            // The controller sees that it is being deleted, and gives the migration up or lets it end.
            (Some(Role::Target(_)), ..) => Ok(Some(After::Again(AGAIN))),
            // It may be noted yet.
            (Some(Role::NotYet), ..) if status.under_way().is_some() => Ok(Some(After::Again(AGAIN))),
            _ => Ok(None),
        }
    }

    /// Has the VM of a pod moved, and reports the result. Each call starts from the beginning,
    /// without remembered state.
    async fn move_away(&self, pod: &Pod, vm: &str, migration: &Migration) -> Result<After, Error> {
        if pod_status::migration(pod, migration.epoch).is_some() {
            return Ok(After::Again(AGAIN));
        }
        let uid = pod.metadata.uid.as_ref();
        let found = self.daemon.vm(vm).await?;
        let Some(vm) = found.filter(|vm| pod_uid(vm) == uid) else {
            let message = "the VM is not on this node any more";
            return self.say(pod, migration.epoch, true, ("Moved", message)).await;
        };
        let target = migration.pod_uid.clone().unwrap_or_default();
        let mark = format!(
            "{}/{}/{target}",
            pod.namespace().unwrap_or_default(),
            migration.pod
        );
        let metadata = vm.metadata.clone().unwrap_or_default();
        if metadata.annotations.get(names::MOVING) != Some(&mark) {
            return match self.mark(&vm, Some(&mark)).await {
                Ok(_) => Ok(After::Again(Duration::ZERO)),
                // It is being started, or removed.
                Err(status) if daemon::refused(&status) => Ok(After::Again(AGAIN)),
                Err(status) => Err(status.into()),
            };
        }
        let Some((reason, message)) = self.ask_to_move(&vm, migration, &target).await? else {
            return Ok(After::Again(AGAIN));
        };
        match self.mark(&vm, None).await {
            Ok(_) => self.say(pod, migration.epoch, false, (&reason, &message)).await,
            // It is handed over: what becomes of it is vmmd's.
            Err(status) if daemon::refused(&status) => Ok(After::Again(AGAIN)),
            Err(status) => Err(status.into()),
        }
    }

    /// Why a VM stays; `None` while it is being moved. The same request each time: vmmd carries it out once.
    async fn ask_to_move(
        &self,
        vm: &v1::Vm,
        migration: &Migration,
        target: &str,
    ) -> Result<Option<(String, String)>, Error> {
        let generation = vm.metadata.as_ref().map(|metadata| metadata.generation);
        let timeout = u64::try_from(migration.timeout_seconds).unwrap_or_default();
        let request = v1::MigrateVmRequest {
            name: name(vm),
            target: migration.address.clone().unwrap_or_default(),
            timeout: Some(duration(Duration::from_secs(timeout))),
            force: migration.force,
            preconditions: Some(v1::Preconditions {
                generation,
                ..same(vm)
            }),
            request_id: format!("kube-migrate-{target}"),
            ..v1::MigrateVmRequest::default()
        };
        match within(CALL, self.daemon.migrations.clone().migrate_vm(request)).await {
            Ok(answer) => {
                let id = answer.operation.map(|operation| operation.id).unwrap_or_default();
                let Some(operation) = self.daemon.operation(&id).await? else {
                    let message = "vmmd does not know the operation any more";
                    return Ok(Some(("Interrupted".to_owned(), message.to_owned())));
                };
                Ok(match operation.phase() {
                    OperationPhase::Failed | OperationPhase::Cancelled => {
                        let error = operation.error.unwrap_or_default();
                        Some(("MigrationFailed".to_owned(), error.message))
                    }
                    // When it is complete, the VM is gone, or goes in this moment.
                    _ => None,
                })
            }
            // Without a reason it is not vmmd that answers.
            Err(status) if status.get_error_details().error_info().is_some() => {
                Ok(Some(daemon::explain(&status)))
            }
            Err(status) => Err(status.into()),
        }
    }

    /// For a VM that was moved to this node, or is on its way.
    pub async fn take_over(&self, pod: &Pod, vm: &v1::Vm) -> Result<After, Error> {
        let status = match self.owner(pod).await? {
            Owner::Unknown => return Ok(After::Again(LATER)),
            // It is nobody's.
            Owner::Gone => return self.remove(vm).await,
            Owner::Found(machine) => machine.status.unwrap_or_default(),
        };
        let role = step::epoch(pod).map(|epoch| (epoch, self.role(pod, epoch, &status)));
        let running = vm.status.as_ref().map(v1::VmStatus::phase) == Some(VmPhase::Running);
        match role {
            Some((_, Role::Run(_))) => {
                let labels = step::run_pod(pod).labels(&self.node);
                let paths = labels.iter().map(|(key, _)| format!("metadata.labels[{key}]"));
                let annotations =
                    [names::POD, names::MOVING].map(|key| format!("metadata.annotations[{key}]"));
                let new = v1::ObjectMetadata {
                    name: name(vm),
                    labels: labels.clone().into(),
                    annotations: [(names::POD.to_owned(), step::run_pod(pod).path())].into(),
                    ..v1::ObjectMetadata::default()
                };
                let vm = self.update(vm, new, paths.chain(annotations).collect()).await?;
                let note = format!("vmmd runs it as VM {}, which was moved here", name(&vm));
                self.tell(Some(pod), EventType::Normal, "TakenOver", &note).await;
                Ok(After::Vm(Box::new(vm)))
            }
            // The other node's agent may not be able to say so.
            Some((epoch, Role::Target(migration)))
                if running
                    && migration.phase == MigrationPhase::Moving
                    && pod_status::migration(pod, epoch).is_none() =>
            {
                self.say(pod, epoch, true, ("Moved", "the VM runs on this node"))
                    .await
            }
            // vmmd removes the remains of a VM that was not moved.
            _ => Ok(After::Again(AGAIN)),
        }
    }

    fn role<'a>(&self, pod: &Pod, epoch: i64, status: &'a VirtualMachineStatus) -> Role<'a> {
        status.role(epoch, &pod.name_any(), pod.metadata.uid.as_deref())
    }

    /// Reports the result of a migration, over the version of the pod that was seen, so that
    /// reports of others are not lost.
    async fn say(&self, pod: &Pod, epoch: i64, moved: bool, why: (&str, &str)) -> Result<After, Error> {
        let conditions = pod_status::with_migration(pod, epoch, moved, why, Timestamp::now());
        let patch = json!({
            "metadata": {"uid": pod.uid(), "resourceVersion": pod.resource_version()},
            "status": {"conditions": conditions},
        });
        self.patch_status(pod, patch).await
    }

    /// Marks a VM as one that is to leave, or takes the mark away. vmmd refuses that while a VM is being moved.
    async fn mark(&self, vm: &v1::Vm, mark: Option<&str>) -> Result<v1::Vm, Status> {
        let mark = mark.map(|mark| (names::MOVING.to_owned(), mark.to_owned()));
        let new = v1::ObjectMetadata {
            name: name(vm),
            annotations: mark.into_iter().collect(),
            ..v1::ObjectMetadata::default()
        };
        let path = format!("metadata.annotations[{}]", names::MOVING);
        self.update(vm, new, vec![path]).await
    }

    async fn update(
        &self,
        vm: &v1::Vm,
        metadata: v1::ObjectMetadata,
        paths: Vec<String>,
    ) -> Result<v1::Vm, Status> {
        let request = v1::UpdateVmRequest {
            vm: Some(v1::Vm {
                metadata: Some(metadata),
                ..v1::Vm::default()
            }),
            update_mask: Some(well_known::FieldMask { paths }),
            no_wait: true,
            preconditions: Some(same(vm)),
            ..v1::UpdateVmRequest::default()
        };
        let answer = within(CALL, self.daemon.vms.clone().update_vm(request)).await?;
        answer
            .vm
            .ok_or_else(|| Status::internal("an answer without a VM"))
    }
}

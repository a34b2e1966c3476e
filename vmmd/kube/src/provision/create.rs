//! Requests to create VMs, each of which vmmd carries out at most once.

use std::{
    collections::HashMap,
    sync::{MutexGuard, PoisonError},
    time::Duration,
};

use tonic::{Code, Status};
use vmmd_api::{
    v1::{self, VmPhase},
    well_known,
};

use super::{Error, Lack, Provisioner, RunPod, seed};
use crate::{
    daemon::{self, CALL, name, pod_uid, same, within},
    names,
    sources::Sources,
};

/// How long the deletion of a VM may take: the end of its process, on a loaded node.
const REMOVE: Duration = Duration::from_secs(180);
/// How soon vmmd is asked again to create a VM whose name another one had.
const TAKEN: Duration = Duration::from_secs(2);

/// Result of the creation of a VM.
#[derive(Debug)]
pub enum Made {
    /// vmmd has created the VM.
    Vm(Box<v1::Vm>),
    /// The VM exists since an earlier request.
    Known(Box<v1::Vm>),
    /// Another VM has the name.
    Lacks(Lack),
    /// Create the VM again after that time.
    Again(Duration),
    /// The VM was created, and another client has deleted it.
    Removed,
    /// vmmd creates no such VM.
    Refused {
        /// One CamelCase word.
        reason: String,
        /// The same for people.
        message: String,
    },
}

impl Provisioner {
    /// Creates and starts the VM of the pod with this uid, once.
    pub async fn make(&self, uid: &str, vm: v1::Vm, sources: &Sources) -> Result<Made, Error> {
        let name = name(&vm);
        let request = v1::CreateVmRequest {
            vm: Some(vm),
            start: true,
            dry_run: false,
            request_id: self.creation_id(uid),
        };
        match self.ask_to_make(uid, request).await {
            Ok(vm) => Ok(Made::Vm(Box::new(vm))),
            Err(status) if status.code() == Code::AlreadyExists => {
                let (reason, message) = daemon::explain(&status);
                match self.daemon.vm(&name).await? {
                    Some(vm) if pod_uid(&vm).is_some_and(|of| of == uid) => Ok(Made::Known(Box::new(vm))),
                    // That of an earlier run, which goes first, or somebody else's.
                    Some(_) => {
                        let message =
                            format!("there is another VM {name} in vmmd: this one waits until that is gone");
                        Ok(Made::Lacks(Lack::new("VmExists", message)))
                    }
                    // An agent before this one was refused with other values of Secrets, and has not told it: another run may have these.
                    None if reason == "RequestIdReused" => Ok(Made::Refused { reason, message }),
                    // It has gone since. vmmd says the same to each repetition of a request that it has refused so.
                    None => {
                        self.spend(uid);
                        Ok(Made::Again(TAKEN))
                    }
                }
            }
            Err(status) if daemon::refused(&status) => {
                let (reason, message) = daemon::explain(&status);
                if reason == "ObjectGone" {
                    return Ok(Made::Removed);
                }
                let message = seed::as_given(message, sources);
                Ok(Made::Refused { reason, message })
            }
            Err(status) => Err(status.into()),
        }
    }

    /// Starts a VM that was created and never started.
    pub async fn start(&self, uid: &str, vm: &v1::Vm) -> Result<Option<v1::Vm>, Error> {
        let request = v1::StartVmRequest {
            name: name(vm),
            no_wait: true,
            preconditions: Some(same(vm)),
            request_id: format!("kube-start-{uid}"),
            ..v1::StartVmRequest::default()
        };
        let answer = within(CALL, self.daemon.vms.clone().start_vm(request)).await?;
        Ok(answer.vm)
    }

    /// Gives a VM the labels of the VM of this pod.
    pub async fn mark(&self, vm: &v1::Vm, run: &RunPod) -> Result<v1::Vm, Status> {
        let labels = run.labels(&self.node);
        let paths = labels.iter().map(|(key, _)| format!("metadata.labels[{key}]"));
        let paths = paths
            .chain([format!("metadata.annotations[{}]", names::POD)])
            .collect();
        let metadata = v1::ObjectMetadata {
            name: name(vm),
            labels: labels.into(),
            annotations: [(names::POD.to_owned(), run.path())].into(),
            ..v1::ObjectMetadata::default()
        };
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

    /// Deletes a VM, with its process when there is one.
    pub async fn remove(&self, vm: &v1::Vm) -> Result<(), Error> {
        let request = v1::DeleteVmRequest {
            name: name(vm),
            force: true,
            preconditions: Some(same(vm)),
            ..v1::DeleteVmRequest::default()
        };
        match within(REMOVE, self.daemon.vms.clone().delete_vm(request)).await {
            Err(status) if status.code() != Code::NotFound => Err(status.into()),
            _ => Ok(()),
        }
    }

    /// Id of the request to create a VM. The next id is used once the previous request cannot take
    /// effect any longer. A restarted agent has the requests refused in the same order, and so
    /// comes to the request that has created the VM, if any.
    fn creation_id(&self, uid: &str) -> String {
        match self.spent().get(uid) {
            None => format!("kube-create-{uid}"),
            Some(spent) => format!("kube-create-{uid}-{spent}"),
        }
    }

    /// The same request for the same pod, however often: vmmd carries it out once. So it is the first one that is repeated as long as it has
    /// no answer, also when a Secret that it has values of has changed.
    pub async fn ask_to_make(&self, uid: &str, request: v1::CreateVmRequest) -> Result<v1::Vm, Status> {
        let request = self.unanswered().entry(uid.to_owned()).or_insert(request).clone();
        let answer = within(CALL, self.daemon.vms.clone().create_vm(request)).await;
        let known = match &answer {
            Ok(_) => true,
            Err(status) => daemon::refused(status) || status.code() == Code::AlreadyExists,
        };
        if known {
            self.unanswered().remove(uid);
        }
        answer?
            .vm
            .ok_or_else(|| Status::internal("an answer without a VM"))
    }

    /// The request to create the VM of this pod that had no answer yet.
    pub fn unanswered_of(&self, uid: &str) -> Option<v1::CreateVmRequest> {
        self.unanswered().get(uid).cloned()
    }

    /// Notes that the last request to create the VM of this pod cannot take effect any longer.
    fn spend(&self, uid: &str) {
        let mut spent = self.spent();
        let count = spent.entry(uid.to_owned()).or_default();
        *count = count.saturating_add(1);
    }

    fn unanswered(&self) -> MutexGuard<'_, HashMap<String, v1::CreateVmRequest>> {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spent(&self) -> MutexGuard<'_, HashMap<String, u32>> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the requests of a pod that has its VM, or is gone.
    pub fn forget(&self, uid: &str) {
        self.unanswered().remove(uid);
        self.spent().remove(uid);
    }
}

/// Whether a VM may have a process.
pub fn has_process(vm: &v1::Vm) -> bool {
    let phase = vm.status.as_ref().map(v1::VmStatus::phase).unwrap_or_default();
    !matches!(
        phase,
        VmPhase::Stopped | VmPhase::Stopping | VmPhase::Failed | VmPhase::Terminating
    )
}

/// Whether a VM was created and never started: vmmd was ended between the two.
pub fn is_unstarted(vm: &v1::Vm) -> bool {
    let status = vm.status.clone().unwrap_or_default();
    let counts = status.counts.unwrap_or_default();
    status.phase() == VmPhase::Stopped
        && status.last_exit.is_none()
        && status.operation.is_empty()
        && counts.starts == 0
        && counts.failed_starts == 0
}

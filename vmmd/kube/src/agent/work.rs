//! Carries out one step for a pod or a VM: calls of the API server and of vmmd.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::{
    Api, Client, Resource as _, ResourceExt as _,
    api::{Patch, PatchParams},
    runtime::events::{Event, EventType, Recorder},
};
use serde_json::{Value, json};
use tonic::Code;
use vmmd_api::{v1, well_known};

use super::{
    migrate::Owner,
    pod_status,
    step::{self, Admission, Step},
};
use crate::{
    daemon::{self, CALL, Daemon, name, same, within},
    names,
    provision::{self, Error, Lack, Made, Prepared, Provisioner},
    sources::{Allowed, Sources},
};

/// How soon the API server is asked again whether the controller has noted a pod.
const NOT_YET: Duration = Duration::from_millis(500);
/// How soon the API server is asked again for a VirtualMachine that it does not know.
const NO_OWNER: Duration = Duration::from_secs(5);
/// Wait before a write is retried that conflicted with another one.
const CHANGED: Duration = Duration::from_secs(1);
/// Wait before the missing parts of a VM are checked again.
const LACKS: Duration = Duration::from_secs(5);

/// Result of a step.
#[derive(Debug)]
pub enum After {
    /// A VM as vmmd described it last.
    Vm(Box<v1::Vm>),
    /// There is no such VM.
    NoVm,
    /// The pod as the API server has it now.
    Pod(Box<Pod>),
    /// Nothing new; look again after that time.
    Again(Duration),
    /// The VM stays on this node, and its guest is to power off by then.
    Stop(Timestamp),
    /// Nothing new: what changes comes by the watches.
    Done,
}

/// Clients and settings for the steps.
#[derive(Clone)]
pub struct Worker {
    /// The API server.
    pub client: Client,
    /// The local vmmd.
    pub daemon: Daemon,
    /// Name of the Kubernetes node.
    pub node: String,
    /// Its address.
    pub host: String,
    /// Things of the node that VMs may name.
    pub allowed: Allowed,
    /// Publishes events of pods.
    pub recorder: Recorder,
    /// Makes VMs and disks.
    pub provisioner: Provisioner,
}

impl Worker {
    /// Does it. `uid` is the pod's.
    pub async fn carry_out(
        &self,
        step: Step,
        uid: &str,
        pod: Option<&Pod>,
        vm: Option<&v1::Vm>,
    ) -> Result<After, Error> {
        match (step, pod, vm) {
            (Step::Wait(time), ..) => Ok(After::Again(time)),
            (Step::Report(status), Some(pod), _) => self.report(pod, &status).await,
            (Step::Create, Some(pod), _) => self.create(pod).await,
            (Step::Start, _, Some(vm)) => self.start(uid, vm).await,
            (Step::Stop(grace), _, Some(vm)) => {
                self.tell(
                    pod,
                    EventType::Normal,
                    "Stopping",
                    "the guest is asked to power off",
                )
                .await;
                self.stop(vm, grace).await
            }
            (Step::Remove, _, Some(vm)) => self.remove(vm).await,
            (Step::Release, Some(pod), _) => self.release(pod).await,
            (Step::Missing, Some(pod), _) => self.missing(pod).await,
            (Step::Leave, Some(pod), Some(vm)) => self.leave(pod, vm).await,
            (Step::TakeOver, Some(pod), Some(vm)) => self.take_over(pod, vm).await,
            (Step::CheckPod, _, Some(vm)) => self.check_pod(uid, vm).await,
            _ => Ok(After::Done),
        }
    }

    /// Those of a pod's namespace.
    pub fn pods(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default())
    }

    async fn report(&self, pod: &Pod, status: &PodStatus) -> Result<After, Error> {
        let mut status = serde_json::to_value(status).map_err(kube::Error::SerdeError)?;
        // Absent fields are to be removed.
        if let Value::Object(fields) = &mut status {
            for name in ["reason", "message", "podIP", "podIPs"] {
                fields.entry(name).or_insert(Value::Null);
            }
        }
        let patch = json!({"metadata": {"uid": pod.uid()}, "status": status});
        self.patch_status(pod, patch).await
    }

    /// Patches a pod's status. The patch names the pod's uid. It also names the version that was
    /// seen where values written by others must not be lost.
    pub async fn patch_status(&self, pod: &Pod, patch: Value) -> Result<After, Error> {
        let parameters = PatchParams::default();
        match self
            .pods(pod)
            .patch_status(&pod.name_any(), &parameters, &Patch::Merge(patch))
            .await
        {
            Ok(pod) => Ok(After::Pod(Box::new(pod))),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(After::Done),
            // It has changed, or is another pod of that name: the watch says so.
            Err(kube::Error::Api(status)) if status.is_conflict() => Ok(After::Again(CHANGED)),
            Err(error) => Err(error.into()),
        }
    }

    /// See [`step::admit`]. Reads the owner from the API server, not from the agent's memory.
    async fn create(&self, pod: &Pod) -> Result<After, Error> {
        let machine = match self.owner(pod).await? {
            Owner::Found(machine) => Some(*machine),
            // The garbage collector deletes pods without an owner.
            Owner::Unknown => return Ok(After::Again(NO_OWNER)),
            Owner::Gone => None,
        };
        match step::admit(pod, machine.as_ref(), &self.node, &self.allowed) {
            Admission::NotYet => Ok(After::Again(NOT_YET)),
            Admission::Refuse { reason, message } => self.give_up(pod, reason, &message).await,
            Admission::Moving => {
                let status = machine.and_then(|machine| machine.status).unwrap_or_default();
                let after = self.is_named(pod, &status).await?;
                Ok(after.unwrap_or(After::Again(NOT_YET)))
            }
            Admission::Await(from) => {
                let message = format!("the VM is to come from node {from}");
                self.wait_for(pod, &[Lack::new(names::AWAITS, message)]).await
            }
            Admission::TakeOver => match self.find(pod, &pod.uid().unwrap_or_default()).await? {
                Some(vm) => Ok(After::Vm(Box::new(vm))),
                None => {
                    let message = "the VM was moved to this node, and is not here";
                    self.give_up(pod, "VmLost", message).await
                }
            },
            Admission::Admit(vm, sources) => match self.prepare(pod, *vm, &sources).await? {
                Prepared::Ready(vm) => self.make(pod, *vm, &sources).await,
                Prepared::Lacks(lacks) => self.wait_for(pod, &lacks).await,
                Prepared::Refused { volume, status } => {
                    let (reason, message) = daemon::explain(&status);
                    let message = format!("volume {volume}: {message}");
                    self.give_up(pod, &reason, &message).await
                }
            },
        }
    }

    /// Reports once why a VM waits. The check is repeated.
    async fn wait_for(&self, pod: &Pod, lacks: &[Lack]) -> Result<After, Error> {
        let reason = lacks.first().map_or("Waiting", |lack| lack.reason);
        let messages: Vec<_> = lacks.iter().map(|lack| lack.message.as_str()).collect();
        let message = messages.join("; ");
        let status = pod_status::waiting(pod, reason, &message, &self.host, Timestamp::now());
        if !pod_status::differs(pod, &status) {
            return Ok(After::Again(LACKS));
        }
        let type_ = match reason {
            provision::IMPORTING_IMAGE | provision::MAKING_DISK | names::AWAITS => EventType::Normal,
            _ => EventType::Warning,
        };
        self.tell(Some(pod), type_, reason, &message).await;
        self.report(pod, &status).await
    }

    async fn make(&self, pod: &Pod, vm: v1::Vm, sources: &Sources) -> Result<After, Error> {
        let name = name(&vm);
        let uid = pod.uid().unwrap_or_default();
        match self.provisioner.make(&uid, vm, sources).await? {
            Made::Vm(vm) => {
                self.tell(
                    Some(pod),
                    EventType::Normal,
                    "Created",
                    &format!("vmmd runs it as VM {name}"),
                )
                .await;
                Ok(After::Vm(vm))
            }
            Made::Known(vm) => Ok(After::Vm(vm)),
            Made::Lacks(lack) => self.wait_for(pod, &[lack]).await,
            Made::Again(time) => Ok(After::Again(time)),
            Made::Removed => self.removed(pod).await,
            Made::Refused { reason, message } => self.give_up(pod, &reason, &message).await,
        }
    }

    async fn start(&self, uid: &str, vm: &v1::Vm) -> Result<After, Error> {
        let vm = self.provisioner.start(uid, vm).await?;
        Ok(vm.map_or(After::Done, |vm| After::Vm(Box::new(vm))))
    }

    async fn stop(&self, vm: &v1::Vm, grace: Duration) -> Result<After, Error> {
        let request = v1::StopVmRequest {
            name: name(vm),
            grace_period: Some(duration(grace.min(Duration::from_secs(3600)))),
            no_wait: true,
            preconditions: Some(same(vm)),
            ..v1::StopVmRequest::default()
        };
        match within(CALL, self.daemon.vms.clone().stop_vm(request)).await {
            // Its state comes by the watch; when that does not say that it is on its way, it is asked again.
            Ok(_) => Ok(After::Again(Duration::from_secs(5))),
            Err(status) if status.code() == Code::NotFound => Ok(After::NoVm),
            Err(status) => Err(status.into()),
        }
    }

    /// Takes the VM away, with its process when there is one.
    pub async fn remove(&self, vm: &v1::Vm) -> Result<After, Error> {
        self.provisioner.remove(vm).await?;
        Ok(After::NoVm)
    }

    /// For a pod that gets no VM any more.
    pub async fn give_up(&self, pod: &Pod, reason: &str, message: &str) -> Result<After, Error> {
        self.tell(Some(pod), EventType::Warning, reason, message).await;
        let status = pod_status::failed(pod, reason, message, &self.host, Timestamp::now());
        self.report(pod, &status).await
    }

    /// Publishes an event. A failure does not stop the work.
    pub async fn tell(&self, pod: Option<&Pod>, type_: EventType, reason: &str, note: &str) {
        let Some(pod) = pod else { return };
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.chars().take(1000).collect()),
            action: "Run".to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, &pod.object_ref(&())).await {
            tracing::debug!("event {reason}: {error}");
        }
    }
}

/// The same of the API.
pub fn duration(time: Duration) -> well_known::Duration {
    well_known::Duration {
        seconds: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(time.subsec_nanos()).unwrap_or_default(),
    }
}

//! Carries out one step for a pod: calls of the API server and of vmmd.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::events::{Event, EventType, Recorder},
};
use tonic::{Code, Status};
use vmmd_api::v1::{self, PodReport, PodVolumeKind};

use super::{
    admit::{self, Admission},
    files::Files,
    step::Step,
};
use crate::{
    crd::{Role, VirtualMachine},
    daemon::{self, CALL, within},
    launcher, names,
    provision::{self, Error, Lack, Made, Prepared, Provisioner, RunPod, seed},
    run::Plan,
};

/// How often disks without a pod are searched.
pub const SWEEP: Duration = Duration::from_secs(300);
/// Wait before the API server is asked again whether the controller has noted a pod; doubled each time.
const NOT_YET: Duration = Duration::from_millis(250);
/// Longest of these waits.
const NOT_YET_AT_MOST: Duration = Duration::from_secs(10);
/// Wait before the API server is asked again for VirtualMachines that it does not know of.
const NO_KIND: Duration = Duration::from_secs(5);
/// Wait before the missing parts of a VM are checked again.
const LACKS: Duration = Duration::from_secs(5);
/// Wait before the API server is asked again whether the run is that of a VM that is moved here.
const HANDED_OVER: Duration = Duration::from_secs(2);
/// Longest message to a launcher, in bytes.
const MAX_MESSAGE: usize = 1024;

/// Reason of a pod that waits for a VM from another node.
const AWAITS_MIGRATION: &str = "AwaitsMigration";

/// The VirtualMachine of a launcher.
enum Named {
    /// It.
    Machine(Box<VirtualMachine>),
    /// There is none.
    Nothing,
    /// An API server knows nothing of VirtualMachines for a moment after its start.
    Unknown,
}

/// Result of a step.
#[derive(Debug)]
pub enum After {
    /// The VM as vmmd has described it last.
    Vm(Box<v1::Vm>),
    /// There is no VM.
    NoVm,
    /// The pod gets no VM.
    Refused,
    /// No disk of the pod is left.
    Clean,
    /// Carry out the step again after that time.
    Again(Duration),
}

/// The last report to a launcher.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Reported {
    reason: String,
    message: String,
    /// Number of times that the controller had not noted the pod.
    not_yet: u32,
}

/// Clients for the steps.
#[derive(Clone)]
pub struct Worker {
    /// The API server.
    pub client: Client,
    /// Makes VMs and disks.
    pub provisioner: Provisioner,
    /// Publishes events of pods.
    pub recorder: Recorder,
    /// By the uids of pods.
    pub reported: Arc<Mutex<Reports>>,
}

/// Reports by the uids of pods.
#[derive(Debug, Default)]
pub struct Reports(HashMap<String, Reported>);

impl Worker {
    /// Carries out a step for the pod with this uid.
    pub async fn carry_out(
        &self,
        step: Step,
        uid: &str,
        pod: Option<&v1::Pod>,
        vm: Option<&v1::Vm>,
    ) -> Result<After, Error> {
        match (step, pod, vm) {
            (Step::Admit, Some(pod), _) => self.admit(pod).await,
            (Step::Adopt, Some(pod), Some(vm)) => self.adopt(pod, vm).await,
            (Step::Start, _, Some(vm)) => {
                let vm = self.provisioner.start(uid, vm).await?;
                Ok(vm.map_or(After::Again(LACKS), |vm| After::Vm(Box::new(vm))))
            }
            (Step::Remove, _, Some(vm)) => {
                self.provisioner.remove(vm).await?;
                Ok(After::NoVm)
            }
            (Step::Clean, ..) => {
                self.end_creation(uid).await?;
                self.provisioner.delete_disks(uid).await?;
                Ok(After::Clean)
            }
            _ => Ok(After::Again(LACKS)),
        }
    }

    /// Forgets the reports to the launcher of a pod.
    pub fn forget(&self, uid: &str) {
        self.reports().0.remove(uid);
    }

    /// Uids of the pods for which this node has disks. Deletes images that are not used any more.
    pub async fn owners_of_disks(&self) -> Result<Vec<String>, Error> {
        self.provisioner.prune_images().await?;
        let disks = self.provisioner.disks().await?.into_iter();
        let labels = disks.filter_map(|disk| disk.metadata);
        let owners = labels.filter_map(|metadata| metadata.labels.get(names::POD_UID).cloned());
        Ok(owners.collect())
    }

    /// Repeats a creation that had no answer: afterwards it cannot take effect any more. A VM that
    /// it has created arrives by the watch.
    async fn end_creation(&self, uid: &str) -> Result<(), Error> {
        let Some(request) = self.provisioner.unanswered_of(uid) else {
            return Ok(());
        };
        match self.provisioner.ask_to_make(uid, request).await {
            Ok(vm) => Ok(self.provisioner.remove(&vm).await?),
            Err(status) if daemon::refused(&status) || status.code() == Code::AlreadyExists => Ok(()),
            // The launcher is not connected: vmmd has not created the VM.
            Err(status) if daemon::explain(&status).0 == "PodNotConnected" => Ok(()),
            Err(status) => Err(status.into()),
        }
    }

    /// The VirtualMachine that a launcher names, from the API server and not from the agent's memory.
    async fn machine(&self, pod: &v1::Pod) -> Result<Named, Error> {
        let machines = Api::<VirtualMachine>::namespaced(self.client.clone(), &pod.namespace);
        match machines.get(&pod.vm).await {
            Ok(machine) => Ok(Named::Machine(Box::new(machine))),
            Err(kube::Error::Api(status)) if status.is_not_found() => {
                let of_it = status.details.as_ref().is_some_and(|it| it.name == pod.vm);
                Ok(if of_it { Named::Nothing } else { Named::Unknown })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// See [`admit::admit`].
    async fn admit(&self, pod: &v1::Pod) -> Result<After, Error> {
        let machine = match self.machine(pod).await? {
            Named::Machine(machine) => Some(machine),
            Named::Nothing => None,
            Named::Unknown => return Ok(After::Again(NO_KIND)),
        };
        match admit::admit(pod, machine.as_deref()) {
            Admission::NotYet => Ok(After::Again(self.not_yet(&pod.uid))),
            Admission::Leaves => Ok(After::Again(LACKS)),
            Admission::Await(from) => {
                let lack = Lack::new(AWAITS_MIGRATION, format!("waits for the VM from node {from}"));
                self.wait_for(pod, &[lack]).await
            }
            // The names of the pod are not verified: no event is published.
            Admission::Refuse { reason, message } => self.refuse(pod, reason, &message).await,
            Admission::Admit(plan) => {
                let machine = machine.and_then(|machine| machine.uid()).unwrap_or_default();
                self.make(pod, &machine, *plan).await
            }
        }
    }

    /// Marks a VM that has moved to this node as one of this agent, when the run is that of the pod.
    async fn adopt(&self, pod: &v1::Pod, vm: &v1::Vm) -> Result<After, Error> {
        let Named::Machine(machine) = self.machine(pod).await? else {
            return Ok(After::Again(NO_KIND));
        };
        let status = machine.status.clone().unwrap_or_default();
        if !matches!(status.role(pod.run, &pod.name, Some(&pod.uid)), Role::Run(_)) {
            return Ok(After::Again(HANDED_OVER));
        }
        let run = run_of(pod, &machine.uid().unwrap_or_default());
        match self.provisioner.mark(vm, &run).await {
            Ok(vm) => {
                let note = format!("vmmd runs it as VM {}, which has moved here", daemon::name(&vm));
                self.tell(pod, EventType::Normal, "TakenOver", &note).await;
                Ok(After::Vm(Box::new(vm)))
            }
            // The hand-over has not ended.
            Err(status) if daemon::refused(&status) => Ok(After::Again(HANDED_OVER)),
            Err(status) => Err(status.into()),
        }
    }

    fn not_yet(&self, uid: &str) -> Duration {
        let mut reports = self.reports();
        let report = reports.0.entry(uid.to_owned()).or_default();
        report.not_yet = report.not_yet.saturating_add(1);
        let factor = 1_u32.checked_shl(report.not_yet).unwrap_or(u32::MAX);
        NOT_YET.saturating_mul(factor).min(NOT_YET_AT_MOST)
    }

    async fn make(&self, pod: &v1::Pod, machine: &str, plan: Plan) -> Result<After, Error> {
        let run = run_of(pod, machine);
        if let Some(message) = missing_volume(pod, &plan) {
            return self.give_up(pod, "VolumeMissing", &message).await;
        }
        let Plan { vm, sources, .. } = plan;
        let mut vm = launcher::with_pod(run.marked(vm, &self.provisioner.node), &pod.uid);
        let request = v1::GetPodRequest { uid: pod.uid.clone() };
        let answer = within(CALL, self.provisioner.daemon.pods.clone().get_pod(request)).await?;
        let files = Files::of(answer.pod.unwrap_or_default().files);
        let mut lacks = Vec::new();
        if let Some(from) = &sources.cloud_init_from {
            seed::fill(&files, from, &mut vm, &mut lacks).await?;
        }
        // Files do not change while the launcher is connected.
        if let Some(lack) = lacks.first() {
            return self.give_up(pod, lack.reason, &lack.message).await;
        }
        let vm = match self.provisioner.finish(&run, vm, &sources, &files, lacks).await? {
            Prepared::Ready(vm) => vm,
            Prepared::Lacks(lacks) => return self.wait_for(pod, &lacks).await,
            Prepared::Refused { volume, status } => {
                let (reason, message) = daemon::explain(&status);
                let message = format!("volume {volume}: {message}");
                return self.give_up(pod, &reason, &message).await;
            }
        };
        match self.provisioner.make(&pod.uid, *vm, &sources).await? {
            Made::Vm(vm) => {
                let note = format!("vmmd runs it as VM {}", daemon::name(&vm));
                self.tell(pod, EventType::Normal, "Created", &note).await;
                Ok(After::Vm(vm))
            }
            Made::Known(vm) => Ok(After::Vm(vm)),
            Made::Lacks(lack) => self.wait_for(pod, &[lack]).await,
            Made::Again(time) => Ok(After::Again(time)),
            Made::Removed => {
                self.give_up(pod, admit::VM_REMOVED, "the VM was removed from vmmd")
                    .await
            }
            Made::Refused { reason, message } => self.give_up(pod, &reason, &message).await,
        }
    }

    /// Reports once why a VM waits. The check is repeated.
    async fn wait_for(&self, pod: &v1::Pod, lacks: &[Lack]) -> Result<After, Error> {
        let reason = lacks.first().map_or("Waiting", |lack| lack.reason);
        let messages: Vec<_> = lacks.iter().map(|lack| lack.message.as_str()).collect();
        let message = messages.join("; ");
        let new = Reported {
            reason: reason.to_owned(),
            message: message.clone(),
            not_yet: 0,
        };
        if self.reports().0.get(&pod.uid) == Some(&new) {
            return Ok(After::Again(LACKS));
        }
        self.report(pod, PodReport::Waiting, reason, &message).await?;
        let type_ = match reason {
            provision::IMPORTING_IMAGE | provision::MAKING_DISK | AWAITS_MIGRATION => EventType::Normal,
            _ => EventType::Warning,
        };
        self.tell(pod, type_, reason, &message).await;
        self.reports().0.insert(pod.uid.clone(), new);
        Ok(After::Again(LACKS))
    }

    /// For an admitted pod that gets no VM.
    async fn give_up(&self, pod: &v1::Pod, reason: &str, message: &str) -> Result<After, Error> {
        self.tell(pod, EventType::Warning, reason, message).await;
        self.refuse(pod, reason, message).await
    }

    async fn refuse(&self, pod: &v1::Pod, reason: &str, message: &str) -> Result<After, Error> {
        self.report(pod, PodReport::Refused, reason, message).await?;
        Ok(After::Refused)
    }

    async fn report(
        &self,
        pod: &v1::Pod,
        report: PodReport,
        reason: &str,
        message: &str,
    ) -> Result<(), Status> {
        let ends = message.char_indices().map(|(start, one)| start + one.len_utf8());
        let end = ends.take_while(|end| *end <= MAX_MESSAGE).last().unwrap_or(0);
        let request = v1::ReportPodRequest {
            uid: pod.uid.clone(),
            report: report.into(),
            reason: reason.to_owned(),
            message: message.get(..end).unwrap_or_default().to_owned(),
        };
        match within(CALL, self.provisioner.daemon.pods.clone().report_pod(request)).await {
            // The launcher is not connected any more, or has its VM: the watches say so.
            Err(status) if daemon::refused(&status) => {
                tracing::debug!(pod = pod.uid, reason, "report: {}", status.message());
                Ok(())
            }
            answer => answer.map(drop),
        }
    }

    fn reports(&self) -> MutexGuard<'_, Reports> {
        self.reported.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes an event of an admitted pod. A failure does not stop the work.
    async fn tell(&self, pod: &v1::Pod, type_: EventType, reason: &str, note: &str) {
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.chars().take(1000).collect()),
            action: "Run".to_owned(),
            secondary: None,
        };
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(pod.namespace.clone()),
            name: Some(pod.name.clone()),
            uid: Some(pod.uid.clone()),
            ..ObjectReference::default()
        };
        if let Err(error) = self.recorder.publish(&event, &about).await {
            tracing::debug!("event {reason}: {error}");
        }
    }
}

/// The pod of a VirtualMachine with this uid.
fn run_of(pod: &v1::Pod, machine: &str) -> RunPod {
    RunPod {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        machine: machine.to_owned(),
        epoch: pod.run.to_string(),
    }
}

/// A claim of the run that the launcher has not passed, or that is a block device instead of a share.
fn missing_volume(pod: &v1::Pod, plan: &Plan) -> Option<String> {
    let spec = plan.vm.spec.as_ref()?;
    let volumes = plan.sources.volumes.iter();
    let mut claims = volumes.filter(|volume| volume.persistent_volume_claim.is_some());
    claims.find_map(|volume| {
        let name = &volume.name;
        let Some(passed) = pod.volumes.iter().find(|passed| passed.name == *name) else {
            return Some(format!("the pod has passed no volume {name}"));
        };
        let share = spec.shares.iter().any(|share| share.name == *name);
        (share && passed.kind() != PodVolumeKind::Directory)
            .then(|| format!("volume {name} is no directory, and cannot be a share"))
    })
}

//! The controller: one pod for each run of a VirtualMachine, and the status of each
//! VirtualMachine.
//!
//! It reads, asks [`decide`] for the next action, carries out this one action, and reads again.
//! Only one of several controllers works: the holder of the [`crate::leader`] lease. Two
//! controllers that both believe to be the holder do no harm, see [`decide`].

mod budget;
mod decide;
mod migration;
mod nodes;
mod orphans;
mod status;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{Stream, StreamExt as _, channel::mpsc};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
    runtime::{
        WatchStreamExt as _,
        controller::{Action, Controller},
        events::{Event, EventType, Recorder},
        reflector::Store,
        watcher,
    },
};
use serde_json::json;
use tokio::time::Instant;

use self::{
    budget::Budgets,
    decide::{Act, Seen},
};
use crate::{
    backoff::{Watches, watching},
    clients::Clients,
    crd::{MigrationPhase, VirtualMachine, VirtualMachineStatus},
    launcher::{self, Claimed, Claims},
    metrics, names,
    run::{Plan, Settings},
    spec::Invalid,
};

/// How long until a VirtualMachine is looked at again without a reason.
const RESYNC: Duration = Duration::from_secs(300);
/// How long it waits after the API server has refused the pod of a run; twice as long each time.
const FIRST_WAIT: Duration = Duration::from_secs(5);
/// How long it waits at most.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// How many things are done at once for one VirtualMachine before others have their turn.
const STEPS: usize = 8;

/// What reconciling needs.
struct Context {
    client: Client,
    settings: Settings,
    recorder: Recorder,
    nodes: Store<Node>,
    budgets: Budgets,
    /// By the uids of the VirtualMachines.
    refused: Mutex<HashMap<String, Refused>>,
}

/// The pod of a run that the API server refuses.
struct Refused {
    /// Number of the run.
    epoch: i64,
    /// When it is tried again.
    next: Instant,
    /// How long it waits after another refusal.
    wait: Duration,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{0}")]
    Api(#[from] kube::Error),
}

/// Works until the watches end, which they never do.
pub async fn run(clients: Clients, settings: Settings) {
    let machines = Api::<VirtualMachine>::all(clients.watches.clone());
    let pods = Api::<Pod>::all(clients.watches.clone());
    let recorder = Recorder::new(clients.calls.clone(), "vmmd-kube-controller".into());
    let (listed, anew) = mpsc::unbounded();
    let (nodes, changes) = nodes::watch(clients.watches.clone(), listed.clone());
    let context = Arc::new(Context {
        client: clients.calls.clone(),
        settings,
        recorder,
        nodes,
        budgets: Budgets::new(clients.calls.clone()),
        refused: Mutex::default(),
    });
    let controller = Controller::new(machines, watching());
    let store = controller.store();
    let counted = store.clone();
    metrics::vms(move || {
        let phase = |machine: &Arc<VirtualMachine>| {
            let status = machine.status.as_ref();
            status.map_or_else(|| "Pending".to_owned(), |status| status.phase.clone())
        };
        metrics::count(counted.state().iter().map(phase))
    });
    let machines = store.clone();
    let orphans = tokio::spawn(orphans::run(clients, store));
    controller
        .owns_stream(watched(pods, listed))
        .reconcile_all_on(anew)
        .watches_stream(changes, move |node| nodes::leaving(&machines, &node))
        .trigger_backoff(Watches::new())
        .run(reconcile, on_error, context)
        .for_each(|result| async move {
            metrics::reconciled(result.is_ok());
            if let Err(error) = result {
                tracing::debug!("{error}");
            }
        })
        .await;
    orphans.abort();
}

/// Changes of pods. A new list of the pods, signalled to `listed`, does not report pods that were
/// deleted since the last watch: all VirtualMachines have to be checked.
fn watched(
    pods: Api<Pod>,
    listed: mpsc::UnboundedSender<()>,
) -> impl Stream<Item = Result<Pod, watcher::Error>> {
    watcher(pods, watching().labels(names::MACHINE_UID))
        .inspect(move |event| {
            if matches!(event, Ok(watcher::Event::InitDone)) {
                // The receiver is closed only when the controller ends.
                let _ = listed.unbounded_send(());
            }
        })
        .touched_objects()
}

#[allow(clippy::needless_pass_by_value, reason = "the form that Controller wants")]
fn on_error(machine: Arc<VirtualMachine>, error: &Error, _: Arc<Context>) -> Action {
    match error {
        // Another client has written, or it is gone: the present state arrives by the watch.
        Error::Api(kube::Error::Api(status)) if status.is_conflict() || status.is_not_found() => {
            Action::requeue(Duration::from_secs(1))
        }
        Error::Api(_) => {
            tracing::warn!(vm = machine.name_any(), "{error}");
            Action::requeue(Duration::from_secs(5))
        }
    }
}

async fn reconcile(machine: Arc<VirtualMachine>, context: Arc<Context>) -> Result<Action, Error> {
    let namespace = machine.namespace().unwrap_or_default();
    let pods = Api::<Pod>::namespaced(context.client.clone(), &namespace);
    let mut machine = (*machine).clone();
    for _ in 0..STEPS {
        let status = machine.status.clone().unwrap_or_default();
        let pod = find(&pods, status.run.as_ref().map(|run| run.pod.as_str())).await?;
        // All about a migration that is over is known, except a pod that it may have left over.
        let (target, source) = match &status.migration {
            None => (None, None),
            Some(last) if last.phase == MigrationPhase::Succeeded => {
                (None, find(&pods, Some(&last.source_pod)).await?)
            }
            Some(migration) => (find(&pods, Some(&migration.pod)).await?, None),
        };
        let node = pod
            .as_ref()
            .and_then(|pod| pod.spec.as_ref()?.node_name.as_deref());
        let seen = Seen {
            machine: &machine,
            pod: pod.as_ref(),
            cordoned: node.is_some_and(|node| nodes::is_cordoned(&context.nodes, node)),
            target: target.as_ref(),
            source: source.as_ref(),
            budget: context.budgets.known(&machine),
            migration_port: context.settings.migration_port,
            now: Timestamp::now(),
        };
        let act = decide::next(&seen);
        let wait = match &act {
            Act::Idle => Some(RESYNC),
            Act::Wait(time) => Some(Duration::try_from(*time).unwrap_or_default().min(RESYNC)),
            Act::CreatePod(_) => context.held(&machine),
            _ => None,
        };
        if let Some(wait) = wait {
            return Ok(Action::requeue(wait));
        }
        let Some(next) = context.carry_out(&machine, act, &pods).await? else {
            return Ok(Action::await_change());
        };
        machine = next;
    }
    Ok(Action::requeue(Duration::from_secs(1)))
}

async fn find(pods: &Api<Pod>, name: Option<&str>) -> Result<Option<Pod>, Error> {
    match name.filter(|name| !name.is_empty()) {
        Some(name) => Ok(pods.get_opt(name).await?),
        None => Ok(None),
    }
}

impl Context {
    /// The VirtualMachine as it is then; `None` when it is gone.
    async fn carry_out(
        &self,
        machine: &VirtualMachine,
        act: Act,
        pods: &Api<Pod>,
    ) -> Result<Option<VirtualMachine>, Error> {
        let namespace = machine.namespace().unwrap_or_default();
        let machines = Api::<VirtualMachine>::namespaced(self.client.clone(), &namespace);
        let name = machine.name_any();
        match act {
            Act::AddFinalizer => {
                let mut finalizers = machine.finalizers().to_vec();
                finalizers.push(names::POD_GONE.to_owned());
                return Ok(Some(self.finalize(&machines, machine, &finalizers).await?));
            }
            Act::RemoveFinalizer => {
                let finalizers = machine.finalizers().iter();
                let finalizers: Vec<_> = finalizers
                    .filter(|one| *one != names::POD_GONE)
                    .cloned()
                    .collect();
                self.finalize(&machines, machine, &finalizers).await?;
                self.refused().remove(&machine.uid().unwrap_or_default());
                self.budgets.forget(machine);
                return Ok(None);
            }
            Act::Write(status) => {
                return Ok(Some(self.write(&machines, machine, *status).await?));
            }
            Act::CreatePod(plan) => {
                let epoch = machine.status.as_ref().map_or(0, |status| status.run_epoch());
                let pod = self.pod(machine, &plan, epoch).await?;
                match self.create(machine, pod, epoch, pods).await {
                    Err(Error::Api(kube::Error::Api(refusal))) if (400..500).contains(&refusal.code) => {
                        self.hold(machine, epoch);
                        let old = machine.status.clone().unwrap_or_default();
                        let new = status::failed_create(old.clone(), &refusal.message, Timestamp::now());
                        if new != old {
                            return Ok(Some(self.write(&machines, machine, new).await?));
                        }
                    }
                    created => {
                        created?;
                        self.refused().remove(&machine.uid().unwrap_or_default());
                    }
                }
            }
            Act::CreateTarget { plan, epoch, from } => {
                let pod = self.pod(machine, &plan, epoch).await?;
                let pod = pod.map(|pod| launcher::away_from(pod, &from));
                match self.create(machine, pod, epoch, pods).await {
                    Err(Error::Api(kube::Error::Api(refusal))) if (400..500).contains(&refusal.code) => {
                        let old = machine.status.clone().unwrap_or_default();
                        let new =
                            migration::failed(&old, "TargetRefused", &refusal.message, Timestamp::now());
                        return Ok(Some(self.write(&machines, machine, new).await?));
                    }
                    created => created?,
                }
            }
            Act::Label(node) => {
                let patch = json!({"metadata": {"labels": {names::MIGRATING_FROM: node}}});
                let parameters = PatchParams::default();
                return Ok(Some(
                    machines.patch(&name, &parameters, &Patch::Merge(patch)).await?,
                ));
            }
            Act::SetBudget(wanted) => self.budgets.set(machine, wanted).await?,
            Act::DeletePod { pod, uid } => {
                let parameters = DeleteParams {
                    preconditions: Some(Preconditions {
                        uid: Some(uid),
                        resource_version: None,
                    }),
                    ..DeleteParams::default()
                };
                match pods.delete(&pod, &parameters).await {
                    Ok(_) => {
                        let note = format!("Deleted pod {pod}");
                        self.tell(machine, EventType::Normal, "DeletedPod", &note).await;
                    }
                    Err(kube::Error::Api(status)) if status.is_not_found() => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Act::Wait(_) | Act::Idle => {}
        }
        Ok(machines.get_opt(&name).await?)
    }

    /// Writes the status over the version that was read.
    async fn write(
        &self,
        machines: &Api<VirtualMachine>,
        machine: &VirtualMachine,
        status: VirtualMachineStatus,
    ) -> Result<VirtualMachine, Error> {
        let old = machine.status.clone().unwrap_or_default();
        let news = status::news(&old, &status);
        let mut new = machine.clone();
        new.status = Some(status);
        let parameters = PostParams::default();
        let written = machines
            .replace_status(&machine.name_any(), &parameters, &new)
            .await?;
        for (type_, reason, note) in news {
            self.tell(machine, type_, &reason, &note).await;
        }
        Ok(written)
    }

    /// The pod of a run.
    async fn pod(
        &self,
        machine: &VirtualMachine,
        plan: &Plan,
        epoch: i64,
    ) -> Result<Result<Pod, Invalid>, Error> {
        let namespace = machine.namespace().unwrap_or_default();
        let claims = Api::<PersistentVolumeClaim>::namespaced(self.client.clone(), &namespace);
        let mut known = Claims::new();
        for name in launcher::claims(&plan.sources) {
            let Some(claim) = claims.get_opt(name).await? else {
                let text = format!("spec.volumes: there is no PersistentVolumeClaim {name}");
                return Ok(Err(Invalid(text)));
            };
            known.insert(name.to_owned(), Claimed::from(&claim));
        }
        Ok(launcher::pod(machine, plan, epoch, &self.settings, &known))
    }

    fn refused(&self) -> MutexGuard<'_, HashMap<String, Refused>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long the pod of the run is not to be made yet. A run with another number has another pod.
    fn held(&self, machine: &VirtualMachine) -> Option<Duration> {
        let epoch = machine.status.as_ref()?.run_epoch();
        let refused = self.refused();
        let refused = refused.get(&machine.uid()?).filter(|one| one.epoch == epoch)?;
        let left = refused.next.saturating_duration_since(Instant::now());
        Some(left).filter(|left| !left.is_zero())
    }

    fn hold(&self, machine: &VirtualMachine, epoch: i64) {
        let mut all = self.refused();
        let before = all.remove(&machine.uid().unwrap_or_default());
        let wait = before
            .filter(|before| before.epoch == epoch)
            .map_or(FIRST_WAIT, |before| before.wait);
        let refused = Refused {
            epoch,
            next: Instant::now() + wait,
            wait: wait.saturating_mul(2).min(LONGEST_WAIT),
        };
        all.insert(machine.uid().unwrap_or_default(), refused);
    }

    /// Writes the finalizers over the version that was read.
    async fn finalize(
        &self,
        machines: &Api<VirtualMachine>,
        machine: &VirtualMachine,
        finalizers: &[String],
    ) -> Result<VirtualMachine, Error> {
        let patch = json!({"metadata": {
            "resourceVersion": machine.resource_version(),
            "finalizers": finalizers,
        }});
        let parameters = PatchParams::default();
        Ok(machines
            .patch(&machine.name_any(), &parameters, &Patch::Merge(patch))
            .await?)
    }

    async fn create(
        &self,
        machine: &VirtualMachine,
        pod: Result<Pod, Invalid>,
        epoch: i64,
        pods: &Api<Pod>,
    ) -> Result<(), Error> {
        let made = match pod {
            Ok(pod) => pods.create(&PostParams::default(), &pod).await,
            Err(Invalid(text)) => {
                self.tell(machine, EventType::Warning, "FailedCreate", &text)
                    .await;
                let status = kube::core::Status::failure(&text, "Invalid").with_code(422);
                return Err(Error::Api(kube::Error::Api(status.boxed())));
            }
        };
        match made {
            Ok(pod) => {
                let note = format!("Created pod {} for run {epoch}", pod.name_any());
                self.tell(machine, EventType::Normal, "CreatedPod", &note).await;
                Ok(())
            }
            // By the controller before this one, or by one that was overtaken: the next look says whose it is.
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
            Err(error) => {
                let note = format!("Can't create the pod of run {epoch}: {error}");
                self.tell(machine, EventType::Warning, "FailedCreate", &note)
                    .await;
                Err(error.into())
            }
        }
    }

    /// Publishes an event. A failure does not stop the work.
    async fn tell(&self, machine: &VirtualMachine, type_: EventType, reason: &str, note: &str) {
        use kube::Resource as _;
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.chars().take(1000).collect()),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, &machine.object_ref(&())).await {
            tracing::debug!("event {reason}: {error}");
        }
    }
}

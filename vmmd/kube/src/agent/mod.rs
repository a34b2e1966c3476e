//! The agent: a vmmd as a node of the cluster.
//!
//! It watches the pods that are bound to its node, and the VMs that it has created in vmmd. For
//! each pod, and each VM without one, [`step`] returns the next step, and [`work`] carries it out;
//! one step for one pod at a time. The agent keeps no state over a restart: it lists both sides
//! again. While one side does not answer, the agent does not act on that side's last report: VMs
//! continue unchanged, and vmmd restarts them on its own.

mod migrate;
mod node;
mod pod_status;
mod prepare;
mod register;
mod release;
mod step;
mod sweep;
mod watch;
mod work;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Time};
use kube::{ResourceExt as _, runtime::events::Recorder};
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
};
use vmmd_api::v1;

pub use self::{node::Settings, register::confined};
use self::{
    step::{Place, Step},
    watch::News,
    work::{After, Worker},
};
use crate::{
    clients::Clients,
    daemon::{Daemon, camel},
    metrics,
    provision::{Error, Provisioner},
    vms,
};

/// How long the first attempt after a failed one waits; twice as long each time.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// How long an attempt waits at most.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Time for the watch to show the effect of a step, before the same step is repeated.
const SETTLE: Duration = Duration::from_secs(2);

/// Works as long as all of its parts do.
pub async fn run(clients: Clients, daemon: Daemon, settings: Settings) {
    let client = clients.calls;
    let host = settings.addresses.iter().find(|(kind, _)| *kind == "InternalIP");
    let worker = Worker {
        client: client.clone(),
        daemon: daemon.clone(),
        node: settings.name.clone(),
        allowed: settings.allowed.clone(),
        host: host.map(|(_, address)| address.clone()).unwrap_or_default(),
        recorder: Recorder::new(client.clone(), "vmmd-kube-agent".into()),
        provisioner: Provisioner::new(daemon.clone(), settings.name.clone()),
    };
    let (news, received) = mpsc::channel(256);
    let mut tasks = JoinSet::new();
    tasks.spawn(register::run(client.clone(), daemon.clone(), settings.clone()));
    tasks.spawn(register::renew(client.clone(), settings.name.clone()));
    tasks.spawn(sweep::run(client.clone(), worker.provisioner.clone()));
    tasks.spawn(crate::tell::run(
        daemon.clone(),
        settings.name.clone(),
        worker.recorder.clone(),
    ));
    tasks.spawn(watch::pods(clients.watches, settings.name, news.clone()));
    tasks.spawn(vms::watch(daemon, news));
    tokio::select! {
        () = Agent::new(worker).work(received) => {}
        Some(Err(error)) = tasks.join_next() => tracing::error!("{error}"),
    }
}

/// Reason for the end of a wait of the loop.
enum Done {
    /// A step for this pod.
    Step(String, Step, Result<After, Error>),
    /// The time to look at this pod again.
    Timer(String),
}

struct Agent {
    worker: Worker,
    /// By uid.
    pods: HashMap<String, Arc<Pod>>,
    pods_known: bool,
    /// By the uid of their pod.
    vms: HashMap<String, Arc<v1::Vm>>,
    vms_known: bool,
    /// Pods for which a step is under way.
    busy: HashSet<String>,
    /// Those of them that have changed meanwhile.
    changed: HashSet<String>,
    /// Pods whose VM the watch has shown meanwhile: the step's answer about the VM is older, or
    /// arrives by the watch too.
    heard: HashSet<String>,
    failures: HashMap<String, u32>,
    /// Until when the guests of pods that are being deleted have time, said once for each deletion; and when the pod was to be gone then.
    deadlines: HashMap<String, (Option<Time>, Timestamp)>,
    timers: HashMap<String, AbortHandle>,
    tasks: JoinSet<Done>,
}

impl Agent {
    fn new(worker: Worker) -> Self {
        Self {
            worker,
            pods: HashMap::new(),
            pods_known: false,
            vms: HashMap::new(),
            vms_known: false,
            busy: HashSet::new(),
            changed: HashSet::new(),
            heard: HashSet::new(),
            failures: HashMap::new(),
            deadlines: HashMap::new(),
            timers: HashMap::new(),
            tasks: JoinSet::new(),
        }
    }

    async fn work(mut self, mut news: mpsc::Receiver<News>) {
        loop {
            tokio::select! {
                received = news.recv() => match received {
                    Some(received) => self.hear(received),
                    None => return,
                },
                Some(done) = self.tasks.join_next() => match done {
                    Ok(Done::Step(uid, step, after)) => self.after(&uid, &step, after),
                    Ok(Done::Timer(uid)) => {
                        self.timers.remove(&uid);
                        self.look(&uid);
                    }
                    // A timer that was replaced.
                    Err(error) if error.is_cancelled() => {}
                    Err(error) => std::panic::resume_unwind(error.into_panic()),
                },
            }
            self.count();
        }
    }

    /// Updates the metrics of the VMs.
    fn count(&self) {
        let phase = |vm: &Arc<v1::Vm>| {
            let phase = vm.status.as_ref().map(v1::VmStatus::phase).unwrap_or_default();
            camel(phase.as_str_name().trim_start_matches("VM_PHASE_"))
        };
        let phases = metrics::count(self.vms.values().map(phase));
        metrics::vms(move || phases.clone());
    }

    fn hear(&mut self, news: News) {
        match news {
            News::Pods(pods) => {
                self.pods = pods
                    .into_iter()
                    .filter_map(|pod| Some((pod.uid()?, Arc::new(pod))))
                    .collect();
                self.pods_known = true;
                self.look_at_all();
            }
            News::Pod(pod) => {
                if let Some(uid) = pod.uid() {
                    self.pods.insert(uid.clone(), Arc::from(pod));
                    self.look(&uid);
                }
            }
            News::PodGone(uid) => {
                self.pods.remove(&uid);
                self.look(&uid);
            }
            News::Vms(vms::News::All(vms)) => {
                let (vms, node) = (vms.into_iter(), &self.worker.node);
                self.vms = vms
                    .filter_map(|vm| Some((step::key(&vm, node)?, Arc::new(vm))))
                    .collect();
                self.vms_known = true;
                self.heard.extend(self.busy.iter().cloned());
                self.look_at_all();
            }
            News::Vms(vms::News::Vm(vm)) => {
                if let Some(uid) = step::key(&vm, &self.worker.node) {
                    self.vms.insert(uid.clone(), Arc::from(vm));
                    self.heard.extend(self.busy.get(&uid).cloned());
                    self.look(&uid);
                }
            }
            News::Vms(vms::News::Gone(vm)) => {
                if let Some(uid) = step::key(&vm, &self.worker.node) {
                    self.forget_vm(&uid, &vm);
                    self.heard.extend(self.busy.get(&uid).cloned());
                    self.look(&uid);
                }
            }
            News::Vms(vms::News::Away) => self.vms_known = false,
        }
    }

    /// Forgets this VM, but not a recreated one.
    fn forget_vm(&mut self, uid: &str, gone: &v1::Vm) {
        let id = |vm: &v1::Vm| vm.metadata.as_ref().map(|metadata| metadata.uid.clone());
        if self.vms.get(uid).is_some_and(|known| id(known) == id(gone)) {
            self.vms.remove(uid);
        }
    }

    fn look_at_all(&mut self) {
        let all: HashSet<_> = self.pods.keys().chain(self.vms.keys()).cloned().collect();
        for uid in all {
            self.look(&uid);
        }
    }

    /// Begins the next step for a pod, when there is one to be done.
    fn look(&mut self, uid: &str) {
        if self.vms.contains_key(uid) {
            // Its creation was carried out. Repeated when the VM is gone, it could only mislead.
            self.worker.provisioner.forget(uid);
        }
        if !self.pods_known || !self.vms_known {
            return;
        }
        if self.busy.contains(uid) {
            self.changed.insert(uid.to_owned());
            return;
        }
        // After a failure nothing but its time begins the next attempt.
        if self.failures.contains_key(uid) && self.timers.contains_key(uid) {
            return;
        }
        let (pod, vm) = (self.pods.get(uid).cloned(), self.vms.get(uid).cloned());
        let place = Place {
            node: &self.worker.node,
            host: &self.worker.host,
        };
        let deadline = self.deadlines.get(uid).and_then(|(deletion, deadline)| {
            let now = pod.as_ref()?.metadata.deletion_timestamp.as_ref();
            (now == deletion.as_ref()).then_some(*deadline)
        });
        let step = match (&pod, &vm) {
            (Some(pod), vm) => step::for_pod(pod, vm.as_deref(), place, deadline, Timestamp::now()),
            (None, Some(vm)) => step::without_pod(vm),
            (None, None) => {
                self.failures.remove(uid);
                self.deadlines.remove(uid);
                self.worker.provisioner.forget(uid);
                return;
            }
        };
        match step {
            Step::Idle => {}
            Step::Wait(time) => self.later(uid, time),
            step => {
                self.busy.insert(uid.to_owned());
                let (worker, uid) = (self.worker.clone(), uid.to_owned());
                self.tasks.spawn(async move {
                    let after = worker
                        .carry_out(step.clone(), &uid, pod.as_deref(), vm.as_deref())
                        .await;
                    Done::Step(uid, step, after)
                });
            }
        }
    }

    fn after(&mut self, uid: &str, step: &Step, after: Result<After, Error>) {
        self.busy.remove(uid);
        let changed = self.changed.remove(uid);
        let heard = self.heard.remove(uid);
        metrics::reconciled(after.is_ok());
        let after = match after {
            Ok(after) => after,
            Err(error) => {
                let failures = self.failures.entry(uid.to_owned()).or_default();
                let factor = 1_u32.checked_shl(*failures).unwrap_or(u32::MAX);
                let wait = FIRST_WAIT.saturating_mul(factor).min(LONGEST_WAIT);
                *failures = failures.saturating_add(1).min(16);
                tracing::warn!(pod = self.called(uid), step = ?std::mem::discriminant(step), "{error}; again in {wait:?}");
                self.later(uid, wait);
                return;
            }
        };
        self.failures.remove(uid);
        match after {
            After::Vm(vm) => {
                if !heard {
                    self.vms.insert(uid.to_owned(), Arc::from(vm));
                }
                self.look(uid);
            }
            After::NoVm => {
                self.vms.remove(uid);
                self.look(uid);
            }
            After::Pod(pod) => {
                // Unless the watch has been quicker.
                if !changed {
                    self.pods.insert(uid.to_owned(), Arc::from(pod));
                }
                self.look(uid);
            }
            After::Again(time) => self.later(uid, time),
            After::Stop(deadline) => {
                let pod = self.pods.get(uid);
                let deletion = pod.and_then(|pod| pod.metadata.deletion_timestamp.clone());
                self.deadlines.insert(uid.to_owned(), (deletion, deadline));
                self.look(uid);
            }
            After::Done if changed => self.look(uid),
            After::Done => self.later(uid, SETTLE),
        }
    }

    fn later(&mut self, uid: &str, time: Duration) {
        if let Some(timer) = self.timers.remove(uid) {
            timer.abort();
        }
        let name = uid.to_owned();
        let timer = self.tasks.spawn(async move {
            tokio::time::sleep(time).await;
            Done::Timer(name)
        });
        self.timers.insert(uid.to_owned(), timer);
    }

    fn called(&self, uid: &str) -> String {
        let pod = self.pods.get(uid);
        pod.map_or_else(
            || uid.to_owned(),
            |pod| format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()),
        )
    }
}

//! The agent of a node whose VMs are in launcher pods.
//!
//! It offers the node's vmmd to the kubelet ([`plugin`]), and creates a VM for each launcher that is
//! connected to vmmd, when the VirtualMachine names the launcher's pod ([`admit`]). It has vmmd move
//! VMs to other nodes ([`migrate`]). It reads VirtualMachines, and nothing else of the API server.
//!
//! For each pod, by its uid, it knows whether the launcher is connected and which VM vmmd has.
//! [`step`] returns the next step, and [`work`] carries it out, one step for one pod at a time. The
//! agent keeps no state over a restart: vmmd lists both again. While vmmd does not answer, the
//! agent does nothing. A VM ends with its launcher without the agent.

mod admit;
mod files;
mod migrate;
pub mod plugin;
mod step;
mod tell;
mod vms;
mod watch;
mod work;

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kube::runtime::events::Recorder;
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::Instant,
};
use vmmd_api::v1;

use self::{
    migrate::Mover,
    step::{Seen, Step},
    watch::News,
    work::{After, Worker},
};
use crate::{
    clients::Clients,
    daemon::{Daemon, camel, launcher_uid, pod_uid},
    metrics, names,
    provision::{Error, Provisioner},
};

/// Wait before the first repetition of a failed step; doubled each time.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Longest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Settings of the agent.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the Kubernetes node.
    pub node: String,
    /// Time in which a launcher connects again after vmmd was not reachable.
    pub reconnect: Duration,
    /// Settings of the device plugin.
    pub plugin: plugin::Settings,
}

/// Works as long as all of its parts do.
pub async fn run(clients: Clients, daemon: Daemon, settings: Settings) {
    let recorder = Recorder::new(clients.calls.clone(), "vmmd-kube-agent".into());
    let worker = Worker {
        client: clients.calls,
        provisioner: Provisioner::new(daemon.clone(), settings.node.clone()),
        recorder: recorder.clone(),
        reported: Arc::default(),
    };
    let (news, received) = mpsc::channel(256);
    let mut tasks = JoinSet::new();
    tasks.spawn(plugin::run(daemon.clone(), settings.plugin));
    tasks.spawn(tell::run(daemon.clone(), settings.node.clone(), recorder.clone()));
    let mover = Mover {
        watches: clients.watches,
        daemon: daemon.clone(),
        node: settings.node,
        recorder,
    };
    tasks.spawn(mover.run());
    tasks.spawn(watch::pods(daemon.clone(), news.clone()));
    tasks.spawn(vms::watch(daemon, news));
    tokio::select! {
        () = Agent::new(worker, settings.reconnect).work(received) => {}
        Some(result) = tasks.join_next() => tracing::error!("a part of the agent has ended: {result:?}"),
    }
}

/// State of a pod.
#[derive(Default)]
struct Entry {
    /// While its launcher is connected.
    pod: Option<Arc<v1::Pod>>,
    /// The VM that vmmd has for it.
    vm: Option<Arc<v1::Vm>>,
    /// Time until which the launcher may connect again.
    returns_until: Option<Instant>,
    /// The pod gets no VM.
    refused: bool,
    /// No disk of the pod is left.
    clean: bool,
    /// Failures of steps in a row.
    failures: u32,
    /// The step that is carried out, or waits for its time.
    task: Option<Task>,
    /// The watch has shown the VM since the step began: the answer of the step about it is older.
    heard: bool,
}

impl Entry {
    /// The state of the pod with this uid, on this node, for the next step.
    fn seen(&self, uid: &str, node: &str) -> Seen<'_> {
        let is_marked = |vm: &v1::Vm| {
            let labels = vm.metadata.as_ref().map(|metadata| &metadata.labels);
            pod_uid(vm).is_some_and(|of| of == uid)
                && labels.is_some_and(|labels| labels.get(names::AGENT).is_some_and(|of| of == node))
        };
        Seen {
            connected: self.pod.is_some(),
            vm: self.vm.as_deref(),
            marked: self.vm.as_deref().is_some_and(is_marked),
            refused: self.refused,
            clean: self.clean,
        }
    }
}

/// A step in progress.
struct Task {
    step: Step,
    handle: AbortHandle,
    /// Its time has come.
    begun: Arc<AtomicBool>,
}

/// Reason for the end of a wait of the loop.
struct Done {
    uid: String,
    step: Step,
    result: Result<After, Error>,
}

struct Agent {
    worker: Worker,
    reconnect: Duration,
    /// By uid of the pod.
    entries: HashMap<String, Entry>,
    pods_known: bool,
    vms_known: bool,
    tasks: JoinSet<Done>,
    sweep: tokio::time::Interval,
}

impl Agent {
    fn new(worker: Worker, reconnect: Duration) -> Self {
        Self {
            worker,
            reconnect,
            entries: HashMap::new(),
            pods_known: false,
            vms_known: false,
            tasks: JoinSet::new(),
            sweep: tokio::time::interval(work::SWEEP),
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
                    Ok(done) => self.after(done),
                    Err(error) if error.is_cancelled() => {}
                    Err(error) => std::panic::resume_unwind(error.into_panic()),
                },
                _ = self.sweep.tick() => self.look_for_disks().await,
            }
            self.count();
        }
    }

    /// Updates the metrics of the VMs.
    fn count(&self) {
        let vms = self.entries.values().filter_map(|entry| entry.vm.as_ref());
        let phases = metrics::count(vms.map(|vm| {
            let phase = vm.status.as_ref().map(v1::VmStatus::phase).unwrap_or_default();
            camel(phase.as_str_name().trim_start_matches("VM_PHASE_"))
        }));
        metrics::vms(move || phases.clone());
    }

    fn hear(&mut self, news: News) {
        match news {
            News::Pods(pods) => {
                let mut known: HashMap<_, _> = pods
                    .into_iter()
                    .map(|pod| (pod.uid.clone(), Arc::new(pod)))
                    .collect();
                for uid in known.keys() {
                    self.entries.entry(uid.clone()).or_default();
                }
                for (uid, entry) in &mut self.entries {
                    match known.remove(uid) {
                        Some(pod) => connect(entry, pod),
                        // vmmd, or this agent, has started: launchers connect again.
                        None => disconnect(entry, Instant::now() + self.reconnect),
                    }
                }
                self.pods_known = true;
                self.look_at_all();
            }
            News::Connected(pod) => {
                let uid = pod.uid.clone();
                connect(self.entries.entry(uid.clone()).or_default(), Arc::from(pod));
                self.look(&uid);
            }
            News::Disconnected(uid) => {
                disconnect(self.entries.entry(uid.clone()).or_default(), Instant::now());
                self.worker.forget(&uid);
                self.look(&uid);
            }
            News::PodsAway => self.pods_known = false,
            News::Vms(vms::News::All(vms)) => {
                let mut known: HashMap<_, _> = vms
                    .into_iter()
                    .filter_map(|vm| Some((launcher_uid(&vm)?.clone(), Arc::new(vm))))
                    .collect();
                for uid in known.keys() {
                    self.entries.entry(uid.clone()).or_insert_with(|| Entry {
                        returns_until: Some(Instant::now() + self.reconnect),
                        ..Entry::default()
                    });
                }
                for (uid, entry) in &mut self.entries {
                    entry.vm = known.remove(uid);
                    entry.heard = true;
                }
                self.vms_known = true;
                self.look_at_all();
            }
            News::Vms(vms::News::Vm(vm)) => {
                if let Some(uid) = launcher_uid(&vm).cloned() {
                    let entry = self.entries.entry(uid.clone()).or_default();
                    entry.vm = Some(Arc::from(vm));
                    entry.heard = true;
                    self.look(&uid);
                }
            }
            News::Vms(vms::News::Gone(vm)) => {
                if let Some(uid) = launcher_uid(&vm).cloned() {
                    let entry = self.entries.entry(uid.clone()).or_default();
                    let id = |vm: &v1::Vm| vm.metadata.as_ref().map(|metadata| metadata.uid.clone());
                    // Not a recreated VM.
                    if entry.vm.as_ref().is_some_and(|known| id(known) == id(&vm)) {
                        entry.vm = None;
                    }
                    entry.heard = true;
                    self.look(&uid);
                }
            }
            News::Vms(vms::News::Away) => self.vms_known = false,
        }
    }

    fn look_at_all(&mut self) {
        let all: Vec<_> = self.entries.keys().cloned().collect();
        for uid in all {
            self.look(&uid);
        }
    }

    /// Begins the next step for a pod, when there is one.
    fn look(&mut self, uid: &str) {
        if !self.pods_known || !self.vms_known {
            return;
        }
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        if entry.vm.is_some() {
            // Its creation was carried out. Repeated when the VM is gone, the request could only mislead.
            self.worker.provisioner.forget(uid);
        }
        let step = step::next(&entry.seen(uid, &self.worker.provisioner.node));
        if let Some(task) = &entry.task {
            // A step that waits is not needed any more. One that has begun ends on its own, except
            // the admission of a pod whose launcher has gone.
            let waits = !task.begun.load(Ordering::SeqCst);
            let needless = waits || task.step == Step::Admit && entry.pod.is_none();
            // A VM that has changed may be handed over.
            let same = task.step == step && step != Step::Adopt;
            if same || !needless {
                return;
            }
            task.handle.abort();
            entry.task = None;
        }
        match step {
            Step::Idle => {}
            Step::Forget => {
                self.entries.remove(uid);
                self.worker.provisioner.forget(uid);
            }
            step => {
                let wait = match step {
                    Step::Remove | Step::Clean => entry
                        .returns_until
                        .map(|until| until.saturating_duration_since(Instant::now())),
                    _ => None,
                };
                self.begin(uid, step, wait.unwrap_or_default());
            }
        }
    }

    fn begin(&mut self, uid: &str, step: Step, wait: Duration) {
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        entry.heard = false;
        let (worker, pod, vm) = (self.worker.clone(), entry.pod.clone(), entry.vm.clone());
        let name = uid.to_owned();
        let begun = Arc::<AtomicBool>::default();
        let begins = begun.clone();
        let handle = self.tasks.spawn(async move {
            tokio::time::sleep(wait).await;
            begins.store(true, Ordering::SeqCst);
            let result = worker.carry_out(step, &name, pod.as_deref(), vm.as_deref()).await;
            Done {
                uid: name,
                step,
                result,
            }
        });
        entry.task = Some(Task { step, handle, begun });
    }

    fn after(&mut self, done: Done) {
        let Done { uid, step, result } = done;
        metrics::reconciled(result.is_ok());
        let Some(entry) = self.entries.get_mut(&uid) else {
            return;
        };
        entry.task = None;
        let wait = match result {
            Ok(After::Vm(vm)) => {
                if !entry.heard {
                    entry.vm = Some(Arc::from(vm));
                }
                None
            }
            Ok(After::NoVm) => {
                if !entry.heard {
                    entry.vm = None;
                }
                None
            }
            Ok(After::Refused) => {
                entry.refused = true;
                None
            }
            Ok(After::Clean) => {
                entry.clean = true;
                None
            }
            Ok(After::Again(wait)) => Some(wait),
            Err(error) => {
                let factor = 1_u32.checked_shl(entry.failures).unwrap_or(u32::MAX);
                let wait = FIRST_WAIT.saturating_mul(factor).min(LONGEST_WAIT);
                entry.failures = entry.failures.saturating_add(1).min(16);
                tracing::warn!(pod = uid, ?step, "{error}; again in {wait:?}");
                Some(wait)
            }
        };
        let Some(wait) = wait else {
            entry.failures = 0;
            return self.look(&uid);
        };
        // The step is repeated only while nothing has changed.
        let again = step::next(&entry.seen(&uid, &self.worker.provisioner.node));
        if again == step {
            self.begin(&uid, step, wait);
        } else {
            self.look(&uid);
        }
    }

    /// Finds disks of pods that this agent knows nothing of: an earlier agent has made them.
    async fn look_for_disks(&mut self) {
        if !self.pods_known || !self.vms_known {
            // Soon, when vmmd answers.
            self.sweep.reset_after(LONGEST_WAIT);
            return;
        }
        let owners: HashSet<_> = match self.worker.owners_of_disks().await {
            Ok(owners) => owners.into_iter().collect(),
            Err(error) => {
                tracing::debug!("disks of runs: {error}");
                self.sweep.reset_after(LONGEST_WAIT);
                return;
            }
        };
        for uid in owners {
            if !self.entries.contains_key(&uid) {
                let entry = Entry {
                    returns_until: Some(Instant::now() + self.reconnect),
                    ..Entry::default()
                };
                self.entries.insert(uid.clone(), entry);
                self.look(&uid);
            }
        }
    }
}

fn connect(entry: &mut Entry, pod: Arc<v1::Pod>) {
    // A launcher that connects again after a refusal asks again.
    entry.refused = false;
    entry.clean = false;
    entry.returns_until = None;
    entry.pod = Some(pod);
    // An admission is that of the earlier connection. A removal waits for the end of the time to
    // connect again, and is not needed.
    let waits = |task: &Task| !task.begun.load(Ordering::SeqCst);
    if let Some(task) = entry.task.take_if(|task| task.step == Step::Admit || waits(task)) {
        task.handle.abort();
    }
}

fn disconnect(entry: &mut Entry, until: Instant) {
    entry.pod = None;
    entry.returns_until.get_or_insert(until);
}

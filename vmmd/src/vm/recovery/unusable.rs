//! Unusable VM: its record cannot be decoded, its spec is not valid for this release, or a process
//! of it lives and cannot be found. The VM stays visible, keeps its name, disks, user id and room,
//! and can be ended and deleted.

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use uuid::Uuid;
use vmmd_api::v1::{self, ConditionStatus, ExitReason, ExitStatus, VmPhase};
use vmmd_host::{capacity::Demand, failure::Failure, ledger::Claim, lock, text};
use vmmd_objects::{
    context::Context,
    event::{Draft, Object},
    operation::Type,
    request::preconditions,
};
use vmmd_spec::vm::VmSpec;
use vmmd_store::store_failure;
use vmmd_store::{Intent, VmRecord};

use super::{reconcile::restore, supervisor};
use crate::{
    disk::moved,
    host::Host,
    paths::{LogDir, NonVolatileDir, RuntimeDir},
    registry::vms::{
        Entry,
        command::{Answer, Command, Commands, Life, Mailbox, Request},
    },
    vm::{
        api::describe::{camel_case, migration, started},
        instance::{Found, Instance, find},
        machine::change,
        start::clean_up,
    },
};

/// How often a process that could not be found is looked for again.
const AGAIN: Duration = Duration::from_secs(2);

/// Why a VM is unusable.
#[derive(Clone, Debug)]
pub enum Why {
    /// Its record in the store is undecodable.
    Record(String),
    /// Its spec is not valid to this release.
    Spec(String),
    /// A process of it lives but was not found.
    Unreachable(String),
    /// Its restoration has panicked.
    NotRestored,
}

impl Why {
    /// For programs, of failures.
    fn reason(&self) -> &'static str {
        match self {
            Self::Record(_) => "RECORD_UNREADABLE",
            Self::Spec(_) => "SPEC_INVALID",
            Self::Unreachable(_) => "UNREACHABLE",
            Self::NotRestored => "NOT_RESTORED",
        }
    }

    fn message(&self) -> String {
        match self {
            Self::Record(error) => {
                format!(
                    "its record in the store can't be read ({error}): delete the VM, or put the store back"
                )
            }
            Self::Spec(problem) => format!(
                "its stored spec is not valid to this vmmd: {problem}; delete it, or install the vmmd that made it"
            ),
            Self::Unreachable(error) => {
                format!("a process of this VM is alive but can't be reached: {error}")
            }
            Self::NotRestored => {
                "what was to take it over has failed: the log of vmmd has the cause".to_owned()
            }
        }
    }
}

/// Task state of an unusable VM.
pub(super) struct Unusable {
    pub(super) host: Arc<Host>,
    pub(super) uid: Uuid,
    pub(super) record: VmRecord,
    pub(super) why: Why,
    /// Its process, where that is found.
    pub(super) instance: Option<Instance>,
    /// Claim of a VM that may still run.
    _claim: Option<Claim>,
    since_ms: u64,
    mailbox: Commands,
    publisher: watch::Sender<Arc<v1::Vm>>,
}

/// Puts a VM whose restoration has panicked into the table.
pub fn not_restored(host: &Arc<Host>, uid: Uuid, record: VmRecord) {
    spawn(host, uid, record, Why::NotRestored, None);
}

/// Looks for the process of a VM with an unusable record or spec, and puts the VM into the table.
pub async fn take_over(host: &Arc<Host>, uid: Uuid, record: VmRecord, why: Why) {
    let run = record.instance.clone();
    let found = match &run {
        Some(run) => find(host, uid, run.user, &record.name, demand(&record))
            .await
            .ok(),
        None => None,
    };
    let instance = match found {
        Some(Found::Alive(instance, _)) => Some(*instance),
        Some(Found::Ended) | None => None,
    };
    spawn(host, uid, record, why, instance);
}

/// Puts it into the table, with all that its record says it holds.
pub fn spawn(host: &Arc<Host>, uid: Uuid, record: VmRecord, why: Why, instance: Option<Instance>) {
    change::hold_disks(host, &record);
    host.requests.adopt(&record.begun, &record.uid);
    let user = record.instance.as_ref().map(|run| run.user);
    let claim = user
        .filter(|_| instance.is_none())
        .map(|user| host.ledger.adopt(&record.name, user, demand(&record)));
    let (sender, mailbox) = Mailbox::new();
    let (publisher, state) = watch::channel(Arc::default());
    let (name, made) = (record.name.clone(), (record.made_run, record.made_revision));
    let object = Object::Vm(name.clone(), uid);
    host.events
        .emit(Draft::warning(object, "VmUnusable", why.message()));
    let unusable = Unusable {
        host: Arc::clone(host),
        uid,
        record,
        why,
        instance,
        _claim: claim,
        since_ms: text::now_ms(),
        mailbox,
        publisher,
    };
    unusable.publisher.send_replace(Arc::new(unusable.describe()));
    let entry = Entry {
        uid,
        mailbox: sender,
        state,
    };
    host.vms.insert(&name, entry, made);
    if let Some(left) = unusable.left_migration() {
        // A send fails only while the daemon ends. The next daemon begins here again.
        let _ = host.attend.send(left);
    }
    supervisor::spawn(Arc::clone(host), uid, name, unusable.run());
}

/// Resource demand of a VM from its record, valid or not.
fn demand(record: &VmRecord) -> Demand {
    let run = record.instance.as_ref().and_then(|run| run.spec.as_ref());
    let Some(wire) = run.or(record.spec.as_ref()) else {
        return Demand::default();
    };
    VmSpec::try_from(wire).map_or_else(|_| Demand::unchecked(wire), |spec| Demand::of(&spec))
}

impl Unusable {
    async fn run(mut self) {
        loop {
            let retries = matches!(self.why, Why::Unreachable(_));
            let Self {
                mailbox, instance, ..
            } = &mut self;
            let ended = async {
                match instance {
                    Some(instance) => drop(instance.ended().await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                command = mailbox.recv() => match command {
                    Some(command) => if self.on(command).await {
                        return;
                    },
                    None => return,
                },
                () = ended => self.on_end().await,
                () = sleep(AGAIN), if retries => if self.found_again().await {
                    return;
                },
            }
        }
    }

    /// Looks again for a process that could not be found; true when the VM is looked after as usual from now on.
    async fn found_again(&mut self) -> bool {
        let Some(run) = &self.record.instance else {
            return false;
        };
        let name = &self.record.name;
        let found = find(&self.host, self.uid, run.user, name, demand(&self.record)).await;
        if found.is_err() {
            return false;
        }
        let (host, uid, record) = (Arc::clone(&self.host), self.uid, self.record.clone());
        let restoring: std::pin::Pin<Box<dyn Future<Output = ()> + Send>> =
            Box::pin(restore(host, uid, record));
        restoring.await;
        // Held until here, so that the VM's user id stays reserved.
        drop(found);
        true
    }

    /// Carries out a command; true when the VM is gone.
    async fn on(&mut self, command: Command) -> bool {
        let life = match command {
            Command::Life(life) => match self.expected(&life.context) {
                Ok(()) => life,
                Err(failure) => {
                    let _ = life.reply.send(Err(failure));
                    return false;
                }
            },
            Command::Reconsider
            | Command::Probe
            | Command::Addresses
            | Command::Guest(_)
            | Command::Probed(_) => return false,
            Command::Disk { reply, .. } => {
                let _ = reply.send(Err(self.refusal()));
                return false;
            }
            Command::Update { reply, .. } => {
                let _ = reply.send(Err(self.refusal()));
                return false;
            }
            Command::Client(_, reply) => {
                let _ = reply.send(Err(self.refusal()));
                return false;
            }
            Command::Quiet(reply) => {
                let _ = reply.send(Err(self.refusal()));
                return false;
            }
            Command::Frozen(_, reply) => {
                let _ = reply.send(Err(self.refusal()));
                return false;
            }
            Command::Handover(request, reply) => {
                let (said, gone) = self.on_handover(*request).await;
                let _ = reply.send(said);
                return gone;
            }
        };
        match life.request {
            Request::Stop if life.grace.is_none() => {
                self.kill(life).await;
                false
            }
            Request::Delete { force } => self.delete(life, force).await,
            _ => {
                let _ = life.reply.send(Err(self.refusal()));
                false
            }
        }
    }

    /// Checks the preconditions of a request.
    pub(super) fn expected(&self, context: &Context) -> Result<(), Failure> {
        let present = v1::Preconditions {
            uid: self.uid.to_string(),
            generation: Some(self.record.generation),
        };
        preconditions::check("VM", &self.record.name, &context.preconditions, &present)
    }

    pub(super) fn refusal(&self) -> Failure {
        let message = format!("VM \"{}\": {}", self.record.name, self.why.message());
        Failure::precondition(self.why.reason(), message)
    }

    /// Ends its process.
    async fn kill(&mut self, life: Life) {
        let Some(instance) = &mut self.instance else {
            let lock = RuntimeDir::of(&self.host.config, self.uid).lock();
            let alive = lock::is_held(&lock).unwrap_or(true);
            let answer = if alive {
                Err(self.refusal())
            } else {
                Ok(self.answer())
            };
            let _ = life.reply.send(answer);
            return;
        };
        instance.process.kill();
        instance.ended().await;
        self.on_end().await;
        let _ = life.reply.send(Ok(self.answer()));
    }

    fn answer(&self) -> Answer {
        Answer {
            vm: Arc::clone(&self.publisher.borrow()),
            pending: None,
        }
    }

    /// Its process has ended.
    async fn on_end(&mut self) {
        self.instance = None;
        let (host, uid) = (Arc::clone(&self.host), self.uid);
        if let Ok(Err(error)) = spawn_blocking(move || clean_up(&host, uid)).await {
            tracing::warn!(vm = self.record.name, %error, "clean up after a run");
        }
        self.record.instance = None;
        self.record.intent = Intent::Stopped.into();
        self.record.last_exit = Some(ExitStatus {
            reason: ExitReason::Lost.into(),
            message: "the vmm process has ended".to_owned(),
            time: text::timestamp(text::now_ms()),
        });
        // An undecodable record stays unchanged, for a release that can decode it.
        if !matches!(self.why, Why::Record(_))
            && let Err(error) = self.host.store.put(&self.record).await
        {
            tracing::error!(vm = self.record.name, %error, "the VM's record could not be written");
        }
        change::hold_disks(&self.host, &self.record);
        self.show();
    }

    /// Publishes its state.
    pub(super) fn show(&self) {
        let state = Arc::new(self.describe());
        self.host.vms.publish(&self.publisher, &state);
    }

    /// Deletes it by request; true when that is done.
    async fn delete(&mut self, life: Life, force: bool) -> bool {
        if self.instance.is_some() && !force {
            let message = format!("VM \"{}\" is running: delete it with force", self.record.name);
            let failure = Failure::precondition("STILL_RUNNING", message);
            let _ = life.reply.send(Err(failure));
            return false;
        }
        let removed = self.remove(&life.context).await;
        let gone = removed.is_ok();
        let _ = life.reply.send(removed);
        gone
    }

    /// Ends its process, and removes it for good.
    pub(super) async fn remove(&mut self, context: &Context) -> Result<Answer, Failure> {
        if let Some(instance) = &mut self.instance {
            instance.process.kill();
            instance.ended().await;
            self.on_end().await;
        }
        let lock = RuntimeDir::of(&self.host.config, self.uid).lock();
        if !matches!(lock::released(&lock).await, Ok(true)) {
            return Err(self.refusal());
        }
        let (name, uid) = (self.record.name.clone(), self.uid);
        moved::remove(&self.host, &name, &self.disks_of_other_node(), context).await?;
        let operations = &self.host.operations;
        let object = Object::Vm(name.clone(), uid);
        let operation = operations.begin(Type::VmDelete, &object, context, None);
        let pending = Some(operation.pending());
        let vm = Arc::clone(&self.publisher.borrow());
        let handover = self.record.handover.as_ref();
        let tombstone = self
            .host
            .vms
            .begin_delete(vm.metadata.clone().unwrap_or_default(), handover);
        let written = tombstone.clone();
        if let Err(error) = self
            .host
            .store
            .remove::<VmRecord>(uid.as_bytes(), Some(written), None)
            .await
        {
            self.host.vms.keep(&tombstone);
            let failure = store_failure(error);
            operation.fail(&failure);
            return Err(failure);
        }
        let host = Arc::clone(&self.host);
        let cleaned = spawn_blocking(move || {
            let cleaned = clean_up(&host, uid);
            let variables = NonVolatileDir::of(&host.config, uid).remove();
            LogDir::of(&host.config, uid).remove().and(variables).and(cleaned)
        });
        if let Ok(Err(error)) = cleaned.await {
            tracing::warn!(vm = name, %error, "clean up after a VM");
        }
        self.host.disks.give_back(&name, None);
        self.host.ledger.expect(&name, None);
        self.host.vms.remove(&name, tombstone);
        self.host
            .events
            .emit(Draft::normal(object, "Deleted", "the VM was deleted").of(context.clone()));
        operation.complete_with("the VM is deleted", Arc::clone(&vm), None);
        Ok(Answer { vm, pending })
    }

    fn describe(&self) -> v1::Vm {
        let (reason, message) = (camel_case(self.why.reason()), self.why.message());
        let run = self.record.instance.as_ref();
        let ready = v1::Condition {
            r#type: "Ready".to_owned(),
            status: ConditionStatus::False.into(),
            reason: reason.clone(),
            message: message.clone(),
            transition_time: text::timestamp(self.since_ms),
        };
        let status = v1::VmStatus {
            phase: VmPhase::Failed.into(),
            reason,
            message,
            instance: self.instance.as_ref().map(|instance| v1::InstanceStatus {
                pid: instance.process.pid(),
                uid: instance.claim.user(),
                start_time: run.and_then(started),
                vmm_version: instance.version.clone(),
                ..Default::default()
            }),
            last_exit: self.record.last_exit.clone(),
            conditions: vec![ready],
            phase_time: text::timestamp(self.since_ms),
            counts: self.record.counts,
            migration: self.record.handover.as_ref().and_then(migration),
            ..Default::default()
        };
        let metadata = v1::ObjectMetadata {
            name: self.record.name.clone(),
            uid: self.uid.to_string(),
            generation: self.record.generation,
            labels: self.record.labels.clone(),
            annotations: self.record.annotations.clone(),
            owner: self.record.owner.clone(),
            create_time: text::timestamp(self.record.created_ms),
        };
        v1::Vm {
            metadata: Some(metadata),
            spec: crate::vm::shown(self.record.spec.as_ref(), self.host.store.key()),
            status: Some(status),
        }
    }
}

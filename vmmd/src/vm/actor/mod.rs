//! Actor of one VM. Only the actor changes the VM's record, drives its `vmm` and publishes its
//! state.
//!
//! The actor waits for a command, the work under way or news of the process. A command handler
//! awaits nothing that takes long, so that a forced stop always gets through. States of the work
//! under way ([`Work`]):
//!
//! ```text
//!            start                 ok                  stop, restart, delete
//!   (none) ────────▶ Start ───────────────▶ (none) ──────────────────────────▶ Stop ──▶ end of the process
//!                      │ stop: cancelled      ▲ │ pause, resume                          │
//!                      ▼                      │ ▼                                        ▼
//!                    (none)                  Change                            (none), Start or deleted
//! ```
//!
//! Invariants: `record.instance` is in the store before a process is forked, and is removed after
//! the process has ended. A new process is created only when none exists.

mod access;
mod agent;
mod attachments;
mod automatic;
mod balloon;
mod disks;
mod handover;
mod left;
mod let_run;
mod nics;
mod panic;
mod pending_stop;
mod plug;
mod plugged;
mod probes;
mod processors;
mod request;
mod row;
mod run;
mod shares;
mod start;
mod stop;
mod tell;
mod update;
mod work;

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use tokio::{
    sync::{oneshot, watch},
    time::{Instant, sleep},
};
use tracing::Instrument;
use uuid::Uuid;
use vmmd_api::v1::{self, VmPhase};
use vmmd_spec::vm::VmSpec;

use self::work::{Done, News, Start, Stop, Work};
pub use self::{
    attachments::Attachments,
    disks::without_disk,
    handover::{as_it_runs, nothing_to_resolve, runs_as_wanted},
};
use vm_lifecycle::{
    admission::{self, Place, Refusal, Situation, Verdict, admit, admit_disk},
    policy::Occasion,
    stop::Then,
};
use vmmd_host::{
    failure::{Failure, Kind},
    fault,
};
use vmmd_objects::{
    context::{self, Context},
    event::Object,
    operation::{Handle, Pending, Reporter, Type},
};
use vmmd_store::{Intent, VmRecord};

use super::{api::describe::View, instance::Instance, recovery::supervisor};
use crate::{
    control,
    host::Host,
    registry::vms::{
        Entry,
        command::{Answer, Command, Commands, Life, LifeReply, Mailbox, Purpose, Quiet, Reply, Request},
    },
};

/// The actor.
#[derive(Debug)]
pub struct Actor {
    host: Arc<Host>,
    uid: Uuid,
    record: VmRecord,
    spec: VmSpec,
    view: View,
    instance: Option<Instance>,
    work: Work,
    /// Context and id of the current or last operation, for events.
    about: (Context, String),
    /// Trace of the input that is being handled.
    trace: String,
    /// When the run policy starts it.
    timer: Option<Instant>,
    /// The run policy would start it, but the node takes no VMs.
    held: bool,
    /// The stop under way makes room: the run policy waits until the node takes VMs again.
    evacuated: bool,
    /// Time of the last restart after a reset by the guest.
    rebooted: Option<Instant>,
    /// When a reset by the guest was last told of.
    reset_told: Option<Instant>,
    /// The same of resets after a crash.
    crash_told: Option<Instant>,
    /// The same of an expired watchdog.
    watchdog_told: Option<Instant>,
    /// When counters were last published alone, and when they are to be.
    counted: Option<Instant>,
    counts_due: Option<Instant>,
    /// A status request to the `vmm` is unanswered.
    asks_state: bool,
    /// It is to be asked once more then.
    asks_again: bool,
    disks: Attachments,
    looks: agent::Looks,
    access: access::Access,
    /// Hears how far a migration is.
    migration: Option<Reporter>,
    /// Ends the migration that was begun last.
    give_up: Option<oneshot::Sender<Failure>>,
    /// The machine is asked to run after a migration, until it does: see [`Self::let_run`].
    resuming: bool,
    /// When the guest reset its machine during a migration, which is given up for that.
    reset_in_migration: Option<Instant>,
    /// Caller that waits until the machine of a VM from another node is loaded.
    receiving: Option<oneshot::Sender<Result<(), Failure>>>,
    /// The store may have an earlier state of the hand-over than the record, or not durably: see [`Self::step`](handover).
    unsure: bool,
    /// When the record is written again: the store may have a later one, of a deletion that was reported as failed.
    rewrite_due: Option<Instant>,
    /// Operations that an earlier daemon left under way.
    left: Vec<Handle>,
    /// The one of a migration that it has handed over.
    handed_over: Option<Handle>,
    mailbox: Commands,
    publisher: watch::Sender<Arc<v1::Vm>>,
}

/// Input of the actor.
enum Next {
    Command(Command),
    Done(Done),
    Outcome(plug::Outcome),
    News(News),
    /// The run policy's time has come.
    Due,
    /// Counters are to be published.
    Counts,
    /// The agent is to be asked about the guest.
    Look,
    /// Passwords and keys are to be set in the guest.
    Access,
    /// The wall clock was set.
    ClockStep,
    /// The record is to be written again.
    Rewrite,
}

/// Work on files that answer takes less: a stop by force that comes meanwhile waits for it.
const USUAL: Duration = Duration::from_millis(200);

/// A guest decides how often counters change: they are published so often at most.
const COUNTS: Duration = Duration::from_millis(100);

impl Actor {
    /// Starts the actor of a VM, with its process if it has one, and adds it to the table. `occasion` is what its run
    /// policy is to judge first, with the length of the run that has ended, in milliseconds.
    pub fn spawn(
        host: &Arc<Host>,
        uid: Uuid,
        record: VmRecord,
        spec: VmSpec,
        mut view: View,
        instance: Option<Instance>,
        occasion: Option<(Occasion, u64)>,
    ) {
        let (sender, mailbox) = Mailbox::new();
        let disks = Attachments::default();
        // Before the table has the VM: a reader that finds the VM running in the table can reach
        // its `vmm`.
        host.clients
            .set(uid, instance.as_ref().and_then(Instance::client));
        let first = view.describe(host, uid, &record, &spec, instance.as_ref(), &disks);
        let (publisher, state) = watch::channel(Arc::new(first));
        let name = record.name.clone();
        host.requests.adopt(&record.begun, &record.uid);
        let left = host.operations.left(&Object::Vm(name.clone(), uid));
        let made = (record.made_run, record.made_revision);
        let actor = Box::new(Self {
            host: Arc::clone(host),
            uid,
            record,
            spec,
            view,
            instance,
            work: Work::None,
            about: Default::default(),
            trace: String::new(),
            timer: None,
            held: false,
            evacuated: false,
            rebooted: None,
            reset_told: None,
            crash_told: None,
            watchdog_told: None,
            counted: None,
            counts_due: None,
            asks_state: false,
            asks_again: false,
            disks,
            looks: agent::Looks::default(),
            access: access::Access::default(),
            migration: None,
            give_up: None,
            resuming: false,
            reset_in_migration: None,
            receiving: None,
            unsure: true,
            rewrite_due: None,
            left,
            handed_over: None,
            mailbox,
            publisher,
        });
        host.vms.insert(
            &name,
            Entry {
                uid,
                mailbox: sender,
                state,
            },
            made,
        );
        supervisor::spawn(Arc::clone(host), uid, name, actor.run(occasion));
    }

    /// Main loop. This future lives as long as the VM, so it is kept small: handlers are boxed and
    /// allocated only while they run.
    async fn run(mut self: Box<Self>, occasion: Option<(Occasion, u64)>) {
        if Box::pin(self.resume(occasion)).await.is_break() {
            return;
        }
        let mut clock_steps = self.host.clock_steps.subscribe();
        loop {
            let Self {
                mailbox,
                work,
                instance,
                disks,
                timer,
                counts_due,
                looks,
                access,
                rewrite_due,
                ..
            } = &mut *self;
            let next = tokio::select! {
                command = mailbox.recv() => match command {
                    Some(command) => Next::Command(command),
                    None => return,
                },
                done = work.next() => Next::Done(done),
                outcome = disks.next() => Next::Outcome(outcome),
                news = work::news(instance) => Next::News(news),
                () = work::until(*timer) => Next::Due,
                () = work::until(*counts_due) => Next::Counts,
                () = work::until(looks.due) => Next::Look,
                () = work::until(access.due) => Next::Access,
                () = work::until(*rewrite_due) => Next::Rewrite,
                Ok(()) = clock_steps.changed() => Next::ClockStep,
            };
            self.trace = match &next {
                Next::Command(command) => command.trace(),
                _ => &self.about.0.trace,
            }
            .to_owned();
            let span = context::span(&self.trace);
            let flow = async {
                fault::point(&self.host.config.run_dir, &self.record.name);
                let flow = self.on(next).await;
                if flow.is_continue() {
                    self.settle_updates().await;
                }
                flow
            };
            if Box::pin(flow.instrument(span)).await.is_break() {
                return;
            }
        }
    }

    /// Takes up what an earlier daemon left.
    async fn resume(&mut self, occasion: Option<(Occasion, u64)>) -> ControlFlow<()> {
        self.look_after();
        self.look_at_guest();
        self.set_access_when_possible();
        self.probe_guest(probes::Occasion::Adopted);
        self.thaw_left();
        self.release_left();
        self.take_handed_over();
        self.resume_handover().await?;
        self.look();
        self.settle_left();
        self.resume_delete().await?;
        if self.record.deleting.is_none() {
            self.resume_policy(occasion).await;
        }
        self.show_panic();
        self.give_up_left();
        ControlFlow::Continue(())
    }

    async fn on(&mut self, next: Next) -> ControlFlow<()> {
        match next {
            Next::Command(command) => return self.on_command(command).await,
            Next::Done(done) => return self.on_done(done).await,
            Next::News(news) => return self.on_news(news).await,
            Next::Outcome(outcome) => self.on_outcome(outcome).await,
            Next::Due => self.on_due().await,
            // Times that are shown may be others now.
            Next::Counts | Next::ClockStep => self.publish(),
            Next::Look => self.ask_about_guest(),
            Next::Access => self.attempt_access().await,
            Next::Rewrite => self.rewrite().await,
        }
        ControlFlow::Continue(())
    }

    fn situation(&self) -> Situation {
        let stopping = |stop: &Stop| match stop.state.then {
            Then::Stay => Situation::Stopping { restarting: false },
            Then::Start => Situation::Stopping { restarting: true },
            Then::Delete => Situation::Terminating,
        };
        match &self.work {
            Work::Stop(stop) if stop.state.then == Then::Delete => Situation::Terminating,
            _ if self.handover().is_under_way() => Situation::Migrating,
            Work::Start(start) => start.stop.as_ref().map_or(Situation::Starting, stopping),
            Work::Stop(stop) => stopping(stop),
            Work::Change(_) => Situation::Changing,
            Work::None if self.instance.is_none() => Situation::Down,
            Work::None if self.view.phase == VmPhase::Paused => Situation::Paused,
            Work::None => Situation::Running,
        }
    }

    async fn on_command(&mut self, command: Command) -> ControlFlow<()> {
        let life = match command {
            Command::Life(life) => life,
            Command::Reconsider => {
                self.reconsider(false).await;
                return ControlFlow::Continue(());
            }
            Command::Probe => {
                self.ask_state();
                return ControlFlow::Continue(());
            }
            Command::Addresses => {
                self.publish();
                return ControlFlow::Continue(());
            }
            Command::Disk {
                context,
                request,
                reply,
            } => {
                self.on_disk_request(&context, request, reply).await;
                return ControlFlow::Continue(());
            }
            Command::Update { update, reply } => {
                self.on_update(*update, reply).await;
                return ControlFlow::Continue(());
            }
            Command::Handover(request, reply) => return self.on_handover(*request, reply).await,
            Command::Client(purpose, reply) => {
                let _ = reply.send(self.client_for(purpose));
                return ControlFlow::Continue(());
            }
            Command::Frozen(may_be_frozen, reply) => {
                let _ = reply.send(self.note_frozen(may_be_frozen).await);
                return ControlFlow::Continue(());
            }
            Command::Guest(guest) => {
                self.on_guest((*guest).map(Box::new));
                return ControlFlow::Continue(());
            }
            Command::Quiet(reply) => {
                let _ = reply.send(self.quiet());
                return ControlFlow::Continue(());
            }
            Command::Probed(report) => {
                self.on_probed(report).await;
                return ControlFlow::Continue(());
            }
        };
        if let Err(failure) = self.expected(&life.context) {
            let _ = life.reply.send(Err(failure));
            return ControlFlow::Continue(());
        }
        if matches!(life.request, Request::Start | Request::Restart) && self.runs_for(&life.context) {
            respond(life.reply, Ok(self.state()));
            return ControlFlow::Continue(());
        }
        let situation = self.situation();
        if (life.restore.is_some() || life.reset_nvram) && situation != Situation::Down {
            let message = format!("VM \"{}\" is not stopped: stop it first", self.record.name);
            let failure = Failure::precondition("VM_NOT_STOPPED", message);
            let _ = life.reply.send(Err(failure));
            return ControlFlow::Continue(());
        }
        let verdict = admit(situation, life.request);
        // A start without effect needs no permission. A stop of a stopped VM does, because it
        // cancels the run policy's restart.
        let nothing_to_do = life.request == Request::Start && verdict == Verdict::Done;
        if !nothing_to_do && let Err(failure) = self.permitted(&life) {
            let _ = life.reply.send(Err(failure));
            return ControlFlow::Continue(());
        }
        if (life.request, verdict) == (Request::Restart, Verdict::Begin)
            && let Err(failure) = self.grow(&self.spec).await
        {
            let _ = life.reply.send(Err(failure));
            return ControlFlow::Continue(());
        }
        if !matches!(verdict, Verdict::Refuse(_)) {
            self.admitted(&life.context);
        }
        match verdict {
            Verdict::Done => {
                match life.request {
                    Request::Stop if life.evacuate => self.wait_for_node().await,
                    Request::Stop => self.forget_restart().await,
                    _ => {}
                }
                respond(life.reply, Ok(self.state()));
            }
            Verdict::Refuse(refusal) => {
                if life.of_pod {
                    self.give_up_migration(handover::pod_stops());
                }
                respond(life.reply, Err(self.refused(refusal)));
            }
            Verdict::Join => self.join(life).await,
            Verdict::Begin => return self.begin(situation, life).await,
        }
        ControlFlow::Continue(())
    }

    /// Returns the client of the `vmm` for the purpose, or the reason for a refusal.
    fn client_for(&self, purpose: Purpose) -> Result<control::Client, Failure> {
        admit_disk(self.situation(), admission::DiskRequest::Stats)
            .map_err(|refusal| refusal.into_failure(&self.record.name))?;
        if purpose == Purpose::Migration {
            self.check_thawed()?;
            match self.situation() {
                Situation::Running => {}
                Situation::Paused => {
                    let message = format!("VM \"{}\" is paused: resume it first", self.record.name);
                    return Err(Failure::precondition("VM_PAUSED", message));
                }
                busy => return Err(Refusal::Busy(busy).into_failure(&self.record.name)),
            }
        }
        self.running_client()
    }

    /// For copying the disks that its guest can write to.
    fn quiet(&self) -> Result<Quiet, Failure> {
        let place = admit_disk(self.situation(), admission::DiskRequest::Attach);
        match place.map_err(|refusal| refusal.into_failure(&self.record.name))? {
            Place::Machine => Ok(Quiet::Runs(self.running_client()?)),
            Place::Spec => match Arc::clone(&self.disks.offline).try_lock_owned() {
                Ok(stopped) => Ok(Quiet::Stopped(stopped)),
                Err(_) => {
                    let message = format!(
                        "the disks of VM \"{}\" are being resized or copied: wait until they are",
                        self.record.name
                    );
                    Err(Failure::precondition("BUSY", message))
                }
            },
        }
    }

    async fn begin(&mut self, situation: Situation, life: Life) -> ControlFlow<()> {
        let kind = match life.request {
            Request::Start => Type::VmStart,
            Request::Stop => Type::VmStop,
            Request::Restart => Type::VmRestart,
            Request::Delete { .. } => Type::VmDelete,
            Request::Pause | Request::Resume | Request::Reset | Request::Nmi => {
                self.begin_change(life.request, life.reply);
                return ControlFlow::Continue(());
            }
        };
        let down = situation == Situation::Down;
        if let Work::Start(start) = &self.work {
            // First of all: from now on the start writes no record.
            start.cancel.cancel();
        }
        // The run is ended only after the deletion is durable: the next daemon continues it.
        if matches!(life.request, Request::Delete { .. })
            && !down
            && let Err(failure) = self.note_delete(&life.context).await
        {
            let _ = life.reply.send(Err(failure));
            return ControlFlow::Continue(());
        }
        let operation = self.operation(kind, &life.context, life.deadline);
        let pending = operation.pending();
        let mut flow = ControlFlow::Continue(());
        match kind {
            Type::VmStart | Type::VmRestart if down => {
                self.begin_start(operation, life.restore, life.reset_nvram).await;
            }
            Type::VmRestart => self.begin_stop(life.grace, operation, Then::Start),
            Type::VmDelete if down => flow = self.delete(operation, Vec::new()).await,
            Type::VmDelete => self.begin_stop(None, operation, Then::Delete),
            _ => {
                self.evacuated = life.evacuate;
                if !life.evacuate {
                    self.note_stop(life.grace, &life.context).await;
                }
                self.begin_stop(life.grace, operation, Then::Stay);
            }
        }
        let answer = Answer {
            vm: self.state(),
            pending: Some(pending),
        };
        let _ = life.reply.send(Ok(answer));
        flow
    }

    /// Notes an operation of this VM that begins.
    fn operation(&mut self, kind: Type, context: &Context, deadline: Option<Duration>) -> Handle {
        let vm = Object::Vm(self.record.name.clone(), self.uid);
        let operation = self.host.operations.begin(kind, &vm, context, deadline);
        self.about = (context.clone(), operation.id().to_owned());
        operation
    }

    /// Joins a request to the same operation that is already under way.
    async fn join(&mut self, life: Life) {
        let stop = match &mut self.work {
            Work::Start(start) if life.request == Request::Start => {
                let pending = start.operation.pending();
                return self.joined(life, pending);
            }
            Work::Start(start) => start.stop.as_mut(),
            Work::Stop(stop) => Some(stop),
            Work::None | Work::Change(_) => None,
        };
        let Some(stop) = stop else {
            return respond(life.reply, Err(Failure::internal("nothing to wait for")));
        };
        let same = match life.request {
            Request::Restart => stop.state.then == Then::Start,
            Request::Delete { .. } => stop.state.then == Then::Delete,
            _ => stop.state.then == Then::Stay && !stop.undoes,
        };
        let pending = if same {
            let pending = stop.operation.pending();
            // A client's stop replaces a stop that only makes room, and the VM must not start
            // again. The same applies to a stop after a panic, which no client requested.
            if life.request == Request::Stop
                && !life.evacuate
                && (std::mem::take(&mut self.evacuated) || self.record.intent() != Intent::Stopped)
            {
                self.note_stop(life.grace, &life.context).await;
            }
            pending
        } else {
            self.turn_into_stop(&life).await
        };
        self.note_haste(life.grace).await;
        self.hasten(life.grace);
        self.joined(life, pending);
    }

    fn joined(&self, life: Life, pending: Pending) {
        let answer = Answer {
            vm: self.state(),
            pending: Some(pending),
        };
        let _ = life.reply.send(Ok(answer));
    }

    async fn on_done(&mut self, done: Done) -> ControlFlow<()> {
        match done {
            Done::Started(result) => return self.on_started(*result).await,
            Done::Changed(result) => {
                if result.as_ref().is_err_and(control::Error::is_lost)
                    && let Some(news) = self.dying().await
                {
                    let ended = matches!(news, News::Ended(_));
                    let flow = self.on_news(news).await;
                    if ended || flow.is_break() {
                        return flow;
                    }
                }
                self.on_changed(result);
            }
            Done::Deadline => self.on_deadline(),
            Done::Cancelled => self.on_cancel().await,
            Done::Unreaped(what) => self.on_lingering(what),
        }
        ControlFlow::Continue(())
    }

    async fn on_news(&mut self, news: News) -> ControlFlow<()> {
        match news {
            News::Ended(signal) => return self.on_exit(signal).await,
            News::Unreaped(what) => self.on_lingering(what),
            News::Notice(notice) => self.on_notice(notice).await,
            News::Disconnected => {
                self.on_disconnected();
                if let Some(news) = self.dying().await {
                    return Box::pin(self.on_news(news)).await;
                }
            }
            News::Connected(result) => self.on_connected(result).await,
            News::Shares => self.publish(),
        }
        ControlFlow::Continue(())
    }

    /// Does work on files and networks that may not answer. A stop by force does not wait for its end: the work is given up.
    async fn unless_stopped<T>(&self, work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        let urgent = async {
            self.mailbox.urgent().await;
            sleep(USUAL).await;
        };
        tokio::select! {
            biased;
            result = work => result,
            () = urgent => Err(superseded(&self.record.name)),
        }
    }

    fn enter(&mut self, phase: VmPhase, reason: impl Into<String>, message: impl Into<String>) {
        let before = self.view.phase;
        self.view.enter(phase, reason, message);
        tracing::debug!(
            vm = self.record.name,
            phase = phase.as_str_name(),
            reason = self.view.reason,
            detail = self.view.message,
            "phase entered",
        );
        self.tell_phase(before);
        if before != phase {
            self.look_at_guest();
            self.set_access_when_possible();
            self.probe_guest(probes::Occasion::Runs);
        }
        self.publish();
    }

    /// Publishes changed counters, at the latest after [`COUNTS`].
    fn publish_counts(&mut self) {
        let now = Instant::now();
        match self.counted {
            Some(last) if now < last + COUNTS => self.counts_due = Some(last + COUNTS),
            _ => self.publish(),
        }
    }

    /// Publishes the VM's state if it has changed.
    fn publish(&mut self) {
        (self.counted, self.counts_due) = (Some(Instant::now()), None);
        self.view.operation = match &self.work {
            Work::Start(Start { stop: Some(stop), .. }) | Work::Stop(stop) => stop.operation.id().to_owned(),
            Work::Start(start) => start.operation.id().to_owned(),
            Work::None | Work::Change(_) => String::new(),
        };
        let client = self.instance.as_ref().and_then(Instance::client);
        self.host.clients.set(self.uid, client);
        let instance = self.instance.as_ref();
        let vm = self.view.describe(
            &self.host,
            self.uid,
            &self.record,
            &self.spec,
            instance,
            &self.disks,
        );
        if *self.publisher.borrow().as_ref() != vm {
            self.host.vms.publish(&self.publisher, &Arc::new(vm));
        }
    }

    fn state(&self) -> Arc<v1::Vm> {
        Arc::clone(&self.publisher.borrow())
    }

    /// Makes the intent durable if it changes.
    async fn intend(&mut self, intent: Intent) {
        let before = std::mem::replace(&mut self.record.intent, intent.into());
        if before != self.record.intent {
            self.persist().await;
        }
    }

    /// Writes the record where a failure must not stand in the way, as after the end of a process.
    async fn persist(&self) -> bool {
        let result = self.host.store.put(&self.record).await;
        if let Err(error) = &result {
            tracing::error!(vm = self.record.name, %error, "the VM's record could not be written");
        }
        result.is_ok()
    }
}

/// Sends the same answer to all waiters.
fn answer(waiters: impl IntoIterator<Item = Reply>, result: &Result<Arc<v1::Vm>, Failure>) {
    for waiter in waiters {
        let _ = waiter.send(result.clone());
    }
}

/// Answers a request that needs no operation: it is already done, or refused.
fn respond(reply: LifeReply, result: Result<Arc<v1::Vm>, Failure>) {
    let _ = reply.send(result.map(|vm| Answer { vm, pending: None }));
}

fn superseded(name: &str) -> Failure {
    let message = format!("another request for VM \"{name}\" came in between");
    Failure::new(Kind::Aborted, "SUPERSEDED", message)
}

//! The actor of one VM: the only one that changes its record, drives its `vmm` and publishes its state.
//!
//! It waits for one of: a command, the work under way, news of the process. Nothing that takes long is awaited where
//! commands are handled, so that a stop by force always gets through. What is under way ([`Work`]):
//!
//! ```text
//!            start                 ok                  stop, restart, delete
//!   (none) ────────▶ Start ───────────────▶ (none) ──────────────────────────▶ Stop ──▶ end of the process
//!                      │ stop: cancelled      ▲ │ pause, resume                          │
//!                      ▼                      │ ▼                                        ▼
//!                    (none)                  Change                            (none), Start or deleted
//! ```
//!
//! Always: `record.instance` is in the store before a process is forked and goes after it has ended; a new process is
//! made only when there is none.

mod attachments;
mod disks;
mod plug;
mod run;
mod stop;
mod work;

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use proto::{
    model::{disk::RateLimit, vm::VmSpec},
    v1::{self, VmPhase},
};
use tokio::sync::{mpsc, oneshot, watch};
use uuid::Uuid;

use self::work::{Done, News, Stop, Then, Work};
pub use self::{
    attachments::{Attachments, public_stats},
    disks::without_disk,
};
use crate::{
    control::Client,
    failure::{Failure, Kind},
    host::Host,
    store::VmRecord,
    vm::{
        admission::{self, Request, Situation, Verdict, admit, admit_disk},
        describe::View,
        instance::Instance,
        table::Entry,
    },
};

/// Commands that wait for the actor at most; more wait at their senders.
const MAILBOX: usize = 32;

/// Where an answer goes: the VM's state after the request, or why not.
pub type Reply = oneshot::Sender<Result<Arc<v1::Vm>, Failure>>;

/// A request with what belongs to it.
#[derive(Debug)]
pub enum Command {
    /// About the life of the VM.
    Life {
        /// What is asked for.
        request: Request,
        /// Of a stop or restart: how long the guest may take; none at all by force.
        grace: Option<Duration>,
        /// Where the answer goes.
        reply: Reply,
    },
    /// About its disks.
    Disk {
        /// What is asked for.
        request: DiskRequest,
        /// Where the answer goes.
        reply: Reply,
    },
    /// For asking the `vmm` for the disks' counters.
    Client(oneshot::Sender<Result<Client, Failure>>),
}

/// What is asked of a VM's disks.
#[derive(Debug)]
pub enum DiskRequest {
    /// Add it.
    Attach(v1::DiskSpec),
    /// Take it away.
    Detach {
        /// Its name in the VM.
        disk: String,
        /// How long the guest may take.
        timeout: Duration,
        /// Take it away then, whatever the guest does.
        force: bool,
    },
    /// Make it larger.
    Resize {
        /// Its name in the VM.
        disk: String,
        /// In bytes; 0 takes what a block device has.
        size: u64,
    },
    /// Change how much may flow.
    Limit(Target, RateLimit),
}

/// Whose limit is changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// That of a disk.
    Disk(String),
    /// That of a rate group.
    Group(String),
}

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
    disks: Attachments,
    mailbox: mpsc::Receiver<Command>,
    publisher: watch::Sender<Arc<v1::Vm>>,
}

impl Actor {
    /// Starts the actor of a VM, with its process if it has one, and adds it to the table.
    pub fn spawn(
        host: &Arc<Host>,
        uid: Uuid,
        record: VmRecord,
        spec: VmSpec,
        mut view: View,
        instance: Option<Instance>,
    ) {
        let (sender, mailbox) = mpsc::channel(MAILBOX);
        let disks = Attachments::default();
        let first = view.describe(host, uid, &record, &spec, instance.as_ref(), &disks);
        let (publisher, state) = watch::channel(Arc::new(first));
        let name = record.name.clone();
        let actor = Self {
            host: Arc::clone(host),
            uid,
            record,
            spec,
            view,
            instance,
            work: Work::None,
            disks,
            mailbox,
            publisher,
        };
        host.table.insert(
            &name,
            Entry {
                uid,
                mailbox: sender,
                state,
            },
        );
        tokio::spawn(actor.run());
    }

    async fn run(mut self) {
        // What an earlier daemon left.
        self.look();
        loop {
            let Self {
                mailbox,
                work,
                instance,
                disks,
                ..
            } = &mut self;
            let flow = tokio::select! {
                command = mailbox.recv() => match command {
                    Some(command) => self.on_command(command).await,
                    None => ControlFlow::Break(()),
                },
                done = work.next() => self.on_done(done).await,
                outcome = disks.next() => {
                    self.on_outcome(outcome).await;
                    ControlFlow::Continue(())
                }
                news = work::news(instance) => self.on_news(news).await,
            };
            if flow.is_break() {
                return;
            }
        }
    }

    fn situation(&self) -> Situation {
        let stopping = |stop: &Stop| match stop.then {
            Then::Stay => Situation::Stopping { restarting: false },
            Then::Start(_) => Situation::Stopping { restarting: true },
            Then::Delete(_) => Situation::Terminating,
        };
        match &self.work {
            Work::Start(start) => start.stop.as_ref().map_or(Situation::Starting, stopping),
            Work::Stop(stop) => stopping(stop),
            Work::Change(_) => Situation::Changing,
            Work::None if self.instance.is_none() => Situation::Down,
            Work::None if self.view.phase == VmPhase::Paused => Situation::Paused,
            Work::None => Situation::Running,
        }
    }

    async fn on_command(&mut self, command: Command) -> ControlFlow<()> {
        let (request, grace, reply) = match command {
            Command::Life {
                request,
                grace,
                reply,
            } => (request, grace, reply),
            Command::Disk { request, reply } => {
                self.on_disk_request(request, reply).await;
                return ControlFlow::Continue(());
            }
            Command::Client(reply) => {
                let admitted = admit_disk(self.situation(), admission::DiskRequest::Stats);
                let client = match admitted {
                    Ok(_) => self.running_client(),
                    Err(refusal) => Err(refusal.into_failure(&self.record.name)),
                };
                let _ = reply.send(client);
                return ControlFlow::Continue(());
            }
        };
        let situation = self.situation();
        match admit(situation, request) {
            Verdict::Done => answer([reply], &Ok(self.state())),
            Verdict::Refuse(refusal) => answer([reply], &Err(refusal.into_failure(&self.record.name))),
            Verdict::Join => self.join(request, grace, reply),
            Verdict::Begin => return self.begin(situation, request, grace, reply).await,
        }
        ControlFlow::Continue(())
    }

    async fn begin(
        &mut self,
        situation: Situation,
        request: Request,
        grace: Option<Duration>,
        reply: Reply,
    ) -> ControlFlow<()> {
        let down = situation == Situation::Down;
        match request {
            Request::Start => self.begin_start(vec![reply]).await,
            Request::Restart if down => self.begin_start(vec![reply]).await,
            Request::Restart => self.begin_stop(grace, Vec::new(), Then::Start(vec![reply])),
            Request::Stop => self.begin_stop(grace, vec![reply], Then::Stay),
            Request::Delete { .. } if down => return self.delete(vec![reply]).await,
            Request::Delete { .. } => self.begin_stop(None, Vec::new(), Then::Delete(vec![reply])),
            Request::Pause | Request::Resume => self.begin_change(request, reply),
        }
        ControlFlow::Continue(())
    }

    /// Waits with those who asked for the same before.
    fn join(&mut self, request: Request, grace: Option<Duration>, reply: Reply) {
        let stop = match &mut self.work {
            Work::Start(start) if request == Request::Start => return start.waiters.push(reply),
            Work::Start(start) => start.stop.as_mut(),
            Work::Stop(stop) => Some(stop),
            Work::None | Work::Change(_) => None,
        };
        let Some(stop) = stop else {
            return answer([reply], &Err(Failure::internal("nothing to wait for")));
        };
        match (request, &mut stop.then) {
            (Request::Restart, Then::Start(waiters)) | (Request::Delete { .. }, Then::Delete(waiters)) => {
                waiters.push(reply);
            }
            (_, then) => {
                // A plain stop takes back a restart.
                if let Then::Start(waiters) = std::mem::take(then) {
                    answer(waiters, &Err(superseded(&self.record.name)));
                }
                stop.waiters.push(reply);
            }
        }
        self.hasten(grace);
    }

    async fn on_done(&mut self, done: Done) -> ControlFlow<()> {
        match done {
            Done::Started(result) => return self.on_started(result).await,
            Done::Changed(result) => self.on_changed(result),
            Done::Deadline => self.on_deadline(),
        }
        ControlFlow::Continue(())
    }

    async fn on_news(&mut self, news: News) -> ControlFlow<()> {
        match news {
            News::Ended(signal) => return self.on_exit(signal).await,
            News::Event(event) => self.on_event(event).await,
            News::Disconnected => self.on_disconnected(),
            News::Connected(result) => self.on_connected(result),
        }
        ControlFlow::Continue(())
    }

    fn enter(&mut self, phase: VmPhase, reason: impl Into<String>, message: impl Into<String>) {
        self.view.enter(phase, reason, message);
        tracing::info!(
            vm = self.record.name,
            phase = phase.as_str_name(),
            reason = self.view.reason,
            detail = self.view.message,
            "phase entered",
        );
        self.publish();
    }

    /// Tells everybody, when there is something new.
    fn publish(&mut self) {
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
            self.host.table.publish(&self.publisher, Arc::new(vm));
        }
    }

    fn state(&self) -> Arc<v1::Vm> {
        Arc::clone(&self.publisher.borrow())
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

/// Gives the same answer to all who wait for it.
fn answer(waiters: impl IntoIterator<Item = Reply>, result: &Result<Arc<v1::Vm>, Failure>) {
    for waiter in waiters {
        let _ = waiter.send(result.clone());
    }
}

fn superseded(name: &str) -> Failure {
    let message = format!("another request for VM \"{name}\" came in between");
    Failure::new(Kind::Aborted, "SUPERSEDED", message)
}

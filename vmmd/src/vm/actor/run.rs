//! Start, pause, resume, and what a running `vmm` tells.

use std::{collections::BTreeMap, ops::ControlFlow, sync::Arc, time::Duration};

use proto::{
    model::vm::VmSpec,
    v1::{EventSeverity, ExitReason, ExitStatus, StartMetadata, VmPhase},
    vmm::{Event, GetStatus, Pause, PauseReason, ResetMachine, Resume, State, Status, event, request::Op},
};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::{
    Actor,
    attachments::Errors,
    plug::Outcome,
    respond,
    work::{self, Change, News, Start, Stop, Then, Work},
};
use crate::{
    context::Initiator,
    control::{self, Notice},
    event::{Draft, Object},
    failure::{Failure, Kind},
    files,
    ledger::FileId,
    operation::{Handle, Metadata, Progress},
    registry::vms::command::{LifeReply, Request, Restore},
    snapshot,
    store::{InstanceRecord, Intent},
    text,
    vm::{
        api::describe::{DISK_ERROR, MIGRATING, SNAPSHOT, camel_case},
        instance::{
            Lingering,
            link::{self, Session},
        },
        lifecycle::{
            exit::{Asked, count},
            policy::Occasion,
        },
        spec::{change, limits, machine},
        start::{Plan, STEPS, Started, start},
    },
};

/// How long a pause or resume may take; the guest's I/O under way is waited for.
/// A client has more patience than that, so that it hears whose fault it is.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a `vmm` may take to say what it is doing.
const STATE_TIMEOUT: Duration = Duration::from_secs(5);
/// The private protocol's minor version that has `ResetMachine` and `SetBalloon`.
pub(super) const SECOND_MINOR: u32 = 2;
/// The one that has PCI slots on other buses than 0.
pub(super) const THIRD_MINOR: u32 = 3;
/// The one that has `UpdateNic`.
pub(super) const FOURTH_MINOR: u32 = 4;
/// The one that has `AttachNic` and `DetachNic`.
pub(super) const SEVENTH_MINOR: u32 = 7;
/// The one that has `Save`, and `restore` in `Boot`.
pub const SNAPSHOT_MINOR: u32 = 4;
/// That of `UnlockDisks`, and of a received machine whose disks are locked when it is resumed.
pub const UNLOCK_MINOR: u32 = 6;

impl Actor {
    pub(super) async fn begin_start(&mut self, operation: Handle, restore: Option<Box<Restore>>) {
        self.timer = None;
        (self.held, self.evacuated) = (false, false);
        (self.asks_state, self.asks_again) = (false, false);
        self.record.evacuated = false;
        // Somebody wants it now: what went wrong before does not count, and the files are meant that are there now.
        if operation.context().initiator != Initiator::RunPolicy {
            self.record.restart = None;
            self.record.files = files::any_of(&self.record.files);
        }
        self.record.counts.get_or_insert_default().starts += 1;
        self.record.intent = Intent::Running.into();
        self.record.stop = None;
        let claim = match self.host.ledger.claim(&self.record.name) {
            Ok(claim) => claim,
            Err(failure) => return self.start_failed(failure, operation).await,
        };
        let spec = match self.run_with(claim.user(), &operation, restore.as_deref()) {
            Ok(spec) => spec,
            Err(failure) => return self.start_failed(failure, operation).await,
        };
        let restart = self.record.restart.as_ref();
        operation.metadata(Metadata::Start(StartMetadata {
            generation: self.record.generation,
            attempt: restart.map_or(0, |restart| restart.attempts),
        }));
        operation.progress(Progress::steps(0, STEPS), "checking files and room");
        let (lingers, lingering) = oneshot::channel();
        let plan = Plan {
            uid: self.uid,
            spec,
            record: self.record.clone(),
            claim,
            trace: operation.context().trace.clone(),
            report: operation.reporter(),
            lingers,
            offline: Arc::clone(&self.disks.offline),
            restore,
        };
        let cancel = CancellationToken::new();
        let task = tokio::spawn(start(Arc::clone(&self.host), plan, cancel.clone()).in_current_span());
        self.work = Work::Start(Start {
            task,
            lingers: Some(lingering),
            _with_actor: cancel.clone().drop_guard(),
            cancel,
            operation,
            heard: false,
            stop: None,
        });
        self.enter(VmPhase::Starting, "Starting", "");
    }

    /// Notes the run that begins, and returns its spec: that of the VM, or of the snapshot that it is restored from.
    fn run_with(
        &mut self,
        user: u32,
        operation: &Handle,
        restore: Option<&Restore>,
    ) -> Result<VmSpec, Failure> {
        let own = (self.record.spec.clone(), self.record.hardware.clone());
        let (spec, wanted) = match restore.and_then(|restore| restore.machine.as_ref()) {
            None => (self.spec.clone(), own.clone()),
            Some((spec, hardware)) => (
                VmSpec::try_from(spec)?,
                (Some(spec.clone()), Some(hardware.clone())),
            ),
        };
        self.record.instance = Some(InstanceRecord {
            user,
            started_ms: text::now_ms(),
            // A snapshot may be of another generation; which one is not known.
            generation: if wanted == own { self.record.generation } else { 0 },
            boot_id: self.host.boot_id.clone(),
            request_id: operation.context().request_id.clone(),
            operation: operation.id().to_owned(),
            taps: machine::taps(self.uid, &wanted.1.clone().unwrap_or_default()),
            spec: wanted.0,
            hardware: wanted.1,
            ..InstanceRecord::default()
        });
        if restore.is_some() {
            change::hold_disks(&self.host, &self.record);
        }
        Ok(spec)
    }

    pub(super) async fn on_started(&mut self, result: Result<Started, Failure>) -> ControlFlow<()> {
        let Work::Start(Start { operation, stop, .. }) = std::mem::take(&mut self.work) else {
            return ControlFlow::Continue(());
        };
        self.view.lingering = None;
        match (result, stop) {
            (Ok(Started { instance, files }), None) => {
                self.record.files = files;
                self.instance = Some(instance);
                self.host.ledger.expect(&self.record.name, None);
                self.disks.clear();
                if !operation.commit() {
                    self.undo_start(operation).await;
                    return ControlFlow::Continue(());
                }
                let done = if self.handover().is_under_way() {
                    self.on_received();
                    "the VM was received; the other node decides what follows"
                } else {
                    self.enter(VmPhase::Running, "Running", "");
                    "the VM runs"
                };
                self.look();
                operation.complete_with(done, self.state(), None);
                self.about = Default::default();
            }
            (Err(_), None) if operation.cause().is_some() => {
                self.no_start().await;
                self.enter(VmPhase::Stopped, "StartCancelled", "");
                operation.cancelled("the start was cancelled: the VM is stopped");
            }
            (Err(failure), None) if self.handover().is_under_way() => {
                return self.not_received(failure, operation).await;
            }
            (Err(failure), None) => self.start_failed(failure, operation).await,
            // It was booted before it heard that it should not.
            (Ok(Started { instance, files }), Some(mut stop)) => {
                self.record.files = files;
                self.instance = Some(instance);
                operation.give_way(&self.cancelled());
                self.end(&mut stop);
                self.work = Work::Stop(stop);
            }
            (Err(_), Some(stop)) => {
                operation.give_way(&self.cancelled());
                self.record.instance = None;
                if stop.then != Then::Delete {
                    self.no_start().await;
                    self.enter(VmPhase::Stopped, "StartCancelled", "");
                }
                return self.after_stop(stop).await;
            }
        }
        ControlFlow::Continue(())
    }

    /// Ends a VM whose start was cancelled in the moment in which it succeeded.
    async fn undo_start(&mut self, operation: Handle) {
        self.intend(Intent::Stopped).await;
        let mut stop = Stop::new(operation, Asked::Kill, Then::Stay);
        stop.undoes = true;
        stop.heard = true;
        self.end(&mut stop);
        self.work = Work::Stop(stop);
        self.enter(VmPhase::Stopping, "Stopping", "");
    }

    /// Notes that a start has been taken back.
    async fn no_start(&mut self) {
        self.record.instance = None;
        self.record.intent = Intent::Stopped.into();
        self.plan(Occasion::Ended(ExitReason::Killed), 0);
        self.persist().await;
    }

    fn cancelled(&self) -> Failure {
        let message = format!(
            "VM \"{}\" was stopped while it was being started",
            self.record.name
        );
        Failure::new(Kind::Aborted, "START_CANCELLED", message)
    }

    async fn start_failed(&mut self, failure: Failure, operation: Handle) {
        self.record.instance = None;
        self.record.last_exit = Some(ExitStatus {
            reason: ExitReason::StartFailed.into(),
            message: failure.message.clone(),
            time: text::timestamp(text::now_ms()),
        });
        count(
            self.record.counts.get_or_insert_default(),
            ExitReason::StartFailed,
        );
        self.plan(Occasion::Ended(ExitReason::StartFailed), 0);
        self.persist().await;
        change::hold_disks(&self.host, &self.record);
        self.enter(
            VmPhase::Failed,
            camel_case(failure.reason),
            failure.message.clone(),
        );
        self.tell_restart();
        operation.fail(&failure);
        self.about = Default::default();
    }

    pub(super) fn begin_change(&mut self, request: Request, reply: LifeReply) {
        let client = match self.running_client() {
            Ok(client) => client,
            Err(failure) => return respond(reply, Err(failure)),
        };
        let op = match request {
            Request::Pause => Op::Pause(Pause {}),
            Request::Reset => {
                if let Err(failure) = self.knows_minor(SECOND_MINOR, "reset") {
                    return respond(reply, Err(failure));
                }
                Op::ResetMachine(ResetMachine {})
            }
            _ => Op::Resume(Resume {}),
        };
        let change = async move {
            let result = timeout(CHANGE_TIMEOUT, client.request(op, &[])).await;
            result.unwrap_or(Err(control::Error::Timeout(CHANGE_TIMEOUT)))
        };
        let task = tokio::spawn(change.in_current_span());
        self.work = Work::Change(Change {
            task,
            reply,
            reset: request == Request::Reset,
            said: None,
        });
    }

    /// Whether the VM's `vmm` speaks a minor version of the private protocol; refused as VMM_TOO_OLD when it does not.
    pub(super) fn knows_minor(&self, minor: u32, what: &str) -> Result<(), Failure> {
        let has = self.instance.as_ref().map_or(0, |instance| instance.minor);
        if has >= minor {
            return Ok(());
        }
        let message = format!(
            "the vmm process of VM \"{}\" is of an older version that can't {what}: restart the VM",
            self.record.name
        );
        Err(Failure::precondition("VMM_TOO_OLD", message))
    }

    pub(super) fn on_changed(&mut self, result: Result<proto::vmm::Status, control::Error>) {
        let Work::Change(Change {
            reply, said, reset, ..
        }) = std::mem::take(&mut self.work)
        else {
            return;
        };
        match result {
            Ok(status) => {
                self.take_state(&status);
                self.check_state(said);
                if reset {
                    self.tell(
                        EventSeverity::Normal,
                        "Reset",
                        "the VM's machine was reset by request",
                    );
                }
                respond(reply, Ok(self.state()));
            }
            Err(error) => {
                let failure = self.unchanged(&error);
                self.check_state(said);
                respond(reply, Err(failure));
            }
        }
    }

    /// What a client is told when a pause, resume or reset was not done.
    fn unchanged(&self, error: &control::Error) -> Failure {
        let name = &self.record.name;
        if let control::Error::Timeout(limit) = error {
            let pid = self
                .instance
                .as_ref()
                .map_or(0, |instance| instance.process.pid());
            let message = format!(
                "the vmm process of VM \"{name}\" (pid {pid}) did not answer within {} s, and may still do it: look at the \
                 VM's status; a stop with force ends it",
                limit.as_secs()
            );
            return Failure::new(Kind::Unavailable, "VMM_UNRESPONSIVE", message);
        }
        Failure::internal(format!("VM \"{name}\": {}", text::chain(error)))
    }

    /// A disk may have failed again in the moment of a resume. Which came first, the event does not say; the `vmm` does.
    fn check_state(&mut self, said: Option<Status>) {
        let by_disk = said.is_some_and(|status| status.pause_reason() == PauseReason::DiskError);
        if by_disk {
            self.ask_state();
        }
    }

    /// Asks the `vmm` what it is doing. While it has not answered, it is not asked a second time at once.
    fn ask_state(&mut self) {
        if self.asks_state {
            self.asks_again = true;
            return;
        }
        if let Ok(client) = self.running_client() {
            (self.asks_state, self.asks_again) = (true, false);
            self.disks.tasks.spawn(async move {
                let asked = timeout(STATE_TIMEOUT, client.request(Op::GetStatus(GetStatus {}), &[])).await;
                Outcome::State(asked.unwrap_or(Err(control::Error::Timeout(STATE_TIMEOUT))))
            });
        }
    }

    /// What the `vmm` is doing, unless something is under way whose end will say.
    pub(super) fn on_state(&mut self, state: Result<Status, control::Error>) {
        self.asks_state = false;
        if let Ok(status) = state {
            if let Some(instance) = &mut self.instance {
                instance.guest_resets = status.guest_resets;
                instance.crash_resets = status.crash_resets;
            }
            if let Work::None = &self.work {
                self.take_state(&status);
            }
            self.publish();
        }
        if self.asks_again {
            self.ask_state();
        }
    }

    pub(super) async fn on_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Event(event) => self.on_event(event).await,
            Notice::Missed => {
                tracing::debug!(
                    vm = self.record.name,
                    "events of a vmm were missed: it is asked what it has"
                );
                self.ask_state();
                self.look();
            }
        }
    }

    fn take_state(&mut self, status: &Status) {
        let by_disk = status.pause_reason() == PauseReason::DiskError;
        match (status.state(), self.view.phase) {
            (State::Running, VmPhase::Paused) => {
                if self.view.reason == DISK_ERROR {
                    // What was held is tried again; if that fails it is told anew.
                    self.disks.errors = Errors::default();
                }
                self.enter(VmPhase::Running, "Running", "");
            }
            (State::Paused, VmPhase::Running) if by_disk => {
                self.disks.errors.note(&status.pause_message);
                self.enter(VmPhase::Paused, DISK_ERROR, status.pause_message.clone());
            }
            (State::Paused, VmPhase::Running) if status.pause_reason() == PauseReason::Snapshot => {
                self.enter(VmPhase::Paused, SNAPSHOT, "a snapshot is written");
            }
            (State::Paused, VmPhase::Running) if status.pause_reason() == PauseReason::Migration => {
                self.enter(
                    VmPhase::Paused,
                    MIGRATING,
                    "the rest of its memory is sent to another node",
                );
            }
            (State::Paused, VmPhase::Running) => self.enter(VmPhase::Paused, "Paused", ""),
            _ => {}
        }
    }

    pub(super) async fn on_event(&mut self, event: Event) {
        let vm = self.record.name.as_str();
        match event.kind {
            Some(event::Kind::StateChanged(changed)) => {
                let status = changed.status.unwrap_or_default();
                // An answer that is on its way may be older.
                self.asks_again |= self.asks_state;
                match &mut self.work {
                    Work::None => self.take_state(&status),
                    // The answer to a request is waited for.
                    Work::Change(change) => change.said = Some(status),
                    Work::Start(_) | Work::Stop(_) => {}
                }
            }
            Some(event::Kind::GuestReset(reset)) => {
                if let Some(instance) = &mut self.instance {
                    instance.guest_resets = reset.guest_resets;
                    instance.panicked = false;
                }
                self.tell_guest_reset();
                self.reboot_from_disk();
                self.publish();
            }
            Some(event::Kind::CrashReset(reset)) => {
                if let Some(instance) = &mut self.instance {
                    instance.crash_resets = reset.crash_resets;
                    instance.panicked = false;
                }
                self.tell_crash_reset(&reset.message);
                self.publish();
            }
            Some(event::Kind::GuestPanicked(_)) => {
                let (phase, message) = (self.view.phase, "the guest's kernel has panicked");
                if let Some(instance) = &mut self.instance
                    && !std::mem::replace(&mut instance.panicked, true)
                {
                    self.record.counts.get_or_insert_default().guest_panics += 1;
                }
                self.tell(EventSeverity::Warning, "GuestPanicked", message);
                self.enter(phase, "GuestPanicked", message);
            }
            Some(event::Kind::DeviceError(error)) => {
                let of_disk = error.device.starts_with("disk ");
                let text = format!("{}: {}", error.device, error.message);
                let object = Object::Vm(vm.to_owned(), self.uid);
                self.host
                    .events
                    .emit(Draft::warning(object, "DeviceError", text.clone()));
                if of_disk && self.disks.errors.note(&text) {
                    self.publish();
                }
            }
            Some(event::Kind::Ended(ended)) => {
                if let Some(instance) = &mut self.instance {
                    instance.ended = ended.exit;
                }
            }
            Some(event::Kind::DisksQuiet(_)) => self.on_disks_quiet(),
            Some(event::Kind::DiskDetached(gone)) => self.on_disk_gone(gone).await,
            Some(event::Kind::NicDetached(gone)) => self.on_nic_gone(gone).await,
            Some(event::Kind::MigrationRound(round)) => self.on_migration_round(round),
            None => {}
        }
    }

    /// Looks at what a machine that an earlier daemon started has of the node, and sets its limits anew. Nobody waits for
    /// that: its files may be where nothing answers.
    pub(super) fn look_after(&mut self) {
        if self.instance.is_none() {
            return;
        }
        let (host, uid) = (Arc::clone(&self.host), self.uid);
        let machine = change::machine(&self.record, &self.spec);
        self.disks.tasks.spawn(async move {
            let of = Arc::clone(&host);
            let paths = files::named(&machine, &host.sources());
            let looking = host.pools.files.run(&paths, move || {
                limits::renew(&of, uid, &machine);
                files::identify(&machine.disks, &of.sources())
            });
            Outcome::Identified(looking.await.unwrap_or_else(|failure| {
                tracing::warn!(%uid, %failure, "look at the files of a running VM");
                BTreeMap::new()
            }))
        });
    }

    pub(super) fn on_identified(&mut self, disks: BTreeMap<String, Vec<FileId>>) {
        let Some(instance) = &mut self.instance else {
            return;
        };
        for (name, ids) in disks {
            // What was plugged meanwhile is known better.
            if !instance.disks.contains_key(&name) {
                instance.set_disk(&name, Some(ids));
            }
        }
    }

    /// An earlier daemon ended while a snapshot kept the VM paused: the VM continues.
    pub(super) fn release_left(&self) {
        if self.view.phase == VmPhase::Paused
            && self.view.reason == SNAPSHOT
            && let Ok(client) = self.running_client()
        {
            tokio::spawn(snapshot::release(client));
        }
    }

    /// The VM is paused for a snapshot of its disks. When nobody takes it any more, the VM continues.
    fn on_disks_quiet(&self) {
        if !self.host.snapshots.disks_quiet(&self.record.uid)
            && let Ok(client) = self.running_client()
        {
            tokio::spawn(snapshot::release(client));
        }
    }

    /// The VM holds its disks, its user id and its room until the last process of the run is gone.
    pub(super) fn on_lingering(&mut self, what: Lingering) {
        match &mut self.instance {
            Some(instance) => instance.lingering = Some(what),
            None => self.view.lingering = Some(what),
        }
        self.tell(EventSeverity::Warning, what.reason(), what.message());
        self.publish();
    }

    pub(super) fn on_disconnected(&mut self) {
        let runtime = crate::paths::RuntimeDir::of(&self.host.config, self.uid);
        if let Some(instance) = &mut self.instance {
            instance.link.retry(runtime);
        }
    }

    /// Whose connection breaks ends as a rule, and what is asked of it in that moment is to find it ended: waits for the
    /// news of that, or of a new connection, as long as that takes as a rule.
    pub(super) async fn dying(&mut self) -> Option<News> {
        let deadline = Instant::now() + link::DYING;
        loop {
            let news = timeout_at(deadline, work::news(&mut self.instance)).await.ok()?;
            match news {
                News::Notice(notice) => self.on_notice(notice).await,
                News::Disconnected => self.on_disconnected(),
                News::Lingering(what) => self.on_lingering(what),
                News::Shares => self.publish(),
                News::Ended(_) | News::Connected(_) => return Some(news),
            }
        }
    }

    pub(super) fn on_connected(&mut self, result: Result<Session, control::Error>) {
        let Some(instance) = &mut self.instance else {
            return;
        };
        match result {
            Ok(Session {
                client,
                notices,
                hello,
            }) => {
                let status = hello.status.unwrap_or_default();
                instance.link.up(client, notices);
                instance.version = hello.build;
                instance.minor = hello.minor;
                instance.guest_resets = status.guest_resets;
                instance.crash_resets = status.crash_resets;
                if matches!(self.work, Work::None) {
                    self.take_state(&status);
                }
                self.look();
                if self.waits_for_guest() {
                    self.press_button(status.state() == State::Paused);
                }
            }
            Err(error) => {
                tracing::debug!(
                    vm = self.record.name,
                    error = text::chain(&error),
                    "connect to a vmm"
                );
                let runtime = crate::paths::RuntimeDir::of(&self.host.config, self.uid);
                instance.link.retry(runtime);
            }
        }
        self.publish();
    }
}

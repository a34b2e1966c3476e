//! Pause, resume and reset, and notices from a running `vmm`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::time::{Instant, timeout, timeout_at};
use tracing::Instrument;
use vm_lifecycle::handover::{Source, Target};
use vm_lifecycle::{
    exit::PANICKED,
    pause::{self, Effect},
};
use vmm_protocol::vmm::{
    Event, GetStatus, InjectNmi, Pause, PauseReason, ResetMachine, Resume, State, Status, event, request::Op,
};
use vmmd_api::v1::{EventSeverity, VmPhase};
use vmmd_host::{
    failure::{Failure, Kind},
    ledger::FileId,
    text,
};
use vmmd_objects::event::{Draft, Object};
use vmmd_spec::policy::OnPanic;
use vmmd_store::handover::Handover;

use super::{
    Actor,
    attachments::Errors,
    plug::Outcome,
    plugged::What,
    respond,
    work::{self, Change, News, Work},
};
use crate::{
    control::{self, Notice},
    files,
    registry::vms::command::{LifeReply, Request},
    vm::{
        api::describe::{GUEST_PANICKED, NO_ANSWER, SNAPSHOT, UNRESPONSIVE},
        instance::{
            Unreaped,
            link::{self, Session},
        },
        machine::{change, limits},
        recovery::reconcile::take_up_images,
    },
};

/// How long a pause or resume may take; the guest's I/O under way is waited for.
/// A client has more patience than that, so that it hears whose fault it is.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of a status request to the `vmm`.
const STATE_TIMEOUT: Duration = Duration::from_secs(5);

impl Actor {
    pub(super) fn begin_change(&mut self, request: Request, reply: LifeReply) {
        let client = match self.running_client() {
            Ok(client) => client,
            Err(failure) => return respond(reply, Err(failure)),
        };
        let op = match request {
            Request::Pause => Op::Pause(Pause {}),
            Request::Reset => Op::ResetMachine(ResetMachine {}),
            Request::Nmi => Op::InjectNmi(InjectNmi {}),
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
            request,
            said: None,
        });
    }

    pub(super) fn on_changed(&mut self, result: Result<vmm_protocol::vmm::Status, control::Error>) {
        let Work::Change(Change {
            reply, said, request, ..
        }) = std::mem::take(&mut self.work)
        else {
            return;
        };
        let failed = result.is_err();
        let reset = request == Request::Reset;
        match result {
            Ok(status) => {
                if reset {
                    self.on_reset();
                }
                self.take_state(&status);
                self.check_state(said);
                if reset {
                    self.tell(
                        EventSeverity::Normal,
                        "Reset",
                        "the VM's machine was reset by request",
                    );
                }
                if request == Request::Nmi {
                    let message = "the guest got a non-maskable interrupt by request";
                    self.tell(EventSeverity::Normal, "NmiInjected", message);
                }
                respond(reply, Ok(self.state()));
            }
            Err(error) => {
                let failure = self.unchanged(&error);
                self.check_state(said);
                self.note_panic_pause(false);
                if matches!(error, control::Error::Timeout(_)) {
                    self.ask_state();
                }
                respond(reply, Err(failure));
            }
        }
        // The guest may have panicked meanwhile. A pause that failed is not tried again at once.
        if !failed || self.spec.on_panic != OnPanic::Pause {
            self.act_on_panic();
        }
    }

    /// Failure for the client when a pause, resume or reset was not done.
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

    /// Requests the status of the `vmm`. At most one request is under way; a second call repeats
    /// the request after the answer.
    pub(super) fn ask_state(&mut self) {
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

    /// Applies the status of the `vmm`, unless the work under way will set the state at its end.
    pub(super) fn on_state(&mut self, state: Result<Status, control::Error>) {
        if matches!(state, Err(control::Error::Timeout(_))) {
            return self.on_silent();
        }
        self.asks_state = false;
        self.set_silent(false);
        if let Ok(status) = state {
            if let Some(instance) = &mut self.instance {
                instance.guest_resets = status.guest_resets;
                instance.crash_resets = status.crash_resets;
            }
            if !self.asks_again {
                self.on_channels(&status.open_channels);
            }
            if let Work::None = &self.work {
                self.take_state(&status);
            }
            if status.panicked && !self.asks_again {
                self.on_panicked(&[]);
            }
            self.publish();
        }
        if self.asks_again {
            self.ask_state();
        }
    }

    /// The `vmm` has not answered in time. Its answer, or the end of the connection, is waited for without a limit.
    fn on_silent(&mut self) {
        let Ok(client) = self.running_client() else {
            self.asks_state = false;
            return;
        };
        self.set_silent(true);
        self.disks.tasks.spawn(async move {
            let answer = client.request(Op::GetStatus(GetStatus {}), &[]).await;
            Outcome::State(answer)
        });
    }

    fn set_silent(&mut self, silent: bool) {
        let Some(instance) = &mut self.instance else {
            return;
        };
        if std::mem::replace(&mut instance.silent, silent) == silent {
            return;
        }
        if silent {
            self.tell(EventSeverity::Warning, UNRESPONSIVE, NO_ANSWER);
        }
        self.publish();
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
        for effect in pause::follow(status, self.view.phase, &self.view.reason) {
            match effect {
                Effect::Enter(phase, "Running" | "Paused", _) if self.panicked() => {
                    self.enter(phase, GUEST_PANICKED, PANICKED);
                }
                Effect::Enter(phase, reason, message) => self.enter(phase, reason, message),
                Effect::NoteDiskError(message) => {
                    self.disks.errors.note(&message);
                }
                Effect::ForgetDiskErrors => self.disks.errors = Errors::default(),
            }
        }
        // The guest may have panicked before the pause that has ended.
        self.act_on_panic();
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
                    // An answer that counts later resets too may have come first.
                    instance.guest_resets = instance.guest_resets.max(reset.guest_resets);
                }
                self.on_reset();
                self.tell_guest_reset();
                self.reboot_from_disk().await;
                self.publish_counts();
            }
            Some(event::Kind::CrashReset(reset)) => {
                if let Some(instance) = &mut self.instance {
                    instance.crash_resets = instance.crash_resets.max(reset.crash_resets);
                }
                self.on_reset();
                self.tell_crash_reset(&reset.message);
                self.publish_counts();
            }
            Some(event::Kind::GuestPanicked(panicked)) => self.on_panicked(&panicked.parameters),
            Some(event::Kind::WatchdogExpired(_)) => self.tell_watchdog(),
            Some(event::Kind::ChannelsChanged(changed)) => {
                // An answer that is on its way may be older.
                self.asks_again |= self.asks_state;
                self.on_channels(&changed.open);
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
            Some(event::Kind::DisksQuiet(quiet)) => self.on_disks_quiet(quiet.number),
            Some(event::Kind::DiskDetached(gone)) => self.on_disk_gone(gone).await,
            Some(event::Kind::NicDetached(gone)) => self.on_gone(What::Nic, &gone.name, gone.forced).await,
            Some(event::Kind::ShareDetached(gone)) => {
                self.on_gone(What::Share, &gone.name, gone.forced).await;
            }
            Some(event::Kind::MigrationRound(round)) => self.on_migration_round(round),
            Some(event::Kind::MigrationDisks(disks)) => self.on_migration_disks(disks),
            None => {}
        }
    }

    /// Identifies the files of a machine that an earlier daemon started, and renews its limits.
    /// Runs in the background, because a file system may not answer.
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
            // A disk that was plugged meanwhile has newer data.
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
            tokio::spawn(client.give_up_snapshot());
        }
    }

    /// Handles the return of the `vmm` of a paused guest: sends the requests that could not be sent
    /// meanwhile. A snapshot ends with the connection that requested it.
    fn run_on(&mut self, paused_for: PauseReason) {
        match (self.handover(), paused_for) {
            (Handover::Target(Target::Owned(_)), _)
            | (Handover::Source(Source::Owner { migrating: false, .. }), PauseReason::Migration) => {
                self.let_run();
            }
            (handover, PauseReason::Snapshot) if !handover.is_under_way() => {
                if let Ok(client) = self.running_client() {
                    tokio::spawn(client.release());
                }
            }
            _ => {}
        }
    }

    /// Handles a pause for a snapshot of the VM's disks. The VM continues if the snapshot was
    /// abandoned.
    fn on_disks_quiet(&self, number: u64) {
        if !self.host.snapshots.disks_quiet(&self.record.uid, number)
            && let Ok(client) = self.running_client()
        {
            tokio::spawn(client.give_up_snapshot());
        }
    }

    /// The VM holds its disks, its user id and its room until the last process of the run is gone.
    pub(super) fn on_lingering(&mut self, what: Unreaped) {
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

    /// Waits for news of a `vmm` whose connection broke. The process usually ends then, so a
    /// request at that moment should find it ended. Waits at most [`link::DYING`] for its end or a
    /// new connection.
    pub(super) async fn dying(&mut self) -> Option<News> {
        let deadline = Instant::now() + link::DYING;
        loop {
            let news = timeout_at(deadline, work::news(&mut self.instance)).await.ok()?;
            match news {
                News::Notice(notice) => self.on_notice(notice).await,
                News::Disconnected => self.on_disconnected(),
                News::Unreaped(what) => self.on_lingering(what),
                News::Shares => self.publish(),
                News::Ended(_) | News::Connected(_) => return Some(news),
            }
        }
    }

    pub(super) async fn on_connected(&mut self, result: Result<Session, control::Error>) {
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
                instance.silent = false;
                instance.version = hello.build;
                instance.guest_resets = status.guest_resets;
                instance.crash_resets = status.crash_resets;
                self.on_channels(&status.open_channels);
                if matches!(self.work, Work::None) {
                    // The last daemon ended in a restore, and this one has not been answered at its start.
                    take_up_images(&self.host, &mut self.record, Some(status.state() != State::Empty)).await;
                    self.take_state(&status);
                }
                if status.panicked {
                    self.on_panicked(&[]);
                }
                self.look();
                let paused = status.state() == State::Paused;
                self.ask_again(paused);
                self.resuming = false;
                if paused && matches!(self.work, Work::None) {
                    self.run_on(status.pause_reason());
                }
                self.act_on_panic();
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

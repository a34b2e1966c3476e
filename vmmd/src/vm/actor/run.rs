//! Start, pause, resume, and what a running `vmm` tells.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use proto::{
    v1::{ExitReason, ExitStatus, VmPhase},
    vmm::{Event, GetStatus, Pause, PauseReason, Resume, State, Status, event, request::Op},
};
use tokio_util::sync::CancellationToken;

use super::{
    Actor, Reply, answer,
    attachments::Errors,
    plug::Outcome,
    work::{Change, Start, Then, Work},
};
use crate::{
    control,
    event::{Draft, Object},
    failure::{Failure, Kind},
    store::{InstanceRecord, Intent},
    text,
    vm::{
        admission::Request,
        describe::{DISK_ERROR, camel_case},
        instance::{self, Instance, Link, Session},
        start::{Plan, start},
    },
};

/// How long a pause or resume may take; the guest's I/O under way is waited for.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

impl Actor {
    pub(super) async fn begin_start(&mut self, waiters: Vec<Reply>) {
        let claim = match self.host.ledger.claim(&self.record.name, self.spec.memory_bytes) {
            Ok(claim) => claim,
            Err(failure) => return self.start_failed(failure, waiters).await,
        };
        self.record.intent = Intent::Running.into();
        self.record.instance = Some(InstanceRecord {
            uid: claim.uid(),
            started_ms: text::now_ms(),
            generation: self.record.generation,
            boot_id: self.host.boot_id.clone(),
            ..InstanceRecord::default()
        });
        let plan = Plan {
            uid: self.uid,
            spec: self.spec.clone(),
            record: self.record.clone(),
            claim,
        };
        let cancel = CancellationToken::new();
        let task = tokio::spawn(start(Arc::clone(&self.host), plan, cancel.clone()));
        self.work = Work::Start(Start {
            task,
            cancel,
            waiters,
            stop: None,
        });
        self.enter(VmPhase::Starting, "Starting", "");
    }

    pub(super) async fn on_started(&mut self, result: Result<Instance, Failure>) -> ControlFlow<()> {
        let Work::Start(Start { waiters, stop, .. }) = std::mem::take(&mut self.work) else {
            return ControlFlow::Continue(());
        };
        match (result, stop) {
            (Ok(instance), None) => {
                self.instance = Some(instance);
                self.disks.clear();
                self.enter(VmPhase::Running, "Running", "");
                self.look();
                answer(waiters, &Ok(self.state()));
            }
            (Err(failure), None) => self.start_failed(failure, waiters).await,
            // It was booted before it heard that it should not.
            (Ok(instance), Some(mut stop)) => {
                self.instance = Some(instance);
                answer(waiters, &Err(self.cancelled()));
                self.end(&mut stop);
                self.work = Work::Stop(stop);
            }
            (Err(_), Some(stop)) => {
                answer(waiters, &Err(self.cancelled()));
                self.record.instance = None;
                self.record.intent = Intent::Stopped.into();
                if !matches!(stop.then, Then::Delete(_)) {
                    self.persist().await;
                    self.enter(VmPhase::Stopped, "StartCancelled", "");
                }
                return self.after_stop(stop).await;
            }
        }
        ControlFlow::Continue(())
    }

    fn cancelled(&self) -> Failure {
        let message = format!(
            "VM \"{}\" was stopped while it was being started",
            self.record.name
        );
        Failure::new(Kind::Aborted, "START_CANCELLED", message)
    }

    async fn start_failed(&mut self, failure: Failure, waiters: Vec<Reply>) {
        self.record.instance = None;
        self.record.last_exit = Some(ExitStatus {
            reason: ExitReason::StartFailed.into(),
            message: failure.message.clone(),
            time: text::timestamp(text::now_ms()),
        });
        self.persist().await;
        self.enter(
            VmPhase::Failed,
            camel_case(failure.reason),
            failure.message.clone(),
        );
        answer(waiters, &Err(failure));
    }

    pub(super) fn begin_change(&mut self, request: Request, reply: Reply) {
        let client = match self.running_client() {
            Ok(client) => client,
            Err(failure) => return answer([reply], &Err(failure)),
        };
        let op = if request == Request::Pause {
            Op::Pause(Pause {})
        } else {
            Op::Resume(Resume {})
        };
        let task = tokio::spawn(async move {
            let result = tokio::time::timeout(CHANGE_TIMEOUT, client.request(op, &[])).await;
            result.unwrap_or(Err(control::Error::Unexpected("not in time")))
        });
        self.work = Work::Change(Change {
            task,
            waiters: vec![reply],
            said: None,
        });
    }

    pub(super) fn on_changed(&mut self, result: Result<proto::vmm::Status, control::Error>) {
        let Work::Change(Change { waiters, said, .. }) = std::mem::take(&mut self.work) else {
            return;
        };
        match result {
            Ok(status) => {
                self.take_state(&status);
                self.check_state(said);
                answer(waiters, &Ok(self.state()));
            }
            Err(error) => {
                let message = format!("VM \"{}\": {}", self.record.name, text::chain(&error));
                self.check_state(said);
                answer(waiters, &Err(Failure::internal(message)));
            }
        }
    }

    /// A disk may have failed again in the moment of a resume. Which came first, the event does not say; the `vmm` does.
    fn check_state(&mut self, said: Option<Status>) {
        let by_disk = said.is_some_and(|status| status.pause_reason() == PauseReason::DiskError);
        if by_disk && let Ok(client) = self.running_client() {
            self.disks
                .tasks
                .spawn(async move { Outcome::State(client.request(Op::GetStatus(GetStatus {}), &[]).await) });
        }
    }

    /// What the `vmm` is doing, unless something is under way whose end will say.
    pub(super) fn on_state(&mut self, state: Result<Status, control::Error>) {
        if let (Ok(status), Work::None) = (state, &self.work) {
            self.take_state(&status);
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
            (State::Paused, VmPhase::Running) => self.enter(VmPhase::Paused, "Paused", ""),
            _ => {}
        }
    }

    pub(super) async fn on_event(&mut self, event: Event) {
        let vm = self.record.name.as_str();
        match event.kind {
            Some(event::Kind::StateChanged(changed)) => {
                let status = changed.status.unwrap_or_default();
                match &mut self.work {
                    Work::None => self.take_state(&status),
                    // The answer to a request is waited for.
                    Work::Change(change) => change.said = Some(status),
                    Work::Start(_) | Work::Stop(_) => {}
                }
            }
            Some(event::Kind::GuestReset(reset)) => {
                tracing::info!(vm, resets = reset.guest_resets, "the guest reset itself");
                if let Some(instance) = &mut self.instance {
                    instance.guest_resets = reset.guest_resets;
                }
                self.publish();
            }
            Some(event::Kind::GuestPanicked(_)) => {
                let (phase, message) = (self.view.phase, "the guest's kernel has panicked");
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
            Some(event::Kind::DiskDetached(gone)) => self.on_disk_gone(gone).await,
            None => {}
        }
    }

    pub(super) fn on_disconnected(&mut self) {
        let runtime = crate::paths::RuntimeDir::of(&self.host.config, self.uid);
        if let Some(instance) = &mut self.instance {
            instance.link = Link::Connecting(tokio::spawn(instance::reconnect(runtime)));
        }
    }

    pub(super) fn on_connected(&mut self, result: Result<Session, control::Error>) {
        let Some(instance) = &mut self.instance else {
            return;
        };
        match result {
            Ok(Session {
                client,
                events,
                hello,
            }) => {
                let status = hello.status.unwrap_or_default();
                instance.link = Link::Up(client, events);
                instance.version = hello.build;
                instance.guest_resets = status.guest_resets;
                if matches!(self.work, Work::None) {
                    self.take_state(&status);
                }
                self.look();
            }
            Err(error) => {
                let error = text::chain(&error);
                tracing::error!(
                    vm = self.record.name,
                    error,
                    "the vmm can't be controlled any more"
                );
                instance.link = Link::Lost;
            }
        }
        self.publish();
    }
}

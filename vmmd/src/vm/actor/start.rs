//! The actor's part of a start: its notes before [`crate::vm::start`] runs, and the steps after
//! success or failure.

use std::{ops::ControlFlow, sync::Arc};

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;
use vm_lifecycle::{
    exit::{Asked, count},
    policy::Occasion,
    stop::{self, Then},
};
use vmmd_api::v1::{ExitReason, ExitStatus, StartMetadata, VmPhase};
use vmmd_host::{
    clock,
    failure::{Failure, Kind},
    text,
};
use vmmd_objects::{
    context::Initiator,
    operation::{Handle, Metadata, Progress},
};
use vmmd_spec::vm::VmSpec;
use vmmd_store::{InstanceRecord, Intent, ReplacingRecord, handover::Handover};

use super::{
    Actor,
    work::{Start, Stop, Work},
};
use crate::{
    files::{self, Known},
    registry::vms::command::Restore,
    vm::{
        access_keys,
        api::describe::camel_case,
        machine::{self, change},
        start::{Plan, STEPS, Started, start},
    },
};

impl Actor {
    /// `reset_nvram`: the firmware begins with new variables.
    pub(super) async fn begin_start(
        &mut self,
        operation: Handle,
        restore: Option<Box<Restore>>,
        reset_nvram: bool,
    ) {
        let receives = restore.as_ref().is_some_and(|restore| restore.stream);
        if self.handover().is_under_way() && !receives {
            let message = format!("VM \"{}\" is being migrated", self.record.name);
            return self
                .start_failed(Failure::precondition("MIGRATING", message), operation)
                .await;
        }
        let by_policy = operation.context().initiator == Initiator::RunPolicy;
        self.note_start(by_policy);
        self.evacuated = false;
        (self.asks_state, self.asks_again) = (false, false);
        self.record.evacuated = false;
        // Somebody wants it now: the files are meant that are there now.
        if !by_policy {
            self.record.files = files::any_of(&self.record.files);
        }
        let counts = self.record.counts.get_or_insert_default();
        // A VM that its policy starts for the first time is placed by that.
        let is_here =
            self.host.ledger.keeps(&self.record.name) || (by_policy && counts.starts > counts.failed_starts);
        counts.starts += 1;
        self.record.intent = Intent::Running.into();
        self.record.stop = None;
        self.record.deleting = None;
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
            is_here,
            spec,
            record: self.record.clone(),
            claim,
            trace: operation.context().trace.clone(),
            report: operation.reporter(),
            lingers,
            offline: Arc::clone(&self.disks.offline),
            restore,
            reset_nvram,
        };
        let cancel = CancellationToken::new();
        let task = tokio::spawn(start(Arc::clone(&self.host), plan, cancel.clone()).in_current_span());
        self.work = Work::Start(Start {
            task,
            lingers: Some(lingering),
            _with_actor: cancel.clone().drop_guard(),
            cancel,
            operation,
            is_cancelled: false,
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
        if let Some((spec, _)) = restore.and_then(|restore| restore.machine.as_ref()) {
            let noted = std::mem::take(&mut self.record.access_keys);
            self.record.access_keys = access_keys::joined(noted, access_keys::of_spec(spec));
        }
        // The guest of a snapshot with memory, or of another node, has started before.
        let has_started = restore.is_some_and(|restore| restore.file.is_some());
        self.record.instance = Some(InstanceRecord {
            user,
            started_ms: text::now_ms(),
            started_since_boot: clock::since_boot_ms(),
            // A snapshot may be of another generation; which one is not known.
            generation: if wanted == own { self.record.generation } else { 0 },
            boot_id: self.host.boot_id.clone(),
            request_id: operation.context().request_id.clone(),
            operation: operation.id().to_owned(),
            shared_memory: spec.shares_memory(),
            started: has_started,
            notified: has_started,
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
            (
                Ok(Started {
                    instance,
                    files,
                    firmware,
                    cgroup,
                    replacing,
                }),
                None,
            ) => {
                self.note_written(files, (firmware, cgroup), replacing);
                self.instance = Some(instance);
                self.host.ledger.expect(&self.record.name, None);
                self.disks.clear();
                if !operation.commit() {
                    self.undo_start(operation).await;
                    return ControlFlow::Continue(());
                }
                let done = if self.is_received() {
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
            (Err(failure), None) if self.is_received() => {
                return self.not_received(failure, operation).await;
            }
            (Err(failure), None) => self.start_failed(failure, operation).await,
            // It was booted before the cancel arrived.
            (
                Ok(Started {
                    instance,
                    files,
                    firmware,
                    cgroup,
                    replacing,
                }),
                Some(mut stop),
            ) => {
                self.note_written(files, (firmware, cgroup), replacing);
                self.instance = Some(instance);
                operation.give_way(&self.cancelled());
                self.step_stop(&mut stop, stop::Input::CameUp);
                self.work = Work::Stop(stop);
            }
            (Err(_), Some(stop)) => {
                operation.give_way(&self.cancelled());
                self.record.instance = None;
                if stop.state.then != Then::Delete {
                    self.no_start().await;
                    self.enter(VmPhase::Stopped, "StartCancelled", "");
                }
                return self.after_stop(stop).await;
            }
        }
        ControlFlow::Continue(())
    }

    /// Takes over the part of the record that the start has written.
    fn note_written(
        &mut self,
        files: Known,
        (firmware, cgroup): (i32, String),
        replacing: Option<ReplacingRecord>,
    ) {
        (self.record.files, self.record.replacing) = (files, replacing);
        if let Some(run) = &mut self.record.instance {
            run.cgroup = cgroup;
        }
        let run = self
            .record
            .instance
            .as_mut()
            .and_then(|run| run.hardware.as_mut());
        for hardware in run.into_iter().chain(self.record.hardware.as_mut()) {
            hardware.firmware = firmware;
        }
    }

    /// Whether the machine comes from another node, which decides what follows.
    fn is_received(&self) -> bool {
        matches!(self.handover(), Handover::Target(target) if !target.may_run())
    }

    /// Ends a VM whose start was cancelled in the moment in which it succeeded.
    async fn undo_start(&mut self, operation: Handle) {
        self.intend(Intent::Stopped).await;
        let mut stop = Stop::new(operation, Asked::Kill, Then::Stay);
        stop.undoes = true;
        stop.is_cancelled = true;
        self.step_stop(&mut stop, stop::Input::CameUp);
        self.work = Work::Stop(stop);
        self.enter(VmPhase::Stopping, "Stopping", "");
    }

    /// Notes that a start has been taken back.
    async fn no_start(&mut self) {
        self.record.instance = None;
        if !self.evacuated {
            self.record.intent = Intent::Stopped.into();
        }
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
}

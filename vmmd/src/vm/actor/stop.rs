//! Stop, and what follows the end of a process: nothing, a start, or the VM's deletion.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use proto::{
    v1::VmPhase,
    vmm::{self, PowerButton, Resume, request::Op},
};
use tokio::{task::spawn_blocking, time::Instant};

use super::{
    Actor, Reply, answer, superseded,
    work::{Change, Stage, Stop, Then, Work},
};
use crate::{
    control::Client,
    failure::Failure,
    lock,
    paths::{LogDir, RuntimeDir},
    store::Intent,
    vm::{
        ending::{Asked, Evidence, judge},
        instance::exit_record,
        start::{clean_up, store_failure},
    },
};

/// How long a `vmm` that was told to end may take before it is killed. Nothing that it had acknowledged to the guest
/// depends on it.
const END_TIMEOUT: Duration = Duration::from_secs(2);

impl Actor {
    /// Begins a stop: graceful within `grace`, or by force.
    pub(super) fn begin_stop(&mut self, grace: Option<Duration>, waiters: Vec<Reply>, then: Then) {
        let phase = if matches!(then, Then::Delete(_)) {
            VmPhase::Terminating
        } else {
            VmPhase::Stopping
        };
        if matches!(then, Then::Stay) {
            self.record.intent = Intent::Stopped.into();
        }
        let asked = if grace.is_some() {
            Asked::PowerOff
        } else {
            Asked::Kill
        };
        let mut stop = Stop {
            stage: Stage::Asked,
            deadline: None,
            asked,
            waiters,
            then,
        };
        match std::mem::take(&mut self.work) {
            Work::Start(mut start) => {
                start.cancel.cancel();
                // An earlier stop of this start: its waiters are answered by the same end.
                stop.waiters.extend(
                    start
                        .stop
                        .take()
                        .map(|old| self.take_over(old))
                        .unwrap_or_default(),
                );
                start.stop = Some(stop);
                self.work = Work::Start(start);
            }
            Work::Stop(old) => {
                stop.stage = old.stage;
                stop.deadline = old.deadline;
                let waiters = self.take_over(old);
                stop.waiters.extend(waiters);
                if stop.stage == Stage::Asked {
                    self.end(&mut stop);
                }
                self.work = Work::Stop(stop);
            }
            Work::Change(Change { waiters, .. }) => {
                answer(waiters, &Err(superseded(&self.record.name)));
                self.ask_or_end(grace, true, &mut stop);
                self.work = Work::Stop(stop);
            }
            Work::None => {
                self.ask_or_end(grace, self.view.phase == VmPhase::Paused, &mut stop);
                self.work = Work::Stop(stop);
            }
        }
        let reason = if matches!(phase, VmPhase::Terminating) {
            "Deleting"
        } else {
            "Stopping"
        };
        self.enter(phase, reason, "");
    }

    /// The waiters of a stop that another takes the place of; those of its restart are told.
    fn take_over(&self, old: Stop) -> Vec<Reply> {
        let mut waiters = old.waiters;
        match old.then {
            Then::Start(starters) => answer(starters, &Err(superseded(&self.record.name))),
            Then::Delete(deleters) => waiters.extend(deleters),
            Then::Stay => {}
        }
        waiters
    }

    fn client(&self) -> Option<Client> {
        self.instance.as_ref()?.client()
    }

    fn ask_or_end(&self, grace: Option<Duration>, paused: bool, stop: &mut Stop) {
        match (grace, self.client()) {
            (Some(grace), Some(client)) => {
                stop.stage = Stage::Asked;
                stop.deadline = Some(Instant::now() + grace);
                // A paused guest could not hear it.
                let resume = paused.then_some(Op::Resume(Resume {}));
                send(
                    client,
                    resume
                        .into_iter()
                        .chain([Op::PowerButton(PowerButton {})])
                        .collect(),
                );
            }
            _ => self.end(stop),
        }
    }

    /// Tells the `vmm` to end; kills it when it can't be told.
    pub(super) fn end(&self, stop: &mut Stop) {
        stop.asked = stop.asked.ended();
        match self.client() {
            Some(client) => {
                stop.stage = Stage::Ending;
                stop.deadline = Some(Instant::now() + END_TIMEOUT);
                send(client, vec![Op::Stop(vmm::Stop {})]);
            }
            None => self.kill(stop),
        }
    }

    fn kill(&self, stop: &mut Stop) {
        stop.asked = stop.asked.ended();
        stop.stage = Stage::Killed;
        stop.deadline = None;
        if let Some(instance) = &self.instance {
            instance.process.kill();
        }
    }

    /// A later request may shorten the time that an earlier one gave, not lengthen it.
    pub(super) fn hasten(&mut self, grace: Option<Duration>) {
        let Work::Stop(mut stop) = std::mem::take(&mut self.work).into_stop_or(&mut self.work) else {
            return;
        };
        if stop.stage == Stage::Asked {
            match grace {
                None => self.end(&mut stop),
                Some(grace) => {
                    let deadline = Instant::now() + grace;
                    stop.deadline = stop.deadline.map(|old| old.min(deadline));
                }
            }
        }
        self.work = Work::Stop(stop);
    }

    pub(super) fn on_deadline(&mut self) {
        let Work::Stop(mut stop) = std::mem::take(&mut self.work).into_stop_or(&mut self.work) else {
            return;
        };
        match stop.stage {
            Stage::Asked => {
                stop.asked = Asked::Overdue;
                tracing::info!(
                    vm = self.record.name,
                    "the guest did not power off in time: it is ended"
                );
                self.end(&mut stop);
            }
            Stage::Ending | Stage::Killed => self.kill(&mut stop),
        }
        self.work = Work::Stop(stop);
    }

    /// The process has ended.
    pub(super) async fn on_exit(&mut self, signal: Option<i32>) -> ControlFlow<()> {
        let Some(instance) = self.instance.take() else {
            return ControlFlow::Continue(());
        };
        let work = std::mem::take(&mut self.work);
        let asked = if let Work::Stop(stop) = &work {
            stop.asked
        } else {
            Asked::Nothing
        };
        let evidence = self.gather(asked, signal, instance.ended.clone()).await;
        let ending = judge(&evidence);
        tracing::info!(
            vm = self.record.name,
            pid = instance.process.pid(),
            reason = ending.exit.reason().as_str_name(),
            detail = ending.exit.message,
            "the vmm process has ended"
        );
        let message = ending.exit.message.clone();
        let told = self.settle_disks();
        self.record.last_exit = Some(ending.exit);
        self.record.instance = None;
        let deleting = matches!(
            &work,
            Work::Stop(Stop {
                then: Then::Delete(_),
                ..
            })
        );
        // The exit record stays where it is as long as it is nowhere else.
        if deleting || self.persist().await {
            self.clean_up().await;
        }
        drop(instance);
        if !deleting {
            self.enter(ending.phase, ending.reason, message);
        }
        for (result, waiters) in told {
            answer(waiters, &result.map(|()| self.state()));
        }
        match work {
            Work::Stop(stop) => return self.after_stop(stop).await,
            Work::Change(Change { waiters, .. }) => {
                let message = format!("VM \"{}\" ended meanwhile", self.record.name);
                answer(waiters, &Err(Failure::precondition("NOT_RUNNING", message)));
            }
            Work::None | Work::Start(_) => {}
        }
        ControlFlow::Continue(())
    }

    async fn gather(&self, asked: Asked, signal: Option<i32>, told: Option<vmm::ExitRecord>) -> Evidence {
        let (host, uid) = (Arc::clone(&self.host), self.uid);
        let found = spawn_blocking(move || {
            let group = host.cgroups.as_ref().map(|parent| parent.group(uid));
            let record = exit_record(&RuntimeDir::of(&host.config, uid).exit());
            (record, group.is_some_and(|group| group.oom_killed()))
        });
        let (record, oom_killed) = found.await.unwrap_or_default();
        Evidence {
            record: record.or(told),
            asked,
            oom_killed,
            signal,
            node_restarted: false,
        }
    }

    async fn clean_up(&self) {
        let (host, uid) = (Arc::clone(&self.host), self.uid);
        let result = spawn_blocking(move || clean_up(&host, uid)).await;
        if let Ok(Err(error)) = result {
            tracing::warn!(vm = self.record.name, %error, "clean up after a run");
        }
    }

    /// What follows when the VM has stopped.
    pub(super) async fn after_stop(&mut self, stop: Stop) -> ControlFlow<()> {
        match stop.then {
            Then::Stay => answer(stop.waiters, &Ok(self.state())),
            Then::Start(waiters) => {
                answer(stop.waiters, &Ok(self.state()));
                self.begin_start(waiters).await;
            }
            Then::Delete(mut waiters) => {
                waiters.extend(stop.waiters);
                return self.delete(waiters).await;
            }
        }
        ControlFlow::Continue(())
    }

    /// Deletes a VM without a process. The record goes first: whatever is left then belongs to no record and is
    /// removed at the next start of the daemon, should this one be killed before it is done.
    pub(super) async fn delete(&mut self, waiters: Vec<Reply>) -> ControlFlow<()> {
        let lock = RuntimeDir::of(&self.host.config, self.uid).lock();
        if !matches!(lock::released(&lock).await, Ok(true)) {
            let message = format!(
                "a process of VM \"{}\" is alive but can't be reached",
                self.record.name
            );
            answer(waiters, &Err(Failure::precondition("OLD_PROCESS_ALIVE", message)));
            return ControlFlow::Continue(());
        }
        let before = self.view.clone();
        self.enter(VmPhase::Terminating, "Deleting", "");
        if let Err(error) = self.host.store.remove(&self.record.uid).await {
            let failure = store_failure(error);
            let phase = match before.phase {
                VmPhase::Terminating => VmPhase::Stopped,
                phase => phase,
            };
            self.enter(phase, "DeleteFailed", failure.message.clone());
            answer(waiters, &Err(failure));
            return ControlFlow::Continue(());
        }
        self.clean_up().await;
        let logs = LogDir::of(&self.host.config, self.uid);
        if let Ok(Err(error)) = spawn_blocking(move || logs.remove()).await {
            tracing::warn!(vm = self.record.name, %error, "remove the VM's logs");
        }
        self.host.disks.give_back(&self.record.name, None);
        self.host.table.remove(&self.record.name);
        tracing::info!(vm = self.record.name, uid = %self.uid, "deleted");
        answer(waiters, &Ok(self.state()));
        ControlFlow::Break(())
    }
}

impl Work {
    /// Itself when it is a stop; anything else goes back to `place`.
    fn into_stop_or(self, place: &mut Self) -> Self {
        match self {
            Self::Stop(_) => self,
            other => {
                *place = other;
                Self::None
            }
        }
    }
}

/// Sends requests one after the other without waiting for what comes of them: the end of the process is what counts.
fn send(client: Client, ops: Vec<Op>) {
    tokio::spawn(async move {
        for op in ops {
            if let Err(error) = client.request(op, &[]).await {
                tracing::debug!(%error, "a vmm did not take a request");
            }
        }
    });
}

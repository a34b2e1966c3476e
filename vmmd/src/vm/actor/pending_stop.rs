//! Stops and deletions in the VM's record: they outlive the daemon, with their deadlines and their callers.

use std::ops::ControlFlow;

use tokio::time::{Duration, Instant};
use vm_lifecycle::stop::{self, Then};
use vmmd_api::v1::EventSeverity;
use vmmd_host::{failure::Failure, fault, text};
use vmmd_objects::{
    context::{Context, Initiator},
    operation::Type,
};
use vmmd_store::store_failure;
use vmmd_store::{Intent, StopRecord};

use super::{Actor, work::Work};

/// How soon a record is written again after a failure.
const REWRITE: Duration = Duration::from_secs(1);

/// How long the guest of a VM that must not run any more may take to power off: as when a stop says nothing.
const GRACE: Duration = Duration::from_secs(60);

/// A stop that begins now; `None` is one by force.
fn stop_record(grace: Option<Duration>, context: &Context) -> StopRecord {
    let grace = grace.unwrap_or_default().as_millis();
    let grace_ms = u64::try_from(grace).unwrap_or(u64::MAX);
    let (mut user, mut certificate, mut policy) = (None, String::new(), false);
    match &context.initiator {
        Initiator::Daemon => {}
        Initiator::RunPolicy => policy = true,
        Initiator::User(uid) => user = Some(*uid),
        Initiator::Certificate(name) => certificate.clone_from(name),
    }
    StopRecord {
        deadline_ms: text::now_ms().saturating_add(grace_ms),
        grace_ms,
        user,
        certificate,
        policy,
        request_id: context.request_id.clone(),
    }
}

/// Context of the stop: its initiator and request.
fn context_of(stop: &StopRecord) -> Context {
    let initiator = match (stop.user, stop.certificate.as_str()) {
        (Some(uid), _) => Initiator::User(uid),
        (None, "") if stop.policy => Initiator::RunPolicy,
        (None, "") => Initiator::Daemon,
        (None, name) => Initiator::Certificate(name.to_owned()),
    };
    Context {
        request_id: stop.request_id.clone(),
        trace: stop.request_id.clone(),
        initiator,
        preconditions: Default::default(),
    }
}

impl Actor {
    /// Notes durably that the VM is not to run any more, and until when its guest has time.
    pub(super) async fn note_stop(&mut self, grace: Option<Duration>, context: &Context) {
        self.record.intent = Intent::Stopped.into();
        self.record.stop = Some(stop_record(grace, context));
        self.persist().await;
    }

    /// Notes that the guest has less time than was noted.
    pub(super) async fn note_haste(&mut self, grace: Option<Duration>) {
        let Some(stop) = &mut self.record.stop else { return };
        let sooner = stop_record(grace, &context_of(stop));
        if sooner.deadline_ms < stop.deadline_ms {
            *stop = sooner;
            self.persist().await;
        }
    }

    /// Notes durably that the VM is to be deleted as soon as its process has ended. A failure of the deletion or a later start of the VM takes that back.
    pub(super) async fn note_delete(&mut self, context: &Context) -> Result<(), Failure> {
        let mut record = self.record.clone();
        record.intent = Intent::Stopped.into();
        record.deleting = Some(stop_record(None, context));
        if let Err(error) = self.host.store.put(&record).await {
            // The store may have the note all the same.
            self.rewrite_due = Some(Instant::now());
            return Err(store_failure(error));
        }
        self.record = record;
        Ok(())
    }

    /// Removes the note of a deletion that has failed: the next daemon must not continue an operation that was reported as failed.
    pub(super) async fn forget_delete(&mut self) {
        if self.record.deleting.take().is_some() {
            self.rewrite().await;
        }
    }

    /// Writes the record, and again until that succeeds: the next daemon would continue a deletion that the store has.
    pub(super) async fn rewrite(&mut self) {
        if self.persist().await {
            self.rewrite_due = None;
            fault::hold(&self.host.config.run_dir, "rewritten").await;
        } else {
            self.rewrite_due = Some(Instant::now() + REWRITE);
        }
    }

    /// Continues with a deletion that an earlier daemon had begun.
    pub(super) async fn resume_delete(&mut self) -> ControlFlow<()> {
        let Some(noted) = self.record.deleting.clone() else {
            return ControlFlow::Continue(());
        };
        if self.handover().is_under_way() || !matches!(self.work, Work::None) {
            return ControlFlow::Continue(());
        }
        let context = context_of(&noted);
        let message = "a deletion had been asked for before the daemon was restarted: it continues";
        self.tell(EventSeverity::Normal, "DeleteResumed", message);
        let begun = self.left.iter().position(|it| it.kind() == Some(Type::VmDelete));
        // One that the earlier daemon began keeps its id: somebody may wait for it.
        let operation = match begun.map(|place| self.left.swap_remove(place)) {
            Some(left) => {
                self.about = (context, left.id().to_owned());
                left
            }
            None => self.operation(Type::VmDelete, &context, None),
        };
        if self.instance.is_none() {
            return self.delete(operation, Vec::new()).await;
        }
        self.begin_stop(None, operation, Then::Delete);
        ControlFlow::Continue(())
    }

    /// Continues a stop that an earlier daemon began. The guest receives the power button again as
    /// soon as its `vmm` answers.
    pub(super) fn resume_stop(&mut self) {
        if self.record.intent() != Intent::Stopped || !self.runs() {
            return;
        }
        let noted = self.record.stop.clone();
        // An earlier release noted no more than that it is not to run.
        let stop = noted.unwrap_or_else(|| stop_record(Some(GRACE), &Context::daemon()));
        let left = Some(stop.left(text::now_ms())).filter(|_| stop.grace_ms != 0);
        let message = "a stop that was requested before the restart of the daemon continues";
        self.tell(EventSeverity::Normal, "StopResumed", message);
        self.stop_as(left, &context_of(&stop));
    }

    /// Stops what must not run.
    pub(super) fn enforce_off(&mut self) {
        if self.spec.run_policy == vmmd_spec::policy::RunPolicy::Off && self.runs() {
            let context = Context {
                initiator: Initiator::RunPolicy,
                ..Context::default()
            };
            self.record.intent = Intent::Stopped.into();
            self.record.stop = Some(stop_record(Some(GRACE), &context));
            self.stop_as(Some(GRACE), &context);
        }
    }

    fn stop_as(&mut self, grace: Option<Duration>, context: &Context) {
        // One that the earlier daemon began keeps its id: somebody may wait for it.
        let operation = match self.left.pop() {
            Some(left) => {
                self.about = (context.clone(), left.id().to_owned());
                left
            }
            None => self.operation(Type::VmStop, context, None),
        };
        self.begin_stop(grace, operation, Then::Stay);
    }

    /// The `vmm` answers again: a stop that waits for the guest asks it once more.
    pub(super) fn ask_again(&mut self, paused: bool) {
        match std::mem::take(&mut self.work) {
            Work::Stop(mut stop) => {
                self.step_stop(&mut stop, stop::Input::Reachable { paused });
                self.work = Work::Stop(stop);
            }
            other => self.work = other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asked_and_when_the_time_is_over_are_kept() {
        for initiator in [
            Initiator::Daemon,
            Initiator::RunPolicy,
            Initiator::User(7),
            Initiator::Certificate("alice".into()),
        ] {
            let context = Context {
                request_id: "r".into(),
                trace: "r".into(),
                initiator,
                preconditions: Default::default(),
            };
            let stop = stop_record(Some(Duration::from_secs(10)), &context);
            assert_eq!(context_of(&stop), context);
            assert_eq!(stop.left(stop.deadline_ms - 4000), Duration::from_secs(4));
            assert_eq!(stop.left(stop.deadline_ms + 1), Duration::ZERO);
            assert_eq!(stop.left(0), Duration::from_secs(10), "a clock that was set back");
        }
    }
}

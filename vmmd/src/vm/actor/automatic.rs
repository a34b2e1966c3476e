//! What the VM's run policy does: starts after a back-off, at the node's boot, at the VM's creation; and what it refuses.

use proto::{model::vm::Boot, v1::EventSeverity};
use tokio::time::{Duration, Instant};

use super::{
    Actor,
    work::{Then, Work},
};
use crate::{
    capacity::Demand,
    context::{Context, Initiator},
    failure::Failure,
    operation::{Handle, Type},
    registry::vms::command::{Life, Request},
    store::{Intent, RestartRecord},
    text,
    vm::{
        lifecycle::{
            admission::{Refusal, Situation},
            policy::{BackOff, Decision, Occasion, decide, refuses},
        },
        spec::change,
    },
};

/// A guest that resets its machine more often boots the same kernel again.
const REBOOTS: Duration = Duration::from_secs(10);

impl Actor {
    /// Whether the node and the run policy let a request be. A refusal by the policy is told.
    pub(super) fn permitted(&self, life: &Life) -> Result<(), Failure> {
        if matches!(life.request, Request::Start | Request::Restart) {
            self.host.schedulable()?;
        }
        let policy = self.spec.run_policy;
        let Some(hint) = refuses(policy, life.request).filter(|_| !life.evacuate) else {
            return Ok(());
        };
        Err(self.refused_by_policy(hint))
    }

    fn refused_by_policy(&self, hint: &str) -> Failure {
        let message = format!(
            "VM \"{}\" has the run policy {}: {hint}",
            self.record.name,
            self.spec.run_policy.name()
        );
        self.tell(EventSeverity::Warning, "RefusedByPolicy", &message);
        Failure::precondition("RUN_POLICY", message)
    }

    /// Starts a VM that was stopped for a restart, unless its policy has been changed meanwhile to one that lets nobody start it.
    pub(super) async fn start_again(&mut self, operation: Handle) {
        let Some(hint) = refuses(self.spec.run_policy, Request::Start) else {
            operation.reopen();
            return self.begin_start(operation, None).await;
        };
        self.intend(Intent::Stopped).await;
        operation.fail(&self.refused_by_policy(hint));
        self.about = Default::default();
        self.publish();
    }

    /// The same for the client. Nobody is told to stop a VM that its policy lets nobody stop.
    pub(super) fn refused(&self, refusal: Refusal) -> Failure {
        let policy = self.spec.run_policy;
        if refusal == Refusal::StillRunning && refuses(policy, Request::Stop).is_some() {
            let message = format!(
                "VM \"{}\" is running, and its run policy {} lets nobody stop it: delete it with force, or change the policy \
                 and stop it",
                self.record.name,
                policy.name()
            );
            return Failure::precondition("STILL_RUNNING", message);
        }
        refusal.into_failure(&self.record.name)
    }

    /// Notes what the policy makes of what has happened after a run of `ran_ms`. The record is to be written then.
    pub(super) fn plan(&mut self, occasion: Occasion, ran_ms: u64) {
        self.schedule(occasion, ran_ms);
        // Room is kept for what is to come, also while the node is cordoned.
        let expected = self.timer.map(|_| Demand::of(&self.spec));
        self.host.ledger.expect(&self.record.name, expected);
    }

    fn schedule(&mut self, occasion: Occasion, ran_ms: u64) {
        let back_off = BackOff::from(self.host.config.restart);
        let mut restart = self.record.restart.take().unwrap_or_default();
        self.timer = None;
        let now = text::now_ms();
        match decide(self.spec.run_policy, occasion, self.record.intent()) {
            Decision::Stay => return,
            Decision::Start => (restart.next_ms, restart.back_off_ms) = (now, 0),
            // A wait that an earlier daemon began goes on.
            Decision::StartLater if matches!(occasion, Occasion::DaemonStart(_)) && restart.next_ms != 0 => {}
            Decision::StartLater => {
                restart.attempts = back_off.after_run(restart.attempts, ran_ms);
                let wait = back_off.wait(restart.attempts);
                restart.back_off_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
                restart.next_ms = now.saturating_add(restart.back_off_ms);
            }
        }
        restart.boot_id.clone_from(&self.host.boot_id);
        // A clock that was set back makes no wait longer.
        let left = restart.next_ms.saturating_sub(now).min(back_off.max_ms);
        self.timer = Some(Instant::now() + Duration::from_millis(left));
        self.record.restart = Some(restart);
    }

    /// What the policy makes of what was found at the actor's start.
    pub(super) async fn resume_policy(&mut self, occasion: Option<(Occasion, u64)>) {
        if let Some((occasion, ran_ms)) = occasion {
            let before = self.record.restart.clone();
            if self.record.evacuated {
                // The daemon's start ends the time for which room is made.
                self.record.restart.get_or_insert_default().next_ms = 0;
            }
            self.plan(occasion, ran_ms);
            if before != self.record.restart {
                self.persist().await;
            }
            self.publish();
            self.tell_restart();
        }
        self.enforce_off();
        self.resume_stop();
    }

    /// What the policy has in mind waits until the node is started anew, or takes VMs again. One that takes VMs all the time gives
    /// no sign of that: there the policy goes on after [`room_ms`](crate::config::Restart::room_ms).
    pub(super) fn make_room(&mut self) {
        if self.timer.take().is_none() {
            return;
        }
        let restart = self.record.restart.get_or_insert_default();
        if self.host.schedulable().is_err() {
            self.held = true;
            (restart.next_ms, restart.back_off_ms) = (0, 0);
            return;
        }
        let room_ms = self.host.config.restart.room_ms;
        restart.next_ms = text::now_ms().saturating_add(room_ms);
        restart.back_off_ms = room_ms;
        self.timer = Some(Instant::now() + Duration::from_millis(room_ms));
    }

    /// The time has come.
    pub(super) async fn on_due(&mut self) {
        self.timer = None;
        if self.situation() != Situation::Down {
            return;
        }
        if let Err(failure) = self.host.schedulable() {
            self.held = true;
            let message = format!("the run policy would start the VM, but {}", failure.message);
            return self.tell(EventSeverity::Warning, "StartHeld", &message);
        }
        let restart = self.record.restart.take().unwrap_or_default();
        let attempts = restart.attempts.saturating_add(1);
        self.record.restart = Some(RestartRecord {
            attempts,
            next_ms: 0,
            back_off_ms: 0,
            ..restart
        });
        self.record.counts.get_or_insert_default().automatic_starts += 1;
        let context = Context {
            initiator: Initiator::RunPolicy,
            ..Context::default()
        };
        let operation = self.operation(Type::VmStart, &context, None);
        let message = format!(
            "the run policy {} starts the VM, start {attempts} in a row",
            self.spec.run_policy.name()
        );
        self.tell(EventSeverity::Normal, "StartedByPolicy", &message);
        self.begin_start(operation, None).await;
    }

    /// Starts the VM anew whose guest has reset it, when it boots the kernel on a disk: the machine has a copy of the one that was there at
    /// its start, and the guest may have installed another one since. A guest that resets it again soon gets the copy.
    pub(super) fn reboot_from_disk(&mut self) {
        let machine = change::machine(&self.record, &self.spec);
        let soon = self.rebooted.is_some_and(|last| last.elapsed() < REBOOTS);
        if soon || !matches!(machine.boot, Boot::Disk { .. }) || !matches!(self.work, Work::None) {
            return;
        }
        self.rebooted = Some(Instant::now());
        let context = Context {
            initiator: Initiator::RunPolicy,
            ..Context::default()
        };
        let operation = self.operation(Type::VmRestart, &context, None);
        let message = "the guest reset its machine: the kernel on its disk is looked for anew";
        self.tell(EventSeverity::Normal, "RestartedForKernel", message);
        self.begin_stop(None, operation, Then::Start);
    }

    /// A stop by request ends what the policy had in mind.
    pub(super) async fn forget_restart(&mut self) {
        let waited = self.record.restart.take().is_some();
        (self.timer, self.held) = (None, false);
        self.host.ledger.expect(&self.record.name, None);
        if waited || self.record.intent() == Intent::Running {
            self.record.intent = Intent::Stopped.into();
            self.record.evacuated = false;
            self.persist().await;
            self.publish();
        }
    }

    /// The policy, or whether the node takes VMs, may be another.
    pub(super) async fn reconsider(&mut self) {
        if self.situation() != Situation::Down {
            return self.enforce_off();
        }
        let last = self.record.exit_reason();
        let held = std::mem::take(&mut self.held);
        let occasion = if held || self.timer.is_some() {
            Occasion::DaemonStart(last)
        } else {
            Occasion::Changed
        };
        let before = self.record.restart.clone();
        self.plan(occasion, 0);
        if held && self.timer.is_some() {
            // The node stood in the way, not the VM: there is nothing to wait for.
            let restart = self.record.restart.get_or_insert_default();
            restart.attempts = before.as_ref().map_or(0, |before| before.attempts);
            (restart.next_ms, restart.back_off_ms) = (text::now_ms(), 0);
            self.timer = Some(Instant::now());
        }
        if before != self.record.restart {
            self.persist().await;
        }
        self.publish();
    }

    pub(super) fn runs(&self) -> bool {
        matches!(
            self.situation(),
            Situation::Running | Situation::Paused | Situation::Changing | Situation::Starting
        )
    }
}

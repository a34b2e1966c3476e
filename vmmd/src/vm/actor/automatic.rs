//! Run policy of a VM: starts after a back-off, at the node's boot and at the VM's creation, and
//! the requests that the policy refuses.

use tokio::time::{Duration, Instant};
use vm_lifecycle::handover::Source;
use vm_lifecycle::{
    admission::{Refusal, Situation},
    policy::{BackOff, Occasion, after, refuses},
    restart::{self, Effect, Input, Restarts},
    stop::Then,
};
use vmmd_api::v1::EventSeverity;
use vmmd_host::{
    capacity::{Demand, placement},
    failure::Failure,
    text,
};
use vmmd_objects::{
    context::{Context, Initiator},
    operation::{Handle, Type},
};
use vmmd_spec::{
    policy::RunPolicy,
    vm::{Boot, VmSpec},
};
use vmmd_store::{Intent, VmRecord, handover::Handover};

use super::{Actor, handover::guest_reset, work::Work};
use crate::{
    node::check,
    registry::vms::command::{Life, Request},
    vm::machine::change,
};

/// A guest that resets its machine more often boots the same kernel again.
const REBOOTS: Duration = Duration::from_secs(10);

impl Actor {
    /// Checks whether the node and the run policy permit a request. Emits an event when the policy
    /// refuses.
    pub(super) fn permitted(&self, life: &Life) -> Result<(), Failure> {
        // A VM that is on the node stays there over a restart.
        let is_new = self.situation() == Situation::Down;
        if is_new && matches!(life.request, Request::Start | Request::Restart) {
            self.host.schedulable()?;
        }
        let policy = self.spec.run_policy;
        let Some(hint) = refuses(policy, life.request).filter(|_| !life.evacuate && !life.of_pod) else {
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

    /// Starts a VM that was stopped for a restart. Fails if the run policy was changed meanwhile
    /// and forbids a start.
    pub(super) async fn start_again(&mut self, operation: Handle) {
        let Some(hint) = refuses(self.spec.run_policy, Request::Start) else {
            operation.reopen();
            return self.begin_start(operation, None, false).await;
        };
        self.host.ledger.expect(&self.record.name, None);
        self.intend(Intent::Stopped).await;
        operation.fail(&self.refused_by_policy(hint));
        self.about = Default::default();
        self.publish();
    }

    /// Takes more room for the restart of a running VM with a larger `spec`. After a refusal the VM continues with its room.
    pub(super) async fn grow(&self, spec: &VmSpec) -> Result<(), Failure> {
        let Some(instance) = &self.instance else {
            return Ok(());
        };
        let (has, needs) = (instance.claim.demand(), Demand::of(spec));
        if needs.resources.within(has.resources) {
            return Ok(());
        }
        let look = check::look(&self.host).await?;
        instance.claim.take(needs.max(has), |others| {
            let node = look.picture(&self.host, others).without_admission();
            placement::refuse(&placement::decide(&needs.resources, &node))
        })
    }

    /// Gives back the room that [`Self::grow`] took for a restart that does not come: the VM keeps `demand`.
    pub(super) fn give_back(&self, demand: Demand) {
        if let Some(instance) = &self.instance {
            // Less room is never refused.
            let _ = instance.claim.take(demand, |_| Ok(()));
        }
    }

    /// Converts a refusal into the client's failure. The message does not suggest a stop if the run
    /// policy forbids one.
    pub(super) fn refused(&self, refusal: Refusal) -> Failure {
        let policy = self.spec.run_policy;
        if refusal == Refusal::StillRunning && refuses(policy, Request::Stop).is_some() {
            let message = format!(
                "VM \"{}\" is running, and its run policy {} permits no stop: delete it with force, or change the policy \
                 and stop it",
                self.record.name,
                policy.name()
            );
            return Failure::precondition("STILL_RUNNING", message);
        }
        refusal.into_failure(&self.record.name)
    }

    /// The run policy, as far as the VM is started at all: a VM that was stopped with its pod stays stopped.
    fn policy(&self) -> RunPolicy {
        let stopped = self.record.intent() == Intent::Stopped && self.record.last_exit.is_some();
        match self.spec.pod.is_some() && stopped {
            true => RunPolicy::Manual,
            false => self.spec.run_policy,
        }
    }

    /// Advances the restart state by one input. The caller writes the record afterwards and carries
    /// out the returned effects.
    fn step_restarts(&mut self, input: Input) -> Vec<Effect> {
        let pending = self.record.restart.is_some();
        let mut restarts = Restarts {
            record: self.record.restart.take(),
            due: self.timer.map(Instant::into_std),
            held: self.held,
            evacuated: self.record.evacuated,
        };
        let config = self.host.config.restart;
        let mut effects = restarts.step(
            input,
            &restart::Situation {
                policy: after(
                    self.policy(),
                    self.spec.on_panic,
                    self.record.exit_reason(),
                    pending,
                ),
                intent: self.record.intent(),
                down: self.situation() == Situation::Down,
                schedulable: self.host.schedulable().is_ok(),
                back_off: BackOff {
                    first_ms: config.first_ms,
                    max_ms: config.max_ms,
                    reset_after_ms: config.reset_after_ms,
                },
                room_ms: config.room_ms,
                boot_id: &self.host.boot_id,
                now: Instant::now().into_std(),
                now_ms: text::now_ms(),
            },
        );
        (self.record.restart, self.record.evacuated) = (restarts.record, restarts.evacuated);
        (self.timer, self.held) = (restarts.due.map(Instant::from_std), restarts.held);
        effects.retain(|effect| {
            match effect {
                Effect::Expect(expected) => {
                    let demand = expected.then(|| Demand::of(&self.spec));
                    self.host.ledger.expect(&self.record.name, demand);
                }
                Effect::IntendStop => self.record.intent = Intent::Stopped.into(),
                Effect::Start(_) | Effect::Hold => return true,
            }
            false
        });
        effects
    }

    /// Notes the decision of the policy after a run of `ran_ms`; the caller writes the record. A VM that ends during a drain makes room
    /// too.
    pub(super) fn plan(&mut self, occasion: Occasion, ran_ms: u64) {
        self.record.evacuated = std::mem::take(&mut self.evacuated);
        self.step_restarts(Input::Occurred(occasion, ran_ms));
        if self.record.evacuated || self.host.node.is_draining() {
            self.make_room();
        }
    }

    /// Notes that a start begins.
    pub(super) fn note_start(&mut self, by_policy: bool) {
        self.step_restarts(Input::Started { by_policy });
    }

    /// Applies the run policy to the situation at the actor's start.
    pub(super) async fn resume_policy(&mut self, occasion: Option<(Occasion, u64)>) {
        if let Some((occasion, ran_ms)) = occasion {
            let before = (self.record.restart.clone(), self.record.intent);
            self.step_restarts(Input::Found(occasion, ran_ms));
            if before != (self.record.restart.clone(), self.record.intent) {
                self.persist().await;
            }
            self.publish();
            self.tell_restart();
        }
        self.enforce_off();
        self.resume_stop();
    }

    /// See [`Input::MakeRoom`]. The record is to be written then.
    pub(super) fn make_room(&mut self) {
        self.step_restarts(Input::MakeRoom);
    }

    /// A VM that does not run makes room: its run policy waits.
    pub(super) async fn wait_for_node(&mut self) {
        let before = (self.record.restart.clone(), self.record.evacuated);
        self.make_room();
        if before != (self.record.restart.clone(), self.record.evacuated) {
            self.persist().await;
            self.publish();
        }
    }

    /// The time has come.
    pub(super) async fn on_due(&mut self) {
        if self.situation() != Situation::Down {
            self.timer = None;
            return;
        }
        for effect in self.step_restarts(Input::Due) {
            match effect {
                Effect::Start(attempts) => self.start_by_policy(attempts).await,
                Effect::Hold => self.tell_held(),
                Effect::Expect(_) | Effect::IntendStop => {}
            }
        }
    }

    fn tell_held(&self) {
        if let Err(failure) = self.host.schedulable() {
            let message = format!("the run policy would start the VM, but {}", failure.message);
            self.tell(EventSeverity::Warning, "StartHeld", &message);
        }
    }

    async fn start_by_policy(&mut self, attempts: u32) {
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
        self.begin_start(operation, None, false).await;
    }

    /// Restarts a VM that boots the kernel on a disk, after its guest has reset the machine.
    ///
    /// The machine has a copy of the kernel from its start, and the guest may have installed
    /// another kernel since. If the guest resets again within [`REBOOTS`], it boots the copy. A
    /// migration from this node is given up first; when that is too late, the guest boots the copy.
    pub(super) async fn reboot_from_disk(&mut self) {
        let machine = change::machine(&self.record, &self.spec);
        let soon = self.rebooted.is_some_and(|last| last.elapsed() < REBOOTS);
        if soon
            || self.instance.is_none()
            || !matches!(machine.boot, Boot::Disk { .. })
            || !matches!(self.work, Work::None)
        {
            return;
        }
        match self.handover() {
            Handover::Source(Source::Owner { migrating: true, .. }) => {
                self.reset_in_migration = Some(Instant::now());
                self.give_up_migration(guest_reset());
                return;
            }
            handover if handover.is_under_way() => return,
            _ => {}
        }
        if let Err(failure) = self.grow(&self.spec).await {
            let message = format!(
                "the guest boots the kernel of its last start: {}",
                failure.message
            );
            return self.tell(EventSeverity::Warning, "RestartRefused", &message);
        }
        self.rebooted = Some(Instant::now());
        let context = Context {
            initiator: Initiator::RunPolicy,
            ..Context::default()
        };
        let operation = self.operation(Type::VmRestart, &context, None);
        let message = "the guest reset its machine: vmmd searches its disk for a kernel again";
        self.tell(EventSeverity::Normal, "RestartedForKernel", message);
        self.begin_stop(None, operation, Then::Start);
    }

    /// Restarts the VM after the migration that was given up for that, unless the guest has booted by then; or acts on a panic.
    pub(super) async fn reboot_after_migration(&mut self) {
        let reset = self.reset_in_migration.take();
        if reset.is_some_and(|at| at.elapsed() < REBOOTS) {
            self.reboot_from_disk().await;
        }
        self.show_panic();
    }

    /// Cancels the restart that the run policy has planned, after a stop by request.
    pub(super) async fn forget_restart(&mut self) {
        let waited = self.record.restart.is_some();
        self.step_restarts(Input::Stopped);
        if waited || self.record.intent() == Intent::Running {
            self.record.intent = Intent::Stopped.into();
            self.record.evacuated = false;
            self.persist().await;
            self.publish();
        }
    }

    /// The policy, if it `is_new`, or the rule for panics, or whether the node takes VMs, may be another.
    pub(super) async fn reconsider(&mut self, is_new: bool) {
        if self.situation() != Situation::Down {
            return self.enforce_off();
        }
        let noted = |record: &VmRecord| (record.restart.clone(), record.intent, record.evacuated);
        let before = noted(&self.record);
        if is_new && self.spec.run_policy == RunPolicy::Manual {
            // The start that the earlier policy had in mind is none after a panic.
            self.record.restart = None;
        }
        self.step_restarts(Input::Reconsidered(self.record.exit_reason()));
        if before != noted(&self.record) {
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

//! A guest whose kernel has panicked: `spec.onPanic` selects the action.

use tokio::sync::oneshot;
use vm_lifecycle::handover::Source;
use vm_lifecycle::{
    exit::{Asked, PANICKED},
    stop::{self, Stage, Then},
};
use vmmd_api::v1::{EventSeverity, VmPhase};
use vmmd_objects::{
    context::{Context, Initiator},
    operation::Type,
};
use vmmd_spec::policy::OnPanic;
use vmmd_store::handover::Handover;

use super::{Actor, handover::guest_panicked, work::Work};
use crate::{
    registry::vms::command::Request,
    vm::api::describe::{DISK_ERROR, GUEST_PANICKED, MIGRATING, SNAPSHOT, phase_word},
};

impl Actor {
    /// Whether the guest's kernel has panicked and was not reset since.
    pub(super) fn panicked(&self) -> bool {
        self.instance.as_ref().is_some_and(|instance| instance.panicked)
    }

    /// The `vmm` says that the guest's kernel has panicked, with parameters by Hyper-V's interface.
    pub(super) fn on_panicked(&mut self, parameters: &[u64]) {
        let Some(instance) = &mut self.instance else {
            return;
        };
        if std::mem::replace(&mut instance.panicked, true) {
            return;
        }
        self.record.counts.get_or_insert_default().guest_panics += 1;
        let message = match parameters {
            [] => PANICKED.to_owned(),
            parameters => {
                let list: Vec<_> = parameters.iter().map(|it| format!("{it:#x}")).collect();
                format!("{PANICKED}, with the crash parameters {}", list.join(", "))
            }
        };
        self.tell(EventSeverity::Warning, GUEST_PANICKED, &message);
        self.show_panic();
    }

    /// Shows the panic in the status, and acts by the spec.
    pub(super) fn show_panic(&mut self) {
        if !self.panicked() {
            return;
        }
        let phase = matches!(self.view.phase, VmPhase::Running | VmPhase::Paused);
        if phase && ![SNAPSHOT, MIGRATING, DISK_ERROR].contains(&self.view.reason.as_str()) {
            self.enter(self.view.phase, GUEST_PANICKED, PANICKED);
        }
        self.act_on_panic();
    }

    /// The machine was reset.
    pub(super) fn on_reset(&mut self) {
        if let Some(instance) = &mut self.instance {
            (instance.panicked, instance.paused_for_panic) = (false, false);
        }
        if self.view.reason == GUEST_PANICKED {
            self.enter(self.view.phase, phase_word(self.view.phase), "");
        }
        self.probe_again();
    }

    /// Whether an action by `spec.onPanic` follows a panic of the guest.
    pub(super) fn acts_on_panic(&self) -> bool {
        let panicked = self.instance.as_ref().filter(|instance| instance.panicked);
        panicked.is_some_and(|instance| match self.spec.on_panic {
            OnPanic::Ignore => false,
            OnPanic::Pause => !instance.paused_for_panic,
            OnPanic::RunPolicy | OnPanic::Restart | OnPanic::Stop => true,
        })
    }

    /// Acts by `spec.onPanic`. A change under way, a migration and the end of a pause come first: each calls this function at its end.
    pub(super) fn act_on_panic(&mut self) {
        if !self.panicked() {
            return;
        }
        match &self.work {
            Work::None => {}
            Work::Stop(_) => return self.hasten_panicked(),
            Work::Start(_) | Work::Change(_) => return,
        }
        if !self.acts_on_panic() {
            return;
        }
        match self.handover() {
            Handover::Source(Source::Owner { migrating: true, .. }) => {
                return self.give_up_migration(guest_panicked());
            }
            handover if handover.is_under_way() => return,
            _ => {}
        }
        match self.spec.on_panic {
            OnPanic::Ignore => {}
            // The machine is about to run, or runs again without a request.
            OnPanic::Pause if self.resuming || self.is_paused_for_a_while() => {}
            OnPanic::Pause if self.view.phase == VmPhase::Paused => self.note_panic_pause(true),
            OnPanic::Pause => {
                // No client waits for the answer: the vmm publishes its new state.
                let (reply, _) = oneshot::channel();
                self.begin_change(Request::Pause, reply);
                self.note_panic_pause(matches!(self.work, Work::Change(_)));
            }
            // The run ends with a panic, and the run policy decides as after every run.
            OnPanic::RunPolicy | OnPanic::Restart | OnPanic::Stop => {
                let context = Context {
                    initiator: Initiator::RunPolicy,
                    ..Context::default()
                };
                let operation = self.operation(Type::VmStop, &context, None);
                self.begin_stop(None, operation, Then::Stay);
            }
        }
    }

    fn is_paused_for_a_while(&self) -> bool {
        self.view.phase == VmPhase::Paused
            && [SNAPSHOT, MIGRATING, DISK_ERROR].contains(&self.view.reason.as_str())
    }

    /// Notes that the VM is paused for its panic, or that the pause failed.
    pub(super) fn note_panic_pause(&mut self, paused: bool) {
        if let Some(instance) = &mut self.instance {
            instance.paused_for_panic = paused;
        }
    }

    /// Ends a stop that waits for the guest: a panicked guest does not hear its power button.
    fn hasten_panicked(&mut self) {
        match std::mem::take(&mut self.work) {
            Work::Stop(mut stop) if stop.state.stage == Stage::Asked => {
                stop.state.asked = Asked::Panicked;
                self.step_stop(&mut stop, stop::Input::Hasten(None));
                self.work = Work::Stop(stop);
                self.publish();
            }
            other => self.work = other,
        }
    }
}

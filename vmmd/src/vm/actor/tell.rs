//! Events about the VM.

use tokio::time::{Duration, Instant};
use vm_lifecycle::pause::{EXPIRED, WATCHDOG_EXPIRED};
use vmmd_api::v1::{EventSeverity, VmPhase};
use vmmd_objects::event::{Draft, Object};
use vmmd_spec::policy::WatchdogAction;

use super::Actor;
use crate::vm::api::describe::DISK_ERROR;

/// Minimum interval between events about guest resets, because a guest can reset continuously.
const RESETS: Duration = Duration::from_secs(1);

impl Actor {
    /// Emits an event with its context and operation.
    pub(super) fn tell(&self, severity: EventSeverity, reason: &str, message: &str) {
        let (context, operation) = self.about.clone();
        let object = Object::Vm(self.record.name.clone(), self.uid);
        let mut draft = Draft::normal(object, reason, message).of(context);
        draft.severity = severity;
        draft.operation = operation;
        self.host.events.emit(draft);
    }

    /// Emits an event for an expired watchdog.
    pub(super) fn tell_watchdog(&mut self) {
        let Some(now) = due(self.watchdog_told) else {
            return;
        };
        self.watchdog_told = Some(now);
        let action = match self.spec.watchdog {
            Some(WatchdogAction::Reset) => "the machine is reset",
            Some(WatchdogAction::PowerOff) => "the run of the VM ends",
            Some(WatchdogAction::Pause) => "the VM is paused",
            Some(WatchdogAction::None) | None => "no action follows",
        };
        let message = format!("{EXPIRED}: {action}");
        self.tell(EventSeverity::Warning, WATCHDOG_EXPIRED, &message);
    }

    /// Emits an event for the new phase if it differs from `before`.
    pub(super) fn tell_phase(&self, before: VmPhase) {
        let phase = self.view.phase;
        if phase == before {
            return;
        }
        let reason = self.view.reason.as_str();
        let (reason, standard) = match phase {
            VmPhase::Starting => ("Starting", "the VM is being started"),
            VmPhase::Running => match before {
                VmPhase::Starting => ("Started", "the VM runs"),
                VmPhase::Paused => ("Resumed", "the VM runs again"),
                _ => (reason, "the VM runs"),
            },
            VmPhase::Paused => (reason, "the VM is paused"),
            VmPhase::Stopping => ("Stopping", "the VM is being stopped"),
            VmPhase::Terminating => (reason, "the VM is being deleted"),
            VmPhase::Stopped => (reason, "the VM is stopped"),
            VmPhase::Failed => (reason, "the VM has failed"),
            VmPhase::Unspecified | VmPhase::Pending => return,
        };
        let severity = if phase == VmPhase::Failed || reason == DISK_ERROR {
            EventSeverity::Warning
        } else {
            EventSeverity::Normal
        };
        let message = match self.view.message.as_str() {
            "" => standard,
            message => message,
        };
        self.tell(severity, reason, message);
    }

    /// Emits an event with the time until the run policy starts the VM, if a start is due.
    pub(super) fn tell_restart(&self) {
        let restart = self.record.restart.as_ref();
        let waits = restart.filter(|restart| self.timer.is_some() && restart.back_off_ms != 0);
        if let Some(restart) = waits {
            let message = format!(
                "the run policy {} starts the VM again in {} ms",
                self.spec.run_policy.name(),
                restart.back_off_ms
            );
            self.tell(EventSeverity::Normal, "BackOff", &message);
        }
    }

    /// Emits an event for a reset by the guest.
    pub(super) fn tell_guest_reset(&mut self) {
        if let Some(now) = due(self.reset_told) {
            self.reset_told = Some(now);
            self.tell(EventSeverity::Normal, "GuestReset", "the guest reset its machine");
        }
    }

    /// Emits an event for a reset after a triple fault. A guest can crash a thousand times per
    /// second, so events and log entries are rate-limited.
    pub(super) fn tell_crash_reset(&mut self, what: &str) {
        if let Some(now) = due(self.crash_told) {
            self.crash_told = Some(now);
            let vm = self.record.name.as_str();
            tracing::warn!(vm, what, "the machine was reset because the guest crashed");
            let message = format!("{what}: the machine was reset (onCrash: restart)");
            self.tell(EventSeverity::Warning, "GuestCrashReset", &message);
        }
    }
}

/// Now, unless the last event of its kind is recent.
fn due(told: Option<Instant>) -> Option<Instant> {
    let now = Instant::now();
    let recent = |told: Instant| now.duration_since(told) < RESETS;
    (!told.is_some_and(recent)).then_some(now)
}

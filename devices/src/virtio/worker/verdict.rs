//! What faults mean: the one place that decides, as [`Fault`] says.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::{
    super::{
        fault::{Counters, DeviceEvent, Fault, words},
        session::Session,
    },
    Shared,
};

/// Effect of a fault on a session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Health {
    Good,
    Broken,
    Dead,
}

impl Shared {
    /// Decides the consequences of a fault. All decisions are in this function.
    pub(super) fn handle_fault(&self, session: &mut Session, fault: Fault) -> Health {
        match fault {
            Fault::Guest { queue, head, .. } => {
                Counters::bump(&self.counters.guest_faults);
                if let Some(held_back) = self.log_limit.allow() {
                    tracing::warn!(device = self.name, %held_back, "{fault}");
                }
                let returned = session
                    .add_used(queue, head, 0)
                    .and_then(|()| session.flush_interrupts());
                match returned {
                    Ok(_) => Health::Good,
                    Err(fault) => {
                        Counters::bump(&self.counters.ring_faults);
                        self.need_reset(&fault);
                        Health::Broken
                    }
                }
            }
            Fault::Ring { .. } => {
                Counters::bump(&self.counters.ring_faults);
                self.need_reset(&fault);
                Health::Broken
            }
            Fault::Backend(what, error) => {
                Counters::bump(&self.counters.backend_faults);
                if let Some(held_back) = self.log_limit.allow() {
                    tracing::warn!(device = self.name, %held_back, %error, "{what}");
                    self.sink.report(
                        &self.name,
                        DeviceEvent::BackendError(format!("{what}: {}", words(&error))),
                    );
                }
                Health::Good
            }
            Fault::Held(what, error) => {
                Counters::bump(&self.counters.backend_faults);
                if let Some(held_back) = self.log_limit.allow() {
                    tracing::warn!(device = self.name, %held_back, %error, "{what}: requests are held");
                }
                // The machine depends on it, and it comes once for each pause.
                self.sink.report(
                    &self.name,
                    DeviceEvent::Held(format!("{what}: {}", words(&error))),
                );
                Health::Good
            }
            Fault::Bug(_) => {
                self.report_bug(&fault);
                Health::Dead
            }
        }
    }

    pub(super) fn need_reset(&self, fault: &Fault) {
        self.signals.need_reset();
        if let Some(held_back) = self.log_limit.allow() {
            tracing::warn!(device = self.name, %held_back, "the device needs a reset: {fault}");
            self.sink
                .report(&self.name, DeviceEvent::NeedsReset(describe(fault)));
        }
    }

    pub(super) fn report_bug(&self, fault: &Fault) {
        tracing::error!(device = self.name, "{fault}");
        self.signals.need_reset();
        self.sink.report(&self.name, DeviceEvent::Failed(describe(fault)));
    }
}

/// The fault with its cause.
fn describe(fault: &Fault) -> String {
    match fault {
        Fault::Backend(what, error) | Fault::Held(what, error) => format!("{what}: {}", words(error)),
        other => other.to_string(),
    }
}

/// Calls into a handler; a panic becomes a fault.
pub(super) fn guard<T>(call: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(Fault::Bug(panic_text(panic.as_ref()))))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("of unknown kind"))
}

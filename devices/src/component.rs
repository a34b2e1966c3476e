//! The life of a part of the machine, as the lifecycle driver of vmm-core sees it.

use std::time::Instant;

use crate::state::{Section, StateError};

/// Reason why a component failed an operation. The machine names the component.
#[derive(Debug, thiserror::Error)]
pub enum ComponentError {
    /// Requests under way did not end in time. After a pause the part runs on as before; a reset is still under way.
    #[error("requests under way did not end in time")]
    DrainTimeout,
    /// A thread of the part is gone.
    #[error("a worker thread is gone")]
    WorkerGone,
    /// The host refused something.
    #[error("{0}")]
    Host(&'static str, #[source] std::io::Error),
}

/// A part of the machine with a life cycle: devices with workers, interrupt controllers, clocks.
///
/// Order of a pause: the vCPUs stop, then the devices in the order of assembly, then interrupt
/// controllers and clocks. Resume is the reverse. A reset happens with all vCPUs stopped: devices,
/// then interrupt controllers.
///
/// A save happens while the component is paused and has no guest-visible effect: the component may
/// resume afterwards. A restore happens on a component that was built like the saved one and has
/// never run; guest memory is complete before it. No method has a default.
///
/// Order of a save: devices in the order of a pause, the PCI root buses and hot-plug registers,
/// interrupt controllers and PIT, vCPUs, kvmclock. Interrupts move in this direction, so an
/// interrupt that moves during a save is in the part that is saved later. Order of a restore:
/// vCPUs, interrupt controllers and PIT, devices, the PCI root buses (which need the functions'
/// BARs), hot-plug registers: no part hands an interrupt to another part whose state is still to be
/// overwritten. kvmclock and interrupts that wait in a device continue with the resume.
pub trait Component: Send {
    /// Name of the component in messages: "disk root", "serial".
    fn name(&self) -> &str;
    /// Quiet on return: no thread of the part touches guest memory or a backend, all requests that were taken are
    /// answered. On an error (also: `deadline` passed) the part runs on.
    fn pause(&mut self, deadline: Instant) -> Result<(), ComponentError>;
    /// Continues from the point at which [`pause`](Self::pause) stopped the component.
    fn resume(&mut self) -> Result<(), ComponentError>;
    /// To the state after power-on. After a [`ComponentError::DrainTimeout`] call it again: guest memory must not be used for
    /// anything else before it succeeds, and nothing but another reset or the drop of the part may follow.
    fn reset(&mut self) -> Result<(), ComponentError>;
    /// Returns the state of the paused component. [`StateError::NotMigratable`] if a save is
    /// impossible at this time or in general.
    fn save(&self) -> Result<Section, StateError>;
    /// Takes over a state that [`save`](Self::save) gave, possibly in another process. Afterwards the component is
    /// paused; [`resume`](Self::resume) goes on. The section is untrusted. After an error the component is safe to
    /// drop, and to reset; it may hold parts of the state.
    fn restore(&mut self, section: &Section) -> Result<(), StateError>;
}

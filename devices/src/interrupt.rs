//! Services of the hypervisor for devices: interrupt lines, message-signalled interrupts, and write
//! notifications that do not make a vCPU leave the kernel. vmm-core implements these on KVM; tests
//! implement them in memory.

use std::{io, sync::Arc};

use vmm_sys_util::eventfd::EventFd;

/// A wired, edge-triggered interrupt of the legacy interrupt controllers (a GSI).
pub trait IrqLine: Send + Sync {
    /// Raises and lowers the line once.
    fn pulse(&self);
}

/// A wired, level-triggered interrupt of the I/O APIC (a GSI), active high, of one device alone.
pub trait LevelLine: Send + Sync {
    /// Raises or lowers the line; it stays so.
    fn set(&self, high: bool);
}

/// Address and data of a message-signalled interrupt (PCI 3.0, 6.8.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Message Address and Message Upper Address.
    pub address: u64,
    /// Message Data.
    pub data: u32,
}

/// One message-signalled interrupt of a device.
pub trait MsiVector: Send + Sync {
    /// Sets the message that [`trigger`](Self::trigger) sends; `None` disconnects the vector (masked, disabled).
    fn connect(&self, message: Option<MsiMessage>) -> io::Result<()>;
    /// Sends the message. Callable from any thread; does nothing when disconnected.
    fn trigger(&self);
    /// An eventfd that has the effect of `trigger` when written to, for handing to the kernel (vhost).
    fn event(&self) -> Option<&EventFd>;
}

/// Gives devices their interrupt vectors.
pub trait MsiController: Send + Sync {
    /// A vector that is not in use; it is free again when dropped.
    fn allocate(&self) -> io::Result<Arc<dyn MsiVector>>;
}

/// Where a write notification is listened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NotifyAddress {
    /// Any width, at this guest-physical address.
    Mmio(u64),
    /// Any width, at this I/O port.
    Pio(u16),
}

/// Turns guest writes at an address into signals of an eventfd, without an exit to user space (KVM's ioeventfd).
pub trait NotifyRegistry: Send + Sync {
    /// From now on a write at `address` signals `event`.
    fn register(&self, address: NotifyAddress, event: &EventFd) -> io::Result<()>;
    /// No longer; `event` is the one registered.
    fn unregister(&self, address: NotifyAddress, event: &EventFd) -> io::Result<()>;
}

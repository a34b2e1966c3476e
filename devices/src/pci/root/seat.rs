//! Functions as accesses find them, and what accesses of their BARs reach.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use super::{
    super::function::{PciFunction, SharedFunction},
    lock,
};
use crate::bus::{BusDevice, Effect};

/// A function in a slot, as accesses find it.
pub(in crate::pci) struct Seat {
    pub(super) function: SharedFunction,
    /// Changed with the function locked.
    pub(super) gone: AtomicBool,
}

impl Seat {
    pub(super) fn new(function: SharedFunction) -> Arc<Self> {
        Arc::new(Self {
            function,
            gone: AtomicBool::new(false),
        })
    }

    /// Uses the function, unless it is gone.
    pub(super) fn access<R>(&self, access: impl FnOnce(&mut dyn PciFunction) -> R) -> Option<R> {
        let mut function = lock(&self.function);
        (!self.gone.load(Ordering::Relaxed)).then(|| access(&mut *function))
    }
}

/// A BAR on the MMIO bus.
pub(in crate::pci) struct BarDevice {
    pub(in crate::pci) seat: Arc<Seat>,
    pub(in crate::pci) bar: usize,
}

impl BusDevice for BarDevice {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let read = self
            .seat
            .access(|function| function.read_bar(self.bar, offset, data));
        if read.is_none() {
            data.fill(0xff);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        self.seat
            .access(|function| function.write_bar(self.bar, offset, data))
            .unwrap_or_default()
    }
}

/// Replaces the BAR of a function that was removed from its driver by force. It reads as zero: a
/// virtio driver still resets a vanished device and waits until the status is zero (virtio 1.3,
/// 4.1.4.3.2); Linux waits without a limit.
pub(super) struct ZeroBar;

impl BusDevice for ZeroBar {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _offset: u64, _data: &[u8]) -> Effect {
        Effect::None
    }
}

//! Interface between the root bus and a function.

use std::sync::{Arc, Mutex};

use super::config::ConfigSpace;
use crate::bus::Effect;

/// A PCI function. The root bus detects on its own when a write to the configuration moves a BAR.
pub trait PciFunction: Send {
    /// Its configuration space.
    fn config(&self) -> &ConfigSpace;
    /// Its configuration space, for placing BARs at assembly.
    fn config_mut(&mut self) -> &mut ConfigSpace;
    /// A guest's read of 1 to 8 bytes of the configuration space; `offset` and `data` lie within 4 KiB.
    fn read_config(&mut self, offset: usize, data: &mut [u8]);
    /// A guest's write of 1 to 8 bytes to the configuration space; `offset` and `data` lie within 4 KiB.
    fn write_config(&mut self, offset: usize, data: &[u8]) -> Effect;
    /// A guest's read behind a BAR, within its size.
    fn read_bar(&mut self, bar: usize, offset: u64, data: &mut [u8]);
    /// A guest's write behind a BAR, within its size.
    fn write_bar(&mut self, bar: usize, offset: u64, data: &[u8]) -> Effect;
    /// The BAR is on the bus at `address` now, or not any more. Addresses that are listened for (notifications)
    /// move with it.
    fn bar_moved(&mut self, bar: usize, address: Option<u64>);
    /// Resets to the state after power-on. [`bar_moved`](Self::bar_moved) reports the resulting
    /// changes of the BARs on the bus later.
    fn reset(&mut self);
}

/// Host memory behind a BAR, which the guest reaches without exits.
pub trait BarMemory: Send + Sync {
    /// Its size in bytes, a power of two of at least a page.
    fn size(&self) -> u64;
    /// The BAR is on the bus at `address` now, or not any more.
    fn moved(&self, address: Option<u64>);
}

/// A function as the root bus and its owner share it.
pub type SharedFunction = Arc<Mutex<dyn PciFunction>>;

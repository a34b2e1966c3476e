//! The channels that programs of the guest have open, for threads other than the worker's.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Called by the worker after a change; it must not block.
pub type OnChange = Box<dyn Fn() + Send>;

/// See the module. A guest that opens and closes its channels continuously causes one report, until
/// the state is read.
#[derive(Debug)]
pub struct OpenChannels {
    names: Vec<String>,
    /// Bit `i` is set while the channel at index `i` is open.
    mask: AtomicU32,
    /// A change was reported, and the state was not read since.
    is_reported: AtomicBool,
}

impl OpenChannels {
    pub(super) fn new(names: Vec<String>) -> Self {
        Self {
            names,
            mask: AtomicU32::new(0),
            is_reported: AtomicBool::new(false),
        }
    }

    /// Names of the channels that are open now.
    pub fn names(&self) -> Vec<String> {
        // A change after this line is reported again.
        self.is_reported.store(false, Ordering::SeqCst);
        let mask = self.mask.load(Ordering::SeqCst);
        let open = self
            .names
            .iter()
            .enumerate()
            .filter(|(index, _)| mask & bit(*index) != 0);
        open.map(|(_, name)| name.clone()).collect()
    }

    /// Sets whether each channel is open, by its index. Returns whether the change is to be reported.
    pub(super) fn set(&self, open: impl Iterator<Item = bool>) -> bool {
        let open = open.enumerate().filter(|(_, open)| *open);
        let mask = open.fold(0, |mask, (index, _)| mask | bit(index));
        self.mask.swap(mask, Ordering::SeqCst) != mask && !self.is_reported.swap(true, Ordering::SeqCst)
    }
}

fn bit(index: usize) -> u32 {
    u32::try_from(index).map_or(0, |index| 1_u32.checked_shl(index).unwrap_or(0))
}

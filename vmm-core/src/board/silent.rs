//! Interrupts and notifications of a machine without KVM and without a guest.

use std::{io, sync::Arc};

use devices::interrupt::{LevelLine, MsiController, MsiMessage, MsiVector, NotifyAddress, NotifyRegistry};
use vmm_sys_util::eventfd::EventFd;

/// Ignores all operations.
pub(super) struct Silent;

impl LevelLine for Silent {
    fn set(&self, _high: bool) {}
}

impl MsiVector for Silent {
    fn connect(&self, _message: Option<MsiMessage>) -> io::Result<()> {
        Ok(())
    }

    fn trigger(&self) {}

    fn event(&self) -> Option<&EventFd> {
        None
    }
}

impl MsiController for Silent {
    fn allocate(&self) -> io::Result<Arc<dyn MsiVector>> {
        Ok(Arc::new(Self))
    }
}

impl NotifyRegistry for Silent {
    fn register(&self, _address: NotifyAddress, _event: &EventFd) -> io::Result<()> {
        Ok(())
    }

    fn unregister(&self, _address: NotifyAddress, _event: &EventFd) -> io::Result<()> {
        Ok(())
    }
}

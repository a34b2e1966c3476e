//! The way of a medium into a CD-ROM drive, while the machine runs or is paused.
//!
//! The drive shows the new medium at once. The worker of its port changes to the new image before it fetches the next
//! command, and when no command of the old medium is in process.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, OnceLock, PoisonError, Weak, atomic::Ordering},
    time::Instant,
};

use block::{Completion, Engine, Geometry, Image, Request, SECTOR};
use vmm_sys_util::eventfd::EventFd;

use super::{atapi, fis::SLOTS, hba::Hba, port::Device};
use crate::virtio::blk::control::{Shared, SharedImage};

/// Reason why a medium could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum MediumError {
    /// The guest prevents the removal.
    #[error(
        "the guest prevents the removal of the medium, and was asked to eject it: eject it in the guest, or use force"
    )]
    Prevented,
    /// The drive is not in a machine.
    #[error("the drive is not in a machine")]
    Gone,
    /// The new image cannot be used.
    #[error("use the new medium")]
    Image(#[source] io::Error),
}

/// See the module.
pub struct Tray {
    shared: Arc<Shared>,
    image: Weak<SharedImage>,
    port: OnceLock<(Arc<Hba>, usize)>,
}

impl Tray {
    pub(super) fn new(shared: &Arc<Shared>, image: &Arc<SharedImage>) -> Self {
        Self {
            shared: Arc::clone(shared),
            image: Arc::downgrade(image),
            port: OnceLock::new(),
        }
    }

    /// The drive is at the port with this index.
    pub(super) fn connect(&self, hba: &Arc<Hba>, index: usize) {
        // A drive is put into one machine.
        let _first = self.port.set((Arc::clone(hba), index));
    }

    /// Replaces the medium; [`NoMedium`] empties the drive. The tray is closed afterwards. Without `force`, a guest that
    /// prevents the removal keeps its medium, and is notified of the request.
    ///
    /// # Errors
    ///
    /// The old medium stays in the drive.
    pub fn change(&self, image: Box<dyn Image>, force: bool) -> Result<(), MediumError> {
        let place = self.image.upgrade().ok_or(MediumError::Gone)?;
        let (hba, index) = self.port.get().ok_or(MediumError::Gone)?;
        let port = hba.ports().get(*index).ok_or(MediumError::Gone)?;
        let engine = image.engine().map_err(MediumError::Image)?;
        let size = image.capacity();
        let capacity = size.saturating_sub(size.checked_rem(atapi::BLOCK).unwrap_or(0));
        // Serializes changes.
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut locked = port.lock();
            let Device::Cdrom(drive) = &mut locked.device else {
                return Err(MediumError::Gone);
            };
            let loaded = self.shared.capacity.load(Ordering::SeqCst) != 0;
            if loaded && !force && !drive.release() {
                return Err(MediumError::Prevented);
            }
            drive.change(capacity != 0);
            self.shared.capacity.store(capacity, Ordering::SeqCst);
            port.set_engine(engine);
        }
        *place = image;
        drop(place);
        port.wake();
        Ok(())
    }
}

/// The image of an empty drive: it has no bytes.
#[derive(Debug)]
pub struct NoMedium;

impl Image for NoMedium {
    fn capacity(&self) -> u64 {
        0
    }

    fn read_only(&self) -> bool {
        true
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            physical_block: u32::try_from(SECTOR).unwrap_or(0),
            optimal_io: 0,
            discard_granularity: None,
        }
    }

    fn engine(&self) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(Nothing(VecDeque::new())))
    }

    fn grow(&self, _capacity: Option<u64>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn commit(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Completes all requests with an error. The drive makes none.
struct Nothing(VecDeque<Completion>);

impl Engine for Nothing {
    fn submit(&mut self, request: Request) {
        self.0.push_back(Completion {
            token: request.token,
            result: Err(io::ErrorKind::NotFound.into()),
            buffers: request.buffers,
        });
    }

    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn completed(&mut self) -> Option<Completion> {
        self.0.pop_front()
    }

    fn in_flight(&self) -> usize {
        self.0.len()
    }

    fn depth(&self) -> usize {
        SLOTS as usize
    }

    fn event(&self) -> Option<&EventFd> {
        None
    }

    fn wait(&mut self, _deadline: Instant) -> io::Result<()> {
        Ok(())
    }
}

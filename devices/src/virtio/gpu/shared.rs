//! State that the front, the back and the handle of an adapter share.

use std::sync::{
    Arc, Mutex, OnceLock, PoisonError,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

use rfb::Size;

use crate::display::server::Resizer;
use crate::{
    state::{StateError, message},
    virtio::signals::Signals,
};

/// VIRTIO_GPU_EVENT_DISPLAY: the display information changed.
const EVENT_DISPLAY: u32 = 1;

pub(super) struct Shared {
    /// Size that a guest chooses by default.
    initial: Size,
    /// The size that the guest is asked to have.
    preferred: Mutex<Size>,
    events: AtomicU32,
    /// A driver has begun to use the device.
    driven: AtomicBool,
    signals: OnceLock<Arc<Signals>>,
}

impl Shared {
    pub fn new(size: Size) -> Self {
        Self {
            initial: size,
            preferred: Mutex::new(size),
            events: AtomicU32::new(0),
            driven: AtomicBool::new(false),
            signals: OnceLock::new(),
        }
    }

    pub fn connect(&self, signals: &Arc<Signals>) {
        // There is one device for each, so it is set once.
        let _again = self.signals.set(Arc::clone(signals));
    }

    pub fn initial(&self) -> Size {
        self.initial
    }

    pub fn preferred(&self) -> Size {
        *self.preferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_driven(&self, driven: bool) {
        self.driven.store(driven, Ordering::SeqCst);
    }

    pub fn events(&self) -> u32 {
        self.events.load(Ordering::SeqCst)
    }

    pub fn clear_events(&self, which: u32) {
        self.events.fetch_and(!which, Ordering::SeqCst);
    }

    fn prefer(&self, size: Size) {
        *self.preferred.lock().unwrap_or_else(PoisonError::into_inner) = size;
    }

    pub fn save(&self) -> message::VirtioGpu {
        let preferred = self.preferred();
        message::VirtioGpu {
            preferred_width: preferred.width().into(),
            preferred_height: preferred.height().into(),
            events: self.events(),
            boot_pixels: Vec::new(),
        }
    }

    pub fn restore(&self, saved: &message::VirtioGpu) -> Result<(), StateError> {
        let size = Size::new(saved.preferred_width, saved.preferred_height)
            .ok_or_else(|| StateError::invalid("preferred_width", "no size of a screen"))?;
        if saved.events & !EVENT_DISPLAY != 0 {
            return Err(StateError::invalid("events", "unknown events"));
        }
        self.prefer(size);
        self.events.store(saved.events, Ordering::SeqCst);
        Ok(())
    }
}

/// A handle on an adapter for everybody but its driver.
#[derive(Clone)]
pub struct GpuControl {
    shared: Arc<Shared>,
}

impl GpuControl {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }
}

impl Resizer for GpuControl {
    /// Asks the guest to change to this size; the guest decides when. Returns false if no driver
    /// runs, or if the size exceeds the 12 bits that an EDID has for each direction.
    fn request_size(&self, size: Size) -> bool {
        const LARGEST: u16 = 0xfff;
        let said = size.width() <= LARGEST && size.height() <= LARGEST;
        if !said || !self.shared.driven.load(Ordering::SeqCst) {
            return false;
        }
        if self.shared.preferred() != size {
            self.shared.prefer(size);
            self.shared.events.fetch_or(EVENT_DISPLAY, Ordering::SeqCst);
            if let Some(signals) = self.shared.signals.get() {
                signals.config_changed();
            }
        }
        true
    }
}

//! Graphics adapter without 3D (virtio 1.3, 5.7). A guest draws into *resources* in its own memory,
//! transfers changed parts to the host's copies, and has one of them scanned out to the machine's
//! [`Framebuffer`].
//!
//! Before its driver runs, the guest may draw into memory behind a BAR: see [`BootScreen`]. The
//! screen shows this memory until a driver scans out a resource, and again after a reset of the
//! device.
//!
//! The adapter has one scan-out. The host's copies of all resources together have at most
//! [`MAX_BYTES`](resource::MAX_BYTES), independent of the guest's requests. A copy occupies memory
//! from its first transfer on.

mod command;
mod edid;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
mod resource;
mod shared;
mod state;
mod worker;

use std::{io, sync::Arc};

use rfb::Size;

use self::{command::Renderer, shared::Shared, worker::GpuHandler};
use super::{
    device::{DeviceKind, VirtioDevice, WorkerSpec, read_bytes},
    signals::Signals,
};
use crate::{
    display::{BootScreen, Framebuffer},
    pci::BarMemory,
    state::{Section, StateError, check, message},
};

pub use self::shared::GpuControl;

/// VIRTIO_GPU_F_EDID: the driver can read the screen's properties.
const F_EDID: u32 = 1;
/// Sizes of the control queue and of the cursor queue.
const QUEUE_SIZES: [u16; 2] = [256, 64];
/// Offset of `events_clear` in `struct virtio_gpu_config`.
const EVENTS_CLEAR: usize = 4;
const CONFIG_LEN: usize = 16;

/// The front of a graphics adapter.
pub struct Gpu {
    framebuffer: Arc<Framebuffer>,
    /// Content of the screen while no driver scans out a resource.
    boot: Option<Arc<BootScreen>>,
    shared: Arc<Shared>,
    connected: bool,
}

impl Gpu {
    /// Creates an adapter that draws on `framebuffer`. Guests choose `size` by default.
    pub fn new(framebuffer: Arc<Framebuffer>, size: Size) -> Self {
        Self {
            framebuffer,
            boot: None,
            shared: Arc::new(Shared::new(size)),
            connected: false,
        }
    }

    /// With a screen on the same framebuffer that guests can use without a driver.
    #[must_use]
    pub fn with_boot_screen(mut self, boot: Arc<BootScreen>) -> Self {
        self.boot = Some(boot);
        self
    }

    /// The handle for others than the driver.
    pub fn control(&self) -> GpuControl {
        GpuControl::new(Arc::clone(&self.shared))
    }

    /// `struct virtio_gpu_config`: events, what clears them, one scan-out, no capability sets.
    fn config(&self) -> [u8; CONFIG_LEN] {
        let mut config = [0; CONFIG_LEN];
        let fields = [self.shared.events(), 0, 1, 0];
        for (place, field) in config.chunks_exact_mut(4).zip(fields) {
            place.copy_from_slice(&u32::to_le_bytes(field));
        }
        config
    }
}

impl VirtioDevice for Gpu {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Gpu
    }

    fn features(&self) -> u64 {
        1 << F_EDID
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        CONFIG_LEN
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(&self.config(), offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        if let (EVENTS_CLEAR, Ok(value)) = (offset, data.try_into().map(u32::from_le_bytes)) {
            self.shared.clear_events(value);
        }
    }

    fn reset(&mut self) {
        self.shared.clear_events(u32::MAX);
    }

    fn workers(&mut self, signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        if std::mem::replace(&mut self.connected, true) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.shared.connect(signals);
        let renderer = Renderer::new(
            Arc::clone(&self.framebuffer),
            self.boot.clone(),
            Arc::clone(&self.shared),
        );
        Ok(vec![WorkerSpec {
            kind: vmm_base::thread::ThreadKind::Worker,
            name: "gpu".into(),
            queues: vec![0, 1],
            handler: Box::new(GpuHandler::new(renderer)),
        }])
    }

    fn bar_memory(&self) -> Option<Arc<dyn BarMemory>> {
        let boot = self.boot.as_ref()?;
        Some(boot.memory())
    }

    fn save(&self) -> Result<Section, StateError> {
        let boot = self.boot.as_ref().map(|boot| boot.save());
        let saved = message::VirtioGpu {
            boot_pixels: boot.unwrap_or_default(),
            ..self.shared.save()
        };
        Ok(Section::new("gpu", &saved))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        let saved: message::VirtioGpu = section.open()?;
        let fits = match &self.boot {
            Some(boot) => boot.restore(&saved.boot_pixels),
            None => saved.boot_pixels.is_empty(),
        };
        check(fits, "boot_pixels", "more than the screen has")?;
        self.shared.restore(&saved)
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]
mod tests;

//! Life cycle of a device under control of its driver (virtio 1.3, 3.1 and 4.1.4.3).
//!
//! ```text
//!          DRIVER_OK             pause
//!   idle ────────────▶ running ────────▶ paused
//!    ▲                  │    ▲              │
//!    │   workers quiet  │    └── resume ────┘
//!    └── resetting ◀────┘ status := 0
//! ```
//!
//! Workers are parked in *idle* and *paused*. A reset of a running device is acknowledged (the
//! status reads as zero) only when all workers are parked, so no worker accesses guest memory
//! afterwards. Until then the status keeps its last value and the device drops all writes except a
//! reset. The wait of a vCPU here is bounded to a moment.
//!
//! Bus-master enable is independent of the phases: in each phase it determines whether the workers
//! may access guest memory.
//!
//! Registers have their natural widths. 64-bit registers may be accessed in halves. An access with
//! another width, at the wrong time or with an invalid value reads as ones and has no effect.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use virtio_bindings::{
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};

use super::super::{
    device::{DeviceKind, VirtioDevice, WorkerSpec},
    queue::QueueState,
    signals::{NO_VECTOR, Signals},
    worker::{Shared, StopError, Stopping, Workers},
};
use crate::{
    component::ComponentError,
    state::{Section, StateError},
};

/// Bytes of the common configuration: up to and with `queue_device` (no optional fields are offered).
pub(super) const COMMON_SIZE: u64 = 0x38;

/// How long a vCPU waits for a reset that it asked for before it has to ask again.
const RESET_WAIT: Duration = Duration::from_millis(20);

/// How long a vCPU that clears bus-master enable waits for the requests under way.
const HALT_WAIT: Duration = Duration::from_millis(20);

/// Device status (2.1).
pub(super) const ACKNOWLEDGE: u8 = 1;
pub(super) const DRIVER: u8 = 2;
pub(super) const DRIVER_OK: u8 = 4;
pub(super) const FEATURES_OK: u8 = 8;
const NEEDS_RESET: u8 = 64;
pub(super) const FAILED: u8 = 128;

/// Features that the transport and the rings offer for every device.
const TRANSPORT_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;

/// Setup of a queue by the driver.
#[derive(Clone, Copy, Default)]
pub(super) struct QueueSetup {
    pub size: u16,
    pub enabled: bool,
    pub desc: u64,
    pub driver: u64,
    pub device: u64,
}

impl QueueSetup {
    /// The address register at `offset` of the common configuration.
    fn address(&self, offset: u64) -> Option<u64> {
        let mut copy = *self;
        copy.address_mut(offset).copied()
    }

    fn address_mut(&mut self, offset: u64) -> Option<&mut u64> {
        match offset {
            0x20 => Some(&mut self.desc),
            0x28 => Some(&mut self.driver),
            0x30 => Some(&mut self.device),
            _ => None,
        }
    }
}

pub(super) enum Phase {
    Idle,
    Running,
    Paused(Vec<QueueState>),
    Resetting(Stopping),
    /// A worker is dead and the VM is failing, or the device is gone.
    Dead,
}

/// See the module.
pub(crate) struct Core {
    pub(super) device: Box<dyn VirtioDevice>,
    pub(super) shared: Arc<Shared>,
    pub(super) workers: Workers,
    pub(super) phase: Phase,
    /// Without NEEDS_RESET, which is in the signals.
    pub(super) status: u8,
    pub(super) offered: u64,
    pub(super) accepted: u64,
    /// The driver acknowledged a feature beyond the 64 that there are.
    pub(super) accepted_beyond: bool,
    pub(super) device_feature_select: u32,
    pub(super) driver_feature_select: u32,
    pub(super) queue_select: u16,
    pub(super) queues: Vec<QueueSetup>,
}

impl Core {
    pub(super) fn new(device: Box<dyn VirtioDevice>, shared: Arc<Shared>, workers: Workers) -> Self {
        let offered = device.features() | TRANSPORT_FEATURES;
        let mut core = Self {
            device,
            shared,
            workers,
            phase: Phase::Idle,
            status: 0,
            offered,
            accepted: 0,
            accepted_beyond: false,
            device_feature_select: 0,
            driver_feature_select: 0,
            queue_select: 0,
            queues: Vec::new(),
        };
        core.clear();
        core
    }

    /// Reads the common configuration.
    pub(super) fn read_common(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let Some((value, width)) = self.register(offset, data.len()) else {
            return;
        };
        if width == data.len() {
            for (byte, value) in data.iter_mut().zip(value.to_le_bytes()) {
                *byte = value;
            }
        }
    }

    /// Value and width of the register at `offset`; 64-bit registers are seen in halves or, if `length` is 8, whole.
    fn register(&mut self, offset: u64, length: usize) -> Option<(u64, usize)> {
        let signals = Arc::clone(&self.shared.signals);
        let selected = self.queues.get(usize::from(self.queue_select)).copied();
        let queue = selected.unwrap_or_default();
        Some(match offset {
            0x00 => (self.device_feature_select.into(), 4),
            0x04 => (half(self.offered, self.device_feature_select), 4),
            0x08 => (self.driver_feature_select.into(), 4),
            0x0c => (half(self.accepted, self.driver_feature_select), 4),
            0x10 => (signals.config_vector().into(), 2),
            0x12 => (u64::try_from(self.queues.len()).unwrap_or(0), 2),
            0x14 => (self.read_status().into(), 1),
            0x15 => (signals.generation().into(), 1),
            0x16 => (self.queue_select.into(), 2),
            0x18 => (queue.size.into(), 2),
            0x1a => (
                signals
                    .queue_vector(self.queue_select)
                    .unwrap_or(NO_VECTOR)
                    .into(),
                2,
            ),
            0x1c => (queue.enabled.into(), 2),
            // The queue's own number: with a multiplier of 4, each has its own address.
            0x1e => (
                if selected.is_some() {
                    self.queue_select.into()
                } else {
                    0
                },
                2,
            ),
            0x20..0x38 if length == 8 && offset.is_multiple_of(8) => (queue.address(offset)?, 8),
            0x20..0x38 if offset.is_multiple_of(4) => {
                let select = if offset.is_multiple_of(8) { 0 } else { 1 };
                (half(queue.address(offset & !7)?, select), 4)
            }
            _ => return None,
        })
    }

    /// Writes the common configuration.
    pub(super) fn write_common(&mut self, offset: u64, data: &[u8]) {
        let Some(value) = number(data) else { return };
        let narrow = |value: u64| u16::try_from(value).unwrap_or(NO_VECTOR);
        if (offset, data.len()) == (0x14, 1) {
            return self.write_status(u8::try_from(value).unwrap_or(0));
        }
        if !self.finish_reset(Instant::now().checked_add(RESET_WAIT)) {
            return;
        }
        match (offset, data.len()) {
            (0x00, 4) => self.device_feature_select = u32::try_from(value).unwrap_or(u32::MAX),
            (0x08, 4) => self.driver_feature_select = u32::try_from(value).unwrap_or(u32::MAX),
            (0x0c, 4) if self.status & FEATURES_OK == 0 => self.accept(value),
            (0x10, 2) => self.shared.signals.set_config_vector(narrow(value)),
            (0x16, 2) => self.queue_select = narrow(value),
            (0x1a, 2) => self
                .shared
                .signals
                .set_queue_vector(self.queue_select, narrow(value)),
            _ if self.status & DRIVER_OK == 0 => self.set_up_queue(offset, data.len(), value),
            _ => {}
        }
    }

    fn accept(&mut self, value: u64) {
        let (mask, shift) = match self.driver_feature_select {
            0 => (u64::from(u32::MAX), 0),
            1 => (u64::from(u32::MAX) << 32, 32),
            _ => {
                self.accepted_beyond |= value != 0;
                return;
            }
        };
        self.accepted = self.accepted & !mask | value << shift;
    }

    fn set_up_queue(&mut self, offset: u64, length: usize, value: u64) {
        let index = usize::from(self.queue_select);
        let max = self.shared.max_sizes.get(index).copied().unwrap_or(0);
        // All of it is to be written before the queue is enabled (4.1.4.3.2).
        let Some(queue) = self.queues.get_mut(index).filter(|queue| !queue.enabled) else {
            return;
        };
        match (offset, length) {
            (0x18, 2) => {
                if let Some(size) = u16::try_from(value)
                    .ok()
                    .filter(|size| size.is_power_of_two() && *size <= max)
                {
                    queue.size = size;
                }
            }
            (0x1c, 2) => queue.enabled = value == 1,
            (0x20..0x38, 8) if offset.is_multiple_of(8) => {
                if let Some(address) = queue.address_mut(offset) {
                    *address = value;
                }
            }
            (0x20..0x38, 4) if offset.is_multiple_of(4) => {
                let shift = if offset.is_multiple_of(8) { 0 } else { 32 };
                if let Some(address) = queue.address_mut(offset & !7) {
                    *address = *address & !(u64::from(u32::MAX) << shift) | value << shift;
                }
            }
            _ => {}
        }
    }

    fn read_status(&mut self) -> u8 {
        self.finish_reset(None);
        let needs_reset = self.shared.signals.needs_reset() && self.status != 0;
        self.status | if needs_reset { NEEDS_RESET } else { 0 }
    }

    fn write_status(&mut self, value: u8) {
        if value == 0 {
            return self.begin_reset();
        }
        if !self.finish_reset(Instant::now().checked_add(RESET_WAIT)) {
            return;
        }
        let mut status = value & (ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | FAILED);
        // The driver must not clear bits (2.1.1).
        if self.status & !status != 0 {
            return;
        }
        let acceptable = acceptable(self.accepted, self.accepted_beyond, self.offered);
        if status & !self.status & FEATURES_OK != 0 && !acceptable {
            status &= !FEATURES_OK;
        }
        if status & DRIVER_OK != 0 && status & FEATURES_OK == 0 {
            status &= !DRIVER_OK;
        }
        let started = status & !self.status & DRIVER_OK != 0 && status & FAILED == 0;
        self.status = status;
        if started && matches!(self.phase, Phase::Idle) {
            self.start();
        }
    }

    fn start(&mut self) {
        let states: Vec<QueueState> = (0_u16..)
            .zip(&self.queues)
            .filter(|(_, queue)| queue.enabled)
            .map(|(index, queue)| QueueState {
                index,
                size: queue.size,
                desc_table: queue.desc,
                avail_ring: queue.driver,
                used_ring: queue.device,
                next_avail: 0,
                next_used: 0,
            })
            .collect();
        self.shared.signals.set_driver_ok(true);
        self.workers.start(&states, self.accepted);
        self.phase = Phase::Running;
    }

    fn begin_reset(&mut self) {
        match self.phase {
            Phase::Idle => return self.clear(),
            Phase::Running | Phase::Paused(_) => {
                self.shared.signals.set_driver_ok(false);
                self.phase = Phase::Resetting(self.workers.reset());
            }
            Phase::Resetting(_) | Phase::Dead => {}
        }
        self.finish_reset(Instant::now().checked_add(RESET_WAIT));
    }

    /// Completes a reset in progress if the workers are parked by `deadline`. Returns false while
    /// the registers cannot be used.
    fn finish_reset(&mut self, deadline: Option<Instant>) -> bool {
        let Phase::Resetting(stopping) = &mut self.phase else {
            return !matches!(self.phase, Phase::Dead);
        };
        if stopping.wait(deadline.unwrap_or_else(Instant::now)) {
            self.phase = Phase::Idle;
            self.clear();
            return true;
        }
        if stopping.gone() {
            self.phase = Phase::Dead;
        }
        false
    }

    /// To the state after power-on; the workers are parked.
    fn clear(&mut self) {
        self.status = 0;
        self.accepted = 0;
        self.accepted_beyond = false;
        self.device_feature_select = 0;
        self.driver_feature_select = 0;
        self.queue_select = 0;
        let fresh = |size: &u16| QueueSetup {
            size: *size,
            ..QueueSetup::default()
        };
        self.queues = self.shared.max_sizes.iter().map(fresh).collect();
        self.shared.signals.reset();
        self.device.reset();
    }

    /// See [`Component::pause`](crate::component::Component::pause).
    pub(super) fn pause(&mut self, deadline: Instant) -> Result<(), ComponentError> {
        if !self.finish_reset(Some(deadline)) {
            return Err(self.reset_error());
        }
        if !matches!(self.phase, Phase::Running) {
            return Ok(());
        }
        match self.workers.pause(deadline, self.accepted) {
            Ok(states) => {
                self.phase = Phase::Paused(states);
                Ok(())
            }
            Err(StopError::Late) => Err(ComponentError::DrainTimeout),
            Err(StopError::Gone) => Err(ComponentError::WorkerGone),
        }
    }

    /// See [`Component::resume`](crate::component::Component::resume).
    pub(super) fn resume(&mut self) {
        if let Phase::Paused(states) = &self.phase {
            self.workers.start(states, self.accepted);
            self.phase = Phase::Running;
        }
    }

    /// Enables or disables the function as a bus master. A disabled device takes no requests and
    /// accesses no guest memory. The disabling waits for requests in progress, but only for a
    /// moment.
    pub(super) fn set_bus_master(&self, on: bool) {
        let deadline = Instant::now().checked_add(HALT_WAIT);
        self.workers.set_bus_master(on, deadline.filter(|_| !on));
    }

    /// [`set_bus_master`](Self::set_bus_master) to off without waiting, in a reset.
    pub(super) fn forget_bus_master(&self) {
        self.workers.set_bus_master(false, None);
    }

    /// Resets and waits for it.
    pub(super) fn reset(&mut self, deadline: Instant) -> Result<(), ComponentError> {
        self.begin_reset();
        if self.finish_reset(Some(deadline)) {
            Ok(())
        } else {
            Err(self.reset_error())
        }
    }

    /// The device is gone: nothing that a driver does reaches it any more. Gives its workers, to be ended.
    pub(super) fn retire(&mut self) -> Workers {
        self.shared.signals.set_driver_ok(false);
        self.phase = Phase::Dead;
        self.device = Box::new(Gone(self.device.kind()));
        std::mem::replace(&mut self.workers, Workers::none())
    }

    fn reset_error(&self) -> ComponentError {
        match self.phase {
            Phase::Dead => ComponentError::WorkerGone,
            _ => ComponentError::DrainTimeout,
        }
    }
}

/// Placeholder for a removed front.
struct Gone(DeviceKind);

impl VirtioDevice for Gone {
    fn kind(&self) -> DeviceKind {
        self.0
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[]
    }

    fn config_len(&self) -> usize {
        0
    }

    fn read_config(&self, _offset: usize, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn reset(&mut self) {}

    fn workers(&mut self, _signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        Ok(Vec::new())
    }

    fn save(&self) -> Result<Section, StateError> {
        Err(StateError::not_migratable("the device", "it is removed"))
    }

    fn restore(&mut self, _section: &Section) -> Result<(), StateError> {
        Err(StateError::not_migratable("the device", "it is removed"))
    }
}

/// Whether a driver may set FEATURES_OK (2.2.2, 6.1).
pub(super) fn acceptable(accepted: u64, beyond: bool, offered: u64) -> bool {
    !beyond && accepted & !offered == 0 && accepted & 1 << VIRTIO_F_VERSION_1 != 0
}

/// 32 bits of `value`: the lower ones for 0, the upper ones for 1, none for others.
fn half(value: u64, select: u32) -> u64 {
    match select {
        0 => value & u64::from(u32::MAX),
        1 => value >> 32,
        _ => 0,
    }
}

fn number(data: &[u8]) -> Option<u64> {
    let mut bytes = [0; 8];
    bytes.get_mut(..data.len())?.copy_from_slice(data);
    Some(u64::from_le_bytes(bytes))
}

//! The PCI function of a virtio device (virtio 1.3, 4.1.2 and 4.1.4): its identity, its capabilities, and the one BAR in
//! which everything lies. A device may have memory behind a second one.

use std::{io, sync::Arc};

use super::{
    super::device::DeviceKind,
    core::{COMMON_SIZE, Core},
};
use crate::{
    bus::Effect,
    interrupt::{NotifyAddress, NotifyRegistry},
    pci::{
        BarKind, BarMemory, ConfigSpace, Header, PciError, PciFunction, PciWindows, config::ConfigError,
        msix::Msix,
    },
};

/// Index of the BAR.
const BAR: usize = 0;
const BAR_SIZE: u64 = 0x8000;
/// Index of the BAR of a device's memory. The first one takes two registers.
const MEMORY_BAR: usize = 2;
/// Offsets of the areas in the BAR, one page each.
const COMMON: u64 = 0x0000;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const NOTIFY: u64 = 0x3000;
const MSIX_TABLE: u64 = 0x4000;
const MSIX_PBA: u64 = 0x5000;
const PAGE: u64 = 0x1000;

/// Distance of the queues' notification addresses.
const NOTIFY_MULTIPLIER: u32 = 4;
/// Most queues: each has an MSI-X vector beside the configuration's, the table has a page.
pub(super) const MAX_QUEUES: usize = 255;
/// Longest configuration space of a device.
pub(super) const MAX_CONFIG: usize = 4096;

const VENDOR: u16 = 0x1af4;
/// Plus the device's kind (4.1.2.1).
const FIRST_DEVICE: u16 = 0x1040;
/// Any from 0x40 on says that the device is not transitional.
const SUBSYSTEM: u16 = 0x1100;
const CAPABILITY_VENDOR: u8 = 0x09;
const CAPABILITY_MSIX: u8 = 0x11;
/// Area that a vendor capability describes (4.1.4, `cfg_type`).
const AREA_COMMON: u8 = 1;
const AREA_NOTIFY: u8 = 2;
const AREA_ISR: u8 = 3;
const AREA_DEVICE: u8 = 4;
const AREA_PCI_ACCESS: u8 = 5;
/// Offsets in the PCI configuration access capability (4.1.4.9).
const ACCESS_BAR: usize = 4;
const ACCESS_OFFSET: usize = 8;
const ACCESS_LENGTH: usize = 12;
const ACCESS_DATA: usize = 16;

/// See the module.
pub(super) struct VirtioFunction {
    pub core: Core,
    pub(super) config: ConfigSpace,
    pub(super) msix: Msix,
    pub(super) msix_capability: usize,
    access_capability: usize,
    notify: Arc<dyn NotifyRegistry>,
    memory: Option<Arc<dyn BarMemory>>,
    /// Where the BAR is on the bus.
    address: Option<u64>,
    /// Bus-master enable as the workers and the interrupts know it.
    pub(super) bus_master: bool,
}

impl VirtioFunction {
    pub fn new(core: Core, msix: Msix, notify: Arc<dyn NotifyRegistry>) -> io::Result<Self> {
        let memory = core.device.bar_memory();
        let (config, msix_capability, access_capability) = layout(&core, &msix, memory.as_deref())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        Ok(Self {
            core,
            config,
            msix,
            msix_capability,
            access_capability,
            notify,
            memory,
            address: None,
            bus_master: false,
        })
    }

    /// Makes the workers and the interrupts agree with bus-master enable in the configuration. An interrupt is a write
    /// to memory too, so it stays pending while the function is no bus master (PCI 3.0, 6.2.2 and 6.8).
    pub(super) fn apply_bus_master(&mut self) {
        let on = self.config.is_bus_master();
        if on == self.bus_master {
            return;
        }
        self.bus_master = on;
        if on {
            self.msix.set_bus_master(true);
            self.core.set_bus_master(true);
        } else {
            // Requests that end in time still have their interrupts.
            self.core.set_bus_master(false);
            self.msix.set_bus_master(false);
        }
    }

    fn write_notify(&self, offset: u64) {
        // The written value repeats the queue's number, which the address already determines.
        let queue = offset
            .checked_div(NOTIFY_MULTIPLIER.into())
            .and_then(|queue| usize::try_from(queue).ok());
        let aligned = offset.is_multiple_of(NOTIFY_MULTIPLIER.into());
        let kick = queue
            .filter(|_| aligned)
            .and_then(|queue| self.core.shared.kicks.get(queue));
        if let Some(kick) = kick {
            // Fails when the counter is full: then the worker has more than one wake-up waiting.
            let _full = kick.write(1);
        }
    }

    /// Offset in the BAR and length that the PCI configuration access capability asks for.
    fn accessed(&self) -> Option<(u64, usize)> {
        let field = |offset| {
            self.config
                .read_u32(self.access_capability.saturating_add(offset))
        };
        let (bar, offset, length) = (
            field(ACCESS_BAR) & 0xff,
            field(ACCESS_OFFSET),
            field(ACCESS_LENGTH),
        );
        let here = bar == 0 && matches!(length, 1 | 2 | 4) && offset.is_multiple_of(length);
        let within = u64::from(offset).checked_add(length.into())? <= BAR_SIZE;
        (here && within).then_some((offset.into(), usize::try_from(length).ok()?))
    }

    fn touches_access_data(&self, offset: usize, length: usize) -> bool {
        let start = self.access_capability.saturating_add(ACCESS_DATA);
        offset < start.saturating_add(4) && start < offset.saturating_add(length)
    }
}

/// The configuration space, and where in it the capabilities for MSI-X and for PCI configuration access are.
fn layout(
    core: &Core,
    msix: &Msix,
    memory: Option<&dyn BarMemory>,
) -> Result<(ConfigSpace, usize, usize), ConfigError> {
    let kind = core.device.kind();
    let header = Header {
        vendor: VENDOR,
        device: FIRST_DEVICE.saturating_add(kind as u16),
        revision: 1,
        class: class(kind, memory.is_some()),
        subsystem_vendor: VENDOR,
        subsystem: SUBSYSTEM,
    };
    let mut config = ConfigSpace::new(&header);
    for (index, kind, size) in bars(memory.map(BarMemory::size)) {
        config.add_bar(index, kind, size)?;
    }
    if memory.is_some() {
        config.decode_memory();
    }
    let area = |cfg_type: u8, offset: u64, length: u64, extra: Option<u32>| {
        let size = if extra.is_some() { 20 } else { 16 };
        // cap_len, cfg_type, bar, id, padding, offset, length (4.1.4).
        let mut body = vec![size, cfg_type, 0, 0, 0, 0];
        for word in [offset, length] {
            body.extend_from_slice(&u32::try_from(word).unwrap_or(0).to_le_bytes());
        }
        body.extend(extra.into_iter().flat_map(u32::to_le_bytes));
        body
    };
    let queues = u64::try_from(core.shared.kicks.len()).unwrap_or(0);
    let notify_len = queues.saturating_mul(NOTIFY_MULTIPLIER.into());
    let common = area(AREA_COMMON, COMMON, COMMON_SIZE, None);
    config.add_capability(CAPABILITY_VENDOR, &common, &[])?;
    config.add_capability(CAPABILITY_VENDOR, &area(AREA_ISR, ISR, 1, None), &[])?;
    let notify = area(AREA_NOTIFY, NOTIFY, notify_len, Some(NOTIFY_MULTIPLIER));
    config.add_capability(CAPABILITY_VENDOR, &notify, &[])?;
    if core.device.config_len() > 0 {
        let length = u64::try_from(core.device.config_len()).unwrap_or(0);
        let device = area(AREA_DEVICE, DEVICE, length, None);
        config.add_capability(CAPABILITY_VENDOR, &device, &[])?;
    }
    let access = area(AREA_PCI_ACCESS, 0, 0, Some(0));
    // bar, offset, length and data are the driver's.
    let mut writable = vec![0, 0, 0xff, 0, 0, 0];
    writable.resize(access.len(), 0xff);
    let access_capability = config.add_capability(CAPABILITY_VENDOR, &access, &writable)?;

    let mut body = msix.message_control().to_le_bytes().to_vec();
    for offset in [MSIX_TABLE, MSIX_PBA] {
        // The three lowest bits are the BAR's index: 0.
        body.extend_from_slice(&u32::try_from(offset).unwrap_or(0).to_le_bytes());
    }
    let msix_capability = config.add_capability(CAPABILITY_MSIX, &body, &[0x00, 0xc0])?;
    Ok((config, msix_capability, access_capability))
}

/// The BARs of a device that has so many bytes of memory.
fn bars(memory: Option<u64>) -> impl Iterator<Item = (usize, BarKind, u64)> {
    let own = memory.map(|size| (MEMORY_BAR, BarKind::Memory64, size));
    [(BAR, BarKind::Memory64, BAR_SIZE)].into_iter().chain(own)
}

/// Where the memory of a device in `slot` is after power-on, of which it has `size` bytes.
pub fn memory_address(windows: &PciWindows, slot: u8, size: u64) -> Result<u64, PciError> {
    let placed = windows.place(slot, bars(Some(size)))?;
    let found = placed.into_iter().find(|(bar, _)| *bar == MEMORY_BAR);
    found.map(|(_, address)| address).ok_or(PciError::NoRoom {
        bar: MEMORY_BAR,
        size,
    })
}

/// PCI class code, subclass and programming interface. An adapter with a framebuffer that needs no driver is one that a kernel
/// takes for its screen.
fn class(kind: DeviceKind, has_memory: bool) -> u32 {
    match kind {
        DeviceKind::Gpu if has_memory => 0x03_00_00,
        DeviceKind::Net => 0x02_00_00,
        DeviceKind::Block | DeviceKind::FileSystem => 0x01_80_00,
        DeviceKind::Console => 0x07_80_00,
        DeviceKind::Gpu => 0x03_80_00,
        DeviceKind::Input => 0x09_80_00,
        DeviceKind::Socket => 0x02_80_00,
        DeviceKind::Entropy | DeviceKind::Balloon => 0x00_ff_00,
    }
}

impl PciFunction for VirtioFunction {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        if self.touches_access_data(offset, data.len()) {
            let mut value = [0xff; 4];
            if let Some((at, length)) = self.accessed()
                && let Some(value) = value.get_mut(..length)
            {
                self.read_bar(BAR, at, value);
            }
            self.config
                .overwrite(self.access_capability.saturating_add(ACCESS_DATA), &value);
        }
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) -> Effect {
        self.config.write(offset, data);
        self.apply_bus_master();
        let control = self.config.read_u16(self.msix_capability.saturating_add(2));
        if control != self.msix.message_control() {
            self.msix.write_message_control(control);
        }
        if self.touches_access_data(offset, data.len())
            && let Some((at, length)) = self.accessed()
        {
            let value = self
                .config
                .read_u32(self.access_capability.saturating_add(ACCESS_DATA))
                .to_le_bytes();
            return self.write_bar(BAR, at, value.get(..length).unwrap_or_default());
        }
        Effect::None
    }

    fn read_bar(&mut self, bar: usize, offset: u64, data: &mut [u8]) {
        if bar != BAR {
            // The guest reaches the memory without coming here, unless it could not be placed.
            data.fill(0xff);
            return;
        }
        let (page, inner) = (offset & !PAGE.wrapping_sub(1), offset & PAGE.wrapping_sub(1));
        match page {
            COMMON => self.core.read_common(inner, data),
            ISR if inner == 0 && data.len() == 1 => data.fill(self.core.shared.signals.take_isr()),
            DEVICE => match device_range(&self.core, inner, data.len()) {
                Some(at) => self.core.device.read_config(at, data),
                None => data.fill(0xff),
            },
            MSIX_TABLE => self.msix.read_table(inner, data),
            MSIX_PBA => self.msix.read_pba(inner, data),
            _ => data.fill(0xff),
        }
    }

    fn write_bar(&mut self, bar: usize, offset: u64, data: &[u8]) -> Effect {
        if bar != BAR {
            return Effect::None;
        }
        let (page, inner) = (offset & !PAGE.wrapping_sub(1), offset & PAGE.wrapping_sub(1));
        match page {
            COMMON => self.core.write_common(inner, data),
            DEVICE => {
                if let Some(at) = device_range(&self.core, inner, data.len()) {
                    self.core.device.write_config(at, data);
                }
            }
            NOTIFY => self.write_notify(inner),
            MSIX_TABLE => self.msix.write_table(inner, data),
            _ => {}
        }
        Effect::None
    }

    fn bar_moved(&mut self, bar: usize, address: Option<u64>) {
        if bar != BAR {
            if let Some(memory) = &self.memory {
                memory.moved(address);
            }
            return;
        }
        let place = |bar: u64, queue: u64| {
            let offset = queue
                .saturating_mul(NOTIFY_MULTIPLIER.into())
                .saturating_add(NOTIFY);
            NotifyAddress::Mmio(bar.saturating_add(offset))
        };
        for (queue, kick) in (0_u64..).zip(&self.core.shared.kicks) {
            // Without it notifications come through the bus: slower, but they come.
            let moved = self
                .address
                .map_or(Ok(()), |old| self.notify.unregister(place(old, queue), kick))
                .and(address.map_or(Ok(()), |new| self.notify.register(place(new, queue), kick)));
            if let Err(error) = moved {
                tracing::warn!(device = self.core.shared.name, queue, %error, "a notification can't be placed");
            }
        }
        self.address = address;
    }

    fn reset(&mut self) {
        self.config.reset();
        self.msix.reset();
        self.bus_master = false;
        self.core.forget_bus_master();
    }
}

/// Where an access to the device's configuration begins, if it ends within.
fn device_range(core: &Core, offset: u64, length: usize) -> Option<usize> {
    let at = usize::try_from(offset).ok()?;
    (at.checked_add(length)? <= core.device.config_len()).then_some(at)
}

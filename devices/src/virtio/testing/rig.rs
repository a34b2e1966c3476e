//! One device in a machine, and the guest's accesses to it.

use std::{fs::File, sync::Arc, time::Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{FileOffset, GuestAddress};
use vmm_base::GuestMemory;

use super::{MockMsi, MockNotify, MockSink, PATIENCE};
use crate::{
    bus::{Bus, Effect},
    component::Component,
    interrupt::NotifyAddress,
    pci::{
        PciRoot, PciWindows,
        root::{ECAM_SIZE, FIRST_PORT, PORTS},
    },
    state::{Section, StateError},
    virtio::{
        device::VirtioDevice,
        transport::{Parts, VirtioPciDevice},
    },
};

/// End of guest memory. It has a hole of 1 MiB at 16 MiB.
pub const MEMORY_END: u64 = 64 << 20;
const HOLE: u64 = 16 << 20;
const HOLE_END: u64 = 17 << 20;
const ECAM: u64 = 0xe800_0000;
const SLOT: u8 = 3;
const LOW: std::ops::Range<u64> = 0xc000_0000..0xe000_0000;
const HIGH: std::ops::Range<u64> = 0x10_0000_0000..0x20_0000_0000;

/// A register area that a capability points to; the device's configuration; the MSI-X table; PCI configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Area {
    Common,
    Notify,
    Isr,
    Device,
    /// The whole BAR.
    Bar,
    /// PCI configuration space.
    Config,
}

pub struct Rig {
    pub memory: GuestMemory,
    pub mmio: Bus,
    pub pio: Bus,
    pub root: Arc<PciRoot>,
    pub device: VirtioPciDevice,
    pub msi: Arc<MockMsi>,
    pub notify: Arc<MockNotify>,
    pub sink: Arc<MockSink>,
    /// Whether notifications take the short way (ioeventfd) or the bus.
    pub ioeventfd: bool,
    bar: u64,
    common: u64,
    notify_area: u64,
    isr: u64,
    device_area: Option<u64>,
    msix: u64,
}

impl Rig {
    /// A machine with that device, found and enabled as an operating system does.
    pub fn new(device: Box<dyn VirtioDevice>) -> Self {
        // Shared, so that another process can serve queues.
        let file = memfd_create(c"guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, MEMORY_END).unwrap();
        let file = Arc::new(File::from(file));
        let region = |start, end| {
            let place = FileOffset::from_arc(Arc::clone(&file), start);
            (GuestAddress(start), (end - start) as usize, Some(place))
        };
        let ranges = [region(0, HOLE), region(HOLE_END, MEMORY_END)];
        let mut rig = Self::with_memory(GuestMemory::from_ranges_with_files(ranges).unwrap(), device);
        rig.root.remap(&rig.mmio);
        rig.probe();
        rig
    }

    /// Simulates a restore in another process: `device` on the same memory, restored from
    /// `section`. The driver's state stays the same.
    pub fn restored(&self, device: Box<dyn VirtioDevice>, section: &Section) -> Result<Self, StateError> {
        let mut rig = Self {
            ioeventfd: self.ioeventfd,
            bar: self.bar,
            common: self.common,
            notify_area: self.notify_area,
            isr: self.isr,
            device_area: self.device_area,
            msix: self.msix,
            ..Self::with_memory(self.memory.clone(), device)
        };
        rig.device.restore(section)?;
        rig.root.remap(&rig.mmio);
        Ok(rig)
    }

    fn with_memory(memory: GuestMemory, device: Box<dyn VirtioDevice>) -> Self {
        let (msi, notify, sink): (Arc<MockMsi>, Arc<MockNotify>, Arc<MockSink>) = Default::default();
        let parts = Parts {
            name: "test".into(),
            memory: memory.clone(),
            msi: &*msi,
            notify: notify.clone(),
            sink: sink.clone(),
        };
        let device = VirtioPciDevice::new(parts, device).unwrap();
        let root = PciRoot::new(PciWindows {
            low: LOW,
            high: HIGH,
            reach: HIGH,
        });
        root.add(SLOT, device.function()).unwrap();
        let (mmio, pio) = (Bus::new(), Bus::new());
        mmio.insert(ECAM, ECAM_SIZE, root.ecam()).unwrap();
        pio.insert(FIRST_PORT, PORTS, root.ports()).unwrap();
        Self {
            memory,
            mmio,
            pio,
            root,
            device,
            msi,
            notify,
            sink,
            ioeventfd: true,
            bar: 0,
            common: 0,
            notify_area: 0,
            isr: 0,
            device_area: None,
            msix: 0,
        }
    }

    /// Finds the capabilities, turns decoding and MSI-X on, gives each vector its own message (its number as data).
    pub fn probe(&mut self) {
        assert_eq!(self.read(Area::Config, 0, 2), 0x1af4);
        assert!(self.read(Area::Config, 6, 2) & 0x10 != 0, "no capabilities");
        self.bar = self.read(Area::Config, 0x10, 4) & !0xf | self.read(Area::Config, 0x14, 4) << 32;
        self.write(Area::Config, 4, 2, 6);
        let mut msix_capability = 0;
        let mut at = self.read(Area::Config, 0x34, 1);
        while at != 0 {
            let id = self.read(Area::Config, at, 1);
            let place = self.read(Area::Config, at + 8, 4);
            match (id, self.read(Area::Config, at + 3, 1)) {
                (0x09, 1) => self.common = place,
                (0x09, 2) => {
                    self.notify_area = place;
                    assert_eq!(self.read(Area::Config, at + 16, 4), 4, "notify_off_multiplier");
                }
                (0x09, 3) => self.isr = place,
                (0x09, 4) => self.device_area = Some(place),
                (0x11, _) => {
                    msix_capability = at;
                    self.msix = self.read(Area::Config, at + 4, 4);
                }
                _ => {}
            }
            at = self.read(Area::Config, at + 1, 1);
        }
        let vectors = (self.read(Area::Config, msix_capability + 2, 2) & 0x7ff) + 1;
        self.write(Area::Config, msix_capability + 2, 2, 0xc000);
        for vector in 0..vectors {
            let entry = self.msix + vector * 16;
            self.write(Area::Bar, entry, 4, 0xfee0_0000);
            self.write(Area::Bar, entry + 4, 4, 0);
            self.write(Area::Bar, entry + 8, 4, vector);
            self.write(Area::Bar, entry + 12, 4, 0);
        }
        self.write(Area::Config, msix_capability + 2, 2, 0x8000);
    }

    /// Resets the machine to undo changes of a random walk to the PCI state.
    pub fn reset_machine(&mut self) {
        self.device.reset().unwrap();
        self.root.reset(&self.mmio);
        self.probe();
    }

    /// A read of 1 to 8 bytes; those beyond the width are zero.
    pub fn read(&self, area: Area, offset: u64, width: usize) -> u64 {
        let mut bytes = [0; 8];
        self.mmio.read(self.address(area, offset), &mut bytes[..width]);
        u64::from_le_bytes(bytes)
    }

    /// A write of 1 to 8 bytes, with its effect carried out.
    pub fn write(&self, area: Area, offset: u64, width: usize, value: u64) {
        let address = self.address(area, offset);
        if self.ioeventfd && self.notify.signal(NotifyAddress::Mmio(address)) {
            return;
        }
        match self.mmio.write(address, &value.to_le_bytes()[..width]) {
            Effect::None => {}
            Effect::Remap => self.root.remap(&self.mmio),
            effect => panic!("{effect:?}"),
        }
    }

    pub fn status(&self) -> u8 {
        self.read(Area::Common, 0x14, 1) as u8
    }

    /// Resets the device as a driver does, waiting until it says that it is reset.
    pub fn reset_device(&self) {
        self.write(Area::Common, 0x14, 1, 0);
        let start = Instant::now();
        while self.status() != 0 {
            assert!(start.elapsed() < PATIENCE, "the reset is not acknowledged");
            std::thread::yield_now();
        }
    }

    /// Pauses the device with a generous deadline.
    pub fn pause(&mut self) {
        self.device.pause(Instant::now() + PATIENCE).unwrap();
    }

    /// Tries to pause while requests can't end: afterwards all that was offered was seen by the workers.
    pub fn pause_is_late(&mut self) {
        let deadline = Instant::now() + std::time::Duration::from_millis(100);
        let result = self.device.pause(deadline);
        assert!(
            matches!(result, Err(crate::component::ComponentError::DrainTimeout)),
            "{result:?}"
        );
    }

    /// The address of the BAR.
    pub fn bar(&self) -> u64 {
        self.bar
    }

    /// Whether the device has a configuration space of its own.
    pub fn has_device_config(&self) -> bool {
        self.device_area.is_some()
    }

    fn address(&self, area: Area, offset: u64) -> u64 {
        match area {
            Area::Common => self.bar + self.common + offset,
            Area::Notify => self.bar + self.notify_area + offset,
            Area::Isr => self.bar + self.isr + offset,
            Area::Device => self.bar + self.device_area.unwrap_or(0x2000) + offset,
            Area::Bar => self.bar + offset,
            Area::Config => ECAM + (u64::from(SLOT) << 15) + offset,
        }
    }
}

//! One port without a thread: the driver's memory, the worker's framework and the host are in the hands of the test.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use std::sync::{Arc, Mutex};

use block::Image;
use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    Drive, DriveOptions, Tray,
    ata::Disk,
    atapi::Cdrom,
    hba::{Hba, HbaPort},
    port::{Device, Port},
    worker::{PortHandler, Setup},
};
use crate::{
    pci::msix::Msix,
    virtio::{
        blk::{
            BlkControl, OnError,
            control::SharedImage,
            harness::{Host, Mock, host},
        },
        signals::Signals,
        testing::{Bare, Layout, MockMsi},
    },
};

/// Guest memory: two regions with a hole between them.
pub(super) const REGION: u64 = 1 << 19;
pub(super) const HOLE_END: u64 = 1 << 20;
pub(super) const MEMORY_END: u64 = HOLE_END + REGION;

/// Where a driver has the command list, the received FISes, the command tables and data.
pub(super) const LIST: u64 = 0x1000;
pub(super) const RECEIVED: u64 = 0x1400;
pub(super) const TABLES: u64 = 0x2000;
pub(super) const TABLE: u64 = 0x800;
pub(super) const DATA: u64 = 0x2_0000;

/// Registers of the first port.
pub(super) mod register {
    pub(in crate::ahci) const CONTROL: u64 = 0x04;
    pub(in crate::ahci) const INTERRUPTS: u64 = 0x08;
    pub(in crate::ahci) const LIST: u64 = 0x100;
    pub(in crate::ahci) const RECEIVED: u64 = 0x108;
    pub(in crate::ahci) const INTERRUPT: u64 = 0x110;
    pub(in crate::ahci) const ENABLE: u64 = 0x114;
    pub(in crate::ahci) const COMMAND: u64 = 0x118;
    pub(in crate::ahci) const TASK_FILE: u64 = 0x120;
    pub(in crate::ahci) const SIGNATURE: u64 = 0x124;
    pub(in crate::ahci) const SATA_STATUS: u64 = 0x128;
    pub(in crate::ahci) const SATA_CONTROL: u64 = 0x12c;
    pub(in crate::ahci) const SATA_ERROR: u64 = 0x130;
    pub(in crate::ahci) const ACTIVE: u64 = 0x134;
    pub(in crate::ahci) const ISSUE: u64 = 0x138;
}

/// PxCMD: started, receives FISes; the list runs.
pub(super) const RUN: u32 = 0x11;
pub(super) const RUNS: u32 = 1 << 15;

/// A command as a driver makes it.
#[derive(Clone, Debug, Default)]
pub(super) struct Request {
    pub command: u8,
    pub features: u16,
    pub lba: u64,
    pub count: u16,
    pub device: u8,
    /// For PACKET.
    pub packet: Vec<u8>,
    pub writes: bool,
    /// Buffers: address and length.
    pub buffers: Vec<(u64, u32)>,
}

impl Request {
    /// The command FIS.
    fn fis(&self) -> [u8; 20] {
        let lba = self.lba.to_le_bytes();
        let (features, count) = (self.features.to_le_bytes(), self.count.to_le_bytes());
        [
            0x27,
            0x80,
            self.command,
            features[0],
            lba[0],
            lba[1],
            lba[2],
            self.device,
            lba[3],
            lba[4],
            lba[5],
            features[1],
            count[0],
            count[1],
            0,
            0,
            0,
            0,
            0,
            0,
        ]
    }

    /// Writes it into a slot of the command list.
    pub(super) fn put(&self, memory: &GuestMemory, slot: u32) {
        put_fis(memory, slot, &self.fis(), self);
    }
}

/// Writes a command with this FIS into a slot of the command list.
pub(super) fn put_fis(memory: &GuestMemory, slot: u32, fis: &[u8; 20], request: &Request) {
    let table = TABLES + u64::from(slot) * TABLE;
    let atapi = u32::from(!request.packet.is_empty()) << 5;
    let flags = 5 | atapi | u32::from(request.writes) << 6 | (request.buffers.len() as u32) << 16;
    let header = [flags, 0, table as u32, 0];
    for (at, word) in (0..).zip(header) {
        let place = GuestAddress(LIST + u64::from(slot) * 32 + at * 4);
        memory.write_obj(word, place).unwrap();
    }
    memory.write_slice(fis, GuestAddress(table)).unwrap();
    let mut packet = request.packet.clone();
    packet.resize(16, 0);
    memory.write_slice(&packet, GuestAddress(table + 0x40)).unwrap();
    for (at, (address, length)) in (0..).zip(&request.buffers) {
        let words = [
            *address as u32,
            (*address >> 32) as u32,
            0,
            length.wrapping_sub(1) & 0x3f_ffff,
        ];
        for (word, value) in (0..).zip(words) {
            let place = GuestAddress(table + 0x80 + at * 16 + word * 4);
            memory.write_obj(value, place).unwrap();
        }
    }
}

/// A port with its host and its control.
pub(super) struct Harness {
    pub bare: Bare,
    pub hba: Arc<Hba>,
    pub host: Arc<Mutex<Host>>,
    pub control: BlkControl,
    pub tray: Arc<Tray>,
    pub msi: MockMsi,
    wake: Arc<EventFd>,
    _image: Arc<SharedImage>,
}

/// Options of a drive without limits.
pub(super) fn options(cdrom: bool, on_error: OnError) -> DriveOptions {
    DriveOptions {
        name: "root".into(),
        serial: "serial-0123456789-too-long".into(),
        cdrom,
        on_error,
        limiter: None,
    }
}

impl Harness {
    pub(super) fn new(host: Host, options: DriveOptions) -> Self {
        let host = Arc::new(Mutex::new(host));
        let image = Mock {
            host: host.clone(),
            event: EventFd::new(EFD_NONBLOCK).unwrap(),
        };
        Self {
            host,
            ..Self::of(Box::new(image), options)
        }
    }

    /// The same with any image, whose host the test does not see.
    pub(super) fn of(image: Box<dyn Image>, options: DriveOptions) -> Self {
        let host = Arc::new(Mutex::new(host(0, true, 512)));
        let drive = Drive::new(image, options).unwrap();
        let control = drive.control();
        let msi = MockMsi::default();
        let mut table = Msix::new(&msi, 1).unwrap();
        table.set_bus_master(true);
        table.write_message_control(1 << 15);
        table.write_table(12, &[0; 4]);
        let signals = Arc::new(Signals::new(Arc::clone(table.vectors()), 0));
        drive.shared.connect(&signals).unwrap();
        let wake = Arc::clone(drive.shared.wake_of(0).unwrap());
        let device = match drive.options.cdrom {
            true => Device::Cdrom(Cdrom::default()),
            false => Device::Disk(Disk::default()),
        };
        let port = HbaPort::new(0, Port::new(device), Arc::clone(&wake));
        let hba = Arc::new(Hba::new(vec![port], Arc::clone(table.vectors())));
        drive.tray.connect(&hba, 0);
        let handler = PortHandler::new(Setup {
            index: 0,
            hba: Arc::clone(&hba),
            shared: Arc::clone(&drive.shared),
            engine: drive.engine,
            limits: drive.limits,
            medium: drive.medium,
            on_error: drive.options.on_error,
        });
        let layout = Layout {
            regions: [(0, REGION), (HOLE_END, MEMORY_END)],
            rings: (0, 0),
            space: 0,
            avail: 0,
            used: 0,
            size: 1,
        };
        let mut harness = Self {
            bare: Bare::of(Box::new(handler), 0, 0, &signals, layout),
            hba,
            host,
            control,
            tray: drive.tray,
            msi,
            wake,
            _image: drive.image,
        };
        harness.settle();
        harness
    }

    pub(super) fn memory(&self) -> &GuestMemory {
        &self.bare.memory
    }

    pub(super) fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.hba.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes a register, and lets the worker run if it is woken.
    pub(super) fn write(&mut self, offset: u64, value: u32) {
        self.hba.write(offset, &value.to_le_bytes());
        self.settle();
    }

    pub(super) fn settle(&mut self) {
        for _ in 0..1000 {
            if self.wake.read().is_err() {
                return;
            }
            self.bare.event();
        }
        panic!("the worker does not come to rest");
    }

    /// Makes the driver's structures known, and starts the port.
    pub(super) fn start(&mut self) {
        for (register, value) in [
            (register::CONTROL, 2),
            (register::LIST, LIST as u32),
            (register::RECEIVED, RECEIVED as u32),
            (register::ENABLE, u32::MAX),
            (register::COMMAND, RUN),
        ] {
            self.write(register, value);
        }
    }

    /// The host does the request that it got first, and what follows from it. False when there is none.
    pub(super) fn finish(&mut self, which: usize) -> bool {
        let done = self.host.lock().unwrap().finish(which);
        if done {
            self.bare.event();
            self.settle();
        }
        done
    }

    pub(super) fn finish_all(&mut self) {
        while self.finish(0) {}
    }

    pub(super) fn pause_and_resume(&mut self) {
        self.bare.drain();
        assert!(self.host.lock().unwrap().waiting.is_empty());
        self.bare.start();
        self.settle();
    }
}

//! A controller with its threads, as the machine has it.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::Arc,
    time::{Duration, Instant},
};

use block::RawImage;
use proptest::{prelude::*, sample::Index};
use prost::Message;
use vmm_base::GuestMemory;

use super::*;
use crate::{
    ahci::{Ahci, Drive, DriveOptions, Parts},
    component::Component,
    state::{Section, message},
    virtio::{
        blk::{BlkControl, OnError},
        rate::{Limiter, Limits},
        testing::{MockMsi, MockSink, PATIENCE},
    },
};

/// Data of the message that the controller sends.
const VECTOR: u32 = 0x41;
/// From the registers of the disk's port to those of the drive's.
const PORT: u64 = 3 * 0x80;

/// A machine with a disk at port 0 and a CD-ROM drive at port 3.
struct Machine {
    memory: GuestMemory,
    msi: Arc<MockMsi>,
    sink: Arc<MockSink>,
    files: [File; 2],
    controls: Vec<BlkControl>,
    device: Ahci,
}

fn file(seed: u8) -> File {
    let file = tempfile::tempfile().unwrap();
    let content: Vec<u8> = (0..CAPACITY).map(|at| (at / 512) as u8 ^ seed).collect();
    file.write_all_at(&content, 0).unwrap();
    file
}

impl Machine {
    fn new() -> Self {
        let ranges = [(GuestAddress(0), REGION as usize)];
        Self::on(
            GuestMemory::from_ranges(&ranges).unwrap(),
            [file(0), file(1)],
            None,
        )
    }

    fn on(memory: GuestMemory, files: [File; 2], limiter: Option<&Arc<Limiter>>) -> Self {
        let (msi, sink): (Arc<MockMsi>, Arc<MockSink>) = Default::default();
        let drive = |cdrom: bool, file: &File| {
            let options = DriveOptions {
                serial: "serial".into(),
                limiter: limiter.filter(|_| !cdrom).cloned(),
                ..options(cdrom, OnError::Report)
            };
            let image = RawImage::open(file.try_clone().unwrap().into(), cdrom).unwrap();
            Drive::new(Box::new(image), options).unwrap()
        };
        let drives = vec![(3, drive(true, &files[1])), (0, drive(false, &files[0]))];
        let controls = drives.iter().rev().map(|(_, drive)| drive.control()).collect();
        let parts = Parts {
            name: "sata".into(),
            memory: memory.clone(),
            msi: &*msi,
            sink: sink.clone(),
        };
        Self {
            device: Ahci::new(parts, drives).unwrap(),
            memory,
            msi,
            sink,
            files,
            controls,
        }
    }

    /// The same in another process, with a saved state.
    fn restored(&self, section: &Section) -> Result<Self, crate::state::StateError> {
        let files = self.files.each_ref().map(|file| file.try_clone().unwrap());
        let mut machine = Self::on(self.memory.clone(), files, None);
        machine.device.restore(section)?;
        Ok(machine)
    }

    fn config(&self, offset: usize, data: &[u8]) {
        let function = self.device.function();
        let _none = function.lock().unwrap().write_config(offset, data);
    }

    fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.device
            .function()
            .lock()
            .unwrap()
            .read_bar(5, offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u64, value: u32) {
        let function = self.device.function();
        let _none = function
            .lock()
            .unwrap()
            .write_bar(5, offset, &value.to_le_bytes());
    }

    /// Sets the function, the controller and its ports up.
    fn start(&self) {
        self.config(0x44, &0xfee0_0000_u32.to_le_bytes());
        self.config(0x4c, &VECTOR.to_le_bytes());
        self.config(0x42, &[1, 0]);
        self.config(0x04, &[6, 0]);
        for port in [0, PORT] {
            for (register, value) in [
                (register::LIST, LIST as u32),
                (register::RECEIVED, RECEIVED as u32),
                (register::ENABLE, u32::MAX),
                (register::COMMAND, RUN),
            ] {
                self.write(register + port, value);
            }
        }
        self.write(register::CONTROL, 2);
    }

    fn issue(&self, port: u64, slot: u32, request: &Request) {
        request.put(&self.memory, slot);
        self.write(register::ISSUE + port, 1 << slot);
    }

    fn wait(&self, port: u64) {
        let done = || self.read(register::ISSUE + port) == 0;
        assert!(
            self.msi.wait_until(done),
            "{:#x}",
            self.read(register::TASK_FILE + port)
        );
        self.write(register::INTERRUPT + port, u32::MAX);
        self.write(register::INTERRUPTS, u32::MAX);
    }

    /// Reads a sector of the disk and a block of the CD-ROM.
    fn probe(&self) {
        self.memory.write_slice(&[0; 4096], GuestAddress(DATA)).unwrap();
        self.issue(0, 0, &transfer(0x25, 77, 1));
        self.wait(0);
        assert_eq!(self.memory.read_obj::<u8>(GuestAddress(DATA)).unwrap(), 77);
        let read = Request {
            command: 0xa0,
            features: 1,
            packet: vec![0x28, 0, 0, 0, 0, 5, 0, 0, 1],
            buffers: vec![(DATA, 2048)],
            ..Request::default()
        };
        self.issue(PORT, 1, &read);
        self.wait(PORT);
        assert_eq!(self.memory.read_obj::<u8>(GuestAddress(DATA)).unwrap(), 20 ^ 1);
    }

    fn pause(&mut self) {
        self.device.pause(Instant::now() + PATIENCE).unwrap();
    }

    fn reset(&mut self) {
        while self.device.reset().is_err() {}
        self.device.function().lock().unwrap().reset();
    }
}

#[test]
fn function_is_the_ahci_controller_of_ich9() {
    let machine = Machine::new();
    let function = machine.device.function();
    let config = function.lock().unwrap().config().clone();
    assert_eq!(
        (config.read_u32(0), config.read_u32(8)),
        (0x2922_8086, 0x0106_0102)
    );
    let bars: Vec<_> = config.bars().map(|(bar, _, size)| (bar, size)).collect();
    assert_eq!(bars, [(5, 0x1000)]);
    assert_eq!((machine.read(0x00) & 0x1f, machine.read(0x0c)), (3, 1 << 3 | 1));
}

#[test]
fn drives_complete_commands_with_interrupts() {
    let machine = Machine::new();
    machine.start();
    machine.probe();
    assert!(machine.msi.count(VECTOR) >= 2);
    assert_eq!(machine.sink.events(), []);
}

#[test]
fn no_command_runs_without_bus_mastering() {
    let machine = Machine::new();
    machine.start();
    machine.probe();
    machine.config(0x04, &[2, 0]);
    let sent = machine.msi.count(VECTOR);
    machine.issue(0, 0, &transfer(0x35, 0, 1));
    assert_eq!(machine.read(register::ISSUE), 1);
    assert_eq!(machine.controls[0].stats().write.requests, 0);
    machine.config(0x04, &[6, 0]);
    machine.wait(0);
    assert!(machine.msi.count(VECTOR) > sent);
}

#[test]
fn restored_controller_carries_out_what_was_issued() {
    let mut machine = Machine::new();
    machine.start();
    machine.probe();
    for _generation in 0..3 {
        machine.pause();
        // The notification is lost with the old process.
        machine.issue(0, 3, &transfer(0x25, 200, 1));
        let section = machine.device.save().unwrap();
        let other = machine.restored(&section).unwrap();
        assert_eq!(other.device.save().unwrap(), section);
        machine = other;
        assert_eq!(machine.read(register::ISSUE), 1 << 3);
        machine.device.resume().unwrap();
        machine.wait(0);
        assert_eq!(machine.memory.read_obj::<u8>(GuestAddress(DATA)).unwrap(), 200);
        machine.probe();
    }
    assert_eq!(machine.sink.events(), []);
}

#[test]
fn running_controller_is_not_saved_or_restored() {
    let mut machine = Machine::new();
    machine.start();
    assert!(machine.device.save().is_err());
    machine.pause();
    let section = machine.device.save().unwrap();
    assert!(machine.device.restore(&section).is_err());
    machine.device.resume().unwrap();
    machine.probe();
}

#[test]
fn reset_machine_finds_the_controller_as_after_power_on() {
    let mut machine = Machine::new();
    let registers = |machine: &Machine| (0..0x100).map(|at| machine.read(at * 4)).collect::<Vec<_>>();
    let before = registers(&machine);
    machine.start();
    machine.probe();
    machine.issue(0, 0, &transfer(0x35, 0, 1));
    machine.reset();
    assert_eq!(registers(&machine), before);
    machine.start();
    machine.probe();
}

#[test]
fn throttled_commands_pass_after_their_time() {
    let limiter = Limiter::new(Limits {
        operations_per_second: 200,
        burst_operations: 1,
        ..Limits::default()
    });
    let ranges = [(GuestAddress(0), REGION as usize)];
    let memory = GuestMemory::from_ranges(&ranges).unwrap();
    let mut machine = Machine::on(memory, [file(0), file(1)], Some(&limiter));
    machine.start();
    let begin = Instant::now();
    for slot in 0..8 {
        transfer(0x25, 1, 1).put(&machine.memory, slot);
    }
    machine.write(register::ISSUE, 0xff);
    // A pause loses none of them.
    machine.pause();
    machine.device.resume().unwrap();
    machine.wait(0);
    assert!(begin.elapsed() >= Duration::from_millis(25));
    assert_eq!(machine.controls[0].stats().read.requests, 8);
}

#[test]
fn larger_disk_is_found_by_the_next_identification() {
    let machine = Machine::new();
    machine.start();
    machine.controls[0].grow(Some(2 * CAPACITY)).unwrap();
    machine.issue(0, 0, &page(0xec));
    machine.wait(0);
    let mut data = [0; SECTOR];
    machine.memory.read_slice(&mut data, GuestAddress(DATA)).unwrap();
    assert_eq!(u64::from(word(&data, 100)), 2 * CAPACITY / 512);
}

#[test]
fn state_of_the_first_version_is_still_taken() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/ahci.bin");
    let mut machine = Machine::new();
    if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
        machine.start();
        machine.probe();
        machine.pause();
        machine.issue(0, 3, &transfer(0x25, 200, 1));
        std::fs::write(path, machine.device.save().unwrap().encode_to_vec()).unwrap();
        machine = Machine::new();
    }
    let golden = std::fs::read(path).unwrap();
    let section = Section::decode(golden.as_slice()).unwrap();
    transfer(0x25, 200, 1).put(&machine.memory, 3);
    machine.device.restore(&section).unwrap();
    assert!(machine.device.save().unwrap().encode_to_vec() == golden);
    machine.device.resume().unwrap();
    machine.wait(0);
    machine.probe();
}

#[test]
fn damaged_state_does_no_harm_that_a_reset_does_not_end() {
    let mut machine = Machine::new();
    machine.start();
    machine.probe();
    machine.pause();
    machine.issue(0, 3, &transfer(0x25, 200, 1));
    let section = machine.device.save().unwrap();
    let config = ProptestConfig {
        cases: 96,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(changes in prop::collection::vec((any::<Index>(), any::<u8>()), 1..3))| {
        let mut damaged = section.clone();
        for (at, value) in &changes {
            let length = damaged.payload.len();
            damaged.payload[at.index(length)] = *value;
        }
        // A smaller capacity is a good state, which a reset keeps: it is the size that the driver knows.
        let state = damaged.open::<message::Ahci>();
        if state.is_ok_and(|state| state.ports.iter().any(|port| port.capacity != CAPACITY)) {
            return Ok(());
        }
        if let Ok(mut machine) = machine.restored(&damaged) {
            machine.device.resume().unwrap();
            machine.reset();
            machine.start();
            machine.probe();
        }
    });
}

#[test]
fn states_of_other_drives_are_refused() {
    let mut machine = Machine::new();
    machine.pause();
    let good: message::Ahci = machine.device.save().unwrap().open().unwrap();
    crate::state::refuses(
        &good,
        &[
            ("ports", |state| state.ports.truncate(1)),
            ("ports.disk", |state| state.ports.swap(0, 1)),
            ("ports.capacity", |state| state.ports[0].capacity += 1),
            ("ports.capacity", |state| state.ports[0].capacity *= 2),
            ("ports.slot", |state| state.ports[0].slot = 32),
            ("ports.status", |state| state.ports[0].status = 256),
            ("ports.disk.ncq_error", |state| {
                state.ports[0].disk.as_mut().unwrap().ncq_error = vec![1];
            }),
            ("ports.cdrom.event", |state| {
                state.ports[1].cdrom.as_mut().unwrap().event = 4;
            }),
            ("interrupt_status", |state| state.interrupt_status = 4),
            ("pci", |state| state.pci = None),
            ("msi", |state| state.msi = None),
        ],
        |state| Machine::new().device.restore(&Section::new("sata", state)),
    );
}

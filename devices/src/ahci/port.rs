//! A port: its registers (AHCI 1.3.1, 3.3) and the device behind it.
//!
//! vCPUs write registers, and the port's worker completes commands, each with the port locked. Neither waits for the
//! other:
//!
//! - A command that is issued (PxCI) waits until the worker *fetches* it. It is in process until the worker gives it
//!   back with [`Port::complete`].
//! - To stop the port (PxCMD.ST), to reset the device or the controller begins another *era*. Commands that the worker
//!   fetched in an earlier era complete without effect, and PxCMD.CR stays set until the last of them has.
//! - After an error the port *halts*: no command is fetched before the port is stopped.

use vmm_base::GuestMemory;

use super::{
    ata::{self, Disk},
    atapi::{self, Cdrom},
    fis::{BusError, Fetched, Received, Registers},
};
use crate::virtio::blk::plan::Plan;

/// Status: busy, ready, seek complete, data request, error.
const BUSY: u8 = 1 << 7;
const READY: u8 = 1 << 6 | 1 << 4;
const DATA_REQUEST: u8 = 1 << 3;
const ERROR: u8 = 1 << 0;
/// Error after a reset: diagnostics passed.
const DIAGNOSTICS_PASSED: u8 = 1;

/// PxCMD: start, FIS receive enable, device is ATAPI, drive LED on ATAPI: bits that a driver may write.
const CMD_START: u32 = 1 << 0;
const CMD_RECEIVE: u32 = 1 << 4;
const CMD_WRITABLE: u32 = CMD_START | CMD_RECEIVE | 1 << 24 | 1 << 25;
/// PxCMD: spun up and powered, always.
const CMD_FIXED: u32 = 1 << 1 | 1 << 2;
/// PxCMD: command list override, which a driver sets to clear busy.
const CMD_OVERRIDE: u32 = 1 << 3;
/// PxCMD: FIS receive and the command list run.
const CMD_RECEIVES: u32 = 1 << 14;
const CMD_RUNS: u32 = 1 << 15;

/// PxIS and PxIE.
mod interrupt {
    /// Register FIS, PIO Setup FIS, Set Device Bits FIS.
    pub(super) const REGISTER: u32 = 1 << 0;
    pub(super) const PIO_SETUP: u32 = 1 << 1;
    pub(super) const DEVICE_BITS: u32 = 1 << 3;
    /// The device was reset: a copy of PxSERR.DIAG.X.
    pub(super) const CONNECT: u32 = 1 << 6;
    /// More data than buffers.
    pub(super) const OVERFLOW: u32 = 1 << 24;
    /// Host bus fatal error; task file error.
    pub(super) const BUS_FATAL: u32 = 1 << 29;
    pub(super) const TASK_FILE: u32 = 1 << 30;
    /// The bits that there are.
    pub(super) const ALL: u32 = 0xfdc0_00ff;
}

/// PxSERR: exchanged, after a reset of the device.
const SERR_EXCHANGED: u32 = 1 << 26;
/// PxSSTS: a device, with a link of the second generation, which is active; a device and no link.
const SSTS_ACTIVE: u32 = 0x123;
const SSTS_OFFLINE: u32 = 0x001;
/// PxSCTL: the bits that there are; device detection, and its value for a reset.
const SCTL_WRITABLE: u32 = 0xfff;
const SCTL_DETECTION: u32 = 0xf;
const SCTL_RESET: u32 = 1;

/// Registers of a port, by their offset.
mod register {
    pub(super) const LIST: u64 = 0x00;
    pub(super) const LIST_HIGH: u64 = 0x04;
    pub(super) const RECEIVED: u64 = 0x08;
    pub(super) const RECEIVED_HIGH: u64 = 0x0c;
    pub(super) const INTERRUPT: u64 = 0x10;
    pub(super) const INTERRUPT_ENABLE: u64 = 0x14;
    pub(super) const COMMAND: u64 = 0x18;
    pub(super) const TASK_FILE: u64 = 0x20;
    pub(super) const SIGNATURE: u64 = 0x24;
    pub(super) const SATA_STATUS: u64 = 0x28;
    pub(super) const SATA_CONTROL: u64 = 0x2c;
    pub(super) const SATA_ERROR: u64 = 0x30;
    pub(super) const ACTIVE: u64 = 0x34;
    pub(super) const ISSUE: u64 = 0x38;
}

/// Properties of a drive that its driver reads.
#[derive(Clone, Debug)]
pub(super) struct Medium {
    pub serial: String,
    /// In bytes.
    pub physical_block: u32,
    pub discard: bool,
}

/// How the data of a command goes, and with that its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// Ends with a Register FIS; also commands without data.
    Dma,
    /// Data to the host, which a PIO Setup FIS announces and ends.
    Pio,
    /// Ends with a Set Device Bits FIS.
    Queued,
    /// PACKET by DMA: as `Dma`.
    Packet,
    /// PACKET by PIO: a PIO Setup FIS for the data, a Register FIS at the end.
    PacketPio,
}

/// The device's decision on a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// An operation on the image.
    Medium {
        plan: Plan,
        /// A write completes when it is stable.
        stable: bool,
        protocol: Protocol,
    },
    /// Ranges to discard, in so many blocks of data.
    Trim { blocks: u16 },
    /// Data for the driver.
    Reply { data: Vec<u8>, protocol: Protocol },
    /// Nothing more; the driver gets these registers.
    Done(Registers),
    /// An error: the Error register.
    Fail(u8),
    /// An error, with the signature of the device.
    Signature(u8),
    /// A reset of the device; the driver gets its signature.
    Reset,
}

impl Answer {
    pub(super) fn medium(plan: Plan, protocol: Protocol) -> Self {
        Self::Medium {
            plan,
            stable: false,
            protocol,
        }
    }

    pub(super) fn reply(data: Vec<u8>, protocol: Protocol) -> Self {
        Self::Reply { data, protocol }
    }

    pub(super) fn done(registers: &Registers) -> Self {
        Self::Done(*registers)
    }
}

/// End of a command.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub protocol: Protocol,
    /// Registers that the driver gets.
    pub registers: Registers,
    /// Bytes transferred.
    pub bytes: u32,
    pub result: Result<(), Failure>,
}

/// Reason why a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The device reports this Error register.
    Device(u8),
    /// The command's buffers are too short.
    Overflow,
    /// Guest memory is not where a structure should be.
    Bus,
}

impl From<BusError> for Failure {
    fn from(_: BusError) -> Self {
        Self::Bus
    }
}

/// The device at a port.
#[derive(Clone, Debug)]
pub(super) enum Device {
    Disk(Disk),
    Cdrom(Cdrom),
}

impl Device {
    /// Registers after a reset: the signature (ATA8-ACS, 9.12).
    fn signature(&self) -> Registers {
        let lba = match self {
            Self::Disk(_) => 0x00_0001,
            Self::Cdrom(_) => 0xeb_1401,
        };
        Registers {
            lba,
            count: 1,
            ..Registers::default()
        }
    }

    fn reset(&mut self) {
        match self {
            Self::Disk(disk) => *disk = Disk::default(),
            Self::Cdrom(drive) => drive.reset(),
        }
    }

    /// The Error register for a read that the host cannot carry out.
    pub(super) fn unreadable(&mut self) -> u8 {
        match self {
            Self::Disk(_) => ata::UNCORRECTABLE,
            Self::Cdrom(drive) => {
                drive.sense = atapi::UNREADABLE;
                atapi::UNREADABLE.error()
            }
        }
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Port {
    pub device: Device,
    pub list: u64,
    pub received: u64,
    /// PxIS without its copies of other registers.
    pub interrupt: u32,
    pub enabled: u32,
    /// The writable bits of PxCMD.
    pub command: u32,
    pub status: u8,
    pub error: u8,
    pub control: u32,
    pub sata_error: u32,
    pub active: u32,
    pub issued: u32,
    pub halted: bool,
    /// The slot of the last command that is not queued (PxCMD.CCS).
    pub slot: u32,
    /// Commands that the worker has fetched, as a bit for each slot.
    pub fetched: u32,
    /// Counts the stops and resets. See the module.
    pub era: u32,
}

impl Port {
    pub(super) fn new(device: Device) -> Self {
        Self {
            device,
            list: 0,
            received: 0,
            interrupt: 0,
            enabled: 0,
            command: 0,
            status: READY,
            error: DIAGNOSTICS_PASSED,
            control: 0,
            sata_error: 0,
            active: 0,
            issued: 0,
            halted: false,
            slot: 0,
            fetched: 0,
            era: 0,
        }
    }

    /// Reads the register at `offset`; reserved ones are 0.
    pub(super) fn read(&self, offset: u64) -> u32 {
        let (list, received) = (halves(self.list), halves(self.received));
        match offset {
            register::LIST => list.0,
            register::LIST_HIGH => list.1,
            register::RECEIVED => received.0,
            register::RECEIVED_HIGH => received.1,
            register::INTERRUPT => self.interrupts(),
            register::INTERRUPT_ENABLE => self.enabled,
            register::COMMAND => self.command_register(),
            register::TASK_FILE => u32::from(self.error) << 8 | u32::from(self.status),
            register::SIGNATURE => {
                let Registers { lba, count, .. } = self.device.signature();
                halves(lba << 8).0 | u32::from(count)
            }
            register::SATA_STATUS if self.resets() => SSTS_OFFLINE,
            register::SATA_STATUS => SSTS_ACTIVE,
            register::SATA_CONTROL => self.control,
            register::SATA_ERROR => self.sata_error,
            register::ACTIVE => self.active,
            register::ISSUE => self.issued,
            _ => 0,
        }
    }

    /// Writes the register at `offset`. Returns whether the worker has to look at the port.
    pub(super) fn write(&mut self, offset: u64, value: u32) -> bool {
        match offset {
            register::LIST => set_half(&mut self.list, 0, value & !0x3ff),
            register::LIST_HIGH => set_half(&mut self.list, 32, value),
            register::RECEIVED => set_half(&mut self.received, 0, value & !0xff),
            register::RECEIVED_HIGH => set_half(&mut self.received, 32, value),
            register::INTERRUPT => self.interrupt &= !value,
            register::INTERRUPT_ENABLE => self.enabled = value & interrupt::ALL,
            register::COMMAND => return self.write_command(value),
            register::SATA_CONTROL => return self.write_control(value & SCTL_WRITABLE),
            register::SATA_ERROR => self.sata_error &= !value,
            register::ACTIVE if self.starts() => self.active |= value,
            register::ISSUE if self.starts() => {
                let new = value & !self.issued != 0;
                self.issued |= value;
                return new && !self.halted;
            }
            _ => {}
        }
        false
    }

    /// Whether the port has an interrupt that its driver wants.
    pub(super) fn is_pending(&self) -> bool {
        self.interrupts() & self.enabled != 0
    }

    /// Commands that the worker may fetch, as a bit for each slot.
    pub(super) fn ready(&self) -> u32 {
        if self.starts() && !self.halted && !self.resets() {
            self.issued & !self.fetched
        } else {
            0
        }
    }

    /// A command that is not queued is carried out.
    pub(super) fn begin(&mut self, slot: u32) {
        self.slot = slot;
        self.status = BUSY | READY;
    }

    /// The worker gives the command in `slot`, which it fetched in `era`, back.
    pub(super) fn complete(
        &mut self,
        memory: &GuestMemory,
        slot: u32,
        era: u32,
        command: Option<&Fetched>,
        end: &End,
    ) {
        let bit = 1_u32.checked_shl(slot).unwrap_or(0);
        self.fetched &= !bit;
        if era != self.era {
            // The device itself is ready again.
            if self.fetched == 0 {
                self.status &= !(BUSY | DATA_REQUEST);
            }
            return;
        }
        let result = end
            .result
            .and_then(|()| Ok(self.succeed(memory, bit, command, end)?));
        if let Err(failure) = result
            && self.fail(memory, slot, end, failure).is_err()
        {
            self.interrupt |= interrupt::BUS_FATAL;
        }
    }

    fn succeed(
        &mut self,
        memory: &GuestMemory,
        bit: u32,
        command: Option<&Fetched>,
        end: &End,
    ) -> Result<(), BusError> {
        if let Some(command) = command.filter(|_| end.protocol != Protocol::Queued) {
            command.write_count(memory, end.bytes)?;
        }
        let registers = end.registers;
        let pio = Received::PioSetup {
            status: READY,
            registers,
            length: u16::try_from(end.bytes).unwrap_or(u16::MAX),
        };
        let register = Received::Register {
            status: READY,
            error: 0,
            registers,
        };
        let bits = Received::SetDeviceBits {
            status: READY,
            error: 0,
            completed: bit,
        };
        let (first, second) = match end.protocol {
            Protocol::Dma | Protocol::Packet => (register, None),
            Protocol::PacketPio if end.bytes == 0 => (register, None),
            Protocol::PacketPio => (pio, Some(register)),
            Protocol::Pio => (pio, None),
            Protocol::Queued => (bits, None),
        };
        for fis in [Some(first), second].into_iter().flatten() {
            self.receive(memory, fis)?;
        }
        (self.status, self.error) = (READY, 0);
        self.issued &= !bit;
        if end.protocol == Protocol::Queued {
            self.active &= !bit;
        }
        Ok(())
    }

    /// Halts the port. The command stays issued (AHCI 1.3.1, 6.2.2).
    fn fail(&mut self, memory: &GuestMemory, slot: u32, end: &End, failure: Failure) -> Result<(), BusError> {
        self.halted = true;
        let error = match failure {
            Failure::Device(error) => error,
            Failure::Overflow => {
                self.interrupt |= interrupt::OVERFLOW;
                ata::ABORT
            }
            Failure::Bus => {
                self.interrupt |= interrupt::BUS_FATAL;
                return Ok(());
            }
        };
        (self.status, self.error) = (READY | ERROR, error);
        self.interrupt |= interrupt::TASK_FILE;
        let registers = end.registers;
        if end.protocol == Protocol::Queued {
            if let Device::Disk(disk) = &mut self.device {
                disk.note_error(&registers, slot, self.status, error);
            }
            let completed = 0;
            let status = self.status;
            return self.receive(
                memory,
                Received::SetDeviceBits {
                    status,
                    error,
                    completed,
                },
            );
        }
        let status = self.status;
        self.receive(
            memory,
            Received::Register {
                status,
                error,
                registers,
            },
        )
    }

    /// Stores a FIS of the device where the driver wants it.
    fn receive(&mut self, memory: &GuestMemory, fis: Received) -> Result<(), BusError> {
        if self.command & CMD_RECEIVE == 0 {
            return Ok(());
        }
        fis.post(memory, self.received)?;
        self.interrupt |= match fis {
            Received::Register { .. } => interrupt::REGISTER,
            Received::PioSetup { .. } => interrupt::PIO_SETUP,
            Received::SetDeviceBits { .. } => interrupt::DEVICE_BITS,
        };
        Ok(())
    }

    /// A reset of the device by a command: the registers for the driver.
    pub(super) fn reset_device(&mut self) -> Registers {
        self.device.reset();
        self.device.signature()
    }

    /// Registers with the signature of the device.
    pub(super) fn signature(&self) -> Registers {
        self.device.signature()
    }

    /// A reset of the controller, which keeps addresses (AHCI 1.3.1, 3.1.2: HR). Commands in process complete without
    /// effect.
    pub(super) fn reset(&mut self) {
        self.device.reset();
        *self = Self {
            list: self.list,
            received: self.received,
            fetched: self.fetched,
            era: self.era.wrapping_add(1),
            ..Self::new(self.device.clone())
        };
    }

    /// To the state after power-on. A tray stays as it is: a guest that has ejected its installer's medium boots without
    /// the medium.
    pub(super) fn power_on(&mut self) {
        self.reset();
        (self.list, self.received) = (0, 0);
    }

    /// Takes over a saved PxCMD.
    pub(super) fn set_command(&mut self, value: u32) {
        self.command = value & CMD_WRITABLE;
    }

    fn starts(&self) -> bool {
        self.command & CMD_START != 0
    }

    fn resets(&self) -> bool {
        self.control & SCTL_DETECTION == SCTL_RESET
    }

    fn interrupts(&self) -> u32 {
        let exchanged = self.sata_error & SERR_EXCHANGED != 0;
        self.interrupt | if exchanged { interrupt::CONNECT } else { 0 }
    }

    fn command_register(&self) -> u32 {
        let when = |on: bool, bit: u32| if on { bit } else { 0 };
        let runs = self.starts() || self.fetched != 0;
        let receives = self.command & CMD_RECEIVE != 0;
        self.command
            | CMD_FIXED
            | (self.slot & 0x1f) << 8
            | when(receives, CMD_RECEIVES)
            | when(runs, CMD_RUNS)
    }

    fn write_command(&mut self, value: u32) -> bool {
        let started = self.starts();
        self.command = value & CMD_WRITABLE;
        if value & CMD_OVERRIDE != 0 && !self.starts() {
            self.status &= !(BUSY | DATA_REQUEST);
        }
        if started && !self.starts() {
            return self.stop();
        }
        false
    }

    /// Begins another era without commands. Returns whether the worker has some of the last one.
    fn stop(&mut self) -> bool {
        self.era = self.era.wrapping_add(1);
        self.issued = 0;
        self.active = 0;
        self.slot = 0;
        self.halted = false;
        self.fetched != 0
    }

    fn write_control(&mut self, value: u32) -> bool {
        let before = self.resets();
        self.control = value;
        match (before, self.resets()) {
            // The device is off the link until the reset ends.
            (false, true) => self.stop(),
            (true, false) => {
                self.device.reset();
                (self.status, self.error) = (READY, DIAGNOSTICS_PASSED);
                self.sata_error |= SERR_EXCHANGED;
                false
            }
            _ => false,
        }
    }
}

fn halves(value: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
}

/// Replaces the 32 bits of `register` from bit `shift` on.
fn set_half(register: &mut u64, shift: u32, value: u32) {
    let mask = u64::from(u32::MAX).wrapping_shl(shift);
    *register = *register & !mask | u64::from(value).wrapping_shl(shift);
}

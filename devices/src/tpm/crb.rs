//! The command response buffer (TCG PC Client Platform TPM Profile for TPM 2.0 1.05, 6.5.3): registers
//! and data buffer of locality 0, the only locality.
//!
//! | offset | register |
//! |---|---|
//! | 0x00 | LOC_STATE: the locality is assigned |
//! | 0x08 | LOC_CTRL: request or relinquish the locality |
//! | 0x0c | LOC_STS: the locality is granted |
//! | 0x30 | INTF_ID, 64 bits |
//! | 0x40 | CTRL_REQ: ready or idle |
//! | 0x44 | CTRL_STS: idle |
//! | 0x48 | CTRL_CANCEL: has no effect, because swtpm cancels no command |
//! | 0x4c | CTRL_START: 1 while a command is in progress |
//! | 0x58 | size of the command, its address, size of the response, its address |
//! | 0x80 | data buffer for commands and responses |

use vmm_sys_util::eventfd::EventFd;

use crate::{
    bus::{BusDevice, Effect},
    state::{StateError, check, message},
};

/// Guest-physical address of the registers.
pub const ADDRESS: u32 = 0xfed4_0000;
/// Address of the control area for the ACPI table TPM2: of CTRL_REQ.
pub const CONTROL_AREA: u64 = ADDRESS as u64 + CTRL_REQ as u64;
/// Length of the registers and the buffer of a locality.
pub const LENGTH: u32 = 0x1000;

/// Length of the data buffer, and so of the longest command and response.
pub(super) const BUFFER: usize = BUFFER_BYTES as usize;
/// The same as the registers have it.
pub(super) const BUFFER_BYTES: u32 = 0xf80;
const _: () = assert!(DATA + BUFFER == LENGTH as usize);
/// Length of the header of commands and responses: tag, size, code.
pub(super) const HEADER: usize = 10;

const LOC_STATE: usize = 0x00;
const LOC_CTRL: usize = 0x08;
const LOC_STS: usize = 0x0c;
const INTF_ID: usize = 0x30;
const CTRL_REQ: usize = 0x40;
const CTRL_STS: usize = 0x44;
const CTRL_START: usize = 0x4c;
const COMMAND_SIZE: usize = 0x58;
const COMMAND_ADDRESS: usize = 0x5c;
const RESPONSE_SIZE: usize = 0x64;
const RESPONSE_ADDRESS: usize = 0x68;
const DATA: usize = 0x80;
/// Address of the data buffer.
const DATA_ADDRESS: u64 = ADDRESS as u64 + DATA as u64;

/// LOC_STATE. There was no D-RTM, so tpmEstablished, which is active low, is set.
const ESTABLISHED: u32 = 1 << 0;
const LOCALITY_ASSIGNED: u32 = 1 << 1;
const REGISTERS_VALID: u32 = 1 << 7;
/// LOC_CTRL.
const REQUEST_ACCESS: u32 = 1 << 0;
const RELINQUISH: u32 = 1 << 1;
/// LOC_STS.
const GRANTED: u32 = 1 << 0;
/// CTRL_REQ.
const COMMAND_READY: u32 = 1 << 0;
const GO_IDLE: u32 = 1 << 1;
/// CTRL_STS.
const IDLE: u32 = 1 << 1;
/// CTRL_START.
const START: u32 = 1 << 0;
/// INTF_ID: CRB interface, version 1 of it, transfers of 64 bytes, CRB supported, CRB selected. The
/// vendor is IBM, as with QEMU.
const INTERFACE: u64 = 1 | 1 << 4 | 3 << 11 | 1 << 14 | 1 << 17 | 0x1014 << 32;

/// Response codes (TPM 2.0 Library Specification, part 2, 6.6.3).
pub(super) const TPM_RC_FAILURE: u32 = 0x101;
pub(super) const TPM_RC_COMMAND_SIZE: u32 = 0x142;
/// Tag and size of a response that is a header alone: TPM_ST_NO_SESSIONS (part 2, 6.9).
const NO_SESSIONS: [u8; 6] = [0x80, 0x01, 0, 0, 0, 10];

/// A response with nothing but this code.
pub(super) fn response(code: u32) -> Vec<u8> {
    [&NO_SESSIONS[..], &code.to_be_bytes()].concat()
}

/// Length in a header: at least the header's, and at most the buffer's.
pub(super) fn length(header: &[u8]) -> Option<usize> {
    let length = u32::from_be_bytes(header.get(2..6)?.try_into().ok()?);
    let length = usize::try_from(length).ok()?;
    (HEADER..=BUFFER).contains(&length).then_some(length)
}

/// See the module.
pub(super) struct Crb {
    granted: bool,
    idle: bool,
    /// A command is in progress.
    executes: bool,
    buffer: Vec<u8>,
    /// Wakes the worker.
    wake: EventFd,
}

impl Crb {
    pub(super) fn new(wake: EventFd) -> Self {
        Self {
            granted: false,
            idle: true,
            executes: false,
            buffer: vec![0; BUFFER],
            wake,
        }
    }

    /// To the state after power-on. No command is in progress.
    pub(super) fn reset(&mut self) {
        self.granted = false;
        self.idle = true;
        self.buffer.fill(0);
    }

    pub(super) fn executes(&self) -> bool {
        self.executes
    }

    /// A copy of the command in progress, or the code of the response to a command of an invalid length.
    ///
    /// swtpm takes a prefix with a locality in front of a command. The size in such a prefix is at another
    /// place, where a value of this bound is none of a prefix, so a guest cannot choose another locality.
    pub(super) fn command(&self) -> Option<Result<Vec<u8>, u32>> {
        self.executes.then(|| {
            let length = length(&self.buffer).ok_or(TPM_RC_COMMAND_SIZE)?;
            let command = self.buffer.get(..length).ok_or(TPM_RC_COMMAND_SIZE)?;
            Ok(command.to_vec())
        })
    }

    /// Ends the command in progress with this response, which fits the buffer.
    pub(super) fn complete(&mut self, response: &[u8]) {
        for (place, byte) in self.buffer.iter_mut().zip(response) {
            *place = *byte;
        }
        self.executes = false;
    }

    /// The state of the registers. No command is in progress.
    pub(super) fn save(&self) -> message::Tpm {
        message::Tpm {
            granted: self.granted,
            ready: !self.idle,
            buffer: self.buffer.clone(),
            ..message::Tpm::default()
        }
    }

    pub(super) fn restore(&mut self, saved: &message::Tpm) -> Result<(), StateError> {
        check(saved.buffer.len() == BUFFER, "buffer", "it has another length")?;
        self.granted = saved.granted;
        self.idle = !saved.ready;
        self.buffer.clone_from(&saved.buffer);
        Ok(())
    }

    /// All registers before the data buffer.
    fn registers(&self) -> [u8; DATA] {
        let mut registers = [0; DATA];
        let mut put = |at: usize, value: &[u8]| {
            for (place, byte) in registers.iter_mut().skip(at).zip(value) {
                *place = *byte;
            }
        };
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        let state = ESTABLISHED | REGISTERS_VALID | flag(self.granted, LOCALITY_ASSIGNED);
        put(LOC_STATE, &state.to_le_bytes());
        put(LOC_STS, &flag(self.granted, GRANTED).to_le_bytes());
        put(INTF_ID, &INTERFACE.to_le_bytes());
        put(CTRL_STS, &flag(self.idle, IDLE).to_le_bytes());
        put(CTRL_START, &flag(self.executes, START).to_le_bytes());
        let (size, address) = (BUFFER_BYTES, DATA_ADDRESS);
        put(COMMAND_SIZE, &size.to_le_bytes());
        put(COMMAND_ADDRESS, &address.to_le_bytes());
        put(RESPONSE_SIZE, &size.to_le_bytes());
        put(RESPONSE_ADDRESS, &address.to_le_bytes());
        registers
    }

    fn write_register(&mut self, offset: usize, value: u32) {
        match offset {
            LOC_CTRL if value & RELINQUISH != 0 => self.granted = false,
            LOC_CTRL if value & REQUEST_ACCESS != 0 => self.granted = true,
            CTRL_REQ if value & GO_IDLE != 0 => self.idle = true,
            CTRL_REQ if value & COMMAND_READY != 0 => self.idle = false,
            CTRL_START if value & START != 0 && self.granted && !self.executes => {
                self.executes = true;
                // Fails only when the counter is full, and then it is readable.
                let _full = self.wake.write(1);
            }
            _ => {}
        }
    }
}

impl BusDevice for Crb {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let registers = match offset < DATA {
            true => self.registers(),
            false => [0; DATA],
        };
        let all = registers.iter().chain(&self.buffer).skip(offset);
        for (place, byte) in data.iter_mut().zip(all) {
            *place = *byte;
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        match offset.checked_sub(DATA) {
            Some(at) if !self.executes => {
                for (place, byte) in self.buffer.iter_mut().skip(at).zip(data) {
                    *place = *byte;
                }
            }
            // The command is in progress.
            Some(_) => {}
            None => {
                let mut value = [0; 4];
                for (place, byte) in value.iter_mut().zip(data) {
                    *place = *byte;
                }
                self.write_register(offset, u32::from_le_bytes(value));
            }
        }
        Effect::None
    }
}

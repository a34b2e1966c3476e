//! Structures in guest memory: command headers, command tables and received FISes (AHCI 1.3.1, 4.2; Serial ATA 3.3,
//! 10.5). The content is the guest's: a structure is copied once, and each address is checked at its use.

use vm_memory::{Bytes, GuestAddress};
use vmm_base::{GuestMemory, ram::Segment};

/// Slots of a command list.
pub(super) const SLOTS: u32 = 32;
/// Most buffers of a command. Linux uses up to 168, FreeBSD 257.
pub(super) const MAX_BUFFERS: u32 = 1024;

/// Bytes of a command header.
const HEADER: u64 = 32;
/// Offset of the count of transferred bytes in a header.
const BYTE_COUNT: u64 = 4;
/// Bytes of a command FIS in a command table.
const COMMAND_FIS: usize = 20;
/// Offset of the ATAPI command in a command table, and its length.
const PACKET: u64 = 0x40;
pub(super) const PACKET_LENGTH: usize = 16;
/// Offset of the region descriptors in a command table, and their length.
const REGIONS: u64 = 0x80;
const REGION: u64 = 16;
/// Bits of the length in a region descriptor, which is the length less one.
const REGION_LENGTH: u32 = 0x3f_ffff;

/// Type of the command FIS: Register, host to device.
const TYPE_COMMAND: u8 = 0x27;
/// Command FIS: it has a command, not a new content of the Device Control register.
const IS_COMMAND: u8 = 1 << 7;
/// FIS to the host: it causes an interrupt.
const INTERRUPT: u8 = 1 << 6;
/// PIO Setup FIS: the data goes to the host.
const TO_HOST: u8 = 1 << 5;

/// Guest memory is not where a structure should be: a fatal error of the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BusError;

/// Registers of a command (ATA8-ACS, 4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Registers {
    pub command: u8,
    pub features: u16,
    /// 48 bits.
    pub lba: u64,
    pub count: u16,
    pub device: u8,
}

/// Content of a command FIS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommandFis {
    Command(Registers),
    /// A new content of the Device Control register.
    Control(u8),
}

impl CommandFis {
    /// `None` if it is another FIS.
    fn new(fis: [u8; COMMAND_FIS]) -> Option<Self> {
        let [
            kind,
            flags,
            command,
            features,
            lba0,
            lba1,
            lba2,
            device,
            lba3,
            lba4,
            lba5,
            features_high,
            count,
            count_high,
            _icc,
            control,
            ..,
        ] = fis;
        match (kind, flags & IS_COMMAND) {
            (TYPE_COMMAND, 0) => Some(Self::Control(control)),
            (TYPE_COMMAND, _) => Some(Self::Command(Registers {
                command,
                features: u16::from_le_bytes([features, features_high]),
                lba: u64::from_le_bytes([lba0, lba1, lba2, lba3, lba4, lba5, 0, 0]),
                count: u16::from_le_bytes([count, count_high]),
                device,
            })),
            _ => None,
        }
    }
}

/// A command as its slot has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetched {
    pub fis: CommandFis,
    pub packet: [u8; PACKET_LENGTH],
    /// Guest-physical addresses of header and command table.
    header: u64,
    table: u64,
    /// Region descriptors.
    regions: u32,
}

impl Fetched {
    /// Copies the command in `slot` of the list at `list`.
    pub(super) fn read(memory: &GuestMemory, list: u64, slot: u32) -> Result<Self, BusError> {
        let header = list
            .checked_add(HEADER.saturating_mul(slot.into()))
            .ok_or(BusError)?;
        let [flags, _count, low, high] = words(read::<16>(memory, header)?);
        let table = u64::from(high) << 32 | u64::from(low & !0x7f);
        let packet = table.checked_add(PACKET).ok_or(BusError)?;
        Ok(Self {
            fis: CommandFis::new(read(memory, table)?).ok_or(BusError)?,
            packet: read(memory, packet)?,
            header,
            table,
            regions: flags >> 16,
        })
    }

    /// Appends the buffers of the command's first `length` bytes. Returns the bytes that there are, which are fewer if
    /// the buffers are shorter or more than [`MAX_BUFFERS`].
    pub(super) fn buffers(
        &self,
        memory: &GuestMemory,
        length: u32,
        segments: &mut Vec<Segment>,
    ) -> Result<u32, BusError> {
        let mut left = length;
        let mut at = self.table.checked_add(REGIONS).ok_or(BusError)?;
        for _ in 0..self.regions.min(MAX_BUFFERS) {
            if left == 0 {
                break;
            }
            let [low, high, _reserved, size] = words(read::<16>(memory, at)?);
            let length = (size & REGION_LENGTH).saturating_add(1).min(left);
            segments.push(Segment {
                address: GuestAddress(u64::from(high) << 32 | u64::from(low & !1)),
                length,
            });
            left = left.saturating_sub(length);
            at = at.checked_add(REGION).ok_or(BusError)?;
        }
        Ok(length.saturating_sub(left))
    }

    /// Notes in the header how many bytes were transferred.
    pub(super) fn write_count(&self, memory: &GuestMemory, bytes: u32) -> Result<(), BusError> {
        write(
            memory,
            self.header.saturating_add(BYTE_COUNT),
            &bytes.to_le_bytes(),
        )
    }
}

/// Copies `data` into the buffers.
pub(super) fn scatter(memory: &GuestMemory, segments: &[Segment], data: &[u8]) -> Result<(), BusError> {
    let mut left = data;
    for segment in segments {
        let length = left.len().min(segment.length as usize);
        let (now, rest) = left.split_at_checked(length).unwrap_or((left, &[]));
        write(memory, segment.address.0, now)?;
        left = rest;
    }
    Ok(())
}

/// Copies the content of the buffers, so many bytes at most as `data` has.
pub(super) fn gather(memory: &GuestMemory, segments: &[Segment], data: &mut [u8]) -> Result<(), BusError> {
    let mut left = data;
    for segment in segments {
        let length = left.len().min(segment.length as usize);
        let (now, rest) = std::mem::take(&mut left)
            .split_at_mut_checked(length)
            .ok_or(BusError)?;
        memory.read_slice(now, segment.address).map_err(|_| BusError)?;
        left = rest;
    }
    Ok(())
}

/// A FIS from a device, to be received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// Register: a command has ended.
    Register {
        status: u8,
        error: u8,
        registers: Registers,
    },
    /// PIO Setup: data of that length to the host, and the status after it.
    PioSetup {
        status: u8,
        registers: Registers,
        length: u16,
    },
    /// Set Device Bits: these queued commands have ended, or one has failed.
    SetDeviceBits { status: u8, error: u8, completed: u32 },
}

/// Status before the data of a PIO transfer: ready, with data.
const STATUS_DATA: u8 = 0x58;

impl Received {
    /// Writes it to the area at `area`.
    pub(super) fn post(self, memory: &GuestMemory, area: u64) -> Result<(), BusError> {
        let registers = |kind: u8, flags: u8, status: u8, error: u8, registers: &Registers| {
            let [lba0, lba1, lba2, lba3, lba4, lba5, ..] = registers.lba.to_le_bytes();
            let [count, count_high] = registers.count.to_le_bytes();
            let (device, flags) = (registers.device, flags | INTERRUPT);
            [
                kind, flags, status, error, lba0, lba1, lba2, device, lba3, lba4, lba5, 0, count, count_high,
                0, 0,
            ]
        };
        let mut fis = [0; 20];
        let (offset, length) = match self {
            Self::Register {
                status,
                error,
                registers: content,
            } => {
                fill(&mut fis, &registers(0x34, 0, status, error, &content));
                (0x40, 20)
            }
            Self::PioSetup {
                status,
                registers: content,
                length,
            } => {
                fill(&mut fis, &registers(0x5f, TO_HOST, STATUS_DATA, 0, &content));
                let [low, high] = length.to_le_bytes();
                let [.., end, count, count_high, _, _] = &mut fis;
                (*end, *count, *count_high) = (status, low, high);
                (0x20, 20)
            }
            Self::SetDeviceBits {
                status,
                error,
                completed,
            } => {
                fill(&mut fis, &[0xa1, INTERRUPT, status & 0x77, error]);
                if let Some(bits) = fis.get_mut(4..8) {
                    bits.copy_from_slice(&completed.to_le_bytes());
                }
                (0x58, 8)
            }
        };
        let place = area.checked_add(offset).ok_or(BusError)?;
        write(memory, place, fis.get(..length).unwrap_or_default())
    }
}

fn fill(fis: &mut [u8; 20], bytes: &[u8]) {
    for (to, from) in fis.iter_mut().zip(bytes) {
        *to = *from;
    }
}

fn read<const N: usize>(memory: &GuestMemory, address: u64) -> Result<[u8; N], BusError> {
    let mut bytes = [0; N];
    memory
        .read_slice(&mut bytes, GuestAddress(address))
        .map_err(|_| BusError)?;
    Ok(bytes)
}

fn write(memory: &GuestMemory, address: u64, bytes: &[u8]) -> Result<(), BusError> {
    memory
        .write_slice(bytes, GuestAddress(address))
        .map_err(|_| BusError)
}

fn words(bytes: [u8; 16]) -> [u32; 4] {
    let words: [zerocopy::little_endian::U32; 4] = zerocopy::transmute!(bytes);
    words.map(zerocopy::little_endian::U32::get)
}

//! Commands of a disk (ATA/ATAPI Command Set 3, with the queued commands of Serial ATA): what each of them asks for.
//!
//! The functions touch neither guest memory nor the image.

use block::SECTOR;

use super::{
    fis::Registers,
    port::{Answer, Medium, Protocol},
};
use crate::virtio::blk::plan::{Limits, Plan, Range};

/// Bytes of a sector, of identification data and of a page of a log.
pub(super) const PAGE: usize = 512;
/// Most blocks of ranges in one DATA SET MANAGEMENT command.
pub(super) const MAX_TRIM_BLOCKS: u16 = 8;
/// Bytes of a range in such a block: 48 bits of LBA and 16 of count.
const TRIM_RANGE: usize = 8;

/// Bits of the Error register.
pub(super) const ABORT: u8 = 1 << 2;
const ID_NOT_FOUND: u8 = 1 << 4;
/// The data cannot be read.
pub(super) const UNCORRECTABLE: u8 = 1 << 6;

/// Device register: an address is an LBA; force unit access of a queued write.
const DEVICE_LBA: u8 = 1 << 6;
const DEVICE_FUA: u8 = 1 << 7;
/// LBA that commands of SMART have in bits 8 to 23: their signature.
const SMART_SIGNATURE: u64 = 0xc2_4f00;
/// Most sectors in one data block of READ MULTIPLE.
const MAX_MULTIPLE: u16 = 16;
/// Sectors that a 28-bit LBA reaches.
const MAX_LBA28: u64 = 0x0fff_ffff;
/// Log of the failed queued command, and its length before the padding.
const LOG_DIRECTORY: u8 = 0x00;
const LOG_NCQ_ERROR: u8 = 0x10;
pub(super) const NCQ_ERROR: usize = 16;

/// State of a disk beside its content. It is that after power-on by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Disk {
    /// Each write is stable when it completes: the driver has turned the write cache off.
    pub cache_off: bool,
    pub smart_off: bool,
    /// Sectors in a data block of READ MULTIPLE; 0: not set.
    pub multiple: u8,
    /// The beginning of the log of the failed queued command, until it is read.
    pub ncq_error: Option<[u8; NCQ_ERROR]>,
}

/// Kind of a transfer: with 28 or 48 bits of address and 8 or 16 of count, or queued.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Width {
    Lba28,
    Lba48,
    Queued,
}

impl Disk {
    /// Whether a command is queued.
    pub(super) fn is_queued(command: u8) -> bool {
        matches!(command, 0x60 | 0x61)
    }

    /// Decides on a command in `slot` for a disk of `capacity` bytes.
    pub(super) fn execute(
        &mut self,
        registers: &Registers,
        slot: u32,
        capacity: u64,
        limits: &Limits,
        medium: &Medium,
    ) -> Answer {
        use Width::{Lba28, Lba48, Queued};
        let read = |width, protocol| transfer(registers, slot, width, capacity, limits, protocol, None);
        let stable = self.cache_off;
        let write = |width, stable| {
            transfer(
                registers,
                slot,
                width,
                capacity,
                limits,
                Protocol::Dma,
                Some(stable),
            )
        };
        let fua = registers.device & DEVICE_FUA != 0;
        match registers.command {
            // READ SECTORS, READ MULTIPLE, READ DMA, each also with EXT, and READ FPDMA QUEUED.
            0x20 | 0x21 | 0xc4 => read(Lba28, Protocol::Pio),
            0x24 | 0x29 => read(Lba48, Protocol::Pio),
            0xc8 | 0xc9 => read(Lba28, Protocol::Dma),
            0x25 => read(Lba48, Protocol::Dma),
            0x60 => read(Queued, Protocol::Queued),
            // WRITE SECTORS, WRITE MULTIPLE, WRITE DMA, each also with EXT and FUA EXT, and WRITE FPDMA QUEUED.
            0x30 | 0x31 | 0xc5 | 0xca | 0xcb => write(Lba28, stable),
            0x34 | 0x39 | 0x35 => write(Lba48, stable),
            0x3d | 0xce => write(Lba48, true),
            0x61 => write(Queued, stable || fua),
            // READ VERIFY SECTORS, also with EXT.
            0x40 | 0x41 => verify(registers, Lba28, capacity, limits),
            0x42 => verify(registers, Lba48, capacity, limits),
            // FLUSH CACHE, FLUSH CACHE EXT; STANDBY IMMEDIATE, STANDBY and SLEEP, which write the cache back.
            0xe7 | 0xea | 0xe0 | 0xe2 | 0xe6 | 0x94 | 0x96 => Answer::medium(Plan::Flush, Protocol::Dma),
            // IDLE IMMEDIATE, IDLE, SEEK, RECALIBRATE, INITIALIZE DEVICE PARAMETERS.
            0xe1 | 0xe3 | 0x95 | 0x97 | 0x70 | 0x10 | 0x91 => Answer::done(registers),
            // CHECK POWER MODE: active or idle.
            0xe5 | 0x98 => Answer::done(&Registers {
                count: 0xff,
                ..*registers
            }),
            // EXECUTE DEVICE DIAGNOSTIC: no fault.
            0x90 => Answer::Reset,
            0xec => Answer::reply(self.identify(capacity, medium), Protocol::Pio),
            0xef => self.set_features(registers),
            0xc6 => self.set_multiple(registers),
            0x06 => trim(registers, limits),
            0xb0 => self.smart(registers),
            0x2f => self.read_log(registers),
            _ => Answer::Fail(ABORT),
        }
    }

    fn set_features(&mut self, registers: &Registers) -> Answer {
        let [feature, _] = registers.features.to_le_bytes();
        match feature {
            0x02 => self.cache_off = false,
            0x82 => {
                // The content of the cache is written back first.
                self.cache_off = true;
                return Answer::medium(Plan::Flush, Protocol::Dma);
            }
            // The transfer mode, and read look-ahead on or off: nothing changes.
            0x03 | 0xaa | 0x55 => {}
            _ => return Answer::Fail(ABORT),
        }
        Answer::done(registers)
    }

    fn set_multiple(&mut self, registers: &Registers) -> Answer {
        let [count, _] = registers.count.to_le_bytes();
        if u16::from(count) > MAX_MULTIPLE || count != 0 && !count.is_power_of_two() {
            return Answer::Fail(ABORT);
        }
        self.multiple = count;
        Answer::done(registers)
    }

    /// The disk is always healthy.
    fn smart(&mut self, registers: &Registers) -> Answer {
        let [feature, _] = registers.features.to_le_bytes();
        let enables = feature == 0xd8;
        if registers.lba & 0xff_ff00 != SMART_SIGNATURE || self.smart_off && !enables {
            return Answer::Fail(ABORT);
        }
        match feature {
            // READ DATA, and its thresholds: no attributes.
            0xd0 | 0xd1 => {
                let mut page = vec![0; PAGE];
                set_word(&mut page, 0, 1);
                checksum(&mut page);
                return Answer::reply(page, Protocol::Pio);
            }
            // ENABLE OPERATIONS, DISABLE OPERATIONS.
            0xd8 => self.smart_off = false,
            0xd9 => self.smart_off = true,
            // ATTRIBUTE AUTOSAVE, and RETURN STATUS, whose answer is the signature.
            0xd2 | 0xda => {}
            _ => return Answer::Fail(ABORT),
        }
        Answer::done(registers)
    }

    fn read_log(&mut self, registers: &Registers) -> Answer {
        let [log, page, ..] = registers.lba.to_le_bytes();
        if registers.count != 1 || page != 0 {
            return Answer::Fail(ABORT);
        }
        let mut content = vec![0; PAGE];
        match log {
            // A word for each log: its pages. The first one is the version.
            LOG_DIRECTORY => {
                set_word(&mut content, 0, 1);
                set_word(&mut content, LOG_NCQ_ERROR.into(), 1);
            }
            LOG_NCQ_ERROR => {
                // Bit 7 of the first byte: no queued command has failed.
                let error = self.ncq_error.take().unwrap_or_else(|| {
                    let mut none = [0; NCQ_ERROR];
                    let [first, ..] = &mut none;
                    *first = 1 << 7;
                    none
                });
                for (to, from) in content.iter_mut().zip(error) {
                    *to = from;
                }
                checksum(&mut content);
            }
            _ => return Answer::Fail(ABORT),
        }
        Answer::reply(content, Protocol::Pio)
    }

    /// Notes the queued command that failed (ACS-3, 9.13: NCQ Command Error log).
    pub(super) fn note_error(&mut self, registers: &Registers, slot: u32, status: u8, error: u8) {
        let [lba0, lba1, lba2, lba3, lba4, lba5, ..] = registers.lba.to_le_bytes();
        let [count, count_high] = registers.count.to_le_bytes();
        let tag = u8::try_from(slot).unwrap_or(0);
        let device = registers.device;
        self.ncq_error = Some([
            tag, 0, status, error, lba0, lba1, lba2, device, lba3, lba4, lba5, 0, count, count_high, 0, 0,
        ]);
    }

    fn identify(&self, capacity: u64, medium: &Medium) -> Vec<u8> {
        let sectors = capacity / SECTOR;
        let cylinders = u16::try_from((sectors / (16 * 63)).min(16383)).unwrap_or(16383);
        let lba28 = u32::try_from(sectors.min(MAX_LBA28)).unwrap_or(u32::MAX);
        let multiple = if self.multiple > 0 {
            0x100 | u16::from(self.multiple)
        } else {
            0
        };
        let on = |off: bool, bit: u16| if off { 0 } else { bit };
        let discard = |bits: u16| on(!medium.discard, bits);
        let physical = (u64::from(medium.physical_block) / SECTOR).max(1).ilog2();
        let mut data = identification(&medium.serial, "vmmd disk");
        for (word, value) in [
            // A disk that is not removable; cylinders, heads and sectors.
            (0, 0x0040),
            (1, cylinders),
            (3, 16),
            (6, 63),
            (47, 0x8000 | MAX_MULTIPLE),
            // IORDY, LBA, DMA; words 54 to 58, 64 to 70 and 88 are valid.
            (49, 0x0b00),
            (50, 0x4000),
            (53, 0x0007),
            (54, cylinders),
            (55, 16),
            (56, 63),
            (59, multiple),
            (63, 0x0007),
            (64, 0x0003),
            (65, 120),
            (66, 120),
            (67, 120),
            (68, 120),
            // Reads of discarded sectors are not deterministic.
            (75, 31),
            (76, SATA_CAPABILITIES | 1 << 8),
            (80, ATA_VERSIONS),
            // SMART, power management, write cache, look-ahead, NOP is not there.
            (82, 0x0069),
            // FLUSH CACHE EXT, FLUSH CACHE, 48-bit addresses.
            (83, 0x7400),
            // WRITE DMA FUA EXT, general purpose logging.
            (84, 0x4060),
            (85, 0x0048 | on(self.smart_off, 1) | on(self.cache_off, 1 << 5)),
            (86, 0x3400),
            (87, 0x4060),
            (88, 0x203f),
            (105, discard(MAX_TRIM_BLOCKS)),
            (
                106,
                0x4000 | u16::try_from(physical).map_or(0, |bits| if bits > 0 { 0x2000 | bits } else { 0 }),
            ),
            (169, discard(1)),
            // Not a rotating medium.
            (217, 1),
        ] {
            set_word(&mut data, word, value);
        }
        set_words(
            &mut data,
            57,
            &u32::from(cylinders).saturating_mul(16 * 63).to_le_bytes(),
        );
        set_words(&mut data, 60, &lba28.to_le_bytes());
        set_words(&mut data, 100, &sectors.to_le_bytes());
        set_word(&mut data, 255, 0xa5);
        checksum(&mut data);
        data
    }
}

/// Word 76: speeds of the first three generations.
pub(super) const SATA_CAPABILITIES: u16 = 0x000e;
/// Word 80: ATA/ATAPI-5 to ACS-3.
pub(super) const ATA_VERSIONS: u16 = 0x07e0;

/// Identification data with serial number, firmware revision and model.
pub(super) fn identification(serial: &str, model: &str) -> Vec<u8> {
    let mut data = vec![0; PAGE];
    for (word, length, text) in [
        (10, 20, serial),
        (23, 8, env!("CARGO_PKG_VERSION")),
        (27, 40, model),
    ] {
        set_text(&mut data, word, length, text);
    }
    data
}

/// Writes a string of `length` characters, which has the first character of a word in the word's upper byte.
fn set_text(data: &mut [u8], word: usize, length: usize, text: &str) {
    let places = data.iter_mut().skip(word.saturating_mul(2)).take(length);
    let printable = |byte: u8| if byte.is_ascii_graphic() { byte } else { b' ' };
    let text = text.bytes().map(printable).chain(std::iter::repeat(b' '));
    let mut swapped = text.take(length).collect::<Vec<_>>();
    for pair in swapped.chunks_exact_mut(2) {
        pair.reverse();
    }
    for (place, byte) in places.zip(swapped) {
        *place = byte;
    }
}

pub(super) fn set_word(data: &mut [u8], word: usize, value: u16) {
    set_words(data, word, &value.to_le_bytes());
}

fn set_words(data: &mut [u8], word: usize, bytes: &[u8]) {
    for (place, byte) in data.iter_mut().skip(word.saturating_mul(2)).zip(bytes) {
        *place = *byte;
    }
}

/// Makes the last byte such that the sum of all bytes is 0.
fn checksum(page: &mut [u8]) {
    if let Some((last, rest)) = page.split_last_mut() {
        let sum = rest.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        *last = sum.wrapping_neg();
    }
}

/// First sector and number of sectors that a command names; `None` for an address that is no LBA.
fn range(registers: &Registers, width: Width) -> Option<(u64, u64)> {
    let whole = |count: u64, all: u64| if count == 0 { all } else { count };
    let [low, _] = registers.count.to_le_bytes();
    let high = u64::from(registers.device & 0xf) << 24;
    let range = match width {
        Width::Lba28 => (registers.lba & 0xff_ffff | high, whole(low.into(), 256)),
        Width::Lba48 => (registers.lba, whole(registers.count.into(), 65536)),
        Width::Queued => (registers.lba, whole(registers.features.into(), 65536)),
    };
    (registers.device & DEVICE_LBA != 0).then_some(range)
}

/// A read, or a write that is `stable` or not.
fn transfer(
    registers: &Registers,
    slot: u32,
    width: Width,
    capacity: u64,
    limits: &Limits,
    protocol: Protocol,
    write: Option<bool>,
) -> Answer {
    let protocol = if width == Width::Queued {
        Protocol::Queued
    } else {
        protocol
    };
    // The tag of a queued command is the number of its slot (AHCI 1.3.1, 5.3.9.4).
    let tagged = width != Width::Queued || u32::from(registers.count >> 3 & 0x1f) == slot;
    let Some((sector, sectors)) = range(registers, width).filter(|_| tagged) else {
        return Answer::Fail(ABORT);
    };
    let bytes = sectors.saturating_mul(SECTOR);
    let (Some(offset), Ok(length)) = (limits.place(capacity, sector, bytes), u32::try_from(bytes)) else {
        return Answer::Fail(ID_NOT_FOUND);
    };
    match write {
        None => Answer::medium(Plan::Read { offset, length }, protocol),
        Some(_) if limits.read_only => Answer::Fail(ABORT),
        Some(stable) => Answer::Medium {
            plan: Plan::Write { offset, length },
            stable,
            protocol,
        },
    }
}

fn verify(registers: &Registers, width: Width, capacity: u64, limits: &Limits) -> Answer {
    let placed = range(registers, width)
        .and_then(|(sector, sectors)| limits.place(capacity, sector, sectors.saturating_mul(SECTOR)));
    match placed {
        Some(_) => Answer::done(registers),
        None => Answer::Fail(ID_NOT_FOUND),
    }
}

/// DATA SET MANAGEMENT, which has TRIM alone.
fn trim(registers: &Registers, limits: &Limits) -> Answer {
    let is_trim = registers.features & 1 != 0;
    if !limits.discard || !is_trim || !(1..=MAX_TRIM_BLOCKS).contains(&registers.count) {
        return Answer::Fail(ABORT);
    }
    Answer::Trim {
        blocks: registers.count,
    }
}

/// The ranges in the data of a TRIM; those of no sectors are left out. `None` if one is beyond the end of the disk.
pub(super) fn trim_ranges(data: &[u8], capacity: u64, limits: &Limits) -> Option<Vec<Range>> {
    let entries = data.chunks_exact(TRIM_RANGE).filter_map(|entry| {
        let entry = u64::from_le_bytes(entry.try_into().ok()?);
        let (sector, sectors) = (entry & 0xffff_ffff_ffff, entry >> 48);
        (sectors > 0).then_some((sector, sectors.saturating_mul(SECTOR)))
    });
    let ranges = entries.map(|(sector, length)| {
        let offset = limits.place(capacity, sector, length)?;
        Some(Range {
            offset,
            length,
            unmap: false,
        })
    });
    ranges.collect()
}

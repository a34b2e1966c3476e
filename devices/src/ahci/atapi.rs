//! Commands of a CD-ROM drive (SCSI Primary Commands 3, Multi-Media Commands 6, ATA/ATAPI-8 PACKET): what each of them
//! asks for.
//!
//! The functions touch neither guest memory nor the image.

use super::{
    ata::{self, ABORT, identification, set_word},
    fis::{PACKET_LENGTH, Registers},
    port::{Answer, Medium, Protocol},
};
use crate::virtio::blk::plan::Plan;

/// Bytes of a block of a data disc.
pub(super) const BLOCK: u64 = 2048;
/// Most blocks of one read: 32 MiB.
const MAX_BLOCKS: u32 = 1 << 14;
/// Blocks of a CD of 80 minutes: larger media are DVDs.
const CD_BLOCKS: u32 = 80 * 60 * 75;
/// Block addresses of minute, second and frame begin two seconds earlier.
const MSF_OFFSET: u32 = 150;
/// The track number of the lead-out.
const LEAD_OUT: u8 = 0xaa;
/// ADR and CONTROL of a data track.
const DATA_TRACK: u8 = 0x14;

/// PACKET: Features bit 0, the data is transferred by DMA.
const FEATURE_DMA: u16 = 1 << 0;
/// Count after a PACKET: the command has ended (input/output and command/data set).
const REASON_ENDED: u16 = 3;

/// Sense key, additional sense code and its qualifier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sense(pub u8, pub u8, pub u8);

const NO_SENSE: Sense = Sense(0, 0, 0);
const NO_MEDIUM: Sense = Sense(2, 0x3a, 0x01);
const TRAY_OPEN: Sense = Sense(2, 0x3a, 0x02);
/// The host cannot read the medium.
pub(super) const UNREADABLE: Sense = Sense(3, 0x11, 0x00);
const UNKNOWN_COMMAND: Sense = Sense(5, 0x20, 0x00);
const OUT_OF_RANGE: Sense = Sense(5, 0x21, 0x00);
const INVALID_FIELD: Sense = Sense(5, 0x24, 0x00);
const UNKNOWN_PAGE: Sense = Sense(5, 0x39, 0x00);
const REMOVAL_PREVENTED: Sense = Sense(5, 0x53, 0x02);
const MEDIUM_CHANGED: Sense = Sense(6, 0x28, 0x00);

impl Sense {
    /// The Error register: the sense key, and that the command was not carried out.
    pub(super) fn error(self) -> u8 {
        self.0 << 4 | ABORT
    }
}

/// Media events of GET EVENT STATUS NOTIFICATION (MMC-6, 6.6.2.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Event {
    #[default]
    None = 0,
    EjectRequest = 1,
    NewMedia = 2,
    Removal = 3,
}

/// State of a drive beside its medium's content. It is that after power-on by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cdrom {
    /// Sense data of the command that failed last, until the driver reads it.
    pub sense: Sense,
    /// The driver has not been notified of a medium.
    pub attention: bool,
    /// The driver prevents the removal of the medium.
    pub locked: bool,
    /// The tray is open.
    pub open: bool,
    pub event: Event,
}

impl Cdrom {
    /// A reset: the tray stays as it is.
    pub(super) fn reset(&mut self) {
        *self = Self {
            open: self.open,
            ..Self::default()
        };
    }

    /// Whether the medium may be removed. If not, the driver is notified that its removal is wanted.
    pub(super) fn release(&mut self) -> bool {
        let prevented = self.locked && !self.open;
        if prevented {
            self.event = Event::EjectRequest;
        }
        !prevented
    }

    /// Another medium is in the drive, or none, and the tray is closed.
    pub(super) fn change(&mut self, loaded: bool) {
        *self = Self {
            sense: self.sense,
            attention: loaded,
            locked: self.locked && loaded,
            open: false,
            event: if loaded { Event::NewMedia } else { Event::Removal },
        };
    }

    /// Decides on a command, whose `packet` matters for PACKET alone, for a medium of `capacity` bytes. A drive of 0 bytes
    /// is empty.
    pub(super) fn execute(
        &mut self,
        registers: &Registers,
        packet: &[u8; PACKET_LENGTH],
        capacity: u64,
        medium: &Medium,
    ) -> Answer {
        match registers.command {
            0xa0 => {
                let pio = registers.features & FEATURE_DMA == 0;
                let protocol = if pio {
                    Protocol::PacketPio
                } else {
                    Protocol::Packet
                };
                match self.packet(packet, capacity, protocol) {
                    Ok(answer) => answer,
                    Err(sense) => self.fail(sense),
                }
            }
            0xa1 => Answer::reply(identify(medium), Protocol::Pio),
            // IDENTIFY DEVICE and READ SECTORS abort with the signature (ATA8-ACS, 7.12.2).
            0xec | 0x20 => Answer::Signature(ABORT),
            // DEVICE RESET, EXECUTE DEVICE DIAGNOSTIC.
            0x08 | 0x90 => Answer::Reset,
            // FLUSH CACHE, the power modes, and SET FEATURES of the transfer mode.
            0xe7 | 0xe0..=0xe3 | 0xe6 => Answer::done(registers),
            0xe5 => Answer::done(&Registers {
                count: 0xff,
                ..*registers
            }),
            0xef if matches!(registers.features & 0xff, 0x02 | 0x03 | 0x55 | 0x82 | 0xaa) => {
                Answer::done(registers)
            }
            _ => Answer::Fail(ABORT),
        }
    }

    /// Notes a failure, and answers with its sense key.
    pub(super) fn fail(&mut self, sense: Sense) -> Answer {
        self.sense = sense;
        Answer::Fail(sense.error())
    }

    fn packet(
        &mut self,
        packet: &[u8; PACKET_LENGTH],
        capacity: u64,
        protocol: Protocol,
    ) -> Result<Answer, Sense> {
        let [code, flags, b2, b3, b4, b5, b6, b7, b8, b9, ..] = *packet;
        let blocks = u32::try_from(capacity / BLOCK).unwrap_or(u32::MAX);
        let reports = matches!(code, 0x03 | 0x12 | 0x46 | 0x4a);
        if !reports && std::mem::take(&mut self.attention) {
            return Err(MEDIUM_CHANGED);
        }
        let length = usize::from(u16::from_be_bytes([b7, b8]));
        let reply = |mut data: Vec<u8>, length: usize| {
            data.truncate(length);
            Ok(Answer::reply(data, protocol))
        };
        let done = Ok(Answer::done(&ended()));
        let lba = u32::from_be_bytes([b2, b3, b4, b5]);
        match code {
            // TEST UNIT READY.
            0x00 => self.ready(blocks).and(done),
            // REQUEST SENSE.
            0x03 => {
                let Sense(key, code, qualifier) = std::mem::replace(&mut self.sense, NO_SENSE);
                let data = vec![
                    0x70, 0, key, 0, 0, 0, 0, 10, 0, 0, 0, 0, code, qualifier, 0, 0, 0, 0,
                ];
                reply(data, b4.into())
            }
            // INQUIRY, without vital product data.
            0x12 if flags & 1 == 0 && b2 == 0 => reply(inquiry(), u16::from_be_bytes([b3, b4]).into()),
            // START STOP UNIT: LOEJ and START in byte 4.
            0x1b => self.start_stop(b4 & 2 != 0, b4 & 1 != 0, blocks).and(done),
            // PREVENT ALLOW MEDIUM REMOVAL.
            0x1e => {
                self.locked = b4 & 1 != 0;
                done
            }
            // READ CAPACITY.
            0x25 => {
                self.ready(blocks)?;
                let last = blocks.saturating_sub(1).to_be_bytes();
                let size = u32::try_from(BLOCK).unwrap_or(0).to_be_bytes();
                reply([last, size].concat(), 8)
            }
            // READ(10), READ(12).
            0x28 => self.read(lba, u32::from(u16::from_be_bytes([b7, b8])), blocks, protocol),
            0xa8 => self.read(lba, u32::from_be_bytes([b6, b7, b8, b9]), blocks, protocol),
            // SEEK(10).
            0x2b => {
                self.ready(blocks)?;
                if lba < blocks { done } else { Err(OUT_OF_RANGE) }
            }
            // SYNCHRONIZE CACHE: nothing is written.
            0x35 => done,
            // READ TOC/PMA/ATIP. The format was in byte 9 once.
            0x43 => {
                self.ready(blocks)?;
                let format = if b2 & 0xf == 0 { b9 >> 6 } else { b2 & 0xf };
                reply(contents(format, flags & 2 != 0, b6, blocks)?, length)
            }
            // GET CONFIGURATION.
            0x46 => {
                let loaded = self.ready(blocks).is_ok().then_some(blocks);
                let data = configuration(flags & 3, u16::from_be_bytes([b2, b3]), loaded);
                reply(data, length)
            }
            // GET EVENT STATUS NOTIFICATION, by polling.
            0x4a if flags & 1 != 0 => reply(self.event(b4 & 1 << 4 != 0, blocks), length),
            // READ DISC INFORMATION, of the standard type.
            0x51 if flags & 7 == 0 => {
                self.ready(blocks)?;
                let mut data = vec![0, 32, 0x0e, 1, 1, 1, 1, 0x20];
                data.resize(34, 0);
                reply(data, length)
            }
            // MODE SENSE(10), of the current values.
            0x5a if b2 >> 6 != 3 => reply(self.mode_pages(b2 & 0x3f, blocks)?, length),
            0x12 | 0x4a | 0x51 => Err(INVALID_FIELD),
            // Values are not saved.
            0x5a => Err(UNKNOWN_PAGE),
            _ => Err(UNKNOWN_COMMAND),
        }
    }

    fn ready(&self, blocks: u32) -> Result<(), Sense> {
        match (self.open, blocks) {
            (true, _) => Err(TRAY_OPEN),
            (false, 0) => Err(NO_MEDIUM),
            (false, _) => Ok(()),
        }
    }

    fn start_stop(&mut self, loads: bool, starts: bool, blocks: u32) -> Result<(), Sense> {
        match (loads, starts) {
            (false, _) => {}
            (true, false) if self.open => {}
            (true, false) if self.locked => return Err(REMOVAL_PREVENTED),
            (true, false) => {
                self.open = true;
                self.event = Event::Removal;
            }
            (true, true) if self.open => {
                self.open = false;
                self.attention = blocks != 0;
                self.event = if self.attention {
                    Event::NewMedia
                } else {
                    Event::None
                };
            }
            (true, true) => {}
        }
        Ok(())
    }

    fn read(&self, lba: u32, count: u32, blocks: u32, protocol: Protocol) -> Result<Answer, Sense> {
        self.ready(blocks)?;
        if lba.checked_add(count).is_none_or(|end| end > blocks) {
            return Err(OUT_OF_RANGE);
        }
        if count > MAX_BLOCKS {
            return Err(INVALID_FIELD);
        }
        if count == 0 {
            return Ok(Answer::done(&ended()));
        }
        let bytes = u64::from(count).saturating_mul(BLOCK);
        let plan = Plan::Read {
            offset: u64::from(lba).saturating_mul(BLOCK),
            length: u32::try_from(bytes).unwrap_or(0),
        };
        Ok(Answer::medium(plan, protocol))
    }

    /// Events of the class that the driver asked for, if it is that of media.
    fn event(&mut self, asked: bool, blocks: u32) -> Vec<u8> {
        /// Class 4: media. The classes that there are, as a bit each.
        const MEDIA: u8 = 4;
        const CLASSES: u8 = 1 << MEDIA;
        /// No event available.
        const NONE: u8 = 1 << 7;
        if !asked {
            return vec![0, 2, NONE, CLASSES];
        }
        let event = std::mem::take(&mut self.event);
        // Bit 0: the tray is open. Bit 1: the drive has a medium.
        let status = match (self.open, blocks) {
            (true, _) => 1,
            (false, 0) => 0,
            (false, _) => 2,
        };
        vec![0, 6, MEDIA, CLASSES, event as u8, status, 0, 0]
    }

    fn mode_pages(&self, page: u8, blocks: u32) -> Result<Vec<u8>, Sense> {
        // Medium type: a data disc, no disc, or an open door.
        let kind = match (self.open, blocks) {
            (true, _) => 0x71,
            (false, 0) => 0x70,
            (false, _) => 0x01,
        };
        let mut data = vec![0, 0, kind, 0, 0, 0, 0, 0];
        let all = page == 0x3f;
        if all || page == 0x01 {
            // Error recovery: 5 tries.
            data.extend([0x01, 6, 0, 5, 0, 0, 0, 0]);
        }
        if all || page == 0x2a {
            // Capabilities: it reads DVDs; it has a tray, ejects and locks; 706 KB/s.
            let lock = if self.locked { 0x2b } else { 0x29 };
            data.extend([
                0x2a, 18, 0x08, 0, 0, 0, lock, 0, 2, 0xc2, 0, 2, 2, 0, 2, 0xc2, 0, 0, 0, 0,
            ]);
        }
        let length = u16::try_from(data.len().saturating_sub(2)).unwrap_or(0);
        if length <= 6 {
            return Err(INVALID_FIELD);
        }
        for (place, byte) in data.iter_mut().zip(length.to_be_bytes()) {
            *place = byte;
        }
        Ok(data)
    }
}

/// Registers after a PACKET.
pub(super) fn ended() -> Registers {
    Registers {
        count: REASON_ENDED,
        ..Registers::default()
    }
}

fn identify(medium: &Medium) -> Vec<u8> {
    let mut data = identification(&medium.serial, "vmmd CD-ROM");
    for (word, value) in [
        // A removable CD-ROM drive with packets of 12 bytes, ready within 50 µs.
        (0, 0x85c0),
        // DMA, LBA, IORDY.
        (49, 0x0f00),
        (53, 0x0006),
        (63, 0x0007),
        (64, 0x0003),
        (65, 120),
        (66, 120),
        (67, 120),
        (68, 120),
        (76, ata::SATA_CAPABILITIES),
        (80, ata::ATA_VERSIONS),
        // PACKET, DEVICE RESET, power management.
        (82, 0x0218),
        (83, 0x4000),
        (84, 0x4000),
        (85, 0x0218),
        (87, 0x4000),
        (88, 0x203f),
    ] {
        set_word(&mut data, word, value);
    }
    data
}

fn inquiry() -> Vec<u8> {
    // A removable CD-ROM drive behind ATAPI, with 31 more bytes.
    let mut data = vec![0x05, 0x80, 0x00, 0x21, 31, 0, 0, 0];
    data.extend(b"vmmd    CD-ROM          1.0 ");
    data
}

/// A block address as 4 bytes, or as minute, second and frame.
fn address(lba: u32, msf: bool) -> [u8; 4] {
    if !msf {
        return lba.to_be_bytes();
    }
    let frames = lba.saturating_add(MSF_OFFSET);
    let part = |value: u32| u8::try_from(value).unwrap_or(u8::MAX);
    [
        0,
        part(frames / 75 / 60),
        part(frames / 75 % 60),
        part(frames % 75),
    ]
}

/// The table of contents of one data track.
fn contents(format: u8, msf: bool, first: u8, blocks: u32) -> Result<Vec<u8>, Sense> {
    let entry = |track: u8, lba: u32| {
        let [a, b, c, d] = address(lba, msf);
        [0, DATA_TRACK, track, 0, a, b, c, d]
    };
    // Length, first and last track or session.
    let mut data = vec![0, 0, 1, 1];
    match format {
        0 if first > 1 && first != LEAD_OUT => return Err(INVALID_FIELD),
        0 => {
            if first <= 1 {
                data.extend(entry(1, 0));
            }
            data.extend(entry(LEAD_OUT, blocks));
        }
        1 => data.extend(entry(1, 0)),
        _ => return Err(INVALID_FIELD),
    }
    let length = u8::try_from(data.len().saturating_sub(2)).unwrap_or(0);
    if let [_, low, ..] = data.as_mut_slice() {
        *low = length;
    }
    Ok(data)
}

/// Features from `start` on: all (`kind` 0), the current ones (1), or that one (2). `blocks` are those of the medium, if
/// there is one.
fn configuration(kind: u8, start: u16, blocks: Option<u32>) -> Vec<u8> {
    const DVD_ROM: u16 = 0x10;
    const CD_ROM: u16 = 0x08;
    let profile = match blocks {
        None => 0,
        Some(blocks) if blocks > CD_BLOCKS => DVD_ROM,
        Some(_) => CD_ROM,
    };
    let current = |of: u16| u8::from(profile == of);
    let (dvd, cd) = (current(DVD_ROM), current(CD_ROM));
    // Code, version with the bits "persistent" and "current", additional length, content.
    let features: [(u16, &[u8]); 5] = [
        (0x00, &[0x03, 8, 0, 0x10, dvd, 0, 0, 0x08, cd, 0]),
        // Core: the interface is ATAPI.
        (0x01, &[0x0b, 8, 0, 0, 0, 2, 1, 0, 0, 0]),
        // Removable medium: a tray that locks and ejects.
        (0x03, &[0x03, 4, 0x29, 0, 0, 0]),
        // CD read, DVD read.
        (0x1e, &[0x08 | cd, 4, 0, 0, 0, 0]),
        (0x1f, &[dvd, 4, 0, 0, 0, 0]),
    ];
    let mut data = vec![0, 0, 0, 0, 0, 0];
    data.extend(profile.to_be_bytes());
    for (code, body) in features {
        let is_current = body.first().is_some_and(|version| version & 1 != 0);
        let wanted = match kind {
            0 => code >= start,
            1 => code >= start && is_current,
            _ => code == start,
        };
        if wanted {
            data.extend(code.to_be_bytes());
            data.extend_from_slice(body);
        }
    }
    let length = u32::try_from(data.len().saturating_sub(4)).unwrap_or(0);
    for (place, byte) in data.iter_mut().zip(length.to_be_bytes()) {
        *place = byte;
    }
    data
}

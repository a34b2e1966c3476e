//! Configuration space (virtio 1.3, 5.8.4 and 5.8.5): the driver selects an item and then reads it.

use super::Kind;
use crate::input::{Key, TABLET_MAX};

/// Length of `struct virtio_input_config`.
pub(super) const LENGTH: usize = 136;
/// Offset of the selected item.
const UNION: usize = 8;

const ID_NAME: u8 = 1;
const ID_DEVIDS: u8 = 3;
const EV_BITS: u8 = 0x11;
const ABS_INFO: u8 = 0x12;

/// Types of events and their codes (linux/input-event-codes.h).
pub(super) mod code {
    pub const EV_SYN: u16 = 0;
    pub const EV_KEY: u16 = 1;
    pub const EV_REL: u16 = 2;
    pub const EV_ABS: u16 = 3;
    pub const EV_LED: u16 = 0x11;
    pub const REL_HWHEEL: u16 = 6;
    pub const REL_WHEEL: u16 = 8;
    pub const ABS_X: u16 = 0;
    pub const ABS_Y: u16 = 1;
    pub const LED_NUML: u16 = 0;
    pub const LED_CAPSL: u16 = 1;
    pub const LED_SCROLLL: u16 = 2;
    pub const BTN_LEFT: u16 = 0x110;
    pub const BTN_RIGHT: u16 = 0x111;
    pub const BTN_MIDDLE: u16 = 0x112;
}

const BUS_VIRTUAL: u16 = 6;
const VENDOR: u16 = 0x1af4;

/// Configuration of a device.
pub(super) struct Config {
    kind: Kind,
    select: u8,
    subsel: u8,
}

impl Config {
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            select: 0,
            subsel: 0,
        }
    }

    pub fn reset(&mut self) {
        self.select(0, 0);
    }

    pub fn selected(&self) -> (u8, u8) {
        (self.select, self.subsel)
    }

    pub fn select(&mut self, select: u8, subsel: u8) {
        (self.select, self.subsel) = (select, subsel);
    }

    pub fn write(&mut self, offset: usize, value: u8) {
        match offset {
            0 => self.select = value,
            1 => self.subsel = value,
            _ => {}
        }
    }

    /// Returns the whole space: the selectors, the size of the selected item, and the item.
    pub fn read(&self) -> [u8; LENGTH] {
        let mut config = [0; LENGTH];
        let content = self.content();
        let head = [self.select, self.subsel, u8::try_from(content.len()).unwrap_or(0)];
        for (place, byte) in config.iter_mut().zip(head) {
            *place = byte;
        }
        for (place, byte) in config.iter_mut().skip(UNION).zip(content) {
            *place = byte;
        }
        config
    }

    fn content(&self) -> Vec<u8> {
        let keyboard = self.kind == Kind::Keyboard;
        match (self.select, u16::from(self.subsel)) {
            (ID_NAME, 0) if keyboard => b"vmmd keyboard".to_vec(),
            (ID_NAME, 0) => b"vmmd tablet".to_vec(),
            (ID_DEVIDS, 0) => {
                let ids = [BUS_VIRTUAL, VENDOR, if keyboard { 1 } else { 2 }, 1];
                ids.into_iter().flat_map(u16::to_le_bytes).collect()
            }
            (EV_BITS, event) => bits(self.codes(event)),
            (ABS_INFO, code::ABS_X | code::ABS_Y) if !keyboard => {
                // Least, most, fuzz, flat, resolution.
                let info = [0, u32::from(TABLET_MAX), 0, 0, 0];
                info.into_iter().flat_map(u32::to_le_bytes).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The codes that it has of a type of events.
    fn codes(&self, event: u16) -> Vec<u16> {
        match (self.kind, event) {
            (Kind::Keyboard, code::EV_KEY) => (1..=u16::from(Key::MAX)).collect(),
            (Kind::Keyboard, code::EV_LED) => vec![code::LED_NUML, code::LED_CAPSL, code::LED_SCROLLL],
            (Kind::Tablet, code::EV_KEY) => vec![code::BTN_LEFT, code::BTN_RIGHT, code::BTN_MIDDLE],
            (Kind::Tablet, code::EV_REL) => vec![code::REL_HWHEEL, code::REL_WHEEL],
            (Kind::Tablet, code::EV_ABS) => vec![code::ABS_X, code::ABS_Y],
            _ => Vec::new(),
        }
    }
}

/// A bit for each code, without zeroes at the end.
fn bits(codes: Vec<u16>) -> Vec<u8> {
    let mut bits = Vec::new();
    for code in codes {
        let at = usize::from(code / 8);
        if bits.len() <= at {
            bits.resize(at.saturating_add(1), 0);
        }
        if let Some(byte) = bits.get_mut(at) {
            *byte |= 1_u8.wrapping_shl(u32::from(code % 8));
        }
    }
    bits
}

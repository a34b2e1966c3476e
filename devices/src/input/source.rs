//! A source of keyboard and pointer input.

use std::sync::Arc;

use rfb::Size;

use super::{Hub, LED_CAPS, Pointer, TABLET_MAX, code::Key, layout::Stroke};

/// Most keys that one source holds at once; further ones are ignored.
const MAX_HELD: usize = 32;

/// Bits of RFB's button mask.
const BUTTONS: u8 = 0b111;
const WHEEL_UP: u8 = 1 << 3;
const WHEEL_DOWN: u8 = 1 << 4;
const WHEEL_LEFT: u8 = 1 << 5;
const WHEEL_RIGHT: u8 = 1 << 6;

/// A key that is held, and the keysym that it was pressed for.
#[derive(Clone, Copy, Debug)]
struct Held {
    key: Key,
    keysym: Option<u32>,
}

/// Types and points for one client. Dropping it releases its pressed keys and buttons.
pub struct Source {
    hub: Arc<Hub>,
    held: Vec<Held>,
    pointer: Pointer,
    /// The last mask, with the wheels.
    mask: u8,
}

impl Source {
    pub(super) fn new(hub: Arc<Hub>) -> Self {
        Self {
            hub,
            held: Vec::new(),
            pointer: Pointer::default(),
            mask: 0,
        }
    }

    /// A key by its XT scancode (see [`Key::from_xt`]). Unknown ones are ignored.
    pub fn scancode(&mut self, scancode: u32, down: bool) {
        if let Some(key) = Key::from_xt(scancode) {
            self.key(key, down);
        }
    }

    /// A key.
    pub fn key(&mut self, key: Key, down: bool) {
        if down {
            self.press(key, None);
        } else {
            self.release(|held| held.key == key);
        }
    }

    /// Handles a key by its X11 keysym. Missing modifiers of the character are pressed around the
    /// key; modifiers that it excludes are released meanwhile. Keysyms missing in the layout are
    /// ignored.
    pub fn keysym(&mut self, keysym: u32, down: bool) {
        if !down {
            // It may have been pressed when another modifier was held, and so by the other case.
            let other = |held: u32| char::from_u32(held).zip(char::from_u32(keysym));
            let same = |(a, b): (char, char)| a.to_lowercase().eq(b.to_lowercase());
            self.release(|held| held.keysym == Some(keysym));
            self.release(|held| held.keysym.is_some_and(|held| other(held).is_some_and(same)));
            return;
        }
        if let Some(held) = self.held.iter().find(|held| held.keysym == Some(keysym)) {
            return self.hub.repeat(held.key);
        }
        if let Some(stroke) = Stroke::of_keysym(self.hub.layout(), keysym) {
            self.stroke(stroke, Some(keysym));
        }
    }

    /// Types a character: presses and releases all that it takes. False when the layout does not have it.
    pub fn character(&mut self, character: char) -> bool {
        let Some(stroke) = Stroke::of_character(self.hub.layout(), character) else {
            return false;
        };
        self.stroke(stroke, None);
        self.release(|held| held.key == stroke.key);
        true
    }

    /// The pointer is at `place` in pixels of a picture of that size, with RFB's button mask.
    pub fn point(&mut self, mask: u8, place: (u16, u16), size: Size) {
        // A wheel's step is a button that goes down.
        let pressed = mask & !self.mask;
        let step =
            |up: u8, down: u8| i32::from(pressed & up != 0).wrapping_sub(i32::from(pressed & down != 0));
        self.mask = mask;
        self.pointer = Pointer {
            x: scale(place.0, size.width()),
            y: scale(place.1, size.height()),
            buttons: mask & BUTTONS,
            wheel: step(WHEEL_UP, WHEEL_DOWN),
            horizontal_wheel: step(WHEEL_RIGHT, WHEEL_LEFT),
        };
        self.hub.point(self.pointer);
    }

    /// Releases all that is held.
    pub fn release_all(&mut self) {
        self.release(|_| true);
        if self.pointer.buttons != 0 {
            self.mask = 0;
            self.pointer = Pointer {
                buttons: 0,
                wheel: 0,
                horizontal_wheel: 0,
                ..self.pointer
            };
            self.hub.point(self.pointer);
        }
    }

    fn stroke(&mut self, stroke: Stroke, keysym: Option<u32>) {
        let caps = stroke.letter && self.hub.leds() & LED_CAPS != 0;
        let wanted = [
            (
                &[Key::LEFT_SHIFT, Key::RIGHT_SHIFT][..],
                stroke.shift.map(|shift| shift != caps),
            ),
            (&[Key::RIGHT_ALT][..], stroke.alt_gr),
        ];
        let (mut added, mut lifted) = (Vec::new(), Vec::new());
        for (keys, wanted) in wanted {
            let held: Vec<Key> = keys.iter().copied().filter(|key| self.holds(*key)).collect();
            match wanted {
                Some(true) if held.is_empty() => added.extend(keys.first().copied()),
                Some(false) => lifted.extend(held),
                _ => {}
            }
        }
        lifted.iter().for_each(|key| self.hub.release(*key));
        added.iter().for_each(|key| self.hub.press(*key));
        self.press(stroke.key, keysym);
        if stroke.dead {
            self.release(|held| held.key == stroke.key);
        }
        added.iter().for_each(|key| self.hub.release(*key));
        if stroke.dead {
            self.hub.press(Key::SPACE);
            self.hub.release(Key::SPACE);
        }
        lifted.iter().for_each(|key| self.hub.press(*key));
    }

    fn holds(&self, key: Key) -> bool {
        self.held.iter().any(|held| held.key == key)
    }

    fn press(&mut self, key: Key, keysym: Option<u32>) {
        if self.holds(key) {
            return self.hub.repeat(key);
        }
        if self.held.len() >= MAX_HELD {
            return;
        }
        self.held.push(Held { key, keysym });
        self.hub.press(key);
    }

    fn release(&mut self, which: impl Fn(&Held) -> bool) {
        let hub = &self.hub;
        self.held.retain(|held| {
            let released = which(held);
            if released {
                hub.release(held.key);
            }
            !released
        });
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.release_all();
    }
}

/// A pixel's place on a tablet.
fn scale(at: u16, length: u16) -> u16 {
    let last = u32::from(length).saturating_sub(1);
    let at = u32::from(at).min(last);
    let scaled = at.wrapping_mul(TABLET_MAX.into()).checked_div(last).unwrap_or(0);
    u16::try_from(scaled).unwrap_or(TABLET_MAX)
}

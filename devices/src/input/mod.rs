//! Keyboard and pointer: from the input source (VNC clients, the API) to the device that the guest
//! listens to.
//!
//! ```text
//!  Source (a client) ─▶ Hub ─▶ the best keyboard whose driver listens: virtio-input, else the i8042's
//!         ...              └─▶ the tablet
//! ```
//!
//! A source identifies keys by their place (scancodes) or by their meaning (keysyms). The guest's
//! configured [`Layout`] maps keysyms to keys. A dropped source releases the keys that it holds; if
//! several sources hold a key, the last one releases it.

mod code;
mod layout;
mod source;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use vmm_sys_util::eventfd::EventFd;

pub use self::{
    code::Key,
    layout::{Layout, Stroke},
    source::Source,
};

/// Largest coordinate of a tablet; the smallest is 0.
pub const TABLET_MAX: u16 = 0x7fff;

/// A keyboard of the guest. Its methods are called with the hub's lock held and must not block.
pub trait Keyboard: Send + Sync {
    /// Whether the guest has a driver for it.
    fn is_listening(&self) -> bool;
    /// A key went down, or up.
    fn key(&self, key: Key, down: bool);
    /// Returns whether the guest has not yet taken all events of the keyboard.
    fn is_waiting(&self) -> bool;
    /// The client repeats a key that is down. Guests are not to repeat by themselves: a release that is late, by a slow line or in a busy
    /// node, would be a key that was held.
    fn repeat(&self, key: Key);
}

/// A pointer of the guest with absolute coordinates. Its methods are called with the hub's lock held and must not block.
pub trait Tablet: Send + Sync {
    /// The pointer is at this place (0 to [`TABLET_MAX`] in both directions), these buttons are down, and the wheels turned by so
    /// many steps.
    fn point(&self, pointer: Pointer);
}

/// State of a pointer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pointer {
    /// 0 to [`TABLET_MAX`], from left to right.
    pub x: u16,
    /// 0 to [`TABLET_MAX`], from top to bottom.
    pub y: u16,
    /// Bit 0 left, bit 1 middle, bit 2 right.
    pub buttons: u8,
    /// Steps up (down: negative).
    pub wheel: i32,
    /// Steps to the right (to the left: negative).
    pub horizontal_wheel: i32,
}

/// The keyboard's lights, as RFB numbers them: bit 0 scroll lock, bit 1 num lock, bit 2 caps lock.
pub const LED_CAPS: u8 = 1 << 2;
/// See [`LED_CAPS`].
pub const LED_NUM: u8 = 1 << 1;
/// See [`LED_CAPS`].
pub const LED_SCROLL: u8 = 1;

struct Inner {
    keyboards: Vec<Arc<dyn Keyboard>>,
    tablet: Option<Arc<dyn Tablet>>,
    layout: Layout,
    /// For each pressed key: the number of sources that hold it, and the keyboard that received it.
    held: BTreeMap<Key, (usize, usize)>,
    leds: u8,
    watcher: Option<Arc<EventFd>>,
}

/// Where keys and the pointer go.
pub struct Hub {
    inner: Mutex<Inner>,
}

impl Hub {
    /// One without devices. Keysyms mean keys of that layout.
    pub fn new(layout: Layout) -> Self {
        Self {
            inner: Mutex::new(Inner {
                keyboards: Vec::new(),
                tablet: None,
                layout,
                held: BTreeMap::new(),
                leds: 0,
                watcher: None,
            }),
        }
    }

    /// Adds a keyboard; keyboards added later take precedence.
    pub fn add_keyboard(&self, keyboard: Arc<dyn Keyboard>) {
        self.lock().keyboards.push(keyboard);
    }

    /// The tablet.
    pub fn set_tablet(&self, tablet: Arc<dyn Tablet>) {
        self.lock().tablet = Some(tablet);
    }

    /// One more that may type and point.
    pub fn source(hub: &Arc<Self>) -> Source {
        Source::new(Arc::clone(hub))
    }

    /// The guest switched the keyboard's lights.
    pub fn set_leds(&self, leds: u8) {
        let mut inner = self.lock();
        if std::mem::replace(&mut inner.leds, leds) != leds
            && let Some(watcher) = &inner.watcher
        {
            // It fails only when the counter is full, and then the watcher is awake.
            let _full = watcher.write(1);
        }
    }

    /// The keyboard's lights: see [`LED_CAPS`].
    pub fn leds(&self) -> u8 {
        self.lock().leds
    }

    /// Writes to `watcher` when the lights change. There is one watcher.
    pub fn watch_leds(&self, watcher: Arc<EventFd>) {
        self.lock().watcher = Some(watcher);
    }

    /// Returns whether the keyboard with a listening driver holds keys that the guest has not taken
    /// yet.
    pub fn keys_wait(&self) -> bool {
        let inner = self.lock();
        let best = inner
            .keyboards
            .iter()
            .rev()
            .find(|keyboard| keyboard.is_listening());
        best.is_some_and(|keyboard| keyboard.is_waiting())
    }

    fn layout(&self) -> Layout {
        self.lock().layout
    }

    fn press(&self, key: Key) {
        let mut inner = self.lock();
        if let Some((holders, _)) = inner.held.get_mut(&key) {
            *holders = holders.saturating_add(1);
            return;
        }
        let listens = inner
            .keyboards
            .iter()
            .rposition(|keyboard| keyboard.is_listening());
        let Some(keyboard) = listens else { return };
        inner.held.insert(key, (1, keyboard));
        if let Some(keyboard) = inner.keyboards.get(keyboard) {
            keyboard.key(key, true);
        }
    }

    fn repeat(&self, key: Key) {
        let inner = self.lock();
        let told = inner.held.get(&key).map(|(_, keyboard)| *keyboard);
        if let Some(keyboard) = told.and_then(|keyboard| inner.keyboards.get(keyboard)) {
            keyboard.repeat(key);
        }
    }

    fn release(&self, key: Key) {
        let mut inner = self.lock();
        let Some((holders, keyboard)) = inner.held.get_mut(&key) else {
            return;
        };
        *holders = holders.saturating_sub(1);
        if *holders > 0 {
            return;
        }
        let keyboard = *keyboard;
        inner.held.remove(&key);
        if let Some(keyboard) = inner.keyboards.get(keyboard) {
            keyboard.key(key, false);
        }
    }

    fn point(&self, pointer: Pointer) {
        if let Some(tablet) = &self.lock().tablet {
            tablet.point(pointer);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests;

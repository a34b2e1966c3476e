//! Events on their way to the driver.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use vmm_sys_util::eventfd::EventFd;

use super::config::code;
use crate::input::Pointer;

/// Events that wait, beyond which only releases are taken.
const FULL: usize = 1024;
/// Most keys and buttons that are down.
pub(super) const MAX_DOWN: usize = 256;
/// Most events that ever wait: a release and its SYN_REPORT for each key that is down.
pub(super) const MAX_EVENTS: usize = FULL + 8 + 2 * MAX_DOWN;

/// Events of a new place of the pointer: two axes and a SYN_REPORT.
const PLACE: usize = 3;

/// Value of a key's event when it is repeated (Linux' Documentation/input/event-codes.rst, EV_KEY).
pub(super) const REPEATED: u32 = 2;

/// `struct virtio_input_event`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub kind: u16,
    pub code: u16,
    pub value: u32,
}

impl Event {
    const SYNC: Self = Self {
        kind: code::EV_SYN,
        code: 0,
        value: 0,
    };

    const fn new(kind: u16, code: u16, value: u32) -> Self {
        Self { kind, code, value }
    }

    pub fn encode(self) -> [u8; 8] {
        let ([a, b], [c, d], [e, f, g, h]) = (
            self.kind.to_le_bytes(),
            self.code.to_le_bytes(),
            self.value.to_le_bytes(),
        );
        [a, b, c, d, e, f, g, h]
    }

    pub fn decode([a, b, c, d, e, f, g, h]: [u8; 8]) -> Self {
        Self {
            kind: u16::from_le_bytes([a, b]),
            code: u16::from_le_bytes([c, d]),
            value: u32::from_le_bytes([e, f, g, h]),
        }
    }
}

#[derive(Debug, Default)]
struct State {
    pending: VecDeque<Event>,
    /// Keys and buttons that are down after all pending events.
    down: BTreeSet<u16>,
    /// Last queued position of the pointer.
    pointer: Option<(u16, u16)>,
    /// The last three of the pending events are the pointer's place and nothing else.
    moved_last: bool,
}

impl State {
    fn is_full(&self) -> bool {
        self.pending.len() >= FULL
    }

    fn push(&mut self, events: impl IntoIterator<Item = Event>) {
        self.pending.extend(events);
        self.pending.push_back(Event::SYNC);
        self.moved_last = false;
    }

    /// Whether that is news, and there is room for it. Notes it then.
    fn takes(&mut self, code: u16, down: bool) -> bool {
        if !down {
            return self.down.remove(&code);
        }
        !self.is_full() && self.down.len() < MAX_DOWN && self.down.insert(code)
    }
}

/// Events that wait for the driver's buffers. The hub adds them, the worker takes them.
#[derive(Debug)]
pub(super) struct Events {
    state: Mutex<State>,
    driven: AtomicBool,
    wake: EventFd,
}

impl Events {
    pub fn new(wake: EventFd) -> Self {
        Self {
            state: Mutex::default(),
            driven: AtomicBool::new(false),
            wake,
        }
    }

    /// Written to when there is something to be taken.
    pub fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// Whether a driver uses the device.
    pub fn is_driven(&self) -> bool {
        self.driven.load(Ordering::SeqCst)
    }

    pub fn set_driven(&self) {
        self.driven.store(true, Ordering::SeqCst);
    }

    /// Forgets the driver and all pending events.
    pub fn forget(&self) {
        self.driven.store(false, Ordering::SeqCst);
        *self.lock() = State::default();
    }

    /// A key or button goes down, or up.
    pub fn button(&self, code: u16, down: bool) {
        let mut state = self.lock();
        if self.is_driven() && state.takes(code, down) {
            state.push([Event::new(code::EV_KEY, code, down.into())]);
            self.notify();
        }
    }

    /// Queues the repetition of a held key. A slow guest gets fewer repetitions.
    pub fn repeat(&self, code: u16) {
        let event = Event::new(code::EV_KEY, code, REPEATED);
        let mut state = self.lock();
        // Before the SYN_REPORT that ends it.
        let last = state.pending.iter().rev().nth(1);
        if last != Some(&event) && state.down.contains(&code) && !state.is_full() {
            state.push([event]);
            self.notify();
        }
    }

    /// The pointer's place, buttons and wheels. A place that waits is replaced by a new one, unless it is the first of all.
    pub fn point(&self, pointer: Pointer) {
        const BUTTONS: [(u16, u8); 3] = [(code::BTN_LEFT, 1), (code::BTN_MIDDLE, 2), (code::BTN_RIGHT, 4)];
        if !self.is_driven() {
            return;
        }
        let mut state = self.lock();
        let place = (pointer.x, pointer.y);
        let mut others = Vec::new();
        for (code, bit) in BUTTONS {
            let down = pointer.buttons & bit != 0;
            if down != state.down.contains(&code) && state.takes(code, down) {
                others.push(Event::new(code::EV_KEY, code, down.into()));
            }
        }
        let wheels = [
            (code::REL_WHEEL, pointer.wheel),
            (code::REL_HWHEEL, pointer.horizontal_wheel),
        ];
        if !state.is_full() {
            let turned = wheels.into_iter().filter(|(_, steps)| *steps != 0);
            others.extend(turned.map(|(code, steps)| Event::new(code::EV_REL, code, steps.cast_unsigned())));
        }
        // A full list is longer than a place.
        let moved = state.pointer != Some(place) && (!state.is_full() || state.moved_last);
        if !moved && others.is_empty() {
            return;
        }
        if moved {
            // The first three may be on their way to the driver.
            if state.moved_last && state.pending.len() > PLACE {
                let length = state.pending.len().saturating_sub(PLACE);
                state.pending.truncate(length);
            }
            state.pointer = Some(place);
            let axis = |axis, value: u16| Event::new(code::EV_ABS, axis, value.into());
            state
                .pending
                .extend([axis(code::ABS_X, pointer.x), axis(code::ABS_Y, pointer.y)]);
        }
        let only_moved = others.is_empty();
        state.push(others);
        state.moved_last = only_moved;
        self.notify();
    }

    /// The first event that waits, which stays.
    pub fn first(&self) -> Option<Event> {
        self.lock().pending.front().copied()
    }

    /// The first event was handed over.
    pub fn pop(&self) {
        let mut state = self.lock();
        state.pending.pop_front();
        // The rest of a partly delivered pointer position must not be replaced.
        state.moved_last &= state.pending.len() >= PLACE;
    }

    /// Releases all keys and buttons, because their holder is gone.
    pub fn release_all(&self) {
        let mut state = self.lock();
        for code in std::mem::take(&mut state.down) {
            state.push([Event::new(code::EV_KEY, code, 0)]);
        }
        self.notify();
    }

    pub fn state(&self) -> (Vec<Event>, Vec<u16>) {
        let state = self.lock();
        (
            state.pending.iter().copied().collect(),
            state.down.iter().copied().collect(),
        )
    }

    pub fn set_state(&self, pending: VecDeque<Event>, down: Vec<u16>) {
        *self.lock() = State {
            pending,
            down: down.into_iter().collect(),
            ..State::default()
        };
    }

    fn notify(&self) {
        // It fails only when the counter is full, and then the worker is awake.
        let _full = self.wake.write(1);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

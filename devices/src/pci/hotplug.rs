//! ACPI PCI hot-plug: the registers that the DSDT's methods use, and the host's requests through
//! them.
//!
//! Each bus has three registers, those of bus *b* at 12 *b*:
//!
//! | offset | register | read | write |
//! |---|---|---|---|
//! | 0 | CHECK | slots to look at: a function came; cleared by the read | nothing |
//! | 4 | ASKED | slots that the guest should give back, or that are empty by force; cleared by the read | nothing |
//! | 8 | EJECT | zero | slots that the guest gives back |
//!
//! One more register follows those of the last bus, at 36: PRESENT, the buses whose host bridges
//! the guest finds, bit *n* for bus *n*; writes have no effect. Bus 0 is always present. Each other
//! bus appears with its first function and stays until a reset of the machine, so that a guest does
//! not probe 32 device numbers of each unused bus.
//!
//! Bit *n* of the other registers is device *n* of the bus. Device 0 of a bus is no slot; its bit
//! in CHECK reports a new bus. Registers are read and written whole (32 bits); other accesses read
//! as ones and have no effect. The interrupt is a level: high while CHECK or ASKED is not empty, so
//! that a guest that is still booting loses no event. A read clears CHECK or ASKED here, but not
//! the record that a slot was *requested*:
//!
//! ```text
//!            ask                  EJECT written              taken off the bus
//!  in use ────────▶ requested ───────────────▶ ejecting ──────────────────────▶ empty
//!    ▲ │              │     ▲ ask: again                                          ▲
//!    │ └──────────────┴─────┴────────────── withdrawn (by force) ─────────────────┤
//!    └──────────────────────────────── plugged ───────────────────────────────────┘
//! ```
//!
//! A guest can eject only requested slots, so no value that it writes affects another slot. The
//! host holds the state's lock while it takes a function off the bus: an older write never ejects a
//! slot that is in use again.

mod state;

use std::sync::{Arc, Mutex, MutexGuard};

use super::root::{BUSES, DEVICES, SLOTS, is_slot, lock};
use crate::{
    bus::{BusDevice, Effect, SharedDevice},
    interrupt::LevelLine,
};

/// First I/O port of the registers.
pub const PORT: u16 = 0xae00;
/// Ports of one bus.
pub const BUS_PORTS: u8 = 12;
/// Offset of PRESENT.
#[allow(clippy::cast_possible_truncation, reason = "three buses")]
pub const PRESENT: u8 = BUS_PORTS * BUSES as u8;
/// Number of ports.
pub const PORTS: u8 = PRESENT + 4;

/// Offset of CHECK.
const CHECK: u64 = 0;
/// Offset of ASKED.
const ASKED: u64 = 4;
/// Offset of EJECT.
const EJECT: u64 = 8;

/// Sets of slots: bit *n* is slot *n*, so that each bus has a word of 32 bits.
type Set = u128;

/// Bit masks of all buses, and of the buses that are absent until they have a function.
const ALL_BUSES: u32 = (1 << BUSES) - 1;
const FURTHER_BUSES: u32 = ALL_BUSES & !1;

#[derive(Clone, Debug)]
struct State {
    check: Set,
    asked: Set,
    requested: Set,
    ejecting: Set,
    /// Buses whose host bridges the guest does not find.
    absent: u32,
}

impl Default for State {
    fn default() -> Self {
        Self {
            check: 0,
            asked: 0,
            requested: 0,
            ejecting: 0,
            absent: FURTHER_BUSES,
        }
    }
}

impl State {
    /// Marks the buses of a set of slots as present; returns the slot 0 bits of the new ones.
    fn bring(&mut self, slots: Set) -> Set {
        let mut came = 0;
        for bus in (0_u32..).take(BUSES).filter(|bus| word(slots, *bus) != 0) {
            let bit = 1_u32 << bus;
            if self.absent & bit != 0 {
                self.absent &= !bit;
                came |= set_of(1, bus);
            }
        }
        came
    }

    fn forget(&mut self, bit: Set) {
        for set in [
            &mut self.check,
            &mut self.asked,
            &mut self.requested,
            &mut self.ejecting,
        ] {
            *set &= !bit;
        }
    }
}

/// See the module.
pub struct HotPlug {
    state: Mutex<State>,
    line: Arc<dyn LevelLine>,
}

/// Returns a slot's bit; 0 for numbers that are no slot, such as the host bridge's.
fn bit(slot: u8) -> Set {
    if is_slot(slot.into()) {
        1_u128.checked_shl(slot.into()).unwrap_or(0)
    } else {
        0
    }
}

fn slots(set: Set) -> impl Iterator<Item = u8> {
    (0..u8::MAX).filter(move |slot| set & bit(*slot) != 0)
}

/// The slots of a bus that are in a set, as its registers show them.
fn word(set: Set, bus: u32) -> u32 {
    let shifted = set.checked_shr(bus.saturating_mul(u32::BITS)).unwrap_or(0);
    u32::try_from(shifted & Set::from(u32::MAX)).unwrap_or(0)
}

/// The set that a bus's register shows as `word`.
fn set_of(word: u32, bus: u32) -> Set {
    let word = Set::from(word);
    word.checked_shl(bus.saturating_mul(u32::BITS)).unwrap_or(0)
}

/// Bus and register that an offset means; `None` for all that is not the beginning of a register.
fn register(offset: u64) -> Option<(u32, u64)> {
    const LENGTH: u64 = BUS_PORTS as u64;
    let bus = u32::try_from(offset / LENGTH).ok()?;
    ((bus as usize) < BUSES).then_some((bus, offset % LENGTH))
}

impl HotPlug {
    /// Creates registers without pending events; interrupts the guest through `line`.
    pub fn new(line: Arc<dyn LevelLine>) -> Arc<Self> {
        const { assert!(DEVICES == 32 && SLOTS <= 128) };
        Arc::new(Self {
            state: Mutex::default(),
            line,
        })
    }

    /// The registers, to be mapped at [`PORT`] with [`PORTS`] ports.
    pub fn registers(self: &Arc<Self>) -> SharedDevice {
        Arc::new(Mutex::new(Registers(Arc::clone(self))))
    }

    /// The guest is switched on: the buses of all slots that are `taken` are there.
    pub fn power_on(&self, taken: impl Fn(u8) -> bool) {
        let taken = slots(Set::MAX).filter(|slot| taken(*slot)).map(bit);
        let taken = taken.fold(0, |set, bit| set | bit);
        self.change(|state| {
            state.bring(taken);
        });
    }

    /// Reports a function in the slot to the guest, and the bus if the function is the first there.
    pub fn plugged(&self, slot: u8) {
        self.change(|state| {
            state.forget(bit(slot));
            let bus = state.bring(bit(slot));
            state.check |= bit(slot) | bus;
        });
    }

    /// Asks the guest to give the slot back, also if it was asked before.
    pub fn ask(&self, slot: u8) {
        self.change(|state| {
            state.requested |= bit(slot);
            state.asked |= bit(slot);
        });
    }

    /// Takes the slot's function off the bus (with `take`) regardless of the guest, and asks the
    /// guest for the slot so that the guest cleans up: at a check, Linux only looks for new
    /// functions. An eject of the slot then has no effect.
    pub fn withdraw(&self, slot: u8, take: impl FnOnce()) {
        self.change(|state| {
            state.forget(bit(slot));
            state.asked |= bit(slot);
            take();
        });
    }

    /// Takes the functions ejected by the guest off the bus (with `take`). Call it after
    /// [`Effect::Eject`], before the vCPU continues. Any number of vCPUs may call it at once; each
    /// slot is taken once.
    pub fn eject(&self, mut take: impl FnMut(u8)) {
        self.change(|state| {
            for slot in slots(state.ejecting) {
                take(slot);
                state.forget(bit(slot));
            }
        });
    }

    /// Whether the guest was asked for the slot and has not given it back.
    pub fn is_requested(&self, slot: u8) -> bool {
        self.state().requested & bit(slot) != 0
    }

    /// Resets to the state after power-on: the guest discovers the functions on its own. Returns
    /// the slots that the old guest was asked for and still had, and cancels those requests.
    pub fn reset(&self) -> Vec<u8> {
        let mut requested = 0;
        self.change(|state| {
            requested = state.requested;
            *state = State::default();
        });
        slots(requested).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.state();
        let result = change(&mut state);
        self.line.set(state.check | state.asked != 0);
        result
    }

    fn read(&self, offset: u64) -> Option<u32> {
        if offset == u64::from(PRESENT) {
            return Some(ALL_BUSES & !self.state().absent);
        }
        let (bus, register) = register(offset)?;
        let take = |set: &mut Set| {
            let word = word(*set, bus);
            *set &= !set_of(word, bus);
            word
        };
        match register {
            CHECK => Some(self.change(|state| take(&mut state.check))),
            ASKED => Some(self.change(|state| take(&mut state.asked))),
            EJECT => Some(0),
            _ => None,
        }
    }
}

struct Registers(Arc<HotPlug>);

impl BusDevice for Registers {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Ok(register) = <&mut [u8; 4]>::try_from(data)
            && let Some(value) = self.0.read(offset)
        {
            *register = value.to_le_bytes();
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let (Some((bus, EJECT)), Ok(value)) = (register(offset), <[u8; 4]>::try_from(data)) else {
            return Effect::None;
        };
        let mut state = self.0.state();
        state.ejecting |= set_of(u32::from_le_bytes(value), bus) & state.requested;
        if state.ejecting == 0 {
            Effect::None
        } else {
            Effect::Eject
        }
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests;

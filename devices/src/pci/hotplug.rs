//! ACPI PCI hot-plug: the registers that the DSDT's methods use, and what the host asks through them.
//!
//! | offset | register | read | write |
//! |---|---|---|---|
//! | 0 | CHECK | slots to look at: a function came; cleared by the read | nothing |
//! | 4 | ASKED | slots that the guest is asked to give back, or that are empty by force; cleared by the read | nothing |
//! | 8 | EJECT | zero | slots that the guest gives back |
//!
//! Bit *n* is device *n* of bus 0. Registers are read and written whole (32 bits); all else reads as ones and does
//! nothing. The interrupt is a level: high while CHECK or ASKED holds anything, so that nothing is lost on a guest that
//! is still booting. What is read is forgotten here, but not that a slot was *requested*:
//!
//! ```text
//!            ask                  EJECT written              taken off the bus
//!  in use ────────▶ requested ───────────────▶ ejecting ──────────────────────▶ empty
//!    ▲ │              │     ▲ ask: again                                          ▲
//!    │ └──────────────┴─────┴────────────── withdrawn (by force) ─────────────────┤
//!    └──────────────────────────────── plugged ───────────────────────────────────┘
//! ```
//!
//! A guest can eject only what it was asked for, so no value that it writes reaches another slot. The host keeps
//! the state's lock while it takes a function off the bus: a slot that is in use again is never ejected by an older write.

use std::sync::{Arc, Mutex, MutexGuard};

use super::root::{SLOTS, lock};
use crate::{
    bus::{BusDevice, Effect, SharedDevice},
    interrupt::LevelLine,
    state::{Section, StateError, check, message},
};

/// First I/O port of the registers.
pub const PORT: u16 = 0xae00;
/// Number of ports.
pub const PORTS: u8 = 12;

/// Offset of CHECK.
const CHECK: u64 = 0;
/// Offset of ASKED.
const ASKED: u64 = 4;
/// Offset of EJECT.
const EJECT: u64 = 8;

/// Sets of slots, a bit each.
#[derive(Debug, Default)]
struct State {
    check: u32,
    asked: u32,
    requested: u32,
    ejecting: u32,
}

impl State {
    fn forget(&mut self, bit: u32) {
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

/// A slot's bit; slot 0, the host bridge, has none.
fn bit(slot: u8) -> u32 {
    match slot {
        0 => 0,
        _ => 1_u32.checked_shl(slot.into()).unwrap_or(0),
    }
}

fn slots(set: u32) -> impl Iterator<Item = u8> {
    (1_u8..32).filter(move |slot| set & bit(*slot) != 0)
}

impl HotPlug {
    /// With nothing to tell; interrupts the guest through `line`.
    pub fn new(line: Arc<dyn LevelLine>) -> Arc<Self> {
        const { assert!(SLOTS == 32) };
        Arc::new(Self {
            state: Mutex::default(),
            line,
        })
    }

    /// The registers, to be mapped at [`PORT`] with [`PORTS`] ports.
    pub fn registers(self: &Arc<Self>) -> SharedDevice {
        Arc::new(Mutex::new(Registers(Arc::clone(self))))
    }

    /// There is a function in the slot: tells the guest.
    pub fn plugged(&self, slot: u8) {
        self.change(|state| {
            state.forget(bit(slot));
            state.check |= bit(slot);
        });
    }

    /// Asks the guest to give the slot back, also if it was asked before.
    pub fn ask(&self, slot: u8) {
        self.change(|state| {
            state.requested |= bit(slot);
            state.asked |= bit(slot);
        });
    }

    /// Takes the slot's function off the bus (with `take`), whatever the guest does, and asks the guest for it, so that it
    /// cleans up: at a check, Linux only looks for what is new. What it ejects then is nothing.
    pub fn withdraw(&self, slot: u8, take: impl FnOnce()) {
        self.change(|state| {
            state.forget(bit(slot));
            state.asked |= bit(slot);
            take();
        });
    }

    /// Takes the functions off the bus (with `take`) that the guest ejected: after [`Effect::Eject`], before the vCPU
    /// goes on. Any number of vCPUs may come here; each slot is taken once.
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

    /// To the state after power-on: the guest finds out by itself what there is. Gives the slots that the old guest
    /// was asked for and still had; nothing is asked any more.
    pub fn reset(&self) -> Vec<u8> {
        let mut requested = 0;
        self.change(|state| {
            requested = state.requested;
            *state = State::default();
        });
        slots(requested).collect()
    }

    /// What is to be read and what the guest was asked for. The machine's vCPUs are stopped.
    pub fn save(&self) -> Section {
        let state = self.state();
        let bus = message::HotPlugBus {
            check: state.check,
            asked: state.asked,
            requested: state.requested,
            ejecting: state.ejecting,
        };
        Section::new("hot-plug", &message::HotPlug { buses: vec![bus] })
    }

    /// Takes over a saved state and sets the interrupt line accordingly.
    pub fn restore(&self, section: &Section) -> Result<(), StateError> {
        let saved: message::HotPlug = section.open()?;
        let [bus] = saved.buses.as_slice() else {
            return Err(StateError::invalid("buses", "not as many as the machine has"));
        };
        let new = State {
            check: bus.check,
            asked: bus.asked,
            requested: bus.requested,
            ejecting: bus.ejecting,
        };
        let all = new.check | new.asked | new.requested | new.ejecting;
        check(all & 1 == 0, "buses", "device 0 can't be plugged")?;
        check(
            new.ejecting & !new.requested == 0,
            "buses.ejecting",
            "a slot that was not asked for",
        )?;
        self.change(|state| *state = new);
        Ok(())
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
        match offset {
            CHECK => Some(self.change(|state| std::mem::take(&mut state.check))),
            ASKED => Some(self.change(|state| std::mem::take(&mut state.asked))),
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
        let (EJECT, Ok(value)) = (offset, <[u8; 4]>::try_from(data)) else {
            return Effect::None;
        };
        let mut state = self.0.state();
        state.ejecting |= u32::from_le_bytes(value) & state.requested;
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
mod tests {
    use std::{
        collections::BTreeSet,
        sync::atomic::{AtomicBool, Ordering},
    };

    use proptest::prelude::*;

    use super::*;

    #[derive(Default)]
    struct Line(AtomicBool);

    impl LevelLine for Line {
        fn set(&self, high: bool) {
            self.0.store(high, Ordering::SeqCst);
        }
    }

    struct Rig {
        line: Arc<Line>,
        hotplug: Arc<HotPlug>,
        registers: SharedDevice,
    }

    impl Rig {
        fn new() -> Self {
            let line = Arc::new(Line::default());
            let hotplug = HotPlug::new(line.clone());
            let registers = hotplug.registers();
            Self {
                line,
                hotplug,
                registers,
            }
        }

        fn read(&self, offset: u64) -> u32 {
            let mut data = [0; 4];
            lock(&self.registers).read(offset, &mut data);
            u32::from_le_bytes(data)
        }

        /// Writes to EJECT and carries the effect out; gives what was taken.
        fn eject(&self, value: u32) -> Vec<u8> {
            let mut taken = Vec::new();
            match lock(&self.registers).write(EJECT, &value.to_le_bytes()) {
                Effect::None => {}
                Effect::Eject => self.hotplug.eject(|slot| taken.push(slot)),
                other => panic!("{other:?}"),
            }
            taken
        }

        fn high(&self) -> bool {
            self.line.0.load(Ordering::SeqCst)
        }
    }

    #[test]
    fn a_disk_comes_and_goes_as_a_guest_does_it() {
        let rig = Rig::new();
        rig.hotplug.plugged(7);
        assert!(rig.high());
        assert_eq!((rig.read(CHECK), rig.read(ASKED)), (1 << 7, 0));
        assert!(!rig.high(), "all is read");
        rig.hotplug.ask(7);
        assert!(rig.high() && rig.hotplug.is_requested(7));
        assert_eq!((rig.read(CHECK), rig.read(ASKED)), (0, 1 << 7));
        assert!(!rig.high());
        assert_eq!(rig.eject(1 << 7), [7]);
        assert!(!rig.hotplug.is_requested(7));
        assert_eq!(rig.eject(1 << 7), [], "only once");
    }

    #[test]
    fn a_guest_that_does_not_answer_is_asked_again() {
        let rig = Rig::new();
        rig.hotplug.ask(3);
        assert_eq!(rig.read(ASKED), 1 << 3);
        rig.hotplug.ask(3);
        assert!(rig.high());
        assert_eq!(rig.read(ASKED), 1 << 3);
    }

    #[test]
    fn nothing_is_ejected_that_was_not_asked_for() {
        let rig = Rig::new();
        rig.hotplug.plugged(7);
        assert_eq!(rig.eject(u32::MAX), []);
        rig.hotplug.ask(4);
        assert_eq!(rig.eject(u32::MAX), [4]);
    }

    #[test]
    fn an_eject_that_comes_after_the_slot_was_withdrawn_and_used_again_does_nothing() {
        let rig = Rig::new();
        rig.hotplug.ask(4);
        let effect = lock(&rig.registers).write(EJECT, &(1_u32 << 4).to_le_bytes());
        assert_eq!(effect, Effect::Eject);
        let mut taken = 0;
        rig.hotplug.withdraw(4, || taken += 1);
        assert_eq!(
            (rig.read(CHECK), rig.read(ASKED)),
            (0, 1 << 4),
            "it is to clean up"
        );
        assert_eq!(rig.eject(1 << 4), [], "and has nothing to eject");
        rig.hotplug.plugged(4);
        rig.hotplug.eject(|slot| panic!("slot {slot} is in use again"));
        assert_eq!(taken, 1);
        assert_eq!(rig.read(CHECK), 1 << 4);
    }

    #[test]
    fn a_reset_forgets_what_was_to_be_told_and_gives_what_was_asked_for() {
        let rig = Rig::new();
        rig.hotplug.plugged(1);
        rig.hotplug.ask(2);
        rig.hotplug.ask(31);
        assert_eq!(rig.read(ASKED), 1 << 2 | 1 << 31);
        assert_eq!(rig.hotplug.reset(), [2, 31]);
        assert!(!rig.high());
        assert_eq!((rig.read(CHECK), rig.eject(u32::MAX)), (0, vec![]));
        assert_eq!(rig.hotplug.reset(), []);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Plug(u8),
        Ask(u8),
        Withdraw(u8),
        Read(u64, usize),
        Write(u64, Vec<u8>),
        Reset,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            any::<u8>().prop_map(Step::Plug),
            (0_u8..34).prop_map(Step::Ask),
            (0_u8..34).prop_map(Step::Withdraw),
            (0_u64..16, 1_usize..=8).prop_map(|(offset, width)| Step::Read(offset, width)),
            (0_u64..16, prop::collection::vec(any::<u8>(), 1..=8)).prop_map(|(o, d)| Step::Write(o, d)),
            any::<[u8; 4]>().prop_map(|data| Step::Write(EJECT, data.into())),
            Just(Step::Reset),
        ]
    }

    proptest! {
        /// Whatever host and guest do: a slot is taken only if it was asked for since it was last plugged, taken or
        /// reset; and the line says whether something is to be read.
        #[test]
        fn only_what_was_asked_for_is_ever_taken(steps in prop::collection::vec(step(), 1..100)) {
            let rig = Rig::new();
            let mut asked = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Plug(slot) => {
                        rig.hotplug.plugged(slot);
                        asked.remove(&slot);
                    }
                    Step::Ask(slot) => {
                        rig.hotplug.ask(slot);
                        asked.insert(slot);
                    }
                    Step::Withdraw(slot) => {
                        rig.hotplug.withdraw(slot, || ());
                        asked.remove(&slot);
                    }
                    Step::Read(offset, width) => {
                        let mut data = vec![0; width];
                        lock(&rig.registers).read(offset, &mut data);
                        if width != 4 || !matches!(offset, CHECK | ASKED | EJECT) {
                            prop_assert_eq!(data, vec![0xff; width]);
                        }
                    }
                    Step::Write(offset, data) => {
                        if lock(&rig.registers).write(offset, &data) == Effect::Eject {
                            rig.hotplug.eject(|slot| assert!(asked.remove(&slot)));
                        }
                    }
                    Step::Reset => {
                        let expected: Vec<u8> = asked.iter().copied().filter(|slot| (1..32).contains(slot)).collect();
                        prop_assert_eq!(rig.hotplug.reset(), expected);
                        asked.clear();
                    }
                }
                let state = rig.hotplug.state();
                prop_assert_eq!(rig.high(), state.check | state.asked != 0);
                prop_assert_eq!((state.check | state.asked | state.requested | state.ejecting) & 1, 0);
            }
        }
    }
}

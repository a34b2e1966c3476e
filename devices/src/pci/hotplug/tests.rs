//! The registers against a guest and a host that do anything.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicBool, Ordering},
};

use proptest::prelude::*;

use super::*;

mod state;

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

    /// Writes to EJECT and carries the effect out; returns the taken slots.
    fn eject(&self, value: u32) -> Vec<u8> {
        self.eject_of(0, value)
    }

    /// The same of another bus.
    fn eject_of(&self, bus: u64, value: u32) -> Vec<u8> {
        let mut taken = Vec::new();
        match lock(&self.registers).write(12 * bus + EJECT, &value.to_le_bytes()) {
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
    assert!(rig.eject(1 << 7).is_empty(), "only once");
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
    assert!(rig.eject(u32::MAX).is_empty());
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
    assert!(rig.eject(1 << 4).is_empty(), "and has nothing to eject");
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
    assert!(rig.hotplug.reset().is_empty());
}

#[test]
fn each_bus_has_registers_of_its_own_and_one_line() {
    let rig = Rig::new();
    rig.hotplug.plugged(33);
    rig.hotplug.ask(95);
    assert!(rig.high());
    assert_eq!((rig.read(CHECK), rig.read(ASKED)), (0, 0));
    assert_eq!(
        (rig.read(12 + CHECK), rig.read(12 + ASKED), rig.read(24 + CHECK)),
        (1 << 1 | 1, 0, 0)
    );
    assert!(rig.high(), "something of bus 2 is left");
    assert_eq!(rig.read(24 + ASKED), 1 << 31);
    assert!(!rig.high());
    assert_eq!((rig.eject(u32::MAX), rig.eject_of(1, u32::MAX)), (vec![], vec![]));
    assert_eq!(rig.eject_of(2, u32::MAX), [95]);
    // There is no fourth bus, and no slot with device number 0.
    for slot in [0, 32, 64, 96, 127, 128, u8::MAX] {
        rig.hotplug.ask(slot);
        rig.hotplug.plugged(slot);
    }
    assert!(!rig.high());
    assert_eq!(rig.read(40), u32::MAX);
}

#[test]
fn a_further_bus_is_there_from_its_first_function_on_and_until_a_reset() {
    let rig = Rig::new();
    let present = || rig.read(36);
    assert_eq!(present(), 0b001);
    // A function present at power-on adds its bus without an event.
    rig.hotplug.power_on(|slot| slot == 5 || slot == 70);
    assert_eq!((present(), rig.high()), (0b101, false));
    rig.hotplug.plugged(71);
    assert_eq!(rig.read(24 + CHECK), 1 << 7, "the bus was there");
    // One that comes later brings the bus with itself, once.
    rig.hotplug.plugged(40);
    assert_eq!((present(), rig.read(12 + CHECK)), (0b111, 1 << 8 | 1));
    rig.hotplug.plugged(41);
    assert_eq!(rig.read(12 + CHECK), 1 << 9);
    // The bus outlives its functions.
    rig.hotplug.withdraw(40, || ());
    rig.hotplug.ask(41);
    assert_eq!(rig.eject_of(1, 1 << 9), [41]);
    assert_eq!(present(), 0b111);
    rig.hotplug.reset();
    assert_eq!(present(), 0b001);
    rig.hotplug.plugged(5);
    assert_eq!((present(), rig.read(CHECK)), (0b001, 1 << 5), "bus 0 never comes");
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
        (0_u8..98).prop_map(Step::Ask),
        (0_u8..98).prop_map(Step::Withdraw),
        (0_u64..44, 1_usize..=8).prop_map(|(offset, width)| Step::Read(offset, width)),
        (0_u64..44, prop::collection::vec(any::<u8>(), 1..=8)).prop_map(|(o, d)| Step::Write(o, d)),
        (0_u64..3, any::<[u8; 4]>()).prop_map(|(bus, data)| Step::Write(12 * bus + EJECT, data.into())),
        Just(Step::Reset),
    ]
}

proptest! {
    /// For any sequence of host and guest actions: a slot is taken only after a request since its
    /// last plug, take or reset, and the line shows whether events are unread.
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
                    if width != 4 || offset > 36 || !matches!(offset % 12, CHECK | ASKED | EJECT) {
                        prop_assert_eq!(data, vec![0xff; width]);
                    }
                }
                Step::Write(offset, data) => {
                    if lock(&rig.registers).write(offset, &data) == Effect::Eject {
                        rig.hotplug.eject(|slot| assert!(asked.remove(&slot)));
                    }
                }
                Step::Reset => {
                    let expected: Vec<u8> = asked.iter().copied().filter(|slot| *slot < 96 && slot % 32 != 0).collect();
                    prop_assert_eq!(rig.hotplug.reset(), expected);
                    asked.clear();
                }
            }
            let state = rig.hotplug.state();
            prop_assert_eq!(rig.high(), state.check | state.asked != 0);
            prop_assert_eq!((state.asked | state.requested | state.ejecting) & 0x1_0000_0001_0000_0001, 0);
            prop_assert_eq!(state.check & 1, 0);
        }
    }
}

//! Root buses that are saved, thrown away and restored.

use super::*;
use crate::state::{Section, StateError, message, refuses};

/// Slots of all buses.
const SLOTS: [u8; 4] = [1, 5, 33, 95];
/// Places for BARs: overlapping ones, the other device's, one outside all windows.
const PLACES: [u64; 6] = [
    HIGH.start,
    HIGH.start + 0x8000,
    HIGH.start + 0x1_0000,
    LOW.start,
    FOREIGN - 0x7000,
    0x8000_0000,
];
const BARS: [(usize, BarKind, u64); 2] = [(0, BarKind::Memory64, 0x8000), (2, BarKind::Memory64, 0x1_0000)];

#[derive(Clone, Debug)]
enum Step {
    /// Of a card: a BAR to a place.
    Move(usize, u64, usize),
    /// Of a card: the command register.
    Command(usize, u32),
    Remove(usize),
    Force(usize),
    Add(usize),
    ConfigAddress(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let card = || 0..SLOTS.len();
    prop_oneof![
        3 => (card(), 0_u64..2, 0..PLACES.len()).prop_map(|(card, bar, place)| Step::Move(card, bar, place)),
        2 => (card(), prop_oneof![Just(0), Just(2)]).prop_map(|(card, value)| Step::Command(card, value)),
        1 => card().prop_map(Step::Remove),
        1 => card().prop_map(Step::Force),
        1 => card().prop_map(Step::Add),
        1 => any::<u32>().prop_map(Step::ConfigAddress),
    ]
}

/// A machine with its cards, by slot.
struct Twin {
    machine: Machine,
    cards: [Option<Arc<Mutex<Card>>>; 4],
}

impl Twin {
    fn new() -> Self {
        let mut twin = Self {
            machine: Machine::new(),
            cards: [const { None }; 4],
        };
        (0..SLOTS.len()).for_each(|card| twin.run(&Step::Add(card)));
        twin
    }

    fn run(&mut self, step: &Step) {
        let machine = &self.machine;
        match *step {
            Step::Move(card, bar, place) => {
                let (slot, register) = (u64::from(SLOTS[card]), 0x10 + 8 * bar);
                let _effect = machine.set_config(slot, register, PLACES[place] as u32);
                let _effect = machine.set_config(slot, register + 4, (PLACES[place] >> 32) as u32);
            }
            Step::Command(card, value) => {
                let _effect = machine.set_config(SLOTS[card].into(), 4, value);
            }
            Step::Remove(card) => {
                let there = machine.root.remove(SLOTS[card], &machine.mmio);
                assert_eq!(there, self.cards[card].take().is_some());
            }
            Step::Force(card) => {
                let there = machine.root.remove_by_force(SLOTS[card], &machine.mmio);
                assert_eq!(there, self.cards[card].take().is_some());
            }
            Step::Add(card) => {
                if self.cards[card].is_none() {
                    let new = Card::shared(SLOTS[card], &BARS);
                    machine.root.add(SLOTS[card], new.clone()).unwrap();
                    self.cards[card] = Some(new);
                }
            }
            Step::ConfigAddress(value) => {
                let _effect = machine.pio.write(0xcf8, &value.to_le_bytes());
            }
        }
    }

    /// Returns all guest-visible values.
    fn shown(&self) -> Vec<u64> {
        let places = PLACES
            .into_iter()
            .flat_map(|place| (0..0x1_8000).step_by(0x1000).map(move |offset| place + offset));
        let registers = SLOTS.into_iter().flat_map(|slot| {
            (0..0x100)
                .step_by(4)
                .map(move |register| ECAM + (u64::from(slot) << 15) + register)
        });
        let port = |port| {
            let mut data = [0; 4];
            self.machine.pio.read(port, &mut data);
            u32::from_le_bytes(data).into()
        };
        let memory = places
            .chain(registers)
            .map(|address| self.machine.read(address, 4));
        memory.chain([port(0xcf8), port(0xcfc)]).collect()
    }

    /// Builds the same machine again, with restored functions and without restored buses.
    fn built_anew(&self) -> Self {
        let mut new = Self {
            machine: Machine::new(),
            cards: [const { None }; 4],
        };
        for (index, card) in self.cards.iter().enumerate() {
            if let Some(card) = card {
                new.run(&Step::Add(index));
                let saved = lock(card).config.save();
                lock(new.cards[index].as_ref().unwrap())
                    .config
                    .restore(&saved)
                    .unwrap();
            }
        }
        new
    }

    fn restore(&self, section: &Section) -> Result<(), StateError> {
        self.machine.root.restore(section, &self.machine.mmio)
    }
}

proptest! {
    #[test]
    fn restored_buses_show_what_their_twins_show_that_were_not_saved(
        before in prop::collection::vec(step(), 0..40),
        after in prop::collection::vec(step(), 0..20),
    ) {
        let mut twin = Twin::new();
        before.iter().for_each(|step| twin.run(step));
        let section = twin.machine.root.save().unwrap();
        let mut restored = twin.built_anew();
        restored.restore(&section).unwrap();
        prop_assert_eq!(restored.machine.root.save().unwrap(), section);
        prop_assert_eq!(restored.shown(), twin.shown());
        for step in &after {
            twin.run(step);
            restored.run(step);
            prop_assert_eq!(restored.shown(), twin.shown());
        }
        prop_assert_eq!(restored.machine.root.save().unwrap(), twin.machine.root.save().unwrap());
    }

    #[test]
    fn a_damaged_state_is_refused_or_ended_by_a_reset(
        before in prop::collection::vec(step(), 0..40),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut twin = Twin::new();
        before.iter().for_each(|step| twin.run(step));
        let mut section = twin.machine.root.save().unwrap();
        for (at, value) in &changes {
            let length = section.payload.len();
            section.payload[at.index(length)] = *value;
        }
        let restored = twin.built_anew();
        let _refused_or_not = restored.restore(&section);
        restored.machine.root.reset(&restored.machine.mmio);
        let fresh = twin.built_anew();
        fresh.machine.root.reset(&fresh.machine.mmio);
        prop_assert_eq!(restored.shown(), fresh.shown());
    }
}

#[test]
fn of_two_bars_at_one_place_the_older_one_is_there_after_a_restore_too() {
    for order in [[0, 1], [1, 0]] {
        let mut twin = Twin::new();
        for card in order {
            twin.run(&Step::Move(card, 0, 0));
            twin.run(&Step::Command(card, 2));
        }
        assert_eq!(twin.machine.read(PLACES[0], 1), u64::from(SLOTS[order[0]]));
        let restored = twin.built_anew();
        restored.restore(&twin.machine.root.save().unwrap()).unwrap();
        assert_eq!(restored.machine.read(PLACES[0], 1), u64::from(SLOTS[order[0]]));
    }
}

#[test]
fn what_can_not_be_on_the_buses_is_refused_with_the_name_of_the_field() {
    let mut twin = Twin::new();
    twin.run(&Step::Command(0, 2));
    twin.run(&Step::Command(1, 2));
    twin.run(&Step::Force(1));
    let whole: message::PciRoot = twin.machine.root.save().unwrap().open().unwrap();
    assert!(!whole.mappings.is_empty() && !whole.withdrawn.is_empty());
    type Change = fn(&mut message::PciRoot);
    let cases: [(&str, Change); 10] = [
        ("config_address", |state| state.config_address = 1),
        ("bridge", |state| state.bridge = None),
        ("pci.bytes", |state| state.bridge.as_mut().unwrap().bytes[0] ^= 1),
        ("mappings.slot", |state| state.mappings[0].slot = 7),
        ("mappings.slot", |state| state.mappings[0].slot = u32::MAX),
        ("mappings.window", |state| state.mappings[0].bar = 6),
        ("mappings.window", |state| state.mappings[0].window = None),
        ("mappings.window", |state| state.mappings.push(state.mappings[0])),
        ("withdrawn", |state| state.withdrawn[0].address = 0),
        ("withdrawn", |state| state.withdrawn.push(state.withdrawn[0])),
    ];
    refuses(&whole, &cases, |saved| {
        twin.built_anew().restore(&Section::new("pci-root", saved))
    });
}

#[test]
fn buses_that_are_in_use_are_not_restored() {
    let mut twin = Twin::new();
    twin.run(&Step::Command(0, 2));
    let section = twin.machine.root.save().unwrap();
    assert!(matches!(
        twin.restore(&section),
        Err(StateError::NotMigratable { .. })
    ));
}

//! Registers that are saved, thrown away and restored.

use super::*;
use crate::state::{Change, Section, StateError, message, refuses};

impl Rig {
    /// Runs a step; returns its read value, the slots taken off the bus, and the level of the line.
    fn run(&self, (what, slot): (u8, u8)) -> (u32, Vec<u8>, bool) {
        let bus = u64::from(slot / 32);
        let (mut read, mut taken) = (0, Vec::new());
        match what {
            0 => self.hotplug.plugged(slot),
            1 => self.hotplug.ask(slot),
            2 => self.hotplug.withdraw(slot, || {}),
            3 => read = self.read(12 * bus + CHECK),
            4 => read = self.read(12 * bus + ASKED),
            5 => read = self.read(PRESENT.into()),
            _ => taken = self.eject_of(bus, 1 << (slot % 32)),
        }
        (read, taken, self.high())
    }
}

fn steps() -> impl Strategy<Value = Vec<(u8, u8)>> {
    prop::collection::vec((0_u8..7, 0_u8..96), 0..40)
}

proptest! {
    #[test]
    fn restored_registers_behave_as_their_twins_that_were_not_saved(before in steps(), after in steps()) {
        let (twin, restored) = (Rig::new(), Rig::new());
        for step in before {
            twin.run(step);
        }
        let section = twin.hotplug.save().unwrap();
        restored.hotplug.restore(&section).unwrap();
        prop_assert_eq!(restored.high(), twin.high());
        for step in after {
            prop_assert_eq!(restored.run(step), twin.run(step));
        }
        prop_assert_eq!(restored.hotplug.save().unwrap(), twin.hotplug.save().unwrap());
    }
}

#[test]
fn nothing_is_saved_while_an_eject_is_under_way() {
    let rig = Rig::new();
    rig.hotplug.ask(40);
    let effect = lock(&rig.registers).write(12 + 8, &(1_u32 << 8).to_le_bytes());
    assert_eq!(effect, Effect::Eject);
    assert!(matches!(
        rig.hotplug.save(),
        Err(StateError::NotMigratable { .. })
    ));
    rig.hotplug.eject(|_| {});
    assert!(rig.hotplug.save().is_ok());
}

#[test]
fn slots_and_buses_that_there_are_not_are_refused_and_change_nothing() {
    let rig = Rig::new();
    rig.hotplug.ask(95);
    let good = rig.hotplug.save().unwrap();
    let whole: message::HotPlug = good.open().unwrap();
    let changes: [Change<message::HotPlug>; 6] = [
        ("buses", |saved| saved.buses.truncate(2)),
        ("buses", |saved| saved.buses.push(saved.buses[0])),
        ("buses", |saved| saved.buses[0].check |= 1),
        ("buses", |saved| saved.buses[2].asked |= 1),
        ("buses", |saved| saved.buses[1].asked |= 1),
        ("buses", |saved| saved.buses[2].requested |= 1),
    ];
    refuses(&whole, &changes, |saved| {
        let result = rig.hotplug.restore(&Section::new("hot-plug", saved));
        assert_eq!(rig.hotplug.save().unwrap(), good);
        result
    });
}

#[test]
fn a_state_of_before_there_were_absent_buses_has_all_and_bus_0_is_never_absent() {
    let rig = Rig::new();
    let whole: message::HotPlug = rig.hotplug.save().unwrap().open().unwrap();
    assert_eq!((whole.absent, rig.read(36)), (0b110, 0b001));
    let with = |absent| {
        Section::new(
            "hot-plug",
            &message::HotPlug {
                absent,
                ..whole.clone()
            },
        )
    };
    rig.hotplug.restore(&with(0)).unwrap();
    assert_eq!(rig.read(36), 0b111);
    rig.hotplug.restore(&with(0b100)).unwrap();
    assert_eq!(rig.read(36), 0b011);
    let changes: [Change<message::HotPlug>; 3] = [
        ("absent", |saved| saved.absent = 0b001),
        ("absent", |saved| saved.absent = 0b1000),
        ("absent", |saved| saved.absent = u32::MAX),
    ];
    refuses(&whole, &changes, |saved| {
        rig.hotplug.restore(&Section::new("hot-plug", saved))
    });
    assert_eq!(rig.read(36), 0b011);
}

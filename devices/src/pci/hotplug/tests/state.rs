//! Registers that are saved, thrown away and restored.

use super::*;
use crate::state::{Section, StateError, message};

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
    let with = |change: fn(&mut Vec<message::HotPlugBus>)| {
        let mut buses = whole.buses.clone();
        change(&mut buses);
        Section::new("hot-plug", &message::HotPlug { buses, absent: 0 })
    };
    let refused = [
        with(|buses| buses.truncate(2)),
        with(|buses| buses.push(buses[0])),
        with(|buses| buses[0].check |= 1),
        with(|buses| buses[2].asked |= 1),
        with(|buses| buses[1].asked |= 1),
        with(|buses| buses[2].requested |= 1),
    ];
    for section in refused {
        let error = rig.hotplug.restore(&section).unwrap_err();
        assert!(
            matches!(error, StateError::Invalid { field: "buses", .. }),
            "{error}"
        );
        assert_eq!(rig.hotplug.save().unwrap(), good);
    }
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
    for absent in [0b001, 0b1000, u32::MAX] {
        let error = rig.hotplug.restore(&with(absent)).unwrap_err();
        assert!(
            matches!(error, StateError::Invalid { field: "absent", .. }),
            "{error}"
        );
    }
    assert_eq!(rig.read(36), 0b011);
}

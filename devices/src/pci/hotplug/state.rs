//! Saved state of the hot-plug registers. Which functions there are is known to whoever builds the machine.

use super::{BUSES, HotPlug, Set, State, bit, set_of, slots, word};
use crate::state::{Section, StateError, check, message};

/// Its name in messages, and the section's id.
const NAME: &str = "hot-plug";

impl HotPlug {
    /// What is to be read, and what the guest was asked for. The vCPUs are stopped, so no eject is under way.
    pub fn save(&self) -> Result<Section, StateError> {
        let state = self.state().clone();
        if state.ejecting != 0 {
            return Err(StateError::not_migratable(NAME, "an eject is under way"));
        }
        let bus = |bus| message::HotPlugBus {
            check: word(state.check, bus),
            asked: word(state.asked, bus),
            requested: word(state.requested, bus),
        };
        let buses = (0_u32..).take(BUSES).map(bus).collect();
        Ok(Section::new(NAME, &message::HotPlug { buses }))
    }

    /// Takes over a saved state and sets the interrupt line accordingly. The section is untrusted.
    pub fn restore(&self, section: &Section) -> Result<(), StateError> {
        let saved: message::HotPlug = section.open()?;
        check(
            saved.buses.len() == BUSES,
            "buses",
            "not as many as the machine has",
        )?;
        let mut new = State::default();
        for (index, bus) in (0_u32..).zip(&saved.buses) {
            new.check |= set_of(bus.check, index);
            new.asked |= set_of(bus.asked, index);
            new.requested |= set_of(bus.requested, index);
        }
        let known: Set = slots(Set::MAX).map(bit).fold(0, |set, bit| set | bit);
        check(
            (new.check | new.asked | new.requested) & !known == 0,
            "buses",
            "there is no such slot",
        )?;
        self.change(|state| *state = new);
        Ok(())
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    };

    use proptest::prelude::*;

    use super::*;
    use crate::{
        bus::{Effect, SharedDevice},
        interrupt::LevelLine,
        pci::root::lock,
    };

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

        /// What a step reads, takes off the bus, and leaves on the line.
        fn run(&self, (what, slot): (u8, u8)) -> (u32, Vec<u8>, bool) {
            let mut data = [0; 4];
            let mut taken = Vec::new();
            let bus = u64::from(slot / 32);
            match what {
                0 => self.hotplug.plugged(slot),
                1 => self.hotplug.ask(slot),
                2 => self.hotplug.withdraw(slot, || {}),
                3 => lock(&self.registers).read(12 * bus, &mut data),
                4 => lock(&self.registers).read(12 * bus + 4, &mut data),
                _ => {
                    let value = (1_u32 << (slot % 32)).to_le_bytes();
                    let effect = lock(&self.registers).write(12 * bus + 8, &value);
                    if effect == Effect::Eject {
                        self.hotplug.eject(|slot| taken.push(slot));
                    }
                }
            }
            (
                u32::from_le_bytes(data),
                taken,
                self.line.0.load(Ordering::SeqCst),
            )
        }
    }

    fn steps() -> impl Strategy<Value = Vec<(u8, u8)>> {
        prop::collection::vec((0_u8..6, 0_u8..96), 0..40)
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
            prop_assert_eq!(
                restored.line.0.load(Ordering::SeqCst),
                twin.line.0.load(Ordering::SeqCst)
            );
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
            Section::new(NAME, &message::HotPlug { buses })
        };
        let refused = [
            with(|buses| buses.truncate(2)),
            with(|buses| buses.push(buses[0])),
            with(|buses| buses[0].check |= 1),
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
}

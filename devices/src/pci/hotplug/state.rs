//! Saved state of the hot-plug registers. The set of existing functions belongs to the builder of
//! the machine.

use super::{BUSES, FURTHER_BUSES, HotPlug, Set, State, bit, set_of, slots, word};
use crate::state::{Section, StateError, check, message};

/// Its name in messages, and the section's id.
const NAME: &str = "hot-plug";

impl HotPlug {
    /// Saves the unread bits, and the requests to the guest. The vCPUs are stopped, so no eject is
    /// under way.
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
        Ok(Section::new(
            NAME,
            &message::HotPlug {
                buses,
                absent: state.absent,
            },
        ))
    }

    /// Takes over a saved state and sets the interrupt line accordingly. The section is untrusted.
    pub fn restore(&self, section: &Section) -> Result<(), StateError> {
        let saved: message::HotPlug = section.open()?;
        check(
            saved.buses.len() == BUSES,
            "buses",
            "not as many as the machine has",
        )?;
        check(
            saved.absent & !FURTHER_BUSES == 0,
            "absent",
            "there is no such bus",
        )?;
        let mut new = State {
            absent: saved.absent,
            ..State::default()
        };
        for (index, bus) in (0_u32..).zip(&saved.buses) {
            new.check |= set_of(bus.check, index);
            new.asked |= set_of(bus.asked, index);
            new.requested |= set_of(bus.requested, index);
        }
        let known: Set = slots(Set::MAX).map(bit).fold(0, |set, bit| set | bit);
        let buses = (1..).take(BUSES - 1).fold(0, |set, bus| set | set_of(1, bus));
        check(
            new.check & !(known | buses) == 0 && (new.asked | new.requested) & !known == 0,
            "buses",
            "there is no such slot",
        )?;
        self.change(|state| *state = new);
        Ok(())
    }
}

//! Functions that come and go, also while vCPUs use them.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use super::*;

const SLOT: u64 = 5;

fn decode(machine: &Machine) -> u64 {
    let _effect = machine.set_config(SLOT, 4, 2);
    machine.bar64(SLOT)
}

#[test]
fn a_removed_function_is_nowhere_and_its_slot_is_free_for_another() {
    let (machine, cards) = with_cards(&[5, 6]);
    let address = decode(&machine);
    assert_eq!(machine.read(address, 1), 5);
    let function: SharedFunction = cards[0].clone();
    assert!(machine.root.holds(5, &function) && machine.root.is_taken(5));
    assert!(machine.root.remove(5, &machine.mmio));
    assert!(!machine.root.holds(5, &function) && !machine.root.is_taken(5));
    assert_eq!(machine.config(SLOT, 0), u32::MAX);
    assert_eq!(machine.set_config(SLOT, 4, 0), Effect::None);
    assert_eq!(machine.read(address, 1), 0xff);
    assert_eq!(
        cards[0].lock().unwrap().bars,
        [None; 6],
        "told that its BAR is gone"
    );
    machine.root.remap(&machine.mmio);
    assert!(!machine.root.remove(5, &machine.mmio), "only once");

    let next = Card::shared(9, &[(0, BarKind::Memory64, 0x4000)]);
    machine.root.add(5, next.clone()).unwrap();
    assert_eq!(machine.config(SLOT, 0), 0x0009_1234);
    assert_eq!(machine.config(6, 0), 0x0006_1234, "others stay");
    assert_eq!(decode(&machine), address);
    assert_eq!(machine.read(address, 1), 9);
}

#[test]
fn the_host_bridge_and_slots_that_do_not_exist_are_not_removed() {
    let (machine, _) = with_cards(&[5]);
    for slot in [0, 4, 31, 32, 64, 96, u8::MAX] {
        assert!(!machine.root.remove(slot, &machine.mmio), "{slot}");
    }
    assert_ne!(machine.config(0, 0), u32::MAX);
}

#[test]
fn an_access_that_found_the_function_before_it_was_removed_reads_ones() {
    let (machine, _) = with_cards(&[5]);
    decode(&machine);
    let seat = machine.root.seat(5).unwrap();
    assert!(machine.root.remove(5, &machine.mmio));
    let mut late = super::super::root::BarDevice { seat, bar: 0 };
    let mut data = [0; 4];
    late.read(0, &mut data);
    assert_eq!(data, [0xff; 4]);
    assert_eq!(late.write(0, &[1]), Effect::None);
}

#[test]
fn what_was_taken_by_force_reads_as_zero_until_something_else_is_there_or_the_guest_is_reset() {
    for reset in [false, true] {
        let (machine, _) = with_cards(&[5]);
        let address = decode(&machine);
        assert!(machine.root.remove_by_force(5, &machine.mmio));
        assert_eq!(machine.config(SLOT, 0), u32::MAX, "gone");
        assert_eq!(machine.read(address, 4), 0);
        machine.root.remap(&machine.mmio);
        assert_eq!(machine.read(address, 4), 0);
        if reset {
            machine.root.reset(&machine.mmio);
            assert_eq!(machine.read(address, 1), 0xff);
        } else {
            machine.root.add(5, Card::shared(9, &CARD)).unwrap();
            assert_eq!(decode(&machine), address);
            assert_eq!(machine.read(address, 1), 9);
        }
    }
}

/// Ends the others also when the test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn vcpus_may_use_a_slot_while_its_function_comes_and_goes() {
    let (machine, _) = with_cards(&[]);
    let end = AtomicBool::new(false);
    thread::scope(|scope| {
        let _end = End(&end);
        for _ in 0..3 {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    let id = machine.config(SLOT, 0);
                    assert!(id == u32::MAX || id & 0xffff == 0x1234, "{id:#x}");
                    let _effect = machine.set_config(SLOT, 4, id >> 16 & 2);
                    let read = machine.read(machine.bar64(SLOT), 4);
                    assert_eq!(read, (read & 0xff) * 0x0101_0101, "half of one, half of another");
                }
            });
        }
        for number in 0..500_u32 {
            let number = u8::try_from(number % 200).unwrap() | 2;
            let card = Card::shared(number, &CARD);
            card.lock().unwrap().busy = true;
            machine.root.add(5, card.clone()).unwrap();
            let _effect = machine.set_config(SLOT, 4, 2);
            assert!(machine.root.remove(5, &machine.mmio));
            let mut card = card.lock().unwrap();
            assert_eq!(card.bars, [None; 6]);
            // An access that still reaches the card fails the test.
            card.busy = false;
        }
    });
    assert!(!machine.root.is_taken(5));
}

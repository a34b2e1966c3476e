use std::sync::Arc;

use prost::Message;
use vmm_protocol::state::{InterruptControllers, Pit};

use super::{super::*, *};

fn vm(with_pit: bool) -> Arc<Vm> {
    let host = Host::open().unwrap_or_else(|error| panic!("these tests need KVM: {error}"));
    Vm::create_with(&host, with_pit).unwrap()
}

/// Registers that differ from those after power-on.
fn programmed(mut chips: InterruptControllers) -> InterruptControllers {
    let master = chips.master.as_mut().unwrap();
    (master.imr, master.irq_base, master.elcr) = (0xfa, 0x20, 0x08);
    let slave = chips.slave.as_mut().unwrap();
    (slave.imr, slave.irq_base) = (0xef, 0x28);
    let io_apic = chips.io_apic.as_mut().unwrap();
    (io_apic.select, io_apic.id) = (0x12, 3);
    // Level, masked, remote IRR cleared; and an edge.
    io_apic.redirections[16] = 0x1_8041;
    io_apic.redirections[4] = 0x0100_0000_0001_0030;
    chips
}

#[test]
fn interrupt_controllers_are_restored_as_they_were_saved() {
    let first = vm(false);
    let saved = programmed(first.save_interrupt_controllers().unwrap());
    let second = vm(false);
    second.restore_interrupt_controllers(&saved).unwrap();
    assert_eq!(second.save_interrupt_controllers().unwrap(), saved);
}

#[test]
fn interrupt_controllers_that_can_not_be_are_refused() {
    let vm = vm(false);
    let saved = vm.save_interrupt_controllers().unwrap();
    let refused = |change: fn(&mut InterruptControllers)| {
        let mut changed = saved.clone();
        change(&mut changed);
        let error = vm.restore_interrupt_controllers(&changed).unwrap_err();
        // Nothing was set.
        assert_eq!(vm.save_interrupt_controllers().unwrap(), saved);
        error.to_string()
    };
    let message = refused(|chips| chips.slave.as_mut().unwrap().imr = 0x100);
    assert_eq!(message, "field `pic.imr`: 0x100 is out of range");
    let message = refused(|chips| chips.master = None);
    assert_eq!(message, "field `master`: is missing");
    let message = refused(|chips| {
        chips.io_apic.as_mut().unwrap().redirections.pop();
    });
    assert_eq!(
        message,
        "field `io_apic.redirections`: has 23 values instead of 24"
    );
    let message = refused(|chips| chips.io_apic.as_mut().unwrap().irr = 1 << 24);
    assert!(message.starts_with("field `io_apic.irr`"), "{message}");
}

#[test]
fn a_pit_is_restored_as_it_was_saved() {
    let mut saved = vm(true).save_pit().unwrap().expect("the VM has one");
    // Channel 2, as Linux calibrates its timers with it.
    saved.channels[2].mode = 0;
    saved.channels[2].count = 0x1234;
    saved.channels[2].gate = 1;
    let second = vm(true);
    second.restore_pit(&saved).unwrap();
    assert_eq!(second.save_pit().unwrap().unwrap(), saved);
}

#[test]
fn a_pit_that_can_not_be_is_refused() {
    let vm = vm(true);
    let saved = vm.save_pit().unwrap().unwrap();
    let refused = |change: fn(&mut Pit)| {
        let mut changed = saved.clone();
        change(&mut changed);
        vm.restore_pit(&changed).unwrap_err().to_string()
    };
    assert_eq!(refused(|pit| pit.flags = 8), "field `flags`: 0x8 is not known");
    let message = refused(|pit| pit.channels[1].count = 0x1_0001);
    assert!(message.starts_with("field `channels.count`"), "{message}");
    let message = refused(|pit| pit.channels[0].mode = 256);
    assert_eq!(message, "field `channels.mode`: 0x100 is out of range");
    assert!(refused(|pit| pit.channels.clear()).starts_with("field `channels`"));
}

/// The state of a PIT, as a program with version 1 encoded it.
const PIT: [u8; 25] = [
    0x0a, 0x06, 0x08, 0x80, 0x80, 0x04, 0x60, 0x01, // channel 0: count 0x10000, its gate is open
    0x0a, 0x04, 0x08, 0xff, 0xff, 0x03, // channel 1: count 0xffff
    0x0a, 0x07, 0x08, 0xb4, 0x24, 0x48, 0x03, 0x60,
    0x01, // channel 2: count 0x1234, both bytes, its gate is open
    0x10, 0x02, // the speaker's data is on
];

#[test]
fn a_pit_of_the_first_version_is_still_taken() {
    let saved = Pit::decode(PIT.as_slice()).unwrap();
    let vm = vm(true);
    vm.restore_pit(&saved).unwrap();
    assert_eq!(vm.save_pit().unwrap().unwrap().encode_to_vec(), PIT);
}

#[test]
fn a_vm_without_a_pit_saves_none() {
    assert!(vm(false).save_pit().unwrap().is_none());
}

#[test]
fn access_rights_are_those_of_the_processor_manual() {
    let code = kvm_bindings::kvm_segment {
        base: 0x1000,
        limit: 0xf_ffff,
        selector: 0x10,
        type_: 0xb,
        present: 1,
        dpl: 3,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    // Granular, long mode, present, ring 3, code: Intel SDM vol. 3, table 25-2.
    let saved = registers::save_segment(&code);
    assert_eq!(saved.access, 0xa0fb);
    assert_eq!(registers::segment("special.cs", Some(saved)).unwrap(), code);
    let mut wrong = saved;
    wrong.access |= 1 << 8;
    assert!(registers::segment("special.cs", Some(wrong)).is_err());
}

#[test]
fn measured_frequencies_of_one_clock_are_equal() {
    assert!(tsc::is_same_frequency(3_000_000, 3_000_750));
    assert!(!tsc::is_same_frequency(3_000_000, 3_000_751));
    assert!(!tsc::is_same_frequency(3_000_000, 0));
    assert!(!tsc::is_same_frequency(0, 3_000_000));
}

#[test]
fn counters_of_all_vcpus_shift_as_the_first_one() {
    // Saved at 1000 with an offset of -5000 (the host was at 6000); here the host is at 20,000 and the offset -20,000.
    let minus = |value: u64| 0_u64.wrapping_sub(value);
    let shift = tsc::shift(minus(5000), minus(20_000), 0, 1000);
    assert_eq!(
        minus(5000).wrapping_add(shift),
        minus(19_000),
        "the counter shows 1000 at 20,000"
    );
    // Another that was 7 ahead of it still is.
    assert_eq!(minus(4993).wrapping_add(shift), minus(18_993));
    // From a host that runs since long to one that was just switched on.
    assert_eq!(tsc::shift(0, 0, 50, 1 << 40), (1 << 40) - 50);
}

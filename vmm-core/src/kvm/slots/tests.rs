use vm_memory::{Bytes, GuestAddress, MemoryRegionAddress};

use super::{super::Host, *};

fn vm() -> Arc<Vm> {
    let host = Host::open().unwrap_or_else(|error| panic!("these tests need KVM: {error}"));
    Vm::create(&host).unwrap()
}

fn region(start: u64, length: usize) -> Arc<Region> {
    Arc::new(Region::from_range(GuestAddress(start), length, None).unwrap())
}

fn place(table: &Table, region: Arc<Region>, limit: u32) -> Result<Slot, SlotError> {
    let start = region.start_addr().0;
    table.place(region, start, limit)
}

#[test]
fn slots_do_not_overlap_and_a_removed_one_leaves_its_place() {
    let vm = vm();
    let first = vm.add_slot(&region(0x10_0000, 0x10_000)).unwrap();
    for start in [0xf_f000, 0x10_0000, 0x10_f000] {
        let refused = vm.add_slot(&region(start, 0x2000)).unwrap_err();
        let told =
            matches!(&refused, SlotError::Overlap { present, .. } if *present == (0x10_0000..0x11_0000));
        assert!(told, "{refused}");
    }
    let second = vm.add_slot(&region(0x11_0000, 0x1000)).unwrap();
    assert_eq!(
        vm.slots(),
        [(first, 0x10_0000..0x11_0000), (second, 0x11_0000..0x11_1000)]
    );
    vm.remove_slot(first).unwrap();
    vm.add_slot(&region(0xf_f000, 0x2000)).unwrap();
}

#[test]
fn a_removed_slot_is_not_taken_for_the_one_that_has_its_number() {
    let vm = vm();
    let first = vm.add_slot(&region(0, 0x1000)).unwrap();
    vm.remove_slot(first).unwrap();
    let second = vm.add_slot(&region(0, 0x1000)).unwrap();
    assert_eq!(first.number, second.number);
    assert!(matches!(vm.remove_slot(first), Err(SlotError::Unknown(id)) if id == first));
    assert!(matches!(vm.start_dirty_log(first), Err(SlotError::Unknown(_))));
    assert!(matches!(vm.take_dirty(first), Err(SlotError::Unknown(_))));
    vm.remove_slot(second).unwrap();
    assert!(vm.slots().is_empty());
}

#[test]
fn a_slot_of_parts_of_pages_is_refused() {
    let vm = vm();
    for (start, length) in [(0x800, 0x1000), (0x1000, 0x800)] {
        let refused = vm.add_slot(&region(start, length)).unwrap_err();
        assert!(matches!(refused, SlotError::Unaligned { .. }), "{refused}");
    }
}

#[test]
fn no_more_slots_than_the_host_has_are_placed() {
    let mut table = Table::default();
    for number in 0..3 {
        let slot = place(&table, region(number * PAGE, 0x1000), 3).unwrap();
        table.slots.insert(slot.id.number, Arc::new(slot));
    }
    assert!(matches!(
        place(&table, region(3 * PAGE, 0x1000), 3),
        Err(SlotError::TooMany(3))
    ));
    table.slots.remove(&1);
    assert_eq!(
        place(&table, region(3 * PAGE, 0x1000), 3).unwrap().id.number,
        1,
        "the lowest number that is free"
    );
}

#[test]
fn dirty_log_starts_full_and_has_writes_of_this_process() {
    let vm = vm();
    let region = region(0x10_0000, 0x4_5000);
    let slot = vm.add_slot(&region).unwrap();
    let write = |offset| region.write_slice(&[1, 2], MemoryRegionAddress(offset)).unwrap();
    assert!(matches!(vm.take_dirty(slot), Err(SlotError::NotLogged(_))));
    vm.start_dirty_log(slot).unwrap();
    vm.start_dirty_log(slot).unwrap();
    let all = vm.take_dirty(slot).unwrap();
    assert!(all.addresses().eq((0x10_0000..0x14_5000).step_by(0x1000)));
    assert_eq!(vm.take_dirty(slot).unwrap().count(), 0);
    write(0xfff);
    write(0x4_4000);
    let dirty = vm.take_dirty(slot).unwrap();
    assert_eq!(
        dirty.addresses().collect::<Vec<_>>(),
        [0x10_0000, 0x10_1000, 0x14_4000]
    );
    assert_eq!(dirty.count(), 3);

    vm.stop_dirty_log(slot).unwrap();
    vm.stop_dirty_log(slot).unwrap();
    write(0);
    assert!(matches!(vm.take_dirty(slot), Err(SlotError::NotLogged(_))));
    vm.start_dirty_log(slot).unwrap();
    assert_eq!(vm.take_dirty(slot).unwrap(), all);
    vm.remove_slot(slot).unwrap();
    write(0);
    assert!(region.get_mmap().bitmap().take().iter().all(|word| *word == 0));
}

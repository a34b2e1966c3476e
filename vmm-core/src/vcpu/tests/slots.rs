//! Memory slots that are added and removed, and the log of a guest's writes.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, MemoryRegionAddress};

use super::{END, Rig, code, rig};
use crate::kvm::{Region, SlotId};
use devices::bus::Effect;

/// `mov [address], eax`.
fn store(address: u32) -> Vec<u8> {
    [&[0xa3][..], &address.to_le_bytes()].concat()
}

fn ram_slot(rig: &Rig) -> SlotId {
    rig.vm.slots().first().expect("RAM is a slot").0
}

#[test]
fn the_log_names_exactly_the_pages_that_the_guest_wrote() {
    let pages = [0x20_0000_u32, 0x20_3ffc, 0x3ff_f000, 0x20_3000, 0x40_0ffc];
    let stores: Vec<_> = pages.iter().flat_map(|page| store(*page)).collect();
    let back = i32::try_from(stores.len() + END.len() + 5).unwrap();
    // The guest writes, ends, and does the same in its next run.
    let guest = code(&[&stores, &END, &[0xe9], &(-back).to_le_bytes()]);
    let mut rig = rig(1, &guest);
    let _end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    let slot = ram_slot(&rig);
    rig.run_to_end();
    rig.vm.start_dirty_log(slot).unwrap();
    assert_eq!(rig.vm.take_dirty(slot).unwrap().count(), rig.ram.size() >> 12);
    for round in 0..3 {
        assert_eq!(rig.vm.take_dirty(slot).unwrap().count(), 0, "round {round}");
        rig.run_to_end();
        // The same log has this process's writes.
        rig.ram.memory().write_obj(7_u8, GuestAddress(0x50_0000)).unwrap();
        let dirty: Vec<_> = rig.vm.take_dirty(slot).unwrap().addresses().collect();
        assert_eq!(
            dirty,
            [0x20_0000, 0x20_3000, 0x40_0000, 0x50_0000, 0x3ff_f000],
            "round {round}"
        );
    }
    rig.vm.stop_dirty_log(slot).unwrap();
    rig.run_to_end();
}

#[test]
fn a_slot_that_comes_is_memory_and_one_that_goes_is_mmio_again() {
    const AT: u64 = 0xc000_0000;
    let address = u32::try_from(AT).unwrap();
    let back = i32::try_from(5 + END.len() + 5).unwrap();
    let guest = code(&[&store(address), &END, &[0xe9], &(-back).to_le_bytes()]);
    let mut rig = rig(1, &guest);
    let _end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    let mmio = rig.probe(&rig.spaces.mmio, AT, 0x1000, Effect::None);
    let region = Arc::new(Region::from_range(GuestAddress(AT), 0x2000, None).unwrap());
    for round in 0..3 {
        rig.run_to_end();
        assert_eq!(mmio.try_iter().count(), 1, "round {round}: outside RAM");
        let slot = rig.vm.add_slot(&region).unwrap();
        region.write_obj(u32::MAX, MemoryRegionAddress(0)).unwrap();
        rig.run_to_end();
        assert_eq!(mmio.try_iter().count(), 0, "round {round}: memory");
        assert_ne!(region.read_obj::<u32>(MemoryRegionAddress(0)).unwrap(), u32::MAX);
        rig.vm.remove_slot(slot).unwrap();
    }
}

#[test]
fn slots_come_and_go_while_the_guest_runs() {
    // again: inc eax; mov [0xc0000000], eax; jmp again
    let guest = code(&[&[0x40], &store(0xc000_0000), &[0xeb, 0xf8]]);
    let mut rig = rig(1, &guest);
    let mmio = rig.probe(&rig.spaces.mmio, 0xc000_0000, 0x1000, Effect::None);
    let region = Arc::new(Region::from_range(GuestAddress(0xc000_0000), 0x1000, None).unwrap());
    rig.vcpus.run().unwrap();
    let mut last = 0;
    for _ in 0..20 {
        let value = || u32::from_le_bytes(mmio.recv_timeout(super::PATIENCE).unwrap().1.try_into().unwrap());
        let seen = value();
        assert!(seen > last, "{seen} after {last}: the guest goes on");
        let slot = rig.vm.add_slot(&region).unwrap();
        rig.vm.start_dirty_log(slot).unwrap();
        rig.vm.take_dirty(slot).unwrap();
        rig.vm.remove_slot(slot).unwrap();
        last = mmio
            .try_iter()
            .last()
            .map_or(seen, |(_, data)| u32::from_le_bytes(data.try_into().unwrap()));
    }
    rig.vcpus.stop().unwrap();
}

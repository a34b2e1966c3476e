//! A watchdog in a whole machine.

use std::time::Instant;

use super::*;

const WATCHDOG: u8 = 23;
/// BAR 0 in the configuration space.
const BAR: u64 = 0x10;

fn rig() -> Rig {
    let (mut spec, fds) = spec(1, &SPIN);
    spec.watchdog = Some(vmm::Watchdog {
        pci_slot: WATCHDOG.into(),
        ..vmm::Watchdog::default()
    });
    Rig::of(&spec, fds)
}

/// A guest's write of the configuration space.
fn configure(machine: &mut Machine, offset: u64, data: &[u8]) {
    let address = layout::Map::Direct.ecam().start + (u64::from(WATCHDOG) << 15) + offset;
    if machine.spaces.mmio.write(address, data) == devices::bus::Effect::Remap {
        machine.pci.remap(&machine.spaces.mmio);
    }
}

/// Enables the watchdog as a driver does, with the fast clock and these preload values.
fn enable(machine: &mut Machine, preload: u32) {
    // Memory decoding.
    configure(machine, 4, &[2, 0]);
    let ecam = layout::Map::Direct.ecam().start + (u64::from(WATCHDOG) << 15);
    let mut bar = [0; 4];
    machine.spaces.mmio.read(ecam + BAR, &mut bar);
    let bar = u64::from(u32::from_le_bytes(bar) & !0xf);
    assert_ne!(bar, 0, "a kernel that is booted directly finds its BARs placed");
    configure(machine, 0x60, &[0x07, 0]);
    for register in [0, 4] {
        for (offset, data) in [
            (0xc, &[0x80, 0][..]),
            (0xc, &[0x86, 0]),
            (register, &preload.to_le_bytes()),
        ] {
            let effect = machine.spaces.mmio.write(bar + offset, data);
            assert_eq!(effect, devices::bus::Effect::None);
        }
    }
    configure(machine, 0x68, &[2]);
}

#[test]
fn watchdog_of_a_machine_expires_by_its_driver() {
    let mut rig = rig();
    rig.inner().start().unwrap();
    assert_eq!(rig.inner().next_deadline(), None, "no wake-ups without a driver");
    enable(rig.inner(), 0);
    let mut notices = Vec::new();
    while let Some(due) = rig.inner().next_deadline() {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        rig.inner().keep_time().unwrap();
    }
    notices.extend(rig.notices.try_iter());
    let expected = [Notice::WatchdogStarted, Notice::WatchdogExpired];
    let notices: Vec<_> = notices
        .into_iter()
        .map(|input| match input {
            Input::Notice(notice) => notice,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(notices, expected);
}

#[test]
fn watchdog_that_counts_goes_on_in_a_restored_machine() {
    let mut rig = rig();
    rig.inner().start().unwrap();
    enable(rig.inner(), 0xf_ffff);
    let before = rig.inner().next_deadline().unwrap();
    rig.inner().pause().unwrap();
    assert_eq!(rig.inner().next_deadline(), None);
    rig.rebuild();
    assert_eq!(rig.inner().next_deadline(), None);
    rig.inner().resume().unwrap();
    assert!(rig.inner().next_deadline().unwrap() >= before);
    rig.inner().reset().unwrap();
    assert_eq!(rig.inner().next_deadline(), None);
}

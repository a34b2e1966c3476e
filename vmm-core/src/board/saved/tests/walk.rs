//! A walk over the registers of a machine that is restored on the way, beside one that is not.
//!
//! The test's thread accesses the buses as a vCPU does. What goes on by itself is left out: drivers that are ready (the suite of
//! each device has those), the clock of the CMOS and the power-management timer.

use devices::bus::Effect;
use proptest::prelude::*;

use super::*;

/// Slots that are walked: the host bridge, all devices, and one that is empty.
const SLOTS: [u8; 6] = [0, RNG, DISK, FURTHER_DISK, BALLOON, 2];
/// virtio's device status with DRIVER_OK (virtio 1.3, 2.1).
const DRIVER_OK: u8 = 4;
const STATUS: u64 = 0x14;

#[derive(Clone, Copy, Debug)]
enum Place {
    Port(u64),
    /// Of a slot's configuration space.
    Config(u8, u64),
    /// Behind a slot's BAR, wherever it is.
    Bar(u8, u64),
}

#[derive(Clone, Debug)]
enum Step {
    Read(Place, usize),
    Write(Place, Vec<u8>),
    /// The host asks the guest for a slot.
    Ask(u8),
    /// Pause, and for one of the two a restore; resume.
    Pause,
}

fn slot() -> impl Strategy<Value = u8> {
    prop::sample::select(SLOTS.to_vec())
}

fn place() -> impl Strategy<Value = Place> {
    prop_oneof![
        prop_oneof![
            0x3f8_u64..0x400,
            prop::sample::select(vec![0x60_u64, 0x64, 0x70, 0xcf8, 0xcfc, 0x505]),
            0xae00_u64..0xae28,
        ]
        .prop_map(Place::Port),
        (slot(), 0_u64..0x100).prop_map(|(slot, register)| Place::Config(slot, register)),
        // Common configuration, interrupt status, the device's own, MSI-X table, pending bits.
        (
            slot(),
            prop_oneof![
                0_u64..0x40,
                Just(0x1000_u64),
                0x2000_u64..0x2040,
                0x4000_u64..0x4040,
                Just(0x5000_u64)
            ]
        )
            .prop_map(|(slot, offset)| Place::Bar(slot, offset)),
    ]
}

/// Values of one width; those that make a register's bits all ones or few, above all.
fn data() -> impl Strategy<Value = Vec<u8>> {
    let width = prop::sample::select(vec![1_usize, 2, 4, 8]);
    let byte = prop_oneof![any::<u8>(), Just(0_u8), Just(0xff), Just(2), Just(6)];
    (width, prop::collection::vec(byte, 8)).prop_map(|(width, bytes)| bytes[..width].to_vec())
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (place(), prop::sample::select(vec![1_usize, 2, 4, 8])).prop_map(|(place, width)| Step::Read(place, width)),
        12 => (place(), data()).prop_map(|(place, data)| Step::Write(place, data)),
        1 => slot().prop_map(Step::Ask),
        2 => Just(Step::Pause),
    ]
}

/// Whether a write has effects that do not come at once, or that another step depends on.
fn is_left_out(place: Place, data: &[u8]) -> bool {
    match place {
        // EJECT takes the function away, and what follows has the driver of the machine's life in it.
        Place::Port(port @ 0xae00..) => port % 12 == 8 || port % 12 + data.len() as u64 > 8,
        // The index of a time register.
        Place::Port(0x70) => data.len() != 1 || data[0] & 0x7f < 0x0e,
        // The capability for access to BARs would reach all registers.
        Place::Config(_, register) => register + data.len() as u64 > 0x40,
        Place::Bar(_, offset) => {
            let status = STATUS
                .checked_sub(offset)
                .and_then(|at| data.get(usize::try_from(at).ok()?));
            status.is_some_and(|status| status & DRIVER_OK != 0)
        }
        Place::Port(_) => false,
    }
}

fn address(machine: &Machine, place: Place) -> Option<(&Bus, u64)> {
    let config = |slot: u8, register| layout::ECAM.start + (u64::from(slot) << 15) + register;
    match place {
        Place::Port(port) => Some((&machine.spaces.pio, port)),
        Place::Config(slot, register) => Some((&machine.spaces.mmio, config(slot, register))),
        Place::Bar(slot, offset) => {
            let mut bar = [0; 8];
            machine.spaces.mmio.read(config(slot, 0x10), &mut bar);
            let bar = u64::from_le_bytes(bar) & !0xf;
            Some((&machine.spaces.mmio, bar.checked_add(offset)?))
        }
    }
}

/// What a step shows.
fn run(machine: &mut Machine, step: &Step) -> Vec<u8> {
    match step {
        Step::Read(place, width) => {
            let mut data = vec![0; *width];
            if let Some((bus, address)) = address(machine, *place) {
                bus.read(address, &mut data);
            }
            data
        }
        Step::Write(place, data) if !is_left_out(*place, data) => {
            let effect = address(machine, *place).map(|(bus, address)| bus.write(address, data));
            if effect == Some(Effect::Remap) {
                machine.pci.remap(&machine.spaces.mmio);
            }
            format!("{effect:?}").into_bytes()
        }
        Step::Ask(slot) => {
            machine.hotplug.ask(*slot);
            Vec::new()
        }
        Step::Write(..) | Step::Pause => Vec::new(),
    }
}

/// The sections of what the walk reaches.
fn walked(machine: &mut Machine) -> Vec<proto::state::Section> {
    let mut sections = machine.save().unwrap().sections;
    sections.retain(|section| {
        matches!(
            section.kind.as_str(),
            "machine" | "virtio-pci" | "serial" | "pci-root" | "hot-plug"
        )
    });
    sections
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    /// At any point of a random walk, a machine that was saved, thrown away and restored shows what its twin shows.
    #[test]
    fn a_guest_sees_no_difference(steps in prop::collection::vec(step(), 1..120)) {
        let (mut twin, mut restored) = (Rig::new(2, &SPIN), Rig::new(2, &SPIN));
        // Random output is of no use to anybody.
        let mut outputs = [&twin, &restored].map(|rig| rig.console.try_clone().unwrap());
        let _drains = outputs.each_mut().map(|output| output.set_nonblocking(true));
        for (number, step) in steps.iter().enumerate() {
            if let Step::Pause = step {
                twin.machine.pause().unwrap();
                twin.inner().resume().unwrap();
                restored.pause_and_resume();
            }
            let shown = (run(restored.inner(), step), run(twin.inner(), step));
            prop_assert_eq!(shown.0, shown.1, "step {}: {:?}", number, step);
            for output in &mut outputs {
                let _nothing_there = output.read(&mut [0; 256]);
            }
        }
        restored.machine.pause().unwrap();
        restored.machine.rebuild().unwrap();
        twin.machine.pause().unwrap();
        prop_assert_eq!(walked(restored.inner()), walked(twin.inner()));
    }
}

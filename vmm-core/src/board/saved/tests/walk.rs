//! A random walk over the registers of a machine that is restored during the walk, beside a twin
//! that is not.
//!
//! The test's thread accesses the buses as a vCPU does. The walk excludes everything that changes
//! on its own: ready drivers (each device's suite covers them), the clock of the CMOS and the
//! power-management timer.

use devices::bus::Effect;
use proptest::prelude::*;

use super::*;

/// Slots of the devices that the machines of other tests do not have.
const NIC: u8 = 3;
const GPU: u8 = 27;
const KEYBOARD: u8 = 28;
const TABLET: u8 = 29;
const CONSOLE: u8 = 30;
const SHARE: u8 = 40;
/// Slots that are walked: the host bridge, all devices, and one that is empty.
const SLOTS: [u8; 12] = [
    0,
    RNG,
    NIC,
    DISK,
    BALLOON,
    GPU,
    KEYBOARD,
    TABLET,
    CONSOLE,
    FURTHER_DISK,
    SHARE,
    2,
];
/// virtio's device status with DRIVER_OK (virtio 1.3, 2.1).
const DRIVER_OK: u8 = 4;
const STATUS: u64 = 0x14;

#[derive(Clone, Copy, Debug)]
enum Place {
    Port(u64),
    /// In a slot's configuration space.
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
            prop::sample::select(vec![0x60_u64, 0x61, 0x64, 0x70, 0xcf8, 0xcfc, 0x505]),
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

/// Values of one width, mostly values that set all or few bits of a register.
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

/// Runs a step and returns the data that the guest sees.
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

/// The sections of the components that the walk reaches.
fn walked(machine: &mut Machine) -> Vec<vmm_protocol::state::Section> {
    let mut sections = machine.save().unwrap().sections;
    sections.retain(|section| {
        matches!(
            section.kind.as_str(),
            "machine" | "virtio-pci" | "serial" | "pci-root" | "hot-plug"
        )
    });
    sections
}

/// A machine with a device of each kind, and the unserved socket of its share. Outside continuous
/// integration, the machine has no NIC if the host does not let the tests create a tap.
fn of_every_kind() -> (Rig, UnixStream) {
    let (mut spec, mut fds) = spec(2, &SPIN);
    // The process of a share has it too.
    spec.memory_shared = true;
    let mut give = |fd: OwnedFd| {
        fds.push(fd);
        u32::try_from(fds.len() - 1).unwrap()
    };
    match devices::sys::tap::open("vmmwalk%d", false) {
        Ok(tap) => spec.nics.push(vmm::Nic {
            name: "eth0".to_owned(),
            fd: give(tap),
            mac: vec![0x52, 0x54, 0, 0, 0, 1],
            pci_slot: NIC.into(),
            mtu: 1500,
            control_queue: true,
            ..vmm::Nic::default()
        }),
        Err(error) => {
            assert!(
                std::env::var_os("CI").is_none(),
                "no tap can be made here: {error}"
            );
            eprintln!("walked without a NIC, no tap can be made here: {error}");
        }
    }
    let (front, back) = UnixStream::pair().unwrap();
    spec.shares.push(vmm::Share {
        name: "data".to_owned(),
        tag: "data".to_owned(),
        pci_slot: SHARE.into(),
        fd: give(front.into()),
    });
    spec.display = Some(vmm::Display {
        gpu_pci_slot: GPU.into(),
        keyboard_pci_slot: KEYBOARD.into(),
        tablet_pci_slot: TABLET.into(),
        width: 640,
        height: 480,
        ..vmm::Display::default()
    });
    spec.console = Some(vmm::Console {
        pci_slot: CONSOLE.into(),
        socket_fd: None,
    });
    (Rig::of(&spec, fds), back)
}

/// Each walked slot except the empty one has a device; otherwise the walk would not notice a
/// missing device.
#[test]
fn the_walk_meets_every_kind_of_device() {
    let (mut rig, _nobody) = of_every_kind();
    let device = |rig: &mut Rig, slot| {
        let id = run(rig.inner(), &Step::Read(Place::Config(slot, 0), 4));
        let (vendor, device) = id.split_at(2);
        (vendor == [0xf4, 0x1a]).then(|| u16::from_le_bytes([device[0], device[1]]))
    };
    // Virtio's device number is 0x1040 and the type (virtio 1.3, 4.1.2).
    let found: Vec<_> = SLOTS.iter().map(|slot| device(&mut rig, *slot)).collect();
    let kinds = [4, 1, 2, 5, 16, 18, 18, 3, 2, 26].map(|kind| Some(0x1040 + kind));
    let nic = usize::from(found[2].is_none());
    assert_eq!(found[1], kinds[0]);
    assert_eq!(found[2 + nic..11], kinds[1 + nic..], "{found:?}");
    assert_eq!((found[0], found[11]), (None, None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    /// At any point of a random walk, a machine that was saved, thrown away and restored shows what its twin shows.
    #[test]
    fn a_guest_sees_no_difference(steps in prop::collection::vec(step(), 1..120)) {
        let ((mut twin, _twins_share), (mut restored, _share)) = (of_every_kind(), of_every_kind());
        // Random output is of no use to anybody.
        let mut outputs = [&twin, &restored].map(|rig| rig.console.try_clone().unwrap());
        let _drains = outputs.each_mut().map(|output| output.set_nonblocking(true));
        for (number, step) in steps.iter().enumerate() {
            if let Step::Pause = step {
                twin.inner().pause().unwrap();
                twin.inner().resume().unwrap();
                restored.pause_and_resume();
            }
            let shown = (run(restored.inner(), step), run(twin.inner(), step));
            prop_assert_eq!(shown.0, shown.1, "step {}: {:?}", number, step);
            for output in &mut outputs {
                let _nothing_there = output.read(&mut [0; 256]);
            }
        }
        restored.inner().pause().unwrap();
        restored.rebuild();
        twin.inner().pause().unwrap();
        prop_assert_eq!(walked(restored.inner()), walked(twin.inner()));
    }
}

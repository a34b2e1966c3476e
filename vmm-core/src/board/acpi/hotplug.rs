//! PCI hot-plug in the DSDT: a device per slot, the registers of [`devices::pci::hotplug`], and the generic event
//! device that is told of them.
//!
//! ```text
//! GED1._EVT ── PCI0.PCNT ──┬── DVNT(CHK_, device check)   ── Notify(Snn_, 1)
//!                          └── DVNT(ASK_, eject request)  ── Notify(Snn_, 3) … Snn_._EJ0 ── EJCT
//! ```
//!
//! Only function 0 of bus 0's devices is there, and each slot can be plugged; slot 0 is the host bridge's.

use acpi_tables::{
    Aml,
    aml::{
        And, Arg, Device, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Interrupt,
        Method, MethodCall, Name, Notify, OpRegion, OpRegionSpace, Path, ResourceTemplate, Scope, Store,
        ZERO,
    },
};

use super::Platform;

/// Notification values (ACPI 6.5, table 5.148): something came or went; the guest is asked to give it back.
const DEVICE_CHECK: u8 = 1;
const EJECT_REQUEST: u8 = 3;

/// PCI devices that have a slot.
const SLOTS: std::ops::RangeInclusive<u32> = 1..=31;

/// Bits of a register.
const REGISTER: usize = 32;

pub(super) fn slots_and_events(platform: &Platform, aml: &mut Vec<u8>) {
    let mut bus = Vec::with_capacity(4096);
    registers(platform, &mut bus);
    for slot in SLOTS {
        device(slot, &mut bus);
    }
    notify_slots(&mut bus);
    aml.extend(Scope::raw(Path::new("PCI0"), bus));
    event_device(platform, aml);
}

fn registers(platform: &Platform, aml: &mut Vec<u8>) {
    let (port, length) = platform.hotplug_ports;
    OpRegion::new(Path::new("HPRG"), OpRegionSpace::SystemIO, &port, &length).to_aml_bytes(aml);
    let fields = [*b"CHK_", *b"ASK_", *b"EJCT"].map(|name| FieldEntry::Named(name, REGISTER));
    Field::new(
        Path::new("HPRG"),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        fields.into(),
    )
    .to_aml_bytes(aml);
}

/// `_ADR` is device and function (6.1.1), `_SUN` the slot's number for people (6.1.11).
fn device(slot: u32, aml: &mut Vec<u8>) {
    let (address, mask) = (slot << 16, 1_u32 << slot);
    Device::new(
        name(slot),
        vec![
            &Name::new(Path::new("_ADR"), &address),
            &Name::new(Path::new("_SUN"), &slot),
            &Method::new(
                Path::new("_EJ0"),
                1,
                false,
                vec![&Store::new(&Path::new("EJCT"), &mask)],
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// `DVNT(set, value)` notifies the devices of a set; `PCNT()` reads both sets, which clears them.
fn notify_slots(aml: &mut Vec<u8>) {
    let slots: Vec<(u32, Path)> = SLOTS.map(|slot| (1 << slot, name(slot))).collect();
    let tests: Vec<And<'_>> = slots
        .iter()
        .map(|(mask, _)| And::new(&ZERO, &Arg(0), mask))
        .collect();
    let calls: Vec<Notify<'_>> = slots.iter().map(|(_, path)| Notify::new(path, &Arg(1))).collect();
    let branches: Vec<If<'_>> = tests
        .iter()
        .zip(&calls)
        .map(|(test, call)| If::new(test, vec![call]))
        .collect();
    let branches = branches.iter().map(|branch| branch as &dyn Aml).collect();
    Method::new(Path::new("DVNT"), 2, true, branches).to_aml_bytes(aml);
    let (checked, asked) = (Path::new("CHK_"), Path::new("ASK_"));
    let check = MethodCall::new(Path::new("DVNT"), vec![&checked, &DEVICE_CHECK]);
    let ask = MethodCall::new(Path::new("DVNT"), vec![&asked, &EJECT_REQUEST]);
    Method::new(Path::new("PCNT"), 0, true, vec![&check, &ask]).to_aml_bytes(aml);
}

/// Its interrupt is a level, so that what happens while the guest boots is told when its driver is there.
fn event_device(platform: &Platform, aml: &mut Vec<u8>) {
    let interrupt = Interrupt::new(true, false, false, false, platform.hotplug_gsi);
    Device::new(
        Path::new("GED1"),
        vec![
            &Name::new(Path::new("_HID"), &"ACPI0013"),
            &Name::new(Path::new("_UID"), &1_u8),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&interrupt])),
            &Method::new(
                Path::new("_EVT"),
                1,
                true,
                vec![&MethodCall::new(Path::new("\\_SB_.PCI0.PCNT"), vec![])],
            ),
        ],
    )
    .to_aml_bytes(aml);
}

fn name(slot: u32) -> Path {
    Path::new(&format!("S{slot:02}_"))
}

//! PCI hot-plug in the DSDT: a device per slot, the registers of [`devices::pci::hotplug`], and the
//! generic event device that notifies them. Each host bridge has the slots and the registers of its
//! bus:
//!
//! ```text
//! GED1._EVT ──┬─ PCI0.PCNT ──┬── DVNT(CHK_, device check)   ── Notify(Snn_, 1)
//!             │              └── DVNT(ASK_, eject request)  ── Notify(Snn_, 3) … Snn_._EJ0 ── EJCT
//!             ├─ PCI1.PCNT ──┬── DVNT(CHK_, …)              ── Notify(PCI1, 0), when the bus itself came; Notify(Snn_, 1)
//!             │              └── …
//!             └─ PCI2.PCNT ── …
//! ```
//!
//! The host bridge of a further bus is present (`_STA`) from the first function on that bus
//! onwards. For the function that makes the bus present, the method notifies the host bridge before
//! the slot. That notification is a bus check, which is also correct for a guest that has already
//! found the bridge on its own. Linux treats a device check of a known bridge as an error.
//!
//! Devices have function 0 only. Each slot supports hot-plug; device 0 of a bus is no slot.

use acpi_tables::{
    Aml,
    aml::{
        And, Arg, Device, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Interrupt,
        Method, MethodCall, Name, Notify, ONE, OpRegion, OpRegionSpace, Path, ResourceTemplate, Return,
        Scope, Store, ZERO,
    },
};

use devices::pci::{
    hotplug::{BUS_PORTS, PRESENT},
    root::DEVICES,
};

use super::{Platform, dsdt::host_bridge};

/// Notification values (ACPI 6.5, table 5.148): look at a bus and all on it; something came or went; the guest is asked to give it
/// back.
const BUS_CHECK: u8 = 0;
const DEVICE_CHECK: u8 = 1;
const EJECT_REQUEST: u8 = 3;

/// Devices of a bus that have a slot.
const SLOTS: std::ops::RangeInclusive<u32> = 1..=31;
const _: () = assert!(DEVICES == 32);

/// Bits of a register.
const REGISTER: usize = 32;

/// `_STA` (6.3.7): present, enabled, shown, works.
const STATUS_PRESENT: u8 = 0xf;

pub(super) fn slots_and_events(platform: &Platform, aml: &mut Vec<u8>) {
    let buses: Vec<u8> = (0_u8..).zip(&platform.mmio64).map(|(bus, _)| bus).collect();
    for bus in &buses {
        let mut slots = Vec::with_capacity(4096);
        registers(platform, *bus, &mut slots);
        if *bus != 0 {
            bridge_status(platform, *bus, &mut slots);
        }
        for device in SLOTS {
            slot(*bus, device, &mut slots);
        }
        notify_slots(*bus, &mut slots);
        aml.extend(Scope::raw(Path::new(&host_bridge(*bus)), slots));
    }
    event_device(platform, &buses, aml);
}

fn registers(platform: &Platform, bus: u8, aml: &mut Vec<u8>) {
    let port = platform.hotplug_port + u16::from(bus) * u16::from(BUS_PORTS);
    OpRegion::new(Path::new("HPRG"), OpRegionSpace::SystemIO, &port, &BUS_PORTS).to_aml_bytes(aml);
    fields("HPRG", &[*b"CHK_", *b"ASK_", *b"EJCT"], aml);
}

/// Method that returns whether the bus's host bridge is present.
fn bridge_status(platform: &Platform, bus: u8, aml: &mut Vec<u8>) {
    let (port, length) = (platform.hotplug_port + u16::from(PRESENT), 4_u8);
    OpRegion::new(Path::new("HPBR"), OpRegionSpace::SystemIO, &port, &length).to_aml_bytes(aml);
    fields("HPBR", &[*b"BUSP"], aml);
    let (buses, mask) = (Path::new("BUSP"), 1_u8 << bus);
    let is_present = And::new(&ZERO, &buses, &mask);
    let (present, absent) = (Return::new(&STATUS_PRESENT), Return::new(&ZERO));
    let branch = If::new(&is_present, vec![&present]);
    Method::new(Path::new("_STA"), 0, false, vec![&branch, &absent]).to_aml_bytes(aml);
}

/// Fields of a region, each a register.
fn fields(region: &str, names: &[[u8; 4]], aml: &mut Vec<u8>) {
    let fields = names.iter().map(|name| FieldEntry::Named(*name, REGISTER));
    Field::new(
        Path::new(region),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        fields.collect(),
    )
    .to_aml_bytes(aml);
}

/// `_ADR` is device and function (6.1.1), `_SUN` the slot's number for people, which is unique in the machine (6.1.11).
fn slot(bus: u8, device: u32, aml: &mut Vec<u8>) {
    let (address, mask) = (device << 16, 1_u32 << device);
    let number = u32::from(bus) << 5 | device;
    Device::new(
        name(device),
        vec![
            &Name::new(Path::new("_ADR"), &address),
            &Name::new(Path::new("_SUN"), &number),
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

/// `DVNT(set, value)` notifies the devices of a set, and before them the host bridge of a bus that came; `PCNT()` reads both
/// sets, which clears them.
fn notify_slots(bus: u8, aml: &mut Vec<u8>) {
    let bridge = Path::new(&host_bridge(bus));
    let (bus_came, notify_bridge) = (And::new(&ZERO, &Arg(0), &ONE), Notify::new(&bridge, &BUS_CHECK));
    let bridge = If::new(&bus_came, vec![&notify_bridge]);
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
    let slots = branches.iter().map(|branch| branch as &dyn Aml);
    let bridge: Option<&dyn Aml> = (bus != 0).then_some(&bridge);
    let branches = bridge.into_iter().chain(slots).collect();
    Method::new(Path::new("DVNT"), 2, true, branches).to_aml_bytes(aml);
    let (checked, asked) = (Path::new("CHK_"), Path::new("ASK_"));
    let check = MethodCall::new(Path::new("DVNT"), vec![&checked, &DEVICE_CHECK]);
    let ask = MethodCall::new(Path::new("DVNT"), vec![&asked, &EJECT_REQUEST]);
    Method::new(Path::new("PCNT"), 0, true, vec![&check, &ask]).to_aml_bytes(aml);
}

/// The interrupt is level-triggered, so that the guest's driver sees events from before its start.
fn event_device(platform: &Platform, buses: &[u8], aml: &mut Vec<u8>) {
    let calls: Vec<MethodCall<'_>> = buses
        .iter()
        .map(|bus| MethodCall::new(Path::new(&format!("\\_SB_.{}.PCNT", host_bridge(*bus))), vec![]))
        .collect();
    let calls = calls.iter().map(|call| call as &dyn Aml).collect();
    let interrupt = Interrupt::new(true, false, false, false, platform.hotplug_gsi);
    Device::new(
        Path::new("GED1"),
        vec![
            &Name::new(Path::new("_HID"), &"ACPI0013"),
            &Name::new(Path::new("_UID"), &1_u8),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&interrupt])),
            &Method::new(Path::new("_EVT"), 1, true, calls),
        ],
    )
    .to_aml_bytes(aml);
}

fn name(slot: u32) -> Path {
    Path::new(&format!("S{slot:02}_"))
}

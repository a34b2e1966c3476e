//! The DSDT's definition block: devices that can't be discovered, in AML.

use std::ops::RangeInclusive;

use acpi_tables::{
    Aml,
    aml::{
        AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Memory32Fixed, Method, Name,
        Notify, Package, Path, ResourceTemplate, Scope, ZERO,
    },
};

use devices::legacy::pm::SLEEP_TYPE_S5;

use super::{Platform, hotplug};

/// Notification value for a pressed power button (ACPI 6.5, table 5.152).
const BUTTON_PRESSED: u8 = 0x80;

pub(super) fn definition_block(platform: &Platform) -> Vec<u8> {
    let mut aml = Vec::with_capacity(4096);
    // 7.4.2.6: the value for the sleep control register's SLP_TYPx.
    let off = Package::new(vec![&SLEEP_TYPE_S5, &ZERO]);
    Name::new(Path::new("_S5_"), &off).to_aml_bytes(&mut aml);

    let mut devices = Vec::with_capacity(4096);
    for (bus, window) in (0_u8..).zip(&platform.mmio64) {
        pci_host_bridge(platform, bus, window, &mut devices);
    }
    motherboard_resources(platform, &mut devices);
    serial_port(platform, &mut devices);
    power_button(platform, &mut devices);
    pvpanic(platform, &mut devices);
    hotplug::slots_and_events(platform, &mut devices);
    aml.extend(Scope::raw(Path::new("\\_SB_"), devices));
    aml
}

/// A root bus of PCI segment 0. No `_PRT`: devices have MSI-X and no interrupt pins. No `_OSC`: hot-plug and errors are not
/// handed to the native PCI Express mechanisms. Windows of different host bridges do not overlap: a guest's tree of
/// resources has each address once.
fn pci_host_bridge(platform: &Platform, bus: u8, mmio64: &RangeInclusive<u64>, aml: &mut Vec<u8>) {
    let number = AddressSpace::<u16>::new_bus_number(bus.into(), bus.into());
    let mmio32 = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        *platform.mmio32.start(),
        *platform.mmio32.end(),
        None,
    );
    let mmio64 = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        *mmio64.start(),
        *mmio64.end(),
        None,
    );
    let mut resources: Vec<&dyn Aml> = vec![&number, &mmio64];
    if bus == 0 {
        resources.push(&mmio32);
    }
    Device::new(
        Path::new(&host_bridge(bus)),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0A08")),
            &Name::new(Path::new("_CID"), &EISAName::new("PNP0A03")),
            &Name::new(Path::new("_SEG"), &ZERO),
            &Name::new(Path::new("_BBN"), &bus),
            &Name::new(Path::new("_UID"), &bus),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(resources)),
        ],
    )
    .to_aml_bytes(aml);
}

/// The name of a bus's host bridge.
pub(super) fn host_bridge(bus: u8) -> String {
    format!("PCI{bus}")
}

/// What is taken without belonging to a device: a guest uses the ECAM only if it is reserved here.
fn motherboard_resources(platform: &Platform, aml: &mut Vec<u8>) {
    let hotplug = platform.hotplug_port;
    let ecam_length = platform.ecam.end() - platform.ecam.start() + 1;
    Device::new(
        Path::new("MBRD"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0C02")),
            &Name::new(Path::new("_UID"), &ZERO),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![
                    &Memory32Fixed::new(true, *platform.ecam.start(), ecam_length),
                    &IO::new(platform.power_port, platform.power_port, 1, 1),
                    &IO::new(hotplug, hotplug, 1, devices::pci::hotplug::PORTS),
                ]),
            ),
        ],
    )
    .to_aml_bytes(aml);
}

fn serial_port(platform: &Platform, aml: &mut Vec<u8>) {
    let (port, gsi) = platform.com1;
    Device::new(
        Path::new("COM1"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0501")),
            &Name::new(Path::new("_UID"), &ZERO),
            &Name::new(Path::new("_DDN"), &"COM1"),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![
                    &IO::new(port, port, 1, 8),
                    &Interrupt::new(true, true, false, false, gsi),
                ]),
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// The power button and the generic event device (ACPI 6.5, 5.6.9) that tells of it. The interrupt has one meaning,
/// so that the guest asks no register what happened.
fn power_button(platform: &Platform, aml: &mut Vec<u8>) {
    Device::new(
        Path::new("PWRB"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0C0C")),
            &Name::new(Path::new("_UID"), &ZERO),
        ],
    )
    .to_aml_bytes(aml);
    Device::new(
        Path::new("GED0"),
        vec![
            &Name::new(Path::new("_HID"), &"ACPI0013"),
            &Name::new(Path::new("_UID"), &ZERO),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![&Interrupt::new(
                    true,
                    true,
                    false,
                    false,
                    platform.power_button_gsi,
                )]),
            ),
            &Method::new(
                Path::new("_EVT"),
                1,
                true,
                vec![&Notify::new(&Path::new("\\_SB_.PWRB"), &BUTTON_PRESSED)],
            ),
        ],
    )
    .to_aml_bytes(aml);
}

fn pvpanic(platform: &Platform, aml: &mut Vec<u8>) {
    let port = platform.pvpanic_port;
    Device::new(
        Path::new("PEVT"),
        vec![
            &Name::new(Path::new("_HID"), &"QEMU0001"),
            &Name::new(Path::new("_UID"), &ZERO),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![&IO::new(port, port, 1, 1)]),
            ),
        ],
    )
    .to_aml_bytes(aml);
}

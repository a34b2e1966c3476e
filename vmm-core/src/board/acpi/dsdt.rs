//! The DSDT's definition block: devices that a guest cannot discover, in AML.

use std::ops::RangeInclusive;

use acpi_tables::{
    Aml,
    aml::{
        AddressSpace, AddressSpaceCacheable, And, Device, EISAName, Field, FieldAccessType, FieldEntry,
        FieldLockRule, FieldUpdateRule, IO, If, Interrupt, Memory32Fixed, Method, Name, Notify, ONE,
        OpRegion, OpRegionSpace, Package, Path, ResourceTemplate, Scope, Store, ZERO,
    },
};

use devices::{
    legacy::pm::{BUTTON_PRESSED, SLEEP_TYPE_S5},
    tpm,
};

/// Index and data.
const RTC_PORTS: u8 = 2;

use super::{Platform, hotplug};

/// Notification value for a pressed power button (ACPI 6.5, table 5.152).
const NOTIFY_BUTTON_PRESSED: u8 = 0x80;

/// Notification value for another generation id.
const NOTIFY_GENERATION: u8 = 0x80;

pub(super) fn definition_block(platform: &Platform) -> Vec<u8> {
    let mut aml = Vec::with_capacity(4096);
    // 7.4.2.6: the value for the sleep control register's SLP_TYPx.
    let off = Package::new(vec![&SLEEP_TYPE_S5, &ZERO]);
    Name::new(Path::new("_S5_"), &off).to_aml_bytes(&mut aml);

    let mut devices = Vec::with_capacity(4096);
    for (bus, windows) in (0_u8..).zip(&platform.mmio64) {
        pci_host_bridge(platform, bus, windows, &mut devices);
    }
    motherboard_resources(platform, &mut devices);
    serial_port(platform, &mut devices);
    keyboard(platform, &mut devices);
    power_button(platform, &mut devices);
    clock(platform, &mut devices);
    pvpanic(platform, &mut devices);
    fw_cfg(platform, &mut devices);
    generation_id(platform, &mut devices);
    hotplug::slots_and_events(platform, &mut devices);
    tpm(platform, &mut devices);
    aml.extend(Scope::raw(Path::new("\\_SB_"), devices));
    aml
}

/// A root bus of PCI segment 0. No `_PRT`: devices have MSI-X and no interrupt pins. No `_OSC`: hot-plug and errors are not
/// handed to the native PCI Express mechanisms. A bus that may come later says itself where its configuration space is; the MCFG
/// has bus 0 alone. Windows of different host bridges do not overlap: a guest's tree of
/// resources has each address once.
fn pci_host_bridge(platform: &Platform, bus: u8, mmio64: &[RangeInclusive<u64>], aml: &mut Vec<u8>) {
    let number = AddressSpace::<u16>::new_bus_number(bus.into(), bus.into());
    let mmio32 = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        *platform.mmio32.start(),
        *platform.mmio32.end(),
        None,
    );
    let window = |window: &RangeInclusive<u64>| {
        let (first, last) = (*window.start(), *window.end());
        AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, first, last, None)
    };
    let mmio64: Vec<_> = mmio64.iter().map(window).collect();
    let mut resources: Vec<&dyn Aml> = vec![&number];
    resources.extend(mmio64.iter().map(|window| window as &dyn Aml));
    if bus == 0 {
        resources.push(&mmio32);
    }
    let (hid, cid) = (EISAName::new("PNP0A08"), EISAName::new("PNP0A03"));
    let (hid, cid) = (
        Name::new(Path::new("_HID"), &hid),
        Name::new(Path::new("_CID"), &cid),
    );
    let segment = Name::new(Path::new("_SEG"), &ZERO);
    let (number, id) = (
        Name::new(Path::new("_BBN"), &bus),
        Name::new(Path::new("_UID"), &bus),
    );
    let resources = ResourceTemplate::new(resources);
    let resources = Name::new(Path::new("_CRS"), &resources);
    // PCI Firmware Specification 3.3, 4.1.3: where bus 0 of the segment has its configuration space.
    let ecam = Name::new(Path::new("_CBA"), platform.ecam.start());
    let mut children: Vec<&dyn Aml> = vec![&hid, &cid, &segment, &number, &id, &resources];
    if bus != 0 {
        children.push(&ecam);
    }
    Device::new(Path::new(&host_bridge(bus)), children).to_aml_bytes(aml);
}

/// The name of a bus's host bridge.
pub(super) fn host_bridge(bus: u8) -> String {
    format!("PCI{bus}")
}

/// Reserved resources that belong to no device. A guest uses the ECAM only if it is reserved here.
fn motherboard_resources(platform: &Platform, aml: &mut Vec<u8>) {
    let (button, hotplug) = (platform.power_button_port, platform.hotplug_port);
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
                    &IO::new(button, button, 1, 1),
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

/// The keyboard controller with its keyboard, where there is one.
fn keyboard(platform: &Platform, aml: &mut Vec<u8>) {
    let Some((data, command, gsi)) = platform.keyboard else {
        return;
    };
    Device::new(
        Path::new("KBD0"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0303")),
            &Name::new(Path::new("_UID"), &ZERO),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![
                    &IO::new(data, data, 1, 1),
                    &IO::new(command, command, 1, 1),
                    &Interrupt::new(true, true, false, false, gsi),
                ]),
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// The power button and the generic event device (ACPI 6.5, 5.6.9) that reports a press. The method
/// clears the press before it notifies the guest, so that the next press is a separate event.
fn power_button(platform: &Platform, aml: &mut Vec<u8>) {
    Device::new(
        Path::new("PWRB"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0C0C")),
            &Name::new(Path::new("_UID"), &ZERO),
        ],
    )
    .to_aml_bytes(aml);
    let status = Path::new("PBST");
    Device::new(
        Path::new("GED0"),
        vec![
            &Name::new(Path::new("_HID"), &"ACPI0013"),
            &Name::new(Path::new("_UID"), &ZERO),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![&Interrupt::new(
                    true,
                    false,
                    false,
                    false,
                    platform.power_button_gsi,
                )]),
            ),
            &OpRegion::new(
                Path::new("PBRG"),
                OpRegionSpace::SystemIO,
                &platform.power_button_port,
                &ONE,
            ),
            &Field::new(
                Path::new("PBRG"),
                FieldAccessType::Byte,
                FieldLockRule::NoLock,
                FieldUpdateRule::WriteAsZeroes,
                vec![FieldEntry::Named(*b"PBST", 8)],
            ),
            &Method::new(
                Path::new("_EVT"),
                1,
                true,
                vec![&If::new(
                    &And::new(&ZERO, &status, &BUTTON_PRESSED),
                    vec![
                        &Store::new(&status, &BUTTON_PRESSED),
                        &Notify::new(&Path::new("\\_SB_.PWRB"), &NOTIFY_BUTTON_PRESSED),
                    ],
                )],
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// The generation ID ("Virtual Machine Generation ID", Microsoft, 2018), and the generic event
/// device that reports its change. The ID changes when the machine continues from a snapshot. The
/// guest then renews data that must be unique. The interrupt is an edge: a guest without a driver
/// reads the ID when it loads the driver.
fn generation_id(platform: &Platform, aml: &mut Vec<u8>) {
    let Some(address) = platform.generation_id else {
        return;
    };
    Device::new(
        Path::new("VGEN"),
        vec![
            &Name::new(Path::new("_HID"), &"VMGENCTR"),
            &Name::new(Path::new("_CID"), &"VM_Gen_Counter"),
            &Name::new(Path::new("_DDN"), &"VM_Gen_Counter"),
            &Name::new(Path::new("ADDR"), &Package::new(vec![&address, &ZERO])),
        ],
    )
    .to_aml_bytes(aml);
    let interrupt = Interrupt::new(true, true, false, false, platform.generation_gsi);
    Device::new(
        Path::new("GED2"),
        vec![
            &Name::new(Path::new("_HID"), &"ACPI0013"),
            &Name::new(Path::new("_UID"), &2_u8),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&interrupt])),
            &Method::new(
                Path::new("_EVT"),
                1,
                true,
                vec![&Notify::new(&Path::new("\\_SB_.VGEN"), &NOTIFY_GENERATION)],
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// The CMOS clock, without an interrupt.
fn clock(platform: &Platform, aml: &mut Vec<u8>) {
    let port = platform.rtc_port;
    Device::new(
        Path::new("RTC0"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0B00")),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![&IO::new(port, port, 1, RTC_PORTS)]),
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

/// The configuration device of firmware (QEMU's `docs/specs/fw_cfg`), for a driver of the guest's system.
fn fw_cfg(platform: &Platform, aml: &mut Vec<u8>) {
    let Some((port, ports)) = platform.fw_cfg else {
        return;
    };
    Device::new(
        Path::new("FWCF"),
        vec![
            &Name::new(Path::new("_HID"), &"QEMU0002"),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![&IO::new(port, port, 1, ports)]),
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// The TPM (TCG PC Client Platform Firmware Profile 1.06, 13), where there is one.
fn tpm(platform: &Platform, aml: &mut Vec<u8>) {
    if platform.tpm.is_none() {
        return;
    }
    Device::new(
        Path::new("TPM_"),
        vec![
            &Name::new(Path::new("_HID"), &"MSFT0101"),
            &Name::new(Path::new("_UID"), &ONE),
            &Name::new(Path::new("_STR"), &"TPM 2.0 Device"),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![&Memory32Fixed::new(true, tpm::ADDRESS, tpm::LENGTH)]),
            ),
        ],
    )
    .to_aml_bytes(aml);
}

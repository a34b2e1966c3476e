//! ACPI tables of platform v1: processors, interrupt controllers, PCI and power.
//!
//! The platform is *hardware-reduced* (ACPI 6.5, 4.1): it has no fixed power-management registers,
//! and no SCI, 8259 or PIT that the guest would have to program at boot. Sleep, reset and power
//! button are the sleep control register, the reset register and a generic event device. This saves
//! hundreds of VM exits per boot.

mod dsdt;
mod hotplug;
mod tables;

use std::ops::RangeInclusive;

use acpi_tables::{Aml, rsdp::Rsdp, xsdt::XSDT};
use devices::pci::root::BUSES;

use tables::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};

/// Properties of a machine that the tables describe.
#[derive(Clone, Debug)]
pub struct Platform {
    /// Local APIC ids of the vCPUs, in order of their numbers.
    pub apic_ids: Vec<u32>,
    /// Base of the local APICs, a guest-physical address.
    pub local_apic: u32,
    /// Base of the I/O APIC, whose first input is GSI 0.
    pub io_apic: u32,
    /// Configuration space of all PCI buses (1 MiB for each, PCI Express 5.0, 7.2.2).
    pub ecam: RangeInclusive<u32>,
    /// Where 32-bit BARs of bus 0 may be.
    pub mmio32: RangeInclusive<u32>,
    /// Where 64-bit BARs of each bus may be, above all RAM.
    pub mmio64: [Vec<RangeInclusive<u64>>; BUSES],
    /// First I/O port and GSI of COM1 (8 ports).
    pub com1: (u16, u32),
    /// Ports and GSI of the keyboard controller, if a keyboard is plugged in: data, command.
    pub keyboard: Option<(u16, u16, u32)>,
    /// I/O port of the sleep control, sleep status and reset register, one byte.
    pub power_port: u16,
    /// Value that resets the machine when the guest writes it to the reset register.
    pub reset_value: u8,
    /// I/O port of the power button's status register ([`devices::legacy::pm::PowerButton`]), one byte.
    pub power_button_port: u16,
    /// GSI that is high while the register says that the power button was pressed.
    pub power_button_gsi: u32,
    /// First I/O port of the CMOS clock (2 ports).
    pub rtc_port: u16,
    /// I/O port of pvpanic, one byte.
    pub pvpanic_port: u16,
    /// First I/O port of PCI hot-plug ([`devices::pci::hotplug`]).
    pub hotplug_port: u16,
    /// GSI that is high while there is something to read there.
    pub hotplug_gsi: u32,
    /// Where the machine's generation id is, a guest-physical address.
    pub generation_id: u32,
    /// GSI that pulses when it is another.
    pub generation_gsi: u32,
}

/// The tables as they lie in guest memory.
#[derive(Debug, PartialEq, Eq)]
pub struct Tables {
    /// To be written at the address that they were built for. The RSDP is at its start.
    pub bytes: Vec<u8>,
}

/// Builds all tables for the guest-physical address `base`, which is a multiple of 16 (ACPI 6.5, 5.2.5.1).
pub fn build(platform: &Platform, base: u64) -> Tables {
    let mut layout = Layout {
        base,
        bytes: vec![0; Rsdp::len()],
    };
    let dsdt = layout.place(&tables::dsdt(&dsdt::definition_block(platform)));
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for table in [
        tables::fadt(platform, dsdt),
        tables::madt(platform),
        tables::mcfg(platform),
        tables::spcr(platform),
    ] {
        xsdt.add_entry(layout.place(&table));
    }
    let mut bytes = Vec::new();
    xsdt.to_aml_bytes(&mut bytes);
    let xsdt = layout.place(&bytes);

    let mut rsdp = Vec::with_capacity(Rsdp::len());
    Rsdp::new(OEM_ID, xsdt).to_aml_bytes(&mut rsdp);
    layout.bytes.splice(..Rsdp::len(), rsdp);
    Tables { bytes: layout.bytes }
}

/// Puts one table behind the other, each on a multiple of 16 bytes.
struct Layout {
    base: u64,
    bytes: Vec<u8>,
}

impl Layout {
    fn place(&mut self, table: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let address = self.base + self.bytes.len() as u64;
        self.bytes.extend_from_slice(table);
        address
    }
}

#[cfg(test)]
mod tests;

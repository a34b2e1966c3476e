//! ACPI tables of platform v1: processors, interrupt controllers, PCI and power.
//!
//! The platform is *hardware-reduced* (ACPI 6.5, 4.1): it has no fixed power-management registers,
//! and no SCI, 8259 or PIT that the guest would have to program at boot. Sleep, reset and power
//! button are the sleep control register, the reset register and a generic event device. This saves
//! hundreds of VM exits per boot.

mod dsdt;
mod hotplug;
mod tables;

use std::ops::{Range, RangeInclusive};

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
    /// Where the machine's generation id is, a guest-physical address, if it has one.
    pub generation_id: Option<u32>,
    /// GSI that pulses when it is another.
    pub generation_gsi: u32,
    /// The TPM, if there is one.
    pub tpm: Option<Tpm>,
    /// Ports of fw_cfg (first one, number) that the guest's system reads, if it has something to read there.
    pub fw_cfg: Option<(u16, u8)>,
}

/// A TPM at [`devices::tpm::ADDRESS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tpm {
    /// Length of the area for the event log of a BIOS, in bytes; 0 for none. UEFI firmware passes its log
    /// on by a protocol of its own.
    pub log_bytes: u32,
}

/// The tables as they lie in guest memory.
#[derive(Debug, PartialEq, Eq)]
pub struct Tables {
    /// To be written at the address that they were built for. The RSDP is at its start.
    pub bytes: Vec<u8>,
    /// Offsets of all addresses of other tables in `bytes`, each 64 bits wide.
    pub pointers: Vec<usize>,
    /// Offset of the address of the TPM's event log, 64 bits wide and zero, if there is to be one.
    pub tpm_log: Option<usize>,
    /// All checksums that depend on these addresses, in the order in which they are to be computed.
    pub checksums: Vec<Checksum>,
}

/// A byte that makes the sum of a range of the tables zero. All are offsets into the tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksum {
    /// Bytes that are summed up.
    pub range: Range<usize>,
    /// The byte.
    pub at: usize,
}

/// Offset of the checksum in the header that tables have in common (ACPI 6.5, 5.2.6).
const HEADER_CHECKSUM: usize = 9;
/// Length of that header.
const HEADER: usize = 36;
/// X_DSDT in the FADT (5.2.9).
const FADT_DSDT: usize = 140;
/// Length of the RSDP (5.2.5.3).
pub const RSDP_LENGTH: usize = 36;
/// XsdtAddress, the checksum of the first 20 bytes, and that of all in the RSDP (5.2.5.3).
const RSDP_XSDT: usize = 24;
const RSDP_CHECKSUM: usize = 8;
const RSDP_CHECKED: usize = 20;
const RSDP_EXTENDED_CHECKSUM: usize = 32;

/// Builds all tables for the guest-physical address `base`, which is a multiple of 16 (ACPI 6.5, 5.2.5.1).
pub fn build(platform: &Platform, base: u64) -> Tables {
    let mut layout = Layout {
        bytes: vec![0; RSDP_LENGTH],
    };
    let dsdt = layout.place(&tables::dsdt(&dsdt::definition_block(platform)));
    let fadt = layout.place(&tables::fadt(platform, base.saturating_add(dsdt.start as u64)));
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    xsdt.add_entry(base.saturating_add(fadt.start as u64));
    let others = [
        tables::madt(platform),
        tables::mcfg(platform),
        tables::spcr(platform),
    ];
    for table in &others {
        let place = layout.place(table);
        xsdt.add_entry(base.saturating_add(place.start as u64));
    }
    let tpm = platform.tpm.map(|tpm| (tpm, layout.place(&tables::tpm2(tpm))));
    if let Some((_, place)) = &tpm {
        xsdt.add_entry(base.saturating_add(place.start as u64));
    }
    let with_log = tpm.filter(|(tpm, _)| tpm.log_bytes > 0).map(|(_, place)| place);
    let mut bytes = Vec::new();
    xsdt.to_aml_bytes(&mut bytes);
    let xsdt = layout.place(&bytes);

    let mut rsdp = Vec::with_capacity(RSDP_LENGTH);
    Rsdp::new(OEM_ID, base.saturating_add(xsdt.start as u64)).to_aml_bytes(&mut rsdp);
    layout.bytes.splice(..RSDP_LENGTH, rsdp);

    let entries = (xsdt.start.saturating_add(HEADER)..xsdt.end).step_by(8);
    let of_table = |range: Range<usize>| Checksum {
        at: range.start.saturating_add(HEADER_CHECKSUM),
        range,
    };
    Tables {
        bytes: layout.bytes,
        pointers: [RSDP_XSDT, fadt.start.saturating_add(FADT_DSDT)]
            .into_iter()
            .chain(entries)
            .collect(),
        tpm_log: with_log
            .as_ref()
            .map(|place| place.start.saturating_add(tables::TPM2_LOG_ADDRESS)),
        checksums: with_log
            .map(of_table)
            .into_iter()
            .chain([
                of_table(fadt),
                of_table(xsdt),
                Checksum {
                    range: 0..RSDP_CHECKED,
                    at: RSDP_CHECKSUM,
                },
                Checksum {
                    range: 0..RSDP_LENGTH,
                    at: RSDP_EXTENDED_CHECKSUM,
                },
            ])
            .collect(),
    }
}

/// Puts one table behind the other, each on a multiple of 16 bytes.
struct Layout {
    bytes: Vec<u8>,
}

impl Layout {
    /// Returns the table's place.
    fn place(&mut self, table: &[u8]) -> Range<usize> {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let start = self.bytes.len();
        self.bytes.extend_from_slice(table);
        start..self.bytes.len()
    }
}

#[cfg(test)]
mod tests;

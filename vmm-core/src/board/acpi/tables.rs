//! The tables that are plain structures.

use acpi_tables::{
    Aml,
    fadt::{FADTBuilder, Flags, PmProfile},
    gas::{AccessSize, AddressSpace, GAS},
    mcfg::MCFG,
    sdt::Sdt,
};
use devices::{legacy::rtc::CENTURY, tpm};

use super::{Platform, Tpm};

pub(super) const OEM_ID: [u8; 6] = *b"VMMD  ";
pub(super) const OEM_TABLE_ID: [u8; 8] = *b"PLATFRM1";
pub(super) const OEM_REVISION: u32 = 1;

/// Length of the header that all tables have in common (ACPI 6.5, 5.2.6).
const HEADER_LENGTH: u32 = 36;

fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    let mut table = Sdt::new(
        signature,
        HEADER_LENGTH,
        revision,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    );
    table.append_slice(body);
    table.as_slice().to_vec()
}

/// The DSDT around its AML.
pub(super) fn dsdt(definition_block: &[u8]) -> Vec<u8> {
    // Revision 2 and above: integers have 64 bits.
    table(*b"DSDT", 6, definition_block)
}

/// IAPC_BOOT_ARCH (ACPI 6.5, 5.2.9.3): flags for hardware that a guest may or need not probe. Bit 0
/// (legacy devices) stays clear. Bit 1 (8042) is clear without a keyboard, so that the guest does
/// not probe for one.
mod boot_arch {
    pub const I8042: u16 = 1 << 1;
    pub const VGA_NOT_PRESENT: u16 = 1 << 2;
    pub const NO_ASPM: u16 = 1 << 4;
}

/// FADT (ACPI 6.5, 5.2.9).
pub(super) fn fadt(platform: &Platform, dsdt: u64) -> Vec<u8> {
    let power = GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        u64::from(platform.power_port),
    );
    let mut builder = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::Wbinvd)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless)
        // Set: there is no button, and no RTC wake status, in fixed registers.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc);
    let keyboard = platform.keyboard.map_or(0, |_| boot_arch::I8042);
    builder.iapc_boot_arch = (keyboard | boot_arch::VGA_NOT_PRESENT | boot_arch::NO_ASPM).into();
    builder.century = CENTURY;
    builder.reset_reg = power;
    builder.reset_value = platform.reset_value;
    builder.sleep_control_reg = power;
    builder.sleep_status_reg = power;
    builder.hypervisor_vendor_identity = u64::from_le_bytes(*b"VMMD\0\0\0\0").into();
    let mut bytes = Vec::new();
    builder.finalize().to_aml_bytes(&mut bytes);
    bytes
}

/// MADT (ACPI 6.5, 5.2.12). Without PCAT_COMPAT: there is no 8259 to disable.
pub(super) fn madt(platform: &Platform) -> Vec<u8> {
    const ENABLED: u32 = 1;
    let mut body = Vec::with_capacity(64 + 8 * platform.apic_ids.len());
    body.extend(platform.local_apic.to_le_bytes());
    body.extend(0u32.to_le_bytes());
    for (uid, &apic_id) in (0u32..).zip(&platform.apic_ids) {
        match (u8::try_from(uid), u8::try_from(apic_id)) {
            // 5.2.12.2: processor local APIC. Id 255 is the broadcast.
            (Ok(uid), Ok(apic_id)) if apic_id < 255 => {
                body.extend([0, 8, uid, apic_id]);
                body.extend(ENABLED.to_le_bytes());
            }
            // 5.2.12.12: processor local x2APIC.
            _ => {
                body.extend([9, 16, 0, 0]);
                body.extend(apic_id.to_le_bytes());
                body.extend(ENABLED.to_le_bytes());
                body.extend(uid.to_le_bytes());
            }
        }
    }
    // 5.2.12.3: I/O APIC with id 0.
    body.extend([1, 12, 0, 0]);
    body.extend(platform.io_apic.to_le_bytes());
    body.extend(0u32.to_le_bytes());
    // 5.2.12.7: local APIC NMI: LINT1 of all processors, polarity and trigger mode of the bus.
    body.extend([4, 6, 0xff, 0, 0, 1]);
    table(*b"APIC", 5, &body)
}

/// MCFG (PCI Firmware Specification 3.3, 4.1.2) of bus 0 alone. It is for buses that are always there: Linux looks for devices on
/// each bus that it names, host bridge or not. Further host bridges name their configuration space themselves (`_CBA`).
pub(super) fn mcfg(platform: &Platform) -> Vec<u8> {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    mcfg.add_ecam(u64::from(*platform.ecam.start()), 0, 0, 0);
    let mut bytes = Vec::new();
    mcfg.to_aml_bytes(&mut bytes);
    bytes
}

/// SPCR, revision 2: the console is COM1 at 115,200 8N1.
pub(super) fn spcr(platform: &Platform) -> Vec<u8> {
    let (port, gsi) = platform.com1;
    let mut body = Vec::with_capacity(44);
    // Interface type 0: full 16550.
    body.extend([0; 4]);
    GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        u64::from(port),
    )
    .to_aml_bytes(&mut body);
    // Interrupt type: an input of an I/O APIC; so the 8259 input is 0.
    body.extend([1 << 1, 0]);
    body.extend(gsi.to_le_bytes());
    // 115,200 baud, no parity, one stop bit, no flow control, ANSI terminal, no language.
    body.extend([7, 0, 1, 0, 3, 0]);
    // No PCI device.
    body.extend([0xff; 4]);
    body.resize(44, 0);
    table(*b"SPCR", 2, &body)
}

/// Offset of the event log's address in the TPM2.
pub(super) const TPM2_LOG_ADDRESS: usize = 68;

/// TPM2, revision 4 (TCG ACPI Specification 1.2, 7.3), of a TPM with the CRB interface.
pub(super) fn tpm2(tpm: Tpm) -> Vec<u8> {
    /// Start method: the command response buffer.
    const CRB: u32 = 7;
    let mut body = Vec::with_capacity(40);
    // Platform class 0: client.
    body.extend([0; 4]);
    body.extend(tpm::CONTROL_AREA.to_le_bytes());
    body.extend(CRB.to_le_bytes());
    // No parameters of the start method.
    body.extend([0; 12]);
    body.extend(tpm.log_bytes.to_le_bytes());
    // Firmware allocates the log.
    body.extend(0u64.to_le_bytes());
    table(*b"TPM2", 4, &body)
}

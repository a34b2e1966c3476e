//! The guest-physical memory map and the I/O ports of platform v1.
//!
//! The map follows the contract of EDK2's CloudHv platform (`OvmfPkg/Include/IndustryStandard/CloudHv.h`), so that its
//! image boots unchanged: RAM below 3 GiB and from 4 GiB up, one MMIO hole of 0x3800_0000 bytes at 3 GiB.
//!
//! ```text
//! 0000_0000 ─ 0009_fc00  RAM; boot structures of the loader lie in its first 256 KiB
//! 0009_fc00 ─ 0010_0000  reserved: ACPI tables at 000e_0000, the generation id at 000e_f000, SMBIOS at 000f_0000
//! 0010_0000 ─ c000_0000  RAM
//! c000_0000 ─ e800_0000  32-bit BARs                       ┐ the hole that
//! e800_0000 ─ e830_0000  ECAM of buses 0 to 2              ┘ firmware knows
//! fec0_0000, fee0_0000   I/O APIC, local APICs
//! feff_c000 ─ ff00_0000  KVM's identity map and task state segment
//! 1_0000_0000 ─          RAM above 3 GiB
//! above all RAM          64-bit BARs
//! ```
//!
//! A machine that boots through UEFI ([`Map::Uefi`]) has another map. Stock OVMF takes
//! 0xb000_0000 (2022.11) or 0xe000_0000 (2025.02) for a window of 256 MiB to the configuration
//! space, and places 32-bit BARs from 0xc000_0000 on or above low RAM. So low RAM ends at 2 GiB, as
//! on QEMU's Q35, 32-bit BARs end at 0xe000_0000, and the window of the ACPI tables is above all
//! that firmware gives to BARs.
//!
//! ```text
//! 0000_0000 ─ 8000_0000  RAM: firmware makes the guest's memory map, with its tables
//! c000_0000 ─ e000_0000  32-bit BARs
//! fc00_0000 ─ fc30_0000  ECAM of buses 0 to 2
//! below 1_0000_0000      flash: the variables, then the code up to the end
//! ```
//!
//! A machine with a BIOS ([`Map::Bios`]) has no variables, and the end of the code also at 000e_0000.
//! SeaBIOS (`src/fw/pciinit.c`) takes 0xb000_0000 for a window of 256 MiB to the configuration space,
//! and places 32-bit BARs below 0xfec0_0000, downwards.
//!
//! ```text
//! b000_0000 ─ b030_0000  ECAM of buses 0 to 2
//! c000_0000 ─ fec0_0000  32-bit BARs
//! ```

use std::ops::Range;

use devices::pci::root::ECAM_SIZE;

/// A mebibyte in bytes.
pub const MIB: u64 = 1 << 20;
/// A gibibyte in bytes.
pub const GIB: u64 = 1 << 30;

/// RAM comes in multiples of this, and begins at multiples of this on guest and host: the size of a huge page.
pub const RAM_ALIGNMENT: u64 = 2 * MIB;
/// The least RAM that a machine has, in bytes.
pub const RAM_MIN: u64 = 64 * MIB;
/// The most RAM that a machine has, in bytes.
pub const RAM_MAX: u64 = 4096 * GIB;

/// Where low RAM ends at the latest and the MMIO hole begins (`CLOUDHV_MMIO_HOLE_ADDRESS`).
pub const HOLE_START: u64 = 0xc000_0000;
/// Length of the hole that firmware knows (`CLOUDHV_MMIO_HOLE_SIZE`).
pub const HOLE_LENGTH: u64 = 0x3800_0000;
/// Where high RAM begins.
pub const HIGH_RAM_START: u64 = 4 * GIB;

/// Conventional memory ends here; what follows belongs to firmware tables.
pub const LOW_RESERVED_START: u64 = 0x9_fc00;
/// Extended memory begins here.
pub const LOW_RESERVED_END: u64 = 0x10_0000;
/// The RSDP, at the start, and the other ACPI tables: in the range that is searched for it (ACPI 6.5, 5.2.5.1).
pub const ACPI: Range<u64> = 0xe_0000..0xf_0000;
/// The generation id of the machine, a GUID, behind the ACPI tables: in memory that is reserved to the platform and cached, as
/// Microsoft's "Virtual Machine Generation ID" has it.
pub const GENERATION_ID: Range<u64> = 0xe_f000..0xe_f010;
/// The SMBIOS entry point, at the start, and its table: in the range that is searched for it (SMBIOS 3.7, 5.2.2).
pub const SMBIOS: Range<u64> = 0xf_0000..0x10_0000;

/// The end of a BIOS, in real mode.
pub const BIOS: Range<u64> = 0xe_0000..0x10_0000;

/// 32-bit BARs: the hole up to the configuration space.
pub const MMIO32: Range<u64> = HOLE_START..0xe800_0000;
/// PCI configuration space of all buses (ECAM), 1 MiB each, within the hole as firmware knows it.
pub const ECAM: Range<u64> = 0xe800_0000..0xe800_0000 + ECAM_SIZE;
/// One page for KVM's identity map (`KVM_SET_IDENTITY_MAP_ADDR`), where no machine has anything; guests never see it.
pub const KVM_IDENTITY_MAP: u64 = 0xfeff_c000;
/// Three pages for KVM's task state segment (`KVM_SET_TSS_ADDR`).
pub const KVM_TSS: u64 = 0xfeff_d000;
/// Registers of the in-kernel I/O APIC (`IOAPIC_DEFAULT_BASE_ADDRESS`).
pub const IO_APIC: u64 = 0xfec0_0000;
/// Registers of each vCPU's local APIC (`APIC_DEFAULT_PHYS_BASE`).
pub const LOCAL_APIC: u64 = 0xfee0_0000;

/// The 64-bit BAR window's size and alignment.
pub const MMIO64_LENGTH: u64 = 64 * GIB;

/// Which memory map a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Map {
    /// That of a machine whose kernel is loaded directly.
    Direct,
    /// That of a machine that boots through UEFI.
    Uefi,
    /// That of a machine with a BIOS.
    Bios,
}

impl Map {
    /// Whether the machine boots through firmware.
    pub fn has_firmware(self) -> bool {
        self != Self::Direct
    }

    /// Where low RAM ends at the latest.
    pub fn low_ram_end(self) -> u64 {
        match self {
            Self::Direct => HOLE_START,
            Self::Uefi | Self::Bios => 2 * GIB,
        }
    }

    /// 32-bit BARs.
    pub fn mmio32(self) -> Range<u64> {
        match self {
            Self::Direct => MMIO32,
            Self::Uefi => HOLE_START..0xe000_0000,
            Self::Bios => HOLE_START..IO_APIC,
        }
    }

    /// PCI configuration space of all buses, as the ACPI tables name it.
    pub fn ecam(self) -> Range<u64> {
        match self {
            Self::Direct => ECAM,
            Self::Uefi => 0xfc00_0000..0xfc00_0000 + ECAM_SIZE,
            Self::Bios => 0xb000_0000..0xb000_0000 + ECAM_SIZE,
        }
    }

    /// The parts of `ram` bytes of RAM: up to the end of low RAM, and from 4 GiB up (empty when all fits below).
    pub fn ram_ranges(self, ram: u64) -> (Range<u64>, Range<u64>) {
        let low = ram.min(self.low_ram_end());
        (
            0..low,
            HIGH_RAM_START..HIGH_RAM_START.saturating_add(ram.saturating_sub(low)),
        )
    }

    /// Where 64-bit BARs are on a machine with `ram` bytes of RAM: the first multiple of 64 GiB above it.
    pub fn mmio64(self, ram: u64) -> Range<u64> {
        let (_, high) = self.ram_ranges(ram);
        let start = high.end.div_ceil(MMIO64_LENGTH).saturating_mul(MMIO64_LENGTH);
        start..start.saturating_add(MMIO64_LENGTH)
    }

    /// Checks that all of a machine's address space is below `1 << bits`. An address beyond it cannot
    /// be mapped (Intel SDM vol. 3, 4.1.4; EPT and NPT have the same width).
    pub fn fits(self, ram: u64, bits: u32) -> Result<(), TooLarge> {
        let end = 1_u64.checked_shl(bits).unwrap_or(u64::MAX);
        if self.mmio64(ram).end <= end {
            return Ok(());
        }
        let window = end.saturating_sub(MMIO64_LENGTH) / MMIO64_LENGTH * MMIO64_LENGTH;
        let most = self
            .low_ram_end()
            .saturating_add(window.saturating_sub(HIGH_RAM_START));
        let most = if window < HIGH_RAM_START { 0 } else { most / MIB };
        Err(TooLarge { ram, bits, most })
    }
}

/// A machine that needs more address space than its host's processors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the processors of this host have {bits} bits of physical address: with what PCI takes above it, RAM can be at most {most} \
     MiB, and is to be {} MiB",
    ram / MIB
)]
pub struct TooLarge {
    /// RAM in bytes.
    pub ram: u64,
    /// Width of a physical address.
    pub bits: u32,
    /// Most RAM that fits, in MiB.
    pub most: u64,
}

/// Allowed use of a range by firmware or a kernel (ACPI 6.5, 15: address range types).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeKind {
    /// `AddressRangeMemory`.
    Ram = 1,
    /// `AddressRangeReserved`.
    Reserved = 2,
}

/// The memory map of a guest that is booted directly (e820, PVH memmap), in order of addresses.
pub fn memory_map(ram: u64) -> Vec<(Range<u64>, RangeKind)> {
    let (low, high) = Map::Direct.ram_ranges(ram);
    let mut map = vec![
        (0..LOW_RESERVED_START, RangeKind::Ram),
        (LOW_RESERVED_START..LOW_RESERVED_END, RangeKind::Reserved),
        (LOW_RESERVED_END..low.end, RangeKind::Ram),
        (ECAM, RangeKind::Reserved),
    ];
    if !high.is_empty() {
        map.push((high, RangeKind::Ram));
    }
    map
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_hole_is_the_one_that_cloudhv_firmware_expects() {
        assert_eq!(MMIO32.start, HOLE_START);
        const { assert!(MMIO32.end <= ECAM.start && ECAM.end <= HOLE_START + HOLE_LENGTH) };
        const { assert!(KVM_IDENTITY_MAP > LOCAL_APIC && KVM_TSS + 3 * 4096 == 0xff00_0000) };
    }

    #[test]
    fn ram_is_split_at_three_gibibytes() {
        assert_eq!(
            Map::Direct.ram_ranges(256 * MIB),
            (0..256 * MIB, HIGH_RAM_START..HIGH_RAM_START)
        );
        assert_eq!(Map::Direct.ram_ranges(3 * GIB), (0..3 * GIB, 4 * GIB..4 * GIB));
        assert_eq!(Map::Direct.ram_ranges(5 * GIB), (0..3 * GIB, 4 * GIB..6 * GIB));
    }

    #[test]
    fn too_much_memory_for_the_host_names_the_maximum() {
        assert_eq!(Map::Direct.fits(RAM_MAX, 43), Ok(()));
        assert_eq!(Map::Direct.fits(RAM_MAX, 52), Ok(()));
        assert_eq!(Map::Direct.fits(60 * GIB, 37), Ok(()));
        for (ram, bits) in [
            (RAM_MAX, 42),
            (RAM_MAX, 40),
            (64 * GIB, 37),
            (RAM_MIN, 36),
            (RAM_MIN, 32),
        ] {
            let error = Map::Direct.fits(ram, bits).unwrap_err();
            assert_eq!((error.ram, error.bits), (ram, bits));
            if error.most > 0 {
                assert_eq!(Map::Direct.fits(error.most * MIB, bits), Ok(()), "{error}");
                assert!(
                    Map::Direct.fits(error.most * MIB + RAM_ALIGNMENT, bits).is_err(),
                    "{error}"
                );
            }
        }
        assert_eq!(Map::Direct.fits(RAM_MAX, 40).unwrap_err().most, 959 * 1024);
        assert_eq!(
            Map::Direct.fits(RAM_MAX, 40).unwrap_err().to_string(),
            "the processors of this host have 40 bits of physical address: with what PCI takes above it, RAM can be at most \
             982016 MiB, and is to be 4194304 MiB"
        );
    }

    proptest! {
        #[test]
        fn map_has_all_ram_except_reserved_in_order(units in 64_u64..=RAM_MAX / RAM_ALIGNMENT) {
            let ram = units * RAM_ALIGNMENT;
            let map = memory_map(ram);
            let mut last = 0;
            for (range, _) in &map {
                prop_assert!(range.start >= last && range.start < range.end);
                last = range.end;
            }
            let total: u64 = map
                .iter()
                .filter(|(_, kind)| *kind == RangeKind::Ram)
                .map(|(range, _)| range.end - range.start)
                .sum();
            prop_assert_eq!(total, ram - (LOW_RESERVED_END - LOW_RESERVED_START));
            let window = Map::Direct.mmio64(ram);
            prop_assert!(window.start >= last && window.start.is_multiple_of(MMIO64_LENGTH));
        }
    }
}

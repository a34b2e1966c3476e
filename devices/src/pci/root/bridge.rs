//! The functions of the chipset: host bridge and LPC bridge. They have registers and no BARs.

use super::super::{
    config::{ConfigSpace, Header},
    function::PciFunction,
};
use crate::bus::Effect;

/// Which machine firmware and guests recognise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chipset {
    /// EDK2's CloudHv platform: a host bridge without registers.
    CloudHv,
    /// Intel's Q35 and ICH9, as far as the OVMF of distributions programs them: a host bridge at
    /// 00:00.0 whose PCIEXBAR places a window to the configuration space, and an LPC bridge at
    /// 00:1f.0.
    Q35,
}

const INTEL: u16 = 0x8086;
/// PCIEXBAR of the host bridge (Intel 3 Series Express Chipset, 5.1.16): 64 bits; bit 0 enables the window.
pub(super) const PCIEXBAR: usize = 0x60;
const PCIEXBAR_ENABLE: u64 = 1;
/// The base is a multiple of 256 MiB below 2 to the power of 36; bits 1 and 2 are the length.
const PCIEXBAR_BASE: u64 = 0xf_f000_0000;
const PCIEXBAR_LENGTH: u64 = 0b110;
/// The device number of the LPC bridge.
pub(super) const LPC_SLOT: u8 = 0x1f;

/// A function of the chipset.
pub(super) struct Bridge {
    config: ConfigSpace,
    /// The registers that move the window to the configuration space.
    has_window: bool,
}

impl Bridge {
    /// The host bridge.
    pub(super) fn host(chipset: Chipset) -> Self {
        let mut config = ConfigSpace::new(&Header {
            vendor: INTEL,
            device: match chipset {
                Chipset::CloudHv => 0x0d57,
                Chipset::Q35 => 0x29c0,
            },
            class: 0x06_00_00,
            ..Header::default()
        });
        if chipset == Chipset::Q35 {
            let writable = PCIEXBAR_BASE | PCIEXBAR_LENGTH | PCIEXBAR_ENABLE;
            config.add_registers(PCIEXBAR, &[0; 8], &writable.to_le_bytes());
        }
        Self {
            config,
            has_window: chipset == Chipset::Q35,
        }
    }

    /// The LPC bridge of ICH9 (Intel I/O Controller Hub 9, 13.1). Its registers hold what firmware writes; the devices behind
    /// it are at fixed addresses.
    pub(super) fn lpc() -> Self {
        let mut config = ConfigSpace::new(&Header {
            vendor: INTEL,
            device: 0x2918,
            revision: 2,
            class: 0x06_01_00,
            ..Header::default()
        });
        // PMBASE, an I/O address, and ACPI_CNTL.
        config.add_registers(0x40, &[1, 0, 0, 0, 0], &[0x80, 0xff, 0, 0, 0xff]);
        // PIRQ routes A to D, E to H: not routed.
        config.add_registers(0x60, &[0x80; 4], &[0x8f; 4]);
        config.add_registers(0x68, &[0x80; 4], &[0x8f; 4]);
        // RCBA.
        config.add_registers(0xf0, &[0; 4], &0xffff_c001_u32.to_le_bytes());
        Self {
            config,
            has_window: false,
        }
    }
}

/// The base of the window to the configuration space, if the host bridge with this configuration has one.
pub(super) fn window(config: &ConfigSpace) -> Option<u64> {
    let register =
        u64::from(config.read_u32(PCIEXBAR.saturating_add(4))) << 32 | u64::from(config.read_u32(PCIEXBAR));
    (register & PCIEXBAR_ENABLE != 0).then_some(register & PCIEXBAR_BASE)
}

impl PciFunction for Bridge {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) -> Effect {
        let before = window(&self.config);
        self.config.write(offset, data);
        if self.has_window && window(&self.config) != before {
            Effect::Remap
        } else {
            Effect::None
        }
    }

    fn read_bar(&mut self, _bar: usize, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write_bar(&mut self, _bar: usize, _offset: u64, _data: &[u8]) -> Effect {
        Effect::None
    }

    fn bar_moved(&mut self, _bar: usize, _address: Option<u64>) {}

    fn reset(&mut self) {
        self.config.reset();
    }
}

//! Which firmware boots a disk, by its partition table, its boot sector or, of a CD-ROM, its boot catalog. A few sectors are read, and no
//! program on the disk is looked at. Only a disk without a table is searched for a file system.

use std::rc::Rc;

use super::{
    medium::{Bounded, Medium, Window},
    partitions::{BootSector, boot_sector, check_gpt_block, has_esp, layout},
    volume,
};

/// How much of a disk may be read, in bytes.
const LOOKING: u64 = 64 << 20;
/// The loader of a medium without boot entries (UEFI 2.10, 3.5.1.1).
const DEFAULT_LOADER: &str = "/EFI/BOOT/BOOTX64.EFI";
/// Block of a CD-ROM in bytes.
const CD_BLOCK: u64 = 2048;
/// Block of the boot record (El Torito 1.0, figure 7).
const BOOT_RECORD: u64 = 17;
/// Begin of the boot record: type, identifier, version, system.
const EL_TORITO: &[u8] = b"\0CD001\x01EL TORITO SPECIFICATION";
/// Length of an entry of the boot catalog in bytes.
const CATALOG_ENTRY: usize = 32;
/// Platform of an entry for UEFI.
const EFI: u8 = 0xef;

/// Firmware that boots a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Firmware {
    /// UEFI.
    Uefi,
    /// A BIOS.
    Bios,
}

/// The firmware that boots a disk with logical blocks of this length. UEFI has precedence.
///
/// # Errors
///
/// No firmware does; the text is the reason.
pub fn of_disk(disk: Rc<dyn Medium>, block: u64) -> Result<Firmware, String> {
    let disk: Rc<dyn Medium> = Rc::new(Bounded::new(disk, LOOKING));
    let window = Window::whole(disk);
    check_gpt_block(&window, block)?;
    if has_esp(&window, block) {
        return Ok(Firmware::Uefi);
    }
    let has_loader = || {
        let volumes = volume::volumes(&window).readable;
        volumes.iter().any(|volume| volume.has(DEFAULT_LOADER))
    };
    if layout(&window).is_none() && has_loader() {
        return Ok(Firmware::Uefi);
    }
    match boot_sector(&window) {
        BootSector::Code if block == 512 => Ok(Firmware::Bios),
        BootSector::Code => Err(format!(
            "it has no EFI system partition, and a BIOS reads no disk with logical blocks of {block} bytes"
        )),
        BootSector::WithoutCode => {
            Err("it has no EFI system partition, and no code in its boot sector".to_owned())
        }
        BootSector::None => Err("it has no EFI system partition and no boot sector".to_owned()),
    }
}

/// The firmware that boots a CD-ROM. UEFI has precedence.
///
/// # Errors
///
/// No firmware does; the text is the reason.
pub fn of_cdrom(disk: Rc<dyn Medium>) -> Result<Firmware, String> {
    let window = Window::whole(disk);
    let none = || "it has no boot catalog (El Torito)".to_owned();
    let record: [u8; 512] = window
        .bytes(BOOT_RECORD.saturating_mul(CD_BLOCK))
        .ok_or_else(none)?;
    let block = record.get(0x47..).and_then(|rest| rest.first_chunk());
    let block = block.filter(|_| record.starts_with(EL_TORITO)).ok_or_else(none)?;
    let catalog = u64::from(u32::from_le_bytes(*block)).saturating_mul(CD_BLOCK);
    let catalog: [u8; 2048] = window.bytes(catalog).ok_or_else(none)?;
    let mut entries = catalog.chunks_exact(CATALOG_ENTRY);
    // The validation entry has the platform of the initial entry; 0 is x86.
    let validation = entries
        .next()
        .filter(|entry| entry.first() == Some(&1))
        .ok_or_else(none)?;
    let first = validation.get(1).copied().unwrap_or_default();
    // Section headers, of which 0x91 is the last, name the platform of the entries behind them.
    let mut platforms = entries
        .filter(|entry| matches!(entry.first(), Some(0x90 | 0x91)))
        .filter_map(|entry| entry.get(1).copied());
    match first == EFI || platforms.any(|platform| platform == EFI) {
        true => Ok(Firmware::Uefi),
        false if first == 0 => Ok(Firmware::Bios),
        false => Err("its boot catalog has no entry for this kind of processor".to_owned()),
    }
}

#[cfg(test)]
mod tests;

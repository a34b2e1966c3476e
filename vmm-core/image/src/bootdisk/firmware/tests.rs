//! Tables by sfdisk, and boot catalogs.

use super::{
    super::tests::{Workshop, fat},
    *,
};

const MIB: usize = 1 << 20;

fn bytes(disk: &Rc<dyn Medium>) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(disk.size()).unwrap()];
    disk.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// A disk with partitions of these types.
fn disk(label: &str, kinds: &[&str]) -> Vec<u8> {
    let parts = vec![Vec::new(); kinds.len()];
    bytes(&Workshop::new().disk(label, kinds, &parts))
}

/// The same with code in its boot sector.
fn with_code(mut disk: Vec<u8>) -> Vec<u8> {
    disk[..3].copy_from_slice(&[0xeb, 0x63, 0x90]);
    disk
}

fn of(disk: Vec<u8>) -> Result<Firmware, String> {
    of_disk(Rc::new(disk), 512)
}

fn refused(disk: Vec<u8>) -> String {
    of(disk).unwrap_err()
}

#[test]
fn efi_system_partition_needs_uefi() {
    assert_eq!(of(disk("gpt", &["L", "U"])), Ok(Firmware::Uefi));
    assert_eq!(of(with_code(disk("gpt", &["U", "L"]))), Ok(Firmware::Uefi));
    assert_eq!(of(disk("dos", &["L", "ef"])), Ok(Firmware::Uefi));
}

#[test]
fn copy_of_a_lost_gpt_is_read() {
    let mut disk = disk("gpt", &["U"]);
    disk[512..1024].fill(0);
    assert_eq!(of(disk.clone()), Ok(Firmware::Uefi));
    let end = disk.len();
    disk[end - 512..].fill(0);
    assert_eq!(
        refused(disk),
        "it has no EFI system partition, and no code in its boot sector"
    );
}

#[test]
fn boot_sector_without_efi_system_partition_needs_a_bios() {
    for (label, kind) in [("dos", "L"), ("gpt", "L")] {
        assert_eq!(of(with_code(disk(label, &[kind]))), Ok(Firmware::Bios));
        let said = refused(disk(label, &[kind]));
        assert!(said.contains("no code in its boot sector"), "{said}");
    }
    let said = of_disk(Rc::new(with_code(disk("dos", &["L"]))), 4096).unwrap_err();
    assert!(said.contains("logical blocks of 4096 bytes"), "{said}");
}

#[test]
fn file_system_without_table_needs_uefi_for_its_default_loader() {
    let loader = fat(&[("EFI/BOOT/BOOTX64.EFI", "MZ")]);
    assert_eq!(of(loader), Ok(Firmware::Uefi));
    assert_eq!(of(fat(&[("README", "")])), Ok(Firmware::Bios));
}

#[test]
fn gpt_for_other_blocks_names_the_field_to_change() {
    let mut disk = disk("gpt", &["U"]);
    let header = disk[512..1024].to_vec();
    disk[512..1024].fill(0);
    disk[4096..4608].copy_from_slice(&header);
    let said = refused(disk.clone());
    assert!(
        said.contains("set logicalBlockBytes of the disk to 4096"),
        "{said}"
    );
}

#[test]
fn empty_and_tiny_disks_are_refused() {
    for disk in [vec![0; MIB], vec![0; 512], Vec::new()] {
        assert_eq!(refused(disk), "it has no EFI system partition and no boot sector");
    }
}

/// A CD-ROM whose boot catalog has these entries.
fn cdrom(entries: &[[u8; 2]]) -> Vec<u8> {
    let mut disk = vec![0; 24 * 2048];
    let record = 17 * 2048;
    disk[record..record + EL_TORITO.len()].copy_from_slice(EL_TORITO);
    disk[record + 0x47] = 20;
    for (index, entry) in entries.iter().enumerate() {
        let at = 20 * 2048 + index * CATALOG_ENTRY;
        disk[at..at + 2].copy_from_slice(entry);
    }
    disk
}

#[test]
fn boot_catalog_of_a_cdrom_names_its_platforms() {
    let of = |entries: &[[u8; 2]]| of_cdrom(Rc::new(cdrom(entries)));
    assert_eq!(of(&[[1, 0], [0x88, 0]]), Ok(Firmware::Bios));
    assert_eq!(
        of(&[[1, 0], [0x88, 0], [0x91, 0xef], [0x88, 0]]),
        Ok(Firmware::Uefi)
    );
    assert_eq!(of(&[[1, 0xef], [0x88, 0]]), Ok(Firmware::Uefi));
    assert!(of(&[[1, 1], [0x88, 0]]).unwrap_err().contains("processor"));
    for disk in [cdrom(&[]), vec![0; 24 * 2048], Vec::new()] {
        assert_eq!(
            of_cdrom(Rc::new(disk)).unwrap_err(),
            "it has no boot catalog (El Torito)"
        );
    }
    let mut elsewhere = cdrom(&[[1, 0]]);
    elsewhere[17 * 2048 + 0x48] = 0xff;
    assert!(of_cdrom(Rc::new(elsewhere)).is_err());
}

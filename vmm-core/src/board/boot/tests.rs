use std::io::Write;

use linux_loader::{bootparam::boot_params, start_info::hvm_start_info};
use proptest::prelude::*;
use rstest::rstest;
use vm_memory::Address;

use super::*;
use crate::memory::{Backing, GuestRam, layout::MIB};

const PARAMS: BootParams = BootParams {
    ram: 128 * MIB,
    rsdp: layout::ACPI.start,
    screen: None,
};
const LOAD_ADDRESS: u64 = 16 * MIB;
const SETUP: usize = 2 * 512;

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

/// A bzImage of one setup sector and 4 KiB of payload that begins with "payload".
fn bzimage() -> Vec<u8> {
    let mut image = vec![0; SETUP + 4096];
    image[0x1f1] = 1;
    put(&mut image, 0x1f4, &256_u32.to_le_bytes());
    put(&mut image, 0x1fe, &0xaa55_u16.to_le_bytes());
    put(&mut image, 0x200, &[0xeb, 0x6a]);
    put(&mut image, 0x202, b"HdrS");
    put(&mut image, 0x206, &0x020f_u16.to_le_bytes());
    image[0x211] = 0x81;
    put(&mut image, 0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(&mut image, 0x230, &0x20_0000_u32.to_le_bytes());
    image[0x234] = 1;
    put(&mut image, 0x236, &1_u16.to_le_bytes());
    put(&mut image, 0x238, &2047_u32.to_le_bytes());
    put(&mut image, 0x258, &LOAD_ADDRESS.to_le_bytes());
    put(&mut image, 0x260, &(32_u32 << 20).to_le_bytes());
    put(&mut image, SETUP, b"payload");
    image
}

/// An ELF with one segment of 64 bytes in the file and 4 KiB in memory at 16 MiB, and a PVH note.
fn elf() -> Vec<u8> {
    let mut image = vec![0; 0x200];
    put(&mut image, 0, b"\x7fELF\x02\x01\x01");
    put(&mut image, 16, &[2, 0, 62, 0, 1, 0, 0, 0]);
    put(&mut image, 32, &64_u64.to_le_bytes());
    put(&mut image, 52, &[64, 0, 56, 0, 2, 0]);
    let mut program = |index: usize, kind: u32, words: [u64; 6]| {
        let at = 64 + index * 56;
        put(&mut image, at, &kind.to_le_bytes());
        for (word, value) in words.iter().enumerate() {
            put(&mut image, at + 8 + word * 8, &value.to_le_bytes());
        }
    };
    // Offset, virtual address, physical address, size in file, size in memory, alignment.
    program(0, 1, [0x180, 0, LOAD_ADDRESS, 64, 4096, 0]);
    program(1, 4, [0x100, 0, 0, 40, 40, 4]);
    // Another note first: name of 3 bytes with padding, descriptor of 4.
    put(&mut image, 0x100, &[3, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0]);
    put(&mut image, 0x10c, b"ab\0\0wxyz");
    put(&mut image, 0x114, &[4, 0, 0, 0, 4, 0, 0, 0, 18, 0, 0, 0]);
    put(&mut image, 0x120, b"Xen\0");
    put(
        &mut image,
        0x124,
        &u32::try_from(LOAD_ADDRESS + 8).unwrap().to_le_bytes(),
    );
    put(&mut image, 0x180, b"segment");
    image
}

struct Loaded {
    ram: GuestRam,
    entry: Result<Entry, BootError>,
}

impl Loaded {
    fn text(&self, address: u64, length: usize) -> String {
        let mut bytes = vec![0; length];
        self.ram
            .memory()
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        String::from_utf8(bytes).unwrap()
    }
}

fn boot_with(kernel: &[u8], initrd: Option<&[u8]>, cmdline: &str, params: BootParams) -> Loaded {
    let ram = GuestRam::new(params.ram, Backing::Private).unwrap();
    let source = BootSource {
        kernel: file(kernel),
        initrd: initrd.map(file),
        cmdline: cmdline.to_owned(),
    };
    let entry = source.load(ram.memory(), &params);
    Loaded { ram, entry }
}

fn boot(kernel: &[u8]) -> Result<Entry, BootError> {
    boot_with(kernel, None, "", PARAMS).entry
}

#[test]
fn the_magic_of_a_kernel_is_its_format() {
    let format = |bytes: &[u8]| Image::new("kernel", &file(bytes))?.format();
    assert_eq!(format(&bzimage()).unwrap(), Format::Linux);
    assert_eq!(format(&elf()).unwrap(), Format::Pvh);
    assert!(matches!(format(&[0; 4096]), Err(BootError::UnknownFormat)));
    assert!(matches!(format(&[0; 3]), Err(BootError::Truncated("kernel"))));
}

#[test]
fn a_bzimage_is_told_of_the_screen_that_needs_no_driver() {
    let screen = BootFramebuffer {
        address: 0x12_3456_0000,
        width: 1280,
        height: 800,
    };
    let params = BootParams {
        screen: Some(screen),
        ..PARAMS
    };
    let loaded = boot_with(&bzimage(), None, "", params);
    let Ok(Entry::Linux64 { zero_page, .. }) = loaded.entry else {
        panic!("{:?}", loaded.entry);
    };
    let page: boot_params = loaded.ram.memory().read_obj(GuestAddress(zero_page)).unwrap();
    let info = page.screen_info;
    assert_eq!({ info.orig_video_isVGA }, 0x70);
    assert_eq!(
        ({ info.lfb_base }, { info.ext_lfb_base }, { info.capabilities }),
        (0x3456_0000, 0x12, 0b11)
    );
    assert_eq!(
        ({ info.lfb_width }, { info.lfb_height }, { info.lfb_depth }),
        (1280, 800, 32)
    );
    assert_eq!(({ info.lfb_linelength }, { info.lfb_size }), (5120, 4_096_000));
}

#[test]
fn a_bzimage_is_entered_in_long_mode_with_its_zero_page() {
    let initrd = vec![b'i'; 5000];
    let loaded = boot_with(&bzimage(), Some(&initrd), "console=ttyS0", PARAMS);
    let Ok(Entry::Linux64 { rip, zero_page }) = loaded.entry else {
        panic!("{:?}", loaded.entry);
    };
    assert_eq!(rip, LOAD_ADDRESS + 0x200);
    assert_eq!(loaded.text(LOAD_ADDRESS, 7), "payload");
    let page: boot_params = loaded.ram.memory().read_obj(GuestAddress(zero_page)).unwrap();
    let header = page.hdr;
    assert_eq!({ page.acpi_rsdp_addr }, layout::ACPI.start);
    assert_eq!({ header.type_of_loader }, 0xff);
    assert_eq!(loaded.text(u64::from(header.cmd_line_ptr), 14), "console=ttyS0\0");
    // The highest page that ends below the end of RAM.
    assert_eq!(u64::from(header.ramdisk_image), 128 * MIB - 8192);
    assert_eq!({ header.ramdisk_size }, 5000);
    assert_eq!(
        loaded.text(u64::from(header.ramdisk_image), 5000).into_bytes(),
        initrd
    );
    let map: Vec<_> = page.e820_table[..usize::from(page.e820_entries)]
        .iter()
        .map(|entry| (entry.addr, entry.addr + entry.size, entry.r#type))
        .collect();
    let expected: Vec<_> = layout::memory_map(PARAMS.ram)
        .iter()
        .map(|(range, kind)| (range.start, range.end, *kind as u32))
        .collect();
    assert_eq!(map, expected);
}

#[test]
fn page_tables_map_the_first_four_gibibytes_one_to_one() {
    let loaded = boot_with(&bzimage(), None, "", PARAMS);
    let mut special = kvm_bindings::kvm_sregs::default();
    let general = loaded.entry.unwrap().registers(&mut special);
    assert_eq!(general.rsi, place::ZERO_PAGE);
    let memory = loaded.ram.memory();
    let table = |base: u64, index: u64| -> u64 {
        let entry: u64 = memory.read_obj(GuestAddress(base + index * 8)).unwrap();
        assert_eq!(entry & 1, 1, "present");
        entry
    };
    for address in [0, LOAD_ADDRESS, 0x7fff_f000, 0xffff_f000_u64] {
        let pdpt = table(special.cr3, address >> 39) & !0xfff;
        let directory = table(pdpt, address >> 30) & !0xfff;
        let page = table(directory, address >> 21 & 0x1ff);
        assert_eq!(page & 1 << 7, 1 << 7, "large");
        assert_eq!(page & !0x1f_ffff, address & !0x1f_ffff);
    }
    assert_eq!((special.cs.l, special.cs.db, special.cs.limit), (1, 0, u32::MAX));
    assert_eq!(
        (special.ds.selector, special.ds.db, special.ds.base),
        (0x18, 1, 0)
    );
    assert_eq!((special.tr.type_, special.tr.limit, special.tr.s), (0xb, 0x67, 0));
}

#[test]
fn an_elf_is_entered_by_its_pvh_note_with_start_info() {
    let loaded = boot_with(&elf(), Some(b"initrd"), "quiet", PARAMS);
    let Ok(Entry::Pvh { eip, start_info }) = loaded.entry else {
        panic!("{:?}", loaded.entry);
    };
    assert_eq!(u64::from(eip), LOAD_ADDRESS + 8);
    assert_eq!(loaded.text(LOAD_ADDRESS, 7), "segment");
    let memory = loaded.ram.memory();
    let info: hvm_start_info = memory.read_obj(GuestAddress(start_info)).unwrap();
    assert_eq!((info.magic, info.version, info.nr_modules), (0x336e_c578, 1, 1));
    assert_eq!(info.rsdp_paddr, layout::ACPI.start);
    assert_eq!(loaded.text(info.cmdline_paddr, 6), "quiet\0");
    assert_eq!(info.memmap_entries as usize, layout::memory_map(PARAMS.ram).len());
    let module: [u64; 2] = [0, 8].map(|at| {
        memory
            .read_obj(GuestAddress(info.modlist_paddr).unchecked_add(at))
            .unwrap()
    });
    assert_eq!(module, [128 * MIB - 4096, 6]);
    assert_eq!(loaded.text(module[0], 6), "initrd");
    let mut special = kvm_bindings::kvm_sregs::default();
    let general = loaded.entry.unwrap().registers(&mut special);
    assert_eq!((general.rbx, special.cr0, special.cs.db), (start_info, 0x11, 1));
}

#[test]
fn the_initrd_stays_below_the_address_that_the_kernel_names() {
    let mut kernel = bzimage();
    put(&mut kernel, 0x22c, &(64_u32 << 20).to_le_bytes());
    let loaded = boot_with(&kernel, Some(&[1; 100]), "", PARAMS);
    let page: boot_params = loaded
        .ram
        .memory()
        .read_obj(GuestAddress(place::ZERO_PAGE))
        .unwrap();
    let header = page.hdr;
    assert_eq!(u64::from(header.ramdisk_image), 64 * MIB - 4096);
}

#[test]
fn an_empty_initrd_is_none() {
    let loaded = boot_with(&bzimage(), Some(&[]), "", PARAMS);
    assert!(loaded.entry.is_ok());
    let page: boot_params = loaded
        .ram
        .memory()
        .read_obj(GuestAddress(place::ZERO_PAGE))
        .unwrap();
    let header = page.hdr;
    assert_eq!({ header.ramdisk_size }, 0);
}

#[rstest]
#[case::empty(&[], "truncated")]
#[case::short(b"\x7fEL", "truncated")]
#[case::text(&[b'x'; 1000], "neither")]
#[case::elf_header_only(&elf()[..40], "truncated")]
#[case::elf_without_segments(&elf()[..100], "truncated")]
#[case::elf_cut_in_a_segment(&elf()[..0x190], "truncated")]
#[case::bzimage_cut_in_its_header(&bzimage()[..0x230], "truncated")]
#[case::bzimage_cut_in_its_setup(&bzimage()[..600], "truncated")]
#[case::bzimage_cut_in_its_payload(&bzimage()[..SETUP + 1000], "truncated")]
fn a_file_that_is_no_whole_kernel_is_refused(#[case] kernel: &[u8], #[case] message: &str) {
    let error = boot(kernel).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

/// Overwrites part of a good image.
fn broken(mut image: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    put(&mut image, at, bytes);
    image
}

#[rstest]
#[case::boot_flag(broken(bzimage(), 0x1fe, &[0, 0]), "boot flag")]
#[case::old_protocol(broken(bzimage(), 0x206, &[0x0b, 2]), "no 64-bit entry")]
#[case::only_32_bit(broken(bzimage(), 0x236, &[0, 0]), "no 64-bit entry")]
#[case::low(broken(bzimage(), 0x258, &0x9000_u64.to_le_bytes()), "not aligned")]
#[case::below_1_mib(broken(bzimage(), 0x258, &[0; 8]), "below 1 MiB")]
#[case::above_ram(broken(bzimage(), 0x258, &0x4000_0000_u64.to_le_bytes()), "does not fit")]
#[case::wraps(broken(bzimage(), 0x258, &(!0x1f_ffff_u64).to_le_bytes()), "overflows")]
#[case::needs_more(broken(bzimage(), 0x260, &u32::MAX.to_le_bytes()), "does not fit")]
#[case::payload_outside(broken(bzimage(), 0x24c, &u32::MAX.to_le_bytes()), "truncated")]
#[case::elf_32_bit(broken(elf(), 4, &[1]), "not for x86-64")]
#[case::elf_other_machine(broken(elf(), 18, &[183, 0]), "not for x86-64")]
#[case::elf_header_size(broken(elf(), 54, &[57, 0]), "malformed")]
#[case::elf_header_count(broken(elf(), 56, &[0xff, 0xff]), "malformed")]
#[case::elf_headers_outside(broken(elf(), 32, &u64::MAX.to_le_bytes()), "truncated")]
#[case::segment_offset_wraps(broken(elf(), 64 + 8, &u64::MAX.to_le_bytes()), "truncated")]
#[case::segment_at_zero(broken(elf(), 64 + 24, &[0; 8]), "below 1 MiB")]
#[case::segment_wraps(broken(elf(), 64 + 24, &u64::MAX.to_le_bytes()), "overflows")]
#[case::segment_too_large(broken(elf(), 64 + 40, &(1_u64 << 40).to_le_bytes()), "does not fit")]
#[case::segment_smaller_in_memory(broken(elf(), 64 + 40, &1_u64.to_le_bytes()), "larger in the file")]
#[case::no_pvh_note(broken(elf(), 0x11c, &[17]), "no PVH entry note")]
#[case::entry_elsewhere(broken(elf(), 0x124, &[0; 4]), "outside its segments")]
#[case::notes_too_large(broken(elf(), 120 + 32, &(1_u64 << 30).to_le_bytes()), "notes are too large")]
fn a_corrupt_kernel_is_refused_with_the_reason(#[case] kernel: Vec<u8>, #[case] message: &str) {
    let error = boot(&kernel).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn an_initrd_without_room_is_refused() {
    // The kernel needs 16 to 48 MiB of 128.
    let initrd = file(&[]);
    initrd.set_len(81 * MIB).unwrap();
    let source = BootSource {
        kernel: file(&bzimage()),
        initrd: Some(initrd),
        cmdline: String::new(),
    };
    let ram = GuestRam::new(PARAMS.ram, Backing::Private).unwrap();
    let error = source.load(ram.memory(), &PARAMS).unwrap_err();
    assert!(
        matches!(error, BootError::TooLarge { what: "initrd", .. }),
        "{error}"
    );
}

#[test]
fn a_command_line_that_the_kernel_would_cut_is_refused() {
    for cmdline in ["x".repeat(CMDLINE_MAX + 1), "a\0b".to_owned()] {
        let error = boot_with(&bzimage(), None, &cmdline, PARAMS).entry.unwrap_err();
        assert!(matches!(error, BootError::Cmdline { .. }), "{error}");
    }
    let short = broken(bzimage(), 0x238, &10_u32.to_le_bytes());
    let error = boot_with(&short, None, "longer than ten", PARAMS)
        .entry
        .unwrap_err();
    assert!(matches!(error, BootError::Cmdline { max: 10 }), "{error}");
    assert!(
        boot_with(&bzimage(), None, &"x".repeat(CMDLINE_MAX), PARAMS)
            .entry
            .is_ok()
    );
}

#[test]
fn a_directory_is_no_kernel() {
    let source = BootSource {
        kernel: File::open("/").unwrap(),
        initrd: None,
        cmdline: String::new(),
    };
    let ram = GuestRam::new(PARAMS.ram, Backing::Private).unwrap();
    assert!(matches!(
        source.load(ram.memory(), &PARAMS),
        Err(BootError::NotAFile("kernel"))
    ));
}

#[test]
fn a_second_load_reads_the_files_again() {
    let loaded = boot_with(&bzimage(), None, "", PARAMS);
    let source = BootSource {
        kernel: file(&bzimage()),
        initrd: None,
        cmdline: String::new(),
    };
    for _ in 0..2 {
        loaded.ram.clear().unwrap();
        assert_eq!(loaded.text(LOAD_ADDRESS, 7), "\0\0\0\0\0\0\0");
        source.load(loaded.ram.memory(), &PARAMS).unwrap();
        assert_eq!(loaded.text(LOAD_ADDRESS, 7), "payload");
    }
}

proptest! {
    /// For any content of a kernel file, the loader ends with a result.
    #[test]
    fn no_kernel_file_breaks_the_loader(
        is_elf in any::<bool>(),
        changes in prop::collection::vec((0..0x290_usize, any::<[u8; 8]>()), 0..6),
        cut in 0..0x1400_usize,
    ) {
        let mut image = if is_elf { elf() } else { bzimage() };
        for (at, bytes) in changes {
            let end = (at + 8).min(image.len());
            let at = at.min(end);
            image[at..end].copy_from_slice(&bytes[..end - at]);
        }
        image.truncate(cut.max(16));
        let _ = boot(&image);
    }

    #[test]
    fn no_note_breaks_the_parser(notes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = pvh::entry_of(&notes);
    }
}

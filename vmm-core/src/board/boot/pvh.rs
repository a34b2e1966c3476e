//! ELF kernels by the PVH boot protocol (Xen's `docs/misc/pvh.pandoc`, `xen/include/public/arch-x86/hvm/start_info.h`).

use std::ops::Range;

use linux_loader::{
    elf::{Elf64_Ehdr, Elf64_Phdr, PT_LOAD, PT_NOTE},
    start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info},
};
use vm_memory::{ByteValued, Bytes, GuestAddress};

use super::{BootError, Entry, Job, entry, place};
use crate::memory::layout;

/// `XEN_HVM_START_MAGIC_VALUE`.
const START_MAGIC: u32 = 0x336e_c578;
/// The version with a memory map.
const START_VERSION: u32 = 1;
/// `XEN_ELFNOTE_PHYS32_ENTRY`: the 32-bit entry point.
const NOTE_PHYS32_ENTRY: u32 = 18;
const NOTE_NAME: &[u8] = b"Xen\0";
/// More than any kernel has; limits the cost of a hostile file.
const PROGRAM_HEADERS_MAX: u16 = 64;
const NOTES_MAX: u64 = 64 << 10;
/// `EM_X86_64`, `ELFCLASS64`, `ELFDATA2LSB`.
const MACHINE: u16 = 62;
const CLASS_AND_DATA: [u8; 2] = [2, 1];

pub(super) fn load(job: &Job<'_>) -> Result<Entry, BootError> {
    let headers = program_headers(job)?;
    let mut rip = None;
    let mut segments: Vec<(Range<u64>, Elf64_Phdr)> = Vec::new();
    for header in headers {
        let end = header.p_offset.checked_add(header.p_filesz);
        match header.p_type {
            PT_LOAD if header.p_memsz > 0 => {
                if end.is_none_or(|end| end > job.kernel.length) {
                    return Err(BootError::Truncated("kernel"));
                }
                let end = header.p_paddr.checked_add(header.p_memsz);
                let range = header.p_paddr..end.ok_or(BootError::Kernel("a segment's address overflows"))?;
                if header.p_filesz > header.p_memsz {
                    return Err(BootError::Kernel(
                        "a segment is larger in the file than in memory",
                    ));
                }
                job.check_extended(&range)?;
                segments.push((range, header));
            }
            PT_NOTE if rip.is_none() => rip = find_entry(job, &header)?,
            _ => {}
        }
    }
    let rip = rip.ok_or(BootError::Kernel("it has no PVH entry note (CONFIG_PVH)"))?;
    if !segments.iter().any(|(range, _)| range.contains(&rip.into())) {
        return Err(BootError::Kernel("its entry point is outside its segments"));
    }

    let mut kernel_end = 0;
    for (range, header) in &segments {
        job.kernel
            .load(job.memory, range.start, header.p_offset, header.p_filesz)?;
        kernel_end = range.end.max(kernel_end);
    }
    let initrd = job.load_initrd(kernel_end, u64::MAX)?;
    job.write_cmdline()?;
    write_start_info(job, initrd)?;
    entry::write_protected_mode(job.memory)?;
    Ok(Entry::Pvh {
        eip: rip,
        start_info: place::START_INFO,
    })
}

fn program_headers(job: &Job<'_>) -> Result<Vec<Elf64_Phdr>, BootError> {
    let mut header = Elf64_Ehdr::default();
    job.kernel.read(header.as_mut_slice(), 0)?;
    if header.e_ident.get(4..6) != Some(&CLASS_AND_DATA[..]) || header.e_machine != MACHINE {
        return Err(BootError::Kernel("its ELF is not for x86-64"));
    }
    if usize::from(header.e_phentsize) != size_of::<Elf64_Phdr>() || header.e_phnum > PROGRAM_HEADERS_MAX {
        return Err(BootError::Kernel("its ELF program headers are malformed"));
    }
    (0..u64::from(header.e_phnum))
        .map(|index| {
            let offset = index
                .saturating_mul(size_of::<Elf64_Phdr>() as u64)
                .saturating_add(header.e_phoff);
            let mut program = Elf64_Phdr::default();
            job.kernel.read(program.as_mut_slice(), offset)?;
            Ok(program)
        })
        .collect()
}

/// Looks for the entry point among the notes of one segment.
fn find_entry(job: &Job<'_>, header: &Elf64_Phdr) -> Result<Option<u32>, BootError> {
    if header.p_filesz > NOTES_MAX {
        return Err(BootError::Kernel("its ELF notes are too large"));
    }
    let mut notes = vec![0; usize::try_from(header.p_filesz).unwrap_or(0)];
    job.kernel.read(&mut notes, header.p_offset)?;
    Ok(entry_of(&notes))
}

/// Walks notes: name size, descriptor size, type (4 bytes each), name and descriptor (padded to 4 bytes each).
pub(super) fn entry_of(mut notes: &[u8]) -> Option<u32> {
    fn word(notes: &mut &[u8]) -> Option<u32> {
        let (word, rest) = notes.split_first_chunk()?;
        *notes = rest;
        Some(u32::from_le_bytes(*word))
    }
    fn padded<'a>(notes: &mut &'a [u8], length: u32) -> Option<&'a [u8]> {
        let length = usize::try_from(length).ok()?;
        let bytes = notes.get(..length)?;
        // Padding may be missing behind the last one.
        *notes = notes
            .get(length.checked_next_multiple_of(4)?..)
            .unwrap_or_default();
        Some(bytes)
    }
    while !notes.is_empty() {
        let (name_size, size, kind) = (word(&mut notes)?, word(&mut notes)?, word(&mut notes)?);
        let name = padded(&mut notes, name_size)?;
        let descriptor = padded(&mut notes, size)?;
        if kind == NOTE_PHYS32_ENTRY && name == NOTE_NAME {
            return descriptor.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        }
    }
    None
}

fn write_start_info(job: &Job<'_>, initrd: Option<Range<u64>>) -> Result<(), BootError> {
    let map: Vec<_> = layout::memory_map(job.params.ram)
        .into_iter()
        .map(|(range, kind)| hvm_memmap_table_entry {
            addr: range.start,
            size: range.end.saturating_sub(range.start),
            type_: kind as u32,
            reserved: 0,
        })
        .collect();
    let mut address = place::PVH_MEMORY_MAP;
    for entry in &map {
        job.memory.write_obj(*entry, GuestAddress(address))?;
        address = address.saturating_add(size_of::<hvm_memmap_table_entry>() as u64);
    }
    let mut info = hvm_start_info {
        magic: START_MAGIC,
        version: START_VERSION,
        cmdline_paddr: place::CMDLINE.start,
        rsdp_paddr: job.params.rsdp,
        memmap_paddr: place::PVH_MEMORY_MAP,
        memmap_entries: u32::try_from(map.len()).unwrap_or(0),
        ..Default::default()
    };
    if let Some(initrd) = initrd {
        let module = hvm_modlist_entry {
            paddr: initrd.start,
            size: initrd.end.saturating_sub(initrd.start),
            ..Default::default()
        };
        job.memory.write_obj(module, GuestAddress(place::PVH_MODULES))?;
        info.nr_modules = 1;
        info.modlist_paddr = place::PVH_MODULES;
    }
    Ok(job.memory.write_obj(info, GuestAddress(place::START_INFO))?)
}

//! bzImage by the 64-bit boot protocol (the kernel's `Documentation/arch/x86/boot.rst`).

use linux_loader::bootparam::{
    CAN_USE_HEAP, LOADED_HIGH, XLF_KERNEL_64, boot_e820_entry, boot_params, screen_info, setup_header,
};
use vm_memory::{ByteValued, Bytes, GuestAddress};

use super::{BootError, BootFramebuffer, Entry, Job, entry, place};
use crate::memory::layout;

/// Offset of "HdrS" in the file.
pub(super) const MAGIC_OFFSET: u64 = 0x202;
/// Offset of `setup_header` in the file and in the zero page.
const HEADER_OFFSET: u64 = 0x1f1;
/// `setup_header.boot_flag`.
const BOOT_FLAG: u16 = 0xaa55;
/// The protocol that has `xloadflags`; Linux 3.8.
const OLDEST_VERSION: u16 = 0x020c;
/// "Undefined" boot loader.
const LOADER_TYPE: u8 = 0xff;
const SECTOR: u64 = 512;
/// Size of a pixel of the boot screen.
const BYTES_PER_PIXEL: u16 = 4;
/// `screen_info.orig_video_isVGA`: a linear framebuffer as EFI leaves it (include/uapi/linux/screen_info.h). Kernels take it
/// without EFI too.
const VIDEO_TYPE_EFI: u8 = 0x70;
/// `screen_info.capabilities`: the kernel uses the given address and skips machine quirks.
const VIDEO_CAPABILITY_SKIP_QUIRKS: u32 = 1 << 0;
/// `screen_info.capabilities`: `ext_lfb_base` has the upper half of the address.
const VIDEO_CAPABILITY_64BIT_BASE: u32 = 1 << 1;
/// From the load address to the 64-bit entry point.
const ENTRY_64_OFFSET: u64 = 0x200;

pub(super) fn load(job: &Job<'_>) -> Result<Entry, BootError> {
    let mut header = read_header(job)?;
    let setup = u64::from(if header.setup_sects == 0 {
        4
    } else {
        header.setup_sects
    });
    let payload = setup.saturating_add(1).saturating_mul(SECTOR);
    let length = job
        .kernel
        .length
        .checked_sub(payload)
        .ok_or(BootError::Truncated("kernel"))?;
    check_length(&header, length)?;

    // Memory that the kernel uses before it reads the memory map: room to decompress itself in
    // place.
    let needed = length.max(header.init_size.into());
    let start = header.pref_address;
    let alignment = u64::from(header.kernel_alignment);
    if header.relocatable_kernel != 0 && (!alignment.is_power_of_two() || start & (alignment - 1) != 0) {
        return Err(BootError::Kernel("its preferred address is not aligned"));
    }
    let range = start
        ..start
            .checked_add(needed)
            .ok_or(BootError::Kernel("its size overflows"))?;
    job.check_extended(&range)?;
    let cmdline_max = usize::try_from(header.cmdline_size).unwrap_or(usize::MAX);
    if job.cmdline.len() > cmdline_max {
        return Err(BootError::Cmdline { max: cmdline_max });
    }

    job.kernel.load(job.memory, start, payload, length)?;
    let initrd = job.load_initrd(range.end, u64::from(header.initrd_addr_max).saturating_add(1))?;
    job.write_cmdline()?;

    let low = |address: u64| u32::try_from(address).map_err(|_| BootError::Kernel("an address above 4 GiB"));
    header.type_of_loader = LOADER_TYPE;
    header.loadflags &= !CAN_USE_HEAP;
    header.code32_start = low(start)?;
    header.cmd_line_ptr = low(place::CMDLINE.start)?;
    if let Some(initrd) = initrd {
        header.ramdisk_image = low(initrd.start)?;
        header.ramdisk_size = low(initrd.end.saturating_sub(initrd.start))?;
    }
    write_zero_page(job, header)?;
    entry::write_long_mode(job.memory)?;
    Ok(Entry::Linux64 {
        rip: start.saturating_add(ENTRY_64_OFFSET),
        zero_page: place::ZERO_PAGE,
    })
}

/// Reads the part of the header that the file has: up to 0x202 plus the byte at 0x201 (the jump over the header).
fn read_header(job: &Job<'_>) -> Result<setup_header, BootError> {
    let mut header = setup_header::default();
    let mut length = [0];
    job.kernel.read(&mut length, MAGIC_OFFSET - 1)?;
    let end = MAGIC_OFFSET.saturating_add(length[0].into());
    let wanted = usize::try_from(end.saturating_sub(HEADER_OFFSET)).unwrap_or(0);
    let bytes = header.as_mut_slice();
    let wanted = wanted.min(bytes.len());
    if let Some(bytes) = bytes.get_mut(..wanted) {
        job.kernel.read(bytes, HEADER_OFFSET)?;
    }
    if header.boot_flag != BOOT_FLAG {
        return Err(BootError::Kernel("its boot flag is wrong"));
    }
    if header.version < OLDEST_VERSION || header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(BootError::Kernel("it has no 64-bit entry point"));
    }
    if header.loadflags & LOADED_HIGH == 0 {
        return Err(BootError::Kernel("it is a zImage"));
    }
    Ok(header)
}

/// The header knows how long the protected-mode part is, and where the compressed kernel is in it.
fn check_length(header: &setup_header, length: u64) -> Result<(), BootError> {
    const PARAGRAPH: u64 = 16;
    let claimed = u64::from(header.syssize).saturating_mul(PARAGRAPH);
    let compressed = u64::from(header.payload_offset).saturating_add(header.payload_length.into());
    // `syssize` is rounded up.
    if claimed.saturating_sub(PARAGRAPH) >= length || compressed > length {
        return Err(BootError::Truncated("kernel"));
    }
    Ok(())
}

fn write_zero_page(job: &Job<'_>, header: setup_header) -> Result<(), BootError> {
    let mut page = boot_params {
        hdr: header,
        acpi_rsdp_addr: job.params.rsdp,
        ..Default::default()
    };
    if let Some(screen) = &job.params.screen {
        page.screen_info = screen_info(screen);
    }
    let map = layout::memory_map(job.params.ram);
    page.e820_entries = u8::try_from(map.len()).unwrap_or(u8::MAX);
    let mut table = page.e820_table;
    for (slot, (range, kind)) in table.iter_mut().zip(map) {
        *slot = boot_e820_entry {
            addr: range.start,
            size: range.end.saturating_sub(range.start),
            r#type: kind as u32,
        };
    }
    page.e820_table = table;
    Ok(job.memory.write_obj(page, GuestAddress(place::ZERO_PAGE))?)
}

fn screen_info(screen: &BootFramebuffer) -> screen_info {
    let stride = screen.width.saturating_mul(BYTES_PER_PIXEL);
    let half = |address: u64| u32::try_from(address & u64::from(u32::MAX)).unwrap_or(0);
    screen_info {
        orig_video_isVGA: VIDEO_TYPE_EFI,
        lfb_width: screen.width,
        lfb_height: screen.height,
        lfb_depth: 32,
        lfb_base: half(screen.address),
        ext_lfb_base: half(screen.address >> 32),
        lfb_size: u32::from(stride).saturating_mul(screen.height.into()),
        lfb_linelength: stride,
        // Where each colour is in the 32 bits.
        blue_size: 8,
        blue_pos: 0,
        green_size: 8,
        green_pos: 8,
        red_size: 8,
        red_pos: 16,
        rsvd_size: 8,
        rsvd_pos: 24,
        pages: 1,
        capabilities: VIDEO_CAPABILITY_SKIP_QUIRKS | VIDEO_CAPABILITY_64BIT_BASE,
        ..Default::default()
    }
}

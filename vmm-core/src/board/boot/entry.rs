//! The state in which a kernel is entered: descriptor table, page tables, registers.

use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};
use vmm_base::GuestMemory;

use super::place;

/// Where and how the guest begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The 64-bit boot protocol of Linux: long mode, the first 4 GiB mapped one to one.
    Linux64 {
        /// Entry point.
        rip: u64,
        /// `struct boot_params`.
        zero_page: u64,
    },
    /// PVH: 32-bit protected mode without paging.
    Pvh {
        /// Entry point.
        eip: u32,
        /// `struct hvm_start_info`.
        start_info: u64,
    },
    /// The first instruction after power-on, in firmware at the end of the first 4 GiB.
    ResetVector,
}

/// Control register bits (Intel SDM vol. 3, 2.5; AMD APM vol. 2, 3.1).
const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// The bit that is always set in RFLAGS.
const RFLAGS: u64 = 1 << 1;

/// IP after power-on (Intel SDM vol. 3, table 10-1).
const RESET_VECTOR: u64 = 0xfff0;

/// Selectors that the boot protocol asks for (`__BOOT_CS`, `__BOOT_DS`), and one for the task state.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;

/// Descriptors (Intel SDM vol. 3, 3.4.5): flat, 4 GiB, accessed.
const CODE_64: u64 = 0x00af_9b00_0000_ffff;
const CODE_32: u64 = 0x00cf_9b00_0000_ffff;
const DATA_32: u64 = 0x00cf_9300_0000_ffff;
/// Busy 32-bit TSS at 0 with limit 0x67, as PVH wants it.
const TASK_32: u64 = 0x0000_8b00_0000_0067;

impl Entry {
    /// Returns the general registers. Changes `special`, which holds the special registers' values
    /// after power-on.
    pub fn registers(self, special: &mut kvm_sregs) -> kvm_regs {
        let general = match self {
            // The special registers are those after power-on: CS begins at 0xffff_0000.
            Self::ResetVector => {
                return kvm_regs {
                    rip: RESET_VECTOR,
                    rflags: RFLAGS,
                    ..Default::default()
                };
            }
            Self::Linux64 { rip, zero_page } => {
                special.cs = segment(CODE, CODE_64);
                special.cr3 = place::PAGE_TABLES;
                special.cr4 = CR4_PAE;
                special.cr0 = CR0_PE | CR0_ET | CR0_PG;
                special.efer = EFER_LME | EFER_LMA;
                kvm_regs {
                    rip,
                    rsi: zero_page,
                    ..Default::default()
                }
            }
            Self::Pvh { eip, start_info } => {
                special.cs = segment(CODE, CODE_32);
                special.cr4 = 0;
                special.cr0 = CR0_PE | CR0_ET;
                special.efer = 0;
                kvm_regs {
                    rip: eip.into(),
                    rbx: start_info,
                    ..Default::default()
                }
            }
        };
        let data = segment(DATA, DATA_32);
        special.ds = data;
        special.es = data;
        special.fs = data;
        special.gs = data;
        special.ss = data;
        special.tr = segment(TASK, TASK_32);
        special.gdt = kvm_dtable {
            base: place::GDT,
            limit: 5 * 8 - 1,
            ..Default::default()
        };
        special.idt = kvm_dtable::default();
        kvm_regs {
            rflags: RFLAGS,
            ..general
        }
    }
}

/// A segment register as if `selector` had been loaded with `descriptor`.
fn segment(selector: u16, descriptor: u64) -> kvm_segment {
    let bits = |shift: u32, width: u32| {
        // At most 16 bits are asked for, so this never truncates.
        u16::try_from((descriptor >> shift) & ((1 << width) - 1)).unwrap_or(0)
    };
    let byte = |shift, width| u8::try_from(bits(shift, width)).unwrap_or(0);
    let limit = u32::from(bits(0, 16)) | u32::from(bits(48, 4)) << 16;
    let granular = byte(55, 1);
    kvm_segment {
        base: u64::from(bits(16, 16)) | u64::from(bits(32, 8)) << 16 | u64::from(bits(56, 8)) << 24,
        limit: if granular == 1 { limit << 12 | 0xfff } else { limit },
        selector,
        type_: byte(40, 4),
        s: byte(44, 1),
        dpl: byte(45, 2),
        present: byte(47, 1),
        avl: byte(52, 1),
        l: byte(53, 1),
        db: byte(54, 1),
        g: granular,
        unusable: 0,
        padding: 0,
    }
}

/// Descriptor and page tables for [`Entry::Linux64`].
pub(super) fn write_long_mode(memory: &GuestMemory) -> Result<(), GuestMemoryError> {
    const PRESENT_WRITABLE: u64 = 0b11;
    const LARGE: u64 = 1 << 7;
    const PAGE: u64 = 0x1000;
    const LARGE_PAGE_SHIFT: u32 = 21;
    write_gdt(memory, CODE_64)?;
    let pml4 = place::PAGE_TABLES;
    let pdpt = pml4 + PAGE;
    let directories = pdpt + PAGE;
    memory.write_obj(pdpt | PRESENT_WRITABLE, GuestAddress(pml4))?;
    for index in 0..4_u64 {
        let directory = directories + index * PAGE;
        memory.write_obj(directory | PRESENT_WRITABLE, GuestAddress(pdpt + index * 8))?;
    }
    // The four directories lie one behind the other: 2,048 entries for 4 GiB.
    let entries: Vec<u8> = (0..2048_u64)
        .flat_map(|index| (index << LARGE_PAGE_SHIFT | PRESENT_WRITABLE | LARGE).to_le_bytes())
        .collect();
    memory.write_slice(&entries, GuestAddress(directories))
}

/// The descriptor table for [`Entry::Pvh`].
pub(super) fn write_protected_mode(memory: &GuestMemory) -> Result<(), GuestMemoryError> {
    write_gdt(memory, CODE_32)
}

fn write_gdt(memory: &GuestMemory, code: u64) -> Result<(), GuestMemoryError> {
    let table = [0, 0, code, DATA_32, TASK_32];
    let bytes: Vec<u8> = table.iter().flat_map(|entry: &u64| entry.to_le_bytes()).collect();
    memory.write_slice(&bytes, GuestAddress(place::GDT))
}

//! A kernel of some bytes: an ELF file with a PVH entry note (xen/interface/elfnote.h, `XEN_ELFNOTE_PHYS32_ENTRY`) around
//! `cli; hlt; jmp $-1`.

/// Where the code is loaded and entered.
const ADDRESS: u32 = 0x20_0000;
const CODE: [u8; 4] = [0xfa, 0xf4, 0xeb, 0xfd];
/// Size of the ELF header and two program headers.
const HEADERS: u64 = 64 + 2 * 56;

/// The file.
pub fn kernel() -> Vec<u8> {
    let mut note = Vec::new();
    // Lengths of the name and of the description, and the type.
    for word in [4_u32, 4, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend(ADDRESS.to_le_bytes());

    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    // ET_EXEC, EM_X86_64, EV_CURRENT; the entry; where the program headers are.
    for half in [2_u16, 62, 1, 0] {
        file.extend(half.to_le_bytes());
    }
    file.extend(u64::from(ADDRESS).to_le_bytes());
    file.extend(64_u64.to_le_bytes());
    file.resize(52, 0);
    // Sizes of the header and of a program header, two of these, no sections.
    for half in [64_u16, 56, 2, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    let note_length = note.len() as u64;
    // PT_NOTE and PT_LOAD. QEMU divides by a note's alignment.
    segment(&mut file, 4, HEADERS, note_length, 0, 4);
    segment(
        &mut file,
        1,
        HEADERS + note_length,
        CODE.len() as u64,
        ADDRESS.into(),
        1,
    );
    file.extend(note);
    file.extend(CODE);
    file
}

fn segment(file: &mut Vec<u8>, kind: u32, offset: u64, length: u64, address: u64, alignment: u64) {
    file.extend(kind.to_le_bytes());
    // PF_R | PF_X
    file.extend(5_u32.to_le_bytes());
    for word in [offset, address, address, length, length, alignment] {
        file.extend(word.to_le_bytes());
    }
}

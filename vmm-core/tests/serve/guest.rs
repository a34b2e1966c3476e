//! Tiny kernels: an ELF with a PVH entry note around some 32-bit code without anything but integer instructions.

/// Where the code is loaded and entered.
const ADDRESS: u32 = 0x20_0000;

/// `out dx, al` of each byte to COM1.
pub const PRINT_HI: &[u8] = &[
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, b'h', 0xee, // mov al, 'h'; out dx, al
    0xb0, b'i', 0xee,
];

/// Echoes each received byte in an endless loop.
pub const ECHO: &[u8] = &[
    0x66, 0xba, 0xfd, 0x03, // mov dx, 0x3fd
    0xec, // in al, dx
    0xa8, 0x01, // test al, 1
    0x74, 0xfb, // jz -5
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xec, // in al, dx
    0xee, // out dx, al
    0xeb, 0xef, // jmp -17
];

/// S5 to the sleep control register.
pub const POWER_OFF: &[u8] = &[0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee];

/// pvpanic: panicked.
pub const PANIC: &[u8] = &[0x66, 0xba, 0x05, 0x05, 0xb0, 0x01, 0xee];

/// `hlt` with interrupts off.
pub const HALT: &[u8] = &[0xfa, 0xf4, 0xeb, 0xfd];

/// An empty interrupt table and a division by zero.
pub const TRIPLE_FAULT: &[u8] = &[
    0x6a, 0x00, 0x6a, 0x00, // push 0; push 0
    0x0f, 0x01, 0x1c, 0x24, // lidt [esp]
    0x31, 0xc9, 0xf7, 0xf1, // xor ecx, ecx; div ecx
];

/// Asks for a reset unless the CMOS memory, which outlives it, says that it was done.
pub const RESET_ONCE: &[u8] = &[
    0xb0, 0x40, 0xe6, 0x70, // mov al, 0x40; out 0x70, al
    0xe4, 0x71, // in al, 0x71
    0x3c, 0x5a, // cmp al, 0x5a
    0x74, 0x0e, // je +14
    0xb0, 0x5a, 0xe6, 0x71, // mov al, 0x5a; out 0x71, al
    0x66, 0xba, 0x00, 0x06, // mov dx, 0x600
    0xb0, 0x01, 0xee, // mov al, 1; out dx, al
    0xf4, 0xeb, 0xfd, // hlt; jmp -3
];

/// The kernel file with that code. A stack is set up before it.
pub fn program(code: &[u8]) -> Vec<u8> {
    const HEADERS: usize = 64 + 2 * 56;
    let mut text = vec![0xbc];
    text.extend((ADDRESS + 0x1_0000).to_le_bytes());
    text.extend(code);

    let mut note = Vec::new();
    for word in [4_u32, 4, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend(ADDRESS.to_le_bytes());

    let mut file = Vec::new();
    file.extend(b"\x7fELF\x02\x01\x01");
    file.resize(16, 0);
    // ET_EXEC, EM_X86_64.
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    file.extend(u64::from(ADDRESS).to_le_bytes());
    file.extend(64_u64.to_le_bytes());
    file.extend([0; 12]);
    for half in [64_u16, 56, 2, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    segment(&mut file, 4, HEADERS, note.len(), 0);
    segment(&mut file, 1, HEADERS + note.len(), text.len(), u64::from(ADDRESS));
    file.extend(note);
    file.extend(text);
    file
}

fn segment(file: &mut Vec<u8>, kind: u32, offset: usize, length: usize, address: u64) {
    file.extend(kind.to_le_bytes());
    file.extend(5_u32.to_le_bytes());
    for word in [offset as u64, address, address, length as u64, length as u64, 0] {
        file.extend(word.to_le_bytes());
    }
}

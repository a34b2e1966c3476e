//! Raw access to memory, registers and ports.
#![allow(unsafe_code)]

use std::{
    arch::asm,
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    ptr,
};

/// A shared mapping: registers of a device, or memory that a device reads.
pub struct Mapping {
    base: *mut u8,
    length: usize,
}

impl Mapping {
    /// Maps a whole BAR through its `resourceN` file.
    pub fn of_file(file: &File, length: usize) -> io::Result<Self> {
        Self::map(length, libc::MAP_SHARED, file.as_raw_fd(), 0)
    }

    /// Maps `length` bytes of a file (`/dev/mem`: of physical memory) from `place` on, a whole page.
    pub fn of_place(file: &File, place: u64, length: usize) -> io::Result<Self> {
        let place = libc::off_t::try_from(place).map_err(io::Error::other)?;
        Self::map(length, libc::MAP_SHARED, file.as_raw_fd(), place)
    }

    /// Memory of `length` bytes that stays where it is.
    pub fn memory(length: usize) -> io::Result<Self> {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_POPULATE | libc::MAP_LOCKED;
        Self::map(length, flags, -1, 0)
    }

    fn map(length: usize, flags: i32, fd: i32, place: libc::off_t) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, fd, place) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            base: base.cast(),
            length,
        })
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    fn at(&self, offset: usize, width: usize) -> Option<*mut u8> {
        let end = offset.checked_add(width)?;
        // SAFETY: within the mapping, as checked in the same expression.
        (end <= self.length).then(|| unsafe { self.base.add(offset) })
    }

    /// Reads 1, 2, 4 or 8 bytes, also where they are not aligned; 0 beyond the end.
    pub fn read(&self, offset: usize, width: usize) -> u64 {
        let Some(at) = self.at(offset, width) else {
            return 0;
        };
        let mut value: u64 = 0;
        // One `mov` of the width asked for, which x86 does at any alignment.
        match width {
            // SAFETY: `at` is readable for `width` bytes, being within a live mapping.
            1 => unsafe { asm!("mov {0:l}, byte ptr [{1}]", inout(reg_abcd) value, in(reg) at) },
            // SAFETY: as above.
            2 => unsafe { asm!("mov {0:x}, word ptr [{1}]", inout(reg) value, in(reg) at) },
            // SAFETY: as above.
            4 => unsafe { asm!("mov {0:e}, dword ptr [{1}]", inout(reg) value, in(reg) at) },
            // SAFETY: as above.
            _ => unsafe { asm!("mov {0}, qword ptr [{1}]", inout(reg) value, in(reg) at) },
        }
        value
    }

    /// Writes the low 1, 2, 4 or 8 bytes of `value`; nothing beyond the end.
    pub fn write(&self, offset: usize, width: usize, value: u64) {
        let Some(at) = self.at(offset, width) else { return };
        match width {
            // SAFETY: `at` is writable for `width` bytes, being within a live mapping.
            1 => unsafe { asm!("mov byte ptr [{1}], {0:l}", in(reg_abcd) value, in(reg) at) },
            // SAFETY: as above.
            2 => unsafe { asm!("mov word ptr [{1}], {0:x}", in(reg) value, in(reg) at) },
            // SAFETY: as above.
            4 => unsafe { asm!("mov dword ptr [{1}], {0:e}", in(reg) value, in(reg) at) },
            // SAFETY: as above.
            _ => unsafe { asm!("mov qword ptr [{1}], {0}", in(reg) value, in(reg) at) },
        }
    }

    /// The guest-physical address of the page that holds `offset` (Linux: admin-guide/mm/pagemap.rst).
    pub fn physical(&self, offset: usize) -> io::Result<u64> {
        let address = self.base as u64 + offset as u64;
        let mut entry = [0; 8];
        File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, address / 4096 * 8)?;
        let entry = u64::from_le_bytes(entry);
        let frame = entry & ((1 << 55) - 1);
        if entry >> 63 == 0 || frame == 0 {
            return Err(io::Error::other(
                "page is not in memory, or pagemap is not readable",
            ));
        }
        Ok(frame * 4096 + address % 4096)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing borrows from it any more.
        unsafe { libc::munmap(self.base.cast(), self.length) };
    }
}

/// Lets this process use every I/O port.
pub fn allow_ports() -> io::Result<()> {
    // SAFETY: changes the privileges of this process alone.
    if unsafe { libc::iopl(3) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Waits until all that was printed has left the terminal's port.
pub fn drain_output() -> io::Result<()> {
    // SAFETY: waits for the kernel, and touches no memory.
    if unsafe { libc::tcdrain(libc::STDOUT_FILENO) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Writes to a port; [`allow_ports`] came before.
pub fn port_write(port: u16, width: usize, value: u32) {
    #[allow(clippy::cast_possible_truncation, reason = "the low bytes are what is meant")]
    let (byte, word) = (value as u8, value as u16);
    match width {
        // SAFETY: port I/O reaches no memory of this process.
        1 => unsafe { asm!("out dx, al", in("dx") port, in("al") byte) },
        // SAFETY: as above.
        2 => unsafe { asm!("out dx, ax", in("dx") port, in("ax") word) },
        // SAFETY: as above.
        _ => unsafe { asm!("out dx, eax", in("dx") port, in("eax") value) },
    }
}

/// Reads a port; [`allow_ports`] came before.
pub fn port_read(port: u16, width: usize) -> u32 {
    match width {
        1 => {
            let value: u8;
            // SAFETY: port I/O reaches no memory of this process.
            unsafe { asm!("in al, dx", in("dx") port, out("al") value) };
            u32::from(value)
        }
        2 => {
            let value: u16;
            // SAFETY: as above.
            unsafe { asm!("in ax, dx", in("dx") port, out("ax") value) };
            u32::from(value)
        }
        _ => {
            let value: u32;
            // SAFETY: as above.
            unsafe { asm!("in eax, dx", in("dx") port, out("eax") value) };
            value
        }
    }
}

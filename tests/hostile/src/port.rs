//! Every I/O port in every width, except those whose right use would end or blind the machine under test.

use std::io;

use crate::{random::Random, sys};

/// Ports whose values have a meaning that ends the machine: i8042 command (pulse reset), PCI reset control, the ACPI
/// reset/sleep register. They are walked by `fatal_ports`.
const FATAL: [u16; 5] = [0x64, 0x600, 0x601, 0xcf9, 0xcf8];
/// Interrupt controllers and timers that the guest's own kernel needs to go on printing.
const KERNEL: [std::ops::Range<u16>; 3] = [0x20..0x22, 0x40..0x44, 0xa0..0xa2];

/// Reads and writes every other port.
pub fn walk() -> io::Result<()> {
    sys::allow_ports()?;
    let mut random = Random::new(0x706f_7274);
    for port in 0..=u16::MAX {
        let touches = |end: u16| (port..=port.saturating_add(3)).contains(&end);
        let kernels = KERNEL.iter().flat_map(Clone::clone).any(touches);
        if FATAL.into_iter().any(touches) || kernels || port > 0xfffc {
            continue;
        }
        // Beyond the ports of any device one in 61 is enough: all end in the same branch.
        if port > 0x1000 && port % 61 != 0 {
            continue;
        }
        for width in [1, 2, 4] {
            sys::port_read(port, width);
            #[allow(clippy::cast_possible_truncation, reason = "any bits will do")]
            sys::port_write(port, width, random.nasty() as u32);
        }
    }
    restore_uart();
    Ok(())
}

/// Sets the 16550 at 0x3f8 as the kernel's driver had left it: 8N1, FIFOs on, no loopback, interrupts by the driver.
fn restore_uart() {
    for (register, value) in [
        (3, 0x83),
        (0, 1),
        (1, 0),
        (3, 0x03),
        (2, 0x07),
        (4, 0x0b),
        (1, 0x05),
    ] {
        sys::port_write(0x3f8 + register, 1, value);
    }
}

/// Wrong widths and values on the ports that can end the machine, then the i8042's reset: the machine must come up
/// again by itself.
pub fn fatal() -> io::Result<()> {
    sys::allow_ports()?;
    for port in FATAL {
        for width in [2, 4] {
            sys::port_read(port, width);
            sys::port_write(port, width, 0);
        }
    }
    println!("HOSTILE fatal-ports survived, now the reset");
    sys::port_write(0x64, 1, 0xfe);
    Err(io::Error::other("the machine did not reset"))
}

//! Every I/O port in every width. Each access belongs to one phase, depending on its ports. The
//! phases report their numbers of accesses, so that the sum proves the coverage.

use std::io;

use crate::{random::Random, sys};

/// Number of accesses: 65,536 ports in three widths, except accesses beyond the last port.
pub const ACCESSES: u64 = 3 * 65_536 - 4;

const WIDTHS: [usize; 3] = [1, 2, 4];

/// Which phase an access belongs to. An access that touches several sorts of ports belongs to the last one here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sort {
    /// No port of the others.
    Plain,
    /// The interrupt controllers and their edge and level registers.
    Pic,
    /// The timer and the register of its gate.
    Pit,
    /// A value there can end the machine: i8042 command (pulse reset), ACPI sleep and reset, PCI configuration and reset
    /// control. They get zeroes.
    Fatal,
}

const SORTS: [(u16, u16, Sort); 8] = [
    (0x20, 0x21, Sort::Pic),
    (0xa0, 0xa1, Sort::Pic),
    (0x4d0, 0x4d1, Sort::Pic),
    (0x40, 0x43, Sort::Pit),
    (0x61, 0x61, Sort::Pit),
    (0x64, 0x64, Sort::Fatal),
    (0x600, 0x601, Sort::Fatal),
    (0xcf8, 0xcff, Sort::Fatal),
];

fn sort_of(port: u16, width: usize) -> Option<Sort> {
    let last = port.checked_add(u16::try_from(width - 1).ok()?)?;
    let touched = SORTS
        .iter()
        .filter(|(first, end, _)| port <= *end && *first <= last);
    Some(touched.map(|(_, _, sort)| *sort).max().unwrap_or(Sort::Plain))
}

/// Reads and writes with every access of one sort. Says how many there were.
fn walk(sort: Sort, mut value: impl FnMut() -> u32) -> u64 {
    let mut count = 0;
    for port in 0..=u16::MAX {
        for width in WIDTHS {
            if sort_of(port, width) == Some(sort) {
                sys::port_read(port, width);
                sys::port_write(port, width, value());
                count += 1;
            }
        }
    }
    count
}

fn any_bits(random: &mut Random) -> u32 {
    #[allow(clippy::cast_possible_truncation, reason = "any bits will do")]
    let value = random.nasty() as u32;
    value
}

fn told(phase: &str, count: u64) {
    println!("HOSTILE {phase} {count} of {ACCESSES} port accesses survived");
}

/// All ports but those of the other phases.
pub fn plain() -> io::Result<()> {
    sys::allow_ports()?;
    let mut random = Random::new(0x706f_7274);
    let count = walk(Sort::Plain, || any_bits(&mut random));
    restore_uart();
    told("ports", count);
    Ok(())
}

/// The interrupt controllers: writes every value to every register, and reads the other registers
/// after each write.
pub fn pic() -> io::Result<()> {
    sys::allow_ports()?;
    let mut random = Random::new(0x0070_6963);
    for value in 0..=0xff {
        for port in [0x20, 0x21, 0xa0, 0xa1, 0x4d0, 0x4d1] {
            sys::port_write(port, 1, value);
            for other in [0x20, 0x21, 0xa0, 0xa1] {
                sys::port_read(other, 1);
            }
        }
        // A controller that waits for the words of its initialization takes them for masks then.
        restore_pics();
    }
    let count = walk(Sort::Pic, || any_bits(&mut random));
    restore_pics();
    told("pic", count);
    Ok(())
}

/// The timer: every control word, then each counter written and read in halves, counting down from little and from much.
pub fn pit() -> io::Result<()> {
    sys::allow_ports()?;
    let mut random = Random::new(0x0070_6974);
    for control in 0..=0xff {
        sys::port_write(0x43, 1, control);
        for counter in 0x40..0x43 {
            for value in [random.next() & 0xff, random.next() & 3] {
                sys::port_write(counter, 1, u32::try_from(value).unwrap_or(0));
                sys::port_read(counter, 1);
            }
            sys::port_read(counter, 1);
        }
        sys::port_write(0x61, 1, control);
        sys::port_read(0x61, 1);
        // A counter that goes round at once would keep the processor busy with its interrupts.
        stop_pit();
    }
    let count = walk(Sort::Pit, || any_bits(&mut random));
    stop_pit();
    told("pit", count);
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

/// Initializes both controllers as Linux does (8259A: ICW1 to ICW4) and masks all of their lines: it uses the IOAPIC.
fn restore_pics() {
    for (command, words) in [(0x20, [0x30, 4, 1, 0xff]), (0xa0, [0x38, 2, 1, 0xff])] {
        sys::port_write(command, 1, 0x11);
        for word in words {
            sys::port_write(command + 1, 1, word);
        }
    }
    for port in [0x4d0, 0x4d1] {
        sys::port_write(port, 1, 0);
    }
}

/// Each counter in mode 0, which counts once, from 65,536; the gate of counter 2 shut.
fn stop_pit() {
    for (counter, control) in [(0x40, 0x30), (0x41, 0x70), (0x42, 0xb0)] {
        sys::port_write(0x43, 1, control);
        sys::port_write(counter, 1, 0);
        sys::port_write(counter, 1, 0);
    }
    sys::port_write(0x61, 1, 0);
}

/// Writes zeroes in every width to the ports that can end the machine, then resets through the
/// i8042: the machine must reboot on its own.
pub fn fatal() -> io::Result<()> {
    sys::allow_ports()?;
    let count = walk(Sort::Fatal, || 0);
    told("fatal-ports", count);
    println!("HOSTILE fatal-ports survived, now the reset");
    // Unsent output of the kernel would be lost with the machine.
    sys::drain_output()?;
    sys::port_write(0x64, 1, 0xfe);
    Err(io::Error::other("the machine did not reset"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_access_belongs_to_one_phase() {
        let sorts = [Sort::Plain, Sort::Pic, Sort::Pit, Sort::Fatal];
        let count = |sort| {
            let accesses = (0..=u16::MAX).flat_map(|port| WIDTHS.map(|width| (port, width)));
            let own = accesses.filter(|(port, width)| sort_of(*port, *width) == Some(sort));
            own.count() as u64
        };
        let counts = sorts.map(count);
        assert_eq!(counts.iter().sum::<u64>(), ACCESSES);
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    }

    #[test]
    fn an_access_is_of_the_most_dangerous_port_that_it_touches() {
        assert_eq!(sort_of(0x3c, 4), Some(Sort::Plain));
        assert_eq!(sort_of(0x3f, 2), Some(Sort::Pit));
        assert_eq!(sort_of(0x61, 4), Some(Sort::Fatal));
        assert_eq!(sort_of(0x61, 2), Some(Sort::Pit));
        assert_eq!(sort_of(0xa1, 1), Some(Sort::Pic));
        assert_eq!(
            (sort_of(0xffff, 1), sort_of(0xffff, 2)),
            (Some(Sort::Plain), None)
        );
    }
}

//! `hostile [--distance N] PHASE…` misuses the virtual machine that it runs in. The program is put
//! into a guest's initramfs and runs as root. No driver may be bound to the tested virtio devices.
//!
//! Phases: `config` (all of the PCI configuration space of each function), `absent` (that of absent
//! functions), `mmio` (every byte of every BAR in wrong widths), `rings` (broken descriptor chains
//! on every queue), `ports` (every I/O port except those of the next phases), `pic` and `pit` (the
//! interrupt controllers and the timer, which the kernel does not use after its boot),
//! `fatal-ports` (ports that may end the machine).
//!
//! After each phase and device, the program prints `HOSTILE <phase> <device> survived` and the
//! number of accesses. After `rings` it also prints that the device works again after a reset. With
//! `--distance N`, the walks through configuration space and BARs access only each Nth byte behind
//! the first 256 bytes of a page, where the registers are. The program ends with `HOSTILE DONE` or
//! `HOSTILE FAILED: …`. All numbers come from a seeded generator, so that a run is repeatable.

mod pci;
mod phases;
mod port;
mod random;
mod rings;
mod sys;

use std::{num::NonZeroUsize, process::ExitCode};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).peekable();
    let distance = match arguments.next_if(|argument| argument == "--distance") {
        Some(_) => arguments.next().and_then(|number| number.parse().ok()),
        None => NonZeroUsize::new(1),
    };
    let (Some(distance), Some(_)) = (distance, arguments.peek()) else {
        eprintln!("usage: hostile [--distance N] [config|absent|mmio|rings|ports|pic|pit|fatal-ports]…");
        return ExitCode::from(2);
    };
    for phase in arguments {
        if let Err(error) = phases::run(&phase, distance) {
            println!("HOSTILE FAILED: {phase}: {error}");
            return ExitCode::FAILURE;
        }
    }
    println!("HOSTILE DONE");
    ExitCode::SUCCESS
}

//! `hostile [--distance N] PHASE…`: misuses the virtual machine that it runs in. It is put into a guest's initramfs and run as root,
//! with no driver bound to the virtio devices that it works on.
//!
//! Phases: `config` (all of the PCI configuration space of each function), `absent` (that of functions that are not there),
//! `mmio` (every byte of every BAR in wrong widths), `rings` (broken descriptor chains on every queue), `ports` (every I/O
//! port but those of the next), `pic` and `pit` (the interrupt controllers and the timer, which the kernel here has no use
//! for once it is up), `fatal-ports` (those that may end the machine). After each phase
//! and device it prints `HOSTILE <phase> <device> survived` and how many accesses it made, after `rings` also that the device
//! works again after a reset. With `--distance N` the walks through configuration space and BARs access each Nth byte only behind
//! the first 256 of a page, where the registers are. It ends with `HOSTILE DONE`, or with `HOSTILE FAILED: …`. All numbers come from a seeded generator: a run
//! can be repeated.

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

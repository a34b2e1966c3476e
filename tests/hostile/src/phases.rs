//! Test phases: their devices, operations and order.

use std::{io, num::NonZeroUsize};

use crate::{pci, port, random::Random, rings};

/// Runs one phase on every device it is for. Behind the registers, every `distance`-th byte is accessed.
pub fn run(phase: &str, distance: NonZeroUsize) -> io::Result<()> {
    match phase {
        "config" => each(phase, false, |function| config(function, distance)),
        "mmio" => each(phase, true, |function| mmio(function, distance)),
        "rings" => each(phase, true, rings::attack),
        "absent" => absent(),
        "ports" => port::plain(),
        "pic" => port::pic(),
        "pit" => port::pit(),
        "fatal-ports" => port::fatal(),
        other => Err(io::Error::other(format!("no phase named {other}"))),
    }
}

fn each(phase: &str, virtio_only: bool, attack: impl Fn(&pci::Function) -> io::Result<()>) -> io::Result<()> {
    let functions = pci::functions(virtio_only)?;
    if functions.is_empty() {
        return Err(io::Error::other("no PCI functions"));
    }
    for function in functions {
        let saved = function.save()?;
        let result = attack(&function);
        function.restore(&saved)?;
        result.map_err(|error| io::Error::other(format!("{}: {error}", function.name)))?;
        println!("HOSTILE {phase} {} survived", function.name);
    }
    Ok(())
}

/// The widths in which the byte at `offset` of `length` bytes is accessed: all in the first 256 bytes of each page of 4 KiB,
/// where the registers are; behind them one for every `distance`-th byte, in turn. Each access leaves the guest.
fn widths(
    all: &[usize],
    offset: usize,
    length: usize,
    distance: NonZeroUsize,
) -> impl Iterator<Item = usize> {
    let chosen = if offset % 4096 < 256 {
        all.to_vec()
    } else if offset.is_multiple_of(distance.get()) {
        vec![all[offset / distance % all.len()]]
    } else {
        Vec::new()
    };
    chosen.into_iter().filter(move |width| offset + width <= length)
}

/// How many random accesses follow a walk, of at most `most`: fewer behind one that is a short one.
fn rounds(most: usize, distance: NonZeroUsize) -> usize {
    most / (distance.get() / 32).max(1)
}

/// All of the function's 4 KiB of configuration space, in every width where registers are, aligned or not, then random writes.
fn config(function: &pci::Function, distance: NonZeroUsize) -> io::Result<()> {
    let mut random = Random::new(0x636f_6e66);
    let saved = function.save()?;
    let space = pci::Ecam::open()?.function(function.number()?)?;
    let mut count = 0;
    for offset in 0..space.len() {
        for width in widths(&[1, 2, 4], offset, space.len(), distance) {
            space.write(offset, width, random.nasty());
            space.read(offset, width);
            count += 1;
        }
        // A function that is moved over the registers of others would take the test's own console away.
        if offset < 0x40 || offset < 0x100 && offset % 16 == 15 {
            function.restore_bars(&saved)?;
        }
    }
    println!("HOSTILE config {} {count} accesses walked", function.name);
    for round in 0..rounds(2000, distance) {
        let width = 1 << random.below(3);
        let offset = random.next() % (256 - width as u64);
        #[allow(clippy::cast_possible_truncation, reason = "any bits will do")]
        function.write(offset, width, random.nasty() as u32)?;
        function.read(random.next() % 252, width)?;
        if round % 16 == 0 {
            function.restore_bars(&saved)?;
        }
    }
    Ok(())
}

/// Configuration space of all absent functions: the first and the last dword of each read as ones,
/// even after writes.
fn absent() -> io::Result<()> {
    let ecam = pci::Ecam::open()?;
    let there: Vec<usize> = pci::functions(false)?
        .iter()
        .map(pci::Function::number)
        .collect::<io::Result<_>>()?;
    let mut count = 0;
    for number in (0..ecam.functions()).filter(|number| !there.contains(number)) {
        let space = ecam.function(number)?;
        for offset in [0, space.len() - 4] {
            space.write(offset, 4, 0x1234_5678);
            let value = space.read(offset, 4);
            if value != u64::from(u32::MAX) {
                return Err(io::Error::other(format!(
                    "function {number:#x} is not there and reads {value:#x}"
                )));
            }
            count += 1;
        }
    }
    println!(
        "HOSTILE absent {count} accesses, {} functions there of {} survived",
        there.len(),
        ecam.functions()
    );
    Ok(())
}

/// Reads and writes every offset of every BAR, in every width where registers are, aligned or not, then walks at random.
fn mmio(function: &pci::Function, distance: NonZeroUsize) -> io::Result<()> {
    function.enable()?;
    let mut random = Random::new(0x6d6d_696f);
    for (index, bar) in function.bars()? {
        let mut count = 0;
        for offset in 0..bar.len() {
            for width in widths(&[1, 2, 4, 8], offset, bar.len(), distance) {
                bar.read(offset, width);
                bar.write(offset, width, random.nasty());
                count += 1;
            }
        }
        for _ in 0..rounds(4000, distance) {
            let offset = random.below(bar.len());
            bar.write(offset, 1 << (random.next() % 4), random.nasty());
        }
        println!(
            "HOSTILE mmio {} BAR {index} of {} bytes {count} accesses walked",
            function.name,
            bar.len()
        );
    }
    rings::check(function)
}

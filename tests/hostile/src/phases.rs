//! The phases: what is done to which device, in which order.

use std::io;

use crate::{pci, port, random::Random, rings};

/// Runs one phase on every device it is for.
pub fn run(phase: &str) -> io::Result<()> {
    match phase {
        "config" => each(phase, false, config),
        "mmio" => each(phase, true, mmio),
        "rings" => each(phase, true, rings::attack),
        "ports" => {
            port::walk()?;
            println!("HOSTILE ports survived");
            Ok(())
        }
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

/// Random writes in random widths all over config space: BARs, command, MSI-X control, capabilities.
fn config(function: &pci::Function) -> io::Result<()> {
    let mut random = Random::new(0x636f_6e66);
    let saved = function.save()?;
    for round in 0..2000 {
        let width = 1 << random.below(3);
        let offset = random.next() % (256 - width as u64);
        #[allow(clippy::cast_possible_truncation, reason = "any bits will do")]
        function.write(offset, width, random.nasty() as u32)?;
        function.read(random.next() % 252, width)?;
        // A function that is moved over the registers of others would take the test's own console away at some
        // point; back to the start now and then.
        if round % 16 == 0 {
            function.restore(&saved)?;
        }
    }
    Ok(())
}

/// Reads and writes every offset of every BAR in every width, aligned or not, then walks at random.
fn mmio(function: &pci::Function) -> io::Result<()> {
    function.enable()?;
    let mut random = Random::new(0x6d6d_696f);
    for (index, bar) in function.bars()? {
        // Beyond a page the areas repeat: one offset in 13 there.
        for offset in (0..bar.len()).filter(|offset| *offset < 0x400 || offset % 13 == 0) {
            for width in [1, 2, 4, 8] {
                bar.read(offset, width);
                bar.write(offset, width, random.nasty());
            }
        }
        for _ in 0..4000 {
            let offset = random.below(bar.len());
            bar.write(offset, 1 << (random.next() % 4), random.nasty());
        }
        println!(
            "HOSTILE mmio {} BAR {index} of {} bytes walked",
            function.name,
            bar.len()
        );
    }
    rings::check(function)
}

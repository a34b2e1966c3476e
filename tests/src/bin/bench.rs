//! `bench`: measures vmmd, beside QEMU in the running test node and without guests on this machine, prints the tables, and
//! writes them into the docs.

use anyhow::Result;
use clap::{Parser, ValueEnum};
use vmmd_tests::bench;

/// Measures vmmd, beside QEMU in the test node that VMMD_NODE names (or the developer's), and without guests on this machine.
#[derive(Parser)]
#[command(name = "bench", version)]
struct Arguments {
    /// How often each VMM is run; the tables have the medians.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Run only these.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<bench::Part>,
    /// Write the tables into docs/src/benchmarks.md.
    #[arg(long)]
    publish: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut parts = arguments.only;
    if parts.is_empty() {
        parts = bench::Part::value_variants().to_vec();
    }
    for part in parts {
        let report = part.run(arguments.runs)?;
        print!("{report}");
        if arguments.publish {
            bench::publish(part, &report, &bench::page())?;
        }
    }
    Ok(())
}

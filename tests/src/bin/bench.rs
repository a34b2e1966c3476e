//! `bench`: measures vmmd beside QEMU in the running test node, prints the tables, and writes them into the docs.

use anyhow::Result;
use clap::Parser;
use vmmd_tests::{Node, bench};

/// Measures vmmd beside QEMU in the test node that VMMD_NODE names (or the developer's).
#[derive(Parser)]
#[command(name = "bench", version)]
struct Arguments {
    /// How often each VMM is run; the tables have the medians.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Run only these.
    #[arg(long, value_enum)]
    only: Option<bench::Part>,
    /// Write the tables into docs/src/benchmarks.md.
    #[arg(long, conflicts_with = "only")]
    publish: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let report = bench::run(&Node::get()?, arguments.runs, arguments.only)?;
    print!("{report}");
    if arguments.publish {
        bench::publish(&report, &bench::page())?;
    }
    Ok(())
}

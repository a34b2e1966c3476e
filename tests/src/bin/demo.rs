//! `demo`: what `make demo` runs.

use std::process::ExitCode;

use clap::Parser;

/// Boots a Debian VM under vmmd and shows it.
#[derive(Parser)]
#[command(name = "demo", version)]
struct Arguments {
    /// End on the VM's console.
    #[arg(long)]
    shell: bool,
}

fn main() -> ExitCode {
    match vmmd_tests::demo::run(Arguments::parse().shell) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

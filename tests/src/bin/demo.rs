//! `demo`: what `make demo` runs.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use vmmd_tests::demo;

/// Shows vmmd with a guest: import, run, console, SSH, screen, hot-plug, snapshot, migration, stop.
#[derive(Parser)]
#[command(name = "demo", version)]
struct Arguments {
    /// Only build the images of the node and of the guest.
    #[arg(long)]
    prepare: bool,
    /// End on the VM's console.
    #[arg(long)]
    shell: bool,
    /// vmmd's package.
    #[arg(long, value_name = "FILE", required_unless_present = "prepare")]
    package: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.package {
        Some(package) => demo::run(&package, arguments.shell),
        None => demo::prepare(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

//! `measure start`: starts the same kernel and initrd under our `vmm` and under QEMU (microvm and q35), in turn, and
//! prints one JSON object a run. It runs as root in the test node; `make bench` copies it there, runs it and makes
//! the table. Its figures are compared with each other only: absolute times of an emulated node mean nothing.

mod kvm_stats;
mod memory;
mod run;
mod trace;
mod vmm;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Measures VMMs beside each other")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Time to the first instruction and to init, VM exits and page faults by kind, idle exits, private memory.
    Start {
        /// bzImage that all of them boot.
        #[arg(long)]
        kernel: PathBuf,
        /// Initial RAM disk; its init prints GUEST-INIT and then GUEST-READY on the serial console.
        #[arg(long)]
        initrd: PathBuf,
        /// Our program.
        #[arg(long)]
        vmm: PathBuf,
        /// QEMU's program.
        #[arg(long, default_value = "/usr/bin/qemu-system-x86_64")]
        qemu: PathBuf,
        /// How often each is run.
        #[arg(long, default_value_t = 5)]
        runs: u32,
        /// For how many seconds an idle guest is watched.
        #[arg(long, default_value_t = 10)]
        idle: u64,
        /// Only this one: vmm, microvm or q35.
        #[arg(long)]
        only: Option<String>,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Start {
            kernel,
            initrd,
            vmm,
            qemu,
            runs,
            idle,
            only,
        } => {
            let mut subjects = vmm::subjects(&vmm, &qemu, &kernel, &initrd)?;
            subjects.retain(|subject| only.as_deref().is_none_or(|only| subject.name == only));
            for number in 0..runs {
                for subject in &subjects {
                    let result = run::start(subject, idle)?;
                    println!(
                        "{}",
                        serde_json::json!({ "vmm": subject.name, "run": number, "result": result })
                    );
                }
            }
            Ok(())
        }
    }
}

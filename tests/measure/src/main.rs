//! `measure start`: starts the same kernel and initrd under our `vmm` and under QEMU (microvm and q35), in turn, and
//! prints one JSON object a run. `measure disk` does the same with fio on a disk in the guest. It runs as root in the
//! test node; `make bench` copies it there, runs it and makes the tables. Its figures are compared with each other only:
//! absolute times of an emulated node mean nothing.

mod disk;
mod kvm_stats;
mod memory;
mod run;
mod trace;
mod vmm;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand};
use serde::Serialize;

use vmm::{Programs, Subject};

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
        #[command(flatten)]
        common: Common,
        /// For how many seconds an idle guest is watched.
        #[arg(long, default_value_t = 10)]
        idle: u64,
    },
    /// Time, VM exits and host CPU time for each request to a disk.
    Disk {
        #[command(flatten)]
        common: Common,
        /// A raw image whose space is all allocated; it is written to.
        #[arg(long)]
        raw: PathBuf,
        /// A qcow2 of the same size whose clusters are all allocated; it is written to.
        #[arg(long)]
        qcow2: PathBuf,
        /// Only fio jobs whose name contains this.
        #[arg(long, default_value = "")]
        job: String,
    },
}

#[derive(Args)]
struct Common {
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
    /// Only this one, by the name that is printed.
    #[arg(long)]
    only: Option<String>,
}

impl Common {
    fn programs(&self) -> Programs {
        Programs {
            vmm: self.vmm.clone(),
            qemu: self.qemu.clone(),
            kernel: self.kernel.clone(),
            initrd: self.initrd.clone(),
        }
    }

    /// Measures all subjects in turn and prints a line for each result.
    fn measure<T: Serialize>(&self, subjects: &[Subject], one: impl Fn(&Subject) -> Result<T>) -> Result<()> {
        let wanted = |subject: &&Subject| self.only.as_deref().is_none_or(|only| subject.name == only);
        if !subjects.iter().any(|subject| wanted(&subject)) {
            let names: Vec<&str> = subjects.iter().map(|subject| subject.name).collect();
            bail!("--only takes one of {}", names.join(", "));
        }
        for number in 0..self.runs {
            for subject in subjects.iter().filter(wanted) {
                let result = one(subject)?;
                println!(
                    "{}",
                    serde_json::json!({ "vmm": subject.name, "run": number, "result": result })
                );
            }
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Start { common, idle } => common.measure(&vmm::subjects(&common.programs())?, |subject| {
            run::start(subject, idle)
        }),
        Command::Disk {
            common,
            raw,
            qcow2,
            job,
        } => {
            let subjects = vmm::with_disks(&common.programs(), &raw, &qcow2)?;
            common.measure(&subjects, |subject| disk::run(subject, &job))
        }
    }
}

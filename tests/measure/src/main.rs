//! `measure start`: starts the same kernel and initrd under our `vmm` and under QEMU (microvm and q35), in turn, and
//! prints one JSON object a run. `measure disk` does the same with fio on a disk, in guests that are up beside each other.
//! `measure net` moves packets between a guest and the node. `measure screen` looks at what guests draw.
//! `measure memory` boots it with its RAM backed in different ways.
//! It runs as root in the test node; `make bench` copies it there, runs it and makes the tables. Its figures are compared
//! with each other only: absolute times of an emulated node mean nothing.

mod access;
mod backing;
mod disk;
mod kvm_stats;
mod memory;
mod net;
mod qmp;
mod run;
mod screen;
mod ticks;
mod tiny;
mod trace;
mod vmm;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand};
use serde::Serialize;

use disk::News;
use vmm::{Copied, Image, Programs, Subject};

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
    /// Time to the first instruction alone.
    First {
        #[command(flatten)]
        common: Common,
        /// Use a kernel of a few bytes without an initial RAM disk.
        #[arg(long)]
        tiny: bool,
    },
    /// Time, VM exits and host CPU time for each request to a disk.
    Disk {
        #[command(flatten)]
        common: Common,
        /// A raw image whose space is all allocated. Each guest gets a copy, beside it.
        #[arg(long)]
        raw: PathBuf,
        /// A qcow2 of the same size whose clusters are all allocated.
        #[arg(long)]
        qcow2: PathBuf,
        /// How often each guest that was booted does each job.
        #[arg(long, default_value_t = 3)]
        turns: u32,
        /// Only fio jobs whose name contains this.
        #[arg(long, default_value = "")]
        job: String,
    },
    /// Time, VM exits, host CPU time, and reads and writes for each MiB, datagram and round trip of a network interface. The initial
    /// RAM disk has this program in /bin.
    Net {
        #[command(flatten)]
        common: Common,
        /// How often each guest that was booted does each job.
        #[arg(long, default_value_t = 3)]
        turns: u32,
        /// Only jobs whose name contains this.
        #[arg(long, default_value = "")]
        job: String,
    },
    /// Serves the traffic of `net`, in a guest.
    Serve,
    /// Updates of a screen by each encoding, an idle screen, keys, and lines on consoles. The initial RAM disk has this program in /bin and a driver
    /// for the display.
    Screen {
        #[command(flatten)]
        common: Common,
        /// How often each guest that was booted does each job.
        #[arg(long, default_value_t = 3)]
        turns: u32,
        /// A folder with the kernel, the initial RAM disk and the root disk of a Debian with an X server, for a terminal on it.
        #[arg(long)]
        desktop: PathBuf,
    },
    /// Draws without end, in a guest.
    Draw {
        /// What is drawn.
        what: screen::draw::What,
    },
    /// Prints lines on a console, in a guest.
    Lines {
        /// "/dev/hvc0".
        device: String,
        /// How many of them.
        count: u32,
    },
    /// Boots of a guest with different RAM backings, the costs when the guest then touches memory,
    /// and the memory that the balloon returns to the host. The initial RAM disk has this program
    /// in /bin.
    Memory {
        #[command(flatten)]
        common: Common,
    },
    /// Touches memory for the first time, then reads it at random.
    Access {
        /// How much of it.
        #[arg(long)]
        mib: usize,
        /// What backs it.
        #[arg(long, value_enum, default_value = "private")]
        backing: access::Backing,
    },
    /// Writes a kernel of some bytes that halts.
    Tiny {
        /// The file.
        path: PathBuf,
    },
    /// Sends a datagram every few milliseconds, without end.
    Tick {
        /// "ADDRESS:PORT".
        #[arg(long)]
        to: String,
        /// Milliseconds from one to the next.
        #[arg(long, default_value_t = 5)]
        every: u64,
        /// Memory that is rewritten meanwhile, again and again.
        #[arg(long, default_value_t = 0)]
        rewrite_mib: usize,
    },
    /// Asks a QEMU for something and prints the answer.
    Qmp {
        /// Its QMP socket.
        socket: PathBuf,
        /// What to do.
        command: String,
        /// A JSON object.
        arguments: String,
    },
    /// Prints when each datagram came.
    Hear {
        /// UDP port.
        port: u16,
    },
    /// The memory of running VMMs.
    Look {
        /// Their processes.
        pids: Vec<u32>,
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
    /// How often each is started.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Only this one, by the name that is printed; can be given several times.
    #[arg(long)]
    only: Vec<String>,
}

impl Common {
    fn programs(&self) -> Programs {
        Programs {
            vmm: self.vmm.clone(),
            qemu: self.qemu.clone(),
            kernel: self.kernel.clone(),
            initrd: Some(self.initrd.clone()),
        }
    }

    /// Those of `subjects` that are to be measured.
    fn wanted<'a>(&self, subjects: &'a [Subject]) -> Result<Vec<&'a Subject>> {
        let wanted =
            |subject: &&Subject| self.only.is_empty() || self.only.iter().any(|only| subject.name == only);
        let names: Vec<&str> = subjects.iter().map(|subject| subject.name).collect();
        if let Some(unknown) = self.only.iter().find(|only| !names.contains(&only.as_str())) {
            bail!("--only {unknown}: it takes {}", names.join(", "));
        }
        Ok(subjects.iter().filter(wanted).collect())
    }

    /// Measures all subjects in turn.
    fn start(&self, idle: u64) -> Result<()> {
        let programs = self.programs();
        let subjects = vmm::subjects(&programs)?;
        for number in 0..self.runs {
            for subject in self.wanted(&subjects)? {
                print(subject.name, number, &run::start(subject, idle)?);
            }
        }
        Ok(())
    }

    /// Times to the first instruction of all subjects in turn, of a kernel of some bytes or of the guest.
    fn first(&self, tiny: bool) -> Result<()> {
        let programs = self.programs();
        let programs = if tiny {
            programs.with_tiny_kernel()?
        } else {
            programs
        };
        let subjects = vmm::subjects(&programs)?;
        for number in 0..self.runs {
            for subject in self.wanted(&subjects)? {
                let us = run::first_instruction(subject)?;
                print(
                    subject.name,
                    number,
                    &serde_json::json!({ "first_instruction_us": us }),
                );
            }
        }
        Ok(())
    }

    /// Measures all subjects with a network interface in turn.
    fn net(&self, job: &str, turns: u32) -> Result<()> {
        let subjects = vmm::with_nics(&self.programs())?;
        let peers = vmm::with_nics_of_peers(&self.programs())?;
        let wanted = self.wanted(&subjects)?;
        let _wires = net::Wires::new(2 * vmm::PEERS)?;
        let pairs = (0..).zip(subjects.iter().zip(&peers));
        let pairs: Vec<_> = pairs
            .map(|(number, (subject, peer))| (number, subject, peer))
            .filter(|(_, subject, _)| wanted.iter().any(|wanted| wanted.name == subject.name))
            .collect();
        for number in 0..self.runs {
            net::run(&pairs, job, turns, |subject, turn, cost| {
                print(subject, of_all(number, turns, turn), &[cost]);
            })?;
        }
        Ok(())
    }

    /// Measures all subjects with a screen in turn.
    fn screen(&self, turns: u32, desktop: &Path) -> Result<()> {
        for number in 0..self.runs {
            let each = |subject: &str, turn: u32, cost: &screen::Cost| {
                print(subject, of_all(number, turns, turn), &[cost]);
            };
            let subjects = vmm::with_screens(&self.programs())?;
            screen::run(&self.wanted(&subjects)?, turns, each)?;
            // Made only now: a subject's manifest is named after it, and these have the same names.
            let desktops = vmm::with_desktops(&self.programs(), desktop)?;
            let desktops = self.wanted(&desktops)?;
            let images = desktops.iter().filter_map(|subject| subject.image.as_ref());
            let _images: Vec<Copied> = images.map(Image::copy).collect::<Result<_>>()?;
            screen::desktop::run(&desktops, turns, each)?;
        }
        Ok(())
    }

    /// Measures all subjects beside each other.
    fn disk(&self, raw: &Path, qcow2: &Path, job: &str, turns: u32) -> Result<()> {
        let subjects = vmm::with_disks(&self.programs(), raw, qcow2)?;
        let subjects = self.wanted(&subjects)?;
        for number in 0..self.runs {
            let images = subjects.iter().filter_map(|subject| subject.image.as_ref());
            let _images: Vec<Copied> = images.map(Image::copy).collect::<Result<_>>()?;
            disk::run(&subjects, job, turns, |subject, turn, news| {
                let run = of_all(number, turns, turn);
                match news {
                    News::Cost(cost) => print(subject, run, &[cost]),
                    News::StoodStill { job } => println!(
                        "{}",
                        serde_json::json!({ "vmm": subject, "run": run, "stood_still": job })
                    ),
                }
            })?;
        }
        Ok(())
    }
}

/// The number of a turn among those of all boots, each of which has as many.
fn of_all(boot: u32, turns: u32, turn: u32) -> u32 {
    boot.saturating_mul(turns).saturating_add(turn)
}

fn print(subject: &str, run: u32, result: &impl Serialize) {
    println!(
        "{}",
        serde_json::json!({ "vmm": subject, "run": run, "result": result })
    );
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Start { common, idle } => common.start(idle),
        Command::First { common, tiny } => common.first(tiny),
        Command::Disk {
            common,
            raw,
            qcow2,
            turns,
            job,
        } => common.disk(&raw, &qcow2, &job, turns),
        Command::Net { common, turns, job } => common.net(&job, turns),
        Command::Serve => net::traffic::serve(),
        Command::Screen {
            common,
            turns,
            desktop,
        } => common.screen(turns, &desktop),
        Command::Draw { what } => screen::draw::run(what),
        Command::Lines { device, count } => screen::draw::lines(&device, count),
        Command::Memory { common } => backing::run(&common.programs(), common.runs, |name, run, cost| {
            print(name, run, cost);
        }),
        Command::Access { mib, backing } => {
            println!("{}", serde_json::to_string(&access::run(mib, backing)?)?);
            Ok(())
        }
        Command::Tiny { path } => Ok(std::fs::write(path, tiny::kernel())?),
        Command::Tick {
            to,
            every,
            rewrite_mib,
        } => ticks::send(&to, std::time::Duration::from_millis(every), rewrite_mib),
        Command::Hear { port } => ticks::hear(port),
        Command::Qmp {
            socket,
            command,
            arguments,
        } => {
            println!("{}", qmp::ask(&socket, &command, &arguments)?);
            Ok(())
        }
        Command::Look { pids } => {
            for pid in pids {
                println!("{}", serde_json::to_string(&memory::of(pid)?)?);
            }
            Ok(())
        }
    }
}

//! `blkcheck write` runs in a guest until its machine is killed. It writes and zeroes random parts
//! of a disk, and prints the number of operations of each thread that are on stable storage.
//! `blkcheck verify` then reads the disk's image on the node, and checks each sector against the
//! operations of the same round: every confirmed operation must be present. `blkcheck digest`
//! prints a digest of the disk's whole content, to compare the views of two readers.
//! `blkcheck replay` creates a disk in its state after a power loss, from a log of dm-log-writes.
//!
//! The written content is a function of the round, the thread and the operation's number: see
//! [`plan`].

mod digest;
mod plan;
mod replay;
mod verify;
mod write;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Writes numbered sectors to a disk, reports the operations on stable storage, and checks the disk
/// afterwards.
#[derive(Parser)]
#[command(name = "blkcheck", version)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Write to a disk until killed. Prints `<prefix>-<thread>:<operations>;` whenever a flush has ended.
    Write {
        /// The block device or file.
        disk: PathBuf,
        /// Which plan is carried out. Rounds on one disk are numbered upwards.
        #[arg(long)]
        round: u32,
        /// Prefix of each line.
        #[arg(long, default_value = "confirmed")]
        prefix: String,
        /// How many threads write; each has one request under way at a time.
        #[arg(long, default_value_t = 4)]
        threads: u64,
        /// End after this many operations of each thread.
        #[arg(long)]
        operations: Option<u64>,
    },
    /// Check an image against the plan of a round, and save its contents to the state file.
    Verify {
        /// The raw image.
        image: PathBuf,
        /// State file: the image's contents before the round and, after success, its current
        /// contents. An absent file stands for zeroes.
        #[arg(long)]
        state: PathBuf,
        /// Which plan was carried out.
        #[arg(long)]
        round: u32,
        /// Confirmed operations of each thread.
        #[arg(long, value_delimiter = ',')]
        confirmed: Vec<u64>,
    },
    /// Create the disk's state after a power loss at a mark: all flushed writes, and some of the
    /// unflushed ones.
    Replay {
        /// The log device of dm-log-writes.
        log: PathBuf,
        /// The disk, which holds zeroes only.
        #[arg(long)]
        onto: PathBuf,
        /// The mark (`dmsetup message DEVICE 0 mark TEXT`); all that was ever written when it is not given.
        #[arg(long)]
        mark: Option<String>,
        /// Which of the writes that were not flushed are there.
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Print a number for the content of a disk.
    Digest {
        /// The block device or file.
        disk: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().action) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("BLKCHECK FAILED: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(action: Action) -> Result<()> {
    match action {
        Action::Write {
            disk,
            round,
            prefix,
            threads,
            operations,
        } => write::run(&disk, round, &prefix, threads, operations),
        Action::Verify {
            image,
            state,
            round,
            confirmed,
        } => verify::run(&image, &state, round, &confirmed),
        Action::Replay {
            log,
            onto,
            mark,
            seed,
        } => replay::run(&log, &onto, mark.as_deref(), seed),
        Action::Digest { disk } => digest::run(&disk),
    }
}

//! `fscheck table FOLDER` performs file operations of POSIX and Linux in sequence, and prints a
//! line for each: its name and its result, with numbers that are the same on every correct file
//! system. A test compares the lines of two file systems. `fscheck small FOLDER COUNT` creates,
//! looks up and removes many small files. `fscheck storm FOLDER SECONDS` renames and looks up files
//! in several threads, and reports whether a name was ever lost.

mod content;
mod metadata;
mod names;
mod storm;

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use rustix::io::Errno;

/// Reports the behavior of a file system.
#[derive(Parser)]
#[command(name = "fscheck", version)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Print the result of each operation.
    Table {
        /// An empty folder.
        folder: PathBuf,
        /// Only the operation of this name.
        #[arg(long)]
        only: Option<String>,
    },
    /// Make, look up and remove small files, and print how long each took, in microseconds: `create 1 stat 2 unlink 3`.
    Small {
        /// An empty folder.
        folder: PathBuf,
        /// How many.
        count: u32,
        /// Only `create`, `stat` or `unlink`; the files of one step remain for the next.
        #[arg(long)]
        step: Option<String>,
        /// By how many threads at once.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        threads: u32,
    },
    /// Rename and look up in several threads.
    Storm {
        /// An empty folder.
        folder: PathBuf,
        /// For how long.
        seconds: u64,
    },
}

/// Result of an operation: a text that is the same on each file system.
type Outcome = io::Result<String>;

/// Name and function of an operation in an empty folder.
type Check = (&'static str, fn(&Path) -> Outcome);

fn main() -> ExitCode {
    let done = match Arguments::parse().action {
        Action::Table { folder, only } => table(&folder, only.as_deref()),
        Action::Small {
            folder,
            count,
            step,
            threads,
        } => storm::small(&folder, count, step.as_deref(), threads),
        Action::Storm { folder, seconds } => storm::storm(&folder, seconds),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fscheck: {error}");
            ExitCode::FAILURE
        }
    }
}

fn table(folder: &Path, only: Option<&str>) -> io::Result<()> {
    let checks = [names::CHECKS, content::CHECKS, metadata::CHECKS].concat();
    for (number, (name, check)) in checks.into_iter().enumerate() {
        if only.is_some_and(|only| only != name) {
            continue;
        }
        let own = folder.join(format!("{number:03}"));
        fs::create_dir(&own)?;
        let outcome = match check(&own) {
            Ok(text) => text,
            Err(error) => said(&error),
        };
        writeln!(io::stdout(), "{name}: {outcome}")?;
    }
    Ok(())
}

/// Formats an error by its number, because C libraries differ in their texts.
fn said(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => format!("errno {number}"),
        None => format!("error {error}"),
    }
}

/// The number of an error, or what succeeded.
fn of<T>(result: Result<T, Errno>) -> String {
    match result.map(drop) {
        Ok(()) => "done".to_owned(),
        Err(errno) => format!("errno {}", errno.raw_os_error()),
    }
}

/// The same of the standard library.
fn io_of<T>(result: io::Result<T>) -> String {
    match result {
        Ok(_) => "done".to_owned(),
        Err(error) => said(&error),
    }
}

//! The demonstration: one guest from its image to a move to another daemon, each step as a user types it.

mod image;
mod place;
pub mod ready;
mod tour;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use place::{Place, logs};

/// How many lines of a step's output are shown; the log has all.
const LINES: usize = 12;

/// Builds the images that [`run`] needs, as far as they are not there yet.
pub fn prepare() -> Result<()> {
    if crate::host::Accel::hardware() {
        return image::get().map(drop);
    }
    place::images().map(drop)
}

/// Runs it with the programs of `package`; with `shell` it ends on the VM's console in the caller's hands.
pub fn run(package: &Path, shell: bool) -> Result<()> {
    let began = Instant::now();
    fs::create_dir_all(logs())?;
    let place = Place::choose(package).context("prepare a place for the demonstration")?;
    let mut steps = Steps {
        place: &place,
        log: File::create(logs().join("demo.log"))?,
        number: 0,
    };
    println!("     {:.1} s", began.elapsed().as_secs_f32());
    let result = if shell {
        tour::shell(&mut steps)
    } else {
        tour::tour(&mut steps)
    };
    if result.is_err() {
        place.keep_logs();
    }
    let number = steps.number;
    place.end()?;
    result.with_context(|| format!("step {number} failed; the logs are in {}", logs().display()))?;
    println!(
        "\nThat was vmmd: {number} steps in {:.0} s. The log is {}.",
        began.elapsed().as_secs_f32(),
        logs().join("demo.log").display()
    );
    Ok(())
}

/// The steps of the demonstration, with their log.
struct Steps<'a> {
    place: &'a Place,
    log: File,
    number: u32,
}

impl Steps<'_> {
    /// Begins a step.
    fn say(&mut self, what: &str) -> Result<()> {
        self.number += 1;
        println!("\n[{:2}] {what}", self.number);
        writeln!(self.log, "\n[{:2}] {what}", self.number).context("write the log")
    }

    /// A step that is one command. Returns the output of the command.
    fn command(&mut self, what: &str, command: &str) -> Result<String> {
        self.say(what)?;
        self.more(command)
    }

    /// Another command of the step.
    fn more(&mut self, command: &str) -> Result<String> {
        self.timed(command, |steps| steps.place.sh(&format!("{command} 2>&1")))
    }

    /// Prints a typed line, the output of `work` and its time. The log has the whole output.
    fn timed(&mut self, typed: &str, work: impl FnOnce(&mut Self) -> Result<String>) -> Result<String> {
        println!("     # {typed}");
        writeln!(self.log, "# {typed}").context("write the log")?;
        let began = Instant::now();
        let output = work(self).with_context(|| format!("`{typed}`"))?;
        let seconds = began.elapsed().as_secs_f32();
        writeln!(self.log, "{output}\n{seconds:.1} s").context("write the log")?;
        let lines: Vec<_> = output.lines().filter(|line| !line.trim().is_empty()).collect();
        for line in lines.iter().skip(lines.len().saturating_sub(LINES)) {
            // A progress display returns to the beginning of its line.
            let line = line.trim_end().rsplit('\r').next().unwrap_or_default();
            let line: String = line.chars().filter(|letter| !letter.is_control()).collect();
            println!("     {line}");
        }
        println!("     {seconds:.1} s");
        Ok(output)
    }

    /// Fails unless the output of a command has `wanted`.
    fn expect(output: &str, wanted: &str) -> Result<()> {
        ensure!(output.contains(wanted), "the output has no {wanted:?}:\n{output}");
        Ok(())
    }
}

/// Where the picture of the guest's screen is left.
fn picture() -> PathBuf {
    logs().join("screen.png")
}

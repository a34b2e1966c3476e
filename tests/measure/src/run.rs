//! One run of one subject.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::{
    kvm_stats::{self, Counters},
    memory, trace,
    vmm::Subject,
};

/// What one run gave. Times are in microseconds from just before the process is started.
#[derive(Serialize)]
pub struct Start {
    first_instruction_us: u128,
    init_us: u128,
    exits_to_init: Counters,
    idle_exits_per_second: f64,
    pss_beyond_guest_kib: u64,
    pss_guest_kib: u64,
}

/// A running subject; killed when dropped.
pub struct Running {
    child: Child,
    input: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Running {
    /// Starts it.
    pub fn new(subject: &Subject) -> Result<Self> {
        let mut child = Command::new(&subject.program)
            .args(&subject.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {}", subject.program.display()))?;
        let lines = BufReader::new(child.stdout.take().context("no standard output")?);
        let input = child.stdin.take().context("no standard input")?;
        Ok(Self { child, input, lines })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Types a line on the guest's console.
    pub fn type_line(&mut self, line: &str) -> Result<()> {
        self.input
            .write_all(format!("{line}\n").as_bytes())
            .context("type")?;
        self.input.flush().context("type")
    }

    /// Reads on until a line has the marker, and returns that line.
    pub fn wait_for(&mut self, marker: &str) -> Result<String> {
        let text = self.text_until(marker)?;
        Ok(text.lines().next_back().unwrap_or_default().to_owned())
    }

    /// Reads on until a line has the marker, and returns all lines up to it.
    pub fn text_until(&mut self, marker: &str) -> Result<String> {
        let mut text = String::new();
        let mut line = Vec::new();
        loop {
            line.clear();
            if self.lines.read_until(b'\n', &mut line)? == 0 {
                bail!("it ended before it printed {marker}:\n{text}");
            }
            let line = String::from_utf8_lossy(&line);
            text += &line;
            if line.contains(marker) {
                return Ok(text);
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Two starts: one with the tracer up to the first instruction, one without to all else.
pub fn start(subject: &Subject, idle: u64) -> Result<Start> {
    let first_instruction_us = first_instruction(subject)
        .with_context(|| format!("{}: time to the first instruction", subject.name))?;
    measure(subject, idle, first_instruction_us).with_context(|| format!("{}: start to init", subject.name))
}

fn first_instruction(subject: &Subject) -> Result<u128> {
    let tracer = trace::FirstEntry::new()?;
    let begin = trace::now();
    let _running = Running::new(subject)?;
    Ok(tracer.wait()?.saturating_sub(begin).as_micros())
}

fn measure(subject: &Subject, idle: u64, first_instruction_us: u128) -> Result<Start> {
    let begin = trace::now();
    let mut running = Running::new(subject)?;
    running.wait_for("GUEST-INIT")?;
    let init_us = trace::now().saturating_sub(begin).as_micros();
    let pid = running.child.id();
    let exits_to_init = kvm_stats::read(pid)?;
    running.wait_for("GUEST-READY")?;
    // The guest settles: its shell starts, its kernel's late work ends. A rate is measured, so time must pass.
    std::thread::sleep(Duration::from_secs(3));
    let before = kvm_stats::read(pid)?;
    std::thread::sleep(Duration::from_secs(idle));
    let after = kvm_stats::read(pid)?;
    let exits = |counters: &Counters| counters.get("exits").copied().unwrap_or(0);
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    let idle_exits_per_second = exits(&after).saturating_sub(exits(&before)) as f64 / idle as f64;
    let (pss_guest_kib, pss_beyond_guest_kib) = memory::pss(pid)?;
    Ok(Start {
        first_instruction_us,
        init_us,
        exits_to_init,
        idle_exits_per_second,
        pss_beyond_guest_kib,
        pss_guest_kib,
    })
}

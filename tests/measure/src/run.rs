//! One run of one subject.

use std::{
    error, fmt, fs,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags, pidfd_open},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use serde::Serialize;

use crate::{
    kvm_stats::{self, Counters},
    memory::{self, Memory},
    trace,
    vmm::Subject,
};

/// Results of one run. Times are in microseconds since just before the start of the process.
#[derive(Serialize)]
pub struct Start {
    first_instruction_us: u128,
    init_us: u128,
    exits_to_init: Counters,
    idle_exits_per_second: f64,
    memory: Memory,
}

/// Timeout of a guest's output: it may hang, or print complaints forever. Five guests that boot at
/// the same time on an emulated node take half a minute.
const PATIENCE: Duration = Duration::from_secs(300);

/// Error: the guest did not print the marker.
#[derive(Debug)]
pub struct Unheard {
    marker: String,
    text: String,
}

impl fmt::Display for Unheard {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "it did not print {} in time:\n{}",
            self.marker, self.text
        )
    }
}

impl error::Error for Unheard {}

/// The processor of guests, and the one of all else.
fn processors() -> Result<[usize; 2]> {
    let allowed = sched_getaffinity(None).context("look which processors there are")?;
    let mut processors = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let (Some(guests), Some(others)) = (processors.next(), processors.next()) else {
        bail!("two processors are needed, one for the guest and one for its VMM");
    };
    Ok([guests, others])
}

/// Puts the calling thread on a processor that neither guests nor their VMMs have; beside the VMMs when there is none.
///
/// The node's first is one (`isolcpus`): no program runs on it that does not ask for that.
pub fn place_elsewhere() -> Result<()> {
    let [guests, others] = processors()?;
    let free = (0..CpuSet::MAX_CPU).filter(|cpu| *cpu != guests && *cpu != others);
    for cpu in free.chain([others]) {
        let mut set = CpuSet::new();
        set.set(cpu);
        // Refused when it does not exist.
        if sched_setaffinity(None, &set).is_ok() {
            return Ok(());
        }
    }
    bail!("there is no processor for a thread")
}

/// A running subject; killed when dropped.
pub struct Running {
    child: Child,
    input: ChildStdin,
    lines: BufReader<ChildStdout>,
    patience: Duration,
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
        Ok(Self {
            child,
            input,
            lines,
            patience: PATIENCE,
        })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Pins the process' vCPU to one processor and all its other threads, including later ones, to
    /// another. When the scheduler puts both on the same processor, a request takes 50 % longer,
    /// and this placement persists at random. It would dominate the measurement.
    pub fn part(&self) -> Result<()> {
        let [vcpu, others] = processors()?;
        let mut found = false;
        let tasks = format!("/proc/{}/task", self.pid());
        for task in fs::read_dir(tasks).context("list the threads")? {
            let task = task?;
            let name = fs::read_to_string(task.path().join("comm")).context("read a thread's name")?;
            // Ours, and QEMU's.
            let is_vcpu = name.starts_with("vcpu-") || name.contains("/KVM");
            found |= is_vcpu;
            let mut set = CpuSet::new();
            set.set(if is_vcpu { vcpu } else { others });
            let thread = task.file_name().to_string_lossy().parse().ok();
            let thread = thread.and_then(Pid::from_raw).context("a thread's number")?;
            sched_setaffinity(Some(thread), &set).context("place a thread")?;
        }
        ensure!(found, "no thread is called like a vCPU's");
        Ok(())
    }

    /// Types a line on the guest's console.
    pub fn type_line(&mut self, line: &str) -> Result<()> {
        self.input
            .write_all(format!("{line}\n").as_bytes())
            .context("type")?;
        self.input.flush().context("type")
    }

    /// Reads on until a line has the marker, and returns that line. Fails with [`Unheard`] when none comes in time.
    pub fn wait_for(&mut self, marker: &str) -> Result<String> {
        let text = self.text_until(marker)?;
        Ok(text.lines().next_back().unwrap_or_default().to_owned())
    }

    /// Reads on until a line has the marker, and returns all lines up to it. Fails with [`Unheard`] when none comes in
    /// time.
    pub fn text_until(&mut self, marker: &str) -> Result<String> {
        self.read_until(marker, true)
    }

    /// The same up to where the marker has come, in a line that has not ended either, as that of a prompt.
    pub fn prompt(&mut self, marker: &str) -> Result<String> {
        self.read_until(marker, false)
    }

    fn read_until(&mut self, marker: &str, whole: bool) -> Result<String> {
        let deadline = Instant::now() + self.patience;
        let mut text = String::new();
        let mut line = Vec::new();
        loop {
            if self.lines.buffer().is_empty() && !self.has_more(deadline)? {
                text += &String::from_utf8_lossy(&line);
                bail!(Unheard {
                    marker: marker.to_owned(),
                    text
                });
            }
            let read = self.lines.fill_buf()?;
            if read.is_empty() {
                text += &String::from_utf8_lossy(&line);
                bail!("it ended before it printed {marker}:\n{text}");
            }
            let end = read.iter().position(|byte| *byte == b'\n');
            let taken = end.map_or(read.len(), |end| end + 1);
            line.extend(read.iter().take(taken));
            self.lines.consume(taken);
            if end.is_none() && whole {
                continue;
            }
            let read = String::from_utf8_lossy(&line);
            if read.contains(marker) {
                return Ok(text + &read);
            }
            if end.is_some() {
                text += &read;
                line.clear();
            }
        }
    }

    /// Waits until it has printed more, or has ended.
    fn has_more(&self, deadline: Instant) -> Result<bool> {
        let mut polled = [PollFd::new(self.lines.get_ref(), PollFlags::IN)];
        let left = deadline.saturating_duration_since(Instant::now());
        let heard = poll(&mut polled, Some(&left.try_into()?)).context("wait for what it prints")?;
        Ok(heard > 0 && !left.is_zero())
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

/// How often a start without a first instruction is tried again: an emulated node loses a guest once in a great while.
const TRIES: u32 = 3;

/// Microseconds from just before the process is started until its guest's first instruction.
pub fn first_instruction(subject: &Subject) -> Result<u128> {
    let mut tries = 1;
    loop {
        match try_first_instruction(subject) {
            Err(error) if tries < TRIES => eprintln!("{}, try {tries}: {error:#}", subject.name),
            measured => return measured,
        }
        tries += 1;
    }
}

fn try_first_instruction(subject: &Subject) -> Result<u128> {
    let mut tracer = trace::FirstEntry::new()?;
    let begin = trace::now();
    let running = Running::new(subject)?;
    let process = Pid::from_child(&running.child);
    let process = pidfd_open(process, PidfdFlags::empty()).context("watch the process")?;
    loop {
        let left = running
            .patience
            .saturating_sub(trace::now().saturating_sub(begin));
        let mut polled = [
            PollFd::new(&tracer, PollFlags::IN),
            PollFd::new(&process, PollFlags::IN),
        ];
        let news = poll(&mut polled, Some(&left.try_into()?)).context("wait for the first instruction")?;
        let [_, process] = polled;
        let ended = !process.revents().is_empty();
        if let Some(first) = tracer.poll()? {
            return Ok(first.saturating_sub(begin).as_micros());
        }
        if ended {
            bail!("it ended before its guest's first instruction");
        }
        if news == 0 {
            bail!("its guest had no first instruction in time");
        }
    }
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
    Ok(Start {
        first_instruction_us,
        init_us,
        exits_to_init,
        idle_exits_per_second,
        memory: memory::of(pid)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A subject that is a shell script.
    fn running(script: &str) -> Running {
        let subject = Subject {
            name: "script",
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into()],
            image: None,
        };
        Running::new(&subject).expect("starts")
    }

    #[test]
    fn lines_are_read_up_to_the_marker_and_no_further() {
        let mut running = running("printf 'a\\nb MARK c\\nrest'; printf ' MARK\\n'");
        assert_eq!(running.text_until("MARK").expect("comes"), "a\nb MARK c\n");
        assert_eq!(running.wait_for("MARK").expect("comes"), "rest MARK");
    }

    #[test]
    fn a_prompt_has_no_end_of_its_line() {
        let mut running = running("printf 'a\\nro'; printf 'ot@guest:~# '; exec sleep 600");
        running.patience = Duration::from_secs(30);
        let text = running.prompt("root@guest").expect("comes");
        assert!(text.starts_with("a\nroot@guest"), "{text}");
    }

    #[test]
    fn ended_program_differs_from_one_that_prints_other_lines() {
        let mut ends = running("echo before; printf half");
        let error = ends.wait_for("MARK").expect_err("it ended");
        assert!(!error.is::<Unheard>());
        assert_eq!(
            error.to_string(),
            "it ended before it printed MARK:\nbefore\nhalf"
        );

        for script in ["exec sleep 600", "while sleep 0.01; do echo watchdog; done"] {
            let mut goes_on = running(script);
            goes_on.patience = Duration::from_millis(100);
            let error = goes_on.wait_for("MARK").expect_err("it never comes");
            assert!(error.is::<Unheard>(), "{script}: {error}");
            assert!(error.to_string().starts_with("it did not print MARK in time"));
        }
    }
}

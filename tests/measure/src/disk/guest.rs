//! A subject's guest that runs only when it is its turn.

use std::{
    error, fmt, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    process::{Signal, WaitId, WaitIdOptions, kill_process, waitid},
    thread::Pid,
};

use super::{
    counters::{Counters, disk_bytes},
    job::Job,
};
use crate::{
    run::{Running, Unheard},
    vmm::Subject,
};

/// How long it runs in one go. The longest silence that a guest sees is this times the number of the others, far from what
/// its kernel would complain of.
const SLICE: Duration = Duration::from_millis(250);
/// When fio has not begun by then, it won't.
const PATIENCE: Duration = Duration::from_secs(120);
/// A job has begun when it has made so many requests.
const BEGUN: u64 = 100;

/// A guest does nothing any more.
#[derive(Debug)]
pub struct StoodStill {
    /// The subject's name.
    pub subject: &'static str,
}

impl fmt::Display for StoodStill {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: its guest stands still", self.subject)
    }
}

impl error::Error for StoodStill {}

/// See the module. Waits for the guest fail with [`StoodStill`] when it hangs.
pub struct Guest<'a> {
    /// The guest's subject.
    pub subject: &'a Subject,
    running: Running,
    pid: Pid,
}

impl<'a> Guest<'a> {
    /// Begins to boot.
    pub fn new(subject: &'a Subject) -> Result<Self> {
        let running = Running::new(subject)?;
        let pid = i32::try_from(running.pid()).ok().and_then(Pid::from_raw);
        Ok(Self {
            subject,
            pid: pid.context("a process has a number")?,
            running,
        })
    }

    /// Waits until it is up, has each thread stay where it is, and stops it.
    pub fn settle(&mut self) -> Result<()> {
        self.wait_for("GUEST-READY")?;
        self.running.part()?;
        self.stop()
    }

    /// Begins a job; once it is under way, the guest is stopped.
    pub fn begin(&mut self, job: &Job) -> Result<()> {
        let before = disk_bytes(self.running.pid())?;
        self.go_on()?;
        self.running
            .type_line(&format!("{} & echo BEGINS-$((1 + 1))", job.command()))?;
        self.wait_for("BEGINS-2")?;
        let begin = Instant::now();
        while job.requests(disk_bytes(self.running.pid())? - before) < BEGUN {
            if begin.elapsed() > PATIENCE {
                self.running.type_line("cat /tmp/fio; echo TOLD-$((1 + 1))")?;
                let text = self.wait_for("TOLD-2")?;
                bail!("{}: {} does not begin: {text}", self.subject.name, job.name);
            }
            thread::sleep(Duration::from_millis(10));
        }
        self.stop()
    }

    /// Ends the job that was begun. The guest is stopped.
    pub fn end(&mut self) -> Result<()> {
        self.go_on()?;
        self.running
            .type_line("kill $!; wait $!; echo ENDED-$((1 + 1))")?;
        self.wait_for("ENDED-2")?;
        self.stop()
    }

    /// Resumes the guest for a slice. Returns the elapsed time and the costs, with at least one
    /// request.
    pub fn slice(&mut self, job: &Job) -> Result<(Duration, Counters)> {
        let before = Counters::read(self.running.pid())?;
        let mut time = Duration::ZERO;
        // The host may have taken the processor away for all of one.
        for _ in 0..2 {
            let begin = Instant::now();
            self.go_on()?;
            thread::sleep(SLICE);
            self.stop()?;
            time += begin.elapsed();
            let cost = Counters::read(self.running.pid())?.since(&before);
            if job.requests(cost.disk_bytes) > 0 {
                return Ok((time, cost));
            }
        }
        bail!(self.stood_still())
    }

    /// Returns the output up to a line with the marker.
    fn wait_for(&mut self, marker: &str) -> Result<String> {
        self.running.text_until(marker).map_err(|error| {
            if error.is::<Unheard>() {
                eprintln!("{}: {error}", self.subject.name);
                self.stood_still().into()
            } else {
                error.context(self.subject.name)
            }
        })
    }

    fn stood_still(&self) -> StoodStill {
        StoodStill {
            subject: self.subject.name,
        }
    }

    fn go_on(&self) -> Result<()> {
        kill_process(self.pid, Signal::CONT).context("have a VMM go on")
    }

    /// Returns when all its threads have stopped.
    fn stop(&self) -> Result<()> {
        kill_process(self.pid, Signal::STOP).context("stop a VMM")?;
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(self.pid), stopped).context("wait until a VMM has stopped")?;
        ensure!(
            status.is_some_and(|status| status.stopped()),
            "{} has ended",
            self.subject.name
        );
        // Consumes the stop, so that the next stop is reported as well.
        waitid(WaitId::Pid(self.pid), WaitIdOptions::STOPPED).context("wait for a VMM")?;
        Ok(())
    }
}

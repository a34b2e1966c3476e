//! Cost of a screen with a viewer: the same guest draws the same content under our VMM and under
//! QEMU, while a VNC client requests each change as soon as it has the previous one.

pub mod client;
pub mod desktop;
pub mod draw;
mod flood;

use std::{
    collections::BTreeMap,
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use self::client::{Client, HEXTILE, RAW, TIGHT, ZRLE};
use crate::{
    disk::counters::Counters,
    run::Running,
    vmm::{OURS, Subject, socket},
};

/// Requested encodings and their names.
pub const ENCODINGS: [(&str, i32); 4] = [
    ("raw", RAW),
    ("hextile", HEXTILE),
    ("tight", TIGHT),
    ("zrle", ZRLE),
];
/// Screen contents during the measurement.
pub const SHOWN: [&str; 2] = ["text", "pictures"];

/// Before a measurement, so that it is under way.
const SETTLE: Duration = Duration::from_secs(1);
/// What is measured.
const TIME: Duration = Duration::from_secs(3);
/// The same of a screen on which nothing changes.
const IDLE: Duration = Duration::from_secs(10);
/// Keys that are pressed one after the other.
const KEYS: u32 = 20;
/// Lines that are printed on a console.
const LINES: u32 = 300;

/// Results of one job in one turn: figures by name.
#[derive(Serialize)]
pub struct Cost {
    job: String,
    figures: BTreeMap<&'static str, f64>,
}

struct Guest<'a> {
    subject: &'a Subject,
    running: Running,
}

/// Boots all guests, and runs each job on each guest in turn. Passes each cost to `each`.
pub fn run(subjects: &[&Subject], turns: u32, each: impl Fn(&str, u32, &Cost)) -> Result<()> {
    let mut guests = Vec::new();
    for subject in subjects {
        let running = Running::new(subject)?;
        guests.push(Guest { subject, running });
    }
    for guest in &mut guests {
        let up = guest.running.text_until("GUEST-READY");
        up.with_context(|| format!("{}: boot", guest.subject.name))?;
        // The console neither goes dark nor has a cursor that blinks.
        guest.order("printf '\\033[?25l\\033[9;0]\\033[14;0]\\033[2J' >/dev/tty1")?;
        // A client that comes lets threads start, which are to be placed too.
        let mut client = Client::connect(&socket(guest.subject.name), ZRLE)?;
        client.ask(false)?;
        ensure!(client.update_within(Duration::from_secs(30))?, "no picture");
        guest.running.part()?;
    }
    for turn in 0..turns {
        // None is always the one that comes after the same other.
        guests.rotate_left(1);
        for guest in &mut guests {
            let name = guest.subject.name;
            let tell = |cost: Result<Cost>| -> Result<()> {
                each(name, turn, &cost.with_context(|| name.to_owned())?);
                Ok(())
            };
            for shown in SHOWN {
                for encoding in ENCODINGS {
                    tell(guest.shows(shown, &format!("measure draw {shown}"), encoding))?;
                }
            }
            tell(guest.idles())?;
            tell(guest.echoes())?;
            for console in ["ttyS0", "hvc0"] {
                tell(guest.prints(console))?;
            }
            // QEMU's character device has one reader at most.
            if guest.subject.name == OURS {
                for cost in guest.floods(turn)? {
                    tell(Ok(cost))?;
                }
            }
        }
    }
    Ok(())
}

impl Guest<'_> {
    /// Has the guest's shell do something, and waits until it is done.
    fn order(&mut self, command: &str) -> Result<()> {
        // The quotes keep the marker out of the console's echo.
        self.running.type_line(&format!("{command}; echo OR''DERED"))?;
        self.running.text_until("ORDERED").map(drop)
    }

    /// The guest draws by a command that does not end, and a client sees it.
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    fn shows(&mut self, shown: &str, draw: &str, (name, encoding): (&str, i32)) -> Result<Cost> {
        self.order(&format!("{draw} & PID=$!"))?;
        let mut client = Client::connect(&socket(self.subject.name), encoding)?;
        client.ask(false)?;
        let (frames, time, bytes, cost) = self.look(&mut client).context(format!("{shown}, {name}"))?;
        drop(client);
        self.order("kill $PID; wait $PID")?;
        ensure!(frames > 0, "{shown}, {name}: no update came");
        let each = |value: f64| value / frames as f64;
        let exits = cost.kvm.get("exits").copied().unwrap_or(0);
        Ok(Cost {
            job: format!("{shown}, {name}"),
            figures: BTreeMap::from([
                ("us_per_frame", each(time.as_secs_f64() * 1e6)),
                ("bytes_per_second", bytes as f64 / time.as_secs_f64()),
                ("host_cpu_us_per_second", cost.cpu_us / time.as_secs_f64()),
                ("exits_per_second", exits as f64 / time.as_secs_f64()),
            ]),
        })
    }

    /// Returns the number of updates, their time and bytes, and their cost in the VMM.
    fn look(&self, client: &mut Client) -> Result<(u64, Duration, u64, Counters)> {
        let begin = Instant::now();
        while begin.elapsed() < SETTLE {
            if client.update_within(SETTLE)? {
                client.ask(true)?;
            }
        }
        let (begin, bytes) = (Instant::now(), client.received());
        let counters = Counters::read(self.running.pid())?;
        let mut frames = 0;
        while begin.elapsed() < TIME {
            if client.update_within(TIME.saturating_sub(begin.elapsed()))? {
                frames += 1;
                client.ask(true)?;
            }
        }
        let cost = Counters::read(self.running.pid())?.since(&counters);
        Ok((frames, begin.elapsed(), client.received() - bytes, cost))
    }

    /// A client waits for changes of a static screen.
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    fn idles(&mut self) -> Result<Cost> {
        self.order("printf '\\033[2J' >/dev/tty1")?;
        let mut client = Client::connect(&socket(self.subject.name), ZRLE)?;
        client.ask(false)?;
        let begin = Instant::now();
        while begin.elapsed() < SETTLE {
            if client.update_within(SETTLE)? {
                client.ask(true)?;
            }
        }
        let (counters, sleeps, begin) = (
            Counters::read(self.running.pid())?,
            self.sleeps()?,
            Instant::now(),
        );
        let updates = u32::from(client.update_within(IDLE)?);
        thread::sleep(IDLE.saturating_sub(begin.elapsed()));
        let cost = Counters::read(self.running.pid())?.since(&counters);
        let sleeps = self.sleeps()?.saturating_sub(sleeps);
        Ok(Cost {
            job: "idle".into(),
            figures: BTreeMap::from([
                ("host_cpu_us_per_second", cost.cpu_us / IDLE.as_secs_f64()),
                ("sleeps_per_second", sleeps as f64 / IDLE.as_secs_f64()),
                ("updates", f64::from(updates)),
            ]),
        })
    }

    /// How often all threads but vCPUs went to sleep so far.
    fn sleeps(&self) -> Result<u64> {
        let mut sum = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.running.pid())).context("list the threads")? {
            let task = task?.path();
            let name = fs::read_to_string(task.join("comm")).unwrap_or_default();
            if name.starts_with("vcpu-") || name.contains("/KVM") {
                continue;
            }
            let status = fs::read_to_string(task.join("status")).unwrap_or_default();
            let count = status
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            sum += count.and_then(|count| count.trim().parse().ok()).unwrap_or(0);
        }
        Ok(sum)
    }

    /// A key is pressed, and the text console shows its letter. The median of some.
    fn echoes(&mut self) -> Result<Cost> {
        self.order("cat </dev/tty1 >/dev/null & PID=$!")?;
        let mut client = Client::connect(&socket(self.subject.name), ZRLE)?;
        client.ask(false)?;
        ensure!(client.update_within(Duration::from_secs(30))?, "no picture");
        let mut times = Vec::new();
        for _ in 0..KEYS {
            client.ask(true)?;
            // Drains the pending updates.
            while client.update_within(Duration::from_millis(200))? {
                client.ask(true)?;
            }
            let begin = Instant::now();
            client.press(u32::from(b'a'))?;
            ensure!(
                client.update_within(Duration::from_secs(30))?,
                "a key that was pressed does not show"
            );
            times.push(begin.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        self.order("kill $PID; wait $PID")?;
        let median = times.get(times.len() / 2).copied().unwrap_or(0.0);
        Ok(Cost {
            job: "key".into(),
            figures: BTreeMap::from([("us", median)]),
        })
    }

    /// Lines on a console without readers.
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    fn prints(&mut self, console: &str) -> Result<Cost> {
        let before = Counters::read(self.running.pid())?;
        self.order(&format!("measure lines /dev/{console} {LINES}"))?;
        let cost = Counters::read(self.running.pid())?.since(&before);
        let exits = cost.kvm.get("exits").copied().unwrap_or(0);
        Ok(Cost {
            job: format!("line on {console}"),
            figures: BTreeMap::from([
                ("exits", exits as f64 / f64::from(LINES)),
                ("host_cpu_us", cost.cpu_us / f64::from(LINES)),
            ]),
        })
    }
}

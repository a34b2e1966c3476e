//! Benchmark of the disk's rings without a guest, compared with the same io_uring without virtio.
//!
//! The benchmark reads 4 KiB blocks at random from one file, at several depths, with the page cache
//! and with direct I/O. It compares two variants:
//!
//! - a loop that only submits and reaps on its own ring;
//! - a virtio-blk device with its worker thread. A thread of the benchmark is the driver.
//!
//! Both variants read into the same guest memory. Each has a second thread that polls: the driver
//! for the device, an observer of the progress for the loop. The benchmark also measures and
//! reports the loop without an observer. The variants take turns in short rounds, because the speed
//! of a shared machine and of each of its processors varies (see [`turns`] and [`places`]). Figures
//! are medians of the rounds. Ratios are medians of the ratios of the rounds. The benchmark also
//! reports the round-trip time of a number between two processors. Each request of the device makes
//! this round trip, the loop's requests do not.
//!
//! Before the disk, the benchmark measures the queue alone and compares it with the crate
//! virtio-queue (see [`queues`]). `--only queues` omits the disk.
//!
//! ```text
//! cargo bench -p vmmd-devices --features testing --bench blk_rings -- [--file PATH] [--mib N]
//!     [--millis N] [--rounds N] [--depth N] [--cache cached|direct] [--driver polling|interrupts]
//! ```
//!
//! The benchmark prints a table on stderr and one JSON object on stdout. CPU time is the time of
//! the thread that serves the disk: the device's worker, or the loop.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod guest;
mod handoff;
mod places;
mod plain;
mod queues;
mod turns;
mod work;

use std::{
    fs::{self, File},
    hint::spin_loop,
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use guest::Wait;
use places::{Places, processors, restore};
use turns::Turns;

/// Bytes of a request.
const BLOCK: u64 = 4096;
/// Where the data of requests is in guest memory, one block for each.
const DATA: u64 = 32 << 20;

/// Results of one run.
#[derive(Clone, Copy, Debug)]
struct Figures {
    requests: u64,
    elapsed: Duration,
    /// CPU time of the thread that serves the disk.
    cpu: Duration,
    /// Notifications by the driver.
    kicks: u64,
}

impl Figures {
    fn per_second(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }

    fn cpu_nanos(&self) -> f64 {
        self.cpu.as_nanos() as f64 / self.requests as f64
    }
}

/// Blocks in an order that is random enough for a disk.
struct Offsets {
    state: u64,
    blocks: u64,
}

impl Offsets {
    fn new(bytes: u64) -> Self {
        Self {
            state: 0x9e37_79b9_7f4a_7c15,
            blocks: bytes / BLOCK,
        }
    }

    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state % self.blocks * BLOCK
    }
}

struct Options {
    file: PathBuf,
    bytes: u64,
    time: Duration,
    rounds: usize,
    depths: Vec<u16>,
    caches: Vec<&'static str>,
    drivers: Vec<Wait>,
    temporary: bool,
}

fn options() -> Options {
    let mut options = Options {
        file: std::env::temp_dir().join(format!("blk-rings-{}", std::process::id())),
        bytes: 256 << 20,
        time: Duration::from_millis(25),
        rounds: 100,
        depths: vec![1, 32],
        caches: vec!["cached", "direct"],
        drivers: vec![Wait::Polling, Wait::Interrupts],
        temporary: true,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--bench" {
            continue;
        }
        let value = arguments
            .next()
            .unwrap_or_else(|| panic!("{argument} needs a value"));
        let number = || {
            value
                .parse::<u64>()
                .unwrap_or_else(|_| panic!("{argument} {value}: no number"))
        };
        match argument.as_str() {
            "--file" => (options.file, options.temporary) = (value.into(), false),
            "--mib" => options.bytes = number() << 20,
            "--millis" => options.time = Duration::from_millis(number()),
            "--rounds" => options.rounds = number().max(1) as usize,
            "--depth" => options.depths = vec![number().clamp(1, 64) as u16],
            "--cache" => options.caches.retain(|cache| *cache == value),
            "--only" if value == "queues" => options.caches.clear(),
            "--driver" => options.drivers.retain(|driver| driver.name() == value),
            _ => {
                panic!(
                    "{argument} is unknown: --file, --mib, --millis, --rounds, --depth, --cache, --driver, --only"
                )
            }
        }
    }
    options
}

/// A file with data in each block.
fn fill(path: &Path, bytes: u64) {
    let mut file = File::create(path).unwrap();
    let data = vec![0x5a; 1 << 20];
    for _ in 0..bytes >> 20 {
        file.write_all(&data).unwrap();
    }
    file.sync_all().unwrap();
}

fn open(path: &Path, direct: bool) -> Option<File> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    File::options().read(true).custom_flags(flags).open(path).ok()
}

/// CPU time that a thread of this process used so far.
fn cpu_time(thread: &Path) -> Duration {
    let text = fs::read_to_string(thread.join("schedstat")).expect("no schedstat: no CPU time of threads");
    let nanos = text.split_whitespace().next().and_then(|word| word.parse().ok());
    Duration::from_nanos(nanos.expect("schedstat"))
}

/// The loop without a thread beside it, the loop, and the device.
type Round = [Figures; 3];

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints the results of the turns and returns them as JSON.
fn row(cache: &str, depth: u16, driver: Wait, turns: &Turns<Round>) -> String {
    let (rounds, disturbed) = (&turns.counted, turns.disturbed);
    let of = |figure: &dyn Fn(&Round) -> f64| median(rounds.iter().map(figure));
    let rates = [0, 1, 2].map(|kind| of(&|round| round[kind].per_second()));
    let cpus = [1, 2].map(|kind| of(&|round| round[kind].cpu_nanos()));
    let ratio = of(&|[_, alone, served]| served.per_second() / alone.per_second());
    let unwatched_ratio = of(&|[unwatched, _, served]| served.per_second() / unwatched.per_second());
    let cpu_ratio = of(&|[_, alone, served]| served.cpu_nanos() / alone.cpu_nanos());
    let kicks = of(&|[_, _, served]| served.kicks as f64 / served.requests as f64);
    let counted = rounds.len();
    let (driver, [unwatched, alone, served], [alone_cpu, served_cpu]) = (driver.name(), rates, cpus);
    eprintln!(
        "{:<30} {unwatched:>10.0}/s {alone:>10.0}/s {served:>10.0}/s {ratio:>6.2} {alone_cpu:>8.0} | {served_cpu:.0}, \
         kicks/request {kicks:.3}, {counted} turns counted and {disturbed} disturbed",
        format!("{cache}, depth {depth}, {driver}"),
    );
    format!(
        r#"{{"cache":"{cache}","depth":{depth},"driver":"{driver}","block_bytes":{BLOCK},"unwatched_ring_per_second":{unwatched:.0},"ring_per_second":{alone:.0},"virtio_per_second":{served:.0},"ratio":{ratio:.3},"unwatched_ratio":{unwatched_ratio:.3},"ring_cpu_ns":{alone_cpu:.0},"virtio_cpu_ns":{served_cpu:.0},"cpu_ratio":{cpu_ratio:.3},"kicks_per_request":{kicks:.4},"turns":{counted},"disturbed":{disturbed}}}"#,
    )
}

/// All three once, the device before the loop or after it.
fn round(
    file: impl Fn() -> File,
    bytes: u64,
    depth: u16,
    driver: Wait,
    time: Duration,
    number: usize,
) -> Round {
    let all = processors();
    let places = Places::new(&all, number / 2 % 2 == 1);
    let served = || guest::run(file(), bytes, depth, driver, time, places);
    let before = (number % 2 == 1).then(served);
    places.serve();
    let unwatched = plain::run(&file(), bytes, depth, time, |_| ());
    let alone = match driver {
        Wait::Polling => plain::run_watched(&file(), bytes, depth, time, places),
        Wait::Interrupts => unwatched,
    };
    let served = before.unwrap_or_else(served);
    restore(&all);
    [unwatched, alone, served]
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, "--serve", ..] = arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        return queues::serve(&arguments[2..]);
    }
    let options = options();
    let fills = options.temporary && !options.caches.is_empty();
    if fills {
        fill(&options.file, options.bytes);
    }
    let queues = queues::run(options.time / 5, options.rounds);
    let mut rows = Vec::new();
    eprintln!(
        "4 KiB random reads             ring alone, watched    virtio-blk        ratio   CPU ns/request"
    );
    for cache in options.caches {
        let direct = cache == "direct";
        for depth in options.depths.clone() {
            let Some(bytes) = open(&options.file, direct).map(|file| file.metadata().unwrap().len()) else {
                eprintln!("{cache}: the file system has no direct I/O");
                continue;
            };
            for driver in options.drivers.clone() {
                let file = || open(&options.file, direct).unwrap();
                let round = |number: usize| round(file, bytes, depth, driver, options.time, number);
                rows.push(row(cache, depth, driver, &turns::take(options.rounds, round)));
            }
        }
    }
    let handoffs = (0..options.rounds).map(|_| handoff::there_and_back(options.time));
    let handoff = median(handoffs);
    eprintln!("a number to the other processor and back: {handoff:.0} ns");
    println!(
        r#"{{"benchmark":"blk_rings","handoff_ns":{handoff:.0},"rows":[{}],"queues":[{}]}}"#,
        rows.join(","),
        queues.join(",")
    );
    if fills {
        let _gone = fs::remove_file(&options.file);
    }
}

/// Between two looks of a thread that polls: gentle to the other thread of its core, where processors share one.
fn between_looks(looks: u64) {
    // The thread that serves the disk may want this processor.
    if looks.is_multiple_of(1 << 14) {
        thread::yield_now();
    }
    for _ in 0..8 {
        spin_loop();
    }
}

/// Runs `step` until the time is over, looking at the clock now and then.
fn repeat(time: Duration, mut step: impl FnMut()) -> Duration {
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            step();
        }
        let elapsed = start.elapsed();
        if elapsed >= time {
            return elapsed;
        }
    }
}

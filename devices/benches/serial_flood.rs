//! Slowdown of a guest that floods its serial port while the port has readers.
//!
//! A thread writes bytes to the port's data register, as a guest does. Turns with ten attached
//! readers, of which five never read, alternate with turns without readers, and the order changes.
//! The thread has a processor of its own. The port's server and the readers share another
//! processor. The first series adds a microsecond per byte, which is the cost of an exit of a guest
//! from a real processor. The second series adds nothing and writes one GiB with readers.
//!
//! `cargo bench -p vmmd-devices --features testing --bench serial_flood` prints one JSON object on
//! stdout: nanoseconds per byte in the time of the writing thread, and the ratio with its
//! quartiles.

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

use std::{
    fmt::Write as _,
    hint::spin_loop,
    io::Read as _,
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use devices::{
    bus::BusDevice as _,
    interrupt::IrqLine,
    serial::{
        SerialPort, Setup,
        history::Capacity,
        log::{DEFAULT_LIMIT, Log},
    },
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Readers that read, and as many that never do.
const READERS: usize = 5;

/// Name of each series, additional cost of a byte, bytes in a turn, and number of turns of each
/// kind.
const WAYS: [(&str, Duration, usize, usize); 2] = [
    ("exit", Duration::from_micros(1), 4 << 20, 8),
    ("none", Duration::ZERO, 64 << 20, 16),
];

struct Line;

impl IrqLine for Line {
    fn pulse(&self) {}
}

/// Pins the calling thread, and the threads that it starts, to one of the processors of the
/// process. `number` is the index in `all`.
fn place(all: &CpuSet, number: usize) {
    let processors: Vec<_> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
    let mut only = CpuSet::new();
    only.set(processors[number % processors.len()]);
    sched_setaffinity(None, &only).expect("place a thread");
}

/// Nanoseconds for each byte.
fn flood(all: &CpuSet, readers: bool, exit: Duration, bytes: usize) -> f64 {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("console.sock");
    let [current, older] = [(); 2].map(|()| tempfile::tempfile().expect("a log"));
    let setup = Setup {
        listener: Some(UnixListener::bind(&path).expect("a socket").into()),
        terminal: None,
        log: Some(Log::new(current, Some(older), DEFAULT_LIMIT).expect("a log")),
        watch: None,
    };
    let port = SerialPort::start(Arc::new(Line), Capacity::default(), setup).expect("a port");
    let attach = || {
        let mut client = UnixStream::connect(&path).expect("attach");
        // The port serves the client as soon as the length of the earlier output arrives.
        client.read_exact(&mut [0; 8]).expect("attached");
        client
    };
    let count = if readers { READERS } else { 0 };
    let _silent: Vec<_> = (0..count).map(|_| attach()).collect();
    let lively = (0..count).map(|_| {
        let client = attach();
        let mut reads = client.try_clone().expect("a descriptor");
        let thread = thread::spawn(move || {
            let (mut chunk, mut bytes) = (vec![0; 64 << 10], 0);
            while let Ok(count @ 1..) = reads.read(&mut chunk) {
                bytes += count;
            }
            bytes
        });
        (client, thread)
    });
    let lively: Vec<_> = lively.collect();
    let uart = port.device();
    let guest = thread::spawn({
        let all = *all;
        move || {
            place(&all, 0);
            let begin = Instant::now();
            for number in 0..bytes {
                let byte = if number % 80 == 79 { b'\n' } else { b'.' };
                let _ = uart.lock().expect("the port").write(0, &[byte]);
                // The exit's time starts after the device's work.
                let written = (!exit.is_zero()).then(Instant::now);
                while written.is_some_and(|written| written.elapsed() < exit) {
                    spin_loop();
                }
            }
            begin.elapsed()
        }
    });
    let time = guest.join().expect("the guest");
    for (client, thread) in lively {
        client.shutdown(Shutdown::Both).expect("detach");
        assert!(thread.join().expect("a reader") > 0, "a reader got nothing");
    }
    drop(port);
    time.as_nanos() as f64 / bytes as f64
}

fn quantile(sorted: &[f64], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}

fn main() {
    let all = sched_getaffinity(None).expect("the processors");
    place(&all, 1);
    let mut rows = String::new();
    for (name, exit, bytes, turns) in WAYS {
        let turns: Vec<[f64; 2]> = (0..turns)
            .map(|turn| {
                let first = turn % 2 == 0;
                let times = [first, !first].map(|readers| flood(&all, readers, exit, bytes));
                if first { times } else { [times[1], times[0]] }
            })
            .collect();
        let sorted = |value: &dyn Fn(&[f64; 2]) -> f64| {
            let mut values: Vec<_> = turns.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let ratios = sorted(&|[read, alone]| read / alone);
        let [low, middle, high] = [0.25, 0.5, 0.75].map(|part| quantile(&ratios, part));
        let [read, alone] = [0, 1].map(|index| quantile(&sorted(&|turn| turn[index]), 0.5));
        write!(
            rows,
            r#"{}{{"exit":"{name}","mib":{},"read_ns":{read:.2},"alone_ns":{alone:.2},"ratio":[{low:.4},{middle:.4},{high:.4}]}}"#,
            if rows.is_empty() { "" } else { "," },
            (bytes * turns.len()) >> 20,
        )
        .expect("text");
    }
    println!(r#"{{"bench":"serial_flood","rows":[{rows}]}}"#);
}

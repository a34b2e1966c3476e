//! Evaluation of the pacing policy with a discrete-event model of driver, worker and device. The
//! model covers a grid of devices, hosts and loads. It compares the policy with two other policies
//! and with an informed policy, which has information that a worker cannot have.

mod current;
mod machine;
mod others;

use std::thread;

use self::{
    current::{Current, Informed},
    machine::{Outcome, run},
    others::{AlwaysPoll, NeverHold},
};

pub use self::machine::Point;

const US: u64 = 1000;

/// All points of the grid.
pub(super) fn grid() -> Vec<Point> {
    let mut points = Vec::new();
    for processors in [1, 2] {
        for serial in [false, true] {
            for latency in [10, 30, 100, 300, 1000, 10_000] {
                for exit in [1000, 7000, 50_000] {
                    for interrupt in [500, 7000, 100_000] {
                        points.extend([1, 4, 16, 32, 128].map(|depth| Point {
                            latency: latency * US,
                            exit,
                            interrupt,
                            depth,
                            processors,
                            serial,
                        }));
                    }
                }
            }
        }
    }
    points
}

/// Results of each policy for one point.
pub(super) struct Row {
    pub(super) point: Point,
    never: Outcome,
    always: Outcome,
    informed: Outcome,
    new: Outcome,
}

impl Row {
    fn of(point: Point) -> Self {
        let requests = 1500 + 10 * point.depth;
        Self {
            point,
            never: run(point, requests, &mut NeverHold),
            always: run(point, requests, &mut AlwaysPoll),
            informed: run(point, requests, &mut Informed::default()),
            new: run(point, requests, &mut Current::default()),
        }
    }

    /// Returns the throughputs of the current policy and of the informed policy, relative to the
    /// better of two baselines: never holding completions back, and always polling.
    pub(super) fn parts(&self) -> [f64; 2] {
        let best = self.never.throughput.max(self.always.throughput);
        [self.new, self.informed].map(|outcome| outcome.throughput / best)
    }

    /// Whether completions were never held back longer than a sixteenth of what requests take from the driver's point of
    /// view. A worker finds out that it is time when it is done with a round.
    pub(super) fn holds_briefly(&self) -> bool {
        const ROUND: u64 = 5 * US;
        self.new.held <= self.new.median / 16 + ROUND
    }

    /// Returns the policy's additional p99 compared with never holding back, relative to a
    /// request's time at the device, its queue included.
    pub(super) fn added(&self) -> f64 {
        (self.new.p99 as f64 - self.never.p99 as f64) / self.never.device as f64
    }
}

/// Simulates all of `points`, on two threads.
pub(super) fn simulate(points: &[Point]) -> Vec<Row> {
    let rows = |points: &[Point]| points.iter().copied().map(Row::of).collect::<Vec<_>>();
    let (one, other) = points.split_at(points.len() / 2);
    thread::scope(|scope| {
        let first = scope.spawn(|| rows(one));
        let second = rows(other);
        let mut all = first.join().expect("a half of the grid");
        all.extend(second);
        all
    })
}

/// Which part of `rows` is so.
pub(super) fn share<'a>(rows: impl IntoIterator<Item = &'a Row>, is: impl Fn(&Row) -> bool) -> f64 {
    let (mut all, mut some) = (0_u32, 0_u32);
    for row in rows {
        all += 1;
        some += u32::from(is(row));
    }
    f64::from(some) / f64::from(all)
}

#[cfg(test)]
mod tests;

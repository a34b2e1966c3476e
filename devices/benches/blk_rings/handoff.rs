//! Cost of the hand-off between a driver and a device on two processors.

use std::{
    hint::spin_loop,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use super::repeat;

/// Says that the thread is to end.
const OVER: u64 = u64::MAX;

/// A number in cache lines of its own, also where the processor fetches lines in pairs.
#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU64);

impl Line {
    /// Waits for another number than `last`.
    fn next(&self, last: u64) -> u64 {
        let mut looks = 0_u64;
        loop {
            let number = self.0.load(Ordering::Acquire);
            if number != last {
                return number;
            }
            looks += 1;
            if looks.is_multiple_of(1 << 14) {
                // Where there is one processor only.
                thread::yield_now();
            }
            spin_loop();
        }
    }
}

/// How long a number takes to another thread, and from there back, in nanoseconds.
pub(super) fn there_and_back(time: Duration) -> f64 {
    let (there, back) = (Line::default(), Line::default());
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = 0;
            while number != OVER {
                number = there.next(number);
                back.0.store(number, Ordering::Release);
            }
        });
        let mut number = 0;
        let elapsed = repeat(time, || {
            there.0.store(number + 1, Ordering::Release);
            number = back.next(number);
        });
        there.0.store(OVER, Ordering::Release);
        elapsed.as_nanos() as f64 / number as f64
    })
}

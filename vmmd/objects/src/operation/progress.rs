//! Progress and rate of an operation.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use vmmd_api::v1::{OperationProgress, ProgressUnit};

/// How much of an operation is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    unit: ProgressUnit,
    done: u64,
    total: u64,
}

impl Progress {
    /// Steps of which each may take differently long.
    pub const fn steps(done: u64, total: u64) -> Self {
        Self::of(ProgressUnit::Steps, done, total)
    }

    /// Bytes; a total of 0 is not known.
    pub const fn bytes(done: u64, total: u64) -> Self {
        Self::of(ProgressUnit::Bytes, done, total)
    }

    /// VMs.
    pub const fn vms(done: u64, total: u64) -> Self {
        Self::of(ProgressUnit::Vms, done, total)
    }

    const fn of(unit: ProgressUnit, done: u64, total: u64) -> Self {
        Self { unit, done, total }
    }

    /// 0 to 99: only the end is 100.
    fn percent(self) -> u32 {
        let done = u128::from(self.done) * 100;
        let percent = done.checked_div(u128::from(self.total)).unwrap_or(0).min(99);
        u32::try_from(percent).unwrap_or(99)
    }
}

/// Shortest time between two reports of a number of bytes.
const APART: Duration = Duration::from_millis(100);
/// The rate is that of this time.
const WINDOW: Duration = Duration::from_secs(5);

/// Measures the rate of an operation, and limits the reports of its progress.
#[derive(Debug, Default)]
pub struct Meter {
    /// Reports in the last [`WINDOW`], oldest first.
    told: VecDeque<(Instant, u64)>,
}

impl Meter {
    /// Returns the progress to report for `now`, after `before`. `None` too soon after the last
    /// report, unless there is `more` to report.
    pub fn take(
        &mut self,
        now: Progress,
        before: Option<&OperationProgress>,
        more: bool,
    ) -> Option<OperationProgress> {
        self.at(now, before, more, Instant::now())
    }

    fn at(
        &mut self,
        now: Progress,
        before: Option<&OperationProgress>,
        more: bool,
        time: Instant,
    ) -> Option<OperationProgress> {
        let percent = before.map_or(0, |before| before.percent);
        let mut progress = OperationProgress {
            percent: now.percent().max(percent),
            done: now.done,
            total: now.total,
            unit: now.unit.into(),
            per_second: 0,
        };
        if now.unit != ProgressUnit::Bytes {
            self.told.clear();
            return Some(progress);
        }
        let soon = self.told.back().is_some_and(|(last, _)| time - *last < APART);
        if soon && !more && now.done != now.total {
            return None;
        }
        while self.told.len() > 1 && self.told.front().is_some_and(|(first, _)| time - *first > WINDOW) {
            self.told.pop_front();
        }
        if let Some((first, done)) = self.told.front() {
            let took = (time - *first).as_millis().max(1);
            let rate = u128::from(now.done.saturating_sub(*done)) * 1000 / took;
            progress.per_second = u64::try_from(rate).unwrap_or(u64::MAX);
        }
        self.told.push_back((time, now.done));
        Some(progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_comes_from_the_count_and_never_goes_back() {
        let mut meter = Meter::default();
        let mut before = None;
        for (now, percent) in [
            (Progress::steps(1, 4), 25),
            (Progress::steps(1, 8), 25),
            (Progress::steps(4, 4), 99),
            (Progress::bytes(5, 0), 99),
        ] {
            let told = meter.take(now, before.as_ref(), true).unwrap();
            assert_eq!(told.percent, percent, "{now:?}");
            before = Some(told);
        }
        assert_eq!(Progress::bytes(u64::MAX - 1, u64::MAX).percent(), 99);
    }

    #[test]
    fn rate_is_that_of_the_last_seconds() {
        let start = Instant::now();
        let mut meter = Meter::default();
        let mut at = |done, ms| {
            let time = start + Duration::from_millis(ms);
            let told = meter.at(Progress::bytes(done, 1 << 40), None, false, time);
            told.map(|told| told.per_second)
        };
        assert_eq!(at(0, 0), Some(0));
        assert_eq!(at(10, 50), None);
        assert_eq!(at(1000, 100), Some(10_000));
        assert_eq!(at(10_000, 1000), Some(10_000));
        // Old reports do not count.
        assert_eq!(at(10_000, 5900), Some(0));
        let (done, all) = (1 << 40, start + Duration::from_millis(5901));
        assert!(meter.at(Progress::bytes(done, done), None, false, all).is_some());
    }
}

//! vCPUs that stand still for a part of the time, so that the guest of a migration changes its memory more slowly than it is sent.

use std::time::{Duration, Instant};

/// A turn of running and standing still. A guest whose vCPUs stand still for 99 % of the time has a pause of 99 ms then; QEMU's have one of
/// almost a second.
const TURN: Duration = Duration::from_millis(100);

/// See the module. The machine's owner stops and releases the vCPUs when a change is due.
#[derive(Debug)]
pub(super) struct Throttle {
    /// The part of the time in which they stand still, 1 to 99.
    percent: u32,
    stands: bool,
    due: Instant,
}

impl Throttle {
    /// Throttle of vCPUs that run at `now`. `None` for 0.
    pub fn new(percent: u8, now: Instant) -> Option<Self> {
        let percent = u32::from(percent.min(99));
        (percent > 0).then(|| Self {
            percent,
            stands: false,
            due: now + TURN * (100 - percent) / 100,
        })
    }

    /// Changes the part of the time, from the next change on.
    pub fn set(&mut self, percent: u8) {
        self.percent = u32::from(percent.clamp(1, 99));
    }

    /// Whether the vCPUs stand still.
    pub fn stands(&self) -> bool {
        self.stands
    }

    /// When they are to be stopped or released.
    pub fn due(&self) -> Instant {
        self.due
    }

    /// Whether the vCPUs are to stand still from `now` on; none when nothing is due yet.
    pub fn turn(&mut self, now: Instant) -> Option<bool> {
        if now < self.due {
            return None;
        }
        self.stands = !self.stands;
        let percent = if self.stands {
            self.percent
        } else {
            100 - self.percent
        };
        // A late call is not compensated: the vCPUs get their running time in any case.
        self.due = now + TURN * percent / 100;
        Some(self.stands)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For how long they stand still in ten seconds, looked at each millisecond.
    fn still(percent: u8) -> u32 {
        let began = Instant::now();
        let Some(mut throttle) = Throttle::new(percent, began) else {
            return 0;
        };
        let mut still = 0;
        for ms in 0..10_000 {
            let _change = throttle.turn(began + Duration::from_millis(ms));
            still += u32::from(throttle.stands());
        }
        still
    }

    #[test]
    fn vcpus_stand_still_for_their_part_of_the_time() {
        for percent in [0, 1, 20, 50, 99] {
            let (ms, wanted) = (still(percent), u32::from(percent) * 100);
            assert!(ms.abs_diff(wanted) <= 100, "{percent}: {ms} ms");
        }
        assert_eq!(still(255), still(99), "they run at times");
    }

    #[test]
    fn a_change_holds_from_the_next_turn_on() {
        let now = Instant::now();
        let mut throttle = Throttle::new(20, now).unwrap();
        throttle.set(90);
        assert_eq!(throttle.due(), now + TURN * 80 / 100);
        assert_eq!(throttle.turn(now), None);
        assert_eq!(throttle.turn(now + TURN), Some(true));
        assert_eq!(throttle.due(), now + TURN + TURN * 90 / 100);
        assert_eq!(throttle.turn(now + 2 * TURN), Some(false));
        assert_eq!(throttle.due(), now + 2 * TURN + TURN * 10 / 100);
    }
}

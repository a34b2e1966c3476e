//! The node's clocks. The wall clock may be set at any time. The time since the boot of the node runs evenly, also while the node sleeps, so
//! it says how long a run lasts.

use std::{io, time::Duration};

use rustix::{
    fd::OwnedFd,
    io::Errno,
    time::{
        ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
        timerfd_create, timerfd_settime,
    },
};
use tokio::{io::unix::AsyncFd, sync::watch};

use crate::text;

use crate::sys;

/// Two clocks are read one after the other, so differences below are no step of the wall clock.
const TOLERANCE_MS: u64 = 1000;
/// Time between two tries to watch the clock.
const RETRY: Duration = Duration::from_secs(60);

/// Milliseconds since the boot of the node; at least 1.
pub fn since_boot_ms() -> u64 {
    let since = Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// Milliseconds since a moment of this boot; 0 for a moment that is unknown.
pub fn elapsed_ms(since_boot: u64) -> Option<u64> {
    (since_boot != 0).then(|| since_boot_ms().saturating_sub(since_boot))
}

/// A moment in milliseconds of Unix time as the wall clock would show it today: it was recorded as `wall_ms`, and as `since_boot` of this boot,
/// which is 0 when it is unknown.
pub fn shown_ms(wall_ms: u64, since_boot: u64) -> u64 {
    match elapsed_ms(since_boot) {
        Some(elapsed) => after_steps(wall_ms, text::now_ms().saturating_sub(elapsed)),
        None => wall_ms,
    }
}

/// The recorded time, unless the wall clock was set since then.
fn after_steps(recorded: u64, computed: u64) -> u64 {
    if recorded.abs_diff(computed) > TOLERANCE_MS {
        computed
    } else {
        recorded
    }
}

/// Notifies `steps` of each change of the wall clock. Never ends.
pub async fn watch_steps(steps: watch::Sender<()>) {
    loop {
        let Err(error) = wait_for_steps(&steps).await;
        tracing::warn!(%error, "watch the node's clock: the start times of VMs are those before the clock was set");
        tokio::time::sleep(RETRY).await;
    }
}

async fn wait_for_steps(steps: &watch::Sender<()>) -> io::Result<std::convert::Infallible> {
    let timer = timer()?;
    loop {
        let mut ready = timer.readable().await?;
        match rustix::io::read(timer.get_ref(), &mut [0_u8; 8]) {
            Err(Errno::CANCELED) => {
                arm(timer.get_ref())?;
                steps.send_replace(());
            }
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(_) => arm(timer.get_ref())?,
        }
    }
}

/// A timer that never expires, and is cancelled when the wall clock is set (timerfd_create(2)).
fn timer() -> io::Result<AsyncFd<OwnedFd>> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    let timer = timerfd_create(TimerfdClockId::Realtime, flags)?;
    arm(&timer)?;
    sys::watch(timer)
}

fn arm(timer: &OwnedFd) -> io::Result<()> {
    let time = |tv_sec| Timespec { tv_sec, tv_nsec: 0 };
    let never = Itimerspec {
        it_interval: time(0),
        it_value: time(i64::MAX),
    };
    let flags = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
    timerfd_settime(timer, flags, &never)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_time_is_shown_unless_the_clock_was_set() {
        const HOURS: u64 = 3_600_000;
        const WALL: u64 = 1_700_000_000_000;
        // The clocks were read at slightly different times.
        for near in [WALL - 1000, WALL - 1, WALL, WALL + 1000] {
            assert_eq!(after_steps(WALL, near), WALL);
        }
        // The clock was set forward and back: the run is as long as before.
        for set in [WALL + 6 * HOURS, WALL - 12 * HOURS, 0] {
            assert_eq!(after_steps(WALL, set), set);
        }
    }

    #[test]
    fn run_with_a_wrong_start_time_has_its_true_length() {
        let began = since_boot_ms();
        let now = text::now_ms();
        for recorded in [0, now / 2, 2 * now] {
            let shown = shown_ms(recorded, began);
            assert!(shown.abs_diff(now) < 5000, "{recorded}: {shown}");
        }
        // An older daemon has not recorded it.
        assert_eq!(shown_ms(7, 0), 7);
        assert_eq!(elapsed_ms(0), None);
        assert!(elapsed_ms(began).unwrap() < 5000);
    }

    #[tokio::test]
    async fn timer_for_steps_waits_without_an_end() {
        let timer = timer().unwrap();
        assert_eq!(
            rustix::io::read(timer.get_ref(), &mut [0_u8; 8]),
            Err(Errno::AGAIN)
        );
    }
}

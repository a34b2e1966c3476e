//! Decisions about the end of a migration's rounds and the throttling of the guest, as functions of
//! the rounds' results.

use std::time::Duration;

use super::{
    SnapshotError,
    saving::{MAX_ROUNDS, Policy},
};

/// Most rounds of a migration. QEMU and Cloud Hypervisor give up, or throttle the guest, after as many or fewer.
const MAX_MIGRATION_ROUNDS: u32 = 30;
/// As many again with vCPUs that are throttled, of a guest that was not before.
const MAX_ROUNDS_THROTTLED: u32 = 2 * MAX_MIGRATION_ROUNDS;
/// For which part of the time vCPUs are throttled first, by how much more each time that this does not help, and at most, in percent.
const FIRST_THROTTLE: u8 = 20;
const THROTTLE_STEP: u8 = 10;
const MAX_THROTTLE: u8 = 99;
/// Changed memory that a migration always sends while the machine is paused, in bytes: a round for less costs more than it saves.
const LITTLE: u64 = 256 << 10;

/// Whether the rest is to be sent with the machine paused, rather than in another round. An error when that would take too long and will not
/// become less.
pub(super) fn is_time_to_pause(
    policy: Policy,
    rounds: u32,
    dirty_bytes: u64,
    bytes_per_second: u64,
    downtime: Duration,
) -> Result<bool, SnapshotError> {
    let rest_ms = dirty_bytes.saturating_mul(1000) / bytes_per_second.max(1);
    let limit_ms = u64::try_from(downtime.as_millis()).unwrap_or(u64::MAX);
    if dirty_bytes <= LITTLE {
        return Ok(true);
    }
    if downtime.is_zero() {
        return Ok(rounds >= MAX_ROUNDS);
    }
    let most = match policy {
        Policy::PreferSafe => MAX_ROUNDS_THROTTLED,
        Policy::AlwaysSafe | Policy::PreferForced | Policy::AlwaysForced => MAX_MIGRATION_ROUNDS,
    };
    if rest_ms > limit_ms && rounds >= most {
        if policy == Policy::AlwaysForced {
            return Ok(true);
        }
        return Err(SnapshotError::NotConverging {
            rounds,
            rest_ms,
            limit_ms,
        });
    }
    Ok(rest_ms <= limit_ms)
}

/// Whether the vCPUs may be throttled after so many rounds.
pub(super) fn may_throttle(policy: Policy, rounds: u32) -> bool {
    match policy {
        Policy::AlwaysSafe => false,
        Policy::PreferSafe => rounds >= MAX_MIGRATION_ROUNDS,
        // The first round sends everything, and says nothing about the guest.
        Policy::PreferForced | Policy::AlwaysForced => rounds > 0,
    }
}

/// For which part of the time the vCPUs are to stand still, when they did so for `percent` of it while `sent` bytes were sent and `dirty` ones
/// were changed: QEMU's steps and its bound for a round that does not help enough.
pub(super) fn next_throttle(percent: u8, sent: u64, dirty: u64) -> u8 {
    match percent {
        _ if dirty < sent / 2 => percent,
        0 => FIRST_THROTTLE,
        _ => percent.saturating_add(THROTTLE_STEP).min(MAX_THROTTLE),
    }
}

/// Rate of `bytes` that were sent in `time`.
pub(super) fn bytes_per_second(bytes: u64, time: Duration) -> u64 {
    let per_second = u128::from(bytes).saturating_mul(1_000_000_000) / time.as_nanos().max(1);
    u64::try_from(per_second).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_comes_when_the_rest_fits_the_downtime() {
        const MIB: u64 = 1 << 20;
        let decide = |rounds, dirty, speed, limit_ms| {
            is_time_to_pause(
                Policy::AlwaysSafe,
                rounds,
                dirty,
                speed,
                Duration::from_millis(limit_ms),
            )
            .ok()
        };
        for (rounds, dirty, speed, limit_ms, wanted) in [
            // 100 ms are needed.
            (0, 10 * MIB, 100 * MIB, 100, Some(true)),
            (0, 10 * MIB, 100 * MIB, 99, Some(false)),
            (29, 10 * MIB, 100 * MIB, 99, Some(false)),
            (30, 10 * MIB, 100 * MIB, 99, None),
            (30, 10 * MIB, 100 * MIB, 100, Some(true)),
            // So little is not worth a round.
            (0, LITTLE, 1, 1, Some(true)),
            (0, LITTLE, 0, 0, Some(true)),
            (0, u64::MAX, 0, 1000, Some(false)),
            // Without a limit.
            (0, 10 * MIB, 100 * MIB, 0, Some(false)),
            (16, u64::MAX, 1, 0, Some(true)),
        ] {
            let case = format!("{rounds} {dirty} {speed} {limit_ms}");
            assert_eq!(decide(rounds, dirty, speed, limit_ms), wanted, "{case}");
        }
    }

    #[test]
    fn policy_decides_when_to_throttle_and_the_end_of_rounds() {
        use Policy::*;
        let too_much =
            |policy, rounds| is_time_to_pause(policy, rounds, u64::MAX, 1, Duration::from_millis(300)).ok();
        for (policy, throttles_from, last, then) in [
            (AlwaysSafe, None, 30, None),
            (PreferSafe, Some(30), 60, None),
            (PreferForced, Some(1), 30, None),
            (AlwaysForced, Some(1), 30, Some(true)),
        ] {
            let first = (0..100).find(|rounds| may_throttle(policy, *rounds));
            assert_eq!(first, throttles_from, "{policy:?}");
            assert_eq!(too_much(policy, last - 1), Some(false), "{policy:?}");
            assert_eq!(too_much(policy, last), then, "{policy:?}");
        }
    }

    #[test]
    fn throttle_grows_until_a_round_halves_the_rest() {
        let mut steps = vec![0];
        while steps.last() != Some(&MAX_THROTTLE) {
            let last = steps.last().copied().unwrap_or_default();
            assert_eq!(next_throttle(last, 100, 49), last);
            steps.push(next_throttle(last, 100, 50));
        }
        assert_eq!(steps, [0, 20, 30, 40, 50, 60, 70, 80, 90, 99]);
        assert_eq!(next_throttle(MAX_THROTTLE, 100, u64::MAX), MAX_THROTTLE);
        assert_eq!(
            next_throttle(0, 0, 0),
            FIRST_THROTTLE,
            "a round without pages says nothing good"
        );
    }

    #[test]
    fn speed_is_that_of_the_time_that_it_took() {
        assert_eq!(bytes_per_second(1 << 20, Duration::from_millis(500)), 2 << 20);
        assert_eq!(bytes_per_second(0, Duration::ZERO), 0);
        assert_eq!(bytes_per_second(u64::MAX, Duration::from_nanos(1)), u64::MAX);
    }
}

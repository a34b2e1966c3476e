//! Times in requests: timeouts and grace periods.

use std::time::Duration;

use vmmd_api::well_known;
use vmmd_host::failure::Failure;

/// Grace period when none is given.
const DEFAULT_GRACE: Duration = Duration::from_secs(60);
/// Longest grace period.
const MAX_GRACE: Duration = Duration::from_secs(3600);

/// After how long an operation is cancelled, if it is.
pub(super) fn timeout(given: Option<well_known::Duration>) -> Result<Option<Duration>, Failure> {
    let given = period("timeout", given)?;
    if given.is_some_and(|given| given.is_zero()) {
        return Err(Failure::field("timeout", "must be above 0 and at most 3600 s"));
    }
    Ok(given)
}

/// How long the guest may take; `None` by force.
pub(super) fn grace(given: Option<well_known::Duration>, force: bool) -> Result<Option<Duration>, Failure> {
    let given = period("gracePeriod", given)?.unwrap_or(DEFAULT_GRACE);
    Ok((!force).then_some(given))
}

/// A time that a guest may take, if one is given; `field` is its path in the request.
pub(super) fn period(field: &str, given: Option<well_known::Duration>) -> Result<Option<Duration>, Failure> {
    let Some(given) = given else { return Ok(None) };
    let seconds = u64::try_from(given.seconds).ok();
    let nanos = u32::try_from(given.nanos)
        .ok()
        .filter(|nanos| *nanos < 1_000_000_000);
    let duration = seconds
        .zip(nanos)
        .map(|(seconds, nanos)| Duration::new(seconds, nanos));
    match duration.filter(|duration| *duration <= MAX_GRACE) {
        Some(duration) => Ok(Some(duration)),
        None => Err(Failure::field(field, "must be 0 to 3600 s")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn period(seconds: i64, nanos: i32) -> Option<well_known::Duration> {
        Some(well_known::Duration { seconds, nanos })
    }

    #[test]
    fn a_grace_period_is_at_most_an_hour_and_never_negative() {
        assert_eq!(grace(None, false).unwrap(), Some(DEFAULT_GRACE));
        assert_eq!(grace(None, true).unwrap(), None);
        assert_eq!(grace(period(3600, 0), false).unwrap(), Some(MAX_GRACE));
        assert_eq!(
            grace(period(0, 500_000_000), false).unwrap(),
            Some(Duration::from_millis(500))
        );
        assert_eq!(grace(period(5, 0), true).unwrap(), None);
        for wrong in [
            period(-1, 0),
            period(3600, 1),
            period(0, -1),
            period(0, i32::MAX),
            period(i64::MAX, 0),
        ] {
            assert!(grace(wrong, false).is_err(), "{wrong:?}");
        }
    }
}

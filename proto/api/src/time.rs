//! Times of the API, and milliseconds of Unix time.

use std::time::Duration;

use crate::well_known::Timestamp;

/// The last second that RFC 3339, and so the API's JSON, can express: the end of the year 9999.
const LAST_SECOND: u64 = 253_402_300_799;

/// Milliseconds of Unix time as the API has it; `None` for 0. A later time than the API can express is the last that it can.
pub fn timestamp(unix_ms: u64) -> Option<Timestamp> {
    let unix_ms = unix_ms.min(LAST_SECOND * 1000 + 999);
    let since = Duration::from_millis(unix_ms);
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    let nanos = i32::try_from(since.subsec_nanos()).unwrap_or(0);
    (unix_ms != 0).then_some(Timestamp { seconds, nanos })
}

/// Milliseconds of Unix time of a time of the API; 0 for one before 1970.
pub fn unix_ms(time: &Timestamp) -> u64 {
    let seconds = u64::try_from(time.seconds).unwrap_or_default();
    let ms = u64::from(time.nanos.unsigned_abs()) / 1_000_000;
    seconds.saturating_mul(1000).saturating_add(ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_is_later_than_the_api_can_express() {
        let last = timestamp(u64::MAX).unwrap();
        assert_eq!((last.seconds, last.nanos), (253_402_300_799, 999_000_000));
        assert!(
            serde_json::to_string(&crate::v1::ExitStatus {
                time: Some(last),
                ..Default::default()
            })
            .is_ok()
        );
    }

    #[test]
    fn a_time_keeps_its_milliseconds() {
        assert_eq!(
            timestamp(1_500),
            Some(Timestamp {
                seconds: 1,
                nanos: 500_000_000
            })
        );
        assert_eq!(timestamp(0), None);
    }
}

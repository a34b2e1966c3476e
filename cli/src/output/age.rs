//! Times as people read them in tables.

use std::time::Duration;

use vmmd_api::well_known::Timestamp;

/// How long ago `time` was, as kubectl writes it: `5s`, `3m12s`, `47m`, `5h20m`, `31h`, `4d6h`, `90d`, `3y41d`.
/// `-` when the time is not known; a time in the future is `0s`.
pub fn since(time: Option<&Timestamp>, now: jiff::Timestamp) -> String {
    let Some(time) = timestamp(time) else {
        return "-".into();
    };
    let elapsed = Duration::try_from(now.duration_since(time)).unwrap_or_default();
    short(elapsed)
}

/// A time in the form of RFC 3339, in UTC, in whole seconds; `-` when it is not known.
pub fn exact(time: Option<&Timestamp>) -> String {
    timestamp(time).map_or_else(
        || "-".into(),
        |time| time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    )
}

/// The time, when it is known.
pub fn timestamp(time: Option<&Timestamp>) -> Option<jiff::Timestamp> {
    let time = time?;
    jiff::Timestamp::new(time.seconds, time.nanos).ok()
}

/// Returns at most two units, the second one only where it adds information.
fn short(elapsed: Duration) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    const YEAR: u64 = 365 * DAY;
    let seconds = elapsed.as_secs();
    let two = |unit: u64, name: &str, smaller: u64, smaller_name: &str| match (
        seconds / unit,
        seconds % unit / smaller,
    ) {
        (whole, 0) => format!("{whole}{name}"),
        (whole, rest) => format!("{whole}{name}{rest}{smaller_name}"),
    };
    match seconds {
        0..120 => format!("{seconds}s"),
        s if s < 10 * MINUTE => two(MINUTE, "m", 1, "s"),
        s if s < 3 * HOUR => format!("{}m", s / MINUTE),
        s if s < 8 * HOUR => two(HOUR, "h", MINUTE, "m"),
        s if s < 2 * DAY => format!("{}h", s / HOUR),
        s if s < 8 * DAY => two(DAY, "d", HOUR, "h"),
        s if s < 2 * YEAR => format!("{}d", s / DAY),
        _ => two(YEAR, "y", DAY, "d"),
    }
}

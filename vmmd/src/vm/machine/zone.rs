//! Time zones of real-time clocks, from the time zone database of the node.

use jiff::{Timestamp, tz::TimeZone};
use vmm_protocol::{machine::MAX_CLOCK_OFFSETS, vmm::ClockOffset};
use vmmd_host::failure::Failure;

/// The zone of the node.
const LOCAL: &str = "localtime";

/// The difference of a clock in this zone to UTC, at present and after the next changes of the zone. Empty for UTC, which has the empty
/// name. Reads the node's time zone database.
///
/// # Errors
///
/// `TIMEZONE_NOT_FOUND` when the node does not know the zone.
pub fn offsets(name: &str) -> Result<Vec<ClockOffset>, Failure> {
    let zone = match name {
        "" => return Ok(Vec::new()),
        LOCAL => TimeZone::try_system(),
        name => TimeZone::get(name),
    };
    let zone = zone.map_err(|error| {
        let message = format!(
            "spec.clock.timezone: time zone \"{name}\": {error}: choose a name below /usr/share/zoneinfo of the node (`apt install tzdata`)"
        );
        Failure::precondition("TIMEZONE_NOT_FOUND", message)
    })?;
    Ok(at(&zone, Timestamp::now()))
}

fn at(zone: &TimeZone, now: Timestamp) -> Vec<ClockOffset> {
    let present = ClockOffset {
        from: 0,
        seconds: zone.to_offset(now).seconds(),
    };
    let changes = zone.following(now).filter_map(|change| {
        Some(ClockOffset {
            from: u64::try_from(change.timestamp().as_second()).ok()?,
            seconds: change.offset().seconds(),
        })
    });
    std::iter::once(present)
        .chain(changes.take(MAX_CLOCK_OFFSETS - 1))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_begin_now_and_have_the_next_changes() {
        // POSIX: Central European Time with its summer time.
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        let winter: Timestamp = "2026-01-15T12:00:00Z".parse().unwrap();
        let found = at(&zone, winter);
        let first: Vec<_> = found.iter().take(3).map(|it| (it.from, it.seconds)).collect();
        let summer: Timestamp = "2026-03-29T01:00:00Z".parse().unwrap();
        let autumn: Timestamp = "2026-10-25T01:00:00Z".parse().unwrap();
        let second = |time: Timestamp| u64::try_from(time.as_second()).unwrap();
        assert_eq!(first, [(0, 3600), (second(summer), 7200), (second(autumn), 3600)]);
        assert_eq!(found.len(), MAX_CLOCK_OFFSETS);
        assert!(found.is_sorted_by(|one, other| one.from < other.from));
    }

    #[test]
    fn utc_has_no_offsets_and_an_unknown_zone_is_refused() {
        assert_eq!(offsets("").unwrap(), []);
        assert_eq!(at(&TimeZone::UTC, Timestamp::now()).len(), 1);
        let refused = offsets("Europe/Atlantis").unwrap_err();
        assert_eq!(refused.reason, "TIMEZONE_NOT_FOUND");
        assert!(refused.message.contains("Atlantis"), "{}", refused.message);
    }
}

//! The balloon.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use devices::virtio::balloon::{Balloon, BalloonControl, BalloonOptions};
use vmm_protocol::vmm;

use super::{Assembly, Failure};
use crate::memory::RamReclaim;

/// Maximum wait for a guest's statistics. Drivers answer from their interrupt's work queue within a
/// millisecond. A slower guest delays the machine's driver thread by at most this time, and its
/// answer counts for the next request.
const PATIENCE: Duration = Duration::from_millis(20);
/// Age up to which a guest's statistics are reused.
const FRESH: Duration = Duration::from_secs(1);

pub(super) fn build(assembly: &mut Assembly, spec: &vmm_protocol::machine::Balloon) -> Result<(), Failure> {
    let options = BalloonOptions {
        free_page_reporting: spec.free_page_reporting,
        target: spec.target_bytes,
    };
    let device = Balloon::new(Box::new(RamReclaim::new(&assembly.ram)), options);
    assembly.balloon = Some(device.control());
    assembly.add_virtio("balloon", spec.slot, Box::new(device))
}

/// Returns a balloon's state, with current statistics of the guest if the guest answers in time.
pub(in crate::board) fn stats(balloon: &BalloonControl) -> vmm::BalloonStats {
    let known = balloon.stats();
    let said = known.guest.as_ref().map(|guest| guest.time);
    let fresh = said.is_some_and(|said| said.elapsed().is_ok_and(|age| age < FRESH));
    let stats = if fresh { known } else { balloon.ask(PATIENCE) };
    let guest = stats
        .guest
        .unwrap_or_else(|| devices::virtio::balloon::GuestStats {
            values: std::collections::BTreeMap::new(),
            time: UNIX_EPOCH,
        });
    vmm::BalloonStats {
        actual_bytes: stats.held,
        target_bytes: stats.target,
        reported_bytes: stats.reported,
        guest: guest
            .values
            .into_iter()
            .map(|(tag, value)| (tag.into(), value))
            .collect(),
        guest_time_ms: unix_ms(guest.time),
    }
}

fn unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

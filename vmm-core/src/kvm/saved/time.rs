//! The guest's time across a standstill: kvmclock and the time stamp counters continue together.
//!
//! KVM lets the counters run while no vCPU runs, and kvmclock is set back to its value at the pause
//! (or forward, to the real time). Without a correction, the two then differ by the standstill, and
//! Linux marks the counter as unstable. kvmclock and the first vCPU's counter are therefore read at
//! one moment of the pause, and again after kvmclock is set at the resume. The counter's excess
//! over kvmclock in between is subtracted from all vCPUs' offsets.

use vmm_protocol::state::StateError;

use super::{
    super::{host::KvmError, vcpu::Vcpu, vm::Clock},
    msrs, tsc,
};

/// How often both are read; the reading that took the shortest time counts.
const READINGS: usize = 4;

/// kvmclock and a counter at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestTime {
    /// kvmclock.
    pub clock: Clock,
    /// Value of the first vCPU's time stamp counter at that moment.
    pub counter: u64,
}

impl GuestTime {
    /// Value to add to a counter that shows `self.counter` when kvmclock shows `self.clock`, so
    /// that both have advanced equally since `then`. `khz` is the counter's frequency.
    fn correction(&self, then: &Self, khz: u32) -> u64 {
        let passed_ns = self.clock.nanoseconds.saturating_sub(then.clock.nanoseconds);
        let passed = u128::from(passed_ns).saturating_mul(khz.into()) / 1_000_000;
        let passed = u64::try_from(passed).unwrap_or(u64::MAX);
        then.counter.wrapping_add(passed).wrapping_sub(self.counter)
    }
}

impl Vcpu {
    /// kvmclock and this vCPU's counter now; with all vCPUs stopped.
    pub fn time(&self) -> Result<GuestTime, StateError> {
        let mut best: Option<(u64, GuestTime)> = None;
        for _ in 0..READINGS {
            let before = msrs::read_one(self, tsc::TSC)?;
            let clock = self.vm().clock()?;
            let took = msrs::read_one(self, tsc::TSC)?.saturating_sub(before);
            if best.is_none_or(|(shortest, _)| took < shortest) {
                let counter = before.wrapping_add(took / 2);
                best = Some((took, GuestTime { clock, counter }));
            }
        }
        best.map(|(_, time)| time)
            .ok_or_else(|| StateError::invalid("tsc", "was not read"))
    }

    /// Value to add to all vCPUs' counters, so that they have advanced as much as kvmclock since
    /// `then`. This vCPU is the one that was read then. `None` if the kernel has no offsets (older
    /// than 5.16). kvmclock is set before the call.
    pub fn counter_correction(&self, then: &GuestTime) -> Result<Option<u64>, StateError> {
        if tsc::offset(self)?.is_none() {
            return Ok(None);
        }
        let khz = self.fd().get_tsc_khz();
        let khz = khz.map_err(KvmError::ioctl("KVM_GET_TSC_KHZ"))?;
        Ok(Some(self.time()?.correction(then, khz)))
    }

    /// Adds to the counter. `has_deadline`: IA32_TSC_DEADLINE is state of this vCPU. KVM has
    /// converted the deadline to the host's time, so the deadline is written again.
    pub fn correct_counter(&self, by: u64, has_deadline: bool) -> Result<(), StateError> {
        let Some(offset) = tsc::offset(self)? else {
            return Ok(());
        };
        tsc::set_offset(self, offset.wrapping_add(by))?;
        if !has_deadline {
            return Ok(());
        }
        match msrs::read_one(self, tsc::TSC_DEADLINE)? {
            0 => Ok(()),
            deadline => msrs::write_one(self, tsc::TSC_DEADLINE, deadline),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn at(nanoseconds: u64, counter: u64) -> GuestTime {
        let clock = Clock {
            nanoseconds,
            realtime_ns: None,
            host_tsc: None,
        };
        GuestTime { clock, counter }
    }

    #[test]
    fn a_counter_goes_on_with_kvmclock() {
        let then = at(5 * SECOND, 7_000_000);
        for (now, khz, correction, why) in [
            (at(5 * SECOND, 7_000_000), 2_000_000, 0_i64, "no time has passed"),
            (
                at(6 * SECOND, 7_000_000 + 2_000_000_000),
                2_000_000,
                0,
                "both ran for a second",
            ),
            (
                at(5 * SECOND, 7_000_000 + 2_000_000_000),
                2_000_000,
                -2_000_000_000,
                "kvmclock was set back by a second",
            ),
            (
                at(8 * SECOND, 7_000_000 + 1_000_000),
                1_000_000,
                3_000_000_000 - 1_000_000,
                "kvmclock has caught up with 3 s of another host",
            ),
            (
                at(4 * SECOND, 6_000_000),
                1_000_000,
                1_000_000,
                "a counter never goes back",
            ),
            (at(5 * SECOND, 6_999_999), 1_000_000, 1, "nor by one"),
        ] {
            assert_eq!(now.correction(&then, khz), correction.cast_unsigned(), "{why}");
        }
        // Values that only a state that was tampered with has.
        let _any = at(u64::MAX, 0).correction(&at(0, u64::MAX), u32::MAX);
    }
}

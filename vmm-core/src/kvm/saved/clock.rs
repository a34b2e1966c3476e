//! kvmclock.

use vmm_protocol::state;

use super::super::vm::Clock;

impl From<Clock> for state::Clock {
    fn from(clock: Clock) -> Self {
        Self {
            nanoseconds: clock.nanoseconds,
            realtime_ns: clock.realtime_ns,
            host_tsc: clock.host_tsc,
        }
    }
}

impl From<state::Clock> for Clock {
    fn from(saved: state::Clock) -> Self {
        Self {
            nanoseconds: saved.nanoseconds,
            realtime_ns: saved.realtime_ns,
            host_tsc: saved.host_tsc,
        }
    }
}

//! Results of a periodic check of a guest.

use vmmd_spec::probe::Probe;

/// Results in a row.
#[derive(Debug)]
pub struct Tally {
    success_threshold: u32,
    failure_threshold: u32,
    last: bool,
    in_a_row: u32,
}

/// State of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It succeeds.
    Succeeded,
    /// It has failed.
    Failed,
}

impl Tally {
    /// The tally of a probe without results.
    pub fn new(probe: &Probe) -> Self {
        Self {
            success_threshold: probe.success_threshold,
            failure_threshold: probe.failure_threshold,
            last: false,
            in_a_row: 0,
        }
    }

    /// Adds a result. Returns the state of the probe, or `None` while the results in a row are too
    /// few for another state.
    pub fn add(&mut self, succeeded: bool) -> Option<Verdict> {
        self.in_a_row = match self.last == succeeded {
            true => self.in_a_row.saturating_add(1),
            false => 1,
        };
        self.last = succeeded;
        match succeeded {
            true => (self.in_a_row >= self.success_threshold).then_some(Verdict::Succeeded),
            false => (self.in_a_row >= self.failure_threshold).then_some(Verdict::Failed),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vmmd_spec::probe::Check;

    use super::*;

    #[test]
    fn a_state_needs_its_number_of_results_in_a_row() {
        let probe = Probe {
            check: Check::Agent,
            initial_delay: Duration::ZERO,
            period: Duration::from_secs(1),
            timeout: Duration::from_secs(1),
            success_threshold: 2,
            failure_threshold: 3,
        };
        let mut tally = Tally::new(&probe);
        let states: Vec<_> = "FFSFFFFSSS"
            .chars()
            .map(|result| tally.add(result == 'S'))
            .collect();
        let (up, down) = (Some(Verdict::Succeeded), Some(Verdict::Failed));
        let wanted = [None, None, None, None, None, down, down, None, up, up];
        assert_eq!(states, wanted);
    }
}

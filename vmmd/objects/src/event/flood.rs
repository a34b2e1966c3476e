//! Keeps a thing that happens over and over again from driving everything else out of the history.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use super::{Draft, Object};

/// The time for which events of one kind are counted.
pub const PERIOD: Duration = Duration::from_secs(60);
/// Maximum number of events of one reason and object per period. The rest becomes one event at the
/// end of the period.
const MOST: u32 = 30;
/// Capacity for kinds that do not flood.
const KINDS: usize = 256;

/// Decision about an event.
#[derive(Debug)]
pub enum Verdict {
    /// Tell it.
    Tell(Box<Draft>),
    /// It is held back. `first` of its period: somebody must [`sweep`](Flood::sweep) when that is over.
    Hold {
        /// See there.
        first: bool,
    },
}

/// Counts of events in the last minute, by object and reason.
#[derive(Debug, Default)]
pub struct Flood {
    kinds: HashMap<(Object, String), Kind>,
}

#[derive(Debug)]
struct Kind {
    since: Instant,
    told: u32,
    /// How many, and the last of them.
    held: Option<(u64, Draft)>,
}

impl Flood {
    /// Decides about an event that happens now.
    pub fn take(&mut self, draft: Draft) -> Verdict {
        self.take_at(draft, Instant::now())
    }

    fn take_at(&mut self, draft: Draft, now: Instant) -> Verdict {
        if self.kinds.len() >= KINDS {
            self.kinds
                .retain(|_, kind| kind.held.is_some() || !kind.over(now));
        }
        if self.kinds.len() >= KINDS {
            // With this many kinds in a minute, all counts restart except those of floods.
            self.kinds.retain(|_, kind| kind.held.is_some());
        }
        let key = (draft.object.clone(), draft.reason.clone());
        let kind = self.kinds.entry(key).or_insert(Kind {
            since: now,
            told: 0,
            held: None,
        });
        // The sweep reports held events before any later event.
        if kind.held.is_none() && kind.over(now) {
            (kind.since, kind.told) = (now, 0);
        }
        if kind.told < MOST {
            kind.told += 1;
            return Verdict::Tell(Box::new(draft));
        }
        let first = kind.held.is_none();
        let count = kind.held.take().map_or(1, |(count, _)| count.saturating_add(1));
        kind.held = Some((count, draft));
        Verdict::Hold { first }
    }

    /// The events held back in periods that are over: the last of each kind, and their number.
    pub fn sweep(&mut self) -> Vec<(Draft, u64)> {
        self.sweep_at(Instant::now())
    }

    fn sweep_at(&mut self, now: Instant) -> Vec<(Draft, u64)> {
        let mut told = Vec::new();
        for kind in self.kinds.values_mut().filter(|kind| kind.over(now)) {
            if let Some((count, draft)) = kind.held.take() {
                (kind.since, kind.told) = (now, 1);
                told.push((draft, count));
            }
        }
        told
    }

    /// Everything that is held back.
    pub fn drain(&mut self) -> Vec<(Draft, u64)> {
        let held = self.kinds.drain().filter_map(|(_, kind)| kind.held);
        held.map(|(count, draft)| (draft, count)).collect()
    }

    /// As if the period of everything were over.
    #[cfg(test)]
    pub fn age(&mut self) {
        for kind in self.kinds.values_mut() {
            kind.since -= PERIOD;
        }
    }
}

impl Kind {
    fn over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= PERIOD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(reason: &str, message: &str) -> Draft {
        Draft::normal(Object::Node, reason, message)
    }

    fn told(verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Tell(_))
    }

    #[test]
    fn a_flood_is_told_a_few_times_and_then_as_one_with_its_count() {
        let (mut flood, start) = (Flood::default(), Instant::now());
        let verdicts: Vec<_> = (0..100)
            .map(|n| flood.take_at(draft("Odd", &n.to_string()), start))
            .collect();
        assert_eq!(verdicts.iter().filter(|verdict| told(verdict)).count(), 30);
        let firsts = verdicts
            .iter()
            .filter(|verdict| matches!(verdict, Verdict::Hold { first: true }));
        assert_eq!(firsts.count(), 1);
        assert!(flood.sweep_at(start).is_empty());
        let later = start + PERIOD;
        let swept = flood.sweep_at(later);
        assert_eq!((swept[0].1, swept[0].0.message.as_str()), (70, "99"));
        assert!(flood.sweep_at(later + PERIOD).is_empty());
        assert!(told(&flood.take_at(draft("Odd", ""), later)));
    }

    #[test]
    fn one_that_floods_does_not_silence_another() {
        let (mut flood, start) = (Flood::default(), Instant::now());
        for _ in 0..100 {
            flood.take_at(draft("Odd", ""), start);
        }
        assert!(told(&flood.take_at(draft("Else", ""), start)));
        let vm = Draft::normal(Object::Vm("a".into(), uuid::Uuid::nil()), "Odd", "");
        assert!(told(&flood.take_at(vm, start)));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (mut flood, start) = (Flood::default(), Instant::now());
        for n in 0..10_000_u32 {
            let now = start + Duration::from_secs((n / 1000).into());
            flood.take_at(draft(&format!("R{n}"), ""), now);
        }
        assert!(flood.kinds.len() <= KINDS);
    }
}

//! The newest events, in order, and where one is among them.

use std::collections::VecDeque;

use prost::Message as _;
use vmmd_api::v1;

/// As many are kept.
pub const KEPT: usize = 10_000;
/// Most events that are handed out at once.
const BATCH: usize = 256;

/// A place between two events: after the one with this sequence number. Its text is opaque to clients: 16 hexadecimal digits of the
/// history's epoch, 16 of the number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    epoch: u64,
    after: u64,
}

/// The events after a cursor are not all kept, or it is none of this history's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expired;

/// How much is handed out at most.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Events.
    pub count: usize,
    /// Their encoded size; one event is handed out in any case.
    pub bytes: usize,
}

/// The newest events.
#[derive(Debug)]
pub struct History {
    /// Differs from that of any other history.
    epoch: u64,
    events: VecDeque<(u64, v1::Event)>,
    /// Number of the newest discarded event, or the number before the first event.
    dropped: u64,
    /// The greatest number ever given.
    last: u64,
    /// Value of `last` at the daemon's start. An event with this number may not exist.
    resumed: u64,
}

impl std::fmt::Display for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}{:016x}", self.epoch, self.after)
    }
}

impl History {
    /// Creates the history of `epoch` from events in the order of their numbers. A last entry
    /// without an event sets the number from which to continue.
    pub fn new(epoch: u64, loaded: Vec<(u64, Option<v1::Event>)>) -> Self {
        let last = loaded.last().map_or(0, |(sequence, _)| *sequence);
        let events: VecDeque<_> = loaded
            .into_iter()
            .filter_map(|(sequence, event)| Some((sequence, event?)))
            .collect();
        let dropped = events.front().map_or(last, |(first, _)| first.saturating_sub(1));
        let mut history = Self {
            epoch,
            events,
            dropped,
            last,
            resumed: last,
        };
        history.trim();
        history
    }

    /// The number of the next event, and the event with its cursor.
    pub fn stamp(&self, mut event: v1::Event) -> (u64, v1::Event) {
        let after = self.last.saturating_add(1);
        let epoch = self.epoch;
        event.cursor = Cursor { epoch, after }.to_string();
        (after, event)
    }

    /// Adds an event that was stamped last.
    pub fn push(&mut self, sequence: u64, event: v1::Event) {
        self.last = sequence;
        self.events.push_back((sequence, event));
        self.trim();
    }

    fn trim(&mut self) {
        while self.events.len() > KEPT {
            if let Some((sequence, _)) = self.events.pop_front() {
                self.dropped = sequence;
            }
        }
    }

    /// After all events.
    pub fn end(&self) -> Cursor {
        Cursor {
            epoch: self.epoch,
            after: self.last,
        }
    }

    /// The number in a client's cursor, if it is of this history.
    fn read(&self, text: &str) -> Result<u64, Expired> {
        let number = |range| {
            text.get(range)
                .and_then(|digits| u64::from_str_radix(digits, 16).ok())
        };
        let (epoch, after) = number(0..16).zip(number(16..32)).ok_or(Expired)?;
        if text.len() != 32 || epoch != self.epoch {
            return Err(Expired);
        }
        Ok(after)
    }

    /// Parses a client's cursor. Fails unless all later events are kept.
    pub fn position(&self, text: &str) -> Result<Cursor, Expired> {
        let after = self.read(text)?;
        self.index(after)?;
        Ok(Cursor {
            epoch: self.epoch,
            after,
        })
    }

    /// Where the events after `sequence` begin.
    fn index(&self, sequence: u64) -> Result<usize, Expired> {
        if sequence == self.last {
            return Ok(self.events.len());
        }
        if sequence == self.dropped {
            return Ok(0);
        }
        if sequence == self.resumed && sequence >= self.dropped {
            return Ok(self.events.partition_point(|(number, _)| *number <= sequence));
        }
        let found = self.events.binary_search_by_key(&sequence, |(number, _)| *number);
        found.map(|index| index + 1).map_err(|_| Expired)
    }

    /// The next events after a place, and where that leads to.
    pub fn after(&self, cursor: &Cursor) -> Result<(Vec<v1::Event>, Cursor), Expired> {
        let index = self.index(cursor.after)?;
        let next: Vec<_> = self.events.range(index..).take(BATCH).collect();
        let after = next.last().map_or(cursor.after, |(sequence, _)| *sequence);
        let events = next.into_iter().map(|(_, event)| event.clone()).collect();
        Ok((
            events,
            Cursor {
                epoch: self.epoch,
                after,
            },
        ))
    }

    /// The newest that are wanted, older than the one with the cursor `before`, the oldest first; and whether there are older ones.
    pub fn newest(
        &self,
        before: Option<&str>,
        bounds: Bounds,
        wanted: impl Fn(&v1::Event) -> bool,
    ) -> Result<(Vec<v1::Event>, bool), Expired> {
        let end = match before {
            // Events before it may be gone, but never come back.
            Some(text) => {
                let before = self.read(text)?;
                self.events.partition_point(|(number, _)| *number < before)
            }
            None => self.events.len(),
        };
        let (mut found, mut bytes, mut more) = (Vec::new(), 0, false);
        let events = self.events.range(..end).rev().map(|(_, event)| event);
        for event in events.filter(|event| wanted(event)) {
            bytes += event.encoded_len();
            more = found.len() == bounds.count || (bytes > bounds.bytes && !found.is_empty());
            if more {
                break;
            }
            found.push(event.clone());
        }
        found.reverse();
        Ok((found, more))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl History {
        fn add(&mut self, event: v1::Event) -> u64 {
            let (sequence, event) = self.stamp(event);
            self.push(sequence, event);
            sequence
        }
    }

    fn history(count: usize) -> History {
        let mut history = History::new(7, Vec::new());
        for _ in 0..count {
            history.add(v1::Event::default());
        }
        history
    }

    fn all_after(history: &History, cursor: &str) -> Result<usize, Expired> {
        let mut position = history.position(cursor)?;
        let mut count = 0;
        loop {
            let (events, next) = history.after(&position)?;
            if events.is_empty() {
                return Ok(count);
            }
            count += events.len();
            position = next;
        }
    }

    #[test]
    fn cursor_is_good_until_an_event_after_it_is_dropped() {
        let mut history = history(5);
        let start = Cursor { epoch: 7, after: 0 }.to_string();
        let third = history.events[2].1.cursor.clone();
        assert_eq!(
            (all_after(&history, &start), all_after(&history, &third)),
            (Ok(5), Ok(2))
        );
        for _ in 5..KEPT {
            history.add(v1::Event::default());
        }
        assert_eq!(all_after(&history, &start), Ok(KEPT));
        history.add(v1::Event::default());
        assert_eq!(all_after(&history, &start), Err(Expired));
        assert_eq!(all_after(&history, &third), Ok(KEPT - 2));
        for _ in 0..2 {
            history.add(v1::Event::default());
        }
        assert_eq!(all_after(&history, &third), Ok(KEPT));
        history.add(v1::Event::default());
        assert_eq!(all_after(&history, &third), Err(Expired));
    }

    #[test]
    fn cursor_that_is_foreign_future_or_garbage_is_refused() {
        let history = history(5);
        for (epoch, after) in [(8, 3), (7, 6), (7, u64::MAX)] {
            assert_eq!(
                history.position(&Cursor { epoch, after }.to_string()),
                Err(Expired)
            );
        }
        for text in [
            "",
            "x",
            "0000000000000007000000000000000",
            "0000000000000007000000000000000300",
            "ääääääääääääääää",
        ] {
            assert_eq!(history.position(text), Err(Expired), "{text}");
        }
    }

    #[test]
    fn a_number_that_was_lost_is_no_cursor() {
        let event = || Some(v1::Event::default());
        let mut history = History::new(7, vec![(3, event()), (4, event()), (100, None)]);
        let text = |after| Cursor { epoch: 7, after }.to_string();
        assert_eq!(history.add(v1::Event::default()), 101);
        assert_eq!(all_after(&history, &text(4)), Ok(1));
        assert_eq!(all_after(&history, &text(2)), Ok(3));
        assert_eq!(all_after(&history, &text(100)), Ok(1));
        for lost in [1, 5, 99] {
            assert_eq!(all_after(&history, &text(lost)), Err(Expired), "{lost}");
        }
    }

    #[test]
    fn page_has_the_newest_and_the_next_page_the_older_ones() {
        let mut history = History::new(7, Vec::new());
        for count in 1..=9 {
            history.add(v1::Event {
                count,
                ..v1::Event::default()
            });
        }
        let page = |before: Option<&str>, count, bytes| {
            let bounds = Bounds { count, bytes };
            let (found, more) = history.newest(before, bounds, |event| event.count % 2 == 0)?;
            let counts: Vec<_> = found.iter().map(|event| event.count).collect();
            let oldest = found.first().map_or(String::new(), |event| event.cursor.clone());
            Ok::<_, Expired>((counts, more, oldest))
        };
        let (first, more, oldest) = page(None, 2, 1 << 20).unwrap();
        assert_eq!((first, more), (vec![6, 8], true));
        let (second, more, _) = page(Some(&oldest), 2, 1 << 20).unwrap();
        assert_eq!((second, more), (vec![2, 4], false));
        let (small, more, _) = page(None, 9, 1).unwrap();
        assert_eq!((small, more), (vec![8], true));
        assert_eq!(page(Some("x"), 2, 1), Err(Expired));
    }
}

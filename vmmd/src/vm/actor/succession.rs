//! Changes of one value of a running machine, of which several may be under way: what the value is to be again when the newest
//! of them fails.

use tokio::sync::oneshot;

/// The changes of one value. An older one that fails takes back nothing that a newer one has written.
#[derive(Debug)]
pub struct Succession<T> {
    last: u64,
    under_way: u32,
    /// What the machine has, as far as is known.
    confirmed: Option<T>,
}

/// What is to be done after a change.
#[derive(Debug, PartialEq, Eq)]
pub enum After<T> {
    /// The machine has what the spec says.
    Newest,
    /// A newer change decides.
    Superseded,
    /// The newest has failed: the spec is to say this again.
    Restore(T),
}

impl<T> Default for Succession<T> {
    fn default() -> Self {
        Self {
            last: 0,
            under_way: 0,
            confirmed: None,
        }
    }
}

impl<T: Clone> Succession<T> {
    /// Notes a change that begins while the spec says `present`. Returns its number.
    pub fn begin(&mut self, present: T) -> u64 {
        if self.under_way == 0 {
            self.confirmed = Some(present);
        }
        self.under_way += 1;
        self.last += 1;
        self.last
    }

    /// Notes that a change is over; with the value that the machine has now, if it took it.
    pub fn end(&mut self, number: u64, taken: Option<T>) -> After<T> {
        self.under_way = self.under_way.saturating_sub(1);
        let is_newest = number == self.last;
        let after = match (&taken, is_newest) {
            (_, false) => After::Superseded,
            (Some(_), true) => After::Newest,
            (None, true) => self.confirmed.clone().map_or(After::Superseded, After::Restore),
        };
        self.confirmed = taken.or(self.confirmed.take());
        after
    }

    /// The value was written otherwise: no change that is under way takes that back.
    pub fn supersede(&mut self) {
        self.last += 1;
    }
}

/// A row of tasks that are done one after the other, in the order in which they were put into it.
#[derive(Debug, Default)]
pub struct Row(Option<oneshot::Receiver<()>>);

/// The place of a task; the next one follows when it is dropped.
#[derive(Debug)]
pub struct Turn {
    before: Option<oneshot::Receiver<()>>,
    _next: oneshot::Sender<()>,
}

impl Row {
    /// A place behind all others.
    pub fn join(&mut self) -> Turn {
        let (next, after) = oneshot::channel();
        Turn {
            before: self.0.replace(after),
            _next: next,
        }
    }
}

impl Turn {
    /// Waits until those before have ended.
    pub async fn come(&mut self) {
        if let Some(before) = self.before.take() {
            // It never sends, it is dropped.
            let _ = before.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_change_that_fails_takes_back_nothing() {
        let mut changes = Succession::default();
        let (first, second) = (changes.begin(50), changes.begin(100));
        assert_eq!(changes.end(first, None), After::Superseded);
        assert_eq!(changes.end(second, Some(200)), After::Newest);
        // In the other order of their ends.
        let (first, second) = (changes.begin(200), changes.begin(300));
        assert_eq!(changes.end(second, Some(400)), After::Newest);
        assert_eq!(changes.end(first, None), After::Superseded);
    }

    #[test]
    fn what_is_restored_is_what_the_machine_has() {
        let mut changes = Succession::default();
        let alone = changes.begin(50);
        assert_eq!(changes.end(alone, None), After::Restore(50));
        // The spec said 100 in between, which the machine never had.
        let (first, second) = (changes.begin(50), changes.begin(100));
        assert_eq!(changes.end(first, None), After::Superseded);
        assert_eq!(changes.end(second, None), After::Restore(50));
        let (first, second) = (changes.begin(50), changes.begin(100));
        assert_eq!(changes.end(first, Some(100)), After::Superseded);
        assert_eq!(changes.end(second, None), After::Restore(100));
    }

    #[test]
    fn what_an_update_wrote_stays() {
        let mut changes = Succession::default();
        let change = changes.begin(50);
        changes.supersede();
        assert_eq!(changes.end(change, None), After::Superseded);
    }

    #[tokio::test]
    async fn tasks_of_a_row_keep_their_order() {
        let mut row = Row::default();
        let (mut first, mut second, mut third) = (row.join(), row.join(), row.join());
        let done = std::sync::Mutex::new(Vec::new());
        let of = |number| done.lock().unwrap().push(number);
        tokio::join!(
            async {
                third.come().await;
                of(3);
                drop(third);
            },
            async {
                second.come().await;
                of(2);
                drop(second);
            },
            async {
                first.come().await;
                tokio::task::yield_now().await;
                of(1);
                drop(first);
            },
        );
        assert_eq!(*done.lock().unwrap(), [1, 2, 3]);
    }
}

//! Order of the changes of one kind of objects: a revision for each
//! change, and the history of deletions. A client that knows the objects at a revision can so
//! receive the changes since. The store has the deletions of earlier runs of the daemon.
//!
//! A deletion has one revision before it is written to the store, and another one when watchers can
//! see it. A later daemon must assume that a watcher with only the first revision has not seen the
//! deletion.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tokio::sync::watch;
use vmmd_api::v1::ObjectMetadata;
use vmmd_store::{DeletionRecords, MAX_TOMBSTONES, Tombstone};

/// A place in the order of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Run of the daemon.
    pub run: u64,
    /// All changes of that run up to this revision have been told.
    pub revision: u64,
    /// All deletions whose first revision is not later than this have been told.
    pub buried: u64,
}

/// Error of a position whose later changes are unknown: it belongs to another store, or is older
/// than the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expired;

/// See the module.
#[derive(Debug)]
pub struct Feed {
    /// Of the daemon.
    run: u64,
    /// Nonce of each run of the daemon, to distinguish it from runs of other stores.
    nonces: BTreeMap<u64, u64>,
    /// Revision of the last change.
    revision: u64,
    /// First revisions of deletions that watchers can't see yet.
    being_buried: BTreeSet<u64>,
    /// Deletions, the oldest first.
    tombstones: VecDeque<Deletion>,
    /// Run and revision of the last deletion that was forgotten.
    trimmed: (u64, u64),
    /// Highest generation of a deleted object: a new one has a higher one.
    generation: u64,
    /// Has the last revision.
    news: watch::Sender<u64>,
}

/// An object that was deleted.
#[derive(Clone, Debug, PartialEq)]
pub struct Deletion {
    /// Last known metadata.
    pub metadata: ObjectMetadata,
    /// Run and revision at which watchers could see that; of an earlier run, its first revision.
    pub at: (u64, u64),
    /// Of a VM: the last migration up to which the VM was this node's; 0 when it never was.
    pub owned: u64,
    /// Uid of the pod that had a VM which has moved to another node; empty without one.
    pub pod: String,
}

impl Feed {
    /// Creates a feed with the history of the store; for `run` and `nonces` see
    /// [`vmmd_store::HistoryRecords`].
    pub fn new(run: u64, nonces: BTreeMap<u64, u64>, history: DeletionRecords) -> Self {
        let tombstones = history.tombstones.into_iter().map(|tombstone| Deletion {
            at: (tombstone.run, tombstone.revision),
            owned: tombstone.owned,
            metadata: tombstone.metadata.unwrap_or_default().into(),
            pod: tombstone.pod,
        });
        Self {
            run,
            nonces,
            revision: 0,
            being_buried: BTreeSet::new(),
            tombstones: tombstones.collect(),
            trimmed: history.trimmed,
            generation: history.generation,
            news: watch::channel(0).0,
        }
    }

    /// Nonce that distinguishes a run of the daemon from runs of other stores, if the run is known.
    pub fn nonce(&self, run: u64) -> Option<u64> {
        self.nonces.get(&run).copied()
    }

    /// Run of the daemon.
    pub fn run(&self) -> u64 {
        self.run
    }

    /// The generation that a new object begins with.
    pub fn first_generation(&self) -> u64 {
        self.generation + 1
    }

    /// Wakes up with each change.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// The revision of a change that is made now, under the same lock.
    pub fn change(&mut self) -> u64 {
        self.revision += 1;
        self.news.send_replace(self.revision);
        self.revision
    }

    /// Begins a deletion. Returns the record for the store. [`Self::buried`] follows.
    pub fn bury(&mut self, metadata: ObjectMetadata) -> Tombstone {
        self.revision += 1;
        self.being_buried.insert(self.revision);
        self.generation = self.generation.max(metadata.generation);
        Tombstone {
            run: self.run,
            revision: self.revision,
            metadata: Some(metadata.into()),
            owned: 0,
            moved: false,
            pod: String::new(),
        }
    }

    /// A deletion did not come about.
    pub fn kept(&mut self, tombstone: &Tombstone) {
        self.being_buried.remove(&tombstone.revision);
    }

    /// Ends a deletion: from now on watchers can see it.
    pub fn buried(&mut self, tombstone: Tombstone) {
        self.being_buried.remove(&tombstone.revision);
        let buried = Deletion {
            metadata: tombstone.metadata.unwrap_or_default().into(),
            at: (self.run, self.change()),
            owned: tombstone.owned,
            pod: tombstone.pod,
        };
        self.tombstones.push_back(buried);
        while u64::try_from(self.tombstones.len()).is_ok_and(|count| count > MAX_TOMBSTONES) {
            if let Some(oldest) = self.tombstones.pop_front() {
                self.trimmed = oldest.at;
            }
        }
    }

    /// The last migration up to which a VM that was deleted was this node's, as far as that is remembered; 0 when it never
    /// was. `uid` is the UUID of the VM.
    pub fn owned(&self, uid: &str) -> u64 {
        let of_it = self.tombstones.iter().filter(|buried| buried.metadata.uid == uid);
        of_it.map(|buried| buried.owned).max().unwrap_or_default()
    }

    /// Whether the VM of a pod has moved to another node, as far as that is remembered.
    pub fn moved_from(&self, pod: &str) -> bool {
        self.tombstones.iter().any(|buried| buried.pod == pod)
    }

    /// Where the last change is.
    pub fn position(&self) -> Position {
        let pending = self.being_buried.first();
        Position {
            run: self.run,
            revision: self.revision,
            buried: pending.map_or(self.revision, |first| first.saturating_sub(1)),
        }
    }

    /// Returns the deletions since a position, the oldest first.
    ///
    /// # Errors
    ///
    /// The position belongs to a later run, or is older than the history.
    pub fn deletions_since(&self, position: Position) -> Result<Vec<Deletion>, Expired> {
        let Position {
            run,
            revision,
            buried,
        } = position;
        if run > self.run || (run == self.run && revision > self.revision) {
            return Err(Expired);
        }
        // Deletions of this run are remembered with the revision at which they could be seen.
        let known = (run, if run == self.run { revision } else { buried });
        if self.trimmed > known {
            return Err(Expired);
        }
        let since = self.tombstones.iter().filter(|buried| buried.at > known);
        Ok(since.cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, generation: u64) -> ObjectMetadata {
        ObjectMetadata {
            name: name.into(),
            generation,
            ..Default::default()
        }
    }

    fn feed(run: u64, history: DeletionRecords) -> Feed {
        Feed::new(run, BTreeMap::new(), history)
    }

    #[test]
    fn written_deletion_is_reported_by_the_next_run() {
        let mut first = feed(1, DeletionRecords::default());
        first.change();
        let tombstone = first.bury(named("a", 3));
        // Somebody sees a later change, and then the daemon is killed.
        first.change();
        let seen = first.position();
        let history = DeletionRecords {
            tombstones: vec![tombstone.clone()],
            trimmed: (0, 0),
            generation: 3,
        };
        let second = feed(2, history);
        let told = second.deletions_since(seen).unwrap();
        assert_eq!((told.len(), told[0].metadata.name.as_str()), (1, "a"));
        assert_eq!(second.first_generation(), 4);
        // A watcher that has seen the deletion does not receive it again.
        first.buried(tombstone);
        assert_eq!(second.deletions_since(first.position()).unwrap(), []);
    }

    #[test]
    fn deletion_that_failed_is_not_reported() {
        let mut feed = feed(1, DeletionRecords::default());
        let start = feed.position();
        let tombstone = feed.bury(named("a", 3));
        assert_eq!(feed.position().buried, 0);
        feed.kept(&tombstone);
        assert_eq!(feed.position().buried, feed.position().revision);
        assert_eq!(feed.deletions_since(start).unwrap(), []);
    }

    #[test]
    fn a_position_before_what_is_remembered_is_refused() {
        let mut feed = feed(1, DeletionRecords::default());
        let start = feed.position();
        for _ in 0..=MAX_TOMBSTONES {
            let tombstone = feed.bury(named("a", 1));
            feed.buried(tombstone);
        }
        assert_eq!(feed.deletions_since(start), Err(Expired));
        assert_eq!(feed.deletions_since(feed.position()), Ok(Vec::new()));
        let later = Position {
            run: 2,
            ..Position::default()
        };
        assert_eq!(feed.deletions_since(later), Err(Expired));
    }

    #[test]
    fn generations_of_new_disks_are_above_those_of_deleted_ones() {
        let mut feed = feed(1, DeletionRecords::default());
        assert_eq!(feed.first_generation(), 1);
        let tombstone = feed.bury(named("a", 7));
        feed.buried(tombstone);
        assert_eq!(feed.first_generation(), 8);
    }
}

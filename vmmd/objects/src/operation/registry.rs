//! Registry of operations, in the order of their begin: the ids are UUIDs of version 7. An ended
//! operation is removed after an hour, or when 1,000 newer ones have ended. The store receives each
//! begin, end and removal.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use prost::Message as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{failure::Failure, text};
use vmmd_store::{self, OperationRecord, Store};

use super::{Cause, Progress, has_ended, progress::Meter};

/// Ended operations kept.
pub(super) const HISTORY: usize = 1000;
/// For how long, in milliseconds.
pub(super) const KEPT_MS: u64 = 3600 * 1000;

/// State shared by the registry and the handles.
#[derive(Debug)]
pub struct Shared {
    /// Distinguishes the changes of this daemon from those of others.
    nonce: u64,
    store: Store,
    inner: Mutex<Inner>,
    /// The last revision.
    news: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Revision of the last change.
    revision: u64,
    entries: BTreeMap<Uuid, Entry>,
    by_revision: BTreeMap<u64, Uuid>,
    /// When they ended, in milliseconds of Unix time, in that order.
    ended: VecDeque<(u64, Uuid)>,
}

#[derive(Debug)]
struct Entry {
    operation: Arc<v1::Operation>,
    /// Of its beginning.
    made: u64,
    /// Revision of its last change.
    revision: u64,
    began_ms: u64,
    /// State of an operation in progress.
    live: Option<Live>,
}

#[derive(Debug)]
struct Live {
    state: Arc<watch::Sender<Arc<v1::Operation>>>,
    meter: Meter,
    token: CancellationToken,
    cause: Option<Cause>,
    committed: bool,
}

/// Token and state of an operation, for its handle.
pub type Parts = (CancellationToken, Arc<watch::Sender<Arc<v1::Operation>>>);

/// A place in the order of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Nonce of the daemon that issued the position.
    pub nonce: u64,
    /// All changes up to this one have been told.
    pub revision: u64,
}

/// An operation that has changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// After its change.
    pub at: Position,
    /// The operation began after the position from which changes are listed.
    pub new: bool,
    /// As it is now.
    pub operation: Arc<v1::Operation>,
}

impl Shared {
    /// None yet.
    pub fn new(store: Store) -> Self {
        Self {
            nonce: Uuid::new_v4().as_u64_pair().0,
            store,
            inner: Mutex::default(),
            news: watch::Sender::new(0),
        }
    }

    /// Keeps a new operation.
    pub fn insert(&self, id: Uuid, operation: v1::Operation, now_ms: u64) -> Parts {
        let mut inner = self.lock();
        self.prune(&mut inner, now_ms);
        self.store
            .note(&operation.id, Some(&record(&operation, now_ms, 0)));
        let parts = inner.insert(id, operation, now_ms);
        self.news.send_replace(inner.revision);
        parts
    }

    /// Writes the recorded changes to the store.
    pub async fn record(&self) -> Result<(), vmmd_store::Error> {
        self.store.flush().await
    }

    /// Keeps an operation of an earlier daemon. One that has ended is forgotten in its time.
    pub fn restore(&self, id: Uuid, operation: v1::Operation, record: &OperationRecord) -> Parts {
        let mut inner = self.lock();
        let parts = inner.insert(id, operation, record.began_ms);
        if record.ended_ms != 0 {
            let after = inner
                .ended
                .partition_point(|(ended, _)| *ended <= record.ended_ms);
            inner.ended.insert(after, (record.ended_ms, id));
        }
        parts
    }

    /// Watches one.
    pub fn watch(&self, id: Uuid, now_ms: u64) -> Option<watch::Receiver<Arc<v1::Operation>>> {
        let mut inner = self.lock();
        self.prune(&mut inner, now_ms);
        let entry = inner.entries.get(&id)?;
        Some(match &entry.live {
            Some(live) => live.state.subscribe(),
            // No further change follows.
            None => watch::channel(Arc::clone(&entry.operation)).1,
        })
    }

    /// Calls `take` with operations that began before `before` (all when `None`), newest first,
    /// until it returns false. Returns the position in the order of changes.
    pub fn each(
        &self,
        before: Option<Uuid>,
        now_ms: u64,
        mut take: impl FnMut(&Arc<v1::Operation>) -> bool,
    ) -> Position {
        let mut inner = self.lock();
        self.prune(&mut inner, now_ms);
        let entries = match before {
            Some(before) => inner.entries.range(..before),
            None => inner.entries.range::<Uuid, _>(..),
        };
        for (_, entry) in entries.rev() {
            if !take(&entry.operation) {
                break;
            }
        }
        self.position(inner.revision)
    }

    /// Operations that have changed after `revision`, in the order of their last changes, and the
    /// position after them.
    pub fn since(&self, revision: u64) -> (Vec<Change>, Position) {
        let inner = self.lock();
        let changed = inner.by_revision.range(revision.saturating_add(1)..);
        let changed = changed.filter_map(|(at, id)| {
            let entry = inner.entries.get(id)?;
            Some(Change {
                at: self.position(*at),
                new: entry.made > revision,
                operation: Arc::clone(&entry.operation),
            })
        });
        (changed.collect(), self.position(inner.revision))
    }

    /// This daemon's place at a revision.
    pub fn position(&self, revision: u64) -> Position {
        Position {
            nonce: self.nonce,
            revision,
        }
    }

    /// Changes with each change of any operation.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// Changes one that has not ended, unless `change` returns false.
    pub fn change(&self, id: Uuid, change: impl FnOnce(&mut v1::Operation) -> bool) {
        self.modify(id, |_, operation| change(operation));
    }

    /// Records the progress of an operation. Changes of a number of bytes are reported at most ten
    /// times a second.
    pub fn progress(&self, id: Uuid, progress: Progress, message: Option<String>) {
        self.modify(id, |meter, operation| {
            let same = message
                .as_ref()
                .is_none_or(|message| *message == operation.message);
            let Some(progress) = meter.take(progress, operation.progress.as_ref(), !same) else {
                return false;
            };
            operation.phase = v1::OperationPhase::InProgress.into();
            operation.progress = Some(progress);
            if let Some(message) = message {
                operation.message = message;
            }
            true
        });
    }

    /// Notes the end of one, unless it has ended already.
    pub fn end(&self, id: Uuid, end: impl FnOnce(&mut v1::Operation)) {
        let now_ms = text::now_ms();
        let ended = self.modify(id, |_, operation| {
            end(operation);
            operation.end_time = text::timestamp(now_ms);
            true
        });
        if let Some((operation, began_ms)) = ended {
            let record = record(&operation, began_ms, now_ms);
            self.store.note(&operation.id, Some(&record));
            let mut inner = self.lock();
            inner.ended.push_back((now_ms, id));
            self.prune(&mut inner, now_ms);
        }
    }

    /// Changes an operation in progress. Returns its new state and its begin.
    fn modify(
        &self,
        id: Uuid,
        change: impl FnOnce(&mut Meter, &mut v1::Operation) -> bool,
    ) -> Option<(Arc<v1::Operation>, u64)> {
        let mut inner = self.lock();
        let Inner {
            revision,
            entries,
            by_revision,
            ..
        } = &mut *inner;
        let entry = entries.get_mut(&id)?;
        let live = entry.live.as_mut()?;
        let mut operation = v1::Operation::clone(&entry.operation);
        if !change(&mut live.meter, &mut operation) {
            return None;
        }
        let operation = Arc::new(operation);
        *revision += 1;
        by_revision.remove(&entry.revision);
        by_revision.insert(*revision, id);
        entry.revision = *revision;
        let began_ms = entry.began_ms;
        entry.operation = Arc::clone(&operation);
        live.state.send_replace(Arc::clone(&operation));
        if has_ended(&operation) {
            entry.live = None;
        }
        self.news.send_replace(*revision);
        Some((operation, began_ms))
    }

    /// Asks for the end of one, unless that has been done or it has ended.
    pub fn cancel(&self, id: Uuid, cause: Cause) -> Result<(), Failure> {
        let mut inner = self.lock();
        let Some(live) = inner.live(id) else {
            return Ok(());
        };
        if live.cause.is_some() {
            return Ok(());
        }
        if live.committed {
            let message = "the operation can't be cancelled any more: wait for its end";
            return Err(Failure::precondition("NOT_CANCELLABLE", message));
        }
        live.cause = Some(cause);
        live.token.cancel();
        Ok(())
    }

    /// Why it is to end.
    pub fn cause(&self, id: Uuid) -> Option<Cause> {
        self.lock().live(id)?.cause
    }

    /// See [`super::Handle::commit`].
    pub fn commit(&self, id: Uuid) -> bool {
        let mut inner = self.lock();
        let Some(live) = inner.live(id) else {
            return true;
        };
        live.committed = live.cause.is_none();
        live.committed
    }

    /// See [`super::Handle::reopen`].
    pub fn reopen(&self, id: Uuid) {
        if let Some(live) = self.lock().live(id) {
            live.committed = false;
        }
    }

    fn prune(&self, inner: &mut Inner, now_ms: u64) {
        while let Some((ended_ms, id)) = inner.ended.front().copied() {
            if inner.ended.len() <= HISTORY && now_ms.saturating_sub(ended_ms) < KEPT_MS {
                return;
            }
            inner.ended.pop_front();
            if let Some(entry) = inner.entries.remove(&id) {
                inner.by_revision.remove(&entry.revision);
                self.store.note(&id.to_string(), None);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn live(&mut self, id: Uuid) -> Option<&mut Live> {
        self.entries.get_mut(&id)?.live.as_mut()
    }

    fn insert(&mut self, id: Uuid, operation: v1::Operation, began_ms: u64) -> Parts {
        self.revision += 1;
        let token = CancellationToken::new();
        let operation = Arc::new(operation);
        let state = Arc::new(watch::channel(Arc::clone(&operation)).0);
        let live = Live {
            state: Arc::clone(&state),
            meter: Meter::default(),
            token: token.clone(),
            cause: None,
            committed: false,
        };
        let entry = Entry {
            live: (!has_ended(&operation)).then_some(live),
            operation,
            made: self.revision,
            revision: self.revision,
            began_ms,
        };
        self.by_revision.insert(self.revision, id);
        self.entries.insert(id, entry);
        (token, state)
    }
}

fn record(operation: &v1::Operation, began_ms: u64, ended_ms: u64) -> OperationRecord {
    OperationRecord {
        began_ms,
        ended_ms,
        operation: operation.encode_to_vec(),
    }
}

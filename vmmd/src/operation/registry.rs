//! Where operations are kept. Ended ones are forgotten after an hour, or when 1,000 newer ones have ended.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use proto::v1;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Cause, has_ended};
use crate::failure::Failure;

/// Ended operations kept.
pub(super) const HISTORY: usize = 1000;
/// For how long.
pub(super) const KEPT: Duration = Duration::from_secs(3600);

/// What the registry and the handles share.
#[derive(Debug, Default)]
pub struct Shared(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    last: u64,
    /// In the order in which they began.
    entries: BTreeMap<u64, Entry>,
    by_id: HashMap<String, u64>,
    /// When they ended, in that order.
    ended: VecDeque<(Instant, u64)>,
}

#[derive(Debug)]
struct Entry {
    state: Arc<watch::Sender<v1::Operation>>,
    token: CancellationToken,
    cause: Option<Cause>,
    committed: bool,
}

impl Shared {
    /// Keeps a new operation.
    pub fn insert(
        &self,
        operation: v1::Operation,
        now: Instant,
    ) -> (CancellationToken, Arc<watch::Sender<v1::Operation>>) {
        let mut inner = self.lock();
        inner.prune(now);
        inner.last += 1;
        let number = inner.last;
        let token = CancellationToken::new();
        inner.by_id.insert(operation.id.clone(), number);
        let state = Arc::new(watch::channel(operation).0);
        let entry = Entry {
            state: Arc::clone(&state),
            token: token.clone(),
            cause: None,
            committed: false,
        };
        inner.entries.insert(number, entry);
        (token, state)
    }

    /// Looks after one.
    pub fn watch(&self, id: &str, now: Instant) -> Option<watch::Receiver<v1::Operation>> {
        let mut inner = self.lock();
        inner.prune(now);
        Some(inner.entry(id)?.state.subscribe())
    }

    /// All, the newest first.
    pub fn list(&self, now: Instant) -> Vec<v1::Operation> {
        let mut inner = self.lock();
        inner.prune(now);
        let entries = inner.entries.values().rev();
        entries.map(|entry| entry.state.borrow().clone()).collect()
    }

    /// Wishes for its end, unless it is there already.
    pub fn cancel(&self, id: &str, cause: Cause) -> Result<(), Failure> {
        let mut inner = self.lock();
        let Some(entry) = inner.entry(id) else {
            return Ok(());
        };
        if has_ended(&entry.state.borrow()) || entry.cause.is_some() {
            return Ok(());
        }
        if entry.committed {
            let message = "the operation can't be cancelled any more: wait for its end";
            return Err(Failure::precondition("NOT_CANCELLABLE", message));
        }
        entry.cause = Some(cause);
        entry.token.cancel();
        Ok(())
    }

    /// Why it is to end.
    pub fn cause(&self, id: &str) -> Option<Cause> {
        self.lock().entry(id)?.cause
    }

    /// See [`super::Handle::commit`].
    pub fn commit(&self, id: &str) -> bool {
        let mut inner = self.lock();
        let Some(entry) = inner.entry(id) else {
            return true;
        };
        entry.committed = entry.cause.is_none();
        entry.committed
    }

    /// See [`super::Handle::reopen`].
    pub fn reopen(&self, id: &str) {
        if let Some(entry) = self.lock().entry(id) {
            entry.committed = false;
        }
    }

    /// It has ended.
    pub fn ended(&self, id: &str, now: Instant) {
        let mut inner = self.lock();
        if let Some(number) = inner.by_id.get(id).copied() {
            inner.ended.push_back((now, number));
        }
        inner.prune(now);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn entry(&mut self, id: &str) -> Option<&mut Entry> {
        self.entries.get_mut(self.by_id.get(id)?)
    }

    fn prune(&mut self, now: Instant) {
        while let Some((ended, number)) = self.ended.front().copied() {
            if self.ended.len() <= HISTORY && now.saturating_duration_since(ended) < KEPT {
                return;
            }
            self.ended.pop_front();
            if let Some(entry) = self.entries.remove(&number) {
                self.by_id.remove(&entry.state.borrow().id);
            }
        }
    }
}

//! The objects of a kind as all watchers have them: one snapshot for each change, however many watch.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use vmmd_objects::registry::{Kind, Record as _, Registry, Snapshot};

/// The newest snapshot.
#[derive(Debug)]
pub struct Shared<K: Kind>(Mutex<Option<Arc<Latest<K>>>>);

/// A snapshot that watchers share.
#[derive(Debug)]
pub struct Latest<K: Kind> {
    /// All objects.
    pub snapshot: Snapshot<K>,
    /// How many objects have been missing in a snapshot that were in the one before, since the daemon was started.
    pub removals: u64,
}

impl<K: Kind> Default for Shared<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Kind> Shared<K> {
    /// The objects as they are now. Objects that have not changed are those of the snapshot before.
    pub fn latest(&self, registry: &Registry<K>) -> Arc<Latest<K>> {
        let mut newest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(newest) = newest.as_ref()
            && newest.snapshot.at == registry.position()
        {
            return Arc::clone(newest);
        }
        let latest = Arc::new(after(newest.as_deref(), registry.after(None)));
        *newest = Some(Arc::clone(&latest));
        latest
    }
}

pub(super) fn after<K: Kind>(before: Option<&Latest<K>>, mut snapshot: Snapshot<K>) -> Latest<K> {
    let objects = before.into_iter().flat_map(|before| &before.snapshot.objects);
    let mut known: BTreeMap<_, _> = objects.map(|seen| (seen.record.uid(), seen)).collect();
    for seen in &mut snapshot.objects {
        if let Some(old) = known.remove(seen.record.uid())
            && old.revision == seen.revision
        {
            *seen = Arc::clone(old);
        }
    }
    let gone = u64::try_from(known.len()).unwrap_or(u64::MAX);
    Latest {
        removals: before.map_or(0, |before| before.removals).saturating_add(gone),
        snapshot,
    }
}

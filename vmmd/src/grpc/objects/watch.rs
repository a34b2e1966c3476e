//! Watches of objects: the current objects, or the changes since a cursor, then each change. A
//! watcher receives the difference between its known state and the current state, so that a slow
//! reader misses only intermediate states.
//!
//! Invariant: a client that has applied the events up to a cursor has the objects of that time,
//! except objects with later changes. Therefore events are sent in the order of their revisions,
//! including the events of the first snapshot.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use vmmd_api::v1::{ObjectMetadata, WatchEventType};
use vmmd_host::failure::Failure;
use vmmd_objects::{
    feed::{Deletion, Position},
    registry::{Kind, Objects, Record as _, Seen},
};

use super::{Served, Watched, cursor};
use crate::{
    grpc::{
        cursor::{Cursor, expired},
        filter::Filter,
        mask::Mask,
    },
    host::Host,
};

/// The stream of events.
pub type Stream<K> = ReceiverStream<Result<<K as Watched>::Event, Status>>;

/// Events ready for a watcher that reads slowly. Each has an object of its own.
const READY: usize = 4;

/// The state of a watcher: the events that were sent to it.
struct Told<K: Kind> {
    /// The objects, by uid; all watchers share them.
    known: BTreeMap<Vec<u8>, Arc<Seen<K>>>,
    /// All changes up to this revision. Nothing when none.
    until: Option<u64>,
    /// All removals up to this number ([`Objects::removals`]).
    removals: u64,
}

/// Something to be told.
struct Event<K: Kind> {
    kind: WatchEventType,
    what: What<K>,
    at: Position,
}

enum What<K: Kind> {
    There(Arc<Seen<K>>),
    /// Last known state of the object.
    Gone(Arc<Seen<K>>),
    /// Last known metadata of the object.
    Deletion(Box<ObjectMetadata>),
}

/// Watches the objects of a filter, from a cursor on if that is given.
pub fn watch<K: Watched>(
    host: &Arc<Host>,
    filter: Filter,
    mask: Mask,
    from: &str,
) -> Result<Stream<K>, Failure> {
    let registry = K::registry(host);
    let from = match from {
        "" => None,
        text => {
            let cursor = Cursor::read("cursor", text, &filter)?;
            Some(cursor.position(|run| registry.nonce(run))?)
        }
    };
    let objects = registry.lock();
    // Changes from here on wake the watcher.
    let news = objects.feed().news();
    let mut told = Told {
        known: BTreeMap::new(),
        until: None,
        removals: objects.removals(),
    };
    let synced = objects.feed().position();
    let first = match from {
        None => difference(&mut told, &objects, Position::default(), &filter),
        Some(from) => {
            let deletions = objects.feed().deletions_since(from).map_err(|_| expired())?;
            let first = since(from, &deletions, &objects, &filter);
            // The holder of the cursor knows the objects that have not changed since.
            let there = objects.changed(None).into_iter();
            let there = there.filter(|seen| K::matches(&filter, seen));
            told.known = there.map(|seen| (seen.record.uid().to_vec(), seen)).collect();
            told.until = Some(synced.revision);
            first
        }
    };
    drop(objects);
    let (sender, receiver) = mpsc::channel(READY);
    let watcher = Watcher::<K> {
        host: Arc::clone(host),
        filter,
        mask,
        sender: sender.clone(),
        told,
        at: from.unwrap_or_default(),
    };
    let stopping = host.stopping.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = watcher.follow(first, synced, news) => {}
            () = sender.closed() => {}
            () = stopping.cancelled() => {
                let _ = sender.send(Err(Failure::stopping().into())).await;
            }
        }
    });
    Ok(ReceiverStream::new(receiver))
}

struct Watcher<K: Watched> {
    host: Arc<Host>,
    filter: Filter,
    mask: Mask,
    sender: mpsc::Sender<Result<K::Event, Status>>,
    told: Told<K>,
    /// Position of the last event.
    at: Position,
}

/// The watcher has gone.
struct Gone;

impl<K: Watched> Watcher<K> {
    async fn follow(
        mut self,
        first: Vec<Event<K>>,
        synced: Position,
        mut news: tokio::sync::watch::Receiver<u64>,
    ) -> Result<(), Gone> {
        self.send(first).await?;
        self.at = synced;
        self.respond(WatchEventType::Synced, None).await?;
        while news.changed().await.is_ok() {
            let events = {
                let objects = K::registry(&self.host).lock();
                difference(&mut self.told, &objects, self.at, &self.filter)
            };
            self.send(events).await?;
        }
        Ok(())
    }

    async fn send(&mut self, events: Vec<Event<K>>) -> Result<(), Gone> {
        for Event { kind, what, at } in events {
            self.at = at;
            let object = match what {
                What::Gone(seen) => K::known(&self.host, &seen),
                What::Deletion(metadata) => K::gone(*metadata),
                What::There(seen) => {
                    let known = vec![K::known(&self.host, &seen)];
                    match K::look_at(&self.host, vec![Arc::clone(&seen)], known).await {
                        Ok(mut objects) => objects.pop().unwrap_or_default(),
                        // Its file does not answer; the rest is known.
                        Err(_) => K::known(&self.host, &seen),
                    }
                }
            };
            self.respond(kind, Some(object)).await?;
        }
        Ok(())
    }

    async fn respond(&self, kind: WatchEventType, object: Option<K::Object>) -> Result<(), Gone> {
        let cursor = cursor::<K>(&self.host, self.at, &self.filter).to_string();
        let object = object.map(|object| K::masked(object, &self.mask));
        let event = K::event(kind, object, cursor);
        self.sender.send(Ok(event)).await.map_err(|_| Gone)
    }
}

/// The events that a watcher lacks; `at` is the place of its last event. Objects that have not changed are not compared.
fn difference<K: Served>(
    told: &mut Told<K>,
    objects: &Objects<K>,
    at: Position,
    filter: &Filter,
) -> Vec<Event<K>> {
    let mut gone = Vec::new();
    if told.removals != objects.removals() {
        told.known.retain(|uid, seen| {
            let is_there = objects.shows(uid);
            gone.extend((!is_there).then(|| Arc::clone(seen)));
            is_there
        });
    }
    let changed = objects.changed(told.until).into_iter();
    let (matching, other): (Vec<_>, Vec<_>) = changed.partition(|seen| K::matches(filter, seen));
    let other = other
        .iter()
        .filter_map(|seen| told.known.remove(seen.record.uid()));
    gone.extend(other);
    let gone = gone.into_iter().map(|seen| Event {
        kind: WatchEventType::Deleted,
        what: What::Gone(seen),
        // The watcher has no later event.
        at,
    });
    let now = objects.feed().position();
    let mut events: Vec<_> = gone.collect();
    events.extend(matching.into_iter().map(|seen| {
        let before = told.known.insert(seen.record.uid().to_vec(), Arc::clone(&seen));
        Event {
            kind: before.map_or(WatchEventType::Added, |_| WatchEventType::Modified),
            at: place(&seen, now),
            what: What::There(seen),
        }
    }));
    told.until = Some(now.revision);
    told.removals = objects.removals();
    events
}

/// Returns the events for a watcher that has all events until `from`. Its known objects are unknown
/// here: an object that has changed and does not match the filter may need a deletion event.
fn since<K: Served>(
    from: Position,
    deletions: &[Deletion],
    objects: &Objects<K>,
    filter: &Filter,
) -> Vec<Event<K>> {
    let now = objects.feed().position();
    let gone = deletions
        .iter()
        .filter(|deletion| filter.may_match_object(Some(&deletion.metadata)));
    let gone = gone.map(|deletion| {
        let (run, revision) = deletion.at;
        Event {
            kind: WatchEventType::Deleted,
            what: What::Deletion(Box::new(deletion.metadata.clone())),
            at: Position {
                run,
                revision,
                buried: if run == now.run {
                    revision.min(now.buried)
                } else {
                    revision
                },
            },
        }
    });
    let changed = objects.changed((from.run == now.run).then_some(from.revision));
    let changed = changed.into_iter().filter_map(|seen| {
        let may_match = filter.may_match_object(Some(&seen.record.metadata()));
        let kind = match (K::matches(filter, &seen), may_match) {
            (true, _) if seen.record.made() > (from.run, from.revision) => WatchEventType::Added,
            (true, _) => WatchEventType::Modified,
            (false, true) => WatchEventType::Deleted,
            (false, false) => return None,
        };
        Some(Event {
            kind,
            at: place(&seen, now),
            what: What::There(seen),
        })
    });
    let mut events: Vec<_> = gone.chain(changed).collect();
    events.sort_by_key(|event| (event.at.run, event.at.revision));
    events
}

/// Position of a watcher that has received all states up to this one; `now` is the place of the last change.
fn place<K: Kind>(seen: &Seen<K>, now: Position) -> Position {
    Position {
        revision: seen.revision,
        buried: seen.revision.min(now.buried),
        ..now
    }
}

#[cfg(test)]
mod tests;

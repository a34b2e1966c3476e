//! Watches of objects: the current objects, or the changes since a cursor, then each change. A
//! watcher receives the difference between its known state and the current state, so that a slow
//! reader misses only intermediate states.
//!
//! Invariant: a client that has applied the events up to a cursor has the objects of that time,
//! except objects with later changes. Therefore events are sent in the order of their revisions,
//! including the events of the first snapshot.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use vmmd_api::v1::{ObjectFilter, ObjectMetadata, WatchEventType};
use vmmd_host::failure::Failure;
use vmmd_objects::{
    feed::{Deletion, Position},
    registry::{Kind, Record as _, Seen, Snapshot},
};

use super::{Served, Shared, cursor, shared::Latest};
use crate::{
    grpc::{
        cursor::{Cursor, expired},
        filter::Filter,
    },
    host::Host,
};

/// The stream of events.
pub type Stream<K> = ReceiverStream<Result<<K as Served>::Event, Status>>;

/// Events ready for a watcher that reads slowly. Each has an object of its own.
const READY: usize = 4;

/// The state of a watcher: the events that were sent to it.
struct Told<K: Kind> {
    /// The objects, by uid; all watchers share them.
    known: BTreeMap<Vec<u8>, Arc<Seen<K>>>,
    /// All changes up to this revision. Nothing when none.
    until: Option<u64>,
    /// All removals up to this number ([`Latest::removals`]).
    removals: Option<u64>,
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
pub fn watch<K: Served>(
    host: &Arc<Host>,
    shared: &Arc<Shared<K>>,
    filter: Option<&ObjectFilter>,
    from: &str,
) -> Result<Stream<K>, Failure> {
    let filter = Filter::of_objects(K::NAME, filter)?;
    // Changes from here on wake the watcher.
    let registry = K::registry(host);
    let mut news = registry.news();
    news.mark_unchanged();
    let mut told = Told {
        known: BTreeMap::new(),
        until: None,
        removals: None,
    };
    let (first, synced, at) = match from {
        "" => {
            let latest = shared.latest(registry);
            let first = difference::<K>(&mut told, &latest, Position::default(), &filter);
            (first, latest.snapshot.at, Position::default())
        }
        text => {
            let from = Cursor::read("cursor", text, &filter)?.position_in(|run| registry.nonce(run))?;
            let (buried, snapshot) = registry.since(from).map_err(|_| expired())?;
            let first = since::<K>(from, &buried, &snapshot, &filter);
            // The holder of the cursor knows the objects that have not changed since.
            let there = snapshot.objects.iter().filter(|seen| matches(seen, &filter));
            told.known = there
                .map(|seen| (seen.record.uid().to_vec(), Arc::clone(seen)))
                .collect();
            told.until = Some(snapshot.at.revision);
            (first, snapshot.at, from)
        }
    };
    let (sender, receiver) = mpsc::channel(READY);
    let watcher = Watcher::<K> {
        host: Arc::clone(host),
        shared: Arc::clone(shared),
        filter,
        sender: sender.clone(),
        told,
        at,
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

struct Watcher<K: Served> {
    host: Arc<Host>,
    shared: Arc<Shared<K>>,
    filter: Filter,
    sender: mpsc::Sender<Result<K::Event, Status>>,
    told: Told<K>,
    /// Position of the last event.
    at: Position,
}

/// The watcher has gone.
struct Gone;

impl<K: Served> Watcher<K> {
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
            let latest = self.shared.latest(K::registry(&self.host));
            let events = difference::<K>(&mut self.told, &latest, self.at, &self.filter);
            drop(latest);
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
                What::There(seen) => match K::look_at(&self.host, vec![Arc::clone(&seen)]).await {
                    Ok(mut objects) => objects.pop().unwrap_or_default(),
                    // Its file does not answer; the rest is known.
                    Err(_) => K::known(&self.host, &seen),
                },
            };
            self.respond(kind, Some(object)).await?;
        }
        Ok(())
    }

    async fn respond(&self, kind: WatchEventType, object: Option<K::Object>) -> Result<(), Gone> {
        let cursor = cursor::<K>(&self.host, self.at, &self.filter).to_string();
        let event = K::event(kind, object, cursor);
        self.sender.send(Ok(event)).await.map_err(|_| Gone)
    }
}

/// The events that a watcher lacks; `at` is the place of its last event. Objects that have not changed are not compared.
fn difference<K: Kind>(
    told: &mut Told<K>,
    latest: &Latest<K>,
    at: Position,
    filter: &Filter,
) -> Vec<Event<K>> {
    let snapshot = &latest.snapshot;
    let changed = by_revision(snapshot, |seen| {
        told.until.is_none_or(|until| seen.revision > until)
    });
    let mut gone = Vec::new();
    if told.removals != Some(latest.removals) {
        let there: BTreeSet<_> = snapshot.objects.iter().map(|seen| seen.record.uid()).collect();
        let known = told.known.keys().filter(|uid| !there.contains(uid.as_slice()));
        let left: Vec<_> = known.cloned().collect();
        gone.extend(left.iter().filter_map(|uid| told.known.remove(uid)));
    }
    let (matching, other): (Vec<_>, Vec<_>) = changed.into_iter().partition(|seen| matches(seen, filter));
    gone.extend(
        other
            .into_iter()
            .filter_map(|seen| told.known.remove(seen.record.uid())),
    );
    let gone = gone.into_iter().map(|seen| Event {
        kind: WatchEventType::Deleted,
        what: What::Gone(seen),
        // The watcher has no later event.
        at,
    });
    let mut events: Vec<_> = gone.collect();
    events.extend(matching.into_iter().filter_map(|seen| {
        let before = told.known.insert(seen.record.uid().to_vec(), Arc::clone(seen));
        let kind = match before {
            None => WatchEventType::Added,
            Some(before) if before.revision != seen.revision => WatchEventType::Modified,
            Some(_) => return None,
        };
        Some(Event {
            kind,
            what: What::There(Arc::clone(seen)),
            at: place(seen, snapshot),
        })
    }));
    told.until = Some(snapshot.at.revision);
    told.removals = Some(latest.removals);
    events
}

/// Returns the events for a watcher that has all events until `from`. Its known objects are unknown
/// here: an object that has changed and does not match the filter may need a deletion event.
fn since<K: Kind>(
    from: Position,
    buried: &[Deletion],
    snapshot: &Snapshot<K>,
    filter: &Filter,
) -> Vec<Event<K>> {
    let run = snapshot.at.run;
    let gone = buried
        .iter()
        .filter(|buried| filter.may_match_object(Some(&buried.metadata)));
    let gone = gone.map(|buried| {
        let (run_of, revision) = buried.at;
        Event {
            kind: WatchEventType::Deleted,
            what: What::Deletion(Box::new(buried.metadata.clone())),
            at: Position {
                run: run_of,
                revision,
                buried: if run_of == run {
                    revision.min(snapshot.at.buried)
                } else {
                    revision
                },
            },
        }
    });
    let changed = by_revision(snapshot, |seen| from.run != run || seen.revision > from.revision);
    let changed = changed.into_iter().filter_map(|seen| {
        let made = seen.record.made();
        let kind = match (
            matches(seen, filter),
            filter.may_match_object(Some(&seen.record.metadata())),
        ) {
            (true, _) if made > (from.run, from.revision) => WatchEventType::Added,
            (true, _) => WatchEventType::Modified,
            (false, true) => WatchEventType::Deleted,
            (false, false) => return None,
        };
        Some(Event {
            kind,
            what: What::There(Arc::clone(seen)),
            at: place(seen, snapshot),
        })
    });
    let mut events: Vec<_> = gone.chain(changed).collect();
    events.sort_by_key(|event| (event.at.run, event.at.revision));
    events
}

fn matches<K: Kind>(seen: &Seen<K>, filter: &Filter) -> bool {
    filter.matches_object(Some(&seen.record.metadata()))
}

fn by_revision<K: Kind>(snapshot: &Snapshot<K>, which: impl Fn(&Seen<K>) -> bool) -> Vec<&Arc<Seen<K>>> {
    let mut objects: Vec<_> = snapshot.objects.iter().filter(|seen| which(seen)).collect();
    objects.sort_by_key(|seen| seen.revision);
    objects
}

/// Position of a watcher that has received all states up to this one.
fn place<K: Kind>(seen: &Seen<K>, snapshot: &Snapshot<K>) -> Position {
    Position {
        revision: seen.revision,
        buried: seen.revision.min(snapshot.at.buried),
        ..snapshot.at
    }
}

#[cfg(test)]
mod tests;

//! Watches of objects: what is there, or what has changed since a cursor, then each change. A watcher gets the difference between
//! what it knows and what is, so that who reads slowly misses states in between and nothing else.
//!
//! Always: who has applied the events up to one with a cursor has the objects as they were then, but for those that have
//! changed after it; so events are sent in the order of their revisions, those of the first look too.

use std::{collections::BTreeMap, sync::Arc};

use proto::v1::{ObjectFilter, WatchEventType};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{Kept, Kind, Snapshot, cursor};
use crate::{
    failure::Failure,
    grpc::{
        cursor::{Cursor, expired},
        filter::Filter,
    },
    host::Host,
    registry::feed::{Buried, Position},
};

/// The stream of events.
pub type Stream<K> = ReceiverStream<Result<<K as Kind>::Event, Status>>;

/// Events ready for a watcher that reads slowly.
const READY: usize = 16;

/// What a watcher has been told of, by uid.
type Known<S> = BTreeMap<Vec<u8>, S>;

/// Something to be told.
struct Event<K: Kind> {
    kind: WatchEventType,
    what: What<K>,
    at: Position,
}

enum What<K: Kind> {
    There(Box<K::Seen>),
    /// What was last known of it.
    Gone(Box<K::Object>),
}

/// Watches the objects of a filter, from a cursor on if that is given.
pub fn watch<K: Kind>(
    host: &Arc<Host>,
    filter: Option<&ObjectFilter>,
    from: &str,
) -> Result<Stream<K>, Failure> {
    let filter = Filter::of_objects(K::NAME, filter)?;
    // What changes from here on is heard.
    let mut news = K::news(host);
    news.mark_unchanged();
    let mut known = Known::<K::Seen>::new();
    let (first, snapshot, at) = match from {
        "" => {
            let snapshot = K::after(host, None);
            let first = difference::<K>(&mut known, &snapshot, Position::default(), &filter);
            (first, snapshot, Position::default())
        }
        text => {
            let from = Cursor::read("cursor", text, &filter)?.position_in(|run| K::nonce(host, run))?;
            let (buried, snapshot) = K::since(host, from).map_err(|_| expired())?;
            let first = since::<K>(from, &buried, &snapshot, &filter);
            // What has not changed since is known to who has the cursor.
            known.extend(present(&snapshot, &filter));
            (first, snapshot, from)
        }
    };
    let (sender, receiver) = mpsc::channel(READY);
    let watcher = Watcher::<K> {
        host: Arc::clone(host),
        filter,
        sender: sender.clone(),
        known,
        at,
    };
    let stopping = host.stopping.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = watcher.follow(first, snapshot.at, news) => {}
            () = sender.closed() => {}
            () = stopping.cancelled() => {
                let _ = sender.send(Err(Failure::stopping().into())).await;
            }
        }
    });
    Ok(ReceiverStream::new(receiver))
}

struct Watcher<K: Kind> {
    host: Arc<Host>,
    filter: Filter,
    sender: mpsc::Sender<Result<K::Event, Status>>,
    known: Known<K::Seen>,
    /// Of the last event.
    at: Position,
}

/// The watcher has gone.
struct Gone;

impl<K: Kind> Watcher<K> {
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
            let snapshot = K::after(&self.host, None);
            let events = difference::<K>(&mut self.known, &snapshot, self.at, &self.filter);
            self.send(events).await?;
        }
        Ok(())
    }

    async fn send(&mut self, events: Vec<Event<K>>) -> Result<(), Gone> {
        for Event { kind, what, at } in events {
            self.at = at;
            let object = match what {
                What::Gone(object) => *object,
                What::There(seen) => match K::look_at(&self.host, vec![(*seen).clone()]).await {
                    Ok(mut objects) => objects.pop().unwrap_or_default(),
                    // Its file does not answer; the rest is known.
                    Err(_) => K::known(&seen),
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

/// What must be told to someone who knows `known` since `at`.
fn difference<K: Kind>(
    known: &mut Known<K::Seen>,
    snapshot: &Snapshot<K::Seen>,
    at: Position,
    filter: &Filter,
) -> Vec<Event<K>> {
    let now: Known<K::Seen> = present(snapshot, filter).collect();
    let gone = known.iter().filter(|(uid, _)| !now.contains_key(*uid));
    let gone = gone.map(|(_, seen)| Event {
        kind: WatchEventType::Deleted,
        what: What::Gone(Box::new(K::known(seen))),
        // Nothing later has been told yet.
        at,
    });
    let mut events: Vec<_> = gone.collect();
    let there = by_revision(snapshot).filter(|seen| matches(*seen, filter));
    events.extend(there.filter_map(|seen| {
        let kind = match known.get(seen.uid()) {
            None => WatchEventType::Added,
            Some(old) if old.revision() != seen.revision() => WatchEventType::Modified,
            Some(_) => return None,
        };
        Some(Event {
            kind,
            what: What::There(Box::new(seen.clone())),
            at: place(seen, snapshot),
        })
    }));
    *known = now;
    events
}

/// What must be told to someone who has been told everything until `from`. Which disks of the filter it knows is not
/// known: of one that has changed and is not of the filter now, it may have to be told that it is gone.
fn since<K: Kind>(
    from: Position,
    buried: &[Buried],
    snapshot: &Snapshot<K::Seen>,
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
            what: What::Gone(Box::new(K::buried(buried.metadata.clone()))),
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
    let changed = by_revision(snapshot).filter(|seen| from.run != run || seen.revision() > from.revision);
    let changed = changed.filter_map(|seen| {
        let made = seen.made();
        let kind = match (
            matches(seen, filter),
            filter.may_match_object(Some(&seen.metadata())),
        ) {
            (true, _) if made > (from.run, from.revision) => WatchEventType::Added,
            (true, _) => WatchEventType::Modified,
            (false, true) => WatchEventType::Deleted,
            (false, false) => return None,
        };
        Some(Event {
            kind,
            what: What::There(Box::new(seen.clone())),
            at: place(seen, snapshot),
        })
    });
    let mut events: Vec<_> = gone.chain(changed).collect();
    events.sort_by_key(|event| (event.at.run, event.at.revision));
    events
}

fn matches(seen: &impl Kept, filter: &Filter) -> bool {
    filter.matches_object(Some(&seen.metadata()))
}

/// The objects of the filter, by uid.
fn present<S: Kept>(snapshot: &Snapshot<S>, filter: &Filter) -> impl Iterator<Item = (Vec<u8>, S)> {
    let there = snapshot.objects.iter().filter(|seen| matches(*seen, filter));
    there.map(|seen| (seen.uid().to_vec(), seen.clone()))
}

fn by_revision<S: Kept>(snapshot: &Snapshot<S>) -> impl Iterator<Item = &S> {
    let mut objects: Vec<_> = snapshot.objects.iter().collect();
    objects.sort_by_key(|seen| seen.revision());
    objects.into_iter()
}

/// Where someone is who has been told of all states up to this one.
fn place<S: Kept>(seen: &S, snapshot: &Snapshot<S>) -> Position {
    Position {
        revision: seen.revision(),
        buried: seen.revision().min(snapshot.at.buried),
        ..snapshot.at
    }
}

//! `WatchDisks`: what is there, or what has changed since a cursor, then each change. A watcher gets the difference between
//! what it knows and what is, so that who reads slowly misses states in between and nothing else.
//!
//! Always: who has applied the events up to one with a cursor has the disks as they were then, but for those that have
//! changed after it; so events are sent in the order of their revisions, those of the first look too.

use std::{collections::BTreeMap, sync::Arc};

use proto::v1::{self, WatchDisksRequest, WatchDisksResponse, WatchEventType};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::{
    disk::{Buried, Seen, Snapshot, describe},
    failure::Failure,
    grpc::{
        cursor::{Cursor, expired},
        filter::Filter,
    },
    host::Host,
    vm::table::Position,
};

/// The stream of events.
pub type Stream = ReceiverStream<Result<WatchDisksResponse, Status>>;

/// What cursors of disks are told from those of other kinds by.
pub const KIND: &str = "disk";
/// Events ready for a watcher that reads slowly.
const READY: usize = 16;

/// What a watcher has been told of, by uid.
type Known = BTreeMap<Vec<u8>, Seen>;

/// Something to be told.
#[derive(Debug)]
struct Event {
    kind: WatchEventType,
    what: What,
    at: Position,
}

#[derive(Debug)]
enum What {
    There(Box<Seen>),
    /// What was last known of it.
    Gone(Box<v1::Disk>),
}

/// A cursor of lists and watches of disks.
pub fn cursor(host: &Host, position: Position, filter: &Filter) -> Cursor {
    let nonce = host.disks.nonce(position.run).unwrap_or_default();
    Cursor::at(nonce, position, filter)
}

/// Watches the disks of the request's filter.
pub fn watch(host: &Arc<Host>, request: &WatchDisksRequest) -> Result<Stream, Failure> {
    let filter = Filter::of_objects(KIND, request.filter.as_ref())?;
    let folder = host.disk_folder();
    // What changes from here on is heard.
    let mut news = host.disks.news();
    news.mark_unchanged();
    let mut known = Known::new();
    let (first, snapshot, at) = match request.cursor.as_str() {
        "" => {
            let snapshot = host.disks.after(&folder, None);
            let first = difference(&mut known, &snapshot, Position::default(), &filter);
            (first, snapshot, Position::default())
        }
        text => {
            let from = Cursor::read("cursor", text, &filter)?.position_in(|run| host.disks.nonce(run))?;
            let (buried, snapshot) = host.disks.since(&folder, from).map_err(|_| expired())?;
            let first = since(from, &buried, &snapshot, &filter);
            // What has not changed since is known to who has the cursor.
            known.extend(present(&snapshot, &filter));
            (first, snapshot, from)
        }
    };
    let (sender, receiver) = mpsc::channel(READY);
    let watcher = Watcher {
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

struct Watcher {
    host: Arc<Host>,
    filter: Filter,
    sender: mpsc::Sender<Result<WatchDisksResponse, Status>>,
    known: Known,
    /// Of the last event.
    at: Position,
}

/// The watcher has gone.
struct Gone;

impl Watcher {
    async fn follow(
        mut self,
        first: Vec<Event>,
        synced: Position,
        mut news: tokio::sync::watch::Receiver<u64>,
    ) -> Result<(), Gone> {
        self.send(first).await?;
        self.at = synced;
        self.respond(WatchEventType::Synced, None).await?;
        while news.changed().await.is_ok() {
            let snapshot = self.host.disks.after(&self.host.disk_folder(), None);
            let events = difference(&mut self.known, &snapshot, self.at, &self.filter);
            self.send(events).await?;
        }
        Ok(())
    }

    async fn send(&mut self, events: Vec<Event>) -> Result<(), Gone> {
        for Event { kind, what, at } in events {
            self.at = at;
            let disk = match what {
                What::Gone(disk) => *disk,
                What::There(seen) => match describe::look_at(&self.host, vec![(*seen).clone()]).await {
                    Ok(mut disks) => disks.pop().unwrap_or_default(),
                    // Its file does not answer; the rest is known.
                    Err(_) => seen.disk,
                },
            };
            self.respond(kind, Some(disk)).await?;
        }
        Ok(())
    }

    async fn respond(&self, kind: WatchEventType, disk: Option<v1::Disk>) -> Result<(), Gone> {
        let response = WatchDisksResponse {
            r#type: kind.into(),
            disk,
            cursor: cursor(&self.host, self.at, &self.filter).to_string(),
        };
        self.sender.send(Ok(response)).await.map_err(|_| Gone)
    }
}

/// What must be told to someone who knows `known` since `at`.
fn difference(known: &mut Known, snapshot: &Snapshot, at: Position, filter: &Filter) -> Vec<Event> {
    let now: Known = present(snapshot, filter).collect();
    let gone = known.iter().filter(|(uid, _)| !now.contains_key(*uid));
    let gone = gone.map(|(_, seen)| Event {
        kind: WatchEventType::Deleted,
        what: What::Gone(Box::new(seen.disk.clone())),
        // Nothing later has been told yet.
        at,
    });
    let mut events: Vec<_> = gone.collect();
    let there = by_revision(snapshot).filter(|seen| matches(seen, filter));
    events.extend(there.filter_map(|seen| {
        let kind = match known.get(&seen.record.uid) {
            None => WatchEventType::Added,
            Some(old) if old.revision != seen.revision => WatchEventType::Modified,
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
fn since(from: Position, buried: &[Buried], snapshot: &Snapshot, filter: &Filter) -> Vec<Event> {
    let run = snapshot.at.run;
    let gone = buried
        .iter()
        .filter(|buried| filter.may_match_object(Some(&buried.metadata)));
    let gone = gone.map(|buried| {
        let (run_of, revision) = buried.at;
        Event {
            kind: WatchEventType::Deleted,
            what: What::Gone(Box::new(v1::Disk {
                metadata: Some(buried.metadata.clone()),
                ..Default::default()
            })),
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
    let changed = by_revision(snapshot).filter(|seen| from.run != run || seen.revision > from.revision);
    let changed = changed.filter_map(|seen| {
        let made = (seen.record.made_run, seen.record.made_revision);
        let kind = match (
            matches(seen, filter),
            filter.may_match_object(seen.disk.metadata.as_ref()),
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

fn matches(seen: &Seen, filter: &Filter) -> bool {
    filter.matches_object(seen.disk.metadata.as_ref())
}

/// The disks of the filter, by uid.
fn present(snapshot: &Snapshot, filter: &Filter) -> impl Iterator<Item = (Vec<u8>, Seen)> {
    let there = snapshot.disks.iter().filter(|seen| matches(seen, filter));
    there.map(|seen| (seen.record.uid.clone(), seen.clone()))
}

fn by_revision(snapshot: &Snapshot) -> impl Iterator<Item = &Seen> {
    let mut disks: Vec<_> = snapshot.disks.iter().collect();
    disks.sort_by_key(|seen| seen.revision);
    disks.into_iter()
}

/// Where someone is who has been told of all states up to this one.
fn place(seen: &Seen, snapshot: &Snapshot) -> Position {
    Position {
        revision: seen.revision,
        buried: seen.revision.min(snapshot.at.buried),
        ..snapshot.at
    }
}

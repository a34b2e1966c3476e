//! `WatchVms`: the current VMs, or the changes since a cursor, then each change. A watcher that
//! falls far behind is not dropped: it receives the difference between its known state and the
//! current state, and may miss intermediate states.
//!
//! Invariant: a client that has applied the events up to a cursor has the VMs of that time, except
//! VMs with later changes. Therefore events are sent in the order of their revisions, including the
//! events of the first snapshot.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::{
    broadcast::{self, error::RecvError},
    mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use vmmd_api::v1::{Vm, WatchEventType, WatchVmsRequest, WatchVmsResponse};
use vmmd_host::failure::Failure;
use vmmd_objects::feed::{Deletion, Position};

use super::{
    cursor::{Cursor, expired},
    filter::Filter,
    mask::Mask,
};
use crate::{
    host::Host,
    registry::vms::{Change, ChangeKind, Seen, Snapshot},
};

/// The stream of events.
pub type Stream = ReceiverStream<Result<WatchVmsResponse, Status>>;

/// Events ready for a watcher that reads slowly; more wait in the registry's own queue.
const READY: usize = 16;

/// VMs that a watcher knows, by uid.
type Known = BTreeMap<String, Arc<Vm>>;

/// Something to be told.
type Event = (WatchEventType, Arc<Vm>, Position);

/// Watches the VMs of the request's filter.
pub fn watch(host: Arc<Host>, request: &WatchVmsRequest) -> Result<Stream, Failure> {
    let filter = Filter::new(request.filter.as_ref(), &request.name)?;
    let mask = Mask::new(&request.fields)?;
    let (sender, receiver) = mpsc::channel(READY);
    let (first, at, snapshot, changes) = match request.cursor.as_str() {
        "" => {
            let (snapshot, changes) = host.vms.subscribe();
            (Vec::new(), Position::default(), snapshot, changes)
        }
        cursor => {
            let from = Cursor::read("cursor", cursor, &filter)?.position(&host.vms)?;
            let (buried, snapshot, changes) = host.vms.resume(from).map_err(|_| expired())?;
            (since(from, &buried, &snapshot, &filter), from, snapshot, changes)
        }
    };
    let mut known = Known::new();
    let first = if request.cursor.is_empty() {
        difference(&mut known, &snapshot, at, &filter)
    } else {
        // The holder of the cursor knows the VMs that have not changed since.
        known.extend(present(&snapshot, &filter));
        first
    };
    let watcher = Watcher {
        host: Arc::clone(&host),
        filter,
        mask,
        sender: sender.clone(),
        known,
        at,
    };
    tokio::spawn(async move {
        tokio::select! {
            _ = watcher.follow(first, snapshot.at, changes) => {}
            () = sender.closed() => {}
            () = host.stopping.cancelled() => {
                let _ = sender.send(Err(Failure::stopping().into())).await;
            }
        }
    });
    Ok(ReceiverStream::new(receiver))
}

struct Watcher {
    host: Arc<Host>,
    filter: Filter,
    mask: Mask,
    sender: mpsc::Sender<Result<WatchVmsResponse, Status>>,
    known: Known,
    /// Position of the last event.
    at: Position,
}

/// The watcher has gone.
struct Gone;

impl Watcher {
    async fn follow(
        mut self,
        first: Vec<Event>,
        synced: Position,
        mut changes: broadcast::Receiver<Change>,
    ) -> Result<(), Gone> {
        for (kind, vm, at) in first {
            self.send(kind, Some(&vm), at).await?;
        }
        self.send(WatchEventType::Synced, None, synced).await?;
        loop {
            match changes.recv().await {
                Ok(change) => {
                    if let Some(kind) = note(&mut self.known, &change, &self.filter) {
                        self.send(kind, Some(&change.vm), change.at).await?;
                    }
                }
                Err(RecvError::Closed) => return Ok(()),
                Err(RecvError::Lagged(_)) => {
                    let snapshot;
                    (snapshot, changes) = self.host.vms.subscribe();
                    for (kind, vm, at) in difference(&mut self.known, &snapshot, self.at, &self.filter) {
                        self.send(kind, Some(&vm), at).await?;
                    }
                }
            }
        }
    }

    async fn send(&mut self, kind: WatchEventType, vm: Option<&Arc<Vm>>, at: Position) -> Result<(), Gone> {
        self.at = at;
        let response = WatchVmsResponse {
            r#type: kind.into(),
            vm: vm.map(|vm| self.mask.apply(vm)),
            cursor: Cursor::new(&self.host.vms, at, &self.filter).to_string(),
        };
        self.sender.send(Ok(response)).await.map_err(|_| Gone)
    }
}

/// Returns the event of a change for a watcher of the filter's VMs; `None` if the change concerns
/// other VMs.
fn note(known: &mut Known, change: &Change, filter: &Filter) -> Option<WatchEventType> {
    if change.kind != ChangeKind::Deleted && filter.matches(&change.vm) {
        let before = known.insert(uid(&change.vm).to_owned(), Arc::clone(&change.vm));
        return Some(match before {
            None => WatchEventType::Added,
            Some(_) => WatchEventType::Modified,
        });
    }
    known.remove(uid(&change.vm)).map(|_| WatchEventType::Deleted)
}

/// Returns the events for a watcher that knows `known` since `at`.
fn difference(known: &mut Known, snapshot: &Snapshot, at: Position, filter: &Filter) -> Vec<Event> {
    let now: Known = present(snapshot, filter).collect();
    let gone = known.iter().filter(|(uid, _)| !now.contains_key(*uid));
    // No later event has been sent yet.
    let gone = gone.map(|(_, vm)| (WatchEventType::Deleted, Arc::clone(vm), at));
    let mut events: Vec<_> = gone.collect();
    let there = by_revision(snapshot).filter(|seen| filter.matches(&seen.vm));
    events.extend(there.filter_map(|seen| {
        let kind = match known.get(uid(&seen.vm)) {
            None => WatchEventType::Added,
            Some(old) if !Arc::ptr_eq(old, &seen.vm) => WatchEventType::Modified,
            Some(_) => return None,
        };
        Some((kind, Arc::clone(&seen.vm), place(seen, snapshot)))
    }));
    *known = now;
    events
}

/// Returns the events for a watcher that has all events until `from`. Its known VMs are unknown
/// here: a VM that has changed and does not match the filter may need a deletion event.
fn since(from: Position, buried: &[Deletion], snapshot: &Snapshot, filter: &Filter) -> Vec<Event> {
    let run = snapshot.at.run;
    let gone = buried
        .iter()
        .filter(|buried| filter.may_match_object(Some(&buried.metadata)));
    let gone = gone.map(|buried| {
        let (run_of, revision) = buried.at;
        let at = Position {
            run: run_of,
            revision,
            buried: if run_of == run {
                revision.min(snapshot.at.buried)
            } else {
                revision
            },
        };
        let vm = Vm {
            metadata: Some(buried.metadata.clone()),
            ..Vm::default()
        };
        (WatchEventType::Deleted, Arc::new(vm), at)
    });
    let changed = by_revision(snapshot).filter(|seen| from.run != run || seen.revision > from.revision);
    let changed = changed.filter_map(|seen| {
        let kind = match (filter.matches(&seen.vm), filter.may_match(&seen.vm)) {
            (true, _) if seen.made > (from.run, from.revision) => WatchEventType::Added,
            (true, _) => WatchEventType::Modified,
            (false, true) => WatchEventType::Deleted,
            (false, false) => return None,
        };
        Some((kind, Arc::clone(&seen.vm), place(seen, snapshot)))
    });
    let mut events: Vec<_> = gone.chain(changed).collect();
    events.sort_by_key(|(.., at)| (at.run, at.revision));
    events
}

/// The VMs of the filter, by uid.
fn present(snapshot: &Snapshot, filter: &Filter) -> impl Iterator<Item = (String, Arc<Vm>)> {
    let there = snapshot.vms.iter().filter(|seen| filter.matches(&seen.vm));
    there.map(|seen| (uid(&seen.vm).to_owned(), Arc::clone(&seen.vm)))
}

fn by_revision(snapshot: &Snapshot) -> impl Iterator<Item = &Seen> {
    let mut vms: Vec<_> = snapshot.vms.iter().collect();
    vms.sort_by_key(|seen| seen.revision);
    vms.into_iter()
}

/// Position of a watcher that has received all states up to this one.
fn place(seen: &Seen, snapshot: &Snapshot) -> Position {
    Position {
        revision: seen.revision,
        buried: seen.revision.min(snapshot.at.buried),
        ..snapshot.at
    }
}

fn uid(vm: &Vm) -> &str {
    vm.metadata.as_ref().map_or("", |metadata| metadata.uid.as_str())
}

#[cfg(test)]
mod tests;

//! `WatchVms`: what is there, then each change. A watcher that falls far behind is not dropped: it gets the
//! difference between what it knows and what is, and may so miss states in between.

use std::{collections::BTreeMap, sync::Arc};

use proto::v1::{Vm, WatchEventType, WatchVmsResponse};
use tokio::sync::{broadcast::error::RecvError, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::{failure::Failure, host::Host, vm::table::Change};

/// The stream of events.
pub type Stream = ReceiverStream<Result<WatchVmsResponse, Status>>;

/// Events ready for a watcher that reads slowly; more wait in the table's own queue.
const READY: usize = 16;

/// What a watcher has been told of, by uid.
type Known = BTreeMap<String, Arc<Vm>>;

/// Watches all VMs, or the one called `only`.
pub fn watch(host: Arc<Host>, only: String) -> Stream {
    let (sender, receiver) = mpsc::channel(READY);
    tokio::spawn(async move {
        tokio::select! {
            _ = follow(&host, &only, &sender) => {}
            () = sender.closed() => {}
            () = host.stopping.cancelled() => {
                let _ = sender.send(Err(Failure::stopping().into())).await;
            }
        }
    });
    ReceiverStream::new(receiver)
}

type Sender = mpsc::Sender<Result<WatchVmsResponse, Status>>;

/// The watcher has gone.
struct Gone;

async fn follow(host: &Host, only: &str, sender: &Sender) -> Result<(), Gone> {
    let wanted = |vm: &Vm| only.is_empty() || name(vm) == only;
    let mut known = Known::new();
    let (mut there, mut changes) = host.table.subscribe();
    let mut synced = false;
    loop {
        there.retain(|vm| wanted(vm));
        for (kind, vm) in difference(&mut known, &there) {
            send(sender, kind, Some(&vm)).await?;
        }
        if !std::mem::replace(&mut synced, true) {
            send(sender, WatchEventType::Synced, None).await?;
        }
        loop {
            let (kind, vm) = match changes.recv().await {
                Ok(Change::Added(vm)) => (WatchEventType::Added, vm),
                Ok(Change::Modified(vm)) => (WatchEventType::Modified, vm),
                Ok(Change::Deleted(vm)) => (WatchEventType::Deleted, vm),
                Err(RecvError::Lagged(_)) => break,
                Err(RecvError::Closed) => return Ok(()),
            };
            if wanted(&vm) {
                note(&mut known, kind, &vm);
                send(sender, kind, Some(&vm)).await?;
            }
        }
        (there, changes) = host.table.subscribe();
    }
}

async fn send(sender: &Sender, kind: WatchEventType, vm: Option<&Arc<Vm>>) -> Result<(), Gone> {
    let vm = vm.map(|vm| vm.as_ref().clone());
    let response = WatchVmsResponse {
        r#type: kind.into(),
        vm,
        ..Default::default()
    };
    sender.send(Ok(response)).await.map_err(|_| Gone)
}

fn note(known: &mut Known, kind: WatchEventType, vm: &Arc<Vm>) {
    if kind == WatchEventType::Deleted {
        known.remove(uid(vm));
    } else {
        known.insert(uid(vm).to_owned(), Arc::clone(vm));
    }
}

/// What must be told to someone who knows `known` when `there` is all there is.
fn difference(known: &mut Known, there: &[Arc<Vm>]) -> Vec<(WatchEventType, Arc<Vm>)> {
    let now: Known = there
        .iter()
        .map(|vm| (uid(vm).to_owned(), Arc::clone(vm)))
        .collect();
    let mut events = Vec::new();
    for (uid, vm) in known.iter() {
        if !now.contains_key(uid) {
            events.push((WatchEventType::Deleted, Arc::clone(vm)));
        }
    }
    for vm in there {
        match known.get(uid(vm)) {
            None => events.push((WatchEventType::Added, Arc::clone(vm))),
            Some(old) if !Arc::ptr_eq(old, vm) => events.push((WatchEventType::Modified, Arc::clone(vm))),
            Some(_) => {}
        }
    }
    *known = now;
    events
}

fn name(vm: &Vm) -> &str {
    vm.metadata.as_ref().map_or("", |metadata| metadata.name.as_str())
}

fn uid(vm: &Vm) -> &str {
    vm.metadata.as_ref().map_or("", |metadata| metadata.uid.as_str())
}

#[cfg(test)]
mod tests {
    use proto::v1::VmMetadata;

    use super::*;

    fn vm(name: &str, uid: &str) -> Arc<Vm> {
        let metadata = VmMetadata {
            name: name.to_owned(),
            uid: uid.to_owned(),
            ..Default::default()
        };
        Arc::new(Vm {
            metadata: Some(metadata),
            ..Default::default()
        })
    }

    #[test]
    fn the_difference_tells_what_came_changed_and_went() {
        use WatchEventType::{Added, Deleted, Modified};
        let mut known = Known::new();
        let (a, b) = (vm("a", "1"), vm("b", "2"));
        let kinds = |events: Vec<(WatchEventType, Arc<Vm>)>| -> Vec<_> {
            events
                .into_iter()
                .map(|(kind, vm)| (kind, uid(&vm).to_owned()))
                .collect()
        };
        let first = difference(&mut known, &[Arc::clone(&a), b]);
        assert_eq!(kinds(first), [(Added, "1".to_owned()), (Added, "2".to_owned())]);
        // b was deleted and made again under the same name meanwhile.
        let second = difference(&mut known, &[Arc::clone(&a), vm("b", "3")]);
        assert_eq!(
            kinds(second),
            [(Deleted, "2".to_owned()), (Added, "3".to_owned())]
        );
        let third = difference(&mut known, &[vm("a", "1"), vm("b", "3")]);
        assert_eq!(
            kinds(third),
            [(Modified, "1".to_owned()), (Modified, "3".to_owned())]
        );
        assert_eq!(known.len(), 2);
    }

    proptest::proptest! {
        /// Whatever was known: one who applies the events knows exactly what is there.
        #[test]
        fn the_difference_leads_from_any_knowledge_to_what_is_there(
            before in proptest::collection::btree_set(0..20_u8, 0..20),
            after in proptest::collection::btree_map(0..20_u8, proptest::bool::ANY, 0..20),
        ) {
            let old: BTreeMap<_, _> = before.iter().map(|id| (*id, vm("x", &id.to_string()))).collect();
            let mut known: Known = old.values().map(|vm| (uid(vm).to_owned(), Arc::clone(vm))).collect();
            let mut view = known.clone();
            let there: Vec<_> = after
                .iter()
                .map(|(id, changed)| match old.get(id) {
                    Some(vm) if !changed => Arc::clone(vm),
                    _ => vm("x", &id.to_string()),
                })
                .collect();
            for (kind, vm) in difference(&mut known, &there) {
                let had = match kind {
                    WatchEventType::Deleted => view.remove(uid(&vm)),
                    _ => view.insert(uid(&vm).to_owned(), Arc::clone(&vm)),
                };
                proptest::prop_assert_eq!(had.is_some(), kind != WatchEventType::Added);
            }
            let same = view.len() == there.len()
                && there.iter().all(|vm| view.get(uid(vm)).is_some_and(|seen| Arc::ptr_eq(seen, vm)));
            proptest::prop_assert!(same);
        }
    }
}

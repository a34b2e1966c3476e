//! All VMs of the node by name, with the state that each actor published last, and the changes as they happen.
//!
//! Nobody who reads here waits for an actor. A state is put into the table and told to the watchers under one lock,
//! so that a watcher sees each change after its first look exactly once and in order.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use proto::v1;
use tokio::sync::{broadcast, mpsc, watch};
use uuid::Uuid;

use super::actor::Command;

/// Changes kept for a watcher that is slow; one that falls behind further looks at everything anew.
const CHANGES: usize = 512;

/// The table.
#[derive(Debug)]
pub struct Table {
    vms: Mutex<Vms>,
    changes: broadcast::Sender<Change>,
}

#[derive(Debug, Default)]
struct Vms {
    by_name: BTreeMap<String, Entry>,
    /// Names of VMs that are being made.
    reserved: BTreeSet<String>,
}

/// How a VM is reached.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The VM.
    pub uid: Uuid,
    /// Its actor.
    pub mailbox: mpsc::Sender<Command>,
    /// What the actor published last.
    pub state: watch::Receiver<Arc<v1::Vm>>,
}

/// What happened to a VM, with its state after that.
#[derive(Clone, Debug)]
pub enum Change {
    /// It is new.
    Added(Arc<v1::Vm>),
    /// Its state is another.
    Modified(Arc<v1::Vm>),
    /// It is gone; its last state.
    Deleted(Arc<v1::Vm>),
}

/// A name that nobody else can take until this is dropped.
#[derive(Debug)]
pub struct Reservation<'a> {
    table: &'a Table,
    name: String,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            vms: Mutex::default(),
            changes: broadcast::channel(CHANGES).0,
        }
    }
}

impl Table {
    /// The VM of this name.
    pub fn get(&self, name: &str) -> Option<Entry> {
        self.vms().by_name.get(name).cloned()
    }

    /// The states of all VMs, by name.
    pub fn list(&self) -> Vec<Arc<v1::Vm>> {
        self.vms().states()
    }

    /// The states of all VMs, and all changes from then on.
    pub fn subscribe(&self) -> (Vec<Arc<v1::Vm>>, broadcast::Receiver<Change>) {
        let vms = self.vms();
        (vms.states(), self.changes.subscribe())
    }

    /// Takes a name for a VM that is being made; `None` when there is one.
    pub fn reserve(&self, name: &str) -> Option<Reservation<'_>> {
        let mut vms = self.vms();
        if vms.by_name.contains_key(name) || !vms.reserved.insert(name.to_owned()) {
            return None;
        }
        Some(Reservation {
            table: self,
            name: name.to_owned(),
        })
    }

    /// Adds a VM.
    pub fn insert(&self, name: &str, entry: Entry) {
        let mut vms = self.vms();
        let state = Arc::clone(&entry.state.borrow());
        vms.by_name.insert(name.to_owned(), entry);
        let _ = self.changes.send(Change::Added(state));
    }

    /// Publishes a VM's new state.
    pub fn publish(&self, publisher: &watch::Sender<Arc<v1::Vm>>, state: Arc<v1::Vm>) {
        let _in_order = self.vms();
        publisher.send_replace(Arc::clone(&state));
        let _ = self.changes.send(Change::Modified(state));
    }

    /// Removes a VM.
    pub fn remove(&self, name: &str) {
        let mut vms = self.vms();
        if let Some(entry) = vms.by_name.remove(name) {
            let _ = self
                .changes
                .send(Change::Deleted(Arc::clone(&entry.state.borrow())));
        }
    }

    fn vms(&self) -> MutexGuard<'_, Vms> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Vms {
    fn states(&self) -> Vec<Arc<v1::Vm>> {
        self.by_name
            .values()
            .map(|entry| Arc::clone(&entry.state.borrow()))
            .collect()
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.table.vms().reserved.remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str) -> (watch::Sender<Arc<v1::Vm>>, Entry) {
        let metadata = v1::VmMetadata {
            name: name.to_owned(),
            ..Default::default()
        };
        let vm = v1::Vm {
            metadata: Some(metadata),
            ..Default::default()
        };
        let (publisher, state) = watch::channel(Arc::new(vm));
        (
            publisher,
            Entry {
                uid: Uuid::new_v4(),
                mailbox: mpsc::channel(1).0,
                state,
            },
        )
    }

    #[test]
    fn a_name_is_given_once() {
        let table = Table::default();
        let reservation = table.reserve("a").unwrap();
        assert!(table.reserve("a").is_none());
        drop(reservation);
        let reservation = table.reserve("a").unwrap();
        let (_publisher, entry) = entry("a");
        table.insert("a", entry);
        drop(reservation);
        assert!(table.reserve("a").is_none());
    }

    #[test]
    fn a_watcher_sees_what_is_there_and_then_every_change_in_order() {
        let table = Table::default();
        let (publisher, first) = entry("a");
        table.insert("a", first);
        let (there, mut changes) = table.subscribe();
        assert_eq!(there.len(), 1);
        for phase in [2, 3] {
            let status = v1::VmStatus {
                phase,
                ..Default::default()
            };
            let vm = v1::Vm {
                status: Some(status),
                ..Default::default()
            };
            table.publish(&publisher, Arc::new(vm));
        }
        table.remove("a");
        let mut seen = Vec::new();
        while let Ok(change) = changes.try_recv() {
            seen.push(match change {
                Change::Added(_) => "added".to_owned(),
                Change::Modified(vm) => format!("{}", vm.status.as_ref().unwrap().phase),
                Change::Deleted(_) => "deleted".to_owned(),
            });
        }
        assert_eq!(seen, ["2", "3", "deleted"]);
        assert!(table.get("a").is_none() && table.list().is_empty());
    }
}

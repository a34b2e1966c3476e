//! What the living VMs hold of the node: user ids, memory, disks. A [`Claim`] is held from before a `vmm` is forked
//! until it has ended, and gives everything back when it is dropped.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    config::UidRange,
    failure::{Failure, Kind},
};

/// The books of the node.
#[derive(Debug)]
pub struct Ledger {
    uids: UidRange,
    /// RAM of the node in bytes.
    memory: u64,
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    /// By user id.
    claims: BTreeMap<u32, Held>,
    /// Where the search for a free user id goes on, so that one isn't used again at once.
    next: u32,
}

#[derive(Debug)]
struct Held {
    vm: String,
    memory: u64,
    disks: Vec<FileId>,
}

/// Device and inode number of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    /// `st_dev`; of a block device `st_rdev`.
    pub device: u64,
    /// `st_ino`; of a block device 0.
    pub inode: u64,
}

/// What one VM holds.
#[derive(Debug)]
pub struct Claim {
    ledger: Arc<Ledger>,
    uid: u32,
}

impl Ledger {
    /// Empty books of a node with `memory` bytes of RAM.
    pub fn new(uids: UidRange, memory: u64) -> Arc<Self> {
        Arc::new(Self {
            uids,
            memory,
            books: Mutex::default(),
        })
    }

    /// Takes a free user id and `memory` bytes for `vm`.
    pub fn claim(self: &Arc<Self>, vm: &str, memory: u64) -> Result<Claim, Failure> {
        let mut books = self.books();
        let committed = books.committed();
        if committed.saturating_add(memory) > self.memory {
            let mib = |bytes: u64| bytes >> 20;
            let message = format!(
                "not enough memory: the VM needs {} MiB, the node has {} MiB of which running VMs have {} MiB; stop \
                 another VM or give this one less",
                mib(memory),
                mib(self.memory),
                mib(committed),
            );
            return Err(Failure::new(Kind::Exhausted, "INSUFFICIENT_MEMORY", message));
        }
        let UidRange { first, count } = self.uids;
        let start = books.next;
        let free = (0..count)
            .map(|step| first + (start + step) % count)
            .find(|uid| !books.claims.contains_key(uid));
        let Some(uid) = free else {
            let message = format!("all {count} user ids for VMs are in use: make `vm_uids` larger");
            return Err(Failure::new(Kind::Exhausted, "NO_FREE_UID", message));
        };
        books.next = (uid - first + 1) % count;
        books.claims.insert(
            uid,
            Held {
                vm: vm.to_owned(),
                memory,
                disks: Vec::new(),
            },
        );
        Ok(Claim {
            ledger: Arc::clone(self),
            uid,
        })
    }

    /// Notes what a VM that is found running holds, whatever the books say.
    pub fn adopt(self: &Arc<Self>, vm: &str, uid: u32, memory: u64) -> Claim {
        self.books().claims.insert(
            uid,
            Held {
                vm: vm.to_owned(),
                memory,
                disks: Vec::new(),
            },
        );
        Claim {
            ledger: Arc::clone(self),
            uid,
        }
    }

    /// The VM that has one of its disks on `file`.
    pub fn user_of(&self, file: FileId) -> Option<String> {
        let books = self.books();
        let held = books.claims.values().find(|held| held.disks.contains(&file))?;
        Some(held.vm.clone())
    }

    /// RAM of the VMs that run now, in bytes.
    pub fn committed(&self) -> u64 {
        self.books().committed()
    }

    /// RAM of the node in bytes.
    pub fn memory(&self) -> u64 {
        self.memory
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Books {
    fn committed(&self) -> u64 {
        self.claims
            .values()
            .fold(0, |sum, held| sum.saturating_add(held.memory))
    }
}

impl Claim {
    /// The user id.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Notes the files that the VM's disks are on, for messages to others.
    pub fn set_disks(&self, disks: Vec<FileId>) {
        if let Some(held) = self.ledger.books().claims.get_mut(&self.uid) {
            held.disks = disks;
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.ledger.books().claims.remove(&self.uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(count: u32) -> Arc<Ledger> {
        Ledger::new(UidRange { first: 100, count }, 1000)
    }

    #[test]
    fn living_vms_have_different_user_ids_and_one_is_not_used_again_at_once() {
        let ledger = ledger(3);
        let (a, b) = (ledger.claim("a", 1).unwrap(), ledger.claim("b", 1).unwrap());
        assert_eq!((a.uid(), b.uid()), (100, 101));
        drop(a);
        assert_eq!(ledger.claim("c", 1).unwrap().uid(), 102);
        let d = ledger.claim("d", 1).unwrap();
        assert_eq!(d.uid(), 100);
        let _e = ledger.claim("e", 1).unwrap();
        assert_eq!(ledger.claim("f", 1).unwrap_err().reason, "NO_FREE_UID");
    }

    #[test]
    fn no_more_memory_is_given_than_the_node_has() {
        let ledger = ledger(10);
        let first = ledger.claim("a", 600).unwrap();
        assert_eq!(ledger.claim("b", 401).unwrap_err().reason, "INSUFFICIENT_MEMORY");
        assert_eq!(ledger.claim("b", u64::MAX).unwrap_err().kind, Kind::Exhausted);
        let _second = ledger.claim("b", 400).unwrap();
        drop(first);
        assert_eq!(ledger.committed(), 400);
    }

    #[test]
    fn the_user_of_a_disk_is_known_while_it_lives() {
        let ledger = ledger(10);
        let file = FileId { device: 1, inode: 2 };
        let claim = ledger.claim("a", 1).unwrap();
        claim.set_disks(vec![file]);
        assert_eq!(ledger.user_of(file).as_deref(), Some("a"));
        drop(claim);
        assert_eq!(ledger.user_of(file), None);
    }

    #[test]
    fn a_vm_found_running_keeps_what_it_has() {
        let ledger = ledger(2);
        let _old = ledger.adopt("old", 100, 900);
        assert_eq!(ledger.claim("new", 50).unwrap().uid(), 101);
        assert_eq!(
            ledger.claim("big", 200).unwrap_err().reason,
            "INSUFFICIENT_MEMORY"
        );
    }
}

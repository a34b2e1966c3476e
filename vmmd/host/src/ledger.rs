//! Resources of the node that VMs hold: user ids, processors, memory, disks. A [`Claim`] exists
//! from before the fork of a `vmm` until its end, and releases all resources when it is dropped.
//! One lock covers the search for free resources and their allocation, so no resource is allocated
//! twice. For a VM that its run policy will start, or that starts again after a stop, the ledger
//! keeps the resources until then. A VM that had its resources when it stopped has a place on the
//! node: it takes the same resources again without a decision.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Kind};

use crate::capacity::{Demand, Resources};

/// A range of user ids that nothing else on the node uses; each living VM has one of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct UidRange {
    /// The first user id. Default 1,900,000,000.
    pub first: u32,
    /// How many user ids: one for each VM that runs, each network that vmmd makes, and each image that is read. Default 65,536.
    pub count: u32,
}

impl UidRange {
    /// Whether a user id is one of them.
    pub fn has(self, user: u32) -> bool {
        user.checked_sub(self.first)
            .is_some_and(|index| index < self.count)
    }
}

impl Default for UidRange {
    fn default() -> Self {
        Self {
            first: 1_900_000_000,
            count: 65_536,
        }
    }
}

/// The books of the node.
#[derive(Debug)]
pub struct Ledger {
    users: UidRange,
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    /// By user id.
    claims: BTreeMap<u32, Held>,
    /// Start of the search for a free user id. Avoids the immediate reuse of an id.
    next: u32,
    /// Serial number of the last claim.
    serial: u64,
    /// User ids of processes that belong to no known VM.
    strangers: BTreeSet<u32>,
    /// By name: what VMs will have that do not run and are to be started by their run policy, or again after a stop.
    expected: BTreeMap<String, Expected>,
}

/// Room for a start that is to come.
#[derive(Debug)]
struct Expected {
    demand: Demand,
    /// The room of its last run; nothing for a VM that was never placed.
    placed: Resources,
}

#[derive(Debug)]
struct Held {
    vm: String,
    /// Distinguishes claims of one user id.
    serial: u64,
    /// A panic dropped the claim. The next actor of the VM adopts or releases it.
    abandoned: bool,
    demand: Demand,
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

/// Resources that one VM holds.
#[derive(Debug)]
pub struct Claim {
    ledger: Arc<Ledger>,
    user: u32,
    serial: u64,
}

impl Ledger {
    /// Empty books.
    pub fn new(users: UidRange) -> Arc<Self> {
        Arc::new(Self {
            users,
            books: Mutex::default(),
        })
    }

    /// Takes a free user id for `vm`, and nothing else yet.
    pub fn claim(self: &Arc<Self>, vm: &str) -> Result<Claim, Failure> {
        let mut books = self.books();
        let UidRange { first, count } = self.users;
        let start = u64::from(books.next);
        let free = (0..u64::from(count))
            .filter_map(|step| u32::try_from((start + step) % u64::from(count)).ok())
            .map(|index| first.saturating_add(index))
            .find(|user| !books.claims.contains_key(user) && !books.strangers.contains(user));
        let Some(user) = free else {
            let message =
                format!("all {count} user ids for VMs and networks are in use: make `vm_uids` larger");
            return Err(Failure::new(Kind::Exhausted, "NO_FREE_UID", message));
        };
        books.next = user.saturating_sub(first).saturating_add(1);
        // Under the lock of the search: no other claim finds the same user id.
        let serial = books.insert(vm, user, Demand::default());
        drop(books);
        Ok(self.held(user, serial))
    }

    /// No VM gets this user id as long as the daemon lives: a process has it that is none of a known VM.
    pub fn set_aside(&self, user: u32) {
        if self.users.has(user) {
            self.books().strangers.insert(user);
        }
    }

    /// Records the resources of a VM found running, without a check against the books.
    pub fn adopt(self: &Arc<Self>, vm: &str, user: u32, demand: Demand) -> Claim {
        let serial = self.books().insert(vm, user, demand);
        self.held(user, serial)
    }

    fn held(self: &Arc<Self>, user: u32, serial: u64) -> Claim {
        Claim {
            ledger: Arc::clone(self),
            user,
            serial,
        }
    }

    /// Releases the VM's claims that a panic has abandoned and that no actor has adopted since.
    pub fn release_abandoned(&self, vm: &str) {
        self.books()
            .claims
            .retain(|_, held| !(held.abandoned && held.vm == vm));
    }

    /// Reserves resources for a VM that its run policy will start, or that starts again after a
    /// stop, without regard to other VMs. `None` ends the reservation. A VM with a claim, now or at
    /// its first reservation, is certain to get these resources. It loses the part beyond its new
    /// demand: other VMs may have taken that part.
    pub fn expect(&self, vm: &str, demand: Option<Demand>) {
        let mut books = self.books();
        match demand {
            Some(demand) => {
                let placed = books.placed(vm).min(demand.resources);
                books.expected.insert(vm.to_owned(), Expected { demand, placed });
            }
            None => drop(books.expected.remove(vm)),
        }
    }

    /// Whether room is kept for a VM that had it when it last ran.
    pub fn keeps(&self, vm: &str) -> bool {
        let books = self.books();
        let expected = books.expected.get(vm);
        expected.is_some_and(|expected| expected.placed != Resources::default())
    }

    /// The VM that has one of its disks on `file`.
    pub fn user_of(&self, file: FileId) -> Option<String> {
        let books = self.books();
        let held = books.claims.values().find(|held| held.disks.contains(&file))?;
        Some(held.vm.clone())
    }

    /// RAM of the VMs that run now, in bytes.
    pub fn ram(&self) -> u64 {
        let books = self.books();
        let rams = books.claims.values().map(|held| held.demand.ram);
        rams.fold(0, u64::saturating_add)
    }

    /// Resources of the VMs, including VMs that their run policy will start.
    pub fn committed(&self) -> Resources {
        self.books().committed_beside("")
    }

    /// The same, except the resources of the VM with this name.
    pub fn committed_beside(&self, vm: &str) -> Resources {
        self.books().committed_beside(vm)
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Books {
    /// Notes a claim; returns its serial number.
    fn insert(&mut self, vm: &str, user: u32, demand: Demand) -> u64 {
        self.serial += 1;
        let held = Held {
            vm: vm.to_owned(),
            serial: self.serial,
            abandoned: false,
            demand,
            disks: Vec::new(),
        };
        self.claims.insert(user, held);
        self.serial
    }

    /// Room of the VM that it has not given back.
    fn placed(&self, vm: &str) -> Resources {
        let expected = self.expected.get(vm).map(|expected| expected.placed);
        let claims = self.claims.values().filter(|held| held.vm == vm);
        claims
            .map(|held| held.demand.resources)
            .fold(expected.unwrap_or_default(), Resources::max)
    }

    fn committed_beside(&self, vm: &str) -> Resources {
        let held = self.claims.values().map(|held| (held.vm.as_str(), &held.demand));
        let held = held.filter(|(name, demand)| *name != vm && **demand != Demand::default());
        // A start that has not come to take its part yet has it kept as before.
        let running: HashSet<_> = held.clone().map(|(name, _)| name).collect();
        let expected = self.expected.iter();
        let expected = expected.map(|(name, expected)| (name.as_str(), &expected.demand));
        held.chain(expected.filter(|(name, _)| *name != vm && !running.contains(name)))
            .fold(Resources::default(), |sum, (_, demand)| {
                sum.plus(demand.resources)
            })
    }
}

impl Claim {
    /// The user id.
    pub fn user(&self) -> u32 {
        self.user
    }

    /// Replaces the claim's demand with `demand` if `decide` agrees. `decide` receives the
    /// resources of the other VMs. A refusal changes nothing. A demand within the VM's present
    /// resources needs no decision.
    pub fn take(
        &self,
        demand: Demand,
        decide: impl FnOnce(Resources) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut books = self.ledger.books();
        let vm = books.claims.get(&self.user).map(|held| held.vm.clone());
        let vm = vm.unwrap_or_default();
        if !demand.resources.within(books.placed(&vm)) {
            decide(books.committed_beside(&vm))?;
        }
        if let Some(held) = books.claims.get_mut(&self.user) {
            held.demand = demand;
        }
        Ok(())
    }

    /// What was taken.
    pub fn demand(&self) -> Demand {
        let books = self.ledger.books();
        let held = books.claims.get(&self.user);
        held.map(|held| held.demand).unwrap_or_default()
    }

    /// Notes the files that the VM's disks are on, for messages to others.
    pub fn set_disks(&self, disks: Vec<FileId>) {
        if let Some(held) = self.ledger.books().claims.get_mut(&self.user) {
            held.disks = disks;
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut books = self.ledger.books();
        let ours = books
            .claims
            .get_mut(&self.user)
            .filter(|held| held.serial == self.serial);
        match ours {
            // The vmm may still run, so no other VM may get its user id.
            Some(held) if thread::panicking() => held.abandoned = true,
            Some(_) => drop(books.claims.remove(&self.user)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(count: u32) -> Arc<Ledger> {
        Ledger::new(UidRange { first: 100, count })
    }

    fn demand(memory: u64) -> Demand {
        let resources = Resources {
            memory,
            cpu_millis: 1,
            ..Resources::default()
        };
        Demand {
            resources,
            ram: memory / 2,
        }
    }

    /// Takes so much of 1,000.
    fn take(claim: &Claim, memory: u64) -> Result<(), Failure> {
        claim.take(demand(memory), |others| {
            if others.memory.saturating_add(memory) > 1000 {
                return Err(Failure::new(Kind::Exhausted, "INSUFFICIENT_MEMORY", "no"));
            }
            Ok(())
        })
    }

    #[test]
    fn living_vms_have_different_user_ids_and_one_is_not_used_again_at_once() {
        let ledger = ledger(3);
        let (a, b) = (ledger.claim("a").unwrap(), ledger.claim("b").unwrap());
        assert_eq!((a.user(), b.user()), (100, 101));
        drop(a);
        assert_eq!(ledger.claim("c").unwrap().user(), 102);
        let d = ledger.claim("d").unwrap();
        assert_eq!(d.user(), 100);
        let _e = ledger.claim("e").unwrap();
        assert_eq!(ledger.claim("f").unwrap_err().reason, "NO_FREE_UID");
    }

    #[test]
    fn a_strangers_user_id_is_given_to_nobody() {
        let ledger = ledger(3);
        for user in [0, 99, 101, 103] {
            ledger.set_aside(user);
        }
        let claims = ["a", "b"].map(|vm| ledger.claim(vm).unwrap());
        assert_eq!(claims.each_ref().map(Claim::user), [100, 102]);
        assert_eq!(ledger.claim("c").unwrap_err().reason, "NO_FREE_UID");
    }

    #[test]
    fn what_is_taken_is_given_back_with_the_claim_and_a_refusal_takes_nothing() {
        let ledger = ledger(10);
        let (first, second) = (ledger.claim("a").unwrap(), ledger.claim("b").unwrap());
        take(&first, 600).unwrap();
        assert_eq!(take(&second, 401).unwrap_err().reason, "INSUFFICIENT_MEMORY");
        take(&second, 400).unwrap();
        assert_eq!((ledger.committed().memory, ledger.ram()), (1000, 500));
        assert!(take(&second, 401).is_err());
        assert_eq!(ledger.committed_beside("a").memory, 400);
        take(&second, 300).unwrap();
        drop(first);
        assert_eq!((ledger.committed(), ledger.ram()), (demand(300).resources, 150));
    }

    #[test]
    fn nothing_is_given_twice_when_many_ask_at_once() {
        let ledger = ledger(64);
        let claims: Vec<_> = (0..64)
            .map(|n| ledger.claim(&format!("vm{n}")).unwrap())
            .collect();
        let given = std::thread::scope(|scope| {
            let asked: Vec<_> = claims
                .iter()
                .map(|claim| scope.spawn(|| take(claim, 100).is_ok()))
                .collect();
            asked
                .into_iter()
                .map(|asked| asked.join().unwrap())
                .filter(|given| *given)
                .count()
        });
        assert_eq!((given, ledger.committed().memory), (10, 1000));
    }

    #[test]
    fn one_user_id_is_never_given_twice() {
        let ledger = ledger(1);
        let held = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let Ok(claim) = ledger.claim("vm") else { continue };
                        assert_eq!(held.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        held.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        drop(claim);
                    }
                });
            }
        });
    }

    #[test]
    fn user_ids_at_the_end_of_their_range_are_given() {
        let ledger = Ledger::new(UidRange {
            first: u32::MAX - 1,
            count: 1,
        });
        for _ in 0..3 {
            assert_eq!(ledger.claim("a").unwrap().user(), u32::MAX - 1);
        }
    }

    #[test]
    fn vm_that_stops_to_start_again_keeps_its_room() {
        let ledger = ledger(10);
        let run = ledger.claim("a").unwrap();
        take(&run, 700).unwrap();
        ledger.expect("a", Some(demand(700)));
        drop(run);
        let other = ledger.claim("b").unwrap();
        assert!(take(&other, 301).is_err());
        // A VM that was never placed expects room too.
        ledger.expect("c", Some(demand(900)));
        assert!(ledger.keeps("a") && !ledger.keeps("c"));
        let again = ledger.claim("a").unwrap();
        take(&again, 700).unwrap();
        assert!(take(&again, 701).is_err(), "more than it had is a decision");
        // A failed start leaves the room.
        drop(again);
        ledger.expect("a", Some(demand(700)));
        let third = ledger.claim("a").unwrap();
        take(&third, 700).unwrap();
        ledger.expect("a", None);
        drop(third);
        assert!(!ledger.keeps("a"));
    }

    #[test]
    fn room_that_a_vm_does_not_demand_is_not_kept() {
        let ledger = ledger(10);
        let of = |memory, cpu_millis| {
            let resources = Resources {
                cpu_millis,
                ..demand(memory).resources
            };
            Demand {
                resources,
                ram: memory / 2,
            }
        };
        let run = ledger.claim("a").unwrap();
        run.take(of(700, 10), |_| Ok(())).unwrap();
        // Less memory and more processors than it had.
        ledger.expect("a", Some(of(400, 20)));
        drop(run);
        assert!(ledger.keeps("a"));
        let refuse = |_| Err(Failure::new(Kind::Exhausted, "INSUFFICIENT_MEMORY", "no"));
        let again = ledger.claim("a").unwrap();
        assert!(again.take(of(401, 10), refuse).is_err());
        assert!(again.take(of(400, 11), refuse).is_err());
        again.take(of(400, 10), refuse).unwrap();
    }

    #[test]
    fn room_is_kept_for_a_vm_that_is_to_be_started_and_is_its_own() {
        let ledger = ledger(10);
        ledger.expect("later", Some(demand(700)));
        let (later, other) = (ledger.claim("later").unwrap(), ledger.claim("other").unwrap());
        drop(later);
        assert!(take(&other, 301).is_err());
        take(&other, 300).unwrap();
        let later = ledger.claim("later").unwrap();
        assert_eq!(ledger.committed().memory, 1000);
        take(&later, 700).unwrap();
        assert_eq!(ledger.committed().memory, 1000);
        drop(later);
        assert_eq!(ledger.committed().memory, 1000);
        ledger.expect("later", None);
        assert_eq!(ledger.committed().memory, 300);
    }

    #[test]
    fn the_user_of_a_disk_is_known_while_it_lives() {
        let ledger = ledger(10);
        let file = FileId { device: 1, inode: 2 };
        let claim = ledger.claim("a").unwrap();
        claim.set_disks(vec![file]);
        assert_eq!(ledger.user_of(file).as_deref(), Some("a"));
        drop(claim);
        assert_eq!(ledger.user_of(file), None);
    }

    #[tokio::test]
    async fn what_a_task_that_panics_holds_is_given_to_nobody_else() {
        let ledger = ledger(1);
        let claim = ledger.claim("a").unwrap();
        take(&claim, 700).unwrap();
        let panics = tokio::spawn(async move {
            tokio::task::yield_now().await;
            assert_ne!(claim.user(), 100, "it is");
        });
        assert!(panics.await.unwrap_err().is_panic());
        assert_eq!(ledger.committed().memory, 700);
        assert_eq!(ledger.claim("b").unwrap_err().reason, "NO_FREE_UID");
        let again = ledger.adopt("a", 100, demand(700));
        ledger.release_abandoned("a");
        assert_eq!(ledger.committed().memory, 700, "it is adopted");
        drop(again);
        assert_eq!(ledger.committed().memory, 0);
    }

    #[test]
    fn a_claim_that_was_adopted_by_another_takes_nothing_from_it() {
        let ledger = ledger(1);
        let old = ledger.claim("a").unwrap();
        let new = ledger.adopt("a", 100, demand(700));
        drop(old);
        assert_eq!(ledger.committed().memory, 700);
        drop(new);
    }

    #[test]
    fn a_vm_found_running_keeps_what_it_has() {
        let ledger = ledger(2);
        let _old = ledger.adopt("old", 100, demand(900));
        let new = ledger.claim("new").unwrap();
        assert_eq!(new.user(), 101);
        assert!(take(&new, 101).is_err());
    }
}

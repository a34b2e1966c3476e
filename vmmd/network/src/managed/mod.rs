//! The networks of vmmd. Each has a record in the store, and on the node a bridge, rules of the
//! packet filter and a helper process for DHCP and DNS.
//!
//! ```text
//!  (none) ──record──▶ Wanted ──bridge, rules, helper──▶ served ──record──▶ Leaving ──all of it gone──▶ (none)
//! ```
//!
//! Invariant: all objects on the node are named by the id of a network with a record. The record
//! therefore identifies the remains of an interrupted create or delete, and [`node`] repairs them
//! at the daemon's start, each minute, and after changes. One task at a time changes the node.
//!
//! A NIC's address is a *lease* in the network's record; [`pool`] assigns addresses.

mod connections;
mod conntrack;
mod describe;
pub(crate) mod helper;
mod lease;
mod listening;
mod nft;
mod node;
mod overlap;
mod plan;
mod pool;
mod rules;
mod ruleset;
mod update;

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    net::{Ipv4Addr, Ipv6Addr},
    ops::Bound,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use tokio::sync::watch;
use uuid::Uuid;
use vmmd_api::v1;
use vmmd_spec::{
    Violations,
    firewall::Firewall,
    network::{NetworkMode, NetworkSpec, NewNetwork},
    nic::{Mac, PublishedPort},
};

use self::{
    describe::{describe, metadata, not_found, tell},
    node::{Filter, users},
};
pub use self::{
    node::PERIOD,
    plan::{Found as BridgeFacts, Wanted as BridgeSpec},
};
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_objects::{
    context::Context,
    feed::{Buried, Expired, Feed, Position},
    request,
};
use vmmd_store::store_failure;
use vmmd_store::{BuriedRecords, LeaseRecord, NetworkRecord, RequestRecord};

use super::{Links, Ports};

/// The folder of all helpers in the daemon's runtime folder.
const FOLDER: &str = "networks";

/// All networks.
#[derive(Debug)]
pub struct Networks {
    inner: Mutex<Inner>,
    /// The holder of the lock may change records and the node.
    turn: tokio::sync::Mutex<Filter>,
    helper_ends: Arc<helper::Ends>,
    /// The program `vmmd-netd`, from its first use.
    netd: OnceLock<File>,
}

#[derive(Debug)]
struct Inner {
    /// By name.
    records: BTreeMap<String, NetworkRecord>,
    /// By UUID: why the node is not as wanted.
    problems: BTreeMap<Vec<u8>, Failure>,
    /// By UUID: of the last change that clients can see.
    revisions: BTreeMap<Vec<u8>, u64>,
    feed: Feed,
}

/// A network at a time.
#[derive(Clone, Debug)]
pub struct Seen {
    /// As clients see it.
    pub network: v1::Network,
    /// UUID.
    pub uid: Vec<u8>,
    /// Run and revision at which it was made.
    pub made: (u64, u64),
    /// Of this state.
    pub revision: u64,
}

impl Inner {
    fn put(&mut self, record: NetworkRecord) {
        if !record.leaving {
            self.changed(&record.uid);
        }
        self.records.insert(record.name.clone(), record);
    }

    fn changed(&mut self, uid: &[u8]) {
        let revision = self.feed.change();
        self.revisions.insert(uid.to_vec(), revision);
    }

    fn see(&self, record: &NetworkRecord) -> Seen {
        Seen {
            network: self.describe(record),
            uid: record.uid.clone(),
            made: (record.made_run, record.made_revision),
            revision: self.revisions.get(&record.uid).copied().unwrap_or_default(),
        }
    }

    fn describe(&self, record: &NetworkRecord) -> v1::Network {
        let problem = self.problems.get(&record.uid);
        describe(
            record,
            problem
                .map(|problem| problem.message.as_str())
                .unwrap_or_default(),
        )
    }
}

/// A NIC that needs an address.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// UUID and name of its VM.
    pub vm: (Uuid, &'a str),
    /// Its name in the VM.
    pub nic: &'a str,
    /// Its interface on the node.
    pub tap: String,
    /// Its MAC address.
    pub mac: Mac,
    /// The address that it is to have.
    pub address: Option<Ipv4Addr>,
    /// Ports of the node that lead to it.
    pub ports: &'a [PublishedPort],
    /// Which connections its guest may have.
    pub firewall: &'a Firewall,
    /// The machine of its VM runs: its other NICs keep their addresses.
    pub plugged: bool,
}

impl Networks {
    /// None yet; see [`Feed::new`].
    pub fn new(run: u64, nonces: BTreeMap<u64, u64>, history: BuriedRecords) -> Self {
        let inner = Inner {
            records: BTreeMap::new(),
            problems: BTreeMap::new(),
            revisions: BTreeMap::new(),
            feed: Feed::new(run, nonces, history),
        };
        Self {
            inner: Mutex::new(inner),
            turn: tokio::sync::Mutex::default(),
            helper_ends: Arc::default(),
            netd: OnceLock::new(),
        }
    }

    /// Loads the records of the store, and adopts the known helpers.
    pub fn adopt(&self, host: Ports<'_>, records: Vec<NetworkRecord>) {
        if let Err(error) = helper::end_strays(&host.run_dir.join(FOLDER)) {
            tracing::error!(%error, "look for processes that serve a network and that no daemon knows");
        }
        let networks = host.run_dir.join(FOLDER);
        match helper::watch_adopted(&networks, &self.helper_ends) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::error!(%error, "watch the helpers of networks: they are looked at once a minute only");
            }
            _ => {}
        }
        for record in records {
            host.requests.adopt_network(&record);
            self.inner().put(record);
        }
    }

    /// The program `vmmd-netd`. The first use opens the file: a package that replaces the file later has another format of the table perhaps.
    fn netd(&self, path: &Path) -> io::Result<&File> {
        if let Some(program) = self.netd.get() {
            return Ok(program);
        }
        let opened = File::open(path).map_err(|error| {
            let message = format!(
                "open {}: {}; install vmmd again",
                path.display(),
                text::words(&error)
            );
            io::Error::new(error.kind(), message)
        })?;
        Ok(self.netd.get_or_init(|| opened))
    }

    /// Waits until a network needs another helper, because the last one has ended: it has no DHCP and no names until [`Self::reconcile`].
    pub async fn helper_due(&self) {
        self.helper_ends.due().await;
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, name: &str) -> Result<NetworkRecord, Failure> {
        let inner = self.inner();
        let found = inner.records.get(name).filter(|record| !record.leaving);
        found.cloned().ok_or_else(|| not_found(name))
    }

    /// Whether there is a network with this UUID.
    pub fn has(&self, uid: &[u8]) -> bool {
        let inner = self.inner();
        let mut there = inner.records.values().filter(|record| !record.leaving);
        there.any(|record| record.uid == uid)
    }

    /// A network.
    pub fn get(&self, name: &str) -> Result<v1::Network, Failure> {
        let record = self.find(name)?;
        Ok(self.inner().describe(&record))
    }

    /// Networks after a name, and where in the order of changes that was.
    pub fn after(&self, name: Option<&str>) -> (Vec<Seen>, Position) {
        let inner = self.inner();
        let from = name.map_or(Bound::Unbounded, Bound::Excluded);
        let records = inner.records.range::<str, _>((from, Bound::Unbounded));
        let there = records.filter(|(_, record)| !record.leaving);
        let seen = there.map(|(_, record)| inner.see(record)).collect();
        (seen, inner.feed.position())
    }

    /// All networks, and deletions since a position.
    pub fn since(&self, position: Position) -> Result<(Vec<Buried>, Vec<Seen>, Position), Expired> {
        let inner = self.inner();
        let buried = inner.feed.buried_since(position)?;
        let there = inner.records.values().filter(|record| !record.leaving);
        let seen = there.map(|record| inner.see(record)).collect();
        Ok((buried, seen, inner.feed.position()))
    }

    /// Wakes up with each change.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.inner().feed.news()
    }

    /// Where the last change is.
    pub fn position(&self) -> Position {
        self.inner().feed.position()
    }

    /// See [`Feed::nonce`].
    pub fn nonce(&self, run: u64) -> Option<u64> {
        self.inner().feed.nonce(run)
    }

    /// The address of a VM's NIC, if it has one.
    pub fn address(&self, network: &str, vm: Uuid, nic: &str) -> Option<Ipv4Addr> {
        let inner = self.inner();
        let leases = &inner.records.get(network)?.leases;
        let own = leases
            .iter()
            .find(|lease| lease.is_of(vm.as_bytes(), nic) && lease.released_ms == 0);
        own.map(LeaseRecord::ip)
    }

    /// The IPv6 address that a VM's NIC makes itself, if it has an address in the network and that has IPv6.
    pub fn address6(&self, network: &str, vm: Uuid, nic: &str) -> Option<Ipv6Addr> {
        let inner = self.inner();
        let record = inner.records.get(network)?;
        let mut leases = record.leases.iter();
        let own = leases.find(|lease| lease.is_of(vm.as_bytes(), nic) && lease.released_ms == 0)?;
        Some(spec_of(record)?.net6?.of(own.mac()?))
    }

    /// The addresses of a network and its gateway, in words: two networks of which a guest sees no difference have the same.
    pub fn range(&self, network: &str) -> Option<String> {
        let spec = spec_of(self.inner().records.get(network)?)?;
        let more = spec.net6.map(|net| format!(" and {net}")).unwrap_or_default();
        Some(format!("{} with gateway {}{more}", spec.net, spec.gateway))
    }

    /// The bridge of a network.
    pub fn bridge(&self, network: &str) -> Option<String> {
        self.inner().records.get(network).map(bridge)
    }

    /// Whether the network is routed, so that its addresses have a meaning beyond the node.
    pub fn is_routed(&self, network: &str) -> bool {
        let spec = self.inner().records.get(network).and_then(spec_of);
        spec.is_some_and(|spec| spec.mode == NetworkMode::Routed)
    }

    /// The network whose bridge has this name.
    pub fn of_bridge(&self, name: &str) -> Option<String> {
        let inner = self.inner();
        let found = inner.records.values().find(|record| bridge(record) == name);
        found.map(|record| record.name.clone())
    }

    /// Creates a network; returns when it is served. A failure leaves no remains.
    pub async fn create(
        &self,
        host: Ports<'_>,
        request: v1::CreateNetworkRequest,
        context: &Context,
    ) -> Result<v1::Network, Failure> {
        if let Some(made) = host.requests.made_network(context)
            && let Some(seen) = self.after(None).0.into_iter().find(|seen| seen.uid == made)
        {
            return Ok(seen.network);
        }
        let wire = request.network.unwrap_or_default();
        let new = NewNetwork::try_from(&wire)?;
        let mut turn = self.turn.lock().await;
        self.no_clash(&new)?;
        self.no_clash_with_the_node(host, &new).await?;
        let (generation, made_run, made_revision) = {
            let mut inner = self.inner();
            let revision = inner.feed.change();
            (inner.feed.first_generation(), inner.feed.run(), revision)
        };
        let record = NetworkRecord {
            uid: Uuid::new_v4().as_bytes().to_vec(),
            name: new.metadata.name.to_string(),
            created_ms: text::now_ms(),
            labels: new.metadata.labels,
            annotations: new.metadata.annotations,
            owner: new.metadata.owner,
            spec: wire.spec,
            leases: Vec::new(),
            leaving: false,
            generation,
            made_run,
            made_revision,
            begun: host.requests.mark(context).into_iter().collect(),
        };
        self.write(host, &record).await?;
        self.apply(host, &mut turn, Some(&record.uid)).await;
        if let Some(problem) = self.problem(&record.uid) {
            self.retire(host, &record, None).await?;
            self.apply(host, &mut turn, Some(&record.uid)).await;
            return Err(problem);
        }
        drop(turn);
        tell(host, &record, "NetworkCreated", "the network was made");
        self.get(&record.name)
    }

    fn no_clash(&self, new: &NewNetwork) -> Result<(), Failure> {
        let inner = self.inner();
        let name = new.metadata.name.as_str();
        if inner.records.contains_key(name) {
            let message = format!("there is a network \"{name}\" already");
            return Err(Failure::new(Kind::Exists, "NETWORK_EXISTS", message));
        }
        for record in inner.records.values() {
            let spec = spec_of(record);
            if let Some(net6) = new.spec.net6
                && spec.as_ref().is_some_and(|spec| spec.net6 == Some(net6))
            {
                let message = format!(
                    "network.spec.ipv6Cidr: the network \"{}\" has {net6} already: choose another prefix",
                    record.name
                );
                return Err(Failure::precondition("NETWORK_OVERLAPS", message));
            }
            if spec.is_some_and(|spec| spec.net.overlaps(new.spec.net)) {
                let message = format!(
                    "network.spec.ipv4Cidr: {} overlaps with the network \"{}\": choose another range",
                    new.spec.net, record.name
                );
                return Err(Failure::precondition("NETWORK_OVERLAPS", message));
            }
        }
        Ok(())
    }

    /// Deletes a network. A later repair removes objects that cannot be removed from the node at
    /// once.
    pub async fn delete(&self, host: Ports<'_>, name: &str, context: &Context) -> Result<(), Failure> {
        let mut turn = self.turn.lock().await;
        let record = self.find(name)?;
        update::expected(&record, context)?;
        let users = users(host, name);
        if !users.is_empty() {
            let users = users.join(", ");
            let message = format!("network \"{name}\" is in use by {users}: detach the NICs there first");
            return Err(Failure::precondition("NETWORK_IN_USE", message));
        }
        let mark = host.requests.mark(context);
        let answered = mark.map(|mark| request::done(mark, &v1::DeleteNetworkResponse::default()));
        self.retire(host, &record, answered).await?;
        self.apply(host, &mut turn, Some(&record.uid)).await;
        tell(host, &record, "NetworkDeleted", "the network was deleted");
        Ok(())
    }

    /// Stores a record durably, then updates the daemon's copy.
    async fn write(&self, host: Ports<'_>, record: &NetworkRecord) -> Result<(), Failure> {
        host.store.put_network(record).await.map_err(store_failure)?;
        self.inner().put(record.clone());
        Ok(())
    }

    /// Begins to delete a network: to clients it is gone then.
    async fn retire(
        &self,
        host: Ports<'_>,
        record: &NetworkRecord,
        answered: Option<RequestRecord>,
    ) -> Result<(), Failure> {
        let record = NetworkRecord {
            leaving: true,
            ..record.clone()
        };
        let tombstone = self.inner().feed.bury(metadata(&record));
        let retired = host.store.retire_network(&record, tombstone.clone(), answered);
        let retired = retired.await.map_err(store_failure);
        let mut inner = self.inner();
        if retired.is_ok() {
            inner.revisions.remove(&record.uid);
            inner.put(record);
            inner.feed.buried(tombstone);
        } else {
            inner.feed.kept(&tombstone);
        }
        retired
    }

    fn problem(&self, uid: &[u8]) -> Option<Failure> {
        self.inner().problems.get(uid).cloned()
    }
}

/// The validated form of a network's spec; it was validated when it came.
fn spec_of(record: &NetworkRecord) -> Option<NetworkSpec> {
    let spec = record.spec.clone().unwrap_or_default();
    NetworkSpec::new(&mut Violations::default(), "spec", &spec)
}

/// The network's bridge: 3 + 10 characters.
fn bridge(record: &NetworkRecord) -> String {
    let uid = Uuid::from_slice(&record.uid).unwrap_or_default();
    let uid = uid.simple().to_string();
    format!("vmb{}", uid.get(..10).unwrap_or_default())
}

/// Files of the network's helper.
fn folder(host: Ports<'_>, record: &NetworkRecord) -> PathBuf {
    let uid = Uuid::from_slice(&record.uid).unwrap_or_default();
    host.run_dir.join(FOLDER).join(uid.to_string())
}

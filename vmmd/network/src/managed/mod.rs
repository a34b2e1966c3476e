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

mod conntrack;
mod decline;
mod describe;
mod filter;
mod firewall;
pub(crate) mod floating;
pub(crate) mod helper;
mod lease;
mod listening;
pub(crate) mod metadata;
mod neighbors;
mod netlink;
pub(crate) mod nft;
pub(crate) mod node;
mod overlap;
mod plan;
mod pool;
pub(crate) mod routes;
pub(crate) mod rules;
pub(crate) mod table;
mod update;

use std::{
    fs::File,
    io,
    net::{Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use uuid::Uuid;
use vmmd_api::v1;
use vmmd_spec::{
    Violations,
    name::Name,
    network::{
        LEAST_MTU_OF_IPV6, MTUS, NetworkMode, NetworkSpec, NewNetwork, Subnet, reservation::Reservation,
    },
    nic::{Access, Mac, NicAddress},
};

pub use self::{
    describe::describe,
    node::PERIOD,
    plan::{Found as BridgeFacts, Wanted as BridgeSpec},
    rules::MARK,
};
use self::{
    describe::tell,
    filter::{Filter, Own},
    netlink::Watch,
    node::users,
};
use vmmd_host::{failure::Failure, text};
use vmmd_objects::{
    context::Context,
    registry::{self, Objects, Registry},
    request,
};
use vmmd_store::store_failure;
use vmmd_store::{LeaseRecord, NetworkRecord, RequestRecord};

use super::{Links, Ports};

/// All networks.
#[derive(Debug)]
pub struct Networks {
    /// All networks; clients do not see networks that are being deleted.
    pub registry: Registry<NetworkKind>,
    /// The holder of the lock may change records and the node.
    turn: tokio::sync::Mutex<Filter>,
    /// Authors of the daemon's changes of the packet filter.
    own: Arc<Own>,
    /// Notifications about changes of the packet filter.
    watch: OnceLock<Watch>,
    pub(crate) helper_ends: Arc<helper::Ends>,
    /// Other packet filters that drop packets of guests; `None` before the first search.
    obstacles: Mutex<Option<Vec<neighbors::Obstacle>>>,
    /// The program `vmmd-netd`, from its first use.
    netd: OnceLock<File>,
}

/// Networks of the NetworkService.
#[derive(Clone, Debug, PartialEq)]
pub enum NetworkKind {}

/// State of a network on the node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NetworkState {
    /// Why the network is not served.
    problem: Option<Failure>,
    /// Deficiencies of a network that is served; empty without any.
    warning: String,
}

/// The state of a network in words.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NetworkView {
    ready: bool,
    message: String,
}

/// A network at a time.
pub type SeenNetwork = registry::Seen<NetworkKind>;

impl registry::Kind for NetworkKind {
    const NAME: &'static str = "network";
    const A: &'static str = "a network";
    const EXISTS: &'static str = "NETWORK_EXISTS";
    const NOT_FOUND: &'static str = "NETWORK_NOT_FOUND";
    type Record = NetworkRecord;
    type State = NetworkState;
    type Index = ();
    type View = NetworkView;

    fn view(_: &Objects<Self>, _: &NetworkRecord, state: &NetworkState) -> NetworkView {
        let problem = state.problem.as_ref().map(|problem| &problem.message);
        NetworkView {
            ready: problem.is_none(),
            message: problem.unwrap_or(&state.warning).clone(),
        }
    }

    fn is_shown(record: &NetworkRecord) -> bool {
        !record.leaving
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
    /// Connections of its guest.
    pub access: &'a Access,
    /// Its guest may use the metadata service.
    pub metadata: bool,
    /// The machine of its VM runs: its other NICs keep their addresses.
    pub plugged: bool,
}

impl Networks {
    /// The networks of this registry.
    pub fn new(registry: Registry<NetworkKind>) -> Self {
        let own = Arc::new(Own::default());
        Self {
            registry,
            turn: tokio::sync::Mutex::new(Filter::new(Arc::clone(&own))),
            own,
            watch: OnceLock::new(),
            helper_ends: Arc::default(),
            obstacles: Mutex::default(),
            netd: OnceLock::new(),
        }
    }

    /// Loads the records of the store, and adopts the known helpers.
    pub fn adopt(&self, host: Ports<'_>, records: Vec<NetworkRecord>) {
        for folder in [helper::NETWORKS, helper::PODS].map(|name| host.run_dir.join(name)) {
            if let Err(error) = helper::end_strays(&folder) {
                tracing::error!(%error, "look for processes that serve a network and that no daemon knows");
            }
            match helper::watch_adopted(&folder, &self.helper_ends) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::error!(%error, "watch the helpers of networks: they are looked at once a minute only");
                }
                _ => {}
            }
        }
        match Watch::open() {
            Ok(watch) => drop(self.watch.set(watch)),
            Err(error) => {
                tracing::error!(%error, "watch the packet filter: it is set up again once a minute");
            }
        }
        for record in records {
            host.requests.adopt(&record.begun, &record.uid);
            self.registry.restore(record);
        }
    }

    /// The program `vmmd-netd`. The first use opens the file: a package that replaces the file later has another format of the table perhaps.
    pub(crate) fn netd(&self, path: &Path) -> io::Result<&File> {
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

    /// Waits until another program changes the tables of the networks in the packet filter; its netlink port, for [`Self::restore_filter`].
    pub async fn filter_changed(&self) -> u32 {
        let Some(watch) = self.watch.get() else {
            return std::future::pending().await;
        };
        loop {
            match watch.next().await {
                Ok(author) if self.own.has(author) => {}
                Ok(0) => {
                    tracing::warn!("notifications about the packet filter were lost: it is set up again");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    return 0;
                }
                Ok(author) => return author,
                Err(error) => {
                    tracing::error!(%error, "watch the packet filter: it is set up again once a minute");
                    tokio::time::sleep(PERIOD).await;
                    return 0;
                }
            }
        }
    }

    fn find(&self, name: &str) -> Result<NetworkRecord, Failure> {
        Ok(self.registry.see(name)?.record.clone())
    }

    /// A network.
    pub fn get(&self, name: &str) -> Result<v1::Network, Failure> {
        let seen = self.registry.see(name)?;
        Ok(describe(&seen))
    }

    /// MAC address of a reservation.
    pub fn reserved_mac(&self, network: &str, name: &Name) -> Option<Mac> {
        let spec = spec_of(self.registry.lock().get(network)?)?;
        let mut reservations = spec.reservations.iter();
        reservations.find(|reservation| reservation.name == *name)?.mac
    }

    /// The IPv4 address that the spec of a NIC with this MAC address gives. Refused as `RESERVATION_NOT_FOUND` when the network has no
    /// reservation of the given name, and as `ADDRESS_RESERVED` when the reservation is that of another MAC address.
    pub fn wanted(
        &self,
        network: &str,
        (nic, mac): (&Name, Mac),
        address: Option<&NicAddress>,
    ) -> Result<Option<Ipv4Addr>, Failure> {
        let name = match address {
            None => return Ok(None),
            Some(NicAddress::Ip(address)) => return Ok(Some(*address)),
            Some(NicAddress::Reserved(name)) => name,
        };
        let spec = spec_of(&self.find(network)?);
        let mut reservations = spec.iter().flat_map(|spec| &spec.reservations);
        match reservations.find(|reservation| reservation.name == *name) {
            Some(Reservation {
                address: None,
                mac: Some(reserved),
                ..
            }) if *reserved != mac => {
                let message = format!(
                    "NIC \"{nic}\": the reservation \"{name}\" of the network \"{network}\" is for the MAC address {reserved}: give the NIC \
                     that MAC address"
                );
                Err(Failure::precondition("ADDRESS_RESERVED", message))
            }
            Some(reservation) => Ok(reservation.address),
            None => {
                let message = format!(
                    "NIC \"{nic}\": the network \"{network}\" has no reservation \"{name}\": add it with `vmmctl update network \
                     {network} --reserve {name}=ADDRESS`, or give an address"
                );
                Err(Failure::precondition("RESERVATION_NOT_FOUND", message))
            }
        }
    }

    /// The IPv4 address of a VM's NIC, if it has one.
    pub fn address(&self, network: &str, vm: Uuid, nic: &str) -> Option<Ipv4Addr> {
        let networks = self.registry.lock();
        let leases = &networks.get(network)?.leases;
        let own = leases
            .iter()
            .find(|lease| lease.is_of(vm.as_bytes(), nic) && lease.released_ms == 0);
        own.and_then(LeaseRecord::ip)
    }

    /// The IPv6 address that a VM's NIC makes itself, if it has an address in the network and that has IPv6.
    pub fn address6(&self, network: &str, vm: Uuid, nic: &str) -> Option<Ipv6Addr> {
        let networks = self.registry.lock();
        let record = networks.get(network)?;
        let mut leases = record.leases.iter();
        let own = leases.find(|lease| lease.is_of(vm.as_bytes(), nic) && lease.released_ms == 0)?;
        Some(spec_of(record)?.net6?.of(own.mac()?))
    }

    /// The addresses of a network and its gateway, in words: two networks of which a guest sees no difference have the same.
    pub fn range(&self, network: &str) -> Option<String> {
        let spec = spec_of(self.registry.lock().get(network)?)?;
        let subnet = spec.subnet;
        let ipv4 = subnet.map(|Subnet { net, gateway }| format!("{net} with gateway {gateway}"));
        let ipv6 = spec.net6.map(|net| net.to_string());
        let all: Vec<_> = ipv4.into_iter().chain(ipv6).collect();
        Some(all.join(" and "))
    }

    /// Whether the network has IPv4 addresses.
    pub fn has_ipv4(&self, network: &str) -> bool {
        let spec = self.registry.lock().get(network).and_then(spec_of);
        spec.is_some_and(|spec| spec.subnet.is_some())
    }

    /// The bridge of a network.
    pub fn bridge(&self, network: &str) -> Option<String> {
        self.registry.lock().get(network).map(bridge)
    }

    /// Whether the network is routed, so that its addresses have a meaning beyond the node.
    pub fn is_routed(&self, network: &str) -> bool {
        let spec = self.registry.lock().get(network).and_then(spec_of);
        spec.is_some_and(|spec| spec.mode == NetworkMode::Routed)
    }

    /// The network whose bridge has this name.
    pub fn of_bridge(&self, name: &str) -> Option<String> {
        let networks = self.registry.lock();
        let found = networks.records().find(|record| bridge(record) == name);
        found.map(|record| record.name.clone())
    }

    /// Creates a network; returns when it is served. A failure leaves no remains.
    pub async fn create(
        &self,
        host: Ports<'_>,
        request: v1::CreateNetworkRequest,
        context: &Context,
    ) -> Result<v1::Network, Failure> {
        if let Some(made) = host.requests.made(context, "CreateNetwork")
            && let Some(seen) = self.registry.find(&made)
        {
            return Ok(describe(&seen));
        }
        let wire = request.network.unwrap_or_default();
        let new = NewNetwork::try_from(&wire)?;
        let mut turn = self.turn.lock().await;
        self.no_clash(&new)?;
        self.no_clash_with_the_node(host, &new).await?;
        let mut record = NetworkRecord {
            uid: Uuid::new_v4().as_bytes().to_vec(),
            name: new.metadata.name.to_string(),
            created_ms: text::now_ms(),
            labels: new.metadata.labels,
            annotations: new.metadata.annotations,
            owner: new.metadata.owner,
            mtu: default_mtu(host, &new.spec).await,
            spec: wire.spec,
            begun: host.requests.mark(context).into_iter().collect(),
            ..NetworkRecord::default()
        };
        self.registry.lock().begin(&mut record);
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
        let networks = self.registry.lock();
        networks.check_free(new.metadata.name.as_str())?;
        for record in networks.records() {
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
            let subnet = spec.and_then(|spec| spec.subnet);
            if let Some((subnet, new)) = subnet.zip(new.spec.subnet)
                && subnet.net.overlaps(new.net)
            {
                let message = format!(
                    "network.spec.ipv4Cidr: {} overlaps with the network \"{}\": choose another range",
                    new.net, record.name
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
        host.store.put(record).await.map_err(store_failure)?;
        self.registry.lock().put(record.clone());
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
        let tombstone = self.registry.bury(&record);
        let retired = host.store.put_with(&record, Some(tombstone.clone()), answered);
        let retired = retired.await.map_err(store_failure);
        let mut networks = self.registry.lock();
        if retired.is_ok() {
            networks.put(record);
            networks.buried(tombstone);
        } else {
            networks.kept(&tombstone);
        }
        retired
    }

    fn problem(&self, uid: &[u8]) -> Option<Failure> {
        let networks = self.registry.lock();
        networks.state(networks.name_of(uid)?)?.problem.clone()
    }
}

/// The MAC address of a network's bridge.
fn bridge_mac(record: &NetworkRecord) -> [u8; 6] {
    let byte = |index: usize| record.uid.get(index).copied().unwrap_or(0);
    [2, byte(0), byte(1), byte(2), byte(3), byte(4)]
}

/// MTU of a new network without one of its own, in bytes: that of the node's default route, within the limits of networks.
async fn default_mtu(host: Ports<'_>, spec: &NetworkSpec) -> u32 {
    if spec.mode == NetworkMode::Isolated {
        return 0;
    }
    let uplink = host.links.uplink().await.unwrap_or_else(|error| {
        tracing::warn!(%error, "look for the default route");
        None
    });
    let least = match spec.net6 {
        Some(_) => LEAST_MTU_OF_IPV6,
        None => *MTUS.start(),
    };
    uplink.map_or(0, |(_, link)| link.mtu.clamp(least.into(), (*MTUS.end()).into()))
}

/// The validated form of a network's spec; it was validated when it came.
fn spec_of(record: &NetworkRecord) -> Option<NetworkSpec> {
    let mut spec = record.spec.clone().unwrap_or_default();
    if spec.mtu == 0 {
        spec.mtu = record.mtu;
    }
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
    host.run_dir.join(helper::NETWORKS).join(uid.to_string())
}

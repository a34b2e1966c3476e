//! The networks that the node makes: a record each in the store, and on the node a bridge, rules of the packet filter and a DHCP
//! server.
//!
//! ```text
//!  (none) ──record──▶ Wanted ──bridge, rules, DHCP──▶ served ──record──▶ Leaving ──all of it gone──▶ (none)
//! ```
//!
//! Always: what is on the node is named by the id of a network that has a record. So what an interrupted create or delete
//! leaves is found by its record, and put right ([`Networks::reconcile`]): at the daemon's start, each minute, and when
//! something changes. One task at a time changes the node.
//!
//! A NIC's address is a *lease* in the network's record; [`pool`] says who gets which.

mod dhcp;
mod nft;
mod plan;
mod pool;
mod rules;

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use proto::{
    model::{
        Violations,
        network::{NetworkMode, NetworkSpec, NewNetwork},
        nic::{Mac, Protocol, PublishedPort},
    },
    v1,
};
use uuid::Uuid;

pub use self::{
    dhcp::server::{ServeDhcp, run as serve_dhcp},
    plan::{Found as BridgeFacts, Wanted as BridgeSpec},
};
use self::{
    dhcp::{Table, helper},
    plan::{Step, Wanted},
    pool::Refusal,
    rules::{Port, Ruleset},
};
use super::Links;
use crate::{
    context::Context,
    event::{Draft, Object},
    failure::{Failure, Kind},
    host::Host,
    request,
    store::{LeaseRecord, NetworkRecord, PortRecord},
    text,
    vm::store_failure,
};

/// How often the node is compared with what is wanted.
const PERIOD: Duration = Duration::from_secs(60);
/// For how long VMs are given their addresses, in seconds. They have them for their lives; a client asks again at half time.
const LEASE_SECONDS: u32 = 3600;

/// All networks.
#[derive(Debug, Default)]
pub struct Networks {
    inner: Mutex<Inner>,
    /// Who holds it may change records and the node.
    turn: tokio::sync::Mutex<Applied>,
}

#[derive(Debug, Default)]
struct Inner {
    /// By name.
    records: BTreeMap<String, NetworkRecord>,
    /// Why the node is not as wanted.
    problem: String,
}

/// What was put on the node last.
#[derive(Debug, Default)]
struct Applied {
    mark: String,
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
}

impl Networks {
    /// Takes over the records of the store.
    pub fn adopt(&self, host: &Host, records: Vec<NetworkRecord>) {
        for record in records {
            host.requests.adopt_network(&record);
            self.inner().records.insert(record.name.clone(), record);
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, name: &str) -> Result<NetworkRecord, Failure> {
        let inner = self.inner();
        let found = inner.records.get(name).filter(|record| !record.leaving);
        found.cloned().ok_or_else(|| not_found(name))
    }

    /// A network.
    pub fn get(&self, name: &str) -> Result<v1::Network, Failure> {
        let record = self.find(name)?;
        Ok(describe(&record, &self.inner().problem))
    }

    /// All networks, by name.
    pub fn list(&self) -> Vec<v1::Network> {
        let inner = self.inner();
        let there = inner.records.values().filter(|record| !record.leaving);
        there.map(|record| describe(record, &inner.problem)).collect()
    }

    /// Refused as NETWORK_NOT_FOUND when there is no such network.
    pub fn look(&self, name: &str) -> Result<(), Failure> {
        self.find(name).map(drop)
    }

    /// The address of a VM's NIC, if it has one.
    pub fn address(&self, network: &str, vm: Uuid, nic: &str) -> Option<Ipv4Addr> {
        let inner = self.inner();
        let leases = &inner.records.get(network)?.leases;
        let own = leases.iter().find(|lease| lease.is_of(vm.as_bytes(), nic) && lease.released_ms == 0);
        own.map(LeaseRecord::ip)
    }

    /// Makes a network; returns when it is served. What fails leaves nothing behind.
    pub async fn create(
        &self,
        host: &Arc<Host>,
        request: v1::CreateNetworkRequest,
        context: &Context,
    ) -> Result<v1::Network, Failure> {
        if let Some(made) = host.requests.made_network(context)
            && let Some(network) = self.list().into_iter().find(|network| is(network, &made))
        {
            return Ok(network);
        }
        let wire = request.network.unwrap_or_default();
        let new = NewNetwork::try_from(&wire)?;
        let mut turn = self.turn.lock().await;
        self.no_clash(&new)?;
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
            begun: host.requests.mark(context).into_iter().collect(),
        };
        host.store.put_network(&record).await.map_err(store_failure)?;
        self.inner().records.insert(record.name.clone(), record.clone());
        if let Err(failure) = self.apply(host, &mut turn).await {
            self.remove(host, &mut turn, record).await;
            return Err(failure);
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
            if spec_of(record).is_some_and(|spec| spec.net.overlaps(new.spec.net)) {
                let message = format!(
                    "network.spec.ipv4Cidr: {} overlaps with the network \"{}\": choose another range",
                    new.spec.net, record.name
                );
                return Err(Failure::precondition("NETWORK_OVERLAPS", message));
            }
        }
        Ok(())
    }

    /// Deletes a network.
    pub async fn delete(&self, host: &Arc<Host>, name: &str, context: &Context) -> Result<(), Failure> {
        let mut turn = self.turn.lock().await;
        let mut record = self.find(name)?;
        let users = users(host, name);
        if !users.is_empty() {
            let users = users.join(", ");
            let message = format!("network \"{name}\" is in the spec of {users}: detach the NICs there first");
            return Err(Failure::precondition("NETWORK_IN_USE", message));
        }
        record.leaving = true;
        let mut answered = Vec::new();
        let mark = host.requests.mark(context);
        answered.extend(mark.map(|mark| request::done(mark, &v1::DeleteNetworkResponse::default())));
        host.store
            .retire_network(&record, answered)
            .await
            .map_err(store_failure)?;
        self.inner().records.insert(record.name.clone(), record.clone());
        self.remove(host, &mut turn, record.clone()).await;
        tell(host, &record, "NetworkDeleted", "the network was deleted");
        Ok(())
    }

    /// Takes a network from the node, and its record from the store. What fails here is done later.
    async fn remove(&self, host: &Arc<Host>, turn: &mut Applied, mut record: NetworkRecord) {
        record.leaving = true;
        if let Err(error) = host.store.put_network(&record).await {
            tracing::error!(network = record.name, %error, "write that a network goes");
        }
        self.inner().records.insert(record.name.clone(), record.clone());
        if let Err(failure) = self.apply(host, turn).await {
            tracing::error!(network = record.name, error = failure.message, "take a network away");
        }
    }

    /// Gives a NIC its address and its rules; the bridge that its tap belongs on.
    pub async fn lease(
        &self,
        host: &Arc<Host>,
        network: &str,
        request: &Request<'_>,
    ) -> Result<String, Failure> {
        let mut turn = self.turn.lock().await;
        let mut record = self.find(network)?;
        let spec = spec_of(&record).ok_or_else(|| not_found(network))?;
        let (vm, now) = (request.vm.0.as_bytes(), text::now_ms());
        let owner = (vm.as_slice(), request.nic);
        let address = pool::allocate(&spec, &record.leases, owner, request.address, now)
            .map_err(|refusal| refused(network, &spec, request, &refusal))?;
        if spec.mode != NetworkMode::Nat && !request.ports.is_empty() {
            let message = format!(
                "NIC \"{}\": the network \"{network}\" has not the mode NAT, so ports can't be published",
                request.nic
            );
            return Err(Failure::precondition("NOT_NAT", message));
        }
        self.no_port_clash(request)?;
        let lease = LeaseRecord {
            address: address.into(),
            vm: vm.to_vec(),
            vm_name: request.vm.1.to_owned(),
            nic: request.nic.to_owned(),
            mac: request.mac.octets().to_vec(),
            tap: request.tap.clone(),
            ports: request.ports.iter().map(PortRecord::from).collect(),
            released_ms: 0,
        };
        let before = record.clone();
        let taken = |other: &LeaseRecord| other.is_of(vm, request.nic) || other.address == lease.address;
        record.leases.retain(|other| !taken(other) && other.counts(now));
        record.leases.push(lease);
        record.leases.sort_by_key(|lease| lease.address);
        if record != before {
            host.store.put_network(&record).await.map_err(store_failure)?;
            self.inner().records.insert(record.name.clone(), record.clone());
        }
        self.apply(host, &mut turn).await?;
        Ok(bridge(&record))
    }

    fn no_port_clash(&self, request: &Request<'_>) -> Result<(), Failure> {
        let inner = self.inner();
        let vm = request.vm.0.as_bytes();
        let leases = inner.records.values().flat_map(|record| &record.leases);
        let others = leases.filter(|lease| lease.released_ms == 0 && !lease.is_of(vm, request.nic));
        for lease in others {
            for port in &lease.ports {
                let wanted = request.ports.iter().map(PortRecord::from);
                if wanted.into_iter().any(|wanted| wanted.udp == port.udp && wanted.node_port == port.node_port) {
                    let protocol = if port.udp { "UDP" } else { "TCP" };
                    let message = format!(
                        "NIC \"{}\": {protocol} port {} of the node leads to NIC \"{}\" of VM \"{}\" already",
                        request.nic, port.node_port, lease.nic, lease.vm_name
                    );
                    return Err(Failure::precondition("PORT_IN_USE", message));
                }
            }
        }
        Ok(())
    }

    /// Compares the node with what is wanted, and puts it right; for ever.
    pub async fn watch(host: Arc<Host>) {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            host.networks.reconcile(&host).await;
        }
    }

    /// Releases the addresses of NICs that are gone, and puts right what differs on the node.
    pub async fn reconcile(&self, host: &Arc<Host>) {
        let mut turn = self.turn.lock().await;
        for record in self.release(host) {
            if let Err(error) = host.store.put_network(&record).await {
                tracing::error!(network = record.name, %error, "release addresses of a network");
                continue;
            }
            self.inner().records.insert(record.name.clone(), record);
        }
        // What others did to the packet filter shows only there.
        turn.mark.clear();
        let result = self.apply(host, &mut turn).await;
        let problem = result.err().map(|failure| failure.message).unwrap_or_default();
        let known = std::mem::replace(&mut self.inner().problem, problem.clone());
        if !problem.is_empty() && problem != known {
            tracing::error!(problem, "the node's networks can't be put right");
        }
    }

    /// Records whose leases change now.
    fn release(&self, host: &Host) -> Vec<NetworkRecord> {
        let now = text::now_ms();
        let mut changed = Vec::new();
        for record in self.inner().records.values() {
            let mut new = record.clone();
            for lease in new.leases.iter_mut().filter(|lease| lease.released_ms == 0) {
                if !is_used(host, &record.name, lease) {
                    lease.released_ms = now;
                }
            }
            new.leases.retain(|lease| lease.counts(now));
            if new != *record {
                changed.push(new);
            }
        }
        changed
    }

    /// Makes the node be as the records say. An error leaves the rest to the next time.
    async fn apply(&self, host: &Arc<Host>, applied: &mut Applied) -> Result<(), Failure> {
        let records: Vec<_> = self.inner().records.values().cloned().collect();
        if records.is_empty() && applied.mark.is_empty() {
            return Ok(());
        }
        self.bridges(host, &records).await?;
        filter(host, &records, applied).await?;
        for record in &records {
            self.serve(host, record).await?;
        }
        let leaving = records.into_iter().filter(|record| record.leaving);
        for record in leaving {
            host.store.remove_network(&record.uid).await.map_err(store_failure)?;
            self.inner().records.remove(&record.name);
        }
        Ok(())
    }

    async fn bridges(&self, host: &Host, records: &[NetworkRecord]) -> Result<(), Failure> {
        let wanted: BTreeMap<_, _> = records
            .iter()
            .map(|record| (bridge(record), wanted(record)))
            .collect();
        let mut found = BTreeMap::new();
        for name in wanted.keys() {
            if let Some(link) = host.links.inspect(name).await.map_err(|error| failed(&error))? {
                found.insert(name.clone(), link);
            }
        }
        for step in plan::plan(&wanted, &found) {
            tracing::debug!(?step, "change a bridge");
            carry_out(&host.links, step).await.map_err(|error| failed(&error))?;
        }
        if wanted.values().any(Option::is_some) && records.iter().any(forwards) {
            forwarding().map_err(|error| failed(&error))?;
        }
        Ok(())
    }

    async fn serve(&self, host: &Host, record: &NetworkRecord) -> Result<(), Failure> {
        let folder = folder(host, record);
        let Some(spec) = spec_of(record).filter(|_| !record.leaving) else {
            return helper::end(&folder).map_err(|error| failed(&error));
        };
        let name = bridge(record);
        let link = host.links.find(&name).await.map_err(|error| failed(&error))?;
        let link = link.ok_or_else(|| Failure::internal(format!("the bridge {name} has vanished")))?;
        helper::write_table(&folder, &table(&spec, record)).map_err(|error| failed(&error))?;
        helper::ensure(&folder, &name, link.index)
            .await
            .map_err(|error| failed(&error))
    }
}

/// Puts the rules into the kernel, unless they are there.
async fn filter(host: &Host, records: &[NetworkRecord], applied: &mut Applied) -> Result<(), Failure> {
    let networks: Vec<_> = records.iter().filter_map(filtered).collect();
    let ruleset: Ruleset = rules::ruleset(&networks);
    if applied.mark == ruleset.mark {
        return Ok(());
    }
    let there = nft::has(&ruleset).await.map_err(|error| failed(&error))?;
    if !there {
        nft::apply(&ruleset).await.map_err(|error| failed(&error))?;
        if applied.mark.is_empty() && !networks.is_empty() {
            tracing::info!(networks = networks.len(), node = host.boot_id, "the networks' packet filter was set up");
        }
    }
    applied.mark = ruleset.mark;
    Ok(())
}

async fn carry_out(links: &Links, step: Step) -> std::io::Result<()> {
    match step {
        Step::Create(name, wanted) => links.create_bridge(&name, &wanted).await,
        Step::Adjust(index, mtu) => links.set_up(index, mtu).await,
        Step::AddAddress(index, (address, prefix)) => links.add_address(index, address, prefix).await,
        Step::RemoveAddress(index, (address, prefix)) => links.remove_address(index, address, prefix).await,
        Step::Delete(index) => links.delete(index).await,
    }
}

/// Lets the kernel forward packets. It stays on: others may have come to need it.
fn forwarding() -> std::io::Result<()> {
    const SWITCH: &str = "/proc/sys/net/ipv4/ip_forward";
    if std::fs::read_to_string(SWITCH)?.trim() == "1" {
        return Ok(());
    }
    std::fs::write(SWITCH, "1\n")
}

fn forwards(record: &NetworkRecord) -> bool {
    spec_of(record).is_some_and(|spec| spec.mode != NetworkMode::Isolated)
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

fn folder(host: &Host, record: &NetworkRecord) -> PathBuf {
    let uid = Uuid::from_slice(&record.uid).unwrap_or_default();
    host.config.run_dir.join("networks").join(uid.to_string())
}

fn wanted(record: &NetworkRecord) -> Option<Wanted> {
    let spec = spec_of(record).filter(|_| !record.leaving)?;
    let uid = record.uid.as_slice();
    let byte = |index: usize| uid.get(index).copied().unwrap_or(0);
    Some(Wanted {
        mac: [2, byte(0), byte(1), byte(2), byte(3), byte(4)],
        address: (spec.gateway, spec.net.prefix()),
        mtu: spec.mtu.into(),
        alias: format!("vmmd: network {}", record.name),
    })
}

fn filtered(record: &NetworkRecord) -> Option<rules::Network> {
    let spec = spec_of(record).filter(|_| !record.leaving)?;
    let leases = record.leases.iter().filter(|lease| lease.released_ms == 0);
    let ports = leases.filter_map(|lease| {
        let mac: [u8; 6] = lease.mac.as_slice().try_into().ok()?;
        Some(Port {
            tap: lease.tap.clone(),
            mac: Mac::try_from(mac).ok()?,
            address: lease.ip(),
            published: lease.ports.iter().filter_map(PortRecord::valid).collect(),
        })
    });
    Some(rules::Network {
        bridge: bridge(record),
        mode: spec.mode,
        net: spec.net,
        gateway: spec.gateway,
        ports: ports.collect(),
    })
}

fn table(spec: &NetworkSpec, record: &NetworkRecord) -> Table {
    let leases = record.leases.iter().filter(|lease| lease.released_ms == 0);
    let hosts = leases.filter_map(|lease| {
        let mac: [u8; 6] = lease.mac.as_slice().try_into().ok()?;
        let host = dhcp::Host {
            address: lease.ip(),
            name: lease.vm_name.clone(),
        };
        Some((Mac::try_from(mac).ok()?.to_string(), host))
    });
    Table {
        gateway: spec.gateway,
        routes: spec.mode != NetworkMode::Isolated,
        mask: spec.net.mask(),
        broadcast: spec.net.last(),
        mtu: spec.mtu,
        dns: spec.dns.clone(),
        ntp: spec.ntp.clone(),
        lease_seconds: LEASE_SECONDS,
        hosts: hosts.collect(),
    }
}

/// Whether the NIC that has a lease is still in its VM's spec.
fn is_used(host: &Host, network: &str, lease: &LeaseRecord) -> bool {
    let uid = Uuid::from_slice(&lease.vm).unwrap_or_default().to_string();
    let vms = host.table.list();
    let mut vms = vms.iter();
    let vm = vms.find(|vm| vm.metadata.as_ref().is_some_and(|metadata| metadata.uid == uid));
    match vm.map(|vm| &vm.spec) {
        None => false,
        // A VM whose record can't be read keeps what it has.
        Some(None) => true,
        Some(Some(spec)) => spec.nics.iter().any(|nic| nic.name == lease.nic && is_on(nic, network)),
    }
}

fn is_on(nic: &v1::NicSpec, network: &str) -> bool {
    matches!(&nic.attachment, Some(v1::nic_spec::Attachment::Network(name)) if name == network)
}

/// "VM \"web\"": VMs whose specs name the network.
fn users(host: &Host, network: &str) -> Vec<String> {
    let vms = host.table.list();
    let using = vms.iter().filter(|vm| {
        let mut nics = vm.spec.iter().flat_map(|spec| &spec.nics);
        nics.any(|nic| is_on(nic, network))
    });
    let names = using.filter_map(|vm| Some(format!("VM \"{}\"", vm.metadata.as_ref()?.name)));
    names.collect()
}

fn describe(record: &NetworkRecord, problem: &str) -> v1::Network {
    let now = text::now_ms();
    let spec = spec_of(record);
    let leases = record.leases.iter().filter(|lease| lease.counts(now));
    let leases = leases.map(|lease| v1::NetworkLease {
        address: lease.ip().to_string(),
        mac: <[u8; 6]>::try_from(lease.mac.as_slice())
            .ok()
            .and_then(|mac| Mac::try_from(mac).ok())
            .map(|mac| mac.to_string())
            .unwrap_or_default(),
        vm: lease.vm_name.clone(),
        nic: lease.nic.clone(),
        release_time: (lease.released_ms != 0)
            .then(|| text::timestamp(lease.released_ms))
            .flatten(),
    });
    v1::Network {
        metadata: Some(v1::ObjectMetadata {
            name: record.name.clone(),
            uid: Uuid::from_slice(&record.uid).unwrap_or_default().to_string(),
            generation: 1,
            labels: record.labels.clone(),
            annotations: record.annotations.clone(),
            owner: record.owner.clone(),
            create_time: text::timestamp(record.created_ms),
        }),
        status: Some(v1::NetworkStatus {
            ready: problem.is_empty(),
            message: problem.to_owned(),
            bridge: bridge(record),
            gateway: spec.as_ref().map(|spec| spec.gateway.to_string()).unwrap_or_default(),
            leases: leases.collect(),
            available_addresses: spec.map_or(0, |spec| pool::available(&spec, &record.leases, now)),
        }),
        spec: record.spec.clone(),
    }
}

fn is(network: &v1::Network, uid: &[u8]) -> bool {
    let uid = Uuid::from_slice(uid).unwrap_or_default().to_string();
    network.metadata.as_ref().is_some_and(|metadata| metadata.uid == uid)
}

fn refused(network: &str, spec: &NetworkSpec, request: &Request<'_>, refusal: &Refusal) -> Failure {
    let nic = request.nic;
    match refusal {
        Refusal::NotInPool(address) => {
            let message = format!(
                "NIC \"{nic}\": {address} is no address for a VM in the network \"{network}\" ({}, gateway {})",
                spec.net, spec.gateway
            );
            Failure::precondition("ADDRESS_NOT_IN_NETWORK", message)
        }
        Refusal::Taken(address, lease) => {
            let had = if lease.released_ms == 0 { "has" } else { "had until a moment ago" };
            let message = format!(
                "NIC \"{nic}\": NIC \"{}\" of VM \"{}\" {had} the address {address}",
                lease.nic, lease.vm_name
            );
            Failure::precondition("ADDRESS_IN_USE", message)
        }
        Refusal::Exhausted => {
            let message = format!(
                "NIC \"{nic}\": all addresses of the network \"{network}\" ({}) are taken; those that were released are kept \
                 for ten minutes",
                spec.net
            );
            Failure::new(Kind::Exhausted, "NO_FREE_ADDRESS", message)
        }
    }
}

fn not_found(name: &str) -> Failure {
    Failure::new(Kind::NotFound, "NETWORK_NOT_FOUND", format!("there is no network \"{name}\""))
}

fn failed(error: &std::io::Error) -> Failure {
    Failure::internal(format!("set up the node's networks: {}", text::words(error)))
}

fn tell(host: &Host, record: &NetworkRecord, reason: &str, message: &str) {
    let uid = Uuid::from_slice(&record.uid).unwrap_or_default();
    let object = Object::Network(record.name.clone(), uid);
    host.events.emit(Draft::normal(object, reason, message));
}

impl From<&PublishedPort> for PortRecord {
    fn from(port: &PublishedPort) -> Self {
        Self {
            udp: port.protocol == Protocol::Udp,
            node_port: port.node_port.into(),
            guest_port: port.guest_port.into(),
        }
    }
}

impl PortRecord {
    fn valid(&self) -> Option<PublishedPort> {
        Some(PublishedPort {
            protocol: if self.udp { Protocol::Udp } else { Protocol::Tcp },
            node_port: u16::try_from(self.node_port).ok()?,
            guest_port: u16::try_from(self.guest_port).ok()?,
        })
    }
}

//! State of the node that the networks' records require, and the steps to reach it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    sync::PoisonError,
    time::Duration,
};

use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{failure::Failure, fault, text};
use vmmd_objects::event::{Draft, Object};
use vmmd_spec::{
    Violations,
    firewall::Firewall,
    network::{Ipv6Net, NetworkMode},
    nic::Mac,
};
use vmmd_store::store_failure;
use vmmd_store::{LeaseRecord, NetworkRecord, PortRecord};

use super::{
    Links, NetworkState, Networks, Ports, bridge, bridge_mac, decline,
    describe::{failed, tell},
    filter::Filter,
    floating, folder,
    helper::{self, Served},
    neighbors::{self, Obstacle},
    plan::{self, Found, Step, Wanted},
    routes,
    rules::{self, Port},
    spec_of,
    table::table,
};
use crate::{
    Link,
    guard::{Guard, TapGuard},
};

/// Interval between comparisons of the node with the wanted state.
pub const PERIOD: Duration = Duration::from_secs(60);
/// Differences between the node and the wanted state.
#[derive(Debug, Default)]
pub struct Repairs {
    /// Networks of which something was missing, and what.
    networks: Vec<(NetworkRecord, &'static str)>,
}

impl Networks {
    /// Releases the addresses of NICs that are gone, and repairs what differs on the node: repairs are events.
    pub async fn reconcile(&self, host: Ports<'_>) {
        let mut filter = self.turn.lock().await;
        self.release(host).await;
        let known = self.problems();
        if self.watch.get().is_none() {
            // Other programs may have changed the packet filter.
            filter.distrust();
        }
        let repairs = self.apply(host, &mut filter, None).await;
        for (record, what) in repairs.networks {
            tell(host, &record, "NetworkRepaired", what);
        }
        for (uid, problem) in self.problems() {
            if known.get(&uid) != Some(&problem) {
                let network = Uuid::from_slice(&uid).unwrap_or_default();
                tracing::error!(%network, error = problem.message, "a network can't be set up");
            }
        }
    }

    /// Takes from NICs that are gone their addresses, rules and ports, and lets floating addresses follow the runs of VMs.
    pub async fn forget_gone(&self, host: Ports<'_>) {
        let mut filter = self.turn.lock().await;
        self.drop_gone(host, &mut filter).await;
    }

    /// The same while no other change is made to networks.
    pub(super) async fn drop_gone(&self, host: Ports<'_>, filter: &mut Filter) {
        for network in self.release(host).await {
            self.apply(host, filter, Some(&network)).await;
        }
    }

    /// Releases the addresses of removed NICs. Returns the UUIDs of the networks with changes. The
    /// next call retries failed writes.
    async fn release(&self, host: Ports<'_>) -> Vec<Vec<u8>> {
        let mut changed = Vec::new();
        for record in self.unused(host) {
            match self.write(host, &record).await {
                Ok(()) => changed.push(record.uid),
                Err(failure) => tracing::error!(
                    network = record.name,
                    error = failure.message,
                    "release addresses of a network"
                ),
            }
        }
        changed
    }

    /// Records whose leases change now.
    pub(super) fn unused(&self, host: Ports<'_>) -> Vec<NetworkRecord> {
        let now = text::now_ms();
        let vms = host.vms.vms();
        let by_uid = vms
            .iter()
            .filter_map(|vm| Some((vm.metadata.as_ref()?.uid.as_str(), &**vm)));
        let vms: HashMap<_, _> = by_uid.collect();
        let is_gone = |record: &NetworkRecord, lease: &LeaseRecord| {
            lease.released_ms == 0 && !is_used(&vms, &record.name, lease)
        };
        let follows = |lease: &mut LeaseRecord| {
            !lease.floating.is_empty() && vm_of(&vms, lease).is_some_and(|vm| floating::follow(lease, vm))
        };
        let networks = self.registry.lock();
        let changes = |record: &&NetworkRecord| {
            let mut leases = record.leases.iter();
            let floats = |lease: &LeaseRecord| follows(&mut lease.clone());
            leases.any(|lease| !lease.counts(now) || is_gone(record, lease) || floats(lease))
        };
        let mut changed: Vec<_> = networks.records().filter(changes).cloned().collect();
        for record in &mut changed {
            let mut leases = std::mem::take(&mut record.leases);
            leases.retain(|lease| lease.counts(now));
            for lease in leases.iter_mut().filter(|lease| is_gone(record, lease)) {
                lease.release(now, host.retention_ms);
            }
            for lease in &mut leases {
                follows(lease);
            }
            record.leases = leases;
        }
        changed
    }

    /// Brings the node to the state of the records: all of them, or the one with the UUID `only`. A
    /// failure becomes a problem of the network, and the next call retries.
    pub(super) async fn apply(&self, host: Ports<'_>, filter: &mut Filter, only: Option<&[u8]>) -> Repairs {
        let meant = |record: &&NetworkRecord| only.is_none_or(|uid| record.uid == uid);
        let all: Vec<_> = self.registry.lock().records().filter(meant).cloned().collect();
        let (mut repairs, mut problems) = (Repairs::default(), BTreeMap::new());
        let mut made = BTreeSet::new();
        let seen = match only {
            None if !all.is_empty() => survey(host).await,
            _ => Seen::new(),
        };
        for record in &all {
            let is_known = only.is_some() && filter.has(record);
            match make_bridge(host, record, &seen, is_known).await {
                Ok(true) => {
                    made.insert(record.uid.clone());
                    repairs
                        .networks
                        .push((record.clone(), "its bridge was not as it has to be"));
                }
                Ok(false) => {}
                Err(error) => drop(problems.insert(record.uid.clone(), failed(&error))),
            }
        }
        if let Err(error) = self.filter(filter).await {
            problems.extend(all.iter().map(|record| (record.uid.clone(), failed(&error))));
        }
        let compares = |uid: &Vec<u8>| only.is_none() || made.contains(uid);
        for (uid, result) in self.set_routes(host, &mut filter.routes, compares).await {
            match result {
                Ok(true) => repairs.networks.extend(
                    all.iter()
                        .find(|record| record.uid == uid)
                        .map(|record| (record.clone(), "routes to subnets behind guests were missing")),
                ),
                Ok(false) => {}
                Err(error) => drop(problems.insert(uid, failed(&error))),
            }
        }
        let floating = || all.iter().filter(|record| floating::has_active(record));
        match self.set_proxies(host, &mut filter.proxies, only.is_none()).await {
            Ok(true) => repairs.networks.extend(
                floating().map(|record| (record.clone(), "the node did not answer for floating addresses")),
            ),
            Ok(false) => {}
            Err(error) => {
                problems.extend(floating().map(|record| (record.uid.clone(), failed(&error))));
            }
        }
        let mut unguarded = guard_all(host, filter, &all, |uid| only.is_none() || made.contains(uid)).await;
        for record in all.iter().filter(|record| only.is_none() && !record.leaving) {
            if let Err(error) = guard_taps(host, record, &seen, &mut filter.taps).await {
                unguarded.insert(record.uid.clone(), error);
            }
            match join_taps(host, record, &seen).await {
                Ok(true) => repairs
                    .networks
                    .push((record.clone(), "VMs were not connected to its bridge")),
                Ok(false) => {}
                Err(error) => drop(problems.insert(record.uid.clone(), failed(&error))),
            }
        }
        for record in &all {
            match serve(host, record).await {
                Ok(true) => repairs
                    .networks
                    .push((record.clone(), "its DHCP and DNS server did not run")),
                Ok(false) => {}
                Err(error) => drop(problems.insert(record.uid.clone(), failed(&error))),
            }
        }
        for record in &all {
            if record.leaving && !problems.contains_key(&record.uid) {
                match host.store.remove::<NetworkRecord>(&record.uid, None, None).await {
                    Ok(()) => drop(self.registry.lock().remove(&record.uid)),
                    Err(error) => drop(problems.insert(record.uid.clone(), store_failure(error))),
                }
            }
        }
        repairs.networks.retain(|(record, _)| !record.leaving);
        if only.is_none() {
            let present: BTreeSet<_> = seen.values().map(|(link, _)| link.index).collect();
            filter.taps.retain(|tap| present.contains(tap));
        }
        let obstacles = self.obstacles(only.is_none()).await;
        for record in &all {
            let error = unguarded.get(&record.uid);
            let is_checked = error.is_some() || filter.guards.contains_key(&record.uid);
            let warning = is_checked.then(|| warning(record, error, &obstacles));
            self.note(record, problems.remove(&record.uid), warning);
        }
        repairs
    }

    /// Notes the state of a network. Without a `warning` the last one stays.
    fn note(&self, record: &NetworkRecord, problem: Option<Failure>, warning: Option<String>) {
        let mut networks = self.registry.lock();
        let Some(before) = networks.state(&record.name) else {
            return;
        };
        let now = NetworkState {
            problem,
            warning: warning.unwrap_or_else(|| before.warning.clone()),
        };
        if *before == now {
            return;
        }
        if before.warning != now.warning && !now.warning.is_empty() {
            let (network, warning) = (&record.name, &now.warning);
            tracing::warn!(network, warning, "guests of a network lack something");
        }
        networks.change(&record.name, |_, state| *state = now);
    }

    /// NICs of a network, by VM and NIC, whose VMs have their default route by another NIC: by the first one of the spec in a network
    /// that leads outside.
    fn secondary(&self, host: Ports<'_>, record: &NetworkRecord) -> BTreeSet<(Vec<u8>, String)> {
        let others = self.ways_out(record);
        if others.is_empty() {
            return BTreeSet::new();
        }
        let leases = record.leases.iter().filter(|lease| lease.released_ms == 0);
        let own: BTreeSet<_> = leases.map(|lease| lease.vm.as_slice()).collect();
        let mut secondary = BTreeSet::new();
        for vm in host.vms.vms() {
            let nics = vm.spec.as_ref().map_or(&[][..], |spec| &spec.nics);
            if nics.len() < 2 {
                continue;
            }
            let uid = vm.metadata.as_ref().map_or("", |metadata| &metadata.uid);
            let uid = Uuid::parse_str(uid).unwrap_or_default();
            if !own.contains(&uid.as_bytes()[..]) {
                continue;
            }
            let mut has_primary = false;
            for nic in nics {
                let Some(v1::nic_spec::Attachment::Network(network)) = &nic.attachment else {
                    continue;
                };
                if *network == record.name && has_primary {
                    secondary.insert((uid.as_bytes().to_vec(), nic.name.clone()));
                }
                has_primary |= *network == record.name || others.contains(network);
            }
        }
        secondary
    }

    /// Names of the other networks that lead outside.
    fn ways_out(&self, record: &NetworkRecord) -> BTreeSet<String> {
        let networks = self.registry.lock();
        let leads = |other: &&NetworkRecord| {
            let spec = other.spec.as_ref();
            let is_isolated = spec.is_some_and(|spec| spec.mode() == v1::NetworkMode::Isolated);
            !is_isolated && !other.leaving && other.uid != record.uid
        };
        let others = networks.records().filter(leads);
        others.map(|other| other.name.clone()).collect()
    }

    /// Puts the rules of all networks into the kernel.
    async fn filter(&self, filter: &mut Filter) -> io::Result<()> {
        let plan = {
            let networks = self.registry.lock();
            filter.plan(&networks.records().collect::<Vec<_>>())
        };
        filter.apply(plan).await
    }

    /// Restores the packet filter after a change by the program with the netlink port `author`.
    pub async fn restore_filter(&self, host: Ports<'_>, author: u32) {
        let mut filter = self.turn.lock().await;
        // A change of the daemon's own, whose author was not known yet.
        if self.own.has(author) {
            return;
        }
        filter.distrust();
        match self.filter(&mut filter).await {
            Err(error) => {
                tracing::error!(%error, "restore the packet filter: the daemon tries it again within a minute");
            }
            Ok(()) if self.registry.lock().records().next().is_some() => {
                let message = "another program changed the rules of the node's networks in the packet filter; they were set up again";
                host.events
                    .emit(Draft::normal(Object::Node, "PacketFilterRepaired", message));
            }
            Ok(()) => {}
        }
    }

    /// Other packet filters that drop packets of guests. They are searched for on demand, and with the first network.
    async fn obstacles(&self, search: bool) -> Vec<Obstacle> {
        let is_empty = self.registry.lock().records().next().is_none();
        let known = {
            let mut known = self.obstacles.lock().unwrap_or_else(PoisonError::into_inner);
            if is_empty || search {
                *known = None;
            }
            known.clone()
        };
        if let Some(known) = known {
            return known;
        }
        if is_empty {
            return Vec::new();
        }
        let found = neighbors::find().await.unwrap_or_else(|error| {
            tracing::warn!(%error, "look for other packet filters of the node");
            Vec::new()
        });
        *self.obstacles.lock().unwrap_or_else(PoisonError::into_inner) = Some(found.clone());
        found
    }

    /// By UUID: why the node is not as wanted.
    fn problems(&self) -> BTreeMap<Vec<u8>, Failure> {
        let networks = self.registry.lock();
        let problems = networks
            .states()
            .filter_map(|(record, state)| Some((record.uid.clone(), state.problem.clone()?)));
        problems.collect()
    }
}

/// Interfaces by name, from one survey.
type Seen = HashMap<String, (Link, Found)>;

async fn survey(host: Ports<'_>) -> Seen {
    let seen = host.links.survey().await;
    seen.unwrap_or_else(|error| {
        tracing::warn!(%error, "look at all network interfaces");
        Seen::new()
    })
}

/// Makes, changes or removes the bridge of a network. True when something was to be done. The addresses of the bridge of a network that
/// `is_known` are compared each minute only.
async fn make_bridge(
    host: Ports<'_>,
    record: &NetworkRecord,
    seen: &Seen,
    is_known: bool,
) -> io::Result<bool> {
    let (name, wanted) = (bridge(record), wanted(record));
    if is_known && host.links.find(&name).await?.is_some_and(|link| link.is_bridge) {
        return Ok(false);
    }
    let plan = |found: Option<&Found>| plan::plan(wanted.as_ref(), found);
    let steps = match seen.get(&name) {
        Some((_, found)) if plan(Some(found)).is_empty() => Vec::new(),
        _ => plan(host.links.inspect(&name).await?.as_ref()),
    };
    let changed = !steps.is_empty();
    for step in steps {
        tracing::debug!(bridge = name, ?step, "change a bridge");
        carry_out(host.links, &name, step).await?;
    }
    let Some(spec) = spec_of(record).filter(|_| !record.leaving) else {
        return Ok(changed);
    };
    let (has_ipv4, has_ipv6) = (spec.subnet.is_some(), spec.net6.is_some());
    if spec.mode != NetworkMode::Isolated {
        forwarding(has_ipv4, has_ipv6)?;
    }
    // Guests need not know the node's addresses on other interfaces (ip-sysctl: arp_ignore).
    switch(&format!("/proc/sys/net/ipv4/conf/{name}/arp_ignore"), "1")?;
    if has_ipv6 {
        // The node must not accept routes from guests.
        switch(&format!("/proc/sys/net/ipv6/conf/{name}/accept_ra"), "0")?;
    }
    Ok(changed)
}

/// Deficiencies of a served network.
fn warning(record: &NetworkRecord, unguarded: Option<&io::Error>, obstacles: &[Obstacle]) -> String {
    let spec = spec_of(record);
    let is_isolated = spec
        .as_ref()
        .is_some_and(|spec| spec.mode == NetworkMode::Isolated);
    let families = [
        spec.as_ref().is_some_and(|spec| spec.subnet.is_some()),
        spec.as_ref().is_some_and(|spec| spec.net6.is_some()),
    ];
    let guard = unguarded.map(|error| {
        format!(
            "guests are not kept from the node and the outside while another program removes the rules of the packet filter: {}; \
             load the kernel's modules sch_ingress and cls_bpf (package linux-modules-extra in some distributions)",
            text::words(error)
        )
    });
    let obstacles = neighbors::warning(obstacles, is_isolated, families);
    let declined = decline::warning(record, text::now_ms());
    let others = [obstacles, declined].into_iter().filter(|text| !text.is_empty());
    let all: Vec<_> = guard.into_iter().chain(others).collect();
    all.join("; ")
}

/// Which frames of a network's guests reach the node while the packet filter lacks the rules of the networks.
fn guarded(record: &NetworkRecord) -> Option<Guard> {
    let spec = spec_of(record).filter(|_| !record.leaving)?;
    let isolated = spec.mode == NetworkMode::Isolated;
    let gateways = (
        spec.subnet.map(|subnet| subnet.gateway),
        spec.net6.map(Ipv6Net::gateway),
    );
    Some(Guard {
        mark: rules::MARK,
        only: isolated.then_some(gateways),
    })
}

/// Guards the bridges of networks whose guards have changed, or that are to be checked, by UUID. Returns the errors of the others.
async fn guard_all(
    host: Ports<'_>,
    filter: &mut Filter,
    all: &[NetworkRecord],
    is_checked: impl Fn(&Vec<u8>) -> bool,
) -> BTreeMap<Vec<u8>, io::Error> {
    let mut errors = BTreeMap::new();
    for record in all {
        let Some(wanted) = guarded(record) else {
            filter.guards.remove(&record.uid);
            continue;
        };
        if !is_checked(&record.uid) && filter.guards.get(&record.uid) == Some(&wanted) {
            continue;
        }
        match guard(host, record, wanted).await {
            Ok(()) => drop(filter.guards.insert(record.uid.clone(), wanted)),
            Err(error) => drop(errors.insert(record.uid.clone(), error)),
        }
    }
    errors
}

async fn guard(host: Ports<'_>, record: &NetworkRecord, wanted: Guard) -> io::Result<()> {
    match host.links.find(&bridge(record)).await? {
        Some(link) => host.links.guard(link.index, wanted).await,
        None => Ok(()),
    }
}

async fn carry_out(links: &Links, name: &str, step: Step) -> io::Result<()> {
    match step {
        Step::Create(wanted) => links.create_bridge(name, &wanted).await,
        Step::Adjust(index, mtu) => links.set_up(index, mtu).await,
        Step::AddAddress(index, (address, prefix)) => links.add_address(index, address, prefix).await,
        Step::RemoveAddress(index, (address, prefix)) => links.remove_address(index, address, prefix).await,
        Step::Delete(index) => links.delete(index).await,
    }
}

/// Lets the kernel forward packets in the network namespace of the caller. It stays on: others may have come to need it.
pub(crate) fn forwarding(with_ipv4: bool, with_ipv6: bool) -> io::Result<()> {
    const SWITCH: &str = "/proc/sys/net/ipv6/conf/all/forwarding";
    if with_ipv4 {
        switch("/proc/sys/net/ipv4/ip_forward", "1")?;
    }
    if !with_ipv6 || std::fs::read_to_string(SWITCH)?.trim() == "1" {
        return Ok(());
    }
    // With forwarding the kernel ignores router advertisements, unless accept_ra is 2 (ip-sysctl:
    // accept_ra). The node would lose its own default route.
    for interface in std::fs::read_dir("/proc/sys/net/ipv6/conf")? {
        let accept = interface?.path().join("accept_ra");
        if std::fs::read_to_string(&accept).is_ok_and(|text| text.trim() == "1") {
            std::fs::write(&accept, "2\n")?;
        }
    }
    switch(SWITCH, "1")
}

/// Sets a switch of the kernel, unless it is set so.
pub(crate) fn switch(path: &str, to: &str) -> io::Result<()> {
    if std::fs::read_to_string(path)?.trim() == to {
        return Ok(());
    }
    fault::step("set a switch of the kernel");
    std::fs::write(path, format!("{to}\n"))
}

/// Guards the taps of running VMs. A new tap has its guard from its creation.
async fn guard_taps(
    host: Ports<'_>,
    record: &NetworkRecord,
    seen: &Seen,
    guarded: &mut BTreeSet<u32>,
) -> io::Result<()> {
    for lease in record.leases.iter().filter(|lease| lease.released_ms == 0) {
        if let Some((tap, _)) = seen.get(&lease.tap)
            && !guarded.contains(&tap.index)
        {
            host.links.guard_tap(tap.index, TapGuard(rules::MARK)).await?;
            guarded.insert(tap.index);
        }
    }
    Ok(())
}

/// Makes the taps of running VMs ports of their network's bridge again, which may be another one by now. True when some were not.
async fn join_taps(host: Ports<'_>, record: &NetworkRecord, seen: &Seen) -> io::Result<bool> {
    let Some(bridge) = host.links.find(&bridge(record)).await? else {
        return Ok(false);
    };
    let mut changed = false;
    for lease in record.leases.iter().filter(|lease| lease.released_ms == 0) {
        // A VM that does not run has no tap. A new tap joins the bridge at its creation.
        if seen
            .get(&lease.tap)
            .is_none_or(|(tap, _)| tap.bridge == bridge.index)
        {
            continue;
        }
        let Some(tap) = host.links.find(&lease.tap).await? else {
            continue;
        };
        if tap.bridge != bridge.index {
            host.links.set_bridge(tap.index, bridge.index).await?;
            changed = true;
        }
    }
    Ok(changed)
}

/// Sees to it that a helper serves the network, or none. True when one had to be started.
async fn serve(host: Ports<'_>, record: &NetworkRecord) -> io::Result<bool> {
    let folder = folder(host, record);
    let Some(spec) = spec_of(record).filter(|_| !record.leaving) else {
        return helper::end(&folder).map(|()| false);
    };
    let name = bridge(record);
    let link = host.links.find(&name).await?.ok_or(io::ErrorKind::NotFound)?;
    let table = table(&spec, record, &host.networks.secondary(host, record));
    helper::write_table(&folder, &table)?;
    let served = Served {
        program: host.networks.netd(host.netd)?,
        folder: &folder,
        bridge: (&name, link.index),
        table: &table,
        helpers: helper::count(host.run_dir),
    };
    let started = helper::ensure(&served, host.ledger, host.cgroups)?;
    let watched = started.map(|started| started.watched(&host.networks.helper_ends));
    Ok(watched.transpose()?.is_some())
}

fn wanted(record: &NetworkRecord) -> Option<Wanted> {
    let spec = spec_of(record).filter(|_| !record.leaving)?;
    Some(Wanted {
        mac: bridge_mac(record),
        addresses: [
            spec.subnet
                .map(|subnet| (subnet.gateway.into(), subnet.net.prefix())),
            spec.net6.map(|net| (net.gateway().into(), Ipv6Net::PREFIX)),
        ]
        .into_iter()
        .flatten()
        .collect(),
        mtu: spec.mtu.into(),
        alias: format!("vmmd: network {}", record.name),
    })
}

/// The network as the packet filter sees it; `None` while it is being deleted.
pub(super) fn filtered(record: &NetworkRecord) -> Option<rules::Network> {
    let spec = spec_of(record).filter(|_| !record.leaving)?;
    let groups = spec.security_groups.into_iter();
    Some(rules::Network {
        bridge: bridge(record),
        mac: Mac::try_from(bridge_mac(record)).ok()?,
        mode: spec.mode,
        net6: spec.net6,
        gateway: spec.subnet.map(|subnet| subnet.gateway),
        deny: spec.deny,
        groups: groups
            .map(|group| (group.name.to_string(), group.firewall))
            .collect(),
    })
}

/// The NIC with a lease as the packet filter sees it; `None` for a released lease.
pub(super) fn port(network: &rules::Network, lease: &LeaseRecord) -> Option<Port> {
    let mac = lease.mac().filter(|_| lease.released_ms == 0)?;
    Some(Port {
        tap: lease.tap.clone(),
        mac,
        address: lease.ip(),
        address6: network.net6.map(|net| net.of(mac)),
        published: lease.ports.iter().filter_map(PortRecord::valid).collect(),
        firewall: firewall(lease),
        subnets: routes::subnets(lease).collect(),
        floating: floating::active(lease).collect(),
        groups: lease.groups.clone(),
        metadata: lease.metadata,
    })
}

/// Firewall of a lease, validated at its arrival. A firewall that this daemon cannot parse blocks
/// all connections: a rule without its unknown part would allow too much.
fn firewall(lease: &LeaseRecord) -> Firewall {
    let stored = lease.firewall.clone().unwrap_or_default();
    let mut found = Violations::default();
    let firewall = Firewall::new(&mut found, "firewall", &stored);
    match found.or(firewall) {
        Ok(firewall) => firewall,
        Err(error) => {
            tracing::error!(vm = lease.vm_name, nic = lease.nic, %error, "a firewall can't be read, so the NIC has no connections");
            Firewall {
                ingress: Some(Vec::new()),
                egress: Some(Vec::new()),
            }
        }
    }
}

/// Whether the NIC that has a lease is in its VM's spec, or in the VM as it runs. `vms` are those of the node, by UUID.
fn is_used(vms: &HashMap<&str, &v1::Vm>, network: &str, lease: &LeaseRecord) -> bool {
    match vm_of(vms, lease) {
        None => false,
        // A VM with an unreadable record keeps its leases.
        Some(vm) if vm.spec.is_none() => true,
        Some(vm) => nics_in(vm, network).any(|nic| nic == lease.nic),
    }
}

/// The VM with a lease.
fn vm_of<'a>(vms: &HashMap<&str, &'a v1::Vm>, lease: &LeaseRecord) -> Option<&'a v1::Vm> {
    let uid = Uuid::from_slice(&lease.vm).unwrap_or_default().to_string();
    vms.get(uid.as_str()).copied()
}

/// Names of the NICs that a VM has in a network: those of its spec, and those of its machine while it runs.
fn nics_in<'a>(vm: &'a v1::Vm, network: &'a str) -> impl Iterator<Item = &'a str> {
    let is_on = move |nic: &&v1::NicSpec| matches!(&nic.attachment, Some(v1::nic_spec::Attachment::Network(name)) if name == network);
    let wanted = vm.spec.iter().flat_map(|spec| &spec.nics).filter(is_on);
    let running = vm.status.iter().flat_map(|status| &status.nics);
    let running = running.filter(move |nic| nic.network == network);
    wanted
        .map(|nic| nic.name.as_str())
        .chain(running.map(|nic| nic.name.as_str()))
}

/// "VM \"web\"": VMs that have a NIC in the network.
pub(super) fn users(host: Ports<'_>, network: &str) -> Vec<String> {
    let vms = host.vms.vms();
    let using = vms.iter().filter(|vm| nics_in(vm, network).next().is_some());
    let names = using.filter_map(|vm| Some(format!("VM \"{}\"", vm.metadata.as_ref()?.name)));
    names.collect()
}

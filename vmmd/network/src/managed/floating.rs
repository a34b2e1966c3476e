//! Floating addresses: addresses of the node's surroundings that the node translates to those of guests, and back.
//!
//! The lease of a NIC has its floating addresses from the start of its VM to the end of the run. They are active while the VM runs: the
//! packet filter translates them, a route leads to the guest, and the node answers for them on the interface whose subnet they are of
//! (proxy ARP and neighbor discovery). So the node itself never has such an address: without the rules of the packet filter, packets
//! to it reach no service of the node. The VM that waits in a migration for its run has its floating addresses reserved only.

use std::{collections::BTreeSet, io, net::IpAddr};

use vmmd_api::v1;
use vmmd_host::failure::Failure;
use vmmd_spec::{
    firewall::Addresses,
    network::{NetworkMode, NetworkSpec},
};
use vmmd_store::{LeaseRecord, NetworkRecord};

use super::{
    Networks, Ports, Request, bridge,
    describe::failed,
    node::switch,
    overlap::{Range, overlap},
};
use crate::announce;

/// An interface of the node, by its index, and an address for which it answers.
pub type Proxy = (u32, IpAddr);

/// Proxies that the daemon has set up.
#[derive(Debug, Default)]
pub struct Known {
    addresses: BTreeSet<IpAddr>,
    proxies: BTreeSet<Proxy>,
}

/// Whether the floating addresses of a VM are active now; `None` when they stay as they are, and for a VM without any.
pub fn floats(vm: &v1::Vm) -> Option<bool> {
    let mut nics = vm.spec.iter().flat_map(|spec| &spec.nics);
    let has_some = nics.any(|nic| !nic.floating_addresses.is_empty());
    has_some.then(|| is_running(vm)).flatten()
}

/// Whether a VM runs; `None` between its runs and states.
fn is_running(vm: &v1::Vm) -> Option<bool> {
    use v1::VmPhase::{
        Failed, Paused, Pending, Running, Starting, Stopped, Stopping, Terminating, Unspecified,
    };
    let status = vm.status.as_ref()?;
    match status.phase() {
        Running => Some(true),
        Stopped | Failed | Terminating => Some(false),
        // The machine runs on another node.
        Paused if status.reason == "HandedOver" => Some(false),
        Paused | Pending | Starting | Stopping | Unspecified => None,
    }
}

/// Brings the floating addresses of a lease to the state of its VM. True when they change.
pub(super) fn follow(lease: &mut LeaseRecord, vm: &v1::Vm) -> bool {
    match is_running(vm) {
        Some(true) if lease.floating.iter().any(|floating| !floating.active) => {
            lease
                .floating
                .iter_mut()
                .for_each(|floating| floating.active = true);
            true
        }
        Some(false) if !lease.floating.is_empty() => {
            lease.floating.clear();
            true
        }
        _ => false,
    }
}

/// The floating addresses of a lease that lead to its guest.
pub(super) fn active(lease: &LeaseRecord) -> impl Iterator<Item = IpAddr> {
    let active = lease.floating.iter().filter(|floating| floating.active);
    active.filter_map(|floating| floating.address.parse().ok())
}

/// The floating addresses that a lease has.
pub(super) fn owned(lease: &LeaseRecord) -> impl Iterator<Item = IpAddr> {
    let addresses = lease.floating.iter().map(|floating| &floating.address);
    addresses.filter_map(|address| address.parse().ok())
}

/// Whether active floating addresses lead to guests of a network.
pub(super) fn has_active(record: &NetworkRecord) -> bool {
    !record.leaving && record.leases.iter().any(|lease| active(lease).next().is_some())
}

impl Networks {
    /// Lets the node answer for all active floating addresses, and for no others. With `compares`, the kernel is asked for the present
    /// ones. Returns whether the kernel lacked some that the daemon had set up.
    pub(super) async fn set_proxies(
        &self,
        host: Ports<'_>,
        known: &mut Option<Known>,
        compares: bool,
    ) -> io::Result<bool> {
        let addresses: BTreeSet<_> = {
            let networks = self.registry.lock();
            let records = networks.records().filter(|record| !record.leaving);
            records
                .flat_map(|record| &record.leases)
                .flat_map(active)
                .collect()
        };
        let compares = compares && !addresses.is_empty();
        // An interrupted change leaves an unknown state.
        let before = match known.take() {
            Some(before) if before.addresses == addresses && !compares => {
                *known = Some(before);
                return Ok(false);
            }
            before => before,
        };
        let wanted = self.surroundings(host, &addresses).await?;
        let lacks = |there: &BTreeSet<Proxy>| {
            let before = before.as_ref().map(|before| &before.proxies);
            before.is_some_and(|before| before.intersection(&wanted).any(|proxy| !there.contains(proxy)))
        };
        let there = match &before {
            Some(before) if !compares => before.proxies.clone(),
            _ => host.links.proxies().await?,
        };
        for proxy in there.difference(&wanted) {
            host.links.remove_proxy(*proxy).await?;
        }
        for proxy in wanted.difference(&there) {
            host.links.add_proxy(*proxy).await?;
            // An interface without Ethernet has no neighbors that could know another address.
            if let Some(mac) = host.links.mac(proxy.0).await? {
                announce::announce(*proxy, mac);
            }
        }
        let lacked = lacks(&there);
        *known = Some(Known {
            addresses,
            proxies: wanted,
        });
        Ok(lacked)
    }

    /// The interfaces of the node whose subnets have the addresses. An address of no such subnet has to be routed to the node.
    async fn surroundings(
        &self,
        host: Ports<'_>,
        addresses: &BTreeSet<IpAddr>,
    ) -> io::Result<BTreeSet<Proxy>> {
        let mut found = BTreeSet::new();
        if addresses.is_empty() {
            return Ok(found);
        }
        let ours: Vec<_> = self.registry.lock().records().map(bridge).collect();
        let seen = host.links.survey().await?;
        for (name, (link, facts)) in seen.iter().filter(|(name, _)| !ours.contains(name)) {
            for address in addresses {
                let own = Addresses::from(*address);
                let range = (own.first, own.prefix);
                if facts.addresses.iter().any(|subnet| overlap(*subnet, range)) {
                    if address.is_ipv6() {
                        switch(&format!("/proc/sys/net/ipv6/conf/{name}/proxy_ndp"), "1")?;
                    }
                    found.insert((link.index, *address));
                }
            }
        }
        Ok(found)
    }

    /// Refuses floating addresses that a NIC cannot have. `record` is that of its network.
    pub(super) async fn no_floating_clash(
        &self,
        host: Ports<'_>,
        (record, spec): (&NetworkRecord, &NetworkSpec),
        request: &Request<'_>,
    ) -> Result<(), Failure> {
        let floating = &request.access.floating;
        if floating.is_empty() {
            return Ok(());
        }
        let (nic, network) = (request.nic, &record.name);
        if spec.mode != NetworkMode::Nat {
            let message = format!(
                "NIC \"{nic}\": the network \"{network}\" has not the mode NAT, so the NIC can't have floating addresses: choose a network \
                 of this mode"
            );
            return Err(Failure::precondition("NOT_NAT", message));
        }
        let is_served = |address: &&IpAddr| match address {
            IpAddr::V4(_) => spec.subnet.is_some(),
            IpAddr::V6(_) => spec.net6.is_some(),
        };
        if let Some(address) = floating.iter().find(|address| !is_served(address)) {
            let message = format!(
                "NIC \"{nic}\": the network \"{network}\" has no address of the guest to which {address} can lead: give the network \
                 addresses of this family, or leave the address out"
            );
            return Err(Failure::precondition("FLOATING_ADDRESS_NOT_ALLOWED", message));
        }
        let allowed = host.floatable.iter().filter_map(|text| text.parse().ok());
        let allowed: Vec<Addresses> = allowed.collect();
        let is_allowed = |address: &&IpAddr| allowed.iter().any(|range| range.has((**address).into()));
        if let Some(address) = floating.iter().find(|address| !is_allowed(address)) {
            let allowed = match host.floatable {
                [] => "the configuration allows none (`floating_addresses`)".to_owned(),
                some => format!(
                    "choose an address of {} (`floating_addresses` of the configuration)",
                    some.join(", ")
                ),
            };
            let message =
                format!("NIC \"{nic}\": the node gives guests no floating address {address}: {allowed}");
            return Err(Failure::precondition("FLOATING_ADDRESS_NOT_ALLOWED", message));
        }
        self.no_floating_of_others(request)?;
        let vm = request.vm.0.as_bytes();
        let mut own = record.leases.iter();
        let own = own.find(|lease| lease.is_of(vm, nic) && lease.released_ms == 0);
        let had: Vec<_> = own.into_iter().flat_map(owned).collect();
        let new: Vec<_> = floating.iter().filter(|address| !had.contains(address)).collect();
        if new.is_empty() {
            return Ok(());
        }
        let seen = host.links.survey().await.map_err(|error| failed(&error))?;
        for (interface, (_, facts)) in &seen {
            let mut theirs = facts.addresses.iter().map(|(address, _)| address);
            if let Some(address) = theirs.find(|address| new.contains(address)) {
                let other = format!("an address of the node's interface \"{interface}\"");
                return Err(in_use(nic, *address, &other));
            }
        }
        let routers = host.links.gateways().await.map_err(|error| failed(&error))?;
        match new.into_iter().find(|address| routers.contains(address)) {
            Some(address) => Err(in_use(nic, *address, "a router of the node's routes")),
            None => Ok(()),
        }
    }

    /// Refuses floating addresses that are those of a NIC of another VM, of a network, or of a subnet behind a guest. Another NIC of the VM
    /// gives its floating addresses up.
    pub(super) fn no_floating_of_others(&self, request: &Request<'_>) -> Result<(), Failure> {
        let floating = request.access.floating.iter();
        let wanted = floating.map(|address| Addresses::from(*address));
        let wanted: Vec<Range> = wanted.map(|range| (range.first, range.prefix)).collect();
        match self.of_others(request.vm.0, &wanted) {
            Some(((address, _), other)) => Err(in_use(request.nic, address, &other)),
            None => Ok(()),
        }
    }
}

fn in_use(nic: &str, address: IpAddr, other: &str) -> Failure {
    let message = format!("NIC \"{nic}\": the floating address {address} is {other}: choose another address");
    Failure::precondition("FLOATING_ADDRESS_IN_USE", message)
}

#[cfg(test)]
mod tests {
    use vmmd_store::FloatingRecord;

    use super::*;

    fn vm(phase: v1::VmPhase, reason: &str) -> v1::Vm {
        v1::Vm {
            status: Some(v1::VmStatus {
                phase: phase.into(),
                reason: reason.into(),
                ..v1::VmStatus::default()
            }),
            ..v1::Vm::default()
        }
    }

    #[test]
    fn addresses_are_active_from_the_run_to_its_end() {
        let mut lease = LeaseRecord {
            floating: vec![FloatingRecord {
                address: "192.0.2.7".into(),
                active: false,
            }],
            ..LeaseRecord::default()
        };
        let count = |lease: &LeaseRecord| (owned(lease).count(), active(lease).count());
        for (phase, reason, changes, expected) in [
            (v1::VmPhase::Starting, "", false, (1, 0)),
            // In a migration to this node.
            (v1::VmPhase::Paused, "Migrating", false, (1, 0)),
            (v1::VmPhase::Running, "", true, (1, 1)),
            (v1::VmPhase::Running, "Migrating", false, (1, 1)),
            (v1::VmPhase::Paused, "", false, (1, 1)),
            (v1::VmPhase::Stopping, "", false, (1, 1)),
            (v1::VmPhase::Paused, "HandedOver", true, (0, 0)),
            (v1::VmPhase::Stopped, "", false, (0, 0)),
        ] {
            let vm = vm(phase, reason);
            assert_eq!(follow(&mut lease, &vm), changes, "{phase:?} {reason}");
            assert_eq!(count(&lease), expected, "{phase:?} {reason}");
            assert_eq!(floats(&vm), None, "its spec has none");
        }
    }
}

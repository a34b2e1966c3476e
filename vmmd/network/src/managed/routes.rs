//! Routes of the node to subnets behind guests, and to their floating addresses: over the network's bridge, by way of the guest's address.
//!
//! The routes of a network follow from its record. They have a routing protocol of their own, by which they differ from routes of
//! an administrator on the same bridge, which stay.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
};

use uuid::Uuid;
use vmmd_host::failure::Failure;
use vmmd_spec::{
    firewall::Addresses,
    network::{Ipv6Net, NetworkMode, NetworkSpec},
};
use vmmd_store::{LeaseRecord, NetworkRecord};

use super::{
    Networks, Ports, Request, bridge, floating,
    overlap::{Range, overlap},
    spec_of,
};

/// A route to a subnet behind a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// Its destination.
    pub to: Addresses,
    /// Address of the guest, of the same family.
    pub via: IpAddr,
}

/// Routes that the daemon has set up, by UUID of the network. A missing network was not compared with the kernel yet.
pub type Known = BTreeMap<Vec<u8>, BTreeSet<Route>>;

/// The subnets behind the guest with a lease, which were validated at their arrival.
pub fn subnets(lease: &LeaseRecord) -> impl Iterator<Item = Addresses> {
    let live = lease.subnets.iter().filter(|_| lease.released_ms == 0);
    live.filter_map(|text| text.parse().ok())
}

/// Destinations that lead to the guest with a lease. A route to a floating address lets the node answer for the address on another
/// interface.
fn destinations(lease: &LeaseRecord) -> impl Iterator<Item = Addresses> {
    subnets(lease).chain(floating::active(lease).map(Addresses::from))
}

/// Routes that a record requires.
fn wanted(record: &NetworkRecord) -> BTreeSet<Route> {
    let is_router = |lease: &&LeaseRecord| destinations(lease).next().is_some();
    let mut routers = record.leases.iter().filter(is_router).peekable();
    if record.leaving || routers.peek().is_none() {
        return BTreeSet::new();
    }
    let net6 = spec_of(record).and_then(|spec| spec.net6);
    let of_router = |lease| {
        let own6 = net6
            .zip(LeaseRecord::mac(lease))
            .map(|(net, mac)| net.of(mac).into());
        let own4 = lease.ip().map(IpAddr::from);
        destinations(lease).filter_map(move |to| {
            let via = if to.first.is_ipv6() { own6 } else { own4 };
            Some(Route { to, via: via? })
        })
    };
    routers.flat_map(of_router).collect()
}

/// Routes of a network that may differ from those of the kernel.
struct Change {
    uid: Vec<u8>,
    bridge: String,
    wanted: BTreeSet<Route>,
    /// The known routes; `None` to ask the kernel.
    known: Option<BTreeSet<Route>>,
    /// The daemon had set the wanted routes up.
    was_set: bool,
}

/// A change with the routes of the kernel.
struct Difference {
    change: Change,
    device: u32,
    there: BTreeSet<Route>,
    /// Whether the kernel lacked routes that the daemon had set up.
    result: io::Result<bool>,
}

/// Asks for the kernel's routes of a network. `None` for a network without a bridge.
async fn difference(host: Ports<'_>, mut change: Change) -> io::Result<Option<Difference>> {
    let Some(bridge) = host.links.find(&change.bridge).await? else {
        return Ok(None);
    };
    let device = bridge.index;
    let there = match change.known.take() {
        Some(known) => known,
        None => host.links.guest_routes(device).await?,
    };
    let lacked = change.was_set && there != change.wanted;
    Ok(Some(Difference {
        change,
        device,
        there,
        result: Ok(lacked),
    }))
}

impl Networks {
    /// Gives the node the routes of all networks, and removes others of the daemon from the networks' bridges. The kernel is asked for the
    /// routes of networks that `compares` names, and is otherwise taken to have the `known` ones. By UUID, whether the kernel lacked routes
    /// that the daemon had set up.
    pub(super) async fn set_routes(
        &self,
        host: Ports<'_>,
        known: &mut Known,
        compares: impl Fn(&Vec<u8>) -> bool,
    ) -> Vec<(Vec<u8>, io::Result<bool>)> {
        let changes: Vec<_> = {
            let networks = self.registry.lock();
            let changes = networks.records().filter_map(|record| {
                let wanted = wanted(record);
                let known = known.get(&record.uid);
                let was_set = known == Some(&wanted);
                let compares = compares(&record.uid);
                (!was_set || compares && !wanted.is_empty()).then(|| Change {
                    uid: record.uid.clone(),
                    bridge: bridge(record),
                    wanted,
                    known: known.filter(|_| !compares).cloned(),
                    was_set,
                })
            });
            changes.collect()
        };
        let (mut outcomes, mut differences) = (Vec::new(), Vec::new());
        for change in changes {
            let uid = change.uid.clone();
            // An interrupted change leaves an unknown state.
            known.remove(&uid);
            match difference(host, change).await {
                Ok(Some(difference)) => differences.push(difference),
                Ok(None) => {}
                Err(error) => outcomes.push((uid, Err(error))),
            }
        }
        // All removals come first: a subnet can move to another network.
        for difference in &mut differences {
            for gone in difference.there.difference(&difference.change.wanted) {
                if let Err(error) = host.links.remove_guest_route(difference.device, *gone).await {
                    difference.result = Err(error);
                }
            }
        }
        for Difference {
            change,
            device,
            there,
            mut result,
        } in differences
        {
            for new in change.wanted.difference(&there) {
                if let Err(error) = host.links.add_guest_route(device, *new).await {
                    result = Err(error);
                }
            }
            if result.is_ok() {
                known.insert(change.uid.clone(), change.wanted);
            }
            outcomes.push((change.uid, result));
        }
        outcomes
    }
}

/// A range, and the words for it.
type Named = (Range, String);

impl Networks {
    /// Refuses subnets behind a guest that the node reaches elsewhere, or that its network cannot have. `record` is the network's.
    pub(super) async fn no_subnet_clash(
        &self,
        host: Ports<'_>,
        (record, spec): (&NetworkRecord, &NetworkSpec),
        request: &Request<'_>,
    ) -> Result<(), Failure> {
        let subnets = &request.access.subnets;
        if subnets.is_empty() {
            return Ok(());
        }
        let (nic, network) = (request.nic, &record.name);
        let refused = |why: String| {
            let message = format!("NIC \"{nic}\": {why}");
            Err(Failure::precondition("NOT_ROUTED", message))
        };
        if spec.mode == NetworkMode::Isolated {
            return refused(format!(
                "the network \"{network}\" is isolated, so no subnets are routed to guests: choose a network of the mode NAT or \
                 ROUTED"
            ));
        }
        let is_served = |subnet: &&Addresses| match subnet.first {
            IpAddr::V4(_) => spec.subnet.is_some(),
            IpAddr::V6(_) => spec.net6.is_some(),
        };
        if let Some(subnet) = subnets.iter().find(|subnet| !is_served(subnet)) {
            return refused(format!(
                "the network \"{network}\" has no address of the guest by which {subnet} can be reached: give the network \
                 addresses of this family, or leave the subnet out"
            ));
        }
        let allowed: Vec<Addresses> = host
            .routable
            .iter()
            .filter_map(|text| text.parse().ok())
            .collect();
        let is_allowed =
            |subnet: &&Addresses| allowed.is_empty() || allowed.iter().any(|range| range.has(**subnet));
        if let Some(subnet) = subnets.iter().find(|subnet| !is_allowed(subnet)) {
            let message = format!(
                "NIC \"{nic}\": the node does not route {subnet} to guests: choose a subnet of {} (`routed_subnets` of the \
                 configuration)",
                host.routable.join(", ")
            );
            return Err(Failure::precondition("SUBNET_NOT_ALLOWED", message));
        }
        self.no_subnet_of_others(request)?;
        let vm = request.vm.0.as_bytes();
        let own = |lease: &&LeaseRecord| lease.is_of(vm, nic) && lease.released_ms == 0;
        let own = record.leases.iter().find(own);
        let had: Vec<_> = own.into_iter().flat_map(self::subnets).collect();
        let new = subnets.iter().filter(|subnet| !had.contains(subnet));
        let new: Vec<Range> = new.map(|subnet| (subnet.first, subnet.prefix)).collect();
        match self.clash_with_the_node(host, &new).await? {
            Some(clash) => Err(overlaps(nic, clash.wanted, &clash.in_words())),
            None => Ok(()),
        }
    }

    /// Refuses subnets that overlap with a network, or with a subnet behind the guest of another VM. Another NIC of the VM gives its
    /// subnets up.
    pub(super) fn no_subnet_of_others(&self, request: &Request<'_>) -> Result<(), Failure> {
        let wanted = request.access.subnets.iter();
        let wanted: Vec<Range> = wanted.map(|subnet| (subnet.first, subnet.prefix)).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        match self.of_others(request.vm.0, &wanted) {
            Some((subnet, other)) => Err(overlaps(request.nic, subnet, &other)),
            None => Ok(()),
        }
    }

    /// The first of the ranges that overlaps with a network, or with addresses that lead to a guest of another VM: the range, and the words
    /// for the other one.
    pub(super) fn of_others(&self, vm: Uuid, wanted: &[Range]) -> Option<(Range, String)> {
        let networks = self.registry.lock();
        let others = networks.records().flat_map(|record| {
            let leases = record.leases.iter().filter(|lease| lease.vm != vm.as_bytes());
            ranges(record).into_iter().chain(leases.flat_map(behind))
        });
        others.into_iter().find_map(|(range, words)| {
            let mut wanted = wanted.iter();
            Some((*wanted.find(|wanted| overlap(**wanted, range))?, words))
        })
    }

    /// The first of the ranges that overlaps with addresses that lead to a guest: the range, and the words for the other one.
    pub(super) fn behind_guests(&self, wanted: &[Range]) -> Option<(Range, String)> {
        let networks = self.registry.lock();
        let leases = networks.records().flat_map(|record| &record.leases);
        leases.flat_map(behind).find_map(|(range, words)| {
            let mut wanted = wanted.iter();
            let clash = wanted.find(|wanted| overlap(**wanted, range))?;
            Some((*clash, words))
        })
    }
}

fn overlaps(nic: &str, (address, prefix): Range, other: &str) -> Failure {
    let message = format!("NIC \"{nic}\": {address}/{prefix} overlaps with {other}: choose another subnet");
    Failure::precondition("SUBNET_OVERLAPS", message)
}

/// The addresses of a network.
fn ranges(record: &NetworkRecord) -> Vec<Named> {
    let spec = spec_of(record);
    let net4 = spec.as_ref().and_then(|spec| spec.subnet);
    let net4 = net4.map(|subnet| (subnet.net.first().into(), subnet.net.prefix()));
    let net6 = spec.as_ref().and_then(|spec| spec.net6);
    let net6 = net6.map(|net| (net.first().into(), Ipv6Net::PREFIX));
    let named = |(first, prefix): Range| {
        let words = format!("{first}/{prefix} of the network \"{}\"", record.name);
        ((first, prefix), words)
    };
    net4.into_iter().chain(net6).map(named).collect()
}

/// The subnets behind the guest with a lease, and its floating addresses.
fn behind(lease: &LeaseRecord) -> impl Iterator<Item = Named> {
    let owner = format!("NIC \"{}\" of VM \"{}\"", lease.nic, lease.vm_name);
    let subnets = subnets(lease).map(|subnet| (subnet, format!("{subnet} behind")));
    let floating =
        floating::owned(lease).map(|address| (address.into(), format!("{address}, a floating address of")));
    let all = subnets.chain(floating);
    all.map(move |(range, words): (Addresses, String)| {
        ((range.first, range.prefix), format!("{words} {owner}"))
    })
}

#[cfg(test)]
mod tests {
    use vmmd_api::v1;

    use super::*;

    #[test]
    fn subnets_of_both_families_are_behind_their_guests_addresses() {
        let lease = |released_ms| LeaseRecord {
            address: u32::from_be_bytes([10, 80, 0, 2]),
            mac: vec![0x52, 0x54, 0, 0, 0, 1],
            subnets: vec!["10.90.0.0/24".into(), "fd00:90::/64".into()],
            released_ms,
            ..LeaseRecord::default()
        };
        let record = |lease| NetworkRecord {
            spec: Some(v1::NetworkSpec {
                ipv4_cidr: "10.80.0.0/24".into(),
                ipv6_cidr: "fd00:80::/64".into(),
                ..v1::NetworkSpec::default()
            }),
            leases: vec![lease],
            ..NetworkRecord::default()
        };
        let routes: Vec<_> = wanted(&record(lease(0)))
            .into_iter()
            .map(|route| format!("{} via {}", route.to, route.via))
            .collect();
        let expected = [
            "10.90.0.0/24 via 10.80.0.2",
            "fd00:90::/64 via fd00:80::5054:ff:fe00:1",
        ];
        assert_eq!(routes, expected);
        assert!(wanted(&record(lease(5))).is_empty());
        let leaving = NetworkRecord {
            leaving: true,
            ..record(lease(0))
        };
        assert!(wanted(&leaving).is_empty());
    }
}

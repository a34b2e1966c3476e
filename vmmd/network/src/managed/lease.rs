//! Lease of a NIC in a network: its address, its published ports of the node, and the connections
//! that its guest may have.

use std::net::Ipv4Addr;

use uuid::Uuid;
use vmmd_host::{failure::Failure, text};
use vmmd_objects::registry::Kind as _;
use vmmd_spec::{
    firewall::Addresses,
    name::Name,
    network::{NetworkMode, NetworkSpec, reservation::Reservation},
    nic::{Access, port_range},
};
use vmmd_store::{FloatingRecord, LeaseRecord, NetworkRecord, PortRecord};

use super::{
    NetworkKind, Networks, Request, bridge,
    describe::{failed, refused},
    filter::Filter,
    listening, nft, pool, routes, spec_of,
};
use crate::Ports;

impl Networks {
    /// Gives a NIC its address and its rules; the bridge that its tap belongs on.
    pub async fn lease(
        &self,
        host: Ports<'_>,
        network: &str,
        request: &Request<'_>,
    ) -> Result<String, Failure> {
        let mut turn = self.turn.lock().await;
        self.free(host, &mut turn, network, request).await;
        let record = self.find(network)?;
        self.give(host, &mut turn, record, request).await
    }

    /// Checks that a network can give a NIC its address and ports.
    pub async fn would_give(
        &self,
        host: Ports<'_>,
        network: &str,
        request: &Request<'_>,
    ) -> Result<(), Failure> {
        let record = self.find(network)?;
        if self.check(host, &record, request).await.is_ok() {
            return Ok(());
        }
        // A NIC that has just gone may still have it.
        let mut turn = self.turn.lock().await;
        self.free(host, &mut turn, network, request).await;
        let record = self.find(network)?;
        self.check(host, &record, request).await.map(drop)
    }

    /// The IPv4 address of a NIC in a network that has some; refused when another NIC has its address or MAC address, or another VM its ports.
    async fn check(
        &self,
        host: Ports<'_>,
        record: &NetworkRecord,
        request: &Request<'_>,
    ) -> Result<Option<Ipv4Addr>, Failure> {
        let network = record.name.as_str();
        let spec = spec_of(record).ok_or_else(|| NetworkKind::not_found(network))?;
        let owner = (request.vm.0.as_bytes().as_slice(), request.nic);
        let keeps = |lease: &LeaseRecord| keeps(request, lease);
        let mut reservations = spec.reservations.iter();
        let own = reservations.find(|reservation| reservation.mac == Some(request.mac));
        let wanted = request
            .address
            .or(own.and_then(|reservation| reservation.address));
        not_reserved_for_another(&spec, record, request, wanted)?;
        let address = pool::allocate(&spec, &record.leases, owner, (wanted, keeps), text::now_ms())
            .map_err(|refusal| refused(network, &spec, request, &refusal))?;
        if spec.mode != NetworkMode::Nat && !request.access.ports.is_empty() {
            let message = format!(
                "NIC \"{}\": the network \"{network}\" has not the mode NAT, so ports can't be published",
                request.nic
            );
            return Err(Failure::precondition("NOT_NAT", message));
        }
        no_mac_clash(record, request)?;
        only_allowed_ports(host.publishable, request)?;
        self.no_port_clash(request)?;
        self.no_port_of_the_node(record, request)?;
        self.no_subnet_clash(host, (record, &spec), request).await?;
        self.no_floating_clash(host, (record, &spec), request).await?;
        only_known_groups(&spec, record, request)?;
        let is_open = request.access.firewall.is_open() && request.access.groups.is_empty();
        if !is_open && !nft::tracks_bridges().await {
            let message = format!(
                "NIC \"{}\": the node's kernel can't tell connections apart on a bridge, which a firewall needs: load its module \
                 nf_conntrack_bridge",
                request.nic
            );
            return Err(Failure::precondition("FIREWALL_UNAVAILABLE", message));
        }
        Ok(address)
    }

    /// Gives it while no other change is made to networks; `record` is the network's.
    async fn give(
        &self,
        host: Ports<'_>,
        turn: &mut Filter,
        mut record: NetworkRecord,
        request: &Request<'_>,
    ) -> Result<String, Failure> {
        let address = self.check(host, &record, request).await?;
        let (vm, now) = (request.vm.0.as_bytes(), text::now_ms());
        let lease = LeaseRecord {
            address: address.map_or(0, u32::from),
            vm: vm.to_vec(),
            vm_name: request.vm.1.to_owned(),
            nic: request.nic.to_owned(),
            mac: request.mac.octets().to_vec(),
            tap: request.tap.clone(),
            ports: request.access.ports.iter().map(PortRecord::from).collect(),
            released_ms: 0,
            firewall: (!request.access.firewall.is_open()).then(|| (&request.access.firewall).into()),
            declined_ms: 0,
            subnets: request.access.subnets.iter().map(ToString::to_string).collect(),
            groups: request.access.groups.iter().map(ToString::to_string).collect(),
            floating: request
                .access
                .floating
                .iter()
                .map(|address| FloatingRecord {
                    address: address.to_string(),
                    // Until the VM runs, they are reserved only.
                    active: request.plugged,
                })
                .collect(),
            retention_ms: None,
            metadata: request.metadata,
        };
        let taken = |other: &LeaseRecord| {
            other.is_of(vm, request.nic) || address.is_some() && other.address == lease.address
        };
        record.leases.retain(|other| !taken(other) && other.counts(now));
        for other in self.vacated(&record.uid, &lease, (now, host.retention_ms)) {
            self.write(host, &other).await?;
        }
        vacate(&mut record, &lease, (now, host.retention_ms));
        record.leases.push(lease);
        record.leases.sort_by_key(|lease| lease.address);
        let is_changed = self.registry.lock().get(&record.name) != Some(&record);
        if is_changed {
            self.write(host, &record).await?;
        }
        self.apply(host, turn, Some(&record.uid)).await;
        match self.problem(&record.uid) {
            Some(problem) => Err(problem),
            None => Ok(bridge(&record)),
        }
    }

    /// Gives a NIC that has an address other connections.
    pub async fn admit(
        &self,
        host: Ports<'_>,
        network: &str,
        (vm, nic): ((Uuid, &str), &str),
        access: &Access,
    ) -> Result<(), Failure> {
        let mut turn = self.turn.lock().await;
        let record = self.find(network)?;
        let mut own = record.leases.iter();
        let own = own.find(|lease| lease.is_of(vm.0.as_bytes(), nic) && lease.released_ms == 0);
        let Some((lease, mac)) = own.and_then(|lease| Some((lease, lease.mac()?))) else {
            let message = format!("NIC \"{nic}\" has no address in the network \"{network}\"");
            return Err(Failure::precondition("NO_ADDRESS", message));
        };
        let request = Request {
            vm,
            nic,
            tap: lease.tap.clone(),
            mac,
            address: lease.ip(),
            access,
            metadata: lease.metadata,
            plugged: true,
        };
        self.free(host, &mut turn, network, &request).await;
        let record = self.find(network)?;
        self.give(host, &mut turn, record, &request).await.map(drop)
    }

    /// Takes the MAC address, the ports, the subnets and the floating addresses that are wanted from NICs that have just gone, if they still have them.
    async fn free(&self, host: Ports<'_>, turn: &mut Filter, network: &str, request: &Request<'_>) {
        let has = |record: &NetworkRecord| others_with_mac(record, request).next().is_some();
        let has_mac = self.registry.lock().get(network).is_some_and(has);
        if has_mac
            || self.no_port_clash(request).is_err()
            || self.no_subnet_of_others(request).is_err()
            || self.no_floating_of_others(request).is_err()
        {
            self.drop_gone(host, turn).await;
        }
    }

    /// The records of networks other than the one with the UUID `uid` that change as a NIC gets `lease`.
    fn vacated(&self, uid: &[u8], lease: &LeaseRecord, times: (u64, u64)) -> Vec<NetworkRecord> {
        let networks = self.registry.lock();
        let loses = |other: &LeaseRecord| {
            loses_tap(other, lease)
                || loses_ports(other, lease)
                || loses_subnets(other, lease)
                || loses_floating(other, lease)
        };
        let changed = networks
            .records()
            .filter(|record| record.uid != uid && record.leases.iter().any(loses));
        let mut changed: Vec<_> = changed.cloned().collect();
        changed.iter_mut().for_each(|record| vacate(record, lease, times));
        changed
    }

    fn no_port_clash(&self, request: &Request<'_>) -> Result<(), Failure> {
        let networks = self.registry.lock();
        let vm = request.vm.0.as_bytes();
        let wanted: Vec<_> = request.access.ports.iter().map(PortRecord::from).collect();
        for (number, port) in wanted.iter().enumerate() {
            if wanted.iter().take(number).any(|other| other.overlaps(port)) {
                let message = format!(
                    "NIC \"{}\": {} of the node is published twice",
                    request.nic,
                    in_words(port)
                );
                return Err(Failure::precondition("PORT_IN_USE", message));
            }
        }
        let leases = networks.records().flat_map(|record| &record.leases);
        // Another NIC of the VM gives its port up: see `vacate`.
        let others = leases.filter(|lease| lease.released_ms == 0 && lease.vm != vm);
        for lease in others {
            let clash = |port: &&PortRecord| wanted.iter().any(|wanted| wanted.overlaps(port));
            if let Some(port) = lease.ports.iter().find(clash) {
                let message = format!(
                    "NIC \"{}\": {} of the node leads to NIC \"{}\" of VM \"{}\" already",
                    request.nic,
                    in_words(port),
                    lease.nic,
                    lease.vm_name
                );
                return Err(Failure::precondition("PORT_IN_USE", message));
            }
        }
        Ok(())
    }

    /// Refuses ports on which the node itself listens. Ports that already lead to the NIC stay.
    /// `record` is that of the NIC's network.
    fn no_port_of_the_node(&self, record: &NetworkRecord, request: &Request<'_>) -> Result<(), Failure> {
        let vm = request.vm.0.as_bytes();
        let own = |lease: &&LeaseRecord| lease.is_of(vm, request.nic) && lease.released_ms == 0;
        let own = record.leases.iter().find(own);
        let had = own.map(|lease| lease.ports.as_slice()).unwrap_or_default();
        if request.access.ports.is_empty() {
            return Ok(());
        }
        let gateways: Vec<_> = {
            let networks = self.registry.lock();
            let specs = networks.records().filter_map(spec_of);
            specs.filter_map(|spec| Some(spec.subnet?.gateway)).collect()
        };
        for port in &request.access.ports {
            let wanted = PortRecord::from(port);
            if had.contains(&wanted) {
                continue;
            }
            if let Some(address) = listening::listens(port, &gateways).map_err(|error| failed(&error))? {
                let message = format!(
                    "NIC \"{}\": the node itself listens on {}, at {address}: publish another one",
                    request.nic,
                    in_words(&wanted)
                );
                return Err(Failure::precondition("PORT_IN_USE", message));
            }
        }
        Ok(())
    }
}

/// Whether the NIC with a lease keeps its addresses when they are requested for another NIC. The spec of a VM gives an address to one NIC, so
/// other leases of this VM are out of date, except of NICs that its machine has.
fn keeps(request: &Request<'_>, lease: &LeaseRecord) -> bool {
    lease.vm != request.vm.0.as_bytes() || (request.plugged && lease.released_ms == 0)
}

/// Refuses an address that is reserved for another MAC address, unless the NIC has it already.
fn not_reserved_for_another(
    spec: &NetworkSpec,
    record: &NetworkRecord,
    request: &Request<'_>,
    address: Option<Ipv4Addr>,
) -> Result<(), Failure> {
    let is_other = |reservation: &&Reservation| {
        address.is_some()
            && reservation.address == address
            && reservation.mac.is_some_and(|mac| mac != request.mac)
    };
    let (vm, nic) = (request.vm.0.as_bytes(), request.nic);
    let has = |lease: &LeaseRecord| lease.is_of(vm, nic) && lease.ip() == address;
    match spec.reservations.iter().find(is_other) {
        Some(reservation) if !record.leases.iter().any(has) => {
            let message = format!(
                "NIC \"{nic}\": the address {} of the network \"{}\" is reserved for another MAC address (\"{}\"): choose another \
                 address, or give the NIC that MAC address",
                address.map_or_else(String::new, |address| address.to_string()),
                record.name,
                reservation.name
            );
            Err(Failure::precondition("ADDRESS_RESERVED", message))
        }
        _ => Ok(()),
    }
}

/// Refuses security groups that the network does not have.
fn only_known_groups(
    spec: &NetworkSpec,
    record: &NetworkRecord,
    request: &Request<'_>,
) -> Result<(), Failure> {
    let has = |name: &Name| spec.security_groups.iter().any(|group| group.name == *name);
    let Some(name) = request.access.groups.iter().find(|name| !has(name)) else {
        return Ok(());
    };
    let (nic, network) = (request.nic, &record.name);
    let message = format!(
        "NIC \"{nic}\": the network \"{network}\" has no security group \"{name}\": add it with `vmmctl update network {network} \
         --security-group {name},in=RULE`, or leave it out"
    );
    Err(Failure::precondition("SECURITY_GROUP_NOT_FOUND", message))
}

/// Refuses ports that the node's configuration does not allow. `allowed` are ports and ranges; all when it is empty.
fn only_allowed_ports(allowed: &[String], request: &Request<'_>) -> Result<(), Failure> {
    let is_allowed = |port: u16| {
        let mut ranges = allowed.iter().filter_map(|text| port_range(text));
        allowed.is_empty() || ranges.any(|range| range.contains(&port))
    };
    let Some(port) = request
        .access
        .ports
        .iter()
        .find(|port| !is_allowed(port.node_port))
    else {
        return Ok(());
    };
    let message = format!(
        "NIC \"{}\": the node does not publish its port {}: choose one of {} (`published_ports` of the configuration)",
        request.nic,
        port.of_node(),
        allowed.join(", ")
    );
    Err(Failure::precondition("PORT_NOT_ALLOWED", message))
}

/// Leases of other NICs in a network with the requested MAC address.
fn others_with_mac<'a>(
    record: &'a NetworkRecord,
    request: &Request<'_>,
) -> impl Iterator<Item = &'a LeaseRecord> {
    let (vm, nic, mac) = (request.vm.0, request.nic, request.mac);
    record.leases.iter().filter(move |lease| {
        lease.released_ms == 0 && lease.mac() == Some(mac) && !lease.is_of(vm.as_bytes(), nic)
    })
}

/// Refuses a MAC address that another NIC of the network has: frames, and addresses by DHCP, go by it.
fn no_mac_clash(record: &NetworkRecord, request: &Request<'_>) -> Result<(), Failure> {
    let Some(lease) = others_with_mac(record, request).find(|lease| keeps(request, lease)) else {
        return Ok(());
    };
    let message = format!(
        "NIC \"{}\": NIC \"{}\" of VM \"{}\" has the MAC address {} in the network \"{}\"",
        request.nic, lease.nic, lease.vm_name, request.mac, record.name
    );
    Err(Failure::precondition("MAC_IN_USE", message))
}

/// "TCP port 8080", or "TCP port 8080 at 192.0.2.1".
fn in_words(port: &PortRecord) -> String {
    let protocol = if port.udp { "UDP" } else { "TCP" };
    let address = port.address().map(|address| format!(" at {address}"));
    format!(
        "{protocol} port {}{}",
        port.node_port,
        address.unwrap_or_default()
    )
}

/// Takes the tap, the ports, the subnets and the floating addresses of the lease `new` from other NICs. A NIC that was behind its tap releases its address: it would be held to that address as
/// well, until the daemon notices that it is gone. Other NICs of the VM give up the others.
fn vacate(record: &mut NetworkRecord, new: &LeaseRecord, (now_ms, retention_ms): (u64, u64)) {
    for lease in &mut record.leases {
        if loses_ports(lease, new) {
            lease
                .ports
                .retain(|port| !new.ports.iter().any(|wanted| wanted.overlaps(port)));
        }
        if loses_subnets(lease, new) {
            let new: Vec<_> = routes::subnets(new).collect();
            let is_lost = |text: &String| {
                let subnet = text.parse::<Addresses>();
                subnet.is_ok_and(|subnet| new.iter().any(|new| new.overlaps(subnet)))
            };
            lease.subnets.retain(|text| !is_lost(text));
        }
        if loses_floating(lease, new) {
            lease.floating.retain(|floating| !floats(new, &floating.address));
        }
        if loses_tap(lease, new) {
            lease.release(now_ms, retention_ms);
        }
    }
}

fn loses_tap(lease: &LeaseRecord, new: &LeaseRecord) -> bool {
    lease.released_ms == 0 && lease.tap == new.tap
}

fn loses_ports(lease: &LeaseRecord, new: &LeaseRecord) -> bool {
    let mut ports = lease.ports.iter();
    lease.released_ms == 0
        && lease.vm == new.vm
        && lease.nic != new.nic
        && ports.any(|port| new.ports.iter().any(|wanted| wanted.overlaps(port)))
}

fn loses_subnets(lease: &LeaseRecord, new: &LeaseRecord) -> bool {
    lease.vm == new.vm
        && lease.nic != new.nic
        && routes::subnets(lease).any(|subnet| routes::subnets(new).any(|new| new.overlaps(subnet)))
}

fn floats(lease: &LeaseRecord, address: &str) -> bool {
    lease.floating.iter().any(|floating| floating.address == address)
}

fn loses_floating(lease: &LeaseRecord, new: &LeaseRecord) -> bool {
    let mut floating = lease.floating.iter();
    lease.vm == new.vm && lease.nic != new.nic && floating.any(|floating| floats(new, &floating.address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tap_has_one_nic() {
        let lease = |tap: &str, released_ms| LeaseRecord {
            tap: tap.into(),
            released_ms,
            ..LeaseRecord::default()
        };
        let mut record = NetworkRecord {
            leases: vec![lease("a", 0), lease("b", 0), lease("a", 5)],
            ..NetworkRecord::default()
        };
        vacate(&mut record, &lease("a", 0), (9, 5000));
        let released: Vec<_> = record.leases.iter().map(|lease| lease.released_ms).collect();
        assert_eq!(released, [9, 0, 5]);
        assert_eq!(record.leases[0].retention_ms, Some(5000));
    }

    #[test]
    fn other_nics_of_a_vm_give_up_its_ports() {
        let lease = |vm: u8, nic: &str, ports: &[u32]| LeaseRecord {
            vm: vec![vm],
            nic: nic.into(),
            tap: format!("{vm}{nic}"),
            ports: ports
                .iter()
                .map(|port| PortRecord {
                    node_port: *port,
                    ..PortRecord::default()
                })
                .collect(),
            ..LeaseRecord::default()
        };
        let mut record = NetworkRecord {
            leases: vec![
                lease(1, "a", &[80, 81]),
                lease(1, "b", &[80]),
                lease(2, "a", &[80]),
            ],
            ..NetworkRecord::default()
        };
        vacate(&mut record, &lease(1, "b", &[80]), (9, 5000));
        let left: Vec<Vec<_>> = record
            .leases
            .iter()
            .map(|lease| lease.ports.iter().map(|port| port.node_port).collect())
            .collect();
        assert_eq!(left, [vec![81], vec![80], vec![80]]);
    }
}

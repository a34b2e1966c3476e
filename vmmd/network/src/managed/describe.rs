//! Networks as the API shows them, and why something about them is refused.

use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_objects::{
    event::{Draft, Object},
    registry::Record as _,
};
use vmmd_spec::network::{Ipv6Net, NetworkSpec, Subnet};
use vmmd_store::{LeaseRecord, NetworkRecord};

use super::{
    Ports, Request, SeenNetwork, bridge,
    pool::{self, Refusal},
    spec_of,
};

/// A network for clients.
pub fn describe(seen: &SeenNetwork) -> v1::Network {
    let (record, view) = (&seen.record, &seen.view);
    let now = text::now_ms();
    let spec = spec_of(record);
    let leases = record.leases.iter().filter(|lease| lease.counts(now));
    let net6 = spec.as_ref().and_then(|spec| spec.net6);
    v1::Network {
        metadata: Some(record.metadata()),
        status: Some(v1::NetworkStatus {
            ready: view.ready,
            message: view.message.clone(),
            bridge: bridge(record),
            gateway: spec
                .as_ref()
                .and_then(|spec| spec.subnet)
                .map(|subnet| subnet.gateway.to_string())
                .unwrap_or_default(),
            leases: leases
                .map(|lease| describe_lease(lease, (spec.as_ref(), net6), now))
                .collect(),
            available_addresses: spec
                .as_ref()
                .map_or(0, |spec| pool::available(spec, &record.leases, now)),
            ipv6_gateway: net6.map(|net| net.gateway().to_string()).unwrap_or_default(),
            mtu: spec.as_ref().map_or(0, |spec| spec.mtu.into()),
        }),
        spec: record.spec.clone(),
    }
}

fn describe_lease(
    lease: &LeaseRecord,
    (spec, net6): (Option<&NetworkSpec>, Option<Ipv6Net>),
    now: u64,
) -> v1::NetworkLease {
    let mut reservations = spec.iter().flat_map(|spec| &spec.reservations);
    let mac = lease.mac();
    let reservation = reservations.find(|reservation| match reservation.address {
        Some(address) => lease.ip() == Some(address),
        None => reservation.mac == mac,
    });
    let address6 = net6.zip(mac).map(|(net, mac)| net.of(mac));
    v1::NetworkLease {
        address: lease.ip().map(|address| address.to_string()).unwrap_or_default(),
        ipv6_address: address6.map(|address| address.to_string()).unwrap_or_default(),
        mac: mac.map(|mac| mac.to_string()).unwrap_or_default(),
        vm: lease.vm_name.clone(),
        nic: lease.nic.clone(),
        release_time: (lease.released_ms != 0)
            .then(|| text::timestamp(lease.released_ms))
            .flatten(),
        reservation: reservation
            .map(|reservation| reservation.name.to_string())
            .unwrap_or_default(),
        routed_subnets: lease.subnets.clone(),
        floating_addresses: lease
            .floating
            .iter()
            .map(|floating| floating.address.clone())
            .collect(),
        declined_time: lease
            .is_declined(now)
            .then(|| text::timestamp(lease.declined_ms))
            .flatten(),
    }
}

/// Why a NIC gets no address.
pub fn refused(network: &str, spec: &NetworkSpec, request: &Request<'_>, refusal: &Refusal) -> Failure {
    let nic = request.nic;
    match refusal {
        Refusal::NotInPool(address) => {
            let addresses = match spec.subnet {
                Some(Subnet { net, gateway }) => format!("{net}, gateway {gateway}"),
                None => "which has no IPv4 addresses: leave `address` out".to_owned(),
            };
            let message = format!(
                "NIC \"{nic}\": {address} is no address for a VM in the network \"{network}\" ({addresses})"
            );
            Failure::precondition("ADDRESS_NOT_IN_NETWORK", message)
        }
        Refusal::Taken(address, lease) if lease.is_replaced() => {
            let message = format!(
                "NIC \"{nic}\": another host of the network uses the address {address}, which NIC \"{}\" of VM \"{}\" declined: choose \
                 another one, or try again ten minutes later",
                lease.nic, lease.vm_name
            );
            Failure::precondition("ADDRESS_IN_USE", message)
        }
        Refusal::Taken(address, lease) => {
            let had = if lease.released_ms == 0 {
                "has"
            } else {
                "had until a moment ago"
            };
            let message = format!(
                "NIC \"{nic}\": NIC \"{}\" of VM \"{}\" {had} the address {address}",
                lease.nic, lease.vm_name
            );
            Failure::precondition("ADDRESS_IN_USE", message)
        }
        Refusal::Exhausted => {
            let message = format!(
                "NIC \"{nic}\": all addresses of the network \"{network}\" ({}) are taken; those that were released are kept \
                 for a while (`address_retention_seconds` of the configuration)",
                spec.subnet
                    .map(|subnet| subnet.net.to_string())
                    .unwrap_or_default()
            );
            Failure::new(Kind::Exhausted, "NO_FREE_ADDRESS", message)
        }
    }
}

/// The node's networks could not be set up.
pub fn failed(error: &std::io::Error) -> Failure {
    Failure::internal(format!("set up the node's networks: {}", text::words(error)))
}

/// Emits an event about a network.
pub fn tell(host: Ports<'_>, record: &NetworkRecord, reason: &str, message: &str) {
    let uid = Uuid::from_slice(&record.uid).unwrap_or_default();
    let object = Object::Network(record.name.clone(), uid);
    host.events.emit(Draft::normal(object, reason, message));
}

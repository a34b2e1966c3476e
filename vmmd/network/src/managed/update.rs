//! Changes fields of a network that a client may change.

use std::sync::Arc;

use vmmd_api::v1::{self, nic_spec::Attachment};
use vmmd_host::failure::Failure;
use vmmd_objects::{
    context::Context,
    registry::Kind as _,
    request::{masked::Masked, preconditions},
};
use vmmd_spec::{
    Violations,
    network::{NetworkMode, NetworkSpec, reservation::Reservation},
};
use vmmd_store::{LeaseRecord, NetworkRecord};

use super::{NetworkKind, Networks, Ports, describe::tell, routes};

/// Paths in an update mask, besides the metadata.
const FIELDS: [&str; 11] = [
    MODE,
    DNS,
    NTP,
    DENY,
    ROUTES,
    DHCP,
    DHCP6,
    DOMAIN,
    RECORDS,
    RESERVATIONS,
    GROUPS,
];
const MODE: &str = "spec.mode";
const DNS: &str = "spec.dns_servers";
const NTP: &str = "spec.ntp_servers";
const DENY: &str = "spec.deny";
const ROUTES: &str = "spec.routes";
const DHCP: &str = "spec.dhcp_options";
const DHCP6: &str = "spec.dhcp6_options";
const DOMAIN: &str = "spec.domain";
const RECORDS: &str = "spec.dns_records";
const RESERVATIONS: &str = "spec.reservations";
const GROUPS: &str = "spec.security_groups";

impl Networks {
    /// Changes a network; returns when the node is so.
    pub async fn update(
        &self,
        host: Ports<'_>,
        request: &v1::UpdateNetworkRequest,
        context: &Context,
    ) -> Result<v1::Network, Failure> {
        let network = request.network.clone().unwrap_or_default();
        let masked = Masked::new("network", &FIELDS, network.metadata, request.update_mask.as_ref())?;
        let spec = network.spec.unwrap_or_default();
        let name = masked.metadata.name.as_str();
        let mut turn = self.turn.lock().await;
        let before = self.find(name)?;
        expected(&before, context)?;
        // A VM that was deleted lately may have its address still.
        let now = self.unused(host).into_iter().find(|now| now.uid == before.uid);
        let before = now.unwrap_or(before);
        let mut record = before.clone();
        masked.change(&mut record.labels, &mut record.annotations, &mut record.owner);
        let new = record.spec.get_or_insert_default();
        if masked.has(MODE) {
            new.mode = spec.mode;
        }
        if masked.has(DNS) {
            new.dns_servers.clone_from(&spec.dns_servers);
        }
        if masked.has(NTP) {
            new.ntp_servers.clone_from(&spec.ntp_servers);
        }
        if masked.has(DENY) {
            new.deny.clone_from(&spec.deny);
        }
        if masked.has(ROUTES) {
            new.routes.clone_from(&spec.routes);
        }
        if masked.has(DHCP) {
            new.dhcp_options.clone_from(&spec.dhcp_options);
        }
        if masked.has(DHCP6) {
            new.dhcp6_options.clone_from(&spec.dhcp6_options);
        }
        if masked.has(DOMAIN) {
            new.domain.clone_from(&spec.domain);
        }
        if masked.has(RECORDS) {
            new.dns_records.clone_from(&spec.dns_records);
        }
        if masked.has(RESERVATIONS) {
            new.reservations.clone_from(&spec.reservations);
        }
        if masked.has(GROUPS) {
            new.security_groups.clone_from(&spec.security_groups);
        }
        let valid = valid(&record)?;
        if valid.mode != NetworkMode::Nat
            && let Some(lease) = record.leases.iter().find(|lease| publishes(lease))
        {
            let message = format!(
                "network \"{name}\" publishes ports of NIC \"{}\" of VM \"{}\", which only the mode NAT has: take them from the NIC \
                 first",
                lease.nic, lease.vm_name
            );
            return Err(Failure::precondition("PORTS_PUBLISHED", message));
        }
        if valid.mode != NetworkMode::Nat
            && let Some(lease) = record.leases.iter().find(|lease| !lease.floating.is_empty())
        {
            let message = format!(
                "NIC \"{}\" of VM \"{}\" has floating addresses, which only the mode NAT has: take them from the NIC first",
                lease.nic, lease.vm_name
            );
            return Err(Failure::precondition("ADDRESSES_FLOATING", message));
        }
        let mut leases = record.leases.iter();
        if valid.mode == NetworkMode::Isolated
            && let Some(lease) = leases.find(|lease| routes::subnets(lease).next().is_some())
        {
            let message = format!(
                "network \"{name}\" routes subnets to NIC \"{}\" of VM \"{}\", which an isolated network does not do: take them from \
                 the NIC first",
                lease.nic, lease.vm_name
            );
            return Err(Failure::precondition("SUBNETS_ROUTED", message));
        }
        no_named_reservation_lost(host, &before, &valid)?;
        no_used_group_lost(host, &before, &valid)?;
        if record == before {
            return self.get(name);
        }
        record.generation = record.generation.max(1) + 1;
        // With an id, a retry after the end of the daemon is known to have begun.
        host.requests.note(context, &mut record.begun);
        self.write(host, &record).await?;
        self.apply(host, &mut turn, Some(&record.uid)).await;
        drop(turn);
        let message = format!("the network has generation {} now", record.generation);
        tell(host, &record, "NetworkChanged", &message);
        match self.problem(&record.uid) {
            Some(problem) => Err(problem),
            None => self.get(name),
        }
    }
}

/// Refuses a change that takes the address of a reservation from a NIC which names it.
fn no_named_reservation_lost(
    host: Ports<'_>,
    before: &NetworkRecord,
    new: &NetworkSpec,
) -> Result<(), Failure> {
    let old = before.spec.iter().flat_map(|spec| &spec.reservations);
    let is_kept = |old: &v1::AddressReservation| {
        let mut new = new.reservations.iter();
        new.any(|new: &Reservation| {
            let is_same = match new.address {
                Some(address) => address.to_string() == old.address,
                // The IPv6 address follows from the MAC address.
                None => old.address.is_empty() && old.mac.parse().ok() == new.mac,
            };
            new.name.as_str() == old.name && is_same
        })
    };
    let lost: Vec<_> = old
        .filter(|old| !is_kept(old))
        .map(|old| old.name.as_str())
        .collect();
    if lost.is_empty() {
        return Ok(());
    }
    for vm in host.vms.vms() {
        let nics = vm.spec.as_ref().map_or(&[][..], |spec| &spec.nics);
        let names = |nic: &&v1::NicSpec| {
            matches!(&nic.attachment, Some(Attachment::Network(network)) if *network == before.name)
                && lost.contains(&nic.address.as_str())
        };
        if let Some(nic) = nics.iter().find(names) {
            let vm = vm.metadata.as_ref().map_or("", |metadata| &metadata.name);
            let message = format!(
                "the reservation \"{}\" of the network \"{}\" is in use by NIC \"{}\" of VM \"{vm}\": give the NIC another address \
                 first",
                nic.address, before.name, nic.name
            );
            return Err(Failure::precondition("RESERVATION_IN_USE", message));
        }
    }
    Ok(())
}

/// Refuses a change that removes a security group which a NIC names.
fn no_used_group_lost(host: Ports<'_>, before: &NetworkRecord, new: &NetworkSpec) -> Result<(), Failure> {
    let old = before.spec.iter().flat_map(|spec| &spec.security_groups);
    let is_lost = |name: &&str| {
        new.security_groups
            .iter()
            .all(|group| group.name.as_str() != *name)
    };
    let mut lost = old.map(|old| old.name.as_str()).filter(is_lost).peekable();
    if lost.peek().is_none() {
        return Ok(());
    }
    let vms = host.vms.vms();
    for group in lost {
        let users = users_of_group(&vms, &before.name, group).join(", ");
        if !users.is_empty() {
            let message = format!(
                "the security group \"{group}\" of the network \"{}\" is in use by {users}: take it from the NICs first",
                before.name
            );
            return Err(Failure::precondition("SECURITY_GROUP_IN_USE", message));
        }
    }
    Ok(())
}

/// "VM \"web\"": VMs with a NIC that names a security group of a network.
fn users_of_group(vms: &[Arc<v1::Vm>], network: &str, group: &str) -> Vec<String> {
    let names = |nic: &v1::NicSpec| {
        matches!(&nic.attachment, Some(Attachment::Network(name)) if name == network)
            && nic.security_groups.iter().any(|name| name == group)
    };
    let users = vms
        .iter()
        .filter(|vm| vm.spec.iter().any(|spec| spec.nics.iter().any(names)));
    let words = users.map(|vm| {
        let name = vm.metadata.as_ref().map_or("", |metadata| &metadata.name);
        format!("VM \"{name}\"")
    });
    words.collect()
}

fn publishes(lease: &LeaseRecord) -> bool {
    lease.released_ms == 0 && !lease.ports.is_empty()
}

/// Checks the preconditions of a request.
pub fn expected(record: &NetworkRecord, context: &Context) -> Result<(), Failure> {
    let now = (record.uid.as_slice(), record.generation, record.begun.as_slice());
    preconditions::check_record("network", &record.name, now, context)
}

/// The changed spec, which must be valid as a whole.
fn valid(record: &NetworkRecord) -> Result<NetworkSpec, Failure> {
    let mut found = Violations::default();
    let spec = NetworkSpec::new(
        &mut found,
        "network.spec",
        &record.spec.clone().unwrap_or_default(),
    );
    match spec {
        Some(spec) => Ok(found.or(spec)?),
        None if found.0.is_empty() => Err(NetworkKind::not_found(&record.name)),
        None => Err(found.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_of_a_group_name_it_in_its_network() {
        let vm = |name: &str, network: &str, groups: &[&str]| {
            let nic = v1::NicSpec {
                attachment: Some(Attachment::Network(network.into())),
                security_groups: groups.iter().map(|group| (*group).to_owned()).collect(),
                ..v1::NicSpec::default()
            };
            Arc::new(v1::Vm {
                metadata: Some(v1::ObjectMetadata {
                    name: name.into(),
                    ..v1::ObjectMetadata::default()
                }),
                spec: Some(v1::VmSpec {
                    nics: vec![nic],
                    ..v1::VmSpec::default()
                }),
                status: None,
            })
        };
        let vms = [
            vm("a", "lan", &["db", "web"]),
            vm("b", "dmz", &["web"]),
            vm("c", "lan", &["web"]),
            vm("d", "lan", &[]),
        ];
        assert_eq!(users_of_group(&vms, "lan", "web"), ["VM \"a\"", "VM \"c\""]);
        assert!(users_of_group(&vms, "lan", "none").is_empty());
    }
}

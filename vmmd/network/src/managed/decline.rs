//! Addresses that guests decline, because another host of the network uses them.
//!
//! The NIC gets another IPv4 address, unless its VM's spec gives the address. For
//! [`LEASE_RETENTION_MS`](vmmd_store::LEASE_RETENTION_MS), no NIC gets the declined address, and the network has a warning. An IPv6 address
//! follows from the MAC address, so it stays. A guest is hostile: one NIC has few declined
//! addresses, and all together have no more than are free.

use std::net::{IpAddr, Ipv4Addr};

use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::text;
use vmmd_objects::event::{Draft, Object};
use vmmd_store::{LeaseRecord, NetworkRecord};

use super::{Networks, Ports, helper::Report, pool, spec_of};
use crate::netd::report::Declined;

/// Most declined addresses of a NIC.
const MOST_OF_A_NIC: usize = 3;

/// The effect of a declined address on its network.
#[derive(Debug, PartialEq, Eq)]
struct Change {
    vm: Vec<u8>,
    /// The IPv4 address that the NIC has instead.
    new: Option<Ipv4Addr>,
    message: String,
}

impl Networks {
    /// Waits for reports of helpers about declined addresses, for [`Self::decline`].
    pub async fn declined(&self) -> Vec<Report> {
        self.helper_ends.reports().await
    }

    /// Gives NICs other addresses instead of declined ones. Returns the UUIDs of VMs whose addresses have changed.
    pub async fn decline(&self, host: Ports<'_>, reports: Vec<Report>) -> Vec<Uuid> {
        let mut turn = self.turn.lock().await;
        let mut moved = Vec::new();
        for Report { network, declined } in reports {
            let record = {
                let networks = self.registry.lock();
                let name = networks.name_of(network.as_bytes());
                name.and_then(|name| networks.get(name)).cloned()
            };
            let Some(mut record) = record.filter(|record| !record.leaving) else {
                continue;
            };
            let is_given = |lease: &LeaseRecord| is_given(host, &record.name, lease);
            let given = live(&record, &declined).is_some_and(is_given);
            let Some(change) = decline(&mut record, &declined, given, text::now_ms()) else {
                continue;
            };
            if let Err(failure) = self.write(host, &record).await {
                tracing::error!(
                    network = record.name,
                    error = failure.message,
                    "note a declined address"
                );
                continue;
            }
            self.apply(host, &mut turn, Some(&record.uid)).await;
            let object = Object::Network(record.name.clone(), network);
            host.events
                .emit(Draft::warning(object, "AddressDeclined", change.message));
            if change.new.is_some() {
                moved.extend(Uuid::from_slice(&change.vm).ok());
            }
        }
        moved
    }
}

/// Whether the spec of its VM gives a NIC its address.
fn is_given(host: Ports<'_>, network: &str, lease: &LeaseRecord) -> bool {
    let vm = host.vms.vm(Uuid::from_slice(&lease.vm).unwrap_or_default());
    let mut nics = vm.iter().flat_map(|vm| &vm.spec).flat_map(|spec| &spec.nics);
    nics.any(|nic| {
        let is_there =
            matches!(&nic.attachment, Some(v1::nic_spec::Attachment::Network(name)) if name == network);
        is_there && nic.name == lease.nic && !nic.address.is_empty()
    })
}

/// The lease of the NIC that declines.
fn live<'a>(record: &'a NetworkRecord, declined: &Declined) -> Option<&'a LeaseRecord> {
    let mut leases = record.leases.iter();
    leases.find(|lease| lease.released_ms == 0 && lease.mac() == Some(declined.mac))
}

/// Notes a declined address in the record of its network; the address is `given` by the VM's spec or not. `None` when the
/// address is not the NIC's, or was declined lately already.
fn decline(record: &mut NetworkRecord, declined: &Declined, given: bool, now: u64) -> Option<Change> {
    let spec = spec_of(record)?;
    let own = live(record, declined)?.clone();
    let is_ipv4 = own.ip().map(IpAddr::from) == Some(declined.address);
    let is_ipv6 = spec.net6.map(|net| net.of(declined.mac).into()) == Some(declined.address);
    if !is_ipv4 && !is_ipv6 || own.is_declined(now) {
        return None;
    }
    let replaced = record.leases.iter().filter(|lease| lease.is_replaced());
    let of_nic = replaced
        .clone()
        .filter(|lease| lease.vm == own.vm && lease.nic == own.nic)
        .count();
    let free = usize::try_from(pool::available(&spec, &record.leases, now)).unwrap_or(0);
    let is_reserved = spec
        .reservations
        .iter()
        .any(|reservation| reservation.mac == Some(declined.mac) && reservation.address.is_some());
    let may_move = is_ipv4 && !given && !is_reserved && of_nic < MOST_OF_A_NIC && replaced.count() < free;
    let place = record.leases.iter().position(|lease| *lease == own)?;
    let old = record.leases.get_mut(place)?;
    old.declined_ms = now;
    let mut new = None;
    if may_move {
        old.released_ms = now;
        (old.ports, old.firewall) = (Vec::new(), None);
        (old.subnets, old.groups, old.floating) = (Vec::new(), Vec::new(), Vec::new());
        let owner = (own.vm.as_slice(), own.nic.as_str());
        let found = pool::allocate(&spec, &record.leases, owner, (None, |_: &LeaseRecord| true), now);
        let address = found.ok().flatten()?;
        record.leases.push(LeaseRecord {
            address: address.into(),
            ..own.clone()
        });
        record.leases.sort_by_key(|lease| lease.address);
        new = Some(address);
    }
    let outcome = match new {
        Some(new) => format!("the NIC has {new} now"),
        None => "the NIC keeps the address: find the other host".to_owned(),
    };
    let message = format!(
        "NIC \"{}\" of VM \"{}\" declined {}, because another host of the network uses the address; {outcome}",
        own.nic, own.vm_name, declined.address
    );
    Some(Change {
        vm: own.vm,
        new,
        message,
    })
}

/// The addresses that were declined lately, for the status of the network; empty when there are none.
pub fn warning(record: &NetworkRecord, now: u64) -> String {
    let declined = record.leases.iter().filter(|lease| lease.is_declined(now));
    let all: Vec<_> = declined
        .map(|lease| {
            let address = lease.ip().map_or("its address".to_owned(), |ip| ip.to_string());
            format!(
                "another host of the network uses an address: NIC \"{}\" of VM \"{}\" declined {address}",
                lease.nic, lease.vm_name
            )
        })
        .collect();
    all.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_700_000_000_000;

    fn record(cidr: &str) -> NetworkRecord {
        NetworkRecord {
            spec: Some(v1::NetworkSpec {
                ipv4_cidr: cidr.into(),
                ipv6_cidr: "fd00:80::/64".into(),
                ..v1::NetworkSpec::default()
            }),
            leases: vec![LeaseRecord {
                address: u32::from(Ipv4Addr::new(10, 80, 0, 2)),
                vm: vec![1; 16],
                vm_name: "web".into(),
                nic: "eth0".into(),
                mac: vec![0x52, 0x54, 0, 0, 0, 1],
                tap: "tap".into(),
                ..LeaseRecord::default()
            }],
            ..NetworkRecord::default()
        }
    }

    fn report(address: &str) -> Declined {
        Declined {
            mac: "52:54:00:00:00:01".parse().unwrap(),
            address: address.parse().unwrap(),
        }
    }

    #[test]
    fn nic_that_declines_gets_another_address() {
        let mut record = record("10.80.0.0/24");
        let change = decline(&mut record, &report("10.80.0.2"), false, NOW).unwrap();
        assert_eq!(change.new, Some([10, 80, 0, 3].into()));
        let [old, new] = &record.leases[..] else {
            panic!("{record:?}");
        };
        assert!(old.is_replaced() && !old.is_of(&[1; 16], "eth0"));
        assert_eq!(
            (new.released_ms, new.declined_ms, new.tap.as_str()),
            (0, 0, "tap")
        );
        assert!(warning(&record, NOW).contains("declined 10.80.0.2"));
        assert_eq!(warning(&record, NOW + vmmd_store::LEASE_RETENTION_MS), "");
        // It has another one by now.
        assert_eq!(decline(&mut record, &report("10.80.0.2"), false, NOW), None);
    }

    #[test]
    fn given_address_and_one_of_ipv6_stay() {
        for (address, given) in [("10.80.0.2", true), ("fd00:80::5054:ff:fe00:1", false)] {
            let mut record = record("10.80.0.0/24");
            let change = decline(&mut record, &report(address), given, NOW).unwrap();
            assert!(
                change.new.is_none() && change.message.contains(address),
                "{change:?}"
            );
            assert_eq!((record.leases.len(), record.leases[0].declined_ms), (1, NOW));
            assert_eq!(decline(&mut record, &report(address), given, NOW + 1), None);
        }
        let mut other = record("10.80.0.0/24");
        assert_eq!(decline(&mut other, &report("10.80.0.9"), false, NOW), None);
    }

    #[test]
    fn guest_that_declines_all_takes_few_addresses() {
        for (cidr, expected) in [("10.80.0.0/24", 3), ("10.80.0.0/29", 2), ("10.80.0.0/30", 0)] {
            let mut record = record(cidr);
            for _ in 0..9 {
                let own = record.leases.iter().find(|lease| lease.released_ms == 0).unwrap();
                let address = own.ip().unwrap().to_string();
                decline(&mut record, &report(&address), false, NOW);
            }
            assert_eq!(record.leases.len(), 1 + expected, "{cidr}");
        }
    }
}

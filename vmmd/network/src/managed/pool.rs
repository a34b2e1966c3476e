//! Which addresses of a network are whose: a pure function of its leases.
//!
//! A NIC keeps its address until it is taken from its VM, or the VM is deleted; the address is *released* then. For
//! the time in its lease it is kept for the same NIC, as a guest may still use it and others may still know it.

use std::{collections::BTreeSet, net::Ipv4Addr};

use vmmd_spec::network::{NetworkSpec, Subnet};
use vmmd_store::LeaseRecord;

/// Why a NIC gets no address.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// It is no address that a VM can have in this network.
    NotInPool(Ipv4Addr),
    /// Another NIC has it, or had it lately.
    Taken(Ipv4Addr, Box<LeaseRecord>),
    /// All are taken.
    Exhausted,
}

/// The address of the NIC `nic` of the VM with UUID `vm`: the `requested` one, or its own, or one that is free. The requested address may be
/// that of a NIC which does not keep it. Without IPv4 there is no address to choose: the IPv6 address of a NIC follows from its MAC address.
pub fn allocate(
    spec: &NetworkSpec,
    leases: &[LeaseRecord],
    (vm, nic): (&[u8], &str),
    (requested, keeps): (Option<Ipv4Addr>, impl Fn(&LeaseRecord) -> bool),
    now_ms: u64,
) -> Result<Option<Ipv4Addr>, Refusal> {
    let Some(Subnet { net, gateway }) = spec.subnet else {
        return requested.map_or(Ok(None), |wanted| Err(Refusal::NotInPool(wanted)));
    };
    let counting = || leases.iter().filter(|lease| lease.counts(now_ms));
    let own = counting().find(|lease| lease.is_of(vm, nic));
    let Some(wanted) = requested.or(own.and_then(LeaseRecord::ip)) else {
        let taken: BTreeSet<_> = counting().filter_map(LeaseRecord::ip).collect();
        let reserved: BTreeSet<_> = spec
            .reservations
            .iter()
            .filter_map(|reserved| reserved.address)
            .collect();
        let free = |address: &Ipv4Addr| {
            *address != gateway && !taken.contains(address) && !reserved.contains(address)
        };
        return net.hosts().find(free).map(Some).ok_or(Refusal::Exhausted);
    };
    if !net.has_host(wanted) || wanted == gateway {
        return Err(Refusal::NotInPool(wanted));
    }
    let keeps = |lease: &LeaseRecord| requested.is_none() || keeps(lease);
    match counting().find(|lease| lease.ip() == Some(wanted) && !lease.is_of(vm, nic) && keeps(lease)) {
        Some(lease) => Err(Refusal::Taken(wanted, Box::new(lease.clone()))),
        None => Ok(Some(wanted)),
    }
}

/// Number of free IPv4 addresses that are not reserved.
pub fn available(spec: &NetworkSpec, leases: &[LeaseRecord], now_ms: u64) -> u32 {
    // Excludes the network address, the broadcast address and the gateway. The prefix has 16 bits
    // or more.
    let prefix = spec.subnet.map_or(32, |subnet| subnet.net.prefix());
    let all = 1_u32.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
    let taken = leases.iter().filter(|lease| lease.counts(now_ms));
    let reserved = spec
        .reservations
        .iter()
        .filter_map(|reservation| reservation.address);
    let taken: BTreeSet<_> = taken.filter_map(LeaseRecord::ip).chain(reserved).collect();
    let taken = taken.len();
    all.saturating_sub(3)
        .saturating_sub(u32::try_from(taken).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use vmmd_spec::network::NetworkMode;
    use vmmd_store::LEASE_RETENTION_MS;

    use super::*;

    fn spec(net: &str) -> NetworkSpec {
        let net: vmmd_spec::network::Ipv4Net = net.parse().unwrap();
        NetworkSpec {
            mode: NetworkMode::Nat,
            subnet: Some(Subnet {
                net,
                gateway: net.hosts().next().unwrap(),
            }),
            dns: Vec::new(),
            ntp: Vec::new(),
            mtu: 1500,
            net6: None,
            deny: Vec::new(),
            routes: Vec::new(),
            dhcp_options: Vec::new(),
            dhcp6_options: Vec::new(),
            domain: None,
            dns_records: std::collections::BTreeMap::new(),
            reservations: Vec::new(),
            security_groups: Vec::new(),
        }
    }

    fn lease(vm: u8, last: u8, released_ms: u64) -> LeaseRecord {
        LeaseRecord {
            address: u32::from(Ipv4Addr::new(10, 80, 0, last)),
            vm: vec![vm],
            nic: "eth0".into(),
            released_ms,
            ..LeaseRecord::default()
        }
    }

    fn address(last: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 80, 0, last)
    }

    #[test]
    fn a_nic_gets_the_first_free_address_and_the_same_one_again() {
        let spec = spec("10.80.0.0/29");
        let leases = [lease(1, 2, 0), lease(2, 4, 0)];
        let allocate = |vm: u8| allocate(&spec, &leases, (&[vm], "eth0"), (None, |_| true), 5000);
        assert_eq!(allocate(3), Ok(Some(address(3))));
        assert_eq!(allocate(2), Ok(Some(address(4))));
        assert_eq!(available(&spec, &leases, 5000), 3);
    }

    #[test]
    fn a_released_address_waits_for_its_nic_for_ten_minutes() {
        let spec = spec("10.80.0.0/30");
        let leases = [lease(1, 2, 1000)];
        let at = |vm: u8, now| allocate(&spec, &leases, (&[vm], "eth0"), (None, |_| true), now);
        assert_eq!(at(2, 2000), Err(Refusal::Exhausted));
        assert_eq!(at(1, 2000), Ok(Some(address(2))));
        assert_eq!(at(2, 1000 + LEASE_RETENTION_MS), Ok(Some(address(2))));
        assert_eq!(available(&spec, &leases, 2000), 0);
    }

    #[test]
    fn released_address_waits_as_long_as_its_lease_says() {
        let spec = spec("10.80.0.0/30");
        for retention_ms in [0, 1, 5000, LEASE_RETENTION_MS * 2] {
            let mut released = lease(1, 2, 0);
            released.release(1000, retention_ms);
            let leases = [released];
            let at = |now| allocate(&spec, &leases, (&[2], "eth0"), (None, |_| true), now);
            if let Some(last) = (1000 + retention_ms).checked_sub(1).filter(|last| *last >= 1000) {
                assert_eq!(at(last), Err(Refusal::Exhausted), "{retention_ms}");
            }
            assert_eq!(at(1000 + retention_ms), Ok(Some(address(2))), "{retention_ms}");
        }
    }

    #[test]
    fn an_address_released_by_a_wrong_clock_is_free() {
        let spec = spec("10.80.0.0/30");
        let now = 1_000_000_000;
        let at = |released| {
            allocate(
                &spec,
                &[lease(1, 2, released)],
                (&[2], "eth0"),
                (None, |_| true),
                now,
            )
        };
        // The clock was set back a little, and by years.
        assert_eq!(at(now + LEASE_RETENTION_MS - 1), Err(Refusal::Exhausted));
        assert_eq!(at(now + LEASE_RETENTION_MS), Ok(Some(address(2))));
        assert_eq!(at(now * 14), Ok(Some(address(2))));
    }

    #[test]
    fn network_without_ipv4_has_no_address_to_give() {
        let spec = NetworkSpec {
            subnet: None,
            ..spec("10.80.0.0/24")
        };
        let ask = |wanted| allocate(&spec, &[], (&[1], "eth0"), (wanted, |_| true), 5);
        assert_eq!(ask(None), Ok(None));
        assert_eq!(ask(Some(address(9))), Err(Refusal::NotInPool(address(9))));
        assert_eq!(available(&spec, &[], 5), 0);
    }

    #[test]
    fn a_requested_address_is_given_or_refused_with_its_owner() {
        let spec = spec("10.80.0.0/24");
        let leases = [lease(1, 9, 0)];
        let ask = |vm: u8, wanted| {
            allocate(
                &spec,
                &leases,
                (&[vm], "eth0"),
                (Some(wanted), |lease| lease.vm != [vm]),
                5,
            )
        };
        assert_eq!(ask(2, address(77)), Ok(Some(address(77))));
        assert_eq!(ask(1, address(9)), Ok(Some(address(9))));
        assert_eq!(
            ask(2, address(9)),
            Err(Refusal::Taken(address(9), Box::new(leases[0].clone())))
        );
        for wanted in [address(0), address(1), address(255), Ipv4Addr::new(10, 81, 0, 5)] {
            assert_eq!(ask(2, wanted), Err(Refusal::NotInPool(wanted)));
        }
    }

    #[test]
    fn a_requested_address_of_the_same_vm_moves_to_the_nic() {
        let spec = spec("10.80.0.0/24");
        for released_ms in [0, 4] {
            let leases = [lease(1, 9, released_ms)];
            let ask = |keeps| allocate(&spec, &leases, (&[1], "eth1"), (Some(address(9)), |_| keeps), 5);
            assert_eq!(ask(false), Ok(Some(address(9))));
            assert_eq!(
                ask(true),
                Err(Refusal::Taken(address(9), Box::new(leases[0].clone())))
            );
        }
    }

    proptest::proptest! {
        #[test]
        fn no_two_nics_have_one_address(vms in proptest::collection::vec(0_u8..40, 1..60)) {
            let spec = spec("10.80.0.0/27");
            let mut leases: Vec<LeaseRecord> = Vec::new();
            for vm in vms {
                match allocate(&spec, &leases, (&[vm], "eth0"), (None, |_| true), 5) {
                    Ok(address) => {
                        leases.retain(|lease| lease.vm != [vm]);
                        leases.push(lease(vm, address.unwrap().octets()[3], 0));
                    }
                    Err(refusal) => proptest::prop_assert_eq!(refusal, Refusal::Exhausted),
                }
            }
            let addresses: BTreeSet<_> = leases.iter().map(LeaseRecord::ip).collect();
            proptest::prop_assert_eq!(addresses.len(), leases.len());
        }
    }
}

//! Addresses of a VM in a pod, and the table of the helper that serves it: pure functions.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use vmmd_spec::{network::Ipv6Net, nic::Mac};

use super::{End, Resolver};
use crate::{
    managed::table::{LEASE_SECONDS, NAME_SERVERS},
    netd::{self, Table},
};

/// Bits of the IPv4 network of the guest and its gateway.
pub const PREFIX: u8 = 24;
/// The network of guests, and the one of pods with an address or a route in the first.
const NETWORKS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 2, 0), Ipv4Addr::new(10, 254, 254, 0)];
/// The IPv6 network of guests.
const NETWORK6: Ipv6Net = Ipv6Net::around(Ipv6Addr::new(0xfd10, 0, 2, 0, 0, 0, 0, 0));
/// Most search domains, of so many bytes together: an option of DHCP has 255 bytes (RFC 2132, 2).
const DOMAINS: usize = 6;
const DOMAIN_BYTES: usize = 240;

/// The private addresses of a guest and of its gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    pub guest4: Ipv4Addr,
    pub gateway4: Ipv4Addr,
    pub guest6: Ipv6Addr,
    pub gateway6: Ipv6Addr,
}

impl Addresses {
    /// Those of a guest with this MAC address in a pod that has these address ranges: addresses and routes. `None` when the address that
    /// the guest `has` is not possible there.
    pub fn new(mac: Mac, has: Option<Ipv4Addr>, taken: &[(IpAddr, u8)]) -> Option<Self> {
        let is_free = |network| !taken.iter().any(|range| overlaps(network, *range));
        let guest4 = |network: Ipv4Addr| Ipv4Addr::from(network.to_bits() | 2);
        let [first, second] = NETWORKS;
        let network = match has {
            Some(has) => NETWORKS
                .into_iter()
                .find(|network| guest4(*network) == has && is_free(*network))?,
            None if is_free(first) => first,
            None => second,
        };
        Some(Self {
            guest4: guest4(network),
            gateway4: (network.to_bits() | 1).into(),
            guest6: NETWORK6.of(mac),
            gateway6: NETWORK6.gateway(),
        })
    }
}

/// Whether a range is in the network of guests `network`, or this in the range, which is no default route.
fn overlaps(network: Ipv4Addr, (address, bits): (IpAddr, u8)) -> bool {
    let IpAddr::V4(address) = address else {
        return false;
    };
    let bits = u32::from(bits.min(PREFIX));
    let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
    bits > 0 && address.to_bits() & mask == network.to_bits() & mask
}

/// The table of the helper. `families`: the pod has IPv4 and IPv6; `tap` is the interface with its MAC address, `mtu` the guest's MTU.
pub fn table(
    end: &End,
    resolver: &Resolver,
    addresses: &Addresses,
    [has_ipv4, has_ipv6]: [bool; 2],
    (tap_mac, mtu): ([u8; 6], u32),
) -> Table {
    let host = netd::Host {
        address: has_ipv4.then_some(addresses.guest4),
        address6: has_ipv6.then_some(addresses.guest6),
        name: end.name.clone(),
        primary: true,
        metadata: None,
    };
    let mask = Ipv4Addr::from(u32::MAX << (32 - u32::from(PREFIX)));
    Table {
        network: String::new(),
        search: domains(&resolver.search),
        domain: String::new(),
        records: BTreeMap::new(),
        routes: true,
        ipv4: has_ipv4.then(|| netd::Ipv4 {
            gateway: addresses.gateway4,
            mask,
            broadcast: addresses.gateway4 | !mask,
            routes: Vec::new(),
            options: Vec::new(),
        }),
        mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
        forward: resolver.servers.iter().copied().take(NAME_SERVERS).collect(),
        site: true,
        ntp: Vec::new(),
        lease_seconds: LEASE_SECONDS,
        ipv6: has_ipv6.then(|| netd::Ipv6 {
            bridge: end.tap.clone(),
            mac: tap_mac,
            prefix: NETWORK6.first(),
            routes: Vec::new(),
            options: Vec::new(),
        }),
        hosts: BTreeMap::from([(end.mac.to_string(), host)]),
    }
}

/// The search domains that a guest gets: the first valid ones.
fn domains(search: &[String]) -> Vec<String> {
    let mut left = DOMAIN_BYTES;
    let domains = search.iter().map(|domain| domain.trim_end_matches('.'));
    let domains = domains.filter(|domain| is_domain(domain)).take(DOMAINS);
    let fits = |domain: &&str| {
        let fits = left.checked_sub(domain.len() + 2);
        left = fits.unwrap_or(0);
        fits.is_some()
    };
    domains.take_while(fits).map(str::to_ascii_lowercase).collect()
}

/// A name of labels of 1 to 63 bytes (RFC 1035, 2.3.4) that need no escape.
fn is_domain(domain: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    domain.len() <= 253
        && domain
            .split('.')
            .all(|label| (1..=63).contains(&label.len()) && label.bytes().all(is_plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mac() -> Mac {
        "52:54:00:12:34:56".parse().unwrap()
    }

    #[test]
    fn guest_has_the_second_network_in_a_pod_of_the_first() {
        let cases = [
            ("10.244.0.9", 24, [10, 0, 2, 2]),
            ("10.0.2.77", 32, [10, 254, 254, 2]),
            ("10.0.0.0", 16, [10, 254, 254, 2]),
            ("10.0.3.0", 24, [10, 0, 2, 2]),
            ("0.0.0.0", 0, [10, 0, 2, 2]),
            ("fd00::", 8, [10, 0, 2, 2]),
        ];
        for (address, bits, expected) in cases {
            let taken = [(address.parse().unwrap(), bits)];
            let addresses = Addresses::new(mac(), None, &taken).unwrap();
            assert_eq!(addresses.guest4, Ipv4Addr::from(expected), "{address}/{bits}");
        }
    }

    #[test]
    fn guest_from_another_pod_keeps_its_address_or_is_refused() {
        let new =
            |has: &str, taken: &[(IpAddr, u8)]| Addresses::new(mac(), Some(has.parse().unwrap()), taken);
        assert_eq!(
            new("10.254.254.2", &[]).unwrap().gateway4,
            Ipv4Addr::new(10, 254, 254, 1)
        );
        assert_eq!(new("10.0.2.2", &[]).unwrap().gateway4, Ipv4Addr::new(10, 0, 2, 1));
        assert_eq!(new("10.0.2.2", &[("10.0.0.0".parse().unwrap(), 16)]), None);
        assert_eq!(new("192.0.2.2", &[]), None);
    }

    #[test]
    fn guest_makes_its_ipv6_address_from_its_mac() {
        let addresses = Addresses::new(mac(), None, &[]).unwrap();
        assert_eq!(addresses.guest6.to_string(), "fd10:0:2:0:5054:ff:fe12:3456");
        assert_eq!(addresses.gateway6.to_string(), "fd10:0:2::1");
    }

    #[test]
    fn search_domains_are_valid_and_bounded() {
        let search = |domains: &[&str]| {
            let domains: Vec<_> = domains.iter().map(|&domain| domain.to_owned()).collect();
            super::domains(&domains)
        };
        assert_eq!(
            search(&[
                "default.svc.cluster.local",
                "Cluster.Local.",
                "",
                ".",
                "a..b",
                "a b",
                "a\\.b"
            ]),
            ["default.svc.cluster.local", "cluster.local"]
        );
        assert_eq!(search(&["a"; 9]).len(), DOMAINS);
        let long = ["a".repeat(63), "b".repeat(63)].join(".");
        assert_eq!(search(&[&long, &long]).len(), 1);
    }
}

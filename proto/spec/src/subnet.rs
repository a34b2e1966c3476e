//! Addresses that lead to a guest beside its own: subnets behind the guest, which is their router, and floating addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{Violations, firewall::Addresses};

/// Most subnets behind a NIC.
pub const MAX_SUBNETS: usize = 16;
/// Most floating addresses of a NIC.
pub const MAX_FLOATING: usize = 16;

const fn v4(a: u8, prefix: u8) -> Addresses {
    Addresses {
        first: IpAddr::V4(Ipv4Addr::new(a, 0, 0, 0)),
        prefix,
    }
}

const fn v6(first: u16, prefix: u8) -> Addresses {
    Addresses {
        first: IpAddr::V6(Ipv6Addr::new(first, 0, 0, 0, 0, 0, 0, 0)),
        prefix,
    }
}

/// IPv4 addresses that no router forwards (RFC 6890, 2.2.2), or that are not of one host (RFC 5771).
const RESERVED: [(Addresses, &str); 5] = [
    (v4(0, 8), "this network"),
    (v4(127, 8), "loopback"),
    (
        Addresses {
            first: IpAddr::V4(Ipv4Addr::new(169, 254, 0, 0)),
            prefix: 16,
        },
        "link-local",
    ),
    (v4(224, 4), "multicast"),
    (v4(240, 4), "reserved"),
];
/// Unique local (RFC 4193) and global unicast addresses (RFC 4291, 2.4).
const ROUTED6: [Addresses; 2] = [v6(0xfc00, 7), v6(0x2000, 3)];

/// Validates subnets behind a NIC; `field` is their path. They are disjoint.
pub(super) fn subnets(found: &mut Violations, field: &str, texts: &[String]) -> Vec<Addresses> {
    ranges(found, field, texts, MAX_SUBNETS)
}

/// Validates floating addresses of a NIC; `field` is their path. They are different.
pub(super) fn floating(found: &mut Violations, field: &str, texts: &[String]) -> Vec<IpAddr> {
    let ranges = ranges(found, field, texts, MAX_FLOATING);
    if let Some(range) = ranges.iter().find(|range| !range.is_one()) {
        found.add(field, format_args!("must be addresses, has the range {range}"));
    }
    ranges.into_iter().map(|range| range.first).collect()
}

fn ranges(found: &mut Violations, field: &str, texts: &[String], most: usize) -> Vec<Addresses> {
    if texts.len() > most {
        let wrong = format_args!("at most {most}, are {}", texts.len());
        found.add(field, wrong);
        return Vec::new();
    }
    let mut subnets = Vec::<Addresses>::new();
    for (index, text) in texts.iter().enumerate() {
        let at = format!("{field}[{index}]");
        let subnet = match text.parse::<Addresses>() {
            Ok(subnet) => subnet,
            Err(error) => {
                found.add(at, error);
                continue;
            }
        };
        let mut reserved = RESERVED.iter();
        if let Some((range, use_)) = reserved.find(|(range, _)| range.overlaps(subnet)) {
            found.add(
                &at,
                format_args!("overlaps with {range} ({use_}), which is not routed"),
            );
        }
        if subnet.first.is_ipv6() && !ROUTED6.iter().any(|range| range.has(subnet)) {
            found.add(
                &at,
                "must be unique local or global unicast addresses (fc00::/7 or 2000::/3)",
            );
        }
        match subnets.iter().find(|other| other.overlaps(subnet)) {
            Some(other) => found.add(at, format_args!("overlaps with {other}: give each address once")),
            None => subnets.push(subnet),
        }
    }
    subnets
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(texts: &[&str]) -> (usize, String) {
        let texts: Vec<_> = texts.iter().map(|text| (*text).to_owned()).collect();
        let mut found = Violations::default();
        let subnets = subnets(&mut found, "s", &texts);
        (subnets.len(), found.to_string())
    }

    #[test]
    fn subnets_are_disjoint_ranges_that_routers_forward() {
        let good = ["10.90.0.0/16", "192.0.2.7", "fd00:90::/48", "2001:db8::/32"];
        assert_eq!(checked(&good), (4, String::new()));
        for (wrong, expected) in [
            ("10.90.1.0/24", "s[4]: overlaps with 10.90.0.0/16"),
            ("10.0.0.0/8", "s[4]: overlaps with 10.90.0.0/16"),
            ("10.91.0.1/16", "s[4]: must be an address, or a range"),
            ("0.0.0.0/0", "s[4]: overlaps with 0.0.0.0/8 (this network)"),
            ("127.0.1.0/24", "overlaps with 127.0.0.0/8 (loopback)"),
            ("169.0.0.0/8", "overlaps with 169.254.0.0/16 (link-local)"),
            ("239.1.0.0/16", "overlaps with 224.0.0.0/4 (multicast)"),
            ("255.255.255.255", "overlaps with 240.0.0.0/4 (reserved)"),
            ("::/0", "must be unique local or global"),
            ("fe80::/64", "must be unique local or global"),
            ("ff02::/16", "must be unique local or global"),
            ("::ffff:10.90.0.0/112", "must be unique local or global"),
        ] {
            let (_, said) = checked(&[&good[..], &[wrong]].concat());
            assert!(said.contains(expected), "{expected}: {said}");
        }
        assert!(checked(&["10.0.0.0/32"; 17]).1.contains("at most 16, are 17"));
    }

    #[test]
    fn floating_addresses_are_single_and_different() {
        let checked = |texts: &[&str]| {
            let texts: Vec<_> = texts.iter().map(|text| (*text).to_owned()).collect();
            let mut found = Violations::default();
            (floating(&mut found, "f", &texts).len(), found.to_string())
        };
        assert_eq!(checked(&["192.0.2.7", "2001:db8::7"]), (2, String::new()));
        for (wrong, expected) in [
            ("192.0.2.8/31", "f: must be addresses, has the range 192.0.2.8/31"),
            ("192.0.2.7", "f[1]: overlaps with 192.0.2.7"),
            ("127.0.0.1", "f[1]: overlaps with 127.0.0.0/8 (loopback)"),
        ] {
            let (_, said) = checked(&["192.0.2.7", wrong]);
            assert!(said.contains(expected), "{expected}: {said}");
        }
    }
}

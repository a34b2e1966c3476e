//! Addresses that stay when their VMs are deleted.

use std::{collections::BTreeSet, net::Ipv4Addr};

use vmmd_api::v1;

use super::Subnet;
use crate::{Violations, name::Name, nic::Mac};

/// Most reservations of a network.
pub const MAX_RESERVATIONS: usize = 256;

/// An address for the NICs that name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Unique in the network.
    pub name: Name,
    /// IPv4, unique among the reservations of the network, and not the gateway's. Without it, the reservation is that of the IPv6 address
    /// of its MAC address.
    pub address: Option<Ipv4Addr>,
    /// The only NIC that may have it; any when there is none.
    pub mac: Option<Mac>,
}

/// Validates reservations of a network with these addresses; `field` is their path.
pub(super) fn reservations(
    found: &mut Violations,
    field: &str,
    (subnet, has_ipv6): (Option<Subnet>, bool),
    wire: &[v1::AddressReservation],
) -> Vec<Reservation> {
    if wire.len() > MAX_RESERVATIONS {
        let wrong = format_args!("at most {MAX_RESERVATIONS} reservations, are {}", wire.len());
        found.add(field, wrong);
        return Vec::new();
    }
    let (mut names, mut addresses, mut macs) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut reservations = Vec::new();
    for (index, reservation) in wire.iter().enumerate() {
        let at = format!("{field}[{index}]");
        let twice = |what: &str| format!("{what} is in another reservation, too");
        let name = match Name::try_from(reservation.name.as_str()) {
            Ok(name) if !names.insert(name.clone()) => {
                found.add(format_args!("{at}.name"), twice(name.as_str()));
                None
            }
            Ok(name) => Some(name),
            Err(error) => {
                found.add(format_args!("{at}.name"), error);
                None
            }
        };
        let is_host = |address: &Ipv4Addr| {
            subnet.is_some_and(|subnet| subnet.net.has_host(*address) && subnet.gateway != *address)
        };
        let address = reservation.address.parse().ok().filter(is_host);
        let is_of_ipv6 = reservation.address.is_empty() && has_ipv6 && !reservation.mac.is_empty();
        match address {
            None if is_of_ipv6 => {}
            None => {
                let wrong = "must be an IPv4 address of a host in the network, not that of the gateway; with a `mac` and IPv6 it may be empty";
                found.add(format_args!("{at}.address"), wrong);
            }
            Some(address) if !addresses.insert(address) => {
                found.add(format_args!("{at}.address"), twice(&reservation.address));
            }
            Some(_) => {}
        }
        let mac = match reservation.mac.as_str() {
            "" => None,
            text => match text.parse::<Mac>() {
                Ok(mac) => {
                    if !macs.insert(mac) {
                        found.add(format_args!("{at}.mac"), twice(text));
                    }
                    Some(mac)
                }
                Err(error) => {
                    found.add(format_args!("{at}.mac"), error);
                    continue;
                }
            },
        };
        if let (Some(name), true) = (name, address.is_some() || is_of_ipv6) {
            reservations.push(Reservation { name, address, mac });
        }
    }
    reservations
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_are_distinct_hosts_of_the_network() {
        let subnet = Subnet {
            net: "10.80.0.0/24".parse().unwrap(),
            gateway: [10, 80, 0, 1].into(),
        };
        let one = |name: &str, address: &str, mac: &str| v1::AddressReservation {
            name: name.into(),
            address: address.into(),
            mac: mac.into(),
        };
        let mac = "52:54:00:00:00:09";
        let check = |wire: &[v1::AddressReservation], subnet| {
            let mut found = Violations::default();
            (
                reservations(&mut found, "r", (subnet, false), wire).len(),
                found.to_string(),
            )
        };
        let good = [one("web", "10.80.0.9", ""), one("db", "10.80.0.10", mac)];
        assert_eq!(check(&good, Some(subnet)), (2, String::new()));
        for (wire, expected) in [
            (one("Web", "10.80.0.11", ""), "r[2].name: must be 1 to 63"),
            (one("web", "10.80.0.11", ""), "r[2].name: web is in another"),
            (one("a", "10.80.0.1", ""), "r[2].address: must be an IPv4"),
            (one("a", "10.81.0.1", ""), "r[2].address: must be an IPv4"),
            (one("a", "10.80.0.9", ""), "r[2].address: 10.80.0.9 is in another"),
            (
                one("a", "10.80.0.11", mac),
                "r[2].mac: 52:54:00:00:00:09 is in another",
            ),
            (one("a", "10.80.0.11", "x"), "r[2].mac"),
        ] {
            let (_, said) = check(&[&good[..], &[wire]].concat(), Some(subnet));
            assert!(said.contains(expected), "{expected}: {said}");
        }
        assert!(check(&good, None).1.contains("r[0].address"));
    }

    #[test]
    fn reservation_of_an_ipv6_address_has_a_mac() {
        let check = |has_ipv6, mac: &str| {
            let wire = v1::AddressReservation {
                name: "web".into(),
                address: String::new(),
                mac: mac.into(),
            };
            let mut found = Violations::default();
            (
                reservations(&mut found, "r", (None, has_ipv6), &[wire]).len(),
                found.to_string(),
            )
        };
        assert_eq!(check(true, "52:54:00:00:00:09"), (1, String::new()));
        for (has_ipv6, mac) in [(false, "52:54:00:00:00:09"), (true, "")] {
            assert!(
                check(has_ipv6, mac)
                    .1
                    .contains("with a `mac` and IPv6 it may be empty")
            );
        }
    }
}

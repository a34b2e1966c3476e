//! Routes and options that guests receive by DHCP.

use std::{collections::BTreeSet, net::Ipv4Addr};

use vmmd_api::v1::{self, dhcp_option::Value};

use super::{NetworkMode, Subnet};
use crate::{Violations, firewall::Addresses};

/// Most routes of a network.
pub const MAX_ROUTES: usize = 16;
/// Most options of a family of a network, and most bytes of these together, each with the two bytes of its head.
pub const MAX_OPTIONS: usize = 32;
/// See [`MAX_OPTIONS`].
pub const MAX_OPTION_BYTES: usize = 255;

/// A route of guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Destination, not the default route.
    pub to: Addresses,
    /// Next hop, an address of the network; the gateway when there is none.
    pub via: Option<Ipv4Addr>,
}

/// An option of DHCP that vmmd does not send itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DhcpOption {
    /// 1 to 254 for IPv4.
    pub code: u16,
    /// Not empty.
    pub value: Vec<u8>,
}

/// Family of DHCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
}

impl Family {
    /// Why a network can't have an option with this code.
    fn reserved(self, code: u16) -> Option<&'static str> {
        let own = "is sent by vmmd itself";
        let by = |field| Some(field);
        match (self, code) {
            // RFC 2132, RFC 3396, RFC 3397, RFC 3442; 249 is 121 of old clients.
            (Self::V4, 6) => by("is the gateway: give `dnsServers`"),
            (Self::V4, 26) => by("is sent by vmmd itself: give `mtu`"),
            (Self::V4, 42) | (Self::V6, 31 | 56) => by("is sent by vmmd itself: give `ntpServers`"),
            (Self::V4, 33 | 121 | 249) => by("is sent by vmmd itself: give `routes`"),
            (Self::V4, 1 | 3 | 12 | 15 | 28 | 50..=59 | 61 | 80 | 82 | 90 | 119) => Some(own),
            // RFC 8415, 21; RFC 3646.
            (Self::V6, 23) => by("is the gateway: give `dnsServers`"),
            (Self::V6, 1..=9 | 11..=14 | 18..=20 | 24..=26) => Some(own),
            _ => None,
        }
    }

    fn codes(self) -> std::ops::RangeInclusive<u32> {
        match self {
            Self::V4 => 1..=254,
            Self::V6 => 1..=65_535,
        }
    }
}

/// Validates options; `field` is their path.
pub(super) fn options(
    found: &mut Violations,
    field: &str,
    family: Family,
    wire: &[v1::DhcpOption],
) -> Vec<DhcpOption> {
    if wire.len() > MAX_OPTIONS {
        found.add(
            field,
            format_args!("at most {MAX_OPTIONS} options, are {}", wire.len()),
        );
        return Vec::new();
    }
    let (mut options, mut codes) = (Vec::new(), BTreeSet::new());
    for (index, option) in wire.iter().enumerate() {
        let at = format!("{field}[{index}]");
        let code = u16::try_from(option.code).unwrap_or(0);
        if !family.codes().contains(&option.code) {
            let (first, last) = (family.codes().start().to_owned(), *family.codes().end());
            let wrong = format_args!("must be {first} to {last}, is {}", option.code);
            found.add(format_args!("{at}.code"), wrong);
        } else if let Some(why) = family.reserved(code) {
            found.add(format_args!("{at}.code"), format_args!("option {code} {why}"));
        } else if !codes.insert(code) {
            found.add(
                format_args!("{at}.code"),
                format_args!("option {code} is given twice"),
            );
        }
        let value = match &option.value {
            Some(Value::Text(text)) => Some(text.as_bytes().to_vec()),
            Some(Value::Hex(hex)) => bytes(hex),
            None => Some(Vec::new()),
        };
        match value {
            None => found.add(
                format_args!("{at}.hex"),
                "must be pairs of hexadecimal digits, as in 0a50000a",
            ),
            Some(value) if value.is_empty() => {
                found.add(at, "must have a value: give `text` or `hex`");
            }
            Some(value) => options.push(DhcpOption { code, value }),
        }
    }
    let together: usize = options.iter().map(|option| option.value.len() + 2).sum();
    if together > MAX_OPTION_BYTES {
        let wrong = format_args!(
            "at most {MAX_OPTION_BYTES} bytes together, with 2 bytes for each option, are {together}"
        );
        found.add(field, wrong);
    }
    options
}

/// The bytes of hexadecimal digits.
fn bytes(hex: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<_>> = hex.chars().map(|digit| digit.to_digit(16)).collect();
    let (pairs, rest) = digits.as_deref()?.as_chunks::<2>();
    let byte = |[high, low]: &[u32; 2]| u8::try_from(high << 4 | low).ok();
    rest.is_empty().then(|| pairs.iter().map(byte).collect())?
}

/// Validates routes of a network with these addresses and this mode; `field` is their path.
pub(super) fn routes(
    found: &mut Violations,
    field: &str,
    (subnet, has_ipv6, mode): (Option<Subnet>, bool, NetworkMode),
    wire: &[v1::NetworkRoute],
) -> Vec<Route> {
    if wire.len() > MAX_ROUTES {
        found.add(
            field,
            format_args!("at most {MAX_ROUTES} routes, are {}", wire.len()),
        );
        return Vec::new();
    }
    let mut routes = Vec::<Route>::new();
    for (index, route) in wire.iter().enumerate() {
        let (to_field, via_field) = (format!("{field}[{index}].to"), format!("{field}[{index}].via"));
        let to = match route.to.parse::<Addresses>() {
            Ok(to) if to.prefix == 0 => {
                found.add(
                    to_field,
                    "must have a prefix of at least 1 bit: the default route is the gateway",
                );
                continue;
            }
            Ok(to) => to,
            Err(error) => {
                found.add(to_field, error);
                continue;
            }
        };
        if routes.iter().any(|other| other.to == to) {
            found.add(&to_field, format_args!("{to} is given twice"));
        }
        let is_served = if to.first.is_ipv6() {
            has_ipv6
        } else {
            subnet.is_some()
        };
        if !is_served {
            found.add(&to_field, "must be of a family of addresses that the network has");
        }
        let own = subnet.map(|subnet| Addresses {
            first: subnet.net.first().into(),
            prefix: subnet.net.prefix(),
        });
        if own.is_some_and(|own| own.has(to)) {
            found.add(&to_field, "must not be addresses of the network itself");
        }
        let via = match (route.via.as_str(), to.first.is_ipv6()) {
            ("", _) if mode == NetworkMode::Isolated => {
                let wrong = "must be given in an isolated network: its gateway forwards nothing";
                found.add(via_field, wrong);
                None
            }
            ("", _) => None,
            (_, true) => {
                found.add(
                    via_field,
                    "must be empty for IPv6: the route leads over the gateway",
                );
                None
            }
            (text, false) => {
                let host = |via: &Ipv4Addr| subnet.is_some_and(|subnet| subnet.net.has_host(*via));
                let via = text.parse().ok().filter(host);
                if via.is_none() {
                    found.add(via_field, "must be an IPv4 address of the network");
                }
                via
            }
        };
        routes.push(Route { to, via });
    }
    routes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn option(code: u32, value: Option<Value>) -> v1::DhcpOption {
        v1::DhcpOption { code, value }
    }

    fn text(text: &str) -> Option<Value> {
        Some(Value::Text(text.into()))
    }

    #[test]
    fn options_have_bytes_of_text_or_of_digits() {
        let mut found = Violations::default();
        let wire = [
            option(66, text("tftp")),
            option(43, Some(Value::Hex("0A5f00".into()))),
        ];
        let valid = options(&mut found, "o", Family::V4, &wire);
        let bytes: Vec<_> = valid
            .iter()
            .map(|option| (option.code, option.value.as_slice()))
            .collect();
        assert_eq!(bytes, [(66, &b"tftp"[..]), (43, &[0x0a, 0x5f, 0])]);
        assert!(found.0.is_empty(), "{found}");
    }

    #[test]
    fn invalid_and_reserved_options_are_refused_by_name() {
        for (family, wire, expected) in [
            (
                Family::V4,
                vec![option(0, text("a"))],
                "o[0].code: must be 1 to 254",
            ),
            (Family::V4, vec![option(255, text("a"))], "must be 1 to 254"),
            (Family::V4, vec![option(42, text("a"))], "give `ntpServers`"),
            (Family::V4, vec![option(121, text("a"))], "give `routes`"),
            (Family::V4, vec![option(51, text("a"))], "sent by vmmd itself"),
            (Family::V6, vec![option(23, text("a"))], "give `dnsServers`"),
            (Family::V6, vec![option(65_536, text("a"))], "must be 1 to 65535"),
            (Family::V4, vec![option(66, None)], "give `text` or `hex`"),
            (
                Family::V4,
                vec![option(66, Some(Value::Hex("abc".into())))],
                "o[0].hex: must be pairs",
            ),
            (
                Family::V4,
                vec![option(66, Some(Value::Hex("ä0".into())))],
                "must be pairs",
            ),
            (
                Family::V4,
                vec![option(66, text("a")), option(66, text("b"))],
                "o[1].code: option 66 is given twice",
            ),
            (
                Family::V4,
                vec![option(66, text(&"a".repeat(254)))],
                "at most 255 bytes",
            ),
            (Family::V4, vec![option(66, text("a")); 33], "at most 32 options"),
        ] {
            let mut found = Violations::default();
            options(&mut found, "o", family, &wire);
            assert!(found.to_string().contains(expected), "{expected}: {found}");
        }
    }

    #[test]
    fn routes_lead_over_the_gateway_or_a_host_of_the_network() {
        let subnet = Subnet {
            net: "10.80.0.0/24".parse().unwrap(),
            gateway: [10, 80, 0, 1].into(),
        };
        let checked = |to: &str, via: &str, mode| {
            let mut found = Violations::default();
            let wire = v1::NetworkRoute {
                to: to.into(),
                via: via.into(),
            };
            let routes = routes(&mut found, "r", (Some(subnet), true, mode), &[wire]);
            (routes.first().map(|route| route.via), found.to_string())
        };
        let nat = NetworkMode::Nat;
        let none = String::new;
        assert_eq!(checked("10.90.0.0/16", "", nat), (Some(None), none()));
        assert_eq!(checked("2001:db8::/32", "", nat), (Some(None), none()));
        let via = Some(Some([10, 80, 0, 9].into()));
        assert_eq!(
            checked("10.0.0.0/8", "10.80.0.9", NetworkMode::Isolated),
            (via, none())
        );
        for (to, via, mode, expected) in [
            ("0.0.0.0/0", "", nat, "at least 1 bit"),
            ("10.90.0.1/16", "", nat, "r[0].to: must be an address"),
            ("10.80.0.128/25", "", nat, "addresses of the network itself"),
            (
                "10.90.0.0/16",
                "10.81.0.1",
                nat,
                "r[0].via: must be an IPv4 address",
            ),
            (
                "10.90.0.0/16",
                "",
                NetworkMode::Isolated,
                "must be given in an isolated",
            ),
            ("2001:db8::/32", "fd00::1", nat, "must be empty for IPv6"),
        ] {
            let (_, said) = checked(to, via, mode);
            assert!(said.contains(expected), "{expected}: {said}");
        }
    }
}

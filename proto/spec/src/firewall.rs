//! Validated rules of a NIC's firewall. Ranges are merged, because the packet filter refuses
//! overlapping ranges.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::RangeInclusive,
    str::FromStr,
};

use vmmd_api::v1;

use super::Violations;

/// Most rules of a direction, and most addresses and ranges of ports of a rule.
pub const MAX_RULES: usize = 64;

/// Which connections a guest may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Firewall {
    /// Allowed incoming connections; all if `None`.
    pub ingress: Option<Vec<Rule>>,
    /// Allowed outgoing connections; all if `None`.
    pub egress: Option<Vec<Rule>>,
}

/// A kind of connections that is let through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Addresses of the other side, without nested ranges; all if empty.
    pub addresses: Vec<Addresses>,
    /// Protocol of the connections.
    pub protocol: RuleProtocol,
    /// Ports of the side to which the connection is opened, in order and disjoint; all if empty.
    pub ports: Vec<RangeInclusive<u16>>,
}

/// Protocol of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleProtocol {
    /// Everything.
    Any,
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP.
    Icmp,
}

/// IPv4 or IPv6 addresses with the same first bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Addresses {
    /// The first one.
    pub first: IpAddr,
    /// How many bits are the same, up to 32 or 128.
    pub prefix: u8,
}

/// Why a text says no addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "must be an address, or a range such as 192.0.2.0/24 or 2001:db8::/32 without bits behind its prefix"
)]
pub struct InvalidAddresses;

impl Addresses {
    /// The bits of an address from the highest one of 128 on, and their number.
    fn bits(address: IpAddr) -> (u128, u8) {
        match address {
            IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, 32),
            IpAddr::V6(address) => (address.to_bits(), 128),
        }
    }

    fn mask(prefix: u8) -> u128 {
        u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0)
    }

    /// The last one.
    pub fn last(self) -> IpAddr {
        let (bits, _) = Self::bits(self.first);
        let last = bits | !Self::mask(self.prefix);
        match self.first {
            IpAddr::V4(_) => Ipv4Addr::from_bits(u32::try_from(last >> 96).unwrap_or(u32::MAX)).into(),
            IpAddr::V6(_) => Ipv6Addr::from_bits(last).into(),
        }
    }

    /// Whether it is one address.
    pub fn is_one(self) -> bool {
        self.prefix == Self::bits(self.first).1
    }

    /// Whether an address is in both.
    pub fn overlaps(self, other: Self) -> bool {
        self.has(other) || other.has(self)
    }

    /// Whether all of the other's are its own.
    pub fn has(self, other: Self) -> bool {
        let (own, others) = (Self::bits(self.first), Self::bits(other.first));
        own.1 == others.1 && self.prefix <= other.prefix && others.0 & Self::mask(self.prefix) == own.0
    }
}

impl From<IpAddr> for Addresses {
    fn from(address: IpAddr) -> Self {
        let (_, prefix) = Self::bits(address);
        Self {
            first: address,
            prefix,
        }
    }
}

impl FromStr for Addresses {
    type Err = InvalidAddresses;

    fn from_str(text: &str) -> Result<Self, InvalidAddresses> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let first: IpAddr = address.parse().map_err(|_| InvalidAddresses)?;
        let (bits, length) = Self::bits(first);
        let prefix = prefix.map_or(Ok(length), |prefix| prefix.parse().map_err(|_| InvalidAddresses))?;
        if prefix > length || bits & !Self::mask(prefix) != 0 {
            return Err(InvalidAddresses);
        }
        Ok(Self { first, prefix })
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix)
    }
}

impl Firewall {
    /// Validates `firewall`; `field` is its path.
    pub fn new(found: &mut Violations, field: &str, firewall: &v1::NicFirewall) -> Self {
        let mut side = |name: &str, rules: &Option<v1::NicRules>| {
            let rules = rules.as_ref()?;
            Some(direction(found, &format!("{field}.{name}.allow"), &rules.allow))
        };
        Self {
            ingress: side("ingress", &firewall.ingress),
            egress: side("egress", &firewall.egress),
        }
    }

    /// Whether it lets everything through.
    pub fn is_open(&self) -> bool {
        self.ingress.is_none() && self.egress.is_none()
    }
}

impl From<&Firewall> for v1::NicFirewall {
    fn from(firewall: &Firewall) -> Self {
        let side = |rules: &Option<Vec<Rule>>| {
            let rules = rules.as_ref()?;
            Some(v1::NicRules {
                allow: rules.iter().map(v1::NicRule::from).collect(),
            })
        };
        Self {
            ingress: side(&firewall.ingress),
            egress: side(&firewall.egress),
        }
    }
}

impl From<&Rule> for v1::NicRule {
    fn from(rule: &Rule) -> Self {
        let protocol = match rule.protocol {
            RuleProtocol::Any => v1::RuleProtocol::Unspecified,
            RuleProtocol::Tcp => v1::RuleProtocol::Tcp,
            RuleProtocol::Udp => v1::RuleProtocol::Udp,
            RuleProtocol::Icmp => v1::RuleProtocol::Icmp,
        };
        let range = |ports: &RangeInclusive<u16>| v1::PortRange {
            first: (*ports.start()).into(),
            last: (*ports.end()).into(),
        };
        Self {
            addresses: rule.addresses.iter().map(Addresses::to_string).collect(),
            protocol: protocol.into(),
            ports: rule.ports.iter().map(range).collect(),
        }
    }
}

fn direction(found: &mut Violations, field: &str, rules: &[v1::NicRule]) -> Vec<Rule> {
    if too_many(found, field, rules.len()) {
        return Vec::new();
    }
    let numbered = rules.iter().enumerate();
    numbered
        .map(|(index, wire)| rule(found, &format!("{field}[{index}]"), wire))
        .collect()
}

fn too_many(found: &mut Violations, field: &str, number: usize) -> bool {
    if number > MAX_RULES {
        found.add(field, format_args!("at most {MAX_RULES}, are {number}"));
    }
    number > MAX_RULES
}

/// Validates addresses and ranges, at most [`MAX_RULES`]; `field` is their path. Nested ranges are left out.
pub(super) fn addresses(found: &mut Violations, field: &str, texts: &[String]) -> Vec<Addresses> {
    let mut addresses = Vec::new();
    if !too_many(found, field, texts.len()) {
        for (index, text) in texts.iter().enumerate() {
            match text.parse() {
                Ok(one) => addresses.push(one),
                Err(error) => found.add(format_args!("{field}[{index}]"), error),
            }
        }
    }
    without_nested(&addresses)
}

fn rule(found: &mut Violations, field: &str, wire: &v1::NicRule) -> Rule {
    let addresses = self::addresses(found, &format!("{field}.addresses"), &wire.addresses);
    let protocol = match v1::RuleProtocol::try_from(wire.protocol) {
        Ok(v1::RuleProtocol::Unspecified) => RuleProtocol::Any,
        Ok(v1::RuleProtocol::Tcp) => RuleProtocol::Tcp,
        Ok(v1::RuleProtocol::Udp) => RuleProtocol::Udp,
        Ok(v1::RuleProtocol::Icmp) => RuleProtocol::Icmp,
        Err(_) => {
            found.add(format_args!("{field}.protocol"), "must be TCP, UDP or ICMP");
            RuleProtocol::Any
        }
    };
    if !wire.ports.is_empty() && !matches!(protocol, RuleProtocol::Tcp | RuleProtocol::Udp) {
        found.add(
            format_args!("{field}.ports"),
            "are for a rule with the protocol TCP or UDP",
        );
    }
    let mut ports = Vec::new();
    if !too_many(found, &format!("{field}.ports"), wire.ports.len()) {
        for (index, range) in wire.ports.iter().enumerate() {
            ports.extend(self::ports(found, &format!("{field}.ports[{index}]"), *range));
        }
    }
    Rule {
        addresses,
        protocol,
        ports: merged(ports),
    }
}

fn ports(found: &mut Violations, field: &str, range: v1::PortRange) -> Option<RangeInclusive<u16>> {
    let first = u16::try_from(range.first).ok().filter(|port| *port != 0);
    let last = match range.last {
        0 => first,
        last => u16::try_from(last).ok().filter(|last| Some(*last) >= first),
    };
    let (Some(first), Some(last)) = (first, last) else {
        let wrong = format_args!(
            "must be 1 to 65535, the last one not below the first, are {} to {}",
            range.first, range.last
        );
        found.add(field, wrong);
        return None;
    };
    Some(first..=last)
}

/// Two ranges with the same first bits are apart, or one is in the other.
fn without_nested(all: &[Addresses]) -> Vec<Addresses> {
    let mut kept: Vec<Addresses> = Vec::new();
    for one in all {
        if kept.iter().any(|other| other.has(*one)) {
            continue;
        }
        kept.retain(|other| !one.has(*other));
        kept.push(*one);
    }
    kept
}

/// Merges overlapping and adjacent ranges.
fn merged(mut ranges: Vec<RangeInclusive<u16>>) -> Vec<RangeInclusive<u16>> {
    ranges.sort_by_key(|range| *range.start());
    let mut merged: Vec<RangeInclusive<u16>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if u32::from(*range.start()) <= u32::from(*last.end()) + 1 => {
                *last = *last.start()..=*last.end().max(range.end());
            }
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validated(rule: v1::NicRule) -> Result<Rule, String> {
        let wire = v1::NicFirewall {
            ingress: Some(v1::NicRules { allow: vec![rule] }),
            egress: None,
        };
        let mut found = Violations::default();
        let firewall = Firewall::new(&mut found, "firewall", &wire);
        assert_eq!(firewall.egress, None);
        match found.0.first() {
            Some(violation) => Err(format!("{}: {}", violation.field, violation.description)),
            None => Ok(firewall.ingress.unwrap().remove(0)),
        }
    }

    fn tcp(ports: &[(u32, u32)]) -> v1::NicRule {
        let range = |(first, last): &(u32, u32)| v1::PortRange {
            first: *first,
            last: *last,
        };
        v1::NicRule {
            protocol: v1::RuleProtocol::Tcp.into(),
            ports: ports.iter().map(range).collect(),
            ..v1::NicRule::default()
        }
    }

    fn from(addresses: &[&str]) -> v1::NicRule {
        v1::NicRule {
            addresses: addresses.iter().map(|text| (*text).to_owned()).collect(),
            ..v1::NicRule::default()
        }
    }

    #[test]
    fn ranges_that_overlap_are_one() {
        let ports = |given: &[(u32, u32)]| validated(tcp(given)).unwrap().ports;
        assert_eq!(
            ports(&[(443, 0), (80, 90), (85, 100), (101, 0)]),
            [80..=101, 443..=443]
        );
        assert_eq!(ports(&[(1, 65535), (80, 0)]), [1..=65535]);
        let addresses = |given: &[&str]| {
            let addresses = validated(from(given)).unwrap().addresses;
            addresses.iter().map(Addresses::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            addresses(&["10.1.2.3", "10.0.0.0/8", "192.0.2.0/24", "10.9.0.0/16"]),
            ["10.0.0.0/8", "192.0.2.0/24"]
        );
        assert_eq!(addresses(&["0.0.0.0/0", "10.1.2.3"]), ["0.0.0.0/0"]);
        assert_eq!(
            addresses(&["fd00::/16", "a00::1", "10.0.0.1", "fd00:80::5"]),
            ["fd00::/16", "a00::1/128", "10.0.0.1/32"]
        );
    }

    #[test]
    fn range_ends_with_its_last_address() {
        for (range, last) in [
            ("10.0.0.0/8", "10.255.255.255"),
            ("0.0.0.0/0", "255.255.255.255"),
            ("192.0.2.1", "192.0.2.1"),
            ("fd00:80::/64", "fd00:80::ffff:ffff:ffff:ffff"),
        ] {
            let range: Addresses = range.parse().unwrap();
            assert_eq!(range.last().to_string(), last);
        }
    }

    #[test]
    fn what_was_validated_is_the_same_when_it_is_validated_again() {
        let rule = v1::NicRule {
            addresses: vec!["10.1.2.3".into(), "10.0.0.0/8".into()],
            ..tcp(&[(443, 0), (80, 90), (85, 100)])
        };
        let mut found = Violations::default();
        let wire = v1::NicFirewall {
            ingress: Some(v1::NicRules { allow: vec![rule] }),
            egress: Some(v1::NicRules::default()),
        };
        let firewall = Firewall::new(&mut found, "firewall", &wire);
        let again = Firewall::new(&mut found, "firewall", &v1::NicFirewall::from(&firewall));
        assert_eq!((again.egress.as_deref(), again.is_open()), (Some(&[][..]), false));
        assert_eq!(again, firewall);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_field() {
        let refused = |rule| validated(rule).unwrap_err();
        for wrong in [(0, 0), (0, 80), (80, 79), (70_000, 0), (80, 70_000)] {
            assert!(
                refused(tcp(&[wrong])).starts_with("firewall.ingress.allow[0].ports[0]: must be 1 to 65535")
            );
        }
        for wrong in [
            "10.0.0.1/8",
            "10.0.0.0/33",
            "fd00::1/64",
            "fd00::/129",
            "",
            "10.0.0.0/",
        ] {
            let said = refused(from(&["10.0.0.0/8", wrong]));
            assert!(
                said.starts_with("firewall.ingress.allow[0].addresses[1]: must be an address"),
                "{said}"
            );
        }
        let any = v1::NicRule {
            protocol: 0,
            ..tcp(&[(80, 0)])
        };
        assert!(refused(any).contains("are for a rule with the protocol TCP or UDP"));
        let unknown = v1::NicRule {
            protocol: 9,
            ..v1::NicRule::default()
        };
        assert!(refused(unknown).contains("must be TCP, UDP or ICMP"));
        assert!(refused(from(&["10.0.0.0/8"; 65])).contains("at most 64"));
    }
}

//! The validated form of a network that the node makes.

pub mod dhcp;
pub mod dns;
pub mod group;
pub mod reservation;

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use vmmd_api::v1;

use self::{group::SecurityGroup, reservation::Reservation};
use super::{
    Violations,
    firewall::{self, Addresses},
    metadata::Metadata,
    nic::Mac,
};

/// Shortest and longest prefix of a network.
pub const PREFIXES: std::ops::RangeInclusive<u8> = 16..=30;
/// Most name servers, and most NTP servers, of a network.
pub const MAX_SERVERS: usize = 4;
/// MTUs that a network can have, in bytes. Each host of an IPv4 network takes packets of 576 bytes (RFC 791).
pub const MTUS: std::ops::RangeInclusive<u16> = 576..=9000;

/// Least MTU of a network with IPv6, in bytes (RFC 8200, 5).
pub const LEAST_MTU_OF_IPV6: u16 = 1280;

/// Addresses with the same first bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ipv4Net {
    /// Without the bits behind the prefix.
    address: u32,
    prefix: u8,
}

impl Ipv4Net {
    /// The network's own address, the first one, which is never assigned.
    pub fn first(self) -> Ipv4Addr {
        Ipv4Addr::from(self.address)
    }

    /// The broadcast address, the last one.
    pub fn last(self) -> Ipv4Addr {
        Ipv4Addr::from(self.address | !self.mask_bits())
    }

    /// Bits of the prefix.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// "255.255.255.0"
    pub fn mask(self) -> Ipv4Addr {
        Ipv4Addr::from(self.mask_bits())
    }

    fn mask_bits(self) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0)
    }

    /// Whether the address is one that a host can have.
    pub fn has_host(self, address: Ipv4Addr) -> bool {
        (self.first()..=self.last()).contains(&address) && address != self.first() && address != self.last()
    }

    /// Addresses that hosts can have, in order.
    pub fn hosts(self) -> impl Iterator<Item = Ipv4Addr> {
        (u32::from(self.first()) + 1..u32::from(self.last())).map(Ipv4Addr::from)
    }

    /// Whether an address is in both.
    pub fn overlaps(self, other: Self) -> bool {
        self.first() <= other.last() && other.first() <= self.last()
    }
}

impl fmt::Display for Ipv4Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first(), self.prefix)
    }
}

/// Why a text is no range of addresses for a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be a private range of IPv4 addresses such as 10.80.0.0/24, with a prefix of 16 to 30 bits")]
pub struct InvalidNet;

impl FromStr for Ipv4Net {
    type Err = InvalidNet;

    fn from_str(text: &str) -> Result<Self, InvalidNet> {
        let (address, prefix) = text.split_once('/').ok_or(InvalidNet)?;
        let address: Ipv4Addr = address.parse().map_err(|_| InvalidNet)?;
        let prefix: u8 = prefix.parse().map_err(|_| InvalidNet)?;
        let net = Self {
            address: u32::from(address),
            prefix,
        };
        if !PREFIXES.contains(&prefix) || net.address & !net.mask_bits() != 0 || !address.is_private() {
            return Err(InvalidNet);
        }
        Ok(net)
    }
}

/// An IPv6 prefix of 64 bits, as hosts need that make their addresses by themselves (RFC 4862, RFC 7421).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ipv6Net(u64);

impl Ipv6Net {
    /// Bits of the prefix.
    pub const PREFIX: u8 = 64;

    /// The network that has an address.
    pub const fn around(address: Ipv6Addr) -> Self {
        let [a, b, c, d, e, f, g, h, ..] = address.octets();
        Self(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }

    /// The network's own address, which is never assigned.
    pub fn first(self) -> Ipv6Addr {
        self.with(0)
    }

    /// The node's address.
    pub fn gateway(self) -> Ipv6Addr {
        self.with(1)
    }

    /// The address that a NIC makes itself.
    pub fn of(self, mac: Mac) -> Ipv6Addr {
        self.with(interface_id(mac))
    }

    fn with(self, interface: u64) -> Ipv6Addr {
        Ipv6Addr::from(u128::from(self.0) << 64 | u128::from(interface))
    }
}

/// The address of a NIC on its link (RFC 4291, 2.5.6).
pub fn link_local(mac: Mac) -> Ipv6Addr {
    Ipv6Addr::from(0xfe80_u128 << 112 | u128::from(interface_id(mac)))
}

/// A modified EUI-64 (RFC 4291, appendix A).
fn interface_id(mac: Mac) -> u64 {
    let [a, b, c, d, e, f] = mac.octets();
    u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

impl fmt::Display for Ipv6Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first(), Self::PREFIX)
    }
}

/// Why a text is no IPv6 prefix for a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be a prefix of 64 bits such as fd00:80::/64, unique local or global")]
pub struct InvalidNet6;

impl FromStr for Ipv6Net {
    type Err = InvalidNet6;

    fn from_str(text: &str) -> Result<Self, InvalidNet6> {
        let (address, prefix) = text.split_once('/').ok_or(InvalidNet6)?;
        let address: Ipv6Addr = address.parse().map_err(|_| InvalidNet6)?;
        let bits = u128::from(address);
        // Unique local (RFC 4193), or global unicast as far as it is given out (RFC 4291, 2.4).
        let kind = address.segments()[0];
        let usable = kind & 0xfe00 == 0xfc00 || kind & 0xe000 == 0x2000;
        match (prefix, u64::try_from(bits >> 64)) {
            ("64", Ok(net)) if usable && bits.trailing_zeros() >= 64 => Ok(Self(net)),
            _ => Err(InvalidNet6),
        }
    }
}

/// Who reaches whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NetworkMode {
    /// The outside by the node's address.
    #[default]
    Nat,
    /// Only each other.
    Isolated,
    /// The outside by their own addresses.
    Routed,
}

/// IPv4 addresses of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet {
    /// All of them.
    pub net: Ipv4Net,
    /// The node's own.
    pub gateway: Ipv4Addr,
}

/// Specification of a network. It has IPv4 addresses, or IPv6 addresses, or both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkSpec {
    /// Who reaches whom.
    pub mode: NetworkMode,
    /// Its IPv4 addresses, if it has any.
    pub subnet: Option<Subnet>,
    /// Name servers that are asked for names outside the network; those of the node when empty.
    pub dns: Vec<IpAddr>,
    /// NTP servers announced to VMs.
    pub ntp: Vec<IpAddr>,
    /// One of [`MTUS`].
    pub mtu: u16,
    /// Its IPv6 addresses, if it has any.
    pub net6: Option<Ipv6Net>,
    /// Addresses beyond the node to which VMs open no connections, without nested ranges.
    pub deny: Vec<Addresses>,
    /// Routes of guests besides the default route.
    pub routes: Vec<dhcp::Route>,
    /// Further options of DHCP for IPv4.
    pub dhcp_options: Vec<dhcp::DhcpOption>,
    /// Further options of DHCP for IPv6.
    pub dhcp6_options: Vec<dhcp::DhcpOption>,
    /// Domain of the names of its VMs besides `<network>.internal`.
    pub domain: Option<String>,
    /// Addresses of names; a name of one label is in the domain.
    pub dns_records: BTreeMap<String, Vec<IpAddr>>,
    /// Addresses that no NIC gets without a reason.
    pub reservations: Vec<Reservation>,
    /// Firewalls that NICs share.
    pub security_groups: Vec<SecurityGroup>,
}

/// A network as a client asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewNetwork {
    /// Name and metadata, kept beside the spec.
    pub metadata: Metadata,
    /// What is wanted.
    pub spec: NetworkSpec,
}

impl NetworkSpec {
    /// Validates `spec`; `field` is its path. `None` when it has no addresses.
    pub fn new(found: &mut Violations, field: &str, spec: &v1::NetworkSpec) -> Option<Self> {
        let mode = match spec.mode() {
            v1::NetworkMode::Unspecified if spec.mode != 0 => {
                found.add(format_args!("{field}.mode"), "must be NAT, ISOLATED or ROUTED");
                NetworkMode::Nat
            }
            v1::NetworkMode::Unspecified | v1::NetworkMode::Nat => NetworkMode::Nat,
            v1::NetworkMode::Isolated => NetworkMode::Isolated,
            v1::NetworkMode::Routed => NetworkMode::Routed,
        };
        let dns = servers(found, &format!("{field}.dnsServers"), &spec.dns_servers);
        let ntp = servers(found, &format!("{field}.ntpServers"), &spec.ntp_servers);
        let mtu = match spec.mtu {
            0 => 1500,
            mtu => u16::try_from(mtu).unwrap_or(0),
        };
        if !MTUS.contains(&mtu) {
            let (least, most) = (MTUS.start(), MTUS.end());
            let wrong = format_args!(
                "must be {least} to {most} bytes, or 0 for that of the node's default route, is {}",
                spec.mtu
            );
            found.add(format_args!("{field}.mtu"), wrong);
        }
        let net6 = match spec.ipv6_cidr.as_str() {
            "" => None,
            text => {
                let net6 = text.parse::<Ipv6Net>();
                net6.map_err(|error| found.add(format_args!("{field}.ipv6Cidr"), error))
                    .ok()
            }
        };
        if net6.is_some() && mtu < LEAST_MTU_OF_IPV6 {
            let wrong = format_args!("must be at least {LEAST_MTU_OF_IPV6} bytes with IPv6, is {mtu}");
            found.add(format_args!("{field}.mtu"), wrong);
        }
        if spec.ipv4_cidr.is_empty() && spec.ipv6_cidr.is_empty() {
            let missing = "must be given, as 10.80.0.0/24, or `ipv6Cidr`, as fd00:80::/64, or both";
            found.add(format_args!("{field}.ipv4Cidr"), missing);
        }
        let subnet = subnet(found, field, spec);
        let deny = firewall::addresses(found, &format!("{field}.deny"), &spec.deny);
        let served = (subnet, net6.is_some(), mode);
        let routes = dhcp::routes(found, &format!("{field}.routes"), served, &spec.routes);
        let mut options =
            |name: &str, family, wire| dhcp::options(found, &format!("{field}.{name}"), family, wire);
        let dhcp_options = options("dhcpOptions", dhcp::Family::V4, &spec.dhcp_options);
        let dhcp6_options = options("dhcp6Options", dhcp::Family::V6, &spec.dhcp6_options);
        let domain = dns::domain(found, &format!("{field}.domain"), &spec.domain);
        let dns_records = dns::records(found, &format!("{field}.dnsRecords"), &spec.dns_records);
        let reservations = reservation::reservations(
            found,
            &format!("{field}.reservations"),
            (subnet, net6.is_some()),
            &spec.reservations,
        );
        let security_groups = group::groups(found, &format!("{field}.securityGroups"), &spec.security_groups);
        (subnet.is_some() || net6.is_some()).then_some(Self {
            mode,
            subnet,
            dns,
            ntp,
            mtu,
            net6,
            deny,
            routes,
            dhcp_options,
            dhcp6_options,
            domain,
            dns_records,
            reservations,
            security_groups,
        })
    }
}

fn subnet(found: &mut Violations, field: &str, spec: &v1::NetworkSpec) -> Option<Subnet> {
    if spec.ipv4_cidr.is_empty() {
        if !spec.ipv4_gateway.is_empty() {
            found.add(
                format_args!("{field}.ipv4Gateway"),
                "is for a network with `ipv4Cidr`",
            );
        }
        return None;
    }
    let net = spec.ipv4_cidr.parse::<Ipv4Net>();
    let net = net
        .map_err(|error| found.add(format_args!("{field}.ipv4Cidr"), error))
        .ok()?;
    let gateway = match spec.ipv4_gateway.as_str() {
        "" => net.hosts().next(),
        text => text.parse().ok().filter(|address| net.has_host(*address)),
    };
    if gateway.is_none() {
        let wrong = format_args!("must be an address of a host in {net}");
        found.add(format_args!("{field}.ipv4Gateway"), wrong);
    }
    Some(Subnet {
        net,
        gateway: gateway.unwrap_or(net.first()),
    })
}

/// Addresses of servers.
fn servers(found: &mut Violations, field: &str, texts: &[String]) -> Vec<IpAddr> {
    if texts.len() > MAX_SERVERS {
        found.add(field, format_args!("at most {MAX_SERVERS}, are {}", texts.len()));
        return Vec::new();
    }
    let numbered = texts.iter().enumerate();
    let parsed = numbered.filter_map(|(index, text)| {
        let address = text.parse().ok();
        if address.is_none() {
            found.add(format_args!("{field}[{index}]"), "must be an IP address");
        }
        address
    });
    parsed.collect()
}

impl TryFrom<&v1::Network> for NewNetwork {
    type Error = Violations;

    fn try_from(network: &v1::Network) -> Result<Self, Violations> {
        let mut found = Violations::default();
        let metadata = network.metadata.clone().unwrap_or_default();
        super::metadata::refuse_given(&mut found, "network.metadata", &metadata);
        if network.status.is_some() {
            found.add("network.status", "is set by the daemon: leave it out");
        }
        let metadata = Metadata::new(&mut found, "network.metadata", &metadata);
        let spec = network.spec.clone().unwrap_or_default();
        let spec = NetworkSpec::new(&mut found, "network.spec", &spec);
        match (metadata, spec) {
            (Some(metadata), Some(spec)) => found.or(Self { metadata, spec }),
            _ => Err(found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_hosts_between_its_first_and_last_address() {
        let net: Ipv4Net = "10.80.0.0/30".parse().unwrap();
        let hosts: Vec<_> = net.hosts().map(|host| host.to_string()).collect();
        assert_eq!(hosts, ["10.80.0.1", "10.80.0.2"]);
        assert_eq!(
            (net.last(), net.mask().to_string().as_str()),
            ([10, 80, 0, 3].into(), "255.255.255.252")
        );
        assert!(
            !net.has_host(net.first()) && !net.has_host(net.last()) && net.has_host([10, 80, 0, 2].into())
        );
        let other = |text: &str| text.parse::<Ipv4Net>().unwrap();
        assert!(net.overlaps(other("10.80.0.0/16")) && !net.overlaps(other("10.80.0.4/30")));
    }

    #[test]
    fn what_is_no_private_range_is_refused() {
        for text in [
            "",
            "10.0.0.0",
            "10.0.0.1/24",
            "8.8.8.0/24",
            "10.0.0.0/8",
            "10.0.0.0/31",
            "fd00::/64",
        ] {
            assert_eq!(text.parse::<Ipv4Net>(), Err(InvalidNet), "{text}");
        }
    }

    #[test]
    fn all_problems_of_a_network_are_named() {
        let network = v1::Network {
            metadata: Some(v1::ObjectMetadata {
                name: "No".into(),
                uid: "1".into(),
                ..v1::ObjectMetadata::default()
            }),
            spec: Some(v1::NetworkSpec {
                mode: 9,
                ipv4_cidr: "10.80.0.0/24".into(),
                ipv4_gateway: "10.81.0.1".into(),
                dns_servers: vec!["dns".into()],
                mtu: 100,
                ..v1::NetworkSpec::default()
            }),
            status: None,
        };
        let problems = NewNetwork::try_from(&network).unwrap_err().to_string();
        for field in [
            "metadata.name",
            "metadata.uid",
            "spec.mode",
            "ipv4Gateway",
            "dnsServers[0]",
            "spec.mtu",
        ] {
            assert!(problems.contains(field), "{field}: {problems}");
        }
    }

    #[test]
    fn network_has_addresses_of_at_least_one_family() {
        let validated = |ipv4: &str, gateway: &str, ipv6: &str| {
            let mut found = Violations::default();
            let wire = v1::NetworkSpec {
                ipv4_cidr: ipv4.into(),
                ipv4_gateway: gateway.into(),
                ipv6_cidr: ipv6.into(),
                dns_servers: vec!["2001:db8::53".into()],
                ..v1::NetworkSpec::default()
            };
            let spec = NetworkSpec::new(&mut found, "spec", &wire);
            (spec.map(|spec| spec.subnet.is_some()), found.to_string())
        };
        assert_eq!(validated("", "", "fd00:80::/64"), (Some(false), String::new()));
        assert_eq!(validated("10.80.0.0/24", "", ""), (Some(true), String::new()));
        let (none, said) = validated("", "", "");
        assert!(
            none.is_none() && said.contains("spec.ipv4Cidr: must be given"),
            "{said}"
        );
        let (_, said) = validated("", "10.80.0.1", "fd00:80::/64");
        assert!(said.contains("spec.ipv4Gateway: is for a network with"), "{said}");
    }

    #[test]
    fn an_ipv6_prefix_has_addresses_by_mac() {
        let net: Ipv6Net = "fd00:80::/64".parse().unwrap();
        let mac: Mac = "52:54:00:12:34:56".parse().unwrap();
        assert_eq!(
            [net.first(), net.gateway(), net.of(mac), link_local(mac)].map(|address| address.to_string()),
            [
                "fd00:80::",
                "fd00:80::1",
                "fd00:80::5054:ff:fe12:3456",
                "fe80::5054:ff:fe12:3456"
            ]
        );
        assert_eq!(net.to_string(), "fd00:80::/64");
        assert!("2001:db8:1:2::/64".parse::<Ipv6Net>().is_ok());
        for text in [
            "",
            "fd00::1/64",
            "fd00::/63",
            "fd00::/128",
            "fe80::/64",
            "ff02::/64",
            "::/64",
            "10.80.0.0/24",
        ] {
            assert_eq!(text.parse::<Ipv6Net>(), Err(InvalidNet6), "{text}");
        }
    }
}

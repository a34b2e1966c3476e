//! Properties of NICs: MAC addresses, queues, offloads.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    ops::RangeInclusive,
    str::FromStr,
};

use vmmd_api::v1;

use super::{
    Violations,
    firewall::{Addresses, Firewall},
    name::Name,
    network::group,
    subnet,
};

/// Most pairs of queues of a NIC.
pub const MAX_QUEUES: usize = 16;
/// Most pairs of queues of all NICs of a VM together: each has a descriptor and a thread.
pub const MAX_QUEUES_TOGETHER: usize = 128;
/// Least MTU in bytes (virtio 1.3, 5.1.4.1).
pub const MIN_MTU: u16 = 68;

/// Offloads of a NIC that are switched off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicSwitches {
    /// Checksums, and with them all segmentation.
    pub checksum: bool,
    /// Segmentation of TCP.
    pub tso: bool,
    /// Segmentation of UDP.
    pub uso: bool,
    /// Packets in several receive buffers.
    pub merge: bool,
}

impl NicSwitches {
    /// Validates `disabled` ([`v1::NicOffload`]); `field` is the NIC's path.
    pub(super) fn new(found: &mut Violations, field: &str, disabled: &[i32]) -> Self {
        let mut without = Self::default();
        for (index, value) in disabled.iter().enumerate() {
            let switch = match v1::NicOffload::try_from(*value) {
                Ok(v1::NicOffload::Checksum) => &mut without.checksum,
                Ok(v1::NicOffload::TcpSegmentation) => &mut without.tso,
                Ok(v1::NicOffload::UdpSegmentation) => &mut without.uso,
                Ok(v1::NicOffload::MergeableBuffers) => &mut without.merge,
                Ok(v1::NicOffload::Unspecified) | Err(_) => {
                    found.add(
                        format_args!("{field}.disabledOffloads[{index}]"),
                        "must be CHECKSUM, TCP_SEGMENTATION, UDP_SEGMENTATION or MERGEABLE_BUFFERS",
                    );
                    continue;
                }
            };
            *switch = true;
        }
        without
    }
}

/// Validates a NIC's backend; `field` is the NIC's path. True for vhost-net.
pub(super) fn vhost(found: &mut Violations, field: &str, backend: i32) -> bool {
    match v1::NicBackend::try_from(backend) {
        Ok(v1::NicBackend::Vhost) => true,
        Ok(v1::NicBackend::Unspecified | v1::NicBackend::Userspace) => false,
        Err(_) => {
            found.add(format_args!("{field}.backend"), "must be USERSPACE or VHOST");
            false
        }
    }
}

/// Protocol of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// The address that a NIC is to have in its network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NicAddress {
    /// This one.
    Ip(Ipv4Addr),
    /// That of the network's reservation with this name.
    Reserved(Name),
}

impl fmt::Display for NicAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => write!(f, "{address}"),
            Self::Reserved(name) => write!(f, "\"{name}\""),
        }
    }
}

/// A port of the node that leads to a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedPort {
    /// Protocol of both ports.
    pub protocol: Protocol,
    /// Port of the node, not 0.
    pub node_port: u16,
    /// Port of the guest, not 0.
    pub guest_port: u16,
    /// The node's address that the port is of; all when there is none.
    pub address: Option<IpAddr>,
}

impl PublishedPort {
    /// The port of the node, in words.
    pub fn of_node(&self) -> String {
        let protocol = match self.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        match self.address {
            Some(address) => format!("{}/{protocol}", SocketAddr::new(address, self.node_port)),
            None => format!("{}/{protocol}", self.node_port),
        }
    }
}

/// Most ports of the node that lead to a NIC.
pub const MAX_PORTS: usize = 256;

/// Ports from "80" or "8000-8010"; none of them is 0.
pub fn port_range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = first.parse().ok()?..=last.parse().ok()?;
    (*range.start() != 0 && !range.is_empty()).then_some(range)
}

/// The part of a NIC in a network of the node that changes while its VM runs: the connections that it may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Ports of the node that lead to the guest, at most [`MAX_PORTS`].
    pub ports: Vec<PublishedPort>,
    /// Connections that the guest may have.
    pub firewall: Firewall,
    /// Subnets behind the guest, disjoint, at most [`MAX_SUBNETS`](subnet::MAX_SUBNETS).
    pub subnets: Vec<Addresses>,
    /// Floating addresses, different ones, at most [`MAX_FLOATING`](subnet::MAX_FLOATING).
    pub floating: Vec<IpAddr>,
    /// Security groups of the network, whose connections the guest may have, too.
    pub groups: Vec<Name>,
}

/// Validates the fields of a NIC in a network of the node; `field` is its path.
pub(super) fn in_network(
    found: &mut Violations,
    field: &str,
    nic: &v1::NicSpec,
) -> (Option<NicAddress>, Access) {
    let firewall = nic.firewall.clone().unwrap_or_default();
    let firewall = Firewall::new(found, &format!("{field}.firewall"), &firewall);
    let subnets = subnet::subnets(found, &format!("{field}.routedSubnets"), &nic.routed_subnets);
    let floating = subnet::floating(
        found,
        &format!("{field}.floatingAddresses"),
        &nic.floating_addresses,
    );
    let groups = group::names(found, &format!("{field}.securityGroups"), &nic.security_groups);
    let address = match nic.address.as_str() {
        "" => None,
        text => {
            let address = text.parse().map(NicAddress::Ip).ok();
            let address = address.or_else(|| Name::try_from(text).map(NicAddress::Reserved).ok());
            if address.is_none() {
                let wrong = "must be an IPv4 address, or the name of a reservation of the network";
                found.add(format_args!("{field}.address"), wrong);
            }
            address
        }
    };
    let length = |port: &v1::PublishedPort| u64::from(port.last_node_port.saturating_sub(port.node_port)) + 1;
    let together: u64 = nic.published_ports.iter().map(length).sum();
    if together > MAX_PORTS as u64 {
        let wrong = format_args!("at most {MAX_PORTS} ports, are {together}");
        found.add(format_args!("{field}.publishedPorts"), wrong);
        return (address, Access::default());
    }
    let numbered = nic.published_ports.iter().enumerate();
    let ports = numbered
        .flat_map(|(index, port)| published(found, &format!("{field}.publishedPorts[{index}]"), port));
    let access = Access {
        ports: ports.collect(),
        firewall,
        subnets,
        floating,
        groups,
    };
    (address, access)
}

/// Each port of an entry.
fn published(found: &mut Violations, field: &str, wire: &v1::PublishedPort) -> Vec<PublishedPort> {
    let mut port = |name: &str, value: u32| {
        let port = u16::try_from(value).unwrap_or(0);
        if port == 0 {
            let wrong = format_args!("must be 1 to 65535, is {value}");
            found.add(format_args!("{field}.{name}"), wrong);
        }
        port
    };
    let node_port = port("nodePort", wire.node_port);
    let guest_port = match wire.guest_port {
        0 => node_port,
        guest => port("guestPort", guest),
    };
    let protocol = match wire.protocol() {
        v1::PortProtocol::Udp => Protocol::Udp,
        v1::PortProtocol::Unspecified if wire.protocol != 0 => {
            found.add(format_args!("{field}.protocol"), "must be TCP or UDP");
            Protocol::Tcp
        }
        v1::PortProtocol::Unspecified | v1::PortProtocol::Tcp => Protocol::Tcp,
    };
    let address = match wire.address.as_str() {
        "" => None,
        text => {
            let address = text.parse().ok();
            let address = address.filter(|address: &IpAddr| {
                !address.is_loopback() && !address.is_unspecified() && !address.is_multicast()
            });
            if address.is_none() {
                let wrong = "must be an address of the node, and not one of its loopback interface; all addresses when empty";
                found.add(format_args!("{field}.address"), wrong);
            }
            address
        }
    };
    let last = match wire.last_node_port {
        0 => node_port,
        last => u16::try_from(last).unwrap_or(0),
    };
    let more = last.checked_sub(node_port);
    let Some(more) = more.filter(|more| guest_port.checked_add(*more).is_some()) else {
        let wrong = format_args!(
            "must be {} to 65535, and leave the guest's ports below 65536, is {}",
            wire.node_port, wire.last_node_port
        );
        found.add(format_args!("{field}.lastNodePort"), wrong);
        return Vec::new();
    };
    let ports = (0..=more).map(|number| PublishedPort {
        protocol,
        node_port: node_port.saturating_add(number),
        guest_port: guest_port.saturating_add(number),
        address,
    });
    ports.collect()
}

/// Records violations for fields that are only valid for a NIC in a network of the node.
pub(super) fn refuse_in_network(found: &mut Violations, field: &str, nic: &v1::NicSpec) {
    for (name, given) in [
        ("address", !nic.address.is_empty()),
        ("publishedPorts", !nic.published_ports.is_empty()),
        ("firewall", nic.firewall.is_some()),
        ("routedSubnets", !nic.routed_subnets.is_empty()),
        ("floatingAddresses", !nic.floating_addresses.is_empty()),
        ("securityGroups", !nic.security_groups.is_empty()),
        ("metadata", nic.metadata),
    ] {
        if given {
            found.add(format_args!("{field}.{name}"), "is for a NIC with a `network`");
        }
    }
}

/// Numbers of VLANs (IEEE 802.1Q-2022, 9.6).
pub const VLANS: RangeInclusive<u16> = 1..=4094;

/// Validates the fields of a NIC on a bridge; `field` is its path.
pub(super) fn on_bridge(found: &mut Violations, field: &str, nic: &v1::NicSpec) -> (Option<u16>, bool) {
    let is_on_bridge = matches!(&nic.attachment, Some(v1::nic_spec::Attachment::Bridge(_)));
    for (name, given) in [("vlan", nic.vlan != 0), ("macFilter", nic.mac_filter)] {
        if given && !is_on_bridge {
            found.add(format_args!("{field}.{name}"), "is for a NIC with a `bridge`");
        }
    }
    let vlan = match nic.vlan {
        0 => None,
        wanted => {
            let vlan = u16::try_from(wanted).ok().filter(|vlan| VLANS.contains(vlan));
            if vlan.is_none() {
                let wrong = format_args!("must be {} to {}, is {wanted}", VLANS.start(), VLANS.end());
                found.add(format_args!("{field}.vlan"), wrong);
            }
            vlan
        }
    };
    (vlan, nic.mac_filter)
}

/// Validates a number of queues; `field` is the NIC's path.
pub(super) fn queues(found: &mut Violations, field: &str, wanted: u32) -> u16 {
    let number = u16::try_from(wanted.max(1)).unwrap_or(u16::MAX);
    if usize::from(number) > MAX_QUEUES {
        let wrong = format_args!("must be 1 to {MAX_QUEUES}, or 0 for one, is {wanted}");
        found.add(format_args!("{field}.queues"), wrong);
        return 1;
    }
    number
}

/// Validates an MTU; `field` is the NIC's path.
pub(super) fn mtu(found: &mut Violations, field: &str, wanted: u32) -> Option<u16> {
    if wanted == 0 {
        return None;
    }
    let mtu = u16::try_from(wanted).ok().filter(|mtu| *mtu >= MIN_MTU);
    if mtu.is_none() {
        let wrong = format_args!(
            "must be {MIN_MTU} to 65535 bytes, or 0 for that of what it is attached to, is {wanted}"
        );
        found.add(format_args!("{field}.mtu"), wrong);
    }
    mtu
}

/// A unicast Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac([u8; 6]);

/// An address that a NIC can't have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be a unicast MAC address such as 52:54:00:12:34:56")]
pub struct InvalidMac;

impl Mac {
    /// The six bytes as on the wire.
    pub fn octets(self) -> [u8; 6] {
        self.0
    }

    /// A locally administered unicast address with these random bits. Its first byte is never `fe`, which those of taps begin with.
    pub fn local(random: [u8; 6]) -> Self {
        let [first, rest @ ..] = random;
        let first = match (first & 0xfc) | 0x02 {
            0xfe => 0xf6,
            first => first,
        };
        Self([first, rest[0], rest[1], rest[2], rest[3], rest[4]])
    }
}

impl TryFrom<[u8; 6]> for Mac {
    type Error = InvalidMac;

    fn try_from(octets: [u8; 6]) -> Result<Self, InvalidMac> {
        let multicast = octets[0] & 1 != 0;
        if multicast || octets == [0; 6] {
            Err(InvalidMac)
        } else {
            Ok(Self(octets))
        }
    }
}

impl FromStr for Mac {
    type Err = InvalidMac;

    fn from_str(text: &str) -> Result<Self, InvalidMac> {
        let mut octets = [0; 6];
        let mut parts = text.split(':');
        for octet in &mut octets {
            let part = parts.next().filter(|part| part.len() == 2).ok_or(InvalidMac)?;
            if !part.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(InvalidMac);
            }
            *octet = u8::from_str_radix(part, 16).map_err(|_| InvalidMac)?;
        }
        if parts.next().is_some() {
            Err(InvalidMac)
        } else {
            Self::try_from(octets)
        }
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vlan_and_filter_are_for_nics_on_bridges() {
        let checked = |attachment, vlan| {
            let mut found = Violations::default();
            let nic = v1::NicSpec {
                attachment: Some(attachment),
                vlan,
                mac_filter: true,
                ..v1::NicSpec::default()
            };
            (on_bridge(&mut found, "nic", &nic), found.to_string())
        };
        let bridge = || v1::nic_spec::Attachment::Bridge("br0".into());
        let none = String::new;
        assert_eq!(checked(bridge(), 4094), ((Some(4094), true), none()));
        assert_eq!(checked(bridge(), 0), ((None, true), none()));
        let (_, said) = checked(bridge(), 4095);
        assert!(said.contains("nic.vlan: must be 1 to 4094, is 4095"), "{said}");
        let (_, said) = checked(v1::nic_spec::Attachment::Network("lan".into()), 5);
        for field in ["nic.vlan: is for", "nic.macFilter: is for"] {
            assert!(said.contains(field), "{said}");
        }
    }

    fn validated(port: v1::PublishedPort) -> Result<Vec<String>, String> {
        let mut found = Violations::default();
        let nic = v1::NicSpec {
            published_ports: vec![port],
            ..v1::NicSpec::default()
        };
        let (_, Access { ports, .. }) = in_network(&mut found, "nic", &nic);
        match found.0.first() {
            Some(violation) => Err(format!("{}: {}", violation.field, violation.description)),
            None => Ok(ports
                .iter()
                .map(|port| format!("{}:{}", port.of_node(), port.guest_port))
                .collect()),
        }
    }

    fn range(node_port: u32, last_node_port: u32, guest_port: u32) -> v1::PublishedPort {
        v1::PublishedPort {
            node_port,
            last_node_port,
            guest_port,
            ..v1::PublishedPort::default()
        }
    }

    #[test]
    fn range_of_ports_is_its_ports() {
        assert_eq!(validated(range(80, 0, 0)).unwrap(), ["80/tcp:80"]);
        assert_eq!(
            validated(range(8000, 8002, 80)).unwrap(),
            ["8000/tcp:80", "8001/tcp:81", "8002/tcp:82"]
        );
        let bound = v1::PublishedPort {
            address: "2001:db8::1".into(),
            protocol: v1::PortProtocol::Udp.into(),
            ..range(53, 0, 0)
        };
        assert_eq!(validated(bound).unwrap(), ["[2001:db8::1]:53/udp:53"]);
    }

    #[test]
    fn wrong_ports_are_refused_with_their_field() {
        for (port, expected) in [
            (
                range(8000, 7999, 0),
                "nic.publishedPorts[0].lastNodePort: must be 8000",
            ),
            (range(8000, 8001, 65_535), "nic.publishedPorts[0].lastNodePort"),
            (range(8000, 70_000, 0), "nic.publishedPorts: at most 256 ports"),
            (
                range(8000, 8256, 0),
                "nic.publishedPorts: at most 256 ports, are 257",
            ),
            (range(0, 0, 0), "nic.publishedPorts[0].nodePort: must be 1"),
        ] {
            let said = validated(port).unwrap_err();
            assert!(said.starts_with(expected), "{said}");
        }
        for address in ["127.0.0.1", "::1", "0.0.0.0", "ff02::1", "node"] {
            let bound = v1::PublishedPort {
                address: address.into(),
                ..range(80, 0, 0)
            };
            let said = validated(bound).unwrap_err();
            assert!(
                said.starts_with("nic.publishedPorts[0].address: must be"),
                "{said}"
            );
        }
    }

    #[test]
    fn range_is_one_port_or_two() {
        assert_eq!(port_range("80"), Some(80..=80));
        assert_eq!(port_range("8000-8010"), Some(8000..=8010));
        for wrong in ["", "0", "0-80", "81-80", "80-", "80-70000", "all"] {
            assert_eq!(port_range(wrong), None, "{wrong}");
        }
    }
}

//! Properties of NICs: MAC addresses, queues, offloads.

use std::{fmt, net::Ipv4Addr, str::FromStr};

use vmmd_api::v1;

use super::{Violations, firewall::Firewall};

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

/// A port of the node that leads to a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedPort {
    /// Protocol of both ports.
    pub protocol: Protocol,
    /// Port of the node, not 0.
    pub node_port: u16,
    /// Port of the guest, not 0.
    pub guest_port: u16,
}

impl PublishedPort {
    /// The port of the node, in words.
    pub fn of_node(&self) -> String {
        let protocol = match self.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        format!("{}/{protocol}", self.node_port)
    }
}

/// Most ports of the node that lead to a NIC.
pub const MAX_PORTS: usize = 64;

/// Validates the fields of a NIC in a network of the node; `field` is its path.
pub(super) fn in_network(
    found: &mut Violations,
    field: &str,
    nic: &v1::NicSpec,
) -> (Option<Ipv4Addr>, Vec<PublishedPort>, Firewall) {
    let firewall = nic.firewall.clone().unwrap_or_default();
    let firewall = Firewall::new(found, &format!("{field}.firewall"), &firewall);
    let address = match nic.address.as_str() {
        "" => None,
        text => {
            let address = text.parse().ok();
            if address.is_none() {
                found.add(format_args!("{field}.address"), "must be an IPv4 address");
            }
            address
        }
    };
    if nic.published_ports.len() > MAX_PORTS {
        let wrong = format_args!("at most {MAX_PORTS}, are {}", nic.published_ports.len());
        found.add(format_args!("{field}.publishedPorts"), wrong);
        return (address, Vec::new(), firewall);
    }
    let numbered = nic.published_ports.iter().enumerate();
    let ports =
        numbered.map(|(index, port)| published(found, &format!("{field}.publishedPorts[{index}]"), port));
    (address, ports.collect(), firewall)
}

fn published(found: &mut Violations, field: &str, wire: &v1::PublishedPort) -> PublishedPort {
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
    PublishedPort {
        protocol,
        node_port,
        guest_port,
    }
}

/// Records violations for fields that are only valid for a NIC in a network of the node.
pub(super) fn refuse_in_network(found: &mut Violations, field: &str, nic: &v1::NicSpec) {
    for (name, given) in [
        ("address", !nic.address.is_empty()),
        ("publishedPorts", !nic.published_ports.is_empty()),
        ("firewall", nic.firewall.is_some()),
    ] {
        if given {
            found.add(format_args!("{field}.{name}"), "is for a NIC with a `network`");
        }
    }
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

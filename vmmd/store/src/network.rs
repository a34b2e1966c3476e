//! Leases and ports of managed networks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use vmmd_spec::nic::{Mac, Protocol, PublishedPort};

use crate::{LeaseRecord, PortRecord};

/// How long an address stays with its NIC after its release by default, and how long no NIC gets a declined address, in milliseconds.
pub const LEASE_RETENTION_MS: u64 = 10 * 60 * 1000;

impl LeaseRecord {
    /// The IPv4 address, in a network that has some.
    pub fn ip(&self) -> Option<Ipv4Addr> {
        (self.address != 0).then(|| Ipv4Addr::from(self.address))
    }

    /// Whether the lease means anything at `now_ms`. One that was released far in the future was released while the clock was wrong, and does not
    /// keep its address until then.
    pub fn counts(&self, now_ms: u64) -> bool {
        let retention = self.retention_ms.unwrap_or(LEASE_RETENTION_MS);
        self.released_ms == 0 || now_ms.abs_diff(self.released_ms) < retention
    }

    /// Notes that the NIC is gone at `now_ms`. Its address stays reserved for `retention_ms`.
    pub fn release(&mut self, now_ms: u64, retention_ms: u64) {
        (self.released_ms, self.retention_ms) = (now_ms, Some(retention_ms));
        self.floating.clear();
    }

    /// Whether it is that NIC's: a declined address that was replaced is no NIC's.
    pub fn is_of(&self, vm: &[u8], nic: &str) -> bool {
        self.vm == vm && self.nic == nic && !self.is_replaced()
    }

    /// Whether the guest has declined the address, and another one has replaced it.
    pub fn is_replaced(&self) -> bool {
        self.declined_ms != 0 && self.released_ms != 0
    }

    /// Whether the guest has declined an address of the lease lately.
    pub fn is_declined(&self, now_ms: u64) -> bool {
        self.declined_ms != 0 && now_ms.abs_diff(self.declined_ms) < LEASE_RETENTION_MS
    }

    /// The NIC's MAC address.
    pub fn mac(&self) -> Option<Mac> {
        let octets: [u8; 6] = self.mac.as_slice().try_into().ok()?;
        Mac::try_from(octets).ok()
    }
}

impl From<&PublishedPort> for PortRecord {
    fn from(port: &PublishedPort) -> Self {
        let bits = port.address.map_or(0, |address| match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
            IpAddr::V6(address) => address.to_bits(),
        });
        let half = |bits: u128| u64::try_from(bits & u128::from(u64::MAX)).unwrap_or_default();
        Self {
            address_high: half(bits >> 64),
            address_low: half(bits),
            udp: port.protocol == Protocol::Udp,
            node_port: port.node_port.into(),
            guest_port: port.guest_port.into(),
        }
    }
}

impl PortRecord {
    /// The port as specs have it; `None` for numbers that are no ports.
    pub fn valid(&self) -> Option<PublishedPort> {
        Some(PublishedPort {
            protocol: if self.udp { Protocol::Udp } else { Protocol::Tcp },
            node_port: u16::try_from(self.node_port).ok()?,
            guest_port: u16::try_from(self.guest_port).ok()?,
            address: self.address(),
        })
    }

    /// The node's address that the port is of; all when there is none.
    pub fn address(&self) -> Option<IpAddr> {
        let bits = u128::from(self.address_high) << 64 | u128::from(self.address_low);
        (bits != 0).then(|| IpAddr::from(Ipv6Addr::from_bits(bits)).to_canonical())
    }

    /// Whether both are a port of the node at one of its addresses.
    pub fn overlaps(&self, other: &Self) -> bool {
        let addresses = self.address().zip(other.address());
        (self.udp, self.node_port) == (other.udp, other.node_port)
            && addresses.is_none_or(|(own, other)| own == other)
    }
}

//! Records of managed networks, with their leases and ports.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use vmmd_spec::nic::{Mac, Protocol, PublishedPort};

use crate::RequestMark;

/// How long an address stays with its NIC after its release by default, and how long no NIC gets a declined address, in milliseconds.
pub const LEASE_RETENTION_MS: u64 = 10 * 60 * 1000;

/// A network of the NetworkService.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NetworkRecord {
    /// UUID, 16 bytes; also the record's key. The names of the network's parts on the node derive
    /// from it.
    #[prost(bytes = "vec", tag = "1")]
    pub uid: Vec<u8>,
    /// Unique among the node's networks.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Unix time in milliseconds.
    #[prost(uint64, tag = "3")]
    pub created_ms: u64,
    /// As in the request.
    #[prost(btree_map = "string, string", tag = "4")]
    pub labels: BTreeMap<String, String>,
    /// As in the request.
    #[prost(btree_map = "string, string", tag = "5")]
    pub annotations: BTreeMap<String, String>,
    /// As in the request.
    #[prost(string, tag = "6")]
    pub owner: String,
    /// As in the request; it is valid.
    #[prost(message, optional, tag = "7")]
    pub spec: Option<vmmd_api::v1::NetworkSpec>,
    /// Addresses that NICs have or had lately, in order.
    #[prost(message, repeated, tag = "8")]
    pub leases: Vec<LeaseRecord>,
    /// It is being deleted: to clients it is gone.
    #[prost(bool, tag = "9")]
    pub leaving: bool,
    /// Counts changes by clients; 0 in what daemons before generations of networks wrote, which is 1.
    #[prost(uint64, tag = "10")]
    pub generation: u64,
    /// Run of the daemon that made it; 0 when not known.
    #[prost(uint64, tag = "11")]
    pub made_run: u64,
    /// Revision in that run at its creation.
    #[prost(uint64, tag = "12")]
    pub made_revision: u64,
    /// MTU in bytes when the spec does not set it; 0 for 1,500.
    #[prost(uint32, tag = "13")]
    pub mtu: u32,
    /// As of a VM.
    #[prost(message, repeated, tag = "20")]
    pub begun: Vec<RequestMark>,
}

/// An address of a NIC.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LeaseRecord {
    /// IPv4; 0 in a network without such addresses.
    #[prost(fixed32, tag = "1")]
    pub address: u32,
    /// UUID of the VM.
    #[prost(bytes = "vec", tag = "2")]
    pub vm: Vec<u8>,
    /// Its name.
    #[prost(string, tag = "3")]
    pub vm_name: String,
    /// The NIC's name in the VM.
    #[prost(string, tag = "4")]
    pub nic: String,
    /// Six bytes.
    #[prost(bytes = "vec", tag = "5")]
    pub mac: Vec<u8>,
    /// The NIC's interface on the node.
    #[prost(string, tag = "6")]
    pub tap: String,
    /// Ports of the node that lead to it.
    #[prost(message, repeated, tag = "7")]
    pub ports: Vec<PortRecord>,
    /// Time of the NIC's removal, in milliseconds of Unix time; 0 while the NIC exists.
    #[prost(uint64, tag = "8")]
    pub released_ms: u64,
    /// Which connections its guest may have; all when there is none.
    #[prost(message, optional, tag = "9")]
    pub firewall: Option<vmmd_api::v1::NicFirewall>,
    /// Time at which the guest last declined an address of the lease, in milliseconds of Unix time; 0 when it has not. A declined lease
    /// with a release time is of no NIC: another lease has replaced it.
    #[prost(uint64, tag = "10")]
    pub declined_ms: u64,
    /// Subnets behind its guest, as "10.90.0.0/16".
    #[prost(string, repeated, tag = "11")]
    pub subnets: Vec<String>,
    /// Names of its security groups.
    #[prost(string, repeated, tag = "12")]
    pub groups: Vec<String>,
    /// Floating addresses of the NIC, from the start of its VM to the end of the run.
    #[prost(message, repeated, tag = "13")]
    pub floating: Vec<FloatingRecord>,
    /// How long the address stays with its NIC after the release, in milliseconds; [`LEASE_RETENTION_MS`]
    /// when not known.
    #[prost(uint64, optional, tag = "14")]
    pub retention_ms: Option<u64>,
    /// Its guest may use the metadata service.
    #[prost(bool, tag = "20")]
    pub metadata: bool,
}

/// A floating address of a NIC.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct FloatingRecord {
    /// IPv4 or IPv6.
    #[prost(string, tag = "1")]
    pub address: String,
    /// It leads to the guest, which runs. Otherwise the NIC has it reserved.
    #[prost(bool, tag = "2")]
    pub active: bool,
}

/// A port of the node that leads to a guest.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct PortRecord {
    /// UDP, else TCP.
    #[prost(bool, tag = "1")]
    pub udp: bool,
    /// Of the node.
    #[prost(uint32, tag = "2")]
    pub node_port: u32,
    /// Of the guest.
    #[prost(uint32, tag = "3")]
    pub guest_port: u32,
    /// Upper half of the node's address that the port is of: IPv6, or IPv4 as an IPv4-mapped address (RFC 4291, 2.5.5.2). Both halves are 0
    /// for all addresses.
    #[prost(fixed64, tag = "4")]
    pub address_high: u64,
    /// Lower half of that address.
    #[prost(fixed64, tag = "5")]
    pub address_low: u64,
}

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

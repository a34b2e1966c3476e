//! Data for the answers of a helper. The daemon writes it, and the helper reads it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use serde::{Deserialize, Serialize};

/// Data for the answers of a helper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// The network's name: `<vm>.<network>.internal`; empty for a network without names of its own.
    pub network: String,
    /// Domain of the names of VMs besides `<network>.internal`; empty without one.
    #[serde(default)]
    pub domain: String,
    /// Addresses by complete name, in lower case and without a dot at the end.
    #[serde(default)]
    pub records: BTreeMap<String, Vec<IpAddr>>,
    /// Domains of a network without names of its own, the guests' own one first.
    #[serde(default)]
    pub search: Vec<String>,
    /// There is something behind the gateways; VMs have no other routes when it is false.
    pub routes: bool,
    /// IPv4 configuration, if the network has IPv4.
    pub ipv4: Option<Ipv4>,
    /// In bytes.
    pub mtu: u16,
    /// Name servers for all other names; without any, queries are not forwarded.
    pub forward: Vec<IpAddr>,
    /// These name servers are of the network's site, and know its private zones.
    #[serde(default)]
    pub site: bool,
    /// NTP servers.
    pub ntp: Vec<IpAddr>,
    /// For how long VMs are given their addresses, in seconds.
    pub lease_seconds: u32,
    /// IPv6 configuration, if the network has IPv6.
    pub ipv6: Option<Ipv6>,
    /// By MAC address: "52:54:00:12:34:56".
    pub hosts: BTreeMap<String, Host>,
}

impl Table {
    /// Whether the helper has the metadata service. The helper of a VM in a pod lacks it.
    pub fn has_metadata(&self) -> bool {
        !self.network.is_empty() && self.ipv4.is_some()
    }

    /// Domains in which guests look names up, their own one first, without a dot at the end.
    pub fn domains(&self) -> Vec<String> {
        match self.zones().next() {
            None => self.search.clone(),
            Some(own) => vec![own],
        }
    }

    /// Domains of the names of VMs, without a dot at the end. The first one is in the names of addresses.
    pub fn zones(&self) -> impl Iterator<Item = String> {
        let internal = Some(&self.network).filter(|network| !network.is_empty());
        let internal = internal.map(|network| format!("{network}.internal"));
        let domain = Some(self.domain.clone()).filter(|domain| !domain.is_empty());
        domain.into_iter().chain(internal)
    }
}

/// IPv4 configuration of guests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipv4 {
    /// The helper's own address, and the gateway.
    pub gateway: Ipv4Addr,
    /// The network's mask.
    pub mask: Ipv4Addr,
    /// The network's broadcast address.
    pub broadcast: Ipv4Addr,
    /// Routes besides the default route.
    #[serde(default)]
    pub routes: Vec<Route4>,
    /// Options that the daemon does not know, each code once.
    #[serde(default)]
    pub options: Vec<DhcpOption>,
}

/// A route of IPv4.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route4 {
    /// The destination's first address, and the bits of its prefix.
    pub to: (Ipv4Addr, u8),
    /// The next hop.
    pub via: Ipv4Addr,
}

/// A route of IPv6 over the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route6 {
    /// The destination's first address, and the bits of its prefix.
    pub to: (Ipv6Addr, u8),
}

/// An option of DHCP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DhcpOption {
    /// Its code, 1 to 254 for IPv4.
    pub code: u16,
    /// Its bytes.
    pub value: Vec<u8>,
}

/// Data from which guests form their IPv6 addresses and routes (RFC 4861, 4.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipv6 {
    /// The network's interface on the node.
    pub bridge: String,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// The first 64 bits of all addresses.
    pub prefix: Ipv6Addr,
    /// Routes besides the default route.
    #[serde(default)]
    pub routes: Vec<Route6>,
    /// Options that the daemon does not know, each code once.
    #[serde(default)]
    pub options: Vec<DhcpOption>,
}

impl Ipv6 {
    /// The helper's own address.
    pub fn gateway(&self) -> Ipv6Addr {
        (self.prefix.to_bits() | 1).into()
    }

    /// Whether an address is of the network.
    pub fn has(&self, address: Ipv6Addr) -> bool {
        address.octets().get(..8) == self.prefix.octets().get(..8)
    }
}

/// A VM's NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Its IPv4 address.
    pub address: Option<Ipv4Addr>,
    /// The one that it makes itself.
    #[serde(default)]
    pub address6: Option<Ipv6Addr>,
    /// The VM's name.
    pub name: String,
    /// The VM's default route leads over this NIC.
    #[serde(default = "yes")]
    pub primary: bool,
    /// Name of the file with the documents of the VM, if the NIC has the metadata service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<String>,
}

fn yes() -> bool {
    true
}

//! Packet filter rules of the networks: constant text (`rules.nft`) over named sets and maps, and
//! the elements of these. A network or a NIC is a few elements, so its creation costs the same
//! however many the node has.
//!
//! - *forward*: traffic from and to a network. A network with NAT receives packets of its own
//!   connections, and packets to published ports. A routed network receives no new connections from
//!   networks that are not routed.
//! - *input*: traffic from guests to the node itself: DHCP, and DNS queries and pings of the
//!   gateway.
//! - *source*, *published*, *local*: address translation, also that of floating addresses. Connections to the metadata service of
//!   guests that may use it lead to the helper of their network.
//! - *egress*, *ingress* (of the bridge): the connections that a guest with a firewall may open,
//!   and that others may open to it ([`firewall`]).
//! - *strangers* (of the bridge): other ports of a network's bridge cannot send to its guests.
//! - *ports* (of the bridge): the frames that a guest may send: its own MAC, IPv4 and IPv6
//!   addresses, ARP and neighbor discovery for these, and no messages of a router or a DHCP server.
//!   A port that is no NIC's cannot send to the node.
//!
//! Sets of ranges are copied by the kernel in each transaction that changes them. Only networks and NICs with denied ranges, or with
//! subnets behind their guests, change such sets.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use vmmd_spec::{
    firewall::{Addresses, Firewall},
    network::{Ipv6Net, NetworkMode, link_local},
    nic::{Mac, Protocol, PublishedPort},
};

use super::firewall::{self, Chains};
use crate::netd::metadata::PORT;

/// The tables' name.
pub const TABLE: &str = "vmmd";
/// A mark of frames from guests that pass the rules of a bridge.
pub const MARK: u32 = 0x0800_0000;
/// The rules, without elements.
const RULES: &str = include_str!("rules.nft");

/// A network as the packet filter sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    /// Its interface.
    pub bridge: String,
    /// The MAC address of that.
    pub mac: Mac,
    /// Who reaches whom.
    pub mode: NetworkMode,
    /// Its IPv6 addresses.
    pub net6: Option<Ipv6Net>,
    /// The node's own IPv4 address.
    pub gateway: Option<Ipv4Addr>,
    /// Addresses to which guests open no connections.
    pub deny: Vec<Addresses>,
    /// Its security groups by name.
    pub groups: BTreeMap<String, Firewall>,
}

/// A NIC in a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its interface on the node.
    pub tap: String,
    /// Its addresses.
    pub mac: Mac,
    pub address: Option<Ipv4Addr>,
    pub address6: Option<Ipv6Addr>,
    /// Ports of the node that lead to it.
    pub published: Vec<PublishedPort>,
    /// Which connections its guest may have.
    pub firewall: Firewall,
    /// Subnets behind its guest.
    pub subnets: Vec<Addresses>,
    /// Floating addresses that lead to its guest.
    pub floating: Vec<IpAddr>,
    /// Names of its security groups.
    pub groups: Vec<String>,
    /// Its guest may use the metadata service.
    pub metadata: bool,
}

/// Family of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    Inet,
    Bridge,
}

/// A set or a map, by its table and name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Set(pub Family, pub &'static str);

/// An element of a set or a map.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Element {
    pub set: Set,
    pub key: Vec<Field>,
    pub data: Data,
}

/// A part of a key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Field {
    Interface(String),
    Mac([u8; 6]),
    Ip(IpAddr),
    /// All of these addresses.
    Range(Addresses),
    /// The target of a neighbor message.
    Target(Ipv6Addr),
    Protocol(Protocol),
    Port(u16),
}

/// Value of a map's element.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Data {
    /// Elements of sets have none.
    None,
    Fields(Vec<Field>),
    Drop,
    Goto(String),
}

impl Network {
    /// Elements of the network itself.
    pub fn elements(&self) -> Vec<Element> {
        use Family::{Bridge, Inet};
        let bridge = || Field::Interface(self.bridge.clone());
        let mut all = vec![
            plain(Inet, "bridges", vec![bridge()]),
            plain(Inet, "within", vec![bridge(), bridge()]),
            plain(Inet, "routers", vec![bridge(), Field::Mac(self.mac.octets())]),
            plain(Bridge, "bridges", vec![Field::Mac(self.mac.octets())]),
        ];
        all.extend(self.deny.iter().map(|denied| {
            let set = if denied.first.is_ipv6() { "deny6" } else { "deny4" };
            plain(Inet, set, vec![bridge(), Field::Range(*denied)])
        }));
        if let Some(gateway) = self.gateway {
            let gateway = || Field::Ip(gateway.into());
            all.push(plain(Inet, "gateways", vec![gateway()]));
            all.push(plain(Inet, "gateway4", vec![bridge(), gateway()]));
            let helper = Data::Fields(vec![gateway(), Field::Port(PORT)]);
            all.push(with(Inet, "metadata", vec![bridge()], helper));
        }
        let mut verdict = |map, data| all.push(with(Inet, map, vec![bridge()], data));
        match self.mode {
            NetworkMode::Nat => verdict("to", Data::Goto("to-nat".to_owned())),
            NetworkMode::Routed => verdict("to", Data::Goto("to-routed".to_owned())),
            NetworkMode::Isolated => {
                verdict("to", Data::Drop);
                verdict("from", Data::Drop);
            }
        }
        if self.mode != NetworkMode::Routed {
            all.push(plain(Inet, "closed", vec![bridge()]));
        }
        if self.mode == NetworkMode::Nat {
            all.push(plain(Inet, "translated", vec![bridge()]));
        }
        if let Some(net6) = self.net6 {
            let gateway = || Field::Ip(net6.gateway().into());
            all.push(plain(Inet, "gateways6", vec![gateway()]));
            all.push(plain(Inet, "gateway6", vec![bridge(), gateway()]));
            all.push(plain(Inet, "with6", vec![bridge()]));
        }
        all
    }

    /// Elements of a NIC of the network.
    pub fn elements_of(&self, port: &Port) -> Vec<Element> {
        use Family::Bridge;
        let tap = || Field::Interface(port.tap.clone());
        let mac = || Field::Mac(port.mac.octets());
        let mut all = vec![
            plain(Bridge, "taps", vec![tap()]),
            plain(Bridge, "macs", vec![tap(), mac()]),
        ];
        if let Some(address) = port.address {
            let owned = vec![tap(), mac(), Field::Ip(address.into())];
            all.push(plain(Bridge, "owned4", owned));
        }
        if let Some(address) = port.address6 {
            all.push(plain(Bridge, "with6", vec![tap()]));
            for own in [address, link_local(port.mac)] {
                let owned = vec![tap(), mac(), Field::Ip(own.into())];
                all.push(plain(Bridge, "owned6", owned));
                all.push(plain(Bridge, "target6", vec![tap(), mac(), Field::Target(own)]));
            }
        }
        let addresses = [port.address.map(IpAddr::from), port.address6.map(IpAddr::from)];
        for address in addresses.into_iter().flatten() {
            let set = if address.is_ipv6() { "inside6" } else { "inside4" };
            let bridge = Field::Interface(self.bridge.clone());
            all.push(plain(Family::Inet, set, vec![Field::Ip(address), bridge]));
            if port.metadata && address.is_ipv4() {
                let bridge = Field::Interface(self.bridge.clone());
                let key = vec![Field::Ip(address), bridge];
                all.push(plain(Family::Inet, "metadata4", key));
            }
            if self.mode == NetworkMode::Nat {
                translate(address, &port.published, &mut all);
                float(address, &port.floating, &mut all);
            }
        }
        for subnet in &port.subnets {
            let [routed, behind] = match subnet.first {
                IpAddr::V4(_) => ["routed4", "behind4"],
                IpAddr::V6(_) => ["routed6", "behind6"],
            };
            let bridge = Field::Interface(self.bridge.clone());
            all.push(plain(Bridge, routed, vec![tap(), mac(), Field::Range(*subnet)]));
            all.push(plain(Family::Inet, behind, vec![Field::Range(*subnet), bridge]));
        }
        for (map, chain) in firewall::chains(self, port).into_keys() {
            all.push(with(Bridge, map, vec![tap()], Data::Goto(chain)));
        }
        all
    }
}

/// Elements of a guest's address behind address translation, and of the ports of the node that lead there.
fn translate(address: IpAddr, ports: &[PublishedPort], all: &mut Vec<Element>) {
    let [nat, published, bound, target] = match address {
        IpAddr::V4(_) => ["nat4", "published4", "bound4", "target4"],
        IpAddr::V6(_) => ["nat6", "published6", "bound6", "target6"],
    };
    all.push(plain(Family::Inet, nat, vec![Field::Ip(address)]));
    for port in ports {
        let protocol = || Field::Protocol(port.protocol);
        let guest = || Field::Port(port.guest_port);
        let mut key = vec![protocol(), Field::Port(port.node_port)];
        let map = match port.address {
            Some(node) if node.is_ipv6() != address.is_ipv6() => continue,
            Some(node) => {
                key.insert(0, Field::Ip(node));
                bound
            }
            None => published,
        };
        let data = Data::Fields(vec![Field::Ip(address), guest()]);
        all.push(with(Family::Inet, map, key, data));
        let key = vec![protocol(), Field::Ip(address), guest()];
        all.push(plain(Family::Inet, target, key));
    }
}

/// Elements of the floating addresses of a guest's address. Connections of the guest to the outside have the first one.
fn float(address: IpAddr, floating: &[IpAddr], all: &mut Vec<Element>) {
    let [leads, sender, pair] = match address {
        IpAddr::V4(_) => ["floating4", "sender4", "floated4"],
        IpAddr::V6(_) => ["floating6", "sender6", "floated6"],
    };
    let own = floating
        .iter()
        .filter(|other| other.is_ipv6() == address.is_ipv6());
    for (number, floating) in own.enumerate() {
        let (guest, floating) = (|| Field::Ip(address), || Field::Ip(*floating));
        all.push(with(
            Family::Inet,
            leads,
            vec![floating()],
            Data::Fields(vec![guest()]),
        ));
        all.push(plain(Family::Inet, pair, vec![floating(), guest()]));
        if number == 0 {
            all.push(with(
                Family::Inet,
                sender,
                vec![guest()],
                Data::Fields(vec![floating()]),
            ));
        }
    }
}

fn plain(family: Family, set: &'static str, key: Vec<Field>) -> Element {
    with(family, set, key, Data::None)
}

fn with(family: Family, set: &'static str, key: Vec<Field>, data: Data) -> Element {
    Element {
        set: Set(family, set),
        key,
        data,
    }
}

/// Input for nft that takes the tables away.
pub fn none() -> String {
    let mut text = String::new();
    for family in [Family::Inet, Family::Bridge] {
        // Adding an existing table is no error, but deleting a missing one is.
        for verb in ["add", "delete"] {
            let _ = writeln!(text, "{verb} table {family} {TABLE}");
        }
    }
    text
}

/// Input for nft that replaces the tables with all content, in one transaction.
pub fn whole(elements: &BTreeSet<Element>, chains: &Chains) -> String {
    let mut text = none() + RULES;
    if !chains.is_empty() {
        text += firewall::SHARED;
        text += &firewall::text(chains);
    }
    let mut set = None;
    for element in elements {
        if set == Some(element.set) {
            text.push_str(",\n");
        } else {
            let end = if set.is_some() { " }\n" } else { "" };
            let _ = write!(text, "{end}add element {} {{ ", element.set);
            set = Some(element.set);
        }
        let _ = write!(text, "{element}");
    }
    if set.is_some() {
        text += " }\n";
    }
    text
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Bridge => "bridge",
        })
    }
}

impl fmt::Display for Set {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {TABLE} {}", self.0, self.1)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        joined(f, &self.key)?;
        match &self.data {
            Data::None => Ok(()),
            Data::Fields(fields) => {
                f.write_str(" : ")?;
                joined(f, fields)
            }
            Data::Drop => f.write_str(" : drop"),
            Data::Goto(chain) => write!(f, " : goto {chain}"),
        }
    }
}

fn joined(f: &mut fmt::Formatter<'_>, fields: &[Field]) -> fmt::Result {
    for (number, field) in fields.iter().enumerate() {
        let between = if number > 0 { " . " } else { "" };
        write!(f, "{between}{field}")?;
    }
    Ok(())
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interface(name) => write!(f, "\"{name}\""),
            Self::Mac([a, b, c, d, e, g]) => write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}"),
            Self::Ip(address) => write!(f, "{address}"),
            Self::Range(addresses) => write!(f, "{addresses}"),
            Self::Target(address) => write!(f, "{:#034x}", u128::from(*address)),
            // By their numbers: nft looks names up in /etc/protocols, which not every node has.
            Self::Protocol(protocol) => write!(f, "{}", number(*protocol)),
            Self::Port(port) => write!(f, "{port}"),
        }
    }
}

/// IANA, Protocol Numbers.
pub fn number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
    }
}

#[cfg(test)]
mod tests;

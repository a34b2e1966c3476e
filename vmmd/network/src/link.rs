//! Network interfaces by rtnetlink: one connection for the daemon's life, no process per call.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use rtnetlink::{
    AddressMessageBuilder, Error, Handle, LinkBridge, LinkUnspec, RouteMessageBuilder,
    packet_core::{
        NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload, Nla as _,
    },
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        address::{AddressAttribute, AddressHeaderFlags, AddressMessage},
        link::{
            AfSpecBridge, BridgeVlanInfo, BridgeVlanInfoFlags, InfoBridge, InfoData, InfoKind, LinkAttribute,
            LinkFlags, LinkInfo, LinkMessage,
        },
        neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage},
        route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteType},
        tc::{TcAttribute, TcHandle, TcMessage},
    },
    sys::AsyncSocket as _,
};
use tokio_stream::StreamExt;
use vmmd_host::fault;
use vmmd_spec::firewall::Addresses;

use super::{
    guard::{Guard, MacFilter, TapGuard},
    managed::{BridgeFacts, BridgeSpec, floating::Proxy, routes::Route},
};

/// The table of the node's own addresses (linux/rtnetlink.h).
const RT_TABLE_LOCAL: u32 = 255;
/// Protocol of routes to subnets behind guests and of proxies for floating addresses, which no routing daemon has (iproute2, rt_protos).
const GUEST_ROUTES: RouteProtocol = RouteProtocol::Other(118);
/// Metric of a second route to ::1, which no packet of the node takes.
const LOOPBACK_METRIC: u32 = 1024;

/// The node's network interfaces.
#[derive(Clone, Debug)]
pub struct Links {
    handle: Handle,
}

/// Properties of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// It is a bridge.
    pub is_bridge: bool,
    /// It is a macvtap.
    pub is_macvtap: bool,
    /// Queues of a tap with several that somebody has opened. The kernel does not say it of other interfaces.
    pub queues: u32,
    /// Largest packet without the Ethernet header, in bytes.
    pub mtu: u32,
    /// Interface index of the bridge that it is a port of; 0 when it is of none.
    pub bridge: u32,
    /// The bridge filters VLANs.
    pub filters_vlans: bool,
    /// VLAN of new ports of the bridge; 0 for none.
    pub default_vlan: u16,
}

/// Counters of an interface since its creation, from the node's point of view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Packets that came in over it.
    pub received_packets: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Packets that went out over it.
    pub sent_packets: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Packets that came in and made no sense.
    pub received_wrong: u64,
    /// Packets that were to go out and were dropped.
    pub sent_dropped: u64,
}

impl Links {
    /// Connects to the kernel. To be called in a tokio runtime.
    pub fn connect() -> io::Result<Self> {
        let (mut connection, handle, _) = rtnetlink::new_connection()?;
        // The kernel applies the filters of a dump then (Linux 4.20).
        let socket = connection.socket_mut().socket_mut();
        socket.set_netlink_get_strict_chk(true)?;
        tokio::spawn(connection);
        Ok(Self { handle })
    }

    /// Looks for an interface by name.
    pub async fn find(&self, name: &str) -> io::Result<Option<Link>> {
        let message = self.message(name).await?;
        Ok(message.as_ref().map(describe))
    }

    async fn message(&self, name: &str) -> io::Result<Option<LinkMessage>> {
        let answers = self.handle.link().get().match_name(name.to_owned()).execute();
        tokio::pin!(answers);
        match answers.next().await {
            Some(Ok(message)) => Ok(Some(message)),
            None => Ok(None),
            Some(Err(error)) => match into_io(error) {
                error if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
                error => Err(error),
            },
        }
    }

    /// Counters of an interface; `None` when no interface has this name. On a macvtap, as on a tap,
    /// "received" counts the writes of its holder.
    pub async fn counters(&self, name: &str) -> io::Result<Option<LinkCounters>> {
        let Some(message) = self.message(name).await? else {
            return Ok(None);
        };
        let counted = message.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Stats64(stats) => Some(LinkCounters {
                received_packets: stats.rx_packets,
                received_bytes: stats.rx_bytes,
                sent_packets: stats.tx_packets,
                sent_bytes: stats.tx_bytes,
                received_wrong: stats.rx_errors,
                sent_dropped: stats.tx_dropped,
            }),
            _ => None,
        });
        Ok(counted.map(|counted| match describe(&message).is_macvtap {
            // The kernel counts the holder's writes as sent on a macvtap, and as received on a tap.
            true => LinkCounters {
                received_packets: counted.sent_packets,
                received_bytes: counted.sent_bytes,
                sent_packets: counted.received_packets,
                sent_bytes: counted.received_bytes,
                ..LinkCounters::default()
            },
            false => counted,
        }))
    }

    /// Facts about the bridge with this name.
    pub async fn inspect(&self, name: &str) -> io::Result<Option<BridgeFacts>> {
        let Some(message) = self.message(name).await? else {
            return Ok(None);
        };
        let mut facts = facts(&message);
        let addresses = self
            .handle
            .address()
            .get()
            .set_link_index_filter(facts.index)
            .execute();
        tokio::pin!(addresses);
        while let Some(address) = addresses.next().await {
            facts.addresses.extend(given(&address.map_err(into_io)?));
        }
        Ok(Some(facts))
    }

    /// All interfaces by name, each with the result of [`Self::inspect`], by two queries of the kernel. An interface that appears or
    /// disappears meanwhile may be missing.
    pub async fn survey(&self) -> io::Result<HashMap<String, (Link, BridgeFacts)>> {
        let mut seen = HashMap::new();
        let mut names = HashMap::new();
        let links = self.handle.link().get().execute();
        tokio::pin!(links);
        while let Some(message) = links.next().await {
            let message = message.map_err(into_io)?;
            if let Some(name) = name(&message) {
                names.insert(message.header.index, name.clone());
                seen.insert(name, (describe(&message), facts(&message)));
            }
        }
        let addresses = self.handle.address().get().execute();
        tokio::pin!(addresses);
        while let Some(address) = addresses.next().await {
            let address = address.map_err(into_io)?;
            let name = names.get(&address.header.index);
            if let Some((_, facts)) = name.and_then(|name| seen.get_mut(name)) {
                facts.addresses.extend(given(&address));
            }
        }
        Ok(seen)
    }

    /// Address ranges in the main routing table, each with the index of its interface, except the
    /// default route.
    pub async fn routes(&self) -> io::Result<Vec<((IpAddr, u8), u32)>> {
        Ok(self
            .main_table(RouteProtocol::Unspec)
            .await?
            .iter()
            .filter_map(route)
            .collect())
    }

    /// Name and properties of the interface of the default route: the one of IPv4 with the lowest metric, or else of IPv6.
    pub async fn uplink(&self) -> io::Result<Option<(String, Link)>> {
        let all = self.main_table(RouteProtocol::Unspec).await?;
        let metric = |route: &RouteMessage| {
            let metric = route.attributes.iter().find_map(|attribute| match attribute {
                RouteAttribute::Priority(metric) => Some(*metric),
                _ => None,
            });
            (u8::from(route.header.address_family), metric.unwrap_or(0))
        };
        let defaults = all.iter().filter(|route| {
            route.header.destination_prefix_length == 0 && route.header.kind == RouteType::Unicast
        });
        let Some(index) = defaults.min_by_key(|route| metric(route)).and_then(interface) else {
            return Ok(None);
        };
        let answers = self.handle.link().get().match_index(index).execute();
        tokio::pin!(answers);
        let found = answers.next().await.transpose().map_err(into_io)?;
        Ok(found.and_then(|message| Some((name(&message)?, describe(&message)))))
    }

    /// The routes of the main table with this protocol, or with any.
    async fn main_table(&self, protocol: RouteProtocol) -> io::Result<Vec<RouteMessage>> {
        let all = [
            RouteMessageBuilder::<Ipv4Addr>::new().build(),
            RouteMessageBuilder::<Ipv6Addr>::new().build(),
        ];
        let mut found = Vec::new();
        for mut version in all {
            version.header.protocol = protocol;
            let routes = self.handle.route().get(version).execute();
            tokio::pin!(routes);
            while let Some(message) = routes.next().await {
                match message.map_err(into_io) {
                    Ok(message) => found.push(message),
                    // There is no table before the first route.
                    Err(error) if error.raw_os_error() == Some(libc::ENOENT) => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(found)
    }

    /// Makes a bridge, and brings it up.
    pub async fn create_bridge(&self, name: &str, wanted: &BridgeSpec) -> io::Result<()> {
        // With snooping a guest that asks for members of groups would get the neighbor solicitations of
        // the others.
        let message = LinkBridge::new(name)
            .mcast_snooping(false)
            .address(wanted.mac.to_vec())
            .mtu(wanted.mtu)
            .build();
        fault::step("add a bridge");
        self.handle.link().add(message).execute().await.map_err(into_io)?;
        let Some(link) = self.find(name).await? else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let message = LinkUnspec::new_with_index(link.index)
            .alias(wanted.alias.clone())
            .build();
        fault::step("name a bridge");
        self.handle.link().set(message).execute().await.map_err(into_io)?;
        for (address, prefix) in &wanted.addresses {
            self.add_address(link.index, *address, *prefix).await?;
        }
        Ok(())
    }

    /// Gives an interface its MTU, and brings it up.
    pub async fn set_up(&self, index: u32, mtu: u32) -> io::Result<()> {
        let message = LinkUnspec::new_with_index(index).mtu(mtu).up().build();
        fault::step("bring a bridge up");
        self.handle.link().set(message).execute().await.map_err(into_io)
    }

    /// Gives an interface an address.
    pub async fn add_address(&self, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
        let mut add = self.handle.address().add(index, address, prefix);
        if address.is_ipv6() {
            // No other host has the node's address, so the kernel need not check for duplicates on
            // the link first (RFC 4862, 5.4).
            add.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        }
        fault::step("add an address");
        add.replace().execute().await.map_err(into_io)
    }

    /// Takes an address from an interface.
    pub async fn remove_address(&self, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
        let message = match address {
            IpAddr::V4(address) => AddressMessageBuilder::<Ipv4Addr>::new()
                .index(index)
                .address(address, prefix)
                .build(),
            IpAddr::V6(address) => AddressMessageBuilder::<Ipv6Addr>::new()
                .index(index)
                .address(address, prefix)
                .build(),
        };
        fault::step("remove an address");
        self.handle
            .address()
            .del(message)
            .execute()
            .await
            .map_err(into_io)
    }

    /// Makes the interface `device`, which is set up, a port of the bridge with the index `bridge`.
    pub async fn set_bridge(&self, device: u32, bridge: u32) -> io::Result<()> {
        let message = LinkUnspec::new_with_index(device).controller(bridge).up().build();
        fault::step("move a tap to its bridge");
        self.handle.link().set(message).execute().await.map_err(into_io)
    }

    /// Drops frames that a bridge passes up to the node. It changes nothing where this was done before.
    pub async fn guard(&self, bridge: u32, guard: Guard) -> io::Result<()> {
        let index = i32::try_from(bridge).map_err(io::Error::other)?;
        fault::step("guard a bridge");
        let made = self.handle.qdisc().add(index).ingress().execute().await;
        match made.map_err(into_io) {
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => return Err(error),
            _ => {}
        }
        self.classify(guard.filter(index)).await
    }

    /// Drops frames to a guest that come from other ports of the bridge without the mark. It changes nothing where this was done
    /// before.
    pub async fn guard_tap(&self, tap: u32, guard: TapGuard) -> io::Result<()> {
        let index = i32::try_from(tap).map_err(io::Error::other)?;
        fault::step("guard a tap");
        self.add_clsact(index).await?;
        self.classify(guard.filter(index)).await
    }

    /// Drops frames from a guest with another source MAC address.
    pub async fn filter_mac(&self, tap: u32, filter: MacFilter) -> io::Result<()> {
        let index = i32::try_from(tap).map_err(io::Error::other)?;
        fault::step("filter a tap");
        self.add_clsact(index).await?;
        self.classify(filter.filter(index)).await
    }

    /// Gives an interface a place for filters of both directions, unless it has one.
    async fn add_clsact(&self, index: i32) -> io::Result<()> {
        let mut qdisc = TcMessage::with_index(index);
        qdisc.header.handle = TcHandle {
            major: u16::MAX,
            minor: 0,
        };
        qdisc.header.parent = TcHandle::INGRESS;
        qdisc.attributes = vec![TcAttribute::Kind("clsact".to_owned())];
        let mut made = NetlinkMessage::from(RouteNetlinkMessage::NewQueueDiscipline(qdisc));
        made.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
        match self.ask(made).await {
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes a filter, or replaces it.
    async fn classify(&self, filter: TcMessage) -> io::Result<()> {
        let mut filter = NetlinkMessage::from(RouteNetlinkMessage::NewTrafficFilter(filter));
        filter.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE;
        self.ask(filter).await
    }

    async fn ask(&self, message: NetlinkMessage<RouteNetlinkMessage>) -> io::Result<()> {
        let answers = self.handle.clone().request(message).map_err(into_io)?;
        tokio::pin!(answers);
        while let Some(answer) = answers.next().await {
            if let NetlinkPayload::Error(error) = answer.payload
                && error.raw_code() != 0
            {
                return Err(error.to_io());
            }
        }
        Ok(())
    }

    /// Gives the interface `device` its address, and brings it up.
    pub async fn set_mac(&self, device: u32, address: [u8; 6]) -> io::Result<()> {
        let message = LinkUnspec::new_with_index(device)
            .address(address.to_vec())
            .up()
            .build();
        fault::step("give a macvtap its address");
        self.handle.link().set(message).execute().await.map_err(into_io)
    }

    /// Gives the tap `device` its address, its MTU in bytes and an alias for users, and brings it up.
    pub async fn set_tap(&self, device: u32, address: [u8; 6], mtu: u32, alias: String) -> io::Result<()> {
        let message = LinkUnspec::new_with_index(device)
            .address(address.to_vec())
            .mtu(mtu)
            .alias(alias)
            .up()
            .build();
        fault::step("bring a tap up");
        self.handle.link().set(message).execute().await.map_err(into_io)
    }

    /// Lets packets to ::1 reach the node's sockets from the interface `device`. The route of the loopback interface stays the preferred
    /// one.
    pub async fn accept_loopback6(&self, device: u32) -> io::Result<()> {
        let route = RouteMessageBuilder::<Ipv6Addr>::new()
            .destination_prefix(Ipv6Addr::LOCALHOST, 128)
            .output_interface(device)
            .kind(RouteType::Local)
            .table_id(RT_TABLE_LOCAL)
            .priority(LOOPBACK_METRIC)
            .build();
        fault::step("add a route");
        self.handle
            .route()
            .add(route)
            .replace()
            .execute()
            .await
            .map_err(into_io)
    }

    /// Routes to subnets behind guests over the interface `device`.
    pub async fn guest_routes(&self, device: u32) -> io::Result<BTreeSet<Route>> {
        let all = self.main_table(GUEST_ROUTES).await?;
        let own = all
            .iter()
            .filter(|message| message.header.protocol == GUEST_ROUTES && interface(message) == Some(device));
        Ok(own.filter_map(guest_route).collect())
    }

    /// Adds a route to a subnet behind a guest over the interface `device`. Another route to this subnet is an error.
    pub async fn add_guest_route(&self, device: u32, route: Route) -> io::Result<()> {
        fault::step("add a route");
        let added = self
            .handle
            .route()
            .add(guest_message(device, route)?)
            .execute()
            .await;
        added.map_err(into_io).map_err(|error| {
            let words = format!("add the route to {} via {}: {error}", route.to, route.via);
            io::Error::new(error.kind(), words)
        })
    }

    /// Removes a route to a subnet behind a guest. A missing one is no error.
    pub async fn remove_guest_route(&self, device: u32, route: Route) -> io::Result<()> {
        fault::step("remove a route");
        let removed = self
            .handle
            .route()
            .del(guest_message(device, route)?)
            .execute()
            .await;
        match removed.map_err(into_io) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => Err(error),
            _ => Ok(()),
        }
    }

    /// MAC address of an interface; `None` for one without Ethernet.
    pub async fn mac(&self, device: u32) -> io::Result<Option<[u8; 6]>> {
        let answers = self.handle.link().get().match_index(device).execute();
        tokio::pin!(answers);
        let message = answers.next().await.transpose().map_err(into_io)?;
        let attributes = message.iter().flat_map(|message| &message.attributes);
        let mut addresses = attributes.filter_map(|attribute| match attribute {
            LinkAttribute::Address(address) => address.as_slice().try_into().ok(),
            _ => None,
        });
        Ok(addresses.next())
    }

    /// Addresses of routers in the main routing table.
    pub async fn gateways(&self) -> io::Result<BTreeSet<IpAddr>> {
        let all = self.main_table(RouteProtocol::Unspec).await?;
        Ok(all.iter().filter_map(gateway).collect())
    }

    /// Addresses of guests for which interfaces of the node answer.
    pub async fn proxies(&self) -> io::Result<BTreeSet<Proxy>> {
        let mut found = BTreeSet::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let all = self.handle.neighbours().get().proxies();
            let all = all.set_address_family(family).execute();
            tokio::pin!(all);
            while let Some(message) = all.next().await {
                found.extend(proxy(&message.map_err(into_io)?));
            }
        }
        Ok(found)
    }

    /// Lets an interface answer for an address (proxy ARP and neighbor discovery).
    pub async fn add_proxy(&self, (device, address): Proxy) -> io::Result<()> {
        fault::step("answer for a floating address");
        let mut request = self.handle.neighbours().add(device, address);
        let message = request.message_mut();
        message.header.flags = NeighbourFlags::Proxy;
        message
            .attributes
            .push(NeighbourAttribute::Protocol(GUEST_ROUTES));
        request.replace().execute().await.map_err(into_io)
    }

    /// Ends [`Self::add_proxy`]. A missing proxy, or a missing interface, is no error.
    pub async fn remove_proxy(&self, (device, address): Proxy) -> io::Result<()> {
        fault::step("answer no more for a floating address");
        let mut message = NeighbourMessage::default();
        message.header.ifindex = device;
        message.header.flags = NeighbourFlags::Proxy;
        let (family, address) = match address {
            IpAddr::V4(address) => (AddressFamily::Inet, NeighbourAddress::Inet(address)),
            IpAddr::V6(address) => (AddressFamily::Inet6, NeighbourAddress::Inet6(address)),
        };
        message.header.family = family;
        message.attributes.push(NeighbourAttribute::Destination(address));
        let removed = self.handle.neighbours().del(message).execute().await;
        match removed.map_err(into_io) {
            Err(error) if ![Some(libc::ENOENT), Some(libc::ENODEV)].contains(&error.raw_os_error()) => {
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Takes an interface away.
    pub async fn delete(&self, index: u32) -> io::Result<()> {
        fault::step("delete a bridge");
        self.handle.link().del(index).execute().await.map_err(into_io)
    }

    /// Makes the interface `device` a port of `bridge`, with the bridge's MTU, and up. With a `vlan` it is a port of this VLAN alone,
    /// for untagged frames.
    pub async fn join_bridge(
        &self,
        device: u32,
        (bridge, vlan): (&Link, Option<u16>),
        address: [u8; 6],
        alias: String,
    ) -> io::Result<()> {
        let message = LinkUnspec::new_with_index(device)
            .address(address.to_vec())
            .mtu(bridge.mtu)
            .alias(alias)
            .controller(bridge.index);
        let message = match vlan {
            None => message.up(),
            // No frame of the bridge's default VLAN reaches the guest.
            Some(_) => message,
        };
        fault::step("make a tap a port of its bridge");
        let joined = self.handle.link().set(message.build()).execute().await;
        joined.map_err(into_io)?;
        let Some(vlan) = vlan else {
            return Ok(());
        };
        fault::step("give a tap its VLAN");
        let flags = BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged;
        self.change_vlan(RouteNetlinkMessage::SetLink(port_vlan(device, vlan, flags)))
            .await?;
        if ![0, vlan].contains(&bridge.default_vlan) {
            let none = BridgeVlanInfoFlags::empty();
            let default = port_vlan(device, bridge.default_vlan, none);
            self.change_vlan(RouteNetlinkMessage::DelLink(default)).await?;
        }
        self.set_up(device, bridge.mtu).await
    }

    async fn change_vlan(&self, message: RouteNetlinkMessage) -> io::Result<()> {
        let mut message = NetlinkMessage::from(message);
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK;
        self.ask(message).await
    }
}

/// A VLAN of a port of a bridge.
fn port_vlan(device: u32, vid: u16, flags: BridgeVlanInfoFlags) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.interface_family = AddressFamily::Bridge;
    message.header.index = device;
    let vlan = AfSpecBridge::VlanInfo(BridgeVlanInfo { flags, vid });
    message.attributes = vec![LinkAttribute::AfSpecBridge(vec![vlan])];
    message
}

/// Name of an interface.
fn name(message: &LinkMessage) -> Option<String> {
    message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })
}

fn describe(message: &LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        is_bridge: false,
        is_macvtap: false,
        queues: 0,
        mtu: 1500,
        bridge: 0,
        filters_vlans: false,
        default_vlan: 0,
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Controller(index) => link.bridge = *index,
            LinkAttribute::LinkInfo(infos) => {
                link.is_bridge |= infos.contains(&LinkInfo::Kind(InfoKind::Bridge));
                link.is_macvtap |= infos.contains(&LinkInfo::Kind(InfoKind::MacVtap));
                link.queues = infos.iter().map(opened).sum();
                for fact in infos.iter().flat_map(bridge_facts) {
                    match fact {
                        InfoBridge::VlanFiltering(filters) => link.filters_vlans = *filters,
                        InfoBridge::VlanDefaultPvid(vlan) => link.default_vlan = *vlan,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    link
}

fn bridge_facts(info: &LinkInfo) -> &[InfoBridge] {
    match info {
        LinkInfo::Data(InfoData::Bridge(facts)) => facts,
        _ => &[],
    }
}

/// Number of open queues of a tap, including queues that are disabled at present (if_link.h:
/// IFLA_TUN_NUM_QUEUES, IFLA_TUN_NUM_DISABLED_QUEUES).
fn opened(info: &LinkInfo) -> u32 {
    const NUMBERS: [u16; 2] = [8, 9];
    let LinkInfo::Data(InfoData::Tun(facts)) = info else {
        return 0;
    };
    let numbers = facts.iter().filter(|fact| NUMBERS.contains(&fact.kind()));
    let numbers = numbers.map(|fact| {
        let mut number = [0; 4];
        if fact.value_len() == number.len() {
            fact.emit_value(&mut number);
        }
        u32::from_ne_bytes(number)
    });
    numbers.sum()
}

/// Facts about an interface as a bridge, except its addresses.
fn facts(message: &LinkMessage) -> BridgeFacts {
    let link = describe(message);
    BridgeFacts {
        index: link.index,
        is_bridge: link.is_bridge,
        up: message.header.flags.contains(LinkFlags::Up),
        mtu: link.mtu,
        addresses: Vec::new(),
    }
}

/// An address that somebody gave the interface: not the one that it has for its link.
fn given(message: &AddressMessage) -> Option<(IpAddr, u8)> {
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Address(IpAddr::V6(address)) if address.is_unicast_link_local() => None,
        AddressAttribute::Address(address) => Some(*address),
        _ => None,
    })?;
    Some((address, message.header.prefix_len))
}

/// The interface of a route.
fn interface(message: &RouteMessage) -> Option<u32> {
    message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        RouteAttribute::MultiPath(hops) => hops.first().map(|hop| hop.interface_index),
        _ => None,
    })
}

/// The message about a route to a subnet behind a guest.
fn guest_message(device: u32, route: Route) -> io::Result<RouteMessage> {
    match (route.to.first, route.via) {
        (IpAddr::V4(to), IpAddr::V4(via)) => Ok(RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(to, route.to.prefix)
            .gateway(via)
            .output_interface(device)
            .protocol(GUEST_ROUTES)
            .onlink()
            .build()),
        (IpAddr::V6(to), IpAddr::V6(via)) => Ok(RouteMessageBuilder::<Ipv6Addr>::new()
            .destination_prefix(to, route.to.prefix)
            .gateway(via)
            .output_interface(device)
            .protocol(GUEST_ROUTES)
            .onlink()
            .build()),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// The router of a route.
fn gateway(message: &RouteMessage) -> Option<IpAddr> {
    message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(via)) => Some(IpAddr::from(*via)),
        RouteAttribute::Gateway(RouteAddress::Inet6(via)) => Some(IpAddr::from(*via)),
        _ => None,
    })
}

/// The proxy of a message, if the daemon has set it up.
fn proxy(message: &NeighbourMessage) -> Option<Proxy> {
    let is_ours = message.header.flags.contains(NeighbourFlags::Proxy)
        && message
            .attributes
            .contains(&NeighbourAttribute::Protocol(GUEST_ROUTES));
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => Some(IpAddr::from(*address)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => Some(IpAddr::from(*address)),
        _ => None,
    });
    Some((message.header.ifindex, address.filter(|_| is_ours)?))
}

/// The route of a message.
fn guest_route(message: &RouteMessage) -> Option<Route> {
    let ((first, prefix), _) = route(message)?;
    let via = gateway(message)?;
    let to = Addresses { first, prefix };
    Some(Route { to, via })
}

/// Where a route leads: the range, and the interface.
fn route(message: &RouteMessage) -> Option<((IpAddr, u8), u32)> {
    let header = &message.header;
    let (mut to, mut table) = (None, u32::from(header.table));
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(address)) => to = Some((*address).into()),
            RouteAttribute::Destination(RouteAddress::Inet6(address)) => to = Some((*address).into()),
            RouteAttribute::Table(number) => table = *number,
            _ => {}
        }
    }
    let is_main = table == u32::from(RouteHeader::RT_TABLE_MAIN) && header.kind == RouteType::Unicast;
    let range = (to?, header.destination_prefix_length);
    (is_main && range.1 > 0).then_some((range, interface(message)?))
}

fn into_io(error: Error) -> io::Error {
    match error {
        Error::NetlinkError(message) => message.to_io(),
        error => io::Error::other(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_loopback_interface_is_found_and_is_no_bridge() {
        let links = Links::connect().unwrap();
        let link = links.find("lo").await.unwrap().unwrap();
        assert!(!link.is_bridge && link.index > 0, "{link:?}");
        assert_eq!(links.find("nonexistent0").await.unwrap(), None);
        assert!(links.counters("lo").await.unwrap().is_some());
        assert_eq!(links.counters("nonexistent0").await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_survey_tells_of_each_interface_what_a_question_about_it_does() {
        let links = Links::connect().unwrap();
        let mut seen = links.survey().await.unwrap();
        let (link, facts) = seen.remove("lo").unwrap();
        assert_eq!(links.find("lo").await.unwrap(), Some(link));
        assert_eq!(links.inspect("lo").await.unwrap(), Some(facts));
    }
}

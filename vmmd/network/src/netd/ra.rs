//! Router advertisements for guests (RFC 4861, 4.2).
//!
//! The advertisement to all nodes says that addresses come by DHCP. A guest whose link-local address
//! is that of its MAC address also gets an advertisement of its own, by which it may form its address
//! (RFC 4862): the result is the address that DHCP gives. Other guests would form addresses that
//! their NICs may not use (RFC 7217, RFC 8981).
//!
//! A guest that hears an advertisement to all does not ask for one (RFC 4861, 6.3.7). So the
//! advertisements to single guests follow, at once and again after [`PAUSE`]: a guest that is just
//! starting has its link-local address by then.

use std::{
    io,
    net::{Ipv6Addr, SocketAddrV6, UdpSocket},
    time::{Duration, Instant},
};

use rustix::net::netdevice::name_to_index;
use socket2::{Domain, Protocol, Socket, Type};
use vmmd_spec::network::link_local;

use super::{Ipv6, Table};

/// Interval of unsolicited advertisements, within the range for routers (RFC 4861, 6.2.1: 200 to
/// 600 s).
pub const PERIOD: Duration = Duration::from_secs(200);
/// The least between two, however many ask (RFC 4861, 10: MIN_DELAY_BETWEEN_RAS).
pub const PAUSE: Duration = Duration::from_secs(3);
/// Router lifetime in seconds, more than three times [`PERIOD`].
const ROUTER_LIFETIME: u16 = 1800;
/// How long a guest uses the name server and the domain, in seconds (RFC 8106, 5.1).
const NAMES_LIFETIME: u32 = 1800;
/// For how long an address is used for new connections, and at all, in seconds.
const PREFERRED: u32 = 14_400;
const VALID: u32 = 86_400;
/// Hop limit for the guests' packets.
const HOP_LIMIT: u8 = 64;
/// Messages (RFC 4861, 4.1, 4.2).
const SOLICITATION: u8 = 133;
const ADVERTISEMENT: u8 = 134;
/// Flags of an advertisement (RFC 4861, 4.2), and of a prefix (4.6.2).
const MANAGED: u8 = 0x80;
const ON_LINK: u8 = 0x80;
const AUTONOMOUS: u8 = 0x40;
/// All nodes and all routers of a link (RFC 4291, 2.7.1).
const NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
/// Hop limit of router messages. A receiver discards a message with another value, because a router
/// forwarded it (RFC 4861, 6.1.2).
const HOPS: u32 = 255;

/// A socket for ICMPv6 on the network's interface. Needs CAP_NET_RAW.
pub fn open(ipv6: &Ipv6) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV6, Type::RAW, Some(Protocol::ICMPV6))?;
    let index = name_to_index(&socket, &ipv6.bridge)?;
    socket.bind_device(Some(ipv6.bridge.as_bytes()))?;
    socket.set_multicast_hops_v6(HOPS)?;
    socket.set_unicast_hops_v6(HOPS)?;
    socket.set_multicast_loop_v6(false)?;
    socket.join_multicast_v6(&ROUTERS, index)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Where such a socket reaches all nodes of the network.
pub fn nodes(socket: &UdpSocket, ipv6: &Ipv6) -> io::Result<SocketAddrV6> {
    let index = name_to_index(socket, &ipv6.bridge)?;
    Ok(node(NODES, index))
}

/// Where such a socket reaches an address of the link with this interface.
pub fn node(address: Ipv6Addr, interface: u32) -> SocketAddrV6 {
    SocketAddrV6::new(address, 0, 0, interface)
}

/// Whether a message asks for an advertisement.
pub fn asks(message: &[u8]) -> bool {
    message.len() >= 8 && message.starts_with(&[SOLICITATION, 0])
}

/// Receivers of advertisements that are due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// All nodes, and the single guests.
    All,
    /// The single guests, once more.
    Guests,
}

/// When advertisements are sent: each [`PERIOD`], and [`PAUSE`] after the last one when somebody
/// without an address asks.
#[derive(Debug, Default)]
pub struct Schedule {
    /// When the last one to all was sent.
    sent: Option<Instant>,
    /// Somebody has asked for one since.
    asked: bool,
    /// When those to single guests are repeated.
    repeat: Option<Instant>,
}

impl Schedule {
    /// A guest without an address for the answer asks.
    pub fn ask(&mut self) {
        self.asked = true;
    }

    /// When the next one is due; `None` when it is due now.
    pub fn due(&self) -> Option<Instant> {
        let all = self.next()?;
        Some(self.repeat.map_or(all, |repeat| repeat.min(all)))
    }

    /// What is due. It counts as sent at `now`.
    pub fn take(&mut self, now: Instant) -> Option<Due> {
        if self.next().is_none_or(|next| next <= now) {
            (self.sent, self.asked) = (Some(now), false);
            self.repeat = Some(now + PAUSE);
            return Some(Due::All);
        }
        self.repeat.take_if(|repeat| *repeat <= now)?;
        Some(Due::Guests)
    }

    fn next(&self) -> Option<Instant> {
        let wait = if self.asked { PAUSE } else { PERIOD };
        self.sent.map(|sent| sent + wait)
    }
}

/// Addresses of the guests that form addresses from their MAC addresses: they form their link-local addresses so, too.
pub fn autonomous(table: &Table) -> impl Iterator<Item = Ipv6Addr> {
    let hosts = table.hosts.iter().filter(|(_, host)| host.address6.is_some());
    hosts.filter_map(|(mac, _)| Some(link_local(mac.parse().ok()?)))
}

/// Returns the advertisement without its checksum, which the kernel writes; `None` for a network
/// without IPv6.
///
/// Guests get their addresses by DHCP. A guest may form an address of the prefix itself when the advertisement is `autonomous`: such
/// a guest may have no client of DHCP.
pub fn advertisement(table: &Table, autonomous: bool) -> Option<Vec<u8>> {
    let ipv6 = table.ipv6.as_ref()?;
    let lifetime = if table.routes { ROUTER_LIFETIME } else { 0 };
    let mut message = vec![ADVERTISEMENT, 0, 0, 0, HOP_LIMIT, MANAGED];
    message.extend(lifetime.to_be_bytes());
    // Reachable time and retransmission timer: not said.
    message.extend([0; 8]);
    // Source link-layer address (4.6.1), MTU (4.6.4), prefix (4.6.2): on the link, for addresses.
    message.extend([1, 1]);
    message.extend(ipv6.mac);
    message.extend([5, 1, 0, 0]);
    message.extend(u32::from(table.mtu).to_be_bytes());
    message.extend([3, 4, 64, if autonomous { ON_LINK | AUTONOMOUS } else { ON_LINK }]);
    // It is not repeated, and the NIC keeps the address.
    let (valid, preferred) = if autonomous {
        (u32::MAX, u32::MAX)
    } else {
        (VALID, PREFERRED)
    };
    message.extend(valid.to_be_bytes());
    message.extend(preferred.to_be_bytes());
    message.extend([0; 4]);
    message.extend(ipv6.prefix.octets());
    names(ipv6, &table.domains(), &mut message);
    for route in &ipv6.routes {
        route_information(route.to, &mut message);
    }
    Some(message)
}

/// A route over this router, with the medium preference (RFC 4191, 2.3).
fn route_information((to, prefix): (Ipv6Addr, u8), message: &mut Vec<u8>) {
    let octets = to.octets();
    let significant = match prefix {
        0 => 0,
        1..=64 => 8,
        _ => 16,
    };
    message.extend([24, 1 + significant / 8, prefix, 0]);
    message.extend(u32::from(ROUTER_LIFETIME).to_be_bytes());
    message.extend(octets.iter().take(significant.into()));
}

/// The name server and the domains of the guests (RFC 8106, 5.1, 5.2).
fn names(ipv6: &Ipv6, domains: &[String], message: &mut Vec<u8>) {
    message.extend([25, 3, 0, 0]);
    message.extend(NAMES_LIFETIME.to_be_bytes());
    message.extend(ipv6.gateway().octets());
    if domains.is_empty() {
        return;
    }
    let mut list = Vec::new();
    for label in domains.iter().flat_map(|domain| domain.split('.').chain([""])) {
        list.push(u8::try_from(label.len()).unwrap_or_default());
        list.extend(label.bytes());
    }
    list.resize(list.len().next_multiple_of(8), 0);
    message.extend([31, u8::try_from(1 + list.len() / 8).unwrap_or_default(), 0, 0]);
    message.extend(NAMES_LIFETIME.to_be_bytes());
    message.extend(list);
}

#[cfg(test)]
mod tests {
    use super::{super::dhcp::tests::table, *};

    #[test]
    fn guests_are_told_prefix_mtu_and_whether_there_is_a_way_out() {
        let message = advertisement(&table(), true).unwrap();
        assert_eq!(message.len(), 16 + 8 + 8 + 32 + 24 + 24);
        assert_eq!(message[..8], [134, 0, 0, 0, 64, 0x80, 0x07, 0x08]);
        assert_eq!(message[16..24], [1, 1, 2, 0, 0, 0, 0, 1]);
        assert_eq!(message[24..32], [5, 1, 0, 0, 0, 0, 0x05, 0x78]);
        assert_eq!(message[32..36], [3, 4, 64, 0xc0]);
        assert_eq!(message[48..64], "fd00:80::".parse::<Ipv6Addr>().unwrap().octets());
        assert_eq!(message[64..72], [25, 3, 0, 0, 0, 0, 0x07, 0x08]);
        assert_eq!(
            message[72..88],
            "fd00:80::1".parse::<Ipv6Addr>().unwrap().octets()
        );
        assert_eq!(message[88..96], [31, 3, 0, 0, 0, 0, 0x07, 0x08]);
        assert_eq!(&message[96..], b"\x03lan\x08internal\0\0\0");
        assert_eq!(advertisement(&table(), false).unwrap()[35], 0x80, "by DHCP alone");
        let isolated = Table {
            routes: false,
            ..table()
        };
        assert_eq!(advertisement(&isolated, true).unwrap()[6..8], [0, 0], "no router");
        let without = Table {
            ipv6: None,
            ..table()
        };
        assert_eq!(advertisement(&without, true), None);
    }

    #[test]
    fn guests_are_told_routes_over_the_gateway() {
        let mut table = table();
        let short = advertisement(&table, false).unwrap().len();
        let routes = [("2001:db8::", 32), ("2001:db8:0:1::2", 128)];
        table.ipv6.as_mut().unwrap().routes = routes
            .map(|(to, prefix)| super::super::Route6 {
                to: (to.parse().unwrap(), prefix),
            })
            .to_vec();
        let message = advertisement(&table, false).unwrap();
        let (first, second) = message[short..].split_at(16);
        assert_eq!(first, b"\x18\x02\x20\0\0\0\x07\x08\x20\x01\x0d\xb8\0\0\0\0");
        assert_eq!(second[..8], [24, 3, 128, 0, 0, 0, 7, 8]);
        assert_eq!(
            second[8..],
            "2001:db8:0:1::2".parse::<Ipv6Addr>().unwrap().octets()
        );
    }

    #[test]
    fn guests_of_a_pod_have_its_search_domains() {
        let search = ["ns.svc.cluster.local", "cluster.local"]
            .map(str::to_owned)
            .to_vec();
        let pod = Table {
            network: String::new(),
            search,
            ..table()
        };
        let message = advertisement(&pod, false).unwrap();
        let names = b"\x02ns\x03svc\x07cluster\x05local\0\x07cluster\x05local\0\0\0\0";
        assert_eq!(message[88..90], [31, 6]);
        assert_eq!(&message[96..], names);
        let none = Table {
            search: Vec::new(),
            ..pod
        };
        assert_eq!(advertisement(&none, false).unwrap().len(), 88);
    }

    #[test]
    fn guests_with_addresses_of_their_macs_are_autonomous() {
        let expected: Ipv6Addr = "fe80::5054:ff:fe00:1".parse().unwrap();
        assert_eq!(autonomous(&table()).collect::<Vec<_>>(), [expected]);
    }

    #[test]
    fn all_are_told_each_period_and_guests_again_after_a_pause() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        assert_eq!(schedule.due(), None);
        assert_eq!([schedule.take(now), schedule.take(now)], [Some(Due::All), None]);
        assert_eq!(schedule.due(), Some(now + PAUSE));
        assert_eq!(schedule.take(now + PAUSE), Some(Due::Guests));
        assert_eq!(schedule.due(), Some(now + PERIOD));
        schedule.ask();
        assert_eq!(schedule.due(), Some(now + PAUSE));
        assert_eq!(schedule.take(now + PAUSE), Some(Due::All));
        assert_eq!(schedule.due(), Some(now + 2 * PAUSE));
    }

    #[test]
    fn only_a_solicitation_asks() {
        assert!(asks(&[133, 0, 0, 0, 0, 0, 0, 0]));
        for other in [
            &[133, 0, 0][..],
            &[134, 0, 0, 0, 0, 0, 0, 0],
            &[133, 1, 0, 0, 0, 0, 0, 0],
            &[],
        ] {
            assert!(!asks(other), "{other:?}");
        }
    }
}

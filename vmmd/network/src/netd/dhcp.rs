//! Response to a DHCP client (RFC 2131, 4.3; RFC 2132): a pure function of the table.

use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};

use dhcproto::{
    Name,
    decoder::{Decodable as _, Decoder},
    encoder::{Encodable as _, Encoder},
    v4::{DhcpOption, HType, Message, MessageType, Opcode, OptionCode, UnknownOption},
};
use vmmd_spec::nic::Mac;

use super::{Host, Ipv4, Table, metadata, report::Declined};

/// Port of clients.
const CLIENT: u16 = 68;

/// Response to a packet, and its destination.
pub fn respond(table: &Table, packet: &[u8]) -> Option<(Vec<u8>, SocketAddrV4)> {
    let request = Message::decode(&mut Decoder::new(&sifted(packet)?)).ok()?;
    let mut answer = answer(table, &request)?;
    let mut reply = encoded(&answer.message)?;
    let longest = longest(table, &request);
    for code in dispensable(table) {
        if reply.len() <= longest {
            break;
        }
        answer.message.opts_mut().remove(code);
        reply = encoded(&answer.message)?;
    }
    reply.resize(reply.len().max(SHORTEST), 0);
    Some((reply, answer.to))
}

fn encoded(message: &Message) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    message.encode(&mut Encoder::new(&mut bytes)).ok()?;
    Some(bytes)
}

/// A client that declines its present address, because another host uses it (RFC 2131, 3.1.5).
pub fn declined(table: &Table, packet: &[u8]) -> Option<Declined> {
    let request = Message::decode(&mut Decoder::new(&sifted(packet)?)).ok()?;
    let host = table.hosts.get(&mac(request.chaddr()))?;
    let declines = request.opts().msg_type() == Some(MessageType::Decline)
        && asked(&request) == host.address
        && !is_for_another(table.ipv4.as_ref()?, &request);
    let octets: [u8; 6] = request.chaddr().try_into().ok()?;
    declines.then_some(Declined {
        mac: Mac::try_from(octets).ok()?,
        address: host.address?.into(),
    })
}

/// Bytes of the longest reply to a client: as it says (RFC 2132, 9.10), but no more than a packet of the network has.
fn longest(table: &Table, request: &Message) -> usize {
    let said = match request.opts().get(OptionCode::MaxMessageSize) {
        Some(DhcpOption::MaxMessageSize(size)) => *size,
        _ => 0,
    };
    usize::from(said.min(table.mtu)).max(SMALLEST_LIMIT) - IP_AND_UDP
}

/// Options that a client can do without, in the order in which a reply that is too long loses them.
fn dispensable(table: &Table) -> impl Iterator<Item = OptionCode> {
    let options = table.ipv4.iter().flat_map(|ipv4| ipv4.options.iter().rev());
    let options = options.filter_map(|option| Some(OptionCode::from(u8::try_from(option.code).ok()?)));
    [OptionCode::DomainSearch]
        .into_iter()
        .chain(options)
        .chain([OptionCode::NtpServers, OptionCode::ClasslessStaticRoute])
}

/// Bytes of a reply with the headers of IP and UDP that each client takes (RFC 2131, 2), and bytes of these headers.
const SMALLEST_LIMIT: usize = 576;
const IP_AND_UDP: usize = 28;
/// Least bytes of a reply for clients of BOOTP (RFC 1542, 2.1).
const SHORTEST: usize = 300;

/// Bytes of a message before its options, the magic cookie included (RFC 2131, 2).
const HEADER: usize = 240;
const COOKIE: [u8; 4] = [99, 130, 83, 99];
/// Options that an answer depends on, with their lengths: the type of the message, the address that is asked for, the server that is
/// meant, the longest reply (RFC 2132, 9.6, 9.1, 9.7, 9.10).
const NEEDED: [(u8, u8); 4] = [(53, 1), (50, 4), (54, 4), (57, 2)];
/// The client's identifier (RFC 2132, 9.14), and its longest value that is repeated: 64 bytes leave room for the other options.
const IDENTIFIER: u8 = 61;
const LONGEST_IDENTIFIER: u8 = 64;

/// A message with the header and the options that an answer depends on and nothing else: dhcproto panics on some options, and on a
/// hardware address that is too long.
fn sifted(packet: &[u8]) -> Option<Vec<u8>> {
    let (header, mut options) = packet.split_at_checked(HEADER)?;
    let mut sifted = header.to_vec();
    if !header.ends_with(&COOKIE) || header.get(2) != Some(&6) {
        return None;
    }
    // Names of a server and a file.
    sifted.get_mut(44..236)?.fill(0);
    while let Some((&code, rest)) = options.split_first() {
        match code {
            0 => options = rest,
            255 => break,
            code => {
                let (&length, rest) = rest.split_first()?;
                let (value, rest) = rest.split_at_checked(length.into())?;
                let identifies = code == IDENTIFIER && (2..=LONGEST_IDENTIFIER).contains(&length);
                if NEEDED.contains(&(code, length)) || identifies {
                    sifted.extend([code, length]);
                    sifted.extend(value);
                }
                options = rest;
            }
        }
    }
    sifted.push(255);
    Some(sifted)
}

/// An answer and where it goes.
#[derive(Clone, Debug, PartialEq)]
struct Answer {
    /// What is sent.
    message: Message,
    /// To whom: one client, or all.
    to: SocketAddrV4,
}

/// The answer to `request`; `None` when it is not for us, makes no sense or needs none.
fn answer(table: &Table, request: &Message) -> Option<Answer> {
    if request.opcode() != Opcode::BootRequest || request.htype() != HType::Eth || request.chaddr().len() != 6
    {
        return None;
    }
    // Relayed requests are of other networks.
    if !request.giaddr().is_unspecified() {
        return None;
    }
    let host = table.hosts.get(&mac(request.chaddr()))?;
    let (ipv4, own) = (table.ipv4.as_ref()?, host.address?);
    let kind = request.opts().msg_type()?;
    let kind = match kind {
        MessageType::Discover => MessageType::Offer,
        MessageType::Request if is_for_another(ipv4, request) => return None,
        MessageType::Request if asked(request) == Some(own) => MessageType::Ack,
        MessageType::Request => MessageType::Nak,
        MessageType::Inform => MessageType::Ack,
        // Addresses are kept for the VM's life: there is nothing to give back.
        _ => return None,
    };
    let informs = request.opts().msg_type() == Some(MessageType::Inform);
    let mut message = Message::default();
    message
        .set_opcode(Opcode::BootReply)
        .set_htype(HType::Eth)
        .set_xid(request.xid())
        .set_flags(request.flags())
        .set_chaddr(request.chaddr());
    message.opts_mut().insert(DhcpOption::MessageType(kind));
    message
        .opts_mut()
        .insert(DhcpOption::ServerIdentifier(ipv4.gateway));
    // RFC 6842, 3.
    if let Some(identifier) = request.opts().get(OptionCode::ClientIdentifier) {
        message.opts_mut().insert(identifier.clone());
    }
    if kind == MessageType::Nak {
        // It may believe to be elsewhere.
        return Some(Answer {
            message,
            to: SocketAddrV4::new(Ipv4Addr::BROADCAST, CLIENT),
        });
    }
    if informs {
        message.set_ciaddr(request.ciaddr());
    } else {
        message.set_yiaddr(own);
        lease(table, &mut message);
    }
    options((table, ipv4), host, &mut message);
    // A client without an address has no ARP, so its response is a broadcast. An address that the
    // client claims may belong to another host.
    let to = match request.ciaddr() {
        address if address == own => address,
        _ => Ipv4Addr::BROADCAST,
    };
    Some(Answer {
        message,
        to: SocketAddrV4::new(to, CLIENT),
    })
}

/// Whether the client has chosen another server's offer.
fn is_for_another(ipv4: &Ipv4, request: &Message) -> bool {
    let chosen = request.opts().get(OptionCode::ServerIdentifier);
    matches!(chosen, Some(DhcpOption::ServerIdentifier(server)) if *server != ipv4.gateway)
}

/// The address that the client asks for: that of an offer or of its memory, or the one that it has.
fn asked(request: &Message) -> Option<Ipv4Addr> {
    match request.opts().get(OptionCode::RequestedIpAddress) {
        Some(DhcpOption::RequestedIpAddress(address)) => Some(*address),
        _ => Some(request.ciaddr()).filter(|address| !address.is_unspecified()),
    }
}

fn lease(table: &Table, message: &mut Message) {
    let options = message.opts_mut();
    options.insert(DhcpOption::AddressLeaseTime(table.lease_seconds));
    // RFC 2131, 4.4.5: half, and seven eighths.
    options.insert(DhcpOption::Renewal(table.lease_seconds / 2));
    options.insert(DhcpOption::Rebinding(
        table.lease_seconds - table.lease_seconds / 8,
    ));
}

fn options((table, ipv4): (&Table, &Ipv4), host: &Host, message: &mut Message) {
    let options = message.opts_mut();
    options.insert(DhcpOption::SubnetMask(ipv4.mask));
    options.insert(DhcpOption::BroadcastAddr(ipv4.broadcast));
    options.insert(DhcpOption::InterfaceMtu(table.mtu));
    options.insert(DhcpOption::Hostname(host.name.clone()));
    // A guest has one default route, or answers leave by a NIC that may not send them.
    let has_way_out = table.routes && host.primary;
    if has_way_out {
        options.insert(DhcpOption::Router(vec![ipv4.gateway]));
    }
    options.insert(DhcpOption::DomainNameServer(vec![ipv4.gateway]));
    let domains = table.domains();
    // RFC 3397.
    let search = domains
        .iter()
        .map(|domain| Name::from_ascii(format!("{domain}.")));
    let search: Vec<_> = search.filter_map(Result::ok).collect();
    if !search.is_empty() {
        options.insert(DhcpOption::DomainSearch(search));
    }
    if let Some(domain) = domains.into_iter().next() {
        options.insert(DhcpOption::DomainName(domain));
    }
    let ntp = table.ntp.iter().filter_map(|server| match server {
        IpAddr::V4(server) => Some(*server),
        IpAddr::V6(_) => None,
    });
    let ntp: Vec<_> = ntp.collect();
    if !ntp.is_empty() {
        options.insert(DhcpOption::NtpServers(ntp));
    }
    let mut raw = |code: u8, value: Vec<u8>| {
        options.insert(DhcpOption::Unknown(UnknownOption::new(code.into(), value)));
    };
    let own = ipv4.routes.iter().map(|route| (route.to, route.via));
    // A guest without a default route reaches the metadata service, too.
    let metadata = host
        .metadata
        .iter()
        .map(|_| ((metadata::ADDRESS, 32), ipv4.gateway));
    let all: Vec<_> = own.chain(metadata).collect();
    if !all.is_empty() {
        let default = has_way_out.then_some(ipv4.gateway);
        raw(OptionCode::ClasslessStaticRoute.into(), routes(&all, default));
    }
    for option in &ipv4.options {
        if let Ok(code) = u8::try_from(option.code) {
            raw(code, option.value.clone());
        }
    }
}

/// Value of the option of classless static routes (RFC 3442). A client that takes it ignores the option of routers.
fn routes(routes: &[((Ipv4Addr, u8), Ipv4Addr)], default: Option<Ipv4Addr>) -> Vec<u8> {
    let mut value = Vec::new();
    let mut add = |to: Ipv4Addr, prefix: u8, via: Ipv4Addr| {
        let significant = usize::from(prefix.div_ceil(8));
        value.push(prefix);
        value.extend(to.octets().iter().take(significant));
        value.extend(via.octets());
    };
    for ((to, prefix), via) in routes {
        add(*to, *prefix, *via);
    }
    if let Some(gateway) = default {
        add(Ipv4Addr::UNSPECIFIED, 0, gateway);
    }
    value
}

/// "52:54:00:12:34:56".
pub fn mac(bytes: &[u8]) -> String {
    let pairs: Vec<_> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    pairs.join(":")
}

#[cfg(test)]
pub mod tests {
    use std::collections::BTreeMap;

    use dhcproto::v4::Flags;

    use super::*;

    const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 2);
    const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 1);

    pub fn table() -> Table {
        Table {
            network: "lan".into(),
            search: Vec::new(),
            domain: String::new(),
            records: BTreeMap::new(),
            routes: true,
            ipv4: Some(Ipv4 {
                gateway: GATEWAY,
                mask: [255, 255, 255, 0].into(),
                broadcast: [10, 80, 0, 255].into(),
                routes: Vec::new(),
                options: Vec::new(),
            }),
            mtu: 1400,
            forward: vec![[10, 0, 0, 53].into()],
            site: false,
            ntp: Vec::new(),
            lease_seconds: 3600,
            ipv6: Some(super::super::Ipv6 {
                bridge: "vmb0123456789".into(),
                mac: [2, 0, 0, 0, 0, 1],
                prefix: "fd00:80::".parse().unwrap(),
                routes: Vec::new(),
                options: Vec::new(),
            }),
            hosts: BTreeMap::from([(
                "52:54:00:00:00:01".to_owned(),
                Host {
                    address: Some(ADDRESS),
                    address6: Some("fd00:80::5054:ff:fe00:1".parse().unwrap()),
                    name: "web".into(),
                    primary: true,
                    metadata: None,
                },
            )]),
        }
    }

    fn request(kind: MessageType, options: &[DhcpOption]) -> Message {
        let mut message = Message::default();
        message
            .set_opcode(Opcode::BootRequest)
            .set_htype(HType::Eth)
            .set_xid(7)
            .set_flags(Flags::default())
            .set_chaddr(&MAC);
        message.opts_mut().insert(DhcpOption::MessageType(kind));
        for option in options {
            message.opts_mut().insert(option.clone());
        }
        message
    }

    fn kind(answer: &Answer) -> MessageType {
        answer.message.opts().msg_type().unwrap()
    }

    #[test]
    fn a_client_is_offered_its_address_with_all_that_it_needs() {
        let offer = answer(&table(), &request(MessageType::Discover, &[])).unwrap();
        assert_eq!(
            (kind(&offer), offer.message.yiaddr()),
            (MessageType::Offer, ADDRESS)
        );
        assert_eq!(offer.to, SocketAddrV4::new(Ipv4Addr::BROADCAST, 68));
        let options = offer.message.opts();
        for expected in [
            DhcpOption::SubnetMask([255, 255, 255, 0].into()),
            DhcpOption::Router(vec![GATEWAY]),
            DhcpOption::DomainNameServer(vec![GATEWAY]),
            DhcpOption::DomainName("lan.internal".into()),
            DhcpOption::DomainSearch(vec![Name::from_ascii("lan.internal.").unwrap()]),
            DhcpOption::InterfaceMtu(1400),
            DhcpOption::Hostname("web".into()),
            DhcpOption::AddressLeaseTime(3600),
            DhcpOption::Renewal(1800),
            DhcpOption::Rebinding(3150),
            DhcpOption::ServerIdentifier(GATEWAY),
        ] {
            let code = OptionCode::from(&expected);
            assert_eq!(options.get(code), Some(&expected));
        }
        assert!(options.get(OptionCode::NtpServers).is_none());
    }

    #[test]
    fn client_in_a_pod_is_offered_its_search_domains() {
        let search = ["ns.svc.cluster.local", "cluster.local"]
            .map(str::to_owned)
            .to_vec();
        let pod = Table {
            network: String::new(),
            search: search.clone(),
            ..table()
        };
        let offer = answer(&pod, &request(MessageType::Discover, &[])).unwrap();
        let options = offer.message.opts();
        let names = search
            .iter()
            .map(|name| Name::from_ascii(format!("{name}.")).unwrap());
        for expected in [
            DhcpOption::DomainName(search[0].clone()),
            DhcpOption::DomainSearch(names.collect()),
        ] {
            assert_eq!(options.get(OptionCode::from(&expected)), Some(&expected));
        }
        let none = Table {
            search: Vec::new(),
            ..pod
        };
        let offer = answer(&none, &request(MessageType::Discover, &[])).unwrap();
        assert!(offer.message.opts().get(OptionCode::DomainName).is_none());
    }

    #[test]
    fn only_the_primary_nic_of_a_vm_has_a_router() {
        let mut table = table();
        for primary in [true, false] {
            table.hosts.values_mut().for_each(|host| host.primary = primary);
            let offer = answer(&table, &request(MessageType::Discover, &[])).unwrap();
            let router = offer.message.opts().get(OptionCode::Router);
            assert_eq!(router.is_some(), primary);
        }
    }

    #[test]
    fn reply_has_the_identifier_of_the_client_and_300_bytes() {
        let identifier = DhcpOption::ClientIdentifier(vec![255, 1, 2, 3, 4]);
        for address in [ADDRESS, [10, 80, 0, 9].into()] {
            let requested = DhcpOption::RequestedIpAddress(address);
            let request = request(MessageType::Request, &[identifier.clone(), requested]);
            let (reply, _) = respond(&table(), &encoded(&request).unwrap()).unwrap();
            let message = Message::decode(&mut Decoder::new(&reply)).unwrap();
            assert_eq!(
                message.opts().get(OptionCode::ClientIdentifier),
                Some(&identifier)
            );
            assert!(reply.len() >= 300, "{}", reply.len());
        }
    }

    #[test]
    fn declined_address_is_that_of_the_client_by_this_server() {
        let decline = |server, address| {
            let options = [
                DhcpOption::ServerIdentifier(server),
                DhcpOption::RequestedIpAddress(address),
            ];
            encoded(&request(MessageType::Decline, &options)).unwrap()
        };
        let report = Declined {
            mac: MAC.try_into().unwrap(),
            address: ADDRESS.into(),
        };
        let other = [10, 80, 0, 7].into();
        assert_eq!(declined(&table(), &decline(GATEWAY, ADDRESS)), Some(report));
        assert_eq!(declined(&table(), &decline(GATEWAY, other)), None);
        assert_eq!(declined(&table(), &decline(other, ADDRESS)), None);
        assert_eq!(declined(&table(), &discover(&[255])), None);
    }

    /// A table with a route, and an option with a value of this length.
    fn with_options(length: usize) -> Table {
        let mut table = table();
        let ipv4 = table.ipv4.as_mut().unwrap();
        ipv4.routes = vec![super::super::Route4 {
            to: ([10, 90, 0, 0].into(), 15),
            via: [10, 80, 0, 9].into(),
        }];
        ipv4.options = vec![super::super::DhcpOption {
            code: 66,
            value: vec![b'a'; length],
        }];
        table
    }

    fn raw(offer: &Answer, code: u8) -> Option<Vec<u8>> {
        let bytes = encoded(&offer.message).unwrap();
        let message = Message::decode(&mut Decoder::new(&bytes)).unwrap();
        let mut value = Vec::new();
        let option = message.opts().get(OptionCode::from(code))?;
        option.encode(&mut Encoder::new(&mut value)).unwrap();
        Some(value[2..].to_vec())
    }

    #[test]
    fn client_gets_routes_with_the_default_route_and_options() {
        let mut table = with_options(3);
        let asks = request(MessageType::Discover, &[]);
        let offer = answer(&table, &asks).unwrap();
        let route = [15, 10, 90, 10, 80, 0, 9];
        let default = [0, 10, 80, 0, 1];
        assert_eq!(raw(&offer, 121), Some([&route[..], &default].concat()));
        assert_eq!(raw(&offer, 66), Some(b"aaa".to_vec()));
        table.routes = false;
        let offer = answer(&table, &asks).unwrap();
        assert_eq!(raw(&offer, 121), Some(route.to_vec()));
    }

    #[test]
    fn reply_loses_options_that_the_client_has_no_room_for() {
        let table = with_options(253);
        let found = |options: &[DhcpOption]| {
            let packet = encoded(&request(MessageType::Discover, options)).unwrap();
            let (reply, _) = respond(&table, &packet).unwrap();
            let message = Message::decode(&mut Decoder::new(&reply)).unwrap();
            let has = |code: u8| message.opts().get(OptionCode::from(code)).is_some();
            (reply.len(), has(119), has(66), has(121))
        };
        let (length, search, option, routes) = found(&[]);
        assert!(length <= SMALLEST_LIMIT - IP_AND_UDP, "{length}");
        assert_eq!((search, option, routes), (false, false, true));
        let (_, search, option, routes) = found(&[DhcpOption::MaxMessageSize(1400)]);
        assert_eq!((search, option, routes), (true, true, true));
        let small = found(&[DhcpOption::MaxMessageSize(1)]);
        assert!(!small.2);
    }

    #[test]
    fn its_own_address_is_acknowledged_and_another_one_is_not() {
        let ask = |address| {
            answer(
                &table(),
                &request(MessageType::Request, &[DhcpOption::RequestedIpAddress(address)]),
            )
        };
        let ack = ask(ADDRESS).unwrap();
        assert_eq!((kind(&ack), ack.message.yiaddr()), (MessageType::Ack, ADDRESS));
        let nak = ask([10, 80, 0, 9].into()).unwrap();
        assert_eq!(
            (kind(&nak), nak.message.yiaddr()),
            (MessageType::Nak, Ipv4Addr::UNSPECIFIED)
        );
        assert!(nak.message.opts().get(OptionCode::AddressLeaseTime).is_none());
    }

    #[test]
    fn a_client_that_renews_is_answered_at_its_address() {
        let mut renewal = request(MessageType::Request, &[]);
        renewal.set_ciaddr(ADDRESS);
        let ack = answer(&table(), &renewal).unwrap();
        assert_eq!(
            (kind(&ack), ack.to),
            (MessageType::Ack, SocketAddrV4::new(ADDRESS, 68))
        );
    }

    #[test]
    fn an_answer_does_not_go_to_an_address_of_another_vm() {
        let mut renewal = request(MessageType::Discover, &[]);
        renewal.set_ciaddr([10, 80, 0, 9]);
        let offer = answer(&table(), &renewal).unwrap();
        assert_eq!(
            (kind(&offer), offer.to),
            (MessageType::Offer, SocketAddrV4::new(Ipv4Addr::BROADCAST, 68))
        );
    }

    #[test]
    fn what_is_for_others_or_of_strangers_is_not_answered() {
        let other = DhcpOption::ServerIdentifier([10, 80, 0, 7].into());
        let wanted = DhcpOption::RequestedIpAddress(ADDRESS);
        assert!(answer(&table(), &request(MessageType::Request, &[other, wanted])).is_none());
        assert!(answer(&table(), &request(MessageType::Release, &[])).is_none());
        assert!(answer(&table(), &request(MessageType::Decline, &[])).is_none());
        let mut stranger = request(MessageType::Discover, &[]);
        stranger.set_chaddr(&[2, 0, 0, 0, 0, 9]);
        assert!(answer(&table(), &stranger).is_none());
        let mut relayed = request(MessageType::Discover, &[]);
        relayed.set_giaddr([10, 1, 1, 1]);
        assert!(answer(&table(), &relayed).is_none());
        let mut reply = request(MessageType::Discover, &[]);
        reply.set_opcode(Opcode::BootReply);
        assert!(answer(&table(), &reply).is_none());
    }

    /// A request for an address, with more options.
    fn discover(options: &[u8]) -> Vec<u8> {
        let mut packet = vec![1, 1, 6, 0];
        packet.resize(28, 0);
        packet.extend([0x52, 0x54, 0, 0, 0, 1]);
        packet.resize(236, 0);
        packet.extend(COOKIE);
        packet.extend([53, 1, 1]);
        packet.extend(options);
        packet
    }

    #[test]
    fn a_request_is_answered_whatever_else_is_in_it() {
        for options in [
            &[255][..],
            &[],
            // A fully qualified name that is too short, and a class (RFC 4702).
            &[81, 1, 0, 0, 60, 4, b'u', b'd', b'h', b'c', 255],
        ] {
            assert!(respond(&table(), &discover(options)).is_some(), "{options:?}");
        }
        assert!(
            respond(&table(), &discover(&[60, 4, 1])).is_none(),
            "an option that is cut off"
        );
    }

    #[test]
    fn a_hardware_address_that_is_longer_than_its_field_is_no_request() {
        let mut packet = discover(&[255]);
        packet[2] = 200;
        assert!(respond(&table(), &packet).is_none());
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig { cases: 5000, ..Default::default() })]

        #[test]
        fn no_packet_does_harm(packet in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..600)) {
            respond(&table(), &packet);
        }

        /// Behind a header that is right.
        #[test]
        fn no_options_do_harm(options in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400)) {
            respond(&table(), &discover(&options));
        }
    }
}

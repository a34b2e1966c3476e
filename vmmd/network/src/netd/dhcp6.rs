//! Response to a DHCP client for IPv6 (RFC 8415): a pure function of the table.
//!
//! A guest has the same address by DHCP as by its MAC address ([`super::ra`]). A client chooses its
//! identifier and its link-local address, so neither names a NIC. The helper has a packet socket for
//! this reason, and reads the sender's MAC address, which the packet filter has checked. The socket
//! is bound to the bridge, and a filter that cannot be removed passes requests only.

use std::{
    io,
    net::{IpAddr, Ipv6Addr},
};

use dhcproto::{
    Name,
    encoder::{Encodable as _, Encoder},
    v6::{
        CLIENT_PORT, DhcpOption, DhcpOptions, IAAddr, IANA, Message, MessageType, SERVER_PORT, Status,
        StatusCode, UnknownOption,
    },
};
use rustix::net::netdevice::name_to_index;
use socket2::{Domain, SockFilter, Socket, Type};
use vmmd_host::sys;
use vmmd_spec::{network::link_local, nic::Mac};

use super::{Host, Ipv6, Table, dhcp::mac, report::Declined};

/// EtherType of IPv6, and the number of UDP (IANA).
const ETHERTYPE: u16 = 0x86dd;
const UDP: u8 = 17;
/// Bytes of the headers of Ethernet, IPv6 and UDP.
const ETHERNET: usize = 14;
const IP: usize = 40;
const HEADERS: usize = ETHERNET + IP + 8;
/// Options of a request that an answer depends on (RFC 8415, 21).
const CLIENT_ID: u16 = 1;
const SERVER_ID: u16 = 2;
const IA_NA: u16 = 3;
const IA_ADDR: u16 = 5;
const RAPID_COMMIT: u16 = 14;
/// Options of NTP servers (RFC 4075, 4; RFC 5908, 4).
const SNTP_SERVERS: u16 = 31;
const NTP_SERVER: u16 = 56;
/// Longest identifier of a client (RFC 8415, 11.1).
const LONGEST_IDENTIFIER: usize = 130;
/// Most associations and addresses of a request: a NIC has one of each.
const MOST: usize = 4;

/// A socket for requests on the network's interface. Needs `CAP_NET_RAW`.
pub fn open(ipv6: &Ipv6) -> io::Result<Socket> {
    /// Steps of a program of classic BPF (linux/filter.h): load 16 or 8 bits, compare, return.
    const LOAD_HALF: u16 = 0x28;
    const LOAD_BYTE: u16 = 0x30;
    const EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    // No frames come before the socket is bound.
    let socket = Socket::new(Domain::PACKET, Type::RAW, None)?;
    socket.attach_filter(&[
        SockFilter::new(LOAD_HALF, 0, 0, 12),
        SockFilter::new(EQUAL, 0, 5, ETHERTYPE.into()),
        SockFilter::new(LOAD_BYTE, 0, 0, 14 + 6),
        SockFilter::new(EQUAL, 0, 3, UDP.into()),
        SockFilter::new(LOAD_HALF, 0, 0, 14 + 40 + 2),
        SockFilter::new(EQUAL, 0, 1, SERVER_PORT.into()),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
        SockFilter::new(RETURN, 0, 0, 0),
    ])?;
    socket.set_nonblocking(true)?;
    let index = name_to_index(&socket, &ipv6.bridge)?;
    sys::bind_packet(&socket, ETHERTYPE, index)?;
    Ok(socket)
}

/// A request, as far as an answer depends on it.
struct Request<'a> {
    kind: MessageType,
    number: [u8; 3],
    client: &'a [u8],
    server: Option<&'a [u8]>,
    /// Identity associations: their numbers, and the addresses in them.
    associations: Vec<(u32, Vec<Ipv6Addr>)>,
    is_rapid: bool,
}

/// Response to a frame of a guest: a frame for that guest.
pub fn respond(table: &Table, frame: &[u8]) -> Option<Vec<u8>> {
    let ipv6 = table.ipv6.as_ref()?;
    let (sender, client, request) = read(frame)?;
    let host = table.hosts.get(&mac(sender))?;
    let message = answer(table, ipv6, host, &request)?;
    let mut payload = Vec::new();
    message.encode(&mut Encoder::new(&mut payload)).ok()?;
    self::frame(ipv6, (*sender, client), &payload)
}

/// A client that declines its address, because another host uses it (RFC 8415, 18.2.8).
pub fn declined(table: &Table, frame: &[u8]) -> Option<Declined> {
    let ipv6 = table.ipv6.as_ref()?;
    let (sender, _, request) = read(frame)?;
    let own = table.hosts.get(&mac(sender))?.address6?;
    let mut addresses = request.associations.iter().flat_map(|(_, addresses)| addresses);
    let declines = request.kind == MessageType::Decline
        && request.server == Some(&identifier(ipv6))
        && addresses.any(|address| *address == own);
    declines.then_some(Declined {
        mac: Mac::try_from(*sender).ok()?,
        address: own.into(),
    })
}

/// The sender of a frame, its link-local address, and its request.
fn read(frame: &[u8]) -> Option<(&[u8; 6], Ipv6Addr, Request<'_>)> {
    let sender: &[u8; 6] = frame.get(6..12)?.first_chunk()?;
    if frame.get(12..14)? != ETHERTYPE.to_be_bytes() || frame.get(ETHERNET + 6) != Some(&UDP) {
        return None;
    }
    let client: [u8; 16] = *frame.get(ETHERNET + 8..)?.first_chunk()?;
    let client = Ipv6Addr::from(client);
    let udp: &[u8; 8] = frame.get(ETHERNET + IP..)?.first_chunk()?;
    if !client.is_unicast_link_local() || udp[2..4] != SERVER_PORT.to_be_bytes() {
        return None;
    }
    let length = usize::from(u16::from_be_bytes([udp[4], udp[5]]));
    let payload = frame.get(HEADERS..ETHERNET + IP + length)?;
    Some((sender, client, parse(payload)?))
}

/// Identifier of the server: DUID-LL of an Ethernet interface (RFC 8415, 11.4).
fn identifier(ipv6: &Ipv6) -> [u8; 10] {
    let [a, b, c, d, e, f] = ipv6.mac;
    [0, 3, 0, 1, a, b, c, d, e, f]
}

/// The kind and the number of a message, and its options.
fn parse(payload: &[u8]) -> Option<Request<'_>> {
    let ([kind, number @ ..], options) = payload.split_first_chunk::<4>()?;
    let mut request = Request {
        kind: MessageType::from(*kind),
        number: *number,
        client: &[],
        server: None,
        associations: Vec::new(),
        is_rapid: false,
    };
    for (code, value) in Options(options) {
        match code {
            CLIENT_ID => request.client = value,
            SERVER_ID => request.server = Some(value),
            IA_NA if request.associations.len() < MOST => {
                let (head, options) = value.split_first_chunk::<12>()?;
                let addresses = Options(options).filter(|(code, _)| *code == IA_ADDR);
                let addresses = addresses.filter_map(|(_, value)| value.first_chunk::<16>());
                let addresses = addresses.map(|octets| Ipv6Addr::from(*octets)).take(MOST);
                let number = u32::from_be_bytes(*head.first_chunk()?);
                request.associations.push((number, addresses.collect()));
            }
            RAPID_COMMIT => request.is_rapid = true,
            _ => {}
        }
    }
    Some(request)
}

/// Options: a code, a length, and a value each.
struct Options<'a>(&'a [u8]);

impl<'a> Iterator for Options<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let ([a, b, c, d], rest) = self.0.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u16::from_be_bytes([*c, *d]).into())?;
        self.0 = rest;
        Some((u16::from_be_bytes([*a, *b]), value))
    }
}

fn answer(table: &Table, ipv6: &Ipv6, host: &Host, request: &Request<'_>) -> Option<Message> {
    use MessageType::{
        Advertise, Confirm, Decline, InformationRequest, Rebind, Release, Renew, Reply, Request as Ask,
        Solicit,
    };
    let own = identifier(ipv6);
    // RFC 8415, 16: which messages name the server.
    let is_named = match request.server {
        Some(server) if server != own => return None,
        server => server.is_some(),
    };
    let has_client = (1..=LONGEST_IDENTIFIER).contains(&request.client.len());
    let (kind, is_valid) = match request.kind {
        Solicit if request.is_rapid => (Reply, !is_named),
        Solicit => (Advertise, !is_named),
        Confirm | Rebind => (Reply, !is_named),
        Ask | Renew | Release | Decline => (Reply, is_named),
        InformationRequest => (Reply, true),
        _ => return None,
    };
    if !is_valid || !has_client && (request.kind != InformationRequest || !request.client.is_empty()) {
        return None;
    }
    let mut message = Message::new_with_id(kind, request.number);
    let options = message.opts_mut();
    options.insert(DhcpOption::ServerId(own.to_vec()));
    if has_client {
        options.insert(DhcpOption::ClientId(request.client.to_vec()));
    }
    match request.kind {
        Solicit | Ask | Renew | Rebind => {
            let address = host.address6?;
            if request.kind == Solicit && request.associations.is_empty() {
                return None;
            }
            for (place, (number, old)) in request.associations.iter().enumerate() {
                let given = (place == 0).then_some(address);
                options.insert(association(table, *number, given, old));
            }
            if request.kind == Solicit && request.is_rapid {
                options.insert(DhcpOption::RapidCommit);
            }
        }
        Confirm => {
            let mut old = request.associations.iter().flat_map(|(_, old)| old).peekable();
            old.peek()?;
            let is_here = old.all(|old| ipv6.has(*old));
            options.insert(status(if is_here {
                Status::Success
            } else {
                Status::NotOnLink
            }));
        }
        // Addresses are kept for the VM's life: there is nothing to give back.
        Release | Decline => options.insert(status(Status::Success)),
        _ => {}
    }
    options.insert(DhcpOption::DomainNameServers(vec![ipv6.gateway()]));
    let domains = table.domains();
    let domains = domains
        .iter()
        .map(|domain| Name::from_ascii(format!("{domain}.")));
    let domains: Vec<_> = domains.filter_map(Result::ok).collect();
    if !domains.is_empty() {
        options.insert(DhcpOption::DomainSearchList(domains));
    }
    let mut raw = |code: u16, value: Vec<u8>| {
        options.insert(DhcpOption::Unknown(UnknownOption::new(code.into(), value)));
    };
    let ntp = table.ntp.iter().filter_map(|server| match server {
        IpAddr::V4(_) => None,
        IpAddr::V6(server) => Some(server.octets()),
    });
    let ntp: Vec<_> = ntp.collect();
    if !ntp.is_empty() {
        // An address is a suboption of the later one.
        let head = [0, 1, 0, 16];
        raw(SNTP_SERVERS, ntp.concat());
        raw(
            NTP_SERVER,
            ntp.iter()
                .flat_map(|server| [&head[..], server].concat())
                .collect(),
        );
    }
    for option in &ipv6.options {
        raw(option.code, option.value.clone());
    }
    Some(message)
}

fn status(status: Status) -> DhcpOption {
    DhcpOption::StatusCode(StatusCode {
        status,
        msg: String::new(),
    })
}

/// An association with its address, and without the ones that the client has from elsewhere (RFC 8415, 18.3.4).
fn association(table: &Table, id: u32, given: Option<Ipv6Addr>, old: &[Ipv6Addr]) -> DhcpOption {
    let address = |addr, life| {
        DhcpOption::IAAddr(IAAddr {
            addr,
            preferred_life: life,
            valid_life: life,
            opts: DhcpOptions::new(),
        })
    };
    let life = table.lease_seconds;
    let mut association = IANA {
        id,
        t1: 0,
        t2: 0,
        opts: DhcpOptions::new(),
    };
    for old in old.iter().filter(|old| Some(**old) != given) {
        association.opts.insert(address(*old, 0));
    }
    match given {
        Some(given) => {
            // RFC 8415, 21.4: half, and eight tenths.
            (association.t1, association.t2) = (life / 2, life / 5 * 4);
            association.opts.insert(address(given, life));
        }
        None => association.opts.insert(status(Status::NoAddrsAvail)),
    }
    DhcpOption::IANA(association)
}

/// The frame of an answer to a client with these addresses.
fn frame(ipv6: &Ipv6, (mac, client): ([u8; 6], Ipv6Addr), payload: &[u8]) -> Option<Vec<u8>> {
    let server = link_local(Mac::try_from(ipv6.mac).ok()?);
    let length = u16::try_from(8 + payload.len()).ok()?;
    let mut udp = Vec::new();
    udp.extend(SERVER_PORT.to_be_bytes());
    udp.extend(CLIENT_PORT.to_be_bytes());
    udp.extend(length.to_be_bytes());
    let mut sum = u64::from(length) + u64::from(UDP);
    let words = |bytes: &[u8]| -> u64 {
        let pairs = bytes.chunks(2).map(|pair| match pair {
            [high, low] => u64::from(u16::from_be_bytes([*high, *low])),
            [high] => u64::from(*high) << 8,
            _ => 0,
        });
        pairs.sum()
    };
    for part in [&server.octets()[..], &client.octets(), &udp, payload] {
        sum += words(part);
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // RFC 8200, 8.1: a sum of zero is sent as its complement.
    let sum = match !u16::try_from(sum).ok()? {
        0 => u16::MAX,
        sum => sum,
    };
    udp.extend(sum.to_be_bytes());
    let mut frame = [&mac[..], &ipv6.mac, &ETHERTYPE.to_be_bytes(), &[0x60, 0, 0, 0]].concat();
    frame.extend(length.to_be_bytes());
    frame.extend([UDP, 64]);
    frame.extend(server.octets());
    frame.extend(client.octets());
    frame.extend(udp);
    frame.extend(payload);
    Some(frame)
}

#[cfg(test)]
mod tests {
    use dhcproto::{
        decoder::{Decodable as _, Decoder},
        v6::OptionCode,
    };

    use super::{super::dhcp::tests::table, *};

    const SERVER: [u8; 10] = [0, 3, 0, 1, 2, 0, 0, 0, 0, 1];

    /// A frame of the client with the MAC address 52:54:00:00:00:01 and a link-local address of its own choice.
    fn request(kind: MessageType, options: &[DhcpOption]) -> Vec<u8> {
        let mut message = Message::new_with_id(kind, [1, 2, 3]);
        for option in options {
            message.opts_mut().insert(option.clone());
        }
        let mut payload = Vec::new();
        message.encode(&mut Encoder::new(&mut payload)).unwrap();
        let length = u16::try_from(payload.len() + 8).unwrap().to_be_bytes();
        let mut frame = vec![0x33, 0x33, 0, 1, 0, 2, 0x52, 0x54, 0, 0, 0, 1, 0x86, 0xdd];
        frame.extend([0x60, 0, 0, 0, length[0], length[1], 17, 1]);
        frame.extend("fe80::abcd".parse::<Ipv6Addr>().unwrap().octets());
        frame.extend("ff02::1:2".parse::<Ipv6Addr>().unwrap().octets());
        frame.extend([2, 34, 2, 35, length[0], length[1], 0, 0]);
        frame.extend(payload);
        frame
    }

    fn client() -> DhcpOption {
        DhcpOption::ClientId(vec![0, 4, 9, 9])
    }

    fn server() -> DhcpOption {
        DhcpOption::ServerId(SERVER.to_vec())
    }

    fn wants(old: &[&str]) -> DhcpOption {
        let DhcpOption::IANA(mut association) = association(&table(), 7, None, &[]) else {
            panic!("no association");
        };
        association.opts = DhcpOptions::new();
        for old in old {
            association.opts.insert(DhcpOption::IAAddr(IAAddr {
                addr: old.parse().unwrap(),
                preferred_life: 5,
                valid_life: 5,
                opts: DhcpOptions::new(),
            }));
        }
        DhcpOption::IANA(association)
    }

    fn decoded(frame: &[u8]) -> Message {
        Message::decode(&mut Decoder::new(&frame[HEADERS..])).unwrap()
    }

    /// The addresses of an answer, with their lifetimes.
    fn addresses(message: &Message) -> Vec<(String, u32)> {
        let Some(DhcpOption::IANA(association)) = message.opts().get(OptionCode::IANA) else {
            return Vec::new();
        };
        assert_eq!(association.id, 7);
        let mut found: Vec<_> = association
            .opts
            .iter()
            .filter_map(|option| match option {
                DhcpOption::IAAddr(address) => Some((address.addr.to_string(), address.valid_life)),
                _ => None,
            })
            .collect();
        found.sort();
        found
    }

    const OWN: &str = "fd00:80::5054:ff:fe00:1";

    #[test]
    fn client_gets_the_address_of_its_nic() {
        use MessageType::{Advertise, Rebind, Renew, Reply, Request as Ask, Solicit};
        let asks = [client(), wants(&[])];
        let names = [client(), server(), wants(&[])];
        let rapid = [client(), wants(&[]), DhcpOption::RapidCommit];
        for (kind, options, expected) in [
            (Solicit, &asks[..], Advertise),
            (Solicit, &rapid, Reply),
            (Ask, &names, Reply),
            (Renew, &names, Reply),
            (Rebind, &asks, Reply),
        ] {
            let reply = respond(&table(), &request(kind, options)).unwrap();
            let message = decoded(&reply);
            assert_eq!((message.msg_type(), message.xid()), (expected, [1, 2, 3]));
            assert_eq!(addresses(&message), [(OWN.to_owned(), 3600)], "{kind:?}");
            assert_eq!(message.opts().get(OptionCode::ClientId), Some(&client()));
            assert_eq!(message.opts().get(OptionCode::ServerId), Some(&server()));
            let names = DhcpOption::DomainNameServers(vec!["fd00:80::1".parse().unwrap()]);
            assert_eq!(message.opts().get(OptionCode::DomainNameServers), Some(&names));
            let is_rapid = message.opts().get(OptionCode::RapidCommit).is_some();
            assert_eq!(is_rapid, options.len() == 3 && kind == Solicit);
        }
    }

    #[test]
    fn client_gets_time_servers_and_options_of_the_network() {
        let mut table = table();
        let server: Ipv6Addr = "2001:db8::123".parse().unwrap();
        table.ntp = vec![[192, 0, 2, 123].into(), server.into()];
        table.ipv6.as_mut().unwrap().options = vec![super::super::DhcpOption {
            code: 59,
            value: b"http://192.0.2.1/".to_vec(),
        }];
        let reply = respond(&table, &request(MessageType::InformationRequest, &[client()])).unwrap();
        let all: Vec<_> = Options(&reply[HEADERS + 4..]).collect();
        let value = |wanted: u16| all.iter().find(|(code, _)| *code == wanted).unwrap().1;
        assert_eq!(value(SNTP_SERVERS), server.octets());
        assert_eq!(value(NTP_SERVER), [&[0, 1, 0, 16][..], &server.octets()].concat());
        assert_eq!(value(59), b"http://192.0.2.1/");
    }

    #[test]
    fn declined_address_is_that_of_the_client_by_this_server() {
        let declined = |options: &[DhcpOption]| {
            declined(&table(), &request(MessageType::Decline, options)).map(|declined| declined.to_string())
        };
        let report = Some(format!("52:54:00:00:00:01 {OWN}"));
        assert_eq!(declined(&[client(), server(), wants(&[OWN])]), report);
        assert_eq!(declined(&[client(), wants(&[OWN])]), None);
        assert_eq!(declined(&[client(), server(), wants(&["fd00:80::5"])]), None);
    }

    #[test]
    fn answer_is_a_frame_for_the_client() {
        let reply = respond(&table(), &request(MessageType::Solicit, &[client(), wants(&[])])).unwrap();
        assert_eq!(
            reply[..14],
            [0x52, 0x54, 0, 0, 0, 1, 2, 0, 0, 0, 0, 1, 0x86, 0xdd]
        );
        let source = "fe80::ff:fe00:1".parse::<Ipv6Addr>().unwrap();
        assert_eq!(reply[22..38], source.octets());
        assert_eq!(reply[38..54], "fe80::abcd".parse::<Ipv6Addr>().unwrap().octets());
        assert_eq!(reply[54..58], [2, 35, 2, 34]);
        // The sum over the pseudo header and the datagram (RFC 8200, 8.1).
        let mut pseudo = reply[22..54].to_vec();
        pseudo.extend([0, 0, reply[58], reply[59], 0, 0, 0, 17]);
        pseudo.extend(&reply[54..]);
        pseudo.resize(pseudo.len().next_multiple_of(2), 0);
        let sum: u32 = pseudo
            .chunks(2)
            .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]))
            .sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    }

    #[test]
    fn other_addresses_of_a_client_end() {
        let old = wants(&[OWN, "fd00:99::5"]);
        let reply = respond(&table(), &request(MessageType::Rebind, &[client(), old.clone()])).unwrap();
        let expected = [(OWN.to_owned(), 3600), ("fd00:99::5".to_owned(), 0)];
        assert_eq!(addresses(&decoded(&reply)), expected);
        let here = |old| {
            let reply = respond(&table(), &request(MessageType::Confirm, &[client(), old])).unwrap();
            match decoded(&reply).opts().get(OptionCode::StatusCode) {
                Some(DhcpOption::StatusCode(code)) => code.status,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(here(old), Status::NotOnLink);
        assert_eq!(here(wants(&[OWN])), Status::Success);
    }

    #[test]
    fn strangers_and_messages_for_others_are_not_answered() {
        use MessageType::{Confirm, Request as Ask, Solicit};
        let solicit = request(Solicit, &[client(), wants(&[])]);
        let changed = |place: usize, value| {
            let mut frame = solicit.clone();
            frame[place] = value;
            respond(&table(), &frame)
        };
        assert!(changed(11, 9).is_none(), "another MAC address");
        assert!(changed(22, 0x20).is_none(), "an address that is not of the link");
        assert!(changed(57, 36).is_none(), "another port");
        assert!(changed(20, 6).is_none(), "TCP");
        let other = DhcpOption::ServerId(vec![0, 3, 0, 1, 9, 9, 9, 9, 9, 9]);
        for (kind, options) in [
            (Ask, vec![client(), other, wants(&[])]),
            (Ask, vec![client(), wants(&[])]),
            (Solicit, vec![client(), server(), wants(&[])]),
            (Solicit, vec![wants(&[])]),
            (Solicit, vec![client()]),
            (Confirm, vec![client(), wants(&[])]),
        ] {
            assert!(respond(&table(), &request(kind, &options)).is_none(), "{kind:?}");
        }
        let without = Table {
            ipv6: None,
            ..table()
        };
        assert!(respond(&without, &solicit).is_none());
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig { cases: 3000, ..Default::default() })]

        #[test]
        fn no_message_does_harm(
            kind in 0_u8..14,
            payload in proptest::collection::vec(
                proptest::prop_oneof![proptest::prelude::any::<u8>(), 0_u8..20], 0..200,
            ),
        ) {
            let mut frame = request(MessageType::from(kind), &[client()]);
            frame.extend(payload);
            let length = u16::try_from(frame.len() - ETHERNET - IP).unwrap().to_be_bytes();
            frame[58..60].copy_from_slice(&length);
            if let Some(reply) = respond(&table(), &frame) {
                decoded(&reply);
                assert!(reply.len() < 1294, "more than the least MTU of IPv6");
            }
        }
    }
}

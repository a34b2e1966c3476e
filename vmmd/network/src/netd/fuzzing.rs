//! Entry points of the fuzz targets (`vmmd/fuzz`), one function per target. Each accepts any bytes
//! and processes them like packets of guests and name servers. It panics when the helper would send
//! an invalid answer. The tests here run the functions over the seeds and over generated input.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4},
    sync::LazyLock,
    time::{Duration, Instant},
};

use dhcproto::{
    decoder::{Decodable as _, Decoder},
    v4::{self, MessageType, OptionCode},
    v6,
};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RData,
};

use super::{
    DhcpOption, Host, Ipv4, Ipv6, Route4, Route6, Table, dhcp, dhcp6,
    dns::{self, Question, Verdict, Way},
    forward::{Answer, Event, MAX_PENDING, MAX_PENDING_OF_GUEST, Outgoing, PATIENCE, Queries, SOCKETS},
    ra::{self, PAUSE, PERIOD, Schedule},
};

/// A request to the metadata service.
pub use super::metadata::fuzz as metadata_request;

/// A common network, and one whose names and lists are as long as they may be.
static TABLES: LazyLock<[Table; 2]> = LazyLock::new(|| {
    let common = table("lan", &["web", "db", "db"]);
    let mut longest = Table {
        routes: false,
        forward: Vec::new(),
        domain: format!("{0}.{0}", "d".repeat(49)),
        records: BTreeMap::from([("record.lan".to_owned(), SERVERS.to_vec())]),
        ntp: SERVERS.repeat(2),
        ..table(&"n".repeat(63), &vec!["h".repeat(63); 64])
    };
    let option = DhcpOption {
        code: 66,
        value: vec![b'o'; 253],
    };
    if let Some(ipv4) = &mut longest.ipv4 {
        let to = |number| (Ipv4Addr::new(10, 90, number, 0), 24);
        let via = Ipv4Addr::new(10, 80, 0, 2);
        ipv4.routes = (0..16).map(|number| Route4 { to: to(number), via }).collect();
        ipv4.options = vec![option.clone()];
    }
    if let Some(ipv6) = &mut longest.ipv6 {
        let to = |number| (Ipv6Addr::new(0x2001, 0xdb8, number, 0, 0, 0, 0, 0), 65);
        ipv6.routes = (0..16).map(|number| Route6 { to: to(number) }).collect();
        ipv6.options = vec![option];
    }
    [common, longest]
});

/// The NICs have the MAC addresses 52:54:00:00:00:01 and so on, and the addresses 10.80.0.2 and so on.
fn table(network: &str, vms: &[impl AsRef<str>]) -> Table {
    let hosts = vms.iter().zip(1_u8..).map(|(name, number)| {
        let host = Host {
            address: Some(Ipv4Addr::new(10, 80, 0, number + 1)),
            address6: Some(Ipv6Addr::new(
                0xfd00,
                0x80,
                0,
                0,
                0x5054,
                0xff,
                0xfe00,
                number.into(),
            )),
            name: name.as_ref().to_owned(),
            primary: true,
            metadata: None,
        };
        (dhcp::mac(&[0x52, 0x54, 0, 0, 0, number]), host)
    });
    Table {
        network: network.to_owned(),
        search: Vec::new(),
        domain: String::new(),
        records: BTreeMap::new(),
        routes: true,
        ipv4: Some(Ipv4 {
            gateway: Ipv4Addr::new(10, 80, 0, 1),
            mask: Ipv4Addr::new(255, 255, 255, 0),
            broadcast: Ipv4Addr::new(10, 80, 0, 255),
            routes: Vec::new(),
            options: Vec::new(),
        }),
        mtu: 1500,
        forward: SERVERS.to_vec(),
        site: true,
        ntp: Vec::new(),
        lease_seconds: 3600,
        ipv6: Some(Ipv6 {
            bridge: "vmb0123456789".to_owned(),
            mac: [2, 0, 0, 0, 0, 1],
            prefix: Ipv6Addr::new(0xfd00, 0x80, 0, 0, 0, 0, 0, 0),
            routes: Vec::new(),
            options: Vec::new(),
        }),
        hosts: hosts.collect::<BTreeMap<_, _>>(),
    }
}

/// Name servers (RFC 5737, RFC 3849).
const SERVERS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 53)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 53)),
];

/// A message of a DHCP client.
pub fn dhcp_client(data: &[u8]) {
    for table in TABLES.iter() {
        if let Some((reply, to)) = dhcp::respond(table, data) {
            check_lease(table, data, &reply, to);
        }
    }
}

/// An answer to a DHCP client is of its own address, and is sent there or to all.
fn check_lease(table: &Table, request: &[u8], reply: &[u8], to: SocketAddrV4) {
    // A client need take no more (RFC 2131, 2): 576 bytes with the headers of IP and UDP, or as it says (RFC 2132, 9.10).
    let says = request[240..].windows(2).any(|head| head == [57, 2]);
    let longest = if says { table.mtu } else { 576 };
    assert!(reply.len() <= usize::from(longest) - 28, "{} bytes", reply.len());
    // A request by Ethernet that no relay has sent on.
    assert_eq!((&request[..3], &request[24..28]), (&[1, 1, 6][..], &[0; 4][..]));
    assert_eq!(reply[..3], [2, 1, 6]);
    for field in [4..8, 28..34] {
        assert_eq!(reply[field.clone()], request[field], "number and MAC address");
    }
    let own = table.hosts[&dhcp::mac(&request[28..34])].address.unwrap();
    assert_eq!(to.port(), 68);
    assert!([own, Ipv4Addr::BROADCAST].contains(to.ip()), "sent to {to}");
    let message = v4::Message::decode(&mut Decoder::new(reply)).unwrap();
    let given = message.yiaddr();
    assert!(given == own || given.is_unspecified(), "{given} of {own}");
    let options = message.opts();
    assert_eq!(
        options.get(OptionCode::ServerIdentifier),
        Some(&v4::DhcpOption::ServerIdentifier(
            table.ipv4.as_ref().unwrap().gateway
        ))
    );
    let leased = options.get(OptionCode::AddressLeaseTime).is_some();
    assert_eq!(leased, given == own);
    assert_eq!(
        options.get(OptionCode::Router).is_some(),
        table.routes && options.msg_type() != Some(MessageType::Nak)
    );
    let report = dhcp::declined(table, request);
    assert!(report.is_none(), "a client that declines is answered");
    match options.msg_type() {
        Some(MessageType::Offer) => assert!(leased),
        Some(MessageType::Ack) => {}
        Some(MessageType::Nak) => assert!(!leased && *to.ip() == Ipv4Addr::BROADCAST),
        other => panic!("a client is sent {other:?}"),
    }
}

/// A frame of a DHCP client for IPv6.
pub fn dhcp6_client(data: &[u8]) {
    for table in TABLES.iter() {
        if let Some(declined) = dhcp6::declined(table, data) {
            let host = &table.hosts[&declined.mac.to_string()];
            assert_eq!(host.address6.map(IpAddr::from), Some(declined.address));
        }
        if let Some(reply) = dhcp6::respond(table, data) {
            check_lease6(table, data, &reply);
        }
    }
}

/// An answer to a DHCP client for IPv6 is a frame for its sender, with the sender's own address.
fn check_lease6(table: &Table, request: &[u8], reply: &[u8]) {
    let ipv6 = table.ipv6.as_ref().unwrap();
    let own = table.hosts[&dhcp::mac(&request[6..12])].address6;
    assert_eq!(
        (&reply[..6], &reply[6..12], &reply[12..14]),
        (&request[6..12], &ipv6.mac[..], &[0x86, 0xdd][..])
    );
    assert_eq!(reply[38..54], request[22..38], "address of the client");
    let length = usize::from(u16::from_be_bytes([reply[18], reply[19]]));
    assert_eq!((reply.len(), &reply[54..58]), (54 + length, &[2, 35, 2, 34][..]));
    // The sum over the pseudo header and the datagram (RFC 8200, 8.1).
    let mut summed = [
        &reply[22..54],
        &[0, 0, reply[18], reply[19], 0, 0, 0, 17],
        &reply[54..],
    ]
    .concat();
    summed.resize(summed.len().next_multiple_of(2), 0);
    let words = summed.as_chunks::<2>().0.iter();
    let sum: u64 = words.map(|word| u64::from(u16::from_be_bytes(*word))).sum();
    assert_eq!(sum % 0xffff, 0, "checksum");
    let message = v6::Message::decode(&mut Decoder::new(&reply[62..])).unwrap();
    assert_eq!(message.xid()[..], request[63..66]);
    assert!([v6::MessageType::Advertise, v6::MessageType::Reply].contains(&message.msg_type()));
    let options = message.opts();
    assert!(options.get(v6::OptionCode::ServerId).is_some());
    assert!(options.get(v6::OptionCode::DomainNameServers).is_some());
    let associations = options.iter().filter_map(|option| match option {
        v6::DhcpOption::IANA(association) => Some(association),
        _ => None,
    });
    let addresses = associations.flat_map(|association| association.opts.iter());
    let given = addresses.filter_map(|option| match option {
        v6::DhcpOption::IAAddr(address) if address.valid_life > 0 => Some(address.addr),
        _ => None,
    });
    let given: Vec<_> = given.collect();
    assert!(
        given.len() <= 1 && given.iter().all(|given| Some(*given) == own),
        "{given:?}"
    );
}

/// A message to the name server.
pub fn dns_query(data: &[u8]) {
    for table in TABLES.iter() {
        check_verdict(table, data, &dns::decide(table, data, Way::Udp));
    }
}

/// Checks that a query gets an answer from the table, or is forwarded.
fn check_verdict(table: &Table, packet: &[u8], verdict: &Verdict) {
    let header: Option<&[u8; 12]> = packet.first_chunk();
    match verdict {
        Verdict::Ignore => {
            let is_query = header.is_some_and(|header| header[2] & 0x80 == 0);
            assert!(!is_query || packet.len() > dns::MAX_QUERY, "a query is ignored");
        }
        Verdict::Answer(reply) => {
            assert!(reply.len() <= dns::MAX_EDNS.into(), "{} bytes", reply.len());
            let header = header.unwrap();
            assert_eq!(reply[..2], header[..2], "number");
            // A reply, and the kind of query (RFC 1035, 4.1.1).
            assert_eq!(reply[2] & 0xf8, (header[2] & 0x78) | 0x80);
            let message = Message::from_vec(reply).unwrap();
            if message.queries.is_empty() {
                let code = message.metadata.response_code;
                assert!(
                    [ResponseCode::FormErr, ResponseCode::NotImp].contains(&code),
                    "{code}"
                );
                assert!(message.answers.is_empty());
            } else {
                assert_eq!(question(reply), question(packet));
                assert!(question(packet).is_some());
            }
            for record in &message.answers {
                let known = |is: &dyn Fn(&Host) -> bool| table.hosts.values().any(is);
                let recorded = |address: IpAddr| table.records.values().flatten().any(|own| *own == address);
                match &record.data {
                    RData::A(address) => {
                        assert!(recorded(address.0.into()) || known(&|host| host.address == Some(address.0)));
                    }
                    RData::AAAA(address) => {
                        assert!(
                            recorded(address.0.into()) || known(&|host| host.address6 == Some(address.0))
                        );
                    }
                    RData::PTR(name) => {
                        let name = name.0.to_ascii();
                        let zone = table.zones().next().unwrap();
                        let of = |host: &Host| format!("{}.{zone}.", host.name) == name;
                        let is_record = table.records.contains_key(name.trim_end_matches('.'));
                        assert!(is_record || known(&of), "{name}");
                    }
                    other => panic!("an answer has {other}"),
                }
            }
        }
        Verdict::Forward(asked) => {
            assert!(!table.forward.is_empty() && packet.len() <= dns::MAX_QUERY);
            let header = header.unwrap();
            assert_eq!(asked.id.to_be_bytes(), header[..2]);
            assert_eq!((header[2] & 0xf8, &header[4..6]), (0, &[0, 1][..]), "one query");
            assert_eq!(question(packet), Some(&asked.bytes[..]));
            let is_internet = asked.bytes.ends_with(&[0, 1]);
            assert!(!is_internet || !is_within(&asked.bytes, &table.network));
        }
    }
}

/// The first question of a message: a name without pointers, a type and a class (RFC 1035, 4.1.2).
fn question(message: &[u8]) -> Option<&[u8]> {
    let mut end = 12;
    loop {
        match usize::from(*message.get(end)?) {
            0 => return message.get(12..end + 5),
            length @ 1..64 => end += 1 + length,
            _ => return None,
        }
    }
}

/// Whether a question is about a name of the network.
fn is_within(question: &[u8], network: &str) -> bool {
    let label = |text: &str| [&[u8::try_from(text.len()).unwrap()][..], text.as_bytes()].concat();
    let zone = [label(network), label("internal"), vec![0]].concat();
    let (name, _) = question.split_at(question.len() - 4);
    let mut rest = name;
    while rest.len() > zone.len() {
        rest = &rest[1 + usize::from(rest[0])..];
    }
    rest.eq_ignore_ascii_case(&zone)
}

/// Forwarded queries of guests, and replies of name servers.
///
/// Each step has a kind byte and four argument bytes: a packet of a guest, whose bytes follow (0);
/// a query of a guest (1); a reply to a sent query, with a chosen error (2); an advance of the
/// clock in quarters of a second (3).
pub fn name_servers(data: &[u8]) {
    let mut seed = 1_u32;
    let random = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let [a, b, c, _] = seed.to_be_bytes();
        Some([a, b, c])
    };
    let mut world = World {
        queries: Queries::new([0..SOCKETS, SOCKETS..2 * SOCKETS], random),
        now: Instant::now(),
        asked: Vec::new(),
        sent: Vec::new(),
    };
    let mut rest = data;
    while let Some(([step, arguments @ ..], behind)) = rest.split_first_chunk::<5>() {
        rest = behind;
        match (step % 4, *arguments) {
            (0, [guest, length, ..]) => {
                let (packet, behind) = behind.split_at(usize::from(length).min(behind.len()));
                rest = behind;
                world.hear(guest, packet);
            }
            (1, [guest, name, id @ ..]) => world.hear(guest, &query(id, name)),
            (2, arguments) => world.reply(arguments),
            (_, [quarters, ..]) => world.wait(Duration::from_millis(250) * u32::from(quarters)),
        }
        world.check();
    }
    for _ in 0..=SERVERS.len() {
        world.wait(PATIENCE);
    }
    assert!(world.asked.is_empty());
    world.check();
}

/// A query for the IPv4 address of "hN.example."
fn query(id: [u8; 2], name: u8) -> Vec<u8> {
    let label = format!("h{}", name % 8);
    let length = u8::try_from(label.len()).unwrap();
    [
        &id[..],
        &[1, 0, 0, 1, 0, 0, 0, 0, 0, 0, length],
        label.as_bytes(),
        b"\x07example\0\0\x01\0\x01",
    ]
    .concat()
}

/// One of 32 guests, by one of 8 ports.
fn guest(number: u8) -> SocketAddr {
    let port = 4000 + u16::from(number / 32);
    SocketAddr::new(Ipv4Addr::new(10, 80, 0, 2 + number % 32).into(), port)
}

/// A forwarded query without an answer.
struct Asked {
    client: SocketAddr,
    question: Question,
}

/// Guests, name servers and time.
struct World<R> {
    queries: Queries<R>,
    now: Instant,
    asked: Vec<Asked>,
    /// All that has gone out.
    sent: Vec<Outgoing>,
}

impl<R: FnMut() -> Option<[u8; 3]>> World<R> {
    /// A guest sends something.
    fn hear(&mut self, number: u8, packet: &[u8]) {
        let table = &TABLES[0];
        let verdict = dns::decide(table, packet, Way::Udp);
        check_verdict(table, packet, &verdict);
        let Verdict::Forward(question) = verdict else {
            return;
        };
        let client = guest(number);
        let mut others = self.asked.iter();
        let again = others.any(|other| other.client == client && other.question == question);
        let (_, own) = self.queries.under_way(client.ip());
        let before = self.sent.len();
        let events = self
            .queries
            .ask(packet, client, question.clone(), &table.forward, self.now);
        if !again {
            self.asked.push(Asked { client, question });
        }
        let answered = self.happen(events);
        let sent = &self.sent[before..];
        assert!(
            sent.iter().all(|query| query.packet[2..] == packet[2..]),
            "as it came"
        );
        if own >= MAX_PENDING_OF_GUEST {
            assert_eq!((answered, sent.len()), (usize::from(!again), 0));
        }
        assert!(!again || (answered, sent.len()) == (0, 0));
    }

    /// Queries go out, and answers go to clients that wait for them; the number of the answers.
    fn happen(&mut self, events: impl IntoIterator<Item = Event>) -> usize {
        let mut answers = 0;
        for event in events {
            match event {
                Event::Ask(outgoing) => {
                    let servers = SERVERS.map(|server| SocketAddr::new(server, 53));
                    assert!(servers.contains(&outgoing.server));
                    assert_eq!(outgoing.socket < SOCKETS, outgoing.server.is_ipv4());
                    self.sent.push(outgoing);
                }
                Event::Answer(Answer { client, packet }) => {
                    let repeated = question(&packet).expect("an answer has no question");
                    let is_asked = |asked: &Asked| {
                        (asked.client, &asked.question.id.to_be_bytes()[..]) == (client, &packet[..2])
                            && is_same(&asked.question.bytes, repeated)
                    };
                    let asked = self.asked.iter().position(is_asked);
                    let asked = self
                        .asked
                        .swap_remove(asked.expect("an answer goes to one who has not asked"));
                    assert!(packet.len() <= asked.question.limit, "{} bytes", packet.len());
                    answers += 1;
                }
            }
        }
        answers
    }

    /// Time goes by.
    fn wait(&mut self, time: Duration) {
        self.now += time;
        let events = self.queries.expire(self.now);
        self.happen(events);
        let deadline = self.queries.deadline();
        assert!(deadline.is_none_or(|deadline| deadline > self.now));
    }

    /// A name server replies, or somebody in its place.
    fn reply(&mut self, [which, flaws, place, value]: [u8; 4]) {
        let Some(back) = usize::from(which).checked_rem(self.sent.len()) else {
            return;
        };
        let query = &self.sent[self.sent.len() - 1 - back];
        let (mut socket, mut packet, mut from) = (query.socket, query.packet.clone(), query.server);
        let place = usize::from(place) % packet.len();
        packet[2] |= 0x80;
        let has = |flaw: u8| flaws & (1 << flaw) != 0;
        if has(0) {
            let other = SERVERS.into_iter().find(|server| *server != from.ip());
            from.set_ip(other.unwrap());
        }
        if has(1) {
            from.set_port(5353);
        }
        if has(2) {
            socket = (socket + 1) % (2 * SOCKETS);
        }
        if has(3) {
            packet[place] = value;
        }
        if has(4) {
            packet.truncate(place);
        }
        if has(5) {
            packet.get_mut(2..).unwrap_or_default().make_ascii_uppercase();
        }
        if has(6) {
            packet.resize(packet.len() + 1000, value);
        }
        let (all, _) = self.queries.under_way(from.ip());
        let Some(event) = self.queries.receive(socket, &packet, from, self.now) else {
            // The reply is unexpected, or is for a copy.
            assert!(all - self.queries.under_way(from.ip()).0 <= 1);
            return;
        };
        let repeated = question(&packet).expect("a reply has no question");
        let is_sent = |query: &Outgoing| {
            (query.socket, query.server, &query.packet[..2]) == (socket, from, &packet[..2])
                && question(&query.packet).is_some_and(|asked| is_same(asked, repeated))
        };
        assert!(self.sent.iter().any(is_sent), "nobody was asked that");
        self.happen([event]);
    }

    /// Each query that waits for an answer is under way, beside copies for servers that do not answer.
    fn check(&self) {
        let (all, _) = self.queries.under_way(guest(0).ip());
        assert!((self.asked.len()..=MAX_PENDING + SERVERS.len()).contains(&all));
        assert_eq!(self.queries.deadline().is_none(), all == 0);
    }
}

/// Whether two questions are equal, apart from the case of letters in the name.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let parts = |question: &[u8]| {
        let (name, kind) = question.split_at(question.len() - 4);
        (name.to_ascii_lowercase(), kind.to_vec())
    };
    parts(one) == parts(other)
}

/// ICMPv6 messages that come to a router: each has before it the seconds since the last one, and its length.
pub fn router_solicitations(data: &[u8]) {
    for table in TABLES.iter() {
        let routes = table.ipv6.as_ref().map_or(0, |ipv6| ipv6.routes.len());
        assert_eq!(
            ra::advertisement(table, true).map(|message| message.len()),
            Some(64 + 24 + 8 + (table.domains()[0].len() + 2).next_multiple_of(8) + routes * 24)
        );
    }
    let (mut schedule, mut now, mut last) = (Schedule::default(), Instant::now(), None::<Instant>);
    let mut rest = data;
    while let Some(([seconds, length], behind)) = rest.split_first_chunk() {
        let (message, behind) = behind.split_at(usize::from(*length).min(behind.len()));
        rest = behind;
        let comes = now + Duration::from_secs((*seconds).into());
        while schedule.due().is_none_or(|due| due <= comes) {
            now = schedule.due().unwrap_or(now).max(now);
            let due = schedule.take(now).expect("it is due");
            if let Some(last) = last {
                assert!((PAUSE..=PERIOD).contains(&(now - last)));
                assert!(due == ra::Due::All || now == last + PAUSE, "once more");
            }
            if due == ra::Due::All {
                last = Some(now);
            }
        }
        now = comes;
        let solicits = message.len() >= 8 && message[..2] == [133, 0];
        assert_eq!(ra::asks(message), solicits);
        if solicits {
            schedule.ask();
            assert_eq!(schedule.due(), last.map(|last| last + PAUSE));
        }
    }
}

#[cfg(test)]
mod tests;

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
                        assert!(recorded(address.0.into()) || known(&|host| host.address == Some(address.0)))
                    }
                    RData::AAAA(address) => {
                        assert!(recorded(address.0.into()) || known(&|host| host.address6 == Some(address.0)))
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
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;

    use super::*;

    /// A seed: its name, and its bytes.
    type Seed = (&'static str, Vec<u8>);

    /// A message of the client with the MAC address 52:54:00:00:00:01, with these options behind its type.
    fn client(kind: u8, address: [u8; 4], options: &[u8]) -> Vec<u8> {
        let mut packet = vec![1, 1, 6, 0, 0, 0, 0, 7, 0, 0, 0, 0];
        packet.extend(address);
        packet.resize(28, 0);
        packet.extend([0x52, 0x54, 0, 0, 0, 1]);
        packet.resize(236, 0);
        packet.extend([99, 130, 83, 99, 53, 1, kind]);
        packet.extend(options);
        packet.push(255);
        packet
    }

    /// With the type of the answer (RFC 2132, 9.6), if there is one.
    fn dhcp_seeds() -> Vec<(Seed, Option<MessageType>)> {
        use MessageType::{Ack, Nak, Offer};
        let none = [0; 4];
        let mut relayed = client(1, none, &[]);
        relayed[24..28].copy_from_slice(&[10, 1, 1, 1]);
        let mut stranger = client(1, none, &[]);
        stranger[33] = 9;
        // Parameter request list, vendor class, client FQDN, option overload, padding (RFC 2132;
        // RFC 4702).
        let options = [
            55, 4, 1, 3, 6, 15, 60, 4, b'u', b'd', b'h', b'c', 81, 4, 0, 0, 0, b'a', 52, 1, 3, 0, 0,
        ];
        let requested = [50, 4, 10, 80, 0, 2, 54, 4, 10, 80, 0, 1];
        let elsewhere = [50, 4, 10, 80, 0, 2, 54, 4, 10, 80, 0, 7];
        vec![
            (("discover", client(1, none, &[])), Some(Offer)),
            (("discover_with_options", client(1, none, &options)), Some(Offer)),
            (("request", client(3, none, &requested)), Some(Ack)),
            (
                ("request_of_another", client(3, none, &[50, 4, 10, 80, 0, 3])),
                Some(Nak),
            ),
            (("request_elsewhere", client(3, none, &elsewhere)), None),
            (("renew", client(3, [10, 80, 0, 2], &[])), Some(Ack)),
            (("renew_of_another", client(3, [10, 80, 0, 3], &[])), Some(Nak)),
            (("decline", client(4, none, &requested)), None),
            (("release", client(7, [10, 80, 0, 2], &[])), None),
            (("inform", client(8, [10, 80, 0, 2], &[])), Some(Ack)),
            (("relayed", relayed), None),
            (("stranger", stranger), None),
        ]
    }

    #[test]
    fn the_seeds_of_dhcp_client_get_the_answers_that_they_are_for() {
        for ((name, packet), expected) in dhcp_seeds() {
            let reply = dhcp::respond(&TABLES[0], &packet);
            let kind = reply.map(|(reply, _)| v4::Message::decode(&mut Decoder::new(&reply)).unwrap());
            assert_eq!(
                kind.and_then(|message| message.opts().msg_type()),
                expected,
                "{name}"
            );
        }
        let seeds: Vec<_> = dhcp_seeds().into_iter().map(|(seed, _)| seed).collect();
        run("dhcp_client", dhcp_client, &seeds);
    }

    /// A frame of the client with the MAC address 52:54:00:00:00:01, with these options behind its identifier.
    fn client6(kind: u8, options: &[u8]) -> Vec<u8> {
        let payload = [&[kind, 1, 2, 3, 0, 1, 0, 4, 0, 4, 9, 9][..], options].concat();
        let length = u16::try_from(payload.len() + 8).unwrap().to_be_bytes();
        let mut frame = vec![0x33, 0x33, 0, 1, 0, 2, 0x52, 0x54, 0, 0, 0, 1, 0x86, 0xdd];
        frame.extend([0x60, 0, 0, 0, length[0], length[1], 17, 1]);
        frame.extend(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0xabcd).octets());
        frame.extend(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2).octets());
        frame.extend([2, 34, 2, 35, length[0], length[1], 0, 0]);
        frame.extend(payload);
        frame
    }

    /// With the type of the answer, if there is one.
    fn dhcp6_seeds() -> Vec<(Seed, Option<v6::MessageType>)> {
        use v6::MessageType::{Advertise, Reply};
        // RFC 8415, 21.3, 21.4, 21.6, 21.14.
        let server = [0, 2, 0, 10, 0, 3, 0, 1, 2, 0, 0, 0, 0, 1];
        let none = [0, 3, 0, 12, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0];
        let own = Ipv6Addr::new(0xfd00, 0x80, 0, 0, 0x5054, 0xff, 0xfe00, 1);
        let has = |address: Ipv6Addr| {
            let head = [0, 3, 0, 40, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 24];
            [&head[..], &address.octets(), &[0, 0, 0, 5, 0, 0, 0, 5]].concat()
        };
        let (with, other) = (has(own), has(Ipv6Addr::LOCALHOST));
        let all = |parts: &[&[u8]]| parts.concat();
        let mut stranger = client6(1, &none);
        stranger[11] = 0xff;
        vec![
            (("solicit", client6(1, &none)), Some(Advertise)),
            (("rapid", client6(1, &all(&[&none, &[0, 14, 0, 0]]))), Some(Reply)),
            (("request", client6(3, &all(&[&server, &with]))), Some(Reply)),
            (
                ("renew_of_two", client6(5, &all(&[&server, &with, &other]))),
                Some(Reply),
            ),
            (("rebind", client6(6, &other)), Some(Reply)),
            (("confirm", client6(4, &with)), Some(Reply)),
            (("confirm_elsewhere", client6(4, &other)), Some(Reply)),
            (("release", client6(8, &all(&[&server, &with]))), Some(Reply)),
            (("decline", client6(9, &all(&[&server, &with]))), Some(Reply)),
            (("decline_without_server", client6(9, &with)), None),
            (("information", client6(11, &[])), Some(Reply)),
            (("relayed", client6(12, &none)), None),
            (("stranger", stranger), None),
            (("cut", client6(1, &none)[..70].to_vec()), None),
        ]
    }

    #[test]
    fn the_seeds_of_dhcp6_client_get_the_answers_that_they_are_for() {
        for ((name, frame), expected) in dhcp6_seeds() {
            let reply = dhcp6::respond(&TABLES[0], &frame);
            let kind = reply.map(|reply| v6::Message::decode(&mut Decoder::new(&reply[62..])).unwrap());
            assert_eq!(kind.map(|message| message.msg_type()), expected, "{name}");
        }
        let seeds: Vec<_> = dhcp6_seeds().into_iter().map(|(seed, _)| seed).collect();
        run("dhcp6_client", dhcp6_client, &seeds);
    }

    /// A query for records of a type.
    fn asks(name: &str, kind: u8) -> Vec<u8> {
        let mut packet = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.').filter(|label| !label.is_empty()) {
            packet.push(u8::try_from(label.len()).unwrap());
            packet.extend(label.as_bytes());
        }
        packet.extend([0, 0, kind, 0, 1]);
        packet
    }

    /// With the number of records in the answer, and its code; `None` for forwarded queries.
    fn dns_seeds() -> Vec<(Seed, Option<(usize, ResponseCode)>)> {
        use ResponseCode::{FormErr, NXDomain, NoError, NotImp};
        let changed = |mut packet: Vec<u8>, place: usize, value: u8| {
            packet[place] = value;
            packet
        };
        let web = || asks("web.lan.internal", 1);
        let six = "1.0.0.0.0.0.e.f.f.f.0.0.4.5.0.5.0.0.0.0.0.0.0.0.0.8.0.0.0.0.d.f.ip6.arpa";
        // An OPT record: 1,232 bytes by UDP (RFC 6891, 6.1.2).
        let mut edns = changed(asks("example.com", 1), 11, 1);
        edns.extend([0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]);
        vec![
            (("address", web()), Some((1, NoError))),
            (
                ("address_of_ipv6", asks("web.lan.internal", 28)),
                Some((1, NoError)),
            ),
            (
                ("any_of_two_nics", asks("DB.Lan.Internal", 255)),
                Some((4, NoError)),
            ),
            (("text", asks("web.lan.internal", 16)), Some((0, NoError))),
            (("network", asks("lan.internal", 6)), Some((0, NoError))),
            (("unknown", asks("none.lan.internal", 1)), Some((0, NXDomain))),
            (("below", asks("a.web.lan.internal", 1)), Some((0, NXDomain))),
            (
                ("reverse", asks("2.0.80.10.in-addr.arpa", 12)),
                Some((1, NoError)),
            ),
            (("reverse_of_ipv6", asks(six, 12)), Some((1, NoError))),
            (
                ("reverse_unknown", asks("99.0.80.10.in-addr.arpa", 12)),
                Some((0, NXDomain)),
            ),
            (("notify", changed(web(), 2, 0x21)), Some((0, NotImp))),
            (("two_questions", changed(web(), 5, 2)), Some((0, FormErr))),
            (("cut", web()[..20].to_vec()), Some((0, FormErr))),
            (
                (
                    "pointer",
                    vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xc0, 0, 0, 1, 0, 1],
                ),
                Some((0, FormErr)),
            ),
            (("chaos", changed(web(), 33, 3)), None),
            (("outside", asks("example.com", 28)), None),
            (("outside_edns", edns), None),
            (("root", asks("", 2)), None),
        ]
    }

    #[test]
    fn the_seeds_of_dns_query_get_the_answers_that_they_are_for() {
        for ((name, packet), expected) in dns_seeds() {
            let found = match dns::decide(&TABLES[0], &packet, Way::Udp) {
                Verdict::Answer(reply) => {
                    let message = Message::from_vec(&reply).unwrap();
                    Some((message.answers.len(), message.metadata.response_code))
                }
                Verdict::Forward(_) => None,
                Verdict::Ignore => panic!("{name} is ignored"),
            };
            assert_eq!(found, expected, "{name}");
        }
        let seeds: Vec<_> = dns_seeds().into_iter().map(|(seed, _)| seed).collect();
        run("dns_query", dns_query, &seeds);
    }

    fn name_server_seeds() -> Vec<Seed> {
        let flood = |guest: u8| (0..70_u8).flat_map(move |id| [1, guest, id, 0, id]);
        let packet = asks("example.com", 1);
        let length = u8::try_from(packet.len()).unwrap();
        vec![
            ("answered", vec![1, 0, 0, 0, 7, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0]),
            (
                "raw",
                [&[0, 0, length, 0, 0][..], &packet, &[2, 0, 0, 0, 0]].concat(),
            ),
            ("other_case", vec![1, 0, 0, 0, 7, 2, 0, 0x20, 0, 0]),
            (
                "by_the_second_server",
                vec![1, 0, 0, 0, 7, 3, 8, 0, 0, 0, 2, 0, 0, 0, 0],
            ),
            (
                "too_late",
                vec![
                    1, 0, 0, 0, 7, 3, 8, 0, 0, 0, 2, 1, 0, 0, 0, 3, 8, 0, 0, 0, 2, 0, 0, 0, 0,
                ],
            ),
            (
                "asked_twice",
                vec![
                    1, 0, 0, 0, 7, 1, 0, 0, 0, 7, 1, 1, 0, 0, 7, 2, 1, 0, 0, 0, 2, 0, 0, 0, 0,
                ],
            ),
            (
                "forged",
                (0..6)
                    .flat_map(|flaw| [1, 0, 0, 0, flaw, 2, 0, 1 << flaw, 13, b'X'])
                    .collect(),
            ),
            (
                "flood",
                flood(0)
                    .chain(flood(1))
                    .chain([3, 8, 0, 0, 0, 2, 3, 0, 0, 0])
                    .collect(),
            ),
        ]
    }

    #[test]
    fn the_seeds_of_name_servers_do_no_harm() {
        run("name_servers", name_servers, &name_server_seeds());
    }

    #[test]
    fn all_guests_together_fill_the_places_and_no_more() {
        let ask = |guest: u8| (0..64_u8).flat_map(move |id| [1, guest, 0, id, id]);
        let data: Vec<_> = (0..20).flat_map(ask).collect();
        name_servers(&data);
    }

    fn router_seeds() -> Vec<Seed> {
        let solicitation = [133, 0, 0, 0, 0, 0, 0, 0];
        // With the link-layer address of the sender (RFC 4861, 4.6.1).
        let option = [1, 1, 0x52, 0x54, 0, 0, 0, 1];
        let after = |seconds: u8, message: &[u8]| {
            let length = u8::try_from(message.len()).unwrap();
            [&[seconds, length][..], message].concat()
        };
        vec![
            ("solicitation", after(1, &[solicitation, option].concat())),
            ("solicitations", after(1, &solicitation).repeat(8)),
            (
                "period",
                [after(1, &solicitation), after(250, &[]), after(2, &solicitation)].concat(),
            ),
            (
                "others",
                [134, 135, 136, 128]
                    .iter()
                    .flat_map(|kind| after(0, &[*kind, 0, 0, 0, 0, 0, 0, 0]))
                    .collect(),
            ),
            ("code", after(0, &[133, 1, 0, 0, 0, 0, 0, 0])),
            ("short", after(0, &solicitation[..7])),
        ]
    }

    #[test]
    fn the_seeds_of_router_solicitations_do_no_harm() {
        run("router_solicitations", router_solicitations, &router_seeds());
    }

    /// Runs `target` over the committed seeds of this name: `seeds`, and inputs that once caused a
    /// failure.
    fn run(name: &str, target: fn(&[u8]), seeds: &[Seed]) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../fuzz/corpus")
            .join(name);
        for (seed, data) in seeds {
            let path = folder.join(seed);
            if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
                fs::create_dir_all(&folder).unwrap();
                fs::write(&path, data).unwrap();
            }
            assert_eq!(&fs::read(&path).unwrap(), data, "{}", path.display());
        }
        for entry in fs::read_dir(&folder).unwrap() {
            target(&fs::read(entry.unwrap().path()).unwrap());
        }
    }

    /// Seeds with some bytes changed, cut or repeated.
    fn changed(seeds: Vec<Seed>) -> impl Strategy<Value = Vec<u8>> {
        let seeds: Vec<_> = seeds.into_iter().map(|(_, data)| data).collect();
        let value = prop_oneof![any::<u8>(), 0..4_u8, Just(0x80), Just(0xc0), Just(0xff)];
        let place = prop_oneof![3 => 0..48_usize, 1 => 228..320_usize, 1 => any::<usize>()];
        let changes = proptest::collection::vec((place, value), 0..8);
        let cut = proptest::option::weighted(0.2, any::<usize>());
        (proptest::sample::select(seeds), changes, cut, 1..3_usize).prop_map(|(seed, changes, cut, times)| {
            let mut data = seed.repeat(times);
            for (place, value) in changes {
                let place = place % data.len();
                data[place] = value;
            }
            let length = cut.map_or(data.len(), |cut| cut % data.len());
            data.truncate(length);
            data
        })
    }

    fn dhcp_packets() -> impl Strategy<Value = Vec<u8>> {
        changed(dhcp_seeds().into_iter().map(|(seed, _)| seed).collect())
    }

    fn dhcp6_frames() -> impl Strategy<Value = Vec<u8>> {
        changed(dhcp6_seeds().into_iter().map(|(seed, _)| seed).collect())
    }

    fn dns_packets() -> impl Strategy<Value = Vec<u8>> {
        changed(dns_seeds().into_iter().map(|(seed, _)| seed).collect())
    }

    fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(any::<u8>(), 0..600)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_changes_make_dhcp_client_do_harm(data in dhcp_packets()) {
            dhcp_client(&data);
        }

        #[test]
        fn no_changes_make_dhcp6_client_do_harm(data in dhcp6_frames()) {
            dhcp6_client(&data);
        }

        #[test]
        fn no_bytes_harm_dhcp6_client(data in any_bytes()) {
            dhcp6_client(&data);
        }

        #[test]
        fn no_changes_make_dns_query_do_harm(data in dns_packets()) {
            dns_query(&data);
        }

        #[test]
        fn no_changes_make_router_solicitations_do_harm(data in changed(router_seeds())) {
            router_solicitations(&data);
        }

        #[test]
        fn no_bytes_harm_dhcp_client(data in any_bytes()) {
            dhcp_client(&data);
        }

        #[test]
        fn no_bytes_harm_dns_query(data in any_bytes()) {
            dns_query(&data);
        }

        #[test]
        fn no_bytes_harm_name_servers(data in any_bytes()) {
            name_servers(&data);
        }

        #[test]
        fn no_bytes_harm_router_solicitations(data in any_bytes()) {
            router_solicitations(&data);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_changes_make_name_servers_do_harm(data in changed(name_server_seeds())) {
            name_servers(&data);
        }
    }
}

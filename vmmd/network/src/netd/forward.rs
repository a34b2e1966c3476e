//! Forwards queries to name servers of the node.
//!
//! The helper opens the sockets before it drops its rights, so they stay in the node's network when
//! the helper leaves it. Each query uses a random socket and a random number: a forged reply must
//! guess both (RFC 5452). A reply counts when it comes from the queried server and repeats number
//! and question.
//!
//! A query without an answer, or with REFUSED or SERVFAIL, goes to the next server. The client gets
//! such an answer when all servers have failed, and SERVFAIL when none has answered. A server that
//! did not answer is asked last. From time to time it gets a copy of a query, whose answer only
//! shows that the server works again: no client waits for it.
//!
//! [`Queries`] has the state and decides; [`Forwarder`] has the sockets.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    ops::Range,
    time::{Duration, Instant},
};

use hickory_proto::op::ResponseCode;

use super::dns::{self, Question};

/// Port of name servers.
const PORT: u16 = 53;
/// Sockets of each family.
pub const SOCKETS: usize = 16;
/// Queries under way, of all guests and of one. Each is [`dns::MAX_QUERY`] bytes at most.
pub const MAX_PENDING: usize = 1024;
pub const MAX_PENDING_OF_GUEST: usize = 256;
/// How long a server has.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// Time between two copies of queries for a server that did not answer.
pub const PROBE: Duration = Duration::from_secs(30);

/// Three random bytes; `None` while the kernel's random generator is not ready.
type Random = fn() -> Option<[u8; 3]>;

/// Sockets and pending queries.
#[derive(Debug)]
pub struct Forwarder {
    sockets: Vec<UdpSocket>,
    queries: Queries,
}

impl Forwarder {
    /// Opens the sockets, in the network of the caller.
    pub fn open() -> io::Result<Self> {
        let mut sockets = Vec::new();
        for _ in 0..SOCKETS {
            sockets.push(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?);
        }
        // A node without IPv6 has no name servers there.
        sockets.extend((0..SOCKETS).map_while(|_| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).ok()));
        for socket in &sockets {
            socket.set_nonblocking(true)?;
        }
        let families = [0..SOCKETS, SOCKETS..sockets.len()];
        Ok(Self {
            sockets,
            queries: Queries::new(families, random),
        })
    }

    /// The sockets that replies come to, in the order of [`Self::receive`].
    pub fn sockets(&self) -> &[UdpSocket] {
        &self.sockets
    }

    /// When [`Self::expire`] has something to do next.
    pub fn deadline(&self) -> Option<Instant> {
        self.queries.deadline()
    }

    /// Asks `servers` for a client. Returns the answers that clients get at once.
    pub fn forward(
        &mut self,
        packet: &[u8],
        client: SocketAddr,
        question: Question,
        servers: &[IpAddr],
        now: Instant,
    ) -> Vec<Answer> {
        let events = self.queries.ask(packet, client, question, servers, now);
        self.send(events)
    }

    /// Handles a packet from a socket. Returns the client's answer if the packet is a reply.
    pub fn receive(&mut self, socket: usize, packet: &[u8], from: SocketAddr, now: Instant) -> Vec<Answer> {
        let event = self.queries.receive(socket, packet, from, now);
        self.send(event)
    }

    /// Sends queries past their deadline to the next server. Returns the answers of those without.
    pub fn expire(&mut self, now: Instant) -> Vec<Answer> {
        let events = self.queries.expire(now);
        self.send(events)
    }

    /// Sends the queries, and returns the answers.
    fn send(&self, events: impl IntoIterator<Item = Event>) -> Vec<Answer> {
        let mut answers = Vec::new();
        for event in events {
            match event {
                Event::Ask(query) => {
                    if let Some(open) = self.sockets.get(query.socket) {
                        // A failed send is like a lost packet: the query goes to the next server at
                        // its deadline.
                        let _lost = open.send_to(&query.packet, query.server);
                    }
                }
                Event::Answer(answer) => answers.push(answer),
            }
        }
        answers
    }
}

/// Result of a step of [`Queries`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Ask(Outgoing),
    Answer(Answer),
}

/// An answer for a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub client: SocketAddr,
    /// With the number of the client's query.
    pub packet: Vec<u8>,
}

/// A query that is to go out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// From which socket.
    pub socket: usize,
    /// With its random number.
    pub packet: Vec<u8>,
    /// Who is asked.
    pub server: SocketAddr,
}

/// Pending queries.
#[derive(Debug)]
pub struct Queries<R = Random> {
    /// Numbers of the sockets of IPv4 and of IPv6.
    sockets: [Range<usize>; 2],
    /// By socket and the number that it was sent with.
    pending: HashMap<(usize, u16), Pending>,
    /// Servers that did not answer, and when they get a copy of a query.
    silent: BTreeMap<IpAddr, Instant>,
    random: R,
}

#[derive(Debug)]
struct Pending {
    /// None for a copy.
    client: Option<SocketAddr>,
    question: Question,
    packet: Vec<u8>,
    server: SocketAddr,
    /// The next servers.
    left: VecDeque<IpAddr>,
    /// The answer of a server that failed.
    failure: Option<Vec<u8>>,
    deadline: Instant,
}

impl Pending {
    /// The end of a query without a good answer.
    fn fail(self) -> Option<Event> {
        let packet = self
            .failure
            .unwrap_or_else(|| dns::bare(&self.packet, &self.question, ResponseCode::ServFail, false));
        let client = self.client?;
        Some(Event::Answer(Answer { client, packet }))
    }
}

impl<R: FnMut() -> Option<[u8; 3]>> Queries<R> {
    /// None yet. `sockets` are the numbers of those of IPv4 and of IPv6, `random` has three random bytes.
    pub fn new(sockets: [Range<usize>; 2], random: R) -> Self {
        Self {
            sockets,
            pending: HashMap::new(),
            silent: BTreeMap::new(),
            random,
        }
    }

    /// When [`Self::expire`] has something to do next.
    pub fn deadline(&self) -> Option<Instant> {
        self.pending.values().map(|pending| pending.deadline).min()
    }

    /// How many are under way: of all guests, and of one.
    pub fn under_way(&self, guest: IpAddr) -> (usize, usize) {
        let is_of = |other: &&Pending| other.client.is_some_and(|client| client.ip() == guest);
        (self.pending.len(), self.pending.values().filter(is_of).count())
    }

    /// Asks the best of `servers`. A guest with too many queries under way is answered SERVFAIL.
    pub fn ask(
        &mut self,
        packet: &[u8],
        client: SocketAddr,
        question: Question,
        servers: &[IpAddr],
        now: Instant,
    ) -> Vec<Event> {
        let mut others = self.pending.values();
        // The pending query also serves a retry of its client.
        if others.any(|other| other.client == Some(client) && other.question == question) {
            return Vec::new();
        }
        let mut left = self.order(servers);
        let first = left.pop_front();
        if left.is_empty() {
            // The packet or its answer may be lost.
            left.extend(first);
        }
        let pending = Pending {
            client: Some(client),
            question,
            packet: packet.to_vec(),
            server: SocketAddr::new(first.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), PORT),
            left,
            failure: None,
            deadline: now + PATIENCE,
        };
        let (all, of_guest) = self.under_way(client.ip());
        if first.is_none() || of_guest >= MAX_PENDING_OF_GUEST {
            return pending.fail().into_iter().collect();
        }
        let mut events = Vec::new();
        if all >= MAX_PENDING {
            match self.largest(of_guest + 1) {
                Some(place) => events.extend(self.pending.remove(&place).and_then(Pending::fail)),
                None => return pending.fail().into_iter().collect(),
            }
        }
        for server in self.due(&pending.left, now) {
            let copy = Pending {
                client: None,
                question: pending.question.clone(),
                packet: pending.packet.clone(),
                server: SocketAddr::new(server, PORT),
                left: VecDeque::new(),
                failure: None,
                deadline: now + PATIENCE,
            };
            events.extend(self.send(copy));
        }
        events.extend(self.send(pending));
        events
    }

    /// The oldest query of the guest that has most of them, if these are more than `least`.
    fn largest(&self, least: usize) -> Option<(usize, u16)> {
        let mut counts = BTreeMap::<_, usize>::new();
        for client in self.pending.values().filter_map(|pending| pending.client) {
            *counts.entry(client.ip()).or_default() += 1;
        }
        let (guest, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
        let of_guest = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.client.is_some_and(|client| client.ip() == guest));
        let oldest = of_guest.min_by_key(|(place, pending)| (pending.deadline, **place))?;
        (count > least).then_some(*oldest.0)
    }

    /// The servers of families with sockets. Silent servers are at the end.
    fn order(&self, servers: &[IpAddr]) -> VecDeque<IpAddr> {
        let usable = |server: &&IpAddr| !self.sockets_for(**server).is_empty();
        let mut usable: Vec<_> = servers.iter().filter(usable).copied().collect();
        usable.sort_by_key(|server| self.silent.contains_key(server));
        usable.into()
    }

    /// Those of `servers` that get a copy of a query now.
    fn due(&mut self, servers: &VecDeque<IpAddr>, now: Instant) -> Vec<IpAddr> {
        let silent = self.silent.iter_mut();
        let due = silent.filter(|(server, due)| **due <= now && servers.contains(server));
        due.map(|(server, due)| {
            *due = now + PROBE;
            *server
        })
        .collect()
    }

    /// Asks the next server, if there is one; otherwise the query has failed.
    fn next(&mut self, mut pending: Pending, now: Instant) -> Option<Event> {
        let Some(server) = pending.left.pop_front() else {
            return pending.fail();
        };
        pending.server = SocketAddr::new(server, PORT);
        pending.deadline = now + PATIENCE;
        self.send(pending)
    }

    fn sockets_for(&self, server: IpAddr) -> Range<usize> {
        let [v4, v6] = &self.sockets;
        if server.is_ipv4() { v4.clone() } else { v6.clone() }
    }

    fn send(&mut self, mut pending: Pending) -> Option<Event> {
        let place = self.place(pending.server.ip());
        let (Some((socket, id)), Some(number)) = (place, pending.packet.first_chunk_mut()) else {
            return pending.fail();
        };
        *number = id.to_be_bytes();
        let outgoing = Outgoing {
            socket,
            packet: pending.packet.clone(),
            server: pending.server,
        };
        self.pending.insert((socket, id), pending);
        Some(Event::Ask(outgoing))
    }

    /// A socket that reaches the server and a number that nothing under way has.
    fn place(&mut self, server: IpAddr) -> Option<(usize, u16)> {
        let sockets = self.sockets_for(server);
        if sockets.is_empty() {
            return None;
        }
        // More would be bad luck beyond belief: 1 in 1,024 numbers of 65,536 at most is in use.
        (0..8).find_map(|_| {
            let [a, b, c] = (self.random)()?;
            let socket = sockets.start + usize::from(a) % sockets.len();
            let place = (socket, u16::from_be_bytes([b, c]));
            (!self.pending.contains_key(&place)).then_some(place)
        })
    }

    /// Handles a packet from a socket: an answer for its client, or a failure, after which the next server is asked.
    pub fn receive(&mut self, socket: usize, packet: &[u8], from: SocketAddr, now: Instant) -> Option<Event> {
        let id = u16::from_be_bytes(*packet.first_chunk()?);
        let pending = self.pending.get(&(socket, id))?;
        if pending.server != from || !dns::is_reply(packet, id, &pending.question.bytes) {
            return None;
        }
        let mut pending = self.pending.remove(&(socket, id))?;
        self.silent.remove(&from.ip());
        let mut reply = packet.to_vec();
        *reply.first_chunk_mut()? = pending.question.id.to_be_bytes();
        if dns::is_failure(packet) {
            // One that the client does not take is replaced by a short one.
            pending.failure = (reply.len() <= pending.question.limit).then_some(reply);
            pending.left.retain(|server| *server != from.ip());
            return self.next(pending, now);
        }
        if reply.len() > pending.question.limit {
            reply = dns::bare(&pending.packet, &pending.question, ResponseCode::NoError, true);
        }
        let client = pending.client?;
        Some(Event::Answer(Answer {
            client,
            packet: reply,
        }))
    }

    /// Sends queries past their deadline to the next server. Queries without one have failed.
    pub fn expire(&mut self, now: Instant) -> Vec<Event> {
        let late = |_: &(usize, u16), pending: &mut Pending| pending.deadline <= now;
        let mut late: Vec<_> = self.pending.extract_if(late).collect();
        late.sort_by_key(|(place, _)| *place);
        for (_, pending) in &late {
            self.silent.insert(pending.server.ip(), now + PROBE);
        }
        let next = late
            .into_iter()
            .filter_map(|(_, pending)| self.next(pending, now));
        next.collect()
    }
}

/// Three random bytes; `None` while the kernel's random generator is not ready.
fn random() -> Option<[u8; 3]> {
    let mut bytes = [0; 3];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK);
    (filled == Ok(bytes.len())).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::RecordType;

    use super::{super::dns::tests::query, *};

    const CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 80, 0, 2)), 4000);
    const SERVERS: [IpAddr; 2] = [
        IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
        IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)),
    ];

    /// On a node without IPv6.
    fn queries() -> Queries {
        Queries::new([0..SOCKETS, SOCKETS..SOCKETS], random)
    }

    fn question(id: u16, name: &str) -> (Vec<u8>, Question) {
        let packet = query(name, RecordType::A);
        let bytes = packet[12..].to_vec();
        let limit = dns::MAX_ANSWER;
        (packet, Question { id, bytes, limit })
    }

    fn number(query: &Outgoing) -> u16 {
        u16::from_be_bytes([query.packet[0], query.packet[1]])
    }

    fn reply(id: u16, name: &str) -> Vec<u8> {
        let mut packet = query(name, RecordType::A);
        packet[..2].copy_from_slice(&id.to_be_bytes());
        packet[2] |= 0x80;
        packet
    }

    fn asked(events: Vec<Event>) -> Vec<Outgoing> {
        let asked = events.into_iter().map(|event| match event {
            Event::Ask(outgoing) => outgoing,
            Event::Answer(answer) => panic!("{answer:?}"),
        });
        asked.collect()
    }

    /// The codes of the answers; the rest are queries that go out.
    fn codes(events: &[Event]) -> Vec<u8> {
        let codes = events.iter().filter_map(|event| match event {
            Event::Answer(answer) => Some(answer.packet[3] & 0xf),
            Event::Ask(_) => None,
        });
        codes.collect()
    }

    impl Queries {
        /// Asks for a name; the only query that goes out.
        fn query(&mut self, name: &str, now: Instant) -> Outgoing {
            let (packet, question) = question(7, name);
            let [outgoing] = asked(self.ask(&packet, CLIENT, question, &SERVERS, now))
                .try_into()
                .unwrap();
            outgoing
        }

        /// A server answers a query with a code.
        fn answer(&mut self, query: &Outgoing, name: &str, code: u8, now: Instant) -> Option<Event> {
            let mut packet = reply(number(query), name);
            packet[3] |= code;
            self.receive(query.socket, &packet, query.server, now)
        }
    }

    #[test]
    fn only_a_reply_to_a_query_is_handed_on() {
        let (mut queries, now) = (queries(), Instant::now());
        let sent = queries.query("example.com.", now);
        let (id, socket) = (number(&sent), sent.socket);
        let packet = reply(id, "example.com.");
        let elsewhere = SocketAddr::new(SERVERS[1], 53);
        assert_eq!(queries.receive(socket, &packet, elsewhere, now), None);
        assert_eq!(queries.receive(socket + 1, &packet, sent.server, now), None);
        let other = reply(id, "example.org.");
        assert_eq!(queries.receive(socket, &other, sent.server, now), None);
        let expected = Answer {
            client: CLIENT,
            packet: reply(7, "example.com."),
        };
        let answer = queries.receive(socket, &packet, sent.server, now);
        assert_eq!(answer, Some(Event::Answer(expected)));
        assert_eq!(
            queries.receive(socket, &packet, sent.server, now),
            None,
            "a second one"
        );
    }

    #[test]
    fn silent_server_has_a_successor_and_then_the_query_fails() {
        let (mut queries, now) = (queries(), Instant::now());
        let sent = queries.query("example.com.", now);
        assert_eq!(sent.server.ip(), SERVERS[0]);
        let (packet, question) = question(7, "example.com.");
        assert_eq!(queries.ask(&packet, CLIENT, question, &SERVERS, now), [], "again");
        assert_eq!(queries.expire(now + PATIENCE / 2), []);
        let sent = asked(queries.expire(now + PATIENCE));
        assert_eq!((sent.len(), sent[0].server.ip()), (1, SERVERS[1]));
        assert_eq!(codes(&queries.expire(now + PATIENCE * 2)), [2]);
        assert_eq!(
            (queries.under_way(CLIENT.ip()), queries.deadline()),
            ((0, 0), None)
        );
    }

    #[test]
    fn server_after_one_that_fails_is_asked() {
        let (mut queries, now) = (queries(), Instant::now());
        for (first, second, expected) in [(5, 0, 0), (2, 0, 0), (5, 2, 2), (2, 3, 3)] {
            let sent = queries.query("example.com.", now);
            assert_eq!(sent.server.ip(), SERVERS[0]);
            let Some(Event::Ask(next)) = queries.answer(&sent, "example.com.", first, now) else {
                panic!("{first} is final");
            };
            assert_eq!(next.server.ip(), SERVERS[1]);
            let answer = queries.answer(&next, "example.com.", second, now);
            assert_eq!(codes(answer.as_slice()), [expected], "{first} {second}");
        }
        // The answer of the first one is better than none.
        let sent = queries.query("example.com.", now);
        queries.answer(&sent, "example.com.", 5, now);
        assert_eq!(codes(&queries.expire(now + PATIENCE)), [5]);
    }

    #[test]
    fn dead_server_is_asked_last_until_it_answers_a_copy() {
        let (mut queries, mut now) = (queries(), Instant::now());
        queries.query("example.com.", now);
        now += PATIENCE;
        let next = asked(queries.expire(now));
        queries.answer(&next[0], "example.com.", 0, now).unwrap();
        for _ in 0..3 {
            let sent = queries.query("example.com.", now);
            assert_eq!(sent.server.ip(), SERVERS[1]);
            queries.answer(&sent, "example.com.", 0, now).unwrap();
        }
        now += PROBE;
        let (packet, question) = question(7, "example.com.");
        let both = asked(queries.ask(&packet, CLIENT, question, &SERVERS, now));
        assert_eq!(
            [both[0].server.ip(), both[1].server.ip()],
            SERVERS,
            "a copy, and the query"
        );
        assert!(queries.answer(&both[1], "example.com.", 0, now).is_some());
        assert_eq!(queries.answer(&both[0], "example.com.", 0, now), None, "the copy");
        assert_eq!(queries.query("example.com.", now).server.ip(), SERVERS[0]);
    }

    #[test]
    fn reply_that_the_client_does_not_take_is_truncated() {
        let (mut queries, now) = (queries(), Instant::now());
        for (length, is_whole) in [(512, true), (513, false)] {
            let sent = queries.query("example.com.", now);
            let mut packet = reply(number(&sent), "example.com.");
            packet.resize(length, 0);
            let Some(Event::Answer(answer)) = queries.receive(sent.socket, &packet, sent.server, now) else {
                panic!("no answer");
            };
            assert_eq!(answer.packet.len() == length, is_whole);
            assert_eq!(answer.packet[2] & 2 == 0, is_whole, "TC");
        }
    }

    #[test]
    fn servers_that_the_node_has_no_way_to_are_passed_over() {
        let (mut queries, now) = (queries(), Instant::now());
        let v6 = "2001:db8::53".parse().unwrap();
        let (packet, asks) = question(7, "example.com.");
        let sent = asked(queries.ask(&packet, CLIENT, asks, &[v6, SERVERS[0]], now));
        assert_eq!(sent[0].server.ip(), SERVERS[0]);
        let sent = asked(queries.expire(now + PATIENCE));
        assert_eq!(sent[0].server.ip(), SERVERS[0], "the same again");
        let (packet, asks) = question(8, "example.org.");
        assert_eq!(codes(&queries.ask(&packet, CLIENT, asks, &[v6], now)), [2]);
    }

    #[test]
    fn hundred_names_of_a_guest_are_asked_at_once() {
        let (mut queries, now) = (queries(), Instant::now());
        for id in 0..200 {
            let (packet, asks) = question(id, "example.com.");
            let sent = asked(queries.ask(&packet, CLIENT, asks, &SERVERS, now));
            assert_eq!(sent.len(), 1);
        }
        // The first server is dead: all are asked again.
        assert_eq!(asked(queries.expire(now + PATIENCE)).len(), 200);
    }

    #[test]
    fn one_guest_does_not_use_up_the_places_of_the_others() {
        let (mut queries, now) = (queries(), Instant::now());
        let mut ask = |guest: u8, id| {
            let (packet, asks) = question(id, "example.com.");
            let client = SocketAddr::new([10, 80, 0, guest].into(), 4000);
            let events = queries.ask(&packet, client, asks, &SERVERS, now);
            (codes(&events), queries.under_way(client.ip()))
        };
        for guest in 2..6 {
            for id in 0..256 {
                assert_eq!(ask(guest, id).0, [0_u8; 0]);
            }
            assert_eq!(ask(guest, 256), (vec![2], (usize::from(guest - 1) * 256, 256)));
        }
        // All places are taken: the guest with most loses its oldest query.
        assert_eq!(ask(6, 0), (vec![2], (1024, 1)));
    }
}

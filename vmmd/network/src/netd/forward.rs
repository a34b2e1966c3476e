//! Forwards queries to name servers of the node.
//!
//! The helper opens the sockets before it drops its rights, so they stay in the node's network when
//! the helper leaves it. Each query uses a random socket and a random number: a forged reply must
//! guess both (RFC 5452). A reply counts when it comes from the queried server and repeats number
//! and question.
//!
//! An unanswered query goes to the next server once, and is then dropped: clients retry on their
//! own.
//!
//! [`Queries`] has the state and decides; [`Forwarder`] has the sockets.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    ops::Range,
    time::{Duration, Instant},
};

use super::dns::{self, Question};

/// Port of name servers.
const PORT: u16 = 53;
/// Sockets of each family.
pub const SOCKETS: usize = 16;
/// Queries under way, of all guests and of one. Each is [`dns::MAX_QUERY`] bytes at most.
pub const MAX_PENDING: usize = 1024;
pub const MAX_PENDING_OF_GUEST: usize = 64;
/// How long a server has.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// Servers that a query is sent to.
pub const TRIES: u32 = 2;

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

    /// Asks the first of `servers`. A guest with too many queries under way is not served.
    pub fn forward(
        &mut self,
        packet: &[u8],
        client: SocketAddr,
        question: Question,
        servers: &[IpAddr],
        now: Instant,
    ) {
        let outgoing = self.queries.ask(packet, client, question, servers, now);
        self.send(outgoing);
    }

    /// Handles a packet from a socket. Returns the client if the packet is a reply. The packet then
    /// has the number of the client's query.
    pub fn receive(&mut self, socket: usize, packet: &mut [u8], from: SocketAddr) -> Option<SocketAddr> {
        self.queries.receive(socket, packet, from)
    }

    /// Sends queries past their deadline to the next of `servers`, once.
    pub fn expire(&mut self, servers: &[IpAddr], now: Instant) {
        let outgoing = self.queries.expire(servers, now);
        self.send(outgoing);
    }

    fn send(&self, outgoing: impl IntoIterator<Item = Outgoing>) {
        for query in outgoing {
            if let Some(open) = self.sockets.get(query.socket) {
                // A failed send is like a lost packet: the query goes to the next server at its
                // deadline.
                let _lost = open.send_to(&query.packet, query.server);
            }
        }
    }
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
    random: R,
}

#[derive(Debug)]
struct Pending {
    client: SocketAddr,
    question: Question,
    packet: Vec<u8>,
    server: SocketAddr,
    tries: u32,
    deadline: Instant,
}

impl<R: FnMut() -> Option<[u8; 3]>> Queries<R> {
    /// None yet. `sockets` are the numbers of those of IPv4 and of IPv6, `random` has three random bytes.
    pub fn new(sockets: [Range<usize>; 2], random: R) -> Self {
        Self {
            sockets,
            pending: HashMap::new(),
            random,
        }
    }

    /// When [`Self::expire`] has something to do next.
    pub fn deadline(&self) -> Option<Instant> {
        self.pending.values().map(|pending| pending.deadline).min()
    }

    /// How many are under way: of all guests, and of one.
    pub fn under_way(&self, guest: IpAddr) -> (usize, usize) {
        let of_guest = self.pending.values().filter(|other| other.client.ip() == guest);
        (self.pending.len(), of_guest.count())
    }

    /// Asks the first of `servers`. A guest with too many queries under way is not served.
    pub fn ask(
        &mut self,
        packet: &[u8],
        client: SocketAddr,
        question: Question,
        servers: &[IpAddr],
        now: Instant,
    ) -> Option<Outgoing> {
        let mut others = self.pending.values();
        // The pending query also serves a retry of its client.
        let again = others.any(|other| other.client == client && other.question == question);
        let (all, of_guest) = self.under_way(client.ip());
        if again || all >= MAX_PENDING || of_guest >= MAX_PENDING_OF_GUEST {
            return None;
        }
        let server = self.server_behind(None, servers)?;
        self.send(Pending {
            client,
            question,
            packet: packet.to_vec(),
            server,
            tries: 1,
            deadline: now + PATIENCE,
        })
    }

    /// Returns the server after `before`, or the first one. Considers only servers whose family has
    /// sockets.
    fn server_behind(&self, before: Option<IpAddr>, servers: &[IpAddr]) -> Option<SocketAddr> {
        let position = servers.iter().position(|server| Some(*server) == before);
        let next = position.map_or(0, |position| position + 1);
        let mut servers = servers.iter().cycle().skip(next).take(servers.len());
        let server = servers.find(|server| !self.sockets_for(**server).is_empty())?;
        Some(SocketAddr::new(*server, PORT))
    }

    fn sockets_for(&self, server: IpAddr) -> Range<usize> {
        let [v4, v6] = &self.sockets;
        if server.is_ipv4() { v4.clone() } else { v6.clone() }
    }

    fn send(&mut self, mut pending: Pending) -> Option<Outgoing> {
        let (socket, id) = self.place(pending.server.ip())?;
        *pending.packet.first_chunk_mut()? = id.to_be_bytes();
        let outgoing = Outgoing {
            socket,
            packet: pending.packet.clone(),
            server: pending.server,
        };
        self.pending.insert((socket, id), pending);
        Some(outgoing)
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

    /// Handles a packet from a socket. Returns the client if the packet is a reply. The packet then
    /// has the number of the client's query.
    pub fn receive(&mut self, socket: usize, packet: &mut [u8], from: SocketAddr) -> Option<SocketAddr> {
        let id = u16::from_be_bytes(*packet.first_chunk()?);
        let pending = self.pending.get(&(socket, id))?;
        if pending.server != from || !dns::is_reply(packet, id, &pending.question.bytes) {
            return None;
        }
        let pending = self.pending.remove(&(socket, id))?;
        *packet.first_chunk_mut()? = pending.question.id.to_be_bytes();
        Some(pending.client)
    }

    /// Removes queries past their deadline. Returns the queries that go to the next of `servers`,
    /// once.
    pub fn expire(&mut self, servers: &[IpAddr], now: Instant) -> Vec<Outgoing> {
        let late = |_: &(usize, u16), pending: &mut Pending| pending.deadline <= now;
        let mut late: Vec<_> = self.pending.extract_if(late).collect();
        late.sort_by_key(|(place, _)| *place);
        let again = late.into_iter().filter(|(_, pending)| pending.tries < TRIES);
        again
            .filter_map(|(_, mut pending)| {
                pending.server = self.server_behind(Some(pending.server.ip()), servers)?;
                pending.tries += 1;
                pending.deadline = now + PATIENCE;
                self.send(pending)
            })
            .collect()
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
        (packet, Question { id, bytes })
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

    #[test]
    fn the_reply_of_the_server_that_was_asked_goes_to_the_client_with_its_number() {
        let mut queries = queries();
        let (packet, asked) = question(7, "example.com.");
        let sent = queries
            .ask(&packet, CLIENT, asked, &SERVERS, Instant::now())
            .unwrap();
        assert_eq!((sent.server.ip(), &sent.packet[2..]), (SERVERS[0], &packet[2..]));
        let (socket, id) = (sent.socket, number(&sent));
        let mut packet = reply(id, "example.com.");
        let elsewhere = SocketAddr::new(SERVERS[1], 53);
        assert_eq!(queries.receive(socket, &mut packet, elsewhere), None);
        assert_eq!(queries.receive(socket + 1, &mut packet, sent.server), None);
        let mut other = reply(id, "example.org.");
        assert_eq!(queries.receive(socket, &mut other, sent.server), None);
        assert_eq!(queries.receive(socket, &mut packet, sent.server), Some(CLIENT));
        assert_eq!(packet[..2], [0, 7]);
        packet[..2].copy_from_slice(&id.to_be_bytes());
        assert_eq!(
            queries.receive(socket, &mut packet, sent.server),
            None,
            "a second one"
        );
    }

    #[test]
    fn a_silent_server_has_a_successor_and_then_the_query_is_forgotten() {
        let mut queries = queries();
        let now = Instant::now();
        let (packet, asked) = question(7, "example.com.");
        let sent = queries.ask(&packet, CLIENT, asked.clone(), &SERVERS, now);
        assert_eq!(sent.unwrap().server.ip(), SERVERS[0]);
        assert_eq!(queries.ask(&packet, CLIENT, asked, &SERVERS, now), None, "again");
        assert_eq!(queries.expire(&SERVERS, now + PATIENCE / 2), []);
        let sent = queries.expire(&SERVERS, now + PATIENCE);
        assert_eq!((sent.len(), sent[0].server.ip()), (1, SERVERS[1]));
        assert_eq!(queries.expire(&SERVERS, now + PATIENCE * 2), []);
        assert_eq!(
            (queries.under_way(CLIENT.ip()), queries.deadline()),
            ((0, 0), None)
        );
    }

    #[test]
    fn servers_that_the_node_has_no_way_to_are_passed_over() {
        let mut queries = queries();
        let now = Instant::now();
        let v6 = "2001:db8::53".parse().unwrap();
        let (packet, asked) = question(7, "example.com.");
        let servers = [v6, SERVERS[0]];
        let sent = queries.ask(&packet, CLIENT, asked, &servers, now);
        assert_eq!(sent.unwrap().server.ip(), SERVERS[0]);
        let sent = queries.expire(&servers, now + PATIENCE);
        assert_eq!(sent[0].server.ip(), SERVERS[0], "the same again");
        let (packet, asked) = question(8, "example.org.");
        assert_eq!(queries.ask(&packet, CLIENT, asked, &[v6], now), None);
    }

    #[test]
    fn one_guest_does_not_use_up_the_places_of_the_others() {
        let mut queries = queries();
        for id in 0..1000 {
            let (packet, asked) = question(id, "example.com.");
            queries.ask(&packet, CLIENT, asked, &SERVERS, Instant::now());
        }
        assert_eq!(queries.under_way(CLIENT.ip()).1, MAX_PENDING_OF_GUEST);
        let (packet, asked) = question(7, "example.com.");
        let other = SocketAddr::new([10, 80, 0, 3].into(), 4000);
        queries.ask(&packet, other, asked, &SERVERS, Instant::now());
        assert_eq!(queries.under_way(other.ip()), (MAX_PENDING_OF_GUEST + 1, 1));
    }
}

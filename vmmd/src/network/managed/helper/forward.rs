//! Queries that name servers of the node are asked.
//!
//! The sockets are opened before the helper gives up its rights, so they stay in the node's network when the helper leaves it. Each
//! query goes out from one of them, chosen at random, with a random number: who wants to forge a reply has to guess both (RFC 5452).
//! A reply counts when it comes from the server that was asked and repeats number and question.
//!
//! A query that is not answered in time is sent to the next server once, and forgotten then: clients ask again by themselves.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use super::dns::{self, Question};

/// Port of name servers.
const PORT: u16 = 53;
/// Sockets of each family.
const SOCKETS: usize = 16;
/// Queries under way, of all guests and of one.
const MAX_PENDING: usize = 1024;
const MAX_PENDING_OF_GUEST: usize = 64;
/// How long a server has.
const PATIENCE: Duration = Duration::from_secs(2);
/// Servers that a query is sent to.
const TRIES: u32 = 2;

/// What is under way.
#[derive(Debug)]
pub struct Forwarder {
    sockets: Vec<UdpSocket>,
    /// By socket and the number that it was sent with.
    pending: HashMap<(usize, u16), Pending>,
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
        Ok(Self {
            sockets,
            pending: HashMap::new(),
        })
    }

    /// The sockets that replies come to, in the order of [`Self::receive`].
    pub fn sockets(&self) -> &[UdpSocket] {
        &self.sockets
    }

    /// When [`Self::expire`] has something to do next.
    pub fn deadline(&self) -> Option<Instant> {
        self.pending.values().map(|pending| pending.deadline).min()
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
        let of_client = self.pending.values().filter(|other| other.client == client);
        // A client that asks again, since no reply came, is served by what is under way.
        let again = of_client.clone().any(|other| other.question == question);
        let of_guest = self
            .pending
            .values()
            .filter(|other| other.client.ip() == client.ip());
        if again || self.pending.len() >= MAX_PENDING || of_guest.count() >= MAX_PENDING_OF_GUEST {
            return;
        }
        let Some(server) = servers.first() else { return };
        self.send(Pending {
            client,
            question,
            packet: packet.to_vec(),
            server: SocketAddr::new(*server, PORT),
            tries: 1,
            deadline: now + PATIENCE,
        });
    }

    fn send(&mut self, mut pending: Pending) {
        let Some((socket, id)) = self.place(pending.server.is_ipv4()) else {
            return;
        };
        let [high, low] = id.to_be_bytes();
        let Some([first, second]) = pending.packet.first_chunk_mut() else {
            return;
        };
        (*first, *second) = (high, low);
        if let Some(open) = self.sockets.get(socket) {
            // What can't be sent is as what gets lost: the next server is asked in time.
            let _lost = open.send_to(&pending.packet, pending.server);
            self.pending.insert((socket, id), pending);
        }
    }

    /// A socket of the family and a number that nothing under way has.
    fn place(&self, v4: bool) -> Option<(usize, u16)> {
        let of_family = if v4 {
            0..SOCKETS
        } else {
            SOCKETS..self.sockets.len()
        };
        if of_family.is_empty() {
            return None;
        }
        // More would be bad luck beyond belief: 1 in 1,024 numbers of 65,536 at most is in use.
        (0..8).find_map(|_| {
            let [a, b, c] = random()?;
            let socket = of_family.start + usize::from(a) % of_family.len();
            let place = (socket, u16::from_be_bytes([b, c]));
            (!self.pending.contains_key(&place)).then_some(place)
        })
    }

    /// What a packet that came to a socket means: a reply, and for whom. The reply has the number of the client's query.
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

    /// Sends what has waited too long to the next of `servers`, once.
    pub fn expire(&mut self, servers: &[IpAddr], now: Instant) {
        let late = |_: &(usize, u16), pending: &mut Pending| pending.deadline <= now;
        let late: Vec<_> = self
            .pending
            .extract_if(late)
            .map(|(_, pending)| pending)
            .collect();
        for mut pending in late.into_iter().filter(|pending| pending.tries < TRIES) {
            let position = servers.iter().position(|server| *server == pending.server.ip());
            let next = position.map_or(0, |position| position + 1);
            let Some(server) = servers.get(next).or(servers.first()) else {
                continue;
            };
            pending.server = SocketAddr::new(*server, PORT);
            pending.tries += 1;
            pending.deadline = now + PATIENCE;
            self.send(pending);
        }
    }
}

/// Three random bytes; `None` when the kernel has none yet.
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
    /// Nothing listens there.
    const SERVERS: [IpAddr; 2] = [
        IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2)),
        IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3)),
    ];

    /// A forwarder whose packets stay on this machine.
    fn forwarder() -> Forwarder {
        let sockets = (0..SOCKETS).map(|_| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        Forwarder {
            sockets: sockets.collect(),
            pending: HashMap::new(),
        }
    }

    fn question(id: u16, name: &str) -> (Vec<u8>, Question) {
        let packet = query(name, RecordType::A);
        let bytes = packet[12..].to_vec();
        (packet, Question { id, bytes })
    }

    fn only(forwarder: &Forwarder) -> (usize, u16, SocketAddr) {
        assert_eq!(forwarder.pending.len(), 1);
        let (place, pending) = forwarder.pending.iter().next().unwrap();
        (place.0, place.1, pending.server)
    }

    fn reply(id: u16, name: &str) -> Vec<u8> {
        let mut packet = query(name, RecordType::A);
        packet[..2].copy_from_slice(&id.to_be_bytes());
        packet[2] |= 0x80;
        packet
    }

    #[test]
    fn the_reply_of_the_server_that_was_asked_goes_to_the_client_with_its_number() {
        let mut forwarder = forwarder();
        let (packet, asked) = question(7, "example.com.");
        forwarder.forward(&packet, CLIENT, asked, &SERVERS, Instant::now());
        let (socket, id, server) = only(&forwarder);
        assert_eq!(server.ip(), SERVERS[0]);
        let mut packet = reply(id, "example.com.");
        let elsewhere = SocketAddr::new(SERVERS[1], 53);
        assert_eq!(forwarder.receive(socket, &mut packet, elsewhere), None);
        assert_eq!(forwarder.receive(socket + 1, &mut packet, server), None);
        let mut other = reply(id, "example.org.");
        assert_eq!(forwarder.receive(socket, &mut other, server), None);
        assert_eq!(forwarder.receive(socket, &mut packet, server), Some(CLIENT));
        assert_eq!(packet[..2], [0, 7]);
        assert_eq!(
            forwarder.receive(socket, &mut packet, server),
            None,
            "a second one"
        );
    }

    #[test]
    fn a_silent_server_has_a_successor_and_then_the_query_is_forgotten() {
        let mut forwarder = forwarder();
        let now = Instant::now();
        let (packet, asked) = question(7, "example.com.");
        forwarder.forward(&packet, CLIENT, asked.clone(), &SERVERS, now);
        forwarder.forward(&packet, CLIENT, asked, &SERVERS, now);
        assert_eq!(only(&forwarder).2.ip(), SERVERS[0]);
        forwarder.expire(&SERVERS, now + PATIENCE / 2);
        assert_eq!(only(&forwarder).2.ip(), SERVERS[0]);
        forwarder.expire(&SERVERS, now + PATIENCE);
        assert_eq!(only(&forwarder).2.ip(), SERVERS[1]);
        forwarder.expire(&SERVERS, now + PATIENCE * 2);
        assert!(forwarder.pending.is_empty() && forwarder.deadline().is_none());
    }

    #[test]
    fn one_guest_does_not_use_up_the_places_of_the_others() {
        let mut forwarder = forwarder();
        for id in 0..1000 {
            let (packet, asked) = question(id, "example.com.");
            forwarder.forward(&packet, CLIENT, asked, &SERVERS, Instant::now());
        }
        assert_eq!(forwarder.pending.len(), MAX_PENDING_OF_GUEST);
        let (packet, asked) = question(7, "example.com.");
        let other = SocketAddr::new([10, 80, 0, 3].into(), 4000);
        forwarder.forward(&packet, other, asked, &SERVERS, Instant::now());
        assert_eq!(forwarder.pending.len(), MAX_PENDING_OF_GUEST + 1);
    }
}

//! DNS over TCP (RFC 7766): connections of guests, and connections to name servers for their queries.
//!
//! The helper has no right to make sockets when guests connect. So it opens the sockets for name
//! servers before. A socket is used for one query at a time, and is disconnected after it
//! (connect(2), `AF_UNSPEC`). A filter that cannot be removed drops all segments of other ports than
//! that of name servers, and Landlock refuses other ports: a helper that a packet has taken over
//! reaches no other service.
//!
//! All sockets are non-blocking, and [`Streams::turn`] does what can be done. A query that finds no
//! free socket waits in the buffer of its connection.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use hickory_proto::op::ResponseCode;
use rustix::{
    event::{PollFd, PollFlags},
    net::{SocketFlags, accept_with, connect, connect_unspec},
};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use super::{
    Table,
    dns::{self, Question, Verdict, Way},
};

/// Port of name servers.
pub const PORT: u16 = 53;
/// Sockets for name servers of each family, and sockets for one guest at a time.
pub const SOCKETS: usize = 8;
const SOCKETS_OF_GUEST: usize = 4;
/// Connections of all guests, and of one.
pub const MAX_CONNECTIONS: usize = 64;
const MAX_CONNECTIONS_OF_GUEST: usize = 8;
/// Answers that wait for a slow client, in bytes: no more queries are read then.
const MAX_OUTPUT: usize = 128 << 10;
/// How long a connection lives without progress (RFC 7766, 6.2.3: some seconds).
pub const IDLE: Duration = Duration::from_secs(10);
/// How long a server has.
pub const PATIENCE: Duration = Duration::from_secs(4);
/// How long a server that could not be asked is asked last.
const PAUSE: Duration = Duration::from_secs(30);
/// Bytes of the length before a message (RFC 1035, 4.2.2).
const LENGTH: usize = 2;

/// Connections of guests and to name servers.
#[derive(Debug)]
pub struct Streams {
    listeners: Vec<TcpListener>,
    guests: Vec<Guest>,
    upstreams: Vec<Upstream>,
    /// Servers that could not be asked, and until when they are asked last.
    silent: BTreeMap<IpAddr, Instant>,
    /// Number of the next connection of a guest.
    next: u64,
    port: u16,
}

/// A connection of a guest.
#[derive(Debug)]
struct Guest {
    number: u64,
    address: IpAddr,
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
    /// The client sends no more.
    ended: bool,
    deadline: Instant,
}

/// A socket for name servers.
#[derive(Debug)]
struct Upstream {
    stream: TcpStream,
    is_ipv6: bool,
    work: Option<Work>,
    /// The last server could not be asked.
    failed: Option<IpAddr>,
}

/// A query that a name server is asked.
#[derive(Debug)]
struct Work {
    /// The guest's connection, and the guest.
    guest: u64,
    address: IpAddr,
    packet: Vec<u8>,
    question: Question,
    /// The next servers.
    left: VecDeque<IpAddr>,
    server: IpAddr,
    /// The answer of a server that failed.
    failure: Option<Vec<u8>>,
    input: Vec<u8>,
    output: Vec<u8>,
    deadline: Instant,
}

impl Streams {
    /// Opens the sockets for name servers, in the network of the caller. Name servers listen on `port`.
    pub fn open(listeners: Vec<TcpListener>, port: u16) -> io::Result<Self> {
        let mut upstreams = Vec::new();
        for (domain, is_ipv6) in [(Domain::IPV4, false), (Domain::IPV6, true)] {
            for _ in 0..SOCKETS {
                match upstream(domain, port) {
                    Ok(stream) => upstreams.push(Upstream {
                        stream,
                        is_ipv6,
                        work: None,
                        failed: None,
                    }),
                    // A node without IPv6 has no name servers there.
                    Err(_) if is_ipv6 => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(Self {
            listeners,
            guests: Vec::new(),
            upstreams,
            silent: BTreeMap::new(),
            next: 0,
            port,
        })
    }

    /// Adds the sockets that a [`Self::turn`] waits for.
    pub fn watch<'a>(&'a self, watched: &mut Vec<PollFd<'a>>) {
        let listeners = self.listeners.iter();
        watched.extend(listeners.map(|listener| PollFd::new(listener, PollFlags::IN)));
        for guest in &self.guests {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, guest.reads());
            flags.set(PollFlags::OUT, !guest.output.is_empty());
            if !flags.is_empty() {
                watched.push(PollFd::new(&guest.stream, flags));
            }
        }
        for upstream in &self.upstreams {
            if let Some(work) = &upstream.work {
                let sends = !work.output.is_empty();
                let flags = if sends { PollFlags::OUT } else { PollFlags::IN };
                watched.push(PollFd::new(&upstream.stream, flags));
            }
        }
    }

    /// When [`Self::turn`] has something to do without a packet.
    pub fn deadline(&self) -> Option<Instant> {
        let guests = self.guests.iter().map(|guest| guest.deadline);
        let works = self
            .upstreams
            .iter()
            .filter_map(|upstream| upstream.work.as_ref());
        guests.chain(works.map(|work| work.deadline)).min()
    }

    /// Reads, answers and forwards what can be.
    pub fn turn(&mut self, table: &Table, now: Instant) {
        for index in 0..self.upstreams.len() {
            let answer = self
                .upstreams
                .get_mut(index)
                .and_then(|upstream| upstream.turn(self.port, now));
            let failed = self
                .upstreams
                .get_mut(index)
                .and_then(|upstream| upstream.failed.take());
            self.silent.extend(failed.map(|server| (server, now + PAUSE)));
            let Some((number, packet)) = answer else {
                continue;
            };
            if let Some(guest) = self.guests.iter_mut().find(|guest| guest.number == number) {
                guest.answer(&packet, now);
            }
        }
        self.accept(now);
        let mut guests = std::mem::take(&mut self.guests);
        guests.retain_mut(|guest| {
            let lives = guest.deadline > now && guest.read(now).is_ok();
            if lives {
                self.serve(guest, table, now);
            }
            let lives = lives && guest.write(now).is_ok();
            lives && (!guest.is_done() || self.works_for(guest))
        });
        self.guests = guests;
        // The clients of these queries are gone.
        for upstream in &mut self.upstreams {
            let is_left = |work: &Work| self.guests.iter().all(|guest| guest.number != work.guest);
            if upstream.work.as_ref().is_some_and(is_left) {
                upstream.end();
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        let accept = |listener| accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC);
        while let Some(stream) = self.listeners.iter().find_map(|listener| accept(listener).ok()) {
            let stream = TcpStream::from(stream);
            let Ok(address) = stream.peer_addr() else {
                continue;
            };
            let address = address.ip();
            let own = self.guests.iter().filter(|guest| guest.address == address);
            if self.guests.len() >= MAX_CONNECTIONS || own.count() >= MAX_CONNECTIONS_OF_GUEST {
                continue;
            }
            self.guests.push(Guest {
                number: self.next,
                address,
                stream,
                input: Vec::new(),
                output: Vec::new(),
                ended: false,
                deadline: now + IDLE,
            });
            self.next += 1;
        }
    }

    /// Answers or forwards the queries of a connection, in their order.
    fn serve(&mut self, guest: &mut Guest, table: &Table, now: Instant) {
        while guest.output.len() < MAX_OUTPUT
            && let Some(packet) = message(&guest.input)
        {
            let packet = packet.to_vec();
            match dns::decide(table, &packet, Way::Tcp) {
                Verdict::Answer(reply) => guest.answer(&reply, now),
                Verdict::Forward(question) => {
                    let servers = table.forward.iter().copied();
                    let has_socket =
                        |server: &IpAddr| self.upstreams.iter().any(|one| one.is_ipv6 == server.is_ipv6());
                    let mut left: Vec<_> = servers.filter(has_socket).collect();
                    left.sort_by_key(|server| self.silent.get(server).is_some_and(|until| *until > now));
                    let left = VecDeque::from(left);
                    let Some(server) = left.front() else {
                        let failure = dns::bare(&packet, &question, ResponseCode::ServFail, false);
                        guest.answer(&failure, now);
                        guest.input.drain(..LENGTH + packet.len());
                        continue;
                    };
                    let works = self
                        .upstreams
                        .iter()
                        .filter_map(|upstream| upstream.work.as_ref());
                    let own = works.filter(|work| work.address == guest.address).count();
                    let mut all = self.upstreams.iter_mut();
                    let free = all.find(|one| one.work.is_none() && one.is_ipv6 == server.is_ipv6());
                    let Some(free) = free.filter(|_| own < SOCKETS_OF_GUEST) else {
                        return;
                    };
                    free.work = Some(Work {
                        guest: guest.number,
                        address: guest.address,
                        packet: packet.clone(),
                        question,
                        server: *server,
                        left,
                        failure: None,
                        input: Vec::new(),
                        output: Vec::new(),
                        deadline: now,
                    });
                    if let Some((_, failure)) = free.ask_next(self.port, now) {
                        guest.answer(&failure, now);
                    }
                }
                Verdict::Ignore => {}
            }
            guest.input.drain(..LENGTH + packet.len());
        }
    }

    fn works_for(&self, guest: &Guest) -> bool {
        let mut works = self
            .upstreams
            .iter()
            .filter_map(|upstream| upstream.work.as_ref());
        works.any(|work| work.guest == guest.number)
    }
}

impl Guest {
    /// Whether more input is wanted.
    fn reads(&self) -> bool {
        !self.ended && self.input.len() < LENGTH + dns::MAX_QUERY && self.output.len() < MAX_OUTPUT
    }

    /// Whether nothing more comes from the client or goes to it, apart from answers of name servers.
    fn is_done(&self) -> bool {
        self.ended && self.output.is_empty() && message(&self.input).is_none()
    }

    fn read(&mut self, now: Instant) -> io::Result<()> {
        while self.reads() {
            let mut bytes = [0; LENGTH + dns::MAX_QUERY];
            match self.stream.read(&mut bytes) {
                Ok(0) => self.ended = true,
                Ok(length) => {
                    self.input.extend(bytes.get(..length).unwrap_or_default());
                    self.deadline = now + IDLE;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        // A longer query is none.
        if length(&self.input).is_some_and(|length| length > dns::MAX_QUERY) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(())
    }

    fn answer(&mut self, packet: &[u8], now: Instant) {
        self.output.extend(framed(packet));
        self.deadline = now + IDLE;
    }

    fn write(&mut self, now: Instant) -> io::Result<()> {
        if send(&mut self.stream, &mut self.output)? {
            self.deadline = now + IDLE;
        }
        Ok(())
    }
}

impl Upstream {
    /// Continues with its query. Returns the answer for the guest's connection.
    fn turn(&mut self, port: u16, now: Instant) -> Option<(u64, Vec<u8>)> {
        let work = self.work.as_mut()?;
        if work.deadline <= now {
            self.failed = Some(work.server);
            return self.ask_next(port, now);
        }
        match work.proceed(&mut self.stream) {
            Ok(false) => None,
            Ok(true) => {
                let packet = message(&work.input)?.to_vec();
                if dns::is_failure(&packet) {
                    work.failure = Some(packet);
                    return self.ask_next(port, now);
                }
                let guest = work.guest;
                self.end();
                Some((guest, packet))
            }
            Err(_) => {
                self.failed = Some(work.server);
                self.ask_next(port, now)
            }
        }
    }

    /// Asks the next server; without one the query has failed, and has this answer.
    fn ask_next(&mut self, port: u16, now: Instant) -> Option<(u64, Vec<u8>)> {
        let _was_connected = connect_unspec(&self.stream);
        let work = self.work.as_mut()?;
        while let Some(server) = work.left.pop_front() {
            if server.is_ipv6() != self.is_ipv6 {
                continue;
            }
            let connected = connect(&self.stream, &SocketAddr::new(server, port));
            if connected.is_ok() || connected == Err(rustix::io::Errno::INPROGRESS) {
                work.server = server;
                work.input.clear();
                work.output = framed(&work.packet);
                work.deadline = now + PATIENCE;
                return None;
            }
        }
        let work = self.work.take()?;
        let failure = work
            .failure
            .unwrap_or_else(|| dns::bare(&work.packet, &work.question, ResponseCode::ServFail, false));
        Some((work.guest, failure))
    }

    fn end(&mut self) {
        self.work = None;
        let _was_connected = connect_unspec(&self.stream);
    }
}

impl Work {
    /// Sends the query, and receives the reply. True when it is whole.
    fn proceed(&mut self, stream: &mut TcpStream) -> io::Result<bool> {
        send(stream, &mut self.output)?;
        if !self.output.is_empty() {
            return Ok(false);
        }
        let mut bytes = [0; 4096];
        loop {
            match stream.read(&mut bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => self.input.extend(bytes.get(..length).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
            if let Some(packet) = message(&self.input) {
                return match dns::is_reply(packet, self.question.id, &self.question.bytes) {
                    true => Ok(true),
                    false => Err(io::ErrorKind::InvalidData.into()),
                };
            }
        }
    }
}

/// A socket for name servers, whose other ports it cannot reach.
fn upstream(domain: Domain, port: u16) -> io::Result<TcpStream> {
    /// Steps of a program of classic BPF (linux/filter.h): load 16 bits, compare, return.
    const LOAD_HALF: u16 = 0x28;
    const EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    // The source port is in the first bytes of a segment.
    let attached = socket.attach_filter(&[
        SockFilter::new(LOAD_HALF, 0, 0, 0),
        SockFilter::new(EQUAL, 0, 1, port.into()),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
        SockFilter::new(RETURN, 0, 0, 0),
    ]);
    match attached {
        // Linux 6.18 lets only root attach filters. Landlock has the same rule since Linux 6.7.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
        attached => attached?,
    }
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Sends what can be sent. True when something was.
fn send(stream: &mut TcpStream, output: &mut Vec<u8>) -> io::Result<bool> {
    let mut sent = 0;
    while let Some(rest) = output.get(sent..).filter(|rest| !rest.is_empty()) {
        match stream.write(rest) {
            Ok(length) => sent += length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    output.drain(..sent.min(output.len()));
    Ok(sent > 0)
}

/// A message behind its length.
fn framed(packet: &[u8]) -> Vec<u8> {
    let length = u16::try_from(packet.len()).unwrap_or(u16::MAX);
    [&length.to_be_bytes()[..], packet].concat()
}

fn length(input: &[u8]) -> Option<usize> {
    input
        .first_chunk()
        .map(|length| u16::from_be_bytes(*length).into())
}

/// The first message of the input, when it is whole.
fn message(input: &[u8]) -> Option<&[u8]> {
    input.get(LENGTH..LENGTH + length(input)?)
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, thread};

    use hickory_proto::{op::Message, rr::RecordType};
    use rustix::event::{Timespec, poll};

    use super::{
        super::dns::tests::{query, table},
        *,
    };

    /// A listener that does not block, on a port of the loopback interface.
    fn listener() -> TcpListener {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    }

    /// Serves until `client` has returned; its result.
    fn serve<T: Send + 'static>(
        streams: &mut Streams,
        forward: &[IpAddr],
        client: impl FnOnce(SocketAddr) -> T + Send + 'static,
    ) -> T {
        let table = Table {
            forward: forward.to_vec(),
            ..table()
        };
        let to = streams.listeners[0].local_addr().unwrap();
        let client = thread::spawn(move || client(to));
        while !client.is_finished() {
            let mut watched = Vec::new();
            streams.watch(&mut watched);
            let wait = Timespec::try_from(Duration::from_millis(20)).unwrap();
            poll(&mut watched, Some(&wait)).unwrap();
            streams.turn(&table, Instant::now());
        }
        client.join().unwrap()
    }

    fn read(stream: &mut TcpStream) -> Vec<u8> {
        let mut length = [0; 2];
        stream.read_exact(&mut length).unwrap();
        let mut packet = vec![0; u16::from_be_bytes(length).into()];
        stream.read_exact(&mut packet).unwrap();
        packet
    }

    /// Sends queries for these names at once; the answers.
    fn ask(to: SocketAddr, names: &[&str]) -> Vec<Message> {
        let mut stream = TcpStream::connect(to).unwrap();
        let queries = names.iter().map(|name| framed(&query(name, RecordType::A)));
        stream.write_all(&queries.collect::<Vec<_>>().concat()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let answers = names
            .iter()
            .map(|_| Message::from_vec(&read(&mut stream)).unwrap());
        let answers = answers.collect();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the connection ends");
        answers
    }

    /// A name server that answers each query with this code and as many bytes behind it, and the port.
    fn name_server(address: Ipv4Addr, port: u16, code: u8, length: usize) -> u16 {
        let listener = TcpListener::bind((address, port)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut packet = read(&mut stream);
                packet[2] |= 0x80;
                packet[3] |= code;
                packet.resize(packet.len() + length, 0);
                // In two parts.
                let bytes = framed(&packet);
                let (first, second) = bytes.split_at(7);
                let _gone = stream.write_all(first).and_then(|()| stream.write_all(second));
            }
        });
        port
    }

    #[test]
    fn queries_of_a_connection_are_answered() {
        let port = name_server(Ipv4Addr::LOCALHOST, 0, 0, 40_000);
        let mut streams = Streams::open(vec![listener()], port).unwrap();
        for _ in 0..3 {
            let answers = serve(&mut streams, &[Ipv4Addr::LOCALHOST.into()], |to| {
                ask(to, &["web.lan.internal."; 3])
            });
            assert!(answers.iter().all(|answer| answer.answers.len() == 1));
            let long = serve(&mut streams, &[Ipv4Addr::LOCALHOST.into()], |to| {
                let mut stream = TcpStream::connect(to).unwrap();
                stream
                    .write_all(&framed(&query("example.com.", RecordType::A)))
                    .unwrap();
                read(&mut stream).len()
            });
            assert!(long > 40_000);
        }
    }

    #[test]
    fn more_queries_than_sockets_wait_for_their_turn() {
        let port = name_server(Ipv4Addr::LOCALHOST, 0, 0, 0);
        let mut streams = Streams::open(vec![listener()], port).unwrap();
        let names = ["example.com."; 3 * SOCKETS];
        let answers = serve(&mut streams, &[Ipv4Addr::LOCALHOST.into()], move |to| {
            ask(to, &names)
        });
        assert_eq!(answers.len(), 3 * SOCKETS);
        assert!(streams.upstreams.iter().all(|upstream| upstream.work.is_none()));
    }

    #[test]
    fn next_server_is_asked_after_one_that_fails() {
        let (refuses, good, nobody) = (
            Ipv4Addr::new(127, 0, 0, 2),
            Ipv4Addr::new(127, 0, 0, 3),
            Ipv4Addr::new(127, 0, 0, 4),
        );
        let port = name_server(refuses, 0, 5, 0);
        name_server(good, port, 3, 0);
        for (servers, expected) in [
            (vec![refuses, good], 3),
            (vec![nobody, good], 3),
            (vec![nobody, refuses], 5),
            (vec![nobody], 2),
        ] {
            let mut streams = Streams::open(vec![listener()], port).unwrap();
            let servers: Vec<_> = servers.into_iter().map(IpAddr::from).collect();
            let answers = serve(&mut streams, &servers, |to| ask(to, &["example.com."]));
            assert_eq!(answers[0].metadata.response_code.low(), expected, "{servers:?}");
            let silent: Vec<_> = streams.silent.keys().copied().collect();
            let is_dead = servers.contains(&nobody.into());
            assert_eq!(silent == [IpAddr::from(nobody)], is_dead);
        }
    }

    #[test]
    fn server_that_cannot_be_reached_is_asked_last() {
        let (good, nobody) = (Ipv4Addr::new(127, 0, 0, 5), Ipv4Addr::new(127, 0, 0, 6));
        let port = name_server(good, 0, 3, 0);
        let mut streams = Streams::open(vec![listener()], port).unwrap();
        let servers = [IpAddr::from(nobody), good.into()];
        serve(&mut streams, &servers, |to| ask(to, &["example.com."]));
        // This server is present from now on. It refuses.
        name_server(nobody, port, 5, 0);
        let answers = serve(&mut streams, &servers, |to| ask(to, &["example.com."]));
        assert_eq!(answers[0].metadata.response_code.low(), 3);
        streams.silent.clear();
        let answers = serve(&mut streams, &[nobody.into()], |to| ask(to, &["example.com."]));
        assert_eq!(answers[0].metadata.response_code.low(), 5);
    }

    #[test]
    fn socket_for_name_servers_reaches_no_other_port() {
        let (right, wrong) = (listener(), listener());
        let address = |listener: &TcpListener| listener.local_addr().unwrap();
        let port = address(&right).port();
        let [first, second] = [(); 2].map(|()| upstream(Domain::IPV4, port).unwrap());
        let _ = connect(&first, &address(&wrong));
        let _ = connect(&second, &address(&right));
        let mut watched = [&first, &second].map(|socket| PollFd::new(socket, PollFlags::OUT));
        poll(&mut watched, None).unwrap();
        let connected = watched.map(|socket| socket.revents().contains(PollFlags::OUT));
        assert_eq!(connected, [false, true]);
    }

    #[test]
    fn guest_has_a_bounded_number_of_connections_and_idle_ones_end() {
        let mut streams = Streams::open(vec![listener()], PORT).unwrap();
        let to = streams.listeners[0].local_addr().unwrap();
        let clients: Vec<_> = (0..20).map(|_| TcpStream::connect(to).unwrap()).collect();
        let now = Instant::now();
        streams.turn(&table(), now);
        assert_eq!(streams.guests.len(), MAX_CONNECTIONS_OF_GUEST);
        assert_eq!(streams.deadline(), Some(now + IDLE));
        streams.turn(&table(), now + IDLE);
        assert_eq!(streams.guests.len(), 0);
        drop(clients);
        // Too long a query ends the connection.
        let mut client = TcpStream::connect(to).unwrap();
        client.write_all(&[0xff; 100]).unwrap();
        streams.turn(&table(), now);
        assert_eq!(streams.guests.len(), 0);
    }
}

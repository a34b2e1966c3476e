//! Worker of the socket device: moves packets between the queues and the connections.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use vmm_base::{GuestMemory, sys::Iovecs};
use zerocopy::IntoBytes as _;

use super::{
    EVENT, RX, TX,
    connection::{Broken, Connection, Stage},
    host::{Direction, HostEnd, VsockHost},
    packet::{HEADER, HOST_CID, Header, Ports, STREAM, TRANSPORT_RESET, op},
};
use crate::{
    state::{Section, StateError, check, message},
    virtio::{
        chain::Chain,
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        session::{EventSet, Session},
        stream::Stream,
    },
};

/// Most connections, with the host's ends that wait for one.
pub const MAX_CONNECTIONS: usize = 1024;

/// So many RST wait for buffers of the driver before its packets wait, too.
const MAX_RESETS: usize = 256;

/// The first port of the host's ends that connect, as of Linux (VMADDR_PORT_ANY is the last one).
const FIRST_PORT: u32 = 1024;

/// Token of the event of [`VsockHost`]. A connection has the token of its place and one more.
const HOST_TOKEN: u32 = 0;

/// How far the driver of a restored guest is with the reset of its connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Transport {
    /// The driver and the device agree on the connections.
    #[default]
    Settled,
    /// The device was restored, and has not looked for a buffer for the event.
    Restored,
    /// The driver had no buffer for the event. Such a driver does not wait for the event.
    ResetDue,
    /// The driver has the event. It had so many further buffers for events, so another buffer shows that it
    /// has handled the event.
    ResetSent { buffers: u16 },
}

pub(super) struct VsockHandler {
    guest_cid: u64,
    host: Arc<VsockHost>,
    /// A connection keeps its place.
    places: Vec<Option<Connection>>,
    /// Places that are free, of those in `places`.
    free: Vec<usize>,
    /// Places of connections that the host has requested, and of established ones.
    by_ports: HashMap<Ports, usize>,
    /// Places of the host's ends that wait, by the host's port, and then in their order.
    listening: BTreeMap<(u32, u64), usize>,
    /// Number of the next end that waits.
    next_listening: u64,
    /// Candidate for the port of the next end that connects.
    next_port: u32,
    /// Places of connections that may have packets for the guest.
    ready: VecDeque<usize>,
    /// RST for the guest.
    resets: VecDeque<Header>,
    /// Packets of the guest wait until some of `resets` are delivered.
    waits_for_resets: bool,
    transport: Transport,
    /// Buffers for events that are taken, to be notified of another one. Only during a session.
    events_taken: u16,
    /// The driver uses the device, so it may have connections.
    active: bool,
    chain: Chain,
    /// List of buffers for one system call. Only during a session.
    buffers: Option<Iovecs>,
}

impl VsockHandler {
    pub(super) fn new(guest_cid: u32, host: Arc<VsockHost>) -> Self {
        Self {
            guest_cid: guest_cid.into(),
            host,
            places: Vec::new(),
            free: Vec::new(),
            by_ports: HashMap::new(),
            listening: BTreeMap::new(),
            next_listening: 0,
            next_port: FIRST_PORT,
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            waits_for_resets: false,
            transport: Transport::Settled,
            events_taken: 0,
            active: false,
            chain: Chain::new(),
            buffers: None,
        }
    }

    /// Sends packets to the guest, as far as it has buffers.
    fn deliver(&mut self, session: &mut Session) -> Result<Progress, Fault> {
        let progress = loop {
            if self.is_held() || self.resets.is_empty() && self.ready.is_empty() {
                // A ring that makes no sense is found now.
                if session.pop(RX, &mut self.chain)? {
                    session.unpop(RX);
                }
                break Progress::Waiting;
            }
            if !session.pop(RX, &mut self.chain)? {
                self.stall(session)?;
                break Progress::Done;
            }
            let head = self.chain.head();
            if self.chain.writable_len() <= HEADER {
                session.show_used(RX)?;
                return Err(Fault::Guest {
                    queue: RX,
                    head,
                    reason: "no room for a packet",
                });
            }
            match self.send(session) {
                Ok(Some(length)) => session.put_used(RX, head, length)?,
                Ok(None) => session.unpop(RX),
                Err(fault) => {
                    session.unpop(RX);
                    session.show_used(RX)?;
                    return Err(fault);
                }
            }
        };
        session.show_used(RX)?;
        if self.resets.len() < MAX_RESETS && std::mem::take(&mut self.waits_for_resets) {
            session.kick_again(TX);
        }
        Ok(progress)
    }

    /// Writes the next packet into the chain. Gives its length; `None` when there is no packet.
    fn send(&mut self, session: &mut Session) -> Result<Option<u32>, Fault> {
        loop {
            if let Some(header) = self.resets.pop_front() {
                let written = self.chain.write(session.memory(), 0, header.as_bytes());
                written.map_err(|_| Fault::Bug("a buffer is shorter than it said".into()))?;
                return Ok(Some(HEADER));
            }
            let Some(place) = self.ready.pop_front() else {
                return Ok(None);
            };
            let connection = self.places.get_mut(place).and_then(Option::as_mut);
            let (Some(connection), Some(buffers)) = (connection, &mut self.buffers) else {
                continue;
            };
            connection.queued = false;
            connection.stalled = false;
            let (memory, guest_cid) = (session.memory(), self.guest_cid);
            match connection.send(memory, &self.chain, guest_cid, buffers) {
                Ok(Some(length)) => {
                    // Others have their turn.
                    self.enqueue(place);
                    return Ok(Some(length));
                }
                Ok(None) => self.watch(session, place)?,
                Err(Broken) => self.reset_connection(session, place)?,
            }
        }
    }

    /// The guest has no buffers: the sockets of the connections that have packets are not watched for
    /// data.
    fn stall(&mut self, session: &Session) -> Result<(), Fault> {
        for index in 0..self.ready.len() {
            let Some(place) = self.ready.get(index).copied() else {
                break;
            };
            if let Some(connection) = self.connection(place)
                && !std::mem::replace(&mut connection.stalled, true)
            {
                self.watch(session, place)?;
            }
        }
        Ok(())
    }

    /// Takes the guest's packets.
    fn take(&mut self, session: &mut Session) -> Result<Progress, Fault> {
        loop {
            self.waits_for_resets = self.resets.len() >= MAX_RESETS;
            if self.waits_for_resets || self.is_held() {
                return Ok(Progress::Waiting);
            }
            if !session.pop(TX, &mut self.chain)? {
                return Ok(Progress::Done);
            }
            let head = self.chain.head();
            let Ok(header) = self.chain.read_obj::<Header>(session.memory(), 0) else {
                return Err(Fault::Guest {
                    queue: TX,
                    head,
                    reason: "a packet without a whole header",
                });
            };
            let handled = self.handle(session, &header);
            session.put_used(TX, head, 0)?;
            handled?;
        }
    }

    /// Acts on a packet of the guest, which is in the chain.
    fn handle(&mut self, session: &mut Session, header: &Header) -> Result<(), Fault> {
        if header.src_cid.get() != self.guest_cid {
            session.count_guest_fault();
            return Ok(());
        }
        let (ports, op) = (header.ports(), header.op.get());
        let is_for_host = header.dst_cid.get() == HOST_CID && header.kind.get() == STREAM;
        let place = match self.by_ports.get(&ports).copied() {
            Some(place) if is_for_host => place,
            _ if op == op::RST => return Ok(()),
            None if is_for_host && op == op::REQUEST => match self.accept(header) {
                Some(place) => return self.follow_up(session, place),
                None => {
                    self.push_reset(session, header.refusal());
                    return Ok(());
                }
            },
            _ => {
                self.push_reset(session, header.refusal());
                return Ok(());
            }
        };
        if op == op::RST {
            return self.remove(session, place).map(drop);
        }
        match self.apply(session.memory(), place, header) {
            Ok(()) => self.follow_up(session, place),
            Err(Broken) => {
                session.count_guest_fault();
                self.reset_connection(session, place)
            }
        }
    }

    /// A request of the guest. Gives the connection's place; `None` if the request is refused.
    fn accept(&mut self, header: &Header) -> Option<usize> {
        let ports = header.ports();
        let range = (ports.host, 0)..=(ports.host, u64::MAX);
        let (key, place) = self.listening.range(range).next()?;
        let (key, place) = (*key, *place);
        let connection = self.connection(place)?;
        connection.ports = ports;
        connection.take_credit(header);
        // The event of an end that is closed removes it.
        connection.establish().ok()?;
        self.listening.remove(&key);
        self.by_ports.insert(ports, place);
        Some(place)
    }

    /// A packet of a connection that the guest may know.
    fn apply(&mut self, memory: &GuestMemory, place: usize, header: &Header) -> Result<(), Broken> {
        let connection = self.places.get_mut(place).and_then(Option::as_mut);
        let (Some(connection), Some(buffers)) = (connection, &mut self.buffers) else {
            return Err(Broken);
        };
        connection.take_credit(header);
        match (header.op.get(), connection.stage) {
            (op::RESPONSE, Stage::Requested) if connection.is_known() => connection.establish(),
            (op::RW, Stage::Open) => connection.receive(memory, &self.chain, header.len.get(), buffers),
            (op::SHUTDOWN, Stage::Open) => {
                connection.shut_down(header.flags.get());
                Ok(())
            }
            (op::CREDIT_UPDATE, Stage::Open) => Ok(()),
            (op::CREDIT_REQUEST, Stage::Open) => {
                connection.owe_credit();
                Ok(())
            }
            _ => Err(Broken),
        }
    }

    /// Acts on a change of a connection: ends it, sends a packet, watches other events.
    fn follow_up(&mut self, session: &mut Session, place: usize) -> Result<(), Fault> {
        let Some(connection) = self.connection(place) else {
            return Ok(());
        };
        if connection.finish() {
            return self.reset_connection(session, place);
        }
        if connection.has_packet() {
            self.enqueue(place);
            session.kick_again(RX);
        }
        self.watch(session, place)
    }

    /// Opens the connections that other threads have asked for.
    fn open(&mut self, session: &mut Session) -> Result<(), Fault> {
        for HostEnd {
            direction,
            port,
            socket,
        } in self.host.take()
        {
            let (ports, stage) = match direction {
                Direction::Accept => (Ports { host: port, guest: 0 }, Stage::Listening),
                Direction::Connect => match self.free_port(port) {
                    Some(host) => (Ports { host, guest: port }, Stage::Requested),
                    None => continue,
                },
            };
            let Some(place) = self.free_place() else {
                continue;
            };
            let connection = Connection::new(ports, stage, Stream::new(socket));
            if let Some(free) = self.places.get_mut(place) {
                *free = Some(connection);
            }
            match direction {
                Direction::Accept => {
                    self.listening.insert((port, self.next_listening), place);
                    self.next_listening = self.next_listening.wrapping_add(1);
                }
                Direction::Connect => {
                    self.by_ports.insert(ports, place);
                }
            }
            self.follow_up(session, place)?;
        }
        Ok(())
    }

    /// A place for another connection.
    fn free_place(&mut self) -> Option<usize> {
        if let Some(place) = self.free.pop() {
            return Some(place);
        }
        let place = self.places.len();
        if place >= MAX_CONNECTIONS {
            return None;
        }
        self.places.push(None);
        Some(place)
    }

    /// A port of the host that has no connection to this port of the guest.
    fn free_port(&mut self, guest: u32) -> Option<u32> {
        for _ in 0..=MAX_CONNECTIONS {
            let host = self.next_port;
            // Without VMADDR_PORT_ANY.
            self.next_port = match host.wrapping_add(1) {
                u32::MAX => FIRST_PORT,
                next => next,
            };
            if !self.by_ports.contains_key(&Ports { host, guest }) {
                return Some(host);
            }
        }
        None
    }

    fn connection(&mut self, place: usize) -> Option<&mut Connection> {
        self.places.get_mut(place)?.as_mut()
    }

    /// The connection may have packets for the guest.
    fn enqueue(&mut self, place: usize) {
        if let Some(connection) = self.connection(place)
            && !std::mem::replace(&mut connection.queued, true)
        {
            self.ready.push_back(place);
        }
    }

    /// Watches the socket of a connection for what matters now.
    fn watch(&mut self, session: &Session, place: usize) -> Result<(), Fault> {
        let Some(connection) = self.connection(place) else {
            return Ok(());
        };
        let events = connection.events();
        connection.stream.watch(session, token(place), events)
    }

    /// The socket of a connection is ready, or its other end is closed.
    fn stream_event(&mut self, session: &mut Session, place: usize) -> Result<(), Fault> {
        let Some(connection) = self.connection(place) else {
            return Ok(());
        };
        connection.flush();
        let hung_up = connection.stream.check_hang_up(session)?;
        match connection.stage {
            Stage::Open => {
                self.enqueue(place);
                session.kick_again(RX);
                self.follow_up(session, place)
            }
            Stage::Requested if hung_up && connection.is_known() => self.reset_connection(session, place),
            Stage::Listening | Stage::Requested if hung_up => self.remove(session, place).map(drop),
            Stage::Listening | Stage::Requested => Ok(()),
        }
    }

    /// Ends a connection that the guest knows.
    fn reset_connection(&mut self, session: &mut Session, place: usize) -> Result<(), Fault> {
        if let Some(ports) = self.remove(session, place)? {
            self.push_reset(session, Header::reset(self.guest_cid, ports));
        }
        Ok(())
    }

    fn push_reset(&mut self, session: &mut Session, header: Header) {
        self.resets.push_back(header);
        session.kick_again(RX);
    }

    /// Closes the host's end of a connection, and frees its place.
    fn remove(&mut self, session: &Session, place: usize) -> Result<Option<Ports>, Fault> {
        let Some(mut connection) = self.places.get_mut(place).and_then(Option::take) else {
            return Ok(None);
        };
        self.forget(place, &connection);
        connection.stream.unwatch(session)?;
        Ok(Some(connection.ports))
    }

    /// Frees the place of a connection that is taken out.
    fn forget(&mut self, place: usize, connection: &Connection) {
        let ports = connection.ports;
        match connection.stage {
            Stage::Listening => self.listening.retain(|_, listening| *listening != place),
            Stage::Requested | Stage::Open => {
                self.by_ports.remove(&ports);
            }
        }
        if connection.queued {
            self.ready.retain(|ready| *ready != place);
        }
        self.free.push(place);
    }

    /// Ends the connections that the guest knew, and knows no more.
    fn end_connections(&mut self, session: Option<&Session>) -> Result<(), Fault> {
        for place in 0..self.places.len() {
            if let Some(connection) = self.places.get_mut(place)
                && let Some(mut ended) = connection.take_if(|connection| connection.is_known())
            {
                self.forget(place, &ended);
                if let Some(session) = session {
                    ended.stream.unwatch(session)?;
                }
            }
        }
        self.resets.clear();
        Ok(())
    }

    /// Delivers the event with which the driver resets its connections, if the event is due. Packets
    /// continue when the driver has handled the event.
    fn settle(&mut self, session: &mut Session) -> Result<Progress, Fault> {
        let before = self.transport;
        if matches!(before, Transport::Restored | Transport::ResetDue) {
            self.send_event(session)?;
        }
        if let Transport::ResetSent { buffers } = self.transport {
            while session.pop(EVENT, &mut self.chain)? {
                self.events_taken = self.events_taken.saturating_add(1);
            }
            if self.events_taken > buffers {
                self.return_events(session);
                self.transport = Transport::Settled;
            }
        }
        if before != self.transport {
            session.kick_again(RX);
            session.kick_again(TX);
        }
        match self.transport {
            Transport::Settled => Ok(Progress::Waiting),
            _ => Ok(Progress::Done),
        }
    }

    /// Delivers the event TRANSPORT_RESET, if there is a buffer.
    fn send_event(&mut self, session: &mut Session) -> Result<(), Fault> {
        self.transport = Transport::ResetDue;
        if !session.pop(EVENT, &mut self.chain)? {
            return Ok(());
        }
        let head = self.chain.head();
        if self.chain.write(session.memory(), 0, &TRANSPORT_RESET).is_err() {
            return Err(Fault::Guest {
                queue: EVENT,
                head,
                reason: "no room for an event",
            });
        }
        let length = u32::try_from(TRANSPORT_RESET.len()).unwrap_or(0);
        let buffers = u16::try_from(session.available(EVENT)).unwrap_or(u16::MAX);
        session.add_used(EVENT, head, length)?;
        self.transport = Transport::ResetSent { buffers };
        self.end_connections(Some(session))
    }

    /// Makes the buffers for events that were taken available again.
    fn return_events(&mut self, session: &mut Session) {
        if let Some(queue) = session.queue(EVENT) {
            queue.unpop(std::mem::take(&mut self.events_taken));
        }
    }

    /// Whether packets wait until the driver has reset its connections.
    fn is_held(&self) -> bool {
        matches!(self.transport, Transport::Restored | Transport::ResetSent { .. })
    }
}

/// Token of the events of the connection at this place.
fn token(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX).saturating_add(1)
}

impl QueueHandler for VsockHandler {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        self.active = true;
        self.buffers = Some(Iovecs::new(Arc::new(session.memory().clone())));
        session.watch(self.host.event(), HOST_TOKEN, EventSet::IN)?;
        for place in 0..self.places.len() {
            if let Some(connection) = self.connection(place) {
                connection.stream.end_session();
            }
            self.watch(session, place)?;
        }
        if session.queue(EVENT).is_none() {
            // The driver takes no events.
            self.transport = Transport::Settled;
        }
        Ok(())
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        match queue {
            RX => self.deliver(session),
            TX => {
                let progress = self.take(session);
                session.show_used(TX)?;
                progress
            }
            _ => self.settle(session),
        }
    }

    fn event(&mut self, session: &mut Session, token: u32) -> Result<(), Fault> {
        match token.checked_sub(1) {
            None => self.open(session),
            Some(place) => self.stream_event(session, place as usize),
        }
    }

    fn drain(&mut self, session: &mut Session, _deadline: Instant) -> Result<Drained, Fault> {
        self.buffers = None;
        self.return_events(session);
        Ok(Drained::Quiet)
    }

    fn reset(&mut self) {
        // Without a session nothing can fail.
        let _ended = self.end_connections(None);
        self.transport = Transport::Settled;
        self.active = false;
    }

    fn save(&self) -> Result<Section, StateError> {
        let state = message::VirtioVsockQueues {
            active: self.active,
            next_port: self.next_port,
        };
        Ok(Section::new("vsock", &state))
    }

    fn restore(&mut self, section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        let saved: message::VirtioVsockQueues = section.open()?;
        check(
            (FIRST_PORT..u32::MAX).contains(&saved.next_port),
            "next_port",
            "not a port of a client",
        )?;
        self.next_port = saved.next_port;
        self.active = saved.active;
        if saved.active {
            self.transport = Transport::Restored;
        }
        Ok(())
    }
}

use std::{
    io::{Read as _, Write as _},
    net::Shutdown,
    os::{fd::OwnedFd, unix::net::UnixStream},
    time::Duration,
};

use zerocopy::{FromBytes as _, IntoBytes as _};

use super::{
    packet::{HEADER, HOST_CID, Header, NO_MORE, NO_RECEIVE, NO_SEND, STREAM, op},
    *,
};
use crate::{
    component::Component as _,
    virtio::testing::{Area, Buffer, Driver, Rig, suite::DeviceUnderTest},
};

const CID: u32 = 52;
/// Size of each buffer for packets: as Linux's.
const BUFFER: u32 = 4096;
/// Port of the guest.
const GUEST: u32 = 22;
/// Port of the host.
const HOST: u32 = 7;
/// Credit that a guest gives at first.
const CREDIT: u32 = 256 << 10;

/// A client on the host.
struct Client(UnixStream);

impl Client {
    /// Asks for a connection.
    fn open(host: &VsockHost, direction: Direction, port: u32) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        host.open(direction, port, OwnedFd::from(theirs)).unwrap();
        Self(ours)
    }

    fn read(&mut self, count: usize) -> Vec<u8> {
        let mut data = vec![0; count];
        self.0.read_exact(&mut data).unwrap();
        data
    }

    fn is_established(&mut self) {
        assert_eq!(self.read(1), [0]);
    }

    fn ends(&mut self) {
        assert_eq!(self.0.read(&mut [0]).unwrap(), 0);
    }
}

/// A driver as Linux's: it always has buffers for packets.
struct Guest {
    driver: Driver,
    host: Arc<VsockHost>,
}

/// A packet that the guest has received.
#[derive(Debug)]
struct Packet {
    header: Header,
    data: Vec<u8>,
}

impl Packet {
    fn op(&self) -> u16 {
        self.header.op.get()
    }

    fn ports(&self) -> (u32, u32) {
        (self.header.src_port.get(), self.header.dst_port.get())
    }
}

/// A packet of the guest from its port `from` to the host's port `to`.
fn packet(op: u16, from: u32, to: u32) -> Header {
    Header {
        src_cid: u64::from(CID).into(),
        dst_cid: HOST_CID.into(),
        src_port: from.into(),
        dst_port: to.into(),
        kind: STREAM.into(),
        op: op.into(),
        buf_alloc: CREDIT.into(),
        ..Header::default()
    }
}

fn send(driver: &mut Driver, header: Header, data: &[u8]) {
    let mut buffers = vec![Buffer::Readable(header.as_bytes().to_vec())];
    if !data.is_empty() {
        buffers.push(Buffer::Readable(data.to_vec()));
    }
    driver.request(TX, &buffers);
}

fn send_data(driver: &mut Driver, from: u32, to: u32, data: &[u8]) {
    let header = Header {
        len: (data.len() as u32).into(),
        ..packet(op::RW, from, to)
    };
    send(driver, header, data);
}

/// The next packet for the guest, in a new buffer.
fn receive(driver: &mut Driver) -> Packet {
    if driver.under_way(RX) == 0 {
        driver.submit(RX, &[Buffer::Writable(BUFFER)]);
    }
    let (used, raw) = driver.wait_used(RX);
    let (header, rest) = Header::read_from_prefix(&raw[..used.written as usize]).unwrap();
    assert_eq!(header.dst_cid.get(), u64::from(CID));
    assert_eq!(header.len.get() as usize, rest.len());
    Packet {
        header,
        data: rest.to_vec(),
    }
}

/// The next packet, which has to have this operation.
fn expect(driver: &mut Driver, op: u16) -> Packet {
    let packet = receive(driver);
    assert_eq!(packet.op(), op, "{packet:?}");
    packet
}

/// Connects a client to a port of the guest, which accepts. Gives the host's port.
fn connect(driver: &mut Driver, host: &VsockHost, port: u32) -> (Client, u32) {
    let mut client = Client::open(host, Direction::Connect, port);
    let (from, to) = expect(driver, op::REQUEST).ports();
    assert_eq!(to, port);
    send(driver, packet(op::RESPONSE, port, from), &[]);
    client.is_established();
    (client, from)
}

impl Guest {
    fn start() -> Self {
        let device = Vsock::new(CID).unwrap();
        let host = device.host();
        let mut driver = Driver::new(Rig::new(Box::new(device)));
        driver.start(F_STREAM);
        Self { driver, host }
    }

    fn connect(&mut self) -> (Client, u32) {
        connect(&mut self.driver, &self.host, GUEST)
    }

    /// A client that waits at [`HOST`], and a program of the guest that connects to it.
    fn accept(&mut self, guest: u32) -> Client {
        let mut client = Client::open(&self.host, Direction::Accept, HOST);
        // The answer shows that the worker has the client.
        self.round_trip();
        self.send(packet(op::REQUEST, guest, HOST), &[]);
        assert_eq!(self.expect(op::RESPONSE).ports(), (HOST, guest));
        client.is_established();
        client
    }

    /// Waits until the worker has taken all that clients have asked for.
    fn round_trip(&mut self) {
        let client = Client::open(&self.host, Direction::Connect, 1);
        let (from, to) = self.expect(op::REQUEST).ports();
        self.send(packet(op::RST, to, from), &[]);
        drop(client);
    }

    fn send(&mut self, header: Header, data: &[u8]) {
        send(&mut self.driver, header, data);
    }

    fn send_data(&mut self, from: u32, to: u32, data: &[u8]) {
        send_data(&mut self.driver, from, to, data);
    }

    fn receive(&mut self) -> Packet {
        receive(&mut self.driver)
    }

    fn expect(&mut self, op: u16) -> Packet {
        expect(&mut self.driver, op)
    }

    /// The guest has passed on all data that it has received.
    fn give_credit(&mut self, from: u32, to: u32, passed: u32) {
        let header = Header {
            fwd_cnt: passed.into(),
            ..packet(op::CREDIT_UPDATE, from, to)
        };
        self.send(header, &[]);
    }
}

struct VsockTest {
    host: Arc<VsockHost>,
}

impl DeviceUnderTest for VsockTest {
    const FEATURES: u64 = F_STREAM;
    const EAGER_QUEUES: &'static [u16] = &[TX];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let device = Vsock::new(CID).unwrap();
        let host = device.host();
        (Self { host }, Box::new(device))
    }

    fn probe(&mut self, driver: &mut Driver) {
        let (mut client, port) = connect(driver, &self.host, GUEST);
        client.0.write_all(b"to the guest").unwrap();
        assert_eq!(expect(driver, op::RW).data, b"to the guest");
        send_data(driver, GUEST, port, b"to the host");
        assert_eq!(client.read(11), b"to the host");
        send(driver, packet(op::RST, GUEST, port), &[]);
        client.ends();
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        // The packet has no connection, so there is no answer.
        let header = packet(op::RST, 1, 1);
        (TX, vec![Buffer::Readable(header.as_bytes().to_vec())])
    }
}

crate::virtio_device_tests!(VsockTest);
crate::virtio_saved_device_tests!(VsockTest, "virtio-vsock");

/// Bytes without a period that divides the size of a packet.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

#[test]
fn guest_reads_its_cid() {
    let guest = Guest::start();
    let rig = &guest.driver.rig;
    let words = [0, 4].map(|offset| rig.read(Area::Device, offset, 4));
    assert_eq!(words, [CID.into(), 0]);
}

#[test]
fn megabytes_go_both_ways_at_once() {
    const TOTAL: usize = 4 << 20;
    let mut guest = Guest::start();
    let (client, port) = guest.connect();
    let data = pattern(TOTAL);
    let (mut reader, mut writer) = (client.0.try_clone().unwrap(), client.0);
    let sent = data.clone();
    let writing = std::thread::spawn(move || {
        writer.write_all(&sent).unwrap();
        writer
    });
    let reading = std::thread::spawn(move || {
        let mut had = vec![0; TOTAL];
        reader.read_exact(&mut had).unwrap();
        had
    });
    let (mut received, mut sent, mut known) = (Vec::new(), 0, 0_u32);
    // The device's buffer, of which it has told.
    let mut room = 64 << 10;
    for _ in 0..64 {
        guest.driver.offer(RX, &[Buffer::Writable(BUFFER)]);
    }
    guest.driver.kick(RX);
    while received.len() < TOTAL || sent < TOTAL {
        let count = (TOTAL - sent).min(room as usize).min(16 << 10);
        if count > 0 {
            let header = Header {
                len: (count as u32).into(),
                fwd_cnt: (received.len() as u32).into(),
                ..packet(op::RW, GUEST, port)
            };
            let body = Buffer::Readable(data[sent..sent + count].to_vec());
            let head = Buffer::Readable(header.as_bytes().to_vec());
            guest.driver.request(TX, &[head, body]);
            sent += count;
            room -= count as u32;
        }
        if received.len() == TOTAL && room > 0 {
            continue;
        }
        let (used, raw) = guest.driver.wait_used(RX);
        let (header, rest) = Header::read_from_prefix(&raw[..used.written as usize]).unwrap();
        guest.driver.submit(RX, &[Buffer::Writable(BUFFER)]);
        match header.op.get() {
            op::RW => received.extend_from_slice(rest),
            op::CREDIT_UPDATE => {}
            op::CREDIT_REQUEST => guest.give_credit(GUEST, port, received.len() as u32),
            other => panic!("operation {other}"),
        }
        let told = header.fwd_cnt.get();
        room += told.wrapping_sub(known);
        known = told;
        if received.len() % (CREDIT as usize / 2) < BUFFER as usize {
            guest.give_credit(GUEST, port, received.len() as u32);
        }
    }
    assert!(received == data);
    assert!(reading.join().unwrap() == data);
    drop(writing.join().unwrap());
}

#[test]
fn a_thousand_connections_carry_their_own_bytes() {
    let mut guest = Guest::start();
    let mut clients: Vec<_> = (0..1000).map(|_| guest.connect()).collect();
    for (client, port) in &mut clients {
        client.0.write_all(&port.to_le_bytes()).unwrap();
        let packet = guest.expect(op::RW);
        assert_eq!(
            (packet.ports().0, packet.data),
            (*port, port.to_le_bytes().to_vec())
        );
        guest.send_data(GUEST, *port, &port.to_be_bytes());
        assert_eq!(client.read(4), port.to_be_bytes());
    }
    // The rest has no place.
    let mut more: Vec<_> = (0..40)
        .map(|_| Client::open(&guest.host, Direction::Accept, 9))
        .collect();
    let refused = |client: &mut Client| {
        // The first ones get the last places, and wait.
        client.0.set_nonblocking(true).unwrap();
        matches!(client.0.read(&mut [0]), Ok(0))
    };
    while more
        .iter_mut()
        .filter_map(|client| refused(client).then_some(()))
        .count()
        < 16
    {
        std::thread::yield_now();
    }
    guest.send(packet(op::RST, GUEST, clients[0].1), &[]);
    clients[0].0.ends();
    drop(more);
}

#[test]
fn guest_connects_to_a_client_that_waits() {
    let mut guest = Guest::start();
    let mut client = guest.accept(1000);
    guest.send_data(1000, HOST, b"hello");
    assert_eq!(client.read(5), b"hello");
    client.0.write_all(b"world").unwrap();
    assert_eq!(guest.expect(op::RW).data, b"world");
    // One client takes one connection.
    guest.send(packet(op::REQUEST, 1001, HOST), &[]);
    assert_eq!(guest.expect(op::RST).ports(), (HOST, 1001));
}

#[test]
fn client_that_gives_up_takes_no_connection() {
    let mut guest = Guest::start();
    let client = Client::open(&guest.host, Direction::Accept, HOST);
    guest.round_trip();
    drop(client);
    guest.round_trip();
    guest.send(packet(op::REQUEST, 1000, HOST), &[]);
    guest.expect(op::RST);
    // The guest has received the request, so it also receives the end.
    let client = Client::open(&guest.host, Direction::Connect, GUEST);
    let (from, _) = guest.expect(op::REQUEST).ports();
    drop(client);
    assert_eq!(guest.expect(op::RST).ports(), (from, GUEST));
}

#[test]
fn refused_client_is_closed_without_the_first_byte() {
    let mut guest = Guest::start();
    let mut client = Client::open(&guest.host, Direction::Connect, GUEST);
    let (from, to) = guest.expect(op::REQUEST).ports();
    guest.send(packet(op::RST, to, from), &[]);
    client.ends();
}

#[test]
fn each_direction_ends_alone() {
    let mut guest = Guest::start();
    let (mut client, port) = guest.connect();
    let shutdown = |flags: u32| Header {
        flags: flags.into(),
        ..packet(op::SHUTDOWN, GUEST, port)
    };
    client.0.write_all(b"last").unwrap();
    client.0.shutdown(Shutdown::Write).unwrap();
    assert_eq!(guest.expect(op::RW).data, b"last");
    assert_eq!(guest.expect(op::SHUTDOWN).header.flags.get(), NO_SEND);
    guest.send_data(GUEST, port, b"answer");
    guest.send(shutdown(NO_SEND), &[]);
    assert_eq!(client.read(6), b"answer");
    client.ends();
    guest.send(shutdown(NO_RECEIVE), &[]);
    // Both directions of the socket have ended, and the device says so.
    let mut last = guest.receive();
    while last.op() == op::SHUTDOWN {
        last = guest.receive();
    }
    assert_eq!((last.op(), last.ports()), (op::RST, (port, GUEST)));
}

#[test]
fn closed_client_ends_both_directions_after_its_data() {
    let mut guest = Guest::start();
    let (mut client, port) = guest.connect();
    client.0.write_all(b"last").unwrap();
    drop(client);
    assert_eq!(guest.expect(op::RW).data, b"last");
    let mut flags = 0;
    while flags != NO_MORE {
        flags = guest.expect(op::SHUTDOWN).header.flags.get();
    }
    // Data for a client that is gone is dropped.
    guest.send_data(GUEST, port, b"late");
    guest.send(packet(op::RST, GUEST, port), &[]);
    guest.connect();
}

#[test]
fn device_sends_no_more_than_the_guest_has_room_for() {
    let mut guest = Guest::start();
    let (mut client, port) = guest.connect();
    let credit = |buffer: u32, passed: u32| Header {
        buf_alloc: buffer.into(),
        fwd_cnt: passed.into(),
        ..packet(op::CREDIT_UPDATE, GUEST, port)
    };
    guest.send(credit(100, 0), &[]);
    client.0.write_all(&pattern(250)).unwrap();
    assert_eq!(guest.expect(op::RW).data.len(), 100);
    guest.expect(op::CREDIT_REQUEST);
    guest.send(credit(100, 40), &[]);
    assert_eq!(guest.expect(op::RW).data.len(), 40);
    guest.expect(op::CREDIT_REQUEST);
    // A guest that has passed on more than it has received has no room.
    guest.send(credit(100, 1 << 20), &[]);
    guest.send(credit(200, 140), &[]);
    assert_eq!(guest.expect(op::RW).data.len(), 110);
}

#[test]
fn client_that_does_not_read_stops_the_guest_by_credit() {
    let mut guest = Guest::start();
    let (mut client, port) = guest.connect();
    let mut sent = 0;
    let mut passed = 0;
    let data = pattern(16 << 10);
    // The socket takes some, and the device the credit.
    while sent - passed + data.len() <= 64 << 10 {
        guest.send_data(GUEST, port, &data);
        sent += data.len();
        guest.send(packet(op::CREDIT_REQUEST, GUEST, port), &[]);
        let answer = guest.expect(op::CREDIT_UPDATE);
        passed = answer.header.fwd_cnt.get() as usize;
    }
    let all = client.read(sent);
    assert!(all.chunks(data.len()).all(|chunk| chunk == data));
    while passed < sent {
        guest.send(packet(op::CREDIT_REQUEST, GUEST, port), &[]);
        passed = guest.expect(op::CREDIT_UPDATE).header.fwd_cnt.get() as usize;
    }
    // More than the credit ends the connection.
    guest.send_data(GUEST, port, &vec![0; (64 << 10) + 1]);
    while guest.receive().op() != op::RST {}
    client.ends();
}

#[test]
fn invalid_packets_are_reset_alone() {
    let mut guest = Guest::start();
    let (mut client, port) = guest.connect();
    let other = packet(op::RW, GUEST, port + 1);
    let kind = Header {
        kind: 2.into(),
        ..packet(op::REQUEST, 5, 5)
    };
    let cid = Header {
        dst_cid: 9.into(),
        ..packet(op::REQUEST, 5, 5)
    };
    for wrong in [other, kind, cid, packet(op::REQUEST, 5, 5), packet(77, 5, 5)] {
        guest.send(wrong, &[]);
        let answer = guest.receive().header;
        assert_eq!((answer.op.get(), answer.kind), (op::RST, wrong.kind));
        assert_eq!(
            (answer.src_cid, answer.src_port, answer.dst_port),
            (wrong.dst_cid, wrong.dst_port, wrong.src_port)
        );
    }
    // A packet of another guest, and the answer to a refusal, get no answer.
    let stranger = Header {
        src_cid: 4.into(),
        ..packet(op::REQUEST, 5, 5)
    };
    for ignored in [stranger, packet(op::RST, 5, 5)] {
        guest.send(ignored, &[]);
    }
    client.0.write_all(b"unharmed").unwrap();
    assert_eq!(guest.expect(op::RW).data, b"unharmed");
    // More data than the packet has.
    let long = Header {
        len: 100.into(),
        ..packet(op::RW, GUEST, port)
    };
    guest.send(long, b"short");
    guest.expect(op::RST);
    client.ends();
}

#[test]
fn requests_without_end_wait_for_their_answers() {
    let mut guest = Guest::start();
    let header = packet(op::REQUEST, 5, 5);
    // No buffer for an answer, so the device stops taking requests.
    for left in [0, 254] {
        for _ in 0..255 {
            guest
                .driver
                .offer(TX, &[Buffer::Readable(header.as_bytes().to_vec())]);
        }
        guest.driver.kick(TX);
        while guest.driver.under_way(TX) > left {
            guest.driver.wait_used(TX);
        }
    }
    for _ in 0..510 {
        guest.expect(op::RST);
    }
    while guest.driver.under_way(TX) > 0 {
        guest.driver.wait_used(TX);
    }
    guest.connect();
}

#[test]
fn reset_ends_connections_and_keeps_clients_that_wait() {
    let mut guest = Guest::start();
    let (mut client, _) = guest.connect();
    let mut waits = Client::open(&guest.host, Direction::Accept, HOST);
    guest.round_trip();
    guest.driver.rig.reset_device();
    client.ends();
    guest.driver.start(F_STREAM);
    guest.send(packet(op::REQUEST, 1000, HOST), &[]);
    guest.expect(op::RESPONSE);
    waits.is_established();
}

#[test]
fn connections_survive_a_pause() {
    let mut guest = Guest::start();
    let (mut client, port) = guest.connect();
    guest.driver.rig.pause();
    client.0.write_all(b"meanwhile").unwrap();
    guest.driver.rig.device.resume().unwrap();
    assert_eq!(guest.expect(op::RW).data, b"meanwhile");
    guest.send_data(GUEST, port, b"answer");
    assert_eq!(client.read(6), b"answer");
}

#[test]
fn restored_driver_resets_its_connections_before_any_packet() {
    let mut guest = Guest::start();
    for _ in 0..8 {
        guest.driver.offer(EVENT, &[Buffer::Writable(8)]);
    }
    guest.driver.kick(EVENT);
    let (mut old, port) = guest.connect();
    guest.driver.rig.pause();
    let section = guest.driver.rig.device.save().unwrap();
    let device = Vsock::new(CID).unwrap();
    guest.host = device.host();
    guest.driver.rig = guest.driver.rig.restored(Box::new(device), &section).unwrap();
    old.ends();
    let mut client = Client::open(&guest.host, Direction::Connect, GUEST);
    guest.driver.rig.device.resume().unwrap();
    let (used, event) = guest.driver.wait_used(EVENT);
    assert_eq!((used.written, &event[..4]), (4, &[0; 4][..]));
    // A packet of a connection from before.
    let header = packet(op::RW, GUEST, port);
    guest
        .driver
        .submit(TX, &[Buffer::Readable(header.as_bytes().to_vec())]);
    guest.driver.submit(RX, &[Buffer::Writable(BUFFER)]);
    guest.driver.rig.pause();
    assert!(guest.driver.try_used(TX).is_none() && guest.driver.try_used(RX).is_none());
    guest.driver.rig.device.resume().unwrap();
    guest.driver.submit(EVENT, &[Buffer::Writable(8)]);
    guest.driver.wait_used(TX);
    let mut answers = [guest.receive(), guest.receive()];
    answers.sort_by_key(Packet::op);
    let [request, reset] = answers;
    assert_eq!((request.op(), reset.op()), (op::REQUEST, op::RST));
    let (from, to) = request.ports();
    guest.send(packet(op::RESPONSE, to, from), &[]);
    client.is_established();
}

#[test]
fn clients_without_a_driver_are_bounded() {
    let device = Vsock::new(CID).unwrap();
    let host = device.host();
    let open = || {
        let (ours, theirs) = fuzz::pair();
        host.open(Direction::Connect, GUEST, theirs).map(|()| ours)
    };
    let clients: Vec<_> = (0..64).map(|_| open().unwrap()).collect();
    assert!(open().is_err());
    drop(clients);
    open().unwrap();
}

#[test]
fn header_is_as_long_as_specified() {
    assert_eq!(size_of::<Header>(), HEADER as usize);
}

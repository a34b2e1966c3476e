//! Traffic between a guest and the node. A server in the guest ([`serve`]) receives orders over
//! TCP: the first byte of a connection is its purpose, and its end is the end of the traffic.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// Ports of the guest: orders and streams, datagrams to be counted, datagrams to be sent back.
const ORDERS: u16 = 5000;
const SINK: u16 = 5001;
const ECHO: u16 = 5002;

/// Purpose of a connection: the guest receives, sends, sends to another guest, floods with
/// datagrams of the given size, or reports its counts of received datagrams and of bytes sent to
/// other guests.
const RECEIVE: u8 = b'R';
const SEND: u8 = b'S';
const SEND_TO: u8 = b'T';
const FLOOD: u8 = b'F';
const COUNT: u8 = b'C';

/// Bytes of one write and read of a stream.
const CHUNK: usize = 128 << 10;
/// Connect timeout; a later success is not expected.
const PATIENCE: Duration = Duration::from_secs(60);

/// Serves without end, in a guest.
pub fn serve() -> Result<()> {
    let received = Arc::<AtomicU64>::default();
    let sink = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, SINK)).context("listen for datagrams")?;
    let counter = Arc::clone(&received);
    thread::spawn(move || {
        let mut packet = [0; 2048];
        while sink.recv(&mut packet).is_ok() {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    });
    let echo = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, ECHO)).context("listen for datagrams to send back")?;
    thread::spawn(move || {
        let mut packet = [0; 2048];
        while let Ok((length, from)) = echo.recv_from(&mut packet) {
            if let Some(packet) = packet.get(..length) {
                let _lost = echo.send_to(packet, from);
            }
        }
    });
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, ORDERS)).context("listen")?;
    println!("TRAFFIC-READY");
    for connection in listener.incoming() {
        let (connection, received) = (connection.context("accept")?, Arc::clone(&received));
        thread::spawn(move || {
            // The end of the connection is the end of the order.
            let _end = obey(connection, &received);
        });
    }
    Ok(())
}

fn obey(mut connection: TcpStream, received: &AtomicU64) -> io::Result<()> {
    let mut ordered = [0; 5];
    connection.read_exact(&mut ordered)?;
    let [what, a, b, c, d] = ordered;
    match what {
        RECEIVE => take(&mut connection, &AtomicU64::new(0)),
        SEND => give(&mut connection),
        SEND_TO => {
            let mut peer = order(Ipv4Addr::new(a, b, c, d), RECEIVE, [0; 4]).map_err(io::Error::other)?;
            let ends = peer.try_clone()?;
            thread::spawn(move || {
                let _end = connection.read(&mut [0]);
                let _gone = ends.shutdown(Shutdown::Both);
            });
            give_counted(&mut peer, received)
        }
        FLOOD => {
            let peer = SocketAddr::new(connection.peer_addr()?.ip(), u16::from_le_bytes([a, b]));
            let ended = Arc::<AtomicBool>::default();
            let told = Arc::clone(&ended);
            thread::spawn(move || {
                let _end = connection.read(&mut [0]);
                told.store(true, Ordering::Relaxed);
            });
            flood(peer, u16::from_le_bytes([c, d]).into(), &ended)
        }
        COUNT => connection.write_all(&received.load(Ordering::Relaxed).to_le_bytes()),
        _ => Ok(()),
    }
}

fn take(connection: &mut TcpStream, bytes: &AtomicU64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        match connection.read(&mut buffer)? {
            0 => return Ok(()),
            count => bytes.fetch_add(count as u64, Ordering::Relaxed),
        };
    }
}

fn give(connection: &mut TcpStream) -> io::Result<()> {
    let buffer = vec![0x5a; CHUNK];
    loop {
        connection.write_all(&buffer)?;
    }
}

fn flood(to: SocketAddr, size: usize, ended: &AtomicBool) -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(to)?;
    let packet = vec![0x5a; size];
    while !ended.load(Ordering::Relaxed) {
        for _ in 0..64 {
            match socket.send(&packet) {
                Ok(_) => {}
                // A queue is full, or the peer is not there yet.
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::WouldBlock)
                        || error.raw_os_error() == Some(libc::ENOBUFS) =>
                {
                    thread::yield_now();
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// What flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Streams from the guest, or to it.
    Tcp {
        /// How many.
        streams: usize,
        /// Who sends.
        from_guest: bool,
    },
    /// Streams from the guest to another one.
    Between {
        /// How many.
        streams: usize,
    },
    /// Datagrams as fast as can be.
    Udp {
        /// Bytes of each.
        size: u16,
        /// Who sends.
        from_guest: bool,
    },
    /// One small datagram after the other, each sent back.
    Ping,
}

/// Traffic that continues until it is dropped.
pub struct Flow {
    guest: Ipv4Addr,
    /// Bytes of streams, datagrams, round trips: as far as they are counted in this process.
    here: Arc<AtomicU64>,
    /// The guest counts.
    by_guest: bool,
    ended: Arc<AtomicBool>,
    connections: Vec<TcpStream>,
}

impl Flow {
    /// Begins. `peer` is the other guest.
    pub fn begin(guest: Ipv4Addr, peer: Ipv4Addr, traffic: Traffic) -> Result<Self> {
        let mut flow = Self {
            guest,
            here: Arc::default(),
            by_guest: false,
            ended: Arc::default(),
            connections: Vec::new(),
        };
        match traffic {
            Traffic::Tcp { streams, from_guest } => {
                for _ in 0..streams {
                    let mut stream = order(guest, if from_guest { SEND } else { RECEIVE }, [0; 4])?;
                    flow.connections
                        .push(stream.try_clone().context("share a stream")?);
                    let bytes = Arc::clone(&flow.here);
                    thread::spawn(move || {
                        let _end = if from_guest {
                            take(&mut stream, &bytes)
                        } else {
                            give_counted(&mut stream, &bytes)
                        };
                    });
                }
            }
            Traffic::Between { streams } => {
                flow.by_guest = true;
                for _ in 0..streams {
                    flow.connections.push(order(guest, SEND_TO, peer.octets())?);
                }
            }
            Traffic::Udp {
                size,
                from_guest: true,
            } => {
                let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("listen for datagrams")?;
                let port = socket.local_addr().context("find the port")?.port().to_le_bytes();
                let [c, d] = size.to_le_bytes();
                flow.connections
                    .push(order(guest, FLOOD, [port[0], port[1], c, d])?);
                let (count, ended) = (Arc::clone(&flow.here), Arc::clone(&flow.ended));
                let pause = Some(Duration::from_millis(100));
                socket.set_read_timeout(pause).context("limit a wait")?;
                thread::spawn(move || {
                    let mut packet = [0; 2048];
                    while !ended.load(Ordering::Relaxed) {
                        if socket.recv(&mut packet).is_ok() {
                            count.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            Traffic::Udp { size, .. } => {
                flow.by_guest = true;
                let ended = Arc::clone(&flow.ended);
                thread::spawn(move || flood((guest, SINK).into(), size.into(), &ended));
            }
            Traffic::Ping => {
                let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("open a socket")?;
                socket.connect((guest, ECHO)).context("connect")?;
                let pause = Some(Duration::from_millis(500));
                socket.set_read_timeout(pause).context("limit a wait")?;
                let (count, ended) = (Arc::clone(&flow.here), Arc::clone(&flow.ended));
                thread::spawn(move || {
                    let mut packet = [0; 64];
                    while !ended.load(Ordering::Relaxed) {
                        if socket.send(&packet).is_ok() && socket.recv(&mut packet).is_ok() {
                            count.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        }
        Ok(flow)
    }

    /// How much has arrived so far: bytes of streams, datagrams, or round trips.
    pub fn arrived(&self) -> Result<u64> {
        if !self.by_guest {
            return Ok(self.here.load(Ordering::Relaxed));
        }
        let mut count = [0; 8];
        order(self.guest, COUNT, [0; 4])?
            .read_exact(&mut count)
            .context("ask the guest what it has counted")?;
        Ok(u64::from_le_bytes(count))
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for connection in &self.connections {
            let _gone = connection.shutdown(Shutdown::Both);
        }
    }
}

/// Sends and counts the bytes that the kernel has accepted: the bytes in flight are a small part of
/// a measurement.
fn give_counted(connection: &mut TcpStream, bytes: &AtomicU64) -> io::Result<()> {
    let buffer = vec![0x5a; CHUNK];
    loop {
        let count = connection.write(&buffer)?;
        bytes.fetch_add(count as u64, Ordering::Relaxed);
    }
}

/// A connection to the guest's server, which has the order.
fn order(guest: Ipv4Addr, what: u8, more: [u8; 4]) -> Result<TcpStream> {
    let begin = Instant::now();
    let [a, b, c, d] = more;
    loop {
        match TcpStream::connect_timeout(&(guest, ORDERS).into(), Duration::from_secs(5)) {
            Ok(mut stream) => {
                stream.write_all(&[what, a, b, c, d]).context("give an order")?;
                return Ok(stream);
            }
            Err(error) if begin.elapsed() > PATIENCE => bail!("the guest {guest} is not reached: {error}"),
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_kinds_of_traffic_arrive_and_are_counted() {
        thread::spawn(|| serve().expect("serve"));
        for traffic in [
            Traffic::Tcp {
                streams: 2,
                from_guest: true,
            },
            Traffic::Tcp {
                streams: 1,
                from_guest: false,
            },
            Traffic::Between { streams: 2 },
            Traffic::Udp {
                size: 64,
                from_guest: true,
            },
            Traffic::Udp {
                size: 64,
                from_guest: false,
            },
            Traffic::Ping,
        ] {
            let flow = Flow::begin(Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST, traffic).expect("begin");
            let before = flow.arrived().expect("count");
            let begin = Instant::now();
            while flow.arrived().expect("count") < before + 10 {
                assert!(begin.elapsed() < PATIENCE, "{traffic:?}");
            }
        }
    }
}

//! Protocol between both ends: one TCP connection for each stream, with lines of JSON. The
//! connecting end sends its request, and for datagrams both ends send their ports. Records of a
//! stream over TCP use the same connection.

use std::{
    io::{BufRead, BufReader, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{OnceLock, atomic::AtomicBool},
    thread,
};

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    data::{Counts, Sizes},
    stream::{self, Plan},
    sys,
};

/// The port of `netcheck serve`.
const PORT: u16 = 9000;
/// The group of multicast (RFC 2365).
const GROUP: Ipv4Addr = Ipv4Addr::new(239, 9, 0, 1);

/// How packets travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// Records over TCP.
    Tcp,
    /// Datagrams.
    Udp,
    /// Datagrams to a group.
    Multicast,
}

/// A stream of packets.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Job {
    /// How they travel.
    pub way: Way,
    /// The end that connects sends them.
    pub there: bool,
    /// See [`Plan`].
    pub packets: u32,
    /// Their sizes.
    pub sizes: Sizes,
    /// See [`Plan`].
    pub window: u32,
}

/// Request of the connecting end.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// A stream; the port is that of this end's socket for datagrams.
    Stream(Job, u16),
    /// Features and pairs of queues of a device.
    Switch {
        /// Its name.
        device: String,
        /// As [`sys::set_features`] takes them.
        features: Vec<(String, bool)>,
        /// Pairs of queues that it is to use.
        pairs: Option<u32>,
    },
}

/// A connection on which lines of JSON come and go.
struct Line {
    reader: BufReader<TcpStream>,
    writer: TcpStream,
}

impl Line {
    fn new(writer: TcpStream) -> Result<Self> {
        // Records of all sizes are packets of all sizes.
        writer.set_nodelay(true)?;
        let reader = BufReader::new(writer.try_clone()?);
        Ok(Self { reader, writer })
    }

    fn tell(&mut self, what: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(what)? + "\n";
        self.writer
            .write_all(line.as_bytes())
            .context("tell the other end")
    }

    fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        self.reader.read_line(&mut line).context("hear the other end")?;
        serde_json::from_str(&line).with_context(|| format!("the other end says {line:?}"))
    }

    fn socket(&self, job: &Job, sends: bool) -> Result<UdpSocket> {
        let own = self.writer.local_addr()?.ip().to_canonical();
        let (group, bound) = match (job.way, own) {
            (Way::Multicast, IpAddr::V4(own)) if !sends => (Some(own), Ipv4Addr::UNSPECIFIED.into()),
            _ => (None, own),
        };
        let socket = UdpSocket::bind((bound, 0)).context("bind")?;
        if let Some(own) = group {
            socket.join_multicast_v4(&GROUP, &own).context("join the group")?;
        }
        stream::prepare(&socket)?;
        Ok(socket)
    }

    /// Sends or receives. The sender says how much it has sent, and the receiver of that says what arrived: `None` is of the sender.
    fn play(
        &mut self,
        job: &Job,
        sends: bool,
        socket: &UdpSocket,
        port: u16,
        enough: &AtomicBool,
    ) -> Result<Option<Counts>> {
        let plan = Plan {
            packets: job.packets,
            sizes: job.sizes,
            window: job.window,
        };
        let peer = SocketAddr::new(self.writer.peer_addr()?.ip().to_canonical(), port);
        let to = match job.way {
            Way::Multicast => SocketAddr::new(GROUP.into(), port),
            _ => peer,
        };
        if sends {
            let sent = match job.way {
                Way::Tcp => stream::write(&self.writer, plan, enough)?,
                _ => stream::send(socket, to, plan, enough)?,
            };
            self.tell(&sent)?;
            return Ok(None);
        }
        if job.way == Way::Tcp {
            let arrived = stream::read(&mut self.reader, job.sizes)?;
            return Ok(Some(arrived.counts(&self.hear()?)));
        }
        let over = OnceLock::new();
        let (arrived, sent) = thread::scope(|scope| {
            let receiver = scope.spawn(|| stream::receive(socket, peer, job.sizes, &over, enough));
            let sent = self.hear::<Counts>();
            let _ = over.set(sent.as_ref().map_or(0, |sent| sent.sent));
            (receiver.join(), sent)
        });
        let arrived = arrived.map_err(|_| anyhow!("the receiver panicked"))??;
        Ok(Some(arrived.counts(&sent?)))
    }
}

/// Serves connections without end.
pub fn serve() -> Result<()> {
    let listener = TcpListener::bind(("::", PORT)).context("listen")?;
    for stream in listener.incoming() {
        let stream = stream.context("accept")?;
        thread::spawn(move || {
            if let Err(error) = serve_one(stream) {
                eprintln!("netcheck: {error:#}");
            }
        });
    }
    Ok(())
}

fn serve_one(stream: TcpStream) -> Result<()> {
    let mut line = Line::new(stream)?;
    match line.hear()? {
        Request::Stream(job, port) => {
            let socket = line.socket(&job, !job.there)?;
            line.tell(&socket.local_addr()?.port())?;
            let enough = AtomicBool::new(false);
            match line.play(&job, !job.there, &socket, port, &enough)? {
                Some(counts) => line.tell(&counts),
                None => Ok(()),
            }
        }
        Request::Switch {
            device,
            features,
            pairs,
        } => {
            let done = sys::set_features(&device, &features)
                .and_then(|()| pairs.map_or(Ok(()), |pairs| sys::set_pairs(&device, pairs)));
            line.tell(&done.map_err(|error| format!("{error:#}")))
        }
    }
}

/// Runs a stream with the server at an address; `enough` ends one without a number of packets.
pub fn run(server: IpAddr, job: &Job, enough: &AtomicBool) -> Result<Counts> {
    let mut line = Line::new(TcpStream::connect((server, PORT)).context("connect")?)?;
    let socket = line.socket(job, job.there)?;
    line.tell(&Request::Stream(*job, socket.local_addr()?.port()))?;
    let port = line.hear()?;
    match line.play(job, job.there, &socket, port, enough)? {
        Some(counts) => Ok(counts),
        None => line.hear(),
    }
}

/// Has the server at an address switch a device of its machine.
pub fn switch(server: IpAddr, request: &Request) -> Result<()> {
    let mut line = Line::new(TcpStream::connect((server, PORT)).context("connect")?)?;
    line.tell(request)?;
    if let Err(error) = line.hear::<Result<(), String>>()? {
        bail!("{error}");
    }
    Ok(())
}

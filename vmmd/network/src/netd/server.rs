//! The process that answers the DHCP, DNS and metadata clients of one network, and its IPv6 hosts.
//!
//! The daemon starts it with sockets that are bound to the bridge and with the folder that the daemon writes the table to. It gives up
//! all rights ([`confine`](super::confine)) before it reads the first packet, and lives until it is killed.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs::File,
    io::{self, Read as _},
    net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, ToSocketAddrs, UdpSocket},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use clap::Parser;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags, openat},
    io::Errno,
};
use vmmd_host::sys::{self, clone::FIRST_FD};
use vmmd_spec::nic::Mac;

use super::{
    Table,
    confine::confine,
    dhcp, dhcp6,
    dns::{self, Verdict, Way},
    forward::{Answer, Forwarder},
    metadata, ra,
    report::{self, Declined},
    streams::{self, Streams},
};

/// The table's name in its folder.
pub const TABLE: &str = "table.json";
/// Largest table in bytes: 65,536 hosts of less than 250 bytes.
const MAX_TABLE: u64 = 16 << 20;
/// Time between two reports about declined addresses of a guest, which can decline as often as it likes.
const DECLINE_PAUSE: Duration = Duration::from_secs(10);
/// Largest UDP packet.
const MAX_PACKET: usize = 65_535;

/// Answers the DHCP and DNS clients of one network, and its IPv6 hosts. Started by vmmd with open sockets.
#[derive(Debug, Parser)]
#[command(name = "vmmd-netd", version)]
pub struct Arguments {
    /// Folder with the table. A later daemon identifies the process by this argument. The process reads the folder through a descriptor.
    folder: PathBuf,
}

/// Serves until it is killed.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut places = FIRST_FD..;
    let mut take = |what: &str| {
        let place = places.next().unwrap_or(usize::MAX);
        sys::inherited(place).with_context(|| format!("take {what}"))
    };
    let folder = take("the network's folder")?;
    let reports = take("the pipe for reports")?;
    // The addresses of the network never change.
    let table = openat(&folder, TABLE, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let table = table.context("open the table").and_then(|file| read(file.into()));
    let table = table.context("read the table of the network")?;
    let has_metadata = table.has_metadata();
    let Table { ipv4, ipv6, .. } = table;
    let (mut dhcp, mut dhcp6, mut routers, mut metadata) = (None, None, None, None);
    let (mut dns, mut listeners) = ([None, None], Vec::new());
    if ipv4.is_some() {
        dhcp = Some(UdpSocket::from(take("the socket for DHCP")?));
        if has_metadata {
            metadata = Some(TcpListener::from(take("the socket for metadata")?));
        }
    }
    let families = dns.iter_mut().zip([ipv4.is_some(), ipv6.is_some()]);
    for (dns, _) in families.filter(|(_, is_served)| *is_served) {
        *dns = Some(UdpSocket::from(take("the socket for DNS")?));
        listeners.push(TcpListener::from(take("the socket for DNS by TCP")?));
    }
    if let Some(ipv6) = ipv6 {
        let socket = UdpSocket::from(take("the socket for router advertisements")?);
        let nodes = ra::nodes(&socket, &ipv6).context("find the bridge")?;
        routers = Some((socket, nodes));
        dhcp6 = Some(take("the socket for DHCP for IPv6")?);
    }
    let streams = Streams::open(listeners, streams::PORT);
    let mut server = Server {
        dhcp,
        dhcp6,
        dns,
        streams: streams.context("open sockets for name servers by TCP")?,
        metadata: metadata::Service::open(metadata, metadata::FOLDER).context("make a key for tokens")?,
        routers,
        schedule: ra::Schedule::default(),
        reports,
        declined: BTreeMap::new(),
        forwarder: Forwarder::open().context("open sockets for name servers")?,
        tables: Tables::of(TABLE.into()),
        packet: vec![0; MAX_PACKET],
    };
    let dhcp6 = server.dhcp6.as_ref().map(OwnedFd::as_fd);
    confine(folder.as_fd(), dhcp6)
        .with_context(|| format!("give up rights beside {}", arguments.folder.display()))?;
    loop {
        if let Err(error) = server.turn() {
            // The sockets fail while the interface is down.
            eprintln!("serve a network: {error}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// A source of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Dhcp,
    Dhcp6,
    Routers,
    /// A socket for DNS, by its place.
    Dns(usize),
    /// A socket for name servers, by its place.
    Server(usize),
    /// Any connection by TCP.
    Streams,
}

/// State of the helper process.
struct Server {
    /// For router advertisements, and where they go; none without IPv6.
    routers: Option<(UdpSocket, SocketAddrV6)>,
    /// When these are sent.
    schedule: ra::Schedule,
    /// A packet socket, without IPv6 none.
    dhcp6: Option<OwnedFd>,
    /// None without IPv4.
    dhcp: Option<UdpSocket>,
    /// The pipe for reports.
    reports: OwnedFd,
    /// When the last report about a declined address of a NIC was sent, as far as this is less than [`DECLINE_PAUSE`] ago.
    declined: BTreeMap<Mac, Instant>,
    /// Sockets for IPv4 and for IPv6.
    dns: [Option<UdpSocket>; 2],
    forwarder: Forwarder,
    streams: Streams,
    metadata: metadata::Service,
    tables: Tables,
    packet: Vec<u8>,
}

impl Server {
    /// Waits for packets, and serves one of each socket.
    fn turn(&mut self) -> io::Result<()> {
        let ready = self.wait()?;
        if ready.contains(&Source::Dhcp) {
            self.dhcp()?;
        }
        if ready.contains(&Source::Dhcp6) {
            self.dhcp6()?;
        }
        for source in &ready {
            match source {
                Source::Dns(family) => self.dns(*family)?,
                Source::Server(socket) => self.reply(*socket)?,
                _ => {}
            }
        }
        self.tell_routers(ready.contains(&Source::Routers))?;
        let now = Instant::now();
        let answers = self.forwarder.expire(now);
        self.answer_all(answers);
        let deadlines = [self.streams.deadline(), self.metadata.deadline()];
        let is_due = deadlines.into_iter().flatten().any(|deadline| deadline <= now);
        if (ready.contains(&Source::Streams) || is_due)
            && let Some(table) = self.tables.current()
        {
            self.streams.turn(table, now);
            self.metadata.turn(table, now);
        }
        Ok(())
    }

    /// The sources of packets that have some.
    fn wait(&self) -> io::Result<Vec<Source>> {
        let mut sources = Vec::new();
        let mut watched = Vec::new();
        {
            let mut watch = |source, socket| {
                sources.push(source);
                watched.push(PollFd::from_borrowed_fd(socket, PollFlags::IN));
            };
            if let Some(socket) = &self.dhcp {
                watch(Source::Dhcp, socket.as_fd());
            }
            if let Some(socket) = &self.dhcp6 {
                watch(Source::Dhcp6, socket.as_fd());
            }
            if let Some((socket, _)) = &self.routers {
                watch(Source::Routers, socket.as_fd());
            }
            for (family, socket) in self.dns.iter().enumerate() {
                if let Some(socket) = socket {
                    watch(Source::Dns(family), socket.as_fd());
                }
            }
            for (place, socket) in self.forwarder.sockets().iter().enumerate() {
                watch(Source::Server(place), socket.as_fd());
            }
        }
        self.streams.watch(&mut watched);
        self.metadata.watch(&mut watched);
        let tells = self.routers.as_ref();
        let tells = tells.map(|_| self.schedule.due().unwrap_or_else(Instant::now));
        let deadlines = [
            self.forwarder.deadline(),
            self.streams.deadline(),
            self.metadata.deadline(),
            tells,
        ];
        let left = deadlines.into_iter().flatten().min().map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            // A moment more, so that the deadline is over then.
            Timespec::try_from(left + Duration::from_millis(1)).unwrap_or_default()
        });
        match poll(&mut watched, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut ready = Vec::new();
        // Those of connections by TCP are the last ones.
        let all = sources.into_iter().chain(std::iter::repeat(Source::Streams));
        for (socket, source) in watched.iter().zip(all) {
            if !socket.revents().is_empty() {
                ready.push(source);
            }
        }
        Ok(ready)
    }

    fn answer_all(&self, answers: Vec<Answer>) {
        let [ipv4, ipv6] = &self.dns;
        for Answer { client, packet } in answers {
            if let Some(socket) = if client.is_ipv6() { ipv6 } else { ipv4 } {
                answer(socket, &packet, client);
            }
        }
    }

    /// Sends the router advertisements that are due, and one to a guest that asks.
    fn tell_routers(&mut self, heard: bool) -> io::Result<()> {
        let Some((socket, all)) = &self.routers else {
            return Ok(());
        };
        let mut asks = None;
        if heard && let Some((length, from)) = received(socket.recv_from(&mut self.packet))? {
            let message = self.packet.get(..length).unwrap_or_default();
            match from.ip() {
                IpAddr::V6(from) if ra::asks(message) && from.is_unspecified() => self.schedule.ask(),
                IpAddr::V6(from) => asks = ra::asks(message).then_some(from),
                IpAddr::V4(_) => {}
            }
        }
        let due = self.schedule.take(Instant::now());
        if due.is_none() && asks.is_none() {
            return Ok(());
        }
        let Some(table) = self.tables.current() else {
            return Ok(());
        };
        let (Some(common), Some(own)) = (ra::advertisement(table, false), ra::advertisement(table, true))
        else {
            return Ok(());
        };
        if due == Some(ra::Due::All) {
            answer(socket, &common, *all);
        }
        let is_autonomous = |asks: Ipv6Addr| ra::autonomous(table).any(|address| address == asks);
        if let Some(asks) = asks {
            let message = if is_autonomous(asks) { &own } else { &common };
            answer(socket, message, ra::node(asks, all.scope_id()));
        }
        if due.is_some() {
            for address in ra::autonomous(table) {
                answer(socket, &own, ra::node(address, all.scope_id()));
            }
        }
        Ok(())
    }

    /// Answers a DHCP client for IPv6, if one has asked.
    fn dhcp6(&mut self) -> io::Result<()> {
        let Some(socket) = &self.dhcp6 else {
            return Ok(());
        };
        let length = match rustix::io::read(socket, &mut self.packet) {
            Ok(length) => length,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        let (Some(table), Some(frame)) = (self.tables.current(), self.packet.get(..length)) else {
            return Ok(());
        };
        if let Some(reply) = dhcp6::respond(table, frame) {
            // Not sendto(2), by which a frame can leave by other interfaces: the filter of system calls forbids it here.
            let _lost = rustix::io::write(socket, &reply);
        }
        if let Some(declined) = dhcp6::declined(table, frame) {
            self.report(&declined);
        }
        Ok(())
    }

    /// Reports a declined address to the daemon.
    fn report(&mut self, declined: &Declined) {
        let now = Instant::now();
        self.declined.retain(|_, last| *last + DECLINE_PAUSE > now);
        if let Entry::Vacant(first) = self.declined.entry(declined.mac) {
            first.insert(now);
            report::send(&self.reports, declined);
        }
    }

    fn dhcp(&mut self) -> io::Result<()> {
        let Some(socket) = &self.dhcp else {
            return Ok(());
        };
        let Some((length, _)) = received(socket.recv_from(&mut self.packet))? else {
            return Ok(());
        };
        let (Some(table), Some(packet)) = (self.tables.current(), self.packet.get(..length)) else {
            return Ok(());
        };
        if let Some((reply, to)) = dhcp::respond(table, packet) {
            answer(socket, &reply, to);
        }
        if let Some(declined) = dhcp::declined(table, packet) {
            self.report(&declined);
        }
        Ok(())
    }

    fn dns(&mut self, family: usize) -> io::Result<()> {
        let Some(Some(socket)) = self.dns.get(family) else {
            return Ok(());
        };
        let Some((length, client)) = received(socket.recv_from(&mut self.packet))? else {
            return Ok(());
        };
        let (Some(table), Some(packet)) = (self.tables.current(), self.packet.get(..length)) else {
            return Ok(());
        };
        match dns::decide(table, packet, Way::Udp) {
            Verdict::Answer(reply) => answer(socket, &reply, client),
            Verdict::Forward(question) => {
                let (servers, now) = (&table.forward, Instant::now());
                let answers = self.forwarder.forward(packet, client, question, servers, now);
                self.answer_all(answers);
            }
            Verdict::Ignore => {}
        }
        Ok(())
    }

    /// Hands the reply of a name server on.
    fn reply(&mut self, socket: usize) -> io::Result<()> {
        let Some(open) = self.forwarder.sockets().get(socket) else {
            return Ok(());
        };
        let Some((length, from)) = received(open.recv_from(&mut self.packet))? else {
            return Ok(());
        };
        let packet = self.packet.get(..length).unwrap_or_default();
        let answers = self.forwarder.receive(socket, packet, from, Instant::now());
        self.answer_all(answers);
        Ok(())
    }
}

/// Sends an answer. A failed send is like a lost packet: a guest chooses the destination (port 0,
/// for example) and must not delay other guests.
fn answer(socket: &UdpSocket, packet: &[u8], to: impl ToSocketAddrs) {
    let _lost = socket.send_to(packet, to);
}

/// What came; `None` when nothing did: a packet with a wrong checksum was dropped, or a server is not there.
fn received(result: io::Result<(usize, SocketAddr)>) -> io::Result<Option<(usize, SocketAddr)>> {
    use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable, WouldBlock};
    match result {
        Ok(received) => Ok(Some(received)),
        Err(error)
            if matches!(
                error.kind(),
                WouldBlock | ConnectionRefused | HostUnreachable | NetworkUnreachable
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn read(file: File) -> anyhow::Result<Table> {
    let mut text = Vec::new();
    file.take(MAX_TABLE).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Last table read from the file.
struct Tables {
    path: PathBuf,
    /// Inode and time of change of the file that was read last.
    version: Option<(u64, i64, i64)>,
    table: Option<Table>,
}

impl Tables {
    /// That of the file at `path`, which is not read yet.
    fn of(path: PathBuf) -> Self {
        Self {
            path,
            version: None,
            table: None,
        }
    }

    /// The daemon exchanges the file as a whole; one that makes no sense changes nothing, and is read once.
    fn current(&mut self) -> Option<&Table> {
        if let Ok(mut file) = File::open(&self.path)
            && let Ok(facts) = file.metadata()
        {
            let version = (facts.ino(), facts.mtime(), facts.mtime_nsec());
            let mut text = Vec::new();
            if self.version != Some(version) && (&mut file).take(MAX_TABLE).read_to_end(&mut text).is_ok() {
                self.version = Some(version);
                match serde_json::from_slice(&text) {
                    Ok(table) => self.table = Some(table),
                    Err(error) => eprintln!("read the table of a network: {error}"),
                }
            }
        }
        self.table.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use vmmd_spec::network::dns::{MAX_ADDRESSES, MAX_RECORDS};

    use super::{
        super::{Host, dhcp::tests::table},
        *,
    };
    use crate::managed::helper::write_table;

    #[test]
    fn a_table_that_makes_no_sense_is_read_once_and_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(TABLE);
        let mut tables = Tables::of(path.clone());
        assert_eq!(tables.current(), None);
        write_table(folder.path(), &table()).unwrap();
        assert_eq!(tables.current(), Some(&table()));

        // The next one has another inode, as this one is kept open.
        let _open = File::open(&path).unwrap();
        let other = Table { mtu: 1280, ..table() };
        let text = serde_json::to_vec(&other).unwrap();
        fs::write(folder.path().join("bad"), &text[1..]).unwrap();
        fs::rename(folder.path().join("bad"), &path).unwrap();
        assert_eq!(tables.current(), Some(&table()));
        // Were it read again, it would be another table.
        let file = File::options().write(true).open(&path).unwrap();
        let changed = file.metadata().unwrap().modified().unwrap();
        fs::write(&path, &text).unwrap();
        file.set_modified(changed).unwrap();
        assert_eq!(tables.current(), Some(&table()));

        write_table(folder.path(), &Table { mtu: 1300, ..table() }).unwrap();
        assert_eq!(tables.current().map(|table| table.mtu), Some(1300));
    }

    #[test]
    fn the_largest_network_has_a_table_that_is_read_as_a_whole() {
        let host = Host {
            address: Some([255; 4].into()),
            address6: Some([0xff; 16].into()),
            name: "n".repeat(63),
            primary: false,
            metadata: None,
        };
        let mut table = table();
        table.hosts.clear();
        let addresses = [IpAddr::from([0xff; 16]); MAX_ADDRESSES];
        let records = (0..MAX_RECORDS).map(|number| (format!("{number:a>253}"), addresses.to_vec()));
        table.records = records.collect();
        let none = serde_json::to_vec(&table).unwrap().len();
        table.hosts.insert("52:54:00:00:00:01".into(), host);
        let one = serde_json::to_vec(&table).unwrap().len() - none;
        // With the comma, and names and servers of the longest kind.
        let all = (one + 1) * 65_536 + none + 4096;
        assert!(all as u64 <= MAX_TABLE, "{all}");
    }
}

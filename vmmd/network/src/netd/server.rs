//! The process that answers the DHCP and DNS clients of one network, and its IPv6 hosts.
//!
//! The daemon starts it with sockets that are bound to the bridge and with the folder that the daemon writes the table to. It gives up
//! all rights ([`confine`](super::confine)) before it reads the first packet, and lives until it is killed.

use std::{
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

use super::{
    Table,
    confine::confine,
    dhcp, dhcp6,
    dns::{self, Verdict, Way},
    forward::{Answer, Forwarder},
    ra,
    streams::{self, Streams},
};

/// The table's name in its folder.
pub const TABLE: &str = "table.json";
/// Largest table in bytes: 65,536 hosts of less than 250 bytes.
const MAX_TABLE: u64 = 16 << 20;
/// Time between two messages about declined addresses: a guest can decline as often as it likes.
const DECLINE_PAUSE: Duration = Duration::from_secs(10);
/// Place of the socket for DHCP for IPv6 among the descriptors.
const DHCP6: usize = 5;
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
    let take = |index: usize| sys::inherited(FIRST_FD + index);
    let folder = take(0).context("take the network's folder")?;
    // Whether the network has IPv6 never changes.
    let table = openat(&folder, TABLE, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let table = table.ok().map(File::from).and_then(|file| read(file).ok());
    let ipv6 = table.and_then(|table| table.ipv6);
    let dhcp6 = ipv6.as_ref().map(|_| take(DHCP6)).transpose();
    let routers = ipv6.map(|ipv6| {
        let socket = UdpSocket::from(take(4)?);
        let nodes = ra::nodes(&socket, &ipv6)?;
        io::Result::Ok((socket, nodes))
    });
    let listener = take(3).context("take the socket for DNS by TCP")?;
    let streams = Streams::open(TcpListener::from(listener), streams::PORT);
    let mut server = Server {
        dhcp6: dhcp6.context("take the socket for DHCP for IPv6")?,
        streams: streams.context("open sockets for name servers by TCP")?,
        routers: routers
            .transpose()
            .context("take the socket for router advertisements")?,
        schedule: ra::Schedule::default(),
        declined: None,
        dhcp: UdpSocket::from(take(1).context("take the socket for DHCP")?),
        dns: UdpSocket::from(take(2).context("take the socket for DNS")?),
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

/// State of the helper process.
struct Server {
    /// For router advertisements, and where they go; none without IPv6.
    routers: Option<(UdpSocket, SocketAddrV6)>,
    /// When these are sent.
    schedule: ra::Schedule,
    /// A packet socket, without IPv6 none.
    dhcp6: Option<OwnedFd>,
    dhcp: UdpSocket,
    /// When the last message about a declined address was written.
    declined: Option<Instant>,
    dns: UdpSocket,
    forwarder: Forwarder,
    streams: Streams,
    tables: Tables,
    packet: Vec<u8>,
}

impl Server {
    /// Waits for packets, and serves one of each socket.
    fn turn(&mut self) -> io::Result<()> {
        let ready = self.wait()?;
        let ready = |index: usize| ready.get(index).copied().unwrap_or(false);
        if ready(0) {
            self.dhcp()?;
        }
        self.dhcp6()?;
        if ready(1) {
            self.dns()?;
        }
        let forwarders = self.forwarder.sockets().len();
        for socket in 0..forwarders {
            if ready(2 + socket) {
                self.reply(socket)?;
            }
        }
        self.tell_routers(ready(2 + forwarders))?;
        let now = Instant::now();
        let answers = self.forwarder.expire(now);
        self.answer_all(answers);
        let is_due = self.streams.deadline().is_some_and(|deadline| deadline <= now);
        if (ready(3 + forwarders) || is_due)
            && let Some(table) = self.tables.current()
        {
            self.streams.turn(table, now);
        }
        Ok(())
    }

    /// Which sockets have something: those for DHCP and DNS, those of the forwarder, the one for routers, and any for DNS by TCP.
    fn wait(&self) -> io::Result<Vec<bool>> {
        let sockets = [&self.dhcp, &self.dns]
            .into_iter()
            .chain(self.forwarder.sockets());
        let mut watched: Vec<_> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        let routers = watched.len();
        watched.extend(
            self.routers
                .iter()
                .map(|(socket, _)| PollFd::new(socket, PollFlags::IN)),
        );
        let streams = watched.len();
        watched.extend(self.dhcp6.iter().map(|socket| PollFd::new(socket, PollFlags::IN)));
        self.streams.watch(&mut watched);
        let tells = self.routers.as_ref();
        let tells = tells.map(|_| self.schedule.due().unwrap_or_else(Instant::now));
        let deadlines = [self.forwarder.deadline(), self.streams.deadline(), tells];
        let left = deadlines.into_iter().flatten().min().map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            // A moment more, so that the deadline is over then.
            Timespec::try_from(left + Duration::from_millis(1)).unwrap_or_default()
        });
        match poll(&mut watched, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let all = watched.iter().map(|socket| !socket.revents().is_empty());
        let mut ready: Vec<_> = all.collect();
        let streams = ready.split_off(streams).contains(&true);
        ready.resize(routers + 1, false);
        ready.push(streams);
        Ok(ready)
    }

    fn answer_all(&self, answers: Vec<Answer>) {
        for Answer { client, packet } in answers {
            answer(&self.dns, &packet, client);
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
        let frame = self.packet.get(..length).unwrap_or_default();
        if let Some(reply) = self
            .tables
            .current()
            .and_then(|table| dhcp6::respond(table, frame))
        {
            // Not sendto(2), by which a frame can leave by other interfaces: the filter of system calls forbids it here.
            let _lost = rustix::io::write(socket, &reply);
        }
        Ok(())
    }

    fn dhcp(&mut self) -> io::Result<()> {
        let Some((length, _)) = received(self.dhcp.recv_from(&mut self.packet))? else {
            return Ok(());
        };
        let (Some(table), Some(packet)) = (self.tables.current(), self.packet.get(..length)) else {
            return Ok(());
        };
        if let Some((reply, to)) = dhcp::respond(table, packet) {
            answer(&self.dhcp, &reply, to);
        }
        let now = Instant::now();
        if self.declined.is_none_or(|last| last + DECLINE_PAUSE <= now)
            && let Some(host) = dhcp::declined(table, packet)
        {
            self.declined = Some(now);
            eprintln!(
                "VM \"{}\" declines its address {} in the network \"{}\": another host of the network uses the address",
                host.name, host.address, table.network
            );
        }
        Ok(())
    }

    fn dns(&mut self) -> io::Result<()> {
        let Some((length, client)) = received(self.dns.recv_from(&mut self.packet))? else {
            return Ok(());
        };
        let (Some(table), Some(packet)) = (self.tables.current(), self.packet.get(..length)) else {
            return Ok(());
        };
        match dns::decide(table, packet, Way::Udp) {
            Verdict::Answer(reply) => answer(&self.dns, &reply, client),
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
            address: [255; 4].into(),
            address6: Some([0xff; 16].into()),
            name: "n".repeat(63),
            primary: false,
        };
        let mut table = table();
        table.hosts.clear();
        let none = serde_json::to_vec(&table).unwrap().len();
        table.hosts.insert("52:54:00:00:00:01".into(), host);
        let one = serde_json::to_vec(&table).unwrap().len() - none;
        // With the comma, and names and servers of the longest kind.
        let all = (one + 1) * 65_536 + none + 4096;
        assert!(all as u64 <= MAX_TABLE, "{all}");
    }
}

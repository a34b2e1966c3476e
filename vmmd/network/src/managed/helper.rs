//! The daemon's side of a helper: start, adoption by a later daemon, replacement and end.
//!
//! The folder of a helper contains `table.json`, which the helper reads, and `server.json`, which
//! identifies the process. The process number and the start time identify a process, so a reused
//! number is no risk. The daemon replaces a helper with another program file than its own. A helper
//! stores nothing: leases are in the table.

use std::{
    collections::BTreeMap,
    ffi::{CString, OsStr},
    fs::{self, File, Metadata},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{
            ffi::OsStrExt as _,
            fs::{MetadataExt as _, PermissionsExt as _},
        },
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, mknodat},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    net::unix::pipe,
    sync::Notify,
    time::{Instant, sleep},
};
use uuid::Uuid;
use vmmd_host::{
    cgroup, fault,
    ledger::{Claim, Ledger},
    process::Process,
    sys::clone::{self, Child, Network, Program},
};

use super::metadata;
use crate::netd::{
    Table,
    metadata::PORT,
    open_dhcp6, open_routers,
    report::{self, Declined},
    server::TABLE,
};

/// Hop limit of the metadata service: its answers reach the guest, and no container behind it.
const METADATA_TTL: u32 = 1;
/// Ports of DHCP and DNS servers.
const DHCP: u16 = 67;
const DNS: u16 = 53;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;
const SERVER: &str = "server.json";
/// Folders of helpers in the daemon's runtime folder: those of networks by the UUID of the network, and those of VMs in pods by the UUID
/// of the VM.
pub const NETWORKS: &str = "networks";
pub const PODS: &str = "pods";
/// Name of the helper's program: its first argument.
const PROGRAM: &str = "vmmd-netd";
/// Cgroup of the helpers, beside those of the VMs.
const GROUP: &str = "networks";
/// Memory of all helpers in bytes: that of one, and of each network twice the largest table with its parsed form.
const MEMORY: u64 = 256 << 20;
const MEMORY_OF_EACH: u64 = 64 << 20;
/// Tasks of all helpers: a helper has one thread, and two helpers serve a network during an exchange.
const TASKS: u64 = 16;
const TASKS_OF_EACH: u64 = 2;
/// Time between the end of a helper and the start of the next one: at first, and at most. A helper that ends at once again must not
/// keep the daemon busy.
const SHORTEST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A helper that has lived shorter ends soon, and the pause doubles.
const SOON: Duration = Duration::from_secs(10);
/// A helper that has lived so long works.
const STEADY: Duration = Duration::from_secs(60);

/// Least time between two reads of a helper's reports: a helper that a guest has taken over must not keep the daemon busy.
const REPORT_PAUSE: Duration = Duration::from_secs(1);
/// Most reports that wait for the daemon: more are lost.
const REPORTS: usize = 1024;

/// A helper that was started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Server {
    pid: i32,
    /// Clock ticks after the start of the system (proc(5), starttime).
    started: u64,
    /// The file that it runs.
    #[serde(default)]
    program: ProgramFile,
    /// Index of the bridge that its sockets are bound to.
    bridge: u32,
}

impl Server {
    fn read(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(folder.join(SERVER)).ok()?).ok()
    }

    fn lives(&self) -> bool {
        started(self.pid) == Some(self.started)
    }
}

/// A file, named as no other file is while a process runs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct ProgramFile {
    device: u64,
    inode: u64,
}

impl From<Metadata> for ProgramFile {
    fn from(facts: Metadata) -> Self {
        Self {
            device: facts.dev(),
            inode: facts.ino(),
        }
    }
}

/// The ends of helpers that their networks still need.
#[derive(Debug, Default)]
pub struct Ends {
    /// Notified when another helper is to be started.
    due: Notify,
    /// The pause after the last end, by folder.
    pauses: Mutex<BTreeMap<PathBuf, Duration>>,
    /// Reports that wait for the daemon.
    reports: Mutex<Vec<Report>>,
    reported: Notify,
}

/// A report of the helper of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// UUID of the network.
    pub network: Uuid,
    /// As hostile as a guest.
    pub declined: Declined,
}

impl Ends {
    /// Waits until another helper is to be started.
    pub async fn due(&self) {
        self.due.notified().await;
    }

    /// Waits for reports of helpers.
    pub async fn reports(&self) -> Vec<Report> {
        loop {
            let reports = std::mem::take(&mut *self.reports.lock().unwrap_or_else(PoisonError::into_inner));
            if !reports.is_empty() {
                return reports;
            }
            self.reported.notified().await;
        }
    }

    fn report(&self, network: Uuid, declined: Vec<Declined>) {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.extend(declined.into_iter().map(|declined| Report { network, declined }));
        reports.truncate(REPORTS);
        self.reported.notify_one();
    }

    /// The pause after the end of a helper that has lived so long.
    fn pause(&self, folder: &Path, lived: Duration) -> Duration {
        let mut pauses = self.pauses.lock().unwrap_or_else(PoisonError::into_inner);
        pauses.retain(|folder, _| folder.exists());
        let pause = pause(pauses.get(folder).copied(), lived);
        pauses.insert(folder.to_owned(), pause);
        pause
    }
}

/// The pause after the end of a helper that has lived so long, when the pause before was `last`.
fn pause(last: Option<Duration>, lived: Duration) -> Duration {
    match last {
        Some(last) if lived < SOON => last.saturating_mul(2).min(LONGEST_PAUSE),
        Some(last) if lived < STEADY => last,
        _ => SHORTEST_PAUSE,
    }
}

/// Writes the table of a helper, which the helper reads before its next answer. An unchanged file
/// stays, so that the helper need not read it again.
pub fn write_table(folder: &Path, table: &Table) -> io::Result<()> {
    fault::step("make a helper's folder");
    fs::create_dir_all(folder)?;
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
    // The server has a user of its own.
    mode(folder, 0o755)?;
    let (path, text) = (folder.join(TABLE), serde_json::to_vec(table)?);
    if fs::read(&path).is_ok_and(|before| before == text) {
        return mode(&path, 0o644);
    }
    replace(&path, &text, 0o644)
}

/// Replaces a file as a whole.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let new = path.with_extension("new");
    fault::step("write a helper's file");
    fs::write(&new, content)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(mode))?;
    fault::step("exchange a helper's file");
    fs::rename(&new, path)
}

/// The network of guests that a helper is to serve.
#[derive(Debug)]
pub struct Served<'a> {
    /// The program `vmmd-netd`.
    pub program: &'a File,
    /// Where its table is.
    pub folder: &'a Path,
    /// Name and index of its bridge, or of the tap of a VM in a pod.
    pub bridge: (&'a str, u32),
    /// What it serves.
    pub table: &'a Table,
    /// How many helpers the node has, with this one.
    pub helpers: usize,
}

/// A started helper without a watcher. It ends when this is dropped.
#[derive(Debug)]
pub struct Started {
    child: Child,
    claim: Claim,
    folder: PathBuf,
    /// The helper that this one replaces.
    before: Option<Server>,
}

impl Started {
    /// Watches the helper, and notifies `ends` when it ends while its folder still names it. To be called in the daemon's runtime.
    pub fn watched(self, ends: &Arc<Ends>) -> io::Result<()> {
        let process = self.child.watched(Process::new)?;
        // The old helper ends after the start of the new one, so that no client waits.
        if let Some(before) = self.before {
            kill(&before);
        }
        watch(process, &self.folder, Arc::clone(ends), Some(self.claim));
        Ok(())
    }
}

/// Number of the node's helpers that have a folder in `run_dir`.
pub fn count(run_dir: &Path) -> usize {
    let folders = [NETWORKS, PODS].map(|name| fs::read_dir(run_dir.join(name)));
    folders.into_iter().flatten().map(Iterator::count).sum()
}

/// Whether the process that the folder names runs `program`.
pub fn runs(folder: &Path, program: &File) -> io::Result<bool> {
    let program = ProgramFile::from(program.metadata()?);
    Ok(Server::read(folder).is_some_and(|server| server.lives() && server.program == program))
}

/// Ensures that a helper with the daemon's program serves the network. A new one has a user id of its own, a cgroup below `parent` with
/// all helpers, and the network namespace of the caller. None when one serves it already.
pub fn ensure(
    served: &Served<'_>,
    ledger: &Arc<Ledger>,
    parent: Option<&cgroup::Parent>,
) -> io::Result<Option<Started>> {
    let program = ProgramFile::from(served.program.metadata()?);
    let before = Server::read(served.folder);
    let (_, bridge) = served.bridge;
    if let Some(server) = &before
        && server.lives()
        && server.program == program
        && server.bridge == bridge
    {
        return Ok(None);
    }
    let claim = ledger.claim("the helper of a network");
    let claim = claim.map_err(|failure| io::Error::other(failure.message))?;
    if served.table.has_metadata() {
        metadata::prepare(served.folder, claim.user())?;
    }
    let child = start(served, claim.user(), parent)?;
    let pid = i32::try_from(child.pid()).unwrap_or(0);
    let server = Server {
        pid,
        started: started(pid).unwrap_or(0),
        program,
        bridge,
    };
    replace(&served.folder.join(SERVER), &serde_json::to_vec(&server)?, 0o600)?;
    Ok(Some(Started {
        child,
        claim,
        folder: served.folder.to_owned(),
        before,
    }))
}

/// Watches the helpers that an earlier daemon started for the networks with a folder in `networks`.
pub fn watch_adopted(networks: &Path, ends: &Arc<Ends>) -> io::Result<()> {
    for entry in fs::read_dir(networks)? {
        let folder = entry?.path();
        let Some(server) = Server::read(&folder) else {
            continue;
        };
        let process = u32::try_from(server.pid).ok().map(Process::open);
        // After the pidfd is open, the number is its own.
        if let Some(Ok(process)) = process
            && server.lives()
        {
            watch(process, &folder, Arc::clone(ends), None);
        }
    }
    Ok(())
}

/// Holds `claim` until the helper has ended, and notifies `ends` then.
fn watch(process: Process, folder: &Path, ends: Arc<Ends>, claim: Option<Claim>) {
    let folder = folder.to_owned();
    let reports = open_pipe(&folder);
    tokio::spawn(async move {
        tokio::select! {
            () = follow(process, &folder, &ends, claim, sleep) => {}
            () = hear(reports, &folder, &ends) => {}
        }
    });
}

/// Makes the pipe for the reports of a new helper. The pipe of an earlier one belongs to that helper alone.
fn make_pipe(path: &Path) -> io::Result<OwnedFd> {
    fault::step("make a helper's pipe");
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, path, FileType::Fifo, mode, 0)?;
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// The reports of a helper; none of one that an older daemon started.
fn open_pipe(folder: &Path) -> io::Result<pipe::Receiver> {
    // Also open for writing: the end of the helper is no end of the pipe.
    let path = folder.join(report::PIPE);
    pipe::OpenOptions::new().read_write(true).open_receiver(path)
}

/// Hands on the reports of the helper with this folder. Never ends.
async fn hear(pipe: io::Result<pipe::Receiver>, folder: &Path, ends: &Ends) {
    let network = folder
        .file_name()
        .and_then(|name| Uuid::parse_str(name.to_str()?).ok());
    let (mut text, mut chunk) = (Vec::new(), [0; 1024]);
    if let (Ok(pipe), Some(network)) = (pipe, network) {
        while pipe.readable().await.is_ok() {
            match pipe.try_read(&mut chunk) {
                Ok(length) => text.extend(chunk.get(..length).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) => break,
            }
            ends.report(network, report::take(&mut text));
            sleep(REPORT_PAUSE).await;
        }
    }
    std::future::pending::<()>().await;
}

/// After the end of a helper and a pause another one is due, if the folder still names the one that has ended.
async fn follow<F: Future>(
    process: Process,
    folder: &Path,
    ends: &Ends,
    claim: Option<Claim>,
    wait: impl FnOnce(Duration) -> F,
) {
    let begun = Instant::now();
    let status = process.status().await;
    tracing::info!(folder = %folder.display(), ?status, "the helper of a network has ended");
    drop(claim);
    let pid = i32::try_from(process.pid()).ok();
    let is_named = || Server::read(folder).is_some_and(|server| Some(server.pid) == pid);
    if is_named() {
        wait(ends.pause(folder, begun.elapsed())).await;
        if is_named() {
            ends.due.notify_one();
        }
    }
}

fn start(served: &Served<'_>, uid: u32, parent: Option<&cgroup::Parent>) -> io::Result<Child> {
    let (name, _) = served.bridge;
    let Table { ipv4, ipv6, .. } = served.table;
    // In the order in which the helper takes them.
    let mut sockets = Vec::new();
    if let Some(ipv4) = ipv4 {
        sockets.push(socket(name, (Ipv4Addr::UNSPECIFIED, DHCP).into())?);
        if served.table.has_metadata() {
            sockets.push(metadata_service(name, ipv4.gateway)?);
        }
        sockets.extend(name_servers(name, ipv4.gateway.into())?);
    }
    if let Some(ipv6) = ipv6 {
        sockets.extend(name_servers(name, ipv6.gateway().into())?);
        sockets.extend([open_routers(ipv6)?, open_dhcp6(ipv6)?]);
    }
    let folder = File::open(served.folder)?;
    let pipe = make_pipe(&served.folder.join(report::PIPE))?;
    let group = parent.map(|parent| group(parent, served.helpers)).and_then(|group| {
        let failed = |error: &io::Error| {
            tracing::warn!(%error, network = name, "the helper of a network stays in the daemon's cgroup");
        };
        group.inspect_err(failed).ok()
    });
    let arguments = [PROGRAM.as_bytes(), served.folder.as_os_str().as_bytes()].into_iter();
    let arguments: Vec<_> = arguments.flat_map(CString::new).collect();
    let mut fds = vec![folder.as_fd(), pipe.as_fd()];
    fds.extend(sockets.iter().map(Socket::as_fd));
    fault::step("start a helper");
    clone::spawn(&Program {
        executable: served.program.as_fd(),
        arguments: &arguments,
        fds: &fds,
        output: None,
        log: io::stderr().as_fd(),
        uid,
        // It opens sockets for name servers in the network of this thread, and leaves that network then.
        network: Network::Node,
        cgroup: group.as_ref().map(OwnedFd::as_fd),
        namespaces: None,
    })
}

/// The helpers' cgroup, which is made when there is none, with limits for so many helpers.
fn group(parent: &cgroup::Parent, helpers: usize) -> io::Result<OwnedFd> {
    fault::step("make the helpers' cgroup");
    let helpers = u64::try_from(helpers).unwrap_or(u64::MAX);
    let limits = cgroup::plan::Limits {
        memory: helpers.saturating_mul(MEMORY_OF_EACH).saturating_add(MEMORY),
        tasks: helpers.saturating_mul(TASKS_OF_EACH).saturating_add(TASKS),
    };
    parent.for_helpers(GROUP, limits)
}

/// Ends the processes that serve a network with a folder in `networks`, whose folder names another process or none: the daemon that started them ended
/// before it had written down which they are, or before it had ended the one that it exchanged.
pub fn end_strays(networks: &Path) -> io::Result<()> {
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let (Some(started), Some(folder)) = (started(pid), served(pid)) else {
            continue;
        };
        let known = Server::read(&folder);
        if folder.parent() == Some(networks) && known.is_none_or(|server| server.pid != pid) {
            tracing::warn!(pid, folder = %folder.display(), "a process that served a network is ended: no daemon knows it");
            kill(&Server {
                pid,
                started,
                program: ProgramFile::default(),
                bridge: 0,
            });
        }
    }
    Ok(())
}

/// The folder of the helper with that number; `None` when it is no helper.
fn served(pid: i32) -> Option<PathBuf> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<_> = line.split(|byte| *byte == 0).collect();
    match words[..] {
        [program, folder, b""] if program == PROGRAM.as_bytes() => Some(OsStr::from_bytes(folder).into()),
        _ => None,
    }
}

/// Ends the server, and removes its folder.
pub fn end(folder: &Path) -> io::Result<()> {
    if let Some(server) = Server::read(folder) {
        kill(&server);
    }
    fault::step("remove a helper's folder");
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn kill(server: &Server) {
    let Some(pid) = Pid::from_raw(server.pid) else {
        return;
    };
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
        return;
    };
    // The descriptor refers to the process that has this number now. The check therefore concerns
    // the same process.
    if server.lives() {
        fault::step("end a helper");
        let _has_ended = pidfd_send_signal(process, Signal::KILL);
    }
}

/// When the process was started; `None` when there is none.
fn started(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // proc(5): the name, in parentheses, is the second field and may hold anything; the start time is the 22nd.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    if fields.next() == Some("Z") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// The sockets for DNS by UDP and by TCP at an address of the bridge.
fn name_servers(bridge: &str, gateway: IpAddr) -> io::Result<[Socket; 2]> {
    let address = (gateway, DNS).into();
    let open = || Ok([socket(bridge, address)?, listener(bridge, address)?]);
    open().map_err(|error: io::Error| {
        let message = format!("port {DNS} of {gateway}, which a name server of the node may have: {error}");
        io::Error::new(error.kind(), message)
    })
}

/// The socket of the metadata service at an address of the bridge.
fn metadata_service(bridge: &str, gateway: Ipv4Addr) -> io::Result<Socket> {
    let open = || {
        let socket = listener(bridge, (gateway, PORT).into())?;
        // Connections inherit it.
        socket.set_ttl_v4(METADATA_TTL)?;
        Ok(socket)
    };
    open().map_err(|error: io::Error| {
        let message = format!("port {PORT} of {gateway}, which a program of the node may have: {error}");
        io::Error::new(error.kind(), message)
    })
}

fn socket(bridge: &str, address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_address(true)?;
    socket.set_broadcast(true)?;
    socket.bind_device(Some(bridge.as_bytes()))?;
    socket.bind(&address.into())?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// A listener for TCP. Another helper of the network may have one at the same time.
fn listener(bridge: &str, address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.bind_device(Some(bridge.as_bytes()))?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::netd::tests::table;

    #[test]
    fn pause_doubles_while_helpers_end_soon_and_is_bounded() {
        let seconds = Duration::from_secs;
        let mut last = None;
        let pauses = [(); 9].map(|()| {
            let next = pause(last, seconds(9));
            last = Some(next);
            next.as_millis()
        });
        assert_eq!(
            pauses,
            [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000]
        );
        assert_eq!(pause(last, seconds(59)), LONGEST_PAUSE);
        assert_eq!(pause(last, seconds(60)), SHORTEST_PAUSE);
        assert_eq!(pause(None, seconds(0)), SHORTEST_PAUSE);
    }

    /// Runs a process that ends at once, and follows it in a folder that names `named`, or the process itself. Returns the pause, and whether
    /// another helper is due.
    async fn pause_after_an_end(folder: &Path, ends: &Ends, named: Option<i32>) -> (Option<Duration>, bool) {
        let mut child = Command::new("true").spawn().unwrap();
        let server = Server {
            pid: named.unwrap_or_else(|| child.id().try_into().unwrap()),
            started: 0,
            program: ProgramFile::default(),
            bridge: 0,
        };
        fs::write(folder.join(SERVER), serde_json::to_vec(&server).unwrap()).unwrap();
        let process = Process::open(child.id()).unwrap();
        let mut pause = None;
        let wait = |time| {
            pause = Some(time);
            std::future::ready(())
        };
        follow(process, folder, ends, None, wait).await;
        // `follow` has reaped it.
        let _ = child.wait();
        let due = tokio::time::timeout(Duration::ZERO, ends.due()).await;
        (pause, due.is_ok())
    }

    #[tokio::test]
    async fn next_helper_is_due_after_a_pause_of_its_network() {
        let (lan, dmz) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let ends = Ends::default();
        for (folder, milliseconds) in [(&lan, 500), (&lan, 1000), (&dmz, 500), (&lan, 2000)] {
            let (pause, due) = pause_after_an_end(folder.path(), &ends, None).await;
            assert_eq!((pause, due), (Some(Duration::from_millis(milliseconds)), true));
        }
        // A network that is gone is forgotten.
        drop(lan);
        ends.pause(dmz.path(), Duration::ZERO);
        assert_eq!(ends.pauses.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn no_helper_is_due_after_an_exchange() {
        let folder = tempfile::tempdir().unwrap();
        let ends = Ends::default();
        let exchanged = pause_after_an_end(folder.path(), &ends, Some(1)).await;
        assert_eq!(exchanged, (None, false));
    }

    #[test]
    fn a_table_is_written_when_it_is_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let inode = || fs::metadata(folder.path().join(TABLE)).unwrap().ino();
        write_table(folder.path(), &table()).unwrap();
        let before = inode();
        write_table(folder.path(), &table()).unwrap();
        assert_eq!(inode(), before);
        // Kept open, so that no other file gets its inode.
        let _open = fs::File::open(folder.path().join(TABLE)).unwrap();
        let other = Table { mtu: 1280, ..table() };
        write_table(folder.path(), &other).unwrap();
        assert_ne!(inode(), before);
    }

    #[test]
    fn a_process_is_known_by_the_time_of_its_start() {
        let own = i32::try_from(std::process::id()).unwrap();
        let started = started(own).unwrap();
        let server = Server {
            pid: own,
            started,
            program: ProgramFile::default(),
            bridge: 1,
        };
        assert!(server.lives());
        assert!(
            !Server {
                started: started + 1,
                ..server
            }
            .lives()
        );
    }
}

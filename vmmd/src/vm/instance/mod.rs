//! One run of a VM: its process, the connection to the process, and its claims on the node.

pub mod link;

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _},
    os::unix::fs::MetadataExt,
    path::Path,
    sync::Arc,
    time::Duration,
};

use prost::Message;
use rustix::fs::{Mode, OFlags};
use tokio::time::timeout;
use uuid::Uuid;
use vmm_protocol::{
    machine::AGENT_CHANNEL,
    vmm::{ExitRecord, HelloReply, Status},
};
use vmmd_api::v1::GuestInfo;
use vmmd_host::{
    capacity::Demand,
    cgroup::Group,
    failure::Failure,
    ledger::{Claim, FileId},
    lock,
    process::Process,
};

use self::link::{DYING, Link, Session, State, greet};
use crate::{
    control::{Client, bounds},
    host::Host,
    paths::RuntimeDir,
    share::Keepers,
    vm::probe::Prober,
};

/// Time that a `vmm` of an earlier daemon has to answer. Afterwards the daemon continues without
/// it.
pub const ATTACH_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest exit record in bytes.
const MAX_EXIT_RECORD: u64 = 64 << 10;

/// Killed process that does not die, for example because a file system does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreaped {
    /// The `vmm` itself.
    Vmm,
    /// Something else in its cgroup.
    Leftovers,
}

impl Unreaped {
    /// For programs: of the condition and the event.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Vmm => "VmmAlive",
            Self::Leftovers => "LeftoversAlive",
        }
    }

    /// For people.
    pub fn message(self) -> &'static str {
        match self {
            Self::Vmm => {
                "the vmm process was killed and does not die (as on a file system that does not answer): the VM holds its \
                 disks, its user id and its room until it is gone"
            }
            Self::Leftovers => {
                "the vmm process has ended, but another process in its cgroup was killed and does not die (as on a \
                 file system that does not answer): the VM holds its disks, its user id and its room until it is gone"
            }
        }
    }
}

/// A living `vmm`.
#[derive(Debug)]
pub struct Instance {
    /// The process.
    pub process: Process,
    /// Its cgroup, where the node has them.
    pub group: Option<Group>,
    /// End of the process, with its signal if it is known.
    pub exited: Option<Option<i32>>,
    /// How it is talked to.
    pub link: Link,
    /// What it holds; given back when the instance is dropped.
    pub claim: Claim,
    /// Files behind each disk, by the disk's name.
    pub disks: BTreeMap<String, Vec<FileId>>,
    /// Build of the `vmm`; empty until it has said so.
    pub version: String,
    /// Resets that the guest did in this run.
    pub guest_resets: u64,
    /// Resets after a triple fault in this run.
    pub crash_resets: u64,
    /// The guest's kernel has panicked and has not been reset since.
    pub panicked: bool,
    /// The VM was paused for that panic, as its spec says: a client that resumes the VM wants it to run.
    pub paused_for_panic: bool,
    /// Its `vmm` has not answered for some seconds, and its answer is waited for.
    pub silent: bool,
    /// Part of the run that was killed and has not died, if any.
    pub lingering: Option<Unreaped>,
    /// How it said that it ends, before it did.
    pub ended: Option<ExitRecord>,
    /// Keepers of the processes that serve the shares.
    pub shares: Keepers,
    /// Names of the channels that programs of the guest have open.
    pub open_channels: Vec<String>,
    /// The agent in the guest.
    pub agent: AgentState,
    /// The guest by its probes.
    pub health: Health,
}

/// A guest by its probes.
#[derive(Debug, Default)]
pub struct Health {
    /// The probes; `None` without any, and before the guest runs.
    pub prober: Option<Prober>,
    /// Number of the last prober: reports of earlier ones are late.
    pub number: u64,
    /// Last state of the readiness probe, or of the startup probe before its success; `None` before
    /// the first result.
    pub ready: Option<Result<(), String>>,
}

/// The agent in a guest, as far as it is known.
#[derive(Debug, Default)]
pub struct AgentState {
    /// A program of the guest has the agent's channel open.
    pub open: bool,
    /// The guest as the agent described it last, or why it did not; `None` before the first answer
    /// since the channel was opened.
    pub guest: Option<Result<Box<GuestInfo>, Failure>>,
    /// Whether the agent has set the passwords and keys of the spec; `None` before its first answer since
    /// the channel was opened or the spec was changed.
    pub access: Option<Result<(), Failure>>,
}

impl AgentState {
    /// As the `vmm` says it.
    pub fn of(status: Option<&Status>) -> Self {
        let mut open = status.into_iter().flat_map(|status| &status.open_channels);
        Self {
            open: open.any(|name| name == AGENT_CHANNEL),
            guest: None,
            access: None,
        }
    }
}

impl Instance {
    /// One that an earlier daemon has started.
    fn new(
        process: Process,
        group: Option<Group>,
        link: Link,
        claim: Claim,
        hello: Option<&HelloReply>,
    ) -> Self {
        let status = hello.and_then(|hello| hello.status.as_ref());
        Self {
            process,
            group,
            exited: None,
            link,
            claim,
            disks: BTreeMap::new(),
            version: hello.map(|hello| hello.build.clone()).unwrap_or_default(),
            panicked: status.is_some_and(|status| status.panicked),
            paused_for_panic: false,
            silent: false,
            lingering: None,
            guest_resets: status.map_or(0, |status| status.guest_resets),
            crash_resets: status.map_or(0, |status| status.crash_resets),
            ended: None,
            shares: Keepers::default(),
            open_channels: status
                .map(|status| status.open_channels.clone())
                .unwrap_or_default(),
            agent: AgentState::of(status),
            health: Health::default(),
        }
    }

    /// Waits for the end of the process, then kills the rest of its cgroup and waits for its end.
    /// Returns the signal that ended the process, if it is known. Cancel-safe.
    pub async fn ended(&mut self) -> Option<i32> {
        let signal = match self.exited {
            Some(signal) => signal,
            None => *self.exited.insert(self.process.ended().await),
        };
        if let Some(group) = &self.group {
            group.end().await;
        }
        signal
    }

    /// Sets the files behind a disk, or removes the disk.
    pub fn set_disk(&mut self, name: &str, ids: Option<Vec<FileId>>) {
        match ids {
            Some(ids) => drop(self.disks.insert(name.to_owned(), ids)),
            None => drop(self.disks.remove(name)),
        }
        self.claim
            .set_disks(self.disks.values().flatten().copied().collect());
    }

    /// For asking it, while it answers.
    pub fn client(&self) -> Option<Client> {
        self.link.client()
    }
}

/// State of a run that was found at the daemon's start.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "each value is moved once")]
pub enum Found {
    /// A living process; with the reply to the hello if that came in time.
    Alive(Box<Instance>, Option<HelloReply>),
    /// It has ended.
    Ended,
}

/// Looks for a process that an earlier daemon has started for the VM `uid` as `user`.
///
/// The lock says whether the process lives. Several sources name candidates for the process; a
/// candidate is accepted if its owner is `user`, because no other process has this user. If the
/// lock file was removed, the process is unreachable, but is still adopted: a second process of the
/// VM would be worse.
pub async fn find(host: &Arc<Host>, uid: Uuid, user: u32, name: &str, demand: Demand) -> io::Result<Found> {
    let runtime = RuntimeDir::of(&host.config, uid);
    if !lock::is_held(&runtime.lock())? {
        let Some(process) = stray(host, uid, user).await else {
            return Ok(Found::Ended);
        };
        tracing::error!(
            vm = name,
            pid = process.pid(),
            "the files of a running vmm were removed: it can only be killed"
        );
        let claim = host.ledger.adopt(name, user, demand);
        let link = State::Unreachable.into();
        let instance = Instance::new(process, group(host, uid), link, claim, None);
        return Ok(Found::Alive(Box::new(instance), None));
    }
    let lock_path = runtime.lock();
    let connected = Client::connect(&runtime.control()).await;
    let peer = connected.as_ref().ok().and_then(|(client, _)| client.peer().ok());
    let mut connecting = tokio::spawn(async {
        let (client, notices) = connected?;
        greet(client, notices).await
    });
    let mut broken = false;
    let (link, hello) = match timeout(ATTACH_TIMEOUT, &mut connecting).await {
        Ok(Ok(Ok(Session {
            client,
            notices,
            hello,
        }))) => (State::Up(client, notices).into(), Some(hello)),
        Ok(failed) => {
            tracing::warn!(vm = name, ?failed, "a running vmm can't be talked to");
            broken = failed.is_ok_and(|session| session.is_err_and(|error| error.is_lost()));
            let mut link = Link::from(State::Unreachable);
            link.retry(RuntimeDir::of(&host.config, uid));
            (link, None)
        }
        Err(_) => (State::Connecting(connecting).into(), None),
    };
    let in_group = group(host, uid)
        .map(|group| group.processes())
        .unwrap_or_default();
    let told = hello.as_ref().map(|hello| hello.pid);
    let mut candidates = peer.map(|(pid, _)| pid).into_iter().chain(in_group).chain(told);
    let process = candidates
        .find(|pid| owner(*pid).is_ok_and(|owner| owner == user))
        .map(Process::open);
    // Both cases need a wait. A lock without a known holder may be a copy in a child that is being
    // forked. A process with a broken connection is usually about to end.
    let ended = if process.is_some() && !broken {
        !lock::is_held(&lock_path)?
    } else {
        lock::released(&lock_path).await?
    };
    if ended {
        return Ok(Found::Ended);
    }
    let process = process.unwrap_or_else(|| Err(io::Error::other("the VM's process can't be found")))?;
    let claim = host.ledger.adopt(name, user, demand);
    let instance = Instance::new(process, group(host, uid), link, claim, hello.as_ref());
    Ok(Found::Alive(Box::new(instance), hello))
}

/// The cgroup of a VM, where the node has them.
fn group(host: &Host, uid: Uuid) -> Option<Group> {
    Some(host.cgroups.as_ref()?.group(uid))
}

/// A process of a VM that holds no lock any more and does not end either: somebody has removed its lock.
async fn stray(host: &Host, uid: Uuid, user: u32) -> Option<Process> {
    let pids = match &host.cgroups {
        Some(parent) => parent.group(uid).processes(),
        None => all_processes().collect(),
    };
    for pid in pids {
        let process = match owner(pid) {
            Ok(owner) if owner == user => Process::open(pid).ok(),
            _ => None,
        };
        if let Some(process) = process
            && timeout(DYING, process.ended()).await.is_err()
        {
            return Some(process);
        }
    }
    None
}

fn all_processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// The user of each process there is.
pub fn users_of_processes() -> impl Iterator<Item = u32> {
    all_processes().filter_map(|pid| owner(pid).ok())
}

/// The user that a process runs as.
fn owner(pid: u32) -> io::Result<u32> {
    Ok(fs::metadata(format!("/proc/{pid}"))?.uid())
}

/// Reads the exit record that the process wrote. The process owns the file, so the file must be
/// regular and at most [`MAX_EXIT_RECORD`] bytes are read.
pub fn exit_record(path: &Path) -> Option<ExitRecord> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = fs::File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX_EXIT_RECORD + 1).read_to_end(&mut bytes).ok()?;
    if bytes.is_empty() || bytes.len() as u64 > MAX_EXIT_RECORD {
        return None;
    }
    let record = ExitRecord::decode(bytes.as_slice()).ok()?;
    Some(bounds::exit_record(&record))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_garbage_in_the_exit_file_is_taken_for_a_record() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("exit");
        assert_eq!(exit_record(&path), None);
        for bytes in [&[][..], &[0xff; 40]] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(exit_record(&path), None);
        }
        let record = ExitRecord {
            kind: 1,
            message: "m".into(),
            time_unix_ms: 5,
        };
        fs::write(&path, record.encode_to_vec()).unwrap();
        assert_eq!(exit_record(&path), Some(record));
    }
}

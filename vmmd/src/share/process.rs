//! One `virtiofsd`: how it is started, and how a later daemon finds it.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{runtime::Handle, task::spawn_blocking};
use uuid::Uuid;
use vmmd_host::{
    failure::Failure,
    fault,
    process::Process,
    sys::clone::{self, Child, FIRST_FD, Namespaces, Network, Program},
    text,
};
use vmmd_spec::share::{Cache, Share};

use crate::{
    files::share::{Inode, Opened, open},
    host::Host,
    paths::{LogDir, RuntimeDir},
};

/// A process that serves a share, and the connection that a `vmm` is to have.
#[derive(Debug)]
pub struct Serving {
    /// Not watched yet.
    pub child: Child,
    /// A vhost-user front end's end.
    pub socket: OwnedFd,
    /// The directory that it serves.
    inode: Inode,
}

/// A process that is ended and forgotten unless somebody keeps it.
#[derive(Debug)]
pub struct Unkept {
    process: Option<Process>,
    /// Where it is noted.
    note: PathBuf,
}

impl Unkept {
    /// Takes a new process that has no owner yet.
    pub fn new(process: Process, note: PathBuf) -> Self {
        Self {
            process: Some(process),
            note,
        }
    }

    /// It continues.
    pub fn keep(mut self) -> Option<Process> {
        self.process.take()
    }
}

impl Drop for Unkept {
    fn drop(&mut self) {
        let note = std::mem::take(&mut self.note);
        if let (Some(process), Ok(runtime)) = (self.process.take(), Handle::try_current()) {
            runtime.spawn(async move {
                process.kill();
                process.ended().await;
                spawn_blocking(move || forget(&note, process.pid())).await
            });
        }
    }
}

/// Numbers of sockets: several shares of a VM may begin at once.
static SOCKETS: AtomicU64 = AtomicU64::new(0);

/// Starts the processes of shares of the VM `uid`, in their order, and notes them. `begun_with` is the directory that the run has begun with: no other
/// one is served to it. Refused as SHARE_PROGRAM_MISSING, as SHARE_MOVED, as [`open`] refuses, or as FILES_DO_NOT_ANSWER: what begins after that is ended.
pub async fn serve(
    host: &Arc<Host>,
    uid: Uuid,
    shares: Vec<Share>,
    begun_with: Option<Inode>,
) -> Result<Vec<Serving>, Failure> {
    if shares.is_empty() {
        return Ok(Vec::new());
    }
    let paths: Vec<_> = shares
        .iter()
        .filter_map(|share| share.path().map(Path::to_owned))
        .collect();
    let runtime = RuntimeDir::of(&host.config, uid);
    let notes: Vec<_> = shares
        .iter()
        .map(|share| runtime.share(share.name.as_str()))
        .collect();
    let of = Arc::clone(host);
    let beginning = host.pools.files.run(&paths, move || {
        let begun = shares.iter().map(|share| begin(&of, uid, share, begun_with));
        begun.collect::<Result<Vec<_>, _>>()
    });
    let serving = beginning.await??;
    // The record is written only while the caller waits: an abandoned start must not replace the
    // record of a later one.
    let noted = spawn_blocking(move || {
        for (path, serving) in notes.iter().zip(&serving) {
            if let Err(error) = note(path, serving.child.pid(), serving.inode) {
                tracing::warn!(%uid, path = %path.display(), %error, "note the process of a share");
            }
        }
        serving
    });
    noted.await.map_err(|error| Failure::internal(error.to_string()))
}

/// Starts the process of one share. Blocking.
fn begin(host: &Host, uid: Uuid, share: &Share, begun_with: Option<Inode>) -> Result<Serving, Failure> {
    let group = host.cgroups.as_ref().map(|parent| parent.group(uid).descriptor());
    let group: Option<OwnedFd> = group
        .transpose()
        .map_err(|error| Failure::internal(format!("open the VM's cgroup: {error}")))?;
    let opened = open(share, &host.sources())?;
    if begun_with.is_some_and(|inode| inode != opened.inode) {
        let message = format!(
            "share \"{}\": another directory has its path than at the VM's start: put it back, or restart the VM",
            share.name
        );
        return Err(Failure::precondition("SHARE_MOVED", message));
    }
    let executable = File::open(host.config.virtiofsd()).map_err(|error| {
        let message = format!(
            "share \"{}\": the program virtiofsd cannot be opened ({}): install vmmd again",
            share.name,
            text::words(&error)
        );
        Failure::precondition("SHARE_PROGRAM_MISSING", message)
    })?;
    let log = LogDir::of(&host.config, uid).vmm();
    let runtime = RuntimeDir::of(&host.config, uid);
    let started = File::options().append(true).open(log).and_then(|log| {
        start(
            &executable,
            share,
            &opened,
            &runtime.share_socket(SOCKETS.fetch_add(1, Ordering::Relaxed)),
            &log,
            group.as_ref().map(AsFd::as_fd),
        )
    });
    started.map_err(|error| {
        let message = format!("share \"{}\": start its process: {error}", share.name);
        Failure::internal(message)
    })
}

fn start(
    executable: &File,
    share: &Share,
    opened: &Opened,
    socket: &Path,
    log: &File,
    group: Option<BorrowedFd<'_>>,
) -> io::Result<Serving> {
    // The process takes a listening socket. The only connection to the socket exists before the
    // process starts.
    remove(socket)?;
    fault::step("make the socket of a share");
    let listener = UnixListener::bind(socket)?;
    let connected = UnixStream::connect(socket);
    remove(socket)?;
    let arguments = arguments(share, opened.squash);
    let namespaces = Namespaces {
        directory: opened.directory.as_fd(),
        uid_map: map(&opened.uids),
        gid_map: map(&opened.gids),
        open_files: share.open_files.saturating_add(RESERVED_FILES).into(),
    };
    let program = Program {
        executable: executable.as_fd(),
        arguments: &arguments,
        fds: &[listener.as_fd()],
        output: None,
        log: log.as_fd(),
        uid: 0,
        network: Network::Empty,
        cgroup: group,
        namespaces: Some(&namespaces),
    };
    fault::step("start the process of a share");
    Ok(Serving {
        socket: connected?.into(),
        child: clone::spawn(&program)?,
        inode: opened.inode,
    })
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// As `/proc/PID/uid_map` takes it (user_namespaces(7)).
fn map(ranges: &[vmmd_spec::share::IdRange]) -> String {
    let lines = ranges
        .iter()
        .map(|range| format!("{} {} {}\n", range.guest, range.node, range.count));
    lines.collect()
}

/// The command line. Its sandbox is a chroot: the namespaces are made already, and with them come the rights for it.
fn arguments(share: &Share, squash: bool) -> Vec<CString> {
    let cache = match share.cache {
        Cache::Auto => "auto",
        Cache::Always => "always",
        Cache::Never => "never",
    };
    let mut arguments = vec![
        "virtiofsd".to_owned(),
        format!("--fd={FIRST_FD}"),
        "--shared-dir=.".to_owned(),
        "--sandbox=chroot".to_owned(),
        "--seccomp=kill".to_owned(),
        "--inode-file-handles=never".to_owned(),
        "--log-level=warn".to_owned(),
        format!("--cache={cache}"),
        // Its limit is set by then.
        "--rlimit-nofile=0".to_owned(),
        // In a restored VM a file that is gone, or another one by now, is an error of that file alone.
        "--migration-on-error=guest-error".to_owned(),
        "--migration-verify-handles".to_owned(),
    ];
    let flags = [
        (share.read_only, "--readonly"),
        (share.writeback, "--writeback"),
        (share.xattr, "--xattr"),
        (share.posix_acl, "--posix-acl=auto"),
        // All ids of guests are the one that there is.
        (squash, "--translate-uid=squash-guest:0:0:4294967295"),
        (squash, "--translate-gid=squash-guest:0:0:4294967295"),
    ];
    let flags = flags.into_iter().filter(|(on, _)| *on);
    arguments.extend(flags.map(|(_, flag)| flag.to_owned()));
    arguments.into_iter().flat_map(CString::new).collect()
}

/// Descriptors that virtiofsd keeps from the guest out of its limit, and without which it does not begin: 509 regions of memory, 100 others and one for
/// each of its threads (`MAX_MEM_SLOTS`, `INTERNAL_FD_RESERVE` and `main` of its version 1.14.0, the one that `package/virtiofsd.sh` builds).
const RESERVED_FILES: u32 = 509 + 100 + 1;

/// Notes which process serves which directory, so that a later daemon finds both: the process's number and when it began, and the directory's device and
/// inode number.
fn note(path: &Path, pid: u32, Inode(device, number): Inode) -> io::Result<()> {
    let begun = begun(pid).ok_or(io::ErrorKind::NotFound)?;
    fault::step("note the process of a share");
    fs::write(path, format!("{pid} {begun} {device} {number}\n"))
}

/// Record of a share's process.
struct Note {
    pid: u32,
    begun: String,
    inode: Inode,
}

impl Note {
    fn read(path: &Path) -> Option<Self> {
        let text = fs::read_to_string(path).ok()?;
        let mut words = text.split_whitespace();
        Some(Self {
            pid: words.next()?.parse().ok()?,
            begun: words.next()?.to_owned(),
            inode: Inode(words.next()?.parse().ok()?, words.next()?.parse().ok()?),
        })
    }
}

/// The directory that was noted.
pub(super) fn noted_inode(path: &Path) -> Option<Inode> {
    Note::read(path).map(|note| note.inode)
}

/// The process that was noted, while it lives.
pub(super) fn find(path: &Path) -> Option<Process> {
    let note = Note::read(path)?;
    let process = Process::open(note.pid).ok()?;
    // The check follows the open of the pidfd, which refers to the process with this number.
    (begun(note.pid)? == note.begun).then_some(process)
}

/// Forgets the process that was noted, unless it is another one than `pid` by now.
pub(super) fn forget(path: &Path, pid: u32) {
    if Note::read(path).is_some_and(|note| note.pid == pid) {
        fault::step("forget the process of a share");
        let _gone_with_the_run = fs::remove_file(path);
    }
}

/// When a process began, in clock ticks since the node was started: field 22 of /proc/PID/stat (proc(5)).
fn begun(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field may have anything in it, but ends with the last parenthesis.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use vmmd_api::v1;
    use vmmd_spec::Violations;

    use super::*;

    fn words(wire: v1::ShareSpec, squash: bool) -> Vec<String> {
        let wire = v1::ShareSpec {
            name: "data".into(),
            path: "/srv/data".into(),
            ..wire
        };
        let share = Share::new(&mut Violations::default(), "", &wire).unwrap();
        let words = arguments(&share, squash);
        words
            .into_iter()
            .map(|word| word.into_string().unwrap())
            .collect()
    }

    #[test]
    fn the_command_line_names_no_path_and_says_what_the_spec_says() {
        let plain = words(v1::ShareSpec::default(), true);
        assert!(plain.iter().all(|word| !word.contains("/srv")));
        assert!(plain.contains(&"--cache=auto".to_owned()));
        assert!(plain.contains(&"--translate-uid=squash-guest:0:0:4294967295".to_owned()));
        assert!(
            !plain
                .iter()
                .any(|word| word.contains("readonly") || word.contains("xattr"))
        );
        let rich = v1::ShareSpec {
            read_only: true,
            writeback: true,
            xattr: true,
            cache: v1::ShareCache::Never.into(),
            ..Default::default()
        };
        let rich = words(rich, false);
        for word in ["--readonly", "--writeback", "--xattr", "--cache=never"] {
            assert!(rich.contains(&word.to_owned()), "{word}");
        }
        assert!(!rich.iter().any(|word| word.contains("translate")));
    }

    #[tokio::test]
    async fn process_is_found_unless_another_one_has_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("share-0");
        assert!(find(&path).is_none());
        let own = std::process::id();
        note(&path, own, Inode(7, 8)).unwrap();
        assert_eq!(find(&path).unwrap().pid(), own);
        assert_eq!(noted_inode(&path), Some(Inode(7, 8)));
        forget(&path, own + 1);
        assert!(path.exists(), "it is another one by now");
        fs::write(&path, format!("{own} 1 7 8\n")).unwrap();
        assert!(find(&path).is_none());
        forget(&path, own);
        assert!(!path.exists());
    }
}

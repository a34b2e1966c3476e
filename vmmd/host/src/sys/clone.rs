//! Starts a program in a process of its own without the daemon's rights.
//!
//! The module uses clone3(2) instead of `std::process::Command`. clone3 returns a pidfd without a
//! window in which the pid could be reused, and puts the child into its cgroup before it runs
//! (CLONE_INTO_CGROUP). The child is a copy of a multi-threaded process: until it executes the
//! program it may only make system calls on prepared data. No allocation, no lock, no unwinding.
//!
//! The child's descriptors are exactly `stdin` (/dev/null), `stdout`, `stderr` (the log) and those
//! of [`Program::fds`] from number 3 on, in order.

use std::{
    ffi::CString,
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
    sync::atomic::{AtomicBool, AtomicI32, Ordering},
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    process::{Resource, Rlimit, WaitId, WaitIdOptions},
    thread::{CapabilitySet, CapabilitySets, Gid, Uid, UnshareFlags},
};

/// Number of the first passed descriptor in the child.
pub const FIRST_FD: usize = 3;
/// Most descriptors that can be passed.
pub const MAX_FDS: usize = 10;
/// All descriptors are moved above this number before they get their own, so that none is overwritten by another.
const PARKED: RawFd = 64;

/// A program to run, with its rights.
#[derive(Debug)]
pub struct Program<'a> {
    /// The executable, open.
    pub executable: BorrowedFd<'a>,
    /// Arguments with the program's name first.
    pub arguments: &'a [CString],
    /// Descriptors it gets as 3, 4, …; at most [`MAX_FDS`].
    pub fds: &'a [BorrowedFd<'a>],
    /// Target of stdout; the log when `None`.
    pub output: Option<BorrowedFd<'a>>,
    /// Target of stderr.
    pub log: BorrowedFd<'a>,
    /// User and group id it runs as; not 0, unless it has namespaces.
    pub uid: u32,
    /// Its network; empty in any case when it has [`Self::namespaces`].
    pub network: Network,
    /// Directory of the cgroup v2 that it runs in.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// It is root of namespaces of its own.
    pub namespaces: Option<&'a Namespaces<'a>>,
}

/// The network of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// An empty network namespace of its own. It takes a user namespace, in which the program's user is not mapped: the program sees
    /// the kernel's overflow user (65534) as its own. Where the kernel refuses a namespace, or gives no rights in one, the program stays
    /// in the node's network and the daemon logs a warning.
    Empty,
    /// The network namespace of the thread that starts the program: that of the node, apart from threads that have entered another one.
    Node,
}

/// Namespaces of users, processes, network, IPC and names of the host (namespaces(7)). The program is root of them, with the rights that
/// serving a directory takes, over the mapped users alone.
#[derive(Debug)]
pub struct Namespaces<'a> {
    /// Its working directory.
    pub directory: BorrowedFd<'a>,
    /// As /proc/PID/uid_map takes it; 0 is mapped.
    pub uid_map: String,
    /// The same of groups.
    pub gid_map: String,
    /// Descriptors that it may have open. A daemon without CAP_SYS_RESOURCE can't give it more than it may have itself: it has as many then.
    pub open_files: u64,
}

/// A started process without a watcher. It is killed and reaped when this is dropped before
/// [`Child::watched`].
#[derive(Debug)]
pub struct Child {
    pid: u32,
    /// Names the process for good. Readable when it has ended.
    pidfd: Option<OwnedFd>,
}

impl Child {
    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Hands the process over to `watch`, which is given its pidfd. When that fails the process is killed.
    pub fn watched<T>(mut self, watch: impl FnOnce(u32, OwnedFd) -> io::Result<T>) -> io::Result<T> {
        let Some(pidfd) = &self.pidfd else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let watched = watch(self.pid, pidfd.try_clone()?)?;
        self.pidfd = None;
        Ok(watched)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let Some(pidfd) = self.pidfd.take() else { return };
        let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
        // Killed before it did anything: it ends at once.
        reap(&pidfd);
    }
}

/// The kernel makes user namespaces, and gives no rights in them.
static NO_RIGHTS: AtomicBool = AtomicBool::new(false);
/// Why a program gets no rights in a user namespace, and the next step.
const RESTRICTED: &str = "the kernel gives no rights in user namespaces (kernel.apparmor_restrict_unprivileged_userns): load the AppArmor \
                          profile /usr/share/vmmd/apparmor/vmmd and restart vmmd";

/// Starts `program`. Returns when the child executes it, or with the error of the child.
pub fn spawn(program: &Program<'_>) -> io::Result<Child> {
    if program.fds.len() > MAX_FDS || (program.uid == 0 && program.namespaces.is_none()) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let leaves = program.network == Network::Empty && program.namespaces.is_none();
    if !leaves || NO_RIGHTS.load(Ordering::Relaxed) {
        return attempt(program, Network::Node).map_err(|failed| failed.describe(program));
    }
    match attempt(program, Network::Empty) {
        // A security module may let a process make a user namespace and then take all rights in it. The process can not leave the
        // namespace, so another process begins.
        Err(failed) if failed.step == Some(Step::Rights) && failed.is_denied() => {
            let child = attempt(program, Network::Node).map_err(|failed| failed.describe(program))?;
            if !NO_RIGHTS.swap(true, Ordering::Relaxed) {
                tracing::warn!("programs stay in the node's network: {RESTRICTED}");
            }
            Ok(child)
        }
        result => result.map_err(|failed| failed.describe(program)),
    }
}

/// Why no program was executed.
#[derive(Debug)]
struct Failed {
    /// Of the child; `None` when there was no child, or the daemon could not do its part.
    step: Option<Step>,
    error: io::Error,
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self { step: None, error }
    }
}

impl From<Errno> for Failed {
    fn from(errno: Errno) -> Self {
        io::Error::from(errno).into()
    }
}

impl Failed {
    fn is_denied(&self) -> bool {
        self.error.raw_os_error() == Some(libc::EPERM)
    }

    fn describe(self, program: &Program<'_>) -> io::Error {
        let Some(step) = self.step else {
            return self.error;
        };
        let restricted = program.namespaces.is_some() && self.is_denied();
        let help = if restricted {
            format!(", perhaps because {RESTRICTED}")
        } else {
            String::new()
        };
        let message = format!("{}: {}{help}", step.name(), self.error);
        io::Error::new(self.error.kind(), message)
    }
}

/// The same in the given network.
fn attempt(program: &Program<'_>, network: Network) -> Result<Child, Failed> {
    let (report_read, report_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // The child waits until its users are mapped.
    let (go_read, go_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let arguments = program.arguments.iter().map(|argument| argument.as_ptr());
    let arguments: Vec<_> = arguments.chain([ptr::null()]).collect();
    let mut pidfd: RawFd = -1;
    let mut clone = clone_args(program, &mut pidfd);
    let size = size_of::<libc::clone_args>();
    // SAFETY: the arguments are initialised and of the given size; without CLONE_VM and with no
    // stack given, the child continues here with its own copy of memory, as after fork(2).
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut clone, size) };
    if pid == 0 {
        // SAFETY: this copy of the process does not use it; while it is open, the end of the daemon would not be seen.
        unsafe { libc::close(go_write.as_raw_fd()) };
        let pipes = (report_write.as_fd(), go_read.as_fd());
        let failed = become_program(program, network, pipes, &arguments);
        exit_child(report_write.as_fd(), failed);
    }
    if pid < 0 {
        return Err(io::Error::last_os_error().into());
    }
    drop(report_write);
    // SAFETY: CLONE_PIDFD has stored a new descriptor without another owner.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let mapped = program
        .namespaces
        .map_or(Ok(()), |namespaces| map_users(pid, namespaces));
    let goes = mapped.and_then(|()| Ok(rustix::io::write(&go_write, b"g")?));
    drop(go_write);
    if let Err(error) = goes {
        // Without the byte from the pipe the child ends.
        reap(&pidfd);
        return Err(io::Error::new(error.kind(), format!("map users: {error}")).into());
    }
    if let Some(failed) = failure(report_read) {
        reap(&pidfd);
        return Err(failed);
    }
    Ok(Child {
        pid: u32::try_from(pid).unwrap_or_default(),
        pidfd: Some(pidfd),
    })
}

/// The step that failed in the child; `None` when the child has executed the program, which closes the pipe.
fn failure(report: OwnedFd) -> Option<Failed> {
    let mut report = File::from(report);
    let mut line = [0; 5];
    while report.read_exact(&mut line).is_ok() {
        let [step, errno @ ..] = line;
        let error = io::Error::from_raw_os_error(i32::from_le_bytes(errno));
        let step = Step::read(step);
        if step != Step::Network {
            return Some(Failed {
                step: Some(step),
                error,
            });
        }
        tracing::warn!(%error, "a process stays in the node's network: the kernel gives it no namespace of its own");
    }
    None
}

/// Performs the steps that a child cannot do itself: maps the users and groups of its namespace,
/// and sets its limit of descriptors.
fn map_users(pid: libc::c_long, namespaces: &Namespaces<'_>) -> io::Result<()> {
    let number = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    limit_open_files(number, namespaces.open_files)?;
    std::fs::write(format!("/proc/{pid}/uid_map"), &namespaces.uid_map)?;
    std::fs::write(format!("/proc/{pid}/gid_map"), &namespaces.gid_map)
}

fn limit_open_files(pid: Option<rustix::process::Pid>, count: u64) -> Result<(), Errno> {
    let limit = |most| Rlimit {
        current: most,
        maximum: most,
    };
    match rustix::process::prlimit(pid, Resource::Nofile, limit(Some(count))) {
        Err(Errno::PERM) => {
            let own = rustix::process::getrlimit(Resource::Nofile).maximum;
            rustix::process::prlimit(pid, Resource::Nofile, limit(own)).map(drop)
        }
        limited => limited.map(drop),
    }
}

fn clone_args(program: &Program<'_>, pidfd: &mut RawFd) -> libc::clone_args {
    let cgroup = program.cgroup;
    // The daemon's signal handlers write into its own pipes: the child must not run them before the exec.
    let mut flags = u64::from(libc::CLONE_PIDFD.cast_unsigned()) | CLONE_CLEAR_SIGHAND;
    if cgroup.is_some() {
        flags |= CLONE_INTO_CGROUP;
    }
    if program.namespaces.is_some() {
        let all = libc::CLONE_NEWUSER
            | libc::CLONE_NEWPID
            | libc::CLONE_NEWNET
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS;
        flags |= u64::from(all.cast_unsigned());
    }
    // SAFETY: a structure of integers, for all of which 0 means "unused".
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags;
    args.pidfd = ptr::from_mut(pidfd) as u64;
    args.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    args.cgroup = cgroup.map_or(0, |fd| u64::from(fd.as_raw_fd().cast_unsigned()));
    args
}

/// Memory that a `vmm` may lock, in bytes: 1,024 rings (64 disks with 16 queues each) with room for their buffers.
const LOCKED_MEMORY: u64 = 256 << 20;

/// linux/sched.h; they don't fit into the C library's `int` constants.
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Waits for a child that has ended; nothing when it is none of ours.
pub fn reap(pidfd: impl AsFd) {
    let _ = rustix::process::waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED);
}

/// Step of the child before the exec, for the error message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Step {
    Namespaces,
    Session,
    Descriptors,
    Limits,
    Rights,
    User,
    /// The child continues without it.
    Network,
    Execute,
}

impl Step {
    /// The step with this number.
    fn read(number: u8) -> Self {
        let steps = [
            Self::Namespaces,
            Self::Session,
            Self::Descriptors,
            Self::Limits,
            Self::Rights,
            Self::User,
            Self::Network,
        ];
        let step = steps.into_iter().find(|step| *step as u8 == number);
        step.unwrap_or(Self::Execute)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Namespaces => "wait for its users",
            Self::Session => "begin a session",
            Self::Descriptors => "arrange descriptors",
            Self::Limits => "set limits",
            Self::Rights => "give up rights",
            Self::User => "change the user",
            Self::Network => "leave the node's network",
            Self::Execute => "execute the program",
        }
    }
}

/// In the child. Returns only when something failed.
fn become_program(
    program: &Program<'_>,
    network: Network,
    (report, go): (BorrowedFd<'_>, BorrowedFd<'_>),
    arguments: &[*const libc::c_char],
) -> (Step, Errno) {
    let steps = || {
        match rustix::io::retry_on_intr(|| rustix::io::read(go, &mut [0_u8])) {
            Ok(1) => {}
            result => return Err((Step::Namespaces, result.err().unwrap_or(Errno::PIPE))),
        }
        detach().map_err(|errno| (Step::Session, errno))?;
        let executable = arrange(program, report).map_err(|errno| (Step::Descriptors, errno))?;
        limits().map_err(|errno| (Step::Limits, errno))?;
        match program.namespaces {
            None => {
                change_user(program.uid).map_err(|errno| (Step::User, errno))?;
                leave_network(network)
                    .and_then(|()| drop_rights(CapabilitySet::empty()))
                    .and_then(|()| set_rights(CapabilitySet::empty()))
                    .map_err(|errno| (Step::Rights, errno))?;
            }
            Some(namespaces) => {
                rustix::thread::set_thread_groups(&[]).map_err(|errno| (Step::User, errno))?;
                drop_rights(FILE_RIGHTS).map_err(|errno| (Step::Rights, errno))?;
                become_root_of(namespaces).map_err(|errno| (Step::User, errno))?;
            }
        }
        Ok(executable)
    };
    match steps() {
        Ok(executable) => (Step::Execute, execute(executable, arguments)),
        Err(failed) => failed,
    }
}

fn detach() -> Result<(), Errno> {
    rustix::process::setsid()?;
    rustix::process::chdir(c"/")?;
    rustix::process::umask(Mode::from_raw_mode(0o077));
    // SAFETY: sets a disposition that has no handler. Rust's runtime ignores SIGPIPE, which an exec keeps.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    Ok(())
}

/// Moves every descriptor to its number and marks all others to be closed by the exec; returns the executable's.
fn arrange(program: &Program<'_>, report: BorrowedFd<'_>) -> Result<RawFd, Errno> {
    let null = rustix::fs::open(c"/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // The report's pipe too: a number below may be its own.
    let parked_report = park(report)?;
    let executable = park(program.executable)?;
    let parked_null = park(null.as_fd())?;
    // Before its number may become one of the program's descriptors.
    drop(null);
    let log = park(program.log)?;
    let output = park(program.output.unwrap_or(program.log))?;
    let mut parked = [-1; MAX_FDS];
    for (place, fd) in parked.iter_mut().zip(program.fds) {
        *place = park(*fd)?;
    }
    for (source, number) in [(parked_null, 0), (output, 1), (log, 2)] {
        put(source, number)?;
    }
    let mut number = 3;
    for source in parked.into_iter().take(program.fds.len()) {
        put(source, number)?;
        number += 1;
    }
    // The report's old number may have become one of the program's descriptors; `exit_child` uses the parked one.
    REPORT.store(parked_report, Ordering::Relaxed);
    // SAFETY: marks descriptors of this process only, and none that the program is to have.
    let result = unsafe { libc::syscall(libc::SYS_close_range, number, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    check(result)?;
    Ok(executable)
}

/// Where the child reports to; changed in the child's own copy of memory only.
static REPORT: AtomicI32 = AtomicI32::new(-1);

fn park(fd: BorrowedFd<'_>) -> Result<RawFd, Errno> {
    use std::os::fd::IntoRawFd;
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, PARKED)?.into_raw_fd())
}

fn put(source: RawFd, number: RawFd) -> Result<(), Errno> {
    // SAFETY: `number` has no owner here: this copy of the process only continues to the exec.
    let result = unsafe { libc::dup2(source, number) };
    check(result.into()).map(drop)
}

fn limits() -> Result<(), Errno> {
    // A core dump would hold the guest's memory.
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    rustix::process::setrlimit(Resource::Core, none)?;
    // Kernels before 5.12 count the rings of io_uring as locked memory of the user, all count registered buffers; the
    // usual limit of 64 KiB to 8 MiB is too little for many disks with many queues.
    let locked = rustix::process::getrlimit(Resource::Memlock);
    if locked.current.is_some_and(|bytes| bytes < LOCKED_MEMORY) {
        let enough = Rlimit {
            current: Some(LOCKED_MEMORY),
            maximum: locked.maximum.map(|maximum| maximum.max(LOCKED_MEMORY)),
        };
        // Without CAP_SYS_RESOURCE a higher hard limit is refused. The limit then stays, and disks
        // work without io_uring.
        let _ = rustix::process::setrlimit(Resource::Memlock, enough);
    }
    // The daemon may be protected from the OOM killer; a VM is not.
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty()) {
        let _ = rustix::io::write(&file, b"0");
    }
    Ok(())
}

/// Capabilities to serve a directory in a user namespace: access to files of all its users, and a
/// root directory of its own.
const FILE_RIGHTS: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SYS_CHROOT);

/// The namespace's root in the given directory, which it reaches with no other rights.
fn become_root_of(namespaces: &Namespaces<'_>) -> Result<(), Errno> {
    rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    rustix::process::fchdir(namespaces.directory)
}

/// Gives up all rights for good but those to be kept.
fn drop_rights(keep: CapabilitySet) -> Result<(), Errno> {
    rustix::thread::set_no_new_privs(true)?;
    rustix::thread::clear_ambient_capability_set()?;
    for bit in (0..64).filter(|bit| keep.bits() >> bit & 1 == 0) {
        match rustix::thread::remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << bit)) {
            // Beyond the last capability that the kernel knows.
            Err(Errno::INVAL) => break,
            result => result?,
        }
    }
    Ok(())
}

/// Becomes the user, and keeps the rights that it may take until [`set_rights`].
fn change_user(uid: u32) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(uid));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_keep_capabilities(true)?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)
}

/// Moves to an empty network. The daemon lacks CAP_SYS_ADMIN, which that takes, so the child makes a user namespace first. In this
/// namespace the child has all rights until it drops them.
fn leave_network(network: Network) -> Result<(), Errno> {
    if network == Network::Empty {
        #[allow(
            deprecated,
            reason = "the child has one thread and no table of descriptors is shared"
        )]
        match rustix::thread::unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNET) {
            #[cfg(test)]
            Ok(()) if tests::NO_RIGHTS_IN_NAMESPACES.load(Ordering::Relaxed) => return Err(Errno::PERM),
            Ok(()) => return Ok(()),
            Err(errno) => tell(Step::Network, errno),
        }
    }
    // The change of the user has left the right to drop others, but not in effect.
    set_rights(CapabilitySet::SETPCAP)
}

/// Has these rights at most, and these in effect.
fn set_rights(rights: CapabilitySet) -> Result<(), Errno> {
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: rights,
            permitted: rights,
            inheritable: CapabilitySet::empty(),
        },
    )
}

fn execute(executable: RawFd, arguments: &[*const libc::c_char]) -> Errno {
    let environment: [*const libc::c_char; 1] = [ptr::null()];
    // SAFETY: path, arguments and environment are NUL-terminated strings and null-terminated lists, which live in
    // this copy of the process until it is replaced.
    let result = unsafe {
        libc::syscall(
            libc::SYS_execveat,
            executable,
            c"".as_ptr(),
            arguments.as_ptr(),
            environment.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    check(result).err().unwrap_or(Errno::INVAL)
}

fn exit_child(report: BorrowedFd<'_>, (step, errno): (Step, Errno)) -> ! {
    if REPORT.load(Ordering::Relaxed) < 0 {
        REPORT.store(report.as_raw_fd(), Ordering::Relaxed);
    }
    tell(step, errno);
    // SAFETY: ends the child at once, without destructors and exit handlers of the daemon.
    unsafe { libc::_exit(127) }
}

/// Reports a failed step to the parent, over [`REPORT`].
fn tell(step: Step, errno: Errno) {
    let [a, b, c, d] = errno.raw_os_error().to_le_bytes();
    let bytes = [step as u8, a, b, c, d];
    // SAFETY: writes from an array of this length; whether it succeeds makes no difference to what follows.
    unsafe { libc::write(REPORT.load(Ordering::Relaxed), bytes.as_ptr().cast(), bytes.len()) };
}

fn check(result: libc::c_long) -> Result<libc::c_long, Errno> {
    if result < 0 {
        Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL))
    } else {
        Ok(result)
    }
}

#[cfg(test)]
mod tests;

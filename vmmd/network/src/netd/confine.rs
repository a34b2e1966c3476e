//! The sandbox of a helper. It keeps its sockets, one folder to read, and the system calls that answering packets takes.
//!
//! The daemon starts it with a user id of its own and without capabilities. The rest is given up here, before the first packet is read.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd},
};

use anyhow::Context as _;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, NetPort, PathBeneath, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, Scope,
};
use rustix::{
    process::{DumpableBehavior, Resource, Rlimit, chroot, fchdir, set_dumpable_behavior, setrlimit},
    thread::{CapabilitySet, CapabilitySets, UnshareFlags, set_capabilities},
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};

use super::streams;

/// Address space in bytes: the program, and the largest table twice over.
const MEMORY: u64 = 1 << 30;
/// Open descriptors: 48 sockets for name servers, 64 connections of guests for DNS and 32 for metadata, and those of a network.
const DESCRIPTORS: u64 = 192;

/// Calls that may have any arguments: packets, the clock, the allocator, log lines, and the end.
const CALLS: [libc::c_long; 30] = [
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    // The address of a client, and connections to name servers by sockets that are open.
    libc::SYS_accept4,
    libc::SYS_getpeername,
    libc::SYS_connect,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_lseek,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Gives up all that a helper does not need. The process has one thread. The table is read from `folder` by its name alone.
/// The socket `bound` sends on the interface that it is bound to, and nowhere else.
pub fn confine(folder: BorrowedFd<'_>, bound: Option<BorrowedFd<'_>>) -> anyhow::Result<()> {
    fchdir(folder).context("enter the network's folder")?;
    leave_network().context("leave the node's network")?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("clear the dumpable flag")?;
    for (resource, most) in [(Resource::As, MEMORY), (Resource::Nofile, DESCRIPTORS)] {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(resource, limit).with_context(|| format!("limit {resource:?}"))?;
    }
    close_in(folder, bound)
}

/// Moves to an empty network, and makes the working directory its root, where the kernel lets a user make namespaces.
fn leave_network() -> io::Result<()> {
    #[allow(deprecated, reason = "the process has one thread")]
    if let Err(error) = rustix::thread::unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNET) {
        eprintln!("the helper stays in the node's network: {error}");
        return Ok(());
    }
    // A kernel that lets a user make namespaces without rights in them refuses it. Landlock forbids files elsewhere too.
    if let Err(error) = chroot(".") {
        eprintln!("the helper keeps the node's root directory: {error}");
    }
    // In a user namespace of its own it has all rights until now.
    let none = CapabilitySet::empty();
    set_capabilities(
        None,
        CapabilitySets {
            effective: none,
            permitted: none,
            inheritable: none,
        },
    )?;
    Ok(())
}

/// Landlock and seccomp, of the calling thread.
fn close_in(folder: BorrowedFd<'_>, bound: Option<BorrowedFd<'_>>) -> anyhow::Result<()> {
    restrict(folder).context("restrict the helper with Landlock")?;
    apply_filter(&program(bound)?).context("limit the helper's system calls")
}

/// Files of the folder can be read, name servers can be reached by TCP, and packets can be sent by UDP. The rest of this kernel's Landlock is forbidden.
fn restrict(folder: BorrowedFd<'_>) -> anyhow::Result<()> {
    const NEWEST: ABI = ABI::V10;
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::BindTcp | AccessNet::ConnectTcp | AccessNet::BindUdp)?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .add_rule(PathBeneath::new(folder.as_fd(), AccessFs::ReadFile))?
        .add_rule(NetPort::new(streams::PORT, AccessNet::ConnectTcp))?
        .restrict_self()?;
    Ok(())
}

/// A call outside the list fails with EPERM: one guest's packet must not end the service of the other guests.
fn program(bound: Option<BorrowedFd<'_>>) -> anyhow::Result<BpfProgram> {
    let mut rules: BTreeMap<_, _> = CALLS.iter().map(|call| (*call, Vec::new())).collect();
    let flags = |bits: libc::c_int| u64::from(bits.cast_unsigned());
    // No executable memory, no file to write, no path, no other process.
    let executable = flags(libc::PROT_EXEC);
    let writes = flags(libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_PATH);
    let by_descriptor = flags(libc::AT_EMPTY_PATH);
    for (call, conditions) in [
        (libc::SYS_mmap, vec![masked(2, executable, 0)?]),
        (libc::SYS_mprotect, vec![masked(2, executable, 0)?]),
        (libc::SYS_openat, vec![masked(2, writes, 0)?]),
        (libc::SYS_statx, vec![masked(2, by_descriptor, by_descriptor)?]),
        (libc::SYS_fcntl, vec![equal(1, flags(libc::F_GETFD))?]),
        (
            libc::SYS_tgkill,
            vec![
                equal(0, std::process::id().into())?,
                equal(2, flags(libc::SIGABRT))?,
            ],
        ),
    ] {
        rules.insert(call, vec![SeccompRule::new(conditions)?]);
    }
    if let Some(bound) = bound {
        // A packet socket sends to any interface that the address names.
        let fd = u64::from(bound.as_raw_fd().cast_unsigned());
        let other = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, fd)?;
        rules.insert(libc::SYS_sendto, vec![SeccompRule::new(vec![other])?]);
    }
    let refused = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let filter = SeccompFilter::new(rules, refused, SeccompAction::Allow, TargetArch::x86_64)?;
    Ok(filter.try_into()?)
}

fn masked(argument: u8, mask: u64, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(
        argument,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::MaskedEq(mask),
        value,
    )
}

fn equal(argument: u8, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        net::{TcpListener, UdpSocket},
        os::unix::net::UnixDatagram,
        process::Command,
        thread,
    };

    use rustix::{
        fs::{MemfdFlags, Mode, OFlags, memfd_create, openat},
        net::{AddressFamily, SocketType, socket},
        process::{Pid, test_kill_process},
    };

    use super::*;

    type Deed = fn(BorrowedFd<'_>) -> io::Result<()>;

    /// Deeds of a helper that a packet has taken over.
    const DEEDS: [(&str, Deed); 15] = [
        ("open a file elsewhere", |_| File::open("/etc/passwd").map(drop)),
        ("make a file", |folder| {
            let flags = OFlags::WRONLY | OFlags::CREATE;
            Ok(openat(folder, "new", flags, Mode::RUSR).map(drop)?)
        }),
        ("change the table", |folder| {
            Ok(openat(folder, "table.json", OFlags::WRONLY, Mode::empty()).map(drop)?)
        }),
        ("remove the table", |folder| {
            Ok(rustix::fs::unlinkat(
                folder,
                "table.json",
                rustix::fs::AtFlags::empty(),
            )?)
        }),
        ("ask about a path", |_| fs::metadata("/etc/passwd").map(drop)),
        ("make a socket of TCP", |_| {
            TcpListener::bind("127.0.0.1:0").map(drop)
        }),
        ("make a socket of UDP", |_| {
            UdpSocket::bind("127.0.0.1:0").map(drop)
        }),
        ("make a socket of UNIX", |_| UnixDatagram::unbound().map(drop)),
        ("make a socket of netlink", |_| {
            Ok(socket(AddressFamily::NETLINK, SocketType::RAW, None).map(drop)?)
        }),
        ("execute a program", |_| {
            Command::new("/bin/true").status().map(drop)
        }),
        ("signal another process", |_| Ok(test_kill_process(Pid::INIT)?)),
        ("make a namespace", |_| {
            #[allow(deprecated, reason = "it is refused")]
            let made = rustix::thread::unshare(UnshareFlags::NEWUSER);
            Ok(made?)
        }),
        ("make a memory file", |_| {
            Ok(memfd_create("x", MemfdFlags::empty()).map(drop)?)
        }),
        ("make a thread", |_| {
            thread::Builder::new()
                .spawn(|| ())
                .map(|thread| drop(thread.join()))
        }),
        ("raise a limit", |_| {
            let none = Rlimit {
                current: None,
                maximum: None,
            };
            Ok(setrlimit(Resource::Nofile, none)?)
        }),
    ];

    /// Both restrict the thread that asks for them.
    #[test]
    fn confined_helper_can_not_do_forbidden_deeds() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("table.json"), "{}").unwrap();
        let open = File::open(folder.path()).unwrap();
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = client.local_addr().unwrap();
        let confined = thread::spawn(move || {
            let bound = UdpSocket::bind("127.0.0.1:0").unwrap();
            bound.connect(to).unwrap();
            close_in(open.as_fd(), Some(bound.as_fd())).unwrap();
            let refused = bound
                .send_to(b"elsewhere", to)
                .map_err(|error| error.raw_os_error());
            assert_eq!(refused, Err(Some(libc::EPERM)));
            assert_eq!(rustix::io::write(&bound, b"here").unwrap(), 4);
            let table = openat(&open, "table.json", OFlags::RDONLY, Mode::empty()).map(File::from);
            let facts = table.as_ref().map(File::metadata);
            let served = (matches!(facts, Ok(Ok(_))), server.send_to(b"answer", to).is_ok());
            let tried = DEEDS.map(|(name, deed)| (name, deed(open.as_fd())));
            (served, tried)
        });
        let (served, tried) = confined.join().unwrap();
        assert_eq!(served, (true, true), "what serving takes");
        for (name, result) in tried {
            let errno = result.err().and_then(|error| error.raw_os_error());
            assert!(
                matches!(errno, Some(libc::EPERM | libc::EACCES)),
                "{name}: {errno:?}"
            );
        }
        let mut answer = [0; 8];
        assert_eq!(client.recv(&mut answer).unwrap(), 4);
        assert_eq!(client.recv(&mut answer).unwrap(), 6);
    }
}

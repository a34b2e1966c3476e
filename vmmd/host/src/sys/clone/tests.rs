use std::{
    fs,
    io::{Seek, SeekFrom, Write as _},
    net::{SocketAddr, TcpListener},
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            fs::MetadataExt,
            net::{SocketAddr as UnixAddress, UnixListener},
        },
    },
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, addr::SocketAddrArg as _};

use super::*;

/// The child of this test finds itself without rights in its user namespace, as AppArmor does it.
pub(super) static NO_RIGHTS_IN_NAMESPACES: AtomicBool = AtomicBool::new(false);

/// Runs `/bin/sh -c script` as uid 1900000001 with `fds` in the node's network. Returns its output.
/// Needs root.
fn run(script: &str, fds: &[BorrowedFd<'_>]) -> String {
    let shell = File::open("/bin/sh").unwrap();
    execute_in(Network::Node, &shell, &["sh", "-c", script], fds)
}

/// The same of a program in one of the networks.
fn execute_in(network: Network, executable: &File, words: &[&str], fds: &[BorrowedFd<'_>]) -> String {
    let mut log = tempfile::tempfile().unwrap();
    let arguments: Vec<_> = words.iter().map(|word| CString::new(*word).unwrap()).collect();
    let program = Program {
        executable: executable.as_fd(),
        arguments: &arguments,
        fds,
        output: None,
        log: log.as_fd(),
        uid: 1_900_000_001,
        network,
        cgroup: None,
        namespaces: None,
    };
    let child = spawn(&program).unwrap();
    let pidfd = child.watched(|_, pidfd| Ok(pidfd)).unwrap();
    reap(&pidfd);
    let mut text = String::new();
    log.seek(SeekFrom::Start(0)).unwrap();
    log.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn the_program_has_its_own_user_and_no_rights() {
    let status = run(
        "while read -r line; do echo \"$line\"; done < /proc/self/status",
        &[],
    );
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name));
        let (_, value) = line
            .unwrap_or_else(|| panic!("{name} in {status}"))
            .split_once(':')
            .unwrap();
        value.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let own = ["1900000001"; 4].join(" ");
    assert_eq!(
        (field("Uid"), field("Gid"), field("Groups")),
        (own.clone(), own, String::new())
    );
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(set), "0".repeat(16), "{set}");
    }
    assert_eq!(field("NoNewPrivs"), "1");
}

/// The program of the next test. It tries to connect to the test by its own calls, and by a ring of io_uring, whose operations no
/// seccomp filter sees. The test's TCP port is in its first descriptor.
#[test]
#[ignore = "runs in a process that another test starts"]
fn reach_the_test() {
    // The harness has begun a line.
    println!();
    let mut port = String::new();
    // SAFETY: the test has passed this descriptor, and nothing else uses it.
    let mut file = unsafe { File::from_raw_fd(FIRST_FD.try_into().unwrap()) };
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_string(&mut port).unwrap();
    let tcp: SocketAddr = format!("127.0.0.1:{port}").parse().unwrap();
    let name = abstract_name(rustix::process::getppid().unwrap());
    let unix = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let kinds = [
        ("tcp", AddressFamily::INET, tcp.as_any()),
        ("unix", AddressFamily::UNIX, unix.as_any()),
    ];
    for (name, family, address) in kinds {
        let socket = rustix::net::socket(family, SocketType::STREAM, None).unwrap();
        let connected = rustix::net::connect(&socket, &address).map_err(Errno::raw_os_error);
        println!("call {name} {}", connected.err().unwrap_or(0));
        let socket = in_ring(IORING_OP_SOCKET, family.as_raw().into(), 1, 0, 0);
        let (start, length) = (address.as_ptr() as u64, address.addr_len());
        let connected = in_ring(IORING_OP_CONNECT, socket, length.into(), start, 0);
        println!("ring {name} {}", -connected);
    }
    let interfaces = fs::read_to_string("/proc/self/net/dev").unwrap();
    let lo_alone = interfaces
        .lines()
        .skip(2)
        .all(|line| line.trim().starts_with("lo:"));
    println!("lo alone {lo_alone}");
}

fn abstract_name(pid: rustix::process::Pid) -> String {
    format!("vmmd-test-{}", pid.as_raw_nonzero())
}

// linux/io_uring.h.
const IORING_OP_CONNECT: u8 = 16;
const IORING_OP_SOCKET: u8 = 45;
const IORING_ENTER_GETEVENTS: libc::c_uint = 1;
const PAGE: usize = 4096;
const IORING_OFF_SQES: i64 = 0x1000_0000;

/// The result of one operation in a new ring of one entry (io_uring(7)): the fields of its entry are descriptor, offset, address and
/// length.
#[allow(clippy::cast_possible_truncation, reason = "halves of 64 bits")]
fn in_ring(operation: u8, fd: i32, offset: u64, address: u64, length: u32) -> i32 {
    // The fields of struct io_uring_params, in words: flags is 2, sq_off begins at 10, cq_off at 20.
    let mut parameters = [0_u32; 30];
    // SAFETY: the kernel reads and writes a structure of that size.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    let ring = i32::try_from(ring).unwrap();
    assert!(ring >= 0, "io_uring_setup: {}", io::Error::last_os_error());
    // The rings of one entry fit into a page.
    let map = |offset| {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe { libc::mmap(ptr::null_mut(), PAGE, access, libc::MAP_SHARED, ring, offset) };
        assert_ne!(memory, libc::MAP_FAILED);
        memory.cast::<u32>()
    };
    let words = |page: *mut u32| {
        // SAFETY: a page of integers that stays mapped, of which one slice is in use at a time.
        unsafe { std::slice::from_raw_parts_mut(page, PAGE / 4) }
    };
    let (rings, entries) = (map(0), map(IORING_OFF_SQES));
    let halves = |value: u64| [value as u32, (value >> 32) as u32];
    let entry = words(entries);
    entry[..2].copy_from_slice(&[operation.into(), fd.cast_unsigned()]);
    entry[2..4].copy_from_slice(&halves(offset));
    entry[4..6].copy_from_slice(&halves(address));
    entry[6] = length;
    let field = |index: usize| parameters[index] as usize / 4;
    words(rings)[field(16)] = 0;
    words(rings)[field(11)] = 1;
    // SAFETY: the kernel reads the entry and writes its completion, while no slice of both is in use.
    let entered =
        unsafe { libc::syscall(libc::SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, 0, 0) };
    assert_eq!(entered, 1, "{}", io::Error::last_os_error());
    words(rings)[field(25) + 2].cast_signed()
}

#[test]
fn program_in_an_empty_network_reaches_no_socket_of_the_node() {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = abstract_name(rustix::process::getpid());
    let address = UnixAddress::from_abstract_name(name).unwrap();
    let _unix = UnixListener::bind_addr(&address).unwrap();
    let mut port = tempfile::tempfile().unwrap();
    write!(port, "{}", tcp.local_addr().unwrap().port()).unwrap();
    let own = File::open("/proc/self/exe").unwrap();
    let test = "sys::clone::tests::reach_the_test";
    let reached = |network| {
        let words = [
            "test",
            "--exact",
            test,
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ];
        let said = execute_in(network, &own, &words, &[port.as_fd()]);
        let lines = said.lines().filter(|line| {
            let words = ["call ", "ring ", "lo alone "];
            words.iter().any(|word| line.starts_with(word))
        });
        lines.collect::<Vec<_>>().join(", ")
    };
    let all = "call tcp 0, ring tcp 0, call unix 0, ring unix 0";
    assert!(
        reached(Network::Node).starts_with(all),
        "{}",
        reached(Network::Node)
    );
    let (unreachable, refused) = (libc::ENETUNREACH, libc::ECONNREFUSED);
    let none = format!(
        "call tcp {unreachable}, ring tcp {unreachable}, call unix {refused}, ring unix {refused}, lo alone true"
    );
    assert_eq!(reached(Network::Empty), none);
}

#[test]
fn program_without_rights_in_namespaces_keeps_the_network() {
    let network = |file: &str| fs::read_link(file).unwrap().to_string_lossy().into_owned();
    let shell = File::open("/bin/sh").unwrap();
    let script =
        "readlink /proc/self/ns/net; while read -r line; do echo \"$line\"; done < /proc/self/status";
    let said = || execute_in(Network::Empty, &shell, &["sh", "-c", script], &[]);
    assert!(!said().starts_with(&network("/proc/self/ns/net")));
    NO_RIGHTS_IN_NAMESPACES.store(true, Ordering::Relaxed);
    let said_then = said();
    assert!(
        said_then.starts_with(&network("/proc/self/ns/net")),
        "{said_then}"
    );
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        let none = format!("\n{set}:\t{}\n", "0".repeat(16));
        assert!(said_then.contains(&none), "{said_then}");
    }
    // The next program does without the attempt.
    NO_RIGHTS_IN_NAMESPACES.store(false, Ordering::Relaxed);
    assert!(said().starts_with(&network("/proc/self/ns/net")));
    NO_RIGHTS.store(false, Ordering::Relaxed);
}

#[test]
fn program_in_an_empty_network_has_no_rights_and_its_own_user() {
    let log = tempfile::tempfile().unwrap();
    let shell = File::open("/bin/sh").unwrap();
    let program = Program {
        executable: shell.as_fd(),
        arguments: &[c"sh".into(), c"-c".into(), c"kill -STOP $$".into()],
        fds: &[],
        output: None,
        log: log.as_fd(),
        uid: 1_900_000_001,
        network: Network::Empty,
        cgroup: None,
        namespaces: None,
    };
    let child = spawn(&program).unwrap();
    let seen = |pid: &str, name: &str| fs::read_link(format!("/proc/{pid}/ns/{name}")).unwrap();
    let pid = child.pid.to_string();
    for name in ["net", "user"] {
        assert_ne!(seen(&pid, name), seen("self", name), "{name}");
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let own = format!("\nUid:{}\n", "\t1900000001".repeat(4));
    assert!(status.contains(&own), "{status}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert!(
            status.contains(&format!("\n{set}:\t{}\n", "0".repeat(16))),
            "{status}"
        );
    }
    assert!(status.contains("\nNoNewPrivs:\t1\n"), "{status}");
}

#[test]
fn the_program_has_exactly_its_descriptors_in_order() {
    let (a, b) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    // Inheritable on purpose: must not get through.
    let stray = rustix::io::fcntl_dupfd_cloexec(&a, 100).unwrap();
    rustix::io::fcntl_setfd(&stray, rustix::io::FdFlags::empty()).unwrap();
    let text = run(
        "echo /proc/self/fd/*; echo a >&3; echo b >&4",
        &[a.as_fd(), b.as_fd()],
    );
    drop(stray);
    let numbers: Vec<_> = text
        .split_whitespace()
        .map(|path| path.rsplit('/').next().unwrap())
        .collect();
    // The directory that the shell reads is one more, and gone afterwards.
    assert!(
        numbers.starts_with(&["0", "1", "2", "3", "4"]) && numbers.len() <= 6,
        "{text}"
    );
    assert_eq!(
        (a.metadata().unwrap().size(), b.metadata().unwrap().size()),
        (2, 2)
    );
}

#[test]
fn the_program_has_no_environment_and_a_session_of_its_own() {
    let text = run(
        "export -p; read -r pid comm state ppid pgrp session rest < /proc/self/stat; echo $pid $session",
        &[],
    );
    let ids = text.lines().last().unwrap();
    let (pid, session) = ids.split_once(' ').unwrap();
    assert_eq!(pid, session);
    assert!(!text.contains("PATH=/") && !text.contains("HOME"), "{text}");
}

#[test]
fn what_cannot_be_executed_is_an_error_that_says_so_and_leaves_no_process() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let open = File::open(file.path()).unwrap();
    let log = tempfile::tempfile().unwrap();
    let program = Program {
        executable: open.as_fd(),
        arguments: &[c"x".into()],
        fds: &[],
        output: None,
        log: log.as_fd(),
        uid: 1_900_000_001,
        network: Network::Empty,
        cgroup: None,
        namespaces: None,
    };
    let error = spawn(&program).unwrap_err().to_string();
    assert!(error.starts_with("execute the program"), "{error}");
    let children = fs::read_to_string(format!(
        "/proc/self/task/{}/children",
        rustix::thread::gettid().as_raw_nonzero()
    ));
    assert_eq!(children.unwrap_or_default(), "");
}

#[test]
fn root_is_refused() {
    let file = tempfile::tempfile().unwrap();
    let program = Program {
        executable: file.as_fd(),
        arguments: &[],
        fds: &[],
        output: None,
        log: file.as_fd(),
        uid: 0,
        network: Network::Empty,
        cgroup: None,
        namespaces: None,
    };
    assert!(spawn(&program).is_err());
}

#[test]
fn a_child_that_nobody_watches_is_killed_and_reaped() {
    let (log, shell) = (tempfile::tempfile().unwrap(), File::open("/bin/sh").unwrap());
    let start = || {
        let program = Program {
            executable: shell.as_fd(),
            arguments: &[c"sh".into(), c"-c".into(), c"sleep 1000".into()],
            fds: &[],
            output: None,
            log: log.as_fd(),
            uid: 1_900_000_001,
            network: Network::Empty,
            cgroup: None,
            namespaces: None,
        };
        spawn(&program).unwrap()
    };
    let child = start();
    let pid = child.pid;
    drop(child);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    let child = start();
    let pid = child.pid;
    let watched = child.watched(|_, _| Err::<(), _>(io::ErrorKind::Other.into()));
    assert!(watched.is_err());
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn a_program_in_namespaces_is_root_of_the_mapped_users_alone() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(folder.path(), Some(1_900_000_002), Some(1_900_000_003)).unwrap();
    let directory = File::open(folder.path()).unwrap();
    fs::write(folder.path().join("of-root"), "").unwrap();
    let mut log = tempfile::tempfile().unwrap();
    let shell = File::open("/bin/sh").unwrap();
    let script = "echo $$ $(id -u) $(id -g); echo made >made; mknod null c 1 3 2>/dev/null && echo device; chown 0 of-root 2>/dev/null && echo taken; \
                  kill -0 1 && echo itself; cat /proc/self/setgroups; ulimit -n; ulimit -Hn";
    let namespaces = Namespaces {
        directory: directory.as_fd(),
        uid_map: "0 1900000002 1\n".into(),
        gid_map: "0 1900000003 1\n".into(),
        open_files: 300,
    };
    let program = Program {
        executable: shell.as_fd(),
        arguments: &[c"sh".into(), c"-c".into(), CString::new(script).unwrap()],
        fds: &[],
        output: None,
        log: log.as_fd(),
        uid: 0,
        network: Network::Empty,
        cgroup: None,
        namespaces: Some(&namespaces),
    };
    let child = spawn(&program).unwrap();
    let pidfd = child.watched(|_, pidfd| Ok(pidfd)).unwrap();
    reap(&pidfd);
    let mut text = String::new();
    log.seek(SeekFrom::Start(0)).unwrap();
    log.read_to_string(&mut text).unwrap();
    // The program is process 1 and can signal only itself. It cannot create a device or take a file
    // of the node's root.
    assert_eq!(text, "1 0 0\nitself\nallow\n300\n300\n");
    let made = fs::metadata(folder.path().join("made")).unwrap();
    assert_eq!((made.uid(), made.gid()), (1_900_000_002, 1_900_000_003));
    assert_eq!(fs::metadata(folder.path().join("of-root")).unwrap().uid(), 0);
}

#[test]
fn users_that_can_not_be_mapped_are_an_error_and_leave_no_process() {
    let folder = tempfile::tempdir().unwrap();
    let directory = File::open(folder.path()).unwrap();
    let log = tempfile::tempfile().unwrap();
    let shell = File::open("/bin/sh").unwrap();
    let namespaces = Namespaces {
        directory: directory.as_fd(),
        uid_map: "0 1900000002 0\n".into(),
        gid_map: "0 1900000003 1\n".into(),
        open_files: 300,
    };
    let program = Program {
        executable: shell.as_fd(),
        arguments: &[c"sh".into()],
        fds: &[],
        output: None,
        log: log.as_fd(),
        uid: 0,
        network: Network::Empty,
        cgroup: None,
        namespaces: Some(&namespaces),
    };
    let error = spawn(&program).unwrap_err().to_string();
    assert!(error.starts_with("map users"), "{error}");
}

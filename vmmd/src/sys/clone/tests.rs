use std::{
    fs,
    io::{Seek, SeekFrom},
    os::unix::fs::MetadataExt,
};

use super::*;

/// Runs `/bin/sh -c script` as uid 1900000001 with `fds`; returns what it printed. Needs root.
fn run(script: &str, fds: &[BorrowedFd<'_>]) -> String {
    let mut log = tempfile::tempfile().unwrap();
    let shell = File::open("/bin/sh").unwrap();
    let arguments = [c"sh".into(), c"-c".into(), CString::new(script).unwrap()];
    let program = Program {
        executable: shell.as_fd(),
        arguments: &arguments,
        fds,
        output: None,
        log: log.as_fd(),
        uid: 1_900_000_001,
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
        cgroup: None,
        namespaces: Some(&namespaces),
    };
    let child = spawn(&program).unwrap();
    let pidfd = child.watched(|_, pidfd| Ok(pidfd)).unwrap();
    reap(&pidfd);
    let mut text = String::new();
    log.seek(SeekFrom::Start(0)).unwrap();
    log.read_to_string(&mut text).unwrap();
    // It is process 1, and has nobody else to signal; it makes no device and takes no file of the node's root.
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
        cgroup: None,
        namespaces: Some(&namespaces),
    };
    let error = spawn(&program).unwrap_err().to_string();
    assert!(error.starts_with("map users"), "{error}");
}

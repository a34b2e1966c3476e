//! The fork.

use std::{
    ffi::CString,
    fs::File,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixListener,
    },
};

use vmmd_host::{
    failure::Failure,
    sys::clone::{self, FIRST_FD, Network, Program},
};

use super::failures::failed;

pub(super) struct Spawn {
    pub(super) executable: File,
    pub(super) control: UnixListener,
    pub(super) console: UnixListener,
    pub(super) exit: File,
    pub(super) lock: File,
    pub(super) log: File,
    pub(super) group: Option<OwnedFd>,
    /// The `vmm` ends when the other end is closed.
    pub(super) lifeline: Option<OwnedFd>,
    pub(super) uid: u32,
}

/// Forks the `vmm`. The daemon's copies of the descriptors are closed when `Spawn` is dropped,
/// above all the lock's.
pub(super) fn spawn(spawn: &Spawn) -> Result<clone::Child, Failure> {
    let passed = [
        ("--control-fd", Some(spawn.control.as_fd())),
        ("--console-fd", Some(spawn.console.as_fd())),
        ("--exit-fd", Some(spawn.exit.as_fd())),
        ("--lock-fd", Some(spawn.lock.as_fd())),
        ("--lifeline-fd", spawn.lifeline.as_ref().map(AsFd::as_fd)),
    ];
    let passed = passed.into_iter().filter_map(|(option, fd)| Some((option, fd?)));
    let (options, fds): (Vec<_>, Vec<_>) = passed.unzip();
    let mut arguments = vec![c"vmm".to_owned(), c"serve".to_owned()];
    for (number, option) in (FIRST_FD..).zip(options) {
        arguments.extend(CString::new(option).ok());
        arguments.extend(CString::new(number.to_string()).ok());
    }
    let program = Program {
        executable: spawn.executable.as_fd(),
        arguments: &arguments,
        fds: &fds,
        output: None,
        log: spawn.log.as_fd(),
        uid: spawn.uid,
        network: Network::Empty,
        cgroup: spawn.group.as_ref().map(AsFd::as_fd),
        namespaces: None,
    };
    clone::spawn(&program).map_err(|error| failed("start the vmm", &error))
}

//! A `vmm` without KVM: the private protocol, the console, the lock and the exit record are as in
//! the real one, the guest is a few commands.
//!
//! Words of the kernel command line choose its behavior:
//!
//! - `mock.power=ignore`: the guest does nothing when its power button is pressed.
//! - `mock.boot=image|kvm|exit|hang|stick:PATH`: `Boot` is refused, the process ends, or no answer
//!   follows (and PATH is accessed).
//! - `mock.pause=hang|fade`: `Pause` is never answered, or the process ends as by `fade`.
//! - `mock.alone=WORD`: `Boot` is refused while a machine of the same name with the same word runs.
//! - `mock.exclusive=PATH`: see [`guest::Guest::runs`].
//! - `mock.attach`, `mock.eject`, `mock.limit`, `mock.stats`: see [`disks`]. `mock.event=none`: no
//!   event about an ejected disk. `mock.resume=fails`: a disk fails again in the moment of a
//!   resume.
//!
//! An executable called `silent` never answers, one called `old` speaks minor version 1. A reset by
//! request is echoed as `reset by the host`. Lines typed on the console are commands to the guest:
//! `open` and `close` (the channel of the agent), `poweroff`, `panic`, `crash`, `error`, `abort`, `fade` (its control connections end, a moment
//! later the process), `reset`, `print N` (N bytes), `pause` (on its own), `eject NAME`,
//! `fail NAME` (a disk reports an error), `stall NAME` (a disk pauses the machine), `machine`
//! (prints its configuration), `deaf` (reads no more from this console until another one has typed
//! `hear`, and then prints the number of waiting bytes), `fork` (leaves a child behind),
//! `stick PATH` (accesses a file system), `lie WORD` (sends messages that no `vmm` sends, see
//! [`lies`]); all others are echoed. Called `virtiofsd` it serves a share, see [`share`];
//! called `swtpm` a TPM, see [`tpm`].
#![allow(clippy::unwrap_used, reason = "a test's helper may fail loudly")]

mod balloon;
mod console;
mod control;
mod disks;
mod guest;
mod lies;
mod nics;
mod share;
mod shares;
mod snapshot;
mod tpm;
mod vsock;

use std::{
    env,
    fs::File,
    os::fd::{FromRawFd, OwnedFd},
    os::unix::net::UnixListener,
    sync::Arc,
    thread,
};

use guest::Guest;
use rustix::event::{PollFd, PollFlags, poll};
use vmm_protocol::vmm::ExitKind;

fn main() {
    match env::args().next().as_deref() {
        Some("virtiofsd") => share::run(),
        Some("swtpm") => tpm::run(),
        _ => {}
    }
    let fd = |option: &str| {
        let number = env::args()
            .skip_while(|argument| argument != option)
            .nth(1)
            .unwrap();
        owned(number.parse().unwrap())
    };
    let listener = |option: &str| {
        let fd = fd(option);
        // Makes this process the peer of later connections.
        rustix::net::listen(&fd, 128).unwrap();
        UnixListener::from(fd)
    };
    let (control, console) = (listener("--control-fd"), listener("--console-fd"));
    let _lock_for_life = fd("--lock-fd");
    let guest = Arc::new(Guest::new(File::from(fd("--exit-fd"))));
    if env::current_exe().unwrap().ends_with("silent") {
        loop {
            thread::park();
        }
    }
    if env::args().any(|argument| argument == "--lifeline-fd") {
        let (lifeline, of_lifeline) = (fd("--lifeline-fd"), Arc::clone(&guest));
        thread::spawn(move || {
            let mut fds = [PollFd::new(&lifeline, PollFlags::empty())];
            poll(&mut fds, None).unwrap();
            of_lifeline.end(ExitKind::LifelineClosed, "the launcher of the VM's pod has ended");
        });
    }
    let of_console = Arc::clone(&guest);
    thread::spawn(move || console::listen(&of_console, &console));
    for stream in control.incoming() {
        let guest = Arc::clone(&guest);
        thread::spawn(move || control::serve(&guest, &Arc::new(stream.unwrap())));
    }
}

#[allow(unsafe_code)]
fn owned(number: i32) -> OwnedFd {
    // SAFETY: the descriptor was passed to this process for this use, and each is taken once.
    unsafe { OwnedFd::from_raw_fd(number) }
}

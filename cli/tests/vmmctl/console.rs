//! The console, on pipes and on a terminal.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::{fd::OwnedFd, unix::process::ExitStatusExt as _},
    process::{Child, Command, Stdio},
};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Termios, tcgetattr},
};
use vmmd_api::v1::VmPhase;

use crate::support::{Daemon, done, failed, run, run_with_input};

fn daemon() -> Daemon {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    daemon.state.put("off", VmPhase::Stopped, &[]);
    daemon
}

fn command(daemon: &Daemon, name: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmmctl"));
    command.args(["console", name]).env("VMMD_SOCKET", &daemon.socket);
    command
}

#[test]
fn a_script_types_through_a_pipe_reads_the_answer_and_leaves() {
    let daemon = daemon();
    let mut running = daemon.begin(&["console", "web"]);
    assert_eq!(running.line(), "old output");
    running.input.write_all(b"hello\n").unwrap();
    assert_eq!(running.line(), "HELLO");
    running.input.write_all(b"bye\n\x1d").unwrap();
    assert_eq!(running.line(), "BYE");
    assert_eq!(running.end(), (Some(0), String::new(), String::new()));
}

#[test]
fn everything_typed_before_the_escape_reaches_the_guest() {
    let daemon = daemon();
    let typed = run_with_input(&daemon, &["console", "web", "--no-replay"], "poweroff\n\x1d");
    assert_eq!(typed, done("POWEROFF\n"));
    assert_eq!(daemon.state.calls(), ["input poweroff\n"]);
}

#[test]
fn the_end_of_the_run_ends_the_console() {
    let daemon = daemon();
    assert_eq!(run_with_input(&daemon, &["console", "web"], "halt\n").0, 0);
}

#[test]
fn console_of_a_stopped_vm_shows_old_output_and_fails() {
    let daemon = daemon();
    let text = "The console of vm/off was closed: the VM is not running.\nerror: vm/off does not run: this is the output of \
                its last run; `vmmctl start off`\n";
    let shown = (5, "old output\r\n".to_owned(), text.to_owned());
    assert_eq!(run(&daemon, &["console", "off"]), shown);
}

#[test]
fn console_continues_after_a_restart_of_the_daemon() {
    let mut daemon = daemon();
    let mut running = daemon.begin(&["console", "web"]);
    assert_eq!(running.line(), "old output");
    running.input.write_all(b"hello\n").unwrap();
    assert_eq!(running.line(), "HELLO");
    daemon.restart();
    daemon.state.print("web", b"meanwhile\n");
    while daemon.state.consoles() < 2 {
        std::thread::yield_now();
    }
    assert_eq!(running.line(), "meanwhile");
    running.input.write_all(b"again\n\x1d").unwrap();
    assert_eq!(running.line(), "AGAIN");
    let said = "\nlost the connection to vmmd; continuing when vmmd is back\n";
    assert_eq!(running.end(), (Some(0), String::new(), said.to_owned()));
}

#[test]
fn the_console_of_an_unknown_vm_is_refused() {
    let daemon = daemon();
    let text = "error: there is no VM \"nope\"; `vmmctl get vm` lists the VMs\n";
    assert_eq!(run(&daemon, &["console", "nope"]), failed(3, text));
}

#[test]
fn which_console_is_opened_and_for_what_is_said_by_options() {
    let daemon = daemon();
    let run = |arguments: &[&str]| {
        let console = [&["console", "web"], arguments].concat();
        assert_eq!(run_with_input(&daemon, &console, "\x1d").0, 0);
    };
    run(&["--hvc"]);
    run(&["--hvc", "--read-only"]);
    run(&["--hvc", "--exclusive", "--force"]);
    run(&["--serial", "--send-break"]);
    let calls = [
        "open Virtio Shared force=false",
        "open Virtio ReadOnly force=false",
        "open Virtio Exclusive force=true",
        "input <break>",
    ];
    assert_eq!(daemon.state.calls(), calls);
}

#[test]
fn held_console_is_refused_and_taken_by_force() {
    let daemon = daemon();
    daemon.state.put("held", VmPhase::Running, &[]);
    let (code, _, text) = run(&daemon, &["console", "held"]);
    assert_eq!(code, 5);
    assert!(
        text.contains("another client types there (ann, for 3 s)"),
        "{text}"
    );
    let (code, _, text) = run_with_input(&daemon, &["console", "held", "--force"], "lose it\n\x1d");
    assert_eq!(code, 0);
    assert!(
        text.contains("ann has taken over the console; input from here is ignored"),
        "{text}"
    );
}

/// A pseudo terminal with vmmctl's console on it.
struct Terminal {
    master: File,
    slave: OwnedFd,
    child: Child,
    unread: Vec<u8>,
    before: Termios,
}

impl Terminal {
    fn start(daemon: &Daemon) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = File::options()
            .read(true)
            .write(true)
            .open(name.to_str().unwrap())
            .unwrap();
        let before = tcgetattr(&slave).unwrap();
        let stdio = || Stdio::from(slave.try_clone().unwrap());
        let child = command(daemon, "web")
            .stdin(stdio())
            .stdout(stdio())
            .stderr(stdio())
            .spawn()
            .unwrap();
        Self {
            master: master.into(),
            slave: slave.into(),
            child,
            unread: Vec::new(),
            before,
        }
    }

    /// Reads until `text` was printed, and discards it and all output before it.
    fn expect(&mut self, text: &str) {
        let mut buffer = [0; 256];
        loop {
            let seen = String::from_utf8_lossy(&self.unread).into_owned();
            if let Some((_, rest)) = seen.split_once(text) {
                self.unread = rest.as_bytes().to_vec();
                return;
            }
            let length = self.master.read(&mut buffer).unwrap();
            assert_ne!(length, 0, "the terminal ended before {text:?}: {seen:?}");
            self.unread.extend_from_slice(&buffer[..length]);
        }
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.slave)
            .unwrap()
            .local_modes
            .contains(LocalModes::ICANON)
    }

    fn assert_restored(&self) {
        let now = tcgetattr(&self.slave).unwrap();
        assert_eq!(now.local_modes, self.before.local_modes);
        assert_eq!(now.input_modes, self.before.input_modes);
        assert_eq!(now.output_modes, self.before.output_modes);
    }
}

#[test]
fn a_terminal_is_raw_while_attached_and_restored_when_left() {
    let daemon = daemon();
    let mut terminal = Terminal::start(&daemon);
    terminal.expect("Press ^] to leave.");
    terminal.expect("old output");
    assert!(terminal.is_raw());
    // ^C is the guest's while attached.
    terminal.master.write_all(b"\x03x").unwrap();
    terminal.expect("\x03X");
    terminal.master.write_all(b"\x1d").unwrap();
    terminal.expect("Left the console of vm/web.");
    assert!(terminal.child.wait().unwrap().success());
    terminal.assert_restored();
}

#[test]
fn a_terminal_is_restored_when_the_run_ends() {
    let daemon = daemon();
    let mut terminal = Terminal::start(&daemon);
    terminal.expect("old output");
    terminal.master.write_all(b"halt").unwrap();
    terminal.expect("The console of vm/web was closed: the guest powered off.");
    assert!(terminal.child.wait().unwrap().success());
    terminal.assert_restored();
}

#[test]
fn a_terminal_is_restored_when_the_daemon_dies() {
    let daemon = daemon();
    let mut terminal = Terminal::start(&daemon);
    terminal.expect("old output");
    drop(daemon);
    terminal.expect("error: ");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(7));
    terminal.assert_restored();
}

#[test]
fn a_terminal_is_restored_by_signals_that_end_the_program() {
    use rustix::process::{Pid, Signal, kill_process};
    for signal in [Signal::TERM, Signal::HUP, Signal::INT, Signal::QUIT] {
        let daemon = daemon();
        let mut terminal = Terminal::start(&daemon);
        terminal.expect("old output");
        kill_process(Pid::from_child(&terminal.child), signal).unwrap();
        let status = terminal.child.wait().unwrap();
        assert_eq!(
            status.code(),
            Some(128 + signal.as_raw()),
            "{:?}",
            status.signal()
        );
        terminal.assert_restored();
    }
}

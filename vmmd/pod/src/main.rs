//! `vmmd-pod`: the launcher of a VM in its pod. It passes the pod's descriptors to the vmmd of the node, shows the VM's serial
//! console, and ends when the VM has ended. It has no rights and starts no process.
//!
//! One thread waits with poll(2) for the connection, signals, the terminal and readiness probes. While the launcher lives, it
//! keeps the write end of the *lifeline*, a pipe; the `vmm` ends when that is closed. The launcher replaces a lost connection:
//! vmmd was restarted, and the VM continues meanwhile.
//!
//! Environment:
//!
//! - `VMMD_POD_NAMESPACE`, `VMMD_POD_NAME`, `VMMD_POD_UID`: the pod.
//! - `VMMD_POD_VM`, `VMMD_POD_RUN`: the VirtualMachine, and the number of its run.
//! - `VMMD_POD_GRACE_SECONDS`: the pod's termination grace period. Default 30.
//! - `VMMD_POD_SOCKET`: the socket of vmmd. Default `/run/vmmd-pod/vmmd.sock`.
//! - `VMMD_POD_FOLDER`: the folder of `volumes`, `devices` and `secrets`. Default `/vmmd`.
//! - `VMMD_POD_TERMINATION_LOG`: gets the reason of the end, if the file exists. Default `/dev/termination-log`.

mod connection;
mod launcher;
mod pod;
mod ready;
mod settings;
mod sys;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use settings::Settings;

const USAGE: &str =
    "usage: vmmd-pod         runs a VM in this pod\n       vmmd-pod ready   succeeds while the VM runs";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match arguments
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .as_slice()
    {
        [] => run(),
        ["ready"] => match Settings::uid().and_then(|uid| ready::ask(&uid)) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => failed("the VM does not run"),
            Err(error) => failed(&error),
        },
        _ => failed(USAGE),
    }
}

fn failed(message: &str) -> ExitCode {
    say(message);
    ExitCode::FAILURE
}

/// Runs the launcher to its end.
fn run() -> ExitCode {
    let termination_log = Settings::termination_log();
    let ended = Settings::read().and_then(launcher::run);
    let (code, reason, message) = match ended {
        Ok(ended) => (ended.code, ended.reason, ended.message),
        Err(message) => (1, "LauncherFailed".to_owned(), message),
    };
    let text = match message.as_str() {
        "" => reason,
        message => format!("{reason}: {message}"),
    };
    say(&text);
    // The kubelet creates this file, and reads the reason from it.
    if let Ok(mut file) = std::fs::File::options()
        .write(true)
        .truncate(true)
        .open(termination_log)
    {
        let _unread = file.write_all(text.as_bytes());
    }
    ExitCode::from(u8::from(code != 0))
}

/// Writes a line to standard error.
fn say(text: &str) {
    let _unread = writeln!(io::stderr(), "vmmd-pod: {text}");
}

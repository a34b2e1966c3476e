//! The command line.

use std::{os::fd::RawFd, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};

/// One virtual machine on KVM.
///
/// Normally vmmd starts this program, once for each VM. `vmm run` boots a VM without the daemon.
#[derive(Debug, Parser)]
#[command(name = "vmm", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Boots a VM in the foreground, its serial console on the terminal
    #[command(after_help = RUN_HELP)]
    Run(Run),
    /// Serves a VM to the daemon that started this process
    Serve(Serve),
}

const RUN_HELP: &str = "\
^] leaves the console and ends the VM at once. SIGTERM, SIGINT and SIGHUP do so too.

Exit codes:
  0  the guest powered off, or the VM was ended as above
  1  the VM could not be started, or the vmm or the host failed
  2  the guest's kernel panicked or crashed (triple fault)

Log lines go to standard error; the environment variable VMM_LOG filters them (\"debug\", \"devices=trace\").";

/// `vmm run`
#[derive(Debug, Args)]
pub struct Run {
    /// Manifest of the VM: the YAML that vmmctl takes
    #[arg(long, value_name = "FILE")]
    pub spec: PathBuf,
    /// Serves the screen (`spec.display`) to VNC clients at this UNIX socket, which is recreated
    #[arg(long, value_name = "SOCKET")]
    pub vnc: Option<PathBuf>,
    /// Serves the virtio-console (`spec.virtioConsole`) at this UNIX socket, which is recreated
    #[arg(long, value_name = "SOCKET")]
    pub hvc: Option<PathBuf>,
    /// Serves the channel to the guest's agent (`spec.guestAgent`) at this UNIX socket, which is recreated
    #[arg(long, value_name = "SOCKET")]
    pub agent: Option<PathBuf>,
    #[command(flatten)]
    pub firmware: FirmwareFiles,
    /// Writes the exit record, an encoded vmm.v1.ExitRecord, to this file
    #[arg(long, value_name = "FILE")]
    pub exit_record: Option<PathBuf>,
    /// Action on a system call outside the thread's list
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub seccomp: Seccomp,
    /// Throws the machine away and restores it, with so many milliseconds in between
    #[cfg(debug_assertions)]
    #[arg(long, value_name = "MS")]
    pub restore_every: Option<u64>,
}

/// Files of the firmware, for a VM with `spec.boot.firmware`.
#[derive(Debug, Args)]
pub struct FirmwareFiles {
    /// UEFI firmware's code
    #[arg(
        long = "uefi-code",
        value_name = "FILE",
        default_value = "/usr/share/OVMF/OVMF_CODE_4M.fd"
    )]
    pub code: PathBuf,
    /// UEFI firmware's variables of this VM: a copy of OVMF_VARS_4M.fd, which the guest changes
    #[arg(long = "uefi-variables", value_name = "FILE")]
    pub variables: Option<PathBuf>,
    /// BIOS
    #[arg(long, value_name = "FILE", default_value = "/usr/share/seabios/bios-256k.bin")]
    pub bios: PathBuf,
}

/// Action on a system call outside the list of the thread's kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Seccomp {
    /// The process ends, with an exit record
    #[default]
    On,
    /// The kernel logs the call (audit, type 1326), which shows the calls that a list lacks
    Log,
    /// Nothing: for developers only
    Off,
}

/// `vmm serve`: every descriptor is inherited.
#[derive(Debug, Args)]
pub struct Serve {
    /// Bound UNIX stream socket for the control protocol; this process listens on it
    #[arg(long, value_name = "FD")]
    pub control_fd: RawFd,
    /// Bound UNIX stream socket for the serial console; this process listens on it
    #[arg(long, value_name = "FD")]
    pub console_fd: RawFd,
    /// Empty file, open for writing, that takes the exit record
    #[arg(long, value_name = "FD")]
    pub exit_fd: RawFd,
    /// Locked file; stays open until the process ends, so that the lock shows whether the process
    /// lives
    #[arg(long, value_name = "FD")]
    pub lock_fd: RawFd,
    /// Read end of a pipe: the process ends at once, with an exit record, when all write ends are
    /// closed
    #[arg(long, value_name = "FD")]
    pub lifeline_fd: Option<RawFd>,
    /// Action on a system call outside the thread's list
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub seccomp: Seccomp,
}

//! `vmm serve`: one machine, driven over the control socket.

use std::{
    fs::File,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::mpsc::channel,
};

use anyhow::{Context, Result};
use rustix::net::listen;
use vmm_base::thread::{self, ThreadKind};
use vmm_core::{
    board::assemble::{Assembler, Console},
    lifecycle::{Notifier, driver::Driver},
};
use vmm_sandbox::process::inherited_fd;

use crate::{args::Serve, control::Server, exit_code, exit_record, sandbox, sys};

/// Console clients that wait to be accepted.
const CONSOLE_BACKLOG: i32 = 16;

/// Serves until the run ends; returns the process's exit code.
pub fn serve(args: &Serve) -> Result<i32> {
    let control = inherited("--control-fd", args.control_fd)?;
    let console = inherited("--console-fd", args.console_fd)?;
    let exit = inherited("--exit-fd", args.exit_fd)?;
    let lock = inherited("--lock-fd", args.lock_fd)?;
    let lifeline = args.lifeline_fd.map(|fd| inherited("--lifeline-fd", fd));
    let lifeline = lifeline.transpose()?;
    let keep = [&control, &console, &exit, &lock].into_iter().chain(&lifeline);
    let keep: Vec<RawFd> = keep.map(AsRawFd::as_raw_fd).collect();
    sandbox::check_inherited(&keep)?;
    exit_record::set_file(File::from(exit));
    // From now on clients can connect; they are served once there is a machine.
    listen(&console, CONSOLE_BACKLOG).context("listening on the console socket")?;

    let (inputs, received) = channel();
    let signals = sys::termination_signals().context("taking termination signals")?;
    let (mut server, outbox) =
        Server::new(control, signals, inputs.clone()).context("listening on the control socket")?;
    if let Some(lifeline) = lifeline {
        server.set_lifeline(lifeline);
    }
    server.set_sandbox(sandbox::close_in(args.seccomp)?);
    let thread = thread::spawn(ThreadKind::Control, "control", move || server.run())
        .context("starting the control thread")?;

    let assembler = Assembler::new(Console::Socket(console));
    let driver = Driver::new(received, Notifier::new(inputs), outbox.clone(), assembler);
    let record = driver.run(exit_record::write);
    outbox.finish();
    match thread.join() {
        Ok(result) => result.context("serving the control socket")?,
        // The panic hook has ended the process already.
        Err(_) => return Ok(exit_code::ERROR),
    }
    drop(lock);
    Ok(exit_code::of(record.kind()))
}

fn inherited(option: &str, fd: RawFd) -> Result<OwnedFd> {
    inherited_fd(fd).with_context(|| format!("{option} {fd} is no descriptor of this process"))
}

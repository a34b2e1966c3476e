//! `vmm run`: a machine in the foreground, without the daemon.

mod open;
#[cfg(debug_assertions)]
mod restores;
pub mod terminal;

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::mpsc::{Sender, channel},
};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, poll};
use vmm_base::thread::{self, ThreadKind};
use vmm_core::lifecycle::{Input, Notifier, Request, Token, driver::Driver};
#[cfg(not(debug_assertions))]
use vmm_core::{
    board::assemble::{Assembler, Console},
    lifecycle::{Answer, Failure, publisher::Audience},
};
use vmm_protocol::vmm::{Boot, ExitKind, Stop, request::Op};
use vmm_sys_util::eventfd::EventFd;

use crate::{args::Run, exit_code, exit_record, sandbox, sys};
use terminal::RawMode;

/// Token of the requests that this process sends to its own driver.
const TOKEN: Token = Token {
    connection: 0,
    request: 0,
};

/// Nobody listens either: the log and the exit code say what there is to know.
#[cfg(not(debug_assertions))]
struct Nobody;

#[cfg(not(debug_assertions))]
impl Audience for Nobody {
    fn event(&self, _event: vmm_protocol::vmm::Event) {}
    fn reply(&self, _token: Token, _answer: Result<Answer, Failure>) {}
}

/// Runs the VM of a manifest until its end; returns the process's exit code.
pub fn run(args: &Run) -> Result<i32> {
    let manifest = open::manifest(&args.spec)?;
    let sockets = open::Sockets {
        vnc: args.vnc.as_deref(),
        hvc: args.hvc.as_deref(),
        agent: args.agent.as_deref(),
    };
    let (spec, fds) = open::resolve(&manifest, sockets, &args.firmware)?;
    if let Some(path) = &args.exit_record {
        let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
        exit_record::set_file(file);
    }
    let (terminal, escape) = terminal::console().context("opening the terminal")?;
    sandbox::drop_rights()?;

    let (inputs, received) = channel();
    let signals = sys::termination_signals().context("taking termination signals")?;
    let boot = Boot {
        machine: Some(spec),
        ..Boot::default()
    };
    let op = Op::Boot(boot);
    let _ = inputs.send(Input::Request(TOKEN, Box::new(Request { op, fds })));
    sandbox::close_in(args.seccomp)?;
    stop_when_asked(signals, escape, inputs.clone()).context("starting a thread for signals")?;

    #[cfg(not(debug_assertions))]
    let (audience, builder) = (Nobody, Assembler::new(Console::Terminal(terminal)));
    #[cfg(debug_assertions)]
    let (audience, builder, restores) = {
        let every = args.restore_every.map(std::time::Duration::from_millis);
        restores::begin(every, terminal, inputs.clone()).context("starting a thread for restores")?
    };
    let driver = Driver::new(received, Notifier::new(inputs), audience, builder);
    let raw = RawMode::enter().context("setting the terminal's mode")?;
    let record = driver.run(exit_record::write);
    drop(raw);
    #[cfg(debug_assertions)]
    restores.finish()?;
    match record.kind() {
        ExitKind::PowerOff | ExitKind::Stopped => {}
        ExitKind::StartFailed => bail!("starting VM {}: {}", manifest.metadata.name, record.message),
        _ => eprintln!("vmm: VM {}: {}", manifest.metadata.name, record.message),
    }
    Ok(exit_code::of(record.kind()))
}

/// Has the driver stop the machine at a termination signal, or when the escape was typed.
fn stop_when_asked(signals: OwnedFd, escape: EventFd, inputs: Sender<Input>) -> io::Result<()> {
    let escape = OwnedFd::from(sys::into_file(escape));
    thread::spawn(ThreadKind::Control, "signals", move || {
        let mut fds = [signals.as_fd(), escape.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        while let Err(rustix::io::Errno::INTR) = poll(&mut fds, None) {}
        let _ = inputs.send(Input::Request(TOKEN, Box::new(Op::Stop(Stop {}).into())));
    })?;
    Ok(())
}

//! `vmm run --restore-every`: the machine is thrown away and restored again and again while its guest runs. For tests.

use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    time::Duration,
};

use anyhow::{Result, bail};
use devices::serial::Terminal;
use vmm_base::thread::{self, ThreadKind};
use vmm_core::{
    board::{assemble::Console, rebuilt::Rebuilder},
    lifecycle::{Answer, Failure, Input, Token, publisher::Audience},
};
use vmm_protocol::vmm::{Event, Pause, Resume, Stop, request::Op};

const TOKEN: Token = Token {
    connection: 1,
    request: 0,
};

/// Hears how pauses and resumes end.
pub struct Listener(Sender<Result<(), Failure>>);

impl Audience for Listener {
    fn event(&self, _event: Event) {}

    fn reply(&self, token: Token, answer: Result<Answer, Failure>) {
        if token == TOKEN {
            // The send fails if the run is over and the receiver is gone.
            let _ = self.0.send(answer.map(|_| ()));
        }
    }
}

/// Results of the restores.
pub struct Restores {
    asked: bool,
    count: Arc<AtomicU64>,
    failure: Arc<OnceLock<Failure>>,
}

impl Restores {
    /// At the end of the run: says how often the machine was restored, if that was asked for. An error if a restore failed.
    pub fn finish(&self) -> Result<()> {
        if self.asked {
            eprintln!("vmm: restored {} times", self.count.load(Ordering::Relaxed));
        }
        match self.failure.get() {
            Some(failure) => bail!("a restore failed: {}", failure.message),
            None => Ok(()),
        }
    }
}

/// Has the machine that is built on `terminal` paused and resumed by requests to `inputs`, with that time in between.
pub fn begin(
    every: Option<Duration>,
    terminal: Terminal,
    inputs: Sender<Input>,
) -> io::Result<(Listener, Rebuilder, Restores)> {
    let consoles = move || {
        let escape = terminal.escape.as_ref();
        let escape = escape.map(|(byte, event)| event.try_clone().map(|event| (*byte, event)));
        Ok(Console::Terminal(Terminal {
            input: terminal.input.try_clone()?,
            output: terminal.output.try_clone()?,
            escape: escape.transpose()?,
        }))
    };
    let rebuilder = Rebuilder::new(Box::new(consoles));
    let failure = Arc::new(OnceLock::new());
    let restores = Restores {
        asked: every.is_some(),
        count: rebuilder.restores(),
        failure: Arc::clone(&failure),
    };
    let (sender, replies) = channel();
    let Some(every) = every else {
        return Ok((Listener(sender), rebuilder, restores));
    };
    thread::spawn(ThreadKind::Control, "restores", move || {
        while let Err(RecvTimeoutError::Timeout) = replies.recv_timeout(every) {
            for op in [Op::Pause(Pause {}), Op::Resume(Resume {})] {
                let asked = inputs.send(Input::Request(TOKEN, Box::new(op.into())));
                let (Ok(()), Ok(answer)) = (asked, replies.recv()) else {
                    return;
                };
                if let Err(error) = answer {
                    let _first = failure.set(error);
                    let stop = Box::new(Op::Stop(Stop {}).into());
                    let _the_run_is_over = inputs.send(Input::Request(TOKEN, stop));
                    return;
                }
            }
        }
    })?;
    Ok((Listener(sender), rebuilder, restores))
}

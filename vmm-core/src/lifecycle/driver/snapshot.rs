//! Snapshots of the machine, as the driver sees them: see [`crate::snapshot::saving`] for how one is taken.

use std::{
    fs::File,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use proto::vmm::{ErrorKind, SaveReply};
use tracing::{info, warn};

use super::{Driver, Next};
use crate::{
    lifecycle::{Answer, Builder, Failure, Token, admission::State, publisher::Audience},
    snapshot::saving::{Event, GoesOn},
};

/// A snapshot that is being taken.
pub(super) struct Underway {
    /// Who waits for it.
    token: Token,
    began: Instant,
    description: Vec<u8>,
    /// The machine was paused for it, then, and goes on when it is done.
    paused: Option<Instant>,
    /// For how long it was paused.
    pause: Duration,
    /// Why it was given up.
    failure: Option<Failure>,
}

impl<A: Audience, B: Builder> Driver<A, B> {
    /// Begins a snapshot. The answer comes when it is done.
    pub(super) fn begin_snapshot(
        &mut self,
        token: Token,
        file: OwnedFd,
        paused: bool,
        description: Vec<u8>,
    ) -> Result<(), Failure> {
        if self.snapshot.is_some() {
            return Err(refused("a snapshot of this machine is being taken already"));
        }
        let began = Instant::now();
        let running = self.publisher.state() == State::Running;
        let pauses = running && paused;
        if pauses {
            self.machine()?.pause()?;
        }
        let begun = self
            .machine()
            .and_then(|machine| machine.begin_snapshot(File::from(file), running && !paused));
        if let Err(failure) = begun {
            if pauses {
                self.machine()?.resume()?;
            }
            return Err(failure);
        }
        if pauses {
            self.publisher.paused_for_snapshot();
        }
        self.snapshot = Some(Underway {
            token,
            began,
            description,
            paused: pauses.then_some(began),
            pause: Duration::ZERO,
            failure: None,
        });
        self.pending.push(token);
        Ok(())
    }

    /// The machine stays paused after a snapshot that paused it: somebody wants that. True when there is such a snapshot.
    pub(super) fn stays_paused(&mut self) -> bool {
        let paused = self.snapshot.as_mut().and_then(|it| it.paused.take());
        if let (Some(paused), Some(snapshot)) = (paused, &mut self.snapshot) {
            snapshot.pause = paused.elapsed();
            self.publisher.paused(None);
        }
        paused.is_some()
    }

    /// Why the machine can't go on now, if a snapshot needs it to be paused.
    pub(super) fn needs_pause(&self) -> Option<Failure> {
        // Of a machine that was paused before, the memory that is being written must not change either.
        let paused = self.publisher.state() == State::Paused;
        (paused && self.snapshot.is_some())
            .then(|| refused("a snapshot of this machine is being taken: wait until that is done"))
    }

    pub(super) fn on_snapshot(&mut self, event: Event) -> Next {
        let result = match event {
            Event::Ready => self.complete_snapshot(),
            Event::Ended => self.end_snapshot(),
        };
        match result {
            Ok(()) => Next::GoOn,
            Err(failure) => {
                let message = format!("going on after a snapshot: {}", failure.message);
                Next::End(super::exit_record(proto::vmm::ExitKind::VmmError, message), None)
            }
        }
    }

    /// Takes the machine's state. An error is one of the machine, which can't go on.
    fn complete_snapshot(&mut self) -> Result<(), Failure> {
        let Some(mut snapshot) = self.snapshot.take() else {
            return Ok(());
        };
        let description = std::mem::take(&mut snapshot.description);
        let running = self.publisher.state() == State::Running;
        let began = Instant::now();
        let completed = if running { self.machine()?.pause() } else { Ok(()) };
        let was_paused = completed.is_ok() && running;
        let completed = completed.and_then(|()| self.machine()?.complete_snapshot(description));
        if was_paused {
            snapshot.paused = Some(began);
        }
        match completed {
            Ok(GoesOn::Now) if snapshot.paused.is_some() => self.go_on(&mut snapshot)?,
            Ok(GoesOn::WhenEnded) if was_paused => self.publisher.paused_for_snapshot(),
            Ok(_) => {}
            Err(failure) => {
                snapshot.failure = Some(failure);
                self.machine()?.give_up_snapshot();
            }
        }
        self.snapshot = Some(snapshot);
        Ok(())
    }

    /// Answers who asked for the snapshot. An error is one of the machine, which can't go on.
    fn end_snapshot(&mut self) -> Result<(), Failure> {
        let Some(mut snapshot) = self.snapshot.take() else {
            return Ok(());
        };
        let result = self.machine()?.end_snapshot();
        let result = match snapshot.failure.take() {
            Some(failure) => Err(failure),
            None => result,
        };
        self.go_on(&mut snapshot)?;
        let token = snapshot.token;
        self.pending.retain(|pending| *pending != token);
        match result {
            Ok(report) => {
                let reply = SaveReply {
                    file_bytes: report.file_bytes,
                    memory_bytes: report.memory_bytes,
                    rounds: report.rounds,
                    pause_ns: nanoseconds(snapshot.pause),
                    total_ns: nanoseconds(snapshot.began.elapsed()),
                };
                info!(?reply, "a snapshot was taken");
                self.publisher.reply_with(token, Answer::Saved(reply));
            }
            Err(failure) => {
                warn!(error = failure.message, "a snapshot failed");
                self.publisher.reply(token, Err(failure));
            }
        }
        Ok(())
    }

    /// Lets a machine go on that was paused for the snapshot.
    fn go_on(&mut self, snapshot: &mut Underway) -> Result<(), Failure> {
        let Some(paused) = snapshot.paused.take() else {
            return Ok(());
        };
        self.machine()?.resume()?;
        snapshot.pause = paused.elapsed();
        if self.publisher.state() == State::Paused {
            self.publisher.enter(State::Running);
        }
        Ok(())
    }
}

fn refused(message: &str) -> Failure {
    Failure {
        kind: ErrorKind::State,
        message: message.to_owned(),
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

//! Snapshots of the machine, as the driver sees them: see [`crate::snapshot::saving`] for how one is taken.

use std::{
    fs::File,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use tracing::{info, warn};
use vmm_protocol::vmm::{
    ErrorKind, MigrationPolicy, PauseReason, Save, SaveReply, Send, SendReply, request::Op,
};

use super::{Driver, Next};
use crate::{
    lifecycle::{Answer, Builder, Failure, Token, admission::State, descriptor, publisher::Audience},
    snapshot::saving::{Event, GoesOn, Policy, Purpose, Report},
};

/// A snapshot that is being taken.
pub(super) struct Underway {
    /// Request that waits for the snapshot.
    token: Token,
    /// Of the request.
    number: u64,
    began: Instant,
    description: Vec<u8>,
    /// Time at which the machine was paused for the snapshot. The machine continues when the
    /// snapshot is done.
    paused: Option<Instant>,
    /// The machine is sent to another `vmm`, and stays paused in the end.
    migrates: bool,
    /// For how long it was paused.
    pause: Duration,
    /// Why it was given up.
    failure: Option<Failure>,
    /// Whether the machine stays paused for its disks.
    disks: Disks,
    /// The thread has ended, with this; at once where there is none.
    ended: Option<Result<Report, Failure>>,
    memory: Memory,
}

/// Use of the machine's memory by the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// It reads the memory, and what changes meanwhile once more.
    Logged,
    /// It reads the memory, which must not change until the thread has ended.
    Lent,
    /// The thread does not read the memory any more.
    Copied,
}

/// State of the copy of the disks' images.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disks {
    /// Nobody does.
    NotCopied,
    /// The machine is not paused yet.
    Waiting,
    /// They are copied until a `Release`.
    Quiet,
}

impl<A: Audience, B: Builder> Driver<A, B> {
    /// Begins a snapshot. The answer comes when the snapshot is done. The outer error means that the
    /// machine cannot continue.
    pub(super) fn begin_snapshot(
        &mut self,
        token: Token,
        save: Save,
        fds: Vec<OwnedFd>,
    ) -> Result<Result<(), Failure>, Failure> {
        let file = match snapshot_file(&save, fds) {
            Ok(file) => file,
            Err(failure) => return Ok(Err(failure)),
        };
        let began = Instant::now();
        let running = self.publisher.state() == State::Running;
        let disks_alone = file.is_none();
        let paused = save.paused || disks_alone;
        let pauses = running && paused;
        if pauses && let Err(failure) = self.machine()?.pause() {
            return Ok(Err(failure));
        }
        let begun = match file {
            Some(file) => self
                .machine()
                .and_then(|machine| machine.begin_snapshot(File::from(file), running && !paused)),
            None => Ok(()),
        };
        if let Err(failure) = begun {
            if pauses {
                self.machine()?.resume()?;
            }
            return Ok(Err(failure));
        }
        if pauses {
            self.publisher.paused_for(PauseReason::Snapshot);
        }
        let mut snapshot = Underway {
            token,
            number: save.number,
            began,
            description: save.description,
            paused: pauses.then_some(began),
            migrates: false,
            pause: Duration::ZERO,
            failure: None,
            disks: if save.keep_paused || disks_alone {
                Disks::Waiting
            } else {
                Disks::NotCopied
            },
            ended: disks_alone.then(|| Ok(Report::default())),
            memory: match (disks_alone, running && !paused) {
                (true, _) => Memory::Copied,
                (false, true) => Memory::Logged,
                (false, false) => Memory::Lent,
            },
        };
        self.pending.push(token);
        if !running || paused {
            self.quiet_disks(&mut snapshot)?;
        }
        if disks_alone && let Some(failure) = snapshot.failure.take() {
            return self.finish(snapshot, Err(failure)).map(Ok);
        }
        self.snapshot = Some(snapshot);
        Ok(Ok(()))
    }

    /// Begins to send the running machine to another `vmm`. The answer comes when it is sent.
    pub(super) fn begin_migration(
        &mut self,
        token: Token,
        send: &Send,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Failure> {
        let socket = descriptor(fds, send.socket_fd).ok_or_else(|| invalid("Send without a socket"))?;
        let purpose = Purpose::Migration {
            downtime: Duration::from_millis(send.downtime_ms),
            policy: policy(send.policy)?,
        };
        let began = Instant::now();
        self.machine()?
            .begin_migration(File::from(socket), purpose, send)?;
        self.pending.push(token);
        self.snapshot = Some(Underway {
            token,
            number: 0,
            began,
            description: Vec::new(),
            paused: None,
            migrates: true,
            pause: Duration::ZERO,
            failure: None,
            disks: Disks::NotCopied,
            ended: None,
            memory: Memory::Logged,
        });
        Ok(())
    }

    /// Reports that the copy of the disks may begin, since the machine is paused. A failure of the
    /// disks is a failure of the snapshot.
    fn quiet_disks(&mut self, snapshot: &mut Underway) -> Result<(), Failure> {
        if snapshot.disks != Disks::Waiting {
            return Ok(());
        }
        match self.machine()?.commit_disks() {
            Ok(()) => {
                snapshot.disks = Disks::Quiet;
                self.publisher.disks_quiet(snapshot.number);
            }
            Err(failure) => {
                snapshot.disks = Disks::NotCopied;
                snapshot.failure = Some(failure);
                self.machine()?.give_up_snapshot();
            }
        }
        Ok(())
    }

    /// Ends the copy of the disks. The outer error means that the machine cannot continue.
    pub(super) fn release(&mut self) -> Result<Result<(), Failure>, Failure> {
        let released = self.snapshot.take_if(|it| it.disks == Disks::Quiet);
        let Some(mut snapshot) = released else {
            return Ok(Err(refused("no snapshot of this machine keeps it paused")));
        };
        snapshot.disks = Disks::NotCopied;
        match snapshot.ended.take() {
            Some(result) => self.finish(snapshot, result)?,
            None => {
                if snapshot.memory == Memory::Copied {
                    self.go_on(&mut snapshot)?;
                }
                self.snapshot = Some(snapshot);
            }
        }
        Ok(Ok(()))
    }

    /// Cancels a snapshot in any state: the machine continues, and the waiting request gets an
    /// error. The outer error means that the machine cannot continue.
    pub(super) fn give_up(&mut self) -> Result<Result<(), Failure>, Failure> {
        let Some(mut snapshot) = self.snapshot.take_if(|it| !it.migrates) else {
            return Ok(Err(refused("no snapshot of this machine is being taken")));
        };
        snapshot.disks = Disks::NotCopied;
        let failure = snapshot
            .failure
            .get_or_insert_with(|| refused("the snapshot was given up"));
        let failure = failure.clone();
        if snapshot.ended.take().is_some() {
            return self.finish(snapshot, Err(failure)).map(Ok);
        }
        // The thread hears it in a moment, and ends.
        self.machine()?.give_up_snapshot();
        self.snapshot = Some(snapshot);
        Ok(Ok(()))
    }

    /// Why an operation must wait for the end of a capture, or of a change of the devices before a capture. The state of a
    /// saved or sent machine has the devices from the start of the capture.
    pub(super) fn refused_by_capture(&self, op: &Op) -> Option<Failure> {
        let Some(snapshot) = &self.snapshot else {
            let changes = matches!(op, Op::Save(_) | Op::Send(_)) && !self.pending.is_empty();
            return changes.then(|| refused(DEVICES_CHANGE));
        };
        let why = match op {
            Op::Save(_) | Op::Send(_) => {
                "a snapshot of this machine is being taken, or it is being sent already"
            }
            Op::AttachDisk(_)
            | Op::ChangeMedium(_)
            | Op::DetachDisk(_)
            | Op::AttachNic(_)
            | Op::DetachNic(_)
            | Op::AttachShare(_)
            | Op::DetachShare(_) => match snapshot.migrates {
                true => "the machine is being sent: try again later",
                false => "a snapshot of this machine is being taken: try again when that is done",
            },
            Op::ResizeDisk(_) if snapshot.disks == Disks::Quiet => {
                "the disks of this machine are being copied for a snapshot: try again when that is done"
            }
            // Even if the machine was paused before the snapshot, its memory must not change while it
            // is written.
            Op::Resume(_) | Op::UnlockDisks(_) if self.stands_for_capture() => {
                "a snapshot of this machine is being taken: wait until that is done"
            }
            _ => return None,
        };
        Some(refused(why))
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

    /// The machine is paused, and a snapshot or migration relies on that.
    pub(super) fn stands_for_capture(&self) -> bool {
        self.publisher.state() == State::Paused && self.snapshot.is_some()
    }

    /// Gives up a capture that still needs the machine's memory as it is, because of `why`. A capture that has copied it continues.
    pub(super) fn give_up_memory(&mut self, why: &str) {
        let needs = |it: &&mut Underway| it.memory != Memory::Copied && it.failure.is_none();
        let Some(snapshot) = self.snapshot.as_mut().filter(needs) else {
            return;
        };
        snapshot.failure = Some(refused(&format!("the capture was given up: {why}; try again")));
        snapshot.disks = Disks::NotCopied;
        if let Ok(machine) = self.machine() {
            machine.give_up_snapshot();
        }
    }

    pub(super) fn on_snapshot(&mut self, event: Event) -> Next {
        let result = match event {
            Event::Disks { done, total } => {
                self.publisher.migration_disks(done, total);
                Ok(())
            }
            Event::Round(round) => {
                self.publisher.migration_round(round);
                let runs = self.publisher.state() == State::Running && !self.is_resetting();
                match self.machine() {
                    Ok(machine) if runs => machine.throttle(round.throttle),
                    _ => Ok(()),
                }
            }
            Event::Ready => self.complete_snapshot(),
            Event::Ended => self.end_snapshot(),
        };
        match result {
            Ok(()) => Next::GoOn,
            Err(failure) => Self::lost(&failure),
        }
    }

    /// Ends the run, since the machine cannot continue.
    pub(super) fn lost(failure: &Failure) -> Next {
        let message = format!("resume after a snapshot: {}", failure.message);
        Next::End(
            super::exit_record(vmm_protocol::vmm::ExitKind::VmmError, message),
            None,
        )
    }

    /// Takes the machine's state. An error means that the machine cannot continue.
    fn complete_snapshot(&mut self) -> Result<(), Failure> {
        // One that was given up needs nothing any more.
        let Some(mut snapshot) = self.snapshot.take_if(|it| it.failure.is_none()) else {
            return Ok(());
        };
        if snapshot.migrates && self.publisher.state() != State::Running {
            // The client that paused the machine does not expect it to move.
            snapshot.failure = Some(refused("the machine was paused while it was being sent"));
            self.machine()?.give_up_snapshot();
            self.snapshot = Some(snapshot);
            return Ok(());
        }
        let description = std::mem::take(&mut snapshot.description);
        let running = self.publisher.state() == State::Running;
        let began = Instant::now();
        let completed = if running { self.machine()?.pause() } else { Ok(()) };
        let was_paused = completed.is_ok() && running;
        let panicked = self.panicked;
        let completed = completed.and_then(|()| self.machine()?.complete_snapshot(description, panicked));
        if was_paused {
            snapshot.paused = Some(began);
        }
        snapshot.memory = match completed {
            Ok(GoesOn::WhenEnded) => Memory::Lent,
            // Without the state the thread ends, and reads nothing any more.
            Ok(GoesOn::Now) | Err(_) => Memory::Copied,
        };
        match completed {
            Ok(_) if was_paused && snapshot.disks == Disks::Waiting => {
                self.publisher.paused_for(PauseReason::Snapshot);
                self.quiet_disks(&mut snapshot)?;
            }
            Ok(GoesOn::Now) if snapshot.disks == Disks::Quiet => {}
            Ok(GoesOn::Now) if snapshot.paused.is_some() => self.go_on(&mut snapshot)?,
            Ok(GoesOn::WhenEnded) if was_paused && snapshot.migrates => {
                self.publisher.paused_for(PauseReason::Migration);
            }
            Ok(GoesOn::WhenEnded) if was_paused => self.publisher.paused_for(PauseReason::Snapshot),
            Ok(_) => {}
            Err(failure) => {
                snapshot.failure = Some(failure);
                snapshot.disks = Disks::NotCopied;
                self.machine()?.give_up_snapshot();
                self.go_on(&mut snapshot)?;
            }
        }
        self.snapshot = Some(snapshot);
        Ok(())
    }

    /// Handles the end of the thread. An error means that the machine cannot continue.
    fn end_snapshot(&mut self) -> Result<(), Failure> {
        let Some(mut snapshot) = self.snapshot.take() else {
            return Ok(());
        };
        let result = self.machine()?.end_snapshot();
        let result = match snapshot.failure.take() {
            Some(failure) => Err(failure),
            None => result,
        };
        if snapshot.disks == Disks::Quiet && result.is_ok() {
            snapshot.ended = Some(result);
            self.snapshot = Some(snapshot);
            return Ok(());
        }
        self.finish(snapshot, result)
    }

    /// Resumes the machine and answers the request for the snapshot. An error means that the
    /// machine cannot continue.
    fn finish(&mut self, mut snapshot: Underway, result: Result<Report, Failure>) -> Result<(), Failure> {
        let token = snapshot.token;
        self.pending.retain(|pending| *pending != token);
        if snapshot.migrates {
            return self.finish_migration(snapshot, result);
        }
        self.go_on(&mut snapshot)?;
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

    /// Leaves the machine paused if all was sent, and resumes it otherwise. An error means that the
    /// machine cannot continue.
    fn finish_migration(
        &mut self,
        mut snapshot: Underway,
        result: Result<Report, Failure>,
    ) -> Result<(), Failure> {
        match result {
            Ok(report) => {
                let pause = snapshot.paused.map_or(Duration::ZERO, |paused| paused.elapsed());
                let reply = SendReply {
                    sent_bytes: report.file_bytes,
                    memory_bytes: report.memory_bytes,
                    disk_bytes: report.disk_bytes,
                    rounds: report.rounds,
                    pause_ns: nanoseconds(pause),
                    total_ns: nanoseconds(snapshot.began.elapsed()),
                };
                info!(?reply, "the machine was sent");
                self.publisher.reply_with(snapshot.token, Answer::Sent(reply));
            }
            Err(failure) => {
                self.go_on(&mut snapshot)?;
                warn!(error = failure.message, "the machine could not be sent");
                self.publisher.reply(snapshot.token, Err(failure));
            }
        }
        Ok(())
    }

    /// Resumes a machine that was paused for the snapshot.
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

/// Longest description of a snapshot in bytes.
const MAX_DESCRIPTION: usize = 512 << 10;

/// File that a snapshot is written to; `None` for a snapshot of the disks alone.
fn snapshot_file(save: &Save, fds: Vec<OwnedFd>) -> Result<Option<OwnedFd>, Failure> {
    if save.description.len() > MAX_DESCRIPTION {
        return Err(invalid("the description of a snapshot has at most 512 KiB"));
    }
    if save.disks_alone {
        return Ok(None);
    }
    let file = descriptor(fds, save.file_fd).ok_or_else(|| invalid("Save without a file"))?;
    Ok(Some(file))
}

fn policy(wire: i32) -> Result<Policy, Failure> {
    Ok(match MigrationPolicy::try_from(wire) {
        Ok(MigrationPolicy::Unspecified | MigrationPolicy::AlwaysSafe) => Policy::AlwaysSafe,
        Ok(MigrationPolicy::PreferSafe) => Policy::PreferSafe,
        Ok(MigrationPolicy::PreferForced) => Policy::PreferForced,
        Ok(MigrationPolicy::AlwaysForced) => Policy::AlwaysForced,
        Err(_) => return Err(invalid("Send with an unknown policy")),
    })
}

fn invalid(message: &str) -> Failure {
    Failure::of(ErrorKind::Invalid, message)
}

/// The device would be in the machine, and not in its saved state.
const DEVICES_CHANGE: &str = "a device is being attached or taken away: try again when that is done";

fn refused(message: &str) -> Failure {
    Failure::of(ErrorKind::State, message)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

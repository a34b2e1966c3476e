//! Keeps the status for clients, and reports each change to listening clients.

use std::time::{SystemTime, UNIX_EPOCH};

use vmm_protocol::vmm::{
    ChannelsChanged, CrashReset, DeviceError, DiskDetached, DisksQuiet, Ended, Event, ExitKind, ExitRecord,
    GuestPanicked, GuestReset, MigrationDisks, MigrationRound, NicDetached, PauseReason, ShareDetached,
    StateChanged, Status, WatchdogExpired, event::Kind,
};

use super::{Answer, Detached, Failure, Pluggable, Token, admission::State};
use crate::snapshot::saving::Round;

/// Clients of the driver. The driver calls the methods, which must not block.
pub trait Audience: Send {
    /// Something happened.
    fn event(&self, event: Event);
    /// The answer to a request, or why it failed.
    fn reply(&self, token: Token, answer: Result<Answer, Failure>);
}

/// See the module.
pub struct Publisher<A> {
    audience: A,
    state: State,
    status: Status,
}

impl<A: Audience> Publisher<A> {
    /// Begins in state `Empty`.
    pub fn new(audience: A) -> Self {
        Self {
            audience,
            state: State::Empty,
            status: initial_status(),
        }
    }

    /// The state that was published last.
    pub fn state(&self) -> State {
        self.state
    }

    /// The machine's name, from its boot on.
    pub fn set_name(&mut self, name: &str) {
        name.clone_into(&mut self.status.name);
    }

    /// A state was entered.
    pub fn enter(&mut self, state: State) {
        self.state = state;
        self.status.state = vmm_protocol::vmm::State::from(state).into();
        if state != State::Paused {
            self.status.pause_reason = PauseReason::Unspecified.into();
            self.status.pause_message.clear();
        }
        self.send(Kind::StateChanged(StateChanged {
            status: Some(self.status.clone()),
        }));
    }

    /// The machine is paused, because that was asked for, or because of an error of a disk.
    pub fn paused(&mut self, disk_error: Option<String>) {
        let reason = match disk_error {
            Some(_) => PauseReason::DiskError,
            None => PauseReason::Requested,
        };
        self.status.pause_reason = reason.into();
        self.status.pause_message = disk_error.unwrap_or_default();
        self.enter(State::Paused);
    }

    /// The machine is paused as long as a snapshot is written, or because it was sent.
    pub fn paused_for(&mut self, reason: PauseReason) {
        self.status.pause_reason = reason.into();
        self.status.pause_message.clear();
        self.enter(State::Paused);
    }

    /// The machine is paused, and the files of its disks can be copied.
    pub fn disks_quiet(&self, number: u64) {
        self.send(Kind::DisksQuiet(DisksQuiet { number }));
    }

    /// A round of a migration has ended.
    pub fn migration_round(&self, round: Round) {
        self.send(Kind::MigrationRound(MigrationRound {
            number: round.number,
            sent_bytes: round.sent_bytes,
            dirty_bytes: round.dirty_bytes,
            bytes_per_second: round.bytes_per_second,
            throttle_percent: round.throttle.into(),
        }));
    }

    /// How far a migration is with its disks.
    pub fn migration_disks(&self, done_bytes: u64, total_bytes: u64) {
        self.send(Kind::MigrationDisks(MigrationDisks {
            done_bytes,
            total_bytes,
        }));
    }

    /// The guest reset itself.
    pub fn guest_reset(&mut self) {
        self.status.guest_resets += 1;
        self.send(Kind::GuestReset(GuestReset {
            guest_resets: self.status.guest_resets,
        }));
    }

    /// The machine was reset after a triple fault.
    pub fn crash_reset(&mut self, message: String) {
        self.status.crash_resets += 1;
        self.send(Kind::CrashReset(CrashReset {
            crash_resets: self.status.crash_resets,
            message,
        }));
    }

    /// The machine was reset: what its guest's kernel said before is over.
    pub fn reset(&mut self) {
        if std::mem::take(&mut self.status.panicked) {
            self.enter(self.state());
        }
    }

    /// The guest's kernel panicked.
    pub fn guest_panicked(&mut self, parameters: Vec<u64>) {
        self.status.panicked = true;
        self.send(Kind::GuestPanicked(GuestPanicked { parameters }));
    }

    /// The guest did not restart its watchdog in time.
    pub fn watchdog_expired(&self) {
        self.send(Kind::WatchdogExpired(WatchdogExpired {}));
    }

    /// A device had an error.
    pub fn device_error(&self, device: String, message: String) {
        self.send(Kind::DeviceError(DeviceError { device, message }));
    }

    /// These channels are open now.
    pub fn channels(&mut self, open: Vec<String>) {
        if self.status.open_channels == open {
            return;
        }
        self.status.open_channels.clone_from(&open);
        self.send(Kind::ChannelsChanged(ChannelsChanged { open }));
    }

    /// A disk, NIC or share is gone.
    pub fn detached(&self, gone: Detached) {
        let Detached { what, name, forced } = gone;
        self.send(match what {
            Pluggable::Disk => Kind::DiskDetached(DiskDetached { name, forced }),
            Pluggable::Nic => Kind::NicDetached(NicDetached { name, forced }),
            Pluggable::Share => Kind::ShareDetached(ShareDetached { name, forced }),
        });
    }

    /// The run is over: state `Ended` and the event that says why.
    pub fn ended(&mut self, exit: &ExitRecord) {
        self.status.exit = Some(exit.clone());
        self.enter(State::Ended);
        self.send(Kind::Ended(Ended {
            exit: Some(exit.clone()),
        }));
    }

    /// Answers a request with the present state, or with why it failed.
    pub fn reply(&self, token: Token, result: Result<(), Failure>) {
        let answer = result.map(|()| Answer::Status(self.status.clone()));
        self.audience.reply(token, answer);
    }

    /// Answers a request for counters.
    pub fn reply_with(&self, token: Token, counters: Answer) {
        self.audience.reply(token, Ok(counters));
    }

    fn send(&self, kind: Kind) {
        self.audience.event(Event { kind: Some(kind) });
    }
}

/// The status of a process without a machine.
pub fn initial_status() -> Status {
    Status {
        state: vmm_protocol::vmm::State::Empty.into(),
        ..Status::default()
    }
}

/// A record of now.
pub fn exit_record(kind: ExitKind, message: impl Into<String>) -> ExitRecord {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    ExitRecord {
        kind: kind.into(),
        message: message.into(),
        time_unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
    }
}

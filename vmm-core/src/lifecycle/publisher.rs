//! Keeps the status that others see, and tells those who listen of each change.

use std::time::{SystemTime, UNIX_EPOCH};

use proto::vmm::{
    DeviceError, Ended, Event, ExitKind, ExitRecord, GuestPanicked, GuestReset, StateChanged, Status,
    event::Kind,
};

use super::{Failure, Token, admission::State};

/// Who asks and listens. The driver calls it; no method may wait.
pub trait Audience: Send {
    /// Something happened.
    fn event(&self, event: Event);
    /// The answer to a request: the state after it, or why it failed.
    fn reply(&self, token: Token, answer: Result<Status, Failure>);
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
        self.status.state = proto::vmm::State::from(state).into();
        self.send(Kind::StateChanged(StateChanged {
            status: Some(self.status.clone()),
        }));
    }

    /// The guest reset itself.
    pub fn guest_reset(&mut self) {
        self.status.guest_resets += 1;
        self.send(Kind::GuestReset(GuestReset {
            guest_resets: self.status.guest_resets,
        }));
    }

    /// The guest's kernel panicked.
    pub fn guest_panicked(&self) {
        self.send(Kind::GuestPanicked(GuestPanicked {}));
    }

    /// A device had an error.
    pub fn device_error(&self, device: String, message: String) {
        self.send(Kind::DeviceError(DeviceError { device, message }));
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
        self.audience.reply(token, result.map(|()| self.status.clone()));
    }

    fn send(&self, kind: Kind) {
        self.audience.event(Event { kind: Some(kind) });
    }
}

/// The status of a process without a machine.
pub fn initial_status() -> Status {
    Status {
        state: proto::vmm::State::Empty.into(),
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

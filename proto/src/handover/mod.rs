//! The hand-over of a live migration: which of two daemons may run a VM, whatever is lost or dies in between.
//!
//! Each daemon keeps a durable record, [`Source`] or [`Target`]. What it hears is an event; [`Source::on`] and [`Target::on`] are pure
//! and say the next record and what is to be done. The record is durable before anything of that is done.
//!
//! ```text
//!  source   Owner ──begin──▶ Owner, migrating ──all sent, guest stands──▶ ⋯ ──Ready──▶ Given ──Running──▶ Gone
//!             ▲                 │ cancel, Refuse, restart                        (point of no return)
//!             └──────────────────┘ the guest goes on, Abort is sent
//!  target   Idle ──Prepare──▶ Prepared ──Commit──▶ Owned, runs
//!             ▲                  │ Abort, or its vmm died
//!             └──────────────────┘
//! ```
//!
//! What always holds, and is checked for every order of messages, losses, repetitions, crashes and restarts (`tests.rs`):
//! - At most one side may run: the source in `Owner`, the target in `Owned`. Never both.
//! - The source decides. Until it has written `Given` it can take everything back by itself, and its guest goes on unharmed. After that
//!   it never runs the guest again by itself.
//! - While both nodes live, one side runs in the end: the source repeats `Commit` until the target has answered, and a target that is
//!   `Prepared` asks until the source has answered.
//! - Nobody guesses. A target that is `Prepared` while its source has vanished, and a source that has `Given` while its target has
//!   vanished, wait for an operator ([`Resolution`]), who knows that the other side is gone for good.
//!
//! Migrations of a VM are numbered by its source, from 1. What is of an older one than the record's is answered as over.

#[cfg(test)]
mod tests;

/// Number of a migration: larger than that of each earlier one of the VM.
pub type Migration = u64;

/// What the daemons say to one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Message {
    /// Source to target: everything has been sent, and the guest stands still.
    Prepare(Migration),
    /// Target to source: everything is there, and it waits for `Commit`.
    Ready(Migration),
    /// Target to source: it does not take the VM.
    Refuse(Migration),
    /// Source to target: the VM is the target's.
    Commit(Migration),
    /// Source to target: the migration is over, and the VM is the source's.
    Abort(Migration),
    /// Target to source: what has become of it?
    Query(Migration),
    /// Target to source: the VM is the target's, durably.
    Running(Migration),
}

/// What a daemon is to do after its record is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Says something to the other daemon.
    Send(Message),
    /// Lets the vCPUs of its own `vmm` run, if that is there.
    Run,
    /// Ends its own `vmm`, if that is there.
    Kill,
}

/// What an operator says who knows that the other node is gone for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// The VM is to run here.
    Run,
    /// It is not.
    Drop,
}

/// The source's durable record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// The VM is here. `last` is the newest migration, 0 when there was none; `migrating` while that is under way.
    Owner {
        /// See there.
        last: Migration,
        /// See there.
        migrating: bool,
    },
    /// The VM is the target's; its answer is waited for. The guest stands still and is kept.
    Given(Migration),
    /// The target has answered.
    Gone(Migration),
}

/// What the source's daemon hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// A client asks for a migration.
    Begin,
    /// Everything was sent, and the guest stands still.
    Sent,
    /// A client cancels it, or a deadline has passed.
    Cancel,
    /// The daemon was restarted.
    Restarted,
    /// Time to say again what has not been answered.
    Tick,
    /// The target's daemon says something.
    Heard(Message),
    /// An operator decides.
    Resolve(Resolution),
}

impl Source {
    /// A VM that was never migrated.
    pub const NEW: Self = Self::Owner {
        last: 0,
        migrating: false,
    };

    /// Whether the VM may run here.
    pub fn may_run(self) -> bool {
        matches!(self, Self::Owner { .. })
    }

    /// Whether only the other side, or an operator, can say how it goes on.
    pub fn waits(self) -> bool {
        matches!(self, Self::Given(_))
    }

    /// The next record, and what is to be done then.
    pub fn on(self, event: SourceEvent) -> (Self, Vec<Effect>) {
        use SourceEvent::{Begin, Cancel, Heard, Resolve, Restarted, Sent, Tick};
        match (self, event) {
            (
                Self::Owner {
                    last,
                    migrating: false,
                },
                Begin,
            ) => {
                let last = last.saturating_add(1);
                (
                    Self::Owner {
                        last,
                        migrating: true,
                    },
                    Vec::new(),
                )
            }
            (
                Self::Owner {
                    last,
                    migrating: true,
                },
                Sent,
            ) => (self, vec![Effect::Send(Message::Prepare(last))]),
            (
                Self::Owner {
                    last,
                    migrating: true,
                },
                Cancel | Restarted,
            ) => back(last),
            (
                Self::Owner {
                    last,
                    migrating: true,
                },
                Heard(Message::Refuse(it)),
            ) if it == last => back(last),
            (
                Self::Owner {
                    last,
                    migrating: true,
                },
                Heard(Message::Ready(it)),
            ) if it == last => (Self::Given(last), vec![Effect::Send(Message::Commit(last))]),
            // Nothing but what the guest did before the daemon ended can have stopped it.
            (Self::Owner { .. }, Restarted) => (self, vec![Effect::Run]),
            (Self::Owner { last, migrating }, Heard(Message::Query(it) | Message::Ready(it)))
                if it < last || !migrating =>
            {
                (self, vec![Effect::Send(Message::Abort(it))])
            }
            (Self::Given(it), Tick | Restarted) => (self, vec![Effect::Send(Message::Commit(it))]),
            (Self::Given(it) | Self::Gone(it), Heard(Message::Query(of) | Message::Ready(of))) => {
                let message = if of == it {
                    Message::Commit(of)
                } else {
                    Message::Abort(of)
                };
                (self, vec![Effect::Send(message)])
            }
            (Self::Given(it), Heard(Message::Running(of))) if of == it => {
                (Self::Gone(it), vec![Effect::Kill])
            }
            (Self::Given(it), Resolve(Resolution::Run)) => back(it),
            (Self::Given(it), Resolve(Resolution::Drop)) => (Self::Gone(it), vec![Effect::Kill]),
            // Until nothing is left: its removal may fail, on a full file system for instance.
            (Self::Gone(_), Tick | Restarted) => (self, vec![Effect::Kill]),
            _ => (self, Vec::new()),
        }
    }
}

/// The VM stays with its source.
fn back(last: Migration) -> (Source, Vec<Effect>) {
    let record = Source::Owner {
        last,
        migrating: false,
    };
    (record, vec![Effect::Run, Effect::Send(Message::Abort(last))])
}

/// The target's durable record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// The VM is not here. All migrations up to this one are over; 0 when there was none.
    Idle(Migration),
    /// Everything is here, and the source decides.
    Prepared(Migration),
    /// The VM is here.
    Owned(Migration),
}

/// What the target's daemon hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetEvent {
    /// The source's daemon says something. `loaded`: a `vmm` has received everything of this migration and lives.
    Heard {
        /// What.
        message: Message,
        /// See there.
        loaded: bool,
    },
    /// Its `vmm` has died before it ran the guest.
    VmmDied,
    /// The daemon was restarted.
    Restarted,
    /// Time to ask again what has not been answered.
    Tick,
    /// An operator decides.
    Resolve(Resolution),
}

impl Target {
    /// A node that has never had the VM.
    pub const NEW: Self = Self::Idle(0);

    /// Whether the VM may run here.
    pub fn may_run(self) -> bool {
        matches!(self, Self::Owned(_))
    }

    /// Whether only the other side, or an operator, can say how it goes on.
    pub fn waits(self) -> bool {
        matches!(self, Self::Prepared(_))
    }

    /// The next record, and what is to be done then.
    pub fn on(self, event: TargetEvent) -> (Self, Vec<Effect>) {
        use TargetEvent::{Heard, Resolve, Restarted, Tick, VmmDied};
        match (self, event) {
            (_, Heard { message, loaded }) => self.heard(message, loaded),
            // The source may have committed by now, so this is no refusal: the question brings the answer.
            (Self::Prepared(it), Tick | Restarted | VmmDied) => {
                (self, vec![Effect::Send(Message::Query(it))])
            }
            (Self::Prepared(it), Resolve(Resolution::Run)) => (Self::Owned(it), vec![Effect::Run]),
            (Self::Prepared(it), Resolve(Resolution::Drop)) => (Self::Idle(it), vec![Effect::Kill]),
            (Self::Owned(it), Restarted) => (self, vec![Effect::Run, Effect::Send(Message::Running(it))]),
            (Self::Idle(_), Restarted) => (self, vec![Effect::Kill]),
            _ => (self, Vec::new()),
        }
    }

    fn heard(self, message: Message, loaded: bool) -> (Self, Vec<Effect>) {
        match (self, message) {
            (Self::Idle(over), Message::Prepare(it)) if it > over && loaded => {
                (Self::Prepared(it), vec![Effect::Send(Message::Ready(it))])
            }
            (Self::Idle(over), Message::Prepare(it)) if it > over => {
                (Self::Idle(it), vec![Effect::Send(Message::Refuse(it))])
            }
            (Self::Prepared(had), Message::Prepare(it)) if it == had => {
                (self, vec![Effect::Send(Message::Ready(it))])
            }
            // Its source has begun another one, so the one before is over.
            (Self::Prepared(had), Message::Prepare(it)) if it > had => Self::Idle(had).heard(message, loaded),
            (Self::Idle(_), Message::Prepare(it)) => (self, vec![Effect::Send(Message::Refuse(it))]),
            (Self::Prepared(had), Message::Commit(it)) if it == had => {
                let effects = vec![Effect::Run, Effect::Send(Message::Running(it))];
                (Self::Owned(it), effects)
            }
            (Self::Owned(had), Message::Commit(it)) if it == had => {
                (self, vec![Effect::Send(Message::Running(it))])
            }
            (Self::Prepared(had), Message::Abort(it)) if it == had => (Self::Idle(it), vec![Effect::Kill]),
            // Whatever comes of it later is over.
            (Self::Idle(over), Message::Abort(it)) if it > over => (Self::Idle(it), vec![Effect::Kill]),
            _ => (self, Vec::new()),
        }
    }
}

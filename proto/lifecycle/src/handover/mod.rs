//! The hand-over of a live migration: it decides which of two daemons may run a VM, regardless of
//! losses and crashes in between.
//!
//! Each daemon keeps a durable record, [`Source`] or [`Target`]. Its input is an event.
//! [`Source::on`] and [`Target::on`] are pure functions that return the next record and the
//! effects. The record is durable before the daemon carries out an effect.
//!
//! ```text
//!  source   Owner ──begin──▶ Owner, migrating ──all sent, guest stands──▶ ⋯ ──Ready──▶ Given ──Running──▶ Gone
//!             ▲                 │ cancel, Refuse, restart                        (point of no return)
//!             └─────────────────┘ the guest continues, Abort is sent
//!  target   Idle ──Prepare──▶ Prepared ──Commit──▶ Owned, runs
//!             ▲                  │ Abort, or its vmm died
//!             └──────────────────┘
//! ```
//!
//! Invariants, checked for every order of messages, losses, repetitions, crashes and restarts
//! (`tests.rs`):
//! - At most one side may run: the source in `Owner`, the target in `Owned`. Never both.
//! - The source decides. Until it has written `Given` it can take the migration back alone, and its
//!   guest continues unharmed. After that only an operator lets the source run the guest again.
//! - While the nodes live, one of them runs the guest in the end: the source repeats `Commit` until
//!   the target has answered. It repeats `Abort` to the target of each migration that it has taken
//!   back ([`Aborts`]), also after the VM has moved or was deleted. Targets send no queries.
//! - Neither side guesses. A target that is `Prepared` while its source has vanished, and a source
//!   that has `Given` while its target has vanished, wait for the decision of an operator
//!   ([`Resolution`]) that the other side is gone permanently.
//!
//! The source numbers the migrations of a VM from 1. A source continues the numbers of the node
//! from which the VM came, so a greater number is a later migration on any node. The answer to
//! messages of a migration older than the record's is that it is over.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

/// Number of a migration: larger than that of each earlier one of the VM.
pub type Migration = u64;

/// Message between the two daemons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Message {
    /// Source to target: everything has been sent, and the guest stands still.
    Prepare(Migration),
    /// Target to source: everything has arrived, and the target waits for `Commit`.
    Ready(Migration),
    /// Target to source: it does not take the VM.
    Refuse(Migration),
    /// Source to target: the VM is the target's.
    Commit(Migration),
    /// Source to target: the migration is over, and the VM is the source's.
    Abort(Migration),
    /// Target to source: the VM is the target's, durably.
    Running(Migration),
}

/// Action of a daemon after its record is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Says something to the other daemon.
    Send(Message),
    /// Lets the vCPUs of its own `vmm` run, if it exists.
    Run,
    /// Ends its own `vmm`, if it exists.
    Kill,
}

/// Decision of an operator after the other node is gone permanently.
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

/// Input of the source's daemon.
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
    /// It is time to repeat unanswered messages.
    Tick,
    /// The target's daemon says something.
    Received(Message),
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

    /// Whether only the other side, or an operator, can decide how the hand-over continues.
    pub fn waits(self) -> bool {
        matches!(self, Self::Given(_))
    }

    /// Returns the next record and its effects.
    pub fn on(self, event: SourceEvent) -> (Self, Vec<Effect>) {
        use SourceEvent::{Begin, Cancel, Received, Resolve, Restarted, Sent, Tick};
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
                Received(Message::Refuse(it)),
            ) if it == last => back(last),
            (
                Self::Owner {
                    last,
                    migrating: true,
                },
                Received(Message::Ready(it)),
            ) if it == last => (Self::Given(last), vec![Effect::Send(Message::Commit(last))]),
            // The daemon may have ended after the record of a take-back and before its `Run`.
            (Self::Owner { .. }, Restarted) => (self, vec![Effect::Run]),
            (Self::Given(it), Tick | Restarted) => (self, vec![Effect::Send(Message::Commit(it))]),
            (Self::Given(it), Received(Message::Running(of))) if of == it => {
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

/// Input of the target's daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetEvent {
    /// The source's daemon says something. `loaded`: a `vmm` has received everything of this migration and lives.
    Received {
        /// What.
        message: Message,
        /// See there.
        loaded: bool,
    },
    /// The daemon was restarted.
    Restarted,
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

    /// Whether only the other side, or an operator, can decide how the hand-over continues.
    pub fn waits(self) -> bool {
        matches!(self, Self::Prepared(_))
    }

    /// Returns the next record and its effects.
    pub fn on(self, event: TargetEvent) -> (Self, Vec<Effect>) {
        use TargetEvent::{Received, Resolve, Restarted};
        match (self, event) {
            (_, Received { message, loaded }) => self.received(message, loaded),
            (Self::Prepared(it), Resolve(Resolution::Run)) => (Self::Owned(it), vec![Effect::Run]),
            (Self::Prepared(it), Resolve(Resolution::Drop)) => (Self::Idle(it), vec![Effect::Kill]),
            (Self::Owned(it), Restarted) => (self, vec![Effect::Run, Effect::Send(Message::Running(it))]),
            (Self::Idle(_), Restarted) => (self, vec![Effect::Kill]),
            _ => (self, Vec::new()),
        }
    }

    fn received(self, message: Message, loaded: bool) -> (Self, Vec<Effect>) {
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
            (Self::Prepared(had), Message::Prepare(it)) if it > had => {
                Self::Idle(had).received(message, loaded)
            }
            (Self::Idle(_), Message::Prepare(it)) => (self, vec![Effect::Send(Message::Refuse(it))]),
            (Self::Prepared(had), Message::Commit(it)) if it == had => {
                let effects = vec![Effect::Run, Effect::Send(Message::Running(it))];
                (Self::Owned(it), effects)
            }
            (Self::Owned(had), Message::Commit(it)) if it == had => {
                (self, vec![Effect::Send(Message::Running(it))])
            }
            // Its source has begun a later one since, so the one that was prepared is over too.
            (Self::Prepared(had), Message::Abort(it)) if it >= had => (Self::Idle(it), vec![Effect::Kill]),
            // A later `Prepare` of this migration is refused.
            (Self::Idle(over), Message::Abort(it)) if it > over => (Self::Idle(it), vec![Effect::Kill]),
            _ => (self, Vec::new()),
        }
    }
}

/// Owner of the VM according to the record of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Handover {
    /// This node's, or it was.
    Source(Source),
    /// It comes from another node.
    Target(Target),
}

impl Handover {
    /// As a source has it. A VM that came here for good is this node's; `None` while the VM comes.
    pub fn source(self) -> Option<Source> {
        match self {
            Self::Source(source) => Some(source),
            Self::Target(Target::Owned(last)) => Some(Source::Owner {
                last,
                migrating: false,
            }),
            Self::Target(Target::Idle(_) | Target::Prepared(_)) => None,
        }
    }

    /// Handles a message of a source's daemon; `loaded` as in [`TargetEvent::Received`]. `None` when the VM is not in a state for that.
    pub fn received(self, message: Message, loaded: bool) -> Option<(Self, Vec<Effect>)> {
        let last = match self {
            Self::Target(target) => {
                let (after, effects) = target.on(TargetEvent::Received { message, loaded });
                return Some((Self::Target(after), effects));
            }
            Self::Source(Source::Owner { last, .. } | Source::Given(last) | Source::Gone(last)) => last,
        };
        match message {
            // The VM ran here since, and may have moved on.
            Message::Commit(it) if it <= last => Some((self, vec![Effect::Send(Message::Running(it))])),
            // That migration has left nothing here.
            Message::Abort(_) => Some((self, Vec::new())),
            _ => None,
        }
    }

    /// The last migration up to which the VM is or was this node's. 0 when it never was.
    pub fn owned(self) -> Migration {
        match self {
            Self::Source(Source::Owner { last, .. } | Source::Given(last) | Source::Gone(last))
            | Self::Target(Target::Owned(last)) => last,
            Self::Target(Target::Idle(_) | Target::Prepared(_)) => 0,
        }
    }

    /// Whether the VM may run here.
    pub fn may_run(self) -> bool {
        match self {
            Self::Source(source) => source.may_run(),
            Self::Target(target) => target.may_run(),
        }
    }

    /// Whether only the other side, or an operator, can say what follows.
    pub fn waits(self) -> bool {
        match self {
            Self::Source(source) => source.waits(),
            Self::Target(target) => target.waits(),
        }
    }

    /// Whether only the migration may change the VM.
    pub fn is_under_way(self) -> bool {
        !matches!(
            self,
            Self::Source(Source::Owner { migrating: false, .. }) | Self::Target(Target::Owned(_))
        )
    }
}

/// The same of a node that has no record of the VM. `owned`: see [`Handover::owned`] of the record that the node had. The answer says nothing
/// where nothing is left; `None` is no answer: a source that has committed must not read that the VM is here.
pub fn heard_without_record(owned: Migration, message: Message) -> Option<Option<Message>> {
    match message {
        Message::Prepare(it) => Some(Some(Message::Refuse(it))),
        Message::Abort(_) => Some(None),
        // It was deleted or moved to a third node since: the source can stop waiting.
        Message::Commit(it) if (1..=owned).contains(&it) => Some(Some(Message::Running(it))),
        _ => None,
    }
}

/// Targets of a VM that have not yet confirmed the end of a migration that the source took back.
/// Durable: a target is recorded together with the record that takes the migration back, and stays
/// until it has answered, regardless of the VM's further life.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Aborts<P>(BTreeMap<P, Migration>);

impl<P> Default for Aborts<P> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<P: Ord> Aborts<P> {
    /// None.
    pub const NEW: Self = Self(BTreeMap::new());

    /// A migration to `target` was taken back. An earlier one to the same target is over with it.
    pub fn note(&mut self, target: P, migration: Migration) {
        let noted = self.0.entry(target).or_insert(migration);
        *noted = migration.max(*noted);
    }

    /// The target has answered that nothing of this migration is left.
    pub fn answered(&mut self, target: &P, migration: Migration) {
        if self.0.get(target).is_some_and(|noted| *noted <= migration) {
            self.0.remove(target);
        }
    }

    /// The migration that this target is to confirm.
    pub fn get(&self, target: &P) -> Option<Migration> {
        self.0.get(target).copied()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&P, Migration)> {
        self.0.iter().map(|(target, migration)| (target, *migration))
    }
}

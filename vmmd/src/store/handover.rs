//! What a VM's record keeps of its migration.

use proto::{
    handover::{Message, Source, Target},
    v1::HandoverStep,
};

use crate::store::{HandoverRecord, HandoverStage};

/// Whose VM it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handover {
    /// This node's, or it was.
    Source(Source),
    /// It comes from another node.
    Target(Target),
}

impl Handover {
    /// As it was written. A VM that is the target's for good is its own.
    pub fn of(record: Option<&HandoverRecord>) -> Self {
        let Some(record) = record else {
            return Self::Source(Source::NEW);
        };
        let number = record.migration;
        match record.stage() {
            HandoverStage::Owner => Self::Source(Source::Owner {
                last: number,
                migrating: false,
            }),
            HandoverStage::Migrating => Self::Source(Source::Owner {
                last: number,
                migrating: true,
            }),
            HandoverStage::Given => Self::Source(Source::Given(number)),
            HandoverStage::Gone => Self::Source(Source::Gone(number)),
            HandoverStage::Idle => Self::Target(Target::Idle(number)),
            HandoverStage::Prepared => Self::Target(Target::Prepared(number)),
            HandoverStage::Owned => Self::Target(Target::Owned(number)),
        }
    }

    /// To be written; `peer` is where the target is.
    pub fn record(self, peer: &str) -> HandoverRecord {
        let (stage, migration) = match self {
            Self::Source(Source::Owner {
                last,
                migrating: false,
            }) => (HandoverStage::Owner, last),
            Self::Source(Source::Owner {
                last,
                migrating: true,
            }) => (HandoverStage::Migrating, last),
            Self::Source(Source::Given(number)) => (HandoverStage::Given, number),
            Self::Source(Source::Gone(number)) => (HandoverStage::Gone, number),
            Self::Target(Target::Idle(number)) => (HandoverStage::Idle, number),
            Self::Target(Target::Prepared(number)) => (HandoverStage::Prepared, number),
            Self::Target(Target::Owned(number)) => (HandoverStage::Owned, number),
        };
        HandoverRecord {
            stage: stage.into(),
            migration,
            peer: peer.to_owned(),
        }
    }

    /// Whether nobody but the migration may do anything to the VM.
    pub fn is_under_way(self) -> bool {
        !matches!(
            self,
            Self::Source(Source::Owner { migrating: false, .. }) | Self::Target(Target::Owned(_))
        )
    }
}

/// As it is said to the other daemon.
pub fn step(message: Message) -> HandoverStep {
    match message {
        Message::Prepare(_) => HandoverStep::Prepare,
        Message::Ready(_) => HandoverStep::Ready,
        Message::Refuse(_) => HandoverStep::Refuse,
        Message::Commit(_) => HandoverStep::Commit,
        Message::Abort(_) => HandoverStep::Abort,
        Message::Running(_) => HandoverStep::Running,
        // The source repeats what was not answered instead.
        Message::Query(_) => HandoverStep::Unspecified,
    }
}

/// As it was said by the other daemon.
pub fn message_of(step: HandoverStep, migration: u64) -> Option<Message> {
    Some(match step {
        HandoverStep::Prepare => Message::Prepare(migration),
        HandoverStep::Ready => Message::Ready(migration),
        HandoverStep::Refuse => Message::Refuse(migration),
        HandoverStep::Commit => Message::Commit(migration),
        HandoverStep::Abort => Message::Abort(migration),
        HandoverStep::Running => Message::Running(migration),
        HandoverStep::Unspecified => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_is_read_as_it_was_written() {
        for handover in [
            Handover::Source(Source::Owner {
                last: 7,
                migrating: false,
            }),
            Handover::Source(Source::Owner {
                last: 7,
                migrating: true,
            }),
            Handover::Source(Source::Given(7)),
            Handover::Source(Source::Gone(7)),
            Handover::Target(Target::Idle(6)),
            Handover::Target(Target::Prepared(7)),
            Handover::Target(Target::Owned(7)),
        ] {
            assert_eq!(Handover::of(Some(&handover.record("node:7443"))), handover);
        }
        assert_eq!(Handover::of(None), Handover::Source(Source::NEW));
    }

    #[test]
    fn every_message_is_heard_as_it_was_said() {
        for message in [
            Message::Prepare(7),
            Message::Ready(7),
            Message::Refuse(7),
            Message::Commit(7),
            Message::Abort(7),
            Message::Running(7),
        ] {
            assert_eq!(message_of(step(message), 7), Some(message));
        }
    }
}

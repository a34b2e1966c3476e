//! What a VM's record keeps of its migration.

use proto::handover::{Source, Target};

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

    /// To be written, for a migration without disks; `peer` is where the target is.
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
            disks: Vec::new(),
        }
    }

    /// The last migration up to which the VM is or was this node's. 0 when it never was.
    pub fn owned(self) -> u64 {
        match self {
            Self::Source(Source::Owner { last, .. } | Source::Given(last) | Source::Gone(last))
            | Self::Target(Target::Owned(last)) => last,
            Self::Target(Target::Idle(_) | Target::Prepared(_)) => 0,
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
}

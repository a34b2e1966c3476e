//! Migration state in a VM's record.

pub use vm_lifecycle::handover::Handover;
use vm_lifecycle::handover::{Effect, Message, Source, Target};

use prost::Message as _;
use redb::{ReadableTable as _, WriteTransaction};

use super::{
    AbortRecord, Change, Error, HandoverRecord, HandoverStage, Kept as _, Store, Table, VMS, VmRecord, decode,
};

/// Migrations that were taken back and whose targets have not confirmed that. Made with the first of them.
pub(super) const ABORTS: Table = Table::new("aborts");

impl Store {
    /// Writes a VM's record, and notes that a migration was taken back. Durable on return. After an error the record in the store is
    /// unknown. A read does not help: it may show pages of the kernel's cache that never become durable.
    pub async fn put_handover(&self, record: &VmRecord, abort: Option<&AbortRecord>) -> Result<(), Error> {
        let put = Change::Put(VMS, record.uid.clone(), record.encoded(&self.key)?);
        let abort = abort.map(|abort| Change::Put(ABORTS, abort.key(), abort.encode_to_vec()));
        self.changes([put].into_iter().chain(abort).collect()).await
    }

    /// Writes the records of a migration that was taken back, and of its VM, once more: records that could be read may not be durable. Durable on return.
    pub async fn again(&self, abort: &AbortRecord) -> Result<(), Error> {
        self.change(Change::Again(abort.clone())).await
    }

    /// The target of a migration that was taken back has confirmed that. Durable on return.
    pub async fn confirmed(&self, abort: &AbortRecord) -> Result<(), Error> {
        self.change(Change::Confirmed(abort.clone())).await
    }
}

fn failed(error: impl Into<redb::Error>) -> Error {
    Error::of("write the store", error)
}

/// Carries out [`Change::Again`].
pub(super) fn write_again(transaction: &WriteTransaction, abort: &AbortRecord) -> Result<(), Error> {
    for (of, key) in [(VMS, abort.uid.clone()), (ABORTS, abort.key())] {
        let mut table = transaction.open_table(of).map_err(failed)?;
        let read = table.get(key.as_slice()).map_err(failed)?;
        let Some(value) = read.map(|read| read.value().to_vec()) else {
            continue;
        };
        table.insert(key.as_slice(), value.as_slice()).map_err(failed)?;
    }
    Ok(())
}

/// Carries out [`Change::Confirmed`].
pub(super) fn confirm(transaction: &WriteTransaction, abort: &AbortRecord) -> Result<(), Error> {
    let mut table = transaction.open_table(ABORTS).map_err(failed)?;
    let noted = table.get(abort.key().as_slice()).map_err(failed)?;
    let noted = noted
        .map(|noted| decode::<AbortRecord>(noted.value()))
        .transpose()?;
    if noted.is_some_and(|noted| noted.migration <= abort.migration) {
        table.remove(abort.key().as_slice()).map_err(failed)?;
    }
    Ok(())
}

/// Reads it from a record. A VM without one was never migrated.
pub fn of(record: Option<&HandoverRecord>) -> Handover {
    let Some(record) = record else {
        return Handover::Source(Source::NEW);
    };
    let number = record.migration;
    let owner = |migrating| {
        Handover::Source(Source::Owner {
            last: number,
            migrating,
        })
    };
    match record.stage() {
        HandoverStage::Owner => owner(false),
        HandoverStage::Migrating => owner(true),
        HandoverStage::Given => Handover::Source(Source::Given(number)),
        HandoverStage::Gone => Handover::Source(Source::Gone(number)),
        HandoverStage::Idle => Handover::Target(Target::Idle(number)),
        HandoverStage::Prepared => Handover::Target(Target::Prepared(number)),
        HandoverStage::Owned => Handover::Target(Target::Owned(number)),
    }
}

/// Whether the other node has confirmed that the VM is its own.
pub fn has_moved(record: Option<&HandoverRecord>) -> bool {
    let peer = record.map_or("", |record| &record.peer);
    matches!(of(record), Handover::Source(Source::Gone(_))) && !peer.is_empty()
}

/// The record of the next state of the migration that `known` describes. All disks of a VM that stays here are its own: their UUIDs are
/// returned too.
pub fn next(next: Handover, known: HandoverRecord) -> (HandoverRecord, Vec<Vec<u8>>) {
    let stage = record(next);
    if next.is_under_way() {
        let record = HandoverRecord {
            stage: stage.stage,
            migration: stage.migration,
            ..known
        };
        return (record, Vec::new());
    }
    let arrived = known.disks;
    let record = match next {
        Handover::Source(_) => stage,
        Handover::Target(_) => HandoverRecord {
            stage: stage.stage,
            migration: stage.migration,
            disks: Vec::new(),
            ..known
        },
    };
    (record, arrived)
}

/// The note of a migration that `effects` take back. None when they take none back, or the target is gone.
pub fn abort(vm: &VmRecord, effects: &[Effect]) -> Option<AbortRecord> {
    let peer = vm.handover.as_ref().map_or("", |record| &record.peer);
    let migration = effects.iter().find_map(|effect| match effect {
        Effect::Send(Message::Abort(migration)) => Some(*migration),
        _ => None,
    })?;
    (!peer.is_empty()).then(|| AbortRecord {
        uid: vm.uid.clone(),
        name: vm.name.clone(),
        peer: peer.to_owned(),
        migration,
    })
}

/// Stage and number of the migration, to be written.
pub fn record(handover: Handover) -> HandoverRecord {
    let (stage, migration) = match handover {
        Handover::Source(Source::Owner {
            last,
            migrating: false,
        }) => (HandoverStage::Owner, last),
        Handover::Source(Source::Owner {
            last,
            migrating: true,
        }) => (HandoverStage::Migrating, last),
        Handover::Source(Source::Given(number)) => (HandoverStage::Given, number),
        Handover::Source(Source::Gone(number)) => (HandoverStage::Gone, number),
        Handover::Target(Target::Idle(number)) => (HandoverStage::Idle, number),
        Handover::Target(Target::Prepared(number)) => (HandoverStage::Prepared, number),
        Handover::Target(Target::Owned(number)) => (HandoverStage::Owned, number),
    };
    HandoverRecord {
        stage: stage.into(),
        migration,
        ..HandoverRecord::default()
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
            assert_eq!(of(Some(&record(handover))), handover);
        }
        assert_eq!(of(None), Handover::Source(Source::NEW));
    }
}

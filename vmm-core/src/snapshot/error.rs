//! Errors of snapshot files.

use std::{fmt, io};

use vmm_protocol::{state::StateError, vmm::ErrorKind};

use crate::{failure::Failure, kvm::SlotError};

/// Where in a snapshot file something is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The first block.
    Header,
    /// The gap between the header and memory, which holds zeroes.
    Gap,
    /// A section, by its number from 0 and where it begins in the file.
    Section {
        /// Which.
        number: u32,
        /// Offset in bytes.
        offset: u64,
    },
    /// The table of checksums.
    Checksums,
    /// A page of memory.
    Page {
        /// Guest-physical address.
        address: u64,
        /// Offset in the file in bytes.
        offset: u64,
    },
    /// A frame of the stream of a migration.
    Stream {
        /// Offset in bytes.
        offset: u64,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => f.write_str("its header"),
            Self::Gap => f.write_str("the gap after its header"),
            Self::Section { number, offset } => write!(f, "its section {number} at byte {offset}"),
            Self::Checksums => f.write_str("its table of checksums"),
            Self::Page { address, offset } => {
                write!(f, "its memory page {address:#x} at byte {offset}")
            }
            Self::Stream { offset } => write!(f, "the frame at byte {offset} of its stream"),
        }
    }
}

/// A snapshot could not be written, read or used.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file is no snapshot.
    #[error("the file is no snapshot")]
    NoSnapshot,
    /// The snapshot was never completed.
    #[error("the snapshot was never completed")]
    Incomplete,
    /// A newer program has written it.
    #[error("the snapshot has format {found}, this program reads format {known}")]
    Format {
        /// As the file says.
        found: u32,
        /// As [`VERSION`](super::format::VERSION).
        known: u32,
    },
    /// The file has another length than when it was written.
    #[error("the snapshot has {found} bytes and was written with {written}")]
    Length {
        /// Bytes now.
        found: u64,
        /// As its header says.
        written: u64,
    },
    /// Something was changed.
    #[error("the snapshot is damaged in {place}: {why}")]
    Damaged {
        /// Where.
        place: Place,
        /// How that shows.
        why: String,
    },
    /// A section is missing, unknown, or of another version.
    #[error("the snapshot's sections")]
    State(#[from] StateError),
    /// This host can't continue the machine.
    #[error("{}", .0.message)]
    Refused(Failure),
    /// The snapshot's memory does not fit the machine.
    #[error("the snapshot is of a machine with other memory: {0}")]
    OtherMemory(String),
    /// The machine has ended, or could not be paused.
    #[error("the snapshot was given up")]
    Cancelled,
    /// The guest changes memory and disks faster than they can be sent.
    #[error(
        "the guest changes its memory and disks faster than they can be sent: after {rounds} rounds the rest would still take {rest_ms} ms, \
         and the limit of the downtime is {limit_ms} ms"
    )]
    NotConverging {
        /// Number of rounds that sent changes.
        rounds: u32,
        /// How long sending the rest would take, in milliseconds.
        rest_ms: u64,
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// A part of the machine has more state than any reader takes (a defect: devices have limits of their own).
    #[error(
        "the state of {id} has {bytes} bytes, and that of the whole machine {all}: that is more than a snapshot or migration takes"
    )]
    TooLong {
        /// Id of the largest part.
        id: String,
        /// Its bytes.
        bytes: u64,
        /// Bytes of all parts.
        all: u64,
    },
    /// The file could not be read or written.
    #[error("{operation} the snapshot")]
    Io {
        /// "reading".
        operation: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A disk could not be read or written.
    #[error("{operation} disk {name}")]
    Disk {
        /// "reading".
        operation: &'static str,
        /// Which.
        name: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The log of changed pages failed.
    #[error("logging the guest's writes")]
    Log(#[from] SlotError),
    /// Guest memory could not be accessed (a defect).
    #[error("accessing guest memory")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

impl SnapshotError {
    pub(crate) fn damaged(place: Place, why: impl Into<String>) -> Self {
        Self::Damaged {
            place,
            why: why.into(),
        }
    }

    pub(crate) fn reading(source: io::Error) -> Self {
        Self::Io {
            operation: "reading",
            source,
        }
    }

    pub(crate) fn disk(operation: &'static str, name: &str, source: io::Error) -> Self {
        Self::Disk {
            operation,
            name: name.to_owned(),
            source,
        }
    }

    pub(crate) fn writing(source: io::Error) -> Self {
        Self::Io {
            operation: "writing",
            source,
        }
    }
}

impl From<SnapshotError> for Failure {
    fn from(error: SnapshotError) -> Self {
        let kind = match &error {
            SnapshotError::Refused(failure) => return failure.clone(),
            SnapshotError::Io { source, .. } | SnapshotError::Disk { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                    ErrorKind::Resources
                }
                _ => ErrorKind::Internal,
            },
            SnapshotError::Log(_) => ErrorKind::Kvm,
            SnapshotError::Cancelled | SnapshotError::NotConverging { .. } => ErrorKind::State,
            SnapshotError::Memory(_) | SnapshotError::TooLong { .. } => ErrorKind::Internal,
            _ => ErrorKind::Invalid,
        };
        Self::new(kind, &error)
    }
}

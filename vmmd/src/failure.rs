//! Why a request of a client was not fulfilled, apart from how gRPC says it.

mod refusal;

use std::io;

use crate::{store, text};

pub use refusal::{DOMAIN, Failure, Kind};

/// What a client is told when the store can't be written.
pub fn store_failure(error: store::Error) -> Failure {
    match error {
        store::Error::Full => Failure::new(
            Kind::Exhausted,
            "STORE_FULL",
            "the file system of the daemon's state is full: nothing was changed; make room and try again",
        ),
        store::Error::Closed => Failure::new(
            Kind::Unavailable,
            "STORE_UNAVAILABLE",
            "the daemon's store has failed and is opened again: nothing is known of the change; look, and try again",
        ),
        error => {
            tracing::error!(%error, "write the store");
            Failure::internal(
                "the daemon's store can't be written, and it is not known whether the change was made: look at the daemon's log and at the object, then try again",
            )
        }
    }
}

/// What a client is told when a disk's file can't be made or changed.
pub fn file_failed(operation: &str, error: &io::Error) -> Failure {
    let words = text::words(error);
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Failure::new(
            Kind::Exhausted,
            "NODE_DISK_FULL",
            format!("{operation}: the file system of the daemon's state is full: make room and try again"),
        ),
        io::ErrorKind::FileTooLarge => Failure::new(
            Kind::Exhausted,
            "NODE_DISK_FULL",
            format!("{operation}: the file system of the daemon's state can't hold a file of this size"),
        ),
        io::ErrorKind::Unsupported => Failure::precondition(
            "NOT_SUPPORTED",
            format!("{operation}: the file system of the daemon's state can't do this ({words})"),
        ),
        _ => {
            tracing::error!(operation, %error, "a disk's file");
            Failure::internal(format!("{operation}: {words}"))
        }
    }
}

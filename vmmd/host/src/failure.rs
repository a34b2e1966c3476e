//! Refusals of operations on files of the node, and the error type of all crates of the daemon.

use std::io;

pub use vmmd_api::failure::{DOMAIN, Failure, Kind};

use crate::text;

/// Refusal for a failed write to a disk's file.
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

//! How clients see an error of the store.

use vmmd_host::failure::{Failure, Kind};

use crate::Error;

/// Refusal for a failed write to the store.
pub fn store_failure(error: Error) -> Failure {
    match error {
        Error::Full => Failure::new(
            Kind::Exhausted,
            "STORE_FULL",
            "the file system of the daemon's state is full: nothing was changed; make room and try again",
        ),
        Error::Closed => Failure::new(
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

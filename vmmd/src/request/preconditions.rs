//! What must be true of an object for a change of it.

use proto::v1::Preconditions;

use crate::failure::{Failure, Kind};

/// Compares what a request wants with what is `present`; `what` ("VM") and `name` say of which object. A generation is
/// compared when both have one.
///
/// # Errors
///
/// ABORTED, `UID_MISMATCH` or `GENERATION_MISMATCH`.
pub fn check(what: &str, name: &str, wanted: &Preconditions, present: &Preconditions) -> Result<(), Failure> {
    let (uid, now) = (&wanted.uid, &present.uid);
    if !uid.is_empty() && uid != now {
        let message =
            format!("{what} \"{name}\" has the uid {now}, not {uid}: it is another {what} of this name");
        return Err(Failure::new(Kind::Aborted, "UID_MISMATCH", message));
    }
    match (wanted.generation, present.generation) {
        (Some(wanted), Some(present)) if wanted != present => {
            let message = format!(
                "{what} \"{name}\" has generation {present}, not {wanted}: look at it again, then decide anew"
            );
            Err(Failure::new(Kind::Aborted, "GENERATION_MISMATCH", message))
        }
        _ => Ok(()),
    }
}

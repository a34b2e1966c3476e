//! Preconditions of a change of an object.

use uuid::Uuid;
use vmmd_api::v1::Preconditions;
use vmmd_host::failure::{Failure, Kind};
use vmmd_store::RequestMark;

use crate::context::Context;

/// Compares the preconditions of a request with the `present` state of the object; `what` ("VM")
/// and `name` identify the object. A generation is compared when both have one.
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
                "{what} \"{name}\" has generation {present}, not {wanted}: read it again, then repeat the request"
            );
            Err(Failure::new(Kind::Aborted, "GENERATION_MISMATCH", message))
        }
        _ => Ok(()),
    }
}

/// The same for an object of the store, which has a uid, a generation and marks of requests. The generation is not compared again for a
/// request that was begun already: the request may have changed it itself.
///
/// # Errors
///
/// As [`check`].
pub fn check_record(
    what: &str,
    name: &str,
    (uid, generation, begun): (&[u8], u64, &[RequestMark]),
    context: &Context,
) -> Result<(), Failure> {
    let present = Preconditions {
        uid: Uuid::from_slice(uid).unwrap_or_default().to_string(),
        // Records of an earlier release have no generation.
        generation: (!context.has_begun(begun)).then_some(generation.max(1)),
    };
    check(what, name, &context.preconditions, &present)
}

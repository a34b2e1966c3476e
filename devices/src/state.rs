//! Saved state of components: the types, and checks that many components share.
//!
//! A component saves itself as one [`Section`]: a prost message of the package `vmm.state.v1` with its kind and its
//! version (`proto/src/state.rs` lists them). A section that is read back is untrusted: each component checks each
//! field and names the one that is wrong ([`StateError::Invalid`]).

pub use vmm_protocol::state as message;
pub use vmm_protocol::state::{Saved, Section, StateError};

/// `value` of `field` as a narrower type.
pub(crate) fn narrow<T, V: TryInto<T> + Copy + std::fmt::Display>(
    field: &'static str,
    value: V,
) -> Result<T, StateError> {
    let error = |_| StateError::invalid(field, format!("{value} is too large"));
    value.try_into().map_err(error)
}

/// An error about `field` unless `holds`.
pub(crate) fn check(holds: bool, field: &'static str, why: &str) -> Result<(), StateError> {
    if holds {
        Ok(())
    } else {
        Err(StateError::invalid(field, why))
    }
}

/// The message in `field`, which is never absent.
pub(crate) fn required<'a, M>(field: &'static str, message: Option<&'a M>) -> Result<&'a M, StateError> {
    message.ok_or_else(|| StateError::invalid(field, "it is absent"))
}

/// A change of a saved state, with the field that it makes invalid.
#[cfg(test)]
pub(crate) type Change<M> = (&'static str, fn(&mut M));

/// Has `restore` called with each change of a good message. Each one is refused with the name of the wrong field.
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) fn refuses<M: Clone>(
    good: &M,
    changes: &[Change<M>],
    mut restore: impl FnMut(&M) -> Result<(), StateError>,
) {
    for (name, change) in changes {
        let mut changed = good.clone();
        change(&mut changed);
        let error = restore(&changed).unwrap_err();
        assert!(
            matches!(error, StateError::Invalid { field, .. } if field == *name),
            "{name}: {error}"
        );
    }
}

//! What happens to a VM is decided here, by pure functions; the [actor](super::actor) does it.

pub mod admission;
pub mod exit;
pub mod policy;

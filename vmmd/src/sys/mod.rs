//! System calls that no crate wraps safely. All `unsafe` of the daemon is in here.
#![allow(unsafe_code)]

pub mod clone;
mod group;
mod lease;
mod lock;
mod readiness;
mod tun;

pub use group::{group_id, peer_groups};
pub use lease::has_writer;
pub use lock::{LockKind, could_lock, is_locked_here, lock_file, lock_file_within, lock_holder};
pub use readiness::{watch, watch_changes};
pub use tun::attach_tap;

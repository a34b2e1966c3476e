//! What all kinds of objects of the API share: who asked ([`context`]), requests with an id ([`request`]), long work
//! ([`operation`]), events ([`event`]), all objects of a kind ([`registry`]) and the order of their changes with tombstones ([`feed`]).
//!
//! This crate knows nothing of VMs, disks or networks: kinds implement its traits.
//!
//! A reader starts at [`registry`] for lists and watches, and at [`request`] for the path of a change.

pub mod context;
pub mod event;
pub mod feed;
pub mod operation;
pub mod registry;
pub mod request;

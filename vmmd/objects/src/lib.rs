//! What all kinds of objects of the API share: who asked ([`context`]), requests with an id ([`request`]), long work
//! ([`operation`]), events ([`event`]), and the order of changes with tombstones ([`feed`]).
//!
//! This crate never knows what a VM, a disk or a network is: kinds implement its traits.
//!
//! A reader starts at [`feed`] for lists and watches, and at [`request`] for the path of a change.

pub mod context;
pub mod event;
pub mod feed;
pub mod operation;
pub mod request;

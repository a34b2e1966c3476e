//! Tests of the framework and the transport, with a device that the test controls.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::type_complexity,
    clippy::cast_possible_truncation
)]

mod framework;
mod master;
mod order;
mod order_model;
mod puppet;
mod queue;
mod removal;
mod rings;
mod state;
mod transport;

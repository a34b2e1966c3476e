//! What the node has, what a VM takes of it, and whether one more fits: pure functions of facts and specs.
//!
//! [`facts`] are read from the kernel when they are needed; [`resources`] makes amounts of them and of specs, with what a `vmm` takes
//! for itself ([`proto::model::overhead`]); [`placement`] decides, and is the only place that does: for CheckPlacement, for CreateVm and, with the
//! books of the [`ledger`](crate::ledger) held, for each start.

pub mod facts;
pub mod limits;
pub mod placement;
mod resources;
pub mod sizing;

pub use self::{
    facts::{Cpus, Facts},
    resources::{Demand, Resources, allocatable, capacity},
};

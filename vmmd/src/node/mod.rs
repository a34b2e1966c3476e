//! The node for a scheduler elsewhere: what it has, what VMs may have of it, and whether one more fits.
//!
//! [`facts`] are read from the kernel when they are needed; [`resources`] makes amounts of them and of specs;
//! [`placement`] decides, and is the only place that does: for CheckPlacement, for CreateVm and, with the books of the
//! [`ledger`](crate::ledger) held, for each start. [`state`] is what outlives the daemon: labels, cordon, since when
//! conditions are what they are.

pub mod check;
pub mod conditions;
mod describe;
pub mod drain;
pub mod facts;
pub mod limits;
pub mod operate;
pub mod placement;
mod resources;
pub mod sizing;
mod state;

pub use self::{
    describe::describe,
    facts::{Cpus, Facts},
    resources::{Demand, Resources, allocatable, capacity},
    state::State,
};

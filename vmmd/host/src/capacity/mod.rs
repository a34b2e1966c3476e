//! Resources of the node, demand of a VM, and placement. All are pure functions of facts and specs.
//!
//! [`facts`] reads from the kernel on demand. [`resources`] computes amounts from facts and specs,
//! including the overhead of a `vmm` ([`vmmd_spec::overhead`]). [`placement`] is the only place
//! that decides: for CheckPlacement, for CreateVm and for each start. A start holds the books of
//! the [`ledger`](crate::ledger).

pub mod facts;
pub mod limits;
pub mod placement;
mod resources;
pub mod sizing;

pub use self::{
    facts::{Cpus, Facts, refuse_missing},
    resources::{Demand, Resources, allocatable, capacity},
};

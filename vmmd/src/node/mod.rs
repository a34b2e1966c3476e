//! Node functions for an external scheduler: its description, the check whether a VM could be
//! created or started here ([`check`]), and the actions of its operator. Amounts and the decision
//! itself are in [`vmmd_host::capacity`]. State that outlives the daemon (labels, cordon, times of the
//! conditions) is in [`crate::registry::node`].

pub mod check;
pub mod conditions;
mod describe;
pub mod drain;
pub mod operate;

pub use self::describe::describe;

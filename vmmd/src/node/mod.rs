//! The node for a scheduler elsewhere: what it is, whether a VM could be created or started here ([`check`]), and what its operator does
//! to it. Amounts and the decision itself are in [`vmmd_host::capacity`]; what outlives the daemon (labels, cordon, since when
//! conditions are what they are) is in [`crate::registry::node`].

pub mod check;
pub mod conditions;
mod describe;
pub mod drain;
pub mod operate;

pub use self::describe::describe;

//! The spec of a VM: what a `vmm` is told to build of it, how a running machine may differ from it, and what limits its cgroup gets.

pub mod change;
pub mod limits;
pub mod machine;
pub mod secret;

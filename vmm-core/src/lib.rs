//! The virtual machine monitor of vmmd.

pub mod board;
mod failure;
pub mod kvm;
pub mod lifecycle;
pub mod memory;
pub mod migration;
pub mod snapshot;
pub mod vcpu;

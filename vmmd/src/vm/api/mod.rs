//! VMs as clients know them: how one is made, and how it is shown.

pub mod create;
pub mod describe;

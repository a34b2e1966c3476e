//! The per-node hypervisor daemon.
fn main() {}
